// Every call refuses a child of fork that uses an inherited handle. The child may make handles of
// its own, and leaves through exit(); the parent goes on as if nothing had happened.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "../sanitizers.h"
#include "handle_calls.h"
#include "trainer.h"

namespace hybridopt::fault {
namespace {

// The sanitizer allows no threads after a fork of a process with threads.
constexpr bool kThreadsInChild = !HYBRIDOPT_TSAN;

// gcc's address sanitizer may leave its allocator's locks, and so its leak check, held in a child
// of threads that allocate.
constexpr bool kAllocatorSurvivesFork = !HYBRIDOPT_ASAN;

// How often the other threads of this process have been given a CPU; 0 if one of them has work.
uint64_t SwitchesOfSleepers() {
  uint64_t switches = 1;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    if (task.path().filename() == std::to_string(gettid())) continue;
    std::ifstream file(task.path() / "status");
    for (std::string line; std::getline(file, line);) {
      if (line.starts_with("State:") && line != "State:\tS (sleeping)") return 0;
      if (line.find("ctxt_switches:") != std::string::npos)
        switches += std::stoul(line.substr(line.find(':') + 1));
    }
  }
  return switches;
}

// Returns when all other threads sleep: then none of them holds a lock of the allocator. Threads
// allocate when they start and when they end, so the test waits until none does.
void AwaitIdleThreads() {
  for (uint64_t before = 0, now = 0; (now = SwitchesOfSleepers()) == 0 || now != before;) {
    before = now;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

// Runs body in a child, which must come to its end. A hang ends in SIGALRM. Where the child leaves
// through exit(), the threads of the parent are idle, or soon will be.
template <typename Body>
void RunInChild(Body&& body, void (*leave)(int) = std::exit) {
  const bool failed_before = testing::Test::HasFailure();
  if (!kAllocatorSurvivesFork && leave == std::exit) AwaitIdleThreads();
  std::fflush(nullptr);  // the child would print it again
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(120);
    body();
    leave(testing::Test::HasFailure() && !failed_before ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

void ExpectInherited(const std::vector<HandleCall>& calls, void* handle) {
  for (const HandleCall& one : calls) {
    EXPECT_EQ(one.call(handle), OFFLOAD_INVALID_STATE) << one.name;
    const std::string message = offload_last_error();
    for (const char* word : {"was made before fork()", "parent process", "make a new one"})
      EXPECT_NE(message.find(word), std::string::npos) << one.name << ": " << message;
  }
}

void ExpectAllInherited(const Trainer& trainer) {
  ExpectInherited(ContextCalls(), trainer.context);
  ExpectInherited(OptimizerCalls(), trainer.optimizer);
}

std::vector<unsigned char> Train(const RunOptions& run) {
  Trainer trainer(run);
  trainer.AddParams();
  trainer.Commit();
  trainer.Steps(0, 3);
  return trainer.Bits();
}

class Fork : public testing::TestWithParam<int32_t> {
 protected:
  Fork() { run_.device_kind = GetParam(); }
  RunOptions run_;
};

TEST_P(Fork, OfIdleHandlesRefusesThemInTheChildOnly) {
  Trainer trainer(run_);
  trainer.AddParams();
  RunInChild([&] { ExpectAllInherited(trainer); });  // before any thread has started
  trainer.Commit();
  trainer.Steps(0, 1);
  for (int child = 0; child < 3; ++child) RunInChild([&] { ExpectAllInherited(trainer); });
  trainer.Steps(1, 3);
  EXPECT_EQ(trainer.Bits(), Train(run_));
}

TEST_P(Fork, OfAStashWithATicketRefusesItInTheChildOnly) {
  Trainer trainer(run_);
  auto options = Make<offload_stash_options_t>();
  options.budget_bytes = 8192;
  options.slab_bytes = 4096;
  options.min_bytes = 1;
  offload_stash_t stash = nullptr;
  ASSERT_OFFLOAD_OK(offload_stash_create(trainer.context, &options, &stash));
  const std::vector<unsigned char> before = trainer.ParamBits(0);
  offload_stash_ticket_t ticket = 0;
  ASSERT_OFFLOAD_OK(offload_stash_push(stash, 0, trainer.data[0], before.size(), nullptr, &ticket));
  RunInChild([&] { ExpectInherited(StashCalls(), stash); });
  const std::vector<unsigned char> others(before.size(), 0x77);
  ASSERT_OFFLOAD_OK(offload_stash_release(stash, ticket, nullptr));
  ASSERT_OFFLOAD_OK(offload_device_upload(trainer.context, trainer.data[0], others.data(),
                                          others.size(), nullptr));
  ASSERT_OFFLOAD_OK(offload_stash_prefetch(stash, ticket, trainer.data[0], before.size(), nullptr));
  ASSERT_OFFLOAD_OK(offload_stash_pop(stash, ticket, nullptr, 0));
  EXPECT_EQ(trainer.ParamBits(0), before);
  ASSERT_OFFLOAD_OK(offload_stash_destroy(stash));
}

TEST_P(Fork, OfAPoolLeavesItsBlocksToTheParent) {
  if (GetParam() == OFFLOAD_DEVICE_HOST) GTEST_SKIP() << "it has no pools";
  Trainer trainer(run_);
  offload_pool_t pool = nullptr;
  void* data = nullptr;
  ASSERT_OFFLOAD_OK(offload_pool_create(trainer.context, &pool));
  ASSERT_OFFLOAD_OK(offload_pool_alloc(pool, 64, &data));
  RunInChild([&] {
    ExpectInherited(PoolCalls(), pool);
    offload_pool_torch_free(data, 64, 0, nullptr);  // as torch may at the end of the child
    EXPECT_EQ(offload_pool_free(data), OFFLOAD_INVALID_ARGUMENT);
  });
  ASSERT_OFFLOAD_OK(offload_pool_free(data));
  ASSERT_OFFLOAD_OK(offload_pool_destroy(pool));
}

TEST_P(Fork, ChildMayTrainOnHandlesOfItsOwn) {
  if (!kThreadsInChild) GTEST_SKIP() << "the thread sanitizer allows no threads in the child";
  const std::vector<unsigned char> expected = Train(run_);
  Trainer trainer(run_);
  trainer.AddParams();
  trainer.Commit();
  trainer.Steps(0, 1);
  RunInChild([&] {
    ExpectAllInherited(trainer);
    EXPECT_EQ(Train(run_), expected);
    ExpectAllInherited(trainer);
    // In the same way handles of the child are foreign to the child's own child.
    Trainer own(run_);
    own.AddParams();
    own.Commit();
    RunInChild([&] {
      ExpectAllInherited(own);
      ExpectAllInherited(trainer);
      EXPECT_EQ(Train(run_), expected);
    });
    own.Steps(0, 3);
    EXPECT_EQ(own.Bits(), expected);
  });
  trainer.Steps(1, 3);
  EXPECT_EQ(trainer.Bits(), expected);
}

TEST_P(Fork, InTheMiddleOfStepsDisturbsNobody) {
  run_.sim_delay_ns_max = GetParam() == OFFLOAD_DEVICE_SIM ? 200'000 : 0;
  run_.counts = {30000, 1, 20000};
  std::vector<unsigned char> bits[2];
  for (const bool forks : {false, true}) {
    Trainer trainer(run_);
    trainer.AddParams();
    trainer.Commit();
    if (!kAllocatorSurvivesFork) {
      trainer.Steps(0, 1);  // starts the threads
      AwaitIdleThreads();
    }
    trainer.UploadGrads(0);
    const auto leave = kAllocatorSurvivesFork ? std::exit : std::_Exit;
    for (int step = 0; step < 8; ++step) {
      ASSERT_OFFLOAD_OK(offload_optimizer_step(trainer.optimizer, nullptr, nullptr));
      if (forks && step % 3 == 0) RunInChild([&] { ExpectAllInherited(trainer); }, leave);
    }
    ASSERT_OFFLOAD_OK(offload_optimizer_wait(trainer.optimizer, 0, -1));
    bits[forks] = trainer.Bits();
  }
  EXPECT_EQ(bits[0], bits[1]);
}

// The locks of the library may be held by threads that the child does not have.
TEST_P(Fork, WhileOtherThreadsAreInsideTheLibraryDoesNotHang) {
  Trainer trainer(run_);
  trainer.AddParams();
  trainer.Commit();
  AwaitIdleThreads();
  std::atomic<bool> stop = false;
  std::atomic<int> inside = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i)
    threads.emplace_back([&] {
      for (++inside; !stop;) {
        auto stats = Make<offload_stats_t>();
        EXPECT_OFFLOAD_OK(offload_optimizer_get_stats(trainer.optimizer, &stats));
        if (!kAllocatorSurvivesFork) continue;
        auto info = Make<offload_context_info_t>();
        EXPECT_OFFLOAD_OK(offload_context_get_info(trainer.context, &info));
      }
    });
  while (inside < 3) std::this_thread::yield();
  for (int child = 0; child < 2 + Scaled(20); ++child)
    RunInChild(
        [&] {
          ExpectAllInherited(trainer);
          offload_context_t own = nullptr;
          const auto options = Make<offload_context_options_t>();
          EXPECT_OFFLOAD_OK(offload_context_create(&options, &own));
          EXPECT_OFFLOAD_OK(offload_context_destroy(own));
        },
        std::_Exit);  // at exit, what those threads had in hand would count as leaked
  stop = true;
  for (std::thread& thread : threads) thread.join();
  trainer.Steps(0, 3);
  EXPECT_EQ(trainer.Bits(), Train(run_));
}

INSTANTIATE_TEST_SUITE_P(Devices, Fork, testing::Values(OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM),
                         [](const testing::TestParamInfo<int32_t>& info) {
                           return info.param == OFFLOAD_DEVICE_HOST ? "Host" : "Sim";
                         });

// A process may end with everything alive and work queued.
TEST(Exit, WithLiveHandlesAndQueuedStepsIsClean) {
  if (!kThreadsInChild) GTEST_SKIP() << "the thread sanitizer allows no threads in the child";
  for (const int32_t device_kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM})
    RunInChild([&] {
      RunOptions run;
      run.device_kind = device_kind;
      run.sim_delay_ns_max = device_kind == OFFLOAD_DEVICE_SIM ? 1'000'000 : 0;
      static Trainer* trainer = nullptr;
      trainer = new Trainer(run);  // never destroyed
      trainer->AddParams();
      trainer->Commit();
      trainer->UploadGrads(0);
      for (int step = 0; step < 8; ++step)
        EXPECT_OFFLOAD_OK(offload_optimizer_step(trainer->optimizer, nullptr, nullptr));
      // Handlers that run late may still call the library.
      std::atexit([] {
        auto stats = Make<offload_stats_t>();
        if (offload_optimizer_get_stats(trainer->optimizer, &stats) != OFFLOAD_OK) std::_Exit(3);
        if (offload_optimizer_wait(trainer->optimizer, 0, -1) != OFFLOAD_OK) std::_Exit(4);
      });
    });
}

}  // namespace
}  // namespace hybridopt::fault
