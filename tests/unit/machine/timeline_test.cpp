// The order of queued work, its failures, and waits for it.
#include "machine/timeline.h"

#include <gtest/gtest.h>

#include <optional>
#include <thread>
#include <vector>

namespace hybridopt {
namespace {

constexpr int64_t kForever = -1;

Status AwaitIssued(Timeline& timeline, uint64_t sequence, uint64_t mark) {
  return timeline.AwaitIssued(sequence, mark, [] { return Status(); });
}

// A timeline whose pieces wait for permits of the test, and fail if the test says so.
class Line {
 public:
  Line()
      : timeline(
            std::in_place, runners,
            [this](uint32_t slot, uint64_t sequence) { return Execute(slot, sequence); },
            [this](bool failure) { return Settle(failure); }, progress) {
    EXPECT_TRUE(runners.Start().ok());
  }

  uint64_t Queue() {
    const Result<uint32_t> slot = timeline->NextSlot();
    EXPECT_TRUE(slot.ok()) << slot.status().message();
    return timeline->Submit().value();
  }
  Status Drain() {
    return timeline->Drain([] { return Status(); });
  }
  void Permit(int count) {
    permits_ += count;
    permits_.notify_all();
  }

  RunnerPool runners;
  std::atomic<uint64_t> progress = 0;
  std::atomic<uint64_t> failing = 0;    // this sequence number fails
  std::atomic<uint64_t> reporting = 0;  // this one fails on its own
  std::atomic<uint64_t> holding = 0;    // this one goes on in the background
  std::atomic<bool> holding_streams = false;
  std::atomic<int> settled = 0;
  std::atomic<int> settled_after_failure = 0;
  std::atomic<bool> settling_slowly = false;
  std::atomic<bool> returning_slowly = false;  // with the background ended
  Status settle_outcome;
  std::vector<std::pair<uint32_t, uint64_t>> executed;
  size_t executed_when_settled = 0;
  std::optional<Timeline> timeline;

