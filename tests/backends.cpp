// Mirrors host arrays on a device around one call of a stage, and knows what each backend promises.
#include "backends.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>

#include "core/numeric.h"
#include "cuda/device.h"
#include "cuda/stages.h"
#ifdef SCOPE_TEST_CUDA
#include <cuda_runtime_api.h>
#endif

namespace scope::test {

namespace {

// CPU: strips of 6, panels of 16 and 64, query tiles of 252, key blocks of 256. CUDA: tiles of 16, 64 and 128.
const Limits kCpu = {
    .dtypes = {DType::f32, DType::f16, DType::bf16},
    .finest = DType::f32,
    .dims = {8, 40, 64, 80, 96, 128, 256},
    .sizes = {1, 2, 5, 6, 7, 15, 16, 17, 63, 64, 65, 97, 251, 252, 253, 255, 256, 257},
    .paddings = {0, 0, 1, 5, 16, -1},
    .alignments = {0, 0, 1, 3, 7},
    .square_share = 0,
    .case_share = 1,
    .long_every = 25,
    .runs = 100,
    .largest_logit = 1e37,
    .table = 1e-7,
    .score = 5e-6,
    .exact_keys = true,
    .rho = 1e-5,
    .order = 0,
    .tail = 1e-5,
    .mean = 4e-6,
    .lse = 2e-6,
};
const Limits kCuda = {
    .dtypes = {DType::f16, DType::bf16},
    .finest = DType::bf16,
    .dims = {8, 40, 64, 80, 96, 128},
    .sizes = {1, 2, 5, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 127, 128, 129, 255, 256, 257},
    .paddings = {0, 0, 8, 16, 40, -1},
    .alignments = {0, 0, 8, 8, 8},
    .square_share = 0.25,
    .case_share = 0.25,
    .long_every = 12,
    .runs = 250,
    .largest_logit = 1e9,
    .table = 2e-6,
    .score = 1e-5,
    .exact_keys = false,
    .rho = 1e-3,
    .order = 2e-3,
    .tail = 0x1p-7,  // weights are rounded to 16 bits
    .mean = 4e-6,
    .lse = 1e-5,
};

}  // namespace

bool testing_cuda() {
  const char* name = std::getenv("SCOPE_BACKEND");
  return name != nullptr && std::string(name) == "cuda";
}

const Limits& limits() { return testing_cuda() ? kCuda : kCpu; }

#ifdef SCOPE_TEST_CUDA

namespace {

void check(cudaError_t error, const char* what) {
  require(error == cudaSuccess, Status::device, "{}: {}", what, cudaGetErrorString(error));
}

constexpr int64_t kGuard = 192;
constexpr int64_t kCopyAtOnce = int64_t{1} << 28;  // bytes; above it, a view's rows are copied and its padding is not

const std::byte* canary() {
  static const std::vector<std::byte> bytes = [] {
    std::vector<std::byte> result;  // NaN in every float type, and no label
    for (int64_t i = 0; i < kGuard; ++i) result.push_back(i % 2 == 0 ? std::byte{0xfe} : std::byte{0x7f});
    return result;
  }();
  return bytes.data();
}

// The device's copy of the arrays of a chunk of heads. Those behind pointers to const must come back as they were.
class Mirror {
 public:
  Mirror(const Exec& exec, int64_t head_gap) : stream_(static_cast<cudaStream_t>(exec.stream)), head_gap_(head_gap) {}
  ~Mirror() {
    for (void* memory : memory_) cudaFreeAsync(memory, stream_);
  }
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  // `count` elements per head, with a canary between one head and the next.
  template <class Args, class Field>
  void array(std::vector<Args>& heads, Field field, int64_t count) {
    using T = std::remove_pointer_t<std::remove_reference_t<decltype(field(heads[0]))>>;
    if (field(heads[0]) == nullptr) return;
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T)), gap = kGuard / 2, n = static_cast<int64_t>(heads.size());
    std::byte* place = reserve(n * bytes + (n - 1) * gap, bytes % 64);  // aligned as a second head would be
    for (size_t h = 0; h < heads.size(); ++h) {
      add(place, field(heads[h]), bytes, std::is_const_v<T>);
      field(heads[h]) = reinterpret_cast<T*>(place);
      place += bytes;
      if (h + 1 < heads.size()) add(place, canary(), gap, true);
      place += gap;
    }
  }
  // The same array for every head.
  template <class Args, class Field>
  void shared(std::vector<Args>& heads, Field field, int64_t count) {
    std::vector<Args> first = {heads[0]};
    array(first, field, count);
    for (Args& head : heads) field(head) = field(first[0]);
  }
  // Ascending token lists; null stands for the first `count` tokens, and every third call says so.
  template <class Args, class Field>
  void tokens(std::vector<Args>& heads, Field field, int64_t count) {
    const int32_t* list = field(heads[0]);
    if (count > 0 && list[0] == 0 && list[count - 1] == count - 1 && lists_++ % 3 == 0) {
      for (Args& head : heads) field(head) = nullptr;
    } else {
      shared(heads, field, count);
    }
  }
  template <class Args, class Field>
  void rows(std::vector<Args>& heads, Field field) {
    const auto first = field(heads[0]);
    if (first.data == nullptr) return;
    const int64_t width = dtype_bytes(first.dtype), n = static_cast<int64_t>(heads.size());
    const int64_t pitch = first.row_stride * width, row = first.dim * width;
    const int64_t extent = first.tokens == 0 ? 0 : (first.tokens - 1) * pitch + row;
    const bool side_by_side = n > 1 && first.row_stride >= n * first.dim && head_gap_ == kHeadGap;
    const int64_t step = side_by_side ? row : round_up(extent, 16) + head_gap_ * width;
    std::byte* place = reserve((n - 1) * step + extent, 16);
    for (Args& head : heads) {
      auto& view = field(head);
      constexpr bool kInput = std::is_same_v<std::decay_t<decltype(view)>, RowsView>;
      auto* host = static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(view.data)));
      if (!side_by_side && extent <= kCopyAtOnce) {
        add(place, host, extent, kInput);
      } else {
        for (int64_t t = 0; t < view.tokens; ++t) add(place + t * pitch, host + t * pitch, row, kInput);
      }
      view.data = place;
      place += step;
    }
  }
  // The chunk's scratch is that of its first head, for all heads.
  template <class Args>
  void scratch(std::vector<Args>& heads) {
    const Scratch one = heads[0].scratch;
    std::byte* place = reserve(one.bytes * static_cast<int64_t>(heads.size()), 0);
    for (Args& head : heads) {
      scratches_.push_back({place, static_cast<const std::byte*>(one.data), one.bytes});
      head.scratch.data = place;
      place += one.bytes;
    }
    heads[0].scratch.bytes = one.bytes * static_cast<int64_t>(heads.size());
  }

  template <class Stage>
  void run(const Stage& stage) {
    upload();
    if (runs_++ % 2 == 0) {
      stage();
      check(cudaGetLastError(), "launch");
    } else {
      cudaGraphExec_t graph = captured(stage);
      check(cudaGraphLaunch(graph, stream_), "first launch of a graph");
      const auto first = outputs();
      upload();
      check(cudaGraphLaunch(graph, stream_), "second launch of a graph");
      EXPECT_TRUE(outputs() == first) << "a graph's second launch gives other bits";
      cudaGraphExecDestroy(graph);
    }
    download();
  }

 private:
  struct Piece {
    std::byte* device;
    std::byte* host;
    int64_t bytes;
  };
  struct ConstPiece {
    std::byte* device;
    const std::byte* host;
    int64_t bytes;
  };

  // Memory between canaries, `shift` bytes after a multiple of 64; NaN wherever nothing else is put.
  std::byte* reserve(int64_t bytes, int64_t shift) {
    void* memory = nullptr;
    const auto all = static_cast<size_t>(bytes + 2 * kGuard + shift);
    check(cudaMallocAsync(&memory, all, stream_), "device memory for a test");
    memory_.push_back(memory);
    check(cudaMemsetAsync(memory, 0xff, all, stream_), "memset");
    std::byte* place = static_cast<std::byte*>(memory) + kGuard + shift;
    inputs_.push_back({place - kGuard, canary(), kGuard});
    inputs_.push_back({place + bytes, canary(), kGuard});
    return place;
  }
  void add(std::byte* device, const void* host, int64_t bytes, bool input) {
    if (bytes == 0) return;
    if (input) {
      inputs_.push_back({device, static_cast<const std::byte*>(host), bytes});
    } else {
      outputs_.push_back({device, static_cast<std::byte*>(const_cast<void*>(host)), bytes});
    }
  }
  void copy(void* to, const void* from, int64_t bytes) {
    check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream_), "copy");
  }
  void upload() {
    for (const auto& piece : inputs_) copy(piece.device, piece.host, piece.bytes);
    for (const auto& piece : outputs_) copy(piece.device, piece.host, piece.bytes);  // poison, or a warm start
    for (const auto& piece : scratches_) copy(piece.device, piece.host, piece.bytes);
  }
  std::vector<std::vector<std::byte>> outputs() {
    std::vector<std::vector<std::byte>> result;
    for (const auto& piece : outputs_) {
      result.emplace_back(static_cast<size_t>(piece.bytes));
      copy(result.back().data(), piece.device, piece.bytes);
    }
    check(cudaStreamSynchronize(stream_), "stage");
    return result;
  }
  void download() {
    for (const auto& piece : outputs_) copy(piece.host, piece.device, piece.bytes);
    check(cudaStreamSynchronize(stream_), "stage");
    std::vector<std::byte> now;
    for (const auto& piece : inputs_) {
      now.resize(static_cast<size_t>(piece.bytes));
      copy(now.data(), piece.device, piece.bytes);
      check(cudaStreamSynchronize(stream_), "copy");
      EXPECT_EQ(std::memcmp(now.data(), piece.host, now.size()), 0)
          << (piece.host == canary() ? "device memory around an array was written" : "an input was written");
    }
  }
  template <class Stage>
  cudaGraphExec_t captured(const Stage& stage) {
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "begin capture");
    try {
      stage();
    } catch (...) {
      cudaStreamEndCapture(stream_, &graph);
      cudaGraphDestroy(graph);
      throw;
    }
    check(cudaStreamEndCapture(stream_, &graph), "end capture: a stage must not allocate, wait or leave its stream");
    cudaGraphExec_t ready = nullptr;
    check(cudaGraphInstantiate(&ready, graph, 0), "instantiate");
    cudaGraphDestroy(graph);
    return ready;
  }

  static inline int64_t lists_ = 0, runs_ = 0;
  cudaStream_t stream_;
  int64_t head_gap_;
  std::vector<void*> memory_;
  std::vector<ConstPiece> inputs_, scratches_;
  std::vector<Piece> outputs_;
};

}  // namespace

