// The stages as the tests call them: in place on the CPU, through mirrored memory on a device.
#pragma once

#include <span>
#include <vector>

#include "stages/backend.h"
#include "stages/kmeans.h"

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
  double tail;                                // error of the tail's means and bias
  double mean;                                // error of a centroid, relative to max(1, its size)
  double lse;                                 // error of a log-sum-exp, relative to 1 + its size
  // Unit roundoff to which an assignment holds centroids, once their mean is subtracted.
  double centroid_rounding(const Exec& exec, DType dtype) const {
    if (exec.device != nullptr) return dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
    return dtype == DType::bf16 && exec.attend_kernels_bf16 != nullptr ? 0x1p-8 : 0;
  }
};
// Those of the backend that this process tests: the environment's SCOPE_BACKEND, cpu unless it says cuda.
const Limits& limits();
bool testing_cuda();

// Every way to run CUDA stages here: kernels for this device and portable ones, on two streams each. None without a GPU.
struct DeviceMachine {
  const char* name;
  std::vector<Exec> streams;
};
std::vector<DeviceMachine> device_machines();

inline const Backend& backend(const Exec& exec) { return exec.device != nullptr ? *cuda_backend() : *cpu_backend(); }

// On a device every array is copied there between canaries; then the stage runs, every other time as a graph that is
// replayed; then canaries and inputs must be intact, and the outputs come back. Between one head's rows and the next's are
// `head_gap` elements; at kHeadGap, a row with enough padding has the other heads there: [tokens, heads, dim].
inline constexpr int64_t kHeadGap = 24;
void run_group(const Exec& exec, std::span<const GroupArgs> heads, int64_t head_gap = kHeadGap);
void run_encode(const Exec& exec, std::span<const EncodeArgs> heads, int64_t head_gap = kHeadGap);
void run_score(const Exec& exec, std::span<const ScoreArgs> heads);
void run_select(const Exec& exec, std::span<const SelectArgs> heads, int64_t head_gap = kHeadGap);
void run_attend(const Exec& exec, std::span<const AttendArgs> heads, int64_t head_gap = kHeadGap);
// The buffer is the CPU's alone, and may be null on a device.
void run_score_rows(const Exec& exec, const Proxy& proxy, int64_t first, int64_t n, float* out, int64_t stride,
                    float* buffer);
void run_describe(const Exec& exec, const DescribeArgs& args);
void run_finish(const Exec& exec, const FinishArgs& args);
void run_import(const Exec& exec, const ImportArgs& args);
void run_fill(const Exec& exec, uint32_t* to, int64_t step, uint32_t value, int64_t count, int64_t rows);
void run_copy(const Exec& exec, const uint32_t* from, int64_t from_step, uint32_t* to, int64_t to_step, int64_t count,
              int64_t rows);
void run_convert(const Exec& exec, const void* from, DType from_type, void* to, DType to_type, int64_t count);
void run_scatter(const Exec& exec, const int32_t* from, int64_t from_step, const int32_t* rows, int64_t count, int32_t* to,
                 int64_t to_step, int64_t heads);
// A device reaches K-means through group (tensor 0, all channels in order) and encode (tensor 1, subspace 0).
void run_kmeans(const Exec& exec, const KMeansArgs& args);
int64_t kmeans_scratch(const Exec& exec, const KMeansArgs& args);

}  // namespace scope::test
