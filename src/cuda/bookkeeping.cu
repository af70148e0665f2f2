// Token lists, the rest of a selection and copies on the GPU.
#include <cuda_bf16.h>

#include <algorithm>
#include <cstring>

#include "core/numeric.h"
#include "cuda/device/reduce.cuh"
#include "cuda/launch.h"
#include "cuda/stages.h"

namespace scope::cuda {

namespace {

constexpr int kThreads = 256;

// Blocks for n items, a thread each, bounded: kernels loop over what is left.
int64_t blocks_for(int64_t n) { return std::clamp<int64_t>(ceil_div(n, kThreads), 1, 4096); }

__device__ int64_t thread_index() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ int64_t thread_count() { return int64_t{gridDim.x} * blockDim.x; }

// Runs of consecutive tokens, as many as travel in one launch's parameters.
struct Runs {
  static constexpr int kMost = 1000;
  int count;
  int32_t begin[kMost];
  int32_t end[kMost];
  int32_t at[kMost];  // where the run goes in the list
};

// The runs' tokens into a list, and their bits into a mask (either may be null).
__global__ void expand_runs(const __grid_constant__ Runs runs, int32_t* list, uint32_t* mask) {
  for (int r = 0; r < runs.count; ++r) {
    const int64_t length = runs.end[r] - runs.begin[r];
    for (int64_t i = thread_index(); list != nullptr && i < length; i += thread_count()) {
      list[runs.at[r] + i] = static_cast<int32_t>(runs.begin[r] + i);
    }
    const int64_t first = runs.begin[r] / 32, last = (runs.end[r] + 31) / 32;
    for (int64_t w = first + thread_index(); mask != nullptr && w < last; w += thread_count()) {
      uint32_t bits = ~0u;
      if (w == first) bits &= ~0u << (runs.begin[r] % 32);
      if (32 * (w + 1) > runs.end[r]) bits &= ~(~0u << (runs.end[r] % 32));
      if (bits == ~0u) {
        mask[w] = bits;
      } else {
        atomicOr(&mask[w], bits);  // two runs may end in one word
      }
    }
  }
}

// Collects runs on the host and sends them off when a launch is full.
class RunSender {
 public:
  RunSender(const Exec& exec, int32_t* list, uint32_t* mask) : exec_(exec), list_(list), mask_(mask) { runs_.count = 0; }
  void add(int64_t begin, int64_t end) {
    if (begin == end) return;
    if (runs_.count == Runs::kMost) send();
    const int i = runs_.count++;
    runs_.begin[i] = static_cast<int32_t>(begin);
    runs_.end[i] = static_cast<int32_t>(end);
    runs_.at[i] = static_cast<int32_t>(at_);
    at_ += end - begin;
    longest_ = std::max(longest_, end - begin);
  }
  void send() {
    if (runs_.count == 0) return;
    launch(exec_, "expand_runs", expand_runs, blocks_for(longest_), kThreads, 0, runs_, list_, mask_);
    runs_.count = 0;
    longest_ = 0;
  }

 private:
  const Exec& exec_;
  int32_t* list_;
  uint32_t* mask_;
  Runs runs_;
  int64_t at_ = 0, longest_ = 0;
};

// What a token is: padding, one that takes part, or an always-kept key or densely attending query.
enum class Kind { padding, part, special };

struct KindOf {
  int64_t length;
  const uint32_t *valid, *special;  // null: all before the length are valid; none is special

