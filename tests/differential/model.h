// Model: computes the expected values in the simplest way: whole params, one after the other, in
// plain loops over the scalar specification. It shares nothing else with the library: it has its
// own tree for the norm, its own step counts and its own skip.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/coefficients.h"
#include "kernels/kernels.h"
#include "kernels/stochastic_rounding.h"
#include "problem.h"

namespace hybridopt {

class Model {
 public:
  struct Param {
    Bytes data;
    std::vector<float> master;
    std::vector<float> moment0;
    std::vector<float> moment1;
    uint64_t step_count = 0;
  };

  explicit Model(const Problem& problem) : problem_(&problem) {
    for (size_t id = 0; id < problem.params.size(); ++id) {
      const ParamSpec& spec = problem.params[id];
      Param param;
      param.data = problem.initial[id];
      param.master = Widen(spec.dtype, spec.count, param.data);
      const double first = problem.groups[spec.group].initial_accumulator_value;
      const auto first_sum = static_cast<float>(first);
      param.moment0.assign(spec.count,
                           problem.state.bf16() ? Bf16ToFp32(Fp32ToBf16(first_sum)) : first_sum);
      param.moment1.assign(spec.count, 0.0f);
      params.push_back(std::move(param));
    }
  }

  void Step(const StepInput& input) {
    const double scale = input.grad_scale == 0 ? 1.0 : input.grad_scale;
    const bool vouched = (input.flags & OFFLOAD_STEP_ASSUME_FINITE) != 0;
    verdict = vouched && input.grad_norm_max == 0
                  ? AssumeFinite(scale)
                  : Decide(SumSquares(input), scale, input.grad_norm_max);
    if (verdict.skip != 0) {
      steps_skipped += 1;
      return;
    }
    steps_applied += 1;
    for (size_t id = 0; id < params.size(); ++id)
      if (input.grads[id].has_value() && problem_->params[id].count > 0) Update(id, input);
  }

  // The effect of offload_optimizer_refresh_masters on a param. If a param is one half of its
  // master, no code can tell whether the param has been written.
  void Refresh(size_t id) {
    if (is_half(id) || problem_->params[id].dtype == OFFLOAD_FP32)
      params[id].master =
          Widen(problem_->params[id].dtype, problem_->params[id].count, params[id].data);
    else
      Follow(id);
  }

  std::vector<Param> params;
  uint64_t steps_applied = 0;
  uint64_t steps_skipped = 0;
  Verdict verdict{};  // of the last step

 private:
  static std::vector<float> Widen(int32_t dtype, uint64_t count, const Bytes& array) {
    std::vector<float> widened(count);
    ReferenceKernels().ToFp32(dtype)(array.data(), count, widened.data());
    return widened;
  }

  double SumSquares(const StepInput& input) const {
    double sum = 0;
    for (size_t id = 0; id < params.size(); ++id) {
      const ParamSpec& spec = problem_->params[id];
      if (!input.grads[id].has_value()) continue;
      sum += SumSquaresOfParam(Widen(spec.grad_dtype, spec.count, *input.grads[id]));
    }
    return sum;
  }

  // Blocks of 4096 elements; in a block 16 sums, folded in halves; blocks in order.
  static double SumSquaresOfParam(const std::vector<float>& grad) {
    double sum = 0;
    for (size_t begin = 0; begin < grad.size(); begin += 4096) {
      double lanes[16] = {};
      for (size_t i = begin; i < grad.size() && i < begin + 4096; ++i)
        lanes[i % 16] += double{grad[i]} * double{grad[i]};
      for (int l = 0; l < 8; ++l) lanes[l] += lanes[l + 8];
      for (int l = 0; l < 4; ++l) lanes[l] += lanes[l + 4];
      const double block = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
      sum += std::isnan(block) ? std::numeric_limits<double>::quiet_NaN() : block;
    }
    return sum;
  }

  bool is_half(size_t id) const {
    return problem_->params[id].dtype == OFFLOAD_BF16 && problem_->state.split();
  }

  // If a 16-bit param differs from its master rounded in both ways, the master becomes equal to the
  // param.
  void Follow(size_t id) {
    const ParamSpec& spec = problem_->params[id];
    Param& param = params[id];
    if (spec.dtype == OFFLOAD_FP32 || is_half(id)) return;
    const std::vector<float> widened = Widen(spec.dtype, spec.count, param.data);
    for (uint64_t i = 0; i < spec.count; ++i) {
      uint16_t stored = 0;
      std::memcpy(&stored, param.data.data() + 2 * i, 2);
      const float master = param.master[i];
      const bool same = spec.dtype == OFFLOAD_FP16
                            ? stored == Fp32ToFp16(master)
                            : stored == Fp32ToBf16(master) || stored == Fp32ToBf16TiesAway(master);
      if (!same) param.master[i] = widened[i];
    }
  }

