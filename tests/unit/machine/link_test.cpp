// The order of copies on the link, on a device that ends prefetches when a test says so.
#include "machine/link.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <thread>
#include <vector>

#include "../../forwarding_device.h"

namespace hybridopt {
namespace {

constexpr int64_t kLongNs = 120'000'000'000;

// A device whose events follow a script. A prefetch waits for two events and ends at a third one.
// The script has the number of the check at which each of them is reached. One check asks about all
// prefetches that have not ended; checks count from 0.
class ScriptedDevice final : public ForwardingDevice {
 public:
  static constexpr int kNever = 1 << 30;
  struct Script {
    int caller_ready_at = 0;
    int down_at = 0;
    int ends_at = kNever;
    bool fails = false;
  };

  explicit ScriptedDevice(std::vector<Script> scripts)
      : ForwardingDevice(CreateHostDevice()),
        scripts_(std::move(scripts)),
        looks_(scripts_.size()) {}

  std::array<EventHandle, 2> awaited(size_t prefetch) const {
    return {Handle(3 * prefetch), Handle(3 * prefetch + 1)};
  }
  EventHandle end(size_t prefetch) const { return Handle(3 * prefetch + 2); }
  int looks(size_t prefetch) const { return looks_[prefetch]; }

  Result<bool> Reached(EventHandle event) override {
    const size_t number = reinterpret_cast<uintptr_t>(event) - 1;
    const size_t prefetch = number / 3;
    const Script& script = scripts_[prefetch];
    if (script.fails) return Status::Error(OFFLOAD_DEVICE_FAILED, "the test's");
    if (number % 3 == 0) return looks_[prefetch] > script.caller_ready_at;
    if (number % 3 == 1) return looks_[prefetch] > script.down_at;
    return looks_[prefetch]++ >= script.ends_at;
  }

 private:
  static EventHandle Handle(size_t number) { return reinterpret_cast<EventHandle>(number + 1); }

  const std::vector<Script> scripts_;
  std::vector<std::atomic<int>> looks_;
};

struct LinkTest : public testing::Test {
  void Make(std::vector<ScriptedDevice::Script> scripts, int64_t timeout_ns = kLongNs) {
    device = std::make_unique<ScriptedDevice>(std::move(scripts));
    link = std::make_unique<Link>(*device, timeout_ns);
    link->AddRoom(16);
    user = std::make_unique<LinkUser>(*link);
  }
  // On a stream of its own, or on the stream with that number.
  uint64_t Prefetch(size_t number, uint64_t bytes) { return Prefetch(number, bytes, number); }
  uint64_t Prefetch(size_t number, uint64_t bytes, size_t stream) {
    return link->PrefetchQueued({reinterpret_cast<StreamHandle>(stream + 1),
                                 device->awaited(number), device->end(number), bytes});
  }

