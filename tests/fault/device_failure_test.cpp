// The device fails, refuses, or stops: waiting threads learn the cause, none hangs, nothing leaks,
// and a call that failed before it began can be repeated.
#include <execinfo.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "../devices.h"
#include "../forwarding_device.h"
#include "../random.h"
#include "../scale.h"
#include "base/system.h"
#include "machine/context.h"
#include "optimizer/optimizer.h"
#include "trainer.h"

namespace hybridopt::fault {
namespace {

constexpr int64_t kLongNs = 60'000'000'000;  // no timed assertion: only the end of a hang

bool Contains(const std::string& text, const std::string& word) {
  return text.find(word) != std::string::npos;
}

// ------------------------------------------------------------------------------ through the ABI --

TEST(AsynchronousFailure, ReachesTheWaiterWithItsCauseAndPoisonsTheRest) {
  RunOptions run;
  run.sim_delay_ns_max = 100'000;
  Trainer trainer(run);
  trainer.AddParams();
  trainer.Commit();
  trainer.Steps(0, 1);
  offload_stream_t stream = nullptr;
  ASSERT_OFFLOAD_OK(offload_stream_create(trainer.context, &stream));

  // The caller's mistake: the gradient is freed while it is bound.
  ASSERT_OFFLOAD_OK(offload_device_free(trainer.context, trainer.grads[2]));
  std::vector<offload_ticket_t> tickets(3);
  for (offload_ticket_t& ticket : tickets) {
    const int32_t status = offload_optimizer_step(trainer.optimizer, nullptr, &ticket);
    if (status != OFFLOAD_OK) break;  // the failure may be known already
    const int32_t waited =
        offload_optimizer_stream_wait(trainer.optimizer, ticket, stream, nullptr, 0);
    if (waited != OFFLOAD_OK) break;
  }
  ASSERT_NE(tickets[0], 0u);
  EXPECT_EQ(offload_optimizer_wait(trainer.optimizer, tickets[0], kLongNs), OFFLOAD_DEVICE_FAILED);
  const std::string cause = offload_last_error();
  EXPECT_TRUE(Contains(cause, "freed or never allocated")) << cause;
  EXPECT_EQ(offload_optimizer_wait(trainer.optimizer, 0, kLongNs), OFFLOAD_DEVICE_FAILED);
  EXPECT_EQ(cause, offload_last_error());

  // Calls that change something are refused with the cause.
  auto binding = Make<offload_binding_t>();
  const std::vector<std::function<int32_t()>> poisoned = {
      [&] { return offload_optimizer_step(trainer.optimizer, nullptr, nullptr); },
      [&] { return offload_optimizer_bind(trainer.optimizer, &binding, 1); },
      [&] { return offload_optimizer_set_group(trainer.optimizer, 0, &trainer.group); },
      [&] {
        uint8_t keep = 0;
        return offload_optimizer_grads_to_keep(trainer.optimizer, &keep, 1);
      },
      [&] { return offload_optimizer_stream_wait(trainer.optimizer, 0, stream, nullptr, 0); }};
  for (const auto& call : poisoned) {
    EXPECT_EQ(call(), OFFLOAD_POISONED);
    EXPECT_TRUE(Contains(offload_last_error(), cause)) << offload_last_error();
  }

  // Calls that only read still work.
  auto plan = Make<offload_plan_t>();
  EXPECT_OFFLOAD_OK(offload_optimizer_plan(trainer.optimizer, &plan));
  EXPECT_EQ(plan.element_count, 5501u);
  auto stats = Make<offload_stats_t>();
  EXPECT_OFFLOAD_OK(offload_optimizer_get_stats(trainer.optimizer, &stats));
  EXPECT_EQ(stats.steps_applied, 1u);
  auto view = Make<offload_state_view_t>();
  EXPECT_OFFLOAD_OK(offload_optimizer_state(trainer.optimizer, 2, OFFLOAD_STATE_EXP_AVG, &view));
  EXPECT_EQ(view.step_count, 1u);
  auto result = Make<offload_step_result_t>();
  EXPECT_OFFLOAD_OK(offload_optimizer_step_result(trainer.optimizer, tickets[0] - 1, &result));
  EXPECT_EQ(result.step, 1u);
  EXPECT_EQ(offload_optimizer_step_result(trainer.optimizer, tickets[0], &result),
            OFFLOAD_DEVICE_FAILED);

  // The stream that waited for the steps is not held: it says what happened.
  EXPECT_EQ(offload_stream_synchronize(trainer.context, stream, kLongNs), OFFLOAD_DEVICE_FAILED);
  EXPECT_TRUE(Contains(offload_last_error(), "freed or never allocated")) << offload_last_error();
}

// If a write fails half way, no step may use its result.
TEST(WriteState, ThatFailsOnTheDevicePoisonsAndSaysWhy) {
  Trainer trainer({});
  trainer.AddParams();
  trainer.Commit();
  trainer.Steps(0, 1);
  std::vector<float> values(trainer.Param(2).count, 1.0f);
  // The caller's mistake: the param is freed while it is bound.
  ASSERT_OFFLOAD_OK(offload_device_free(trainer.context, trainer.data[2]));
  EXPECT_EQ(offload_optimizer_write_state(trainer.optimizer, 2, OFFLOAD_STATE_MASTER, 0,
                                          values.size(), values.data()),
            OFFLOAD_DEVICE_FAILED);
  const std::string cause = offload_last_error();
  for (const char* word : {"state was being written", "mixture", "freed or never allocated"})
    EXPECT_TRUE(Contains(cause, word)) << cause;
  for (const auto& call : std::vector<std::function<int32_t()>>{
           [&] { return offload_optimizer_step(trainer.optimizer, nullptr, nullptr); },
           [&] {
             return offload_optimizer_read_state(trainer.optimizer, 0, OFFLOAD_STATE_MASTER, 0, 1,
                                                 values.data());
           },
           [&] {
             return offload_optimizer_write_state(trainer.optimizer, 0, OFFLOAD_STATE_MASTER, 0, 1,
                                                  values.data());
           }}) {
    EXPECT_EQ(call(), OFFLOAD_POISONED);
    EXPECT_TRUE(Contains(offload_last_error(), cause)) << offload_last_error();
  }
  // What had completed before stays so.
  EXPECT_OFFLOAD_OK(offload_optimizer_wait(trainer.optimizer, 0, kLongNs));
}

TEST(ReadState, ThatFailsOnTheDeviceSaysWhy) {
  RunOptions run;
  run.device_fraction = 1;
  Trainer trainer(run);
  trainer.AddParams();
  trainer.Commit();
  trainer.Steps(0, 1);
  std::vector<float> values(trainer.Param(1).count);
  ASSERT_OFFLOAD_OK(offload_device_free(trainer.context, trainer.data[1]));  // its own master
  EXPECT_EQ(offload_optimizer_read_state(trainer.optimizer, 1, OFFLOAD_STATE_MASTER, 0,
                                         values.size(), values.data()),
            OFFLOAD_DEVICE_FAILED);
  EXPECT_TRUE(Contains(offload_last_error(), "freed or never allocated")) << offload_last_error();
}

TEST(StuckStream, FailsTheStepAfterDeviceTimeoutAndReleasesWhoWaits) {
  RunOptions run;
  run.device_timeout_ns = 1'000'000'000;
  Trainer trainer(run), other(run);
  for (Trainer* t : {&trainer, &other}) {
    t->AddParams();
    t->Commit();
    t->UploadGrads(0);
  }
  Gate gate;
  offload_stream_t stuck = nullptr, waiting = nullptr;
  ASSERT_OFFLOAD_OK(offload_stream_create(trainer.context, &stuck));
  ASSERT_OFFLOAD_OK(offload_stream_create(trainer.context, &waiting));
  ASSERT_OFFLOAD_OK(offload_stream_run(trainer.context, stuck, Gate::Hold, &gate));
  auto options = Make<offload_step_options_t>();
  options.stream = stuck;
  offload_ticket_t ticket = 0;
  for (int step = 0; step < 2; ++step)  // the stream waits for the one that will never run
    ASSERT_OFFLOAD_OK(offload_optimizer_step(trainer.optimizer, &options, &ticket));
  const int32_t status =
      offload_optimizer_stream_wait(trainer.optimizer, ticket, waiting, nullptr, 0);
  EXPECT_TRUE(status == OFFLOAD_OK || status == OFFLOAD_POISONED) << offload_last_error();

  EXPECT_EQ(offload_optimizer_wait(trainer.optimizer, ticket, kLongNs), OFFLOAD_DEVICE_FAILED);
  for (const char* word : {"no progress for 1.0 s", "device_timeout_ns", "waited for the gradients",
                           "event \"caller ready\" on stream \"caller\"", "is that stream stuck"})
    EXPECT_TRUE(Contains(offload_last_error(), word)) << offload_last_error();
  EXPECT_EQ(offload_optimizer_step(trainer.optimizer, nullptr, nullptr), OFFLOAD_POISONED);
  EXPECT_OFFLOAD_OK(offload_stream_synchronize(trainer.context, waiting, kLongNs));
  other.Steps(0, 1);  // another context is not affected

  // The copies queued behind the stuck stream never run: destroy drops them and returns.
  ASSERT_OFFLOAD_OK(offload_optimizer_destroy(trainer.optimizer));
  trainer.optimizer = nullptr;
  EXPECT_FALSE(gate.open);
  gate.open = true;
}

TEST(StuckStream, FailsACommitThatCanBeTriedAgain) {
  RunOptions run;
  run.device_timeout_ns = 1'000'000'000;
  Trainer trainer(run), alone(run);
  for (Trainer* t : {&trainer, &alone}) t->AddParams();
  auto before = Make<offload_context_info_t>(), after = Make<offload_context_info_t>();
  ASSERT_OFFLOAD_OK(offload_context_get_info(trainer.context, &before));
  Gate gate;
  offload_stream_t stuck = nullptr;
  ASSERT_OFFLOAD_OK(offload_stream_create(trainer.context, &stuck));
  ASSERT_OFFLOAD_OK(offload_stream_run(trainer.context, stuck, Gate::Hold, &gate));
  EXPECT_EQ(offload_optimizer_commit(trainer.optimizer, stuck), OFFLOAD_DEVICE_FAILED);
  EXPECT_TRUE(Contains(offload_last_error(),
                       "the params given to commit: event \"moved\" on stream \"caller\""))
      << offload_last_error();
  EXPECT_TRUE(Contains(offload_last_error(), "the params given to commit")) << offload_last_error();
  ASSERT_OFFLOAD_OK(offload_context_get_info(trainer.context, &after));
  EXPECT_EQ(std::memcmp(&before, &after, sizeof(after)), 0);

  gate.open = true;
  for (Trainer* t : {&trainer, &alone}) {
    t->Commit();
    t->Steps(0, 2);
  }
  EXPECT_EQ(trainer.Bits(), alone.Bits());
}

TEST(Destroy, WithStepsQueuedAppliesThemFirst) {
  for (int32_t device_kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    RunOptions run;
    run.device_kind = device_kind;
    run.sim_delay_ns_max = device_kind == OFFLOAD_DEVICE_SIM ? 200'000 : 0;
    Trainer trainer(run), alone(run);
    for (Trainer* t : {&trainer, &alone}) {
      t->AddParams();
      t->Commit();
      t->UploadGrads(0);
      for (int step = 0; step < 8; ++step)
        ASSERT_OFFLOAD_OK(offload_optimizer_step(t->optimizer, nullptr, nullptr));
    }
    ASSERT_OFFLOAD_OK(offload_optimizer_destroy(trainer.optimizer));
    ASSERT_OFFLOAD_OK(offload_optimizer_wait(alone.optimizer, 0, -1));
    trainer.optimizer = nullptr;
    for (uint32_t param = 0; param < trainer.size(); ++param)
      EXPECT_EQ(trainer.ParamBits(param), alone.ParamBits(param));
  }
}

// ----------------------------------------------------------------------------- through the port --

// The place in the code from which a call comes, as return addresses.
using Place = std::vector<void*>;

Place PlaceOfCaller() {
  std::array<void*, 32> frames;
  const int count = backtrace(frames.data(), static_cast<int>(frames.size()));
  return {frames.begin(), frames.begin() + count};
}

struct Call {
  std::string name;
  int step;  // 0 while committing, then from 1
  Place place;
};

// The call that fails, when, and how.
struct Plan {
  uint64_t failing_call = UINT64_MAX;
  int32_t code = OFFLOAD_DEVICE_FAILED;
  bool sticky = false;  // all calls from then on
  std::atomic<uint64_t> calls = 0;
  std::atomic<int64_t> streams = 0, events = 0, pinned = 0, allocations = 0;  // held
  int step = 0;
  std::vector<Call> made;  // in one thread at a time; only where nothing is to fail

