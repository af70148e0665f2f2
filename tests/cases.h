// Seeded cases for the stage tests: sizes, dtypes, memory layouts, guarded buffers and every instruction set.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "backends.h"
#include "core/numeric.h"
#include "core/parallel.h"
#include "core/random.h"
#include "core/tensor.h"
#include "cpu/kernels.h"
#include "guarded.h"
#include "stages/exec.h"
#include "support.h"

namespace scope::test {

// Draws in sequence from one counter-based stream.
class Random {
 public:
  explicit Random(uint64_t seed) : stream_{.seed = seed, .purpose = 3} {}
  int64_t below(int64_t n) { return stream_.index(next_++, n); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  double uniform() { return stream_.uniform(next_++); }
  bool chance(double p) { return uniform() < p; }
  // The sum of four 16-bit uniforms: close enough to normal, and cheap.
  double normal() {
    const uint64_t bits = stream_.bits(next_++);
    double sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<double>((bits >> (16 * i)) & 0xffff);
    return (sum / 65535 - 2) * 1.7320508;
  }
  template <class T>
  T pick(const std::vector<T>& from) {
    return from[static_cast<size_t>(below(static_cast<int64_t>(from.size())))];
  }

 private:
  RandomStream stream_;
  uint64_t next_ = 0;
};

// Writes `value` as element `channel` of a row.
inline void put(std::byte* row, DType dtype, int64_t channel, double value) {
  const auto single = static_cast<float>(value);
  if (dtype == DType::f32) {
    reinterpret_cast<float*>(row)[channel] = single;
  } else {
    reinterpret_cast<uint16_t*>(row)[channel] = dtype == DType::bf16 ? f32_to_bf16(single) : f32_to_f16(single);
  }
}

// [tokens, dim] in any dtype, with a row stride and a start that need not be aligned; padding is NaN.
class Rows {
 public:
  Rows(DType dtype, int64_t tokens, int64_t dim, int64_t padding = 0, int64_t misalign = 0)
      : view_{nullptr, dtype, tokens, dim, dim + padding},
        memory_(static_cast<size_t>((tokens * (dim + padding) + misalign) * dtype_bytes(dtype)), std::byte{0xff}) {
    view_.data = memory_.data() + misalign * dtype_bytes(dtype);
  }
  // Normal values, in a random layout unless `padding` is given.
  Rows(Random& random, DType dtype, int64_t tokens, int64_t dim, double deviation)
      : Rows(dtype, tokens, dim, random_padding(random, dim), random.pick(limits().alignments)) {
    fill(random, deviation);
  }
  Rows(Random& random, DType dtype, int64_t tokens, int64_t dim, double deviation, int64_t padding)
      : Rows(dtype, tokens, dim, padding) {
    fill(random, deviation);
  }
  Rows(Rows&&) = default;  // the view points into heap memory, which a move keeps
  Rows& operator=(Rows&&) = default;
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

  const RowsView& view() const { return view_; }
  MutableRowsView mutable_view() {
    return {const_cast<void*>(view_.data), view_.dtype, view_.tokens, view_.dim, view_.row_stride};
  }
  void set(int64_t token, int64_t channel, double value) { put(mutable_view().row(token), view_.dtype, channel, value); }
  void copy_row(int64_t to, const RowsView& other, int64_t from) {
    std::memcpy(mutable_view().row(to), other.row(from), static_cast<size_t>(view_.dim * dtype_bytes(view_.dtype)));
  }
  void copy_row(int64_t to, int64_t from) { copy_row(to, view_, from); }

