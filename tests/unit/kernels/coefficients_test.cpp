// Coefficients and formulas: compared with tables of values computed by hand, and the updates of a
// thousand steps compared with the textbook formulas in double.
#include "kernels/coefficients.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <vector>

#include "../../random.h"
#include "kernels/kernels.h"

// Tables leave out zeros.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

namespace hybridopt {
namespace {

constexpr offload_group_t kAdamGroup = {
    .lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.3};
constexpr offload_group_t kBetaZero = {.lr = 0.1, .eps = 1e-8, .weight_decay = 0.3};
constexpr offload_group_t kSgdGroup = {
    .lr = 0.1, .weight_decay = 0.2, .momentum = 0.9, .dampening = 0.25};
constexpr offload_group_t kNesterovGroup = {
    .nesterov = 1, .maximize = 1, .lr = 0.1, .weight_decay = 0.2, .momentum = 0.9};
constexpr offload_group_t kSignumGroup = {.lr = 0.1, .weight_decay = 0.3, .momentum = 0.9};
constexpr offload_group_t kAdagradGroup = {
    .lr = 0.6, .eps = 1e-10, .weight_decay = 0.125, .lr_decay = 0.5};

TEST(RuleOf, AdamAndAdamWShareAKernel) {
  EXPECT_EQ(RuleOf(OFFLOAD_ADAMW, 0.0), Rule::kAdam);
  EXPECT_EQ(RuleOf(OFFLOAD_ADAM, 0.0), Rule::kAdam);
  EXPECT_EQ(RuleOf(OFFLOAD_SGD, 0.0), Rule::kSgdPlain);
  EXPECT_EQ(RuleOf(OFFLOAD_SGD, 0.9), Rule::kSgdMomentum);
  EXPECT_EQ(RuleOf(OFFLOAD_LION, 0.0), Rule::kLion);
  EXPECT_EQ(RuleOf(OFFLOAD_ADAGRAD, 0.0), Rule::kAdagrad);
  EXPECT_EQ(RuleOf(OFFLOAD_SIGNUM, 0.0), Rule::kSignum);
  EXPECT_EQ(RuleOf(OFFLOAD_SIGNUM, 0.9), Rule::kSignum);
}

TEST(RuleOfStep, CautiousWeightDecayHasARuleOfItsOwn) {
  offload_group_t group = {};
  EXPECT_EQ(RuleOfStep(OFFLOAD_ADAMW, Rule::kAdam, group), Rule::kAdam);
  EXPECT_EQ(RuleOfStep(OFFLOAD_SGD, Rule::kSgdPlain, group), Rule::kSgdPlain);
  group.cautious_weight_decay = 1;
  EXPECT_EQ(RuleOfStep(OFFLOAD_ADAMW, Rule::kAdam, group), Rule::kCautiousAdam);
  for (int32_t moment : {0, 1})
    EXPECT_EQ(MomentOf(Rule::kCautiousAdam, moment), MomentOf(Rule::kAdam, moment));
}

struct CoefficientsRow {
  int32_t algorithm;
  offload_group_t group;
  uint64_t step;
  Coefficients expected;
};

// In the order of Coefficients: grad_factor, l2_decay, decoupled_decay, step_size, keep0, weight0,
// keep1, weight1, inverse_sqrt_bias_correction2, eps, nesterov_momentum, nesterov.
const CoefficientsRow kCoefficients[] = {
    // 0.1 / (1 - 0.9), 1 / sqrt(1 - 0.99); 0.1 / 0.19, 1 / sqrt(0.0199); no correction late
    {OFFLOAD_ADAMW, kAdamGroup, 1, {1, 0, .03f, 1, .9f, .1f, .99f, .01f, 10, 1e-8f}},
    {OFFLOAD_ADAMW,
     kAdamGroup,
     2,
     {1, 0, .03f, .526315789473684f, .9f, .1f, .99f, .01f, 7.08881205008336f, 1e-8f}},
    {OFFLOAD_ADAMW, kAdamGroup, 1u << 31, {1, 0, .03f, .1f, .9f, .1f, .99f, .01f, 1, 1e-8f}},
    {OFFLOAD_ADAM, kAdamGroup, 1, {1, .3f, 0, 1, .9f, .1f, .99f, .01f, 10, 1e-8f}},
    // Without a beta nothing is to be corrected.
    {OFFLOAD_ADAMW, kBetaZero, 1, {1, 0, .03f, .1f, 0, 1, 0, 1, 1, 1e-8f}},
    {OFFLOAD_ADAMW, kBetaZero, 2, {1, 0, .03f, .1f, 0, 1, 0, 1, 1, 1e-8f}},
    {OFFLOAD_ADAMW, kBetaZero, 1000, {1, 0, .03f, .1f, 0, 1, 0, 1, 1, 1e-8f}},
    // The first step is not dampened.
    {OFFLOAD_SGD, kSgdGroup, 1, {1, .2f, 0, .1f, 0, 1}},
    {OFFLOAD_SGD, kSgdGroup, 2, {1, .2f, 0, .1f, .9f, .75f}},
    {OFFLOAD_SGD, kNesterovGroup, 2, {-1, .2f, 0, .1f, .9f, 1, 0, 0, 0, 0, .9f, 1}},
    {OFFLOAD_LION, kAdamGroup, 5, {1, 0, .03f, .1f, .9f, .1f, .99f, .01f}},
    {OFFLOAD_SIGNUM, kSignumGroup, 5, {1, 0, .03f, .1f, .9f, .1f}},
    // 0.6 / (1 + 4 * 0.5)
    {OFFLOAD_ADAGRAD, kAdagradGroup, 1, {1, .125f, 0, .6f, 0, 0, 0, 0, 0, 1e-10f}},
    {OFFLOAD_ADAGRAD, kAdagradGroup, 5, {1, .125f, 0, .2f, 0, 0, 0, 0, 0, 1e-10f}},
};

// All are 4 bytes long; nesterov, the only integer, shows as a tiny float.
using Fields = std::array<float, sizeof(Coefficients) / sizeof(float)>;

TEST(MakeCoefficients, IsWhatTheTableSays) {
  for (const CoefficientsRow& row : kCoefficients)
    EXPECT_EQ(std::bit_cast<Fields>(MakeCoefficients(row.algorithm, row.group, row.step)),
              std::bit_cast<Fields>(row.expected))
        << AlgorithmOf(row.algorithm)->name << ", step " << row.step;
}

TEST(MakeCoefficients, BiasCorrectionIsExactForEveryBetaAndStep) {
  offload_group_t group = kAdamGroup;
  group.lr = 1.0;
  for (double beta : {0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 0.9999, 0.999999, 1.0 - 1e-10}) {
    group.beta1 = group.beta2 = beta;
    for (uint64_t step : {1, 2, 3, 7, 10, 100, 1000, 12345, 1000000, 100000007}) {
      const Coefficients c = MakeCoefficients(OFFLOAD_ADAMW, group, step);
      const long double correction =
          -std::expm1(static_cast<long double>(step) * std::log(static_cast<long double>(beta)));
      EXPECT_EQ(c.step_size, static_cast<float>(1.0L / correction)) << beta << " " << step;
      EXPECT_EQ(c.inverse_sqrt_bias_correction2, static_cast<float>(1.0L / std::sqrt(correction)))
          << beta << " " << step;
    }
  }
}

TEST(MakeCoefficients, EpsNeverBecomesZero) {
  offload_group_t group = kAdamGroup;
  group.eps = 1e-300;
  EXPECT_GT(MakeCoefficients(OFFLOAD_ADAMW, group, 1).eps, 0.0f);
  EXPECT_GT(MakeCoefficients(OFFLOAD_ADAGRAD, group, 1).eps, 0.0f);
}

// ------------------------------------------------------------------------ steps by hand

struct Param {
  float weight = 0.0f;
  float moment0 = 0.0f;
  float moment1 = 0.0f;
};

void Step(const KernelTable& kernels, int32_t algorithm, const offload_group_t& group,
          uint64_t step, float grad, Param& param) {
  const Rule rule = RuleOfStep(algorithm, RuleOf(algorithm, group.momentum), group);
  const UpdateSpan span = {&grad, &param.weight, &param.weight, &param.moment0, &param.moment1, 1};
  kernels.Update(rule, OFFLOAD_FP32, OFFLOAD_FP32)(MakeCoefficients(algorithm, group, step), span);
}

// One step, from the state of an earlier row or of the start.
struct HandRow {
  int32_t algorithm;
  offload_group_t group;
  uint64_t step;
  float grad;
  Param before;
  Param after;
  float within = 0.0f;  // the allowed error of the weight
};

constexpr offload_group_t kAdamW = {
    .lr = 0.5, .beta1 = 0.5, .beta2 = 0.75, .eps = 0.5, .weight_decay = 0.5};
constexpr offload_group_t kCautious = {
    .cautious_weight_decay = 1, .lr = 0.5, .eps = 1.0, .weight_decay = 0.5};
constexpr offload_group_t kAdam = {
    .lr = 0.5, .beta1 = 0.5, .beta2 = 0.75, .eps = 2.0, .weight_decay = 0.5};
constexpr offload_group_t kMomentum = {.lr = 0.5, .momentum = 0.5, .dampening = 0.5};
constexpr offload_group_t kNesterov = {.nesterov = 1, .lr = 0.5, .momentum = 0.5};
constexpr offload_group_t kPlain = {.lr = 0.5, .weight_decay = 0.5};
constexpr offload_group_t kMaximize = {.maximize = 1, .lr = 0.5, .weight_decay = 0.5};
constexpr offload_group_t kLion = {.lr = 0.25, .beta1 = 0.5, .beta2 = 0.75, .weight_decay = 0.5};
constexpr offload_group_t kLionNoDecay = {.lr = 0.25, .beta1 = 0.5, .beta2 = 0.75};
constexpr offload_group_t kSignum = {.lr = 0.25, .weight_decay = 0.5, .momentum = 0.75};
constexpr offload_group_t kSignumNoDecay = {.lr = 0.25, .momentum = 0.75};
constexpr offload_group_t kSignSgd = {.lr = 0.25};
constexpr offload_group_t kAdagrad = {.lr = 0.5, .eps = 3.0, .lr_decay = 1.0};
constexpr float kTiny = 0x1p-100f;

// Moments are those of the row's formula; the comment is of the weight, where it is not plain.
const HandRow kByHand[] = {
    // 1 - 0.5 * 0.5 * 1 - 0.5 * (1 / 0.5) / (sqrt(1 / 0.25) + 0.5)
    {OFFLOAD_ADAMW, kAdamW, 1, 2.0f, {1.0f}, {0.35f, 1.0f, 1.0f}, 1e-7f},
    // 0.35 - 0.25 * 0.35 - 0.5 * (1 / 0.75) / (sqrt(1 / 0.4375) + 0.5)
    {OFFLOAD_ADAMW,
     kAdamW,
     2,
     1.0f,
     {0.35f, 1.0f, 1.0f},
     {0.2625f - 0.3313687f, 1.0f, 1.0f},
     1e-7f},
    // 4 - 0.5 * (1 / (1 + 1) + 0.5 * 4); without decay where the update leads away from zero
    {OFFLOAD_ADAMW, kCautious, 1, 1.0f, {4.0f}, {2.75f, 1.0f, 1.0f}},
    {OFFLOAD_ADAMW, kCautious, 1, -1.0f, {4.0f}, {4.25f, -1.0f, 1.0f}},
    {OFFLOAD_ADAMW, kCautious, 1, 1.0f, {-4.0f}, {-4.25f, 1.0f, 1.0f}},
    {OFFLOAD_ADAMW, kCautious, 1, -1.0f, {-4.0f}, {-2.75f, -1.0f, 1.0f}},
    // No update, so decay: 4 - 0.5 * 0.5 * 4
    {OFFLOAD_ADAMW, kCautious, 1, 0.0f, {4.0f}, {3.0f}},
    {OFFLOAD_ADAMW, kCautious, 1, 1.0f, {0.0f}, {-0.25f, 1.0f, 1.0f}},
    // Signs that differ count, however small the product.
    {OFFLOAD_ADAMW, kCautious, 1, -kTiny, {kTiny}, {kTiny + 0.5f * kTiny, -kTiny}},
    {OFFLOAD_ADAMW, kCautious, 1, kTiny, {kTiny}, {kTiny - 0.5f * kTiny - 0.25f * kTiny, kTiny}},
    // 2 - 0.5 * 2 / (2 + 2), 1.75 - 0.5 * (1.5 / 0.75) / (sqrt(1.75 / 0.4375) + 2); moments of
    // grad + 0.5 * weight = 2
    {OFFLOAD_ADAM, kAdam, 1, 1.0f, {2.0f}, {1.75f, 1.0f, 1.0f}},
    {OFFLOAD_ADAM, kAdam, 2, 1.125f, {1.75f, 1.0f, 1.0f}, {1.5f, 1.5f, 1.75f}},
    {OFFLOAD_SGD, kMomentum, 1, 1.0f, {4.0f}, {3.5f, 1.0f}},
    {OFFLOAD_SGD, kMomentum, 2, 2.0f, {3.5f, 1.0f}, {2.75f, 1.5f}},
    // 4 - 0.5 * (1 + 0.5 * 1), 3.25 - 0.5 * (2 + 0.5 * 2.5)
    {OFFLOAD_SGD, kNesterov, 1, 1.0f, {4.0f}, {3.25f, 1.0f}},
    {OFFLOAD_SGD, kNesterov, 2, 2.0f, {3.25f, 1.0f}, {1.625f, 2.5f}},
    // 4 - 0.5 * (1 + 0.5 * 4), 2.5 - 0.5 * (-2 + 0.5 * 2.5)
    {OFFLOAD_SGD, kPlain, 1, 1.0f, {4.0f}, {2.5f}},
    {OFFLOAD_SGD, kMaximize, 2, 2.0f, {2.5f}, {2.875f}},
    // 4 - 0.25 * (1 + 0.5 * 4), 3.25 - 0.25 * (-1 + 0.5 * 3.25), and 0.5 * -0.0625 + 0.5 * 0.0625,
    // which has no sign
    {OFFLOAD_LION, kLion, 1, 1.0f, {4.0f}, {3.25f, 0.25f}},
    {OFFLOAD_LION, kLion, 2, -1.0f, {3.25f, 0.25f}, {3.09375f, -0.0625f}},
    {OFFLOAD_LION, kLionNoDecay, 3, 0.0625f, {3.09375f, -0.0625f}, {3.09375f, -0.03125f}},
    // As Lion; in the third step the moment, 0.75 * -0.3125 + 0.25 * 0.9375, has no sign
    {OFFLOAD_SIGNUM, kSignum, 1, 1.0f, {4.0f}, {3.25f, 0.25f}},
    {OFFLOAD_SIGNUM, kSignum, 2, -2.0f, {3.25f, 0.25f}, {3.09375f, -0.3125f}},
    {OFFLOAD_SIGNUM, kSignumNoDecay, 3, 0.9375f, {3.09375f, -0.3125f}, {3.09375f, 0.0f}},
    {OFFLOAD_SIGNUM, kSignSgd, 4, -1e-30f, {3.09375f}, {3.34375f, -1e-30f}},
    // 4 - 0.5 * 3 / (3 + 3), 3.75 - 0.25 * 4 / (5 + 3)
    {OFFLOAD_ADAGRAD, kAdagrad, 1, 3.0f, {4.0f}, {3.75f, 9.0f}},
    {OFFLOAD_ADAGRAD, kAdagrad, 2, 4.0f, {3.75f, 9.0f}, {3.625f, 25.0f}},
};

TEST(ByHand, StepsAreWhatTheTableSays) {
  for (const HandRow& row : kByHand) {
    SCOPED_TRACE(testing::Message() << AlgorithmOf(row.algorithm)->name << ", step " << row.step
                                    << ", grad " << row.grad << ", weight " << row.before.weight);
    Param param = row.before;
    Step(ReferenceKernels(), row.algorithm, row.group, row.step, row.grad, param);
    EXPECT_NEAR(param.weight, row.after.weight, row.within);
    EXPECT_EQ(param.moment0, row.after.moment0);
    EXPECT_EQ(param.moment1, row.after.moment1);
  }
}

// If the caller has guaranteed that gradients are finite and one is NaN, the weights become NaN.
TEST(ByHand, SignumKeepsNan) {
  const auto expect_nan = [&](const KernelTable& table) {
    Param param = {.weight = 4.0f};
    Step(table, OFFLOAD_SIGNUM, kSignumNoDecay, 1, std::numeric_limits<float>::quiet_NaN(), param);
    EXPECT_TRUE(std::isnan(param.moment0)) << table.isa;
    EXPECT_TRUE(std::isnan(param.weight)) << table.isa;
  };
  expect_nan(ReferenceKernels());
  for (const KernelTable* table : SimdKernels()) expect_nan(*table);
}

// ----------------------------------------------------------------- a thousand steps in double

// The textbook: each algorithm as its paper and PyTorch's documentation write it.
class Textbook {
 public:
  Textbook(int32_t algorithm, const offload_group_t& group, uint64_t count)
      : algorithm_(algorithm), group_(group), first_(count, 0.0), second_(count, 0.0) {}

