#include "state_io/change_slots.h"

#include <algorithm>
#include <utility>

#include "base/system.h"

namespace hybridopt {
namespace {

constexpr char kWaiter[] = "a take of changes";
constexpr uint64_t kTilesMost = 16384;
constexpr uint64_t kTilesWithBitsMost = 2048;       // their bits take half of a slot
constexpr uint64_t kBytesMost = uint64_t{4} << 20;  // of bits and of what comes down
constexpr uint64_t kAlignment = 256;
// A tile of which all elements have changed, with elements of 4 bytes.
constexpr uint64_t kTileBytesMost = kChangeTileElements * (sizeof(uint32_t) + sizeof(uint16_t));

}  // namespace

// If the device is too full, the slots are made smaller: only batches shrink.
Result<ChangeSlots> ChangeSlots::Create(Context& context, uint64_t tiles, bool host_bits) {
  Device& device = context.device();
  ChangeSlots made;
  made.context_ = &context;
  made.SetSizes(std::min(tiles, host_bits ? kTilesWithBitsMost : kTilesMost), host_bits);
  Result<void*> memory = device.Allocate(kSlots * made.slot_bytes());
  while (memory.status().code() == OFFLOAD_OUT_OF_DEVICE_MEMORY && made.tiles_most_ > 1) {
    made.SetSizes(made.tiles_most_ / 2, host_bits);
    memory = device.Allocate(kSlots * made.slot_bytes());
  }
  HYBRIDOPT_ASSIGN(made.device_memory_, std::move(memory));
  HYBRIDOPT_ASSIGN(made.pinned_, PinnedRoom::TakeAnyway(context, kSlots * made.slot_bytes()));
  HYBRIDOPT_ASSIGN(made.stream_, device.CreateStream("take of changes"));
  for (uint32_t i = 0; i < kSlots; ++i) {
    ChangeSlot& slot = made.slots_[i];
    slot.host = made.pinned_.data() + i * made.slot_bytes();
    slot.device = static_cast<std::byte*>(made.device_memory_) + i * made.slot_bytes();
    HYBRIDOPT_ASSIGN(slot.down, device.CreateEvent("changed elements copied"));
  }
  return made;
}

void ChangeSlots::SetSizes(uint64_t tiles, bool host_bits) {
  tiles_most_ = tiles;
  starts_bytes_ = system::RoundUp(tiles * sizeof(uint32_t), kAlignment);
  bits_bytes_ = host_bits ? tiles * kChangeTileWords * sizeof(uint64_t) : 0;
  down_bytes_ = std::min(tiles * kTileBytesMost, kBytesMost - bits_bytes_);
}

ChangeSlots::~ChangeSlots() {
  if (context_ == nullptr) return;
  Device& device = context_->device();
  if (stream_ != nullptr) device.AbandonStream(stream_);
  for (const ChangeSlot& slot : slots_)
    if (slot.down != nullptr) device.DestroyEvent(slot.down);
  if (device_memory_ != nullptr) (void)device.Free(device_memory_);
}

ChangeSlots& ChangeSlots::operator=(ChangeSlots&& other) noexcept {
  std::swap(context_, other.context_);
  std::swap(stream_, other.stream_);
  std::swap(pinned_, other.pinned_);
  std::swap(device_memory_, other.device_memory_);
  std::swap(tiles_most_, other.tiles_most_);
  std::swap(starts_bytes_, other.starts_bytes_);
  std::swap(bits_bytes_, other.bits_bytes_);
  std::swap(down_bytes_, other.down_bytes_);
  for (uint32_t i = 0; i < kSlots; ++i) std::swap(slots_[i], other.slots_[i]);
  return *this;
}

Status ChangeSlots::CopyUp(const ChangeSlot& slot, uint64_t offset, uint64_t bytes) {
  return context_->device().CopyToDevice(stream_, slot.device + offset, slot.host + offset, bytes);
}

Status ChangeSlots::CopyDown(const ChangeSlot& slot, uint64_t offset, uint64_t bytes) {
  HYBRIDOPT_TRY(
      context_->device().CopyToHost(stream_, slot.host + offset, slot.device + offset, bytes));
  return NoteQueued(slot);
}

Status ChangeSlots::NoteQueued(const ChangeSlot& slot) {
  return context_->device().Record(slot.down, stream_);
}

Status ChangeSlots::Await(const ChangeSlot& slot) const {
  return context_->AwaitEvent(slot.down, kWaiter, "changed elements coming down");
}

}  // namespace hybridopt
