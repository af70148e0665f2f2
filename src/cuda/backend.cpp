// CUDA's row of the backend table, and what the host does around a call: the current device, times, reads.
#include "stages/backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda/clock.h"
#include "cuda/device.h"
#include "cuda/errors.h"
#include "cuda/memory.h"
#include "cuda/stages.h"

namespace scope {

namespace cuda {

namespace {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) fail(status_of(error), "{}: {}", what, cudaGetErrorString(error));
}

cudaStream_t stream(const Exec& exec) { return static_cast<cudaStream_t>(exec.stream); }

bool capturing(const Exec& exec) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream(exec), &status), "stream");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

// Events at the moments of the last call.
class Clock {
 public:
  explicit Clock(int device) {
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
  ~Clock() { destroy(); }
  Clock(const Clock&) = delete;
  Clock& operator=(const Clock&) = delete;

  void mark(const Exec& exec, Moment moment) {
    if (moment == Moment::check) {  // every call begins with it, even after one that failed midway
      used_ = 0;
      call_ = exec.call;
      on_ = !capturing(exec);
    }
    if (used_ == kMost) on_ = false;  // more chunks than events: no times rather than wrong ones
    if (!on_) return;
    check(cudaEventRecord(events_[used_], stream(exec)), "cudaEventRecord");
    moments_[used_++] = moment;
  }

  bool times(const Exec& exec, double* seconds) const {
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

std::shared_ptr<Clock> make_clock(int device) { return std::make_shared<Clock>(device); }

namespace {

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

void mark(const Exec& exec, Moment moment) {
  if (exec.clock != nullptr) exec.clock->mark(exec, moment);
}

bool times(const Exec& exec, double* seconds) { return exec.clock != nullptr && exec.clock->times(exec, seconds); }

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
    .group = group,
    .encode = encode,
    .score = score,
    .select = select,
    .attend = attend,
    .group_scratch = group_scratch,
    .encode_scratch = encode_scratch,
    .select_scratch = select_scratch,
    .attend_scratch = attend_scratch,
    .describe = describe,
    .finish = finish,
    .import_selection = import_selection,
    .set_slot = set_slot,
    .fill = fill,
    .copy = copy,
    .convert = convert,
    .scatter = scatter,
    .enter = enter,
    .leave = leave,
    .check_slot = check_slot,
    .mark = mark,
    .times = times,
    .read = read,
    .write = write,
};

}  // namespace

void* allocate(int64_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, static_cast<size_t>(std::max<int64_t>(bytes, 1))), "device memory");
  return memory;
}
void release(void* memory) { cudaFree(memory); }
void upload(const void* host, void* to, int64_t bytes) {
  check(cudaMemcpy(to, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice), "upload");
}
void download(const void* from, void* host, int64_t bytes) {
  check(cudaMemcpy(host, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost), "download");
}

}  // namespace cuda

const Backend* cuda_backend() { return &cuda::kCuda; }

}  // namespace scope
