// Makes one chunk of separate heads around a call of a stage, and knows what each backend promises.
#include "backends.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>

#include "core/numeric.h"
#include "guarded.h"
#include "stages/choices.h"
#ifdef SCOPE_TEST_CUDA
#include <cuda_runtime_api.h>

#include "cuda/device.h"
#include "cuda/stages.h"
#endif

namespace scope::test {

namespace {

// A member as Mirror wants it.
#define FIELD(path) \
  [](auto& one) -> auto& { return one.path; }

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
    .threshold = 0,
    .mass = 1e-5,
    .tail_mass = 0,
    .tail_mean = 0,
    .split = 0x1p-22,  // of f32
    .mean = 4e-6,
    .lse = 2e-6,
    .kernels = {"auto"},
    .equal_out = 1e-5,
    .equal_lse = 1e-5,
    .density = 0.005,
    .other_keys = 0,
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
    .threshold = 2.0 / 640,  // of the bins, whose range is a third wider
    .mass = 2e-3,
    .tail_mass = 0x1.4p-8,  // weights are rounded to 16 bits, each by 2^-8 at most and perhaps all the same way
    .tail_mean = 0x1p-5,
    .split = 0x1p-15,
    .mean = 4e-6,
    .lse = 1e-5,
    .kernels = {"auto", "portable"},
    .equal_out = 3e-2,
    .equal_lse = 1e-4,
    .density = 0.03,
    .other_keys = 0.01,
};

}  // namespace

bool testing_cuda() {
  const char* name = std::getenv("SCOPE_BACKEND");
  return name != nullptr && std::string(name) == "cuda";
}

const Limits& limits() { return testing_cuda() ? kCuda : kCpu; }

const Backend& backend() { return find_backend(testing_cuda() ? "cuda" : "cpu"); }

namespace {

// Where a chunk lies while a stage runs; all that differs from one backend to another.
class Memory {
 public:
  virtual ~Memory() = default;
  // At a multiple of 64, all 0xff; released with this.
  virtual std::byte* allocate(int64_t bytes) = 0;
  virtual void copy(void* to, const void* from, int64_t bytes) = 0;
  virtual void wait() = 0;
  // What runs the stage each time that it is called.
  virtual std::function<void()> recorded(const std::function<void()>& stage) = 0;
};

class HostMemory : public Memory {
 public:
  ~HostMemory() override {
    for (void* memory : memory_) std::free(memory);
  }
  std::byte* allocate(int64_t bytes) override {
    const auto all = static_cast<size_t>(round_up(bytes, 64));
    memory_.push_back(std::aligned_alloc(64, all));
    require(memory_.back() != nullptr, Status::internal, "{} bytes for a test", all);
    return static_cast<std::byte*>(std::memset(memory_.back(), 0xff, all));
  }
  void copy(void* to, const void* from, int64_t bytes) override { std::memcpy(to, from, static_cast<size_t>(bytes)); }
  void wait() override {}
  std::function<void()> recorded(const std::function<void()>& stage) override { return stage; }

 private:
  std::vector<void*> memory_;
};

#ifdef SCOPE_TEST_CUDA

void check(cudaError_t error, const char* what) {
  require(error == cudaSuccess, Status::device, "{}: {}", what, cudaGetErrorString(error));
}

class DeviceMemory : public Memory {
 public:
  explicit DeviceMemory(const Exec& exec) : stream_(static_cast<cudaStream_t>(exec.stream)) {}
  ~DeviceMemory() override {
    for (void* memory : memory_) cudaFreeAsync(memory, stream_);
  }
  std::byte* allocate(int64_t bytes) override {
    const auto all = static_cast<size_t>(bytes);
    void* memory = nullptr;
    check(cudaMallocAsync(&memory, all, stream_), "device memory for a test");
    memory_.push_back(memory);
    check(cudaMemsetAsync(memory, 0xff, all, stream_), "memset");
    return static_cast<std::byte*>(memory);
  }
  void copy(void* to, const void* from, int64_t bytes) override {
    check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream_), "copy");
  }
  void wait() override {
    check(cudaGetLastError(), "launch");
    check(cudaStreamSynchronize(stream_), "stage");
  }
  std::function<void()> recorded(const std::function<void()>& stage) override {
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
    cudaGraphExec_t made = nullptr;
    check(cudaGraphInstantiate(&made, graph, 0), "instantiate");
    cudaGraphDestroy(graph);
    const std::shared_ptr<CUgraphExec_st> ready(made, cudaGraphExecDestroy);
    return [ready, stream = stream_] { check(cudaGraphLaunch(ready.get(), stream), "launch of a graph"); };
  }

 private:
  cudaStream_t stream_;
  std::vector<void*> memory_;
};

std::unique_ptr<Memory> memory_of(const Exec& exec) {
  if (exec.device != nullptr) return std::make_unique<DeviceMemory>(exec);
  return std::make_unique<HostMemory>();
}

#else

std::unique_ptr<Memory> memory_of(const Exec&) { return std::make_unique<HostMemory>(); }

#endif

constexpr int64_t kCopyAtOnce = int64_t{1} << 28;  // bytes; above it, a view's rows are copied and its padding is not

