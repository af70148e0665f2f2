// The stages as the tests call them: a head alone in place on the CPU, and else as a chunk in memory of its own.
#pragma once

#include <span>
#include <vector>

#include "stages/backends.h"
#include "stages/kmeans.h"
#include "stages/split.h"

namespace scope::test {

// What differs between the backends is data, and all of it is here.
struct Limits {
  std::vector<DType> dtypes;
  DType finest;                               // the most precise input
  std::vector<int64_t> dims;                  // of a head
  std::vector<int64_t> sizes;                 // tokens around every tile
  std::vector<int64_t> paddings, alignments;  // elements after each row (-1: another dim), and before the first
  double square_share;                        // of attend's cases with many queries and many keys
  double case_share;                          // of each test's cases
  int64_t long_every;                         // case has 1,025 tokens or more
  int64_t runs;                               // of one input, bitwise
  double largest_logit;                       // up to which softmax must hold
  double table;                               // error of a table entry, relative to 1 + its size
  double score;                               // error of a proxy score
  bool exact_keys;                            // the choice of keys is exact on the scores in f32
  double rho;                                 // t_c lies between the float64 counts for rho -+ this
  double order;                               // a dropped key's score exceeds a kept one's by at most this
  double threshold;                           // of a sample's scores, as a share of their range
  double mass;                                // that a group drops, as a share of all, and the log of all
  // The mass that a group drops may err by the first share of itself, and its mean keys and values by the second share of
  // sqrt(sum p^2 x^2), which is what terms p x of random signs add up to; both besides the rounding of f32. A kernel that
  // loses one tile of 64 keys of N loses 64 / N of the mass and moves the means by sqrt(64 / N) of that root: at N = 4,097,
  // the longest case, by 1/64 and 1/8, three and four times what any backend is allowed.
  double tail_mass, tail_mean;
  // Error of a query's squared distance to the centroid c of a part, relative to the sum of (|x - c| + |x| / 4) |c|. CUDA
  // has each channel of c as a sum of two 16-bit numbers, which leaves 2^-16 of it at most: 2^-15 |x - c| |c| of the
  // distance. Its sums of products err by 2^-18 of |x| |c| at most, twice in the distance.
  double split;
  double mean;  // error of a centroid, relative to max(1, its size)
  double lse;   // error of a log-sum-exp, relative to 1 + its size
  // Of whole calls.
  std::vector<const char*> kernels;  // values of the setting `kernel`
  double equal_out, equal_lse;       // between a call that keeps every key and a dense one
  double density;                    // by which a target may be missed
  double other_keys;                 // share of queries whose keys may not be the float64 rule's
  // Error of an output of size about 3: half a unit in the last place, and twice that for P.
  static double out(DType dtype) { return dtype == DType::f32 ? 2e-5 : dtype == DType::f16 ? 4e-3 : 3e-2; }
  // Unit roundoff to which an assignment holds centroids, once their mean is subtracted.
  double centroid_rounding(const Exec& exec, DType dtype) const {
    if (exec.device != nullptr) return dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
    return dtype == DType::bf16 && exec.attend_kernels_bf16 != nullptr ? 0x1p-8 : 0;
  }
};
// Those of the backend that this process tests: the environment's SCOPE_BACKEND, cpu unless it says cuda.
const Limits& limits();
bool testing_cuda();

// Every way to run CUDA stages here: kernels for this device and portable ones, these also within the shared memory of
// consumer GPUs, on two streams each. None without a GPU.
struct DeviceMachine {
  const char* name;
  std::vector<Exec> streams;
};
std::vector<DeviceMachine> device_machines();

// The one that this process tests.
const Backend& backend();

// What the scratch of these arguments follows from.
Sizes sizes_of(const GroupArgs& args);
Sizes sizes_of(const SplitArgs& args);
Sizes sizes_of(const EncodeArgs& args);
Sizes sizes_of(const CoclusterArgs& args);
Sizes sizes_of(const CompensateArgs& args);
Sizes sizes_of(const WeighArgs& args);
Sizes sizes_of(const TailArgs& args);
Sizes sizes_of(const AttendArgs& args);

// Each takes heads with memory of their own. A head alone runs there on the CPU. Several, or any on a device, are copied
// into one chunk with canaries between them; then the stage runs, every other time once more (on a device: as a graph that
// is replayed); then canaries and inputs must be intact, and the outputs come back. Between one head's rows and the next's
// are `head_gap` elements; at kHeadGap, a row with enough padding has the other heads there: [tokens, heads, dim].
inline constexpr int64_t kHeadGap = 24;
void run_group(const Exec& exec, std::span<const GroupArgs> heads, int64_t head_gap = kHeadGap);
void run_split(const Exec& exec, std::span<const SplitArgs> heads, int64_t head_gap = kHeadGap);
void run_encode(const Exec& exec, std::span<const EncodeArgs> heads, int64_t head_gap = kHeadGap);
void run_cocluster(const Exec& exec, std::span<const CoclusterArgs> heads, int64_t head_gap = kHeadGap);
void run_score(const Exec& exec, std::span<const ScoreArgs> heads, int64_t head_gap = kHeadGap);
void run_compensate(const Exec& exec, std::span<const CompensateArgs> heads, int64_t head_gap = kHeadGap);
// weigh, then keep.
void run_select(const Exec& exec, std::span<const KeepArgs> heads, int64_t head_gap = kHeadGap);
// weigh, `chunk` heads at a time, then solve for all of them, then keep; rho: [1] out.
void run_select_sample(const Exec& exec, std::span<const KeepArgs> heads, int64_t chunk, double* rho);
void run_tail(const Exec& exec, std::span<const TailArgs> heads, int64_t head_gap = kHeadGap);
void run_attend(const Exec& exec, std::span<const AttendArgs> heads, int64_t head_gap = kHeadGap);
// The buffer is the CPU's alone, and may be null on a device.
void run_score_rows(const Exec& exec, const Proxy& proxy, int64_t first, int64_t n, float* out, int64_t stride,
                    float* buffer);
void run_reuse(const Exec& exec, std::span<const ReuseArgs> heads, int64_t head_gap = kHeadGap);
void run_describe(const Exec& exec, const DescribeArgs& args);
void run_finish(const Exec& exec, const FinishArgs& args);
void run_import(const Exec& exec, const ImportArgs& args);
void run_set_slot(const Exec& exec, StateSlot* slot, StateSlot value);
// `state` is `bytes` long, with the slot at `slot` in it.
void run_check_slot(const Exec& exec, const std::byte* state, int64_t bytes, const void* header, int64_t slot,
                    StateSlot expected, uint32_t* status);
void run_fill(const Exec& exec, uint32_t* to, int64_t step, uint32_t value, int64_t count, int64_t rows);
void run_copy(const Exec& exec, const uint32_t* from, int64_t from_step, uint32_t* to, int64_t to_step, int64_t count,
              int64_t rows);
void run_round_to(const Exec& exec, DType type, const float* from, float* to, int64_t count);
void run_convert(const Exec& exec, const void* from, DType from_type, void* to, DType to_type, int64_t count);
void run_scatter(const Exec& exec, const int32_t* from, int64_t from_step, const int32_t* rows, int64_t count, int32_t* to,
                 int64_t to_step, int64_t heads);
// A device reaches K-means through group (tensor 0, all channels in order) and encode (tensor 1, subspace 0).
void run_kmeans(const Exec& exec, const KMeansArgs& args);
int64_t kmeans_scratch(const Exec& exec, const KMeansArgs& args);

}  // namespace scope::test
