// Optimizer's moves of params, gradients and states: this file decides and queues them, Mover runs
// them.
#include <utility>

#include "optimizer/optimizer.h"

namespace hybridopt {

Result<offload_ticket_t> Optimizer::MoveResource(Move move, std::span<const uint32_t> params,
                                                 std::span<const offload_stream_t> streams) {
  HYBRIDOPT_TRY(CheckCommitted());
  const TraceSpan span(trace(), TraceRow::kCallers, "call move");
  Committed& committed = *committed_;
  HYBRIDOPT_ASSIGN(const uint32_t slot, NextSlot());
  HYBRIDOPT_TRY(CheckParams("options.params", params));
  for (offload_stream_t stream : streams) HYBRIDOPT_TRY(context_->device().CheckStream(stream));
  HYBRIDOPT_ASSIGN(
      const std::vector<uint32_t> ids,
      committed.lifecycle->Check(move, params.data() == nullptr ? committed.all_ids : params));

  MoveRequest& request = committed.requests[slot].emplace<MoveRequest>();
  FillMove(move, ids, request);
  request.producer_count = static_cast<uint32_t>(streams.size());
  HYBRIDOPT_TRY(RecordProducers(slot, streams));
  Status taken;
  if (move == Move::kReloadStates && !ids.empty() && !committed.device_memory_held)
    taken = TakeDeviceMemory(request);
  Result<uint64_t> sequence = taken.ok() ? committed.timeline->Submit() : Result<uint64_t>(taken);
  if (!sequence.ok()) {
    committed.requests[slot] = std::monostate();  // frees the memory that the request has taken
    return sequence.status();
  }
  committed.lifecycle->Apply(move, ids);
  // Only in host memory the workers see what other code has written, and note it.
  if (move == Move::kRefreshMasters)
    for (uint32_t id : ids)
      if (!context_->device().unified() || !committed.shape.params[id].Keeps(Tier::kHost, kMaster))
        committed.changes->MarkWhole(id);
  ReleaseAddresses(move, ids);
  if (request.frees_device_memory) committed.device_memory_held = false;
  if (request.brings_device_memory) committed.device_memory_held = true;
  return TicketOf(sequence.value());
}

void Optimizer::FillMove(Move move, std::span<const uint32_t> ids, MoveRequest& request) {
  const Lifecycle& lifecycle = *committed_->lifecycle;
  request.move = move;
  request.groups = table_.GroupsNow();
  const bool grads = RowOf(move).resource == Resource::kGrads;
  for (uint32_t id : ids) {
    const Addresses& addresses = table_.addresses()[id];
    void* const address = grads ? const_cast<void*>(addresses.grad) : addresses.data;
    request.items.push_back(
        {id, address, addresses.data, lifecycle.host_grad(id) == HostGrad::kNone});
  }
  // When the states of all params will be on the host, the optimizer needs no device memory.
  request.frees_device_memory = move == Move::kOffloadStates && committed_->device_memory_held &&
                                lifecycle.states_on_host_count() + ids.size() == table_.size();
}

// Takes all device memory that the move needs, or returns an error and takes none. The call takes
// the memory, not the queued move, so that a full device refuses the call instead of poisoning the
// optimizer.
Status Optimizer::TakeDeviceMemory(MoveRequest& request) {
  if (context_->device().unified()) return {};
  HYBRIDOPT_ASSIGN(request.pages,
                   committed_->memory->TakeDevice(nullptr, committed_->decided.residence));
  HYBRIDOPT_ASSIGN(request.scratch, LaneScratch::Take(*context_, committed_->decided.lanes));
  request.brings_device_memory = true;
  return {};
}

// An offload gives addresses up: the library does not use them until the caller binds new ones.
void Optimizer::ReleaseAddresses(Move move, std::span<const uint32_t> ids) {
  const MoveRow& row = RowOf(move);
  for (uint32_t id : ids) {
    if (row.gives_up_address && row.resource == Resource::kParams) table_.ReleaseData(id);
    if (row.gives_up_address && row.resource == Resource::kGrads) table_.ReleaseGrad(id);
  }
}

// Runs on a runner.
Status Optimizer::AwaitBeforeMove(const MoveRequest& request, uint32_t slot) {
  // A running save may still read params and states from where they are now.
  if (RowOf(request.move).touches_state)
    HYBRIDOPT_TRY(committed_->checkpoints->save().AwaitCapture());
  return committed_->mover->AwaitProducers(request, committed_->lanes->ReadyEvents(slot), [this] {
    return committed_->checkpoints->save().AwaitBorrowed();
  });
}

Status Optimizer::RunMove(MoveRequest& request) {
  uint64_t bytes = 0;
  HYBRIDOPT_TRY(committed_->mover->Run(request, &bytes));
  const bool reload = RowOf(request.move).direction == Direction::kUp;
  // Frees the lists: 256 slots that each keep their longest list would take much memory.
  request.items = {};
  request.groups = nullptr;
  std::lock_guard lock(results_mutex_);
  (reload ? stats_.reloaded_bytes : stats_.offloaded_bytes) += bytes;
  if (request.frees_device_memory) stats_.device_bytes = 0;
  if (request.brings_device_memory) stats_.device_bytes = committed_->planned_device_bytes;
  return {};
}

}  // namespace hybridopt