// One chunk made of separate heads. Arrays behind pointers to const must come back as they were.
template <class Args>
class Mirror {
 public:
  Args chunk;  // the first head's, until its fields are mirrored

  Mirror(const Exec& exec, std::span<const Args> heads, int64_t head_gap = kHeadGap)
      : chunk(heads[0]), heads_(heads), head_gap_(head_gap), device_(exec.device != nullptr), memory_(memory_of(exec)) {}

  // `count` elements per head, with a canary between one head and the next.
  template <class Field>
  void array(Field field, int64_t count) {
    auto& to = field(chunk);
    using T = std::remove_pointer_t<decltype(to.base)>;
    if (!to) return;
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T)), gap = kGuard / 2;
    const auto n = static_cast<int64_t>(heads_.size());
    std::byte* place = reserve(n * bytes + (n - 1) * gap, bytes % 64);  // aligned as a second head would be
    to = {reinterpret_cast<T*>(place), count + gap / static_cast<int64_t>(sizeof(T))};
    for (int64_t h = 0; h < n; ++h, place += bytes + gap) {
      add(place, field(heads_[static_cast<size_t>(h)]).base, bytes, std::is_const_v<T>);
      if (h + 1 < n) add(place + bytes, kCanary.data(), gap, true);
    }
  }
  // One array for all heads.
  template <class Field>
  void shared(Field field, int64_t count) {
    auto& to = field(chunk);
    using T = std::remove_pointer_t<std::remove_reference_t<decltype(to)>>;
    if (to == nullptr) return;
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    std::byte* place = reserve(bytes, bytes % 64);
    add(place, to, bytes, std::is_const_v<T>);
    to = reinterpret_cast<T*>(place);
  }
  // Ascending token lists; on a device null stands for the first `count` tokens, and every third call says so.
  template <class Field>
  void tokens(Field field, int64_t count) {
    const int32_t* list = field(chunk);
    if (device_ && list != nullptr && count > 0 && list[0] == 0 && list[count - 1] == count - 1 && lists_++ % 3 == 0) {
      field(chunk) = nullptr;
    } else {
      shared(field, count);
    }
  }
  template <class Field>
  void rows(Field field) {
    auto& to = field(chunk);
    constexpr bool kInput = std::is_same_v<std::decay_t<decltype(to)>, HeadsView>;
    if (to.data == nullptr) return;
    const int64_t width = dtype_bytes(to.dtype), n = static_cast<int64_t>(heads_.size());
    const int64_t pitch = to.row_stride * width, row = to.dim * width;
    const int64_t extent = to.tokens == 0 ? 0 : (to.tokens - 1) * pitch + row;
    const bool side_by_side = n > 1 && to.row_stride >= n * to.dim && head_gap_ == kHeadGap;
    const int64_t step = side_by_side ? row : round_up(extent, 16) + head_gap_ * width;
    std::byte* place = reserve((n - 1) * step + extent, 16);
    to.data = place;
    to.head_stride = step / width;
    for (const Args& head : heads_) {
      const auto* from = static_cast<const std::byte*>(field(head).data);
      if (!side_by_side && extent <= kCopyAtOnce) {
        add(place, from, extent, kInput);
      } else {
        for (int64_t t = 0; t < to.tokens; ++t) add(place + t * pitch, from + t * pitch, row, kInput);
      }
      place += step;
    }
  }
  // As much as a head alone brings, which may be too little, or `chunk_bytes`.
  template <class Field>
  void scratch(Field field, int64_t chunk_bytes) {
    Scratch& to = field(chunk);
    const int64_t bytes = heads_.size() == 1 ? to.bytes : chunk_bytes;
    const auto poison = to.bytes == 0 ? std::byte{0xff} : *static_cast<const std::byte*>(to.data);
    poisons_.emplace_back(static_cast<size_t>(bytes), poison);
    to = {reserve(bytes, 0), bytes};
    if (bytes > 0) scratches_.push_back({static_cast<std::byte*>(to.data), poisons_.back().data(), bytes});
  }
  void proxy(auto field) {
    const Proxy& p = field(heads_[0]);
    const auto member = [&](auto of) {
      return [=](auto& args) -> auto& { return of(field(args)); };
    };
    array(member(FIELD(centroids)), p.groups * p.k.dim);
    rows(member(FIELD(k)));
    tokens(member(FIELD(rows)), p.count);
    array(member(FIELD(tables)), p.groups * p.subspaces * p.codes);
    array(member(FIELD(labels)), p.subspaces * p.count);
  }

  template <class Stage>
  void run(const Stage& stage) {
    upload();
    if (runs_++ % 2 == 0) {
      stage(chunk);
    } else {
      const auto again = memory_->recorded([&] { stage(chunk); });
      again();
      const auto first = outputs();
      upload();
      again();
      EXPECT_TRUE(outputs() == first) << "a stage's second run gives other bits";
    }
    download();
  }

 private:
  struct Piece {
    std::byte* place;
    std::byte* home;
    int64_t bytes;
  };
  struct ConstPiece {
    std::byte* place;
    const std::byte* home;
    int64_t bytes;
  };

  // Memory between canaries, `shift` bytes after a multiple of 64; NaN wherever nothing else is put.
  std::byte* reserve(int64_t bytes, int64_t shift) {
    std::byte* place = memory_->allocate(bytes + 2 * kGuard + shift) + kGuard + shift;
    add(place - kGuard, kCanary.data(), kGuard, true);
    add(place + bytes, kCanary.data(), kGuard, true);
    return place;
  }
  void add(std::byte* place, const void* home, int64_t bytes, bool input) {
    if (bytes == 0) return;
    if (input) {
      inputs_.push_back({place, static_cast<const std::byte*>(home), bytes});
    } else {
      outputs_.push_back({place, static_cast<std::byte*>(const_cast<void*>(home)), bytes});
    }
  }
  void upload() {
    for (const auto& piece : inputs_) memory_->copy(piece.place, piece.home, piece.bytes);
    for (const auto& piece : outputs_) memory_->copy(piece.place, piece.home, piece.bytes);  // poison, or a warm start
    for (const auto& piece : scratches_) memory_->copy(piece.place, piece.home, piece.bytes);
  }
  std::vector<std::vector<std::byte>> outputs() {
    std::vector<std::vector<std::byte>> result;
    for (const auto& piece : outputs_) {
      result.emplace_back(static_cast<size_t>(piece.bytes));
      memory_->copy(result.back().data(), piece.place, piece.bytes);
    }
    memory_->wait();
    return result;
  }
  void download() {
    for (const auto& piece : outputs_) memory_->copy(piece.home, piece.place, piece.bytes);
    memory_->wait();
    std::vector<std::byte> now;
    for (const auto& piece : inputs_) {
      now.resize(static_cast<size_t>(piece.bytes));
      memory_->copy(now.data(), piece.place, piece.bytes);
      memory_->wait();
      const bool around = static_cast<const void*>(piece.home) == kCanary.data();
      EXPECT_EQ(std::memcmp(now.data(), piece.home, now.size()), 0)
          << (around ? "memory around an array of a chunk was written" : "an input was written");
    }
  }

  static inline int64_t lists_ = 0, runs_ = 0;
  std::span<const Args> heads_;
  int64_t head_gap_;
  bool device_;
  std::unique_ptr<Memory> memory_;
  std::vector<ConstPiece> inputs_, scratches_;
  std::vector<Piece> outputs_;
  std::vector<std::vector<std::byte>> poisons_;
};

