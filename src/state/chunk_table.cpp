#include "state/chunk_table.h"

#include <algorithm>

#include "base/system.h"
#include "state/move_table.h"

namespace hybridopt {
namespace {

constexpr uint64_t kSlotAlignmentBytes = 64;  // a cache line
constexpr uint64_t kCutElements = 1024;  // chunks that are not full have whole multiples of this

// Returns the number of elements of the next chunk. `rest` is the number of elements that no chunk
// has yet.
uint64_t ChunkElements(const StateShape& shape, uint64_t rest) {
  if (shape.options.one_chunk()) return UINT64_MAX;
  if (!SharesChunks(shape)) return shape.options.chunk_elements;
  return std::clamp(system::RoundUp(rest / kChunksAhead, kCutElements),
                    SmallestChunkElements(shape), shape.options.chunk_elements);
}

class ChunkCutter {
 public:
  // `elements` is the sum over all params that will be added.
  ChunkCutter(const StateShape& shape, uint64_t elements, ChunkTable& table)
      : shape_(shape),
        rest_(elements),
        holds_grads_(HostMayHoldGrads(shape) && !shape.options.unified),
        table_(table) {}

  void Add(uint32_t id, const Param& param, Tier tier, const ElementRange& range) {
    const Unit& unit = shape_.params[id].unit;
    for (uint64_t begin = range.begin; begin < range.end();) {
      if (table_.chunks.empty() || chunk().element_count >= chunk_elements_) Open();
      const uint64_t room = chunk_elements_ - chunk().element_count;
      const uint64_t end = unit.CutOf(begin, range.end(), room);
      const uint64_t taken = end - begin;
      if (taken > room && chunk().element_count > 0) {
        Open();
        continue;
      }
      rest_ -= taken;
      table_.fragments.push_back({id,
                                  tier,
                                  begin,
                                  taken,
                                  chunk().element_count,
                                  grad_bytes_,
                                  param_bytes_,
                                  {},
                                  unit.From(begin)});
      PlaceInRing(table_.fragments.back());
      grad_bytes_ += system::RoundUp(taken * DtypeBytes(param.grad_dtype), kSlotAlignmentBytes);
      param_bytes_ += system::RoundUp(taken * DtypeBytes(param.dtype), kSlotAlignmentBytes);
      table_.slot_grad_bytes = std::max(table_.slot_grad_bytes, grad_bytes_);
      table_.slot_param_bytes = std::max(table_.slot_param_bytes, param_bytes_);
      table_.grads_down_bytes += taken * DtypeBytes(param.grad_dtype);
      table_.params_up_bytes += taken * DtypeBytes(param.dtype);
      chunk().fragment_count += 1;
      chunk().element_count += taken;
      chunk().on_disk = chunk().on_disk || tier == Tier::kDisk;
      if (holds_grads_)
        chunk().held_grads_bytes =
            system::RoundUp(chunk().element_count * sizeof(float), kArrayAlignmentBytes);
      begin = end;
    }
    table_.last_chunk_end[id] = static_cast<uint32_t>(table_.chunks.size());
  }

 private:
  Chunk& chunk() { return table_.chunks.back(); }
  void Open() {
    chunk_elements_ = ChunkElements(shape_, rest_);
    table_.chunks.push_back({static_cast<uint32_t>(table_.fragments.size()), 0, 0, false, {}, 0});
    grad_bytes_ = 0;
    param_bytes_ = 0;
    state_end_ = {};
    host_end_ = {};
  }

  // Places a fragment's arrays in the areas of the chunk in the device's ring. An array keeps the
  // alignment that it has on the host. If on the host only padding lies between this array and the
  // one before it, the array keeps that distance too, so that one copy moves both.
  void PlaceInRing(Fragment& fragment) {
    const ParamShape& shaped = shape_.params[fragment.param];
    for (uint32_t index = 0; index < kStateSlots; ++index) {
      const StateSlot slot{index};
      if (!shaped.Keeps(fragment.tier, slot)) continue;
      const uint64_t host = shaped.ByteAt(fragment.tier, slot, fragment.begin);
      const bool follows = state_end_[slot] > 0 && host >= host_end_[slot] &&
                           host - host_end_[slot] < kArrayAlignmentBytes;
      const uint64_t offset = follows ? state_end_[slot] + host - host_end_[slot]
                                      : system::RoundUp(state_end_[slot], kArrayAlignmentBytes) +
                                            host % kArrayAlignmentBytes;
      const uint64_t bytes = shaped.Bytes(slot, fragment.begin, fragment.count);
      fragment.state_offset[slot] = offset;
      state_end_[slot] = offset + bytes;
      host_end_[slot] = host + bytes;
      chunk().state_area_bytes[slot] = system::RoundUp(state_end_[slot], kArrayAlignmentBytes);
    }
  }

  const StateShape& shape_;
  uint64_t chunk_elements_ = 0;  // of the open chunk
  uint64_t rest_;                // elements that are in no chunk yet
  const bool holds_grads_;
  ChunkTable& table_;
  uint64_t grad_bytes_ = 0;  // of the open chunk so far
  uint64_t param_bytes_ = 0;
  std::array<uint64_t, kStateSlots> state_end_{};  // where the areas of the open chunk end
  std::array<uint64_t, kStateSlots> host_end_{};   // where its arrays end in the host's regions
};

}  // namespace

bool HostMayHoldGrads(const StateShape& shape) {
  return (shape.options.movable & kGradsMovable) != 0;
}

uint64_t ChunkTable::BytesMax(const StateShape& shape) {
  const uint64_t chunks = ChunksMost(shape);
  return shape.params.size() * sizeof(uint32_t) + chunks * (sizeof(Chunk) + sizeof(Fragment)) +
         shape.params.size() * sizeof(Fragment);
}

ChunkTable CutChunks(const ParamTable& table, const StateShape& shape, const Residence& residence) {
  ChunkTable chunks;
  chunks.last_chunk_end.resize(table.size());
  ChunkCutter cutter(shape, residence.chunked_elements(), chunks);
  for (uint32_t id : shape.update_order)
    for (const TierRow& row : kTierRows)
      if (row.is_chunked && residence.range(id, row.tier).count > 0)
        cutter.Add(id, table.param(id), row.tier, residence.range(id, row.tier));
  if (shape.options.unified)  // no chunk is staged or copied
    chunks.slot_grad_bytes = chunks.slot_param_bytes = chunks.grads_down_bytes =
        chunks.params_up_bytes = 0;
  return chunks;
}

}  // namespace hybridopt