std::vector<DeviceMachine> device_machines() {
  static const std::vector<cuda::Device> devices = cuda::devices();
  if (devices.empty()) return {};
  Exec exec;
  exec.device = &devices[0];
  std::vector<Exec> execs;
  for (int i = 0; i < 2; ++i) {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    exec.stream = stream;
    execs.push_back(exec);
  }
  cudaMemPool_t memory = nullptr;  // keep what was freed, or every case pays for mapping it again
  uint64_t threshold = uint64_t{4} << 30;
  check(cudaDeviceGetDefaultMemPool(&memory, 0), "memory pool");
  check(cudaMemPoolSetAttribute(memory, cudaMemPoolAttrReleaseThreshold, &threshold), "memory pool");
  std::vector<DeviceMachine> machines = {{"portable", execs}};
  if (devices[0].major == 9) {
    for (Exec& with_wgmma : execs) with_wgmma.wgmma = true;
    machines.push_back({"wgmma", execs});
  }
  return machines;
}

#else

namespace {

// A build without CUDA has no device to run on.
struct Mirror {
  Mirror(const Exec&, int64_t) {}
  template <class... T>
  void array(T&&...) {}
  template <class... T>
  void shared(T&&...) {}
  template <class... T>
  void tokens(T&&...) {}
  template <class... T>
  void rows(T&&...) {}
  template <class... T>
  void scratch(T&&...) {}
  template <class... T>
  void run(T&&...) {}
};

}  // namespace