template <class Args>
bool in_place(const Exec& exec, std::span<const Args> heads) {
  return exec.device == nullptr && heads.size() == 1;
}

// The sizes of a chunk of heads like this one.
template <class Args>
Sizes chunk_sizes(std::span<const Args> heads) {
  Sizes sizes = sizes_of(heads[0]);
  sizes.heads = static_cast<int64_t>(heads.size());
  return sizes;
}

}  // namespace

#ifdef SCOPE_TEST_CUDA
std::vector<DeviceMachine> device_machines() {
  if (!backend().present()) return {};
  static ThreadPool pool(1);
  static const scope::Machine opened = backend().open({.backend = "cuda"}, pool);
  std::vector<Exec> execs(2, opened.exec);
  for (Exec& exec : execs) {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    exec.stream = stream;
  }
  cudaMemPool_t memory = nullptr;  // keep what was freed, or every case pays for mapping it again
  uint64_t threshold = uint64_t{4} << 30;
  check(cudaDeviceGetDefaultMemPool(&memory, 0), "memory pool");
  check(cudaMemPoolSetAttribute(memory, cudaMemPoolAttrReleaseThreshold, &threshold), "memory pool");
  // The portable kernels also as on GPUs with less shared memory than this one: a launch that asks for more fails.
  static cuda::Device small = *opened.exec.device;
  small.shared_bytes = cuda::kLeastSharedBytes;
  std::vector<DeviceMachine> machines;
  const struct {
    const char *name, *kernels;
    const cuda::Device* device;
  } ways[] = {{"portable", "portable", opened.exec.device},
              {"portable, 99 KiB", "portable", &small},
              {"wgmma", "wgmma", opened.exec.device}};
  for (const auto& way : ways) {
    try {
      for (Exec& exec : execs) {
        exec.device = way.device;
        backend().configure(exec, way.kernels, DType::bf16, Products::bf16);
      }
      machines.push_back({way.name, execs});
    } catch (const Error& error) {
      require(error.status() == Status::unsupported, error.status(), "{}", error.what());
    }
  }
  return machines;
}
#else
std::vector<DeviceMachine> device_machines() { return {}; }
#endif

Sizes sizes_of(const GroupArgs& args) {
  return {.heads = args.heads, .q_tokens = args.count, .dim = args.q.dim, .groups = args.groups};
}
Sizes sizes_of(const SplitArgs& args) {
  return {.heads = args.heads, .q_tokens = args.q.tokens, .dim = args.q.dim, .groups = args.groups, .parts = args.parts};
}
Sizes sizes_of(const EncodeArgs& args) {
  return {.heads = args.heads, .k_tokens = args.count, .dim = args.k.dim, .codes = args.codes};
}
Sizes sizes_of(const CoclusterArgs& args) {
  Sizes sizes = sizes_of(args.keys);
  sizes.q_tokens = args.queries.count;
  sizes.groups = args.queries.groups;
  return sizes;
}

