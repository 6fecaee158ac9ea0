#include "save/load/load_units.h"

#include <algorithm>
#include <tuple>

namespace hybridopt {
namespace {

using checkpoint::Extent;
using checkpoint::StoredShard;
using checkpoint::StoredTensor;

constexpr uint64_t kUnitBytesMax = uint64_t{8} << 20;

}  // namespace

Status LoadUnits::List() {
  uint64_t largest = 1;
  for (uint32_t id = 0; id < table_.size(); ++id)
    if (const checkpoint::StoredParam* stored = sources_.stored(id); stored != nullptr)
      for (const StoredShard& shard : stored->shards)
        for (const StoredTensor& tensor : shard.tensors) largest = std::max(largest, tensor.bytes);
  unit_bytes_ = std::min({kUnitBytesMax, block_bytes(), checkpoint::RoundUpToDirect(largest)});
  HYBRIDOPT_TRY(ForEach(
      [&](const LoadUnit& unit) {
        extents_.push_back(unit.extent);
        if (blocks_.empty() || blocks_.back().tensor != unit.tensor ||
            blocks_.back().block != unit.block)
          blocks_.push_back(unit);
        return Status();
      },
      [](const LoadPiece&) { return Status(); }));
  SortBlocks();
  return {};
}

void LoadUnits::SortBlocks() {
  const auto key = [](const LoadUnit& unit) {
    return std::tuple(unit.tensor->file, unit.tensor->offset, unit.block);
  };
  std::sort(blocks_.begin(), blocks_.end(),
            [&](const LoadUnit& a, const LoadUnit& b) { return key(a) < key(b); });
  const auto end =
      std::unique(blocks_.begin(), blocks_.end(),
                  [&](const LoadUnit& a, const LoadUnit& b) { return key(a) == key(b); });
  blocks_.erase(end, blocks_.end());
}

Status LoadUnits::ForEach(FunctionRef<Status(const LoadUnit&)> begin_unit,
                          FunctionRef<Status(const LoadPiece&)> visit) const {
  for (uint32_t id = 0; id < table_.size(); ++id)
    for (uint32_t slot = 0; slot < kStateSlots; ++slot)
      if (sources_.Wants(id, StateSlot{slot}))
        HYBRIDOPT_TRY(ForEachOf(id, StateSlot{slot}, begin_unit, visit));
  return {};
}

Status LoadUnits::ForEachOf(uint32_t id, StateSlot slot,
                            FunctionRef<Status(const LoadUnit&)> begin_unit,
                            FunctionRef<Status(const LoadPiece&)> visit) const {
  const std::vector<StoredShard>& shards = sources_.stored(id)->shards;
  Extent extent{0, 0, 0};
  const auto visit_segment = [&](const checkpoint::Segment& segment) -> Status {
    const StoredTensor& tensor =
        *checkpoint::FindTensor(shards[segment.shard], locator_.KindOf(id, slot));
    const uint64_t element_bytes = DtypeBytes(tensor.dtype);
    for (uint64_t done = 0; done < segment.count;) {
      const uint64_t at = (segment.source + done) * element_bytes;
      const Extent next = UnitAt(tensor, at);
      if (next.file != extent.file || next.offset != extent.offset || extent.bytes == 0) {
        extent = next;
        HYBRIDOPT_TRY(begin_unit({extent, &tensor, id, at / block_bytes()}));
      }
      const uint64_t into = tensor.offset + at - extent.offset;
      const uint64_t count = std::min(segment.count - done, (extent.bytes - into) / element_bytes);
      HYBRIDOPT_TRY(visit({{id, slot, segment.destination + done, count}, into, tensor.dtype}));
      done += count;
    }
    return {};
  };
  return sources_.ForEachSegment(id, visit_segment);
}

// The unit that holds the byte `at` of an array. Each block is cut into units, so no unit spans two
// blocks.
Extent LoadUnits::UnitAt(const StoredTensor& tensor, uint64_t at) const {
  const uint64_t block = at / block_bytes() * block_bytes();
  const uint64_t begin = block + (at - block) / unit_bytes_ * unit_bytes_;
  const uint64_t end = std::min({begin + unit_bytes_, block + block_bytes(), tensor.bytes});
  return {tensor.file, tensor.offset + begin, end - begin};
}

std::vector<Extent> LoadUnits::ExtentsOf(const LoadUnit& block) const {
  std::vector<Extent> extents;
  const uint64_t end = std::min((block.block + 1) * block_bytes(), block.tensor->bytes);
  for (uint64_t at = block.block * block_bytes(); at < end; at += extents.back().bytes)
    extents.push_back(UnitAt(*block.tensor, at));
  return extents;
}

}  // namespace hybridopt