std::vector<DeviceMachine> device_machines() { return {}; }

#endif

namespace {

// A pointer member as Mirror wants it.
#define FIELD(path) \
  [](auto& head) -> auto& { return head.path; }

template <class Args>
std::vector<Args> copied(std::span<const Args> heads) {
  return {heads.begin(), heads.end()};
}

void mirror_proxy(Mirror& mirror, std::vector<SelectArgs>& heads) {
  const Proxy proxy = heads[0].proxy;
  mirror.array(heads, FIELD(proxy.centroids), proxy.groups * proxy.k.dim);
  mirror.rows(heads, FIELD(proxy.k));
  mirror.tokens(heads, FIELD(proxy.rows), proxy.count);
  mirror.array(heads, FIELD(proxy.tables), proxy.groups * proxy.subspaces * proxy.codes);
  mirror.array(heads, FIELD(proxy.labels), proxy.subspaces * proxy.count);
}

}  // namespace

void run_group(const Exec& exec, std::span<const GroupArgs> in, int64_t head_gap) {
  if (exec.device == nullptr) return cpu_backend()->group(exec, in);
  Mirror mirror(exec, head_gap);
  auto heads = copied(in);
  mirror.rows(heads, FIELD(q));
  mirror.tokens(heads, FIELD(rows), in[0].count);
  mirror.array(heads, FIELD(centroids), in[0].groups * in[0].q.dim);
  mirror.array(heads, FIELD(labels), in[0].q.tokens);
  mirror.array(heads, FIELD(sizes), in[0].groups);
  mirror.array(heads, FIELD(order), in[0].count);
  mirror.array(heads, FIELD(offsets), in[0].groups + 1);
  mirror.array(heads, FIELD(similarity), in[0].groups);
  mirror.shared(heads, FIELD(status), 1);
  mirror.scratch(heads);
  mirror.run([&] { cuda_backend()->group(exec, heads); });
}