namespace {

Sizes sizes_of(const Proxy& proxy, int64_t heads) {
  return {.heads = heads, .k_tokens = proxy.count, .dim = proxy.k.dim, .groups = proxy.groups, .codes = proxy.codes};
}

}  // namespace

Sizes sizes_of(const CompensateArgs& args) { return sizes_of(args.proxy, args.heads); }
Sizes sizes_of(const WeighArgs& args) {
  Sizes sizes = sizes_of(args.proxy, args.heads);
  sizes.whole_codes = row(args.rule).whole_codes;
  sizes.sampled = args.stride > 1;
  return sizes;
}
Sizes sizes_of(const TailArgs& args) {
  Sizes sizes = sizes_of(args.proxy, args.heads);
  sizes.whole_codes = row(args.tail).per_code;
  sizes.extra = row(args.tail).per_code ? args.proxy.codes : row(args.tail).per_group ? args.proxy.groups : 0;
  sizes.parts = row(args.tail).splits ? args.parts.each : 0;
  sizes.part_stride = args.parts.stride;
  return sizes;
}
Sizes sizes_of(const AttendArgs& args) {
  return {.heads = args.heads,
          .q_tokens = args.q.tokens,
          .k_tokens = args.k.tokens,
          .dim = args.q.dim,
          .groups = args.groups,
          .extra = args.extra.count,
          .products = args.products};
}

namespace {

// The fields of group and encode, of which cocluster takes both.
template <class Args, class Field>
void mirror_group(Mirror<Args>& mirror, std::span<const Args> in, Field field) {
  const GroupArgs& args = field(in[0]);
  const auto member = [=](auto of) {
    return [=](auto& each) -> auto& { return of(field(each)); };
  };
  field(mirror.chunk).heads = static_cast<int64_t>(in.size());
  mirror.rows(member(FIELD(q)));
  mirror.tokens(member(FIELD(rows)), args.count);
  mirror.array(member(FIELD(centroids)), args.groups * args.q.dim);
  mirror.array(member(FIELD(labels)), args.q.tokens);
  mirror.array(member(FIELD(sizes)), args.groups);
  mirror.array(member(FIELD(order)), args.count);
  mirror.array(member(FIELD(offsets)), args.groups + 1);
  mirror.array(member(FIELD(similarity)), args.groups);
  mirror.shared(member(FIELD(status)), 1);
}

template <class Args, class Field>
void mirror_encode(Mirror<Args>& mirror, std::span<const Args> in, Field field) {
  const EncodeArgs& args = field(in[0]);
  const auto subspaces = static_cast<int64_t>(args.partition->size());
  const auto member = [=](auto of) {
    return [=](auto& each) -> auto& { return of(field(each)); };
  };
  field(mirror.chunk).heads = static_cast<int64_t>(in.size());
  mirror.rows(member(FIELD(k)));
  mirror.tokens(member(FIELD(rows)), args.count);
  mirror.array(member(FIELD(codebooks)), args.codes * args.k.dim);
  mirror.array(member(FIELD(labels)), subspaces * args.count);
  mirror.array(member(FIELD(empty)), subspaces);
  mirror.array(member(FIELD(similarity)), args.codes);
  mirror.shared(member(FIELD(status)), 1);
}

}  // namespace

void run_group(const Exec& exec, std::span<const GroupArgs> in, int64_t head_gap) {
  if (in_place(exec, in)) return backend().group(exec, in[0]);
  Mirror mirror(exec, in, head_gap);
  mirror_group(
      mirror, in, [](auto& args) -> auto& { return args; });
  mirror.scratch(FIELD(scratch), backend().group_scratch(exec, chunk_sizes(in)));
  mirror.run([&](const GroupArgs& chunk) { backend().group(exec, chunk); });
}

void run_encode(const Exec& exec, std::span<const EncodeArgs> in, int64_t head_gap) {
  if (in_place(exec, in)) return backend().encode(exec, in[0]);
  Mirror mirror(exec, in, head_gap);
  mirror_encode(
      mirror, in, [](auto& args) -> auto& { return args; });
  mirror.scratch(FIELD(scratch), backend().encode_scratch(exec, chunk_sizes(in)));
  mirror.run([&](const EncodeArgs& chunk) { backend().encode(exec, chunk); });
}

void run_cocluster(const Exec& exec, std::span<const CoclusterArgs> in, int64_t head_gap) {
  if (in_place(exec, in)) return backend().cocluster(exec, in[0]);
  Mirror mirror(exec, in, head_gap);
  mirror_group(mirror, in, FIELD(queries));
  mirror_encode(mirror, in, FIELD(keys));
  mirror.scratch(FIELD(queries.scratch), backend().cocluster_scratch(exec, chunk_sizes(in)));
  mirror.run([&](const CoclusterArgs& chunk) { backend().cocluster(exec, chunk); });
}

void run_score(const Exec& exec, std::span<const ScoreArgs> in, int64_t head_gap) {
  if (in_place(exec, in)) return backend().score(exec, in[0]);
  Mirror mirror(exec, in, head_gap);
  mirror.chunk.heads = static_cast<int64_t>(in.size());
  mirror.array(FIELD(centroids), in[0].groups * in[0].dim);
  mirror.array(FIELD(codebooks), in[0].codes * in[0].dim);
  mirror.array(FIELD(tables), in[0].groups * static_cast<int64_t>(in[0].partition->size()) * in[0].codes);
  mirror.run([&](const ScoreArgs& chunk) { backend().score(exec, chunk); });
}

