#include "optimizer/optimizer.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <set>
#include <utility>

#include "base/system.h"
#include "memory/size_text.h"
#include "optimizer/optimizer_options.h"
#include "optimizer/step_totals.h"
#include "state/group.h"

namespace hybridopt {
namespace {

constexpr uint64_t kDefaultCommTimeoutNs = 600'000'000'000;

// The options without what the caller may free: Comm has a copy of its table.
offload_optimizer_options_t OwnOptions(offload_optimizer_options_t options,
                                       const std::string& disk_paths) {
  options.comm = nullptr;
  if (options.disk_paths != nullptr) options.disk_paths = disk_paths.c_str();
  return options;
}

Comm MakeComm(const offload_optimizer_options_t& options) {
  if (options.comm == nullptr) return {};
  return {*options.comm,
          static_cast<int64_t>(options.comm_timeout_ns != 0 ? options.comm_timeout_ns
                                                            : kDefaultCommTimeoutNs)};
}

}  // namespace

Result<std::shared_ptr<Optimizer>> Optimizer::Create(std::shared_ptr<Context> context,
                                                     const offload_optimizer_options_t& options) {
  HYBRIDOPT_TRY(CheckOptimizerOptions(options, context->device()));
  auto optimizer = std::make_shared<Optimizer>(std::move(context), options);
  HYBRIDOPT_TRY(optimizer->tickets_.Reserve(0));
  return optimizer;
}

Optimizer::Optimizer(std::shared_ptr<Context> context, const offload_optimizer_options_t& options)
    : context_(std::move(context)),
      disk_paths_(options.disk_paths != nullptr ? options.disk_paths : ""),
      options_(OwnOptions(options, disk_paths_)),
      comm_(MakeComm(options)),
      table_(options.algorithm, context_->device()) {
  context_->OptimizerCreated();
}

Optimizer::~Optimizer() {
  if (committed_ != nullptr) {
    // Queued work uses committed_, so it must end before committed_ is destroyed.
    (void)committed_->timeline->Drain([] { return Status(); });
  }
  committed_.reset();
  context_->OptimizerDestroyed();
}

Status Optimizer::Close() {
  if (!is_committed_) return {};
  Status stuck = committed_->timeline->Drain([this] { return comm_.GiveUpIfStuck(); });
  // Work that has been queued on the device ends without the other ranks.
  if (!stuck.ok()) committed_->lanes->AwaitStreams();
  return stuck;
}

// --------------------------------------------------------------------------------- registering --

Result<uint32_t> Optimizer::AddGroup(const offload_group_t& group) {
  if (committed_ != nullptr)
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "groups are fixed at commit; add them before, or make a new optimizer");
  return table_.AddGroup(group);
}

Status Optimizer::SetGroup(uint32_t id, const offload_group_t& group) {
  if (committed_ != nullptr) HYBRIDOPT_TRY(committed_->timeline->CheckPoison());
  const bool gains_momentum = committed_ != nullptr && id < table_.groups().size() &&
                              group.momentum > 0 && committed_->momentum_free[id];
  if (gains_momentum)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "group.momentum is %g, but group %u was committed with momentum 0 and has "
                         "no momentum_buffer; commit with momentum above 0 and lower it afterwards",
                         group.momentum, id);
  return table_.SetGroup(id, group, committed_ != nullptr);
}

Result<uint32_t> Optimizer::AddParams(std::span<const ParamInput> params) {
  if (committed_ != nullptr)
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "params are fixed at commit; add them before, or make a new optimizer");
  for (const ParamInput& input : params)
    if (input.param.placement == OFFLOAD_PLACE_DISK && options_.disk_paths == nullptr)
      return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                           "param '%.200s' has placement OFFLOAD_PLACE_DISK, but "
                           "options.disk_paths is NULL; name directories there, or place it "
                           "OFFLOAD_PLACE_AUTO",
                           input.param.name != nullptr ? input.param.name : "");
  return table_.AddParams(params);
}

