// Many optimizers of one context: they share a few threads, and none waits for something that only
// another one waits for.
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm_gate.h"
#include "runtime/runner_pool.h"
#include "runtime/side_threads.h"
#include "trainer.h"

namespace hybridopt::fault {
namespace {

constexpr size_t kOptimizers = 50;
constexpr uint32_t kWorkers = 2;

RunOptions Options(int32_t device_kind) {
  RunOptions run;
  run.device_kind = device_kind;
  run.counts = {2500};
  run.threads = kWorkers;
  run.sim_memory_bytes = uint64_t{64} << 20;
  return run;
}

void StepAll(const std::vector<std::unique_ptr<Trainer>>& trainers, uint64_t number) {
  for (const auto& trainer : trainers) {
    trainer->UploadGrads(number);
    ASSERT_OFFLOAD_OK(offload_optimizer_step(trainer->optimizer, nullptr, nullptr));
  }
  for (const auto& trainer : trainers)
    ASSERT_OFFLOAD_OK(offload_optimizer_wait(trainer->optimizer, 0, -1));
}

void Add(std::vector<std::unique_ptr<Trainer>>& trainers, const RunOptions& run,
         offload_context_t context) {
  trainers.push_back(std::make_unique<Trainer>(run, context));
  trainers.back()->AddParams();
  trainers.back()->Commit();
}

std::vector<unsigned char> BitsOfOneAlone(const RunOptions& run, uint64_t steps) {
  Trainer owner(run);
  std::vector<std::unique_ptr<Trainer>> alone;
  Add(alone, run, owner.context);
  for (uint64_t number = 0; number < steps; ++number) StepAll(alone, number);
  return alone.front()->Bits();
}

// The library's threads in this process. Streams of the simulated device are threads too, but have
// other names.
size_t LibraryThreads() {
  size_t threads = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    threads += name.starts_with("hybridopt/") ? 1 : 0;
  }
  return threads;
}

TEST(ManyOptimizersTest, OnTheHostAllShareOneThread) {
  const RunOptions run = Options(OFFLOAD_DEVICE_HOST);
  const Trainer owner(run);
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (size_t i = 0; i < kOptimizers; ++i) {
    Add(trainers, run, owner.context);
    StepAll(trainers, i);
    ASSERT_EQ(LibraryThreads(), kWorkers + 1) << i + 1 << " optimizers";
  }
}

// More may have run for a while, where steps took longer than the pool's patience.
TEST(ManyOptimizersTest, OnADeviceFewThreadsStayHoweverManyOptimizersThereAre) {
  const RunOptions run = Options(OFFLOAD_DEVICE_SIM);
  const Trainer owner(run);
  std::vector<std::unique_ptr<Trainer>> trainers;
  while (trainers.size() < kOptimizers) Add(trainers, run, owner.context);
  for (uint64_t number = 0; number < 3; ++number) StepAll(trainers, number);
  for (const auto& trainer : trainers) EXPECT_EQ(trainer->Bits(), trainers.front()->Bits());
  constexpr size_t kMost = kWorkers + RunnerPool::kIdleRunnersMax + SideThreads::kMost;
  while (LibraryThreads() > kMost) std::this_thread::yield();
}

TEST(ManyOptimizersTest, AllOthersStepWhileACommFunctionOfOneDoesNotReturn) {
  constexpr uint64_t kSteps = 3;
  for (const int32_t device_kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    const RunOptions run = Options(device_kind);
    const std::vector<unsigned char> expected = BitsOfOneAlone(run, kSteps);
    const Trainer owner(run);
    CommGate comm;
    const offload_comm_t table = comm.Table();
    RunOptions stuck_run = run;
    stuck_run.comm = &table;
    std::vector<std::unique_ptr<Trainer>> stuck, others;
    Add(stuck, stuck_run, owner.context);
    stuck.front()->UploadGrads(0);
    ASSERT_OFFLOAD_OK(offload_optimizer_step(stuck.front()->optimizer, nullptr, nullptr));
    comm.AwaitEntered();

    while (others.size() < kOptimizers - 1) Add(others, run, owner.context);
    for (uint64_t number = 0; number < kSteps; ++number) StepAll(others, number);
    for (const auto& other : others) EXPECT_TRUE(other->Bits() == expected);
    others.clear();  // destroy does not wait for it either

    EXPECT_EQ(offload_optimizer_wait(stuck.front()->optimizer, 0, 0), OFFLOAD_TIMED_OUT);
    comm.gate.open = true;
    ASSERT_OFFLOAD_OK(offload_optimizer_wait(stuck.front()->optimizer, 0, -1));
    EXPECT_TRUE(stuck.front()->Bits() == BitsOfOneAlone(run, 1));
  }
}

TEST(ManyOptimizersTest, AllOthersStepWhileTheStreamOfOneStandsStill) {
  const RunOptions run = Options(OFFLOAD_DEVICE_SIM);
  const std::vector<unsigned char> expected = BitsOfOneAlone(run, 1);
  const Trainer owner(run);
  std::vector<std::unique_ptr<Trainer>> stuck, others;
  Add(stuck, run, owner.context);
  stuck.front()->UploadGrads(0);
  offload_stream_t stream = nullptr;
  ASSERT_OFFLOAD_OK(offload_stream_create(owner.context, &stream));
  Gate gate;
  EXPECT_OFFLOAD_OK(offload_stream_run(owner.context, stream, Gate::Hold, &gate));
  auto options = Make<offload_step_options_t>();
  options.stream = stream;
  ASSERT_OFFLOAD_OK(offload_optimizer_step(stuck.front()->optimizer, &options, nullptr));

  while (others.size() < kOptimizers - 1) Add(others, run, owner.context);
  StepAll(others, 0);
  for (const auto& other : others) EXPECT_TRUE(other->Bits() == expected);

  EXPECT_EQ(offload_optimizer_wait(stuck.front()->optimizer, 0, 0), OFFLOAD_TIMED_OUT);
  gate.open = true;
  ASSERT_OFFLOAD_OK(offload_optimizer_wait(stuck.front()->optimizer, 0, -1));
  EXPECT_TRUE(stuck.front()->Bits() == expected);
  EXPECT_OFFLOAD_OK(offload_stream_destroy(owner.context, stream));
}

// A comm table of one rank whose sum returns when the sums of all tables have been called: so do
// ranks whose optimizers step in different orders.
struct Meeting {
  offload_comm_t Table() {
    auto table = Make<offload_comm_t>();
    table.world = 1;
    table.user = this;
    table.sum = [](void* self, double*, uint32_t, int64_t) -> int32_t {
      auto& meeting = *static_cast<Meeting*>(self);
      meeting.missing -= 1;
      while (meeting.missing > 0) std::this_thread::yield();
      return OFFLOAD_OK;
    };
    table.max = [](void*, int32_t*, uint32_t, int64_t) -> int32_t { return OFFLOAD_OK; };
    table.barrier = [](void*, int64_t) -> int32_t { return OFFLOAD_OK; };
    return table;
  }