void run_score_rows(const Exec& exec, const Proxy& proxy, int64_t first, int64_t n, float* out, int64_t stride,
                    float* buffer) {
  if (exec.device == nullptr) return cpu::score_rows(exec, proxy, 0, first, n, out, stride, buffer);
#ifdef SCOPE_TEST_CUDA
  struct Rows {
    Proxy proxy;
    float* out;
  };
  const Rows rows{proxy, out};
  Mirror mirror(exec, std::span(&rows, 1));
  mirror.proxy(FIELD(proxy));
  mirror.shared(FIELD(out), n * stride);
  mirror.run([&](const Rows& chunk) { cuda::score_rows(exec, chunk.proxy, first, n, chunk.out, stride); });
#endif
}

void run_compensate(const Exec& exec, std::span<const CompensateArgs> in, int64_t head_gap) {
  if (in_place(exec, in)) return backend().compensate(exec, in[0]);
  Mirror mirror(exec, in, head_gap);
  const Proxy& proxy = in[0].proxy;
  mirror.chunk.heads = static_cast<int64_t>(in.size());
  mirror.proxy(FIELD(proxy));
  mirror.rows(FIELD(v));
  mirror.array(FIELD(value), proxy.codes * in[0].v.dim);
  mirror.array(FIELD(bias), proxy.codes);
  mirror.array(FIELD(errors), proxy.groups * proxy.codes);
  mirror.scratch(FIELD(scratch), backend().compensate_scratch(exec, chunk_sizes(in)));
  mirror.run([&](const CompensateArgs& chunk) { backend().compensate(exec, chunk); });
}

namespace {

// The arrays of `select`, which is of(args), for a chunk of `sizes`; `alpha` holds each head's.
template <class Args, class Of>
void mirror_select(const Exec& exec, Mirror<Args>& mirror, const Of& of, const Sizes& sizes, const double* alpha) {
  const auto member = [&](auto path) {
    return [=](auto& args) -> auto& { return path(of(args)); };
  };
  const Proxy& proxy = of(mirror.chunk).weighed.proxy;
  const int64_t groups = proxy.groups, codes = proxy.codes, words = mask_words(proxy.k.tokens);
  of(mirror.chunk).weighed.heads = sizes.heads;
  of(mirror.chunk).weighed.alpha = alpha;
  mirror.proxy(member(FIELD(weighed.proxy)));
  mirror.array(member(FIELD(weighed.sizes)), groups);
  mirror.array(member(FIELD(weighed.q_similarity)), groups);
  mirror.array(member(FIELD(weighed.k_similarity)), codes);
  mirror.array(member(FIELD(weighed.errors)), groups * codes);
  mirror.array(member(FIELD(weighed.top_p)), groups);
  mirror.array(member(FIELD(counts)), groups);
  mirror.array(member(FIELD(dropped)), groups);
  mirror.array(member(FIELD(log_mass)), groups);
  mirror.array(member(FIELD(head_budget)), 1);
  mirror.array(member(FIELD(rho_used)), 1);
  mirror.array(member(FIELD(alpha_used)), 1);
  mirror.array(member(FIELD(mask)), groups * words);
  mirror.scratch(member(FIELD(weighed.weights)), backend().weights_bytes(exec, sizes));
  mirror.scratch(member(FIELD(weighed.scratch)), backend().weigh_scratch(exec, sizes));
}

std::vector<double> alphas_of(std::span<const KeepArgs> heads) {
  std::vector<double> alpha;
  for (const KeepArgs& head : heads) alpha.push_back(*head.weighed.alpha);
  return alpha;
}

// Heads [first, first + count) of a chunk.
KeepArgs slice(const Exec& exec, KeepArgs args, int64_t first, int64_t count) {
  const auto shift = [&](auto&... arrays) { ((arrays.base += first * arrays.step), ...); };
  WeighArgs& weighed = args.weighed;
  Sizes before = test::sizes_of(weighed);
  before.heads = first;
  const int64_t bytes = backend().weights_bytes(exec, before);
  weighed.weights = {static_cast<std::byte*>(weighed.weights.data) + bytes, weighed.weights.bytes - bytes};
  weighed.heads = count;
  weighed.alpha += first;
  weighed.proxy.k.data = static_cast<const std::byte*>(weighed.proxy.k.data) +
                         first * weighed.proxy.k.head_stride * dtype_bytes(weighed.proxy.k.dtype);
  shift(weighed.proxy.centroids, weighed.proxy.tables, weighed.proxy.labels, weighed.sizes, weighed.q_similarity,
        weighed.k_similarity, weighed.errors, weighed.top_p);
  shift(args.counts, args.dropped, args.log_mass, args.head_budget, args.rho_used, args.alpha_used, args.mask);
  return args;
}

// A sample's selection with what its heads share.
struct SampleArgs {
  KeepArgs keep;
  double* rho;
  Scratch solve;
};

}  // namespace

