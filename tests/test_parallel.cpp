// The thread pool: every chunk once, exceptions contained, and a pool that stays usable.
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/parallel.h"

namespace scope {
namespace {

TEST(ThreadPool, RunsEveryChunkOnceOnAValidThread) {
  for (const int threads : {1, 2, 3, 5, 16}) {
    ThreadPool pool(threads);
    ASSERT_EQ(pool.threads(), threads);
    for (const int64_t chunks : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> seen(static_cast<size_t>(chunks));
      std::atomic<bool> valid = true;
      pool.run(chunks, [&](int64_t chunk, int thread) {
        ++seen[static_cast<size_t>(chunk)];
        if (thread < 0 || thread >= threads) valid = false;
      });
      EXPECT_TRUE(valid);
      for (const auto& n : seen) ASSERT_EQ(n, 1);
    }
  }
}

// A thread's index names its scratch: no two chunks may hold the same one at a time.
TEST(ThreadPool, NoTwoChunksShareAThreadIndex) {
  ThreadPool pool(5);
  std::vector<std::atomic<int>> inside(5);
  std::atomic<bool> alone = true;
  pool.run(2000, [&](int64_t, int thread) {
    if (++inside[static_cast<size_t>(thread)] != 1) alone = false;
    --inside[static_cast<size_t>(thread)];
  });
  EXPECT_TRUE(alone);
}

TEST(ThreadPool, ExceptionsDoNotEscapeAParallelRegion) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 50; ++round) {
      std::atomic<int> done = 0;
      EXPECT_THROW(pool.run(100,
                            [&](int64_t chunk, int) {
                              if (chunk == 10) fail(Status::non_finite, "chunk {}", chunk);
                              ++done;
                            }),
                   Error);
      EXPECT_LT(done, 100);
      std::atomic<int> after = 0;  // the pool is as good as new
      pool.run(64, [&](int64_t, int) { ++after; });
      EXPECT_EQ(after, 64);
    }
    EXPECT_THROW(pool.run(100, [](int64_t, int) { throw std::bad_alloc(); }), std::bad_alloc) << "all chunks throw";
  }
}

TEST(ThreadPool, ManyShortRunsLoseNothing) {
  ThreadPool pool(3);
  std::atomic<int64_t> sum = 0;
  for (int round = 0; round < 5000; ++round) pool.run(4, [&](int64_t chunk, int) { sum += chunk; });
  EXPECT_EQ(sum, 5000 * 6);
}

TEST(ThreadPool, RefusesCountsOutOfBounds) {
  for (const int threads : {-1, kMostThreads + 1, 99999}) EXPECT_THROW(ThreadPool{threads}, Error) << threads;
}

TEST(ThreadPool, ZeroMeansAllCores) {
  EXPECT_GE(available_cores(), 1);
  EXPECT_EQ(ThreadPool(0).threads(), available_cores());
}

// A host's threads: a new one for each task.
void run_on_new_threads(void* count, int32_t tasks, void (*task)(void*, int32_t), void* data) {
  *static_cast<int*>(count) += tasks;
  std::vector<std::thread> threads;
  for (int32_t i = 0; i < tasks; ++i) threads.emplace_back([=] { task(data, i); });
  for (auto& thread : threads) thread.join();
}

TEST(ForeignThreads, RunEveryChunkOnceAndNoneIsStartedHere) {
  int given = 0;
  ThreadPool pool(4, {run_on_new_threads, &given});
  ASSERT_EQ(pool.threads(), 4);
  for (const int64_t chunks : {0, 1, 2, 7, 1000}) {
    given = 0;
    std::vector<std::atomic<int>> seen(static_cast<size_t>(chunks));
    std::vector<std::atomic<int>> inside(4);
    std::atomic<bool> alone = true;
    pool.run(chunks, [&](int64_t chunk, int thread) {
      ++seen[static_cast<size_t>(chunk)];
      if (++inside[static_cast<size_t>(thread)] != 1) alone = false;
      --inside[static_cast<size_t>(thread)];
    });
    EXPECT_TRUE(alone);
    EXPECT_EQ(given, chunks < 2 ? 0 : std::min<int64_t>(chunks, 4)) << "tasks for " << chunks << " chunks";
    for (const auto& n : seen) ASSERT_EQ(n, 1);
  }
}

TEST(ForeignThreads, ExceptionsComeBackToTheCaller) {
  int given = 0;
  ThreadPool pool(3, {run_on_new_threads, &given});
  EXPECT_THROW(pool.run(100, [](int64_t, int) { throw std::bad_alloc(); }), std::bad_alloc);
  std::atomic<int> after = 0;
  pool.run(64, [&](int64_t, int) { ++after; });
  EXPECT_EQ(after, 64);
}

// What a host may get wrong: tasks that never run, run twice at once, run later, or have another index.
TEST(ForeignThreads, TasksThatDoNotRunAreAnError) {
  ThreadPool pool(4, {[](void*, int32_t, void (*)(void*, int32_t), void*) {}, nullptr});
  int ran = 0;
  try {
    pool.run(100, [&](int64_t, int) { ++ran; });
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("run_tasks"), std::string::npos) << error.what();
  }
  EXPECT_EQ(ran, 0);
}

TEST(ForeignThreads, WrongIndicesDoNothingAndLateTasksFindNothing) {
  struct Late {
    void (*task)(void*, int32_t) = nullptr;
    void* data = nullptr;
  } late;
  ThreadPool pool(4, {[](void* to, int32_t tasks, void (*task)(void*, int32_t), void* data) {
                        *static_cast<Late*>(to) = {task, data};
                        task(data, -1);
                        task(data, 4);
                        std::vector<std::thread> threads;  // each index twice at a time
                        for (int32_t i = 0; i < 2 * tasks; ++i) threads.emplace_back([=] { task(data, i % tasks); });
                        for (auto& thread : threads) thread.join();
                      },
                      &late});
  std::vector<std::atomic<int>> inside(4);
  std::atomic<int> ran = 0;
  std::atomic<bool> alone = true;
  pool.run(2000, [&](int64_t, int thread) {
    if (++inside[static_cast<size_t>(thread)] != 1) alone = false;
    ++ran;
    --inside[static_cast<size_t>(thread)];
  });
  EXPECT_EQ(ran, 2000);
  EXPECT_TRUE(alone);
  late.task(late.data, 0);
  EXPECT_EQ(ran, 2000);
}

}  // namespace
}  // namespace scope