  Kind operator()(int64_t i) const {
    if (i >= length || (valid != nullptr && !mask_bit(valid, i))) return Kind::padding;
    return special != nullptr && mask_bit(special, i) ? Kind::special : Kind::part;
  }
  // Whether tokens [i, i + 32), a whole word, are all of `kind`.
  bool whole(int64_t i, Kind kind) const {
    const uint32_t v = valid == nullptr ? ~0u : valid[i / 32], s = special == nullptr ? 0u : special[i / 32];
    if (i >= length) return kind == Kind::padding;
    if (i + 32 > length) return false;
    return kind == Kind::padding ? v == 0 : kind == Kind::part ? v == ~0u && s == 0 : v == ~0u && s == ~0u;
  }
};

// Calls run(begin, end, kind) for the maximal runs of one kind in [0, n).
template <class Run>
void each_run(const KindOf& kind_of, int64_t n, const Run& run) {
  int64_t begin = 0;
  Kind kind = n > 0 ? kind_of(0) : Kind::padding;
  for (int64_t i = 1; i < n;) {
    if (i % 32 == 0 && i + 32 <= n && kind_of.whole(i, kind)) {
      i += 32;
      continue;
    }
    if (kind_of(i) != kind) {
      run(begin, i, kind);
      begin = i;
      kind = kind_of(i);
    }
    ++i;
  }
  run(begin, n, kind);
}

__global__ void set_offsets(int64_t* offsets, int64_t end) {
  offsets[0] = 0;
  offsets[1] = end;
}

}  // namespace

void describe(const Exec& exec, const DescribeArgs& args) {
  const Tokens& t = args.tokens;
  const TokenMasks& m = args.masks;
  const int64_t words = mask_words(t.k_tokens);
  fill(exec, args.valid, 0, 0, words, 1);
  fill(exec, args.kept, 0, 0, words, 1);
  fill(exec, args.queries, 0, 0, mask_words(t.q_tokens), 1);
  RunSender keys(exec, args.k_rows, args.valid), kept(exec, nullptr, args.kept);
  each_run({m.k_length, m.valid_k, m.keep}, t.k_tokens, [&](int64_t begin, int64_t end, Kind kind) {
    if (kind != Kind::padding) (kind == Kind::special ? kept : keys).add(begin, end);
  });
  keys.send();
  kept.send();
  RunSender queries(exec, args.q_rows, args.queries), dense(exec, args.q_rows + t.queries, args.queries),
      idle(exec, args.q_rows + t.valid_q, nullptr);
  each_run({m.q_length, m.valid_q, m.dense_queries}, t.q_tokens, [&](int64_t begin, int64_t end, Kind kind) {
    (kind == Kind::padding ? idle : kind == Kind::special ? dense : queries).add(begin, end);
  });
  queries.send();
  dense.send();
  idle.send();
  launch(exec, "set_offsets", set_offsets, 1, 1, 0, args.offsets, t.valid_q);
}

namespace {

// A block per head.
__global__ void finish_heads(const FinishArgs args) {
  const Tokens& t = args.tokens;
  const int64_t h = blockIdx.x, words = (t.k_tokens + 31) / 32, groups = args.groups, all = args.all_groups;
  HeadStats& head = args.report[h];
  if (groups == 0) {
    if (threadIdx.x == 0) {
      head = HeadStats{};
      head.density = head.total_density = 1;
      head.queries = t.queries;
      head.keys = t.keys;
    }
    return;
  }
  int32_t* labels = args.labels + h * t.q_tokens;
  int32_t* sizes = args.sizes + h * args.row_groups;
  int32_t* counts = args.counts + h * args.row_groups;
  int32_t* order = args.order + h * t.q_tokens;
  int64_t* offsets = args.offsets + h * (args.row_groups + 1);
  uint32_t* mask = args.mask + h * args.row_groups * words;
  const int64_t last = t.dense > 0 ? all - 1 : all;
  for (int64_t c = groups + threadIdx.x; c < all; c += kThreads) {
    sizes[c] = c == last ? static_cast<int32_t>(t.dense) : 0;
    counts[c] = c == last ? static_cast<int32_t>(t.keys) : 0;
    offsets[c + 1] = c == last ? t.valid_q : t.queries;
  }
  for (int64_t i = threadIdx.x; i < (all - groups) * words; i += kThreads) {
    mask[groups * words + i] = groups + i / words == last ? args.valid[i % words] : 0;
  }
  for (int64_t i = t.queries + threadIdx.x; i < t.q_tokens; i += kThreads) {
    const int32_t token = args.q_rows[i];
    order[i] = token;
    if (i < t.valid_q) labels[token] = static_cast<int32_t>(last);
  }
  __syncthreads();

  double pairs = 0, total = 0;
  int64_t empty = 0, high = 0, low = t.keys;
  for (int64_t c = threadIdx.x; c < all; c += kThreads) {
    total += static_cast<double>(sizes[c]) * static_cast<double>(counts[c] + t.kept);
    if (c >= groups) continue;
    if (sizes[c] == 0) {
      ++empty;
      continue;
    }
    pairs += static_cast<double>(sizes[c]) * counts[c];
    high = max(high, int64_t{counts[c]});
    low = min(low, int64_t{counts[c]});
  }
  pairs = block_sum<kThreads>(pairs);
  total = block_sum<kThreads>(total);
  empty = block_reduce<kThreads>(empty, [](int64_t x, int64_t y) { return x + y; });
  high = block_reduce<kThreads>(high, [](int64_t x, int64_t y) { return max(x, y); });
  low = block_reduce<kThreads>(low, [](int64_t x, int64_t y) { return min(x, y); });
  if (threadIdx.x != 0) return;
  head.density = pairs / (static_cast<double>(t.queries) * static_cast<double>(t.keys));
  head.total_density = total / (static_cast<double>(t.valid_q) * static_cast<double>(t.valid_k));
  head.queries = t.queries;
  head.keys = t.keys;
  head.groups = groups;
  head.codes = args.codes;
  head.empty_groups = empty;
  head.empty_codes = 0;
  for (int64_t m = 0; args.codes > 0 && m < args.subspaces; ++m) head.empty_codes += args.empty[h * args.subspaces + m];
  head.min_count = low;
  head.max_count = high;
}

__device__ bool attends(const ImportArgs& args, int64_t i, int32_t label) {
  return mask_bit(args.valid_queries, i) && label >= 0 && label < args.groups;
}

__global__ void count_labels(const ImportArgs args) {
  const int64_t h = blockIdx.x;
  int64_t* offsets = args.offsets + h * (args.row_groups + 1);
  for (int64_t c = threadIdx.x; c <= args.groups; c += kThreads) offsets[c] = 0;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < args.tokens.q_tokens; i += kThreads) {
    const int32_t label = args.labels[h * args.tokens.q_tokens + i];
    if (attends(args, i, label)) atomicAdd(reinterpret_cast<unsigned long long*>(offsets + label + 1), 1ull);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int64_t c = 0; c < args.groups; ++c) offsets[c + 1] += offsets[c];
  }
}

