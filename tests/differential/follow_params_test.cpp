// Other code writes params in host memory between steps with OFFLOAD_STEP_FOLLOW_PARAMS: the
// masters of what it has written follow, all others keep their bits.
#include <gtest/gtest.h>

#include "rig.h"

namespace hybridopt {
namespace {

// Writes some elements of some params, in the rig and in the model.
void WriteParams(const Rig& rig, const Problem& problem, Random& random, Model& model) {
  for (size_t id = 0; id < problem.params.size(); ++id) {
    const ParamSpec& spec = problem.params[id];
    Model::Param& param = model.params[id];
    const uint64_t bytes = DtypeBytes(spec.dtype);
    const Bytes values = RandomArray(spec.dtype, spec.count, true, random);
    const uint64_t one_in = std::array<uint64_t, 4>{1, 2, 50, UINT64_MAX}[random.Below(4)];
    for (uint64_t i = 0; i < spec.count; ++i) {
      if (one_in == UINT64_MAX || !random.OneIn(one_in)) continue;
      const std::byte* const value = values.data() + i * bytes;
      std::memcpy(static_cast<std::byte*>(rig.DataAddress(0, id)) + i * bytes, value, bytes);
      std::memcpy(param.data.data() + i * bytes, value, bytes);
      if (spec.dtype == OFFLOAD_FP32) std::memcpy(&param.master[i], value, bytes);
    }
  }
}

// A param with a split master holds the upper half of it: there is nothing to follow.
std::vector<StateChoice> WithWholeMasters() {
  std::vector<StateChoice> choices = StateChoices();
  std::erase_if(choices, [](const StateChoice& choice) { return choice.split(); });
  return choices;
}

TEST(FollowParamsTest, MastersAreWhatOtherCodeHasWritten) {
  const std::vector<StateChoice> choices = WithWholeMasters();
  const std::vector<std::string> isas = UsableIsas();
  const auto rounds = static_cast<uint64_t>(Scaled(42));
  for (uint64_t seed = 0; seed < rounds; ++seed) {
    Random random(seed);
    Problem problem = RandomProblem(AlgorithmOfSeed(seed), AllDtypePairs(), 5, seed);
    problem.state = choices[seed % choices.size()];
    ContextSetting setting;
    setting.device_kind = OFFLOAD_DEVICE_HOST;
    setting.threads = 1 + static_cast<uint32_t>(random.Below(3));
    setting.isa = isas[random.Below(isas.size())];
    const TestContext context(setting);
    Rig rig(context, problem, {});
    Model model(problem);
    for (StepInput& input : problem.steps) {
      input.flags |= OFFLOAD_STEP_FOLLOW_PARAMS;
      WriteParams(rig, problem, random, model);
      rig.Step(input);
      model.Step(input);
      ASSERT_EQ(rig.Difference(model), "") << Text(setting, {}) << ", seed " << seed;
    }
  }
}

TEST(FollowParamsTest, RefusedWhereParamsAreInDeviceMemory) {
  const Solved solved(RandomProblem(OFFLOAD_ADAMW, AllDtypePairs(), 1, 3));
  ContextSetting setting;
  setting.device_kind = AcceleratorUnderTest();
  const TestContext context(setting);
  Rig rig(context, solved.problem, {0.5, 1024, 0});
  auto options = Make<offload_step_options_t>();
  options.flags = OFFLOAD_STEP_FOLLOW_PARAMS;
  EXPECT_EQ(offload_optimizer_step(rig.handle(), &options, nullptr), OFFLOAD_UNSUPPORTED);
  EXPECT_STREQ(offload_last_error(),
               "options.flags has OFFLOAD_STEP_FOLLOW_PARAMS, expected it only where params are in "
               "host memory; call offload_optimizer_refresh_masters for params that other code has "
               "written");
  EXPECT_EQ(rig.BitsDifference(solved.trace.front()), "");
}

}  // namespace
}  // namespace hybridopt