 private:
  Status Execute(uint32_t slot, uint64_t sequence) {
    while (permits_ == 0) permits_.wait(0);
    permits_ -= 1;
    executed.emplace_back(slot, sequence);
    timeline->Reached(sequence, 5);
    if (sequence == holding) {
      timeline->Hold(sequence, 0, holding_streams);
      // Others may be queued meanwhile.
      const uint64_t least = timeline->submitted() - executed.size() + 1;
      const uint64_t queued = timeline->queued();
      EXPECT_GE(queued, least) << "counted";
      EXPECT_LE(queued, timeline->submitted() - executed.size() + 1) << "counted once";
    }
    if (sequence == reporting)
      timeline->Report(sequence, Status::Error(OFFLOAD_IO_FAILED, "no room for %d", 8));
    if (sequence == failing) return Status::Error(OFFLOAD_DEVICE_FAILED, "broken at %d", 7);
    return {};
  }
  Status Settle(bool failure) {
    (failure ? settled_after_failure : settled) += 1;
    executed_when_settled = executed.size();
    while (settling_slowly) std::this_thread::yield();
    timeline->Release(settle_outcome);
    while (returning_slowly) std::this_thread::yield();
    return settle_outcome;
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
  EXPECT_EQ(line.timeline->queued(), 0u);
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

TEST(Timeline, WhatIsIssuedIsAheadOfWhatIsReached) {
  Line line;
  line.Queue();
  Timeline& timeline = *line.timeline;
  timeline.Issued(1, 7);
  timeline.Issued(1, 3);  // late, and no way back
  EXPECT_TRUE(AwaitIssued(timeline, 1, 7).ok());
  EXPECT_FALSE(timeline.HasReached(1, 1));
  line.Permit(1);
  EXPECT_TRUE(timeline.Wait(1, -1).ok());
  EXPECT_TRUE(timeline.HasReached(1, Timeline::kMarks));
  EXPECT_TRUE(AwaitIssued(timeline, 1, Timeline::kMarks).ok());
}

TEST(Timeline, AMarkIsAwaitedByTheCallingThread) {
  Line line;
  line.failing = 2;
  line.Queue();
  line.Queue();
  std::thread permits([&] { line.Permit(2); });
  const Status reached = AwaitIssued(*line.timeline, 1, 5);
  EXPECT_TRUE(reached.ok() || reached.code() == OFFLOAD_POISONED) << reached.message();
  EXPECT_GE(line.progress, Timeline::ProgressAt(1, 5));
  // The second piece reaches mark 5, then fails.
  const Status failed = AwaitIssued(*line.timeline, 2, 6);
  EXPECT_EQ(failed.code(), OFFLOAD_POISONED);
  EXPECT_NE(failed.message().find("broken at 7"), std::string::npos) << failed.message();
  permits.join();
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
  EXPECT_EQ(line.timeline->queued(), 0u);
  EXPECT_TRUE(line.timeline->idle());
  EXPECT_EQ(line.progress, Timeline::kReleased) << "streams that wait are let go";
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
  EXPECT_TRUE(line.Drain().ok());
  EXPECT_EQ(line.executed.size(), 8u);
  EXPECT_EQ(line.progress, Timeline::kReleased);
  EXPECT_TRUE(line.timeline->Wait(8, 0).ok());
  line.timeline.reset();  // drained twice, harmlessly
}

TEST(Timeline, EndsAtOnceIfItNeverBegan) {
  Line line;
  line.timeline.reset();
  EXPECT_TRUE(line.executed.empty());
  EXPECT_EQ(line.progress, Timeline::kReleased);
}

// ------------------------------------------------------------------------ failing on its own --

TEST(Timeline, APieceThatFailsOnItsOwnTellsItsTicketAndNothingElseSuffers) {
  Line line;
  line.reporting = 2;
  line.Permit(3);
  for (int i = 0; i < 3; ++i) line.Queue();
  EXPECT_TRUE(line.timeline->Wait(3, kForever).ok());
  EXPECT_TRUE(line.timeline->Wait(1, 0).ok());
  for (int again = 0; again < 2; ++again) {
    const Status status = line.timeline->Wait(2, 0);
    EXPECT_EQ(status.code(), OFFLOAD_IO_FAILED);
    EXPECT_EQ(status.message(), "no room for 8");
  }
  EXPECT_TRUE(line.timeline->CheckPoison().ok());
  EXPECT_TRUE(line.timeline->WaitForAll(0).ok());  // its ticket has told
}

TEST(Timeline, WhoOnlyLooksIsToldNothing) {
  Line line;
  line.reporting = 1;
  line.Queue();
  EXPECT_EQ(line.timeline->Look(1).code(), OFFLOAD_TIMED_OUT);
  line.Permit(1);
  while (line.timeline->Look(1).code() == OFFLOAD_TIMED_OUT) std::this_thread::yield();
  EXPECT_TRUE(line.timeline->Look(1).ok());
  EXPECT_EQ(line.timeline->WaitForAll(0).code(), OFFLOAD_IO_FAILED);
}

TEST(Timeline, WhoWaitsForEverythingIsToldOnceOfAFailureThatNobodyHasHeardOf) {
  Line line;
  line.reporting = 1;
  line.Permit(2);
  line.Queue();
  line.Queue();
  EXPECT_EQ(line.timeline->WaitForAll(kForever).code(), OFFLOAD_IO_FAILED);
  EXPECT_TRUE(line.timeline->WaitForAll(0).ok());
  EXPECT_EQ(line.timeline->Wait(1, 0).code(), OFFLOAD_IO_FAILED);
}

TEST(Timeline, AFailureOfTheLastPieceIsToldOnceToo) {
  Line line;
  line.Permit(2);
  line.reporting = 1;
  line.Queue();
  EXPECT_EQ(line.timeline->Wait(1, kForever).code(), OFFLOAD_IO_FAILED);
  EXPECT_TRUE(line.timeline->WaitForAll(0).ok()) << "its ticket has told";
  line.reporting = 2;
  line.Queue();
  EXPECT_EQ(line.timeline->WaitForAll(kForever).code(), OFFLOAD_IO_FAILED);
  EXPECT_TRUE(line.timeline->WaitForAll(0).ok());
}

TEST(Timeline, RemembersWhyTheLastHaveFailedAndOfAllThatTheyHave) {
  Line line;
  line.Permit(1000);
  const uint64_t count = Timeline::kFailuresKept + 3;
  for (uint64_t sequence = 1; sequence <= count; ++sequence) {
    if (sequence != 2) line.reporting = sequence;
    line.Queue();
    (void)line.timeline->Wait(sequence, kForever);
  }
  EXPECT_TRUE(line.timeline->Wait(2, 0).ok());
  for (uint64_t sequence : {1, 3}) {
    const Status status = line.timeline->Wait(sequence, 0);
    EXPECT_EQ(status.code(), OFFLOAD_INVALID_STATE);
    EXPECT_NE(status.message().find("failed, and why has been forgotten: the last 64 failures are "
                                    "remembered"),
              std::string::npos)
        << status.message();
  }
  for (uint64_t sequence = 4; sequence <= count; ++sequence)
    EXPECT_EQ(line.timeline->Wait(sequence, 0).code(), OFFLOAD_IO_FAILED);
}

// ---------------------------------------------------------------------------- in the background --

TEST(Timeline, LaterPiecesRunAndCompleteBesideTheBackground) {
  Line line;
  line.holding = 1;
  line.Permit(3);
  for (int i = 0; i < 3; ++i) line.Queue();
  EXPECT_TRUE(line.timeline->Wait(2, kForever).ok());
  EXPECT_TRUE(line.timeline->Wait(3, kForever).ok());
  EXPECT_EQ(line.executed.size(), 3u);
  EXPECT_EQ(line.timeline->Wait(1, 0).code(), OFFLOAD_TIMED_OUT);
  EXPECT_EQ(line.timeline->WaitForAll(0).code(), OFFLOAD_TIMED_OUT);
  EXPECT_EQ(line.timeline->queued(), 1u);
  EXPECT_FALSE(line.timeline->idle());
  line.timeline->Wake();
  EXPECT_TRUE(line.timeline->Wait(1, kForever).ok());
  EXPECT_TRUE(line.timeline->WaitForAll(0).ok());
  EXPECT_EQ(line.settled, 1);
  EXPECT_TRUE(line.timeline->idle());
}

// It counts as one of those that may be queued, and its slot is given out again.
TEST(Timeline, AnyNumberOfPiecesPassesTheBackground) {
  Line line;
  line.holding = 1;
  line.Permit(1);
  line.Queue();
  for (uint64_t round = 0; round < 3; ++round) {
    const uint64_t first = line.timeline->submitted() + 1;
    while (line.timeline->queued() > 1) std::this_thread::yield();
    for (uint32_t i = 1; i < Timeline::kCapacity; ++i) line.Queue();
    const Result<uint32_t> full = line.timeline->NextSlot();
    EXPECT_EQ(full.status().code(), OFFLOAD_INVALID_STATE);
    line.Permit(Timeline::kCapacity - 1);
    for (uint64_t sequence = first; sequence <= line.timeline->submitted(); ++sequence)
      EXPECT_TRUE(line.timeline->Wait(sequence, kForever).ok());
  }
  EXPECT_EQ(line.executed.size(), 3 * 255u + 1);
  EXPECT_EQ(line.timeline->Wait(1, 0).code(), OFFLOAD_TIMED_OUT);
  line.timeline->Wake();
  EXPECT_TRUE(line.timeline->WaitForAll(kForever).ok());
}

TEST(Timeline, AFailureInTheBackgroundIsItsOwn) {
  Line line;
  line.holding = line.reporting = 1;
  line.Permit(2);
  line.Queue();
  line.Queue();
  EXPECT_TRUE(line.timeline->Wait(2, kForever).ok());
  line.timeline->Wake();
  EXPECT_EQ(line.timeline->WaitForAll(kForever).code(), OFFLOAD_IO_FAILED);
  EXPECT_EQ(line.timeline->Wait(1, 0).code(), OFFLOAD_IO_FAILED);
  EXPECT_TRUE(line.timeline->Wait(2, 0).ok());
}

// A stream that waits for the piece, or for a later one, must not write what it reads.
TEST(Timeline, TheBackgroundHoldsStreamsUntilItHasRead) {
  Line line;
  line.holding = 1;
  line.holding_streams = true;
  line.Permit(3);
  for (int i = 0; i < 3; ++i) line.Queue();
  std::atomic<bool> issued = false;
  std::thread caller([&] {
    EXPECT_TRUE(AwaitIssued(*line.timeline, 2, 1).ok());
    issued = true;
  });
  EXPECT_TRUE(line.timeline->Wait(3, kForever).ok());
  line.timeline->Issued(4, 1);
  EXPECT_EQ(line.progress, Timeline::ProgressAt(1, 5)) << "streams that wait for 1 stand still";
  EXPECT_FALSE(issued) << "and so do those that are to be put behind what is issued";
  line.timeline->ReleaseStreams();
  caller.join();
  EXPECT_EQ(line.progress, Timeline::ProgressAt(4, 0));
  line.timeline->ReleaseStreams();
  EXPECT_EQ(line.progress, Timeline::ProgressAt(4, 0));
  EXPECT_EQ(line.timeline->Wait(1, 0).code(), OFFLOAD_TIMED_OUT);
  line.timeline->Wake();
  EXPECT_TRUE(line.timeline->Wait(1, kForever).ok());
}

TEST(Timeline, AFailureLetsStreamsGoWhenTheBackgroundHasRead) {
  Line line;
  line.holding = 1;
  line.holding_streams = true;
  line.failing = 2;
  line.settling_slowly = true;
  line.Permit(2);
  line.Queue();
  line.Queue();
  EXPECT_EQ(AwaitIssued(*line.timeline, 2, 0).code(), OFFLOAD_POISONED)
      << "each thread that asks is told";
  EXPECT_EQ(line.progress, Timeline::ProgressAt(1, 5));
  EXPECT_EQ(line.timeline->Wait(2, 0).code(), OFFLOAD_TIMED_OUT) << "what was lent is being read";
  std::thread waiting(
      [&] { EXPECT_EQ(line.timeline->Wait(2, kForever).code(), OFFLOAD_DEVICE_FAILED); });
  line.timeline->ReleaseStreams();
  waiting.join();
  EXPECT_EQ(line.progress, Timeline::kReleased);
  line.settling_slowly = false;
  EXPECT_TRUE(line.timeline->Wait(1, kForever).ok());
}

TEST(Timeline, TheBackgroundEndsThoughNothingIsQueued) {
  Line line;
  line.holding = 1;
  line.Permit(1);
  line.Queue();
  while (line.progress.load() < Timeline::ProgressAt(2, 0)) std::this_thread::yield();
  line.timeline->Wake();
  EXPECT_TRUE(line.timeline->Wait(1, kForever).ok());
  line.Queue();
  EXPECT_EQ(line.settled, 1);
  line.Permit(1);
  EXPECT_TRUE(line.timeline->Wait(2, kForever).ok());
}

// The second piece may have begun when the background has something to do, the third has not.
TEST(Timeline, TheBackgroundGoesBeforeWhatIsQueued) {
  Line line;
  line.holding = 1;
  line.Permit(1);
  for (int piece = 0; piece < 3; ++piece) line.Queue();
  while (line.progress.load() < Timeline::ProgressAt(2, 0)) std::this_thread::yield();
  line.timeline->Wake();
  line.Permit(2);
  EXPECT_TRUE(line.timeline->WaitForAll(kForever).ok());
  EXPECT_EQ(line.settled, 1);
  EXPECT_LE(line.executed_when_settled, 2u);
}

TEST(Timeline, DrainingWaitsForTheBackground) {
  Line line;
  line.holding = 1;
  line.Permit(1);
  line.Queue();
  while (line.progress.load() < Timeline::ProgressAt(2, 0)) std::this_thread::yield();
  std::thread waker([&] { line.timeline->Wake(); });
  EXPECT_TRUE(line.Drain().ok());
  waker.join();
  EXPECT_EQ(line.settled, 1);
}

TEST(Timeline, AFailureBehindTheBackgroundLeavesItTheChanceToEnd) {
  Line line;
  line.holding = 1;
  line.failing = 2;
  line.Permit(2);
  line.Queue();
  line.Queue();
  EXPECT_EQ(line.timeline->Wait(2, kForever).code(), OFFLOAD_DEVICE_FAILED);
  EXPECT_TRUE(line.timeline->Wait(1, kForever).ok());
  EXPECT_EQ(line.settled_after_failure, 1);
}

TEST(Timeline, AFailureIsToldBeforeTheBackgroundHasEnded) {
  Line line;
  line.holding = 1;
  line.failing = 2;
  line.settling_slowly = true;
  line.Permit(2);
  line.Queue();
  line.Queue();
  while (line.settled_after_failure == 0) std::this_thread::yield();
  EXPECT_EQ(line.timeline->CheckPoison().code(), OFFLOAD_POISONED);
  EXPECT_EQ(line.timeline->Wait(2, 0).code(), OFFLOAD_DEVICE_FAILED);
  EXPECT_EQ(line.progress.load(), Timeline::kReleased);
  EXPECT_EQ(line.timeline->Wait(1, 0).code(), OFFLOAD_TIMED_OUT);
  EXPECT_FALSE(line.timeline->idle());
  line.settling_slowly = false;
  EXPECT_TRUE(line.timeline->Wait(1, kForever).ok());
}

TEST(Timeline, ABackgroundThatFailsForMoreThanItselfPoisons) {
  Line line;
  line.holding = 1;
  line.settle_outcome = Status::Error(OFFLOAD_COMM_FAILED, "a rank is gone");
  line.Permit(1);
  line.Queue();
  while (line.progress.load() < Timeline::ProgressAt(2, 0)) std::this_thread::yield();
  line.timeline->Wake();
  while (line.timeline->CheckPoison().ok()) std::this_thread::yield();
  EXPECT_EQ(line.timeline->CheckPoison().code(), OFFLOAD_POISONED);
  EXPECT_EQ(line.timeline->NextSlot().status().code(), OFFLOAD_POISONED);
}

TEST(Timeline, TheCauseThatIsToldIsTheFirstFailure) {
  Line line;
  line.holding = 1;
  line.failing = 2;
  line.settle_outcome = Status::Error(OFFLOAD_COMM_FAILED, "a rank is gone");
  line.Permit(2);
  line.Queue();
  line.Queue();
  EXPECT_TRUE(line.Drain().ok());
  const std::string text = line.timeline->CheckPoison().message();
  EXPECT_NE(text.find("broken at 7"), std::string::npos) << text;
}

// After a thread has got the error of a failure that concerns more than a save, its next call
// returns POISONED, and not the status of the failed device.
TEST(Timeline, PoisonIsThereBeforeAWaiterIsTold) {
  Line line;
  line.holding = line.reporting = 1;
  line.settle_outcome = Status::Error(OFFLOAD_DEVICE_FAILED, "the device is gone");
  line.returning_slowly = true;
  line.Permit(1);
  line.Queue();
  while (line.progress.load() < Timeline::ProgressAt(2, 0)) std::this_thread::yield();
  line.timeline->Wake();
  EXPECT_EQ(line.timeline->Wait(1, kForever).code(), OFFLOAD_IO_FAILED);
  EXPECT_EQ(line.timeline->CheckPoison().code(), OFFLOAD_POISONED);
  EXPECT_EQ(line.progress, Timeline::kReleased);
  line.returning_slowly = false;
}

}  // namespace
}  // namespace hybridopt
