// A slow save: work that is queued after it runs, completes and reports its results, for any number
// of calls, and still the files have the state of the save's own point. The caller gets the memory
// that the save reads back when a later step has completed.
#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <thread>

#include "../forwarding_device.h"
#include "../held_files.h"
#include "../labelled_device.h"
#include "../scale.h"
#include "../temporary_directory.h"
#include "base/system.h"
#include "lifecycle_rig.h"
#include "machine/timeline.h"

namespace hybridopt {
namespace {

constexpr int64_t kAWhileNs = 20'000'000;  // nothing may happen in this time

constexpr int64_t kLongNs = 300'000'000'000;  // only a hang takes this long

// Some params have separate masters; some, if the step is in place, are their own masters. With
// split masters all params are in bf16 and are halves of their masters.
Problem SmallProblem(size_t steps, StateChoice state = {}) {
  const std::vector<ParamSpec> params = {
      {OFFLOAD_BF16, OFFLOAD_BF16, 0, 0, 1500},
      {state.split() ? OFFLOAD_BF16 : OFFLOAD_FP32, OFFLOAD_BF16, 0, 0, 2100},
      {OFFLOAD_BF16, OFFLOAD_FP32, 0, 0, 700}};
  Problem problem = RandomProblem(OFFLOAD_ADAMW, params, steps, 3);
  problem.state = state;
  return problem;
}

struct Place {
  int32_t device;
  double fraction;
  int32_t host_executors = OFFLOAD_EXECUTORS_AUTO;
};

class BesideASave : public testing::Test {
 protected:
  // Even after a failed assertion the save must end, or destroy would wait for it.
  void TearDown() override { files_.before_reading = files_.before_end = false; }

  // A save of the state after one step, which stops before it has read anything, or when it has
  // read everything.
  void Start(const Problem& problem, const Place& place, bool before_reading,
             offload_stream_t* stream = nullptr) {
    solved_.emplace(problem);
    (before_reading ? files_.before_reading : files_.before_end) = true;
    LifecycleSetting setting;
    setting.device_kind = place.device;
    setting.optimizer = {place.fraction, 1024, 2, place.host_executors};
    setting.optimizer.save_buffer_bytes = buffer_bytes_;
    setting.files = &files_;
    setting.wrap = wrap_;
    rig_.emplace(solved_->problem, setting);
    rig_->NewGrads(solved_->problem.steps[0]);
    rig_->BindAll();
    rig_->Wait(rig_->Step(solved_->problem.steps[0]));
    path_ = directory_ / std::to_string(saves_++);
    if (stream == nullptr) save_ = rig_->Save(path_);
  }
  offload_ticket_t QueueStep(size_t step) {
    rig_->NewGrads(solved_->problem.steps[step]);
    rig_->BindAll();
    return rig_->Step(solved_->problem.steps[step]);
  }
  static std::string Text(const Place& place) {
    return ", device " + std::to_string(place.device) + ", fraction " +
           std::to_string(place.fraction) + ", executors " + std::to_string(place.host_executors);
  }
  int32_t Look(offload_ticket_t ticket) {
    return offload_optimizer_wait(rig_->optimizer(), ticket, 0);
  }
  // A step that updates nothing.
  offload_ticket_t EmptyStep() {
    for (void*& grad : rig_->grad) rig_->Free(grad);
    rig_->BindAll();
    return rig_->Step({std::vector<std::optional<Bytes>>(rig_->size()), {}});
  }
  offload_ticket_t DropGrads() {
    return rig_->Move(offload_optimizer_offload_grads, {{}, OFFLOAD_MOVE_DROP});
  }
  // Compares the content of the save with the state at its point.
  std::string SavedDifference() {
    LifecycleSetting setting;
    setting.device_kind = OFFLOAD_DEVICE_HOST;
    LifecycleRig rig(solved_->problem, setting);
    if (rig.TryLoad(path_) != OFFLOAD_OK) return offload_last_error();
    return rig.Difference(solved_->trace[1]);
  }