Status Optimizer::Bind(std::span<const offload_binding_t> bindings) {
  if (committed_ != nullptr) {
    HYBRIDOPT_TRY(committed_->timeline->CheckPoison());
    if (committed_->changes->on()) MarkRebound(bindings);
  }
  return table_.Bind(bindings);
}

// --------------------------------------------------------------------------------- plan, commit --

Result<offload_plan_t> Optimizer::Plan() const {
  if (committed_ != nullptr) {
    HYBRIDOPT_ASSIGN(offload_plan_t plan,
                     PlanOf(*context_, table_, committed_->shape, committed_->decided));
    plan.fits = 1;
    if (committed_->timeline->idle()) SetNodeBytes(committed_->FoundNodeBytes(), plan);
    return plan;
  }
  HYBRIDOPT_ASSIGN(const StateShape shape, MakeShape());
  Arrangement arrangement = Arrange(table_, shape, FractionsOf(options_));
  HYBRIDOPT_ASSIGN(offload_plan_t plan, FitRing(shape, arrangement));
  plan.fits = CheckStateMayStream(shape, arrangement).ok() &&
                      DiskMemory::CheckRing(shape, arrangement.chunks).ok() &&
                      CheckRoom(shape, plan).ok()
                  ? 1
                  : 0;
  return plan;
}

// The shape of what is registered. If the options leave the size of the save's buffer to the
// library, the size follows from the memory that all else leaves free.
Result<StateShape> Optimizer::MakeShape() const {
  StateShape shape = MakeStateShape(table_, ShapeOptionsOf(options_, context_->device()));
  for (const ParamShape& param : shape.params)
    for (const MatrixPart& part : param.parts)
      shape.device_matrix_bytes =
          std::max(shape.device_matrix_bytes, context_->device().MatrixWorkspaceBytes(part.shape));
  if (shape.matrices > 0 && !context_->device().matrix_products().empty()) {
    HYBRIDOPT_TRY(CheckNoCpuUpdates(options_, context_->device()));
    shape.options.cpu_updates = false;
  }
  HYBRIDOPT_TRY(CheckBesideDisk(options_.disk_fraction, "options."));
  if (options_.save_buffer_bytes != kAutoSaveBuffer) return shape;
  shape.options.save_buffer_bytes = 0;
  if (shape.options.on_disk) return shape;  // a step waits for the save
  HYBRIDOPT_ASSIGN(const offload_plan_t plan,
                   PlanOf(*context_, table_, shape, Arrange(table_, shape, FractionsOf(options_))));
  const auto less = [](uint64_t bytes, uint64_t taken) { return bytes - std::min(bytes, taken); };
  uint64_t bytes = Checkpoints::AutoBufferBytes(
      *context_, less(plan.host_available_bytes, context_->local_world() * plan.host_bytes));
  if (!context_->device().unified())
    bytes = std::min(bytes, less(plan.pinned_bytes_left, PinnedBytesOf(shape, plan)));
  shape.options.save_buffer_bytes = bytes;
  return shape;
}

// What state on disk does not go together with, where the params are known. The host's memory has
// no holes: between the elements that are on disk and those of a param that is placed on the host
// would be memory without use.
Status Optimizer::CheckBesideDisk(double disk_fraction, const char* of) const {
  if (disk_fraction == 0) return {};
  for (const Param& param : table_.params())
    if (param.placement == OFFLOAD_PLACE_HOST && param.count > 0)
      return Status::Error(OFFLOAD_UNSUPPORTED,
                           "param '%.200s' has placement OFFLOAD_PLACE_HOST, but "
                           "%sdisk_fraction is %g; register it as OFFLOAD_PLACE_AUTO, in "
                           "front of the others if it is to stay in memory, or leave "
                           "disk_fraction 0 and place params OFFLOAD_PLACE_DISK",
                           param.name.c_str(), of, disk_fraction);
  return {};
}

Status Optimizer::CheckRoom(const StateShape& shape, const offload_plan_t& plan) const {
  HYBRIDOPT_TRY(
      CheckDeviceRoom(*context_, "device_fraction", options_.device_fraction, plan.device_bytes));
  HYBRIDOPT_TRY(CheckHostRoom("the plan", plan.host_bytes, plan.host_available_bytes));
  if (context_->device().unified()) return {};
  return context_->CheckPinned(PinnedBytesOf(shape, plan),
                               "chunk_elements, staging_slots, movable, early_update_bytes, "
                               "save_buffer_bytes or disk_ring_bytes");
}