  void Update(size_t id, const StepInput& input) {
    const ParamSpec& spec = problem_->params[id];
    Param& param = params[id];
    if ((input.flags & OFFLOAD_STEP_FOLLOW_PARAMS) != 0) Follow(id);
    const double momentum_at_commit = problem_->groups[spec.group].momentum;
    const offload_group_t& group = input.groups[spec.group];
    const int32_t algorithm = problem_->AlgorithmOfParam(id);
    const Rule rule = group.cautious_weight_decay != 0 ? Rule::kCautiousAdam
                                                       : RuleOf(algorithm, momentum_at_commit);
    param.step_count += 1;
    Coefficients coefficients = MakeCoefficients(algorithm, group, param.step_count);
    coefficients.grad_factor *= verdict.grad_factor;
    UpdateSpan span{input.grads[id]->data(), param.data.data(),    param.master.data(),
                    param.moment0.data(),    param.moment1.data(), spec.count};
    const StateChoice& state = problem_->state;
    if (state.random())
      span.rounding = StochasticRounding(state.rounding_seed, HashOfName(id), param.step_count);
    span.rounding.ties_away = state.split() && spec.dtype == OFFLOAD_BF16;
    UpdateArrays(id, rule, coefficients, span);
    if (state.split24() && spec.dtype == OFFLOAD_BF16) RoundMasters(id, span.rounding);
  }

  void UpdateArrays(size_t id, Rule rule, const Coefficients& coefficients, UpdateSpan span) {
    const ParamSpec& spec = problem_->params[id];
    Param& param = params[id];
    if (!problem_->state.bf16()) {
      ReferenceKernels().Update(rule, spec.grad_dtype, spec.dtype)(coefficients, span);
      return;
    }
    std::vector<uint16_t> moment0 = Narrow(param.moment0), moment1 = Narrow(param.moment1);
    span.moment0 = moment0.data();
    span.moment1 = moment1.data();
    ReferenceKernels().Update(
        rule, {spec.grad_dtype, spec.dtype, {Format::kFp32, Format::kBf16, Format::kBf16}})(
        coefficients, span);
    param.moment0 = Widen(OFFLOAD_BF16, moment0);
    param.moment1 = Widen(OFFLOAD_BF16, moment1);
  }

  // Rounds away the lower 8 bits of fp32 masters that a step has computed, and sets the params.
  void RoundMasters(size_t id, const Rounding& rounding) {
    Param& param = params[id];
    for (uint64_t i = 0; i < param.master.size(); ++i) {
      uint32_t bits = std::bit_cast<uint32_t>(param.master[i]);
      const uint32_t random = RandomBits(CounterOf(rounding, i), TweakOf(rounding, i));
      const uint32_t to_nearest = 0x7F + (bits >> 8 & 1);
      if (!std::isnan(param.master[i]))
        bits += rounding.stochastic ? random * 0x6F4A955D >> 24 : to_nearest;
      param.master[i] = std::bit_cast<float>(bits & 0xFFFFFF00);
      PutElement(param.data, OFFLOAD_BF16, i, Fp32ToBf16TiesAway(param.master[i]));
    }
  }

  // FNV-1a of "param0" and so on, the names in all rigs.
  static uint64_t HashOfName(size_t id) {
    uint64_t hash = 14695981039346656037u;
    for (char c : "param" + std::to_string(id)) hash = (hash ^ uint64_t(c)) * 1099511628211u;
    return hash;
  }

  static std::vector<uint16_t> Narrow(const std::vector<float>& values) {
    std::vector<uint16_t> narrow;
    for (float value : values) narrow.push_back(Fp32ToBf16(value));
    return narrow;
  }
  static std::vector<float> Widen(int32_t dtype, const std::vector<uint16_t>& narrow) {
    std::vector<float> widened(narrow.size());
    ReferenceKernels().ToFp32(dtype)(narrow.data(), narrow.size(), widened.data());
    return widened;
  }

  const Problem* problem_;
};

// trace[i] is the model after i steps.
inline std::vector<Model> TraceOf(const Problem& problem) {
  std::vector<Model> trace = {Model(problem)};
  for (const StepInput& input : problem.steps) {
    trace.push_back(trace.back());
    trace.back().Step(input);
  }
  return trace;
}

}  // namespace hybridopt