void run_encode(const Exec& exec, std::span<const EncodeArgs> in, int64_t head_gap) {
  if (exec.device == nullptr) return cpu_backend()->encode(exec, in);
  Mirror mirror(exec, head_gap);
  auto heads = copied(in);
  const auto subspaces = static_cast<int64_t>(in[0].partition->size());
  mirror.rows(heads, FIELD(k));
  mirror.tokens(heads, FIELD(rows), in[0].count);
  mirror.array(heads, FIELD(codebooks), in[0].codes * in[0].k.dim);
  mirror.array(heads, FIELD(labels), subspaces * in[0].count);
  mirror.array(heads, FIELD(empty), subspaces);
  mirror.array(heads, FIELD(similarity), in[0].codes);
  mirror.shared(heads, FIELD(status), 1);
  mirror.scratch(heads);
  mirror.run([&] { cuda_backend()->encode(exec, heads); });
}

void run_score(const Exec& exec, std::span<const ScoreArgs> in) {
  if (exec.device == nullptr) return cpu_backend()->score(exec, in);
  Mirror mirror(exec, 0);
  auto heads = copied(in);
  mirror.array(heads, FIELD(centroids), in[0].groups * in[0].dim);
  mirror.array(heads, FIELD(codebooks), in[0].codes * in[0].dim);
  mirror.array(heads, FIELD(tables), in[0].groups * static_cast<int64_t>(in[0].partition->size()) * in[0].codes);
  mirror.run([&] { cuda_backend()->score(exec, heads); });
}

void run_score_rows(const Exec& exec, const Proxy& proxy, int64_t first, int64_t n, float* out, int64_t stride,
                    float* buffer) {
  if (exec.device == nullptr) return cpu::score_rows(exec, proxy, first, n, out, stride, buffer);
  struct Rows {
    float* out;
  };
  Mirror mirror(exec, kHeadGap);
  std::vector<SelectArgs> heads(1);
  heads[0].proxy = proxy;
  mirror_proxy(mirror, heads);
  std::vector<Rows> rows = {{out}};
  mirror.array(rows, FIELD(out), n * stride);
  mirror.run([&] { cuda::score_rows(exec, heads[0].proxy, first, n, rows[0].out, stride); });
}