// Whether the device's ring leaves enough memory free. This is required only for a ring that the
// options do not ask for: other memory on the device is more important than such a ring.
bool Optimizer::LeavesRoom(const StateShape& shape, const offload_plan_t& plan) const {
  if (!shape.options.cpu_updates || options_.stream_ring_bytes != 0) return true;
  const uint64_t held_bytes =
      committed_ != nullptr ? committed_->decided.lanes.stream_ring_bytes : 0;
  return plan.device_ring_bytes <= std::max(held_bytes, plan.device_free_bytes / 8);
}

// The plan of an arrangement. Removes the device's ring from the arrangement if the context's cap
// does not allow its state to be pinned, or if the device has too little memory.
Result<offload_plan_t> Optimizer::FitRing(const StateShape& shape, Arrangement& arrangement) const {
  HYBRIDOPT_ASSIGN(const offload_plan_t plan, PlanOf(*context_, table_, shape, arrangement));
  if (!LeavesRoom(shape, plan)) {
    arrangement.lacks_room = true;
    arrangement.lanes.DropStreamRing();
    return PlanOf(*context_, table_, shape, arrangement);
  }
  if (plan.pinned_state_bytes == 0) return plan;
  // A change of residence has freed all that the optimizer holds now when it pins the state.
  uint64_t held_bytes = 0;
  if (committed_ != nullptr) {
    HYBRIDOPT_ASSIGN(const offload_plan_t held,
                     PlanOf(*context_, table_, shape, committed_->decided));
    held_bytes = PinnedBytesOf(shape, held) + committed_->pinned_state_bytes;
  }
  const uint64_t wanted_bytes = PinnedBytesOf(shape, plan) + plan.pinned_state_bytes;
  if (wanted_bytes <= held_bytes || wanted_bytes - held_bytes <= plan.pinned_bytes_left)
    return plan;
  arrangement.unpinned_bytes = plan.pinned_state_bytes;
  arrangement.lanes.DropStreamRing();
  return PlanOf(*context_, table_, shape, arrangement);
}

// Checks that the options' demands on the device's ring can be met.
Status Optimizer::CheckStateMayStream(const StateShape& shape,
                                      const Arrangement& arrangement) const {
  const ChunkTable& chunks = arrangement.chunks;
  const uint64_t least = std::min<uint64_t>(kMinStreamChunks, chunks.chunks.size());
  if (!shape.options.streams_state || arrangement.lacks_room) return {};
  if (arrangement.unpinned_bytes > 0 && shape.options.cpu_updates) return {};
  const StreamedOnly streamed = StreamedOnlyOf(options_);
  if (arrangement.unpinned_bytes > 0)
    return Status::Error(
        OFFLOAD_INVALID_ARGUMENT,
        "%s, but %llu bytes of state must be pinned for that, more than options.pinned_bytes_max "
        "of the context leaves; raise it, or %s",
        streamed.why, static_cast<unsigned long long>(arrangement.unpinned_bytes),
        streamed.way_out);
  if (arrangement.lanes.stream_slots >= least) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "options.stream_ring_bytes is %llu, expected at least %llu, the state of 2 "
                       "chunks (0 = that of %u); raise it, make chunk_elements smaller, or use "
                       "OFFLOAD_EXECUTORS_CPU",
                       static_cast<unsigned long long>(options_.stream_ring_bytes),
                       static_cast<unsigned long long>(least * chunks.stream_bytes_most()),
                       DefaultStreamChunks(shape));
}

// Whether CPU workers may update the host share, whose state is not pinned.
Status Optimizer::CheckCpuUpdates(const StateShape& shape, const Status& pinned) const {
  if (shape.options.cpu_updates) return {};
  const StreamedOnly streamed = StreamedOnlyOf(options_);
  return Status::Error(pinned.code(), "%s, but its state is not pinned: %s; %s", streamed.why,
                       pinned.message().c_str(), streamed.way_out);
}

