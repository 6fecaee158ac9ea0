// State layouts as a caller sees them: the plan's bytes, views, and that training in every layout
// gives the results of fp32 state.
#include <gtest/gtest.h>

#include <cmath>

#include "rig.h"

namespace hybridopt {
namespace {

constexpr uint64_t kCount = 5000;

Problem OneBf16Param(const StateChoice& choice, int32_t algorithm = OFFLOAD_ADAMW) {
  Problem problem = RandomProblem(algorithm, {{OFFLOAD_BF16, OFFLOAD_BF16, 0, 0, kCount}}, 2, 5);
  problem.state = choice;
  for (StepInput& step : problem.steps)
    for (auto& grad : step.grads)
      if (!grad.has_value()) grad = Bytes(kCount * 2);
  return problem;
}

ContextSetting On(int32_t device_kind) {
  ContextSetting setting;
  setting.device_kind = device_kind;
  return setting;
}

uint64_t StateBytes(const uint64_t* bytes) {
  uint64_t sum = 0;
  for (int kind = 0; kind < 8; ++kind) sum += bytes[kind];
  return sum;
}

TEST(LayoutsTest, ThePlanSaysWhatEachLayoutTakes) {
  for (const StateChoice& choice : StateChoices()) {
    const uint64_t moments = choice.bf16() ? 4 : 8;
    const uint64_t masters = choice.split24() ? 1 : choice.split() ? 2 : 4;
    for (int32_t device : DevicesUnderTest()) {
      for (double fraction : {0.0, 1.0}) {
        const TestContext context(On(device));
        const Problem problem = OneBf16Param(choice);
        Rig rig(context, problem, {fraction, 1024, 2});
        auto plan = Make<offload_plan_t>();
        MUST(offload_optimizer_plan(rig.handle(), &plan));
        const bool on_device = device != OFFLOAD_DEVICE_HOST && fraction == 1;
        const uint64_t* of =
            on_device ? plan.state_bytes[OFFLOAD_TIER_DEVICE] : plan.state_bytes[OFFLOAD_TIER_HOST];
        const bool split = choice.split();
        const uint64_t least = kCount * (moments + masters);
        EXPECT_GE(StateBytes(of), least) << choice.Text();
        EXPECT_LE(StateBytes(of), least + 4 * 512) << choice.Text();
        EXPECT_EQ(of[OFFLOAD_STATE_MASTER] == 0, split) << choice.Text();
        EXPECT_EQ(of[OFFLOAD_STATE_MASTER_LOW] == 0, !split) << choice.Text();
        auto stats = Make<offload_stats_t>();
        MUST(offload_optimizer_get_stats(rig.handle(), &stats));
        EXPECT_EQ(on_device ? stats.state_bytes[OFFLOAD_TIER_DEVICE]
                            : stats.state_bytes[OFFLOAD_TIER_HOST],
                  least);
      }
    }
  }
}

TEST(LayoutsTest, ViewsHaveTheStoredDtypesAndCountTheirOwnElements) {
  const StateChoice choice{OFFLOAD_MASTER_SPLIT, OFFLOAD_BF16, OFFLOAD_ROUND_STOCHASTIC, 1};
  const TestContext context(On(AcceleratorUnderTest()));
  const Problem problem = OneBf16Param(choice);
  Rig rig(context, problem, {0.5, 1024, 2});
  auto view = Make<offload_state_view_t>();
  MUST(offload_optimizer_state(rig.handle(), 0, OFFLOAD_STATE_EXP_AVG, &view));
  EXPECT_EQ(view.dtype, OFFLOAD_BF16);
  EXPECT_EQ(view.device_count, kCount / 2);
  EXPECT_EQ(view.host_count, kCount / 2);
  MUST(offload_optimizer_state(rig.handle(), 0, OFFLOAD_STATE_MASTER_LOW, &view));
  EXPECT_EQ(view.dtype, OFFLOAD_U16);
  EXPECT_EQ(view.device_count, kCount / 2);
  EXPECT_EQ(view.host_count, kCount / 2);
}

TEST(LayoutsTest, AViewOf24BitMastersHasTheirBytes) {
  const TestContext context(On(AcceleratorUnderTest()));
  const Problem problem = OneBf16Param({OFFLOAD_MASTER_SPLIT24, 0, 0, 1});
  Rig rig(context, problem, {0.5, 1024, 2});
  auto view = Make<offload_state_view_t>();
  MUST(offload_optimizer_state(rig.handle(), 0, OFFLOAD_STATE_MASTER_LOW, &view));
  EXPECT_EQ(view.dtype, OFFLOAD_I8);
  EXPECT_EQ(view.device_count, kCount / 2);
  EXPECT_EQ(view.host_count, kCount / 2);
}

TEST(LayoutsTest, AMasterThatIsSplitIsRefusedWithTheWayOut) {
  const StateChoice choice{OFFLOAD_MASTER_SPLIT24, 0, 0, 0};
  const TestContext context(On(DevicesUnderTest().front()));
  const Problem problem = OneBf16Param(choice);
  Rig rig(context, problem, {1, 1024, 2});
  auto view = Make<offload_state_view_t>();
  EXPECT_EQ(offload_optimizer_state(rig.handle(), 0, OFFLOAD_STATE_MASTER, &view),
            OFFLOAD_INVALID_ARGUMENT);
  for (const char* words : {"'param0'", "split", "OFFLOAD_STATE_MASTER_LOW"})
    EXPECT_NE(std::string(offload_last_error()).find(words), std::string::npos) << words;
}

// Lower halves of old masters must not stay under new params.
TEST(LayoutsTest, ARefreshLeavesNothingOfTheOldMasters) {
  for (int32_t device : DevicesUnderTest()) {
    const int32_t masters = device % 2 == 0 ? OFFLOAD_MASTER_SPLIT : OFFLOAD_MASTER_SPLIT24;
    const Solved solved(OneBf16Param({masters, 0, 0, 0}));
    const TestContext context(On(device));
    Rig rig(context, solved.problem, {0.5, 1024, 2});
    for (const StepInput& step : solved.problem.steps) rig.Step(step);
    Model model = solved.trace.back();
    Model::Param& param = model.params[0];
    Random random(3);
    param.data = RandomArray(OFFLOAD_BF16, kCount, false, random);
    const std::vector<uint16_t> bits = ElementsOf<uint16_t>(param.data);
    std::transform(bits.begin(), bits.end(), param.master.begin(), Bf16ToFp32);
    rig.PutParams(0, model);
    MUST(offload_optimizer_refresh_masters(rig.handle(), nullptr, nullptr));
    MUST(offload_optimizer_wait(rig.handle(), 0, -1));
    EXPECT_EQ(rig.BitsDifference(model), "") << "device " << device;
  }
}

// Another seed gives other moments and masters: the key is really used.
TEST(LayoutsTest, TheSeedDecidesTheBits) {
  std::vector<float> moments[2], masters[2];
  for (uint64_t seed : {1, 2}) {
    const Solved solved(
        OneBf16Param({OFFLOAD_MASTER_SPLIT24, OFFLOAD_BF16, OFFLOAD_ROUND_STOCHASTIC, seed}));
    const TestContext context(On(DevicesUnderTest().front()));
    ASSERT_EQ(RunAll(context, solved, {1, 1024, 2}), "");
    moments[seed - 1] = solved.trace.back().params[0].moment0;
    masters[seed - 1] = solved.trace.back().params[0].master;
  }
  EXPECT_NE(moments[0], moments[1]);
  EXPECT_NE(masters[0], masters[1]);
}

// 200 steps of gradient descent on (w - target)^2 / 2 in every layout. The path of the weights
// differs from that of AdamW in double by a few per cent; an optimizer that does nothing differs by
// 100 %.
TEST(LayoutsTest, UpdatesFollowDoublePrecision) {
  constexpr uint64_t kWeights = 2000;
  constexpr int kSteps = 200;
  for (const StateChoice& choice : StateChoices()) {
    if (choice.moment_rounding == OFFLOAD_ROUND_NEAREST) continue;  // it is known to be slower
    Problem problem;
    problem.algorithm = OFFLOAD_ADAMW;
    offload_group_t group{};
    group.struct_size = sizeof(group);
    group.lr = 1e-3;
    group.beta1 = 0.9;
    group.beta2 = 0.999;
    group.eps = 1e-8;
    group.weight_decay = 0.01;
    problem.groups = {group};
    problem.params = {{OFFLOAD_BF16, OFFLOAD_FP32, 0, 0, kWeights}};
    problem.state = choice;
    Random random(9);
    std::vector<double> weight(kWeights), target(kWeights), m(kWeights), v(kWeights);
    problem.initial = {Bytes(kWeights * 2)};
    for (uint64_t i = 0; i < kWeights; ++i) {
      const uint16_t bits = Fp32ToBf16(static_cast<float>(random.Between(-1, 1)));
      PutElement(problem.initial[0], OFFLOAD_BF16, i, bits);
      weight[i] = Bf16ToFp32(bits);
      target[i] = weight[i] + (random.OneIn(2) ? 1 : -1) * random.Between(0.3, 0.6);
    }
    const std::vector<double> start = weight;
    const TestContext context(On(DevicesUnderTest().back()));
    Rig rig(context, problem, {1, 1024, 2});
    for (int t = 1; t <= kSteps; ++t) {
      StepInput step;
      step.groups = problem.groups;
      step.grads = {Bytes(kWeights * 4)};
      for (uint64_t i = 0; i < kWeights; ++i) {
        const auto grad = static_cast<float>(weight[i] - target[i] + 0.2 * random.Between(-1, 1));
        PutElement(*step.grads[0], OFFLOAD_FP32, i, std::bit_cast<uint32_t>(grad));
        m[i] = 0.9 * m[i] + 0.1 * grad;
        v[i] = 0.999 * v[i] + 0.001 * double{grad} * grad;
        const double update =
            m[i] / (1 - std::pow(0.9, t)) / (std::sqrt(v[i] / (1 - std::pow(0.999, t))) + 1e-8);
        weight[i] -= 1e-3 * (update + 0.01 * weight[i]);
      }
      rig.Step(step);
    }
    Bytes data(kWeights * 2);
    MUST(offload_device_download(context.handle(), data.data(), rig.DataAddress(0, 0), data.size(),
                                 nullptr));
    const auto read = [&](const void* from, uint64_t bytes) {
      Bytes copied(bytes);
      MUST(offload_device_download(context.handle(), copied.data(), from, bytes, nullptr));
      return copied;
    };
    const StateBits state = ReadState(rig.handle(), 0, OFFLOAD_STATE_MASTER, data, read);
    ASSERT_EQ(state.error, "");
    double error = 0, moved = 0;
    for (uint64_t i = 0; i < kWeights; ++i) {
      error += std::pow(state.values[i] - weight[i], 2);
      moved += std::pow(weight[i] - start[i], 2);
    }
    const double relative = std::sqrt(error / moved);
    // 200 roundings at random of masters below 2, each off by at most 2^-15 and by half of that in
    // the mean of squares at worst: 2.2e-4 of weights that have moved by more than 0.1.
    const double bound = choice.bf16() ? 0.01 : choice.split24() ? 2.2e-3 : 1e-5;
    EXPECT_LT(relative, bound) << choice.Text();
    EXPECT_GT(std::sqrt(moved / kWeights), 0.1);
  }
}

}  // namespace
}  // namespace hybridopt
