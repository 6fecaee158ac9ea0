#include "step/step.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "base/prim.h"
#include "base/ranges.h"
#include "kernels/coefficients.h"
#include "kernels/rounding.h"
#include "machine/stopwatch.h"

namespace hybridopt {
namespace {

constexpr uint32_t kNoCoefficients = UINT32_MAX;  // of an empty memo

}  // namespace

StepPipeline::StepPipeline(Context& context, const ParamTable& table, const Placement& placement,
                           const StateMemory& memory, Lanes& lanes, const SwapMemory& swap,
                           NormSums& norm_sums, const Comm& comm, StepCounts& step_counts,
                           uint64_t rounding_seed)
    : context_(context),
      device_(context.device()),
      table_(table),
      placement_(placement),
      memory_(memory),
      lanes_(lanes),
      swap_(swap),
      norm_sums_(norm_sums),
      comm_(comm),
      step_counts_(step_counts),
      rounding_seed_(rounding_seed),
      host_share_(table, placement, memory, context.kernels()),
      chunks_(context, table, placement, lanes, host_share_),
      pieces_(context.workers().threads()),
      params_(table.size()),
      active_(placement),
      memos_(table.groups().size()) {
  for (const Param& param : table.params())
    has_replicas_ = has_replicas_ || (param.flags & OFFLOAD_PARAM_REPLICA) != 0;
  // Every param may need coefficients of its own.
  coefficients_.reserve(table.size());
  host_coefficients_.reserve(table.size());
  norm_inputs_.reserve(table.size());
  // A launch reads these while later ones are added: they must never move.
  device_updates_.reserve(MaxDeviceUpdates(table, placement));
}

// One per param, and one more where a piece of a gradient that comes back from the host or a stripe
// begins.
uint64_t StepPipeline::MaxDeviceUpdates(const ParamTable& table, const Placement& placement) {
  if (placement.device_elements == 0) return 0;
  const uint64_t pieces = placement.lanes.device_grad_elements == 0
                              ? 0
                              : placement.device_elements / placement.lanes.device_grad_elements;
  return table.size() + pieces + placement.stripes.size();
}

uint64_t StepPipeline::ScratchBytes(const ParamTable& table, const Placement& placement) {
  const uint64_t per_param = sizeof(uint64_t) + sizeof(StepParam) + 2 * sizeof(Coefficients) +
                             sizeof(NormInput) + sizeof(ParamPlace) +
                             kMaxQueuedSteps * (sizeof(Addresses) + sizeof(HostGrad));
  return table.size() * per_param + MaxDeviceUpdates(table, placement) * sizeof(DeviceUpdate) +
         placement.lanes.norm_blocks * sizeof(double) +
         placement.fragments.size() * sizeof(Fragment) + placement.chunks.size() * sizeof(Chunk) +
         placement.stripes.size() * sizeof(Stripe) + ActiveElements::Bytes(placement);
}

// ------------------------------------------------------------------------------------- the step --

Status StepPipeline::Run(const StepRequest& request, EventHandle ready, Capture* capture,
                         FunctionRef<void(uint64_t)> reached, offload_step_result_t* result) {
  const Range range("step", step_counts_.applied() + 1);
  const int64_t begin_ns = prim::NowNs();
  capture_ = capture;
  Prepare(request);
  Verdict verdict{};
  if (device_.unified()) {
    HYBRIDOPT_TRY(RunInPlace(request, result, &verdict));
    result->total_seconds = SecondsSince(begin_ns);
  } else {
    HYBRIDOPT_TRY(RunStaged(request, ready, reached, result, &verdict));
  }
  AwaitBorrowed(result);
  CountStep(verdict, result);
  return {};
}

// Settles which params take part, and with which coefficients. Step counts are not touched yet: the
// step may still be skipped.
void StepPipeline::Prepare(const StepRequest& request) {
  coefficients_.clear();
  std::fill(memos_.begin(), memos_.end(), Memo{0, kNoCoefficients});
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
    const uint64_t step = step_counts_.of(id) + 1;
    step_param.coefficients = CoefficientsFor(request.groups[param.group], param.group, step);
    const ParamPlace& place = placement_.params[id];
    step_param.rounding = {};
    if (place.stripe_count > 0)
      step_param.rounding = StochasticRounding(rounding_seed_, param.name_hash, step);
    step_param.rounding.ties_away = place.ties_away;
  }
  active_.Count(params_);
}

uint32_t StepPipeline::CoefficientsFor(const offload_group_t& group, uint32_t group_id,
                                       uint64_t step) {
  // Params of a group nearly always share their step count: then this is computed once.
  Memo& memo = memos_[group_id];
  if (memo.coefficients == kNoCoefficients || memo.step != step) {
    memo = {step, static_cast<uint32_t>(coefficients_.size())};
    coefficients_.push_back(MakeCoefficients(table_.algorithm(), group, step));
  }
  return memo.coefficients;
}

