// Steps and moves beside the copies of a stash: they give way to a prefetch that is under way and
// to no other, and only the order of the copies changes. Streams are blocked at the important
// points, so that nothing here depends on time.
#include <gtest/gtest.h>

#include <thread>

#include "stash_rig.h"

namespace hybridopt {
namespace {

// Counts copies, by the label of their stream, and blocks one of them.
class LinkWatch final : public LabelledDevice {
 public:
  using LabelledDevice::LabelledDevice;

  // The next copy on this stream waits until Open.
  void HoldNext(const char* stream) {
    std::lock_guard lock(mutex_);
    held_ = stream;
    begun_ = open_ = false;
  }
  void AwaitHeld() const {
    while (!begun_) std::this_thread::yield();
  }
  void Open() { open_ = true; }

  uint64_t copies(const char* stream) { return SumOf(copies_, stream); }
  uint64_t bytes(const char* stream) { return SumOf(bytes_, stream); }
  uint64_t records(const char* event) { return SumOf(records_, event); }
  uint64_t waits(const char* event) { return SumOf(waits_, event); }
  // How often a thread of the library has checked the stash's copies.
  int looks() const { return looks_; }

  Status Record(EventHandle event, StreamHandle stream) override {
    Add(&records_, LabelOf(event), 1);
    return ForwardingDevice::Record(event, stream);
  }
  Result<bool> Reached(EventHandle event) override {
    if (LabelOf(event) == "stash interval" && std::this_thread::get_id() != caller_) looks_ += 1;
    return ForwardingDevice::Reached(event);
  }
  Status Wait(EventHandle event, int64_t timeout_ns) override {
    Add(&waits_, LabelOf(event), 1);
    return ForwardingDevice::Wait(event, timeout_ns);
  }
  Status CopyToHost(StreamHandle stream, void* host, const void* device, uint64_t bytes) override {
    HYBRIDOPT_TRY(Count(stream, bytes));
    return ForwardingDevice::CopyToHost(stream, host, device, bytes);
  }
  Status CopyToDevice(StreamHandle stream, void* device, const void* host,
                      uint64_t bytes) override {
    HYBRIDOPT_TRY(Count(stream, bytes));
    return ForwardingDevice::CopyToDevice(stream, device, host, bytes);
  }

 private:
  using Sums = std::map<std::string, uint64_t>;  // by label

  uint64_t SumOf(const Sums& sums, const char* label) {
    std::lock_guard lock(mutex_);
    const auto found = sums.find(label);
    return found != sums.end() ? found->second : 0;
  }
  void Add(Sums* sums, const std::string& label, uint64_t count) {
    std::lock_guard lock(mutex_);
    (*sums)[label] += count;
  }
  Status Count(StreamHandle stream, uint64_t bytes) {
    const std::string label = LabelOf(stream);
    Add(&copies_, label, 1);
    Add(&bytes_, label, bytes);
    {
      std::lock_guard lock(mutex_);
      if (held_.empty() || label != held_) return {};
      held_.clear();
    }
    return ForwardingDevice::Run(
        stream,
        [](void* self) {
          auto* const watch = static_cast<LinkWatch*>(self);
          watch->begun_ = true;
          while (!watch->open_) std::this_thread::yield();
        },
        this);
  }

  const std::thread::id caller_ = std::this_thread::get_id();
  std::atomic<bool> begun_ = false;
  std::atomic<bool> open_ = false;
  std::atomic<int> looks_ = 0;
  std::mutex mutex_;  // guards all below
  std::string held_;
  Sums copies_, bytes_, records_, waits_;
};

struct LinkTest : public testing::Test {
  static constexpr uint64_t kBytes = 9000;

  void SetUp() override {
    if (TestsRunOnCuda()) GTEST_SKIP() << "streams stand still only on the simulated device";
  }

  void Make(const fault::RunOptions& run, uint64_t device_bytes = 16 << 20) {
    StashSetting setting;
    setting.device_bytes = device_bytes;
    setting.delay_ns_max = 20'000;
    setting.wrap = [this](std::unique_ptr<Device> device) {
      auto wrapped = std::make_unique<LinkWatch>(std::move(device));
      watch = wrapped.get();
      return wrapped;
    };
    rig = std::make_unique<StashRig>(setting);
    trainer = std::make_unique<fault::Trainer>(run, rig->context);
    trainer->AddParams();
    trainer->Commit();
    trainer->UploadGrads(0);
    data = rig->Allocate(kBytes);
    destination = rig->Allocate(kBytes);
    Random random(7);
    content = StashRig::RandomBytes(kBytes, random);
    rig->Write(rig->streams[0], data, content);
  }
  void TearDown() override {
    trainer.reset();
    rig.reset();
  }

