#include "step/step.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/profiler_range.h"
#include "base/system.h"
#include "machine/stopwatch.h"

namespace hybridopt {

StepPipeline::StepPipeline(Context& context, const StepParts& parts, uint64_t rounding_seed)
    : context_(context),
      device_(context.device()),
      table_(parts.table),
      shape_(parts.shape),
      lanes_(parts.lanes),
      host_norm_sums_(parts.host_norm_sums),
      step_counts_(parts.step_counts),
      comm_(parts.comm),
      memory_(parts.memory),
      plan_(parts.table, parts.shape, parts.residence, parts.chunks, parts.swap, rounding_seed),
      updater_(parts.table, parts.shape, parts.memory, context.kernels(), parts.changes),
      aside_(parts.table, parts.shape, parts.residence, parts.memory, plan_, parts.lanes),
      cpu_executor_(context, parts.table, plan_, parts.lanes, parts.memory, queue_, *this,
                    updater_),
      streamed_(context.side_threads(), parts.table, parts.shape, plan_, parts.memory, parts.lanes,
                queue_, *this, aside_, parts.changes),
      device_executor_(parts.table, parts.shape, parts.memory, parts.lanes, parts.changes),
      early_(context, parts.table, parts.shape, plan_, parts.lanes, parts.step_counts, queue_,
             *this, updater_),
      work_(context.workers().threads()) {
  for (const Param& param : table_.params())
    has_replicas_ = has_replicas_ || (param.flags & OFFLOAD_PARAM_REPLICA) != 0;
  host_coefficients_.reserve(parts.shape.coefficients);
  norm_inputs_.reserve(table_.size());
  queue_.UseChunks(plan_.chunk_count());
}

Status StepPipeline::Start() {
  HYBRIDOPT_TRY(streamed_.Start());
  HYBRIDOPT_TRY(aside_.Start());
  return early_.Start();
}

void StepPipeline::UseChunks() {
  plan_.UseChunks();
  queue_.UseChunks(plan_.chunk_count());
  cpu_executor_.UseRing();
  early_.UseChunks();
}

uint64_t StepPipeline::ScratchBytes(const ParamTable& table, const StateShape& shape) {
  const uint64_t per_param = sizeof(NormInput) + sizeof(ParamShape) +
                             2 * sizeof(uint64_t) +  // step count, device count
                             kMaxQueuedSteps * (sizeof(Addresses) + sizeof(HostGrad));
  return table.size() * per_param +
         shape.coefficients * (sizeof(Coefficients) + sizeof(MatrixPart)) +
         StepPlan::Bytes(table, shape) + DeviceExecutor::Bytes(shape) +
         StreamedExecutor::Bytes(shape) + ChunkUpdater::Bytes(shape) +
         EarlyUpdates::Bytes(table, shape) + ChunkTable::BytesMax(shape) +
         ChunkQueue::Bytes(ChunksMost(shape)) + shape.norm_blocks * sizeof(double) +
         shape.stripes.size() * sizeof(Stripe);
}

// ------------------------------------------------------------------------------------- the step --

Status StepPipeline::Run(const StepRequest& request, EventHandle ready, Capture* capture,
                         const StepMarks& marks, offload_step_result_t* result) {
  Trace& trace = lanes_.trace();
  trace.SetStep(step_counts_.applied() + 1);
  trace.SetAnchor(lanes_.compute);
  const ProfilerRange range("step", step_counts_.applied() + 1);
  const TraceSpan span(trace, TraceRow::kSteps, "step");
  const int64_t begin_ns = system::NowNs();
  capture_ = capture;
  marks_ = &marks;
  HYBRIDOPT_TRY(early_.Stop(request));
  plan_.Make(request, step_counts_);
  BeginDisk();
  Verdict verdict{};
  if (device_.unified()) {
    HYBRIDOPT_TRY(RunInPlace(request, result, &verdict));
    result->total_seconds = SecondsSince(begin_ns);
  } else {
    HYBRIDOPT_TRY(RunStaged(request, ready, result, &verdict));
  }
  HYBRIDOPT_TRY(EndDisk());
  HYBRIDOPT_TRY(PutBorrowedAside(result));
  CountStep(verdict, result);
  early_.End(request, result);
  trace.Collect();
  trace.SetStep(step_counts_.applied() + 1);
  return {};
}

Status StepPipeline::GradsComing(std::span<const MoveItem> grads,
                                 std::span<const offload_group_t> groups, Capture* capture) {
  if (!early_.Assume(groups)) return {};
  for (const MoveItem& grad : grads) HYBRIDOPT_TRY(early_.Coming(grad.param, grad.data, capture));
  return {};
}

void StepPipeline::CountStep(const Verdict& verdict, offload_step_result_t* result) {
  result->skipped = verdict.skip;
  result->grad_norm = verdict.grad_norm;
  result->grad_clip = verdict.grad_clip;
  if (verdict.skip == 0) {
    step_counts_.set_applied(step_counts_.applied() + 1);
    for (uint32_t id = 0; id < table_.size(); ++id)
      if (plan_.param(id).active) step_counts_.set(id, step_counts_.of(id) + 1);
  }
  result->step = step_counts_.applied();
}

// ---------------------------------------------------------------------------------- the verdict --

// Lists the gradients whose squares have not been summed yet, in registration order.
void StepPipeline::ListNormInputs() {
  norm_inputs_.clear();
  for (uint32_t id = 0; id < table_.size(); ++id) {
    const StepParam& param = plan_.param(id);
    if (param.active && param.host_grad == nullptr)
      norm_inputs_.push_back({param.addresses.grad, table_.param(id).count, param.grad_dtype,
                              shape_.params[id].first_norm_block});
  }
}

// Adds the sums of all params: sums of gradients that the host holds, and sums in `landed_blocks`.
// Then combines the result with the other ranks. The order of the additions is the same as on the
// device.
Result<Verdict> StepPipeline::DecideOnHost(const StepRequest& request,
                                           const double* landed_blocks) {
  double sum = 0;
  bool finite = true;
  for (uint32_t id = 0; id < table_.size(); ++id) {
    if (!plan_.param(id).active) continue;
    const uint64_t first = shape_.params[id].first_norm_block;
    const double* const blocks = plan_.param(id).host_grad != nullptr
                                     ? host_norm_sums_.blocks(first)
                                     : landed_blocks + first;
    const double param_sum = AddBlocks(blocks, table_.param(id).count);
    finite = finite && std::isfinite(param_sum);
    if ((table_.param(id).flags & OFFLOAD_PARAM_REPLICA) == 0) sum += param_sum;
  }
  HYBRIDOPT_TRY(comm_.AgreeOnNorm(&sum, &finite));
  // `sum` does not include gradients of replicas or of other ranks. If one of those is not finite,
  // `sum` becomes NaN. Inf stays Inf.
  if (!finite && std::isfinite(sum)) sum = std::numeric_limits<double>::quiet_NaN();
  return Decide(sum, request.grad_scale, request.grad_norm_max);
}

void StepPipeline::BeginDisk() {
  if (DiskMemory* const disk = memory_.disk(); disk != nullptr)
    disk->Begin([this](uint32_t chunk) { return plan_.active_count(chunk) > 0; });
}

// ----------------------------------------------------------------------- params in host memory --

Status StepPipeline::RunInPlace(const StepRequest& request, offload_step_result_t* result,
                                Verdict* verdict) {
  if (NeedsNorm(request)) {
    const TraceRange range(lanes_.trace(), TraceRow::kSteps, "norm");
    Stopwatch norm(result->norm_seconds);
    ListNormInputs();
    HYBRIDOPT_TRY(host_norm_sums_.Sum(context_, norm_inputs_));
    HYBRIDOPT_ASSIGN(*verdict, DecideOnHost(request, host_norm_sums_.blocks(0)));
  } else {
    *verdict = AssumeFinite(request.grad_scale);
  }
  if (verdict->skip != 0 || plan_.chunk_count() == 0) return {};
  plan_.ScaleCoefficients(verdict->grad_factor, &host_coefficients_);
  Stopwatch update(result->update_seconds);
  HostStep step = HostStepNow();
  step.follow_params = (request.flags & OFFLOAD_STEP_FOLLOW_PARAMS) != 0;
  if (memory_.disk() != nullptr) return UpdateThroughDiskRing(step, result);
  const uint64_t total = plan_.active_count(0);
  result->cpu_elements = total;
  // The update is one pass. While a save has state to read that its buffer has no room for, the
  // pass is cut into ranges, and the state of each range is put aside. With room for all there is
  // nothing to wait for between ranges; cut up, the pass would end each range with a wait for the
  // last worker, whose CPU the save's threads may be using.
  if (capture_ == nullptr || !capture_->reads_state() || capture_->AwaitRoom(0))
    return UpdateInPlace(step, 0, {0, total});
  WorkRange range{0, 0};
  for (const Fragment& fragment : plan_.fragments(0)) {
    if (!plan_.param(fragment.param).active) continue;
    const uint64_t most = shape_.options.chunk_elements;
    for (uint64_t first = 0, end = 0; first < fragment.count; first = end) {
      end = fragment.unit.CutOf(first, fragment.count, most);  // as segments of the capture
      if (range.end - range.begin + end - first > most) {
        HYBRIDOPT_TRY(UpdateInPlace(step, 0, range));
        range.begin = range.end;
      }
      range.end += end - first;
    }
  }
  return UpdateInPlace(step, 0, range);
}

// Some chunks are on disk: while one is updated, threads read later ones and write earlier ones.
Status StepPipeline::UpdateThroughDiskRing(const HostStep& step, offload_step_result_t* result) {
  for (uint32_t chunk = 0; chunk < plan_.chunk_count(); ++chunk) {
    {
      const TraceRange range(lanes_.trace(), TraceRow::kSteps, "await state from disk", chunk);
      Stopwatch stall(result->stall_seconds);
      HYBRIDOPT_TRY(memory_.disk()->Await(chunk));
    }
    HYBRIDOPT_TRY(UpdateInPlace(step, chunk, {0, plan_.active_count(chunk)}));
    memory_.disk()->Updated(chunk);
    result->cpu_elements += plan_.active_count(chunk);
  }
  return {};
}

Status StepPipeline::UpdateInPlace(const HostStep& step, uint32_t chunk, const WorkRange& range) {
  if (range.begin == range.end) return {};
  updater_.PutAside(step, chunk, range);
  const ProfilerRange updating("update", chunk);
  updater_.Begin(plan_, chunk, range, work_);
  const Status status = work_.pieces.Share(context_.workers(), [&](uint32_t worker) {
    const TraceSpan span(lanes_.trace(), WorkerRow(worker), "update", chunk);
    updater_.Update(step, chunk, {}, work_, worker);
  });
  updater_.Copied(step, chunk, range, status.ok());
  return status;
}

// ------------------------------------------------------------------------------- behind a save --

Status StepPipeline::PutDeviceShareAside() {
  return capture_ != nullptr ? aside_.QueueDeviceShare(*capture_) : Status();
}

// After the step has completed the caller may write any param, even one that the step does not
// update. So the step first puts aside all borrowed memory that the save has not read.
Status StepPipeline::PutBorrowedAside(offload_step_result_t* result) {
  if (capture_ == nullptr) return {};
  Stopwatch total(result->total_seconds), stall(result->stall_seconds);
  if (!device_.unified()) return aside_.PutBorrowedAside(*capture_);
  for (uint32_t id = 0; id < table_.size(); ++id)
    if (capture_->borrows(id))
      updater_.PutBorrowedAside(*capture_, id, plan_.param(id).addresses.data);
  return {};
}

// Waits until the gradients are ready. The caller's stream may itself be waiting for the save.
Status StepPipeline::AwaitGradients(EventHandle ready) {
  const TraceRange range(lanes_.trace(), TraceRow::kSteps, "await gradients");
  return lanes_.WaitForCaller(ready, "the gradients", [this]() -> Result<bool> {
    if (capture_ == nullptr || !capture_->borrows()) return false;
    return capture_->AwaitBorrowed();
  });
}

// --------------------------------------------------------------------- params in device memory --

Status StepPipeline::RunStaged(const StepRequest& request, EventHandle ready,
                               offload_step_result_t* result, Verdict* verdict) {
  HYBRIDOPT_TRY(device_.StreamWait(lanes_.down, ready));
  HYBRIDOPT_TRY(device_.StreamWait(lanes_.compute, ready));
  TakeAhead();
  // If a stream's launch queue is full, a call that queues a copy blocks until the stream runs
  // again. So copies that might fill the queue are queued only after the gradients are ready.
  if (cpu_executor_.CopiesAhead() > Lanes::kMaxCommandsAhead) HYBRIDOPT_TRY(AwaitGradients(ready));
  HYBRIDOPT_TRY(cpu_executor_.CopyAhead(result));
  HYBRIDOPT_TRY(QueueVerdict(request));
  HYBRIDOPT_TRY(streamed_.CopyAhead());
  // The clock starts when the gradients are ready: the caller's own work does not count as time of
  // the step.
  HYBRIDOPT_TRY(AwaitGradients(ready));
  Stopwatch total(result->total_seconds);
  {
    const TraceRange range(lanes_.trace(), TraceRow::kSteps, "norm");
    Stopwatch norm(result->norm_seconds);
    HYBRIDOPT_ASSIGN(*verdict, AwaitVerdict(request));
  }
  HYBRIDOPT_TRY(DecideEarly(*verdict, result));
  if (verdict->skip != 0) {
    HYBRIDOPT_TRY(cpu_executor_.AwaitCopiedAhead());
    return streamed_.AwaitCopiedAhead();
  }
  plan_.ScaleCoefficients(verdict->grad_factor, &host_coefficients_);
  HYBRIDOPT_TRY(PutDeviceShareAside());
  HYBRIDOPT_TRY(device_executor_.Queue(plan_));
  marks_->issued(kDevicePart);
  return RunChunks(result);
}

// The two executors take the first chunks in turn, so that the first chunks finish at the speed of
// both together. If a chunk's gradients are on the host, the CPU workers need less of the link for
// it; if they are on the device, the streamed executor does. Where CPU workers take chunks, only
// they update a chunk on disk, and the disk takes longest: so they begin with these chunks, and
// leave the others to the streamed executor.
void StepPipeline::TakeAhead() {
  queue_.Reset();
  early_.TakeFromQueue();
  cpu_executor_.Reset();
  streamed_.Reset();
  if (CpuTakes() && streamed_.on()) PreferExecutors();
  TakeInTurns();
}

void StepPipeline::PreferExecutors() {
  const bool has_disk = memory_.disk() != nullptr;
  if (!has_disk && !plan_.host_holds_grads()) return;
  for (uint32_t chunk = 0; chunk < plan_.chunk_count(); ++chunk) {
    if (plan_.active_count(chunk) == 0) continue;
    const bool cpu =
        plan_.chunks().chunks[chunk].on_disk || (plan_.host_holds_grads() && plan_.IsHeld(chunk));
    queue_.Prefer(chunk, cpu ? Executor::kCpu : Executor::kStreamed);
  }
}

void StepPipeline::TakeInTurns() {
  for (bool taken = true; taken;) {
    taken = CpuTakes() && cpu_executor_.TakeAhead();
    taken = streamed_.TakeAhead() || taken;
  }
}

// Chunks that were updated early and then undone are free again.
Status StepPipeline::DecideEarly(const Verdict& verdict, offload_step_result_t* result) {
  HYBRIDOPT_ASSIGN(const bool kept, early_.Keep(verdict));
  if (kept || verdict.skip != 0) return {};
  TakeInTurns();
  HYBRIDOPT_TRY(cpu_executor_.CopyAhead(result));
  return streamed_.CopyAhead();
}

Status StepPipeline::RunChunks(offload_step_result_t* result) {
  device_updated_ = false;
  const HostStep step = HostStepNow();
  HYBRIDOPT_TRY(streamed_.Begin(step));
  const Status cpu = cpu_executor_.Run(step, result);
  if (!cpu.ok()) queue_.Stop();
  const Status streamed = streamed_.Await(result);
  const bool stopped = !cpu.ok() || !streamed.ok();
  HYBRIDOPT_TRY(stopped ? early_.sent() : early_.Finish(result));
  HYBRIDOPT_TRY(cpu);
  HYBRIDOPT_TRY(streamed);
  double no_chunk_seconds = 0;
  Stopwatch stall(plan_.chunk_count() > 0 ? result->stall_seconds : no_chunk_seconds);
  HYBRIDOPT_TRY(device_executor_.Await(&result->device_update_seconds));
  if (capture_ != nullptr) aside_.DeviceShareCopied(*capture_);
  marks_->reached(kDevicePart + queue_.finished());
  return {};
}

// The device's share has been queued before all chunks.
void StepPipeline::Issued(uint32_t chunk, EventHandle written) {
  marks_->issued(kDevicePart + queue_.Issue(chunk, written));
  // After each chunk that another executor has issued, one chunk that was updated early is sent: if
  // all of these were sent at once, they would delay the chunks for which the caller waits first.
  if (queue_.TakenBy(chunk) != Executor::kEarly && !early_.SendNext().ok()) queue_.Stop();
}

Status StepPipeline::PutBehind(StreamHandle stream, uint64_t mark) const {
  HYBRIDOPT_TRY(device_.StreamWait(stream, lanes_.device_updated.end));
  for (EventHandle written : queue_.WrittenUpTo(mark - kDevicePart))
    if (written != nullptr) HYBRIDOPT_TRY(device_.StreamWait(stream, written));
  return {};
}

// One mark stands for a param's progress on both tiers, so a finished chunk counts only after the
// device has updated its share. The executor that has finished a chunk calls this.
Status StepPipeline::Finished(uint32_t chunk) {
  std::lock_guard lock(finished_mutex_);
  const uint32_t finished = queue_.Finish(chunk);
  if (!device_updated_) {
    HYBRIDOPT_ASSIGN(device_updated_, device_executor_.Updated());
  }
  if (device_updated_) marks_->reached(kDevicePart + finished);
  return {};
}

// If all gradients are on the device and no other rank takes part, the device makes the verdict,
// and its updates need not wait for the host.
bool StepPipeline::VerdictOnDevice() const {
  return !plan_.host_holds_grads() && !comm_.present() && !has_replicas_;
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
  TraceWork work(lanes_.trace(), TraceRow::kDeviceUpdate, lanes_.compute, "norm");
  HYBRIDOPT_TRY(device_.Norm(lanes_.compute, launch));
  if (on_device) {
    HYBRIDOPT_TRY(device_.CopyToHost(lanes_.compute, lanes_.host_verdict, lanes_.device_verdict,
                                     sizeof(Verdict)));
  } else if (!norm_inputs_.empty()) {
    HYBRIDOPT_TRY(device_.CopyToHost(lanes_.compute, lanes_.host_block_sums, lanes_.block_sums,
                                     shape_.norm_blocks * sizeof(double)));
  }
  work.End();
  return device_.Record(lanes_.verdict_known, lanes_.compute);
}

Result<Verdict> StepPipeline::AwaitVerdict(const StepRequest& request) {
  if (!NeedsNorm(request)) return AssumeFinite(request.grad_scale);
  HYBRIDOPT_TRY(lanes_.Wait(lanes_.verdict_known, "the gradient norm"));
  if (VerdictOnDevice()) return *lanes_.host_verdict;
  HYBRIDOPT_ASSIGN(const Verdict verdict, DecideOnHost(request, lanes_.host_block_sums));
  // A skipped step ends here and queues nothing more on the device.
  if (verdict.skip == 0)
    HYBRIDOPT_TRY(device_.SetVerdict(lanes_.compute, verdict, lanes_.device_verdict));
  return verdict;
}

}  // namespace hybridopt
