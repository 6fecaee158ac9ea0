// The global norm, clipping by it, and the exact skip of a step with a gradient that is not finite.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "rig.h"

namespace hybridopt {
namespace {

struct Setting {
  ContextSetting context;
  OptimizerSetting optimizer;
};

// One setting of each kind; the first one is the simplest.
std::vector<Setting> Settings() {
  std::vector<Setting> settings;
  for (int32_t device : DevicesUnderTest()) {
    for (const std::string& isa : UsableIsas()) {
      for (double fraction : {0.0, 0.3, 1.0}) {
        Setting setting;
        setting.context.device_kind = device;
        setting.context.isa = isa;
        setting.context.threads = 1 + static_cast<uint32_t>(settings.size()) % 3;
        setting.optimizer = {fraction, 1024, 2};
        settings.push_back(setting);
      }
    }
  }
  return settings;
}

void ExpectTraceEverywhere(const Solved& solved) {
  for (const Setting& setting : Settings()) {
    const TestContext context(setting.context);
    EXPECT_EQ(RunAll(context, solved, setting.optimizer), "")
        << Text(setting.context, setting.optimizer);
  }
}

// No NULL gradients, so that every place can be poisoned.
Problem FullProblem(int32_t algorithm, size_t steps, uint64_t seed) {
  Problem problem = RandomProblem(algorithm, AllDtypePairs(), steps, seed);
  Random random(seed);
  for (StepInput& input : problem.steps) {
    input.flags = 0;
    for (size_t id = 0; id < problem.params.size(); ++id)
      input.grads[id] =
          RandomArray(problem.params[id].grad_dtype, problem.params[id].count, false, random);
  }
  return problem;
}

double NormOf(const Problem& problem, const StepInput& input) {
  Model model(problem);
  model.Step(input);
  return model.verdict.grad_norm;
}

// The sum of squares in the wrong order: all blocks of all params in one chain.
double ChainedSumSquares(const Problem& problem, const StepInput& input) {
  double sum = 0;
  for (size_t id = 0; id < problem.params.size(); ++id) {
    const ParamSpec& spec = problem.params[id];
    if (!input.grads[id].has_value()) continue;
    std::vector<double> blocks(spec.count / kNormBlockElements + 1);
    ReferenceKernels().SumSquares(spec.grad_dtype)(input.grads[id]->data(), spec.count,
                                                   blocks.data());
    for (double block : blocks) sum += block;
  }
  return sum;
}

// ------------------------------------------------------------------------------------- clipping --

// The norm just below, on and just above the threshold, with and without a loss scale.
TEST(NormTest, ClippingOnTheThreshold) {
  Problem problem = FullProblem(OFFLOAD_ADAMW, 8, 1);
  for (size_t i = 0; i < problem.steps.size(); ++i) {
    StepInput& input = problem.steps[i];
    input.grad_scale = i < 4 ? 0 : 65536;
    input.grad_norm_max = 0;
    const double norm = NormOf(problem, input);
    const double thresholds[] = {norm, norm + 1e-6, std::nextafter(norm, 0.0), norm / 2};
    input.grad_norm_max = thresholds[i % 4];
    input.flags = i % 2 == 0 ? 0 : OFFLOAD_STEP_ASSUME_FINITE;  // clipping needs the norm anyway
  }
  const Solved solved(std::move(problem));
  for (size_t i = 0; i < solved.problem.steps.size(); ++i) {
    const Verdict& verdict = solved.trace[i + 1].verdict;
    const double max = solved.problem.steps[i].grad_norm_max;
    EXPECT_EQ(verdict.grad_clip, std::min(1.0, max / (verdict.grad_norm + 1e-6)));
    EXPECT_EQ(verdict.grad_clip < 1, i % 4 != 1);
  }
  ExpectTraceEverywhere(solved);
}

// Sums of squares that no fp32 can hold, and ones that are denormal in fp32.
TEST(NormTest, HugeAndTinyGradients) {
  Problem problem = FullProblem(OFFLOAD_LION, 4, 2);
  for (size_t i = 0; i < problem.steps.size(); ++i) {
    StepInput& input = problem.steps[i];
    for (size_t id = 0; id < problem.params.size(); ++id) {
      const ParamSpec& spec = problem.params[id];
      const float wanted = spec.grad_dtype == OFFLOAD_FP16 ? (i % 2 == 0 ? 6e4f : 6e-8f)
                                                           : (i % 2 == 0 ? 1e37f : 1e-39f);
      for (uint64_t e = 0; e < spec.count; ++e)
        PutElement(*input.grads[id], spec.grad_dtype, e, BitsOf(spec.grad_dtype, wanted));
    }
    input.grad_norm_max = i < 2 ? 0 : 1;
  }
  const Solved solved(std::move(problem));
  EXPECT_GT(solved.trace[1].verdict.grad_norm, 1e38);
  EXPECT_LT(solved.trace[2].verdict.grad_norm, 1e-4);
  ExpectTraceEverywhere(solved);
}

// Params of many blocks: adding the blocks in one chain gives other bits here.
TEST(NormTest, BlocksAddUpParamByParam) {
  std::vector<ParamSpec> params;
  for (uint64_t count : {50'000, 4097, 8192, 33'333, 12'289})
    params.push_back({OFFLOAD_FP32, kDtypes[count % 3], OFFLOAD_PLACE_AUTO, 0, count});
  Problem problem = RandomProblem(OFFLOAD_SGD, params, 5, 40);
  for (StepInput& input : problem.steps) input.flags = 0;
  const Solved solved(std::move(problem));
  int differs = 0;
  for (size_t i = 0; i < solved.problem.steps.size(); ++i) {
    const StepInput& input = solved.problem.steps[i];
    const double scale = input.grad_scale == 0 ? 1 : input.grad_scale;
    const Verdict chained = Decide(ChainedSumSquares(solved.problem, input), scale, 0);
    differs += chained.grad_norm != solved.trace[i + 1].verdict.grad_norm;
  }
  ASSERT_GT(differs, 0) << "a problem on which the order shows is needed";
  ExpectTraceEverywhere(solved);
}

TEST(NormTest, WithoutAnyGradientTheNormIsZeroAndNothingChanges) {
  Problem problem = FullProblem(OFFLOAD_ADAM, 2, 3);
  for (auto& grad : problem.steps[0].grads) grad.reset();
  const Solved solved(std::move(problem));
  EXPECT_EQ(solved.trace[1].verdict.grad_norm, 0.0);
  EXPECT_EQ(solved.trace[1].steps_applied, 1u);
  ExpectTraceEverywhere(solved);
}

// ----------------------------------------------------------------------------------------- skip --

uint32_t InfBits(int32_t dtype) { return BitsOf(dtype, std::numeric_limits<float>::infinity()); }

// Inf, -Inf, a quiet NaN, a negative one, one whose payload is in the lowest bit alone.
uint32_t NotFinite(int32_t dtype, size_t kind) {
  const uint32_t inf = InfBits(dtype);
  const uint32_t quiet = dtype == OFFLOAD_FP32 ? 0x400000 : dtype == OFFLOAD_BF16 ? 0x40 : 0x200;
  const uint32_t kinds[] = {inf, inf | SignBit(dtype), inf | quiet, inf | quiet | SignBit(dtype),
                            inf | 1};
  return kinds[kind % 5];
}

// First, last, around SIMD and block borders, and where a fraction of 0.3 may cut.
std::vector<uint64_t> Positions(uint64_t count) {
  std::vector<uint64_t> positions;
  for (uint64_t position : {uint64_t{0}, count / 3, count / 2, uint64_t{4095}, uint64_t{4096},
                            count - count % 32, count - 1}) {
    if (position < count) positions.push_back(position);
  }
  return positions;
}

// A good step, then a bad one for each position of each param, after which nothing has changed; at
// the end a good step with the bits of a run without the bad ones.
std::string SkipEverywhere(const Setting& setting, const Problem& problem, size_t kind) {
  const TestContext context(setting.context);
  Rig rig(context, problem, setting.optimizer);
  Model model(problem);
  rig.Step(problem.steps[0]);
  model.Step(problem.steps[0]);
  for (size_t id = 0; id < problem.params.size(); ++id) {
    const ParamSpec& spec = problem.params[id];
    for (uint64_t position : Positions(spec.count)) {
      StepInput bad = problem.steps[1];
      PutElement(*bad.grads[id], spec.grad_dtype, position, NotFinite(spec.grad_dtype, kind++));
      // With ASSUME_FINITE and clipping the norm is known all the same.
      bad.grad_norm_max = kind % 2;
      bad.flags = kind % 4 == 1 ? OFFLOAD_STEP_ASSUME_FINITE : 0;
      rig.Step(bad);
      model.Step(bad);
      if (model.verdict.skip != 1) return "the model did not skip";
      const std::string difference = rig.Difference(model);
      if (!difference.empty())
        return "param " + std::to_string(id) + " (" + spec.Text() + "), position " +
               std::to_string(position) + ": " + difference;
    }
  }
  rig.Step(problem.steps[2]);
  model.Step(problem.steps[2]);
  const std::string difference = rig.Difference(model);
  return difference.empty() ? rig.StatsDifference(model) : difference;
}

TEST(SkipTest, AnyGradientThatIsNotFiniteChangesNothing) {
  size_t number = 0;
  for (const Setting& setting : Settings()) {
    const int32_t algorithm = AlgorithmOfSeed(number++);
    if (Random(number).Unit() >= TestScale() && number > 1) continue;
    const Problem problem = FullProblem(algorithm, 3, number);
    EXPECT_EQ(SkipEverywhere(setting, problem, number), "")
        << Text(setting.context, setting.optimizer) << ", algorithm " << algorithm;
  }
}

// fp32 squares overflow where doubles do not: large finite gradients are no reason to skip.
TEST(SkipTest, LargeFiniteGradientsAreNotSkipped) {
  Problem problem = FullProblem(OFFLOAD_ADAMW, 1, 9);
  for (size_t id = 0; id < problem.params.size(); ++id) {
    const ParamSpec& spec = problem.params[id];
    if (spec.count > 0 && spec.grad_dtype != OFFLOAD_FP16)
      PutElement(*problem.steps[0].grads[id], spec.grad_dtype, spec.count - 1,
                 BitsOf(spec.grad_dtype, 3e38f));
  }
  const Solved solved(std::move(problem));
  EXPECT_EQ(solved.trace[1].verdict.skip, 0);
  ExpectTraceEverywhere(solved);
}

// A skipped step between two queued ones: each takes its own gradients.
TEST(SkipTest, QueuedStepsGoOnBehindASkippedOne) {
  for (const Setting& setting : Settings()) {
    const Problem problem = FullProblem(OFFLOAD_SGD, 3, 10);
    StepInput bad = problem.steps[1];
    for (size_t id = 0; id < problem.params.size(); ++id) {
      const ParamSpec& spec = problem.params[id];
      if (spec.count == 1) PutElement(*bad.grads[id], spec.grad_dtype, 0, InfBits(spec.grad_dtype));
    }
    const StepInput inputs[] = {problem.steps[0], bad, problem.steps[2]};
    const TestContext context(setting.context);
    Rig rig(context, problem, setting.optimizer);
    Model model(problem);
    std::vector<offload_ticket_t> tickets;
    for (const StepInput& input : inputs) {
      const size_t block = rig.AddBlock(tickets.size() + 5);
      rig.PutGrads(block, input);
      rig.Bind(0, block, input);
      rig.SetGroups(input.groups);
      tickets.push_back(rig.Queue(input));
    }
    MUST(offload_optimizer_wait(rig.handle(), 0, -1));
    for (size_t i = 0; i < 3; ++i) {
      model.Step(inputs[i]);
      EXPECT_EQ(model.verdict.skip, i == 1);
      EXPECT_EQ(rig.ResultDifference(model, tickets[i]), "");
    }
    EXPECT_EQ(rig.Difference(model), "") << Text(setting.context, setting.optimizer);
    EXPECT_EQ(rig.StatsDifference(model), "");
  }
}

// When a ticket has completed, these gradients are not read any more. Devices with memory of their
// own fail if a copy meets freed memory.
TEST(SkipTest, GradientsMayBeFreedOnceTheirStepIsComplete) {
  for (int seed = 0; seed < Scaled(40); ++seed) {
    Setting setting;
    setting.context.device_kind = AcceleratorsUnderTest().front();
    setting.context.seed = static_cast<uint64_t>(seed);
    setting.context.delay_ns_max = 50'000;
    setting.optimizer = {0, 1024, 4};
    Problem problem = FullProblem(AlgorithmOfSeed(seed), 3, 11);
    for (size_t id = 0; id < problem.params.size(); ++id) {
      const ParamSpec& spec = problem.params[id];
      if (spec.count == 1)
        PutElement(*problem.steps[1].grads[id], spec.grad_dtype, 0, InfBits(spec.grad_dtype));
    }
    const std::vector<Model> trace = TraceOf(problem);
    const TestContext context(setting.context);
    Rig rig(context, problem, setting.optimizer);
    for (size_t i = 0; i < problem.steps.size(); ++i) {
      const size_t block = rig.AddBlock(i);
      rig.Step(problem.steps[i], block);
      rig.FreeBlock(block);
      ASSERT_EQ(rig.Difference(trace[i + 1]), "") << "seed " << seed << ", step " << i + 1;
    }
    EXPECT_EQ(trace.back().steps_skipped, 1u);
  }
}

}  // namespace
}  // namespace hybridopt
