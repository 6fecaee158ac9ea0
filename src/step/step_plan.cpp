#include "step/step_plan.h"

#include <algorithm>

#include "kernels/stochastic_rounding.h"

namespace hybridopt {
namespace {

constexpr uint32_t kNoCoefficients = UINT32_MAX;                   // a memo without coefficients
constexpr uint64_t kNsStepsBytes = kNsStepsMost * sizeof(NsStep);  // of a group

// The coefficients of step i: the last row of the list is that of all later steps.
NsStep NsStepAt(const offload_group_t& group, int32_t i) {
  const int32_t rows = RowsOf(group.ns_coefficients);
  if (rows == 0) return kNsDefault;
  const double(&row)[3] = group.ns_coefficients[std::min(i, rows - 1)];
  return {static_cast<float>(row[0]), static_cast<float>(row[1]), static_cast<float>(row[2])};
}

}  // namespace

StepPlan::StepPlan(const ParamTable& table, const StateShape& shape, const Residence& residence,
                   const ChunkTable& chunks, const SwapMemory& swap, uint64_t rounding_seed)
    : table_(table),
      shape_(shape),
      residence_(residence),
      chunks_(chunks),
      swap_(swap),
      rounding_seed_(rounding_seed),
      params_(table.size()),
      memos_(table.groups().size()),
      ns_steps_(shape.matrices > 0 ? table.groups().size() * kNsStepsMost : 0) {
  coefficients_.reserve(shape.coefficients);
  UseChunks();
}

uint64_t StepPlan::Bytes(const ParamTable& table, const StateShape& shape) {
  const uint64_t chunks = ChunksMost(shape);
  return table.size() * (sizeof(StepParam) + sizeof(uint64_t)) +
         shape.coefficients * sizeof(Coefficients) + 3 * chunks * sizeof(uint64_t) +
         table.groups().size() * (sizeof(Memo) + (shape.matrices > 0 ? kNsStepsBytes : 0));
}

void StepPlan::UseChunks() {
  active_before_.resize(chunks_.fragments.size());
  active_in_chunk_.resize(chunks_.chunks.size());
  held_in_chunk_.resize(chunks_.chunks.size());
}

void StepPlan::Make(const StepRequest& request, const StepCounts& step_counts) {
  coefficients_.clear();
  std::fill(memos_.begin(), memos_.end(), Memo{0, kNoCoefficients});
  host_holds_grads_ = params_come_down_ = false;
  FillNsSteps(request.groups);
  for (uint32_t id = 0; id < table_.size(); ++id) {
    const Param& param = table_.param(id);
    StepParam& step_param = params_[id];
    const HostGrad held = request.host_grads[id];
    step_param.addresses = request.addresses[id];
    step_param.host_grad = held == HostGrad::kNone ? nullptr : swap_.Grads(id);
    step_param.grad_dtype =
        held == HostGrad::kAccumulated ? int32_t{OFFLOAD_FP32} : param.grad_dtype;
    step_param.active =
        param.count > 0 && (step_param.addresses.grad != nullptr || held != HostGrad::kNone);
    if (!step_param.active) continue;
    host_holds_grads_ = host_holds_grads_ || step_param.host_grad != nullptr;
    params_come_down_ = params_come_down_ || ParamComesDown(id);
    const uint64_t step = step_counts.of(id) + 1;
    const offload_group_t& group = request.groups[param.group];
    step_param.coefficients = CoefficientsFor(group, id, step);
    const ParamShape& shaped = shape_.params[id];
    step_param.rule = RuleOfStep(group.algorithm, shaped.rule, group);
    step_param.ns_steps = {};
    if (shaped.is_of_matrices())
      step_param.ns_steps = std::span(ns_steps_).subspan(param.group * kNsStepsMost,
                                                         static_cast<size_t>(NsStepsOf(group)));
    step_param.rounding = {};
    if (shaped.stripe_count > 0)
      step_param.rounding = StochasticRounding(rounding_seed_, param.name_hash, step);
    step_param.rounding.ties_away = shaped.beside_param();
  }
  CountActive();
}

void StepPlan::FillNsSteps(std::span<const offload_group_t> groups) {
  if (ns_steps_.empty()) return;
  for (size_t id = 0; id < groups.size(); ++id)
    for (int32_t i = 0; i < NsStepsOf(groups[id]); ++i)
      ns_steps_[id * kNsStepsMost + static_cast<size_t>(i)] = NsStepAt(groups[id], i);
}

uint32_t StepPlan::CoefficientsFor(const offload_group_t& group, uint32_t id, uint64_t step) {
  if (const auto& parts = shape_.params[id].parts; !parts.empty()) {
    const auto first = static_cast<uint32_t>(coefficients_.size());
    for (const MatrixPart& part : parts) {
      coefficients_.push_back(MakeCoefficients(group.algorithm, group, step));
      FitToMatrix(group, part.shape.rows, part.shape.cols, coefficients_.back());
    }
    return first;
  }
  // Usually the params of a group have the same step count, so their coefficients are computed
  // once.
  Memo& memo = memos_[table_.param(id).group];
  if (memo.coefficients == kNoCoefficients || memo.step != step) {
    memo = {step, static_cast<uint32_t>(coefficients_.size())};
    coefficients_.push_back(MakeCoefficients(group.algorithm, group, step));
  }
  return memo.coefficients;
}

void StepPlan::CountActive() {
  for (uint32_t chunk = 0; chunk < chunk_count(); ++chunk) {
    uint64_t active = 0, held = 0;
    for (const Fragment& fragment : fragments(chunk)) {
      active_before_[static_cast<size_t>(&fragment - chunks_.fragments.data())] = active;
      const StepParam& param = params_[fragment.param];
      if (!param.active) continue;
      active += fragment.count;
      if (param.host_grad != nullptr) held += fragment.count;
    }
    active_in_chunk_[chunk] = active;
    held_in_chunk_[chunk] = held;
  }
}

void ChooseGradsToKeep(const ParamTable& table, const StateShape& shape, const Residence& residence,
                       double streamed_share, uint64_t early_elements, std::span<uint8_t> keep) {
  uint64_t left = residence.chunked_elements();  // including this param's
  double owed = 0;  // elements that should have been kept so far, minus those that were kept
  for (uint32_t id : shape.update_order) {
    const uint64_t count = table.param(id).count;
    const uint64_t device_count = residence.range(id, Tier::kDevice).count;
    keep[id] = 2 * device_count > count;
    left -= count - device_count;
    if (keep[id] != 0 || left < early_elements) continue;
    const auto chunked = static_cast<double>(count - device_count);
    owed += streamed_share * chunked;
    keep[id] = 2 * owed > chunked;
    if (keep[id] != 0) owed -= chunked;
  }
}

}  // namespace hybridopt
