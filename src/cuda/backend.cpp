// CUDA's row of the backend table, and what the host does around a call: the current device, times, reads.
#include "cuda/backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "core/numeric.h"
#include "cuda/device.h"
#include "cuda/errors.h"
#include "cuda/memory.h"
#include "cuda/stages.h"
#include "stages/choices.h"

namespace scope {

namespace cuda {

namespace {

cudaStream_t stream(const Exec& exec) { return static_cast<cudaStream_t>(exec.stream); }

bool capturing(const Exec& exec) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream(exec), &status), "stream");
  return status != cudaStreamCaptureStatusNone;
}

// Events at the moments. A call makes those that are not there yet.
class EventClock final : public Clock {
 public:
  EventClock() = default;
  // All of them at once, so that no call makes one.
  explicit EventClock(int device) {
    int previous = 0;
    check(cudaGetDevice(&previous), "cudaGetDevice");
    check(cudaSetDevice(device), "cudaSetDevice");
    for (; made_ < kMost; ++made_) {
      if (cudaEventCreate(&events_[made_]) != cudaSuccess) break;
    }
    const cudaError_t error = cudaGetLastError();
    cudaSetDevice(previous);
    if (made_ == kMost) return;
    destroy();
    check(error, "cudaEventCreate");
  }
  ~EventClock() override { destroy(); }

  void mark(const Exec& exec, Moment moment) override {
    if (moment == Moment::check) {  // every call begins with it, even after one that failed midway
      used_ = 0;
      call_ = exec.call;
      on_ = !capturing(exec);
    }
    if (used_ == kMost) on_ = false;  // more chunks than events: no times rather than wrong ones
    if (!on_) return;
    if (used_ == made_) {
      check(cudaEventCreate(&events_[made_]), "cudaEventCreate");
      ++made_;
    }
    check(cudaEventRecord(events_[used_], stream(exec)), "cudaEventRecord");
    moments_[used_++] = moment;
  }

  bool times(const Exec& exec, double* seconds) const override {
    std::fill_n(seconds, kMoments, 0.0);
    if (!on_ || used_ < 2 || call_ != exec.call) return false;
    for (int i = 0; i + 1 < used_; ++i) {
      float ms = 0;
      check(cudaEventElapsedTime(&ms, events_[i], events_[i + 1]), "cudaEventElapsedTime");
      seconds[static_cast<int>(moments_[i])] += 1e-3 * static_cast<double>(ms);
    }
    return true;
  }

 private:
  void destroy() {
    while (made_ > 0) cudaEventDestroy(events_[--made_]);
  }

  static constexpr int kMost = 512;
  cudaEvent_t events_[kMost] = {};
  Moment moments_[kMost] = {};
  const void* call_ = nullptr;
  int made_ = 0, used_ = 0;
  bool on_ = false;
};

// What a context on a GPU keeps alive.
struct Parts {
  explicit Parts(const Device& found) : device(found), clock(found.index) {}
  Device device;
  EventClock clock;
};

Machine open(const ContextOptions& options, ThreadPool& pool) {
  const auto found = devices();
  require(!found.empty(), Status::unsupported, "backend: there is no GPU, or no driver for it");
  const auto at = std::find_if(found.begin(), found.end(), [&](const Device& x) { return x.index == options.device; });
  require(at != found.end(), Status::invalid_argument, "device: got {}, expected 0..{}", options.device, found.back().index);
  require(at->major >= 8, Status::unsupported, "device: {} is sm_{}{}, expected sm_80 or later", at->name, at->major,
          at->minor);
  auto parts = std::make_shared<Parts>(*at);
  Machine machine{.exec = {}, .name = fmt::format("sm_{}{}", at->major, at->minor), .device = at->name, .parts = parts};
  machine.exec.pool = &pool;
  machine.exec.device = &parts->device;
  machine.exec.memory_bytes = at->memory_bytes;
  machine.exec.clock = &parts->clock;
  return machine;
}

bool present() {
  const auto found = devices();
  return std::any_of(found.begin(), found.end(), [](const Device& x) { return x.major >= 8; });
}

std::vector<std::string> inventory() {
  std::vector<std::string> lines;
  for (const Device& x : devices()) {
    lines.push_back(fmt::format("GPU {}             {}, sm_{}{}, {} multiprocessors, {:.0f} GiB{}", x.index, x.name, x.major,
                                x.minor, x.multiprocessors, static_cast<double>(x.memory_bytes) / (1 << 30),
                                x.major < 8    ? ": too old, sm_80 is needed"
                                : x.major == 9 ? "; products bf16, qk8, qkv8"
                                               : "; products bf16, qk8"));
  }
  if (lines.empty()) lines.push_back("GPU               none, or no driver for it");
  return lines;
}