  const TemporaryDirectory directory_;
  HeldFiles files_;
  std::function<std::unique_ptr<Device>(std::unique_ptr<Device>)> wrap_;
  std::optional<Solved> solved_;
  std::optional<LifecycleRig> rig_;
  std::string path_;
  uint64_t buffer_bytes_ = 0;  // for what steps put aside
  int saves_ = 0;
  offload_ticket_t save_ = 0;
};

TEST_F(BesideASave, AnyNumberOfStepsCompletes) {
  constexpr size_t kSteps = 300;  // more than may be queued
  const Problem problem = SmallProblem(kSteps);
  for (const Place& place : {Place{OFFLOAD_DEVICE_HOST, 0}, Place{OFFLOAD_DEVICE_SIM, 0.4}}) {
    Start(problem, place, false);
    for (size_t step = 1; step < kSteps; ++step) {
      rig_->NewGrads(problem.steps[step]);
      rig_->BindAll();
      const offload_ticket_t ticket = rig_->Step(problem.steps[step]);
      ASSERT_EQ(offload_optimizer_wait(rig_->optimizer(), ticket, kLongNs), OFFLOAD_OK)
          << offload_last_error();
      const Model& model = solved_->trace[step + 1];
      ASSERT_EQ(rig_->ResultDifference(model, ticket), "") << "step " << step;
      for (uint32_t id = 0; id < rig_->size(); ++id)
        ASSERT_EQ(rig_->Read(rig_->data[id], problem.params[id].data_bytes()),
                  model.params[id].data)
            << "step " << step << ", param " << id;
    }
    EXPECT_EQ(Look(save_), OFFLOAD_TIMED_OUT);
    EXPECT_EQ(Look(0), OFFLOAD_TIMED_OUT);
    EXPECT_EQ(rig_->Stats().queued, 1u);
    EXPECT_EQ(rig_->Stats().steps_applied + rig_->Stats().steps_skipped, kSteps);
    files_.before_end = false;
    rig_->Wait(save_);
    EXPECT_EQ(rig_->Stats().queued, 0u);
    EXPECT_EQ(SavedDifference(), "");
    EXPECT_EQ(rig_->Difference(solved_->trace[kSteps]), "");
  }
}

TEST_F(BesideASave, NoExecutorOverwritesWhatItHasStillToRead) {
  for (int32_t executors :
       {OFFLOAD_EXECUTORS_AUTO, OFFLOAD_EXECUTORS_CPU, OFFLOAD_EXECUTORS_STREAMED}) {
    for (double fraction : {0.0, 0.4}) {
      Start(SmallProblem(2), {AcceleratorUnderTest(), fraction, executors}, true);
      rig_->NewGrads(solved_->problem.steps[1]);
      rig_->BindAll();
      const offload_ticket_t step = rig_->Step(solved_->problem.steps[1]);
      EXPECT_EQ(offload_optimizer_wait(rig_->optimizer(), step, kAWhileNs), OFFLOAD_TIMED_OUT)
          << "executors " << executors;
      files_.before_reading = false;
      rig_->Wait(step);
      rig_->Wait(save_);
      EXPECT_EQ(SavedDifference(), "") << "executors " << executors << ", fraction " << fraction;
      EXPECT_EQ(rig_->Difference(solved_->trace[2]), "");
    }
  }
}

constexpr uint64_t kSlotBytes = 1024 * sizeof(float);  // chunks have 1024 elements

const std::vector<Place> kPlacesWithBuffers = {
    {OFFLOAD_DEVICE_HOST, 0},
    {OFFLOAD_DEVICE_SIM, 0, OFFLOAD_EXECUTORS_CPU},
    {OFFLOAD_DEVICE_SIM, 0.4, OFFLOAD_EXECUTORS_CPU},
    {OFFLOAD_DEVICE_SIM, 0.4, OFFLOAD_EXECUTORS_STREAMED},
    {OFFLOAD_DEVICE_SIM, 0.4, OFFLOAD_EXECUTORS_AUTO},
    {OFFLOAD_DEVICE_SIM, 1}};

// The save has read nothing when the steps have completed, and the caller has written its params.
TEST_F(BesideASave, WithRoomForAllStepsDoNotWaitForIt) {
  constexpr size_t kSteps = 4;
  buffer_bytes_ = UINT64_MAX;  // no more is taken than all state could use
  for (const StateChoice& state : StateChoices()) {
    for (const Place& place : kPlacesWithBuffers) {
      SCOPED_TRACE(state.Text() + Text(place));
      Start(SmallProblem(kSteps, state), place, true);
      for (size_t step = 1; step < kSteps; ++step)
        ASSERT_EQ(offload_optimizer_wait(rig_->optimizer(), QueueStep(step), kLongNs), OFFLOAD_OK)
            << offload_last_error();
      EXPECT_EQ(Look(save_), OFFLOAD_TIMED_OUT);
      for (uint32_t id = 0; id < rig_->size(); ++id) {
        const uint64_t bytes = solved_->problem.params[id].data_bytes();
        ASSERT_EQ(rig_->Read(rig_->data[id], bytes), solved_->trace[kSteps].params[id].data);
        rig_->Write(rig_->data[id], Bytes(bytes, std::byte{255}));
      }
      // Nor does a stream behind the save, since all that is the caller's has been copied.
      MUST(offload_optimizer_stream_wait(rig_->optimizer(), save_, nullptr, nullptr, 0));
      EXPECT_EQ(offload_stream_synchronize(rig_->context(), nullptr, kLongNs), OFFLOAD_OK);
      files_.before_reading = false;
      rig_->Wait(save_);
      EXPECT_EQ(SavedDifference(), "");
    }
  }
}

// The simulated device with a slow stream of copies.
class SlowCopies final : public LabelledDevice {
 public:
  SlowCopies(std::unique_ptr<Device> device, std::string slow)
      : LabelledDevice(std::move(device)), slow_(std::move(slow)) {}
  Status CopyToHost(StreamHandle stream, void* host, const void* device, uint64_t bytes) override {
    HYBRIDOPT_TRY(Delay(stream));
    return ForwardingDevice::CopyToHost(stream, host, device, bytes);
  }
  Status CopyToDevice(StreamHandle stream, void* device, const void* host,
                      uint64_t bytes) override {
    HYBRIDOPT_TRY(Delay(stream));
    return ForwardingDevice::CopyToDevice(stream, device, host, bytes);
  }