  // What step t subtracts from weight i.
  double Update(uint64_t i, uint64_t t, double grad, double weight) {
    const offload_group_t& o = group_;
    double g = o.maximize ? -grad : grad;
    const bool decoupled =
        algorithm_ == OFFLOAD_ADAMW || algorithm_ == OFFLOAD_LION || algorithm_ == OFFLOAD_SIGNUM;
    const double decay = decoupled ? o.lr * o.weight_decay * weight : 0.0;
    if (!decoupled) g += o.weight_decay * weight;
    double& m = first_[i];
    double& v = second_[i];
    switch (algorithm_) {
      case OFFLOAD_ADAMW:
      case OFFLOAD_ADAM: {
        m = o.beta1 * m + (1 - o.beta1) * g;
        v = o.beta2 * v + (1 - o.beta2) * g * g;
        const double corrected_m = m / (1 - std::pow(o.beta1, t));
        const double corrected_v = v / (1 - std::pow(o.beta2, t));
        const double u = corrected_m / (std::sqrt(corrected_v) + o.eps);
        const bool decays = o.cautious_weight_decay == 0 || u * weight >= 0;
        return o.lr * u + (decays ? decay : 0.0);
      }
      case OFFLOAD_SGD: {
        if (o.momentum == 0) return o.lr * g;
        m = t == 1 ? g : o.momentum * m + (1 - o.dampening) * g;
        return o.lr * (o.nesterov ? g + o.momentum * m : m);
      }
      case OFFLOAD_LION: {
        const double c = o.beta1 * m + (1 - o.beta1) * g;
        m = o.beta2 * m + (1 - o.beta2) * g;
        return o.lr * ((c > 0) - (c < 0)) + decay;
      }
      case OFFLOAD_SIGNUM: {
        m = o.momentum * m + (1 - o.momentum) * g;
        return o.lr * ((m > 0) - (m < 0)) + decay;
      }
      default: {
        m += g * g;
        const double lr = o.lr / (1 + static_cast<double>(t - 1) * o.lr_decay);
        return lr * g / (std::sqrt(m) + o.eps);
      }
    }
  }