  std::atomic<int64_t> missing;
};

TEST(ManyOptimizersTest, CommFunctionsOfAllMayWaitForEachOther) {
  constexpr size_t kMeeting = 2 * RunnerPool::kIdleRunnersMax;
  for (const int32_t device_kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    RunOptions run = Options(device_kind);
    const std::vector<unsigned char> expected = BitsOfOneAlone(run, 1);
    Meeting meeting{kMeeting};
    const offload_comm_t table = meeting.Table();
    run.comm = &table;
    const Trainer owner(run);
    std::vector<std::unique_ptr<Trainer>> trainers;
    while (trainers.size() < kMeeting) Add(trainers, run, owner.context);
    StepAll(trainers, 0);
    for (const auto& trainer : trainers) EXPECT_TRUE(trainer->Bits() == expected);
  }
}

// 70,000 other optimizers may come in between: their tickets differ in more than 16 bits.
TEST(ManyOptimizersTest, NoneTakesTheTicketOfAnother) {
  constexpr size_t kOthers = 70'000;
  constexpr size_t kSameIn16Bits = 65'535;
  const RunOptions run = Options(OFFLOAD_DEVICE_HOST);
  const Trainer owner(run);
  std::vector<std::unique_ptr<Trainer>> trainers;
  std::vector<offload_ticket_t> tickets;
  const auto step = [&] {
    Add(trainers, run, owner.context);
    tickets.emplace_back();
    ASSERT_OFFLOAD_OK(offload_optimizer_step(trainers.back()->optimizer, nullptr, &tickets.back()));
  };
  auto options = Make<offload_optimizer_options_t>();
  options.algorithm = OFFLOAD_SGD;
  for (size_t made = 0; made < kOthers; ++made) {
    if (made == 0 || made == kSameIn16Bits || made == kOthers - 1) {
      step();
      continue;
    }
    offload_optimizer_t optimizer = nullptr;
    ASSERT_OFFLOAD_OK(offload_optimizer_create(owner.context, &options, &optimizer));
    ASSERT_OFFLOAD_OK(offload_optimizer_destroy(optimizer));
  }
  ASSERT_EQ(tickets.size(), 3u);
  for (size_t one = 0; one < trainers.size(); ++one) {
    const offload_optimizer_t optimizer = trainers[one]->optimizer;
    EXPECT_OFFLOAD_OK(offload_optimizer_wait(optimizer, tickets[one], -1));
    for (size_t other = 0; other < trainers.size(); ++other) {
      if (other == one) continue;
      ExpectError(offload_optimizer_wait(optimizer, tickets[other], 0), OFFLOAD_INVALID_ARGUMENT,
                  {"which this optimizer has not given out"});
    }
  }
}

}  // namespace
}  // namespace hybridopt::fault
