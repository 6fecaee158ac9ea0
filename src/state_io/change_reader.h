// ChangeReader: reads params for a take of changes, wherever they are: first the hash of each param
// and how many elements have changed, then these elements. A param on the device is read there, in
// batches of tiles; a param on the host by the workers. So only changed elements cross the link.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/function_ref.h"
#include "kernels/changes/tiles.h"
#include "machine/context.h"
#include "state/shape.h"
#include "state_io/change_indices.h"
#include "state_io/change_slots.h"

namespace hybridopt {

// A param to read.
struct ChangeSource {
  const std::byte* data;
  bool on_device;
  uint64_t count;
  uint64_t element_bytes;
  ChangedBits device_bits;  // at device addresses, in at most two arrays
  ChangedBits host_bits;
};

// Where the changed elements of a param are written to: host memory or device memory.
struct ChangeTarget {
  const ChangeIndices* indices = nullptr;  // NULL: the param is not read
  std::byte* indices_at = nullptr;
  std::byte* values_at = nullptr;
};

// What a survey has found about a param.
struct ChangeFindings {
  uint64_t hash = 0;
  uint64_t count = 0;  // changed elements
  IndexSummary elements;
};

// The place of a tile's first changed element among those of its param, and the changed element
// before it, and 1 more.
struct ChangePlace {
  uint64_t position;
  uint64_t before;
};

// What takes note of each tile. It is kept from one take to the next, because the system gives out
// new memory slowly.
struct ChangeTable {
  std::vector<ChangeTile> tiles;
  std::vector<ChangePlace> places;

  // What a take of all params needs.
  static uint64_t HostBytes(const StateShape& shape);
};

class ChangeReader {
 public:
  ChangeReader(Context& context, std::vector<ChangeSource> sources, ChangeTable& table);

  Status Survey();
  ChangeFindings Find(size_t param) const;
  // One target for each source; to_device: in device memory, then all params are on the device too,
  // and indices count in the shard. A take fails as a whole, but may then have written to targets.
  Status Collect(std::span<const ChangeTarget> targets, bool to_device);

 private:
  std::vector<TileRange> RangesOnHost() const;
  ChangePart PartOf(const TileRange& range) const;
  uint64_t NumberOf(const TileRange& range) const {
    return first_tile_[range.param] + range.first_tile;
  }
  Status ForEachTileOnHost(FunctionRef<void(const TileRange&)> visit) const;
  Status SurveyHost();
  Status CollectHost();
  // Reads the params on the device in batches: `collects`: their elements.
  Status ReadDevice(bool collects);
  // Appends to the batch of a slot as many tiles of a range as it has room for. Returns how many.
  uint64_t Append(ChangeSlot& slot, const TileRange& range, bool collects) const;
  // Gives the elements of tiles their places in a slot. Returns for how many tiles it has room.
  uint64_t AddElements(ChangeSlot& slot, const TileRange& range) const;
  Status Queue(ChangeSlot& slot, bool collects);
  Status SendBits(ChangeSlot& slot);
  void SetOutputs(ChangeSlot& slot) const;
  Status QueueSurvey(const ChangeSlot& slot);
  Status QueueCollection(ChangeSlot& slot);
  // Waits for the batch of a slot, handles what has come down, and empties the slot.
  Status Finish(ChangeSlot& slot, bool collects);
  void KeepSurvey(const ChangeSlot& slot);
  Status WriteCollected(const ChangeSlot& slot) const;
  void WriteTile(const TileRange& tile, std::span<const uint16_t> offsets,
                 const std::byte* values) const;
  void SetPlaces();

  Context& context_;
  const std::vector<ChangeSource> sources_;
  std::vector<uint64_t> first_tile_;  // of each source; tiles of all sources are numbered in order
  std::vector<ChangeTile>& tiles_;
  std::vector<ChangePlace>& places_;
  std::span<const ChangeTarget> targets_;
  bool to_device_ = false;  // the targets are device memory
  ChangeSlots slots_;
};

}  // namespace hybridopt