void run_select(const Exec& exec, std::span<const SelectArgs> in, int64_t head_gap) {
  if (exec.device == nullptr) return cpu_backend()->select(exec, in);
  Mirror mirror(exec, head_gap);
  auto heads = copied(in);
  const int64_t groups = in[0].proxy.groups, dim = in[0].proxy.k.dim;
  mirror_proxy(mirror, heads);
  mirror.array(heads, FIELD(sizes), groups);
  mirror.array(heads, FIELD(q_similarity), groups);
  mirror.array(heads, FIELD(k_similarity), in[0].proxy.codes);
  mirror.array(heads, FIELD(counts), groups);
  mirror.array(heads, FIELD(top_p), groups);
  mirror.array(heads, FIELD(head_budget), 1);
  mirror.array(heads, FIELD(rho_used), 1);
  mirror.array(heads, FIELD(alpha_used), 1);
  mirror.array(heads, FIELD(mask), groups * mask_words(in[0].proxy.k.tokens));
  std::vector<TailArgs> tails;
  if (in[0].tail != nullptr) {
    for (const SelectArgs& head : in) tails.push_back(*head.tail);
    mirror.rows(tails, FIELD(v));
    mirror.array(tails, FIELD(k), groups * dim);
    mirror.array(tails, FIELD(value), groups * dim);
    mirror.array(tails, FIELD(bias), groups);
    for (size_t h = 0; h < heads.size(); ++h) heads[h].tail = &tails[h];
  }
  mirror.scratch(heads);
  mirror.run([&] { cuda_backend()->select(exec, heads); });
}

void run_attend(const Exec& exec, std::span<const AttendArgs> in, int64_t head_gap) {
  if (exec.device == nullptr) return cpu_backend()->attend(exec, in);
  Mirror mirror(exec, head_gap);
  auto heads = copied(in);
  const int64_t groups = in[0].groups, words = mask_words(in[0].k.tokens), extra = in[0].extra.count;
  mirror.rows(heads, FIELD(q));
  mirror.rows(heads, FIELD(k));
  mirror.rows(heads, FIELD(v));
  mirror.array(heads, FIELD(order), in[0].q.tokens);
  mirror.array(heads, FIELD(offsets), groups + 1);
  mirror.array(heads, FIELD(mask), groups * words);
  mirror.shared(heads, FIELD(keep), words);
  if (extra > 0) {
    mirror.array(heads, FIELD(extra.k), extra * in[0].q.dim);
    mirror.array(heads, FIELD(extra.v), extra * in[0].q.dim);
    mirror.array(heads, FIELD(extra.bias), extra);
    mirror.array(heads, FIELD(extra.mask), groups * mask_words(extra));
  }
  mirror.rows(heads, FIELD(out));
  mirror.array(heads, FIELD(lse), in[0].q.tokens);
  mirror.scratch(heads);
  mirror.run([&] { cuda_backend()->attend(exec, heads); });
}

void run_describe(const Exec& exec, const DescribeArgs& args) {
  if (exec.device == nullptr) return cpu_backend()->describe(exec, args);
  Mirror mirror(exec, 0);
  std::vector<DescribeArgs> one = {args};
  mirror.array(one, FIELD(q_rows), args.tokens.q_tokens);
  mirror.array(one, FIELD(k_rows), args.tokens.keys);
  mirror.array(one, FIELD(valid), mask_words(args.tokens.k_tokens));
  mirror.array(one, FIELD(kept), mask_words(args.tokens.k_tokens));
  mirror.array(one, FIELD(offsets), 2);
  mirror.run([&] { cuda_backend()->describe(exec, one[0]); });
}