 private:
  void fill(Random& random, double deviation) {
    for (int64_t t = 0; t < view_.tokens; ++t) {
      for (int64_t c = 0; c < view_.dim; ++c) set(t, c, deviation * random.normal());
    }
  }
  static int64_t random_padding(Random& random, int64_t dim) {
    const int64_t padding = random.pick(limits().paddings);
    return padding < 0 ? dim : padding;
  }
  RowsView view_;
  std::vector<std::byte> memory_;
};

// Virtual memory that costs nothing until touched, for strides past 2^31 elements.
class SparseMemory {
 public:
  explicit SparseMemory(int64_t bytes)
      : bytes_(static_cast<size_t>(bytes)),
        data_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~SparseMemory() {
    if (ok()) munmap(data_, bytes_);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  bool ok() const { return data_ != MAP_FAILED; }
  void* data() const { return data_; }

 private:
  size_t bytes_;
  void* data_;
};

inline std::vector<int32_t> all_rows(int64_t count) {
  std::vector<int32_t> rows(static_cast<size_t>(count));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

inline std::vector<int32_t> shuffled(Random& random, int64_t count) {
  auto order = all_rows(count);
  for (int64_t i = count - 1; i > 0; --i)
    std::swap(order[static_cast<size_t>(i)], order[static_cast<size_t>(random.below(i + 1))]);
  return order;
}

// `count` of `tokens`, ascending.
inline std::vector<int32_t> subset(Random& random, int64_t tokens, int64_t count) {
  auto rows = shuffled(random, tokens);
  rows.resize(static_cast<size_t>(count));
  std::sort(rows.begin(), rows.end());
  return rows;
}

// One way to run a backend: an instruction set, with or without bf16 dot products; or a device's kernels.
struct Machine {
  std::string name;
  Exec exec;                    // without a pool
  std::vector<Exec> more = {};  // the same on other streams
  Exec with(ThreadPool& pool) const {
    Exec result = exec;
    result.pool = &pool;
    return result;
  }
};

inline const std::vector<Machine>& machines() {
  static const std::vector<Machine> all = [] {
    std::vector<Machine> result;
    if (testing_cuda()) {
      for (const auto& [name, streams] : device_machines()) result.push_back({name, streams[0], streams});
      return result;
    }
    for (const auto& set : cpu::instruction_sets())
      result.push_back({set.name, {nullptr, set.kernels, set.attend, nullptr}});
    Exec best = result.front().exec;
    best.attend_kernels_bf16 = cpu::bf16_dot_kernels();
    best.byte_kernels = cpu::byte_kernels();
    if (best.attend_kernels_bf16 != nullptr) result.push_back({"bf16dot", best});
    return result;
  }();
  return all;
}

inline ThreadPool& pool(int threads) {
  static std::map<int, std::unique_ptr<ThreadPool>> pools;
  auto& entry = pools[threads];
  if (!entry) entry = std::make_unique<ThreadPool>(threads);
  return *entry;
}

// Counts what ran and prints it when the program ends.
class Tally {
 public:
  void add(const char* stage, DType dtype, const std::string& machine, int64_t tokens) {
    const char* size = tokens >= 4097   ? ">=4097"
                       : tokens >= 1025 ? "1025-4096"
                       : tokens >= 257  ? "257-1024"
                       : tokens >= 97   ? "97-256"
                       : tokens >= 8    ? "8-96"
                       : tokens >= 1    ? "1-7"
                                        : "0";
    for (const std::string& key :
         {std::string("all"), std::string(dtype_name(dtype)), machine, "tokens " + std::string(size)}) {
      ++counts_[stage][key];
    }
  }
  ~Tally() {
    for (const auto& [stage, counts] : counts_) {
      fmt::print("cases of {}:", stage);
      for (const auto& [key, n] : counts) fmt::print("  {} {}", key, n);
      fmt::print("\n");
    }
  }

 private:
  std::map<std::string, std::map<std::string, int64_t>> counts_;
};

// A machine without a GPU has nothing to test on one.
class SkipWithoutMachine : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo&) override {
    if (machines().empty()) GTEST_SKIP() << "[GPU tests skipped]";
  }
};
inline const bool skips_without_machine = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new SkipWithoutMachine);
  return true;
}();

// Scaled by SCOPE_CASES, so that slow builds can run fewer.
inline int64_t scaled(int64_t cases) {
  const char* text = std::getenv("SCOPE_CASES");
  return std::max<int64_t>(1, std::llround(static_cast<double>(cases) * (text == nullptr ? 1.0 : number(text))));
}

struct Case {
  int64_t index;
  Random random;
  DType dtype;
  int64_t tokens, dim;
  const Machine& machine;
  Exec exec;
  uint8_t poison;
};