// Pins the host's state for the device's ring. If the system does not pin all of it, the ring is
// freed and the CPU workers update all chunks, unless the options forbid that.
Status Optimizer::PinStates(Committed& committed) {
  if (committed.decided.unpinned_bytes > 0)
    context_->Note("state does not stream through the device: pinned_bytes_max is too small");
  if (committed.decided.lacks_room)
    context_->Note(
        "state does not stream through the device: a ring would take more than an eighth of its "
        "free memory");
  if (committed.decided.lanes.stream_slots == 0) return {};
  const Status status = committed.PinForStreams();
  if (status.ok() || !IsUnpinnable(status)) return status;
  HYBRIDOPT_TRY(CheckCpuUpdates(committed.shape, status));
  committed.decided.lanes.DropStreamRing();
  HYBRIDOPT_ASSIGN(LaneScratch scratch, LaneScratch::Take(*context_, committed.decided.lanes));
  committed.lanes->UseScratch(scratch);
  return {};
}

// The device gets to know all shapes of matrices before the first step.
Status Optimizer::PrepareMatrices(Committed& committed) {
  const Lanes& lanes = *committed.lanes;
  std::set<std::pair<uint64_t, uint64_t>> known;
  for (const ParamShape& param : committed.shape.params)
    for (const MatrixPart& part : param.parts)
      if (known.insert({part.shape.rows, part.shape.cols}).second)
        HYBRIDOPT_TRY(
            context_->device().PrepareMatrices(lanes.compute, part.shape, lanes.matrix_workspace));
  return {};
}

Status Optimizer::Commit(StreamHandle stream) {
  if (committed_ != nullptr)
    return Status::Error(OFFLOAD_INVALID_STATE, "this optimizer has been committed before");
  if (table_.size() == 0)
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "no params; call offload_optimizer_add_params before commit");
  HYBRIDOPT_TRY(context_->device().CheckStream(stream));
  HYBRIDOPT_ASSIGN(StateShape shape, MakeShape());
  Arrangement arrangement = Arrange(table_, shape, FractionsOf(options_));
  HYBRIDOPT_ASSIGN(const offload_plan_t plan, FitRing(shape, arrangement));
  HYBRIDOPT_TRY(CheckStateMayStream(shape, arrangement));
  HYBRIDOPT_TRY(DiskMemory::CheckRing(shape, arrangement.chunks));
  HYBRIDOPT_TRY(CheckRoom(shape, plan));
  HYBRIDOPT_TRY(CheckChunkCount(shape));
  HYBRIDOPT_ASSIGN(auto committed, Committed::Make(*context_, table_, comm_, options_,
                                                   std::move(shape), std::move(arrangement)));
  HYBRIDOPT_TRY(committed->checkpoints->CheckRoom());
  HYBRIDOPT_TRY(committed->pipeline->Start());
  // A program may never save: what it has not asked for it is not to pay for.
  if (options_.save_buffer_bytes != kAutoSaveBuffer)
    HYBRIDOPT_TRY(committed->checkpoints->TakeBuffer());
  HYBRIDOPT_TRY(committed->master_fill->Initialize(table_.addresses(), stream));
  if (DiskMemory* const disk = committed->memory->disk(); disk != nullptr && !disk->is_direct())
    context_->Note("state on disk goes through the page cache: a file system takes no direct I/O");
  HYBRIDOPT_TRY(PinStates(*committed));  // the workers must touch it before: Initialize does that
  HYBRIDOPT_TRY(committed->changes->ClearDevice());
  HYBRIDOPT_TRY(PrepareMatrices(*committed));
  committed->planned_device_bytes = plan.device_bytes;
  HYBRIDOPT_ASSIGN(std::atomic<uint64_t>* const progress, context_->device().NewFlag());
  HYBRIDOPT_TRY(context_->runners().Start());
  committed->timeline = std::make_unique<Timeline>(
      context_->runners(),
      [this](uint32_t slot, uint64_t sequence) { return Execute(slot, sequence); },
      [this](bool failure) { return Settle(failure); }, *progress);
  committed_ = std::move(committed);
  is_committed_ = true;

  std::lock_guard lock(results_mutex_);
  stats_.host_bytes = plan.host_bytes;
  stats_.device_bytes = plan.device_bytes;
  stats_.staging_bytes = plan.staging_bytes;
  char text[160];
  std::snprintf(text, sizeof(text), "committed %u params: %s on the host, %s on %s",
                plan.param_count, SizeText(plan.host_bytes).c_str(),
                SizeText(plan.device_bytes).c_str(), context_->device().name());
  context_->Log(OFFLOAD_LOG_INFO, text);
  return {};
}

