// The updates of 1,000 steps against a straightforward optimizer in float64, with PyTorch's
// formulas (Lion: its paper's) as they are written there.
#include <gtest/gtest.h>

#include <cmath>
#include <ostream>

#include "rig.h"

namespace hybridopt {
namespace {

constexpr size_t kSteps = 1000;
constexpr uint64_t kCount = 193;

class Float64Optimizer {
 public:
  Float64Optimizer(int32_t algorithm, const offload_group_t& group, std::vector<double> params)
      : params(std::move(params)),
        algorithm_(algorithm),
        group_(group),
        first_(this->params.size(), group.initial_accumulator_value),
        second_(this->params.size(), 0.0) {}

  // `grad` as the caller gave it; the unscaled norm is clipped first.
  void Step(const std::vector<double>& grad, double grad_scale, double grad_norm_max) {
    step_ += 1;
    double norm = 0;
    for (double g : grad) norm += (g / grad_scale) * (g / grad_scale);
    norm = std::sqrt(norm);
    const double clip = grad_norm_max > 0 ? std::min(1.0, grad_norm_max / (norm + 1e-6)) : 1.0;
    for (size_t i = 0; i < grad.size(); ++i) {
      const double g = grad[i] / grad_scale * clip;
      UpdateElement(i, group_.maximize ? -g : g);
    }
  }

  std::vector<double> params;

 private:
  void UpdateElement(size_t i, double g) {
    switch (algorithm_) {
      case OFFLOAD_ADAMW:
        return AdamW(i, g);
      case OFFLOAD_ADAM:
        params[i] -= group_.lr * AdamDirection(i, g + group_.weight_decay * params[i]);
        return;
      case OFFLOAD_SGD:
        return Sgd(i, g + group_.weight_decay * params[i]);
      case OFFLOAD_LION:
        return Lion(i, g);
      case OFFLOAD_SIGNUM:
        return Signum(i, g);
      default:
        return Adagrad(i, g + group_.weight_decay * params[i]);
    }
  }

  void AdamW(size_t i, double g) {
    const double u = AdamDirection(i, g), x = params[i];
    const bool decays = group_.cautious_weight_decay == 0 || u * x >= 0;
    params[i] -= group_.lr * (u + (decays ? group_.weight_decay * x : 0));
  }

  double AdamDirection(size_t i, double g) {
    first_[i] = group_.beta1 * first_[i] + (1 - group_.beta1) * g;
    second_[i] = group_.beta2 * second_[i] + (1 - group_.beta2) * g * g;
    const double mean = first_[i] / (1 - std::pow(group_.beta1, step_));
    const double square = second_[i] / (1 - std::pow(group_.beta2, step_));
    return mean / (std::sqrt(square) + group_.eps);
  }

  void Sgd(size_t i, double g) {
    if (group_.momentum > 0) {
      first_[i] = step_ == 1 ? g : group_.momentum * first_[i] + (1 - group_.dampening) * g;
      g = group_.nesterov ? g + group_.momentum * first_[i] : first_[i];
    }
    params[i] -= group_.lr * g;
  }

  void Lion(size_t i, double g) {
    const double mix = group_.beta1 * first_[i] + (1 - group_.beta1) * g;
    const double sign = mix > 0 ? 1 : mix < 0 ? -1 : 0;
    params[i] -= group_.lr * (sign + group_.weight_decay * params[i]);
    first_[i] = group_.beta2 * first_[i] + (1 - group_.beta2) * g;
  }

  void Signum(size_t i, double g) {
    first_[i] = group_.momentum * first_[i] + (1 - group_.momentum) * g;
    const double sign = first_[i] > 0 ? 1 : first_[i] < 0 ? -1 : 0;
    params[i] -= group_.lr * (sign + group_.weight_decay * params[i]);
  }

  void Adagrad(size_t i, double g) {
    first_[i] += g * g;
    const double lr = group_.lr / (1 + (step_ - 1) * group_.lr_decay);
    params[i] -= lr * g / (std::sqrt(first_[i]) + group_.eps);
  }

