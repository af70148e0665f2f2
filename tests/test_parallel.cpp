// The thread pool: every chunk once, exceptions contained, and a pool that stays usable.
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>

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

}  // namespace
}  // namespace scope
