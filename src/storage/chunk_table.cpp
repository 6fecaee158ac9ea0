#include "storage/chunk_table.h"

#include <algorithm>

namespace hybridopt {
namespace {

constexpr uint64_t kSlotAlignmentBytes = 64;  // a cache line

uint64_t RoundUp(uint64_t bytes) {
  return (bytes + kSlotAlignmentBytes - 1) / kSlotAlignmentBytes * kSlotAlignmentBytes;
}

uint64_t ChunkElements(const StateShape& shape) {
  return shape.options.unified ? UINT64_MAX : shape.options.chunk_elements;
}

class ChunkCutter {
 public:
  ChunkCutter(uint64_t chunk_elements, ChunkTable& table)
      : chunk_elements_(chunk_elements), table_(table) {}

  void Add(uint32_t id, const Param& param, uint64_t begin) {
    for (uint64_t count = param.count - begin; count > 0;) {
      if (table_.chunks.empty() || chunk().element_count == chunk_elements_) Open();
      const uint64_t taken = std::min(count, chunk_elements_ - chunk().element_count);
      table_.fragments.push_back(
          {id, begin, taken, chunk().element_count, grad_bytes_, param_bytes_});
      grad_bytes_ += RoundUp(taken * DtypeBytes(param.grad_dtype));
      param_bytes_ += RoundUp(taken * DtypeBytes(param.dtype));
      table_.slot_grad_bytes = std::max(table_.slot_grad_bytes, grad_bytes_);
      table_.slot_param_bytes = std::max(table_.slot_param_bytes, param_bytes_);
      table_.grads_down_bytes += taken * DtypeBytes(param.grad_dtype);
      table_.params_up_bytes += taken * DtypeBytes(param.dtype);
      chunk().fragment_count += 1;
      chunk().element_count += taken;
      begin += taken;
      count -= taken;
    }
    table_.last_chunk_end[id] = static_cast<uint32_t>(table_.chunks.size());
  }

 private:
  Chunk& chunk() { return table_.chunks.back(); }
  void Open() {
    table_.chunks.push_back({static_cast<uint32_t>(table_.fragments.size()), 0, 0});
    grad_bytes_ = 0;
    param_bytes_ = 0;
  }

  const uint64_t chunk_elements_;
  ChunkTable& table_;
  uint64_t grad_bytes_ = 0;  // of the open chunk so far
  uint64_t param_bytes_ = 0;
};

}  // namespace

uint64_t ChunkTable::BytesMax(const StateShape& shape) {
  const uint64_t chunk_elements = ChunkElements(shape);
  const uint64_t chunks =
      shape.element_count / chunk_elements + (shape.element_count % chunk_elements != 0 ? 1 : 0);
  return shape.params.size() * sizeof(uint32_t) + chunks * (sizeof(Chunk) + sizeof(Fragment)) +
         shape.params.size() * sizeof(Fragment);
}

ChunkTable CutChunks(const ParamTable& table, const StateShape& shape, const Residence& residence) {
  ChunkTable chunks;
  chunks.last_chunk_end.resize(table.size());
  ChunkCutter cutter(ChunkElements(shape), chunks);
  for (uint32_t id : shape.update_order)
    if (residence.device_count(id) < table.param(id).count)
      cutter.Add(id, table.param(id), residence.device_count(id));
  if (shape.options.unified)  // nothing is staged, nothing is copied
    chunks.slot_grad_bytes = chunks.slot_param_bytes = chunks.grads_down_bytes =
        chunks.params_up_bytes = 0;
  return chunks;
}

LaneSizes LaneSizesOf(const StateShape& shape, const Residence& residence,
                      const ChunkTable& chunks) {
  LaneSizes sizes;
  sizes.norm_blocks = shape.norm_blocks;
  if (shape.options.unified) return sizes;
  const uint32_t movable = shape.options.movable;
  sizes.staging_slots =
      static_cast<uint32_t>(std::min<uint64_t>(shape.options.staging_slots, chunks.chunks.size()));
  sizes.slot_grad_bytes = chunks.slot_grad_bytes;
  sizes.slot_param_bytes = chunks.slot_param_bytes;
  if ((movable & OFFLOAD_MOVABLE_ACCUMULATE) != 0) {
    // Gradients to be added come down through the ring, even where all state is on the device.
    sizes.staging_slots = shape.options.staging_slots;
    sizes.slot_grad_bytes =
        std::max(sizes.slot_grad_bytes, shape.options.chunk_elements * sizeof(float));
  }
  if ((movable & (OFFLOAD_MOVABLE_GRADS | OFFLOAD_MOVABLE_ACCUMULATE)) != 0)
    sizes.device_grad_elements =
        std::min(shape.options.chunk_elements, residence.device_elements());
  return sizes;
}

}  // namespace hybridopt
