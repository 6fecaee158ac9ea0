// The executor that updates the host share does not change the bits, only the counts in step
// results: CPU workers alone, the device alone, or both with one queue, where a slow executor
// leaves the rest to the other.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "holding_device.h"
#include "lifecycle_rig.h"
#include "machine/lanes.h"

namespace hybridopt {
namespace {

constexpr uint64_t kChunkElements = 1024;

// Params of all dtypes, some of which share a chunk.
std::vector<ParamSpec> Params() {
  std::vector<ParamSpec> params;
  for (uint64_t count : {9000, 33, 700, 5100, 1, 1300, 8192})
    params.push_back({kDtypes[params.size() % 3], kDtypes[(params.size() / 2) % 3],
                      OFFLOAD_PLACE_AUTO, 0, count});
  return params;
}

Problem MakeProblem(int32_t algorithm, const StateChoice& state, size_t steps,
                    const std::vector<ParamSpec>& params = Params()) {
  Problem problem = RandomProblem(algorithm, params, steps, 3);
  problem.state = state;
  // Every param takes part.
  Random random(4);
  for (StepInput& step : problem.steps)
    for (size_t id = 0; id < problem.params.size(); ++id)
      step.grads[id] =
          RandomArray(problem.params[id].grad_dtype, problem.params[id].count, false, random);
  return problem;
}

uint64_t Elements(const Problem& problem) {
  uint64_t elements = 0;
  for (const ParamSpec& param : problem.params) elements += param.count;
  return elements;
}

LifecycleSetting SettingOf(int32_t host_executors) {
  LifecycleSetting setting;
  setting.optimizer.chunk_elements = kChunkElements;
  setting.optimizer.host_executors = host_executors;
  setting.movable = 0;
  return setting;
}

TEST(Executors, TheDeviceAloneDoesAllAndCopiesStateOnly) {
  for (int32_t algorithm : kAlgorithmValues) {
    for (const StateChoice& state : StateChoices()) {
      SCOPED_TRACE(std::to_string(algorithm) + ", " + state.Text());
      const Solved solved(MakeProblem(algorithm, state, 2));
      LifecycleRig rig(solved.problem, SettingOf(OFFLOAD_EXECUTORS_STREAMED));
      const offload_plan_t plan = rig.Plan();
      EXPECT_GT(plan.device_ring_bytes, 0u);
      uint64_t state_bytes = 0;
      for (const uint64_t bytes : plan.state_bytes[OFFLOAD_TIER_HOST]) state_bytes += bytes;
      EXPECT_GE(plan.pinned_state_bytes, state_bytes);
      for (size_t i = 0; i < solved.problem.steps.size(); ++i) {
        const offload_step_result_t result = rig.StepOnce(solved.problem.steps[i]);
        ASSERT_EQ(rig.Difference(solved.trace[i + 1]), "");
        EXPECT_EQ(result.streamed_elements, Elements(solved.problem));
        EXPECT_EQ(result.cpu_elements, 0u);
        EXPECT_EQ(result.grads_down_bytes, 0u);
        EXPECT_EQ(result.params_up_bytes, 0u);
        // All state, plus at most the padding.
        EXPECT_GT(result.state_up_bytes, 0u);
        EXPECT_LE(result.state_up_bytes, state_bytes);
        EXPECT_EQ(result.state_down_bytes, result.state_up_bytes);
      }
    }
  }
}

TEST(Executors, CpuThreadsAloneStreamNothing) {
  const Solved solved(MakeProblem(OFFLOAD_ADAMW, {}, 1));
  LifecycleRig rig(solved.problem, SettingOf(OFFLOAD_EXECUTORS_CPU));
  EXPECT_EQ(rig.Plan().device_ring_bytes, 0u);
  EXPECT_EQ(rig.Plan().pinned_state_bytes, 0u);
  const offload_step_result_t result = rig.StepOnce(solved.problem.steps[0]);
  EXPECT_EQ(rig.Difference(solved.trace[1]), "");
  EXPECT_EQ(result.cpu_elements, Elements(solved.problem));
  EXPECT_EQ(result.streamed_elements, 0u);
  EXPECT_EQ(result.state_up_bytes, 0u);
  EXPECT_EQ(result.grads_down_bytes, rig.Plan().grads_down_bytes);
  EXPECT_EQ(result.params_up_bytes, rig.Plan().params_up_bytes);
}

TEST(Executors, StatsAddUpTheResultsOfAllSteps) {
  for (int32_t executors : {OFFLOAD_EXECUTORS_CPU, OFFLOAD_EXECUTORS_STREAMED}) {
    const Solved solved(MakeProblem(OFFLOAD_ADAMW, StateChoice{}, 3));
    LifecycleRig rig(solved.problem, SettingOf(executors));
    offload_stats_t sums{};
    for (const StepInput& step : solved.problem.steps) {
      const offload_step_result_t result = rig.StepOnce(step);
      sums.total_seconds += result.total_seconds;
      sums.update_seconds += result.update_seconds;
      sums.streamed_update_seconds += result.streamed_update_seconds;
      sums.grads_down_bytes += result.grads_down_bytes;
      sums.state_down_bytes += result.state_down_bytes;
      sums.cpu_elements += result.cpu_elements;
      sums.streamed_elements += result.streamed_elements;
    }
    const offload_stats_t stats = rig.Stats();
    EXPECT_GT(stats.total_seconds, 0.0);
    EXPECT_EQ(stats.total_seconds, sums.total_seconds);
    EXPECT_EQ(stats.update_seconds, sums.update_seconds);
    EXPECT_EQ(stats.streamed_update_seconds, sums.streamed_update_seconds);
    EXPECT_EQ(stats.grads_down_bytes, sums.grads_down_bytes);
    EXPECT_EQ(stats.state_down_bytes, sums.state_down_bytes);
    EXPECT_EQ(stats.cpu_elements, sums.cpu_elements);
    EXPECT_EQ(stats.streamed_elements, sums.streamed_elements);
    EXPECT_EQ(stats.cpu_elements + stats.streamed_elements, 3 * Elements(solved.problem));
  }
}

TEST(Executors, ASkippedStepBringsNoStateBack) {
  Problem problem = MakeProblem(OFFLOAD_ADAMW, {}, 1);
  PutElement(*problem.steps[0].grads[3], problem.params[3].grad_dtype, 0,
             BitsOf(problem.params[3].grad_dtype, INFINITY));
  problem.steps[0].flags = 0;
  const Solved solved(std::move(problem));
  LifecycleRig rig(solved.problem, SettingOf(OFFLOAD_EXECUTORS_STREAMED));
  const offload_step_result_t result = rig.StepOnce(solved.problem.steps[0]);
  EXPECT_EQ(result.skipped, 1);
  EXPECT_EQ(result.streamed_elements, 0u);
  EXPECT_EQ(result.state_down_bytes, 0u);
  EXPECT_EQ(rig.Difference(solved.trace[1]), "");
}

// Keeps the events of the copies that a step begins ahead of its verdict.
class PrefetchDevice final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;

