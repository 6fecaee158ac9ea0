// ChangeSlots: what a take of changes needs to read params on the device: a stream, and two slots
// of memory, so that one batch of tiles is read while the workers handle the one before it. A slot
// has the same layout in pinned host memory and in device memory:
//
//   | starts of the tiles | bits that come from the host | what comes down |
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/device.h"
#include "machine/context.h"
#include "machine/pinned_room.h"

namespace hybridopt {

// Tiles of one param of a take.
struct TileRange {
  uint32_t param;       // its place in the take
  uint64_t first_tile;  // in the param
  uint64_t tiles;
};

struct ChangeSlot {
  std::byte* host = nullptr;
  std::byte* device = nullptr;
  EventHandle down = nullptr;  // recorded behind the batch
  bool queued = false;
  // The batch. Nothing of it changes while it is queued.
  std::vector<TileRange> ranges;
  std::vector<ChangePart> parts;
  uint64_t tiles = 0;
  uint64_t elements = 0;       // that have changed, if these are collected
  uint64_t element_bytes = 0;  // of each
};

class ChangeSlots {
 public:
  ChangeSlots() = default;
  // For batches from `tiles` tiles; host_bits: some bits come from the host.
  static Result<ChangeSlots> Create(Context& context, uint64_t tiles, bool host_bits);
  // If a copy does not end in time, the device keeps the memory that the copy may still touch.
  ~ChangeSlots();
  ChangeSlots(ChangeSlots&& other) noexcept { *this = std::move(other); }
  ChangeSlots& operator=(ChangeSlots&& other) noexcept;

  uint64_t tiles_most() const { return tiles_most_; }  // of a batch
  uint64_t down_bytes() const { return down_bytes_; }
  uint64_t bits_offset() const { return starts_bytes_; }
  uint64_t down_offset() const { return starts_bytes_ + bits_bytes_; }
  ChangeSlot& slot(uint32_t number) { return slots_[number]; }
  static constexpr uint32_t kSlots = 2;

  StreamHandle stream() const { return stream_; }
  // Copies bytes [offset, offset + bytes) of a slot.
  Status CopyUp(const ChangeSlot& slot, uint64_t offset, uint64_t bytes);
  Status CopyDown(const ChangeSlot& slot, uint64_t offset, uint64_t bytes);
  // To be called behind what has been queued for a batch, unless that ends with a copy down.
  Status NoteQueued(const ChangeSlot& slot);
  // Waits for a queued batch.
  Status Await(const ChangeSlot& slot) const;

 private:
  void SetSizes(uint64_t tiles, bool host_bits);
  uint64_t slot_bytes() const { return down_offset() + down_bytes_; }

  Context* context_ = nullptr;
  StreamHandle stream_ = nullptr;
  PinnedRoom pinned_;
  void* device_memory_ = nullptr;
  uint64_t tiles_most_ = 0;
  uint64_t starts_bytes_ = 0;
  uint64_t bits_bytes_ = 0;
  uint64_t down_bytes_ = 0;
  ChangeSlot slots_[kSlots];
};

}  // namespace hybridopt