// Checks that a step has a mark for each chunk, under every device fraction.
Status Optimizer::CheckChunkCount(const StateShape& shape) const {
  if (shape.options.unified) return {};
  const uint64_t chunks = ChunksMost(shape);
  if (chunks + 2 <= Timeline::kMarks) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "options.chunk_elements %llu cuts %llu elements into %llu chunks, at most "
                       "2^24 - 2 can be told apart; raise it",
                       static_cast<unsigned long long>(shape.options.chunk_elements),
                       static_cast<unsigned long long>(shape.element_count),
                       static_cast<unsigned long long>(chunks));
}

Status Optimizer::CheckCommitted() const {
  if (is_committed_) return {};
  return Status::Error(OFFLOAD_INVALID_STATE, "not committed; call offload_optimizer_commit first");
}

// ------------------------------------------------------------------------------------- stepping --

Result<offload_ticket_t> Optimizer::Step(const offload_step_options_t& options) {
  HYBRIDOPT_TRY(CheckCommitted());
  const TraceSpan span(trace(), TraceRow::kCallers, "call step");
  Committed& committed = *committed_;
  HYBRIDOPT_ASSIGN(const uint32_t slot, NextSlot());
  if (committed.steps_queued - committed.steps_done >= StepPipeline::kMaxQueuedSteps)
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "%u steps are queued, at most %u may be; wait for an earlier ticket",
                         StepPipeline::kMaxQueuedSteps, StepPipeline::kMaxQueuedSteps);
  HYBRIDOPT_TRY(CheckStepOptions(options));
  HYBRIDOPT_TRY(committed.lifecycle->CheckStep());
  StepRequest& step = committed.steps[committed.steps_queued % committed.steps.size()];
  FillStep(options, step);
  committed.requests[slot] = &step;
  HYBRIDOPT_TRY(RecordProducers(slot, {&options.stream, 1}));
  HYBRIDOPT_ASSIGN(const uint64_t sequence, committed.timeline->Submit());
  committed.steps_queued += 1;
  committed.last_step = sequence;
  committed.lifecycle->ApplyStep();
  return TicketOf(sequence);
}

Status Optimizer::CheckStepOptions(const offload_step_options_t& options) const {
  constexpr uint32_t kKnown = OFFLOAD_STEP_ASSUME_FINITE | OFFLOAD_STEP_FOLLOW_PARAMS;
  if ((options.flags & ~kKnown) != 0)
    return Status::Error(OFFLOAD_UNSUPPORTED, "options.flags is 0x%x, known is 0x%x", options.flags,
                         kKnown);
  if ((options.flags & OFFLOAD_STEP_FOLLOW_PARAMS) != 0 && !context_->device().unified())
    return Status::Error(OFFLOAD_UNSUPPORTED,
                         "options.flags has OFFLOAD_STEP_FOLLOW_PARAMS, expected it only where "
                         "params are in host memory; call offload_optimizer_refresh_masters for "
                         "params that other code has written");
  // Kernels multiply gradients by the reciprocal of grad_scale, in fp32. The comparison is written
  // so that NaN fails it.
  const float reciprocal =
      options.grad_scale != 0 ? static_cast<float>(1.0 / options.grad_scale) : 1.0f;
  if (!(reciprocal > 0) || std::isinf(reciprocal))
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.grad_scale is %g, expected a number above 0 whose reciprocal is "
                         "finite and above 0 in fp32 (0 = 1)",
                         options.grad_scale);
  if (!(options.grad_norm_max >= 0) || std::isinf(options.grad_norm_max))
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.grad_norm_max is %g, expected a finite number of at least 0 "
                         "(0 = no clipping)",
                         options.grad_norm_max);
  if (options.grad_norm_max > 0 && !comm_.present() && committed_->partial_param.has_value())
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.grad_norm_max is %g, but param %u '%.200s' is a part of its "
                         "tensor and no other rank can be asked for the rest of the norm; give a "
                         "comm table at create (with world 1 if this part is all there is)",
                         options.grad_norm_max, *committed_->partial_param,
                         table_.param(*committed_->partial_param).name.c_str());
  return context_->device().CheckStream(options.stream);
}

