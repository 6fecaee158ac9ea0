// The scheduler itself: small programs with known bugs, each of which some schedule must find; and
// the same seed gives the same run.
#include "scheduler.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <vector>

namespace hybridopt::schedule {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

// Runs `program` in up to `count` schedules; the first one that fails ends the process.
void Explore(uint64_t count, const std::function<void()>& program) {
  for (uint64_t seed = 0; seed < count; ++seed) RunSchedule(seed, program);
}

// Returns in how many of `count` schedules `program` returns true.
uint64_t Count(uint64_t count, const std::function<bool()>& program) {
  uint64_t times = 0;
  for (uint64_t seed = 0; seed < count; ++seed) RunSchedule(seed, [&] { times += program(); });
  return times;
}

void Threads(const std::vector<std::function<void()>>& bodies) {
  std::vector<std::thread> threads;
  for (const auto& body : bodies) threads.emplace_back(body);
  for (std::thread& thread : threads) thread.join();
}

// -------------------------------------------------------------------------------- good programs --

TEST(Scheduler, AMutexExcludes) {
  Explore(200, [] {
    std::mutex mutex;
    int inside = 0, entered = 0;
    const auto enter = [&] {
      for (int i = 0; i < 5; ++i) {
        std::lock_guard lock(mutex);
        if (++inside != 1) Fail("two threads hold the mutex");
        std::this_thread::yield();
        ++entered;
        --inside;
      }
    };
    Threads({enter, enter, enter});
    if (entered != 15) Fail("entered " + std::to_string(entered) + " times");
  });
}

TEST(Scheduler, ASharedMutexExcludesWriters) {
  Explore(200, [] {
    std::shared_mutex mutex;
    int readers = 0, writers = 0;
    const auto read = [&] {
      std::shared_lock lock(mutex);
      ++readers;
      std::this_thread::yield();
      if (writers != 0) Fail("a reader beside a writer");
      --readers;
    };
    const auto write = [&] {
      std::unique_lock lock(mutex);
      ++writers;
      std::this_thread::yield();
      if (writers != 1 || readers != 0) Fail("a writer beside another thread");
      --writers;
    };
    Threads({read, write, read, write});
  });
}

TEST(Scheduler, AQueueLosesNothing) {
  Explore(200, [] {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<int> queue;
    int sum = 0;
    Threads({[&] {
               for (int i = 1; i <= 10; ++i) {
                 std::lock_guard lock(mutex);
                 queue.push_back(i);
                 changed.notify_one();
               }
             },
             [&] {
               for (int taken = 0; taken < 10; ++taken) {
                 std::unique_lock lock(mutex);
                 changed.wait(lock, [&] { return !queue.empty(); });
                 sum += queue.back();
                 queue.pop_back();
               }
             }});
    if (sum != 55) Fail("sum " + std::to_string(sum));
  });
}

TEST(Scheduler, AnAtomicWakesWhoWaits) {
  Explore(200, [] {
    std::atomic<uint32_t> word = 0;
    std::atomic<uint64_t> wide = 0;
    Threads({[&] {
               word.wait(0);
               wide = 1;
               wide.notify_all();
             },
             [&] { wide.wait(0); },
             [&] {
               word = 1;
               word.notify_all();
             }});
  });
}

TEST(Scheduler, TimeIsItsOwn) {
  Explore(20, [] {
    const auto begin = Clock::now();
    const auto begin_of_day = std::chrono::system_clock::now();
    std::this_thread::sleep_for(std::chrono::hours(24));
    const auto end = Clock::now();
    if (end - begin < std::chrono::hours(24)) Fail("it woke too early");
    if (end - begin > std::chrono::hours(24) + seconds(1)) Fail("it woke too late");
    if (std::chrono::system_clock::now() - begin_of_day < std::chrono::hours(24))
      Fail("two clocks differ");
    std::mutex mutex;
    std::condition_variable never;
    std::unique_lock lock(mutex);
    if (never.wait_for(lock, std::chrono::hours(1), [] { return false; })) Fail("it was woken");
    if (Clock::now() - end < std::chrono::hours(1)) Fail("the timeout came too early");
  });
}

// ------------------------------------------------------------------- what it finds, and reports --

// Two threads add without a lock.
bool LosesAnAddition() {
  std::atomic<int> sum = 0;
  const auto add = [&] {
    const int before = sum.load();
    std::this_thread::yield();
    sum.store(before + 1);
  };
  Threads({add, add});
  return sum != 2;
}

TEST(Scheduler, OrdersDiffer) {
  const uint64_t lost = Count(200, LosesAnAddition);
  EXPECT_GT(lost, 20u);
  EXPECT_LT(lost, 200u);
}

// A notification between the check and the wait is lost.
void LosesAWakeUp() {
  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<bool> ready = false;
  Threads({[&] {
             if (ready) return;
             std::unique_lock lock(mutex);
             changed.wait(lock);
           },
           [&] {
             ready = true;
             changed.notify_all();
           }});
}

TEST(SchedulerDeathTest, ALostWakeUpIsADeadlock) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(Explore(1000, LosesAWakeUp), testing::ExitedWithCode(1),
              "Schedule [0-9]+ of HYBRIDOPT_TEST_SEED=.*deadlock: no thread can run.*"
              "thread 1 waits for condition variable");
}

// A thread that is never woken.
void LeavesAThread() {
  static std::mutex mutex;
  static std::condition_variable never;
  std::thread([] {
    std::unique_lock lock(mutex);
    never.wait(lock, [] { return false; });
  }).detach();
}

TEST(SchedulerDeathTest, AThreadThatIsLeftIsADeadlock) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(Explore(1, LeavesAThread), testing::ExitedWithCode(1), "deadlock");
  const auto allowed = [] {
    Explore(100, [] {
      LeavesAThread();
      LeaveThreads();
    });
    _exit(0);
  };
  EXPECT_EXIT(allowed(), testing::ExitedWithCode(0), "");
}

TEST(SchedulerDeathTest, TwoLocksInTwoOrdersAreADeadlock) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto program = [] {
    std::mutex one, other;
    Threads({[&] { std::scoped_lock lock(one), second(other); },
             [&] { std::scoped_lock lock(other), second(one); }});
  };
  EXPECT_EXIT(Explore(1000, program), testing::ExitedWithCode(1), "waits for mutex");
}

TEST(SchedulerDeathTest, ThreadsThatLookForEachOtherForEver) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto program = [] {
    std::atomic<bool> never = false;
    Threads({[&] {
      while (!never) std::this_thread::yield();
    }});
  };
  EXPECT_EXIT(Explore(1, program), testing::ExitedWithCode(1), "livelock");
}

// ----------------------------------------------------------------------------------- repetition --

// The same seed: the same choices, the same clock, the same outcome.
TEST(Scheduler, ASeedRepeats) {
  uint64_t differ = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    bool first = false, second = false;
    const Summary one = RunSchedule(seed, [&] { first = LosesAnAddition(); });
    const Summary two = RunSchedule(seed, [&] { second = LosesAnAddition(); });
    EXPECT_EQ(one.trace, two.trace) << seed;
    EXPECT_EQ(one.points, two.points) << seed;
    EXPECT_EQ(first, second) << seed;
    differ += one.trace != RunSchedule(seed + 1, [] { LosesAnAddition(); }).trace;
  }
  EXPECT_GT(differ, 50u);
}

}  // namespace
}  // namespace hybridopt::schedule
