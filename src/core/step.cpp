#include "core/step.h"

#include "base/check.h"
#include "base/prim.h"
#include "core/timeline.h"
#include "kernels/coefficients.h"

namespace hybridopt {
namespace {

double SecondsSince(int64_t begin_ns) {
  return static_cast<double>(prim::NowNs() - begin_ns) * 1e-9;
}

// Adds the time until its end of scope to a sum.
class Stopwatch {
 public:
  explicit Stopwatch(double& sum) : sum_(sum) {}
  ~Stopwatch() { sum_ += SecondsSince(begin_ns_); }

 private:
  double& sum_;
  const int64_t begin_ns_ = prim::NowNs();
};

std::byte* At(void* base, uint64_t element, int32_t dtype) {
  return static_cast<std::byte*>(base) + element * DtypeBytes(dtype);
}
const std::byte* At(const void* base, uint64_t element, int32_t dtype) {
  return static_cast<const std::byte*>(base) + element * DtypeBytes(dtype);
}

}  // namespace

StepPipeline::StepPipeline(Context& context, const ParamTable& table, const Placement& placement,
                           const StateMemory& memory, Lanes& lanes)
    : context_(context),
      device_(context.device()),
      table_(table),
      placement_(placement),
      memory_(memory),
      lanes_(lanes),
      host_share_(table, placement, memory, context.kernels()),
      step_counts_(table.size()),
      params_(table.size()),
      memos_(table.groups().size()) {
  // Every param may need coefficients of its own.
  coefficients_.reserve(table.size());
  host_coefficients_.reserve(table.size());
  if (device_.unified()) {
    block_sums_.resize(placement.norm_blocks);
  } else {
    norm_inputs_.reserve(table.size());
    device_updates_.reserve(table.size());
  }
}

uint64_t StepPipeline::ScratchBytes(const ParamTable& table, const Placement& placement) {
  const uint64_t per_param = sizeof(uint64_t) + sizeof(StepParam) + 2 * sizeof(Coefficients) +
                             sizeof(NormInput) + sizeof(DeviceUpdate) + sizeof(ParamPlace) +
                             Timeline::kCapacity * sizeof(Addresses);
  return table.size() * per_param + placement.norm_blocks * sizeof(double) +
         placement.fragments.size() * sizeof(Fragment) + placement.chunks.size() * sizeof(Chunk);
}

std::span<const Fragment> StepPipeline::FragmentsOf(uint32_t chunk) const {
  return {&placement_.fragments[placement_.chunks[chunk].first_fragment],
          placement_.chunks[chunk].fragment_count};
}

// ------------------------------------------------------------------------------------- the step --

Status StepPipeline::Run(const StepRequest& request, FunctionRef<void(uint64_t)> reached,
                         offload_step_result_t* result) {
  Prepare(request);
  Verdict verdict{};
  if (device_.unified()) {
    HYBRIDOPT_TRY(RunInPlace(request, result, &verdict));
  } else {
    HYBRIDOPT_TRY(RunStaged(request, reached, result, &verdict));
  }
  CountStep(verdict, result);
  return {};
}

// Settles which params take part, and with which coefficients. Step counts are not touched yet: the
// step may still be skipped.
void StepPipeline::Prepare(const StepRequest& request) {
  coefficients_.clear();
  std::fill(memos_.begin(), memos_.end(), Memo{0, 0});
  for (uint32_t id = 0; id < table_.size(); ++id) {
    const Param& param = table_.param(id);
    StepParam& step_param = params_[id];
    step_param.addresses = request.addresses[id];
    step_param.active = step_param.addresses.grad != nullptr && param.count > 0;
    if (!step_param.active) continue;
    step_param.coefficients =
        CoefficientsFor(request.groups[param.group], param.group, step_counts_[id] + 1);
  }
}

uint32_t StepPipeline::CoefficientsFor(const offload_group_t& group, uint32_t group_id,
                                       uint64_t step) {
  // Params of a group nearly always share their step count: then this is computed once.
  Memo& memo = memos_[group_id];
  if (memo.step != step) {
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
    steps_applied_ += 1;
    for (uint32_t id = 0; id < table_.size(); ++id)
      if (params_[id].active) step_counts_[id] += 1;
  }
  result->step = steps_applied_;
}

// ----------------------------------------------------------------------- params in host memory --

Status StepPipeline::RunInPlace(const StepRequest& request, offload_step_result_t* result,
                                Verdict* verdict) {
  Stopwatch total(result->total_seconds);
  if (NeedsNorm(request)) {
    Stopwatch norm(result->norm_seconds);
    HYBRIDOPT_ASSIGN(*verdict, NormInPlace(request));
  } else {
    *verdict = AssumeFinite(request.grad_scale);
  }
  if (verdict->skip != 0 || placement_.chunks.empty()) return {};
  ScaleCoefficients(*verdict);
  Stopwatch update(result->update_seconds);
  const uint32_t workers = context_.workers().threads();
  return context_.workers().Run([&](uint32_t worker) {
    host_share_.Update(placement_.chunks[0], {}, params_, host_coefficients_, worker, workers);
  });
}

Result<Verdict> StepPipeline::NormInPlace(const StepRequest& request) {
  const uint32_t workers = context_.workers().threads();
  HYBRIDOPT_TRY(context_.workers().Run([&](uint32_t worker) {
    const WorkRange blocks = RangeOfWorker(placement_.norm_blocks, 1, worker, workers);
    uint64_t block = blocks.begin;
    // The last param whose first block is not behind the range's.
    auto place =
        std::upper_bound(placement_.params.begin(), placement_.params.end(), block,
                         [](uint64_t b, const ParamPlace& p) { return b < p.first_norm_block; });
    for (uint32_t id = static_cast<uint32_t>(place - placement_.params.begin()) - 1;
         block < blocks.end; ++id) {
      const Param& param = table_.param(id);
      const uint64_t begin = (block - placement_.params[id].first_norm_block) * kNormBlockElements;
      const uint64_t end = std::min(param.count, begin + (blocks.end - block) * kNormBlockElements);
      if (params_[id].active && begin < end)
        context_.kernels().SumSquares(param.grad_dtype)(
            At(params_[id].addresses.grad, begin, param.grad_dtype), end - begin,
            &block_sums_[block]);
      if (begin < end) block += (end - begin + kNormBlockElements - 1) / kNormBlockElements;
    }
  }));
  double sum = 0;
  for (uint32_t id = 0; id < table_.size(); ++id) {
    if (!params_[id].active) continue;
    const uint64_t first = placement_.params[id].first_norm_block;
    const uint64_t blocks = (table_.param(id).count + kNormBlockElements - 1) / kNormBlockElements;
    double param_sum = 0;
    for (uint64_t block = first; block < first + blocks; ++block) param_sum += block_sums_[block];
    sum += param_sum;
  }
  return Decide(sum, request.grad_scale, request.grad_norm_max);
}

// --------------------------------------------------------------------- params in device memory --

Status StepPipeline::RunStaged(const StepRequest& request, FunctionRef<void(uint64_t)> reached,
                               offload_step_result_t* result, Verdict* verdict) {
  HYBRIDOPT_TRY(device_.StreamWait(lanes_.down, request.ready));
  HYBRIDOPT_TRY(device_.StreamWait(lanes_.compute, request.ready));
  const uint32_t prefetched = std::min(placement_.staging_slots, chunk_count());
  for (uint32_t chunk = 0; chunk < prefetched; ++chunk) HYBRIDOPT_TRY(BringDown(chunk, result));
  HYBRIDOPT_TRY(QueueVerdict(request));
  // The clock starts when the gradients are there: the caller's own work is not the step's.
  HYBRIDOPT_TRY(lanes_.Wait(request.ready, "the gradients"));
  Stopwatch total(result->total_seconds);
  {
    Stopwatch norm(result->norm_seconds);
    HYBRIDOPT_ASSIGN(*verdict, AwaitVerdict(request));
  }
  if (verdict->skip != 0) {
    for (uint32_t chunk = 0; chunk < prefetched; ++chunk)
      HYBRIDOPT_TRY(lanes_.Wait(lanes_.landed[SlotOf(chunk)].end, "gradients coming down"));
    return {};
  }
  ScaleCoefficients(*verdict);
  HYBRIDOPT_TRY(QueueDeviceUpdates());
  const uint32_t slots = placement_.staging_slots;
  for (uint32_t chunk = 0; chunk < chunk_count(); ++chunk) {
    // The slot's params half is written next: its last copy up must be over.
    if (chunk >= slots) HYBRIDOPT_TRY(Retire(chunk - slots, reached, result));
    HYBRIDOPT_TRY(UpdateChunk(chunk, result));
    HYBRIDOPT_TRY(SendUp(chunk, result));
    if (chunk + slots < chunk_count()) HYBRIDOPT_TRY(BringDown(chunk + slots, result));
  }
  for (uint32_t chunk = chunk_count() - prefetched; chunk < chunk_count(); ++chunk)
    HYBRIDOPT_TRY(Retire(chunk, reached, result));
  if (chunk_count() == 0) HYBRIDOPT_TRY(AwaitDeviceShare(reached, result));
  return {};
}

// Norm and verdict are made on the device, where the gradients are, and stay there for its updates.
Status StepPipeline::QueueVerdict(const StepRequest& request) {
  if (!NeedsNorm(request))
    return device_.SetVerdict(lanes_.compute, AssumeFinite(request.grad_scale),
                              lanes_.device_verdict);
  norm_inputs_.clear();
  for (uint32_t id = 0; id < table_.size(); ++id) {
    if (!params_[id].active) continue;
    norm_inputs_.push_back({params_[id].addresses.grad, table_.param(id).count,
                            table_.param(id).grad_dtype, placement_.params[id].first_norm_block});
  }
  NormLaunch launch{};
  launch.inputs = norm_inputs_;
  launch.block_sums = lanes_.block_sums;
  launch.grad_scale = request.grad_scale;
  launch.grad_norm_max = request.grad_norm_max;
  launch.verdict = lanes_.device_verdict;
  HYBRIDOPT_TRY(device_.Norm(lanes_.compute, launch));
  HYBRIDOPT_TRY(device_.CopyToHost(lanes_.compute, lanes_.host_verdict, lanes_.device_verdict,
                                   sizeof(Verdict)));
  return device_.Record(lanes_.verdict_known, lanes_.compute);
}

Result<Verdict> StepPipeline::AwaitVerdict(const StepRequest& request) {
  if (!NeedsNorm(request)) return AssumeFinite(request.grad_scale);
  HYBRIDOPT_TRY(lanes_.Wait(lanes_.verdict_known, "the gradient norm"));
  return *lanes_.host_verdict;
}

// One launch per rule: SGD params with and without momentum differ.
Status StepPipeline::QueueDeviceUpdates() {
  HYBRIDOPT_TRY(device_.Record(lanes_.device_updated.begin, lanes_.compute));
  device_updates_.clear();
  for (int32_t rule = 0; rule < kRuleCount; ++rule) {
    const size_t first = device_updates_.size();
    for (uint32_t id = 0; id < table_.size(); ++id) {
      const ParamPlace& place = placement_.params[id];
      if (!params_[id].active || place.device_count == 0 || place.rule != Rule{rule}) continue;
      const Param& param = table_.param(id);
      float* master = memory_.OnDevice(id, kMaster);
      if (master == nullptr) master = static_cast<float*>(params_[id].addresses.data);
      device_updates_.push_back(
          {{params_[id].addresses.grad, params_[id].addresses.data, master,
            memory_.OnDevice(id, kMoment0), memory_.OnDevice(id, kMoment1), place.device_count},
           param.grad_dtype,
           param.dtype,
           params_[id].coefficients});
    }
    if (device_updates_.size() == first) continue;
    UpdateLaunch launch{};
    launch.rule = Rule{rule};
    launch.updates = std::span(device_updates_).subspan(first);
    launch.coefficients = coefficients_;
    launch.verdict = lanes_.device_verdict;
    HYBRIDOPT_TRY(device_.Update(lanes_.compute, launch));
  }
  return device_.Record(lanes_.device_updated.end, lanes_.compute);
}

Status StepPipeline::BringDown(uint32_t chunk, offload_step_result_t* result) {
  const uint32_t slot = SlotOf(chunk);
  HYBRIDOPT_TRY(device_.Record(lanes_.landed[slot].begin, lanes_.down));
  for (const Fragment& fragment : FragmentsOf(chunk)) {
    if (!params_[fragment.param].active) continue;
    const int32_t dtype = table_.param(fragment.param).grad_dtype;
    HYBRIDOPT_TRY(
        device_.CopyToHost(lanes_.down, lanes_.ring().grads(slot) + fragment.grad_offset,
                           At(params_[fragment.param].addresses.grad, fragment.begin, dtype),
                           fragment.count * DtypeBytes(dtype)));
    result->grads_down_bytes += fragment.count * DtypeBytes(dtype);
  }
  return device_.Record(lanes_.landed[slot].end, lanes_.down);
}

Status StepPipeline::UpdateChunk(uint32_t chunk, offload_step_result_t* result) {
  const uint32_t slot = SlotOf(chunk);
  {
    Stopwatch stall(result->stall_seconds);
    HYBRIDOPT_TRY(lanes_.Wait(lanes_.landed[slot].end, "gradients coming down"));
  }
  HYBRIDOPT_ASSIGN(const double seconds, lanes_.Seconds(lanes_.landed[slot]));
  result->grads_down_seconds += seconds;
  Stopwatch update(result->update_seconds);
  const ChunkBuffers buffers{lanes_.ring().grads(slot), lanes_.ring().params(slot)};
  const uint32_t workers = context_.workers().threads();
  HYBRIDOPT_TRY(context_.workers().Run([&](uint32_t worker) {
    host_share_.Update(placement_.chunks[chunk], buffers, params_, host_coefficients_, worker,
                       workers);
  }));
  lanes_.ring().ReleaseGrads(slot);
  return {};
}

Status StepPipeline::SendUp(uint32_t chunk, offload_step_result_t* result) {
  const uint32_t slot = SlotOf(chunk);
  HYBRIDOPT_TRY(device_.Record(lanes_.uploaded[slot].begin, lanes_.up));
  for (const Fragment& fragment : FragmentsOf(chunk)) {
    if (!params_[fragment.param].active) continue;
    const int32_t dtype = table_.param(fragment.param).dtype;
    HYBRIDOPT_TRY(device_.CopyToDevice(
        lanes_.up, At(params_[fragment.param].addresses.data, fragment.begin, dtype),
        lanes_.ring().params(slot) + fragment.param_offset, fragment.count * DtypeBytes(dtype)));
    result->params_up_bytes += fragment.count * DtypeBytes(dtype);
  }
  return device_.Record(lanes_.uploaded[slot].end, lanes_.up);
}

// Chunks retire in order, behind the device share, so that one mark tells a param's progress.
Status StepPipeline::Retire(uint32_t chunk, FunctionRef<void(uint64_t)> reached,
                            offload_step_result_t* result) {
  if (chunk == 0) HYBRIDOPT_TRY(AwaitDeviceShare(reached, result));
  const uint32_t slot = SlotOf(chunk);
  {
    Stopwatch stall(result->stall_seconds);
    HYBRIDOPT_TRY(lanes_.Wait(lanes_.uploaded[slot].end, "params going up"));
  }
  HYBRIDOPT_ASSIGN(const double seconds, lanes_.Seconds(lanes_.uploaded[slot]));
  result->params_up_seconds += seconds;
  lanes_.ring().ReleaseParams(slot);
  reached(kDeviceShareDone + chunk + 1);
  return {};
}

Status StepPipeline::AwaitDeviceShare(FunctionRef<void(uint64_t)> reached,
                                      offload_step_result_t* result) {
  HYBRIDOPT_TRY(lanes_.Wait(lanes_.device_updated.end, "the device's own update"));
  HYBRIDOPT_ASSIGN(const double seconds, lanes_.Seconds(lanes_.device_updated));
  if (!device_updates_.empty()) result->device_update_seconds += seconds;
  reached(kDeviceShareDone);
  return {};
}

// ------------------------------------------------------------------------------ the first state --

Status StepPipeline::Initialize(std::span<const Addresses> addresses, StreamHandle stream) {
  if (!device_.unified()) {
    HYBRIDOPT_TRY(device_.Record(lanes_.verdict_known, stream));
    HYBRIDOPT_TRY(lanes_.Wait(lanes_.verdict_known, "the params given to commit"));
    HYBRIDOPT_TRY(InitializeDeviceShare(addresses));
  }
  for (uint32_t chunk = 0; chunk < chunk_count(); ++chunk)
    HYBRIDOPT_TRY(InitializeChunk(chunk, addresses));
  if (device_.unified()) return {};
  HYBRIDOPT_TRY(device_.Record(lanes_.verdict_known, lanes_.compute));
  return lanes_.Wait(lanes_.verdict_known, "the device's first state");
}

Status StepPipeline::InitializeDeviceShare(std::span<const Addresses> addresses) {
  for (uint32_t id = 0; id < table_.size(); ++id) {
    const uint64_t count = placement_.params[id].device_count;
    const Param& param = table_.param(id);
    if (float* master = memory_.OnDevice(id, kMaster); master != nullptr)
      HYBRIDOPT_TRY(device_.ToFp32(lanes_.compute, addresses[id].data, param.dtype, count, master));
    const float first = static_cast<float>(table_.groups()[param.group].initial_accumulator_value);
    if (float* moment = memory_.OnDevice(id, kMoment0); moment != nullptr)
      HYBRIDOPT_TRY(device_.Fill(lanes_.compute, moment, count, first));
    if (float* moment = memory_.OnDevice(id, kMoment1); moment != nullptr)
      HYBRIDOPT_TRY(device_.Fill(lanes_.compute, moment, count, 0.0f));
  }
  return {};
}

Status StepPipeline::InitializeChunk(uint32_t chunk, std::span<const Addresses> addresses) {
  ChunkBuffers buffers;
  if (!device_.unified()) {
    buffers = {lanes_.ring().grads(0), lanes_.ring().params(0)};
    for (const Fragment& fragment : FragmentsOf(chunk)) {
      const int32_t dtype = table_.param(fragment.param).dtype;
      HYBRIDOPT_TRY(device_.CopyToHost(lanes_.down, buffers.params + fragment.param_offset,
                                       At(addresses[fragment.param].data, fragment.begin, dtype),
                                       fragment.count * DtypeBytes(dtype)));
    }
    HYBRIDOPT_TRY(device_.Record(lanes_.landed[0].end, lanes_.down));
    HYBRIDOPT_TRY(lanes_.Wait(lanes_.landed[0].end, "params coming down"));
  }
  const uint32_t workers = context_.workers().threads();
  return context_.workers().Run([&](uint32_t worker) {
    host_share_.Initialize(placement_.chunks[chunk], buffers, addresses, worker, workers);
  });
}

}  // namespace hybridopt
