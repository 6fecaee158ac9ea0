#include "step/executors/device_executor.h"

#include <algorithm>

#include "step/executors/device_updates.h"

namespace hybridopt {
namespace {

// An upper bound: one update for each param, one for each stripe, and one for each piece of a
// gradient that is copied up from the host, and one for each matrix.
uint64_t DeviceUpdatesMost(const StateShape& shape) {
  if (shape.options.unified) return 0;
  uint64_t pieces = HostMayHoldGrads(shape)
                        ? shape.element_count / shape.options.chunk_elements + shape.params.size()
                        : 0;
  if (shape.largest_unit > 1) pieces *= 2;  // a piece that ends with a unit may be half full
  return shape.params.size() + pieces + shape.stripes.size() + shape.matrices;
}

}  // namespace

DeviceExecutor::DeviceExecutor(const ParamTable& table, const StateShape& shape,
                               const StateMemory& memory, Lanes& lanes, const ChangeLog& changes)
    : table_(table), shape_(shape), memory_(memory), lanes_(lanes), changes_(changes) {
  updates_.reserve(DeviceUpdatesMost(shape));
}

uint64_t DeviceExecutor::Bytes(const StateShape& shape) {
  return DeviceUpdatesMost(shape) * sizeof(DeviceUpdate);
}

Status DeviceExecutor::Queue(const StepPlan& plan) {
  Device& device = lanes_.device();
  TraceWork work(lanes_.trace(), TraceRow::kDeviceUpdate, lanes_.compute, "update device share");
  HYBRIDOPT_TRY(device.Record(lanes_.device_updated.begin, lanes_.compute));
  updates_.clear();
  for (int32_t rule = 0; rule < kAllRuleCount; ++rule) {
    const size_t first = updates_.size();
    for (uint32_t id = 0; id < table_.size(); ++id)
      if (plan.device_count(id) > 0 && plan.param(id).host_grad == nullptr &&
          plan.param(id).rule == Rule{rule})
        Add(UpdateOf(plan, id), id, 0, plan.device_count(id));
    HYBRIDOPT_TRY(Launch(plan, Rule{rule}, first));
  }
  for (uint32_t id = 0; id < table_.size() && plan.host_holds_grads(); ++id)
    if (plan.device_count(id) > 0 && plan.param(id).host_grad != nullptr)
      HYBRIDOPT_TRY(QueueFromHost(plan, id));
  work.End();
  return device.Record(lanes_.device_updated.end, lanes_.compute);
}

Status DeviceExecutor::Await(double* seconds) {
  const TraceRange range(lanes_.trace(), TraceRow::kSteps, "await device update");
  HYBRIDOPT_TRY(lanes_.Wait(lanes_.device_updated.end, "the device's own update"));
  HYBRIDOPT_ASSIGN(const double taken, lanes_.Seconds(lanes_.device_updated));
  lanes_.link().ArrivedUpTo(lanes_.link().queued_up_bytes());
  if (!updates_.empty()) *seconds += taken;
  return {};
}

// The update of all of a param's elements on the device.
DeviceUpdate DeviceExecutor::UpdateOf(const StepPlan& plan, uint32_t id) const {
  const StepParam& param = plan.param(id);
  const ParamShape& shaped = shape_.params[id];
  void* master = memory_.At(Tier::kDevice, id, shaped.master_slot());
  if (master == nullptr) master = param.addresses.data;
  DeviceUpdate update{};
  update.span = {param.addresses.grad,
                 param.addresses.data,
                 master,
                 memory_.At(Tier::kDevice, id, kMoment0),
                 memory_.At(Tier::kDevice, id, kMoment1),
                 plan.device_count(id)};
  update.span.rounding = param.rounding;
  update.grad_dtype = param.grad_dtype;
  update.param_dtype = table_.param(id).dtype;
  update.coefficients = param.coefficients;
  update.formats = shaped.formats();
  update.noted = changes_.OnDevice(id);
  update.ns_steps = param.ns_steps;
  return update;
}

// Lists the update of elements [begin, begin + count) of a param, stripe by stripe. `whole` has the
// addresses of element 0, except for the gradient: its address is that of element `begin`.
void DeviceExecutor::Add(const DeviceUpdate& whole, uint32_t id, uint64_t begin, uint64_t count) {
  DeviceUpdate range = whole;
  range.span = Advanced(whole.span, whole.types(), begin);
  range.span.grad = whole.span.grad;
  range.noted = whole.noted.From(begin);
  range.span.count = count;
  AddUpdates(shape_, shape_.params[id], begin, range, updates_);
}

// Launches the updates listed from index `first` on.
Status DeviceExecutor::Launch(const StepPlan& plan, Rule rule, size_t first) {
  if (updates_.size() == first) return {};
  UpdateLaunch launch{};
  launch.rule = rule;
  launch.updates = std::span(updates_).subspan(first);
  launch.coefficients = plan.coefficients();
  launch.verdict = lanes_.device_verdict;
  launch.workspace = lanes_.matrix_workspace;
  return rule == Rule::kMuon ? lanes_.device().UpdateMatrices(lanes_.compute, launch)
                             : lanes_.device().Update(lanes_.compute, launch);
}

// The gradient is copied up piece by piece through one buffer. All work is queued on one stream, so
// each piece is copied only after the update has read the piece before it.
Status DeviceExecutor::QueueFromHost(const StepPlan& plan, uint32_t id) {
  const StepParam& param = plan.param(id);
  DeviceUpdate whole = UpdateOf(plan, id);
  const uint64_t grad_bytes = DtypeBytes(param.grad_dtype);
  const uint64_t piece_elements = lanes_.device_grad_elements();
  for (uint64_t begin = 0, end = 0; begin < whole.span.count; begin = end) {
    end = shape_.params[id].unit.CutOf(begin, whole.span.count, piece_elements);
    const uint64_t count = end - begin;
    lanes_.link().GiveWay(count * grad_bytes);
    lanes_.link().QueuedUp(count * grad_bytes);
    HYBRIDOPT_TRY(lanes_.device().CopyToDevice(lanes_.compute, lanes_.device_grads,
                                               param.host_grad + begin * grad_bytes,
                                               count * grad_bytes));
    const size_t first = updates_.size();
    whole.span.grad = lanes_.device_grads;
    Add(whole, id, begin, count);
    HYBRIDOPT_TRY(Launch(plan, param.rule, first));
  }
  return {};
}

}  // namespace hybridopt