  static fault::RunOptions Streamed() {
    fault::RunOptions run;
    run.threads = 1;
    run.host_executors = OFFLOAD_EXECUTORS_STREAMED;
    run.stream_ring_bytes = 4 * (1024 * 16 + (64 << 10));
    return run;
  }

  offload_stash_ticket_t Push() {
    offload_stash_ticket_t ticket = 0;
    EXPECT_OFFLOAD_OK(offload_stash_push(rig->stash, 0, data, kBytes, rig->streams[0], &ticket));
    return ticket;
  }
  void Prefetch(offload_stash_ticket_t ticket) {
    EXPECT_OFFLOAD_OK(
        offload_stash_prefetch(rig->stash, ticket, destination, kBytes, rig->streams[0]));
  }
  void ExpectBack(offload_stash_ticket_t ticket) {
    EXPECT_OFFLOAD_OK(offload_stash_pop(rig->stash, ticket, rig->streams[0], 0));
    const std::byte* const got = rig->Read(rig->streams[0], destination, kBytes);
    rig->Synchronize(rig->streams[0]);
    EXPECT_EQ(std::memcmp(got, content.data(), kBytes), 0);
  }
  // A prefetch that is blocked in the middle of its copies.
  offload_stash_ticket_t PrefetchHeld() {
    const offload_stash_ticket_t ticket = Push();
    watch->HoldNext("stash up");
    Prefetch(ticket);
    watch->AwaitHeld();
    return ticket;
  }

  offload_ticket_t Step() {
    offload_ticket_t ticket = 0;
    EXPECT_OFFLOAD_OK(offload_optimizer_step(trainer->optimizer, nullptr, &ticket));
    return ticket;
  }
  bool HasEnded(offload_ticket_t ticket) {
    return offload_optimizer_wait(trainer->optimizer, ticket, 0) == OFFLOAD_OK;
  }
  void Await(offload_ticket_t ticket) {
    EXPECT_OFFLOAD_OK(offload_optimizer_wait(trainer->optimizer, ticket, kLongNs));
  }
  // Waits until the library has checked the prefetch several times, or is done without that.
  void AwaitLooks(offload_ticket_t ticket) {
    for (const int before = watch->looks(); watch->looks() < before + 6 && !HasEnded(ticket);)
      std::this_thread::yield();
  }
  offload_stats_t Stats() {
    auto stats = Make<offload_stats_t>();
    EXPECT_OFFLOAD_OK(offload_optimizer_get_stats(trainer->optimizer, &stats));
    return stats;
  }
  std::vector<unsigned char> BitsWithoutStash(const fault::RunOptions& run) {
    Make(run);
    Await(Step());
    const std::vector<unsigned char> bits = trainer->Bits();
    TearDown();
    return bits;
  }
  template <typename Struct>
  static Struct Make() {
    return fault::Make<Struct>();
  }