void Optimizer::FillStep(const offload_step_options_t& options, StepRequest& request) const {
  request.flags = options.flags;
  request.grad_scale = options.grad_scale != 0 ? options.grad_scale : 1.0;
  request.grad_norm_max = options.grad_norm_max;
  std::copy(table_.addresses().begin(), table_.addresses().end(), request.addresses.begin());
  std::copy(table_.groups().begin(), table_.groups().end(), request.groups.begin());
  for (uint32_t id = 0; id < table_.size(); ++id)
    request.host_grads[id] = committed_->lifecycle->host_grad(id);
}

// Records events after the work that is queued on the streams now; the request in this slot waits
// for these events.
Status Optimizer::RecordProducers(uint32_t slot, std::span<const offload_stream_t> streams) {
  Device& device = context_->device();
  if (device.unified()) return {};
  const std::span<const EventHandle> events = committed_->lanes->ReadyEvents(slot);
  for (size_t i = 0; i < streams.size(); ++i) HYBRIDOPT_TRY(device.Record(events[i], streams[i]));
  return {};
}

// The slot of the next request. The caller will get a ticket for this request.
Result<uint32_t> Optimizer::NextSlot() {
  HYBRIDOPT_ASSIGN(const uint32_t slot, committed_->timeline->NextSlot());
  std::lock_guard lock(tickets_mutex_);
  HYBRIDOPT_TRY(tickets_.Reserve(committed_->timeline->submitted() + 1));
  return slot;
}

offload_ticket_t Optimizer::TicketOf(uint64_t sequence) const {
  std::lock_guard lock(tickets_mutex_);
  return tickets_.NumberOf(sequence);
}

Result<offload_ticket_t> Optimizer::QueueNothing() {
  HYBRIDOPT_TRY(CheckCommitted());
  HYBRIDOPT_ASSIGN(const uint32_t slot, NextSlot());
  committed_->requests[slot] = std::monostate();
  HYBRIDOPT_ASSIGN(const uint64_t sequence, committed_->timeline->Submit());
  return TicketOf(sequence);
}

// ------------------------------------------------------------------------- who may use the state--
//
// Chunks that have been updated early (step/executors/early_updates.h) already have the values that
// the next step will give them. So these updates are undone before anything other than that step
// uses the state: in ExecuteRequest for queued requests, in InTurn after a failure, because no step
// follows, and in ClaimState for the caller's own thread. No other code has to undo them.

Status Optimizer::ExecuteRequest(uint32_t slot, uint64_t sequence) {
  Request& request = committed_->requests[slot];
  Checkpoints& checkpoints = *committed_->checkpoints;
  Timeline& timeline = *committed_->timeline;
  if (const auto* const step = std::get_if<StepRequest*>(&request))
    return ExecuteStep(**step, slot, sequence);
  auto* const move = std::get_if<MoveRequest>(&request);
  if (move != nullptr && move->move == Move::kOffloadGrads) return OffloadGrads(*move, slot);
  HYBRIDOPT_TRY(committed_->pipeline->UndoEarly());
  if (move != nullptr) {
    HYBRIDOPT_TRY(AwaitBeforeMove(*move, slot));
    return RunMove(*move);
  }
  if (auto* const save = std::get_if<SaveRequest>(&request))
    return checkpoints.Save(std::move(*save), committed_->lanes->KeepReadyEvent(slot), timeline,
                            sequence);
  if (const auto* const load = std::get_if<LoadRequest>(&request))
    return checkpoints.Load(*load, ReadyEvent(slot), timeline, sequence);
  if (auto* const change = std::get_if<ResidenceRequest>(&request))
    return ExecuteResidenceChange(*change);
  return {};
}

