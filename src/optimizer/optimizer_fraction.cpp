// Optimizer's change of the fractions: this file decides and queues it, ResidenceChanger runs
// it.
#include <algorithm>
#include <utility>

#include "optimizer/optimizer.h"
#include "optimizer/optimizer_options.h"

namespace hybridopt {
namespace {

bool SameRing(const LaneSizes& a, const LaneSizes& b) {
  return a.staging_slots == b.staging_slots && a.slot_grad_bytes == b.slot_grad_bytes &&
         a.slot_param_bytes == b.slot_param_bytes;
}

bool SameScratch(const LaneSizes& a, const LaneSizes& b) {
  return a.device_grad_elements == b.device_grad_elements && a.stream_slots == b.stream_slots &&
         a.stream_ring_bytes == b.stream_ring_bytes;
}

uint64_t Growth(uint64_t from, uint64_t to) { return to > from ? to - from : 0; }

}  // namespace

Result<offload_ticket_t> Optimizer::SetDeviceFraction(double device_fraction) {
  HYBRIDOPT_TRY(CheckCommitted());
  return SetFractions(device_fraction, committed_->decided.fractions[Tier::kDisk]);
}

Result<offload_ticket_t> Optimizer::SetFractions(double device_fraction, double disk_fraction) {
  HYBRIDOPT_TRY(CheckCommitted());
  Committed& committed = *committed_;
  HYBRIDOPT_ASSIGN(const uint32_t slot, NextSlot());
  ByTier<double> fractions;
  fractions[Tier::kDevice] = device_fraction;
  fractions[Tier::kDisk] = disk_fraction;
  HYBRIDOPT_TRY(CheckFractions(fractions, options_, ""));
  HYBRIDOPT_TRY(CheckBesideDisk(disk_fraction, ""));
  Arrangement wanted = Arrange(table_, committed.shape, fractions);
  HYBRIDOPT_TRY(DiskMemory::CheckRing(committed.shape, wanted.chunks));
  HYBRIDOPT_ASSIGN(const offload_plan_t plan, FitRing(committed.shape, wanted));
  HYBRIDOPT_TRY(CheckStateMayStream(committed.shape, wanted));
  ResidenceRequest& request = committed.requests[slot].emplace<ResidenceRequest>();
  Status taken = TakeForResidence(wanted, plan, request);
  const uint64_t device_bytes = request.device_bytes;
  Result<uint64_t> sequence = taken.ok() ? committed.timeline->Submit() : Result<uint64_t>(taken);
  if (!sequence.ok()) {
    committed.requests[slot] = std::monostate();  // frees the memory that the request has taken
    return sequence.status();
  }
  committed.planned_device_bytes = device_bytes;
  committed.decided = std::move(wanted);
  committed.residence_sequence = sequence.value();
  std::vector<uint64_t> device_state_bytes =
      StateBytes(committed.shape, committed.decided.residence, Tier::kDevice);
  std::lock_guard lock(results_mutex_);  // other threads ask for stats
  committed.lifecycle->SetDeviceStateBytes(std::move(device_state_bytes));
  committed.CountStateBytes();
  return TicketOf(sequence.value());
}

// Takes all memory that the change needs, or returns an error and takes none.
Status Optimizer::TakeForResidence(const Arrangement& wanted, const offload_plan_t& plan,
                                   ResidenceRequest& request) const {
  const Committed& committed = *committed_;
  const Arrangement& decided = committed.decided;
  const Device& device = context_->device();
  request.residence = wanted.residence;
  request.chunks = wanted.chunks;
  request.locations = LocationsNow();
  request.on_device = committed.device_memory_held;
  request.streams_state = wanted.lanes.stream_slots > 0;
  request.host_bytes = plan.host_bytes;
  request.device_bytes = plan.device_bytes;
  request.staging_bytes = plan.staging_bytes;
  const auto before = StateMemory::Bytes(device, committed.shape, decided.residence);
  const auto after = StateMemory::Bytes(device, committed.shape, wanted.residence);
  // Both rings, and the files of both, are there until the change has been made.
  const bool disk_changes =
      committed.shape.options.on_disk && !(wanted.residence == decided.residence);
  const uint64_t ring_bytes = disk_changes ? plan.host_disk_bytes : 0;
  HYBRIDOPT_TRY(CheckHostRoom("device_fraction",
                              Growth(before[Tier::kHost], after[Tier::kHost]) + ring_bytes +
                                  SwapStates::Bytes(committed.shape, wanted.residence),
                              plan.host_available_bytes));
  if (disk_changes) {
    HYBRIDOPT_ASSIGN(request.disk, DiskMemory::Create(*context_, committed.shape, request.chunks,
                                                      DiskPaths(options_.disk_paths),
                                                      committed.memory->disk_totals()));
  }
  if (device.unified()) return {};
  if (request.on_device) {
    HYBRIDOPT_TRY(CheckDeviceRoom(*context_, "device_fraction", wanted.fractions[Tier::kDevice],
                                  Growth(before[Tier::kDevice], after[Tier::kDevice])));
    HYBRIDOPT_ASSIGN(request.pages,
                     committed.memory->TakeDevice(&decided.residence, wanted.residence));
  }
  if (!SameRing(decided.lanes, wanted.lanes)) {
    HYBRIDOPT_ASSIGN(request.ring, LaneRing::Take(*context_, wanted.lanes));
  }
  if (request.on_device && !SameScratch(decided.lanes, wanted.lanes)) {
    HYBRIDOPT_ASSIGN(request.scratch, LaneScratch::Take(*context_, wanted.lanes));
  }
  if ((committed.shape.options.movable & OFFLOAD_MOVABLE_STATES) != 0) {
    HYBRIDOPT_ASSIGN(request.swap, SwapStates::Take(*context_, committed.shape, wanted.residence));
  }
  return {};
}

// The mark of a step at which these params (all, if none is named) have been written completely.
// For a step before the last change of residence the chunks are no longer known, so the caller
// waits for the whole step.
uint64_t Optimizer::MarkOf(std::span<const uint32_t> params, uint64_t sequence) const {
  if (sequence < committed_->residence_sequence) return Timeline::kMarks;
  const ChunkTable& chunks = committed_->decided.chunks;
  if (params.empty()) return StepPipeline::kDevicePart + chunks.chunks.size();
  uint64_t end = 0;
  for (uint32_t id : params) end = std::max<uint64_t>(end, chunks.last_chunk_end[id]);
  return StepPipeline::kDevicePart + end;
}

// Runs on a runner.
Status Optimizer::ExecuteResidenceChange(ResidenceRequest& request) {
  // A running save reads states from where they are now.
  HYBRIDOPT_TRY(committed_->checkpoints->save().AwaitCapture());
  const uint64_t host_bytes = request.host_bytes, staging_bytes = request.staging_bytes;
  const uint64_t device_bytes = request.on_device ? request.device_bytes : 0;
  const bool streams_state = request.streams_state;
  HYBRIDOPT_TRY(committed_->residence_changer->Run(request));
  committed_->pipeline->UseChunks();
  const Status pinned = streams_state ? committed_->PinForStreams() : Status();
  if (!pinned.ok() && !IsUnpinnable(pinned)) return pinned;
  if (!pinned.ok()) HYBRIDOPT_TRY(CheckCpuUpdates(committed_->shape, pinned));
  std::lock_guard lock(results_mutex_);
  stats_.host_bytes = host_bytes;
  stats_.staging_bytes = staging_bytes;
  stats_.device_bytes = device_bytes;
  return {};
}

}  // namespace hybridopt