  Status Next(const char* call) {
    const uint64_t number = calls++;
    if (failing_call == UINT64_MAX) made.push_back({call, step, PlaceOfCaller()});
    if (number == failing_call || (sticky && number > failing_call))
      return Status::Error(code, "injected into call %llu, %s",
                           static_cast<unsigned long long>(number), call);
    return {};
  }
};

// Forwards to a device, and fails one call as planned. Calls that free something never fail.
class FaultyDevice final : public ForwardingDevice {
 public:
  FaultyDevice(std::unique_ptr<Device> device, Plan& plan)
      : ForwardingDevice(std::move(device)), plan_(plan) {}

  Result<DeviceMemory> Memory() const override {
    HYBRIDOPT_TRY(plan_.Next("Memory"));
    return ForwardingDevice::Memory();
  }
  Result<void*> Allocate(uint64_t bytes) override {
    HYBRIDOPT_TRY(plan_.Next("Allocate"));
    plan_.allocations += 1;
    return ForwardingDevice::Allocate(bytes);
  }
  Status Free(void* data) override {
    plan_.allocations -= 1;
    return ForwardingDevice::Free(data);
  }
  Status PinHost(void* data, uint64_t bytes) override {
    HYBRIDOPT_TRY(plan_.Next("PinHost"));
    plan_.pinned += 1;
    return ForwardingDevice::PinHost(data, bytes);
  }
  void UnpinHost(void* data) override {
    plan_.pinned -= 1;
    ForwardingDevice::UnpinHost(data);
  }
  Result<StreamHandle> CreateStream(const char* label) override {
    HYBRIDOPT_TRY(plan_.Next("CreateStream"));
    plan_.streams += 1;
    return ForwardingDevice::CreateStream(label);
  }
  void AbandonStream(StreamHandle stream) override {
    plan_.streams -= 1;
    ForwardingDevice::AbandonStream(stream);
  }
  Status DestroyStream(StreamHandle stream) override {
    plan_.streams -= 1;
    return ForwardingDevice::DestroyStream(stream);
  }
  Result<EventHandle> CreateEvent(const char* label) override {
    HYBRIDOPT_TRY(plan_.Next("CreateEvent"));
    plan_.events += 1;
    return ForwardingDevice::CreateEvent(label);
  }
  void DestroyEvent(EventHandle event) override {
    plan_.events -= 1;
    ForwardingDevice::DestroyEvent(event);
  }
  Status Record(EventHandle event, StreamHandle stream) override {
    HYBRIDOPT_TRY(plan_.Next("Record"));
    return ForwardingDevice::Record(event, stream);
  }
  Status StreamWait(StreamHandle stream, EventHandle event) override {
    HYBRIDOPT_TRY(plan_.Next("StreamWait"));
    return ForwardingDevice::StreamWait(stream, event);
  }
  Status StreamWaitFlag(StreamHandle stream, const std::atomic<uint64_t>* flag,
                        uint64_t value) override {
    HYBRIDOPT_TRY(plan_.Next("StreamWaitFlag"));
    return ForwardingDevice::StreamWaitFlag(stream, flag, value);
  }
  // Waits, so that the number of calls does not depend on the speed of the device: chunks then go
  // to the workers as early as possible.
  Result<bool> Reached(EventHandle event) override {
    HYBRIDOPT_TRY(plan_.Next("Reached"));
    HYBRIDOPT_TRY(ForwardingDevice::Wait(event, -1));
    return ForwardingDevice::Reached(event);
  }
  Status Wait(EventHandle event, int64_t timeout_ns) override {
    HYBRIDOPT_TRY(plan_.Next("Wait"));
    return ForwardingDevice::Wait(event, timeout_ns);
  }
  Result<double> Elapsed(EventHandle begin, EventHandle end) override {
    HYBRIDOPT_TRY(plan_.Next("Elapsed"));
    return ForwardingDevice::Elapsed(begin, end);
  }
  Status CopyToHost(StreamHandle stream, void* host, const void* device, uint64_t bytes) override {
    HYBRIDOPT_TRY(plan_.Next("CopyToHost"));
    return ForwardingDevice::CopyToHost(stream, host, device, bytes);
  }
  Status CopyToDevice(StreamHandle stream, void* device, const void* host,
                      uint64_t bytes) override {
    HYBRIDOPT_TRY(plan_.Next("CopyToDevice"));
    return ForwardingDevice::CopyToDevice(stream, device, host, bytes);
  }
  Status Fill(StreamHandle stream, void* device, uint64_t count, const Pattern& pattern) override {
    HYBRIDOPT_TRY(plan_.Next("Fill"));
    return ForwardingDevice::Fill(stream, device, count, pattern);
  }
  Status SurveyChanges(StreamHandle stream, const ChangeSurvey& launch) override {
    HYBRIDOPT_TRY(plan_.Next("SurveyChanges"));
    return ForwardingDevice::SurveyChanges(stream, launch);
  }
  Status CollectChanges(StreamHandle stream, const ChangeCollection& launch) override {
    HYBRIDOPT_TRY(plan_.Next("CollectChanges"));
    return ForwardingDevice::CollectChanges(stream, launch);
  }
  Status FollowParams(StreamHandle stream, const void* params, int32_t dtype, uint64_t count,
                      float* masters) override {
    HYBRIDOPT_TRY(plan_.Next("FollowParams"));
    return ForwardingDevice::FollowParams(stream, params, dtype, count, masters);
  }
  Status Norm(StreamHandle stream, const NormLaunch& launch) override {
    HYBRIDOPT_TRY(plan_.Next("Norm"));
    return ForwardingDevice::Norm(stream, launch);
  }
  Status SetVerdict(StreamHandle stream, const Verdict& value, Verdict* device) override {
    HYBRIDOPT_TRY(plan_.Next("SetVerdict"));
    return ForwardingDevice::SetVerdict(stream, value, device);
  }
  Status Update(StreamHandle stream, const UpdateLaunch& launch) override {
    HYBRIDOPT_TRY(plan_.Next("Update"));
    return ForwardingDevice::Update(stream, launch);
  }