// After the offload, chunks may be updated early with these gradients.
Status Optimizer::OffloadGrads(MoveRequest& request, uint32_t slot) {
  StepPipeline& pipeline = *committed_->pipeline;
  HYBRIDOPT_TRY(AwaitBeforeMove(request, slot));
  HYBRIDOPT_TRY(pipeline.GradsComing(request.items, *request.groups,
                                     committed_->checkpoints->save().capture()));
  HYBRIDOPT_TRY(RunMove(request));
  return pipeline.GradsArrived();
}

Status Optimizer::InTurn(const char* what, FunctionRef<Status()> work) {
  Status status = CatchExceptions(what, work);
  if (status.ok()) return status;
  (void)committed_->pipeline->UndoEarly();
  committed_->timeline->LetOthersRun();  // the log is a function of the caller's
  context_->Log(OFFLOAD_LOG_ERROR, status.message().c_str());
  return status;
}

// Gives the state to the caller's thread until the present call returns. INVALID_STATE if queued
// work or a save in the background uses the state.
Status Optimizer::ClaimState() const {
  const Timeline& timeline = *committed_->timeline;
  if (const uint32_t queued = timeline.queued(); queued > 0)
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "%u calls are queued (a save counts until its ticket completes); call "
                         "offload_optimizer_wait first",
                         queued);
  // After a failure a runner undoes early updates, and it may still be doing that.
  return timeline.CheckPoison().ok() ? committed_->pipeline->UndoEarly() : Status();
}

// ---------------------------------------------------------------------------------- on a runner --

Status Optimizer::Execute(uint32_t slot, uint64_t sequence) {
  if (MayWait(slot)) committed_->timeline->LetOthersRun();
  return InTurn("queued work", [&] { return ExecuteRequest(slot, sequence); });
}

Status Optimizer::Settle(bool failure) {
  return InTurn("a save", [&] { return committed_->checkpoints->save().Settle(failure); });
}

// Whether the request may wait for anything other than the workers: for the device, other ranks or
// files.
bool Optimizer::MayWait(uint32_t slot) const {
  const bool is_step = std::holds_alternative<StepRequest*>(committed_->requests[slot]);
  return !is_step || !context_->device().unified() || comm_.present();
}

EventHandle Optimizer::ReadyEvent(uint32_t slot) const {
  const std::span<const EventHandle> ready = committed_->lanes->ReadyEvents(slot);
  return ready.empty() ? nullptr : ready[0];
}

Status Optimizer::ExecuteStep(const StepRequest& request, uint32_t slot, uint64_t sequence) {
  offload_step_result_t result{};
  BackgroundSave& save = committed_->checkpoints->save();
  // State on disk has one user at a time.
  if (committed_->memory->disk() != nullptr) HYBRIDOPT_TRY(save.AwaitCapture());
  HYBRIDOPT_TRY(save.BeforeStep(request.addresses));
  Timeline& timeline = *committed_->timeline;
  const auto issued = [&](uint64_t mark) { timeline.Issued(sequence, mark); };
  const auto reached = [&](uint64_t mark) { timeline.Reached(sequence, mark); };
  HYBRIDOPT_TRY(committed_->pipeline->Run(request, ReadyEvent(slot), save.capture(),
                                          {issued, reached}, &result));
  Remember(sequence, result);
  committed_->steps_done += 1;
  return {};
}

void Optimizer::Remember(uint64_t sequence, const offload_step_result_t& result) {
  std::lock_guard lock(results_mutex_);
  results_[(stats_.steps_applied + stats_.steps_skipped) % results_.size()] = {sequence, result};
  stats_.steps_applied += result.skipped == 0;
  stats_.steps_skipped += result.skipped != 0;
  AddToTotals(result, stats_);
  if (const uint64_t elements = result.cpu_elements + result.streamed_elements; elements > 0)
    streamed_share_ = static_cast<double>(result.streamed_elements) / static_cast<double>(elements);
}