  LinkWatch* watch = nullptr;
  std::unique_ptr<StashRig> rig;
  std::unique_ptr<fault::Trainer> trainer;
  std::byte *data = nullptr, *destination = nullptr;
  std::vector<std::byte> content;
};

TEST_F(LinkTest, StateThatStreamsGivesWayToAPrefetch) {
  const std::vector<unsigned char> alone = BitsWithoutStash(Streamed());
  Make(Streamed());
  const offload_stash_ticket_t prefetched = PrefetchHeld();
  const uint64_t before = watch->copies("up");
  const offload_ticket_t step = Step();
  AwaitLooks(step);
  EXPECT_EQ(watch->copies("up"), before) << "state went up beside a prefetch";
  EXPECT_FALSE(HasEnded(step));
  watch->Open();
  Await(step);
  EXPECT_GT(watch->copies("up"), before);
  EXPECT_EQ(trainer->Bits(), alone);
  EXPECT_EQ(Stats().gave_way_copies, 1u);  // the later chunks had no prefetch to give way to
  EXPECT_GT(Stats().gave_way_seconds, 0.0);
  ExpectBack(prefetched);
}

TEST_F(LinkTest, ParamsThatForwardWaitsForGiveWayToNothing) {
  fault::RunOptions run = Streamed();
  run.host_executors = OFFLOAD_EXECUTORS_CPU;
  run.stream_ring_bytes = 0;
  const std::vector<unsigned char> alone = BitsWithoutStash(run);
  Make(run);
  const offload_stash_ticket_t prefetched = PrefetchHeld();
  Await(Step());
  EXPECT_EQ(Stats().gave_way_copies, 0u);
  watch->Open();
  EXPECT_EQ(trainer->Bits(), alone);
  ExpectBack(prefetched);
}

// The prefetch cannot begin while the caller's stream, which waits for the step, uses its
// destination. If the step waited for the prefetch, both would wait for ever.
TEST_F(LinkTest, AStepDoesNotWaitForAPrefetchThatMayBeWaitingForIt) {
  const std::vector<unsigned char> alone = BitsWithoutStash(Streamed());
  Make(Streamed());
  const offload_stash_ticket_t ticket = Push();
  Gate gate;
  EXPECT_OFFLOAD_OK(offload_stream_run(rig->context, rig->streams[0], Gate::Hold, &gate));
  Prefetch(ticket);
  Await(Step());
  EXPECT_EQ(Stats().gave_way_copies, 0u);
  gate.open = true;
  EXPECT_EQ(trainer->Bits(), alone);
  ExpectBack(ticket);
}

TEST_F(LinkTest, StatesThatComeBackGiveWayToAPrefetch) {
  fault::RunOptions run = Streamed();
  run.movable = OFFLOAD_MOVABLE_STATES;
  const std::vector<unsigned char> alone = BitsWithoutStash(run);
  Make(run);
  Await(Step());
  offload_ticket_t move = 0;
  EXPECT_OFFLOAD_OK(offload_optimizer_offload_states(trainer->optimizer, nullptr, &move));
  Await(move);
  const offload_stash_ticket_t prefetched = PrefetchHeld();
  const uint64_t before = watch->copies("up");
  EXPECT_OFFLOAD_OK(offload_optimizer_reload_states(trainer->optimizer, nullptr, &move));
  AwaitLooks(move);
  EXPECT_EQ(watch->copies("up"), before);
  EXPECT_FALSE(HasEnded(move));
  watch->Open();
  Await(move);
  EXPECT_EQ(trainer->Bits(), alone);
  EXPECT_EQ(Stats().gave_way_copies, 1u);
  ExpectBack(prefetched);
}

// Queued copies give way to nothing. So if a prefetch is possible, a move is at most 64 MiB ahead
// of the device: 8 pieces on each of its two streams.
TEST_F(LinkTest, AMoveRunsFarAheadOfTheDeviceOnlyWithoutAStash) {
  fault::RunOptions run;
  run.device_fraction = 1;
  run.counts = {8 << 20};  // with 96 MiB of state
  run.movable = OFFLOAD_MOVABLE_STATES;
  Make(run, 400 << 20);
  for (const uint64_t pieces : {8, 12}) {
    offload_ticket_t move = 0;
    EXPECT_OFFLOAD_OK(offload_optimizer_offload_states(trainer->optimizer, nullptr, &move));
    Await(move);
    const uint64_t up = watch->copies("up"), other = watch->copies("device update");
    const uint64_t waits = watch->waits("moved");
    watch->HoldNext("up");
    EXPECT_OFFLOAD_OK(offload_optimizer_reload_states(trainer->optimizer, nullptr, &move));
    while (watch->waits("moved") == waits) std::this_thread::yield();
    EXPECT_EQ(watch->copies("up") - up, pieces);
    EXPECT_EQ(watch->copies("device update") - other, pieces);
    watch->Open();
    Await(move);
    if (rig->stash == nullptr) continue;
    EXPECT_OFFLOAD_OK(offload_stash_destroy(rig->stash));
    rig->stash = nullptr;
  }
}

TEST_F(LinkTest, AStashMayBeDestroyedWhileAStepGivesWayToIt) {
  const std::vector<unsigned char> alone = BitsWithoutStash(Streamed());
  Make(Streamed());
  PrefetchHeld();
  const offload_ticket_t step = Step();
  AwaitLooks(step);
  std::thread destroyer([&] {
    EXPECT_OFFLOAD_OK(offload_stash_destroy(rig->stash));
    rig->stash = nullptr;
  });
  watch->Open();
  destroyer.join();
  Await(step);
  EXPECT_EQ(trainer->Bits(), alone);
}

TEST_F(LinkTest, AnOptimizerMayBeDestroyedWhileItGivesWay) {
  Make(Streamed());
  const offload_stash_ticket_t prefetched = PrefetchHeld();
  AwaitLooks(Step());
  std::thread destroyer([&] { trainer.reset(); });
  watch->Open();
  destroyer.join();
  ExpectBack(prefetched);
}

TEST_F(LinkTest, AFailureOfThePrefetchEndsTheStepWithItsCause) {
  Make(Streamed());
  const offload_stash_ticket_t ticket = Push();
  EXPECT_OFFLOAD_OK(offload_stash_wait(rig->stash, ticket, kLongNs));
  watch->HoldNext("stash up");
  Prefetch(ticket);
  watch->AwaitHeld();
  const offload_ticket_t step = Step();
  AwaitLooks(step);
  EXPECT_OFFLOAD_OK(offload_device_free(rig->context, destination));  // the caller's mistake
  watch->Open();
  EXPECT_EQ(offload_optimizer_wait(trainer->optimizer, step, kLongNs), OFFLOAD_DEVICE_FAILED);
  EXPECT_NE(std::string(offload_last_error()).find("stash up"), std::string::npos)
      << offload_last_error();
}

TEST_F(LinkTest, APrefetchCountsWhatStandsAheadOfIt) {
  Make(Streamed());
  Await(Step());
  const offload_stash_ticket_t ticket = Push();
  const uint64_t before = watch->bytes("up"), waits = watch->waits("state down");
  watch->HoldNext("up");
  const offload_ticket_t step = Step();
  // Then the ring is full, and the step waits for its first chunk.
  while (watch->waits("state down") == waits) std::this_thread::yield();
  const uint64_t state_bytes = watch->bytes("up") - before;
  EXPECT_GT(state_bytes, 0u);
  EXPECT_EQ(rig->Stats().ahead_bytes, 0u);
  Prefetch(ticket);
  EXPECT_EQ(rig->Stats().ahead_bytes, state_bytes);
  watch->Open();
  Await(step);
  ExpectBack(ticket);
  const offload_stash_ticket_t later = Push();
  Prefetch(later);
  EXPECT_EQ(rig->Stats().ahead_bytes, state_bytes);
  ExpectBack(later);
}

// The only chunk is updated early, so no other one follows its params.
TEST_F(LinkTest, ParamsThatHaveArrivedStandAheadOfNothing) {
  fault::RunOptions run;
  run.counts = {700};
  run.device_fraction = 0;
  run.host_executors = OFFLOAD_EXECUTORS_CPU;
  run.movable = OFFLOAD_MOVABLE_GRADS;
  run.early_update_bytes = 1 << 20;
  Make(run);
  offload_ticket_t move = 0;
  EXPECT_OFFLOAD_OK(offload_optimizer_offload_grads(trainer->optimizer, nullptr, &move));
  Await(move);
  const offload_ticket_t step = Step();
  Await(step);
  auto result = Make<offload_step_result_t>();
  EXPECT_OFFLOAD_OK(offload_optimizer_step_result(trainer->optimizer, step, &result));
  EXPECT_EQ(result.early_elements, 700u);
  const offload_stash_ticket_t ticket = Push();
  Prefetch(ticket);
  EXPECT_EQ(rig->Stats().ahead_bytes, 0u);
  ExpectBack(ticket);
}

TEST_F(LinkTest, AStepCountsPushesThatStandAheadOfItsChunks) {
  Make(Streamed());
  Await(Step());
  EXPECT_EQ(Stats().pushes_ahead_bytes, 0u);
  const uint64_t chunks = watch->records("state down") / 2;  // each has two such events
  EXPECT_GT(chunks, 1u);
  watch->HoldNext("stash down");
  const offload_stash_ticket_t ticket = Push();
  watch->AwaitHeld();
  Await(Step());  // and it waits for no push
  EXPECT_EQ(Stats().pushes_ahead_bytes, chunks * kBytes);
  watch->Open();
  Prefetch(ticket);
  ExpectBack(ticket);
  rig->Stats();  // notes the end of the push
  Await(Step());
  EXPECT_EQ(Stats().pushes_ahead_bytes, chunks * kBytes);
}

}  // namespace
}  // namespace hybridopt
