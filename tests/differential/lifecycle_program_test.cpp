// Random programs of lifecycle calls on an accelerator, queued one after the other with random
// delays, against a sequential model that knows nothing of residence: it sees gradients, weights,
// hyperparameters and steps, and the bits must be those of the model. A follower
// gets the params by what takes of changes give, and its copy must be that of the model too.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "follower.h"
#include "lifecycle_rig.h"
#include "state/lifecycle.h"

namespace hybridopt {
namespace {

constexpr int kCalls = 32;

const std::vector<uint64_t> kCounts = {1500, 33, 700, 2100, 1, 4099, 0, 1024};

Problem ProgramProblem(uint64_t seed) {
  Random random(seed + 1);
  Problem problem = RandomProblem(AlgorithmOfSeed(seed), SpecsOf(kCounts, random), 1, seed);
  problem.state = StateChoices()[seed / kAlgorithmValues.size() % StateChoices().size()];
  return problem;
}

LifecycleSetting ProgramSetting(uint64_t seed, int32_t device_kind) {
  Random random(seed + 2);
  LifecycleSetting setting;
  setting.device_kind = device_kind;
  setting.threads = 1 + static_cast<uint32_t>(random.Below(3));
  setting.seed = seed;
  setting.delay_ns_max = random.OneIn(3) ? 0 : 20'000;
  setting.memory_bytes = 4 << 20;
  setting.optimizer.device_fraction = random.OneIn(4) ? 0 : random.OneIn(3) ? 1 : random.Unit();
  setting.optimizer.chunk_elements = 1024 + 1000 * random.Below(3);
  setting.optimizer.staging_slots = 2 + static_cast<uint32_t>(random.Below(3));
  DrawExecutors(setting.optimizer.chunk_elements, random, setting.optimizer);
  if (random.OneIn(4)) {  // a file system in memory is faster; where there is none, this one
    setting.optimizer.disk_fraction =
        (1 - setting.optimizer.device_fraction) * (random.OneIn(2) ? 1 : random.Unit());
    setting.optimizer.disk_paths = std::filesystem::is_directory("/dev/shm") ? "/dev/shm" : "/tmp";
  }
  setting.slow_event = DrawSlowEvent(random);
  setting.track_changes = 1;
  if (random.OneIn(2) && setting.optimizer.host_executors != OFFLOAD_EXECUTORS_STREAMED)
    setting.optimizer.early_update_bytes = 1 << (12 + random.Below(8));
  for (int i = 0; i < 8; ++i)
    setting.chunk_orders.push_back(random.OneIn(2) ? 0 : static_cast<int32_t>(random.Below(5)));
  if (device_kind == OFFLOAD_DEVICE_HOST) {
    setting.optimizer.host_executors = OFFLOAD_EXECUTORS_AUTO;
    setting.optimizer.stream_ring_bytes = setting.optimizer.early_update_bytes = 0;
  }
  return setting;
}

// Makes random calls of the library, and repeats in the model those that change numbers. It
// remembers where params, gradients and states are, so that it knows which calls are legal.
class Program {
 public:
  Program(uint64_t seed, int32_t device_kind)
      : random_(seed),
        device_kind_(device_kind),
        problem_(ProgramProblem(seed)),
        seen_(problem_),
        model_(seen_),
        may_use_disk_(!ProgramSetting(seed, device_kind).optimizer.disk_paths.empty()),
        rig_(problem_, ProgramSetting(seed, device_kind)),
        params_(problem_.params.size()),
        groups_(problem_.groups),
        follower_(problem_.params.size()) {
    MUST(offload_stream_create(rig_.context(), &streams_[1]));
    MUST(offload_stream_create(rig_.context(), &streams_[2]));
  }
  ~Program() {
    rig_.Wait();
    for (offload_stream_t stream : streams_) MUST(offload_stream_destroy(rig_.context(), stream));
  }

  uint64_t steps() const { return model_.steps_applied; }
  const Follower& follower() const { return follower_; }

