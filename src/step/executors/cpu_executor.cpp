#include "step/executors/cpu_executor.h"

#include "base/profiler_range.h"
#include "base/system.h"
#include "machine/stopwatch.h"
#include "machine/trace/trace.h"

namespace hybridopt {

CpuExecutor::CpuExecutor(Context& context, const ParamTable& table, const StepPlan& plan,
                         Lanes& lanes, const StateMemory& memory, ChunkQueue& queue,
                         ChunkProgress& progress, const ChunkUpdater& updater)
    : context_(context),
      device_(context.device()),
      table_(table),
      plan_(plan),
      lanes_(lanes),
      memory_(memory),
      queue_(queue),
      progress_(progress),
      updater_(updater) {
  UseRing();
}

void CpuExecutor::UseRing() {
  slots_.clear();
  slots_.reserve(lanes_.ring().slots());
  for (uint32_t slot = 0; slot < lanes_.ring().slots(); ++slot)
    slots_.push_back({this, ChunkWork(context_.workers().threads())});
}

bool CpuExecutor::TakeAhead() { return taken_ < lanes_.ring().slots() && Take(); }

uint64_t CpuExecutor::CopiesAhead() const {
  uint64_t copies = 0;
  for (uint32_t number = 0; number < taken_; ++number)
    copies += (plan_.params_come_down() ? 2 : 1) * plan_.fragments(slots_[number].taken).size();
  return copies;
}

Status CpuExecutor::CopyAhead(offload_step_result_t* result) {
  for (; copied_ahead_ < taken_; ++copied_ahead_) HYBRIDOPT_TRY(BringDown(copied_ahead_, result));
  return {};
}

Status CpuExecutor::AwaitCopiedAhead() {
  for (uint32_t number = 0; number < taken_; ++number)
    HYBRIDOPT_TRY(lanes_.Wait(lanes_.landed(number).end, "gradients coming down"));
  return {};
}

// --------------------------------------------------------------------------- the step's thread --

Status CpuExecutor::Run(const HostStep& step, offload_step_result_t* result) {
  task_.emplace(Task{step, result});
  status_ = {};
  idle_since_ns_ = system::NowNs();
  const Status status = GiveAll();
  task_.reset();
  return status;
}

Status CpuExecutor::GiveAll() {
  // When all taken chunks have been given, Retire may take another chunk.
  while (retired_ < taken_) {
    if (given_ == taken_) {
      HYBRIDOPT_TRY(AwaitRetire());
      continue;
    }
    HYBRIDOPT_TRY(AwaitNext());
    HYBRIDOPT_TRY(GiveNext());
    AwaitWorkers();
    HYBRIDOPT_TRY(status_);
  }
  task_->result->stall_seconds += SecondsSince(idle_since_ns_);
  return {};
}

Status CpuExecutor::AwaitNext() {
  while (!HasSlot()) HYBRIDOPT_TRY(AwaitRetire());
  const uint32_t slot = SlotOf(given_);
  const uint32_t chunk = slots_[slot].taken;
  {
    const TraceRange range(lanes_.trace(), TraceRow::kSteps, "await grads down", chunk);
    HYBRIDOPT_TRY(lanes_.Wait(lanes_.landed(slot).end, "gradients coming down"));
  }
  HYBRIDOPT_TRY(AwaitState(chunk));
  updater_.PutAside(task_->step, chunk, {0, plan_.active_count(chunk)});
  task_->result->stall_seconds += SecondsSince(idle_since_ns_);
  return {};
}

// A disk may be slow; meanwhile this retires chunks, because the caller may be waiting for their
// params.
Status CpuExecutor::AwaitState(uint32_t chunk) {
  DiskMemory* const disk = memory_.disk();
  if (disk == nullptr) return {};
  while (retired_ < sent_ && !disk->IsReady(chunk)) HYBRIDOPT_TRY(AwaitRetire());
  const TraceRange range(lanes_.trace(), TraceRow::kSteps, "await state from disk", chunk);
  return disk->Await(chunk);
}

// Gives the first chunk to the workers. If this succeeds, from here on the workers advance the
// pipeline.
Status CpuExecutor::GiveNext() {
  const WorkerPool::Work work = PrepareNext();
  busy_since_ns_ = system::NowNs();
  busy_.test_and_set();
  Status status = context_.workers().Begin(work, &job_);
  if (status.ok()) return status;
  given_ -= 1;
  busy_.clear();
  const uint32_t chunk = slots_[SlotOf(given_)].chunk;
  updater_.Copied(task_->step, chunk, {0, plan_.active_count(chunk)}, false);
  return status;
}

void CpuExecutor::AwaitWorkers() {
  const TraceRange range(lanes_.trace(), TraceRow::kSteps, "await workers");
  busy_.wait(true);
  context_.workers().Await(job_);  // the worker that did the last part may not have returned yet
}

WorkerPool::Work CpuExecutor::PrepareNext() {
  Slot& slot = slots_[SlotOf(given_++)];
  slot.chunk = slot.taken;
  updater_.Begin(plan_, slot.chunk, {0, plan_.active_count(slot.chunk)}, slot.work);
  return {slot, slot};
}

// On the step's own thread, which waits here; a worker retires only what has arrived.
Status CpuExecutor::AwaitRetire() {
  const uint32_t chunk = slots_[SlotOf(retired_)].chunk;
  const TraceSpan span(lanes_.trace(), TraceRow::kSteps, "await params up", chunk);
  return Retire();
}

Status CpuExecutor::Retire() {
  const uint32_t slot = SlotOf(retired_);
  const uint32_t chunk = slots_[slot].chunk;
  {
    const ProfilerRange range("await params up", chunk);
    HYBRIDOPT_TRY(lanes_.Wait(lanes_.uploaded(slot).end, "params going up"));
  }
  lanes_.link().ArrivedUpTo(slots_[slot].queued_up);
  HYBRIDOPT_ASSIGN(const double seconds, lanes_.Seconds(lanes_.uploaded(slot)));
  task_->result->params_up_seconds += seconds;
  lanes_.ring().ReleaseParams(slot);
  retired_ += 1;
  if (plan_.params_come_down()) HYBRIDOPT_TRY(TakeAndBringDown());
  return progress_.Finished(chunk);
}

// ------------------------------------------------------------------------------------- workers --

void CpuExecutor::Update(Slot& slot, uint32_t worker) {
  const TraceRange range(lanes_.trace(), WorkerRow(worker), "update", slot.chunk);
  const auto index = static_cast<uint32_t>(&slot - slots_.data());
  const ChunkBuffers buffers{lanes_.ring().grads(index), lanes_.ring().params(index)};
  updater_.Update(task_->step, slot.chunk, buffers, slot.work, worker);
}

// Jobs finish in the order in which they began, so the finished job is that of the oldest chunk
// that has been given.
void CpuExecutor::AfterUpdate() {
  const uint32_t number = sent_++;
  const uint32_t chunk = slots_[SlotOf(number)].chunk;
  updater_.Copied(task_->step, chunk, {0, plan_.active_count(chunk)});
  if (status_.ok()) status_ = CatchExceptions("a chunk", [&] { return MoveOn(number); });
  if (sent_ < given_) return;
  idle_since_ns_ = system::NowNs();
  task_->result->update_seconds += static_cast<double>(idle_since_ns_ - busy_since_ns_) * 1e-9;
  busy_.clear();
  busy_.notify_one();
}

Status CpuExecutor::MoveOn(uint32_t number) {
  const uint32_t slot = SlotOf(number);
  if (DiskMemory* const disk = memory_.disk(); disk != nullptr) disk->Updated(slots_[slot].chunk);
  HYBRIDOPT_ASSIGN(const double seconds, lanes_.Seconds(lanes_.landed(slot)));
  task_->result->grads_down_seconds += seconds;
  lanes_.ring().ReleaseGrads(slot);
  task_->result->cpu_elements += plan_.active_count(slots_[slot].chunk);
  HYBRIDOPT_TRY(SendUp(number));
  progress_.Issued(slots_[slot].chunk, lanes_.uploaded(slot).end);
  if (!plan_.params_come_down()) HYBRIDOPT_TRY(TakeAndBringDown());
  // Retires chunks now, even if no slot is needed yet, because the caller may be waiting for their
  // params.
  while (true) {
    HYBRIDOPT_ASSIGN(const bool may_retire, MayRetire());
    if (!may_retire) break;
    HYBRIDOPT_TRY(Retire());
  }
  while (true) {
    HYBRIDOPT_ASSIGN(const bool may_give, MayGive());
    if (!may_give) return {};
    if (context_.workers().TryBegin(PrepareNext(), &job_)) continue;
    given_ -= 1;  // the workers' queue is full of jobs of other optimizers
    return {};
  }
}

// Whether the oldest chunk that is not retired can be retired without a wait.
Result<bool> CpuExecutor::MayRetire() {
  if (retired_ == sent_) return false;
  return device_.Reached(lanes_.uploaded(SlotOf(retired_)).end);
}

// Whether the next chunk can be given without a wait. While a save has state to read, workers give
// no chunk: only the step's own thread does, because it may have to wait for the save.
Result<bool> CpuExecutor::MayGive() {
  const Capture* const capture = task_->step.capture;
  if (given_ == taken_ || !HasSlot() || (capture != nullptr && capture->reads_state()))
    return false;
  if (DiskMemory* const disk = memory_.disk(); disk != nullptr) {
    const uint32_t chunk = slots_[SlotOf(given_)].taken;
    if (!disk->IsReady(chunk)) return false;
    HYBRIDOPT_TRY(disk->Await(chunk));
  }
  return device_.Reached(lanes_.landed(SlotOf(given_)).end);
}

// -------------------------------------------------------------------------------------- copies --

// Takes a chunk from the queue into the slot of the chunk's number; the slot must be free.
bool CpuExecutor::Take() {
  const std::optional<uint32_t> chunk = queue_.Take(Executor::kCpu);
  if (chunk.has_value()) slots_[SlotOf(taken_++)].taken = *chunk;
  return chunk.has_value();
}

Status CpuExecutor::TakeAndBringDown() {
  return Take() ? BringDown(taken_ - 1, task_->result) : Status();
}

Status CpuExecutor::BringDown(uint32_t number, offload_step_result_t* result) {
  const uint32_t slot = SlotOf(number);
  const uint32_t chunk = slots_[slot].taken;
  const ProfilerRange range("queue grads down", chunk);
  lanes_.link().QueuedDown();
  TraceWork work(lanes_.trace(), TraceRow::kCopiesDown, lanes_.down, "grads down", chunk);
  HYBRIDOPT_TRY(device_.Record(lanes_.landed(slot).begin, lanes_.down));
  for (const Fragment& fragment : plan_.fragments(chunk)) {
    const StepParam& param = plan_.param(fragment.param);
    if (param.GradComesDown()) {
      const uint64_t element_bytes = DtypeBytes(param.grad_dtype);
      const uint64_t bytes = fragment.count * element_bytes;
      const auto* const grad = static_cast<const std::byte*>(param.addresses.grad);
      HYBRIDOPT_TRY(device_.CopyToHost(lanes_.down,
                                       lanes_.ring().grads(slot) + fragment.grad_offset,
                                       grad + fragment.begin * element_bytes, bytes));
      result->grads_down_bytes += bytes;
      work.AddBytes(bytes);
    }
    if (plan_.ParamComesDown(fragment.param)) {
      const uint64_t element_bytes = DtypeBytes(table_.param(fragment.param).dtype);
      const auto* const data = static_cast<const std::byte*>(param.addresses.data);
      HYBRIDOPT_TRY(device_.CopyToHost(
          lanes_.down, lanes_.ring().params(slot) + fragment.param_offset,
          data + fragment.begin * element_bytes, fragment.count * element_bytes));
      work.AddBytes(fragment.count * element_bytes);
    }
  }
  work.End();
  return device_.Record(lanes_.landed(slot).end, lanes_.down);
}

// These copies give way to no prefetch, because the forward pass waits for the params, and because
// a worker must not wait here.
Status CpuExecutor::SendUp(uint32_t number) {
  const uint32_t slot = SlotOf(number);
  const uint32_t chunk = slots_[slot].chunk;
  const ProfilerRange range("queue params up", chunk);
  TraceWork work(lanes_.trace(), TraceRow::kCopiesUp, lanes_.up, "params up", chunk);
  HYBRIDOPT_TRY(device_.Record(lanes_.uploaded(slot).begin, lanes_.up));
  for (const Fragment& fragment : plan_.fragments(chunk)) {
    const StepParam& param = plan_.param(fragment.param);
    if (!param.active) continue;
    const uint64_t element_bytes = DtypeBytes(table_.param(fragment.param).dtype);
    HYBRIDOPT_TRY(device_.CopyToDevice(
        lanes_.up, static_cast<std::byte*>(param.addresses.data) + fragment.begin * element_bytes,
        lanes_.ring().params(slot) + fragment.param_offset, fragment.count * element_bytes));
    task_->result->params_up_bytes += fragment.count * element_bytes;
    work.AddBytes(fragment.count * element_bytes);
    lanes_.link().QueuedUp(fragment.count * element_bytes);
  }
  slots_[slot].queued_up = lanes_.link().queued_up_bytes();
  work.End();
  return device_.Record(lanes_.uploaded(slot).end, lanes_.up);
}

}  // namespace hybridopt
