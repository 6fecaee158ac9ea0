// StagingRing: how memory is cut into the fixed ring of pinned chunks between device and host. The
// pipeline reuses slots in turn.
//
//   slot 0: | grads | params |   slot 1: | grads | params |   ...
//
// The grads half of a slot is free again when the update has read it, the params half when its copy
// to the device has ended. Each half is released separately.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/device.h"

namespace hybridopt {

class StagingRing {
 public:
  StagingRing() = default;
  // `memory`, on a page, has slots * SlotBytes(grad_bytes, param_bytes) bytes and outlives the
  // ring.
  StagingRing(Device& device, std::byte* memory, uint32_t slots, uint64_t grad_bytes,
              uint64_t param_bytes);

  // The bytes of a slot, padding included.
  static uint64_t SlotBytes(uint64_t grad_bytes, uint64_t param_bytes);

  uint32_t slots() const { return slots_; }
  uint64_t grad_bytes() const { return grad_bytes_; }  // of a slot's grads half
  std::byte* grads(uint32_t slot) const { return memory_ + slot * slot_bytes_; }
  std::byte* params(uint32_t slot) const { return grads(slot) + grad_bytes_; }

  // To be called when the content of this half is not needed any more (Device::DiscardHost).
  void ReleaseGrads(uint32_t slot);
  void ReleaseParams(uint32_t slot);

 private:
  Device* device_ = nullptr;
  std::byte* memory_ = nullptr;
  uint32_t slots_ = 0;
  uint64_t grad_bytes_ = 0;
  uint64_t slot_bytes_ = 0;
};

}  // namespace hybridopt