void run_select(const Exec& exec, std::span<const KeepArgs> in, int64_t head_gap) {
  const auto select = [&](const KeepArgs& chunk) {
    backend().weigh(exec, chunk.weighed);
    backend().keep(exec, chunk);
  };
  if (in_place(exec, in)) return select(in[0]);
  Mirror mirror(exec, in, head_gap);
  const auto alpha = alphas_of(in);
  Sizes sizes = sizes_of(in[0].weighed);
  sizes.heads = static_cast<int64_t>(in.size());
  mirror_select(
      exec, mirror, [](auto& args) -> auto& { return args; }, sizes, alpha.data());
  mirror.run(select);
}

void run_select_sample(const Exec& exec, std::span<const KeepArgs> in, int64_t chunk, double* rho) {
  const auto heads = static_cast<int64_t>(in.size());
  Sizes sizes = sizes_of(in[0].weighed);
  sizes.heads = heads;
  std::vector<std::byte> scratch(static_cast<size_t>(backend().solve_scratch(exec, sizes)), std::byte{0xa5});
  std::vector<SampleArgs> all;
  for (const KeepArgs& head : in) all.push_back({head, rho, {scratch.data(), std::ssize(scratch)}});
  Mirror mirror(exec, std::span<const SampleArgs>(all));
  const auto alpha = alphas_of(in);
  mirror_select(
      exec, mirror, [](auto& args) -> auto& { return args.keep; }, sizes, alpha.data());
  mirror.shared(FIELD(rho), 1);
  mirror.scratch(FIELD(solve), std::ssize(scratch));
  mirror.run([&](const SampleArgs& sample) {
    const auto each_chunk = [&](const auto& body) {
      for (int64_t h = 0; h < heads; h += chunk) body(slice(exec, sample.keep, h, std::min(chunk, heads - h)));
    };
    each_chunk([&](const KeepArgs& args) { backend().weigh(exec, args.weighed); });
    SolveArgs solve{.weighed = sample.keep.weighed, .rho = sample.rho, .scratch = sample.solve};
    solve.weighed.scratch = {};
    solve.weighed.top_p = {};
    backend().solve(exec, solve);
    each_chunk([&](KeepArgs args) {
      args.rho = sample.rho;
      backend().keep(exec, args);
    });
  });
}

void run_tail(const Exec& exec, std::span<const TailArgs> in, int64_t head_gap) {
  if (in_place(exec, in)) return backend().tail(exec, in[0]);
  Mirror mirror(exec, in, head_gap);
  const Proxy& proxy = in[0].proxy;
  const int64_t keys = sizes_of(in[0]).extra, words = mask_words(proxy.k.tokens);
  mirror.chunk.heads = static_cast<int64_t>(in.size());
  mirror.proxy(FIELD(proxy));
  mirror.rows(FIELD(v));
  mirror.array(FIELD(sizes), proxy.groups);
  mirror.array(FIELD(kept), proxy.groups * words);
  if (row(in[0].tail).splits) {
    const int64_t parts = proxy.groups * in[0].parts.each;
    mirror.array(FIELD(parts.centroids), parts * proxy.k.dim);
    mirror.array(FIELD(parts.sizes), parts);
    mirror.array(FIELD(parts.log_mass), proxy.groups);
    mirror.shared(FIELD(keep), words);
    mirror.array(FIELD(value), parts * proxy.k.dim);
    mirror.array(FIELD(share), in[0].rows);
  } else if (row(in[0].tail).mixes) {
    mirror.shared(FIELD(keep), words);
    mirror.array(FIELD(value), in[0].rows * proxy.k.dim);
    mirror.array(FIELD(share), in[0].rows);
  } else {
    mirror.array(FIELD(k), keys * proxy.k.dim);
    mirror.array(FIELD(value), keys * proxy.k.dim);
    mirror.array(FIELD(bias), keys);
    mirror.array(FIELD(mask), in[0].rows * mask_words(keys));
  }
  mirror.scratch(FIELD(scratch), backend().tail_scratch(exec, chunk_sizes(in)));
  mirror.run([&](const TailArgs& chunk) { backend().tail(exec, chunk); });
}

void run_attend(const Exec& exec, std::span<const AttendArgs> in, int64_t head_gap) {
  if (in_place(exec, in)) return backend().attend(exec, in[0]);
  Mirror mirror(exec, in, head_gap);
  const int64_t groups = in[0].groups, words = mask_words(in[0].k.tokens), extra = in[0].extra.count;
  mirror.chunk.heads = static_cast<int64_t>(in.size());
  mirror.rows(FIELD(q));
  mirror.rows(FIELD(k));
  mirror.rows(FIELD(v));
  mirror.array(FIELD(order), in[0].q.tokens);
  mirror.array(FIELD(offsets), groups + 1);
  mirror.array(FIELD(mask), groups * words);
  mirror.shared(FIELD(keep), words);
  mirror.shared(FIELD(valid), words);
  if (extra > 0) {
    mirror.array(FIELD(extra.k), extra * in[0].q.dim);
    mirror.array(FIELD(extra.v), extra * in[0].q.dim);
    mirror.array(FIELD(extra.bias), extra);
    mirror.array(FIELD(extra.mask), groups * mask_words(extra));
  }
  if (in[0].mix.share) {
    mirror.array(FIELD(mix.share), groups);
    mirror.array(FIELD(mix.row), (in[0].mix.part ? kMostParts : groups) * in[0].q.dim);  // as the tests have them
  }
  if (in[0].mix.part) {
    mirror.array(FIELD(mix.part), in[0].q.tokens);
  }
  mirror.rows(FIELD(out));
  mirror.array(FIELD(lse), in[0].q.tokens);
  mirror.scratch(FIELD(scratch), backend().attend_scratch(exec, chunk_sizes(in)));
  mirror.run([&](const AttendArgs& chunk) { backend().attend(exec, chunk); });
}