  Result<EventHandle> CreateEvent(const char* label) override {
    Result<EventHandle> event = ForwardingDevice::CreateEvent(label);
    const std::string name = label;
    if (event.ok() && (name == "state up" || name == "gradients landed"))
      events_.push_back(event.value());
    return event;
  }
  size_t UnderWay() {
    size_t count = 0;
    for (EventHandle event : events_) count += Reached(event).value() ? 0 : 1;
    return count;
  }

 private:
  std::vector<EventHandle> events_;
};

// When the step's ticket has completed, the caller may free gradients, and state may be moved or
// offloaded.
TEST(Executors, ASkippedStepEndsBehindItsCopies) {
  Problem problem = MakeProblem(OFFLOAD_ADAMW, {}, 1);
  PutElement(*problem.steps[0].grads[3], problem.params[3].grad_dtype, 0,
             BitsOf(problem.params[3].grad_dtype, INFINITY));
  problem.steps[0].flags = 0;
  const Solved solved(std::move(problem));
  for (int32_t executors : {OFFLOAD_EXECUTORS_CPU, OFFLOAD_EXECUTORS_STREAMED}) {
    LifecycleSetting setting = SettingOf(executors);
    setting.delay_ns_max = 1'000'000;
    PrefetchDevice* device = nullptr;
    setting.WrapIn(&device);
    LifecycleRig rig(solved.problem, setting);
    rig.NewGrads(solved.problem.steps[0]);
    rig.BindAll();
    const offload_ticket_t ticket = rig.Step(solved.problem.steps[0]);
    rig.Wait();
    EXPECT_EQ(device->UnderWay(), 0u) << "executors " << executors;
    auto result = Make<offload_step_result_t>();
    MUST(offload_optimizer_step_result(rig.optimizer(), ticket, &result));
    EXPECT_EQ(result.skipped, 1);
    EXPECT_EQ(rig.Difference(solved.trace[1]), "");
  }
}

// State that is not contiguous on the host needs separate copies: state of params that are updated
// in an order other than that of registration, and of params around a param that the step does not
// update.
TEST(Executors, StateThatIsApartIsCopiedApart) {
  const ParamSpec spec{OFFLOAD_BF16, OFFLOAD_BF16, OFFLOAD_PLACE_AUTO, 0, 64};
  for (const StateChoice& state : StateChoices()) {
    SCOPED_TRACE(state.Text());
    Problem problem = MakeProblem(OFFLOAD_ADAMW, state, 2, std::vector<ParamSpec>(24, spec));
    for (size_t id : {3, 4, 11, 17}) problem.steps[1].grads[id] = std::nullopt;
    const Solved solved(problem);
    LifecycleSetting setting = SettingOf(OFFLOAD_EXECUTORS_STREAMED);
    for (size_t id = 0; id < problem.params.size(); ++id)
      setting.chunk_orders.push_back(static_cast<int32_t>(id * 7 % 24));
    LifecycleRig rig(solved.problem, setting);
    for (size_t i = 0; i < 2; ++i) {
      rig.StepOnce(solved.problem.steps[i]);
      ASSERT_EQ(rig.Difference(solved.trace[i + 1]), "");
    }
  }
}

// Gradients that the host holds go up with the state.
TEST(Executors, HeldGradientsGoUpWithTheState) {
  const Solved solved(MakeProblem(OFFLOAD_ADAMW, {}, 1));
  LifecycleSetting setting = SettingOf(OFFLOAD_EXECUTORS_STREAMED);
  setting.movable = OFFLOAD_MOVABLE_GRADS;
  LifecycleRig rig(solved.problem, setting);
  rig.NewGrads(solved.problem.steps[0]);
  rig.BindAll();
  rig.Move(offload_optimizer_offload_grads);
  const offload_ticket_t ticket = rig.Step(solved.problem.steps[0]);
  rig.Wait();
  const offload_step_result_t result = rig.ResultOf(ticket);
  EXPECT_EQ(result.streamed_elements, Elements(solved.problem));
  EXPECT_EQ(rig.Difference(solved.trace[1]), "");
}

// ---------------------------------------------------------------------------------- who is slow --

// Makes one executor wait, with chunks in its ring, until the other one has updated all other
// chunks. The step's result then shows this.
offload_step_result_t StepHolding(const Solved& solved, const char* held, const char* counted,
                                  uint32_t ring_of_held) {
  LifecycleSetting setting = SettingOf(OFFLOAD_EXECUTORS_AUTO);
  HoldingDevice* holding = nullptr;
  setting.WrapIn(&holding, held, counted);
  LifecycleRig rig(solved.problem, setting);
  const auto others = static_cast<int>(rig.Plan().chunk_count - ring_of_held);
  holding->Close(2 * others);
  const offload_step_result_t result = rig.StepOnce(solved.problem.steps[0]);
  EXPECT_EQ(rig.Difference(solved.trace[1]), "");
  return result;
}

TEST(Executors, TheDeviceDoesWhatHeldUpWorkersLeave) {
  const Solved solved(MakeProblem(OFFLOAD_ADAMW, {}, 1));
  const offload_step_result_t result = StepHolding(solved, "gradients landed", "state down", 2);
  EXPECT_EQ(result.cpu_elements, 2 * kChunkElements);
  EXPECT_EQ(result.streamed_elements, Elements(solved.problem) - 2 * kChunkElements);
}

TEST(Executors, WorkersDoWhatAHeldUpDeviceLeaves) {
  const Solved solved(MakeProblem(OFFLOAD_ADAMW, {}, 1));
  constexpr uint32_t kHeld = kDefaultStreamChunks;
  const offload_step_result_t result = StepHolding(solved, "state down", "params uploaded", kHeld);
  EXPECT_EQ(result.streamed_elements, kHeld * kChunkElements);
  EXPECT_EQ(result.cpu_elements, Elements(solved.problem) - kHeld * kChunkElements);
}

// ------------------------------------------------------------ gradients in two memories at once --

std::vector<uint8_t> GradsToKeep(const LifecycleRig& rig, size_t count) {
  std::vector<uint8_t> keep(count, 2);
  MUST(offload_optimizer_grads_to_keep(rig.optimizer(), keep.data(), static_cast<uint32_t>(count)));
  return keep;
}

// A step whose gradients are offloaded, except those to keep.
offload_step_result_t StepKeeping(LifecycleRig& rig, const StepInput& input,
                                  const std::vector<uint8_t>& keep) {
  rig.NewGrads(input);
  rig.BindAll();
  MoveArguments leave;
  for (uint32_t id = 0; id < keep.size(); ++id)
    if (keep[id] == 0) leave.params.push_back(id);
  if (!leave.params.empty()) rig.Move(offload_optimizer_offload_grads, leave);
  const offload_ticket_t ticket = rig.Step(input);
  rig.Wait();
  return rig.ResultOf(ticket);
}

// One chunk a param, and no more chunks than both executors take ahead of the verdict.
TEST(Executors, EachTakesTheChunksWhoseGradientsAreNearIt) {
  const ParamSpec spec{OFFLOAD_BF16, OFFLOAD_BF16, OFFLOAD_PLACE_AUTO, 0, kChunkElements};
  Problem problem = RandomProblem(OFFLOAD_ADAMW, std::vector<ParamSpec>(11, spec), 1, 3);
  Random random(4);
  for (auto& grad : problem.steps[0].grads)
    grad = RandomArray(OFFLOAD_BF16, kChunkElements, false, random);
  problem.steps[0].flags = 0;
  for (const StateChoice& state :
       {StateChoice{}, StateChoice{OFFLOAD_MASTER_SPLIT, OFFLOAD_BF16}}) {
    problem.state = state;
    const Solved solved(problem);
    LifecycleSetting setting = SettingOf(OFFLOAD_EXECUTORS_AUTO);
    setting.movable = OFFLOAD_MOVABLE_GRADS;
    setting.optimizer.staging_slots = 8;
    LifecycleRig rig(solved.problem, setting);
    std::vector<uint8_t> keep(11);
    for (uint32_t id : {2, 5, 9}) keep[id] = 1;
    const offload_step_result_t result = StepKeeping(rig, solved.problem.steps[0], keep);
    EXPECT_EQ(rig.Difference(solved.trace[1]), "");
    EXPECT_EQ(result.streamed_elements, 3 * kChunkElements);
    EXPECT_EQ(result.cpu_elements, 8 * kChunkElements);
    EXPECT_EQ(result.grads_down_bytes, 0u);
  }
}

TEST(Executors, GradientsThatTheDeviceWillReadAreToBeKept) {
  constexpr size_t kSteps = 6;
  const Solved solved(MakeProblem(OFFLOAD_ADAMW, {}, kSteps));
  const size_t count = solved.problem.params.size();
  const std::vector<uint8_t> all(count, 1), none(count, 0);
  for (int32_t executors :
       {OFFLOAD_EXECUTORS_AUTO, OFFLOAD_EXECUTORS_CPU, OFFLOAD_EXECUTORS_STREAMED}) {
    SCOPED_TRACE(executors);
    LifecycleSetting setting = SettingOf(executors);
    setting.movable = OFFLOAD_MOVABLE_GRADS;
    LifecycleRig rig(solved.problem, setting);
    for (size_t i = 0; i < kSteps; ++i) {
      const std::vector<uint8_t> keep = GradsToKeep(rig, count);
      if (executors == OFFLOAD_EXECUTORS_STREAMED) {
        EXPECT_EQ(keep, all);
      } else if (executors == OFFLOAD_EXECUTORS_CPU || i == 0) {
        EXPECT_EQ(keep, none);  // nothing streams, or it is not known yet how much will
      }
      for (uint8_t one : keep) EXPECT_LE(one, 1);
      StepKeeping(rig, solved.problem.steps[i], keep);
      ASSERT_EQ(rig.Difference(solved.trace[i + 1]), "");
    }
    rig.SetDeviceFraction(1);
    EXPECT_EQ(GradsToKeep(rig, count), all);
    rig.Wait();
  }
}

// -------------------------------------------------------------------------------------- pinning --

struct PinnedRange {
  const std::byte* begin;
  uint64_t bytes;
  auto operator<=>(const PinnedRange&) const = default;
};

// Checks that each copy between the host's state and the device keeps to one pinned range.
class PinnedCopiesDevice final : public LabelledDevice {
 public:
  explicit PinnedCopiesDevice(std::unique_ptr<Device> device) : LabelledDevice(std::move(device)) {}