 private:
  Plan& plan_;
};

constexpr uint64_t kCount = 2500;
constexpr int kSteps = 3;

// The executor of the host share: one at a time, so that the calls of each try are the same. In the
// last mode the CPU workers update one chunk early, because there is room for only one.
enum class Mode { kCpu, kStreamed, kEarly };

// An optimizer on a faulty device: an SGD param with momentum and one without, device and host
// shares, three chunks through two slots.
class Rig {
 public:
  Rig(Plan& plan, Mode mode) : plan_(plan), mode_(mode) {
    Result<const KernelTable*> kernels = SelectKernels();
    Result<std::unique_ptr<Device>> accelerator =
        MakeAccelerator({uint64_t{1} << 20, 1, 0}, *kernels.value());
    auto options = Make<offload_context_options_t>();
    options.device_kind = accelerator.value()->kind();
    options.threads = 2;
    options.log = DropLog;
    auto device = std::make_unique<FaultyDevice>(std::move(accelerator.value()), plan);
    device_ = device.get();
    context_ = std::make_shared<Context>(options, std::move(device), *kernels.value());
    Result<void*> memory = device_->Allocate(4 * kArrays * kCount);
    for (uint64_t i = 0; i < kArrays; ++i)
      arrays_[i] = static_cast<char*>(memory.value()) + 4 * i * kCount;
    FillArrays();
    auto optimizer_options = Make<offload_optimizer_options_t>();
    optimizer_options.algorithm = OFFLOAD_SGD;
    optimizer_options.device_fraction = 0.3;
    optimizer_options.chunk_elements = 1024;
    optimizer_options.staging_slots = 2;
    optimizer_options.host_executors =
        mode == Mode::kStreamed ? OFFLOAD_EXECUTORS_STREAMED : OFFLOAD_EXECUTORS_CPU;
    if (mode == Mode::kEarly) {
      optimizer_options.movable = OFFLOAD_MOVABLE_GRADS;
      optimizer_options.early_update_bytes = 14 << 10;
    }
    optimizer = Optimizer::Create(context_, optimizer_options).value();
    Register();
    idle_ = Held();
  }

