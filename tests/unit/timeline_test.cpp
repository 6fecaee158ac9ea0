// The order of queued work, its failure, and who waits.
#include "core/timeline.h"

#include <gtest/gtest.h>

#include <optional>
#include <thread>
#include <vector>

namespace hybridopt {
namespace {

constexpr int64_t kForever = -1;

// A timeline whose pieces wait for permits, and fail where told.
class Line {
 public:
  Line()
      : timeline(
            std::in_place,
            [this](uint32_t slot, uint64_t sequence) { return Execute(slot, sequence); },
            progress) {}

  uint64_t Queue() {
    const Result<uint32_t> slot = timeline->NextSlot();
    EXPECT_TRUE(slot.ok()) << slot.status().message();
    return timeline->Submit().value();
  }
  void Permit(int count) {
    permits_ += count;
    permits_.notify_all();
  }

  std::atomic<uint64_t> progress = 0;
  std::atomic<uint64_t> failing = 0;  // this sequence number fails
  std::vector<std::pair<uint32_t, uint64_t>> executed;
  std::optional<Timeline> timeline;

 private:
  Status Execute(uint32_t slot, uint64_t sequence) {
    while (permits_ == 0) permits_.wait(0);
    permits_ -= 1;
    executed.emplace_back(slot, sequence);
    timeline->Reached(sequence, 5);
    if (sequence == failing) return Status::Error(OFFLOAD_DEVICE_FAILED, "broken at %d", 7);
    return {};
  }
  std::atomic<int> permits_ = 0;
};

TEST(Timeline, RunsInOrderAndCountsFromOne) {
  Line line;
  line.Permit(1000);
  for (uint64_t sequence = 1; sequence <= 100; ++sequence) {
    EXPECT_EQ(line.Queue(), sequence);
    if (sequence % 8 == 0) {
      EXPECT_TRUE(line.timeline->Wait(sequence, kForever).ok());
    }
  }
  EXPECT_TRUE(line.timeline->Wait(100, kForever).ok());
  ASSERT_EQ(line.executed.size(), 100u);
  for (uint64_t i = 0; i < 100; ++i)
    EXPECT_EQ(line.executed[i],
              std::make_pair(static_cast<uint32_t>((i + 1) % Timeline::kCapacity), i + 1));
  EXPECT_EQ(line.timeline->completed(), 100u);
  EXPECT_TRUE(line.timeline->idle());
}

TEST(Timeline, SlotsOfQueuedWorkAreNotGivenOutAgain) {
  Line line;
  std::vector<bool> taken(Timeline::kCapacity);
  for (uint32_t i = 0; i < Timeline::kCapacity; ++i) {
    const uint32_t slot = line.timeline->NextSlot().value();
    EXPECT_EQ(line.timeline->NextSlot().value(), slot) << "asking twice takes nothing";
    ASSERT_LT(slot, Timeline::kCapacity);
    EXPECT_FALSE(taken[slot]);
    taken[slot] = true;
    EXPECT_TRUE(line.timeline->Submit().ok());
  }
  const Result<uint32_t> full = line.timeline->NextSlot();
  EXPECT_EQ(full.status().code(), OFFLOAD_INVALID_STATE);
  EXPECT_NE(full.status().message().find("256 calls are queued, at most 256"), std::string::npos);
  line.Permit(1);
  EXPECT_TRUE(line.timeline->Wait(1, kForever).ok());
  EXPECT_TRUE(line.timeline->NextSlot().ok());
  line.Permit(Timeline::kCapacity);
}

TEST(Timeline, WaitsTimeOutAndTheWorkGoesOn) {
  Line line;
  EXPECT_TRUE(line.timeline->Wait(0, 0).ok()) << "nothing queued, nothing to wait for";
  line.Queue();
  for (const int64_t timeout_ns : {int64_t{0}, int64_t{1000}, int64_t{2'000'000}}) {
    const Status status = line.timeline->Wait(1, timeout_ns);
    EXPECT_EQ(status.code(), OFFLOAD_TIMED_OUT);
    EXPECT_NE(status.message().find("wait again"), std::string::npos);
  }
  EXPECT_FALSE(line.timeline->idle());
  line.Permit(1);
  EXPECT_TRUE(line.timeline->Wait(1, INT64_MAX).ok());
  EXPECT_TRUE(line.timeline->Wait(1, 0).ok());
}

TEST(Timeline, AFailurePoisonsWhatComesAfterButNotWhatWasBefore) {
  Line line;
  line.failing = 3;
  for (int i = 0; i < 6; ++i) line.Queue();
  std::vector<std::thread> waiters;
  for (uint64_t sequence = 1; sequence <= 6; ++sequence)
    waiters.emplace_back([&, sequence] {
      const Status status = line.timeline->Wait(sequence, kForever);
      if (sequence < 3) {
        EXPECT_TRUE(status.ok()) << status.message();
      } else {
        EXPECT_EQ(status.code(), OFFLOAD_DEVICE_FAILED);
        EXPECT_EQ(status.message(), "broken at 7");
      }
    });
  line.Permit(100);
  for (std::thread& waiter : waiters) waiter.join();
  EXPECT_EQ(line.executed.size(), 3u) << "what was queued behind the failure never runs";
  EXPECT_EQ(line.timeline->completed(), 2u);
  EXPECT_TRUE(line.timeline->idle());
  EXPECT_EQ(line.progress, UINT64_MAX) << "streams that wait are let go";
  for (const Status& status : {line.timeline->CheckPoison(), line.timeline->NextSlot().status()}) {
    EXPECT_EQ(status.code(), OFFLOAD_POISONED);
    EXPECT_NE(status.message().find("broken at 7"), std::string::npos) << status.message();
  }
}

TEST(Timeline, ProgressOnlyGrowsAndTellsMarksApart) {
  EXPECT_LT(Timeline::ProgressAt(1, Timeline::kMarks - 1), Timeline::ProgressAt(2, 0));
  EXPECT_EQ(Timeline::ProgressAt(1, Timeline::kMarks), Timeline::ProgressAt(2, 0));
  Line line;
  // All marks of "nothing queued" are reached from the start.
  EXPECT_GE(line.progress, Timeline::ProgressAt(0, Timeline::kMarks));
  EXPECT_LT(line.progress, Timeline::ProgressAt(1, 1));
  line.Queue();
  line.Queue();
  line.Permit(1);
  EXPECT_TRUE(line.timeline->Wait(1, kForever).ok());
  while (line.progress < Timeline::ProgressAt(2, 0)) std::this_thread::yield();
  EXPECT_EQ(line.progress, Timeline::ProgressAt(2, 0)) << "all of 1, nothing of 2";
  line.Permit(1);
  EXPECT_TRUE(line.timeline->Wait(2, kForever).ok());
}

TEST(Timeline, EndsWhenItsQueueHasRun) {
  Line line;
  for (int i = 0; i < 8; ++i) line.Queue();
  line.Permit(100);
  line.timeline->Drain();
  EXPECT_EQ(line.executed.size(), 8u);
  EXPECT_EQ(line.progress, UINT64_MAX);
  EXPECT_TRUE(line.timeline->Wait(8, 0).ok());
  line.timeline.reset();  // drained twice, harmlessly
}

TEST(Timeline, EndsAtOnceIfItNeverBegan) {
  Line line;
  line.timeline.reset();
  EXPECT_TRUE(line.executed.empty());
  EXPECT_EQ(line.progress, UINT64_MAX);
}

}  // namespace
}  // namespace hybridopt