 private:
  Status Delay(StreamHandle stream) {
    const auto sleep = [](void*) { std::this_thread::sleep_for(std::chrono::microseconds(200)); };
    return LabelOf(stream) == slow_ ? Run(stream, sleep, nullptr) : Status();
  }
  const std::string slow_;
};

// State is copied to the buffer when it is in the device's ring, and before it is updated there.
TEST_F(BesideASave, CopiesToTheBufferKeepTheirPlaceInTheOrderOfStreams) {
  buffer_bytes_ = UINT64_MAX;
  for (const char* slow : {"up", "down", "device update"}) {
    wrap_ = [&](std::unique_ptr<Device> device) {
      return std::make_unique<SlowCopies>(std::move(device), slow);
    };
    for (const StateChoice& state : StateChoices()) {
      const Place place = {OFFLOAD_DEVICE_SIM, 0.4, OFFLOAD_EXECUTORS_STREAMED};
      SCOPED_TRACE(state.Text() + ", slow: " + slow);
      Start(SmallProblem(2, state), place, true);
      rig_->Wait(QueueStep(1));
      files_.before_reading = false;
      rig_->Wait(save_);
      EXPECT_EQ(SavedDifference(), "");
      EXPECT_EQ(rig_->Difference(solved_->trace[2]), "");
    }
  }
}

TEST_F(BesideASave, AFullBufferIsWaitedFor) {
  for (const Place& place : kPlacesWithBuffers) {
    for (const uint64_t slots : {uint64_t{1}, uint64_t{4}, uint64_t{12}}) {
      buffer_bytes_ = slots * kSlotBytes + 17;
      Start(SmallProblem(2), place, true);
      const offload_ticket_t step = QueueStep(1);
      EXPECT_EQ(offload_optimizer_wait(rig_->optimizer(), step, kAWhileNs), OFFLOAD_TIMED_OUT);
      files_.before_reading = false;
      rig_->Wait(step);
      rig_->Wait(save_);
      EXPECT_EQ(SavedDifference(), "") << slots << " slots" << Text(place);
      EXPECT_EQ(rig_->Difference(solved_->trace[2]), "");
    }
  }
}

TEST_F(BesideASave, TheFilesAreTheSameWithBuffersOfAllSizes) {
  for (uint64_t seed = 0; seed < Scaled(60u); ++seed) {
    Random random(seed);
    const std::vector<StateChoice> states = StateChoices();
    const StateChoice state = states[random.Below(states.size())];
    Place place = kPlacesWithBuffers[random.Below(kPlacesWithBuffers.size())];
    if (place.device == OFFLOAD_DEVICE_SIM) place.fraction = random.Unit();
    const size_t steps = 2 + random.Below(4);
    buffer_bytes_ = random.OneIn(4) ? 0 : random.Below(20 * kSlotBytes);
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + state.Text() + Text(place) + ", " +
                 std::to_string(buffer_bytes_) + " bytes");
    Start(SmallProblem(steps, state), place, false);
    files_.before_end = false;
    for (size_t step = 1; step < steps; ++step) rig_->Wait(QueueStep(step));
    rig_->Wait();
    ASSERT_EQ(SavedDifference(), "");
    ASSERT_EQ(rig_->Difference(solved_->trace[steps]), "");
  }
}

offload_plan_t PlanWithBuffer(int32_t device_kind, uint64_t buffer_bytes) {
  const Solved solved(SmallProblem(1));
  LifecycleSetting setting;
  setting.device_kind = device_kind;
  setting.optimizer.save_buffer_bytes = buffer_bytes;
  const LifecycleRig rig(solved.problem, setting);
  auto plan = Make<offload_plan_t>();
  MUST(offload_optimizer_plan(rig.optimizer(), &plan));
  return plan;
}

TEST(SaveBuffer, ThePlanTellsWhatIsTaken) {
  for (int32_t device : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    const offload_plan_t none = PlanWithBuffer(device, 0);
    const offload_plan_t all = PlanWithBuffer(device, uint64_t{1} << 40);
    EXPECT_EQ(none.host_save_bytes, 0u);
    EXPECT_LT(all.host_save_bytes, 60 * kSlotBytes);
    EXPECT_EQ(PlanWithBuffer(device, 12345).host_save_bytes, 12345u);
    EXPECT_EQ(PlanWithBuffer(device, UINT64_MAX).host_save_bytes, all.host_save_bytes);
    EXPECT_EQ(all.host_bytes - none.host_bytes, all.host_save_bytes);
  }
}

uint64_t PinnedBytes(const LifecycleRig& rig) {
  auto info = Make<offload_context_info_t>();
  MUST(offload_context_get_info(rig.context(), &info));
  return info.pinned_bytes;
}

TEST(SaveBuffer, OnlyASaveTakesWhatTheLibraryChooses) {
  const TemporaryDirectory directory;
  const Solved solved(SmallProblem(1));
  LifecycleSetting setting;
  setting.device_kind = OFFLOAD_DEVICE_SIM;
  const LifecycleRig none(solved.problem, setting);
  setting.optimizer.save_buffer_bytes = uint64_t{1} << 40;
  const LifecycleRig named(solved.problem, setting);
  setting.optimizer.save_buffer_bytes = UINT64_MAX;
  LifecycleRig chosen(solved.problem, setting);
  EXPECT_GT(PinnedBytes(named), PinnedBytes(none));
  EXPECT_EQ(PinnedBytes(chosen), PinnedBytes(none));
  for (int save = 0; save < 2; ++save) {
    chosen.Wait(chosen.Save(directory / std::to_string(save)));
    EXPECT_EQ(PinnedBytes(chosen), PinnedBytes(named));
  }
}

// State that takes half of what is free leaves an eighth of it to the buffer.
TEST(SaveBuffer, OfItsOwnChoiceTheLibraryTakesAQuarterOfWhatIsLeft) {
  auto context_options = Make<offload_context_options_t>();
  context_options.device_kind = OFFLOAD_DEVICE_HOST;
  context_options.threads = 1;
  offload_context_t context = nullptr;
  MUST(offload_context_create(&context_options, &context));
  auto options = Make<offload_optimizer_options_t>();
  options.algorithm = OFFLOAD_ADAMW;
  options.save_buffer_bytes = UINT64_MAX;
  offload_optimizer_t optimizer = nullptr;
  MUST(offload_optimizer_create(context, &options, &optimizer));
  auto group = Make<offload_group_t>();
  group.beta1 = group.beta2 = 0.5;
  group.eps = 1e-8;
  uint32_t group_id = 0;
  MUST(offload_optimizer_add_group(optimizer, &group, &group_id));
  const auto available = static_cast<double>(system::AvailableBytes());
  auto param = Make<offload_param_t>();
  param.name = "large";
  param.dtype = param.grad_dtype = OFFLOAD_BF16;
  param.count = static_cast<uint64_t>(available / 24);
  param.data = reinterpret_cast<void*>(uint64_t{1} << 40);  // nothing looks there
  MUST(offload_optimizer_add_params(optimizer, &param, 1, nullptr));
  auto plan = Make<offload_plan_t>();
  MUST(offload_optimizer_plan(optimizer, &plan));
  EXPECT_GT(static_cast<double>(plan.host_save_bytes), 0.05 * available);
  EXPECT_LT(static_cast<double>(plan.host_save_bytes), 0.2 * available);
  EXPECT_EQ(plan.fits, 1);
  MUST(offload_optimizer_destroy(optimizer));
  MUST(offload_context_destroy(context));
}

// What a step copies is at the new addresses, and the save reads the old ones.
TEST_F(BesideASave, AStepWaitsIfParamsThatItReadsHaveMoved) {
  buffer_bytes_ = 100 * kSlotBytes;
  const StateChoice split{OFFLOAD_MASTER_SPLIT};
  for (const auto& [state, place] : {std::pair{StateChoice(), Place{OFFLOAD_DEVICE_HOST, 0}},
                                     std::pair{split, Place{OFFLOAD_DEVICE_HOST, 0}},
                                     std::pair{split, Place{OFFLOAD_DEVICE_SIM, 0.4}}}) {
    Start(SmallProblem(2, state), place, true);
    for (uint32_t id = 0; id < rig_->size(); ++id) {
      const uint64_t bytes = solved_->problem.params[id].data_bytes();
      rig_->data[id] = rig_->Allocate(bytes);
      rig_->Write(rig_->data[id], Bytes(bytes, std::byte{1}));
    }
    const offload_ticket_t step = QueueStep(1);
    EXPECT_EQ(offload_optimizer_wait(rig_->optimizer(), step, kAWhileNs), OFFLOAD_TIMED_OUT);
    files_.before_reading = false;
    rig_->Wait(step);
    rig_->Wait(save_);
    EXPECT_EQ(SavedDifference(), "") << Text(place);
  }
}

// Nothing of the first save is left in the buffer.
TEST_F(BesideASave, TheBufferIsFreeAgainWhenASaveHasFailed) {
  buffer_bytes_ = 100 * kSlotBytes;
  for (const Place& place : kPlacesWithBuffers) {
    files_.is_broken = true;
    Start(SmallProblem(3), place, true);
    rig_->Wait(QueueStep(1));
    files_.before_reading = false;
    EXPECT_EQ(offload_optimizer_wait(rig_->optimizer(), save_, -1), OFFLOAD_IO_FAILED);
    files_.is_broken = false;
    files_.before_reading = true;
    save_ = rig_->Save(path_);
    rig_->Wait(QueueStep(2));
    files_.before_reading = false;
    rig_->Wait(save_);
    EXPECT_EQ(rig_->Difference(solved_->trace[3]), "");
    LifecycleRig loaded(solved_->problem, {});
    ASSERT_EQ(loaded.TryLoad(path_), OFFLOAD_OK) << offload_last_error();
    EXPECT_EQ(loaded.Difference(solved_->trace[2]), "");
  }
}

TEST_F(BesideASave, StateIsNotToBeSeenUntilItHasEnded) {
  Start(SmallProblem(1), {OFFLOAD_DEVICE_HOST, 0}, false);
  rig_->Wait(EmptyStep());
  auto view = Make<offload_state_view_t>();
  for (const int32_t status :
       {offload_optimizer_state(rig_->optimizer(), 0, OFFLOAD_STATE_EXP_AVG, &view),
        offload_optimizer_set_step_count(rig_->optimizer(), 0, 7)})
    EXPECT_EQ(status, OFFLOAD_INVALID_STATE);
  EXPECT_NE(std::string(offload_last_error()).find("1 calls are queued (a save counts until"),
            std::string::npos)
      << offload_last_error();
  files_.before_end = false;
  rig_->Wait();
  EXPECT_EQ(offload_optimizer_state(rig_->optimizer(), 0, OFFLOAD_STATE_EXP_AVG, &view),
            OFFLOAD_OK);
}

// Params that are masters, or halves of masters, are read where they are. A caller that has waited
// for a step after the save may write them, even if the step did not update them.
TEST_F(BesideASave, AStepCompletesWhenNothingOfTheCallersIsReadAnyMore) {
  const StateChoice split{OFFLOAD_MASTER_SPLIT};
  for (const StateChoice& state : {StateChoice(), split}) {
    for (const Place& place : {Place{OFFLOAD_DEVICE_HOST, 0}, Place{OFFLOAD_DEVICE_SIM, 1}}) {
      Start(SmallProblem(1, state), place, true);
      files_.before_end = true;
      const offload_ticket_t step = EmptyStep();
      EXPECT_EQ(offload_optimizer_wait(rig_->optimizer(), step, kAWhileNs), OFFLOAD_TIMED_OUT);
      files_.before_reading = false;
      rig_->Wait(step);
      EXPECT_EQ(Look(save_), OFFLOAD_TIMED_OUT);
      for (uint32_t id = 0; id < rig_->size(); ++id)
        rig_->Write(rig_->data[id],
                    Bytes(solved_->problem.params[id].data_bytes(), std::byte{255}));
      files_.before_end = false;
      rig_->Wait(save_);
      EXPECT_EQ(SavedDifference(), "") << state.Text() << ", device " << place.device;
    }
  }
}

TEST_F(BesideASave, WhereMastersAreApartNothingIsHeldUp) {
  Start(SmallProblem(1), {OFFLOAD_DEVICE_SIM, 0}, true);
  rig_->Wait(EmptyStep());
  for (uint32_t id = 0; id < rig_->size(); ++id)
    rig_->Write(rig_->data[id], Bytes(solved_->problem.params[id].data_bytes(), std::byte{255}));
  MUST(offload_optimizer_stream_wait(rig_->optimizer(), save_, nullptr, nullptr, 0));
  MUST(offload_stream_synchronize(rig_->context(), nullptr, -1));
  EXPECT_EQ(Look(save_), OFFLOAD_TIMED_OUT);
  files_.before_reading = false;
  rig_->Wait(save_);
  EXPECT_EQ(SavedDifference(), "");
}

// Memory of the device, overwritten by work on a stream.
struct Overwriting {
  void* mapped;
  uint64_t bytes;
  static void Run(void* self) {
    const auto* const it = static_cast<Overwriting*>(self);
    std::memset(it->mapped, 0xff, it->bytes);
  }
};

// Work on a stream that waits for the save, or for anything behind it, may write params when the
// save has read them, and before it has ended.
TEST_F(BesideASave, AStreamBehindItWaitsUntilItHasRead) {
  for (int behind = 0; behind < 4; ++behind) {
    for (const bool named : {false, true}) {
      Start(SmallProblem(1), {OFFLOAD_DEVICE_SIM, 1}, true);
      files_.before_end = true;
      const offload_ticket_t ticket = behind == 0   ? save_
                                      : behind == 1 ? DropGrads()
                                      : behind == 2 ? EmptyStep()
                                                    : 0;
      if (behind == 1) rig_->Wait(ticket);  // does not concern params
      offload_stream_t stream = nullptr;
      MUST(offload_stream_create(rig_->context(), &stream));
      const std::vector<uint32_t> ids = {0, 1, 2};
      MUST(offload_optimizer_stream_wait(rig_->optimizer(), ticket, stream,
                                         named ? ids.data() : nullptr, named ? 3 : 0));
      std::vector<Overwriting> writes(ids.size());
      for (uint32_t id : ids) {
        writes[id].bytes = solved_->problem.params[id].data_bytes();
        MUST(offload_device_map(rig_->context(), rig_->data[id], writes[id].bytes,
                                &writes[id].mapped));
        MUST(offload_stream_run(rig_->context(), stream, Overwriting::Run, &writes[id]));
      }
      EXPECT_EQ(offload_stream_synchronize(rig_->context(), stream, kAWhileNs), OFFLOAD_TIMED_OUT);
      files_.before_reading = false;
      MUST(offload_stream_synchronize(rig_->context(), stream, -1));
      EXPECT_EQ(Look(save_), OFFLOAD_TIMED_OUT);
      files_.before_end = false;
      rig_->Wait(save_);
      EXPECT_EQ(SavedDifference(), "") << "behind " << behind;
    }
  }
}

// On the host the caller itself is the stream.
TEST_F(BesideASave, OnTheHostTheCallerWaitsUntilItHasRead) {
  Start(SmallProblem(1), {OFFLOAD_DEVICE_HOST, 0}, true);
  files_.before_end = true;
  rig_->Wait(DropGrads());
  std::atomic<bool> returned = false;
  std::thread caller([&] {
    MUST(offload_optimizer_stream_wait(rig_->optimizer(), 0, nullptr, nullptr, 0));
    returned = true;
  });
  std::this_thread::sleep_for(std::chrono::nanoseconds(kAWhileNs));
  EXPECT_FALSE(returned);
  files_.before_reading = false;
  caller.join();
  EXPECT_EQ(Look(save_), OFFLOAD_TIMED_OUT);
  for (uint32_t id = 0; id < rig_->size(); ++id)
    rig_->Write(rig_->data[id], Bytes(solved_->problem.params[id].data_bytes(), std::byte{255}));
  files_.before_end = false;
  rig_->Wait(save_);
  EXPECT_EQ(SavedDifference(), "");
}

// Stops the first thread that passes, or the second, and so on, after it has been armed.
struct StopPoint {
  std::atomic<int> passes_left = 0;
  std::atomic<bool> reached = false, held = true;
  void Pass() {
    if (passes_left.fetch_sub(1) != 1) return;
    reached = true;
    while (held) std::this_thread::yield();
  }
};

// Stops a thread in front of its wait for an event.
class StoppingDevice final : public ForwardingDevice {
 public:
  StoppingDevice(std::unique_ptr<Device> device, StopPoint& stop)
      : ForwardingDevice(std::move(device)), stop_(stop) {}
  Status Wait(EventHandle event, int64_t timeout_ns) override {
    stop_.Pass();
    return ForwardingDevice::Wait(event, timeout_ns);
  }

