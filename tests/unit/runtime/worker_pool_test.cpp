#include "runtime/worker_pool.h"

#include <fenv.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <new>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "../../floating_point_mode.h"
#include "../../limit_threads.h"
#include "base/system.h"

// Counts every allocation of this program, on any thread. Not inlined: gcc would see malloc meet
// delete and warn.
static std::atomic<uint64_t> allocations{0};

[[gnu::noinline]] void* operator new(size_t bytes) {
  allocations.fetch_add(1);
  void* data = std::malloc(bytes);
  if (data == nullptr) std::abort();
  return data;
}
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  allocations.fetch_add(1);
  return std::malloc(bytes);
}
[[gnu::noinline]] void operator delete(void* data) noexcept { std::free(data); }
[[gnu::noinline]] void operator delete(void* data, size_t) noexcept { std::free(data); }

namespace hybridopt {
namespace {

// What one worker found out about itself.
struct Seen {
  pid_t thread = 0;
  std::vector<uint32_t> cpus;
  std::string name;
  bool flushes_to_zero = true;
  int rounding = -1;
  sigset_t blocked;
};

std::vector<Seen> Look(WorkerPool& pool) {
  std::vector<Seen> seen(pool.threads());
  const Status status = pool.Run([&](uint32_t index) {
    char name[64];
    pthread_getname_np(pthread_self(), name, sizeof(name));
    seen[index].thread = gettid();
    seen[index].cpus = system::AllowedCpus();
    seen[index].name = name;
    seen[index].flushes_to_zero = FlushesToZero();
    seen[index].rounding = fegetround();
    pthread_sigmask(SIG_SETMASK, nullptr, &seen[index].blocked);
  });
  EXPECT_TRUE(status.ok()) << status.message();
  return seen;
}

TEST(WorkerPoolTest, EveryWorkerRunsExactlyOncePerRun) {
  for (uint32_t threads : {1u, 2u, 3u, 7u}) {
    WorkerPool pool(threads);
    ASSERT_EQ(pool.threads(), threads);
    std::vector<uint32_t> runs(threads);  // plain: Run itself must order the workers' writes
    for (uint32_t run = 1; run <= 300; ++run) {
      ASSERT_TRUE(pool.Run([&](uint32_t index) { ++runs[index]; }).ok());
      ASSERT_EQ(runs, std::vector<uint32_t>(threads, run));
    }
  }
}

TEST(WorkerPoolTest, RunReturnsAfterTheSlowestWorker) {
  WorkerPool pool(3);
  for (int run = 0; run < 10; ++run) {
    int slow_done = 0;
    ASSERT_TRUE(pool.Run([&](uint32_t index) {
                      if (index != static_cast<uint32_t>(run) % 3) return;
                      std::this_thread::sleep_for(std::chrono::milliseconds(3));
                      slow_done = 1;
                    })
                    .ok());
    ASSERT_EQ(slow_done, 1);
  }
}

TEST(WorkerPoolTest, WorkersWakeFromSleep) {
  WorkerPool pool(2);
  std::vector<uint32_t> runs(2);
  for (uint32_t run = 1; run <= 20; ++run) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // far longer than they spin
    ASSERT_TRUE(pool.Run([&](uint32_t index) { ++runs[index]; }).ok());
    ASSERT_EQ(runs, std::vector<uint32_t>(2, run));
  }
}

TEST(WorkerPoolTest, AnIndexIsAlwaysTheSameThreadAndNeverTheCaller) {
  WorkerPool pool(3);
  const std::vector<Seen> first = Look(pool);
  EXPECT_NE(first[0].thread, first[1].thread);
  EXPECT_NE(first[0].thread, first[2].thread);
  EXPECT_NE(first[1].thread, first[2].thread);
  for (uint32_t index = 0; index < 3; ++index) EXPECT_NE(first[index].thread, gettid());
  for (int run = 0; run < 50; ++run) {
    const std::vector<Seen> now = Look(pool);
    for (uint32_t index = 0; index < 3; ++index) EXPECT_EQ(now[index].thread, first[index].thread);
  }
}

TEST(WorkerPoolTest, ThreadsCarryTheirName) {
  WorkerPool pool(2);
  const std::vector<Seen> seen = Look(pool);
  EXPECT_EQ(seen[0].name, "hybridopt/0");
  EXPECT_EQ(seen[1].name, "hybridopt/1");
}

int64_t ThreadsOfThisProcess() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

TEST(WorkerPoolTest, StartsNothingBeforeTheFirstRun) {
  const int64_t before = ThreadsOfThisProcess();
  WorkerPool pool(3);
  EXPECT_LE(ThreadsOfThisProcess(), before);
  ASSERT_TRUE(pool.Run([](uint32_t) {}).ok());
  EXPECT_GE(ThreadsOfThisProcess(), 3 + 1);
}

TEST(WorkerPoolTest, PoolsComeAndGo) {
  for (int round = 0; round < 50; ++round) {
    WorkerPool idle(2), used(2);
    ASSERT_TRUE(used.Run([](uint32_t) {}).ok());
  }
}

TEST(WorkerPoolTest, RunAllocatesNothingAfterTheFirst) {
  WorkerPool pool(2);
  ASSERT_TRUE(pool.Run([](uint32_t) {}).ok());
  const uint64_t before = allocations;
  bool ok = true;
  for (int run = 0; run < 100; ++run) ok = pool.Run([](uint32_t) {}).ok() && ok;
  EXPECT_EQ(allocations, before);
  EXPECT_TRUE(ok);
}

TEST(WorkerPoolTest, CallersTakeTurns) {
  WorkerPool pool(2);
  std::atomic<int> inside{0}, overlaps{0};
  std::vector<uint64_t> sums(2);  // plain: turns must order them
  std::vector<std::thread> callers;
  for (uint64_t caller = 0; caller < 4; ++caller)
    callers.emplace_back([&, caller] {
      for (int run = 0; run < 250; ++run) {
        int here = 0;
        const Status status = pool.Run([&](uint32_t index) {
          if (index == 0) {
            here = 1;
            overlaps += inside.fetch_add(1);
          }
          sums[index] += caller;
          if (index == 0) --inside;
        });
        EXPECT_TRUE(status.ok());
        EXPECT_EQ(here, 1);
      }
    });
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(overlaps, 0);
  EXPECT_EQ(sums, std::vector<uint64_t>(2, 250 * (0 + 1 + 2 + 3)));
}

// --- Jobs that nobody waits for at once ---

constexpr auto kNothing = [] {};

template <typename Body>
WorkerPool::Job Begin(WorkerPool& pool, const Body& body) {
  WorkerPool::Job job = 0;
  EXPECT_TRUE(pool.Begin({body, kNothing}, &job).ok());
  return job;
}

TEST(WorkerPoolTest, AWorkerGoesOnToTheNextJobWithoutTheOthers) {
  WorkerPool pool(3);
  std::atomic<bool> held{true};
  std::atomic<uint32_t> ahead{0};
  const auto first = [&](uint32_t index) {
    if (index == 0) held.wait(true);
  };
  const auto second = [&](uint32_t index) {
    if (index != 0) ahead += 1;
    ahead.notify_all();
  };
  const WorkerPool::Job a = Begin(pool, first), b = Begin(pool, second);
  // Worker 0 is still at the first job.
  for (uint32_t seen = 0; seen < 2; seen = ahead) ahead.wait(seen);
  held = false;
  held.notify_all();
  pool.Await(b);
  pool.Await(a);  // long finished: order does not matter
}

TEST(WorkerPoolTest, AwaitReturnsAfterItsOwnJobNotAfterLaterOnes) {
  WorkerPool pool(2);
  std::atomic<bool> held{true};
  uint32_t done = 0;
  const auto first = [&](uint32_t index) {
    if (index == 1) done += 1;
  };
  const auto second = [&](uint32_t) { held.wait(true); };
  const WorkerPool::Job a = Begin(pool, first), b = Begin(pool, second);
  pool.Await(a);
  EXPECT_EQ(done, 1u);
  held = false;
  held.notify_all();
  pool.Await(b);
}

// What EveryWorkerDoesAllJobsInOrder hands out.
struct Numbered {
  std::atomic<bool>& held;
  std::vector<std::vector<uint32_t>>& done;
  uint32_t number;

