// Means over the keys that groups drop, from the weights of a few proxy rows at a time.
#pragma once

#include "cpu/kernels.h"
#include "stages/tail.h"

namespace scope::cpu {

struct MeanBuffers {
  float* block;    // [threads, kKeyBlock, padded dim]
  float* buffer;   // [threads, 2, padded dim]
  float* sum;      // [threads, ProxyRows::kMost, padded dim]
  double* centre;  // [dim] the mean of the keys that take part
  uint32_t* kept;  // [threads, words of the keys that take part]

  MeanBuffers(Arena& arena, const Exec& exec, int64_t count, int64_t dim);
};

// Proxy rows [first, first + n), or the weights that became of them.
struct ProxyBlock {
  float* rows;  // [n, stride]
  int64_t stride, first, n;
};

// out [first + i] = the mean of x[j] by weights[i, j], where they are not all zero; by the products of `kernels`, which may
// use the weights up.
void weighted_mean(const Exec& exec, const AttendKernels& kernels, const MeanBuffers& at, const Proxy& proxy,
                   const RowsView& x, const ProxyBlock& weights, float* out, int thread);

// One head's mean dropped values, and how much of each its group mixes in.
class Mean {
 public:
  // Finds what the others need.
  Mean(const Exec& exec, const TailArgs& args, int64_t head, const MeanBuffers& at);

  // No group mixes anything in, until sum_up says so.
  void clear() const;
  // Of some groups, once their masks are there; the rows are used up.
  void sum_up(const ProxyBlock& weights, int thread) const;
  // Of the share that keep says a group drops of its keys, what it mixes in.
  float share_of(int64_t group, double dropped, double log_mass, int thread) const;

 private:
  template <class Body>
  void each_key(const int32_t* tokens, int64_t count, int thread, const Body& body) const;
  void set_centre() const;
  double text_mass(int64_t group, double high, int thread) const;
  const uint32_t* kept_of(int64_t group, int thread) const;

  const Exec& exec_;
  const TailArgs& args_;
  const Proxy& proxy_;
  int64_t head_;
  const MeanBuffers& at_;
};

}  // namespace scope::cpu