 private:
  StopPoint& stop_;
};

// The events of its place in the queue are used again by then, for other streams.
TEST_F(BesideASave, ItWaitsForItsOwnStreamHoweverManyCallsComeBehindIt) {
  StopPoint stop;
  wrap_ = [&](std::unique_ptr<Device> device) {
    return std::make_unique<StoppingDevice>(std::move(device), stop);
  };
  offload_stream_t stream = nullptr;
  Start(SmallProblem(1), {OFFLOAD_DEVICE_SIM, 1}, false, &stream);
  files_.before_end = false;
  MUST(offload_stream_create(rig_->context(), &stream));
  Gate gate;
  gate.Close(rig_->context(), stream);
  const uint32_t own_master = solved_->problem.params[0].dtype == OFFLOAD_FP32   ? 0
                              : solved_->problem.params[1].dtype == OFFLOAD_FP32 ? 1
                                                                                 : 2;
  Overwriting writing{nullptr, solved_->problem.params[own_master].data_bytes()};
  MUST(offload_device_map(rig_->context(), rig_->data[own_master], writing.bytes, &writing.mapped));
  MUST(offload_stream_run(rig_->context(), stream, Overwriting::Run, &writing));
  stop.passes_left = 1;
  auto options = Make<offload_save_options_t>();
  options.path = path_.c_str();
  options.stream = stream;
  MUST(offload_optimizer_save(rig_->optimizer(), &options, &save_));
  while (!stop.reached) std::this_thread::yield();
  for (uint32_t i = 0; i <= Timeline::kCapacity; ++i) rig_->Wait(DropGrads());
  stop.held = false;
  EXPECT_EQ(offload_optimizer_wait(rig_->optimizer(), save_, kAWhileNs), OFFLOAD_TIMED_OUT);
  gate.Open();
  rig_->Wait(save_);
  LifecycleSetting setting;
  LifecycleRig loaded(solved_->problem, setting);
  ASSERT_EQ(loaded.TryLoad(path_), OFFLOAD_OK) << offload_last_error();
  EXPECT_EQ(loaded.Read(loaded.data[own_master], writing.bytes),
            Bytes(writing.bytes, std::byte{255}));
  rig_.reset();  // its device uses the stop point
}

// Stops a save in front of a copy of state from the device, whose address it has looked up.
class StoppingCopies final : public ForwardingDevice {
 public:
  StoppingCopies(std::unique_ptr<Device> device, StopPoint& stop)
      : ForwardingDevice(std::move(device)), stop_(stop) {}
  Result<StreamHandle> CreateStream(const char* label) override {
    Result<StreamHandle> stream = ForwardingDevice::CreateStream(label);
    if (stream.ok() && label == std::string("checkpoint")) of_save_ = stream.value();
    return stream;
  }
  Status CopyToHost(StreamHandle stream, void* host, const void* device, uint64_t bytes) override {
    if (stream == of_save_) stop_.Pass();
    return ForwardingDevice::CopyToHost(stream, host, device, bytes);
  }

