#include "memory/staging.h"

#include "base/system.h"

namespace hybridopt {
namespace {

constexpr uint64_t kPageBytes = 4096;

}  // namespace

uint64_t StagingRing::Bytes(uint32_t slots, uint64_t grad_bytes, uint64_t param_bytes) {
  return slots *
         (system::RoundUp(grad_bytes, kPageBytes) + system::RoundUp(param_bytes, kPageBytes));
}

Result<StagingRing> StagingRing::Create(Device& device, uint32_t slots, uint64_t grad_bytes,
                                        uint64_t param_bytes, const PageWish& wish,
                                        bool allow_pageable) {
  StagingRing ring;
  HYBRIDOPT_ASSIGN(ring.arena_, PinnedArena::Map(device, Bytes(slots, grad_bytes, param_bytes),
                                                 wish, allow_pageable));
  if (ring.arena_.bytes() == 0) return ring;
  ring.slots_ = slots;
  ring.grad_bytes_ = system::RoundUp(grad_bytes, kPageBytes);
  ring.slot_bytes_ = ring.grad_bytes_ + system::RoundUp(param_bytes, kPageBytes);
  ring.device_ = &device;
  for (uint32_t slot = 0; slot < slots; ++slot) {
    ring.ReleaseGrads(slot);
    ring.ReleaseParams(slot);
  }
  return ring;
}

void StagingRing::ReleaseGrads(uint32_t slot) { device_->DiscardHost(grads(slot), grad_bytes_); }

void StagingRing::ReleaseParams(uint32_t slot) {
  device_->DiscardHost(params(slot), slot_bytes_ - grad_bytes_);
}

}  // namespace hybridopt