// A warp per (head, group), and one per head for the idle: the group's queries, ascending.
__global__ void place_labels(const ImportArgs args, int64_t warps) {
  const int64_t warp = thread_index() / 32;
  const int lane = threadIdx.x % 32;
  if (warp >= warps) return;
  const int64_t h = warp / (args.groups + 1), group = warp % (args.groups + 1);  // the last one gathers the idle queries
  const int32_t* labels = args.labels + h * args.tokens.q_tokens;
  int32_t* order = args.order + h * args.tokens.q_tokens;
  int64_t at = args.offsets[h * (args.row_groups + 1) + group];
  for (int64_t first = 0; first < args.tokens.q_tokens; first += 32) {
    const int64_t i = first + lane;
    const bool inside = i < args.tokens.q_tokens;
    const int32_t label = inside ? labels[i] : -1;
    const bool valid = inside && attends(args, i, label);
    const bool mine = inside && (group == args.groups ? !valid : valid && label == group);
    const uint32_t vote = __ballot_sync(~0u, mine);
    if (mine) order[at + __popc(vote & ~(~0u << lane))] = static_cast<int32_t>(i);
    at += __popc(vote);
  }
}

__global__ void import_masks(const ImportArgs args, int64_t words) {
  const int64_t per_head = args.groups * words;
  for (int64_t i = thread_index(); i < args.heads * per_head; i += thread_count()) {
    args.mask[i / per_head * args.row_groups * words + i % per_head] = args.selected[i] & args.valid_keys[i % words];
  }
  for (int64_t w = thread_index(); w < words; w += thread_count()) {
    args.kept[w] = args.keep == nullptr ? 0 : args.keep[w] & args.valid_keys[w];
  }
}

__global__ void fill_words(uint32_t* to, int64_t step, uint32_t value, int64_t count, int64_t rows) {
  for (int64_t i = thread_index(); i < count * rows; i += thread_count()) to[i / count * step + i % count] = value;
}

__global__ void copy_words(const uint32_t* from, int64_t from_step, uint32_t* to, int64_t to_step, int64_t count,
                           int64_t rows) {
  for (int64_t i = thread_index(); i < count * rows; i += thread_count()) {
    to[i / count * to_step + i % count] = from[i / count * from_step + i % count];
  }
}

template <class From, class To>
__global__ void convert_elements(const From* from, To* to, int64_t count) {
  for (int64_t i = thread_index(); i < count; i += thread_count()) to[i] = static_cast<To>(static_cast<float>(from[i]));
}

template <class T>
__global__ void round_elements(const float* from, float* to, int64_t count) {
  for (int64_t i = thread_index(); i < count; i += thread_count()) to[i] = static_cast<float>(static_cast<T>(from[i]));
}