 private:
  StopPoint& stop_;
  std::atomic<StreamHandle> of_save_ = nullptr;
};

// The memory that the save is reading stays where it is. Memory that the device gets back is
// overwritten.
TEST_F(BesideASave, AChangeOfTheFractionWaitsUntilItHasRead) {
  for (int copy = 1; copy <= 9; ++copy) {  // three states of three params
    SCOPED_TRACE(copy);
    StopPoint stop;
    stop.passes_left = copy;
    wrap_ = [&](std::unique_ptr<Device> device) {
      return std::make_unique<StoppingCopies>(std::move(device), stop);
    };
    Start(SmallProblem(1), {OFFLOAD_DEVICE_SIM, 1}, false);
    while (!stop.reached) std::this_thread::yield();
    const offload_ticket_t change = rig_->SetDeviceFraction(0);
    EXPECT_EQ(offload_optimizer_wait(rig_->optimizer(), change, kAWhileNs), OFFLOAD_TIMED_OUT);
    stop.held = false;
    rig_->Wait(change);
    EXPECT_EQ(Look(save_), OFFLOAD_TIMED_OUT);
    files_.before_end = false;
    rig_->Wait(save_);
    EXPECT_EQ(SavedDifference(), "");
    EXPECT_EQ(rig_->Difference(solved_->trace[1]), "");
    rig_.reset();  // its device uses the stop point
  }
}

TEST_F(BesideASave, DestroyWaitsForItAndNotForMore) {
  for (const Place& place : {Place{OFFLOAD_DEVICE_HOST, 0}, Place{OFFLOAD_DEVICE_SIM, 0.4}}) {
    Start(SmallProblem(1), place, false);
    rig_->Wait(EmptyStep());
    std::thread destroyer([this] { rig_->DestroyOptimizer(); });
    files_.before_end = false;
    destroyer.join();
    EXPECT_EQ(SavedDifference(), "");
  }
}

TEST_F(BesideASave, AFailureOfItIsItsOwn) {
  Start(SmallProblem(1), {OFFLOAD_DEVICE_HOST, 0}, false);
  const offload_ticket_t step = EmptyStep();
  rig_->Wait(step);
  std::filesystem::create_directory(path_);  // another program has taken the name
  files_.before_end = false;
  EXPECT_EQ(offload_optimizer_wait(rig_->optimizer(), save_, -1), OFFLOAD_IO_FAILED);
  rig_->Wait(step);
  rig_->Wait();
  rig_->Wait(EmptyStep());
}

TEST_F(BesideASave, AStepThatWaitsForItGoesOnWhenItFails) {
  const Problem problem = SmallProblem(2);
  for (const Place& place : {Place{OFFLOAD_DEVICE_HOST, 0}, Place{OFFLOAD_DEVICE_SIM, 0.4}}) {
    files_.is_broken = true;
    Start(problem, place, true);
    rig_->NewGrads(problem.steps[1]);
    rig_->BindAll();
    const offload_ticket_t step = rig_->Step(problem.steps[1]);
    EXPECT_EQ(offload_optimizer_wait(rig_->optimizer(), step, kAWhileNs), OFFLOAD_TIMED_OUT);
    files_.before_reading = false;
    ASSERT_EQ(offload_optimizer_wait(rig_->optimizer(), step, kLongNs), OFFLOAD_OK)
        << offload_last_error();
    EXPECT_EQ(offload_optimizer_wait(rig_->optimizer(), save_, -1), OFFLOAD_IO_FAILED);
    EXPECT_EQ(rig_->Difference(solved_->trace[2]), "");
  }
}

// In one wait for work on a stream the device's timeout is over at once.
struct Impatience {
  std::atomic<StreamHandle> stream = nullptr;
  std::atomic<EventHandle> event = nullptr;  // recorded after that work
  std::atomic<bool> ran_out = false;
};
class ImpatientDevice final : public ForwardingDevice {
 public:
  ImpatientDevice(std::unique_ptr<Device> device, Impatience& impatience)
      : ForwardingDevice(std::move(device)), impatience_(impatience) {}
  Status Record(EventHandle event, StreamHandle stream) override {
    if (stream != nullptr && stream == impatience_.stream) impatience_.event = event;
    return ForwardingDevice::Record(event, stream);
  }
  Status Wait(EventHandle event, int64_t timeout_ns) override {
    if (event != impatience_.event || impatience_.ran_out)
      return ForwardingDevice::Wait(event, timeout_ns);
    Status status = ForwardingDevice::Wait(event, 0);
    impatience_.ran_out = true;
    return status;
  }