 private:
  int32_t algorithm_;
  offload_group_t group_;
  std::vector<double> first_;
  std::vector<double> second_;
};

double RelativeRms(const std::vector<double>& got, const std::vector<double>& expected) {
  double error = 0.0;
  double size = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += (got[i] - expected[i]) * (got[i] - expected[i]);
    size += expected[i] * expected[i];
  }
  return std::sqrt(error / size);
}

// Weights are set to a small value before each step, so that the update can be read with little
// rounding, while the moments continue.
void ExpectThousandSteps(int32_t algorithm, const offload_group_t& group,
                         const KernelTable& kernels) {
  constexpr uint64_t kCount = 499;
  constexpr uint64_t kSteps = 1000;
  Random random(2024);
  std::vector<double> signal(kCount);
  std::vector<float> start(kCount);
  for (uint64_t i = 0; i < kCount; ++i) {
    signal[i] = 0.05 * random.SignedUnit();  // gradients are mostly noise
    start[i] = static_cast<float>(0.02 * random.SignedUnit());
  }
  Textbook textbook(algorithm, group, kCount);
  std::vector<float> grad(kCount), weight(kCount), moment0(kCount, 0.0f), moment1(kCount, 0.0f);
  std::vector<double> total(kCount, 0.0), expected_total(kCount, 0.0);
  std::vector<double> late, expected_late;
  const Rule rule = RuleOfStep(algorithm, RuleOf(algorithm, group.momentum), group);
  for (uint64_t t = 1; t <= kSteps; ++t) {
    for (uint64_t i = 0; i < kCount; ++i) {
      grad[i] = static_cast<float>(std::ldexp(signal[i] + random.Noise(), -6));
    }
    weight = start;
    const UpdateSpan span = {grad.data(),    weight.data(),  weight.data(),
                             moment0.data(), moment1.data(), kCount};
    kernels.Update(rule, OFFLOAD_FP32, OFFLOAD_FP32)(MakeCoefficients(algorithm, group, t), span);
    for (uint64_t i = 0; i < kCount; ++i) {
      const double got = static_cast<double>(start[i]) - static_cast<double>(weight[i]);
      const double expected = textbook.Update(i, t, grad[i], start[i]);
      total[i] += got;
      expected_total[i] += expected;
      if (t > kSteps - 10) {
        late.push_back(got);
        expected_late.push_back(expected);
      }
    }
  }
  EXPECT_LE(RelativeRms(total, expected_total), 1e-5) << kernels.isa;
  EXPECT_LE(RelativeRms(late, expected_late), 1e-5) << kernels.isa;
}

struct TextbookRow {
  int32_t algorithm;
  offload_group_t group;
};

const TextbookRow kThousandSteps[] = {
    {OFFLOAD_ADAMW, {.lr = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1}},
    {OFFLOAD_ADAMW,
     {.maximize = 1, .lr = 0.01, .beta1 = 0.4, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1}},
    {OFFLOAD_ADAMW,
     {.maximize = 1,
      .cautious_weight_decay = 1,
      .lr = 0.01,
      .beta1 = 0.4,
      .beta2 = 0.95,
      .eps = 1e-8,
      .weight_decay = 10.0}},
    {OFFLOAD_ADAM, {.lr = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-3, .weight_decay = 0.1}},
    {OFFLOAD_SGD, {.lr = 1.0, .weight_decay = 0.1}},
    {OFFLOAD_SGD, {.lr = 1.0, .weight_decay = 0.1, .momentum = 0.9, .dampening = 0.3}},
    {OFFLOAD_SGD, {.nesterov = 1, .lr = 1.0, .weight_decay = 0.1, .momentum = 0.9}},
    {OFFLOAD_LION, {.lr = 0.01, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1}},
    {OFFLOAD_SIGNUM, {.lr = 0.01, .weight_decay = 0.1, .momentum = 0.9}},
    {OFFLOAD_SIGNUM, {.maximize = 1, .lr = 0.01, .weight_decay = 0.1, .momentum = 0.4}},
    {OFFLOAD_ADAGRAD, {.lr = 0.1, .eps = 1e-10, .weight_decay = 0.1, .lr_decay = 0.001}},
};

TEST(ThousandSteps, FollowTheTextbook) {
  for (size_t i = 0; i < std::size(kThousandSteps); ++i) {
    const auto& [algorithm, group] = kThousandSteps[i];
    SCOPED_TRACE(testing::Message() << AlgorithmOf(algorithm)->name << ", row " << i);
    ExpectThousandSteps(algorithm, group, ReferenceKernels());
    for (const KernelTable* table : SimdKernels()) ExpectThousandSteps(algorithm, group, *table);
  }
}

// torch.optim.Muon's "original" and "match_rms_adamw": the learning rate follows the shape, and
// what a step decays is lr * weight_decay whatever the shape is.
TEST(Muon, AMatrixScalesTheLearningRateAndNotTheDecay) {
  struct Case {
    uint64_t rows, cols;
    double update_rms, scale;
  };
  constexpr Case kCases[] = {{100, 100, 0, 1}, {400, 100, 0, 2},     {100, 400, 0, 1},
                             {1, 1, 0, 1},     {100, 400, 0.2, 4.0}, {400, 9, 0.5, 10.0}};
  for (const Case& one : kCases) {
    offload_group_t group{.lr = 0.02, .eps = 1e-7, .weight_decay = 0.1, .momentum = 0.95};
    group.update_rms = one.update_rms;
    Coefficients c = MakeCoefficients(OFFLOAD_MUON, group, 1);
    FitToMatrix(group, one.rows, one.cols, c);
    SCOPED_TRACE(testing::Message() << one.rows << " x " << one.cols << ", " << one.update_rms);
    EXPECT_EQ(c.step_size, static_cast<float>(0.02 * one.scale));
    EXPECT_NEAR(double{c.step_size} * c.l2_decay, 0.02 * 0.1, 1e-9);
    EXPECT_EQ(c.keep0, 0.95f);
    EXPECT_EQ(c.weight0, static_cast<float>(1.0 - 0.95));
    // With lr 0 no weight changes, and nothing becomes NaN.
    group.lr = 0;
    FitToMatrix(group, one.rows, one.cols, c);
    EXPECT_EQ(c.step_size, 0.0f);
    EXPECT_NEAR(c.l2_decay * one.scale, 0.1, 1e-7);
  }
}

}  // namespace
}  // namespace hybridopt