void StepPipeline::ScaleCoefficients(const Verdict& verdict) {
  host_coefficients_ = coefficients_;  // within its capacity
  for (Coefficients& coefficients : host_coefficients_)
    coefficients.grad_factor *= verdict.grad_factor;
}

void StepPipeline::CountStep(const Verdict& verdict, offload_step_result_t* result) {
  result->skipped = verdict.skip;
  result->grad_norm = verdict.grad_norm;
  result->grad_clip = verdict.grad_clip;
  if (verdict.skip == 0) {
    step_counts_.set_applied(step_counts_.applied() + 1);
    for (uint32_t id = 0; id < table_.size(); ++id)
      if (params_[id].active) step_counts_.set(id, step_counts_.of(id) + 1);
  }
  result->step = step_counts_.applied();
}

// ---------------------------------------------------------------------------------- the verdict --

// The gradients that nobody has summed yet, in registration order.
void StepPipeline::ListNormInputs() {
  norm_inputs_.clear();
  for (uint32_t id = 0; id < table_.size(); ++id) {
    const StepParam& param = params_[id];
    if (param.active && param.host_grad == nullptr)
      norm_inputs_.push_back({param.addresses.grad, table_.param(id).count, param.grad_dtype,
                              placement_.params[id].first_norm_block});
  }
}

// Adds up the params' sums, those of gradients the host holds and those in `landed_blocks`, then
// asks the other ranks. The order is the device's.
Result<Verdict> StepPipeline::DecideOnHost(const StepRequest& request,
                                           const double* landed_blocks) {
  double sum = 0;
  bool finite = true;
  for (uint32_t id = 0; id < table_.size(); ++id) {
    if (!params_[id].active) continue;
    const uint64_t first = placement_.params[id].first_norm_block;
    const double* const blocks =
        params_[id].host_grad != nullptr ? norm_sums_.blocks(first) : landed_blocks + first;
    const double param_sum = AddBlocks(blocks, table_.param(id).count);
    finite = finite && std::isfinite(param_sum);
    if ((table_.param(id).flags & OFFLOAD_PARAM_REPLICA) == 0) sum += param_sum;
  }
  HYBRIDOPT_TRY(comm_.AgreeOnNorm(&sum, &finite));
  // A replica's gradient, or another rank's, does not show in the sum. Inf stays Inf.
  if (!finite && std::isfinite(sum)) sum = std::numeric_limits<double>::quiet_NaN();
  return Decide(sum, request.grad_scale, request.grad_norm_max);
}

// ----------------------------------------------------------------------- params in host memory --

Status StepPipeline::RunInPlace(const StepRequest& request, offload_step_result_t* result,
                                Verdict* verdict) {
  if (NeedsNorm(request)) {
    const Range range("norm");
    Stopwatch norm(result->norm_seconds);
    ListNormInputs();
    HYBRIDOPT_TRY(norm_sums_.Sum(context_, norm_inputs_));
    HYBRIDOPT_ASSIGN(*verdict, DecideOnHost(request, norm_sums_.blocks(0)));
  } else {
    *verdict = AssumeFinite(request.grad_scale);
  }
  if (verdict->skip != 0 || placement_.chunks.empty()) return {};
  ScaleCoefficients(*verdict);
  Stopwatch update(result->update_seconds);
  const HostStep step = HostStepNow();
  const uint64_t total = active_.in_chunk(0);
  // One pass, but in pieces while a save reads ahead of it.
  const uint64_t most = capture_ != nullptr ? placement_.piece_elements : total;
  for (WorkRange range{0, 0}; range.end < total;) {
    range = {range.end, std::min(range.end + most, total)};
    host_share_.AwaitCapture(step, 0, range);
    const Range updating("update", 0);
    pieces_.Reset(range, kWorkGrainElements, kWorkPieceElements);
    HYBRIDOPT_TRY(context_.workers().Run(
        [&](uint32_t worker) { host_share_.Update(step, 0, {}, pieces_, worker); }));
  }
  return {};
}

// ------------------------------------------------------------------------------- behind a save --

void StepPipeline::AwaitCaptureOfDeviceShare() {
  if (capture_ == nullptr) return;
  for (uint32_t id = 0; id < table_.size(); ++id)
    if (params_[id].active && placement_.params[id].device_count > 0)
      capture_->Await(id, placement_.params[id].device_count);
}

// Once the step has completed the caller may write any param, those that it left alone too.
void StepPipeline::AwaitBorrowed(offload_step_result_t* result) {
  if (capture_ == nullptr) return;
  Stopwatch total(result->total_seconds), stall(result->stall_seconds);
  capture_->AwaitBorrowed();
}

