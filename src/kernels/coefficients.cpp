#include "kernels/coefficients.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"

namespace hybridopt {
namespace {

// 1 - beta^t, exact to a few ulp for every t and every beta, even near 1. The function works with 1
// - power instead of the powers, by 1 - ab = (1 - a) + a(1 - b), so that no digits cancel. It uses
// only additions and multiplications, so that the bits do not depend on libm.
double OneMinusPower(double beta, uint64_t t) {
  double result = 0.0;         // 1 - beta^(the bits of t so far)
  double factor = 1.0 - beta;  // 1 - beta^(2^bit)
  for (; t != 0; t >>= 1) {
    if (t & 1) result += (1.0 - result) * factor;
    factor += (1.0 - factor) * factor;
  }
  return result;
}

float Round(double value) { return static_cast<float>(value); }

// An eps below the range of fp32 must not become 0: with a zero gradient the result would be 0 / 0,
// a NaN.
float RoundAboveZero(double eps) {
  return std::max(Round(eps), std::numeric_limits<float>::denorm_min());
}

void SetAdamFamily(const offload_group_t& group, uint64_t step, Coefficients& c) {
  c.step_size = Round(group.lr / OneMinusPower(group.beta1, step));
  c.inverse_sqrt_bias_correction2 = Round(1.0 / std::sqrt(OneMinusPower(group.beta2, step)));
  c.keep0 = Round(group.beta1);
  c.weight0 = Round(1.0 - group.beta1);
  c.keep1 = Round(group.beta2);
  c.weight1 = Round(1.0 - group.beta2);
  c.eps = RoundAboveZero(group.eps);
}

}  // namespace

void SetAdamW(const offload_group_t& group, uint64_t step, Coefficients& c) {
  SetAdamFamily(group, step, c);
  c.decoupled_decay = Round(group.lr * group.weight_decay);
}

void SetAdam(const offload_group_t& group, uint64_t step, Coefficients& c) {
  SetAdamFamily(group, step, c);
  c.l2_decay = Round(group.weight_decay);
}

// The first step sets the momentum_buffer to the gradient, without dampening.
void SetSgd(const offload_group_t& group, uint64_t step, Coefficients& c) {
  const bool first = step == 1;
  c.step_size = Round(group.lr);
  c.l2_decay = Round(group.weight_decay);
  c.keep0 = first ? 0.0f : Round(group.momentum);
  c.weight0 = first ? 1.0f : Round(1.0 - group.dampening);
  c.nesterov = group.nesterov;
  c.nesterov_momentum = group.nesterov ? Round(group.momentum) : 0.0f;
}

void SetLion(const offload_group_t& group, uint64_t, Coefficients& c) {
  c.step_size = Round(group.lr);
  c.decoupled_decay = Round(group.lr * group.weight_decay);
  c.keep0 = Round(group.beta1);
  c.weight0 = Round(1.0 - group.beta1);
  c.keep1 = Round(group.beta2);
  c.weight1 = Round(1.0 - group.beta2);
}

void SetAdagrad(const offload_group_t& group, uint64_t step, Coefficients& c) {
  const double past_steps = static_cast<double>(step - 1);
  c.step_size = Round(group.lr / (1.0 + past_steps * group.lr_decay));
  c.l2_decay = Round(group.weight_decay);
  c.eps = RoundAboveZero(group.eps);
}

void SetSignum(const offload_group_t& group, uint64_t, Coefficients& c) {
  c.step_size = Round(group.lr);
  c.decoupled_decay = Round(group.lr * group.weight_decay);
  c.keep0 = Round(group.momentum);
  c.weight0 = Round(1.0 - group.momentum);
}

// Before FitToMatrix.
void SetMuon(const offload_group_t& group, uint64_t, Coefficients& c) {
  c.step_size = Round(group.lr);
  c.l2_decay = Round(group.weight_decay);
  c.keep0 = Round(group.momentum);
  c.weight0 = Round(1.0 - group.momentum);
  c.eps = RoundAboveZero(group.eps);
  c.nesterov = group.nesterov;
}

void FitToMatrix(const offload_group_t& group, uint64_t rows, uint64_t cols, Coefficients& c) {
  const auto height = static_cast<double>(rows), width = static_cast<double>(cols);
  const double scale = group.update_rms > 0 ? group.update_rms * std::sqrt(std::max(height, width))
                                            : std::sqrt(std::max(1.0, height / width));
  c.step_size = Round(group.lr * scale);
  c.l2_decay = Round(group.weight_decay / scale);
}

Coefficients MakeCoefficients(int32_t algorithm, const offload_group_t& group, uint64_t step) {
  HYBRIDOPT_CHECK(step >= 1);
  Coefficients c = {};
  c.grad_factor = group.maximize ? -1.0f : 1.0f;
  AlgorithmOf(algorithm)->set_coefficients(group, step, c);
  return c;
}

}  // namespace hybridopt
