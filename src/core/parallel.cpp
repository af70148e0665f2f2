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

ThreadPool::ThreadPool(int threads, const ForeignThreads& foreign) : foreign_(foreign) {
  require(threads >= 0 && threads <= kMostThreads, Status::invalid_argument, "threads: got {}, expected 0 (all cores) to {}",
          threads, kMostThreads);
  const int total = threads_ = threads == 0 ? available_cores() : threads;
  if (foreign_.run != nullptr) {
    in_use_.resize(static_cast<size_t>(total));
    return;
  }
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
  if (threads_ == 1 || chunks == 1) {
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
  if (foreign_.run != nullptr) {
    run_foreign();
    return;
  }
  start_.notify_all();
  drain(0);
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return busy_ == 0; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

// Foreign threads may call a task late, twice or not at all. No chunk runs after this returned, none runs twice, no two
// share a thread's index, and chunks that nobody ran are an error.
void ThreadPool::run_foreign() {
  const auto tasks = static_cast<int32_t>(std::min<int64_t>(threads_, chunks_));
  foreign_.run(
      foreign_.pool, tasks, [](void* self, int32_t index) { static_cast<ThreadPool*>(self)->run_task(index); }, this);
  std::unique_lock lock(mutex_);
  const int64_t left = error_ ? 0 : chunks_ - next_;
  chunks_ = next_;
  done_.wait(lock, [&] { return busy_ == 0; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  require(left == 0, Status::invalid_argument, "run_tasks: it returned before its {} tasks had run", tasks);
}

void ThreadPool::run_task(int32_t index) {
  {
    const std::lock_guard lock(mutex_);
    if (index < 0 || index >= threads_ || in_use_[static_cast<size_t>(index)]) return;
    in_use_[static_cast<size_t>(index)] = true;
    ++busy_;
  }
  drain(index);
  {
    const std::lock_guard lock(mutex_);
    in_use_[static_cast<size_t>(index)] = false;
    --busy_;
  }
  done_.notify_one();
}

}  // namespace scope