void run_finish(const Exec& exec, const FinishArgs& args) {
  if (exec.device == nullptr) return cpu_backend()->finish(exec, args);
  Mirror mirror(exec, 0);
  std::vector<FinishArgs> one = {args};
  const int64_t words = mask_words(args.tokens.k_tokens), rows = args.heads * args.row_groups;
  mirror.array(one, FIELD(q_rows), args.tokens.q_tokens);
  mirror.array(one, FIELD(valid), words);
  mirror.array(one, FIELD(labels), args.heads * args.tokens.q_tokens);
  mirror.array(one, FIELD(sizes), rows);
  mirror.array(one, FIELD(counts), rows);
  mirror.array(one, FIELD(order), args.heads * args.tokens.q_tokens);
  mirror.array(one, FIELD(offsets), rows + args.heads);
  mirror.array(one, FIELD(mask), rows * words);
  mirror.array(one, FIELD(empty), args.heads * args.subspaces);
  mirror.array(one, FIELD(tail_bias), args.heads * args.tail_groups);
  mirror.array(one, FIELD(tail_mask), rows * mask_words(args.tail_groups));
  mirror.array(one, FIELD(report), args.heads);
  mirror.run([&] { cuda_backend()->finish(exec, one[0]); });
}

void run_import(const Exec& exec, const ImportArgs& args) {
  if (exec.device == nullptr) return cpu_backend()->import_selection(exec, args);
  Mirror mirror(exec, 0);
  std::vector<ImportArgs> one = {args};
  const int64_t words = mask_words(args.tokens.k_tokens);
  mirror.array(one, FIELD(labels), args.heads * args.tokens.q_tokens);
  mirror.array(one, FIELD(selected), args.heads * args.groups * words);
  mirror.array(one, FIELD(keep), words);
  mirror.array(one, FIELD(order), args.heads * args.tokens.q_tokens);
  mirror.array(one, FIELD(offsets), args.heads * (args.row_groups + 1));
  mirror.array(one, FIELD(mask), args.heads * args.row_groups * words);
  mirror.array(one, FIELD(kept), words);
  mirror.run([&] { cuda_backend()->import_selection(exec, one[0]); });
}

namespace {

// What the copies take, in bytes unless a type says more.
struct Moved {
  const std::byte* from;
  const int32_t* rows;
  std::byte* to;
};

template <class Move>
void run_move(const Exec& exec, Moved moved, int64_t from_bytes, int64_t rows, int64_t to_bytes, const Move& move) {
  Mirror mirror(exec, 0);
  std::vector<Moved> one = {moved};
  mirror.array(one, FIELD(from), from_bytes);
  mirror.array(one, FIELD(rows), rows);
  mirror.array(one, FIELD(to), to_bytes);
  mirror.run([&] { move(one[0]); });
}

}  // namespace

void run_fill(const Exec& exec, uint32_t* to, int64_t step, uint32_t value, int64_t count, int64_t rows) {
  if (exec.device == nullptr) return cpu_backend()->fill(exec, to, step, value, count, rows);
  run_move(exec, {nullptr, nullptr, reinterpret_cast<std::byte*>(to)}, 0, 0, 4 * ((rows - 1) * step + count),
           [&](const Moved& at) { cuda_backend()->fill(exec, at.to, step, value, count, rows); });
}

void run_copy(const Exec& exec, const uint32_t* from, int64_t from_step, uint32_t* to, int64_t to_step, int64_t count,
              int64_t rows) {
  if (exec.device == nullptr) return cpu_backend()->copy(exec, from, from_step, to, to_step, count, rows);
  run_move(exec, {reinterpret_cast<const std::byte*>(from), nullptr, reinterpret_cast<std::byte*>(to)},
           4 * ((rows - 1) * from_step + count), 0, 4 * ((rows - 1) * to_step + count),
           [&](const Moved& at) { cuda_backend()->copy(exec, at.from, from_step, at.to, to_step, count, rows); });
}

void run_convert(const Exec& exec, const void* from, DType from_type, void* to, DType to_type, int64_t count) {
  if (exec.device == nullptr) return cpu_backend()->convert(exec, from, from_type, to, to_type, count);
  run_move(exec, {static_cast<const std::byte*>(from), nullptr, static_cast<std::byte*>(to)}, count * dtype_bytes(from_type),
           0, count * dtype_bytes(to_type),
           [&](const Moved& at) { cuda_backend()->convert(exec, at.from, from_type, at.to, to_type, count); });
}

