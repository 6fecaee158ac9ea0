// A stash returns the bytes that were put aside, in spite of all other work: random programs of a
// caller with several streams and lanes, beside optimizer steps. And each wait of the stash is
// needed: without it a program that shows this gets wrong bytes.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "../scale.h"
#include "stash_rig.h"

namespace hybridopt {
namespace {

// ------------------------------------------------------------------------------ random programs --

// A caller that reuses device memory as soon as the stash allows it: after release, drop and pop it
// overwrites the memory at once, on the stream of that call.
class Program {
 public:
  Program(StashRig& rig, uint64_t seed, uint32_t lanes, uint32_t slabs)
      : rig_(rig), random_(seed), lanes_(lanes), slabs_(slabs), marks_(lanes) {
    for (Buffer& buffer : buffers_) buffer.data = rig.Allocate(kBytesMax);
    for (size_t i = 0; i < std::size(buffers_); ++i)
      buffers_[i].stream = rig.streams[i % std::size(rig.streams)];
    taken_before_ = rig.leaky_device->taken();
  }

  void Run(int calls) {
    for (int i = 0; i < calls && !testing::Test::HasFailure(); ++i) Call();
    while (!live_.empty()) {
      if (live_.back().destination == nullptr && FreeBuffer() == nullptr)
        Drop(live_.size() - 1);
      else
        Fetch(live_.size() - 1, false);
    }
    for (offload_stream_t stream : rig_.streams) rig_.Synchronize(stream);
  }

  void Check() {
    for (const Expected& one : expected_)
      ASSERT_EQ(std::memcmp(one.got, one.content.data(), one.content.size()), 0) << one.what;
    EXPECT_EQ(rig_.leaky_device->taken(), taken_before_) << "pinned memory, events or streams";
    const offload_stash_stats_t stats = rig_.Stats();
    EXPECT_EQ(stats.tickets, 0u);
    EXPECT_EQ(stats.used_bytes, 0u);
    EXPECT_EQ(stats.held_bytes, 0u);
    EXPECT_EQ(stats.pushes, pushes_);
    EXPECT_EQ(stats.pushed_bytes, pushed_bytes_);
    EXPECT_EQ(stats.refused_pushes, refused_);
    EXPECT_EQ(stats.pops, pops_);
    EXPECT_EQ(stats.drops, drops_);
  }

 private:
  static constexpr uint64_t kBytesMax = 20'000;
  struct Buffer {
    std::byte* data = nullptr;
    offload_stream_t stream = nullptr;
    bool used = false;
  };
  struct Live {
    offload_stash_ticket_t ticket = 0;
    uint32_t lane = 0;
    uint64_t order = 0;  // among all pushes
    std::vector<std::byte> content;
    Buffer* source = nullptr;       // until it is released
    Buffer* destination = nullptr;  // while it is prefetched
  };
  struct Expected {
    const std::byte* got;
    std::vector<std::byte> content;
    const char* what;
  };
  struct LaneMark {
    offload_stash_mark_t mark = 0;
    uint64_t order = 0;
    bool set = false;
  };

  void Call() {
    const uint64_t drawn = random_.Below(100);
    if (live_.empty() || drawn < 35) return Push();
    const size_t index = random_.Below(live_.size());
    if (drawn < 50) return Release(live_[index]);
    if (drawn < 65) return Prefetch(live_[index]);
    if (drawn < 85) return Fetch(random_.OneIn(2) ? live_.size() - 1 : index, random_.OneIn(4));
    if (drawn < 92) return Drop(index);
    if (drawn < 96) return Mark();
    return Rollback();
  }

  Buffer* FreeBuffer() {
    std::vector<Buffer*> free;
    for (Buffer& buffer : buffers_)
      if (!buffer.used) free.push_back(&buffer);
    return free.empty() ? nullptr : free[random_.Below(free.size())];
  }
  // Another user overwrites the memory, and reads its own values there.
  void GiveBack(Buffer* buffer) {
    if (buffer == nullptr) return;
    const std::vector<std::byte> others = StashRig::RandomBytes(kBytesMax, random_);
    rig_.Write(buffer->stream, buffer->data, others);
    buffer->used = false;
    Expect(*buffer, others, "memory that was used again");
  }
  void Expect(const Buffer& buffer, const std::vector<std::byte>& content, const char* what) {
    expected_.push_back({rig_.Read(buffer.stream, buffer.data, content.size()), content, what});
  }

  uint64_t UsedSlabs() const {
    uint64_t used = 0;
    for (const Live& live : live_) used += SlabsOf(live.content.size());
    return used;
  }
  static uint64_t SlabsOf(uint64_t bytes) {
    return (bytes + StashRig::kSlabBytes - 1) / StashRig::kSlabBytes;
  }

