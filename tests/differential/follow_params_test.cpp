// Other code writes params: the masters of written elements follow, all others keep their bits. In
// steps with OFFLOAD_STEP_FOLLOW_PARAMS over params in host memory, and in a refresh of masters
// wherever params and states are.
#include <gtest/gtest.h>

#include "lifecycle_rig.h"
#include "rig.h"

namespace hybridopt {
namespace {

// Replaces all elements of a param, half of them, a few, or none.
void WriteSome(const ParamSpec& spec, Random& random, Bytes& data) {
  const uint64_t bytes = DtypeBytes(spec.dtype);
  const Bytes values = RandomArray(spec.dtype, spec.count, true, random);
  const uint64_t one_in = std::array<uint64_t, 4>{1, 2, 50, UINT64_MAX}[random.Below(4)];
  for (uint64_t i = 0; i < spec.count; ++i)
    if (one_in != UINT64_MAX && random.OneIn(one_in))
      std::memcpy(data.data() + i * bytes, values.data() + i * bytes, bytes);
}

// Writes some elements of some params, in the rig and in the model.
void WriteParams(const Rig& rig, const Problem& problem, Random& random, Model& model) {
  for (size_t id = 0; id < problem.params.size(); ++id) {
    Model::Param& param = model.params[id];
    WriteSome(problem.params[id], random, param.data);
    if (param.data.empty()) continue;
    std::memcpy(rig.DataAddress(0, id), param.data.data(), param.data.size());
    if (problem.params[id].dtype == OFFLOAD_FP32)
      std::memcpy(param.master.data(), param.data.data(), param.data.size());
  }
}

// A param with a split master is the upper half of it, so nothing has to follow.
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

// ------------------------------------------------------------------------- refreshes of masters

struct RefreshCase {
  int32_t device_kind;
  double fraction;
};

void PrintTo(const RefreshCase& c, std::ostream* out) {
  *out << DeviceText(c.device_kind) << ", fraction " << c.fraction;
}

std::vector<RefreshCase> RefreshCases() {
  std::vector<RefreshCase> cases;
  for (int32_t device_kind : DevicesUnderTest())
    for (double fraction : {0.0, 0.4, 1.0})
      if (device_kind != OFFLOAD_DEVICE_HOST || fraction == 0)
        cases.push_back({device_kind, fraction});
  return cases;
}

class RefreshTest : public testing::TestWithParam<RefreshCase> {
 protected:
  // Trains the library and a model. After each step `between` changes both.
  template <typename Between>
  void Train(const Problem& problem, Between between) {
    LifecycleSetting setting;
    setting.device_kind = GetParam().device_kind;
    setting.optimizer.device_fraction = GetParam().fraction;
    LifecycleRig rig(problem, setting);
    Model model(problem);
    for (const StepInput& input : problem.steps) {
      rig.NewGrads(input);
      rig.BindAll();
      rig.Step(input);
      model.Step(input);
      rig.Wait();
      between(rig, model);
      ASSERT_EQ(rig.Difference(model), "") << "after step " << model.steps_applied;
    }
  }
};

TEST_P(RefreshTest, ParamsThatNobodyHasWrittenKeepTheLowBitsOfTheirMasters) {
  for (const StateChoice& choice : WithWholeMasters()) {
    Problem problem = RandomProblem(OFFLOAD_ADAMW, AllDtypePairs(), 3, 31);
    problem.state = choice;
    Train(problem, [](LifecycleRig& rig, const Model&) {
      rig.Move(offload_optimizer_refresh_masters);
      rig.Wait();
    });
  }
}

// Params and states go to the host and come back before the refresh, and in between they are
// written.
TEST_P(RefreshTest, OnlyWrittenElementsFollowInEveryFormat) {
  uint64_t seed = 0;
  for (const StateChoice& choice : StateChoices()) {
    Random random(++seed);
    Problem problem = RandomProblem(AlgorithmOfSeed(seed), AllDtypePairs(), 3, seed);
    problem.state = choice;
    Train(problem, [&](LifecycleRig& rig, Model& model) {
      rig.Move(offload_optimizer_offload_states);
      rig.Move(offload_optimizer_offload_params);
      rig.Wait();
      rig.FreeAll();
      rig.AllocateAll(false, random);
      rig.BindAll();
      rig.Move(offload_optimizer_reload_params);
      rig.Wait();
      std::vector<uint32_t> named;
      for (uint32_t id = 0; id < rig.size(); ++id) {
        if (random.OneIn(3)) continue;
        named.push_back(id);
        WriteSome(problem.params[id], random, model.params[id].data);
        rig.Write(rig.data[id], model.params[id].data);
        model.Refresh(id);
      }
      rig.Move(offload_optimizer_reload_states);
      rig.Move(offload_optimizer_refresh_masters, {named});
      rig.Wait();
    });
  }
}

INSTANTIATE_TEST_SUITE_P(FollowParams, RefreshTest, testing::ValuesIn(RefreshCases()));

}  // namespace
}  // namespace hybridopt
