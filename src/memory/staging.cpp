#include "memory/staging.h"

#include <cstring>

namespace hybridopt {
namespace {

constexpr uint64_t kPageBytes = 4096;
constexpr int kPoisonByte = 0xff;

uint64_t RoundUpToPage(uint64_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

}  // namespace

uint64_t StagingRing::Bytes(uint32_t slots, uint64_t grad_bytes, uint64_t param_bytes) {
  return slots * (RoundUpToPage(grad_bytes) + RoundUpToPage(param_bytes));
}

Result<StagingRing> StagingRing::Create(Device& device, uint32_t slots, uint64_t grad_bytes,
                                        uint64_t param_bytes, const PageWish& wish,
                                        bool allow_pageable) {
  StagingRing ring;
  HYBRIDOPT_ASSIGN(ring.arena_, PinnedArena::Map(device, Bytes(slots, grad_bytes, param_bytes),
                                                 wish, allow_pageable));
  if (ring.arena_.bytes() == 0) return ring;
  ring.slots_ = slots;
  ring.grad_bytes_ = RoundUpToPage(grad_bytes);
  ring.slot_bytes_ = ring.grad_bytes_ + RoundUpToPage(param_bytes);
  ring.poison_ = device.kind() == OFFLOAD_DEVICE_SIM;
  for (uint32_t slot = 0; slot < slots; ++slot) {
    ring.ReleaseGrads(slot);
    ring.ReleaseParams(slot);
  }
  return ring;
}

void StagingRing::ReleaseGrads(uint32_t slot) {
  if (poison_) std::memset(grads(slot), kPoisonByte, grad_bytes_);
}

void StagingRing::ReleaseParams(uint32_t slot) {
  if (poison_) std::memset(params(slot), kPoisonByte, slot_bytes_ - grad_bytes_);
}

}  // namespace hybridopt