  void Push() {
    Buffer* const buffer = FreeBuffer();
    if (buffer == nullptr) return;
    Live live;
    live.lane = static_cast<uint32_t>(random_.Below(lanes_));
    live.content = StashRig::RandomBytes(1 + random_.Below(kBytesMax), random_);
    rig_.Write(buffer->stream, buffer->data, live.content);
    ASSERT_OFFLOAD_OK(offload_stash_push(rig_.stash, live.lane, buffer->data, live.content.size(),
                                         buffer->stream, &live.ticket));
    const bool fits = UsedSlabs() + SlabsOf(live.content.size()) <= slabs_;
    ASSERT_EQ(live.ticket != 0, fits) << "whether there is room depends on the live tickets alone";
    (fits ? pushes_ : refused_) += 1;
    if (!fits) return;
    pushed_bytes_ += live.content.size();
    buffer->used = true;
    live.source = buffer;
    live.order = ++order_;
    live_.push_back(std::move(live));
  }

  void Release(Live& live) {
    if (live.source == nullptr) return;
    ASSERT_OFFLOAD_OK(offload_stash_release(rig_.stash, live.ticket, live.source->stream));
    GiveBack(std::exchange(live.source, nullptr));
  }

  void Prefetch(Live& live) {
    Buffer* const buffer = FreeBuffer();
    if (live.destination != nullptr || buffer == nullptr) return;
    ASSERT_OFFLOAD_OK(
        offload_stash_prefetch(rig_.stash, live.ticket, buffer->data, kBytesMax, buffer->stream));
    buffer->used = true;
    live.destination = buffer;
  }

