// A pool of threads that runs numbered chunks; results never depend on which thread ran which chunk.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace scope {

inline constexpr int kMostThreads = 1024;

// Threads of somebody else: calls task(data, i) once for every i in [0, tasks), on any threads, and returns when all are
// done.
struct ForeignThreads {
  void (*run)(void* pool, int32_t tasks, void (*task)(void* data, int32_t index), void* data) = nullptr;
  void* pool = nullptr;
};

class ThreadPool {
 public:
  // `threads` counts the caller, up to kMostThreads; 0 means one per available core. With foreign threads it is how many
  // tasks they are given at a time, and none is started here.
  explicit ThreadPool(int threads, const ForeignThreads& foreign = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Calls body(chunk, thread) once for each chunk in [0, chunks), thread in [0, threads()). Returns when all are
  // done; the first exception is rethrown here and stops chunks that have not begun.
  template <class Body>
  void run(int64_t chunks, const Body& body) {
    // A plain pointer pair: a std::function may allocate, and calls must not.
    run_chunks(chunks, &body,
               [](const void* b, int64_t chunk, int thread) { (*static_cast<const Body*>(b))(chunk, thread); });
  }

 private:
  using Call = void (*)(const void* body, int64_t chunk, int thread);
  void run_chunks(int64_t chunks, const void* body, Call call);
  void work(int thread);
  void drain(int thread);
  void run_foreign();
  void run_task(int32_t index);

  int threads_;
  ForeignThreads foreign_;
  std::mutex mutex_;
  std::condition_variable start_, done_;
  const void* body_ = nullptr;
  Call call_ = nullptr;
  int64_t chunks_ = 0, next_ = 0;
  int busy_ = 0;  // workers that are not done with this round, or foreign tasks that run
  uint64_t round_ = 0;
  bool stop_ = false;
  std::exception_ptr error_;
  std::vector<std::thread> workers_;
  std::vector<bool> in_use_;  // indices of foreign tasks that run
};

// Cores this process may use.
int available_cores();

}  // namespace scope