// Runs body on `cases` seeded cases; some have 1,025 tokens or more. Stops at the first that fails, naming it.
template <class Body>
void each_case(const char* stage, int64_t cases, const Body& body) {
  static Tally tally;
  const auto& all = machines();
  const int64_t share = std::llround(limits().case_share * static_cast<double>(cases));
  for (int64_t i = 0; i < scaled(share); ++i) {
    Random random(static_cast<uint64_t>(i) + 1);
    const auto dtype = random.pick(limits().dtypes);
    const bool is_long = i % limits().long_every == limits().long_every - 1;
    const int64_t tokens = is_long ? random.pick<int64_t>({1025, 1025, 1025, 4097}) : random.pick(limits().sizes);
    const auto dim = random.pick(limits().dims);
    const Machine& machine = all[static_cast<size_t>(i) % all.size()];
    Case the_case{i,
                  random,
                  dtype,
                  tokens,
                  dim,
                  machine,
                  machine.with(pool(random.chance(0.8) ? 1 : 3)),
                  static_cast<uint8_t>(i % 2 == 0 ? 0xff : 0xa5)};
    SCOPED_TRACE(fmt::format("{} case {}: {} tokens {} dim {} {} threads {}", stage, i, dtype_name(dtype), tokens, dim,
                             machine.name, the_case.exec.pool->threads()));
    ASSERT_NO_FATAL_FAILURE(body(the_case));
    tally.add(stage, dtype, machine.name, the_case.tokens);  // a body may change it
    if (testing::Test::HasFailure()) return;
  }
}

// More than a CUDA grid has in y or z; blocks of up to 128 tokens.
inline constexpr int64_t kManyGroups = 66'000, kManyTokens = kManyGroups * 128 + 7;

// Runs body once on every machine.
template <class Body>
void each_machine(const Body& body, int threads = 2) {
  for (const Machine& machine : machines()) {
    SCOPED_TRACE(machine.name);
    ASSERT_NO_FATAL_FAILURE(body(machine.with(pool(threads))));
  }
}

// Runs body (Exec -> bytes) for several thread counts, on every stream, and many times; every result must have the same
// bits.
template <class Body>
void expect_repeatable(const Body& body) {
  for (const Machine& machine : machines()) {
    SCOPED_TRACE(machine.name);
    const std::vector<uint8_t> first = body(machine.with(pool(1)));
    for (const int threads : {2, 3, 5}) EXPECT_TRUE(body(machine.with(pool(threads))) == first) << threads << " threads";
    std::vector<Exec> execs = machine.more;
    if (execs.empty()) execs = {machine.with(pool(3))};
    for (int64_t run = 0; run < scaled(limits().runs); ++run) {
      ASSERT_TRUE(body(execs[static_cast<size_t>(run) % execs.size()]) == first) << "run " << run;
    }
  }
}

// Runs the heads as one chunk between canaries, on a device also with their rows more than 2^31 elements apart, and each
// alone: the same bits. Output(exec, problem) has the arguments of one call and the memory for its results.
template <class Output, class Args, class Run>
void expect_chunk_equals_heads(const std::vector<Args>& problems, const Run& run) {
  each_machine([&](const Exec& exec) {
    for (const int64_t gap : {kHeadGap, (int64_t{1} << 30) + 8}) {
      if (gap != kHeadGap && exec.device == nullptr) continue;
      SCOPED_TRACE(fmt::format("heads {} elements apart", gap));
      std::vector<std::unique_ptr<Output>> chunk;
      std::vector<Args> heads;
      for (const Args& problem : problems) {
        chunk.push_back(std::make_unique<Output>(exec, problem));
        heads.push_back(chunk.back()->args);
      }
      run(exec, heads, gap);
      for (size_t h = 0; h < problems.size(); ++h) {
        Output alone(exec, problems[h]);
        run(exec, {&alone.args, 1}, kHeadGap);
        EXPECT_TRUE(alone.all() == chunk[h]->all()) << "head " << h;
      }
    }
  });
}

}  // namespace scope::test