  Status PinHost(void* data, uint64_t bytes) override {
    HYBRIDOPT_TRY(ForwardingDevice::PinHost(data, bytes));
    std::lock_guard lock(mutex_);
    pinned_[static_cast<std::byte*>(data)] = bytes;
    return {};
  }
  void UnpinHost(void* data) override {
    ForwardingDevice::UnpinHost(data);
    std::lock_guard lock(mutex_);
    pinned_.erase(static_cast<std::byte*>(data));
  }
  Status CopyToHost(StreamHandle stream, void* host, const void* device, uint64_t bytes) override {
    Look(stream, host, bytes);
    return ForwardingDevice::CopyToHost(stream, host, device, bytes);
  }
  Status CopyToDevice(StreamHandle stream, void* device, const void* host,
                      uint64_t bytes) override {
    Look(stream, host, bytes);
    return ForwardingDevice::CopyToDevice(stream, device, host, bytes);
  }
  // Small, so that there are many.
  uint64_t pin_piece_bytes() const override { return 8192; }

  int pinned_copies() const { return pinned_copies_; }
  int other_copies() const { return other_copies_; }
  // The pinned range in which all these bytes lie.
  std::optional<PinnedRange> RangeOf(const void* host, uint64_t bytes) {
    std::lock_guard lock(mutex_);
    const auto* const first = static_cast<const std::byte*>(host);
    auto after = pinned_.upper_bound(const_cast<std::byte*>(first));
    if (after == pinned_.begin()) return std::nullopt;
    const auto& [begin, size] = *--after;
    if (first + bytes > begin + size) return std::nullopt;
    return PinnedRange{begin, size};
  }

