#include "move/residence_change.h"

#include <algorithm>
#include <utility>

namespace hybridopt {

Status ResidenceChanger::Run(ResidenceRequest& request) {
  const TraceRange range(lanes_.trace(), TraceRow::kSteps, "change the fractions");
  HYBRIDOPT_TRY(memory_.Grow(request.residence, request.pages));
  // The copies need a staging ring: the new one, or the old one if the new residence needs none.
  const bool ring_first = request.ring.has_value() && request.ring->staging().slots() > 0;
  if (ring_first) lanes_.UseRing(*request.ring);
  HYBRIDOPT_TRY(CopyBetweenMemories(request));
  if (request.disk != nullptr) {
    HYBRIDOPT_TRY(CopyFromDisk(request));
    HYBRIDOPT_TRY(CopyToDisk(request));
  }
  if (request.ring.has_value() && !ring_first) lanes_.UseRing(*request.ring);
  if (request.scratch.has_value()) HYBRIDOPT_TRY(changes_.UseScratch(*request.scratch));
  if (request.swap.has_value()) std::swap(swap_.states(), *request.swap);
  memory_.Shrink(residence_, request.residence);
  residence_ = std::move(request.residence);
  chunks_ = std::move(request.chunks);
  if (request.disk != nullptr) {
    request.disk->UseChunks(chunks_);
    memory_.UseDisk(std::move(request.disk));
  }
  request = {};  // frees the old ring, scratch and swap memory
  return {};
}

Status ResidenceChanger::CopyBetweenMemories(const ResidenceRequest& request) {
  for (uint32_t id = 0; id < table_.size(); ++id)
    for (Tier from : {Tier::kDevice, Tier::kHost})
      for (Tier to : {Tier::kDevice, Tier::kHost})
        HYBRIDOPT_TRY(CopyArrays(request, id, residence_.range(id, from), from, to));
  return MakeCopies();
}

Status ResidenceChanger::CopyFromDisk(const ResidenceRequest& request) {
  for (uint32_t id = 0; id < table_.size(); ++id)
    for (Tier to : {Tier::kDevice, Tier::kHost})
      HYBRIDOPT_TRY(CopyArrays(request, id, residence_.range(id, Tier::kDisk), Tier::kDisk, to));
  return MakeCopies();
}

// Copies the part of a range that is on the tier `to` after the change.
Status ResidenceChanger::CopyArrays(const ResidenceRequest& request, uint32_t id,
                                    const ElementRange& range, Tier from, Tier to) {
  const ParamShape& param = shape_.params[id];
  const ElementRange all = request.residence.range(id, to);
  const uint64_t begin = std::max(range.begin, all.begin), end = std::min(range.end(), all.end());
  if (begin >= end) return {};
  const StateLocator after(table_, shape_, request.residence, memory_, swap_,
                           request.swap.has_value() ? *request.swap : swap_.states());
  for (uint32_t index = 0; index < kStateSlots; ++index) {
    const StateSlot slot{index};
    if (!param.Keeps(from, slot) && !param.Keeps(to, slot)) continue;
    const StateRange range_after = after.At(id, slot, begin, end - begin, request.locations[id]);
    // A param that becomes its own master has the master's value already.
    if (!range_after.is_param)
      HYBRIDOPT_TRY(
          Add(request, {id, slot, {begin, end - begin}, range_after.data, range_after.on_device}));
  }
  return {};
}

// A pass over the new files.
Status ResidenceChanger::CopyToDisk(const ResidenceRequest& request) {
  DiskMemory& disk = *request.disk;
  const ChunkTable& chunks = request.chunks;
  disk.Begin([](uint32_t) { return true; }, DiskMemory::Content::kNew);
  for (uint32_t number = 0; number < chunks.chunks.size(); ++number) {
    HYBRIDOPT_TRY(disk.Await(number));
    for (const Fragment& fragment : chunks.FragmentsOf(chunks.chunks[number]))
      for (uint32_t slot = 0; slot < kStateSlots; ++slot)
        if (fragment.tier == Tier::kDisk &&
            shape_.params[fragment.param].Keeps(Tier::kDisk, StateSlot{slot}))
          HYBRIDOPT_TRY(Add(request, {fragment.param,
                                      StateSlot{slot},
                                      {fragment.begin, fragment.count},
                                      disk.At(fragment.param, StateSlot{slot}, fragment.begin),
                                      false}));
    HYBRIDOPT_TRY(MakeCopies());
    disk.Updated(number);
  }
  return disk.End();
}

// Adds the copies of a range. What comes from disk is copied at once: an area stays in memory only
// until the next one of its array is brought.
Status ResidenceChanger::Add(const ResidenceRequest& request, const Target& target) {
  const ParamShape& param = shape_.params[target.param];
  const ElementRange& range = target.range;
  const StateLocator before(table_, shape_, residence_, memory_, swap_);
  for (uint64_t first = range.begin; first < range.end();) {
    StateRange from = before.At(target.param, target.slot, first, range.end() - first,
                                request.locations[target.param]);
    HYBRIDOPT_TRY(from.Bring());
    std::byte* const to = target.to + param.Bytes(target.slot, range.begin, first - range.begin);
    std::vector<Copy>& copies = from.on_device ? down_ : target.on_device ? up_ : on_host_;
    if (from.data != to)
      copies.push_back({from.data, to, param.Bytes(target.slot, first, from.count)});
    if (from.disk != nullptr) HYBRIDOPT_TRY(MakeCopies());
    first += from.count;
  }
  return {};
}

Status ResidenceChanger::MakeCopies() {
  HYBRIDOPT_TRY(CopyOnHost());
  HYBRIDOPT_TRY(CopyDown());
  HYBRIDOPT_TRY(CopyUp());
  for (std::vector<Copy>* const copies : {&down_, &up_, &on_host_}) copies->clear();
  return {};
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
