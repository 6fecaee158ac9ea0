// Coefficients and formulas: against values worked out by hand, and the updates of a thousand
// steps against the textbook formulas in double.
#include "kernels/coefficients.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "../../random.h"
#include "kernels/kernels.h"

namespace hybridopt {
namespace {

offload_group_t AdamGroup() {
  offload_group_t group = {};
  group.struct_size = sizeof(group);
  group.lr = 0.1;
  group.beta1 = 0.9;
  group.beta2 = 0.99;
  group.eps = 1e-8;
  group.weight_decay = 0.3;
  return group;
}

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

TEST(MakeCoefficients, AdamW) {
  const Coefficients first = MakeCoefficients(OFFLOAD_ADAMW, AdamGroup(), 1);
  EXPECT_EQ(first.grad_factor, 1.0f);
  EXPECT_EQ(first.step_size, 1.0f);                       // 0.1 / (1 - 0.9)
  EXPECT_EQ(first.inverse_sqrt_bias_correction2, 10.0f);  // 1 / sqrt(1 - 0.99)
  EXPECT_EQ(first.keep0, 0.9f);
  EXPECT_EQ(first.weight0, 0.1f);
  EXPECT_EQ(first.keep1, 0.99f);
  EXPECT_EQ(first.weight1, 0.01f);
  EXPECT_EQ(first.eps, 1e-8f);
  EXPECT_EQ(first.decoupled_decay, 0.03f);
  EXPECT_EQ(first.l2_decay, 0.0f);

  const Coefficients second = MakeCoefficients(OFFLOAD_ADAMW, AdamGroup(), 2);
  EXPECT_EQ(second.step_size, 0.526315789473684f);                     // 0.1 / 0.19
  EXPECT_EQ(second.inverse_sqrt_bias_correction2, 7.08881205008336f);  // 1 / sqrt(0.0199)

  const Coefficients late = MakeCoefficients(OFFLOAD_ADAMW, AdamGroup(), 1u << 31);
  EXPECT_EQ(late.step_size, 0.1f);
  EXPECT_EQ(late.inverse_sqrt_bias_correction2, 1.0f);
}

TEST(MakeCoefficients, AdamDecaysThroughTheGradient) {
  const Coefficients c = MakeCoefficients(OFFLOAD_ADAM, AdamGroup(), 1);
  EXPECT_EQ(c.l2_decay, 0.3f);
  EXPECT_EQ(c.decoupled_decay, 0.0f);
  EXPECT_EQ(c.step_size, 1.0f);
}

TEST(MakeCoefficients, BetaZeroNeedsNoCorrection) {
  offload_group_t group = AdamGroup();
  group.beta1 = group.beta2 = 0.0;
  for (uint64_t step : {1, 2, 1000}) {
    const Coefficients c = MakeCoefficients(OFFLOAD_ADAMW, group, step);
    EXPECT_EQ(c.step_size, 0.1f);
    EXPECT_EQ(c.inverse_sqrt_bias_correction2, 1.0f);
    EXPECT_EQ(c.keep0, 0.0f);
    EXPECT_EQ(c.weight0, 1.0f);
  }
}

TEST(MakeCoefficients, BiasCorrectionIsExactForEveryBetaAndStep) {
  offload_group_t group = AdamGroup();
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
  offload_group_t group = AdamGroup();
  group.eps = 1e-300;
  EXPECT_GT(MakeCoefficients(OFFLOAD_ADAMW, group, 1).eps, 0.0f);
  EXPECT_GT(MakeCoefficients(OFFLOAD_ADAGRAD, group, 1).eps, 0.0f);
}

TEST(MakeCoefficients, Sgd) {
  offload_group_t group = {};
  group.lr = 0.1;
  group.weight_decay = 0.2;
  group.momentum = 0.9;
  group.dampening = 0.25;
  const Coefficients first = MakeCoefficients(OFFLOAD_SGD, group, 1);
  EXPECT_EQ(first.step_size, 0.1f);
  EXPECT_EQ(first.l2_decay, 0.2f);
  EXPECT_EQ(first.keep0, 0.0f);
  EXPECT_EQ(first.weight0, 1.0f);
  const Coefficients second = MakeCoefficients(OFFLOAD_SGD, group, 2);
  EXPECT_EQ(second.keep0, 0.9f);
  EXPECT_EQ(second.weight0, 0.75f);
  EXPECT_EQ(second.nesterov, 0);
  EXPECT_EQ(second.nesterov_momentum, 0.0f);

  group.dampening = 0.0;
  group.nesterov = 1;
  group.maximize = 1;
  const Coefficients nesterov = MakeCoefficients(OFFLOAD_SGD, group, 2);
  EXPECT_EQ(nesterov.nesterov, 1);
  EXPECT_EQ(nesterov.nesterov_momentum, 0.9f);
  EXPECT_EQ(nesterov.weight0, 1.0f);
  EXPECT_EQ(nesterov.grad_factor, -1.0f);
}

TEST(MakeCoefficients, Lion) {
  const Coefficients c = MakeCoefficients(OFFLOAD_LION, AdamGroup(), 5);
  EXPECT_EQ(c.step_size, 0.1f);
  EXPECT_EQ(c.decoupled_decay, 0.03f);
  EXPECT_EQ(c.l2_decay, 0.0f);
  EXPECT_EQ(c.keep0, 0.9f);
  EXPECT_EQ(c.weight0, 0.1f);
  EXPECT_EQ(c.keep1, 0.99f);
  EXPECT_EQ(c.weight1, 0.01f);
}

TEST(MakeCoefficients, Signum) {
  offload_group_t group = {};
  group.lr = 0.1;
  group.momentum = 0.9;
  group.weight_decay = 0.3;
  const Coefficients c = MakeCoefficients(OFFLOAD_SIGNUM, group, 5);
  EXPECT_EQ(c.step_size, 0.1f);
  EXPECT_EQ(c.decoupled_decay, 0.03f);
  EXPECT_EQ(c.l2_decay, 0.0f);
  EXPECT_EQ(c.keep0, 0.9f);
  EXPECT_EQ(c.weight0, 0.1f);
}

TEST(MakeCoefficients, Adagrad) {
  offload_group_t group = {};
  group.lr = 0.6;
  group.lr_decay = 0.5;
  group.eps = 1e-10;
  group.weight_decay = 0.125;
  EXPECT_EQ(MakeCoefficients(OFFLOAD_ADAGRAD, group, 1).step_size, 0.6f);
  const Coefficients c = MakeCoefficients(OFFLOAD_ADAGRAD, group, 5);
  EXPECT_EQ(c.step_size, 0.2f);  // 0.6 / (1 + 4 * 0.5)
  EXPECT_EQ(c.l2_decay, 0.125f);
  EXPECT_EQ(c.eps, 1e-10f);
}

// ------------------------------------------------------------------------ two steps by hand

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

TEST(ByHand, AdamW) {
  offload_group_t group = {};
  group.lr = 0.5;
  group.beta1 = 0.5;
  group.beta2 = 0.75;
  group.eps = 0.5;
  group.weight_decay = 0.5;
  Param param = {.weight = 1.0f};
  Step(ReferenceKernels(), OFFLOAD_ADAMW, group, 1, 2.0f, param);
  EXPECT_EQ(param.moment0, 1.0f);  // 0.5 * 2
  EXPECT_EQ(param.moment1, 1.0f);  // 0.25 * 4
  // 1 - 0.5 * 0.5 * 1 - 0.5 * (1 / 0.5) / (sqrt(1 / 0.25) + 0.5)
  EXPECT_FLOAT_EQ(param.weight, 0.35f);
  Step(ReferenceKernels(), OFFLOAD_ADAMW, group, 2, 1.0f, param);
  EXPECT_EQ(param.moment0, 1.0f);  // 0.5 * 1 + 0.5 * 1
  EXPECT_EQ(param.moment1, 1.0f);  // 0.75 * 1 + 0.25 * 1
  // 0.35 - 0.25 * 0.35 - 0.5 * (1 / 0.75) / (sqrt(1 / 0.4375) + 0.5)
  EXPECT_NEAR(param.weight, 0.2625 - 0.3313687, 2e-7);
}

TEST(ByHand, AdamWDecaysCautiously) {
  offload_group_t group = {};
  group.lr = 0.5;
  group.eps = 1.0;
  group.weight_decay = 0.5;
  group.cautious_weight_decay = 1;
  const auto stepped = [&](float grad, float weight) {
    Param param = {.weight = weight};
    Step(ReferenceKernels(), OFFLOAD_ADAMW, group, 1, grad, param);
    return param.weight;
  };
  EXPECT_EQ(stepped(1.0f, 4.0f), 2.75f);    // 4 - 0.5 * (1 / (1 + 1) + 0.5 * 4)
  EXPECT_EQ(stepped(-1.0f, 4.0f), 4.25f);   // away from zero: 4 - 0.5 * (-1 / (1 + 1))
  EXPECT_EQ(stepped(1.0f, -4.0f), -4.25f);  // away from zero
  EXPECT_EQ(stepped(-1.0f, -4.0f), -2.75f);
  EXPECT_EQ(stepped(0.0f, 4.0f), 3.0f);  // no update: 4 - 0.5 * 0.5 * 4
  EXPECT_EQ(stepped(1.0f, 0.0f), -0.25f);
  // Signs that differ count, however small the product.
  EXPECT_EQ(stepped(-0x1p-100f, 0x1p-100f), 0x1p-100f - 0.5f * -0x1p-100f);
  EXPECT_EQ(stepped(0x1p-100f, 0x1p-100f), 0x1p-100f - 0.5f * 0x1p-100f - 0.25f * 0x1p-100f);
}

TEST(ByHand, Adam) {
  offload_group_t group = {};
  group.lr = 0.5;
  group.beta1 = 0.5;
  group.beta2 = 0.75;
  group.eps = 2.0;
  group.weight_decay = 0.5;
  Param param = {.weight = 2.0f};
  Step(ReferenceKernels(), OFFLOAD_ADAM, group, 1, 1.0f, param);
  EXPECT_EQ(param.moment0, 1.0f);  // 0.5 * (1 + 0.5 * 2)
  EXPECT_EQ(param.moment1, 1.0f);  // 0.25 * 2^2
  EXPECT_EQ(param.weight, 1.75f);  // 2 - 0.5 * 2 / (2 + 2)
  Step(ReferenceKernels(), OFFLOAD_ADAM, group, 2, 1.125f, param);
  EXPECT_EQ(param.moment0, 1.5f);       // 0.5 * 1 + 0.5 * (1.125 + 0.875)
  EXPECT_EQ(param.moment1, 1.75f);      // 0.75 * 1 + 0.25 * 4
  EXPECT_FLOAT_EQ(param.weight, 1.5f);  // 1.75 - 0.5 * (1.5 / 0.75) / (sqrt(1.75 / 0.4375) + 2)
}

TEST(ByHand, SgdMomentum) {
  offload_group_t group = {};
  group.lr = 0.5;
  group.momentum = 0.5;
  group.dampening = 0.5;
  Param param = {.weight = 4.0f};
  Step(ReferenceKernels(), OFFLOAD_SGD, group, 1, 1.0f, param);
  EXPECT_EQ(param.moment0, 1.0f);
  EXPECT_EQ(param.weight, 3.5f);
  Step(ReferenceKernels(), OFFLOAD_SGD, group, 2, 2.0f, param);
  EXPECT_EQ(param.moment0, 1.5f);  // 0.5 * 1 + 0.5 * 2
  EXPECT_EQ(param.weight, 2.75f);
}

TEST(ByHand, SgdNesterov) {
  offload_group_t group = {};
  group.lr = 0.5;
  group.momentum = 0.5;
  group.nesterov = 1;
  Param param = {.weight = 4.0f};
  Step(ReferenceKernels(), OFFLOAD_SGD, group, 1, 1.0f, param);
  EXPECT_EQ(param.weight, 3.25f);  // 4 - 0.5 * (1 + 0.5 * 1)
  Step(ReferenceKernels(), OFFLOAD_SGD, group, 2, 2.0f, param);
  EXPECT_EQ(param.moment0, 2.5f);   // 0.5 * 1 + 2
  EXPECT_EQ(param.weight, 1.625f);  // 3.25 - 0.5 * (2 + 0.5 * 2.5)
}

TEST(ByHand, SgdPlain) {
  offload_group_t group = {};
  group.lr = 0.5;
  group.weight_decay = 0.5;
  Param param = {.weight = 4.0f};
  Step(ReferenceKernels(), OFFLOAD_SGD, group, 1, 1.0f, param);
  EXPECT_EQ(param.weight, 2.5f);  // 4 - 0.5 * (1 + 0.5 * 4)
  group.maximize = 1;
  Step(ReferenceKernels(), OFFLOAD_SGD, group, 2, 2.0f, param);
  EXPECT_EQ(param.weight, 2.875f);  // 2.5 - 0.5 * (-2 + 0.5 * 2.5)
}

TEST(ByHand, Lion) {
  offload_group_t group = {};
  group.lr = 0.25;
  group.weight_decay = 0.5;
  group.beta1 = 0.5;
  group.beta2 = 0.75;
  Param param = {.weight = 4.0f};
  Step(ReferenceKernels(), OFFLOAD_LION, group, 1, 1.0f, param);
  EXPECT_EQ(param.weight, 3.25f);  // 4 - 0.25 * (1 + 0.5 * 4)
  EXPECT_EQ(param.moment0, 0.25f);
  Step(ReferenceKernels(), OFFLOAD_LION, group, 2, -1.0f, param);
  EXPECT_EQ(param.weight, 3.09375f);   // 3.25 - 0.25 * (-1 + 0.5 * 3.25)
  EXPECT_EQ(param.moment0, -0.0625f);  // 0.75 * 0.25 - 0.25
  group.weight_decay = 0.0;
  Step(ReferenceKernels(), OFFLOAD_LION, group, 3, 0.0625f, param);
  EXPECT_EQ(param.weight, 3.09375f);  // 0.5 * -0.0625 + 0.5 * 0.0625 has no sign
}

TEST(ByHand, Signum) {
  offload_group_t group = {};
  group.lr = 0.25;
  group.weight_decay = 0.5;
  group.momentum = 0.75;
  Param param = {.weight = 4.0f};
  Step(ReferenceKernels(), OFFLOAD_SIGNUM, group, 1, 1.0f, param);
  EXPECT_EQ(param.moment0, 0.25f);
  EXPECT_EQ(param.weight, 3.25f);  // 4 - 0.25 * (1 + 0.5 * 4)
  Step(ReferenceKernels(), OFFLOAD_SIGNUM, group, 2, -2.0f, param);
  EXPECT_EQ(param.moment0, -0.3125f);  // 0.75 * 0.25 - 0.25 * 2
  EXPECT_EQ(param.weight, 3.09375f);   // 3.25 - 0.25 * (-1 + 0.5 * 3.25)
  group.weight_decay = 0.0;
  Step(ReferenceKernels(), OFFLOAD_SIGNUM, group, 3, 0.9375f, param);
  EXPECT_EQ(param.moment0, 0.0f);     // 0.75 * -0.3125 + 0.25 * 0.9375
  EXPECT_EQ(param.weight, 3.09375f);  // which has no sign
  group.momentum = 0.0;               // signSGD
  Step(ReferenceKernels(), OFFLOAD_SIGNUM, group, 4, -1e-30f, param);
  EXPECT_EQ(param.weight, 3.34375f);
}

// Where the caller has vouched for a gradient that is NaN, the weights show it.
TEST(ByHand, SignumKeepsNan) {
  offload_group_t group = {};
  group.lr = 0.25;
  group.momentum = 0.75;
  const auto expect_nan = [&](const KernelTable& table) {
    Param param = {.weight = 4.0f};
    Step(table, OFFLOAD_SIGNUM, group, 1, std::numeric_limits<float>::quiet_NaN(), param);
    EXPECT_TRUE(std::isnan(param.moment0)) << table.isa;
    EXPECT_TRUE(std::isnan(param.weight)) << table.isa;
  };
  expect_nan(ReferenceKernels());
  for (const KernelTable* table : SimdKernels()) expect_nan(*table);
}

TEST(ByHand, Adagrad) {
  offload_group_t group = {};
  group.lr = 0.5;
  group.lr_decay = 1.0;
  group.eps = 3.0;
  Param param = {.weight = 4.0f};
  Step(ReferenceKernels(), OFFLOAD_ADAGRAD, group, 1, 3.0f, param);
  EXPECT_EQ(param.moment0, 9.0f);
  EXPECT_EQ(param.weight, 3.75f);  // 4 - 0.5 * 3 / (3 + 3)
  Step(ReferenceKernels(), OFFLOAD_ADAGRAD, group, 2, 4.0f, param);
  EXPECT_EQ(param.moment0, 25.0f);
  EXPECT_EQ(param.weight, 3.625f);  // 3.75 - 0.25 * 4 / (5 + 3)
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

// Weights are set to a small value before each step, so that the test reads what a step subtracts
// with little rounding while the moments go on.
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

void ExpectThousandSteps(int32_t algorithm, const offload_group_t& group) {
  ExpectThousandSteps(algorithm, group, ReferenceKernels());
  for (const KernelTable* table : SimdKernels()) ExpectThousandSteps(algorithm, group, *table);
}

TEST(ThousandSteps, AdamW) {
  offload_group_t group = {};
  group.lr = 0.01;
  group.beta1 = 0.9;
  group.beta2 = 0.999;
  group.eps = 1e-8;
  group.weight_decay = 0.1;
  ExpectThousandSteps(OFFLOAD_ADAMW, group);
  group.beta1 = 0.4;
  group.beta2 = 0.95;
  group.maximize = 1;
  ExpectThousandSteps(OFFLOAD_ADAMW, group);
  group.weight_decay = 10.0;
  group.cautious_weight_decay = 1;
  ExpectThousandSteps(OFFLOAD_ADAMW, group);
}

TEST(ThousandSteps, Adam) {
  offload_group_t group = {};
  group.lr = 0.01;
  group.beta1 = 0.9;
  group.beta2 = 0.999;
  group.eps = 1e-3;
  group.weight_decay = 0.1;
  ExpectThousandSteps(OFFLOAD_ADAM, group);
}

TEST(ThousandSteps, Sgd) {
  offload_group_t group = {};
  group.lr = 1.0;
  group.weight_decay = 0.1;
  ExpectThousandSteps(OFFLOAD_SGD, group);
  group.momentum = 0.9;
  group.dampening = 0.3;
  ExpectThousandSteps(OFFLOAD_SGD, group);
  group.dampening = 0.0;
  group.nesterov = 1;
  ExpectThousandSteps(OFFLOAD_SGD, group);
}

TEST(ThousandSteps, Lion) {
  offload_group_t group = {};
  group.lr = 0.01;
  group.beta1 = 0.9;
  group.beta2 = 0.99;
  group.weight_decay = 0.1;
  ExpectThousandSteps(OFFLOAD_LION, group);
}

TEST(ThousandSteps, Signum) {
  offload_group_t group = {};
  group.lr = 0.01;
  group.momentum = 0.9;
  group.weight_decay = 0.1;
  ExpectThousandSteps(OFFLOAD_SIGNUM, group);
  group.momentum = 0.4;
  group.maximize = 1;
  ExpectThousandSteps(OFFLOAD_SIGNUM, group);
}

TEST(ThousandSteps, Adagrad) {
  offload_group_t group = {};
  group.lr = 0.1;
  group.lr_decay = 0.001;
  group.eps = 1e-10;
  group.weight_decay = 0.1;
  ExpectThousandSteps(OFFLOAD_ADAGRAD, group);
}

}  // namespace
}  // namespace hybridopt
