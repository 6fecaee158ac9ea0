// Turns of many tasks on few threads: in order, one at a time for each task, and no task waits for
// something that only another task waits for.
#include "runtime/runner_pool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <deque>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "../../limit_threads.h"

namespace hybridopt {
namespace {

constexpr int64_t kHoursNs = 10'000'000'000'000;  // patience that no test outlasts

// A task whose turns call a function, which says whether the next turn is due.
class FunctionTask : public RunnerPool::Task {
 public:
  FunctionTask(RunnerPool& pool, std::function<bool(FunctionTask&)> turn)
      : pool_(pool), turn_(std::move(turn)) {}
  ~FunctionTask() override { pool_.Withdraw(*this); }
  void Submit() { pool_.Submit(*this); }
  void LetOthersRun() { pool_.LetOthersRun(*this); }

 private:
  bool RunTurn() override { return turn_(*this); }

  RunnerPool& pool_;
  const std::function<bool(FunctionTask&)> turn_;
};

struct StartedPool : RunnerPool {
  explicit StartedPool(int64_t patience_ns) : RunnerPool(patience_ns) { EXPECT_TRUE(Start().ok()); }
};

template <typename Value>
void AwaitEqual(const std::atomic<Value>& value, Value expected) {
  while (value != expected) std::this_thread::yield();
}

TEST(RunnerPoolTest, ATaskHasOneTurnAtATimeAndOneBehindEachSubmit) {
  StartedPool pool(0);
  std::atomic<int> in_turn = 0;
  std::atomic<uint64_t> submitted = 0, seen = 0;
  FunctionTask task(pool, [&](FunctionTask& self) {
    EXPECT_EQ(++in_turn, 1);
    self.LetOthersRun();
    seen = submitted.load();
    std::this_thread::yield();
    --in_turn;
    return false;
  });
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3; ++thread)
    threads.emplace_back([&] {
      for (int i = 0; i < 2000; ++i) {
        submitted += 1;
        task.Submit();
      }
    });
  for (std::thread& thread : threads) thread.join();
  pool.Withdraw(task);
  EXPECT_EQ(seen, 6000u) << "the last turn began behind the last Submit";
}

TEST(RunnerPoolTest, ATurnMayAskForTheNextAndOthersHaveTheirsBetween) {
  StartedPool pool(kHoursNs);
  std::vector<char> order;  // written by the one runner
  std::atomic<uint32_t> turns = 0;
  FunctionTask a(pool, [&](FunctionTask&) {
    order.push_back('a');
    return ++turns < 20;
  });
  FunctionTask b(pool, [&](FunctionTask&) {
    order.push_back('b');
    return ++turns < 20;
  });
  FunctionTask first(pool, [&](FunctionTask&) {
    a.Submit();
    b.Submit();
    return false;
  });
  first.Submit();
  while (turns < 20) std::this_thread::yield();
  pool.Withdraw(a);
  pool.Withdraw(b);
  for (size_t i = 0; i < order.size(); ++i) EXPECT_EQ(order[i], i % 2 == 0 ? 'a' : 'b') << i;
}

TEST(RunnerPoolTest, OneRunnerRunsTheTurnsOfTasksThatDoNotWait) {
  StartedPool pool(0);
  constexpr uint32_t kTasks = 50;
  std::vector<uint32_t> order;  // written by the one runner
  std::atomic<uint32_t> turns = 0;
  std::deque<FunctionTask> tasks;
  for (uint32_t task = 0; task < kTasks; ++task)
    tasks.emplace_back(pool, [&, task](FunctionTask&) {
      order.push_back(task);
      ++turns;
      return false;
    });
  for (uint32_t round = 1; round <= 20; ++round) {
    for (FunctionTask& task : tasks) task.Submit();
    AwaitEqual(turns, round * kTasks);
  }
  for (uint32_t turn = 0; turn < turns; ++turn) EXPECT_EQ(order[turn], turn % kTasks);
  EXPECT_EQ(pool.runners(), 1u);
}

// The turn of each task waits until the turn of the next task has begun.
void WaitForTheNext(RunnerPool& pool, uint32_t count) {
  std::deque<std::atomic<bool>> ran(count);
  std::deque<FunctionTask> tasks;
  for (uint32_t task = 0; task < count; ++task)
    tasks.emplace_back(pool, [&, task](FunctionTask& self) {
      self.LetOthersRun();
      self.LetOthersRun();  // has no effect
      if (task + 1 < count) AwaitEqual(ran[task + 1], true);
      ran[task] = true;
      return false;
    });
  for (FunctionTask& task : tasks) task.Submit();
  AwaitEqual(ran[0], true);
}

TEST(RunnerPoolTest, ATurnThatWaitsLetsTheNextOneBeginAtOnce) {
  StartedPool pool(kHoursNs);
  constexpr uint32_t kTasks = RunnerPool::kWaitingTogether + 1;
  for (int round = 0; round < 50; ++round) {
    WaitForTheNext(pool, kTasks);
    EXPECT_LE(pool.runners(), kTasks + 1);
  }
}

TEST(RunnerPoolTest, HoweverManyTurnsWaitTheNextOneBegins) {
  StartedPool pool(1000);
  WaitForTheNext(pool, 40);
}

// A few turns that wait for ever do not slow down those of others.
TEST(RunnerPoolTest, TurnsThatWaitLongDoNotCountForEver) {
  constexpr uint32_t kStuck = 2 * RunnerPool::kWaitingTogether;
  StartedPool pool(1'000'000);
  std::atomic<bool> open = false;
  std::atomic<uint32_t> entered = 0;
  std::deque<FunctionTask> stuck;
  for (uint32_t task = 0; task < kStuck; ++task)
    stuck.emplace_back(pool, [&](FunctionTask& self) {
      self.LetOthersRun();
      ++entered;
      AwaitEqual(open, true);
      return false;
    });
  for (FunctionTask& task : stuck) task.Submit();
  AwaitEqual(entered, kStuck);
  WaitForTheNext(pool, RunnerPool::kWaitingTogether);
  EXPECT_GE(pool.runners(), kStuck + RunnerPool::kWaitingTogether);
  EXPECT_LE(pool.runners(), kStuck + RunnerPool::kIdleRunnersMax);
  open = true;
}

TEST(RunnerPoolTest, FewRunnersStayIdle) {
  StartedPool pool(1000);
  for (int round = 0; round < 3; ++round) {
    WaitForTheNext(pool, 20);
    while (pool.runners() > RunnerPool::kIdleRunnersMax) std::this_thread::yield();
  }
}

TEST(RunnerPoolTest, WithdrawReturnsWhenTheTurnHasEnded) {
  StartedPool pool(kHoursNs);
  std::atomic<bool> begun = false, ended = false;
  FunctionTask task(pool, [&](FunctionTask&) {
    begun = true;
    for (int i = 0; i < 1000; ++i) std::this_thread::yield();
    ended = true;
    return false;
  });
  task.Submit();
  AwaitEqual(begun, true);
  pool.Withdraw(task);
  EXPECT_TRUE(ended);
}

TEST(RunnerPoolTest, OneThatNeverStartedEnds) {
  const RunnerPool pool;
  EXPECT_EQ(pool.runners(), 0u);
}

TEST(RunnerPoolTest, AForkedChildLeavesItsThreadsAlone) {
  std::optional<StartedPool> pool(kHoursNs);
  std::atomic<bool> ran = false;
  FunctionTask task(*pool, [&](FunctionTask&) {
    ran = true;
    return false;
  });
  task.Submit();
  AwaitEqual(ran, true);
  pool->Withdraw(task);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    pool.reset();  // joining a thread that does not exist here would hang
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// ---------------------------------------------------------------- a system that refuses threads --

constexpr uid_t kNobodyElse = 61235;

[[noreturn]] void StartWithoutRoomThenWithRoom() {
  alarm(60);
  rlimit before;
  getrlimit(RLIMIT_NPROC, &before);
  RunnerPool pool(0);
  if (!LimitThreads(0, kNobodyElse)) std::_Exit(2);
  const Status status = pool.Start();
  if (status.code() != OFFLOAD_OUT_OF_HOST_MEMORY || pool.runners() != 0) std::_Exit(3);
  std::fprintf(stderr, "%s\n", status.message().c_str());
  setrlimit(RLIMIT_NPROC, &before);
  if (!pool.Start().ok()) std::_Exit(4);
  // A second runner is refused: the second turn begins when the first one ends.
  std::atomic<bool> waits = false, open = false, ran = false;
  FunctionTask first(pool, [&](FunctionTask& self) {
    if (!LimitThreads(0, kNobodyElse)) std::_Exit(5);
    self.LetOthersRun();
    waits = true;
    AwaitEqual(open, true);
    return false;
  });
  FunctionTask second(pool, [&](FunctionTask&) {
    ran = true;
    return false;
  });
  first.Submit();
  AwaitEqual(waits, true);
  second.Submit();
  if (ran || pool.runners() != 1) std::_Exit(6);
  open = true;
  AwaitEqual(ran, true);
  std::_Exit(0);
}

TEST(RunnerPoolDeathTest, AThreadThatTheSystemRefusesIsAnErrorOrWaitsForAnother) {
  EXPECT_EXIT(StartWithoutRoomThenWithRoom(), testing::ExitedWithCode(0),
              "the system refused another thread \\(Resource temporarily unavailable\\): raise the "
              "limit of threads");
}

}  // namespace
}  // namespace hybridopt
