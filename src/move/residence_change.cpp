#include "move/residence_change.h"

#include <algorithm>
#include <utility>

#include "base/profiler_range.h"

namespace hybridopt {

Status ResidenceChanger::Run(ResidenceRequest& request) {
  const ProfilerRange range("change the device fraction");
  HYBRIDOPT_TRY(memory_.GrowHost(request.residence));
  if (request.on_device) HYBRIDOPT_TRY(memory_.GrowDevice(request.pages));
  // The copies need a staging ring: the new one, or the old one if the new residence needs none.
  const bool ring_first = request.ring.has_value() && request.ring->staging().slots() > 0;
  if (ring_first) lanes_.UseRing(*request.ring);
  List(request);
  HYBRIDOPT_TRY(CopyOnHost());
  HYBRIDOPT_TRY(CopyDown());
  HYBRIDOPT_TRY(CopyUp());
  if (request.ring.has_value() && !ring_first) lanes_.UseRing(*request.ring);
  if (request.scratch.has_value()) lanes_.UseScratch(*request.scratch);
  if (request.swap.has_value()) std::swap(swap_.states(), *request.swap);
  if (request.on_device) memory_.ShrinkDevice(request.residence);
  memory_.UnpinHost(&request.residence);  // memory that will be freed must not be pinned
  memory_.ShrinkHost(residence_, request.residence);
  residence_ = std::move(request.residence);
  chunks_ = std::move(request.chunks);
  request = {};  // frees the old ring, scratch and swap memory
  return {};
}

void ResidenceChanger::List(const ResidenceRequest& request) {
  down_.clear();
  up_.clear();
  on_host_.clear();
  for (uint32_t id = 0; id < table_.size(); ++id) ListParam(request, id);
}

void ResidenceChanger::ListParam(const ResidenceRequest& request, uint32_t id) {
  const ParamShape& param = shape_.params[id];
  const ParamLocation& location = request.locations[id];
  const uint64_t old_count = residence_.device_count(id);
  const uint64_t new_count = request.residence.device_count(id);
  const uint64_t begin = std::min(old_count, new_count);
  const uint64_t count = std::max(old_count, new_count) - begin;
  for (uint32_t index = 0; index < kStateSlots; ++index) {
    const StateSlot slot{index};
    const bool swapped = location.states_on_host && param.Keeps(Tier::kDevice, slot);
    if (swapped && begin > 0)
      on_host_.push_back(
          {swap_.State(id, slot, 0), request.swap->At(param, slot, 0), param.Bytes(slot, begin)});
    if (count == 0 || !param.Keeps(Tier::kHost, slot)) continue;
    std::byte* const host = memory_.Host(id, slot, begin);
    const uint64_t bytes = param.Bytes(slot, count);
    if (!param.Keeps(Tier::kDevice, slot)) {  // the master: on the device the param itself is it
      if (new_count > old_count) continue;
      const uint64_t offset = param.Bytes(slot, begin);
      if (location.params_on_host)
        on_host_.push_back({swap_.Params(id) + offset, host, bytes});
      else
        down_.push_back({static_cast<std::byte*>(location.data) + offset, host, bytes});
    } else if (new_count < old_count) {
      if (swapped)
        on_host_.push_back({swap_.State(id, slot, begin), host, bytes});
      else
        down_.push_back({memory_.OnDevice(id, slot, begin), host, bytes});
    } else if (swapped) {
      on_host_.push_back({host, request.swap->At(param, slot, begin), bytes});
    } else {
      up_.push_back({host, memory_.OnDevice(id, slot, begin), bytes});
    }
  }
}

std::vector<ResidenceChanger::Batch> ResidenceChanger::Cut(const std::vector<Copy>& copies) {
  std::vector<Batch> batches;
  const uint64_t room = lanes_.ring().grad_bytes();
  for (const Copy& copy : copies) {
    for (uint64_t done = 0; done < copy.bytes;) {
      if (batches.empty() || batches.back().bytes == room) batches.emplace_back();
      Batch& batch = batches.back();
      const uint64_t now = std::min(copy.bytes - done, room - batch.bytes);
      batch.pieces.push_back({{copy.from + done, copy.to + done, now}, batch.bytes});
      batch.bytes += now;
      done += now;
    }
  }
  return batches;
}

Status ResidenceChanger::QueueDown(const Batch& batch, uint32_t slot) {
  for (const Piece& piece : batch.pieces)
    HYBRIDOPT_TRY(device_.CopyToHost(lanes_.down, lanes_.ring().grads(slot) + piece.slot_offset,
                                     piece.copy.from, piece.copy.bytes));
  return device_.Record(lanes_.landed(slot).end, lanes_.down);
}

Status ResidenceChanger::CopyDown() {
  const std::vector<Batch> batches = Cut(down_);
  const size_t slots = lanes_.ring().slots();
  for (size_t i = 0; i < std::min(slots, batches.size()); ++i)
    HYBRIDOPT_TRY(QueueDown(batches[i], static_cast<uint32_t>(i)));
  for (size_t i = 0; i < batches.size(); ++i) {
    const uint32_t slot = static_cast<uint32_t>(i % slots);
    HYBRIDOPT_TRY(lanes_.Wait(lanes_.landed(slot).end, "state coming down"));
    std::vector<HostCopy> copies;
    for (const Piece& piece : batches[i].pieces)
      copies.push_back(
          {lanes_.ring().grads(slot) + piece.slot_offset, piece.copy.to, piece.copy.bytes});
    HYBRIDOPT_TRY(CopyInParallel(context_.workers(), copies));
    lanes_.ring().ReleaseGrads(slot);
    if (i + slots < batches.size()) HYBRIDOPT_TRY(QueueDown(batches[i + slots], slot));
  }
  return {};
}

Status ResidenceChanger::CopyUp() {
  const std::vector<Batch> batches = Cut(up_);
  const size_t slots = lanes_.ring().slots();
  for (size_t i = 0; i < batches.size(); ++i) {
    const uint32_t slot = static_cast<uint32_t>(i % slots);
    if (i >= slots) HYBRIDOPT_TRY(lanes_.Wait(lanes_.uploaded(slot).end, "state going up"));
    std::vector<HostCopy> copies;
    for (const Piece& piece : batches[i].pieces)
      copies.push_back(
          {piece.copy.from, lanes_.ring().grads(slot) + piece.slot_offset, piece.copy.bytes});
    HYBRIDOPT_TRY(CopyInParallel(context_.workers(), copies));
    lanes_.link().GiveWay(batches[i].bytes);
    lanes_.link().QueuedUp(batches[i].bytes);
    for (const Piece& piece : batches[i].pieces)
      HYBRIDOPT_TRY(device_.CopyToDevice(lanes_.up, piece.copy.to,
                                         lanes_.ring().grads(slot) + piece.slot_offset,
                                         piece.copy.bytes));
    HYBRIDOPT_TRY(device_.Record(lanes_.uploaded(slot).end, lanes_.up));
  }
  for (size_t slot = 0; slot < std::min(slots, batches.size()); ++slot) {
    HYBRIDOPT_TRY(lanes_.Wait(lanes_.uploaded(static_cast<uint32_t>(slot)).end, "state going up"));
    lanes_.ring().ReleaseGrads(static_cast<uint32_t>(slot));
  }
  lanes_.link().ArrivedUpTo(lanes_.link().queued_up_bytes());
  return {};
}

Status ResidenceChanger::CopyOnHost() {
  std::vector<HostCopy> copies;
  for (const Copy& copy : on_host_) copies.push_back({copy.from, copy.to, copy.bytes});
  return CopyInParallel(context_.workers(), copies);
}

}  // namespace hybridopt