void run_scatter(const Exec& exec, const int32_t* from, int64_t from_step, const int32_t* rows, int64_t count, int32_t* to,
                 int64_t to_step, int64_t heads) {
  if (exec.device == nullptr) {
    return cpu_backend()->scatter(exec, from, from_step, rows, count, to, to_step, heads);
  }
  run_move(exec, {reinterpret_cast<const std::byte*>(from), rows, reinterpret_cast<std::byte*>(to)}, 4 * heads * from_step,
           count, 4 * heads * to_step, [&](const Moved& at) {
             cuda_backend()->scatter(exec, reinterpret_cast<const int32_t*>(at.from), from_step, at.rows, count,
                                     reinterpret_cast<int32_t*>(at.to), to_step, heads);
           });
}

// On a device K-means itself is not reachable; group and encode are, and what they do not return follows from the labels.
void run_kmeans(const Exec& exec, const KMeansArgs& args) {
  if (exec.device == nullptr) return cpu::kmeans(exec, args);
  if (args.random.tensor == 0) {
    std::vector<int32_t> labels(static_cast<size_t>(args.points.tokens), -7);
    const GroupArgs group{.q = args.points,
                          .rows = args.rows,
                          .count = args.count,
                          .groups = args.clusters,
                          .grouping = Grouping::kmeans,
                          .iterations = args.iterations,
                          .sample = args.sample,
                          .warm = args.warm,
                          .seed = args.random.seed,
                          .centroids = args.centroids,
                          .labels = labels.data(),
                          .sizes = args.sizes,
                          .order = args.order,
                          .offsets = args.offsets,
                          .scratch = args.scratch};
    run_group(exec, {&group, 1});
    for (int64_t i = 0; i < args.count; ++i) {
      args.labels[i] = labels[static_cast<size_t>(args.rows[i])];
      const int32_t* place = std::lower_bound(args.rows, args.rows + args.count, args.order[i]);
      args.order[i] = static_cast<int32_t>(place - args.rows);
    }
    return;
  }
  Partition partition = {{args.channels, args.channels + args.depth}, {}};
  for (int32_t c = 0; c < args.points.dim; ++c) {
    if (std::find(args.channels, args.channels + args.depth, c) == args.channels + args.depth) partition[1].push_back(c);
  }
  if (partition[1].empty()) partition.pop_back();
  std::vector<float> codebooks(static_cast<size_t>(args.clusters * args.points.dim));
  std::vector<int32_t> labels(partition.size() * static_cast<size_t>(args.count));
  std::vector<int64_t> empty(partition.size());
  const int64_t used = args.clusters * args.depth;
  std::copy_n(args.centroids, used, codebooks.begin());
  const EncodeArgs encode{.k = args.points,
                          .rows = args.rows,
                          .count = args.count,
                          .partition = &partition,
                          .codes = args.clusters,
                          .iterations = args.iterations,
                          .sample = args.sample,
                          .warm = args.warm,
                          .seed = args.random.seed,
                          .codebooks = codebooks.data(),
                          .labels = labels.data(),
                          .empty = empty.data(),
                          .scratch = args.scratch};
  run_encode(exec, {&encode, 1});
  std::copy_n(codebooks.begin(), used, args.centroids);
  std::copy_n(labels.begin(), args.count, args.labels);
  std::fill_n(args.sizes, args.clusters, 0);
  for (int64_t i = 0; i < args.count; ++i) {
    if (labels[static_cast<size_t>(i)] >= 0 && labels[static_cast<size_t>(i)] < args.clusters) ++args.sizes[args.labels[i]];
  }
  args.offsets[0] = 0;
  std::partial_sum(args.sizes, args.sizes + args.clusters, args.offsets + 1);
  std::iota(args.order, args.order + args.count, 0);
  std::stable_sort(args.order, args.order + args.count,
                   [&](int32_t a, int32_t b) { return args.labels[a] < args.labels[b]; });
  EXPECT_EQ(empty[0], std::count(args.sizes, args.sizes + args.clusters, 0));
}

int64_t kmeans_scratch(const Exec& exec, const KMeansArgs& args) {
  if (exec.device == nullptr) return cpu::kmeans_scratch(exec, args.count, args.points.dim, args.clusters);
  const auto scratch = args.random.tensor == 0 ? backend(exec).group_scratch : backend(exec).encode_scratch;
  return scratch(exec, args.count, args.points.dim, args.clusters);
}

}  // namespace scope::test