  // Everything from commit on; the first failure.
  Status Work() {
    HYBRIDOPT_TRY(optimizer->Commit(nullptr));
    committed = true;
    for (int step = 0; step < kSteps; ++step) {
      plan_.step = step + 1;
      if (mode_ == Mode::kEarly) HYBRIDOPT_TRY(OffloadGrads());
      auto options = Make<offload_step_options_t>();
      const int unclipped = mode_ == Mode::kEarly ? 0 : 1;  // updates are kept, then undone
      options.grad_norm_max = step == unclipped ? 0 : 0.5;
      options.flags = step == unclipped ? OFFLOAD_STEP_ASSUME_FINITE : 0;
      HYBRIDOPT_ASSIGN(const offload_ticket_t ticket, optimizer->Step(options));
      HYBRIDOPT_TRY(optimizer->Wait(ticket, kLongNs));
      HYBRIDOPT_TRY(optimizer->StreamWait(ticket, nullptr, {}));
    }
    plan_.step = kSteps + 1;
    std::vector<float> masters(kCount);
    HYBRIDOPT_TRY(optimizer->ReadState({0, OFFLOAD_STATE_MASTER, 0, kCount}, masters.data()));
    return optimizer->WriteState({0, OFFLOAD_STATE_MASTER, 0, kCount}, masters.data());
  }