  // Prefetch, if that has not been done, and pop.
  void Fetch(size_t index, bool keep) {
    Prefetch(live_[index]);
    Live& live = live_[index];
    if (live.destination == nullptr) return;
    // A pop on one stream does not order another stream.
    if (live.source != nullptr && live.source->stream != live.destination->stream) Release(live);
    ASSERT_OFFLOAD_OK(offload_stash_pop(rig_.stash, live.ticket, live.destination->stream,
                                        keep ? uint32_t{OFFLOAD_STASH_KEEP} : 0));
    pops_ += 1;
    Expect(*live.destination, live.content, "bytes that came back");
    GiveBack(std::exchange(live.destination, nullptr));
    if (!keep || live.source != nullptr) GiveBack(std::exchange(live.source, nullptr));
    if (!keep) live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  // Streams other than `stream` that use the memory of a ticket which ends on `stream`.
  void Leave(Live& live, offload_stream_t stream) {
    if (live.source != nullptr && live.source->stream != stream) Release(live);
    if (live.destination == nullptr || live.destination->stream == stream) return;
    ASSERT_OFFLOAD_OK(
        offload_stash_pop(rig_.stash, live.ticket, live.destination->stream, OFFLOAD_STASH_KEEP));
    pops_ += 1;
    GiveBack(std::exchange(live.destination, nullptr));
  }
  void Forget(size_t index) {
    GiveBack(live_[index].source);
    GiveBack(live_[index].destination);
    drops_ += 1;
    live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  void Drop(size_t index) {
    const offload_stream_t stream = rig_.streams[random_.Below(std::size(rig_.streams))];
    Leave(live_[index], stream);
    ASSERT_OFFLOAD_OK(offload_stash_drop(rig_.stash, live_[index].ticket, stream));
    Forget(index);
  }

  void Mark() {
    const auto lane = static_cast<uint32_t>(random_.Below(lanes_));
    ASSERT_OFFLOAD_OK(offload_stash_mark(rig_.stash, lane, &marks_[lane].mark));
    marks_[lane].order = order_;
    marks_[lane].set = true;
  }

  void Rollback() {
    const auto lane = static_cast<uint32_t>(random_.Below(lanes_));
    if (!marks_[lane].set) return;
    const offload_stream_t stream = rig_.streams[random_.Below(std::size(rig_.streams))];
    const auto goes = [&](const Live& live) {
      return live.lane == lane && live.order > marks_[lane].order;
    };
    for (Live& live : live_)
      if (goes(live)) Leave(live, stream);
    ASSERT_OFFLOAD_OK(offload_stash_rollback(rig_.stash, marks_[lane].mark, stream));
    for (size_t i = live_.size(); i > 0; --i)
      if (goes(live_[i - 1])) Forget(i - 1);
  }

  StashRig& rig_;
  Random random_;
  const uint32_t lanes_;
  const uint32_t slabs_;
  Buffer buffers_[18];
  std::vector<Live> live_;
  std::vector<LaneMark> marks_;  // by lane
  std::vector<Expected> expected_;
  int taken_before_ = 0;
  uint64_t order_ = 0, pushes_ = 0, pushed_bytes_ = 0, refused_ = 0, pops_ = 0, drops_ = 0;
};

// Params of an optimizer of the same context, and steps that are under way beside the stash.
struct Steps {
  explicit Steps(const fault::RunOptions& run, offload_context_t context) : trainer(run, context) {
    trainer.AddParams();
    trainer.Commit();
    trainer.UploadGrads(0);
  }
  void Queue() { EXPECT_OFFLOAD_OK(offload_optimizer_step(trainer.optimizer, nullptr, nullptr)); }
  std::vector<unsigned char> Bits() {
    EXPECT_OFFLOAD_OK(offload_optimizer_wait(trainer.optimizer, 0, -1));
    return trainer.Bits();
  }
  fault::Trainer trainer;
};

class StashProgram : public testing::TestWithParam<int32_t> {};

TEST_P(StashProgram, EveryByteComesBackBesideOptimizerSteps) {
  constexpr int kCalls = 90, kSteps = 3;
  fault::RunOptions run;
  run.threads = 1;
  StashSetting setting;
  setting.device_kind = GetParam();
  std::vector<unsigned char> alone;  // the bits of steps without a stash beside them
  {
    StashRig rig(setting);
    Steps steps(run, rig.context);
    for (int step = 0; step < kSteps; ++step) steps.Queue();
    alone = steps.Bits();
  }
  const int programs = Scaled(50);
  for (int i = 0; i < programs && !HasFailure(); ++i) {
    SCOPED_TRACE("program " + std::to_string(i));
    setting.seed = static_cast<uint64_t>(i);
    setting.delay_ns_max = i % 3 == 0 ? 0 : 20'000;
    setting.slabs = i % 2 == 0 ? 24 : 12;
    setting.lanes = 1 + static_cast<uint32_t>(i % 3);
    StashRig rig(setting);
    Steps steps(run, rig.context);
    Program program(rig, setting.seed, setting.lanes, setting.slabs);
    for (int step = 0; step < kSteps; ++step) {
      steps.Queue();
      program.Run(kCalls / kSteps);
    }
    program.Check();
    EXPECT_EQ(steps.Bits(), alone);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, StashProgram, testing::ValuesIn(DevicesUnderTest()),
                         [](const auto& info) { return DeviceText(info.param); });

// ------------------------------------------------------------------------- each wait, left out --

// A caller whose streams are blocked at the important points. With a wait left out, the side that
// should have waited is done before the streams go on; otherwise the streams go on at once.
struct LeftOut : public testing::Test {
  static constexpr uint64_t kBytes = 3000;

  void SetUp() override {
    if (TestsRunOnCuda()) GTEST_SKIP() << "streams stand still only on the simulated device";
  }

  enum class Seen { kRight, kWrongBytes, kFailed };
  using Scene = Seen (LeftOut::*)();

  // The scenario gives the right bytes, and without the wait wrong ones.
  void ExpectNeeded(StashLeak leak, Scene scene, uint32_t slabs = 4,
                    Seen without = Seen::kWrongBytes) {
    for (const bool leaking : {false, true}) {
      SCOPED_TRACE(leaking ? "without the wait" : "with the wait");
      StashSetting setting;
      setting.slabs = slabs;
      setting.leak = leaking ? leak : StashLeak::kNone;
      Gate gate;
      StashRig rig(setting);
      rig_ = &rig;
      gate_ = &gate;
      leaking_ = leaking;
      Random random(7);
      x_ = StashRig::RandomBytes(kBytes, random);
      y_ = StashRig::RandomBytes(kBytes, random);
      source_ = rig.Allocate(kBytes);
      destination_ = rig.Allocate(kBytes);
      a_ = rig.streams[0], b_ = rig.streams[1], c_ = rig.streams[2];
      rig.leaking = true;
      EXPECT_EQ((this->*scene)(), leaking ? without : Seen::kRight);
      rig.leaking = false;
      gate.open = true;
      if (without == Seen::kFailed && leaking) AbandonRig();
      rig_ = nullptr;
    }
  }

  // The rest of the rig would find a failed device.
  void AbandonRig() {
    EXPECT_OFFLOAD_OK(offload_stash_destroy(std::exchange(rig_->stash, nullptr)));
    for (offload_stream_t& stream : rig_->streams) stream = nullptr;
  }

  void Hold(offload_stream_t stream) {
    EXPECT_OFFLOAD_OK(offload_stream_run(rig_->context, stream, Gate::Hold, gate_));
  }
  // Lets the streams go on: at once, or without the wait when `done` has returned.
  template <typename Done>
  void Open(Done&& done) {
    if (leaking_) done();
    gate_->open = true;
  }
  void AwaitCopies() { EXPECT_OFFLOAD_OK(offload_stash_wait(rig_->stash, 0, kLongNs)); }
  offload_stash_ticket_t Push(offload_stream_t stream, const std::byte* data) {
    offload_stash_ticket_t ticket = 0;
    EXPECT_OFFLOAD_OK(offload_stash_push(rig_->stash, 0, data, kBytes, stream, &ticket));
    EXPECT_NE(ticket, 0u);
    return ticket;
  }
  void Prefetch(offload_stash_ticket_t ticket, offload_stream_t stream) {
    EXPECT_OFFLOAD_OK(offload_stash_prefetch(rig_->stash, ticket, destination_, kBytes, stream));
  }
  void Pop(offload_stash_ticket_t ticket, offload_stream_t stream) {
    EXPECT_OFFLOAD_OK(offload_stash_pop(rig_->stash, ticket, stream, 0));
  }
  void WriteSource() {
    rig_->Write(a_, source_, x_);
    rig_->Synchronize(a_);
  }
  // Puts x aside from a stream that is not blocked.
  offload_stash_ticket_t PutAside() {
    WriteSource();
    const offload_stash_ticket_t ticket = Push(a_, source_);
    AwaitCopies();
    return ticket;
  }
  Seen Compare(const std::byte* got, const std::vector<std::byte>& content) {
    return std::memcmp(got, content.data(), kBytes) == 0 ? Seen::kRight : Seen::kWrongBytes;
  }
  // Reads the destination when stream b has come to its end.
  Seen ReadDestination(const std::vector<std::byte>& content) {
    const std::byte* const got = rig_->Read(b_, destination_, kBytes);
    rig_->Synchronize(b_);
    return Compare(got, content);
  }
  Seen FetchAndRead(offload_stash_ticket_t ticket) {
    Prefetch(ticket, b_);
    Pop(ticket, b_);
    return ReadDestination(x_);
  }

  Seen Producer() {
    Hold(a_);
    rig_->Write(a_, source_, x_);
    const offload_stash_ticket_t ticket = Push(a_, source_);
    Open([&] { AwaitCopies(); });
    rig_->Synchronize(a_);
    return FetchAndRead(ticket);
  }
  Seen UsersOfTheDestination() {
    const offload_stash_ticket_t ticket = PutAside();
    Hold(b_);
    rig_->Write(b_, destination_, y_);
    Prefetch(ticket, b_);
    Open([&] { AwaitCopies(); });
    Pop(ticket, b_);
    return ReadDestination(x_);
  }
  Seen CopyToTheHost() {
    Hold(a_);
    rig_->Write(a_, source_, x_);
    const offload_stash_ticket_t ticket = Push(a_, source_);
    Prefetch(ticket, b_);
    Open([&] { EXPECT_OFFLOAD_OK(offload_stash_wait(rig_->stash, ticket, kLongNs)); });
    rig_->Synchronize(a_);
    Pop(ticket, b_);
    return ReadDestination(x_);
  }
  Seen Release() {
    WriteSource();
    Hold(a_);
    const offload_stash_ticket_t ticket = Push(a_, source_);
    EXPECT_OFFLOAD_OK(offload_stash_release(rig_->stash, ticket, b_));
    rig_->Write(b_, source_, y_);
    Open([&] { rig_->Synchronize(b_); });
    rig_->Synchronize(a_);
    return FetchAndRead(ticket);
  }
  Seen PopBeforeTheCopy() {
    const offload_stash_ticket_t ticket = PutAside();
    Hold(c_);
    Prefetch(ticket, c_);
    Pop(ticket, b_);
    const std::byte* const got = rig_->Read(b_, destination_, kBytes);
    Open([&] { rig_->Synchronize(b_); });
    rig_->Synchronize(b_);
    return Compare(got, x_);
  }
  // The memory is freed: the copy then faults, as it would on a real device, or reads what another
  // tensor has there.
  Seen DropBeforeTheCopyToTheHost() {
    WriteSource();
    Hold(a_);
    const offload_stash_ticket_t ticket = Push(a_, source_);
    EXPECT_OFFLOAD_OK(offload_stash_drop(rig_->stash, ticket, b_));
    const auto free_source = [&] {
      rig_->Synchronize(b_);
      EXPECT_OFFLOAD_OK(offload_device_free(rig_->context, source_));
    };
    Open(free_source);
    if (!leaking_) free_source();
    return offload_stash_wait(rig_->stash, 0, kLongNs) == OFFLOAD_OK ? Seen::kRight : Seen::kFailed;
  }
  Seen DropBeforeTheCopyToTheDevice() {
    const offload_stash_ticket_t ticket = PutAside();
    Hold(c_);
    Prefetch(ticket, c_);
    EXPECT_OFFLOAD_OK(offload_stash_drop(rig_->stash, ticket, b_));
    rig_->Write(b_, destination_, y_);
    Open([&] { rig_->Synchronize(b_); });
    AwaitCopies();
    return ReadDestination(y_);
  }
  Seen SlabsUsedAgain() {
    const offload_stash_ticket_t ticket = PutAside();
    Hold(c_);
    Prefetch(ticket, c_);
    Pop(ticket, b_);
    rig_->Write(a_, source_, y_);
    const offload_stash_ticket_t other = Push(a_, source_);
    Open([&] { EXPECT_OFFLOAD_OK(offload_stash_wait(rig_->stash, other, kLongNs)); });
    return ReadDestination(x_);
  }
  Seen WaitOnTheHost() {
    WriteSource();
    Hold(a_);
    const offload_stash_ticket_t ticket = Push(a_, source_);
    if (!leaking_) gate_->open = true;
    EXPECT_OFFLOAD_OK(offload_stash_wait(rig_->stash, ticket, kLongNs));
    rig_->Write(b_, source_, y_);
    rig_->Synchronize(b_);
    gate_->open = true;
    rig_->Synchronize(a_);
    rig_->leaking = false;
    AwaitCopies();
    return FetchAndRead(ticket);
  }
  Seen Destroy() {
    const offload_stash_ticket_t ticket = PutAside();
    rig_->Write(b_, destination_, y_);
    rig_->Synchronize(b_);
    Hold(c_);
    Prefetch(ticket, c_);
    if (!leaking_) gate_->open = true;
    EXPECT_OFFLOAD_OK(offload_stash_destroy(std::exchange(rig_->stash, nullptr)));
    gate_->open = true;
    return ReadDestination(x_);
  }

  StashRig* rig_ = nullptr;
  Gate* gate_ = nullptr;
  bool leaking_ = false;
  std::vector<std::byte> x_, y_;
  std::byte* source_ = nullptr;
  std::byte* destination_ = nullptr;
  offload_stream_t a_ = nullptr, b_ = nullptr, c_ = nullptr;
};

TEST_F(LeftOut, ProducerOfWhatIsPushed) {
  ExpectNeeded(StashLeak::kDownBehindProducer, &LeftOut::Producer);
}
TEST_F(LeftOut, UsersOfTheDestinationOfAPrefetch) {
  ExpectNeeded(StashLeak::kUpBehindUsers, &LeftOut::UsersOfTheDestination);
}
TEST_F(LeftOut, CopyToTheHostBeforeThatToTheDevice) {
  ExpectNeeded(StashLeak::kUpBehindDown, &LeftOut::CopyToTheHost);
}
TEST_F(LeftOut, ReleaseBehindTheCopyToTheHost) {
  ExpectNeeded(StashLeak::kBehindDown, &LeftOut::Release);
}
TEST_F(LeftOut, PopBehindTheCopyToTheDevice) {
  ExpectNeeded(StashLeak::kBehindUp, &LeftOut::PopBeforeTheCopy);
}
TEST_F(LeftOut, DropBehindTheCopyToTheHost) {
  ExpectNeeded(StashLeak::kBehindDown, &LeftOut::DropBeforeTheCopyToTheHost, 4, Seen::kFailed);
}
TEST_F(LeftOut, DropBehindTheCopyToTheDevice) {
  ExpectNeeded(StashLeak::kBehindUp, &LeftOut::DropBeforeTheCopyToTheDevice);
}
TEST_F(LeftOut, SlabsBehindTheCopyOutOfThem) {
  ExpectNeeded(StashLeak::kDownBehindUp, &LeftOut::SlabsUsedAgain, 1);
}
TEST_F(LeftOut, LookWhetherSlabsMayBeUsedAgain) {
  ExpectNeeded(StashLeak::kReached, &LeftOut::SlabsUsedAgain, 1);
}
TEST_F(LeftOut, WaitOfTheHost) { ExpectNeeded(StashLeak::kWait, &LeftOut::WaitOnTheHost); }
TEST_F(LeftOut, DestroyBehindTheCopies) {
  ExpectNeeded(StashLeak::kSynchronize, &LeftOut::Destroy);
}

}  // namespace
}  // namespace hybridopt