  std::unique_ptr<ScriptedDevice> device;
  std::unique_ptr<Link> link;
  std::unique_ptr<LinkUser> user;
};

TEST_F(LinkTest, WithoutPrefetchesNobodyLooksOrWaits) {
  Make({{}});
  user->GiveWay(100);
  EXPECT_EQ(device->looks(0), 0);
  EXPECT_EQ(user->gave_way_copies(), 0u);
  EXPECT_EQ(user->gave_way_seconds(), 0.0);
}

TEST_F(LinkTest, WaitsUntilWhatIsUnderWayHasEnded) {
  Make({{.ends_at = 4}});
  Prefetch(0, 10);
  user->GiveWay(100);
  EXPECT_EQ(device->looks(0), 5);
  EXPECT_EQ(user->gave_way_copies(), 1u);
  EXPECT_GT(user->gave_way_seconds(), 0.0);
  user->GiveWay(100);  // it is known to have ended
  EXPECT_EQ(device->looks(0), 5);
  EXPECT_EQ(user->gave_way_copies(), 1u);
  link->PrefetchEnded(device->end(0));  // then this does not find it
}

// The caller's stream may be waiting for this very step, and a copy to the host for the stream.
TEST_F(LinkTest, DoesNotWaitForWhatWaitsForMoreThanTheLink) {
  for (const auto& [caller_ready_at, down_at] :
       {std::pair(ScriptedDevice::kNever, 0), {0, ScriptedDevice::kNever}}) {
    Make({{caller_ready_at, down_at, 50}});
    Prefetch(0, 10);
    user->GiveWay(100);
    EXPECT_EQ(device->looks(0), 1);
    EXPECT_EQ(user->gave_way_copies(), 0u);
  }
}

TEST_F(LinkTest, WaitsForOneOfSeveralThatOnlyTheLinkHoldsUp) {
  Make(
      {{.caller_ready_at = ScriptedDevice::kNever, .ends_at = 50}, {.ends_at = 3}, {.ends_at = 1}});
  for (size_t i = 0; i < 3; ++i) Prefetch(i, 10);
  user->GiveWay(100);
  EXPECT_EQ(device->looks(0), 4);
  EXPECT_EQ(device->looks(1), 4);
  EXPECT_EQ(device->looks(2), 2);
}

TEST_F(LinkTest, OfOneStreamTheFirstThatHasNotEndedIsEnough) {
  Make(
      {{.ends_at = 2}, {.ends_at = 1}, {.caller_ready_at = ScriptedDevice::kNever, .ends_at = 50}});
  for (size_t i = 0; i < 3; ++i) Prefetch(i, 10, 0);
  user->GiveWay(100);
  EXPECT_EQ(device->looks(0), 3);
  EXPECT_EQ(device->looks(1), 2);  // from the third check on
  EXPECT_EQ(device->looks(2), 1);  // from the fourth check on
  EXPECT_EQ(user->gave_way_copies(), 1u);
}

// Prefetches follow each other without an end: a copy goes on when three times its bytes have gone
// first, so a step has a quarter of the link.
TEST_F(LinkTest, NoStepStarves) {
  for (const auto& [bytes, passed] : {std::pair<uint64_t, int>{1, 1}, {33, 1}, {34, 2}, {66, 2}}) {
    SCOPED_TRACE(bytes);
    std::vector<ScriptedDevice::Script> scripts;
    for (int i = 0; i < 16; ++i) scripts.push_back({.ends_at = i + 1});
    Make(scripts);
    for (size_t i = 0; i < scripts.size(); ++i) Prefetch(i, 100);
    user->GiveWay(bytes);
    EXPECT_EQ(device->looks(15), 1 + passed);
    EXPECT_EQ(user->gave_way_copies(), 1u);
    user->GiveWay(bytes);  // the next copy gives way to others
    EXPECT_EQ(device->looks(15), 2 * (1 + passed));
    EXPECT_EQ(user->gave_way_copies(), 2u);
  }
}

TEST_F(LinkTest, ADeviceThatStandsStillHoldsNobodyUpForEver) {
  Make({{}}, 1'000'000);
  Prefetch(0, 10);
  user->GiveWay(100);
  EXPECT_GE(user->gave_way_seconds(), 1e-3);
}

TEST_F(LinkTest, ADeviceThatFailsHoldsNobodyUp) {
  Make({{.fails = true}});
  Prefetch(0, 10);
  user->GiveWay(100);
  EXPECT_EQ(user->gave_way_copies(), 0u);
}

TEST_F(LinkTest, AStashThatGoesHoldsNobodyUp) {
  Make({{}});
  Prefetch(0, 10);
  std::thread step([&] { user->GiveWay(100); });
  while (device->looks(0) == 0) std::this_thread::yield();
  link->PrefetchEnded(device->end(0));
  step.join();
  EXPECT_EQ(user->gave_way_copies(), 1u);
  EXPECT_TRUE(link->has_prefetches());
  link->RemoveRoom(16);
  EXPECT_FALSE(link->has_prefetches());
}

TEST_F(LinkTest, CountsWhatStandsAhead) {
  Make({{}, {}, {}, {}, {}});
  EXPECT_EQ(Prefetch(0, 10), 0u);
  LinkUser other(*link);
  user->QueuedUp(100);
  const uint64_t first = user->queued_up_bytes();
  user->QueuedUp(20);
  other.QueuedUp(7);
  EXPECT_EQ(Prefetch(1, 10), 127u);
  user->ArrivedUpTo(user->queued_up_bytes());
  user->ArrivedUpTo(first);  // told late: these have arrived with the others
  EXPECT_EQ(Prefetch(2, 10), 7u);
  user->QueuedUp(50);
  EXPECT_EQ(Prefetch(3, 10), 57u);
  user.reset();  // with a copy that is not known to have ended
  EXPECT_EQ(Prefetch(4, 10), 7u);
}

TEST_F(LinkTest, CountsPushesThatStandAheadOfEachChunk) {
  Make({});
  user->QueuedDown();
  EXPECT_EQ(user->pushes_ahead_bytes(), 0u);
  link->PushQueued(100);
  link->PushQueued(20);
  user->QueuedDown();
  link->PushEnded(100);
  user->QueuedDown();
  EXPECT_EQ(user->pushes_ahead_bytes(), 140u);
}

}  // namespace
}  // namespace hybridopt