  std::vector<float> Params() {
    std::vector<float> values(2 * kCount);
    for (uint64_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(device_->CopyToHost(nullptr, &values[i * kCount], arrays_[i], 4 * kCount).ok());
    }
    EXPECT_TRUE(device_->Synchronize(nullptr, kLongNs).ok());
    return values;
  }

  // Streams, events, pinned areas, allocations and device bytes.
  std::array<int64_t, 5> Held() {
    const uint64_t failing_call = std::exchange(plan_.failing_call, UINT64_MAX);
    // A real driver takes memory for its own use at any time.
    const int64_t free_bytes =
        TestsRunOnCuda() ? 0 : static_cast<int64_t>(device_->Memory().value().free_bytes);
    plan_.failing_call = failing_call;
    return {plan_.streams, plan_.events, plan_.pinned, plan_.allocations, free_bytes};
  }
  bool shares_queues() const { return device_->shares_queues(); }
  bool HoldsWhatItHeldBeforeCommit() {
    return Held() == idle_ && context_->Info().value().pinned_bytes == 0;
  }

  std::shared_ptr<Optimizer> optimizer;
  bool committed = false;

 private:
  static constexpr uint64_t kArrays = 4;  // two params, two gradients

  Status OffloadGrads() {
    for (uint32_t i = 0; i < 2; ++i) {
      auto binding = Make<offload_binding_t>();
      binding.param = i;
      binding.data = arrays_[i];
      binding.grad = arrays_[2 + i];
      HYBRIDOPT_TRY(optimizer->Bind({&binding, 1}));
    }
    const offload_stream_t stream = nullptr;
    HYBRIDOPT_ASSIGN(const offload_ticket_t ticket,
                     optimizer->MoveResource(Move::kOffloadGrads, {}, {&stream, 1}));
    return optimizer->Wait(ticket, kLongNs);
  }