// The caller's stream may wait for the save too.
Status StepPipeline::AwaitGradients(EventHandle ready) {
  const Range range("await gradients");
  return lanes_.WaitForCaller(ready, "the gradients", [this]() -> Result<bool> {
    if (capture_ == nullptr || !capture_->borrows()) return false;
    return capture_->AwaitBorrowed();
  });
}

// --------------------------------------------------------------------- params in device memory --

Status StepPipeline::RunStaged(const StepRequest& request, EventHandle ready,
                               FunctionRef<void(uint64_t)> reached, offload_step_result_t* result,
                               Verdict* verdict) {
  HYBRIDOPT_TRY(device_.StreamWait(lanes_.down, ready));
  HYBRIDOPT_TRY(device_.StreamWait(lanes_.compute, ready));
  // A full launch queue blocks for as long as the stream before it does: what might fill it is
  // queued only when the gradients are there.
  if (chunks_.PrefetchCopies() > Lanes::kMaxCommandsAhead) HYBRIDOPT_TRY(AwaitGradients(ready));
  HYBRIDOPT_TRY(chunks_.Prefetch(params_, result));
  HYBRIDOPT_TRY(QueueVerdict(request));
  // The clock starts when the gradients are there: the caller's own work is not the step's.
  HYBRIDOPT_TRY(AwaitGradients(ready));
  Stopwatch total(result->total_seconds);
  {
    const Range range("norm");
    Stopwatch norm(result->norm_seconds);
    HYBRIDOPT_ASSIGN(*verdict, AwaitVerdict(request));
  }
  if (verdict->skip != 0) return chunks_.AwaitPrefetched();
  ScaleCoefficients(*verdict);
  AwaitCaptureOfDeviceShare();
  HYBRIDOPT_TRY(QueueDeviceUpdates());
  // Chunks retire behind the device share, so that one mark tells a param's progress.
  const auto retired = [&](uint32_t chunk) -> Status {
    if (chunk == 0) HYBRIDOPT_TRY(AwaitDeviceShare(reached, result));
    reached(kDeviceShareDone + chunk + 1);
    return {};
  };
  HYBRIDOPT_TRY(chunks_.Run(HostStepNow(), retired, result));
  return chunks_.count() > 0 ? Status() : AwaitDeviceShare(reached, result);
}

// Where all gradients are on the device and no other rank is asked, the verdict is made there and
// the device's updates need not wait for the host.
bool StepPipeline::VerdictOnDevice() const {
  const bool all_there = std::none_of(params_.begin(), params_.end(), [](const StepParam& param) {
    return param.active && param.host_grad != nullptr;
  });
  return all_there && !comm_.present() && !has_replicas_;
}

Status StepPipeline::QueueVerdict(const StepRequest& request) {
  if (!NeedsNorm(request))
    return device_.SetVerdict(lanes_.compute, AssumeFinite(request.grad_scale),
                              lanes_.device_verdict);
  ListNormInputs();
  const bool on_device = VerdictOnDevice();
  NormLaunch launch{};
  launch.inputs = norm_inputs_;
  launch.block_sums = lanes_.block_sums;
  launch.grad_scale = request.grad_scale;
  launch.grad_norm_max = request.grad_norm_max;
  launch.verdict = on_device ? lanes_.device_verdict : nullptr;
  HYBRIDOPT_TRY(device_.Norm(lanes_.compute, launch));
  if (on_device) {
    HYBRIDOPT_TRY(device_.CopyToHost(lanes_.compute, lanes_.host_verdict, lanes_.device_verdict,
                                     sizeof(Verdict)));
  } else if (!norm_inputs_.empty()) {
    HYBRIDOPT_TRY(device_.CopyToHost(lanes_.compute, lanes_.host_block_sums, lanes_.block_sums,
                                     placement_.lanes.norm_blocks * sizeof(double)));
  }
  return device_.Record(lanes_.verdict_known, lanes_.compute);
}

Result<Verdict> StepPipeline::AwaitVerdict(const StepRequest& request) {
  if (!NeedsNorm(request)) return AssumeFinite(request.grad_scale);
  HYBRIDOPT_TRY(lanes_.Wait(lanes_.verdict_known, "the gradient norm"));
  if (VerdictOnDevice()) return *lanes_.host_verdict;
  HYBRIDOPT_ASSIGN(const Verdict verdict, DecideOnHost(request, lanes_.host_block_sums));
  // A skipped step ends here: nothing of it may still be queued on the device.
  if (verdict.skip == 0)
    HYBRIDOPT_TRY(device_.SetVerdict(lanes_.compute, verdict, lanes_.device_verdict));
  return verdict;
}