  void operator()(uint32_t index) const {
    if (number == 0 && index == 2) held.wait(true);
    done[index].push_back(number);
    if (number + 1 != WorkerPool::kJobsMax || index != 0) return;
    held = false;
    held.notify_all();
  }
};

// More jobs than there is room for, and a worker that does not get to its first one until there is
// no room left.
TEST(WorkerPoolTest, EveryWorkerDoesAllJobsInOrder) {
  constexpr uint32_t kJobs = 5 * WorkerPool::kJobsMax;
  WorkerPool pool(3);
  std::atomic<bool> held{true};
  std::vector<std::vector<uint32_t>> done(3);
  std::vector<Numbered> bodies;
  for (uint32_t number = 0; number < kJobs; ++number) bodies.push_back({held, done, number});
  WorkerPool::Job last = 0;
  for (const Numbered& body : bodies) last = Begin(pool, body);
  pool.Await(last);
  std::vector<uint32_t> all(kJobs);
  std::iota(all.begin(), all.end(), 0u);
  for (const std::vector<uint32_t>& one : done) EXPECT_EQ(one, all);
}

// A job that goes on for as long as it hands itself out again, as chunks do.
struct Chain {
  WorkerPool& pool;
  uint32_t left;
  std::vector<uint32_t> done;  // per worker
  WorkerPool::Job job = 0;
  std::atomic<bool> over = false;