 private:
  Impatience& impatience_;
};

// The stream that a step or move waits for may itself wait for the save: then the disk is slow, not
// the device.
TEST_F(BesideASave, ADeviceThatWaitsForASlowDiskHasNotFailed) {
  using Call = std::function<offload_ticket_t(offload_stream_t)>;
  const auto move = [&](MoveFunction function, uint32_t flags) -> Call {
    return [this, function, flags](offload_stream_t stream) {
      return rig_->Move(function, {{}, flags, {stream}});
    };
  };
  const Call calls[] = {
      [&](offload_stream_t stream) { return rig_->Step(solved_->problem.steps[0], stream); },
      move(offload_optimizer_offload_grads, 0),
      move(offload_optimizer_offload_grads, OFFLOAD_MOVE_ACCUMULATE),
      [&](offload_stream_t stream) {
        rig_->Move(offload_optimizer_offload_grads);
        rig_->BindAll();
        return move(offload_optimizer_reload_grads, 0)(stream);
      }};
  for (const Call& call : calls) {
    SCOPED_TRACE(&call - calls);
    Impatience impatience;
    wrap_ = [&](std::unique_ptr<Device> device) {
      return std::make_unique<ImpatientDevice>(std::move(device), impatience);
    };
    Start(SmallProblem(1), {OFFLOAD_DEVICE_SIM, 1}, true);
    offload_stream_t stream = nullptr;
    MUST(offload_stream_create(rig_->context(), &stream));
    MUST(offload_optimizer_stream_wait(rig_->optimizer(), save_, stream, nullptr, 0));
    std::vector<Overwriting> writes(rig_->size());
    for (uint32_t id = 0; id < rig_->size(); ++id) {
      writes[id].bytes = solved_->problem.params[id].data_bytes();
      MUST(offload_device_map(rig_->context(), rig_->data[id], writes[id].bytes,
                              &writes[id].mapped));
      MUST(offload_stream_run(rig_->context(), stream, Overwriting::Run, &writes[id]));
    }
    impatience.stream = stream;
    const offload_ticket_t ticket = call(stream);
    while (!impatience.ran_out) std::this_thread::yield();
    EXPECT_EQ(offload_optimizer_wait(rig_->optimizer(), ticket, kAWhileNs), OFFLOAD_TIMED_OUT)
        << offload_last_error();
    files_.before_reading = false;
    EXPECT_EQ(offload_optimizer_wait(rig_->optimizer(), ticket, -1), OFFLOAD_OK)
        << offload_last_error();
    EXPECT_EQ(offload_optimizer_wait(rig_->optimizer(), save_, -1), OFFLOAD_OK);
    EXPECT_EQ(SavedDifference(), "");
    rig_.reset();  // it uses the device's short timeout
  }
}

}  // namespace
}  // namespace hybridopt