  void FillArrays() {
    std::vector<float> values(kCount);
    for (uint64_t i = 0; i < kArrays; ++i) {
      for (uint64_t e = 0; e < kCount; ++e)
        values[e] = static_cast<float>(e % 97) / 97.0f - 0.25f * static_cast<float>(i);
      EXPECT_TRUE(device_->CopyToDevice(nullptr, arrays_[i], values.data(), 4 * kCount).ok());
      EXPECT_TRUE(device_->Synchronize(nullptr, kLongNs).ok());
    }
  }

  void Register() {
    auto group = Make<offload_group_t>();
    group.lr = 0.1;
    for (double momentum : {0.9, 0.0}) {
      group.momentum = momentum;
      EXPECT_TRUE(optimizer->AddGroup(group).ok());
    }
    const char* const names[] = {"with", "without"};
    for (uint32_t i = 0; i < 2; ++i) {
      ParamInput input{Make<offload_param_t>(), std::nullopt};
      input.param.group = i;
      input.param.dtype = input.param.grad_dtype = OFFLOAD_FP32;
      input.param.name = names[i];
      input.param.data = arrays_[i];
      input.param.grad = arrays_[2 + i];
      input.param.count = kCount;
      EXPECT_TRUE(optimizer->AddParams({&input, 1}).ok());
    }
  }

