// The same bits in every setting: algorithm x dtypes x instruction set x threads x chunk size x
// device fraction x device x executors, each against the model, after every step.
#include <gtest/gtest.h>

#include <cfenv>
#include <deque>
#include <map>
#include <thread>

#include "../floating_point_mode.h"
#include "rig.h"

namespace hybridopt {
namespace {

constexpr size_t kSteps = 3;

std::string NameOfCase(const testing::TestParamInfo<int32_t>& info) {
  return AlgorithmText(info.param);
}

// Runs a fixed share of the cases, spread evenly, when the scale is below 1.
bool Chosen(uint64_t index) { return Random(index).Unit() < TestScale(); }

// Settings take turns: CPU workers and streams, one of them alone.
int32_t ExecutorsOf(int32_t device, uint64_t index) {
  return device == OFFLOAD_DEVICE_HOST ? OFFLOAD_EXECUTORS_AUTO : static_cast<int32_t>(index % 3);
}

class StepTest : public testing::TestWithParam<int32_t> {};

TEST_P(StepTest, EverySettingGivesTheModelsBits) {
  const int32_t algorithm = GetParam();
  // Three orders of the params, so that each is met in the device share and in the host share.
  const Solved solved[] = {Solved(RandomProblem(algorithm, AllDtypePairs(), kSteps, 1)),
                           Solved(RandomProblem(algorithm, AllDtypePairs(), kSteps, 2)),
                           Solved(RandomProblem(algorithm, AllDtypePairs(), kSteps, 3))};
  uint64_t index = 0;
  for (int32_t device : DevicesUnderTest()) {
    for (const std::string& isa : UsableIsas()) {
      for (uint32_t threads : {1u, 2u, 3u, 7u}) {
        ContextSetting context_setting;
        context_setting.device_kind = device;
        context_setting.threads = threads;
        context_setting.isa = isa;
        const TestContext context(context_setting);
        ASSERT_EQ(context.isa(), isa);
        for (uint64_t chunk : {1024, 4096, 0}) {
          for (double fraction : {0.0, 0.25, 0.5, 1.0}) {
            if (!Chosen(++index)) continue;
            const OptimizerSetting setting{fraction, chunk, 0, ExecutorsOf(device, index / 4)};
            ASSERT_EQ(RunAll(context, solved[index % 3], setting), "")
                << Text(context_setting, setting);
          }
        }
      }
    }
  }
}

TEST_P(StepTest, EverySettingGivesTheModelsBitsInEveryLayout) {
  std::deque<Solved> solved;
  for (const StateChoice& choice : StateChoices()) {
    Problem problem = RandomProblem(GetParam(), AllDtypePairs(), kSteps, 41 + solved.size());
    problem.state = choice;
    solved.emplace_back(std::move(problem));
  }
  uint64_t index = 1000;
  for (int32_t device : DevicesUnderTest()) {
    for (const std::string& isa : UsableIsas()) {
      for (uint32_t threads : {1u, 3u}) {
        ContextSetting context_setting;
        context_setting.device_kind = device;
        context_setting.threads = threads;
        context_setting.isa = isa;
        const TestContext context(context_setting);
        for (double fraction : {0.0, 0.3, 1.0}) {
          if (device == OFFLOAD_DEVICE_HOST && fraction != 0) continue;  // no effect there
          for (const Solved& one : solved) {
            if (!Chosen(++index)) continue;
            const OptimizerSetting setting{fraction, index % 2 == 0 ? 1024u : 4096u, 0,
                                           ExecutorsOf(device, index / 2)};
            ASSERT_EQ(RunAll(context, one, setting), "")
                << one.problem.state.Text() << ", " << Text(context_setting, setting);
          }
        }
      }
    }
  }
}

TEST_P(StepTest, PlacementOverridesDoNotChangeBits) {
  std::vector<ParamSpec> params = AllDtypePairs();
  for (size_t i = 0; i < params.size(); ++i) params[i].placement = static_cast<int32_t>(i % 3);
  for (int32_t device : DevicesUnderTest()) {
    ContextSetting context_setting;
    context_setting.device_kind = device;
    context_setting.threads = 2;
    const TestContext context(context_setting);
    for (uint64_t seed : {11, 12, 13}) {
      const Solved solved(RandomProblem(GetParam(), params, kSteps, seed));
      for (double fraction : {0.0, 0.5, 1.0}) {
        const OptimizerSetting setting{fraction, 1024, 2};
        ASSERT_EQ(RunAll(context, solved, setting), "") << Text(context_setting, setting);
      }
    }
  }
}

TEST_P(StepTest, TheCallersFloatingPointModeDoesNotMatter) {
  const Solved solved(RandomProblem(GetParam(), AllDtypePairs(), kSteps, 21));
  for (int32_t device : DevicesUnderTest()) {
    for (int rounding : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
      ContextSetting context_setting;
      context_setting.device_kind = device;
      context_setting.threads = 2;
      const OptimizerSetting setting{0.5, 1024, 0};
      std::string difference;
      std::thread caller([&] {
        SetFlushToZero();
        std::fesetround(rounding);
        const TestContext context(context_setting);
        difference = RunAll(context, solved, setting);
      });
      caller.join();
      EXPECT_EQ(difference, "") << Text(context_setting, setting) << ", rounding " << rounding;
    }
  }
}

// Not even the sign of a zero.
TEST_P(StepTest, ALearningRateOfZeroLeavesParamsAndMastersAlone) {
  Problem problem = RandomProblem(GetParam(), AllDtypePairs(), kSteps, 31);
  for (StepInput& input : problem.steps) {
    for (offload_group_t& group : input.groups) group.lr = group.weight_decay = 0;
  }
  const Solved solved(std::move(problem));
  const std::vector<Model>& trace = solved.trace;
  for (size_t id = 0; id < trace[0].params.size(); ++id) {
    const std::vector<float>& before = trace.front().params[id].master;
    const std::vector<float>& after = trace.back().params[id].master;
    ASSERT_EQ(trace.front().params[id].data, trace.back().params[id].data);
    ASSERT_TRUE(before.empty() || std::memcmp(before.data(), after.data(), before.size() * 4) == 0);
  }
  for (int32_t device : DevicesUnderTest()) {
    ContextSetting context_setting;
    context_setting.device_kind = device;
    const TestContext context(context_setting);
    EXPECT_EQ(RunAll(context, solved, {0.5, 1024, 0}), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Algorithms, StepTest, testing::ValuesIn(kAlgorithmsAndMixed), NameOfCase);

}  // namespace
}  // namespace hybridopt
