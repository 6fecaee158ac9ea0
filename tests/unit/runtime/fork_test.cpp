// A child of fork has none of its parent's threads: inherited objects must refuse calls, and not
// hang.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>

#include "../../sanitizers.h"
#include "base/system.h"
#include "runtime/worker_pool.h"

namespace hybridopt {
namespace {

constexpr char kRefusal[] =
    "this process was forked after its worker pool was made, and threads do not survive fork: make "
    "a new context in the child";

// The calls of a child on an inherited pool; it exits with 0 if they are refused. A hang ends in
// SIGALRM.
[[noreturn]] void UseAndDestroyInChild(std::unique_ptr<WorkerPool>& pool) {
  alarm(30);
  bool touched = false;
  for (int attempt = 0; attempt < 2; ++attempt) {
    const Status status = pool->Run([&](uint32_t) { touched = true; });
    std::fprintf(stderr, "%s\n", status.message().c_str());
    if (status.code() != OFFLOAD_INVALID_STATE) std::_Exit(2);
  }
  pool.reset();
  std::exit(touched ? 3 : 0);
}

void ExpectParentGoesOn(WorkerPool& pool) {
  std::atomic<uint32_t> runs{0};
  EXPECT_TRUE(pool.Run([&](uint32_t) { ++runs; }).ok());
  EXPECT_EQ(runs, pool.threads());
}

TEST(ForkDeathTest, TheGenerationDiffersInTheChildOnly) {
  const uint64_t before = system::ForkGeneration();
  EXPECT_EXIT(std::_Exit(system::ForkGeneration() == before + 1 ? 0 : 1),
              testing::ExitedWithCode(0), "");
  EXPECT_EQ(system::ForkGeneration(), before);
}

TEST(ForkDeathTest, AChildIsRefusedALivePoolAndTheParentGoesOn) {
  auto pool = std::make_unique<WorkerPool>(2);
  ExpectParentGoesOn(*pool);
  for (int child = 0; child < 3; ++child) {
    EXPECT_EXIT(UseAndDestroyInChild(pool), testing::ExitedWithCode(0), kRefusal);
    ExpectParentGoesOn(*pool);
  }
}

TEST(ForkDeathTest, AChildIsRefusedAPoolThatHadNotStarted) {
  auto pool = std::make_unique<WorkerPool>(2);
  EXPECT_EXIT(UseAndDestroyInChild(pool), testing::ExitedWithCode(0), kRefusal);
  ExpectParentGoesOn(*pool);
}

// The pool's lock is held at the time of the fork, by a thread that the child does not have.
TEST(ForkDeathTest, AChildOfAForkInTheMiddleOfARunDoesNotHang) {
  auto pool = std::make_unique<WorkerPool>(2);
  std::atomic<int> running{0};
  std::atomic<bool> release{false};
  std::thread caller([&] {
    const Status status = pool->Run([&](uint32_t) {
      ++running;
      while (!release) std::this_thread::yield();
    });
    EXPECT_TRUE(status.ok());
  });
  while (running != 2) std::this_thread::yield();
  EXPECT_EXIT(UseAndDestroyInChild(pool), testing::ExitedWithCode(0), kRefusal);
  release = true;
  caller.join();
  ExpectParentGoesOn(*pool);
}

[[noreturn]] void MakeANewPoolInChild() {
  alarm(30);
  std::atomic<uint32_t> runs{0};
  {
    WorkerPool pool(2);
    for (int run = 0; run < 10; ++run)
      if (!pool.Run([&](uint32_t) { ++runs; }).ok()) std::_Exit(2);
  }
  std::_Exit(runs == 20 ? 0 : 3);
}

// The way out that the error names.
TEST(ForkDeathTest, AChildMayMakeAPoolOfItsOwn) {
  if (HYBRIDOPT_TSAN) GTEST_SKIP() << "the thread sanitizer allows no threads after such a fork";
  WorkerPool pool(2);
  ExpectParentGoesOn(pool);
  EXPECT_EXIT(MakeANewPoolInChild(), testing::ExitedWithCode(0), "");
  ExpectParentGoesOn(pool);
}

}  // namespace
}  // namespace hybridopt