  Plan& plan_;
  const Mode mode_;
  FaultyDevice* device_ = nullptr;
  std::shared_ptr<Context> context_;
  void* arrays_[kArrays] = {};
  std::array<int64_t, 5> idle_{};
};

// Counts the calls of setting up a rig, which are not to fail.
uint64_t CallsBeforeWork() {
  Plan plan;
  Rig rig(plan, Mode::kCpu);
  return plan.calls;
}

// Which calls to fail: in each step the first and the last from each place, one drawn from those
// between, and a call that is not made any more. In a long run all of them; under a sanitizer,
// where a try takes a tenth of a second, none is drawn; on a real device the first and the last few
// of each kind.
std::vector<uint64_t> CallsToFail(uint64_t before, const std::vector<Call>& made) {
  const size_t of_each_end = TestsRunOnCuda() ? 4 : TestScale() > 1 ? made.size() : 1;
  const bool draws = TestScale() >= 1;
  std::map<std::tuple<std::string, int, Place>, std::vector<uint64_t>> alike;
  for (uint64_t number = before; number < made.size(); ++number) {
    const Call& call = made[number];
    alike[TestsRunOnCuda() ? std::tuple(call.name, 0, Place())
                           : std::tuple(call.name, call.step, call.place)]
        .push_back(number);
  }
  std::vector<uint64_t> calls;
  for (const auto& [kind, of_kind] : alike) {
    const size_t drawn = draws ? Random(of_kind.front()).Below(of_kind.size()) : 0;
    for (size_t i = 0; i < of_kind.size(); ++i)
      if (i < of_each_end || i + of_each_end >= of_kind.size() || i == drawn)
        calls.push_back(of_kind[i]);
  }
  std::sort(calls.begin(), calls.end());
  calls.push_back(made.size());
  return calls;
}

void FailEveryCallOnce(int32_t code, bool sticky, Mode mode) {
  const uint64_t before = CallsBeforeWork();
  std::vector<float> expected;
  std::vector<uint64_t> calls;
  bool waits_for_flags = false;
  {
    Plan plan;
    Rig rig(plan, mode);
    waits_for_flags = !rig.shares_queues();
    const Status status = rig.Work();
    ASSERT_TRUE(status.ok()) << status.message();
    calls = CallsToFail(before, plan.made);
    expected = rig.Params();
    rig.optimizer.reset();
    EXPECT_TRUE(rig.HoldsWhatItHeldBeforeCommit());
  }
  std::set<std::string> failed;  // the kinds of calls that were reached
  for (const uint64_t call : calls) {
    SCOPED_TRACE("call " + std::to_string(call));
    Plan plan;
    plan.failing_call = call;
    plan.code = code;
    plan.sticky = sticky;
    Rig rig(plan, mode);
    const Status status = rig.Work();
    plan.failing_call = UINT64_MAX;
    if (status.ok()) {
      EXPECT_EQ(call, calls.back()) << "the failure was swallowed";
      EXPECT_EQ(rig.Params(), expected);
      continue;
    }
    ASSERT_TRUE(Contains(status.message(), "injected into call " + std::to_string(call)))
        << status.message();
    EXPECT_TRUE(status.code() == code) << offload_status_name(status.code());
    failed.insert(status.message().substr(status.message().rfind(' ') + 1));
    if (!rig.committed) {
      // Nothing is kept, and the optimizer still registers.
      EXPECT_TRUE(rig.HoldsWhatItHeldBeforeCommit());
      const Status retried = rig.Work();
      ASSERT_TRUE(retried.ok()) << retried.message();
      EXPECT_EQ(rig.Params(), expected);
    }
    rig.optimizer.reset();
    EXPECT_TRUE(rig.HoldsWhatItHeldBeforeCommit());
  }
  for (const char* call :
       {"Memory", "Allocate", "PinHost", "CreateStream", "CreateEvent", "Record", "StreamWait",
        "Wait", "Elapsed", "CopyToHost", "CopyToDevice", "Fill", "Norm", "SetVerdict", "Update"})
    EXPECT_EQ(failed.count(call), 1u) << call << " was never made to fail";
  // Where streams share queues, the host waits instead.
  EXPECT_EQ(failed.count("StreamWaitFlag"), waits_for_flags ? 1u : 0u);
}

class InjectedFailure : public testing::TestWithParam<Mode> {};

TEST_P(InjectedFailure, OfAnyOneCallIsReportedAndLeaksNothing) {
  FailEveryCallOnce(OFFLOAD_DEVICE_FAILED, false, GetParam());
}
TEST_P(InjectedFailure, OfAllCallsFromAnyOneOnIsReportedAndLeaksNothing) {
  FailEveryCallOnce(OFFLOAD_DEVICE_FAILED, true, GetParam());
}
TEST_P(InjectedFailure, OfMemoryAtAnyCallIsReportedAndLeaksNothing) {
  FailEveryCallOnce(OFFLOAD_OUT_OF_DEVICE_MEMORY, false, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Executors, InjectedFailure,
                         testing::Values(Mode::kCpu, Mode::kStreamed, Mode::kEarly),
                         [](const auto& info) {
                           return info.param == Mode::kCpu        ? "Cpu"
                                  : info.param == Mode::kStreamed ? "Streamed"
                                                                  : "Early";
                         });

}  // namespace
}  // namespace hybridopt::fault