  // Empty, or the difference to the model.
  std::string Run() {
    for (int call = 0; call < kCalls && error_.empty(); ++call) MakeCall();
    ComeHome();
    for (int last = 0; last < 2; ++last) {  // the remaining gradients, then once more
      Step();
      WriteGrads();
    }
    TakeChanges(Some(1));
    if (!error_.empty()) return error_;
    const std::string difference = rig_.Difference(model_);
    if (!difference.empty()) return difference;
    const offload_stats_t stats = rig_.Stats();
    if (stats.steps_applied != model_.steps_applied || stats.steps_skipped != model_.steps_skipped)
      return "steps";
    return device_kind_ == OFFLOAD_DEVICE_HOST ? "" : BytesLeft();
  }

 private:
  // When everything is offloaded, the device has only memory of the test.
  std::string BytesLeft() {
    if (TestsRunOnCuda()) return "";  // its driver takes memory for its own use
    rig_.Move(offload_optimizer_offload_grads, {{}, OFFLOAD_MOVE_DROP, {}});
    rig_.Move(offload_optimizer_offload_params);
    Move(offload_optimizer_offload_states, Some());
    rig_.Move(offload_optimizer_offload_states);
    CollectGarbage();
    const uint64_t left = rig_.DeviceBytesUsed() - rig_.allocated_bytes();
    return left == 0 ? "" : std::to_string(left) + " bytes are still held on the device";
  }

  struct ParamState {
    bool away = false;    // params
    bool address = true;  // of the params; given up when they are offloaded
    bool states_away = false;
    HostGrad held = HostGrad::kNone;
    std::vector<float> sum;      // the host's gradient, widened
    Bytes stored;                // the host's gradient, unchanged
    std::optional<Bytes> bound;  // the content at the bound address
  };

  void MakeCall() {
    switch (random_.Below(20)) {
      case 0:
      case 1:
      case 2:
        return WriteGrads();
      case 3:
        return OffloadGrads();
      case 4:
      case 5:
        return Accumulate();
      case 6:
        return Drop();
      case 7:
        return ReloadGrads();
      case 8:
        return OffloadParams();
      case 9:
        return ReloadParams();
      case 10:
        return OffloadStates();
      case 11:
        return ReloadStates();
      case 12:
        return Refresh();
      case 13:
        groups_ = RandomGroups(problem_.algorithm, false, random_);
        return rig_.SetGroups(groups_);
      case 14:
        return MakeIllegalCall();
      case 15:
      case 16:
        return ChangeFraction();
      case 17:
      case 18:
        return TakeChanges(Some());
      default:
        if (random_.OneIn(2)) ComeHome();
        return Step();
    }
  }

  // Each param with that probability, in random order.
  std::vector<uint32_t> Some(uint64_t one_in = 2) {
    std::vector<uint32_t> ids;
    for (uint32_t id = 0; id < params_.size(); ++id)
      if (random_.OneIn(one_in)) ids.push_back(id);
    random_.Shuffle(ids);
    return ids;
  }
  template <typename Keep>
  std::vector<uint32_t> SomeOf(Keep keep, uint64_t one_in = 2) {
    std::vector<uint32_t> ids = Some(one_in);
    std::erase_if(ids, [&](uint32_t id) { return !keep(params_[id]); });
    return ids;
  }
  template <typename Keep>
  std::vector<uint32_t> AllOf(Keep keep) {
    return SomeOf(keep, 1);
  }

  // Gradients are made on all streams.
  MoveArguments With(std::vector<uint32_t> ids, uint32_t flags = 0) {
    if (!ids.empty() && random_.OneIn(4)) ids.push_back(ids.front());
    MoveArguments arguments = {std::move(ids), flags, {streams_[0], streams_[1], streams_[2]}};
    if (random_.OneIn(2)) arguments.streams.push_back(streams_[1]);
    random_.Shuffle(arguments.streams);
    return arguments;
  }
  // No params would mean all.
  void Move(MoveFunction move, const std::vector<uint32_t>& ids, uint32_t flags = 0) {
    if (ids.empty()) return;
    rig_.Move(move, With(ids, flags));
    if (random_.OneIn(4)) CollectGarbage();
  }

