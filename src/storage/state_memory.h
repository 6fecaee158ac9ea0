// StateMemory: the masters and moments of one optimizer, on the host and on the device. Each slot
// has one region of addresses on each tier; the residence says how much of it has memory.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "machine/context.h"
#include "memory/arena.h"
#include "memory/device_window.h"
#include "state/residence.h"

namespace hybridopt {

// Memory of the device that state will need, taken by the call that asks for it, so that a full
// device refuses the call instead of failing queued work.
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

// Whether PinHost found the system's limit, or the context's cap.
inline bool IsUnpinnable(const Status& status) {
  return status.code() == OFFLOAD_OUT_OF_HOST_MEMORY || status.code() == OFFLOAD_INVALID_ARGUMENT;
}

class StateMemory {
 public:
  ~StateMemory() { UnpinHost(nullptr); }
  StateMemory(const StateMemory&) = delete;
  StateMemory& operator=(const StateMemory&) = delete;

  // Takes the memory; its content is unspecified until moves.h fills it. `shape` outlives it.
  static Result<std::unique_ptr<StateMemory>> Create(Context& context, const StateShape& shape,
                                                     const Residence& residence);

  // What a residence takes, whole pages.
  static uint64_t HostBytes(const Residence& residence);
  static uint64_t DeviceBytes(const Device& device, const StateShape& shape,
                              const Residence& residence);

  // The device's memory for going from one residence to another; `from` NULL: from nothing.
  Result<TakenPages> TakeDevice(const Residence* from, const Residence& to) const;
  Status GrowDevice(TakenPages& pages);
  void ShrinkDevice(const Residence& to);
  void FreeDevice();
  // False while all states are elsewhere, or were on their way when queued work failed.
  bool has_device() const { return has_device_; }

  // Memory for what the host holds in either residence; then only for what it holds in one.
  Status GrowHost(const Residence& to);
  void ShrinkHost(const Residence& from, const Residence& to);

  // Pins what a residence holds on the host, so that the device copies it at its full speed. What
  // is pinned must be unpinned before ShrinkHost, but for what the new residence holds too. Where
  // that much cannot be pinned (IsUnpinnable), nothing is.
  Status PinHost(const Residence& residence);
  void UnpinHost(const Residence* but_what_this_holds);
  bool pinned() const { return pinned_; }
  uint64_t pinned_bytes() const;
  static uint64_t PinnedBytes(const StateShape& shape, const Residence& residence);
  // Bytes from this address on that one copy may have: pieces are pinned one by one.
  uint64_t BytesOfCopy(const std::byte* host) const {
    return piece_bytes_ - static_cast<uint64_t>(host - arena_.data()) % piece_bytes_;
  }

  // Adds on which NUMA nodes lies what the host holds.
  void AddNodeBytes(const Residence& residence, NodeBytes* sum) const;

  // An element's address on a tier; NULL where that tier keeps no such array. Whether there is
  // memory behind it the residence says.
  std::byte* Host(uint32_t param, StateSlot slot, uint64_t element = 0) const {
    const ParamShape& shaped = shape_.params[param];
    if (!shaped.Keeps(Tier::kHost, slot)) return nullptr;
    return arena_.data() + shape_.host_region_begin[slot] +
           shaped.ByteAt(Tier::kHost, slot, element);
  }
  std::byte* OnDevice(uint32_t param, StateSlot slot, uint64_t element = 0) const {
    const ParamShape& shaped = shape_.params[param];
    if (!shaped.Keeps(Tier::kDevice, slot)) return nullptr;
    return windows_[slot].data() + shaped.ByteAt(Tier::kDevice, slot, element);
  }

 private:
  struct Piece {  // bytes of the arena
    uint64_t begin;
    uint64_t end;
    bool operator==(const Piece&) const = default;
  };

  StateMemory(Context& context, const StateShape& shape)
      : context_(context),
        device_(context.device()),
        shape_(shape),
        piece_bytes_(context.device().pin_piece_bytes()) {}
  static std::vector<Piece> Pieces(const StateShape& shape, const Residence& residence,
                                   uint64_t piece_bytes);
  Status PinPiece(const Piece& piece);
  void UnpinPiece(const Piece& piece);

  Context& context_;
  Device& device_;
  const StateShape& shape_;
  const uint64_t piece_bytes_;
  std::vector<Piece> pieces_;  // pinned, in order
  bool pinned_ = false;        // all that the host holds
  Arena arena_;
  std::array<DeviceWindow, kStateSlots> windows_;
  bool has_device_ = true;
};

}  // namespace hybridopt