void run_split(const Exec& exec, std::span<const SplitArgs> in, int64_t head_gap) {
  if (in_place(exec, in)) return backend().split(exec, in[0]);
  Mirror mirror(exec, in, head_gap);
  const SplitArgs& args = in[0];
  const int64_t rows = args.groups * args.parts;
  mirror.chunk.heads = static_cast<int64_t>(in.size());
  mirror.rows(FIELD(q));
  mirror.array(FIELD(order), args.q.tokens);
  mirror.array(FIELD(offsets), args.groups + 1);
  mirror.array(FIELD(centroids), rows * args.q.dim);
  mirror.array(FIELD(sizes), rows);
  mirror.array(FIELD(labels), args.q.tokens);
  mirror.scratch(FIELD(scratch), backend().split_scratch(exec, chunk_sizes(in)));
  mirror.run([&](const SplitArgs& chunk) { backend().split(exec, chunk); });
}

void run_reuse(const Exec& exec, std::span<const ReuseArgs> in, int64_t head_gap) {
  if (in_place(exec, in)) return backend().reuse(exec, in[0]);
  Mirror mirror(exec, in, head_gap);
  const ReuseArgs& args = in[0];
  mirror.chunk.heads = static_cast<int64_t>(in.size());
  mirror.tokens(FIELD(q_rows), args.tokens.queries);
  mirror.tokens(FIELD(k_rows), args.tokens.keys);
  mirror.array(FIELD(state_labels), args.tokens.q_tokens);
  mirror.array(FIELD(state_codes), args.subspaces * args.tokens.k_tokens);
  mirror.array(FIELD(labels), args.tokens.q_tokens);
  mirror.array(FIELD(sizes), args.groups);
  mirror.array(FIELD(order), args.tokens.queries);
  mirror.array(FIELD(offsets), args.groups + 1);
  mirror.array(FIELD(code_labels), args.subspaces * args.tokens.keys);
  mirror.array(FIELD(empty), args.subspaces);
  mirror.scratch(FIELD(scratch), args.scratch.bytes * mirror.chunk.heads);
  mirror.run([&](const ReuseArgs& chunk) { backend().reuse(exec, chunk); });
}

void run_describe(const Exec& exec, const DescribeArgs& args) {
  if (exec.device == nullptr) return backend().describe(exec, args);
  Mirror mirror(exec, std::span(&args, 1));
  mirror.shared(FIELD(q_rows), args.tokens.q_tokens);
  mirror.shared(FIELD(k_rows), args.tokens.keys);
  mirror.shared(FIELD(valid), mask_words(args.tokens.k_tokens));
  mirror.shared(FIELD(kept), mask_words(args.tokens.k_tokens));
  mirror.shared(FIELD(queries), mask_words(args.tokens.q_tokens));
  mirror.shared(FIELD(offsets), 2);
  mirror.run([&](const DescribeArgs& chunk) { backend().describe(exec, chunk); });
}

void run_finish(const Exec& exec, const FinishArgs& args) {
  if (exec.device == nullptr) return backend().finish(exec, args);
  Mirror mirror(exec, std::span(&args, 1));
  const int64_t words = mask_words(args.tokens.k_tokens), rows = args.heads * args.row_groups;
  mirror.shared(FIELD(q_rows), args.tokens.q_tokens);
  mirror.shared(FIELD(valid), words);
  mirror.shared(FIELD(labels), args.heads * args.tokens.q_tokens);
  mirror.shared(FIELD(sizes), rows);
  mirror.shared(FIELD(counts), rows);
  mirror.shared(FIELD(order), args.heads * args.tokens.q_tokens);
  mirror.shared(FIELD(offsets), rows + args.heads);
  mirror.shared(FIELD(mask), rows * words);
  mirror.shared(FIELD(empty), args.heads * args.subspaces);
  mirror.shared(FIELD(report), args.heads);
  mirror.run([&](const FinishArgs& chunk) { backend().finish(exec, chunk); });
}

void run_import(const Exec& exec, const ImportArgs& args) {
  if (exec.device == nullptr) return backend().import_selection(exec, args);
  Mirror mirror(exec, std::span(&args, 1));
  const int64_t words = mask_words(args.tokens.k_tokens);
  mirror.shared(FIELD(valid_keys), words);
  mirror.shared(FIELD(valid_queries), mask_words(args.tokens.q_tokens));
  mirror.shared(FIELD(labels), args.heads * args.tokens.q_tokens);
  mirror.shared(FIELD(selected), args.heads * args.groups * words);
  mirror.shared(FIELD(keep), words);
  mirror.shared(FIELD(order), args.heads * args.tokens.q_tokens);
  mirror.shared(FIELD(offsets), args.heads * (args.row_groups + 1));
  mirror.shared(FIELD(mask), args.heads * args.row_groups * words);
  mirror.shared(FIELD(kept), words);
  mirror.run([&](const ImportArgs& chunk) { backend().import_selection(exec, chunk); });
}

