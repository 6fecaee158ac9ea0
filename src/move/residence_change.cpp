#include "move/residence_change.h"

#include <algorithm>
#include <utility>

namespace hybridopt {

Status ResidenceChanger::Run(ResidenceRequest& request) {
  const TraceRange range(lanes_.trace(), TraceRow::kSteps, "change the device fraction");
  HYBRIDOPT_TRY(memory_.Grow(request.residence, request.pages));
  // The copies need a staging ring: the new one, or the old one if the new residence needs none.
  const bool ring_first = request.ring.has_value() && request.ring->staging().slots() > 0;
  if (ring_first) lanes_.UseRing(*request.ring);
  List(request);
  HYBRIDOPT_TRY(CopyOnHost());
  HYBRIDOPT_TRY(CopyDown());
  HYBRIDOPT_TRY(CopyUp());
  if (request.ring.has_value() && !ring_first) lanes_.UseRing(*request.ring);
  if (request.scratch.has_value()) HYBRIDOPT_TRY(changes_.UseScratch(*request.scratch));
  if (request.swap.has_value()) std::swap(swap_.states(), *request.swap);
  memory_.Shrink(residence_, request.residence);
  residence_ = std::move(request.residence);
  chunks_ = std::move(request.chunks);
  request = {};  // frees the old ring, scratch and swap memory
  return {};
}

void ResidenceChanger::List(const ResidenceRequest& request) {
  down_.clear();
  up_.clear();
  on_host_.clear();
  for (uint32_t id = 0; id < table_.size(); ++id) {
    const ParamShape& param = shape_.params[id];
    for (Tier old_tier : kTiers) {
      request.residence.ForEachTier(
          id, residence_.range(id, old_tier), [&](Tier new_tier, const ElementRange& range) {
            for (uint32_t slot = 0; slot < kStateSlots; ++slot)
              if (param.Keeps(old_tier, StateSlot{slot}) || param.Keeps(new_tier, StateSlot{slot}))
                ListArray(request, id, StateSlot{slot}, range);
          });
    }
  }
}

// Lists the copies for a range whose elements are all on one tier before the change and all on one
// tier after it.
void ResidenceChanger::ListArray(const ResidenceRequest& request, uint32_t id, StateSlot slot,
                                 const ElementRange& range) {
  const ParamLocation& location = request.locations[id];
  const StateLocator before(table_, shape_, residence_, memory_, swap_);
  const StateLocator after(table_, shape_, request.residence, memory_, swap_,
                           request.swap.has_value() ? *request.swap : swap_.states());
  const StateRange from = before.At(id, slot, range.begin, range.count, location);
  const StateRange to = after.At(id, slot, range.begin, range.count, location);
  // A param that becomes its own master has the master's value already.
  if (to.is_param || from.data == to.data) return;
  std::vector<Copy>& copies = from.on_device ? down_ : to.on_device ? up_ : on_host_;
  copies.push_back({from.data, to.data, shape_.params[id].Bytes(slot, range.begin, range.count)});
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
