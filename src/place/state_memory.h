// StateMemory: the masters and moments of one optimizer, on all tiers. Each slot has one region of
// addresses on the device and on the host; the residence says which part of it has memory.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "machine/context.h"
#include "memory/arena.h"
#include "memory/device_window.h"
#include "place/disk_memory.h"
#include "state/residence.h"

namespace hybridopt {

// Device memory that state will need. The call that needs the memory takes it at once: if the
// device is full, that call is refused, instead of a failure of queued work later.
class TakenPages {
 public:
  TakenPages() = default;
  explicit TakenPages(Device& device) : device_(&device) {}
  TakenPages(TakenPages&& other) noexcept { *this = std::move(other); }
  TakenPages& operator=(TakenPages&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(slots, other.slots);
    return *this;
  }
  ~TakenPages() {
    for (DevicePages& pages : slots)
      if (pages.bytes > 0) device_->FreePages(pages);
  }

  std::array<DevicePages, kStateSlots> slots;

 private:
  Device* device_ = nullptr;
};

// Whether PinHost failed at the system's limit or the context's cap.
inline bool IsUnpinnable(const Status& status) {
  return status.code() == OFFLOAD_OUT_OF_HOST_MEMORY || status.code() == OFFLOAD_INVALID_ARGUMENT;
}

class StateMemory {
 public:
  ~StateMemory() { UnpinHost(nullptr); }
  StateMemory(const StateMemory&) = delete;
  StateMemory& operator=(const StateMemory&) = delete;

  // Takes the memory. Its content is unspecified until MasterFill fills it. `shape` must
  // outlive the StateMemory.
  static Result<std::unique_ptr<StateMemory>> Create(Context& context, const StateShape& shape,
                                                     const Residence& residence);

  // Bytes of memory for a residence, in whole pages.
  static ByTier<uint64_t> Bytes(const Device& device, const StateShape& shape,
                                const Residence& residence);

  // Takes the device memory that `to` needs beyond `from`; `from` NULL: all that `to` needs.
  Result<TakenPages> TakeDevice(const Residence* from, const Residence& to) const;
  Status GrowDevice(TakenPages& pages);
  void FreeDevice();
  // False while all states are offloaded, or after queued work failed while it moved them.
  bool has_device() const { return has_device_; }

  // Grow adds the memory that `to` needs on each tier; device memory comes from `pages`, and only
  // while states are on the device. After the copies Shrink frees the memory that only `from`
  // needed.
  Status Grow(const Residence& to, TakenPages& pages);
  void Shrink(const Residence& from, const Residence& to);

  // Pins the state that a residence holds on the host, so that the device copies it at full speed.
  // If not all can be pinned (IsUnpinnable), nothing is pinned.
  Status PinHost(const Residence& residence);
  bool pinned() const { return pinned_; }
  uint64_t pinned_bytes() const;
  static uint64_t PinnedBytes(const StateShape& shape, const Residence& residence);

  // Adds the bytes of the host's state, and of the disk's ring, on each NUMA node.
  void AddNodeBytes(const Residence& residence, NodeBytes* sum) const;

  // The state on disk; NULL if there is none.
  void UseDisk(std::unique_ptr<DiskMemory> disk) { disk_ = std::move(disk); }
  DiskMemory* disk() const { return disk_.get(); }
  DiskTotals& disk_totals() { return disk_totals_; }

  // The address of an element on a tier; NULL if that tier has no such array. The residence tells
  // whether there is memory at that address; an element on disk must be in the ring of the disk.
  std::byte* At(Tier tier, uint32_t param, StateSlot slot, uint64_t element = 0) const {
    const ParamShape& shaped = shape_.params[param];
    if (!shaped.Keeps(tier, slot)) return nullptr;
    if (tier == Tier::kDisk) return disk_->At(param, slot, element);
    return regions_[tier][slot] + shaped.ByteAt(tier, slot, element);
  }

 private:
  struct Piece {  // bytes of the arena
    uint64_t begin;
    uint64_t end;
    bool operator==(const Piece&) const = default;
  };

  StateMemory(Context& context, const StateShape& shape)
      : context_(context), device_(context.device()), shape_(shape) {}
  static std::vector<Piece> Pieces(const StateShape& shape, const Residence& residence);
  Status GrowHost(const Residence& to);
  void ShrinkHost(const Residence& from, const Residence& to);
  // Unpins all host memory, or all that this residence does not hold. It must unpin the memory that
  // ShrinkHost will free.
  void UnpinHost(const Residence* but_what_this_holds);
  Status PinPiece(const Piece& piece);
  void UnpinPiece(const Piece& piece);

  Context& context_;
  Device& device_;
  const StateShape& shape_;
  std::vector<Piece> pieces_;  // pinned, in order
  bool pinned_ = false;        // all state on the host is pinned
  Arena arena_;
  std::array<DeviceWindow, kStateSlots> windows_;
  ByTier<std::array<std::byte*, kStateSlots>> regions_;  // where each region begins
  DiskTotals disk_totals_;
  std::unique_ptr<DiskMemory> disk_;
  bool has_device_ = true;
};

}  // namespace hybridopt
