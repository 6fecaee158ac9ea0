// Offload and reload: nothing is lost, nothing is left on the device, and every bit is that of an
// optimizer whose params, gradients and states never moved.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "../sanitizers.h"
#include "lifecycle_rig.h"
#include "watched_device.h"

namespace hybridopt {
namespace {

constexpr double kFractions[] = {0, 0.3, 1};

// ---------------------------------------------------------------------------------------- cycles

struct CycleCase {
  int32_t device_kind;
  double fraction;
  int32_t algorithm;
  int cycles;
};

void PrintTo(const CycleCase& c, std::ostream* out) {
  *out << DeviceText(c.device_kind) << ", fraction " << c.fraction << ", " << c.algorithm << ", "
       << c.cycles << " cycles";
}

LifecycleSetting SettingOf(int32_t device_kind, double fraction) {
  LifecycleSetting setting;
  setting.device_kind = device_kind;
  setting.optimizer.device_fraction = fraction;
  return setting;
}

class CycleTest : public testing::TestWithParam<CycleCase> {};

// Step; offload everything; use the whole device for other data; reload everything at new
// addresses.
TEST_P(CycleTest, GivesTheBitsOfNeverMoving) {
  const CycleCase& c = GetParam();
  const Problem problem = RandomProblem(c.algorithm, AllDtypePairs(), 6, 17);
  LifecycleRig rig(problem, SettingOf(c.device_kind, c.fraction));
  Model model(problem);
  Random random(99);
  const int cycles = Scaled(c.cycles);
  uint64_t drivers_bytes = 0;
  for (int cycle = 0; cycle < cycles; ++cycle) {
    const StepInput& input = problem.steps[static_cast<size_t>(cycle) % problem.steps.size()];
    rig.NewGrads(input);
    rig.BindAll();
    rig.Step(input);
    model.Step(input);

    rig.Move(offload_optimizer_offload_grads, {{}, OFFLOAD_MOVE_DROP, {}});
    rig.Move(offload_optimizer_offload_params);
    rig.Move(offload_optimizer_offload_states);
    rig.Wait();
    ASSERT_EQ(rig.ResultDifference(model), "") << "cycle " << cycle;
    rig.FreeAll();
    // A real driver takes some memory for the streams themselves, once.
    if (cycle == 0 && c.device_kind == OFFLOAD_DEVICE_CUDA) drivers_bytes = rig.DeviceBytesUsed();
    ASSERT_EQ(rig.DeviceBytesUsed(), drivers_bytes) << "cycle " << cycle;
    ASSERT_EQ(rig.Stats().device_bytes, 0u);

    void* rollout = rig.Allocate(100'000 + 1000 * random.Below(100));
    rig.AllocateAll(false, random);
    rig.Free(rollout);
    rig.BindAll();
    rig.Move(offload_optimizer_reload_states);
    rig.Move(offload_optimizer_reload_params);
    rig.Wait();
    ASSERT_EQ(rig.Difference(model), "") << "cycle " << cycle;
  }
}

// The host device has one memory: a device share would change nothing.
std::vector<double> FractionsOn(int32_t device_kind) {
  if (device_kind == OFFLOAD_DEVICE_HOST) return {0};
  return {std::begin(kFractions), std::end(kFractions)};
}

std::vector<CycleCase> CycleCases() {
  std::vector<CycleCase> cases;
  for (int32_t algorithm : kAlgorithmValues)
    for (int32_t device_kind : DevicesUnderTest())
      for (double fraction : FractionsOn(device_kind))
        cases.push_back({device_kind, fraction, algorithm, algorithm == OFFLOAD_ADAMW ? 100 : 6});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Lifecycle, CycleTest, testing::ValuesIn(CycleCases()));

// ----------------------------------------------------------------------------------------- bytes

// Counts whose arrays fill whole units of the device's memory, at fraction 0.3 too.
Problem RoundProblem() {
  std::vector<ParamSpec> params;
  for (uint64_t count : {1280, 640, 2560, 1920})
    params.push_back({kDtypes[params.size() % 3], kDtypes[(params.size() + 1) % 3],
                      OFFLOAD_PLACE_AUTO, 0, count});
  return RandomProblem(OFFLOAD_ADAMW, params, 3, 5);
}

uint64_t DataBytes(const Problem& problem) {
  uint64_t sum = 0;
  for (const ParamSpec& spec : problem.params) sum += spec.data_bytes();
  return sum;
}
uint64_t GradBytes(const Problem& problem) {
  uint64_t sum = 0;
  for (const ParamSpec& spec : problem.params) sum += spec.grad_bytes();
  return sum;
}

class FractionTest : public testing::TestWithParam<double> {};

// The statistics add up to what the device itself has given out.
void ExpectDevicesOwnCount(const LifecycleRig& rig, uint64_t params, uint64_t grads,
                           uint64_t states, const char* phase) {
  const offload_stats_t stats = rig.Stats();
  EXPECT_EQ(stats.params_bytes[OFFLOAD_TIER_DEVICE], params) << phase;
  EXPECT_EQ(stats.grads_bytes[OFFLOAD_TIER_DEVICE], grads) << phase;
  EXPECT_EQ(stats.state_bytes[OFFLOAD_TIER_DEVICE], states) << phase;
  const uint64_t scratch = stats.device_bytes == 0 ? 0 : rig.Plan().device_scratch_bytes;
  EXPECT_EQ(stats.device_bytes, states + scratch) << phase;
  EXPECT_EQ(rig.DeviceBytesUsed(), params + grads + states + scratch) << phase;
}

TEST_P(FractionTest, StatisticsAreTheDevicesOwnCount) {
  const Problem problem = RoundProblem();
  LifecycleRig rig(problem, SettingOf(OFFLOAD_DEVICE_SIM, GetParam()));
  const uint64_t data_bytes = DataBytes(problem);
  const uint64_t grad_bytes = GradBytes(problem);
  const offload_plan_t plan = rig.Plan();
  uint64_t device_states = 0;
  for (uint64_t bytes : plan.state_bytes[OFFLOAD_TIER_DEVICE]) device_states += bytes;
  EXPECT_EQ(plan.elements[OFFLOAD_TIER_DEVICE], static_cast<uint64_t>(GetParam() * 6400));

  for (uint32_t id = 0; id < rig.size(); ++id)
    rig.NewGrad(id, Bytes(problem.params[id].grad_bytes()));
  rig.BindAll();
  ExpectDevicesOwnCount(rig, data_bytes, grad_bytes, device_states, "at home");
  const offload_stats_t home = rig.Stats();
  EXPECT_EQ(home.params_bytes[OFFLOAD_TIER_HOST], 0u);
  EXPECT_EQ(home.grads_bytes[OFFLOAD_TIER_HOST], 0u);

  rig.Move(offload_optimizer_offload_grads);
  rig.Wait();
  for (void*& grad : rig.grad) rig.Free(grad);
  ExpectDevicesOwnCount(rig, data_bytes, 0, device_states, "gradients out");
  EXPECT_EQ(rig.Stats().grads_bytes[OFFLOAD_TIER_HOST], grad_bytes);
  EXPECT_EQ(rig.Stats().offloaded_bytes, grad_bytes);

  rig.Move(offload_optimizer_offload_params, {{1, 3}});
  rig.Wait();
  const uint64_t moved = problem.params[1].data_bytes() + problem.params[3].data_bytes();
  rig.Free(rig.data[1]);
  rig.Free(rig.data[3]);
  ExpectDevicesOwnCount(rig, data_bytes - moved, 0, device_states, "some params out");
  EXPECT_EQ(rig.Stats().params_bytes[OFFLOAD_TIER_HOST], moved);

  rig.Move(offload_optimizer_offload_states);
  rig.Move(offload_optimizer_offload_params);
  rig.Wait();
  rig.FreeAll();
  ExpectDevicesOwnCount(rig, 0, 0, 0, "everything out");
  const offload_stats_t away = rig.Stats();
  EXPECT_EQ(away.params_bytes[OFFLOAD_TIER_HOST], data_bytes);
  EXPECT_EQ(away.state_bytes[OFFLOAD_TIER_HOST],
            home.state_bytes[OFFLOAD_TIER_HOST] + home.state_bytes[OFFLOAD_TIER_DEVICE]);
  EXPECT_EQ(away.offloaded_bytes, grad_bytes + data_bytes + device_states);
  EXPECT_EQ(away.reloaded_bytes, 0u);

  Random random(3);
  rig.AllocateAll(true, random);
  rig.BindAll();
  rig.Move(offload_optimizer_reload_states);
  rig.Move(offload_optimizer_reload_params);
  rig.Move(offload_optimizer_reload_grads);
  rig.Wait();
  ExpectDevicesOwnCount(rig, data_bytes, grad_bytes, device_states, "home again");
  EXPECT_EQ(rig.Stats().reloaded_bytes, away.offloaded_bytes);
  EXPECT_EQ(rig.Stats().state_bytes[OFFLOAD_TIER_HOST], home.state_bytes[OFFLOAD_TIER_HOST]);
}

// The optimizer holds the bytes that the plan says, also where no size is a round number.
TEST_P(FractionTest, TheLibraryHoldsThePlansBytes) {
  const Problem problem = RandomProblem(OFFLOAD_ADAMW, AllDtypePairs(), 1, 8);
  LifecycleRig rig(problem, SettingOf(OFFLOAD_DEVICE_SIM, GetParam()));
  EXPECT_EQ(rig.DeviceBytesUsed(), rig.allocated_bytes() + rig.Plan().device_bytes);
  EXPECT_EQ(rig.Stats().device_bytes, rig.Plan().device_bytes);
  auto info = Make<offload_context_info_t>();
  MUST(offload_context_get_info(rig.context(), &info));
  const offload_plan_t plan = rig.Plan();
  EXPECT_EQ(info.pinned_bytes, plan.staging_bytes + plan.host_params_bytes + plan.host_grads_bytes +
                                   plan.host_swap_bytes + plan.pinned_state_bytes);
  uint64_t host_bytes = plan.host_scratch_bytes + plan.host_params_bytes + plan.host_grads_bytes +
                        plan.host_swap_bytes + plan.staging_bytes;
  for (const uint64_t state_bytes : plan.state_bytes[OFFLOAD_TIER_HOST]) host_bytes += state_bytes;
  EXPECT_GE(plan.host_bytes, host_bytes);  // which may be rounded up
}

// Some states are offloaded: the memory stays. Offloading the last one frees the memory, reloading
// the first one takes it.
TEST_P(FractionTest, StatesOfSomeParams) {
  const Problem problem = RoundProblem();
  LifecycleRig rig(problem, SettingOf(OFFLOAD_DEVICE_SIM, GetParam()));
  Model model(problem);
  for (int round = 0; round < 3; ++round) {
    const uint64_t used = rig.DeviceBytesUsed();
    rig.Move(offload_optimizer_offload_states, {{2, 0}});
    rig.Wait();
    EXPECT_EQ(rig.DeviceBytesUsed(), used);
    rig.Move(offload_optimizer_offload_states, {{3, 1}});
    rig.Wait();
    EXPECT_EQ(rig.DeviceBytesUsed(), rig.allocated_bytes());
    rig.Move(offload_optimizer_reload_states, {{1}});
    EXPECT_EQ(rig.DeviceBytesUsed(), used);
    EXPECT_EQ(rig.TryStep(problem.steps[0]), OFFLOAD_INVALID_STATE);
    EXPECT_EQ(std::string(offload_last_error()).find("states of 3 params"), 0u);
    rig.Move(offload_optimizer_reload_states);
    rig.Wait();
    ASSERT_EQ(rig.Difference(model), "");
    (void)rig.StepOnce(problem.steps[0]);
    model.Step(problem.steps[0]);
    ASSERT_EQ(rig.Difference(model), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Lifecycle, FractionTest, testing::ValuesIn(kFractions));

// ------------------------------------------------------------------------------- host and device

class DeviceTest : public testing::TestWithParam<int32_t> {
 protected:
  LifecycleSetting Setting(double fraction = 0.3) const {
    return SettingOf(GetParam(), GetParam() == OFFLOAD_DEVICE_HOST ? 0 : fraction);
  }
};

TEST_P(DeviceTest, TwiceIsOnceAndMovesNothing) {
  const Problem problem = RandomProblem(OFFLOAD_ADAMW, AllDtypePairs(), 2, 23);
  LifecycleRig rig(problem, Setting());
  Model model(problem);
  rig.NewGrads(problem.steps[0]);
  rig.BindAll();
  const auto twice = [&](MoveFunction move, uint32_t flags = 0) {
    rig.Wait(rig.Move(move, {{}, flags, {}}));
    const offload_stats_t once = rig.Stats();
    rig.Wait(rig.Move(move, {{}, flags, {}}));
    const offload_stats_t again = rig.Stats();
    EXPECT_EQ(std::memcmp(&once, &again, sizeof(once)), 0);
  };
  twice(offload_optimizer_offload_grads);
  twice(offload_optimizer_offload_params);
  twice(offload_optimizer_offload_states);
  EXPECT_GT(rig.Stats().offloaded_bytes, 0u);
  rig.FreeAll();
  Random random(1);
  rig.AllocateAll(true, random);
  for (uint32_t id = 0; id < rig.size(); ++id)
    if (!problem.steps[0].grads[id].has_value()) rig.Free(rig.grad[id]);
  rig.BindAll();
  twice(offload_optimizer_reload_grads);
  twice(offload_optimizer_reload_params);
  twice(offload_optimizer_reload_states);
  EXPECT_EQ(rig.Stats().reloaded_bytes, rig.Stats().offloaded_bytes);
  EXPECT_EQ(rig.Difference(model), "");
  rig.Step(problem.steps[0]);
  rig.Wait();
  model.Step(problem.steps[0]);
  EXPECT_EQ(rig.Difference(model), "");
  twice(offload_optimizer_offload_grads, OFFLOAD_MOVE_ACCUMULATE);
  twice(offload_optimizer_offload_grads, OFFLOAD_MOVE_DROP);
}

TEST_P(DeviceTest, ParamsOfAPoolComeBackAtTheirAddresses) {
  if (GetParam() == OFFLOAD_DEVICE_HOST) GTEST_SKIP() << "it has no pools";
  const Problem problem = RandomProblem(OFFLOAD_ADAMW, AllDtypePairs(), 3, 24);
  LifecycleRig rig(problem, Setting());
  Model model(problem);
  rig.PutParamsIntoPool();
  const std::vector<void*> addresses = rig.data;
  for (const StepInput& input : problem.steps) {
    rig.NewGrads(input);
    rig.BindAll();
    rig.Step(input);
    model.Step(input);
    rig.Move(offload_optimizer_offload_grads, {{}, OFFLOAD_MOVE_DROP, {}});
    rig.Move(offload_optimizer_offload_params);
    rig.Wait();
    const uint64_t used = rig.DeviceBytesUsed();
    rig.ReleasePool();
    if (GetParam() == OFFLOAD_DEVICE_SIM) {
      EXPECT_LT(rig.DeviceBytesUsed(), used);
    }
    for (void*& grad : rig.grad) rig.Free(grad);
    rig.TakePool();
    rig.BindAll();
    rig.Move(offload_optimizer_reload_params);
    rig.Wait();
    ASSERT_EQ(rig.Difference(model), "");
    ASSERT_EQ(rig.data, addresses);
  }
}

// Every pattern of bits, NaNs included, comes back, over and over, at other addresses.
TEST_P(DeviceTest, GradientsKeepTheirBits) {
  Problem problem = RandomProblem(OFFLOAD_SGD, AllDtypePairs(), 1, 29);
  LifecycleRig rig(problem, Setting());
  Random random(31);
  std::vector<Bytes> grads;
  for (const ParamSpec& spec : problem.params) {
    Bytes bytes(spec.grad_bytes());
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.Next());
    grads.push_back(bytes);
  }
  for (uint32_t id = 0; id < rig.size(); ++id) rig.NewGrad(id, grads[id]);
  for (int round = 0; round < 5; ++round) {
    rig.BindAll();
    rig.Move(offload_optimizer_offload_grads);
    rig.Wait();
    for (void*& grad : rig.grad) rig.Free(grad);
    for (uint32_t id = 0; id < rig.size(); ++id) rig.grad[id] = rig.Allocate(grads[id].size());
    rig.BindAll();
    rig.Wait(rig.Move(offload_optimizer_reload_grads));
    for (uint32_t id = 0; id < rig.size(); ++id)
      ASSERT_TRUE(rig.Read(rig.grad[id], grads[id].size()) == grads[id])
          << "param " << id << ", round " << round;
  }
}

// Decides which of a step's gradients are on the host.
enum class Held { kAll, kSome, kOne };

// A step reads gradients where they are: every dtype, clipped or not, some of them missing.
TEST_P(DeviceTest, AStepReadsGradientsOnTheHost) {
  for (int32_t algorithm : kAlgorithmValues) {
    for (double fraction : kFractions) {
      if (GetParam() == OFFLOAD_DEVICE_HOST && fraction != 0) continue;
      for (Held held : {Held::kAll, Held::kSome, Held::kOne}) {
        const Problem problem = RandomProblem(algorithm, AllDtypePairs(), 6, 41);
        LifecycleRig rig(problem, Setting(fraction));
        Model model(problem);
        Random random(43);
        for (const StepInput& input : problem.steps) {
          rig.NewGrads(input);
          rig.BindAll();
          MoveArguments some;
          for (uint32_t id = 0; id < rig.size(); ++id)
            if (held == Held::kAll || (held == Held::kSome && random.OneIn(2)) || id == 4)
              some.params.push_back(id);
          rig.Wait(rig.Move(offload_optimizer_offload_grads, some));
          for (uint32_t id : some.params) rig.Free(rig.grad[id]);
          rig.Step(input);
          rig.Wait();
          model.Step(input);
          ASSERT_EQ(rig.Difference(model), "")
              << "algorithm " << algorithm << ", fraction " << fraction;
          ASSERT_EQ(rig.ResultDifference(model), "");
          ASSERT_EQ(rig.Stats().grads_bytes[OFFLOAD_TIER_HOST], 0u);
        }
      }
    }
  }
}

// Inf or NaN in one gradient, on the host or on the device, while the other gradients are on the
// other side.
TEST_P(DeviceTest, AStepIsSkippedForWhatIsNotFiniteOnTheHost) {
  for (const double fraction : {0.0, 1.0}) {
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
      for (const bool bad_on_host : {false, true}) {
        Problem problem = RandomProblem(OFFLOAD_ADAMW, AllDtypePairs(), 2, 47);
        for (uint32_t id = 1; id < problem.params.size(); id += 3) {
          const ParamSpec& spec = problem.params[id];
          if (spec.count == 0) continue;
          StepInput input = problem.steps[1];
          Random random(id);
          input.grads[id] = RandomArray(spec.grad_dtype, spec.count, false, random);
          PutElement(*input.grads[id], spec.grad_dtype, spec.count - 1,
                     BitsOf(spec.grad_dtype, bad));
          LifecycleRig rig(problem, Setting(fraction));
          Model model(problem);
          rig.NewGrads(input);
          rig.BindAll();
          MoveArguments moved;
          for (uint32_t other = 0; other < rig.size(); ++other)
            if ((other == id) == bad_on_host) moved.params.push_back(other);
          rig.Move(offload_optimizer_offload_grads, moved);
          rig.Step(input);
          rig.Wait();
          model.Step(input);
          ASSERT_EQ(model.steps_skipped, 1u);
          ASSERT_EQ(rig.Difference(model), "");
          ASSERT_EQ(rig.ResultDifference(model), "");
          // The skipped step has used the host's gradients up.
          ASSERT_EQ(rig.Stats().grads_bytes[OFFLOAD_TIER_HOST], 0u);
        }
      }
    }
  }
}

// 0 to 5 micro-batches a param: one fp32 addition each, in the order of the calls.
TEST_P(DeviceTest, AccumulatesInFp32InTheOrderOfTheCalls) {
  for (double fraction : kFractions) {
    if (GetParam() == OFFLOAD_DEVICE_HOST && fraction != 0) continue;
    const Problem problem = RandomProblem(OFFLOAD_ADAMW, AllDtypePairs(), 6, 53);
    LifecycleRig rig(problem, Setting(fraction));
    Problem summed = problem;  // what the model sees: gradients that are sums are fp32
    Model model(summed);
    Random random(59);
    for (size_t step = 0; step < problem.steps.size(); ++step) {
      StepInput input = problem.steps[step];
      const uint64_t batches = step % 5 + 1;
      std::vector<std::optional<std::vector<float>>> sums(rig.size());
      for (uint64_t batch = 0; batch < batches; ++batch) {
        for (uint32_t id = 0; id < rig.size(); ++id) {
          const ParamSpec& spec = problem.params[id];
          if (id % 7 == 3 || random.OneIn(6)) continue;  // one in seven stays on the device
          const Bytes grad = RandomArray(spec.grad_dtype, spec.count, false, random);
          rig.NewGrad(id, grad);
          rig.Bind({id});
          void* buffer = rig.grad[id];
          const offload_ticket_t ticket =
              rig.Move(offload_optimizer_offload_grads, {{id}, OFFLOAD_MOVE_ACCUMULATE, {}});
          if (random.OneIn(2)) {
            rig.Wait(ticket);
            rig.Free(buffer);
          }
          rig.grad[id] = nullptr;
          AddTo(sums[id], spec.grad_dtype, grad);
        }
      }
      for (uint32_t id = 0; id < rig.size(); ++id) {
        summed.params[id].grad_dtype = problem.params[id].grad_dtype;
        if (id % 7 == 3) {
          if (input.grads[id].has_value()) rig.NewGrad(id, *input.grads[id]);
          rig.Bind({id});
          rig.grad[id] = nullptr;
        } else {
          if (sums[id].has_value()) summed.params[id].grad_dtype = OFFLOAD_FP32;
          input.grads[id].reset();
          if (sums[id].has_value()) input.grads[id] = BytesOf(*sums[id]);
        }
      }
      rig.Step(input);
      rig.Wait();
      model.Step(input);
      ASSERT_EQ(rig.Difference(model), "") << "fraction " << fraction << ", step " << step;
      ASSERT_EQ(rig.ResultDifference(model), "") << "fraction " << fraction << ", step " << step;
    }
  }
}

// A sum of fp32 gradients can be reloaded to the device, and the caller can add to it there.
TEST_P(DeviceTest, AnFp32SumComesBackWithItsBits) {
  const ParamSpec spec = {OFFLOAD_BF16, OFFLOAD_FP32, OFFLOAD_PLACE_AUTO, 0, 5000};
  const Problem problem = RandomProblem(OFFLOAD_ADAMW, {spec}, 1, 61);
  LifecycleRig rig(problem, Setting());
  Random random(67);
  std::optional<std::vector<float>> sum;
  for (int batch = 0; batch < 3; ++batch) {
    const Bytes grad = RandomArray(spec.grad_dtype, spec.count, true, random);
    rig.NewGrad(0, grad);
    rig.BindAll();
    rig.Move(offload_optimizer_offload_grads, {{}, OFFLOAD_MOVE_ACCUMULATE, {}});
    AddTo(sum, OFFLOAD_FP32, grad);
  }
  rig.grad[0] = rig.Allocate(spec.grad_bytes());
  rig.BindAll();
  rig.Wait(rig.Move(offload_optimizer_reload_grads));
  EXPECT_TRUE(rig.Read(rig.grad[0], spec.grad_bytes()) == BytesOf(*sum));
}

// The first micro-batch is not added to zero: -0 would become 0.
TEST_P(DeviceTest, MinusZeroStaysMinusZero) {
  const ParamSpec spec = {OFFLOAD_BF16, OFFLOAD_FP32, OFFLOAD_PLACE_AUTO, 0, 100};
  const Problem problem = RandomProblem(OFFLOAD_ADAMW, {spec}, 1, 61);
  LifecycleRig rig(problem, Setting());
  const Bytes zeros = BytesOf(std::vector<float>(spec.count, -0.0f));
  for (int batches = 1; batches <= 2; ++batches) {
    for (int batch = 0; batch < batches; ++batch) {
      rig.NewGrad(0, zeros);
      rig.BindAll();
      rig.Move(offload_optimizer_offload_grads, {{}, OFFLOAD_MOVE_ACCUMULATE, {}});
    }
    rig.grad[0] = rig.Allocate(spec.grad_bytes());
    rig.BindAll();
    rig.Wait(rig.Move(offload_optimizer_reload_grads));
    EXPECT_TRUE(rig.Read(rig.grad[0], spec.grad_bytes()) == zeros) << batches << " batches";
    rig.Move(offload_optimizer_offload_grads, {{}, OFFLOAD_MOVE_DROP, {}});
  }
}

// Gradients that are dropped on the device, on the host, or in the middle of an accumulation: the
// next step leaves the param, its moments and its count unchanged, and the step after a new
// gradient does not.
TEST_P(DeviceTest, DroppedGradientsAreAbsentUntilBoundAgain) {
  const Problem problem = RandomProblem(OFFLOAD_ADAMW, AllDtypePairs(), 3, 71);
  LifecycleRig rig(problem, Setting());
  Model model(problem);
  for (const StepInput& step : problem.steps) {
    StepInput input = step;
    rig.NewGrads(input);
    rig.BindAll();
    MoveArguments stored;
    MoveArguments summed;
    MoveArguments dropped;
    summed.flags = OFFLOAD_MOVE_ACCUMULATE;
    dropped.flags = OFFLOAD_MOVE_DROP;
    for (uint32_t id = 0; id < rig.size(); ++id) {
      if (id % 4 == 0) stored.params.push_back(id);
      if (id % 4 == 1) summed.params.push_back(id);
      if (id % 4 == 3) continue;  // keeps its gradient
      dropped.params.push_back(id);
      input.grads[id].reset();
    }
    rig.Move(offload_optimizer_offload_grads, stored);
    rig.Move(offload_optimizer_offload_grads, summed);
    rig.Wait(rig.Move(offload_optimizer_offload_grads, dropped));
    for (uint32_t id : dropped.params) rig.Free(rig.grad[id]);
    EXPECT_EQ(rig.Stats().grads_bytes[OFFLOAD_TIER_HOST], 0u);
    rig.Step(input);
    rig.Wait();
    model.Step(input);
    ASSERT_EQ(rig.Difference(model), "");
    ASSERT_EQ(rig.ResultDifference(model), "");
  }
}

// Whole cycles queued without a wait in between; the tickets tell when buffers may be freed.
TEST_P(DeviceTest, MovesQueuedBackToBack) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    const Problem problem = RandomProblem(AlgorithmOfSeed(seed), AllDtypePairs(), 3, seed);
    LifecycleSetting setting = Setting(kFractions[seed % 3]);
    setting.seed = seed;
    setting.delay_ns_max = 30'000;
    LifecycleRig rig(problem, setting);
    Model model(problem);
    for (const StepInput& input : problem.steps) {
      for (uint32_t id = 0; id < rig.size(); ++id) {
        rig.grad[id] = nullptr;
        if (input.grads[id].has_value()) rig.NewGrad(id, *input.grads[id]);
      }
      rig.BindAll();
      rig.Move(offload_optimizer_offload_grads, {{0, 2, 4, 6, 8}});
      for (uint32_t id : {0, 2, 4, 6, 8}) rig.grad[id] = nullptr;
      rig.Step(input);
      model.Step(input);
      rig.Move(offload_optimizer_offload_params);
      rig.Move(offload_optimizer_offload_states);
      for (uint32_t id = 0; id < rig.size(); ++id)
        rig.data[id] = rig.Allocate(problem.params[id].data_bytes());
      rig.BindAll();
      rig.Move(offload_optimizer_reload_states);
      rig.Move(offload_optimizer_reload_params);
    }
    rig.Wait();
    ASSERT_EQ(rig.Difference(model), "") << "seed " << seed;
    ASSERT_EQ(rig.ResultDifference(model), "") << "seed " << seed;
  }
}

// ---------------------------------------------------------------------------- weights from outside

// A step that changes only moments and counts: the masters are rounded into the params.
StepInput StandingStep(const Problem& problem, size_t number) {
  StepInput input = problem.steps[number];
  input.groups = problem.groups;
  for (offload_group_t& group : input.groups) group.lr = group.weight_decay = 0;
  for (uint32_t id = 0; id < problem.params.size(); ++id) {
    const ParamSpec& spec = problem.params[id];
    Random random(id);
    if (!input.grads[id].has_value())
      input.grads[id] = RandomArray(spec.grad_dtype, spec.count, false, random);
  }
  return input;
}

// Weights that another program has written, zeros of both signs among them.
std::vector<Bytes> OtherWeights(const Problem& problem) {
  Random random(73);
  std::vector<Bytes> weights;
  for (const ParamSpec& spec : problem.params) {
    weights.push_back(RandomArray(spec.dtype, spec.count, true, random));
    if (spec.count > 0) PutElement(weights.back(), spec.dtype, 0, SignBit(spec.dtype));
  }
  return weights;
}

TEST_P(DeviceTest, RefreshMakesLoadedWeightsStay) {
  for (int32_t algorithm : kAlgorithmValues) {
    for (double fraction : kFractions) {
      if (GetParam() == OFFLOAD_DEVICE_HOST && fraction != 0) continue;
      const Problem problem = RandomProblem(algorithm, AllDtypePairs(), 2, 79);
      LifecycleRig rig(problem, Setting(fraction));
      Model model(problem);
      rig.NewGrads(problem.steps[0]);
      rig.BindAll();
      rig.Step(problem.steps[0]);
      model.Step(problem.steps[0]);
      rig.Wait();
      const std::vector<Bytes> weights = OtherWeights(problem);
      for (uint32_t id = 0; id < rig.size(); ++id) {
        rig.Write(rig.data[id], weights[id]);
        model.params[id].data = weights[id];
        model.Refresh(id);
      }
      rig.Move(offload_optimizer_refresh_masters);
      rig.Wait();
      ASSERT_EQ(rig.Difference(model), "") << "algorithm " << algorithm;
      const StepInput standing = StandingStep(problem, 1);
      (void)rig.StepOnce(standing);
      model.Step(standing);
      for (uint32_t id = 0; id < rig.size(); ++id)
        ASSERT_TRUE(rig.Read(rig.data[id], weights[id].size()) == weights[id]) << "param " << id;
      ASSERT_EQ(rig.Difference(model), "") << "algorithm " << algorithm;
    }
  }
}

// Only the named params are refreshed; the others, and all without a refresh, get their old weights
// back with the next step (docs/LIFECYCLE.md).
TEST_P(DeviceTest, WithoutRefreshTheOldWeightsComeBack) {
  std::vector<ParamSpec> params;
  for (int32_t dtype : {OFFLOAD_BF16, OFFLOAD_FP16})
    for (uint64_t count : {1500, 40, 2100})
      params.push_back({dtype, OFFLOAD_BF16, OFFLOAD_PLACE_AUTO, 0, count});
  const Problem problem = RandomProblem(OFFLOAD_ADAMW, params, 1, 83);
  for (double fraction : kFractions) {
    if (GetParam() == OFFLOAD_DEVICE_HOST && fraction != 0) continue;
    LifecycleRig rig(problem, Setting(fraction));
    const std::vector<Bytes> weights = OtherWeights(problem);
    for (uint32_t id = 0; id < rig.size(); ++id) rig.Write(rig.data[id], weights[id]);
    rig.Move(offload_optimizer_refresh_masters, {{1, 4}});
    const StepInput standing = StandingStep(problem, 0);
    (void)rig.StepOnce(standing);
    for (uint32_t id = 0; id < rig.size(); ++id) {
      const Bytes& expected = id == 1 || id == 4 ? weights[id] : problem.initial[id];
      ASSERT_TRUE(rig.Read(rig.data[id], expected.size()) == expected) << "param " << id;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Lifecycle, DeviceTest, testing::ValuesIn(DevicesUnderTest()),
                         [](const auto& info) { return std::string(DeviceText(info.param)); });

// ----------------------------------------------------------------------------------- full devices

TEST(FullDevice, ReloadStatesIsRefusedAndWorksOnceThereIsRoom) {
  const Problem problem = RandomProblem(OFFLOAD_ADAMW, AllDtypePairs(), 2, 89);
  LifecycleRig rig(problem, SettingOf(OFFLOAD_DEVICE_SIM, 0.7));
  Model model(problem);
  const offload_plan_t plan = rig.Plan();
  const uint64_t block_bytes = plan.device_bytes - plan.device_scratch_bytes;
  rig.Wait(rig.Move(offload_optimizer_offload_states));
  auto info = Make<offload_context_info_t>();
  MUST(offload_context_get_info(rig.context(), &info));
  // No free memory; memory for one of its two allocations; memory for all but one unit.
  for (uint64_t left : {uint64_t{0}, block_bytes, plan.device_bytes - 256}) {
    void* rollout = rig.Allocate(info.device_memory_free_bytes - left);
    const offload_stats_t before = rig.Stats();
    const uint64_t used = rig.DeviceBytesUsed();
    EXPECT_EQ(rig.TryMove(offload_optimizer_reload_states), OFFLOAD_OUT_OF_DEVICE_MEMORY);
    const std::string text = offload_last_error();
    EXPECT_NE(text.find("bytes of device memory"), std::string::npos) << text;
    const offload_stats_t after = rig.Stats();
    EXPECT_EQ(std::memcmp(&before, &after, sizeof(before)), 0) << left;
    EXPECT_EQ(rig.DeviceBytesUsed(), used) << left;
    EXPECT_EQ(rig.TryStep(problem.steps[0]), OFFLOAD_INVALID_STATE);
    rig.Free(rollout);
  }
  rig.Move(offload_optimizer_reload_states);
  for (const StepInput& input : problem.steps) {
    (void)rig.StepOnce(input);
    model.Step(input);
  }
  EXPECT_EQ(rig.Difference(model), "");
}

// A reload that is queued when other work fails already has its memory: destroy frees it.
TEST(FullDevice, AFailureLeavesNoMemoryBehind) {
  auto comm = Make<offload_comm_t>();
  comm.world = 2;
  comm.sum = [](void*, double*, uint32_t, int64_t) -> int32_t { return OFFLOAD_COMM_FAILED; };
  comm.max = [](void*, int32_t*, uint32_t, int64_t) -> int32_t { return OFFLOAD_COMM_FAILED; };
  comm.barrier = [](void*, int64_t) -> int32_t { return OFFLOAD_COMM_FAILED; };
  const Problem problem = RandomProblem(OFFLOAD_ADAMW, AllDtypePairs(), 1, 97);
  LifecycleSetting setting = SettingOf(OFFLOAD_DEVICE_SIM, 0.5);
  setting.comm = &comm;
  LifecycleRig rig(problem, setting);
  Gate gate;
  gate.Close(rig.context(), nullptr);
  StepInput input = problem.steps[0];
  input.flags = 0;
  rig.Step(input);
  rig.Move(offload_optimizer_offload_states);
  rig.Move(offload_optimizer_reload_states);
  gate.Open();
  EXPECT_EQ(offload_optimizer_wait(rig.optimizer(), 0, -1), OFFLOAD_COMM_FAILED);
  EXPECT_EQ(rig.TryMove(offload_optimizer_reload_params), OFFLOAD_POISONED);
  rig.DestroyOptimizer();
  EXPECT_EQ(rig.DeviceBytesUsed(), rig.allocated_bytes());
}

// ------------------------------------------------------------------------------------ producers

struct Producers {
  static constexpr uint32_t kCount = 4;
  explicit Producers(LifecycleRig& rig) : context(rig.context()) {
    for (offload_stream_t& stream : streams) MUST(offload_stream_create(context, &stream));
  }
  ~Producers() {
    for (offload_stream_t stream : streams) MUST(offload_stream_destroy(context, stream));
  }
  std::vector<offload_stream_t> All() const { return {streams, streams + kCount}; }
  offload_context_t context;
  offload_stream_t streams[kCount] = {};
};

struct Write {
  void* to;
  const Bytes* from;
  static void Run(void* self) {
    const auto* write = static_cast<const Write*>(self);
    std::memcpy(write->to, write->from->data(), write->from->size());
  }
};

// Four streams make a quarter of the gradients each, one of them long after the call. Empty if the
// step had the model's bits.
std::string StepBehindFourProducers(uint32_t late, bool accumulate, bool drop_its_wait) {
  std::vector<ParamSpec> params;
  for (uint64_t count : {1500, 33, 700, 2100, 1300, 1024, 5000, 64})
    params.push_back({OFFLOAD_BF16, OFFLOAD_FP32, OFFLOAD_PLACE_AUTO, 0, count});
  const Problem problem = RandomProblem(OFFLOAD_ADAMW, params, 1, 101);
  StepInput input = StandingStep(problem, 0);
  input.groups = problem.groups;
  Watch watch;
  LifecycleSetting setting = SettingOf(OFFLOAD_DEVICE_SIM, 0.3);
  setting.wrap = [&watch](std::unique_ptr<Device> device) {
    return std::make_unique<WatchedDevice>(std::move(device), watch);
  };
  LifecycleRig rig(problem, setting);
  Producers producers(rig);
  if (drop_its_wait) watch.DropWaitsFor(producers.streams[late]);

  Gate gate;
  gate.Close(rig.context(), producers.streams[late]);
  std::vector<Write> writes(rig.size());
  for (uint32_t id = 0; id < rig.size(); ++id) {
    const uint64_t bytes = problem.params[id].grad_bytes();
    rig.grad[id] = rig.Allocate(bytes);
    void* mapped = nullptr;
    MUST(offload_device_map(rig.context(), rig.grad[id], bytes, &mapped));
    writes[id] = {mapped, &*input.grads[id]};
    MUST(offload_stream_run(rig.context(), producers.streams[id % Producers::kCount], Write::Run,
                            &writes[id]));
  }
  rig.BindAll();
  const offload_ticket_t ticket =
      rig.Move(offload_optimizer_offload_grads,
               {{}, accumulate ? uint32_t{OFFLOAD_MOVE_ACCUMULATE} : 0, producers.All()});
  if (drop_its_wait) rig.Wait(ticket);  // completes although the producer has not even begun
  std::thread later([&gate] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    gate.Open();
  });
  rig.Wait(ticket);
  rig.Step(input);
  rig.Wait();
  later.join();
  for (offload_stream_t stream : producers.streams)
    MUST(offload_stream_synchronize(rig.context(), stream, -1));
  Model model(problem);
  model.Step(input);
  const std::string difference = rig.Difference(model);
  return difference.empty() ? rig.ResultDifference(model) : difference;
}

TEST(ProducersTest, EachIsWaitedFor) {
  for (bool accumulate : {false, true})
    for (uint32_t late = 0; late < Producers::kCount; ++late)
      EXPECT_EQ(StepBehindFourProducers(late, accumulate, false), "") << "late: " << late;
}

// A test of the test above.
TEST(ProducersTest, AMissingWaitGivesWrongBits) {
  if (HYBRIDOPT_TSAN)
    GTEST_SKIP() << "a missing wait is a data race: the thread sanitizer would end the program";
  for (bool accumulate : {false, true})
    for (uint32_t late = 0; late < Producers::kCount; ++late)
      EXPECT_NE(StepBehindFourProducers(late, accumulate, true), "") << "late: " << late;
}

// Opens the gate some time after this call, and waits for the ticket and then for the stream.
void OpenLater(const LifecycleRig& rig, Gate& gate, offload_ticket_t ticket,
               offload_stream_t stream) {
  std::thread later([&gate] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    gate.Open();
  });
  MUST(offload_optimizer_wait(rig.optimizer(), ticket, -1));
  later.join();
  MUST(offload_stream_synchronize(rig.context(), stream, -1));
}

// The memory to which a reload copies may still be used by a stream of the caller, and the weights
// that a refresh reads may still be being written: both calls wait.
TEST(ProducersTest, ReloadAndRefreshWaitToo) {
  const Problem problem = RandomProblem(OFFLOAD_ADAMW, AllDtypePairs(), 1, 103);
  LifecycleRig rig(problem, SettingOf(OFFLOAD_DEVICE_SIM, 0.3));
  Producers producers(rig);
  const offload_stream_t stream = producers.streams[2];
  Model model(problem);
  std::vector<Write> writes(2 * rig.size());
  const auto write_data = [&](Write& write, uint32_t id, const Bytes& bytes) {
    if (bytes.empty()) return;
    void* mapped = nullptr;
    MUST(offload_device_map(rig.context(), rig.data[id], bytes.size(), &mapped));
    write = {mapped, &bytes};
    MUST(offload_stream_run(rig.context(), stream, Write::Run, &write));
  };

  rig.Wait(rig.Move(offload_optimizer_offload_params));
  const std::vector<Bytes> weights = OtherWeights(problem);
  Gate gate;
  gate.Close(rig.context(), stream);
  for (uint32_t id = 0; id < rig.size(); ++id) {  // another user's last use of the new buffers
    rig.data[id] = rig.Allocate(problem.params[id].data_bytes());
    write_data(writes[id], id, weights[id]);
  }
  rig.BindAll();
  OpenLater(rig, gate, rig.Move(offload_optimizer_reload_params, {{}, 0, {stream}}), stream);
  EXPECT_EQ(rig.Difference(model), "");

  Gate second;
  second.Close(rig.context(), stream);
  for (uint32_t id = 0; id < rig.size(); ++id) {
    write_data(writes[rig.size() + id], id, weights[id]);
    model.params[id].data = weights[id];
    model.Refresh(id);
  }
  OpenLater(rig, second, rig.Move(offload_optimizer_refresh_masters, {{}, 0, {nullptr, stream}}),
            stream);
  EXPECT_EQ(rig.Difference(model), "");
}

// Gradients of many params leave in one move, for which the library waits as often as for one
// param, and whose norms the device makes in one launch.
TEST(LeavingGradients, ManyParamsTakeNoMoreWaitsThanOne) {
  std::vector<ParamSpec> params;
  for (uint64_t i = 0; i < 60; ++i)
    params.push_back({kDtypes[i % 3], kDtypes[i / 3 % 3], OFFLOAD_PLACE_AUTO, 0, i * 97});
  const Problem problem = RandomProblem(OFFLOAD_ADAMW, params, 2, 113);
  for (double fraction : kFractions) {
    Watch watch;
    LifecycleSetting setting = SettingOf(OFFLOAD_DEVICE_SIM, fraction);
    setting.wrap = [&watch](std::unique_ptr<Device> device) {
      return std::make_unique<WatchedDevice>(std::move(device), watch);
    };
    LifecycleRig rig(problem, setting);
    Producers producers(rig);
    Model model(problem);
    std::vector<int> waits;
    for (const StepInput& input : {StandingStep(problem, 0), StandingStep(problem, 1)}) {
      rig.NewGrads(input);
      rig.BindAll();
      // Every seventh stays on the device: its sums come from the step.
      MoveArguments many = {{}, 0, {producers.streams[1]}}, one = {{11}, 0, {producers.streams[1]}};
      for (uint32_t id = 0; id < rig.size(); ++id)
        if (id % 7 != 3 && id != 11) many.params.push_back((id * 31 + 12) % rig.size());
      std::erase(many.params, 11u);
      for (const MoveArguments& moved : {many, one}) {
        const int waits_before = watch.waits(), norms_before = watch.norms();
        rig.Wait(rig.Move(offload_optimizer_offload_grads, moved));
        waits.push_back(watch.waits() - waits_before);
        EXPECT_EQ(watch.norms() - norms_before, 1);
        for (uint32_t id : moved.params) rig.Free(rig.grad[id]);
      }
      rig.Step(input);
      rig.Wait();
      model.Step(input);
      ASSERT_EQ(rig.Difference(model), "") << "fraction " << fraction;
      ASSERT_EQ(rig.ResultDifference(model), "") << "fraction " << fraction;
    }
    EXPECT_EQ(waits, std::vector<int>(4, 3)) << "producers, sums, copies";
  }
}

// The device's scratch memory was freed with its states, so the host computes the sums.
TEST(LeavingGradients, WhileStatesAreOnTheHost) {
  const Problem problem = RandomProblem(OFFLOAD_ADAMW, AllDtypePairs(), 1, 127);
  const StepInput input = StandingStep(problem, 0);
  for (double fraction : kFractions) {
    LifecycleRig rig(problem, SettingOf(OFFLOAD_DEVICE_SIM, fraction));
    Model model(problem);
    rig.NewGrads(input);
    rig.BindAll();
    rig.Move(offload_optimizer_offload_states);
    rig.Move(offload_optimizer_offload_grads);
    rig.Move(offload_optimizer_reload_states);
    rig.Step(input);
    rig.Wait();
    model.Step(input);
    ASSERT_EQ(rig.Difference(model), "") << "fraction " << fraction;
    ASSERT_EQ(rig.ResultDifference(model), "") << "fraction " << fraction;
  }
}

// ---------------------------------------------------------------------------------- overlap, order

// While the caller's stream is blocked, everything can be queued after it.
TEST(Overlap, NoCallWaitsForTheCallersStream) {
  const Problem problem = RandomProblem(OFFLOAD_ADAMW, AllDtypePairs(), 2, 107);
  Watch watch;
  LifecycleSetting setting = SettingOf(OFFLOAD_DEVICE_SIM, 0.3);
  setting.wrap = [&watch](std::unique_ptr<Device> device) {
    return std::make_unique<WatchedDevice>(std::move(device), watch);
  };
  LifecycleRig rig(problem, setting);
  Producers producers(rig);
  const offload_stream_t stream = producers.streams[0];
  Model model(problem);
  rig.NewGrads(problem.steps[0]);
  rig.BindAll();
  std::vector<void*> other_data;
  for (uint32_t id = 0; id < rig.size(); ++id)
    other_data.push_back(rig.Allocate(problem.params[id].data_bytes()));

  Gate gate;
  gate.Close(rig.context(), stream);
  watch.CountHostWaits();
  const MoveArguments behind = {{}, 0, {stream}};
  const offload_ticket_t first = rig.Move(offload_optimizer_offload_grads, behind);
  const offload_ticket_t step = rig.Step(problem.steps[0], stream);
  const uint32_t some[] = {1, 2};
  MUST(offload_optimizer_stream_wait(rig.optimizer(), step, stream, some, 2));
  MUST(offload_optimizer_stream_wait(rig.optimizer(), step, stream, nullptr, 0));
  rig.Move(offload_optimizer_offload_params, behind);
  rig.Move(offload_optimizer_offload_states, behind);
  std::swap(rig.data, other_data);
  for (void*& grad : rig.grad) grad = nullptr;
  rig.BindAll();
  rig.Move(offload_optimizer_reload_states, behind);
  rig.Move(offload_optimizer_reload_params, behind);
  rig.Move(offload_optimizer_refresh_masters, behind);
  rig.Move(offload_optimizer_reload_grads, behind);
  rig.Move(offload_optimizer_offload_grads, {{}, OFFLOAD_MOVE_ACCUMULATE, {stream}});
  rig.Move(offload_optimizer_offload_grads, {{}, OFFLOAD_MOVE_DROP, {stream}});
  const offload_ticket_t last = rig.Step(problem.steps[1], stream);
  MUST(offload_optimizer_stream_wait(rig.optimizer(), last, stream, nullptr, 0));
  EXPECT_EQ(watch.host_waits(), 0);
  EXPECT_EQ(offload_optimizer_wait(rig.optimizer(), first, 0), OFFLOAD_TIMED_OUT);
  gate.Open();
  rig.Wait();
  EXPECT_EQ(watch.host_waits(), 0);
  MUST(offload_stream_synchronize(rig.context(), stream, -1));
  EXPECT_EQ(watch.host_waits(), 1);  // so they are counted

  model.Step(problem.steps[0]);
  StepInput without = problem.steps[1];
  for (auto& grad : without.grads) grad.reset();
  model.Step(without);
  EXPECT_EQ(rig.Difference(model), "");
}

Problem OrderProblem() {
  std::vector<ParamSpec> params;
  for (uint64_t count : {3000, 1500, 2500, 1100, 2048})
    params.push_back({OFFLOAD_BF16, OFFLOAD_BF16, OFFLOAD_PLACE_AUTO, 0, count});
  return RandomProblem(OFFLOAD_ADAMW, params, 3, 109);
}

// Any order of chunks gives the same bits.
TEST(ChunkOrder, ChangesNoBit) {
  const Problem problem = OrderProblem();
  const std::vector<std::vector<int32_t>> orders = {
      {}, {0, 0, 0, 0, -1}, {5, 4, 3, 2, 1}, {2, 1, 2, 1, 2}, {INT32_MAX, 0, INT32_MIN, 7, -7}};
  for (double fraction : {0.0, 0.4}) {
    for (const std::vector<int32_t>& order : orders) {
      LifecycleSetting setting = SettingOf(OFFLOAD_DEVICE_SIM, fraction);
      setting.chunk_orders = order;
      LifecycleRig rig(problem, setting);
      Model model(problem);
      for (const StepInput& input : problem.steps) {
        (void)rig.StepOnce(input);
        model.Step(input);
        ASSERT_EQ(rig.Difference(model), "");
        ASSERT_EQ(rig.ResultDifference(model), "");
      }
    }
  }
}

// The param that was registered last but has the lowest chunk_order is copied up first, and a
// stream can wait for it without waiting for the others.
TEST(ChunkOrder, TheLowestIsReadyFirst) {
  const Problem problem = OrderProblem();
  for (bool ordered : {false, true}) {
    Watch watch;
    LifecycleSetting setting = SettingOf(OFFLOAD_DEVICE_SIM, 0);
    setting.wrap = [&watch](std::unique_ptr<Device> device) {
      return std::make_unique<WatchedDevice>(std::move(device), watch);
    };
    setting.optimizer.host_executors = OFFLOAD_EXECUTORS_CPU;  // whose params go up
    if (ordered) setting.chunk_orders = {4, 3, 2, 1, -1};
    LifecycleRig rig(problem, setting);
    const StepInput input = StandingStep(problem, 0);
    rig.NewGrads(input);
    rig.BindAll();
    const size_t uploads = watch.copies_up().size();  // the test's own
    const offload_ticket_t ticket = rig.Step(input);
    Producers producers(rig);
    for (uint32_t id = 0; id < rig.size(); ++id)
      MUST(offload_optimizer_stream_wait(rig.optimizer(), ticket, producers.streams[0], &id, 1));
    rig.Wait();

    std::vector<uint32_t> expected = {0, 1, 2, 3, 4};
    if (ordered) std::reverse(expected.begin(), expected.end());
    const std::vector<void*> copies = watch.copies_up();
    std::vector<uint32_t> went_up;  // params in the order of their first copies
    for (size_t i = uploads; i < copies.size(); ++i)
      for (uint32_t id = 0; id < rig.size(); ++id)
        if (copies[i] == rig.data[id]) went_up.push_back(id);
    EXPECT_EQ(went_up, expected);

    const std::vector<uint64_t> marks = watch.flags_awaited();
    ASSERT_EQ(marks.size(), rig.size());
    std::vector<uint32_t> ready = {0, 1, 2, 3, 4};
    std::stable_sort(ready.begin(), ready.end(),
                     [&](uint32_t a, uint32_t b) { return marks[a] < marks[b]; });
    EXPECT_EQ(ready.front(), expected.front());
    EXPECT_EQ(ready.back(), expected.back());
    EXPECT_LT(marks[expected[0]], marks[expected[1]]);
  }
}

TEST(Queue, HoldsTwoHundredAndFiftySixCalls) {
  const Problem problem = RandomProblem(OFFLOAD_ADAMW, AllDtypePairs(), 1, 113);
  LifecycleRig rig(problem, SettingOf(OFFLOAD_DEVICE_SIM, 0.3));
  Model model(problem);
  Producers producers(rig);
  Gate gate;
  gate.Close(rig.context(), producers.streams[0]);
  const MoveArguments behind = {{}, 0, {producers.streams[0]}};
  const offload_ticket_t first = rig.Move(offload_optimizer_offload_params, behind);
  for (int call = 1; call < 256; ++call) rig.Move(offload_optimizer_offload_params, behind);
  const offload_stats_t before = rig.Stats();
  EXPECT_EQ(before.queued, 256u);
  EXPECT_EQ(rig.TryMove(offload_optimizer_offload_states), OFFLOAD_INVALID_STATE);
  EXPECT_STREQ(offload_last_error(),
               "256 calls are queued, at most 256 may be; wait for an earlier ticket");
  EXPECT_EQ(rig.TryStep(problem.steps[0]), OFFLOAD_INVALID_STATE);
  const offload_stats_t after = rig.Stats();
  EXPECT_EQ(std::memcmp(&before, &after, sizeof(before)), 0);
  gate.Open();
  rig.Wait(first);
  rig.Wait();
  for (uint32_t id = 0; id < rig.size(); ++id)
    rig.data[id] = rig.Allocate(problem.params[id].data_bytes());
  rig.BindAll();
  rig.Move(offload_optimizer_reload_params);
  rig.Wait();
  EXPECT_EQ(rig.Difference(model), "");
}

// Remembers every stream that was made on it.
class ListingDevice final : public ForwardingDevice {
 public:
  ListingDevice(std::unique_ptr<Device> device, std::vector<StreamHandle>& made)
      : ForwardingDevice(std::move(device)), made_(made) {}
  Result<StreamHandle> CreateStream(const char* label) override {
    Result<StreamHandle> stream = ForwardingDevice::CreateStream(label);
    if (stream.ok()) made_.push_back(stream.value());
    return stream;
  }

 private:
  std::vector<StreamHandle>& made_;
};

// A stale handle of a destroyed context may equal the address of such a stream.
TEST(ForeignStreams, OfTheOptimizerAreNotTheCallersToDestroy) {
  const Solved solved(RandomProblem(OFFLOAD_ADAMW, AllDtypePairs(), 1, 5));
  std::vector<StreamHandle> made;
  LifecycleSetting setting;
  setting.wrap = [&](std::unique_ptr<Device> device) {
    return std::make_unique<ListingDevice>(std::move(device), made);
  };
  LifecycleRig rig(solved.problem, setting);
  const std::vector<StreamHandle> streams = made;
  ASSERT_FALSE(streams.empty());
  for (StreamHandle stream : streams) {
    EXPECT_EQ(offload_stream_destroy(rig.context(), stream), OFFLOAD_INVALID_ARGUMENT);
    EXPECT_NE(
        std::string(offload_last_error())
            .find("expected NULL or a stream that offload_stream_create of this context gave"),
        std::string::npos)
        << offload_last_error();
  }
  (void)rig.StepOnce(solved.problem.steps[0]);
  EXPECT_EQ(rig.Difference(solved.trace[1]), "");
}

}  // namespace
}  // namespace hybridopt