  void operator()(uint32_t index) { done[index] += 1; }
  void operator()() {
    if (left > 0 && pool.TryBegin({*this, *this}, &job)) {
      left -= 1;
      return;
    }
    over = true;
    over.notify_all();
  }
};

TEST(WorkerPoolTest, TheLastWorkerHandsOutTheNextJob) {
  WorkerPool pool(3);
  Chain chain{pool, 1000, {0, 0, 0}};
  ASSERT_TRUE(pool.Begin({chain, chain}, &chain.job).ok());
  chain.over.wait(false);
  pool.Await(chain.job);
  EXPECT_EQ(chain.left, 0u);
  EXPECT_EQ(chain.done, std::vector<uint32_t>(3, 1001));
}

TEST(WorkerPoolTest, AJobIsFinishedWhenWhatFollowsItHasReturned) {
  WorkerPool pool(2);
  uint32_t finished = 0;  // plain: Await must order it
  const auto body = [](uint32_t) {};
  const auto count = [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    finished += 1;
  };
  for (uint32_t round = 1; round <= 10; ++round) {
    WorkerPool::Job job = 0;
    ASSERT_TRUE(pool.Begin({body, count}, &job).ok());
    pool.Await(job);
    ASSERT_EQ(finished, round);
  }
}

TEST(WorkerPoolTest, TryBeginDoesNotWaitForRoom) {
  WorkerPool pool(2);
  std::atomic<bool> held{true};
  const auto hold = [&](uint32_t) { held.wait(true); };
  WorkerPool::Job last = 0;
  for (uint32_t job = 0; job < WorkerPool::kJobsMax; ++job) last = Begin(pool, hold);
  EXPECT_FALSE(pool.TryBegin({hold, kNothing}, &last));
  held = false;
  held.notify_all();
  pool.Await(last);
  EXPECT_TRUE(pool.TryBegin({hold, kNothing}, &last));
  pool.Await(last);
}

// --- What threads inherit from their creator, and must not ---

TEST(WorkerPoolTest, FlushToZeroAndRoundingOfTheCreatorDoNotReachTheWorkers) {
  std::thread([] {
    SetFlushToZero();
    fesetround(FE_TOWARDZERO);
    WorkerPool pool(2);
    for (const Seen& seen : Look(pool)) {
      EXPECT_FALSE(seen.flushes_to_zero);
      EXPECT_EQ(seen.rounding, FE_TONEAREST);
    }
    EXPECT_TRUE(FlushesToZero());  // the caller's own mode is the caller's
    EXPECT_EQ(fegetround(), FE_TOWARDZERO);
  }).join();
}

TEST(WorkerPoolTest, NoSignalHandlerOfTheApplicationRunsOnAWorker) {
  sigset_t before, after;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  WorkerPool pool(2);
  for (const Seen& seen : Look(pool))
    for (int number : {SIGINT, SIGTERM, SIGUSR1, SIGALRM, SIGPROF, SIGCHLD, SIGRTMIN, SIGRTMAX})
      EXPECT_EQ(sigismember(&seen.blocked, number), 1) << number;
  pthread_sigmask(SIG_SETMASK, nullptr, &after);
  for (int number = 1; number < 32; ++number)
    EXPECT_EQ(sigismember(&before, number), sigismember(&after, number)) << number;
}

// --- CPUs ---

TEST(WorkerPoolTest, ByDefaultHasOneThreadPerUsableCpu) {
  const uint32_t cpus = static_cast<uint32_t>(system::AllowedCpus().size());
  const uint32_t limit = system::CgroupCpuLimit();
  const WorkerPool pool(0);
  EXPECT_EQ(pool.cpus(), cpus);
  EXPECT_EQ(pool.threads(), limit == 0 ? cpus : std::min(cpus, limit));
}

void ExpectOnTheirNodes(const std::vector<Seen>& seen, const std::vector<uint32_t>& cpus) {
  const uint32_t threads = static_cast<uint32_t>(seen.size());
  for (uint32_t index = 0; index < threads; ++index) {
    std::vector<uint32_t> expected = NodeOfThread(NodesOf(cpus), index, threads).cpus;
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(seen[index].cpus, expected);
  }
}

TEST(WorkerPoolTest, ThreadsRunOnAnyCpuOfTheirNode) {
  const std::vector<uint32_t> cpus = system::AllowedCpus();
  for (size_t threads : {size_t{1}, cpus.size(), cpus.size() + 1}) {
    WorkerPool pool(static_cast<uint32_t>(threads));
    ExpectOnTheirNodes(Look(pool), cpus);
    EXPECT_TRUE(pool.seated());
  }
}

TEST(WorkerPoolTest, ThreadsAreNotTiedToTheCpuOfTheFirstCaller) {
  const std::vector<uint32_t> cpus = system::AllowedCpus();
  WorkerPool pool(2);
  std::thread([&] {
    ASSERT_TRUE(system::PinThisThread({cpus[0]}));
    ExpectOnTheirNodes(Look(pool), cpus);
  }).join();
}

TEST(WorkerPoolTest, RespectsTheAffinityOfItsMaker) {
  std::thread([] {
    const std::vector<uint32_t> last{system::AllowedCpus().back()};
    ASSERT_TRUE(system::PinThisThread(last));
    WorkerPool one(0), two(2);
    EXPECT_EQ(one.threads(), 1u);
    EXPECT_EQ(one.cpus(), 1u);
    EXPECT_EQ(Look(one)[0].cpus, last);
    EXPECT_EQ(two.cpus(), 1u);
    for (const Seen& seen : Look(two)) EXPECT_EQ(seen.cpus, last);
  }).join();
}

TEST(WorkerPoolTest, SaysWhenTheSystemRefusesItsCpus) {
  WorkerPool pool(2, {{0, {60000, 60001}}}, 0);
  EXPECT_TRUE(pool.seated());
  Look(pool);
  EXPECT_FALSE(pool.seated());
}

TEST(PoolShapeTest, FollowsAffinityAndQuota) {
  const struct {
    uint32_t asked, cpus, limit, threads;
    bool spare_cpus;
  } cases[] = {
      {0, 8, 0, 8, false},         // all CPUs are ours
      {0, 8, 8, 8, false},         // a quota that takes nothing away
      {0, 8, 16, 8, false},        //
      {7, 8, 16, 7, true},         //
      {0, 64, 4, 4, false},        // which 4 of the 64 are free, only the scheduler knows
      {4, 64, 4, 4, false},        //
      {4, 64, 0, 4, true},         //
      {9, 8, 0, 9, false},         // asked for more than there are
      {1, 1, 0, 1, false},         //
      {0, 0, 0, 1, false},         // a system that names no CPU
      {0, 1024, 0, 1024, false},   //
      {0, 4096, 0, 1024, true},    // at most 1024
      {5000, 4096, 0, 1024, true}  //
  };
  for (const auto& c : cases) {
    const PoolShape shape = ChoosePoolShape(c.asked, c.cpus, c.limit);
    EXPECT_EQ(shape.threads, c.threads) << c.asked << " " << c.cpus << " " << c.limit;
    EXPECT_EQ(shape.spare_cpus, c.spare_cpus) << c.asked << " " << c.cpus << " " << c.limit;
  }
}

// --- A system that refuses threads ---

constexpr uid_t kNobodyElse = 61234;

[[noreturn]] void StartWithoutRoomThenWithRoom() {
  alarm(60);
  WorkerPool pool(5);
  rlimit before;
  getrlimit(RLIMIT_NPROC, &before);
  if (!LimitThreads(2, kNobodyElse)) std::_Exit(2);
  std::atomic<int> runs{0};
  for (int attempt = 0; attempt < 3; ++attempt) {
    const Status status = pool.Run([&](uint32_t) { ++runs; });
    if (status.code() != OFFLOAD_OUT_OF_HOST_MEMORY || runs != 0) std::_Exit(3);
    std::fprintf(stderr, "%s\n", status.message().c_str());
  }
  setrlimit(RLIMIT_NPROC, &before);
  for (int run = 0; run < 10; ++run)
    if (!pool.Run([&](uint32_t) { ++runs; }).ok()) std::_Exit(4);
  std::_Exit(runs == 50 ? 0 : 5);
}

TEST(WorkerPoolDeathTest, AFailedStartIsAnErrorAndALaterRunTriesAgain) {
  EXPECT_EXIT(StartWithoutRoomThenWithRoom(), testing::ExitedWithCode(0),
              "worker thread [1-5] of 5 did not start: the system refused another thread "
              "\\(Resource temporarily unavailable\\): raise the limit of threads \\(ulimit -u, "
              "cgroup pids.max\\) or of memory, or ask for fewer threads");
}

// --- Ranges ---

TEST(RangeOfWorkerTest, CoversExactlyInOrderAtMultiplesOfTheGrainAndEvenly) {
  for (uint64_t grain : {1u, 3u, 16u, 64u, 1000u})
    for (uint32_t workers : {1u, 2u, 3u, 7u, 64u, 1024u})
      for (uint64_t count : {uint64_t{0}, uint64_t{1}, grain - 1, grain, grain + 1, 31 * grain,
                             workers * grain - 1, workers * grain, workers * grain + 1,
                             uint64_t{1000003}, uint64_t{1} << 40, UINT64_MAX - 1, UINT64_MAX}) {
        uint64_t next = 0, smallest = UINT64_MAX, largest = 0;
        for (uint32_t index = 0; index < workers; ++index) {
          const WorkRange range = RangeOfWorker(count, grain, index, workers);
          ASSERT_EQ(range.begin, next);
          ASSERT_GE(range.end, range.begin);
          ASSERT_TRUE(range.end % grain == 0 || range.end == count);
          const uint64_t elements = range.end - range.begin;
          const uint64_t grains = elements / grain + (elements % grain != 0);
          smallest = std::min(smallest, grains);
          largest = std::max(largest, grains);
          next = range.end;
        }
        ASSERT_EQ(next, count);
        ASSERT_LE(largest - smallest, 1u);
      }
}

TEST(RangeOfWorkerTest, Examples) {
  const auto range = [](uint64_t count, uint64_t grain, uint32_t index, uint32_t workers) {
    const WorkRange r = RangeOfWorker(count, grain, index, workers);
    return std::pair(r.begin, r.end);
  };
  EXPECT_EQ(range(100, 16, 0, 3), std::pair(uint64_t{0}, uint64_t{48}));
  EXPECT_EQ(range(100, 16, 1, 3), std::pair(uint64_t{48}, uint64_t{80}));
  EXPECT_EQ(range(100, 16, 2, 3), std::pair(uint64_t{80}, uint64_t{100}));
  EXPECT_EQ(range(5, 16, 0, 2), std::pair(uint64_t{0}, uint64_t{5}));
  EXPECT_EQ(range(5, 16, 1, 2), std::pair(uint64_t{5}, uint64_t{5}));
}

TEST(RangeOfWorkerDeathTest, RefusesNonsense) {
  EXPECT_DEATH(RangeOfWorker(10, 0, 0, 1), "broken invariant grain > 0");
  EXPECT_DEATH(RangeOfWorker(10, 1, 2, 2), "broken invariant");
  EXPECT_DEATH(RangeOfWorker(10, 1, 0, 0), "broken invariant");
}

}  // namespace
}  // namespace hybridopt