// One launch per rule: SGD params with and without momentum differ. Params whose gradient the host
// holds follow one by one.
Status StepPipeline::QueueDeviceUpdates() {
  HYBRIDOPT_TRY(device_.Record(lanes_.device_updated.begin, lanes_.compute));
  device_updates_.clear();
  for (int32_t rule = 0; rule < kRuleCount; ++rule) {
    const size_t first = device_updates_.size();
    for (uint32_t id = 0; id < table_.size(); ++id) {
      const ParamPlace& place = placement_.params[id];
      if (params_[id].active && params_[id].host_grad == nullptr && place.device_count > 0 &&
          place.rule == Rule{rule})
        AddDeviceUpdates(DeviceUpdateOf(id), id, 0, place.device_count);
    }
    HYBRIDOPT_TRY(QueueUpdate(Rule{rule}, first));
  }
  for (uint32_t id = 0; id < table_.size(); ++id)
    if (params_[id].active && params_[id].host_grad != nullptr &&
        placement_.params[id].device_count > 0)
      HYBRIDOPT_TRY(QueueUpdateFromHost(id));
  return device_.Record(lanes_.device_updated.end, lanes_.compute);
}

// The update of a param's whole device share.
DeviceUpdate StepPipeline::DeviceUpdateOf(uint32_t id) const {
  const StepParam& param = params_[id];
  const ParamPlace& place = placement_.params[id];
  void* master = memory_.OnDevice(id, IsSplit(place.device_layout) ? kMasterLow : kMaster);
  if (master == nullptr) master = param.addresses.data;
  DeviceUpdate update{};
  update.span = {
      param.addresses.grad,           param.addresses.data,           master,
      memory_.OnDevice(id, kMoment0), memory_.OnDevice(id, kMoment1), place.device_count};
  update.span.rounding = param.rounding;
  update.grad_dtype = param.grad_dtype;
  update.param_dtype = table_.param(id).dtype;
  update.coefficients = param.coefficients;
  update.layout = place.device_layout;
  return update;
}

// Lists the update of elements [begin, begin + count) of a param, stripe by stripe. `whole` has the
// addresses of element 0, but for the gradient's, which is that of element `begin`.
void StepPipeline::AddDeviceUpdates(const DeviceUpdate& whole, uint32_t id, uint64_t begin,
                                    uint64_t count) {
  DeviceUpdate stretch = whole;
  stretch.span = Advanced(whole.span, whole.types(), begin);
  stretch.span.grad = whole.span.grad;
  ForEachStripe(placement_, placement_.params[id], begin, count,
                [&](uint64_t offset, uint64_t part_count, ElementOrder order) {
                  HYBRIDOPT_CHECK(device_updates_.size() < device_updates_.capacity());
                  DeviceUpdate& part = device_updates_.emplace_back(stretch);
                  part.span = Advanced(stretch.span, stretch.types(), offset);
                  part.span.count = part_count;
                  part.span.order = order;
                });
}

// Launches what was listed from `first` on.
Status StepPipeline::QueueUpdate(Rule rule, size_t first) {
  if (device_updates_.size() == first) return {};
  UpdateLaunch launch{};
  launch.rule = rule;
  launch.updates = std::span(device_updates_).subspan(first);
  launch.coefficients = coefficients_;
  launch.verdict = lanes_.device_verdict;
  return device_.Update(lanes_.compute, launch);
}

// The gradient's device share goes up piece by piece through one buffer; the stream's order keeps
// the next piece from overtaking the update that reads the last one.
Status StepPipeline::QueueUpdateFromHost(uint32_t id) {
  const StepParam& param = params_[id];
  DeviceUpdate whole = DeviceUpdateOf(id);
  const uint64_t grad_bytes = DtypeBytes(param.grad_dtype);
  for (uint64_t begin = 0; begin < whole.span.count;
       begin += placement_.lanes.device_grad_elements) {
    const uint64_t count =
        std::min(placement_.lanes.device_grad_elements, whole.span.count - begin);
    HYBRIDOPT_TRY(device_.CopyToDevice(lanes_.compute, lanes_.device_grads,
                                       param.host_grad + begin * grad_bytes, count * grad_bytes));
    const size_t first = device_updates_.size();
    whole.span.grad = lanes_.device_grads;
    AddDeviceUpdates(whole, id, begin, count);
    HYBRIDOPT_TRY(QueueUpdate(placement_.params[id].rule, first));
  }
  return {};
}

Status StepPipeline::AwaitDeviceShare(FunctionRef<void(uint64_t)> reached,
                                      offload_step_result_t* result) {
  const Range range("await device update");
  HYBRIDOPT_TRY(lanes_.Wait(lanes_.device_updated.end, "the device's own update"));
  HYBRIDOPT_ASSIGN(const double seconds, lanes_.Seconds(lanes_.device_updated));
  if (!device_updates_.empty()) result->device_update_seconds += seconds;
  reached(kDeviceShareDone);
  return {};
}

}  // namespace hybridopt
