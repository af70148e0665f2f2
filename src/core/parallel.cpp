// The thread pool behind every parallel loop.
#include "core/parallel.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace scope {

int available_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

ThreadPool::ThreadPool(int threads) {
  require(threads >= 0 && threads <= kMostThreads, Status::invalid_argument, "threads: got {}, expected 0 (all cores) to {}",
          threads, kMostThreads);
  const int total = threads == 0 ? available_cores() : threads;
  workers_.reserve(static_cast<size_t>(total));
  try {
    for (int i = 1; i < total; ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (...) {  // no thread, or no memory for one: those that run must end before this object does
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    start_.notify_all();
    for (auto& worker : workers_) worker.join();
    fail(Status::out_of_memory, "threads: could start {} of {}", workers_.size() + 1, total);
  }
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (auto& worker : workers_) worker.join();
}

// Chunks are taken under the lock: a chunk is thousands of operations, so contention is negligible.
void ThreadPool::drain(int thread) {
  std::unique_lock lock(mutex_);
  while (next_ < chunks_ && !error_) {
    const int64_t chunk = next_++;
    lock.unlock();
    std::exception_ptr error;
    try {
      call_(body_, chunk, thread);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error && !error_) error_ = error;
  }
}

void ThreadPool::work(int thread) {
  uint64_t seen = 0;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      start_.wait(lock, [&] { return stop_ || round_ != seen; });
      if (stop_) return;
      seen = round_;
    }
    drain(thread);
    {
      const std::lock_guard lock(mutex_);
      --busy_;
    }
    done_.notify_one();
  }
}

void ThreadPool::run_chunks(int64_t chunks, const void* body, Call call) {
  if (chunks <= 0) return;
  if (workers_.empty() || chunks == 1) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) call(body, chunk, 0);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    body_ = body;
    call_ = call;
    chunks_ = chunks;
    next_ = 0;
    error_ = nullptr;
    busy_ = static_cast<int>(workers_.size());
    ++round_;
  }
  start_.notify_all();
  drain(0);
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return busy_ == 0; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

}  // namespace scope
