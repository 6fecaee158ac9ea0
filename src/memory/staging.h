// StagingRing: the fixed ring of pinned chunks between device and host. All memory is taken when
// it is made; the pipeline reuses slots in turn.
//
//   slot 0: | grads | params |   slot 1: | grads | params |   ...
//
// The grads half of a slot is free again when the update has read it, the params half when its copy
// to the device has ended. Each half is released separately.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "device/device.h"
#include "memory/pinned_arena.h"

namespace hybridopt {

class StagingRing {
 public:
  StagingRing() = default;
  static Result<StagingRing> Create(Device& device, uint32_t slots, uint64_t grad_bytes,
                                    uint64_t param_bytes, const PageWish& wish = {},
                                    bool allow_pageable = false);

  // The bytes that Create takes, padding included.
  static uint64_t Bytes(uint32_t slots, uint64_t grad_bytes, uint64_t param_bytes);

  uint32_t slots() const { return slots_; }
  uint64_t bytes() const { return arena_.bytes(); }
  uint64_t pinned_bytes() const { return arena_.pinned_bytes(); }
  void AddNodeBytes(NodeBytes* sum) const { arena_.AddNodeBytes(sum); }
  uint64_t grad_bytes() const { return grad_bytes_; }  // of a slot's grads half
  std::byte* grads(uint32_t slot) const { return arena_.data() + slot * slot_bytes_; }
  std::byte* params(uint32_t slot) const { return grads(slot) + grad_bytes_; }

  // To be called when the content of this half is not needed any more (Device::DiscardHost).
  void ReleaseGrads(uint32_t slot);
  void ReleaseParams(uint32_t slot);

 private:
  Device* device_ = nullptr;
  PinnedArena arena_;
  uint32_t slots_ = 0;
  uint64_t grad_bytes_ = 0;
  uint64_t slot_bytes_ = 0;
};

}  // namespace hybridopt