Result<uint64_t> Optimizer::SequenceOf(offload_ticket_t ticket) const {
  const uint64_t submitted = committed_->timeline->submitted();
  if (ticket == 0) return submitted;
  const std::optional<uint64_t> sequence = [&] {
    std::lock_guard lock(tickets_mutex_);
    return tickets_.CountOf(ticket);
  }();
  if (!sequence.has_value() || *sequence == 0 || *sequence > submitted)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "ticket is 0x%llx, which this optimizer has not given out; use the ticket "
                         "of its own offload_optimizer_step, or 0 for everything queued",
                         static_cast<unsigned long long>(ticket));
  return *sequence;
}

Result<offload_step_result_t> Optimizer::StepResult(offload_ticket_t ticket) const {
  HYBRIDOPT_TRY(CheckCommitted());
  HYBRIDOPT_ASSIGN(const uint64_t asked, SequenceOf(ticket));
  const uint64_t sequence = ticket == 0 ? committed_->last_step.load() : asked;
  if (sequence == 0) return Status::Error(OFFLOAD_INVALID_STATE, "no step has been queued yet");
  if (Status status = committed_->timeline->Look(sequence); !status.ok()) {
    if (status.code() != OFFLOAD_TIMED_OUT) return status;
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "the step is still running; call offload_optimizer_wait first");
  }
  std::lock_guard lock(results_mutex_);
  for (const Remembered& remembered : results_)
    if (remembered.sequence == sequence) return remembered.result;
  return Status::Error(OFFLOAD_INVALID_STATE,
                       "the ticket is not of one of the last %zu steps, which are remembered",
                       results_.size());
}

Status Optimizer::Wait(offload_ticket_t ticket, int64_t timeout_ns) {
  HYBRIDOPT_TRY(CheckCommitted());
  const TraceSpan span(trace(), TraceRow::kCallers, "wait");
  HYBRIDOPT_ASSIGN(const uint64_t sequence, SequenceOf(ticket));
  Timeline& timeline = *committed_->timeline;
  return ticket == 0 ? timeline.WaitForAll(timeout_ns) : timeline.Wait(sequence, timeout_ns);
}

Status Optimizer::AwaitIssued(uint64_t sequence, uint64_t mark) {
  Status status =
      committed_->timeline->AwaitIssued(sequence, mark, [this] { return comm_.GiveUpIfStuck(); });
  // Work that has been queued on the device ends without the other ranks.
  if (status.code() == OFFLOAD_COMM_FAILED) committed_->lanes->AwaitStreams();
  return status;
}

Status Optimizer::StreamWait(offload_ticket_t ticket, StreamHandle stream,
                             std::span<const uint32_t> params) {
  HYBRIDOPT_TRY(CheckCommitted());
  const TraceSpan span(trace(), TraceRow::kCallers, "stream wait");
  HYBRIDOPT_ASSIGN(const uint64_t sequence, SequenceOf(ticket));
  HYBRIDOPT_TRY(context_->device().CheckStream(stream));
  HYBRIDOPT_TRY(CheckParams("params", params));
  const uint64_t mark = MarkOf(params, sequence);
  Timeline& timeline = *committed_->timeline;
  HYBRIDOPT_TRY(timeline.CheckPoison());
  if (context_->device().unified()) return AwaitIssued(sequence, mark);
  if (context_->device().shares_queues()) {
    HYBRIDOPT_TRY(AwaitIssued(sequence, mark));
    // After the step has ended, a queued move may destroy the events of the step's chunks.
    const std::unique_lock<std::mutex> kept = committed_->lanes->KeepEvents();
    return timeline.HasReached(sequence, mark) ? Status()
                                               : committed_->pipeline->PutBehind(stream, mark);
  }
  return context_->device().StreamWaitFlag(stream, &timeline.progress(),
                                           Timeline::ProgressAt(sequence, mark));
}

}  // namespace hybridopt