__global__ void scatter_words(const int32_t* from, int64_t from_step, const int32_t* rows, int64_t count, int32_t* to,
                              int64_t to_step, int64_t heads) {
  for (int64_t i = thread_index(); i < count * heads; i += thread_count()) {
    const int64_t h = i / count, j = i % count;
    to[h * to_step + (rows == nullptr ? j : rows[j])] = from[h * from_step + j];
  }
}

__global__ void write_slot(StateSlot* slot, StateSlot value) { *slot = value; }

struct Header {
  uint32_t words[16];
};

__global__ void compare_slot(const uint32_t* state, const __grid_constant__ Header header, const StateSlot* slot,
                             StateSlot expected, uint32_t* status) {
  bool same = slot->groups == expected.groups && slot->codes == expected.codes && slot->tokens == expected.tokens;
  for (int i = 0; i < 16; ++i) same = same && state[i] == header.words[i];
  if (!same) *status |= kStateNotFilled;
}

}  // namespace

void finish(const Exec& exec, const FinishArgs& args) {
  if (args.heads == 0) return;
  launch(exec, "finish_heads", finish_heads, args.heads, kThreads, 0, args);
}

void import_selection(const Exec& exec, const ImportArgs& args) {
  const int64_t words = mask_words(args.tokens.k_tokens), warps = args.heads * (args.groups + 1);
  launch(exec, "count_labels", count_labels, args.heads, kThreads, 0, args);
  launch(exec, "place_labels", place_labels, ceil_div(warps * 32, kThreads), kThreads, 0, args, warps);
  launch(exec, "import_masks", import_masks, blocks_for(args.heads * args.groups * words), kThreads, 0, args, words);
}

void set_slot(const Exec& exec, StateSlot* slot, StateSlot value) {
  launch(exec, "write_slot", write_slot, 1, 1, 0, slot, value);
}

void check_slot(const Exec& exec, const void* state, const void* header, const StateSlot* slot, StateSlot expected,
                uint32_t* status) {
  Header copy;
  std::memcpy(&copy, header, sizeof copy);
  launch(exec, "compare_slot", compare_slot, 1, 1, 0, static_cast<const uint32_t*>(state), copy, slot, expected, status);
}

void fill(const Exec& exec, void* to, int64_t step, uint32_t value, int64_t count, int64_t rows) {
  if (count * rows == 0) return;
  launch(exec, "fill_words", fill_words, blocks_for(count * rows), kThreads, 0, static_cast<uint32_t*>(to), step, value,
         count, rows);
}

void copy(const Exec& exec, const void* from, int64_t from_step, void* to, int64_t to_step, int64_t count, int64_t rows) {
  if (count * rows == 0) return;
  launch(exec, "copy_words", copy_words, blocks_for(count * rows), kThreads, 0, static_cast<const uint32_t*>(from),
         from_step, static_cast<uint32_t*>(to), to_step, count, rows);
}

void round_to(const Exec& exec, DType type, const float* from, float* to, int64_t count) {
  if (count == 0) return;
  const auto kernel = type == DType::f32    ? round_elements<float>
                      : type == DType::bf16 ? round_elements<__nv_bfloat16>
                                            : round_elements<__half>;
  launch(exec, "round_elements", kernel, blocks_for(count), kThreads, 0, from, to, count);
}

void convert(const Exec& exec, const void* from, DType from_type, void* to, DType to_type, int64_t count) {
  if (count == 0) return;
  const bool from_f32 = from_type == DType::f32, to_f32 = to_type == DType::f32;
  const auto start = [&]<class From, class To>(const From* x, To* y) {
    launch(exec, "convert_elements", convert_elements<From, To>, blocks_for(count), kThreads, 0, x, y, count);
  };
  if (from_f32 && to_f32) {
    start(static_cast<const float*>(from), static_cast<float*>(to));
  } else if (from_f32) {
    start(static_cast<const float*>(from), static_cast<__nv_bfloat16*>(to));
  } else {
    start(static_cast<const __nv_bfloat16*>(from), static_cast<float*>(to));
  }
}

void scatter(const Exec& exec, const int32_t* from, int64_t from_step, const int32_t* rows, int64_t count, int32_t* to,
             int64_t to_step, int64_t heads) {
  if (count * heads == 0) return;
  launch(exec, "scatter_words", scatter_words, blocks_for(count * heads), kThreads, 0, from, from_step, rows, count, to,
         to_step, heads);
}

}  // namespace scope::cuda