namespace {

// What the copies take, in bytes unless a type says more.
struct Moved {
  const std::byte* from;
  const int32_t* rows;
  std::byte* to;
};

template <class Move>
void run_move(const Exec& exec, const Moved& moved, int64_t from_bytes, int64_t rows, int64_t to_bytes, const Move& move) {
  if (exec.device == nullptr) return move(moved);
  Mirror mirror(exec, std::span(&moved, 1));
  mirror.shared(FIELD(from), from_bytes);
  mirror.shared(FIELD(rows), rows);
  mirror.shared(FIELD(to), to_bytes);
  mirror.run(move);
}

template <class T>
const std::byte* bytes_of(const T* x) {
  return static_cast<const std::byte*>(static_cast<const void*>(x));
}
template <class T>
std::byte* bytes_of(T* x) {
  return static_cast<std::byte*>(static_cast<void*>(x));
}

}  // namespace

void run_set_slot(const Exec& exec, StateSlot* slot, StateSlot value) {
  run_move(exec, {nullptr, nullptr, bytes_of(slot)}, 0, 0, sizeof value,
           [&](const Moved& at) { backend().set_slot(exec, reinterpret_cast<StateSlot*>(at.to), value); });
}

void run_check_slot(const Exec& exec, const std::byte* state, int64_t bytes, const void* header, int64_t slot,
                    StateSlot expected, uint32_t* status) {
  run_move(exec, {state, nullptr, bytes_of(status)}, bytes, 0, sizeof *status, [&](const Moved& at) {
    backend().check_slot(exec, at.from, header, reinterpret_cast<const StateSlot*>(at.from + slot), expected,
                         reinterpret_cast<uint32_t*>(at.to));
  });
}

void run_fill(const Exec& exec, uint32_t* to, int64_t step, uint32_t value, int64_t count, int64_t rows) {
  run_move(exec, {nullptr, nullptr, bytes_of(to)}, 0, 0, 4 * ((rows - 1) * step + count),
           [&](const Moved& at) { backend().fill(exec, at.to, step, value, count, rows); });
}

void run_copy(const Exec& exec, const uint32_t* from, int64_t from_step, uint32_t* to, int64_t to_step, int64_t count,
              int64_t rows) {
  run_move(exec, {bytes_of(from), nullptr, bytes_of(to)}, 4 * ((rows - 1) * from_step + count), 0,
           4 * ((rows - 1) * to_step + count),
           [&](const Moved& at) { backend().copy(exec, at.from, from_step, at.to, to_step, count, rows); });
}

void run_round_to(const Exec& exec, DType type, const float* from, float* to, int64_t count) {
  run_move(exec, {bytes_of(from), nullptr, bytes_of(to)}, 4 * count, 0, 4 * count, [&](const Moved& at) {
    backend().round_to(exec, type, reinterpret_cast<const float*>(at.from), reinterpret_cast<float*>(at.to), count);
  });
}

void run_convert(const Exec& exec, const void* from, DType from_type, void* to, DType to_type, int64_t count) {
  run_move(exec, {static_cast<const std::byte*>(from), nullptr, static_cast<std::byte*>(to)}, count * dtype_bytes(from_type),
           0, count * dtype_bytes(to_type),
           [&](const Moved& at) { backend().convert(exec, at.from, from_type, at.to, to_type, count); });
}

void run_scatter(const Exec& exec, const int32_t* from, int64_t from_step, const int32_t* rows, int64_t count, int32_t* to,
                 int64_t to_step, int64_t heads) {
  run_move(exec, {bytes_of(from), rows, bytes_of(to)}, 4 * heads * from_step, count, 4 * heads * to_step,
           [&](const Moved& at) {
             backend().scatter(exec, reinterpret_cast<const int32_t*>(at.from), from_step, at.rows, count,
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
                          .full_iterations = args.full_iterations,
                          .draw = args.draw,
                          .warm = args.warm,
                          .seed = args.random.seed,
                          .centroids = args.centroids,
                          .labels = labels.data(),
                          .sizes = args.sizes,
                          .order = args.order,
                          .offsets = args.offsets,
                          .similarity = {},
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
                          .full_iterations = args.full_iterations,
                          .draw = args.draw,
                          .warm = args.warm,
                          .seed = args.random.seed,
                          .codebooks = codebooks.data(),
                          .labels = labels.data(),
                          .empty = empty.data(),
                          .similarity = {},
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
  const Sizes sizes = {.q_tokens = args.count,
                       .k_tokens = args.count,
                       .dim = args.points.dim,
                       .groups = args.clusters,
                       .codes = args.clusters};
  return args.random.tensor == 0 ? backend().group_scratch(exec, sizes) : backend().encode_scratch(exec, sizes);
}

}  // namespace scope::test