const char* kernel(const Exec& exec) { return exec.wgmma ? "wgmma" : "portable"; }

void configure(Exec& exec, std::string_view kernels, DType, Products products) {
  require(kernels != "wgmma" || exec.device->major == 9, Status::unsupported, "kernel: wgmma needs sm_90, {} is sm_{}{}",
          exec.device->name, exec.device->major, exec.device->minor);
  exec.wgmma = exec.device->major == 9 && kernels != "portable";
  require(products != Products::qkv8 || exec.wgmma, Status::unsupported, "products: the {} kernel has no {}", kernel(exec),
          row(products).name);
}

const char* arithmetic(const Exec&, DType dtype, Products products) {
  switch (products) {
    case Products::bf16:
      return dtype_name(dtype);
    case Products::qk8:
      return dtype == DType::bf16 ? "s8+bf16" : "s8+f16";
    case Products::qkv8:
      return "s8+e4m3";
  }
  return "";
}

// As few chunks as fit the limit, and these of equal size.
int64_t chunk(int64_t heads, int64_t limit, const std::function<int64_t(int64_t)>& bytes) {
  require(bytes(1) <= limit, Status::invalid_argument, "workspace_limit: got {} MiB, the least is {} MiB", limit >> 20,
          ceil_div(bytes(1), 1 << 20));
  int64_t fits = 1, most = heads;  // more heads never need less
  while (fits < most) {
    const int64_t middle = (fits + most + 1) / 2;
    if (bytes(middle) <= limit) {
      fits = middle;
    } else {
      most = middle - 1;
    }
  }
  return ceil_div(heads, ceil_div(heads, fits));
}

void leave(int previous) {
  int now = 0;
  if (cudaGetDevice(&now) == cudaSuccess && now != previous) cudaSetDevice(previous);
}

int enter(const Exec& exec) {
  int previous = 0;
  check(cudaGetDevice(&previous), "cudaGetDevice");
  if (previous != exec.device->index) check(cudaSetDevice(exec.device->index), "cudaSetDevice");
  const cudaError_t before = cudaGetLastError();  // the host's own failed launches are not ours to report
  if (before != cudaSuccess && status_of(before) == Status::device_lost) {
    leave(previous);
    check(before, "the device was lost before this call");
  }
  return previous;
}

std::shared_ptr<Clock> make_clock() { return std::make_shared<EventClock>(); }

void read(const Exec& exec, const void* from, void* host, int64_t bytes) {
  check(cudaMemcpyAsync(host, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream(exec)), "read");
  check(cudaStreamSynchronize(stream(exec)), "the device");
}

void write(const Exec& exec, const void* host, void* to, int64_t bytes) {
  check(cudaMemcpyAsync(to, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream(exec)), "write");
  check(cudaStreamSynchronize(stream(exec)), "the device");
}

constexpr Backend kCuda = {
    .name = "cuda",
    .can = {.dtypes = {DType::f16, DType::bf16},
            .most_dim = 128,
            .dim_multiple = 8,
            .row_bytes = 16,
            .most_tokens = (int64_t{1} << 31) - 70000,
            .most_selected_keys = (int64_t{1} << 26) - 1,
            .most_whole_codes = kMostRankedCodes,
            .profiles = true,
            .host = false,
            .groupings = {Grouping::kmeans, Grouping::raster, Grouping::blocks, Grouping::cocluster},
            .encodings = {Encoding::kmeans, Encoding::blocks, Encoding::cocluster, Encoding::means},
            .proxies = {ProxyKind::codes, ProxyKind::exact},
            .rules = {Rule::fixed, Rule::top_p, Rule::hybrid, Rule::online, Rule::target, Rule::clusters, Rule::blocks_topk,
                      Rule::blocks_cdf, Rule::error_aware, Rule::deviation},
            .target_scopes = {TargetScope::head, TargetScope::sample},
            .tails = {Tail::none, Tail::first_order, Tail::centroids, Tail::mean, Tail::means},
            .products = {Products::bf16, Products::qk8, Products::qkv8},
            .mean_in_keep = false},
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
    .check_finite = nullptr,
    .read = read,
    .write = write,
    .allocate = [](const Exec&, int64_t bytes) { return allocate(bytes); },
    .release = release,
};

}  // namespace

void* allocate(int64_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, static_cast<size_t>(std::max<int64_t>(bytes, 1))), "device memory");
  return memory;
}
void release(void* memory) { cudaFree(memory); }

}  // namespace cuda

const Backend* cuda_backend() { return &cuda::kCuda; }

}  // namespace scope