 private:
  void Look(StreamHandle stream, const void* host, uint64_t bytes) {
    if (const std::string label = LabelOf(stream); label != "down" && label != "up") return;
    (RangeOf(host, bytes).has_value() ? pinned_copies_ : other_copies_) += 1;
  }

  std::mutex mutex_;
  std::map<std::byte*, uint64_t> pinned_;  // guarded by mutex_
  std::atomic<int> pinned_copies_ = 0, other_copies_ = 0;
};

// The pinned ranges of the host's state. A caller may copy each view with one call, so each must
// lie in one range.
std::set<PinnedRange> RangesOfState(const LifecycleRig& rig, PinnedCopiesDevice& watch) {
  std::set<PinnedRange> ranges;
  for (uint32_t id = 0; id < rig.size(); ++id) {
    for (int32_t kind = OFFLOAD_STATE_MASTER; kind <= OFFLOAD_STATE_MASTER_LOW; ++kind) {
      auto view = Make<offload_state_view_t>();
      if (offload_optimizer_state(rig.optimizer(), id, kind, &view) != OFFLOAD_OK) continue;
      if (view.host_count == 0) continue;
      const std::optional<PinnedRange> range =
          watch.RangeOf(view.host_data, view.host_count * DtypeBytes(view.dtype));
      EXPECT_TRUE(range.has_value()) << "param " << id << ", kind " << kind;
      if (range.has_value()) ranges.insert(*range);
    }
  }
  return ranges;
}

TEST(Executors, EveryCopyKeepsToOnePinnedRangeWhateverTheFraction) {
  for (const StateChoice& state : StateChoices()) {
    const Solved solved(MakeProblem(OFFLOAD_ADAMW, state, 6));
    LifecycleSetting setting = SettingOf(OFFLOAD_EXECUTORS_STREAMED);
    PinnedCopiesDevice* watch = nullptr;
    setting.WrapIn(&watch);
    LifecycleRig rig(solved.problem, setting);
    constexpr double kFractions[] = {0, 0.4, 0.1, 1, 0.7, 0};
    for (size_t i = 0; i < solved.problem.steps.size(); ++i) {
      rig.SetDeviceFraction(kFractions[i]);
      const offload_step_result_t result = rig.StepOnce(solved.problem.steps[i]);
      ASSERT_EQ(rig.Difference(solved.trace[i + 1]), "") << state.Text() << ", step " << i;
      EXPECT_EQ(result.streamed_elements, rig.Plan().elements[OFFLOAD_TIER_HOST]);
      auto info = Make<offload_context_info_t>();
      MUST(offload_context_get_info(rig.context(), &info));
      EXPECT_EQ(info.pinned_bytes, rig.Plan().staging_bytes + rig.Plan().pinned_state_bytes);
      EXPECT_EQ(RangesOfState(rig, *watch).empty(), kFractions[i] == 1) << state.Text();
    }
    EXPECT_GT(watch->pinned_copies(), 100);
    EXPECT_EQ(watch->other_copies(), 0);
  }
}

// One range for each kind of state is pinned again, the one that loses a part.
TEST(Executors, StateThatStaysOnTheHostStaysPinned) {
  const Solved solved(MakeProblem(OFFLOAD_ADAMW, {}, 1));
  LifecycleSetting setting = SettingOf(OFFLOAD_EXECUTORS_STREAMED);
  PinnedCopiesDevice* watch = nullptr;
  setting.WrapIn(&watch);
  LifecycleRig rig(solved.problem, setting);
  std::set<PinnedRange> before = RangesOfState(rig, *watch);
  EXPECT_GE(before.size(), 12u);
  for (const double fraction : {0.1, 0.37, 0.5, 0.7, 0.9}) {
    rig.SetDeviceFraction(fraction);
    rig.Wait();
    const std::set<PinnedRange> after = RangesOfState(rig, *watch);
    std::set<PinnedRange> pinned_again;
    std::set_difference(after.begin(), after.end(), before.begin(), before.end(),
                        std::inserter(pinned_again, pinned_again.end()));
    EXPECT_LE(pinned_again.size(), 3u) << fraction;
    before = after;
  }
}

// ------------------------------------------------------- streams that wait while a ring changes --

// A device whose streams share hardware queues, so that they wait for events and not for a flag.
// The step's last events count as not reached until a stream of the test waits for the first one:
// at that moment the test can act.
class LateDevice final : public LabelledDevice {
 public:
  LateDevice(std::unique_ptr<Device> device, std::string late)
      : LabelledDevice(std::move(device)), late_label_(std::move(late)) {}

