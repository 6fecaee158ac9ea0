// Chunks are updated before their step is called. The step keeps these updates, or another call
// undoes them first: in both cases the bits are those of a run without early updates.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "../held_files.h"
#include "../temporary_directory.h"
#include "lifecycle_rig.h"

namespace hybridopt {
namespace {

constexpr uint64_t kPlenty = 1 << 20;

const std::vector<uint64_t> kCounts = {3000, 1, 1027, 0, 5000, 640, 2048, 77};

// Every param has a gradient in every step, and no step clips or skips. The loss scale is the same
// in all steps.
Problem ProblemOf(uint64_t seed, size_t steps) {
  Random random(seed + 1);
  Problem problem = RandomProblem(AlgorithmOfSeed(seed), SpecsOf(kCounts, random), steps, seed);
  problem.state = StateChoices()[seed / kAlgorithmValues.size() % StateChoices().size()];
  const double scale = random.OneIn(2) ? 0 : 1024;
  for (StepInput& step : problem.steps) {
    step.grad_scale = scale;
    step.grad_norm_max = random.OneIn(2) ? 0 : 1e30;
    step.flags = random.OneIn(2) ? 0 : OFFLOAD_STEP_ASSUME_FINITE;
    for (size_t id = 0; id < problem.params.size(); ++id) {
      const ParamSpec& spec = problem.params[id];
      step.grads[id] = RandomArray(spec.grad_dtype, spec.count, false, random);
    }
  }
  return problem;
}

LifecycleSetting SettingOf(uint64_t seed) {
  Random random(seed + 2);
  LifecycleSetting setting;
  setting.device_kind = AcceleratorUnderTest();
  setting.threads = 1 + static_cast<uint32_t>(random.Below(3));
  setting.seed = seed;
  setting.delay_ns_max = random.OneIn(2) ? 0 : 20'000;
  setting.optimizer.chunk_elements = 1024 + 512 * random.Below(4);
  setting.optimizer.staging_slots = 2 + static_cast<uint32_t>(random.Below(3));
  do {
    setting.optimizer.stream_ring_bytes = 0;
    DrawExecutors(setting.optimizer.chunk_elements, random, setting.optimizer);
  } while (setting.optimizer.host_executors == OFFLOAD_EXECUTORS_STREAMED);
  setting.optimizer.early_update_bytes = kPlenty;
  setting.slow_event = DrawSlowEvent(random);
  for (int i = 0; i < 8; ++i)
    setting.chunk_orders.push_back(random.OneIn(2) ? 0 : static_cast<int32_t>(random.Below(5)));
  return setting;
}

// One of the gradients is not finite, so the step is skipped.
void SpoilOne(const Problem& problem, StepInput& step) {
  for (size_t id = 0; id < problem.params.size(); ++id) {
    const ParamSpec& spec = problem.params[id];
    if (spec.count == 0 || !step.grads[id].has_value()) continue;
    step.flags = 0;
    return PutElement(*step.grads[id], spec.grad_dtype, spec.count / 2,
                      BitsOf(spec.grad_dtype, INFINITY));
  }
}

// The backward pass of a program with gradient hooks, in a few calls.
void Backward(LifecycleRig& rig, const StepInput& input, Random& random) {
  rig.SetGroups(input.groups);
  rig.NewGrads(input);
  rig.BindAll();
  std::vector<uint32_t> ids;
  for (uint32_t id = 0; id < rig.size(); ++id) ids.push_back(id);
  random.Shuffle(ids);
  for (size_t begin = 0; begin < ids.size();) {
    const size_t end = std::min(ids.size(), begin + 1 + random.Below(5));
    rig.Move(offload_optimizer_offload_grads, {{ids.begin() + begin, ids.begin() + end}, 0, {}});
    begin = end;
  }
  for (void*& grad : rig.grad) grad = nullptr;  // the rig frees them at its end
}

offload_step_result_t ResultOf(LifecycleRig& rig, offload_ticket_t ticket) {
  rig.Wait(ticket);
  return rig.ResultOf(ticket);
}

uint64_t HostElements(const LifecycleRig& rig) { return rig.Plan().elements[OFFLOAD_TIER_HOST]; }

void ExpectAllUpdated(const LifecycleRig& rig, const offload_step_result_t& result) {
  EXPECT_EQ(result.cpu_elements + result.streamed_elements + result.early_elements,
            result.skipped != 0 ? 0 : HostElements(rig));
}

TEST(EarlyUpdatesTest, StepsKeepThem) {
  const uint64_t rounds = static_cast<uint64_t>(Scaled(84));
  for (uint64_t seed = 0; seed < rounds; ++seed) {
    const Solved solved(ProblemOf(seed, 4));
    LifecycleRig rig(solved.problem, SettingOf(seed));
    Random random(seed + 3);
    for (size_t step = 0; step < 4; ++step) {
      const StepInput& input = solved.problem.steps[step];
      Backward(rig, input, random);
      if (step > 0) rig.Wait();  // then the workers have begun at least
      const offload_step_result_t result = ResultOf(rig, rig.Step(input));
      ExpectAllUpdated(rig, result);
      // The first step's loss scale may not be the one assumed.
      if (step >= 2) {
        EXPECT_GT(result.early_elements, 0u) << "seed " << seed;
      }
      if (step >= 1) {
        EXPECT_EQ(result.undone_elements, 0u) << "seed " << seed;
      }
      ASSERT_EQ(rig.Difference(solved.trace[step + 1]), "") << "seed " << seed << ", step " << step;
    }
  }
}

// The verdict is the assumed one in some steps and not in others, and the room differs too.
TEST(EarlyUpdatesTest, AnyVerdictGivesTheSameBits) {
  const uint64_t rounds = static_cast<uint64_t>(Scaled(84));
  for (uint64_t seed = 0; seed < rounds; ++seed) {
    Random random(seed + 4);
    Problem problem = ProblemOf(seed, 8);
    for (StepInput& step : problem.steps) {
      const uint64_t kind = random.Below(6);
      if (kind == 0) step.grad_norm_max = 0.01;
      if (kind == 1) step.grad_scale = 7;
      if (kind == 2) step.grads[random.Below(8)].reset();
      if (kind == 3) SpoilOne(problem, step);
    }
    const Solved solved(std::move(problem));
    LifecycleSetting setting = SettingOf(seed);
    setting.optimizer.early_update_bytes = uint64_t{1} << (10 + random.Below(10));
    setting.optimizer.device_fraction = random.OneIn(2) ? 0 : random.Unit();
    LifecycleRig rig(solved.problem, setting);
    for (size_t step = 0; step < 8; ++step) {
      const StepInput& input = solved.problem.steps[step];
      Backward(rig, input, random);
      if (random.OneIn(2)) rig.Wait();
      const offload_ticket_t ticket = rig.Step(input);
      if (random.OneIn(2)) continue;
      rig.Wait();
      ASSERT_EQ(rig.ResultDifference(solved.trace[step + 1], ticket), "") << "seed " << seed;
      ASSERT_EQ(rig.Difference(solved.trace[step + 1]), "") << "seed " << seed << ", step " << step;
    }
    rig.Wait();
    ASSERT_EQ(rig.Difference(solved.trace[8]), "") << "seed " << seed;
  }
}

// Makes two steps. The second one has early updates when `call` comes. After the call the state
// must be that of the first step, and the second step must keep no early update and give the same
// bits.
template <typename Call>
void ExpectUndoneBy(const char* what, Call call) {
  for (uint64_t seed = 0; seed < 14; ++seed) {
    Problem problem = ProblemOf(seed, 2);
    for (StepInput& step : problem.steps) step.grad_scale = 0;  // what the first step assumes too
    const Solved solved(std::move(problem));
    LifecycleSetting setting = SettingOf(seed);
    setting.optimizer.device_fraction = seed % 2 == 0 ? 0 : 0.3;
    LifecycleRig rig(solved.problem, setting);
    Random random(seed + 3);
    Backward(rig, solved.problem.steps[0], random);
    rig.Wait(rig.Step(solved.problem.steps[0]));
    Backward(rig, solved.problem.steps[1], random);
    rig.Wait();
    call(rig, solved, random);
    const offload_step_result_t result = ResultOf(rig, rig.Step(solved.problem.steps[1]));
    EXPECT_EQ(result.early_elements, 0u) << what << ", seed " << seed;
    EXPECT_GT(result.undone_elements, 0u) << what << ", seed " << seed;
    ExpectAllUpdated(rig, result);
    ASSERT_EQ(rig.Difference(solved.trace[2]), "") << what << ", seed " << seed;
  }
}

TEST(EarlyUpdatesTest, WhatComesBetweenUndoesThem) {
  const TemporaryDirectory directory;
  int saves = 0;
  ExpectUndoneBy("a view", [](LifecycleRig& rig, const Solved& solved, Random&) {
    ASSERT_EQ(rig.Difference(solved.trace[1]), "");
  });
  ExpectUndoneBy("the call for it", [](LifecycleRig& rig, const Solved&, Random&) {
    MUST(offload_optimizer_undo_early_updates(rig.optimizer(), nullptr));
    MUST(offload_optimizer_undo_early_updates(rig.optimizer(), nullptr));
  });
  ExpectUndoneBy("a step count", [](LifecycleRig& rig, const Solved& solved, Random&) {
    const uint64_t count = solved.trace[1].params[0].step_count;
    MUST(offload_optimizer_set_step_count(rig.optimizer(), 0, count));
  });
  ExpectUndoneBy("other fractions", [](LifecycleRig& rig, const Solved&, Random& random) {
    rig.SetDeviceFraction(random.Unit());
    rig.SetDeviceFraction(random.Unit());
  });
  ExpectUndoneBy("states away", [](LifecycleRig& rig, const Solved&, Random&) {
    rig.Move(offload_optimizer_offload_states);
    rig.Move(offload_optimizer_reload_states);
  });
  ExpectUndoneBy("params away", [](LifecycleRig& rig, const Solved&, Random&) {
    rig.Move(offload_optimizer_offload_params);
    rig.BindAll();
    rig.Move(offload_optimizer_reload_params);
  });
  ExpectUndoneBy("a gradient comes back", [](LifecycleRig& rig, const Solved& solved, Random&) {
    rig.grad[2] = rig.Allocate(solved.problem.params[2].grad_bytes());
    rig.Bind({2});
    rig.Move(offload_optimizer_reload_grads, {{2}, 0, {}});
  });
  ExpectUndoneBy("a save", [&](LifecycleRig& rig, const Solved& solved, Random&) {
    const std::string path = directory / std::to_string(saves++);
    rig.Wait(rig.Save(path));
    LifecycleSetting setting;
    setting.device_kind = OFFLOAD_DEVICE_HOST;
    LifecycleRig loaded(solved.problem, setting);
    ASSERT_EQ(loaded.TryLoad(path), OFFLOAD_OK) << offload_last_error();
    ASSERT_EQ(loaded.Difference(solved.trace[1]), "");
  });
}

// The other ranks never answer with the norm. The state can still be read.
TEST(EarlyUpdatesTest, AFailureUndoesThem) {
  bool fails = false;
  auto comm = Make<offload_comm_t>();
  comm.world = 1;
  comm.user = &fails;
  comm.sum = [](void* user, double*, uint32_t, int64_t) -> int32_t {
    return *static_cast<const bool*>(user) ? 1 : 0;
  };
  comm.max = [](void*, int32_t*, uint32_t, int64_t) -> int32_t { return 0; };
  comm.barrier = [](void*, int64_t) -> int32_t { return 0; };
  for (uint64_t seed = 0; seed < 14; ++seed) {
    fails = false;
    const Solved solved(ProblemOf(seed, 3));
    LifecycleSetting setting = SettingOf(seed);
    setting.comm = &comm;
    LifecycleRig rig(solved.problem, setting);
    Random random(seed + 3);
    for (size_t step = 0; step < 2; ++step) {
      Backward(rig, solved.problem.steps[step], random);
      rig.Wait(rig.Step(solved.problem.steps[step]));
    }
    StepInput input = solved.problem.steps[2];
    Backward(rig, input, random);
    rig.Wait();  // then the workers have begun at least
    fails = true;
    input.flags = 0;  // the norm is needed
    EXPECT_EQ(offload_optimizer_wait(rig.optimizer(), rig.Step(input), -1), OFFLOAD_COMM_FAILED);
    EXPECT_EQ(rig.Difference(solved.trace[2]), "") << "seed " << seed;
  }
}

// A chunk that a save has still to read is not updated early, one that it has read is.
TEST(EarlyUpdatesTest, WhatASaveHasStillToReadIsLeftAlone) {
  const TemporaryDirectory directory;
  for (uint64_t seed = 0; seed < 28; ++seed) {
    const bool before_reading = seed % 2 == 0;
    const std::string path = directory / std::to_string(seed);
    Problem problem = ProblemOf(seed / 2, 2);
    for (StepInput& step : problem.steps) step.grad_scale = 0;  // as the first step assumes
    const Solved solved(std::move(problem));
    HeldFiles files;
    LifecycleSetting setting = SettingOf(seed / 2);
    setting.optimizer.host_executors = OFFLOAD_EXECUTORS_CPU;
    setting.optimizer.stream_ring_bytes = 0;
    setting.files = &files;
    LifecycleRig rig(solved.problem, setting);
    Random random(seed + 3);
    Backward(rig, solved.problem.steps[0], random);
    rig.Wait(rig.Step(solved.problem.steps[0]));
    (before_reading ? files.before_reading : files.before_end) = true;
    const offload_ticket_t save = rig.Save(path);
    // A change of the fraction waits until the save has read everything.
    if (!before_reading) rig.Wait(rig.SetDeviceFraction(0));
    rig.SetGroups(solved.problem.steps[1].groups);
    rig.NewGrads(solved.problem.steps[1]);
    rig.BindAll();
    rig.Wait(rig.Move(offload_optimizer_offload_grads));
    const offload_ticket_t step = rig.Step(solved.problem.steps[1]);
    files.before_reading = false;
    rig.Wait(step);
    files.before_end = false;
    rig.Wait(save);
    const offload_step_result_t result = ResultOf(rig, step);
    EXPECT_EQ(result.early_elements > 0, !before_reading) << "seed " << seed;
    EXPECT_EQ(result.undone_elements, 0u) << "seed " << seed;
    LifecycleSetting on_host;
    on_host.device_kind = OFFLOAD_DEVICE_HOST;
    LifecycleRig loaded(solved.problem, on_host);
    ASSERT_EQ(loaded.TryLoad(path), OFFLOAD_OK) << offload_last_error();
    EXPECT_EQ(loaded.Difference(solved.trace[1]), "") << "seed " << seed;
    EXPECT_EQ(rig.Difference(solved.trace[2]), "") << "seed " << seed;
  }
}

// Groups, gradients, masters and other state are replaced after the first offload; the model
// replaces them too.
TEST(EarlyUpdatesTest, WhatChangesTheStepUndoesThem) {
  const TemporaryDirectory directory;
  for (uint64_t seed = 0; seed < 42; ++seed) {
    Problem problem = ProblemOf(seed, 2);
    for (StepInput& step : problem.steps) step.grad_scale = 0;
    const std::vector<offload_group_t> groups = problem.steps[1].groups;
    LifecycleRig rig(problem, SettingOf(seed));
    Random random(seed + 3);
    Backward(rig, problem.steps[0], random);
    rig.Wait(rig.Step(problem.steps[0]));
    const std::string path = directory / std::to_string(seed);
    rig.Wait(rig.Save(path));
    Backward(rig, problem.steps[1], random);
    rig.Wait();
    StepInput input = problem.steps[1];
    Model model(problem);
    model.Step(problem.steps[0]);
    const uint64_t kind = seed / 7 % 3;
    if (kind == 0) {
      for (offload_group_t& group : input.groups) group.lr *= 2;
    } else if (kind == 1) {
      const ParamSpec& spec = problem.params[0];
      input.grads[0] = RandomArray(spec.grad_dtype, spec.count, false, random);
      rig.Move(offload_optimizer_offload_grads, {{0}, OFFLOAD_MOVE_DROP, {}});
      rig.NewGrad(0, *input.grads[0]);
      rig.Bind({0});
      rig.Move(offload_optimizer_offload_grads, {{0}, 0, {}});
    } else {
      ASSERT_EQ(rig.TryLoad(path), OFFLOAD_OK) << offload_last_error();
    }
    const offload_step_result_t result = ResultOf(rig, rig.Step(input));
    EXPECT_EQ(result.early_elements, 0u) << "seed " << seed;
    EXPECT_GT(result.undone_elements, 0u) << "seed " << seed;
    model.Step(input);
    ASSERT_EQ(rig.Difference(model), "") << "seed " << seed;
  }
}

// Params with split masters are read when their gradients arrive, so at another address they are
// read again.
TEST(EarlyUpdatesTest, ParamsThatHaveMovedAreReadThere) {
  Problem problem = RandomProblem(
      OFFLOAD_ADAMW, {{OFFLOAD_BF16, OFFLOAD_BF16, OFFLOAD_PLACE_AUTO, 0, 5000}}, 2, 5);
  problem.state.master_layout = OFFLOAD_MASTER_SPLIT;
  for (StepInput& step : problem.steps) step = {step.grads, step.groups};
  for (StepInput& step : problem.steps)
    step.grads[0] = RandomArray(OFFLOAD_BF16, 5000, false, *std::make_unique<Random>(1));
  const Solved solved(std::move(problem));
  LifecycleSetting setting = SettingOf(5);
  setting.chunk_orders = {0};
  LifecycleRig rig(solved.problem, setting);
  Random random(6);
  Backward(rig, solved.problem.steps[0], random);
  rig.Wait();
  void* before = rig.data[0];
  rig.data[0] = rig.Allocate(solved.problem.params[0].data_bytes());
  rig.Write(rig.data[0], solved.problem.initial[0]);
  rig.Bind({0});
  rig.Free(before);
  EXPECT_EQ(ResultOf(rig, rig.Step(solved.problem.steps[0])).early_elements, 0u);
  EXPECT_EQ(rig.Difference(solved.trace[1]), "");
}

// After an undo some steps have no early updates, and twice as many after the next undo.
TEST(EarlyUpdatesTest, EachUndoIsFollowedByALongerPause) {
  constexpr size_t kSteps = 20;
  Problem problem = ProblemOf(0, kSteps);
  for (StepInput& step : problem.steps) {
    step.grad_scale = 0;
    step.grad_norm_max = 0.01;
  }
  problem.steps[10].grad_norm_max = 0;
  const Solved solved(std::move(problem));
  LifecycleRig rig(solved.problem, SettingOf(0));
  Random random(1);
  std::vector<size_t> undone, kept;
  for (size_t step = 0; step < kSteps; ++step) {
    Backward(rig, solved.problem.steps[step], random);
    rig.Wait();
    const offload_step_result_t result = ResultOf(rig, rig.Step(solved.problem.steps[step]));
    if (result.undone_elements > 0) undone.push_back(step);
    if (result.early_elements > 0) kept.push_back(step);
    ASSERT_EQ(rig.Difference(solved.trace[step + 1]), "") << "step " << step;
  }
  EXPECT_EQ(undone, (std::vector<size_t>{0, 2, 5, 11, 13, 16}));
  EXPECT_EQ(kept, (std::vector<size_t>{10}));
}

// The room is that of the option, or less if all chunks could not use it.
TEST(EarlyUpdatesTest, ThePlanTellsTheirRoom) {
  const Problem problem = ProblemOf(3, 1);
  const auto room = [&](uint64_t bytes) {
    LifecycleSetting setting;
    setting.device_kind = OFFLOAD_DEVICE_SIM;
    setting.movable = OFFLOAD_MOVABLE_GRADS;
    setting.optimizer.early_update_bytes = 0;
    const uint64_t without = LifecycleRig(problem, setting).Plan().host_bytes;
    setting.optimizer.early_update_bytes = bytes;
    const LifecycleRig rig(problem, setting);
    const offload_plan_t plan = rig.Plan();
    EXPECT_EQ(rig.Stats().host_bytes, plan.host_bytes);
    EXPECT_GE(plan.host_bytes, without + plan.host_early_bytes);
    EXPECT_LE(plan.host_bytes, without + plan.host_early_bytes + 4096);  // tables
    return plan.host_early_bytes;
  };
  EXPECT_EQ(room(20000), 20000u);
  EXPECT_LT(room(UINT64_MAX), kPlenty);
}

// Chunks of 1,024 elements of 14 bytes each: two fit, and one byte less holds one.
TEST(EarlyUpdatesTest, NoMoreChunksThanTheRoomHolds) {
  Problem problem = RandomProblem(
      OFFLOAD_ADAMW, {{OFFLOAD_BF16, OFFLOAD_BF16, OFFLOAD_PLACE_AUTO, 0, 8 * 1024}}, 1, 5);
  problem.steps[0].grads[0] =
      RandomArray(OFFLOAD_BF16, 8 * 1024, false, *std::make_unique<Random>(1));
  problem.steps[0].grad_norm_max = 0;
  const Solved solved(std::move(problem));
  for (const auto& [bytes, most] : std::vector<std::pair<uint64_t, uint64_t>>{
           {2 * 1024 * 14, 2}, {2 * 1024 * 14 - 1, 1}, {14335, 0}}) {
    LifecycleSetting setting;
    setting.device_kind = AcceleratorUnderTest();
    setting.optimizer.early_update_bytes = bytes;
    LifecycleRig rig(solved.problem, setting);
    Random random(1);
    Backward(rig, solved.problem.steps[0], random);
    rig.Wait();
    const uint64_t early = ResultOf(rig, rig.Step(solved.problem.steps[0])).early_elements;
    EXPECT_LE(early, most * 1024);
    EXPECT_GE(early, std::min<uint64_t>(most, 1) * 1024);
    EXPECT_EQ(rig.Difference(solved.trace[1]), "");
  }
}

size_t GradsToKeep(const LifecycleRig& rig) {
  std::vector<uint8_t> keep(rig.size(), 2);
  MUST(offload_optimizer_grads_to_keep(rig.optimizer(), keep.data(), rig.size()));
  return static_cast<size_t>(std::count(keep.begin(), keep.end(), 1));
}

// Gradients are copied to the host for early updates only if early updates will use them: the
// memory has room for one chunk of 16, and one chunk more is wanted than in the last step.
TEST(EarlyUpdatesTest, NoMoreGradientsAreWantedThanTheLastStepHasUsed) {
  const ParamSpec spec{OFFLOAD_BF16, OFFLOAD_BF16, OFFLOAD_PLACE_AUTO, 0, 1024};
  Problem problem = RandomProblem(OFFLOAD_ADAMW, std::vector<ParamSpec>(16, spec), 3, 5);
  Random random(1);
  for (StepInput& step : problem.steps) {
    step.grad_scale = 0;
    step.grad_norm_max = 0;
    for (auto& grad : step.grads) grad = RandomArray(OFFLOAD_BF16, 1024, false, random);
  }
  problem.steps[2].grad_norm_max = 1e-3;  // it clips
  const Solved solved(std::move(problem));
  LifecycleSetting setting;
  setting.device_kind = AcceleratorUnderTest();
  setting.optimizer.early_update_bytes = 1024 * 14;
  LifecycleRig rig(solved.problem, setting);
  EXPECT_EQ(GradsToKeep(rig), 0u);  // it is not known yet how much will stream
  for (size_t step = 0; step < 3; ++step) {
    const StepInput& input = solved.problem.steps[step];
    Backward(rig, input, random);
    rig.Wait();
    const offload_step_result_t result = ResultOf(rig, rig.Step(input));
    EXPECT_EQ(result.early_elements, step < 2 ? 1024u : 0u);
    EXPECT_GT(result.streamed_elements, 0u);
    EXPECT_GT(GradsToKeep(rig), 0u);
    EXPECT_EQ(rig.Difference(solved.trace[step + 1]), "");
  }
}

// The pinned memory counts, and commit refuses what the context does not allow.
TEST(EarlyUpdatesTest, TheRoomIsUnderThePinnedCap) {
  auto options = Make<offload_context_options_t>();
  options.device_kind = OFFLOAD_DEVICE_SIM;
  options.sim_memory_bytes = 8 << 20;
  options.pinned_bytes_max = 400 << 10;
  offload_context_t context = nullptr;
  MUST(offload_context_create(&options, &context));
  void* data = nullptr;
  MUST(offload_device_alloc(context, 2 << 17, &data));
  for (uint64_t bytes : {uint64_t{0}, uint64_t{500} << 10}) {
    auto choice = Make<offload_optimizer_options_t>();
    choice.algorithm = OFFLOAD_SGD;
    choice.chunk_elements = 1024;
    choice.staging_slots = 2;
    choice.host_executors = OFFLOAD_EXECUTORS_CPU;
    choice.movable = OFFLOAD_MOVABLE_GRADS;
    choice.early_update_bytes = bytes;
    offload_optimizer_t optimizer = nullptr;
    MUST(offload_optimizer_create(context, &choice, &optimizer));
    auto group = Make<offload_group_t>();
    group.lr = 1;
    uint32_t id = 0;
    MUST(offload_optimizer_add_group(optimizer, &group, &id));
    auto param = Make<offload_param_t>();
    param.dtype = param.grad_dtype = OFFLOAD_BF16;
    param.name = "weight";
    param.data = data;
    param.count = 1 << 17;
    MUST(offload_optimizer_add_params(optimizer, &param, 1, nullptr));
    const int32_t status = offload_optimizer_commit(optimizer, nullptr);
    EXPECT_EQ(status, bytes == 0 ? OFFLOAD_OK : OFFLOAD_INVALID_ARGUMENT);
    if (bytes > 0) {
      EXPECT_NE(std::string(offload_last_error()).find("pinned_bytes_max"), std::string::npos)
          << offload_last_error();
    }
    MUST(offload_optimizer_destroy(optimizer));
  }
  MUST(offload_device_free(context, data));
  MUST(offload_context_destroy(context));
}

// The workers are in the middle of a large chunk when its optimizer ends.
TEST(EarlyUpdatesTest, DestroyWaitsForTheWorkers) {
  constexpr uint64_t kCount = 1 << 20;
  const Problem problem = RandomProblem(
      OFFLOAD_ADAMW, {{OFFLOAD_BF16, OFFLOAD_BF16, OFFLOAD_PLACE_AUTO, 0, kCount}}, 1, 5);
  LifecycleSetting setting;
  setting.device_kind = AcceleratorUnderTest();
  setting.memory_bytes = 64 << 20;
  setting.optimizer.chunk_elements = kCount;
  setting.optimizer.host_executors = OFFLOAD_EXECUTORS_CPU;
  setting.optimizer.early_update_bytes = kCount * 16;
  LifecycleRig rig(problem, setting);
  rig.grad[0] = rig.Allocate(kCount * 2);
  rig.BindAll();
  rig.Wait(rig.Move(offload_optimizer_offload_grads));
  rig.DestroyOptimizer();
}

// A chunk that lacks one gradient waits for the step.
TEST(EarlyUpdatesTest, ChunksWithoutAllGradientsAreLeftAlone) {
  for (uint64_t seed = 0; seed < 14; ++seed) {
    Problem problem = ProblemOf(seed, 1);
    problem.steps[0].grad_scale = 0;
    const Solved solved(std::move(problem));
    LifecycleSetting setting = SettingOf(seed);
    setting.optimizer.chunk_elements = 1 << 16;  // all params in one chunk
    setting.optimizer.stream_ring_bytes = 0;
    setting.optimizer.host_executors = OFFLOAD_EXECUTORS_CPU;
    LifecycleRig rig(solved.problem, setting);
    const StepInput& input = solved.problem.steps[0];
    rig.SetGroups(input.groups);
    rig.NewGrads(input);
    rig.BindAll();
    rig.Move(offload_optimizer_offload_grads, {{0, 1, 2, 3, 4, 5, 6}, 0, {}});
    const offload_step_result_t result = ResultOf(rig, rig.Step(input));
    EXPECT_EQ(result.early_elements + result.undone_elements,
              solved.problem.params[7].count == 0 ? HostElements(rig) : 0u);
    EXPECT_EQ(rig.Difference(solved.trace[1]), "") << "seed " << seed;
  }
}

}  // namespace
}  // namespace hybridopt
