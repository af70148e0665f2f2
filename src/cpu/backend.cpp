// The CPU's row of the backend table, and what happens around a call: instruction sets, times, checks, memory.
#include "cpu/backend.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <new>

#include "core/numeric.h"
#include "cpu/bookkeeping.h"
#include "cpu/kernels.h"
#include "stages/choices.h"

namespace scope {

namespace cpu {

namespace {

// Wall time, by moment.
class WallClock final : public Clock {
 public:
  void mark(const Exec& exec, Moment moment) override {
    const auto now = std::chrono::steady_clock::now();
    if (moment == Moment::check) {  // every call begins with it, even after one that failed midway
      std::fill_n(seconds_, kMoments, 0.0);
      call_ = exec.call;
    } else {
      seconds_[static_cast<int>(moment_)] += std::chrono::duration<double>(now - since_).count();
    }
    moment_ = moment;
    since_ = now;
  }

  bool times(const Exec& exec, double* seconds) const override {
    std::copy_n(seconds_, kMoments, seconds);
    return call_ != nullptr && call_ == exec.call && moment_ == Moment::end;
  }

 private:
  const void* call_ = nullptr;
  Moment moment_ = Moment::end;
  std::chrono::steady_clock::time_point since_;
  double seconds_[kMoments] = {};
};

constexpr int64_t kMostTokens = (int64_t{1} << 31) - 64;  // token positions are 32-bit in the selection format
constexpr std::align_val_t kAlignment{Arena::kAlignment};

std::string set_names() {
  std::string names;
  for (const InstructionSet& set : instruction_sets()) names.append(names.empty() ? "" : ", ").append(set.name);
  return names;
}

Machine open(const ContextOptions& options, ThreadPool& pool) {
  const std::string& wanted = options.instruction_set;
  const auto sets = instruction_sets();
  const auto set =
      std::find_if(sets.begin(), sets.end(), [&](const auto& each) { return wanted == "auto" || wanted == each.name; });
  require(set != sets.end(), Status::unsupported, "instruction_set: got \"{}\", this machine has auto, {}", wanted,
          set_names());
  const auto clock = std::make_shared<WallClock>();
  Machine machine{.exec = {}, .name = set->name, .device = "", .parts = clock};
  machine.exec.pool = &pool;
  machine.exec.kernels = set->kernels;
  machine.exec.attend_kernels = set->attend;
  if (machine.name == "avx512") {
    machine.exec.attend_kernels_bf16 = bf16_dot_kernels();
    machine.exec.byte_kernels = byte_kernels();
  }
  machine.exec.clock = clock.get();
  return machine;
}

bool present() { return true; }

std::vector<std::string> inventory() {
  return {fmt::format("instruction sets  {}", set_names()),
          fmt::format("bf16 dot products {}", bf16_dot_kernels() != nullptr ? "yes" : "no"),
          fmt::format("products          {}", byte_kernels() != nullptr ? "bf16, qk8 of bf16 inputs" : "bf16")};
}

void configure(Exec& exec, std::string_view kernels, DType dtype, Products products) {
  require(kernels == "auto", Status::unsupported, "kernel: {} is a CUDA kernel, and this context runs on the CPU", kernels);
  require(products != Products::qk8 || (dtype == DType::bf16 && exec.byte_kernels != nullptr), Status::unsupported,
          "products: cpu has no {} for {} inputs on {}, expected bf16 and AVX-512 with BF16 and VNNI", row(products).name,
          dtype_name(dtype), exec.kernels->name);
}

const char* kernel(const Exec& exec) { return exec.kernels->name; }

const char* arithmetic(const Exec& exec, DType dtype, Products products) {
  return products == Products::qk8 ? "s8+bf16" : attend_kernels(exec, dtype).name;
}

// Threads share one head's work, and its scratch serves the next.
int64_t chunk(int64_t, int64_t, const std::function<int64_t(int64_t)>&) { return 1; }

int enter(const Exec&) { return 0; }
void leave(int) {}
bool capturing(const Exec&) { return false; }

std::shared_ptr<Clock> make_clock() { return std::make_shared<WallClock>(); }

void check_finite(const Exec& exec, const char* name, const TensorView& x, const int64_t* lengths, const uint32_t* valid) {
  std::atomic<int64_t> bad{-1};
  constexpr int64_t kRows = 2048;
  const int64_t blocks = ceil_div(x.tokens, kRows);
  exec.pool->run(x.batch * x.heads * blocks, [&](int64_t i, int) {
    const int64_t head = i / blocks, b = head / x.heads, first = i % blocks * kRows;
    const int64_t end = std::min(first + kRows, lengths == nullptr ? x.tokens : lengths[b]);
    const uint32_t* bits = valid == nullptr ? nullptr : valid + b * mask_words(x.tokens);
    int32_t rows[kRows];
    int64_t n = 0;
    for (int64_t t = first; t < end; ++t) {
      if (bits == nullptr || mask_bit(bits, t)) rows[n++] = static_cast<int32_t>(t);
    }
    if (n > 0 && !exec.kernels->all_within(x.head(b, head % x.heads), rows, n, kMostMagnitude)) bad = head;
  });
  require(bad < 0, Status::non_finite, "{}: NaN, Inf or a magnitude over 1e18 among the valid tokens of sample {}, head {}",
          name, bad / x.heads, bad % x.heads);
}

void read(const Exec&, const void* from, void* host, int64_t bytes) {
  if (bytes > 0) std::memcpy(host, from, static_cast<size_t>(bytes));
}
void write(const Exec&, const void* host, void* to, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, host, static_cast<size_t>(bytes));
}

void* allocate(const Exec&, int64_t bytes) { return ::operator new(static_cast<size_t>(bytes), kAlignment); }
void release(void* memory) { ::operator delete(memory, kAlignment); }

constexpr Backend kCpu = {
    .name = "cpu",
    .can = {.dtypes = {DType::f32, DType::f16, DType::bf16},
            .most_dim = 256,
            .dim_multiple = 1,
            .row_bytes = 0,
            .most_tokens = kMostTokens,
            .most_selected_keys = kMostTokens,
            .most_whole_codes = 65536,
            .profiles = true,
            .host = true,
            .groupings = {Grouping::kmeans, Grouping::raster, Grouping::blocks, Grouping::cocluster},
            .encodings = {Encoding::kmeans, Encoding::blocks, Encoding::cocluster, Encoding::means},
            .proxies = {ProxyKind::codes, ProxyKind::exact},
            .rules = {Rule::fixed, Rule::top_p, Rule::hybrid, Rule::online, Rule::target, Rule::clusters, Rule::blocks_topk,
                      Rule::blocks_cdf, Rule::error_aware, Rule::deviation},
            .target_scopes = {TargetScope::head, TargetScope::sample},
            .tails = {Tail::none, Tail::first_order, Tail::centroids, Tail::mean, Tail::means},
            .products = {Products::bf16, Products::qk8},
            .mean_in_keep = true},
    .open = open,
    .present = present,
    .inventory = inventory,
    .configure = configure,
    .kernel = kernel,
    .arithmetic = arithmetic,
    .chunk = chunk,
    .group = group,
    .group_scratch = group_scratch,
    .split = split,
    .split_scratch = split_scratch,
    .encode = encode,
    .encode_scratch = encode_scratch,
    .cocluster = cocluster,
    .cocluster_scratch = cocluster_scratch,
    .score = score,
    .compensate = compensate,
    .compensate_scratch = compensate_scratch,
    .weigh = weigh,
    .solve = solve,
    .solve_scratch = solve_scratch,
    .keep = keep,
    .weights_bytes = weights_bytes,
    .weigh_scratch = weigh_scratch,
    .tail = tail,
    .tail_scratch = tail_scratch,
    .attend = attend,
    .attend_scratch = attend_scratch,
    .describe = describe,
    .finish = finish,
    .import_selection = import_selection,
    .reuse = reuse,
    .set_slot = set_slot,
    .check_slot = check_slot,
    .fill = fill,
    .copy = copy,
    .round_to = round_to,
    .convert = convert,
    .scatter = scatter,
    .enter = enter,
    .leave = leave,
    .capturing = capturing,
    .make_clock = make_clock,
    .check_finite = check_finite,
    .read = read,
    .write = write,
    .allocate = allocate,
    .release = release,
};

}  // namespace

}  // namespace cpu

const Backend* cpu_backend() { return &cpu::kCpu; }

}  // namespace scope