  bool shares_queues() const override { return true; }
  void DestroyEvent(EventHandle event) override {
    EXPECT_FALSE(watched_stream_waits_);
    ForwardingDevice::DestroyEvent(event);
  }
  Status Wait(EventHandle event, int64_t timeout_ns) override {
    if (LabelOf(event) == late_label_) {
      std::unique_lock lock(mutex_);
      ended_.wait_for(lock, std::chrono::seconds(60), [&] { return meanwhile == nullptr; });
    }
    return ForwardingDevice::Wait(event, timeout_ns);
  }
  Status StreamWait(StreamHandle stream, EventHandle event) override {
    if (stream == watched_stream && meanwhile != nullptr) {
      watched_stream_waits_ = true;
      const std::function<void()> now = meanwhile;
      {
        std::lock_guard lock(mutex_);
        meanwhile = nullptr;
      }
      ended_.notify_all();
      now();
      watched_stream_waits_ = false;
    }
    return ForwardingDevice::StreamWait(stream, event);
  }

  // To be set while nothing is queued.
  StreamHandle watched_stream = nullptr;
  std::function<void()> meanwhile;

 private:
  const std::string late_label_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::atomic<bool> watched_stream_waits_ = false;
};

struct RingChange {
  int32_t executors;
  const char* last_event;  // of a chunk
  MoveFunction move;       // NULL: the device fraction changes
};

class RingChangeTest : public testing::TestWithParam<RingChange> {};

// The step ends, and a later move wants to destroy the events of the chunks, while a call makes a
// stream wait for these events.
TEST_P(RingChangeTest, AwaitsAStreamThatIsPutBehindTheStep) {
  // All elements are in the first chunks, which are queued before a thread waits for their end.
  const ParamSpec small = {OFFLOAD_BF16, OFFLOAD_BF16, OFFLOAD_PLACE_AUTO, 0, kChunkElements};
  const Solved solved(MakeProblem(OFFLOAD_ADAMW, {}, 1, {small, small}));
  LifecycleSetting setting = SettingOf(GetParam().executors);
  setting.movable = OFFLOAD_MOVABLE_STATES;
  LateDevice* device = nullptr;
  setting.WrapIn(&device, GetParam().last_event);
  LifecycleRig rig(solved.problem, setting);
  rig.NewGrads(solved.problem.steps[0]);
  rig.BindAll();
  offload_stream_t stream = nullptr;
  MUST(offload_stream_create(rig.context(), &stream));
  offload_ticket_t step = 0, change = 0;
  device->watched_stream = stream;
  device->meanwhile = [&] {
    rig.Wait(step);
    change = GetParam().move != nullptr ? rig.Move(GetParam().move) : rig.SetDeviceFraction(1);
    EXPECT_EQ(offload_optimizer_wait(rig.optimizer(), change, 200'000'000), OFFLOAD_TIMED_OUT);
  };
  step = rig.Step(solved.problem.steps[0]);
  MUST(offload_optimizer_stream_wait(rig.optimizer(), step, stream, nullptr, 0));
  EXPECT_NE(change, 0u);
  rig.Wait();
  MUST(offload_stream_synchronize(rig.context(), stream, -1));
  MUST(offload_stream_destroy(rig.context(), stream));
  EXPECT_EQ(rig.Difference(solved.trace[1]), "");
}

INSTANTIATE_TEST_SUITE_P(
    Rings, RingChangeTest,
    testing::Values(RingChange{OFFLOAD_EXECUTORS_STREAMED, "state down",
                               offload_optimizer_offload_states},
                    RingChange{OFFLOAD_EXECUTORS_STREAMED, "state down", nullptr},
                    RingChange{OFFLOAD_EXECUTORS_CPU, "params uploaded", nullptr}));

}  // namespace
}  // namespace hybridopt