  // Buffers that queued work may still use are freed when all of it is done.
  void Discard(void*& buffer) {
    if (buffer != nullptr) garbage_.push_back(buffer);
    buffer = nullptr;
  }
  void CollectGarbage() {
    rig_.Wait();
    for (offload_stream_t stream : streams_)  // an unused gradient may still be being written
      MUST(offload_stream_synchronize(rig_.context(), stream, -1));
    for (void* buffer : garbage_) rig_.Free(buffer);
    garbage_.clear();
  }

  // ---- gradients

  // The backward pass, on a stream of its own: a function that runs behind the call.
  struct Kernel {
    void* to;
    Bytes from;
    std::chrono::nanoseconds duration;
    static void Run(void* self) {
      const auto* kernel = static_cast<const Kernel*>(self);
      std::this_thread::sleep_for(kernel->duration);
      std::memcpy(kernel->to, kernel->from.data(), kernel->from.size());
    }
  };
  void WriteBehind(void* buffer, const Bytes& bytes) {
    if (bytes.empty()) return;
    if (TestsRunOnCuda()) return rig_.Write(buffer, bytes, streams_[random_.Below(3)]);
    void* mapped = nullptr;
    MUST(offload_device_map(rig_.context(), buffer, bytes.size(), &mapped));
    const std::chrono::nanoseconds duration(random_.OneIn(8) ? random_.Below(200'000) : 0);
    kernels_.push_back(std::make_unique<Kernel>(Kernel{mapped, bytes, duration}));
    MUST(offload_stream_run(rig_.context(), streams_[random_.Below(3)], Kernel::Run,
                            kernels_.back().get()));
  }

  void WriteGrads() {
    for (uint32_t id : Some()) {
      ParamState& state = params_[id];
      const ParamSpec& spec = problem_.params[id];
      if (state.held == HostGrad::kStored && random_.OneIn(2)) continue;
      Bytes grad = RandomArray(spec.grad_dtype, spec.count, false, random_);
      if (spec.count > 0 && random_.OneIn(60))
        PutElement(grad, spec.grad_dtype, random_.Below(spec.count),
                   BitsOf(spec.grad_dtype, INFINITY));
      Discard(rig_.grad[id]);
      rig_.grad[id] = rig_.Allocate(spec.grad_bytes());
      WriteBehind(rig_.grad[id], grad);
      state.bound = std::move(grad);
      BindOne(id);
    }
  }

  // Binds the gradient; the param's address may be a new one, or the same as before.
  void BindOne(uint32_t id) { rig_.Bind({id}); }

  void Unbind(const std::vector<uint32_t>& ids) {
    for (uint32_t id : ids) {
      params_[id].bound.reset();
      Discard(rig_.grad[id]);
    }
  }

  void OffloadGrads() {
    const std::vector<uint32_t> ids = SomeOf([](const ParamState& state) {
      return !state.bound.has_value() || state.held == HostGrad::kNone;
    });
    Move(offload_optimizer_offload_grads, ids);
    for (uint32_t id : ids) {
      ParamState& state = params_[id];
      if (!state.bound.has_value()) continue;
      state.held = HostGrad::kStored;
      state.stored = *state.bound;
    }
    Unbind(ids);
  }

  void Accumulate() {
    const std::vector<uint32_t> ids = SomeOf([](const ParamState& state) {
      return !state.bound.has_value() || state.held != HostGrad::kStored;
    });
    Move(offload_optimizer_offload_grads, ids, OFFLOAD_MOVE_ACCUMULATE);
    for (uint32_t id : ids) {
      ParamState& state = params_[id];
      if (!state.bound.has_value()) continue;
      std::optional<std::vector<float>> sum;
      if (state.held == HostGrad::kAccumulated) sum = state.sum;
      AddTo(sum, problem_.params[id].grad_dtype, *state.bound);
      state.sum = *sum;
      state.held = HostGrad::kAccumulated;
    }
    Unbind(ids);
  }

  void Drop() {
    const std::vector<uint32_t> ids = Some(4);
    Move(offload_optimizer_offload_grads, ids, OFFLOAD_MOVE_DROP);
    for (uint32_t id : ids) params_[id].held = HostGrad::kNone;
    Unbind(ids);
  }

  bool CanReload(uint32_t id) const {
    const ParamState& state = params_[id];
    return state.held == HostGrad::kStored ||
           (state.held == HostGrad::kAccumulated && problem_.params[id].grad_dtype == OFFLOAD_FP32);
  }

  void ReloadGrads() {
    std::vector<uint32_t> ids = Some();
    std::erase_if(
        ids, [&](uint32_t id) { return params_[id].held != HostGrad::kNone && !CanReload(id); });
    for (uint32_t id : ids) {
      ParamState& state = params_[id];
      if (state.held == HostGrad::kNone) continue;
      Discard(rig_.grad[id]);
      rig_.grad[id] = rig_.Allocate(problem_.params[id].grad_bytes());
      BindOne(id);
      state.bound = state.held == HostGrad::kStored ? state.stored : BytesOf(state.sum);
      state.held = HostGrad::kNone;
    }
    Move(offload_optimizer_reload_grads, ids);
  }

  // ---- params and states

  void OffloadParams() {
    const std::vector<uint32_t> ids = Some();
    Move(offload_optimizer_offload_params, ids);
    for (uint32_t id : ids) {
      ParamState& state = params_[id];
      if (state.away) continue;
      state.away = true;
      state.address = false;
      Discard(rig_.data[id]);
    }
  }

  void BindNewData(uint32_t id) {
    Discard(rig_.data[id]);
    rig_.data[id] = rig_.Allocate(problem_.params[id].data_bytes());
    BindOne(id);
    params_[id].address = true;
  }

  void ReloadParams(const std::vector<uint32_t>& ids) {
    for (uint32_t id : ids)
      if (params_[id].away && (!params_[id].address || random_.OneIn(3))) BindNewData(id);
    Move(offload_optimizer_reload_params, ids);
    for (uint32_t id : ids) params_[id].away = false;
  }
  void ReloadParams() {
    if (random_.OneIn(3)) {  // the address now, the bits later
      for (uint32_t id : SomeOf([](const ParamState& state) { return state.away; }))
        BindNewData(id);
      return;
    }
    ReloadParams(Some());
  }

  void OffloadStates() {
    const std::vector<uint32_t> ids = random_.OneIn(2) ? Some(1) : Some();
    Move(offload_optimizer_offload_states, ids);
    for (uint32_t id : ids) params_[id].states_away = true;
  }
  void ReloadStates() {
    const std::vector<uint32_t> ids = Some();
    Move(offload_optimizer_reload_states, ids);
    for (uint32_t id : ids) params_[id].states_away = false;
  }

  // Other code writes the weights, on a stream behind all queued work. Then masters are refreshed
  // at once: without that the bits would depend on the share in which an element is.
  void Refresh() {
    const std::vector<uint32_t> ids =
        SomeOf([](const ParamState& state) { return !state.away && !state.states_away; });
    if (ids.empty()) return;
    for (offload_stream_t stream : streams_)
      MUST(offload_optimizer_stream_wait(rig_.optimizer(), 0, stream, nullptr, 0));
    for (uint32_t id : ids) {
      const ParamSpec& spec = problem_.params[id];
      Model::Param& param = model_.params[id];
      if (random_.OneIn(2)) {
        param.data = RandomArray(spec.dtype, spec.count, false, random_);
        WriteBehind(rig_.data[id], param.data);
      }
      model_.Refresh(id);
    }
    Move(offload_optimizer_refresh_masters, ids);
  }

  // States change their tier, wherever everything is; the model is not told.
  void ChangeFraction() {
    const double device = random_.OneIn(4) ? 0 : random_.OneIn(3) ? 1 : random_.Unit();
    if (!may_use_disk_) return void(rig_.SetDeviceFraction(device));
    rig_.SetFractions(device, (1 - device) * (random_.OneIn(3) ? 0 : random_.Unit()));
    if (random_.OneIn(4)) CollectGarbage();
  }

  // ---- steps

  bool MayStep() const {
    return std::all_of(params_.begin(), params_.end(), [](const ParamState& state) {
      const bool held = state.held != HostGrad::kNone;
      if (state.states_away || (held && state.bound.has_value())) return false;
      return !state.away || !(held || state.bound.has_value());
    });
  }

  // Prepares a step with as few moves as possible.
  void ComeHome() {
    ReloadParams(AllOf([](const ParamState& state) { return state.away; }));
    std::vector<uint32_t> ids = AllOf([](const ParamState& state) { return state.states_away; });
    Move(offload_optimizer_reload_states, ids);
    for (uint32_t id : ids) params_[id].states_away = false;
    ids = AllOf([](const ParamState& state) {
      return state.held != HostGrad::kNone && state.bound.has_value();
    });
    Unbind(ids);
    for (uint32_t id : ids) BindOne(id);
  }

  StepInput RandomOptions() {
    StepInput input;
    input.groups = groups_;
    if (random_.OneIn(2)) input.grad_scale = random_.OneIn(2) ? 1024 : 3;
    if (random_.OneIn(2)) input.grad_norm_max = random_.Between(0.1, 2);
    return input;
  }

  void Step() {
    StepInput input = RandomOptions();
    if (!MayStep()) return ExpectRefused(rig_.TryStep(input), "step");
    bool finite = true;
    for (uint32_t id = 0; id < params_.size(); ++id) {
      ParamState& state = params_[id];
      const int32_t own = problem_.params[id].grad_dtype;
      const bool summed = state.held == HostGrad::kAccumulated;
      seen_.params[id].grad_dtype = summed ? int32_t{OFFLOAD_FP32} : own;
      input.grads.push_back(summed                            ? BytesOf(state.sum)
                            : state.held == HostGrad::kStored ? std::optional(state.stored)
                                                              : state.bound);
      state.held = HostGrad::kNone;
      if (!input.grads.back().has_value()) continue;
      for (float value : Widened(seen_.params[id].grad_dtype, *input.grads.back()))
        finite = finite && std::isfinite(value);
    }
    if (finite && random_.OneIn(3)) input.flags = OFFLOAD_STEP_ASSUME_FINITE;
    JoinStreams();
    const uint64_t queued = rig_.Stats().queued;
    if (queued >= 8) rig_.Wait();
    last_step_ = rig_.Step(input, streams_[0]);
    model_.Step(input);
    if (random_.OneIn(3)) CheckResult();
    // After the step, gradients on the device stay bound with their content.
  }

  void CheckResult() {
    rig_.Wait(last_step_);
    const std::string difference = rig_.ResultDifference(model_, last_step_);
    if (!difference.empty()) error_ = "result: " + difference;
  }

  // The step waits for one stream only, so that stream waits for the others.
  void JoinStreams() {
    for (offload_stream_t stream : {streams_[1], streams_[2]})
      MUST(offload_stream_synchronize(rig_.context(), stream, -1));
  }

  // ---- changes

  void TakeChanges(const std::vector<uint32_t>& ids) {
    rig_.Wait();
    if (!random_.OneIn(4)) follower_.Acknowledge(rig_.optimizer());
    if (ids.empty() || !error_.empty()) return;
    bool on_device = device_kind_ != OFFLOAD_DEVICE_HOST && random_.OneIn(2);
    for (uint32_t id : ids) on_device = on_device && !params_[id].away;
    error_ = follower_.Take(
        rig_.optimizer(), ids, [this](uint32_t id) { return model_.params[id].data; },
        on_device ? rig_.context() : nullptr, random_);
    if (!error_.empty()) error_ = "changes: " + error_;
  }

  // ---- illegal calls

  void ExpectRefused(int32_t status, const char* call) {
    if (status == OFFLOAD_INVALID_STATE) return;
    error_ = std::string(call) + " was to be refused, and gave " + offload_status_name(status);
  }

  // One param for which the call is illegal, among others for which it is not: none may move.
  void MakeIllegalCall() {
    struct Illegal {
      MoveFunction move;
      uint32_t flags;
      bool (*applies)(const ParamState& state);
    };
    const Illegal calls[] = {
        {offload_optimizer_reload_params, 0,
         [](const ParamState& state) { return state.away && !state.address; }},
        {offload_optimizer_refresh_masters, 0,
         [](const ParamState& state) { return state.away || state.states_away; }},
        {offload_optimizer_offload_grads, 0,
         [](const ParamState& state) {
           return state.held != HostGrad::kNone && state.bound.has_value();
         }},
        {offload_optimizer_offload_grads, OFFLOAD_MOVE_ACCUMULATE,
         [](const ParamState& state) {
           return state.held == HostGrad::kStored && state.bound.has_value();
         }},
        {offload_optimizer_reload_grads, 0,
         [](const ParamState& state) {
           return state.held != HostGrad::kNone && !state.bound.has_value();
         }},
    };
    const size_t first = random_.Below(5);
    for (size_t i = 0; i < 5; ++i) {
      const Illegal& call = calls[(first + i) % 5];
      // An empty param needs no address.
      std::vector<uint32_t> bad = AllOf(call.applies);
      if (call.move == offload_optimizer_reload_params)
        std::erase_if(bad, [&](uint32_t id) { return problem_.params[id].count == 0; });
      if (bad.empty()) continue;
      std::vector<uint32_t> ids = Some();
      ids.push_back(bad[0]);
      const offload_stats_t before = rig_.Stats();
      ExpectRefused(rig_.TryMove(call.move, With(ids, call.flags)), "a move");
      const offload_stats_t after = rig_.Stats();
      // Other work does not show in these figures.
      if (before.params_bytes[OFFLOAD_TIER_HOST] != after.params_bytes[OFFLOAD_TIER_HOST] ||
          before.grads_bytes[OFFLOAD_TIER_HOST] != after.grads_bytes[OFFLOAD_TIER_HOST] ||
          before.state_bytes[OFFLOAD_TIER_HOST] != after.state_bytes[OFFLOAD_TIER_HOST] ||
          before.params_bytes[OFFLOAD_TIER_DEVICE] != after.params_bytes[OFFLOAD_TIER_DEVICE] ||
          before.grads_bytes[OFFLOAD_TIER_DEVICE] != after.grads_bytes[OFFLOAD_TIER_DEVICE])
        error_ = "a refused call has changed something";
      return;
    }
  }

  Random random_;
  const int32_t device_kind_;
  const Problem problem_;
  Problem seen_;  // by the model: gradients that are sums are fp32 there
  Model model_;
  std::vector<std::unique_ptr<Kernel>> kernels_;  // outlive the streams
  const bool may_use_disk_;
  LifecycleRig rig_;
  std::vector<ParamState> params_;
  std::vector<offload_group_t> groups_;
  offload_stream_t streams_[3] = {};  // the NULL stream, and two others
  std::vector<void*> garbage_;
  offload_ticket_t last_step_ = 0;
  Follower follower_;
  std::string error_;
};

TEST(LifecycleProgramTest, AThousandProgramsGiveTheModelsBits) {
  const uint64_t programs = static_cast<uint64_t>(Scaled(1000));
  uint64_t steps = 0, sparse = 0, dense = 0;
  for (uint64_t seed = 0; seed < programs; ++seed) {
    Program program(seed, AcceleratorsUnderTest().front());
    ASSERT_EQ(program.Run(), "") << "seed " << seed;
    steps += program.steps();
    sparse += program.follower().sparse_elements;
    dense += program.follower().dense_elements;
  }
  RecordProperty("steps", static_cast<int>(steps));
  // The followers of these programs got changed elements as well as whole params.
  EXPECT_GT(sparse, dense / 16);
  EXPECT_GT(dense, 0u);
}

TEST(LifecycleProgramTest, SoDoProgramsOnTheHostDevice) {
  const uint64_t programs = static_cast<uint64_t>(Scaled(300));
  for (uint64_t seed = 0; seed < programs; ++seed) {
    Program program(seed, OFFLOAD_DEVICE_HOST);
    ASSERT_EQ(program.Run(), "") << "seed " << seed;
  }
}

}  // namespace
}  // namespace hybridopt