  const int32_t algorithm_;
  const offload_group_t group_;
  double step_ = 0;
  std::vector<double> first_;   // exp_avg, momentum_buffer or sum
  std::vector<double> second_;  // exp_avg_sq
};

struct Case {
  std::string name;
  int32_t algorithm;
  offload_group_t group;
};

offload_group_t Group(double lr, double weight_decay) {
  auto group = Make<offload_group_t>();
  group.lr = lr;
  group.weight_decay = weight_decay;
  return group;
}

offload_group_t AdamGroup(double lr, double weight_decay, double beta1, double beta2, double eps) {
  offload_group_t group = Group(lr, weight_decay);
  group.beta1 = beta1;
  group.beta2 = beta2;
  group.eps = eps;
  return group;
}

offload_group_t SgdGroup(double momentum, double dampening, int32_t nesterov) {
  offload_group_t group = Group(1e-2, 1e-2);
  group.momentum = momentum;
  group.dampening = dampening;
  group.nesterov = nesterov;
  return group;
}

std::vector<Case> Cases() {
  offload_group_t maximize = AdamGroup(1e-3, 0.1, 0.9, 0.95, 1e-8);
  maximize.maximize = 1;
  offload_group_t cautious = AdamGroup(1e-3, 1.0, 0.9, 0.999, 1e-8);
  cautious.cautious_weight_decay = 1;
  offload_group_t adagrad = Group(1e-2, 1e-3);
  adagrad.eps = 1e-10;
  adagrad.lr_decay = 1e-3;
  adagrad.initial_accumulator_value = 0.1;
  offload_group_t signum = Group(1e-4, 0.1);
  signum.momentum = 0.9;
  return {{"AdamW", OFFLOAD_ADAMW, AdamGroup(1e-3, 0.1, 0.9, 0.999, 1e-8)},
          {"AdamWMaximize", OFFLOAD_ADAMW, maximize},
          {"AdamWCautious", OFFLOAD_ADAMW, cautious},
          {"Adam", OFFLOAD_ADAM, AdamGroup(1e-3, 1e-2, 0.9, 0.999, 1e-8)},
          {"SgdPlain", OFFLOAD_SGD, SgdGroup(0, 0, 0)},
          {"SgdMomentum", OFFLOAD_SGD, SgdGroup(0.9, 0.1, 0)},
          {"SgdNesterov", OFFLOAD_SGD, SgdGroup(0.9, 0, 1)},
          {"Lion", OFFLOAD_LION, AdamGroup(1e-4, 0.1, 0.9, 0.99, 0)},
          {"Adagrad", OFFLOAD_ADAGRAD, adagrad},
          {"Signum", OFFLOAD_SIGNUM, signum}};
}

// A drift that differs from element to element and changes its direction, with noise. Without the
// change masters would grow until the test measured only the rounding of the master itself, which
// every optimizer with fp32 masters has: 1.2e-5 of an update of AdamW at a master of 0.5.
Bytes NoisyGrad(int32_t dtype, size_t step, double scale, Random& random) {
  Bytes grad(kCount * DtypeBytes(dtype));
  for (uint64_t i = 0; i < kCount; ++i) {
    const double drift =
        0.1 * std::sin(0.7 * static_cast<double>(i) + 0.1 * static_cast<double>(step));
    const double noise = 0.4 * (random.Unit() + random.Unit() + random.Unit() - 1.5);
    PutElement(grad, dtype, i, BitsOf(dtype, static_cast<float>(scale * (drift + noise))));
  }
  return grad;
}

std::vector<double> ToDouble(int32_t dtype, const Bytes& array) {
  std::vector<float> widened(kCount);
  ReferenceKernels().ToFp32(dtype)(array.data(), kCount, widened.data());
  return {widened.begin(), widened.end()};
}

Problem NoisyProblem(const Case& test_case, int32_t dtype, int32_t grad_dtype) {
  Random random(7);
  Problem problem;
  problem.algorithm = test_case.algorithm;
  problem.groups = {test_case.group};
  problem.params = {{dtype, grad_dtype, OFFLOAD_PLACE_AUTO, 0, kCount}};
  Bytes initial(kCount * DtypeBytes(dtype));
  for (uint64_t i = 0; i < kCount; ++i)
    PutElement(initial, dtype, i, BitsOf(dtype, static_cast<float>(random.Between(-0.01, 0.01))));
  problem.initial = {initial};
  for (size_t i = 0; i < kSteps; ++i) {
    StepInput input;
    input.groups = problem.groups;
    input.grad_scale = i % 2 == 0 ? 0 : 1000;
    input.grad_norm_max = i % 3 == 0 ? 2 : 0;
    input.grads = {NoisyGrad(grad_dtype, i, i % 2 == 0 ? 1 : 1000, random)};
    problem.steps.push_back(std::move(input));
  }
  return problem;
}

std::vector<float> Masters(const Rig& rig) {
  auto view = Make<offload_state_view_t>();
  MUST(offload_optimizer_state(rig.handle(), 0, OFFLOAD_STATE_MASTER, &view));
  std::vector<float> masters(view.host_count);
  std::memcpy(masters.data(), view.host_data, view.host_count * sizeof(float));
  return masters;
}

// The relative RMS error of all updates of all steps.
double UpdateError(const Case& test_case, int32_t dtype, int32_t grad_dtype) {
  const Problem problem = NoisyProblem(test_case, dtype, grad_dtype);
  const TestContext context(ContextSetting{});
  Rig rig(context, problem, {});
  Float64Optimizer exact(problem.algorithm, problem.groups[0], ToDouble(dtype, problem.initial[0]));
  std::vector<float> before = Masters(rig);
  double error = 0;
  double size = 0;
  for (const StepInput& input : problem.steps) {
    const std::vector<double> exact_before = exact.params;
    rig.Step(input);
    exact.Step(ToDouble(grad_dtype, *input.grads[0]), input.grad_scale == 0 ? 1 : input.grad_scale,
               input.grad_norm_max);
    const std::vector<float> after = Masters(rig);
    for (uint64_t i = 0; i < kCount; ++i) {
      const double expected = exact.params[i] - exact_before[i];
      const double got = double{after[i]} - double{before[i]};
      error += (got - expected) * (got - expected);
      size += expected * expected;
    }
    before = after;
  }
  EXPECT_GT(size, 0);
  return std::sqrt(error / size);
}

void PrintTo(const Case& test_case, std::ostream* out) { *out << test_case.name; }

class Float64Test : public testing::TestWithParam<Case> {};

TEST_P(Float64Test, UpdatesOfAThousandSteps) {
  const int32_t pairs[][2] = {{OFFLOAD_FP32, OFFLOAD_FP32},
                              {OFFLOAD_BF16, OFFLOAD_BF16},
                              {OFFLOAD_BF16, OFFLOAD_FP32},
                              {OFFLOAD_FP16, OFFLOAD_FP16}};
  for (const auto& [dtype, grad_dtype] : pairs) {
    const double error = UpdateError(GetParam(), dtype, grad_dtype);
    EXPECT_LE(error, 1e-5) << DtypeName(dtype) << " param, " << DtypeName(grad_dtype) << " grad";
  }
}

INSTANTIATE_TEST_SUITE_P(Algorithms, Float64Test, testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace hybridopt
