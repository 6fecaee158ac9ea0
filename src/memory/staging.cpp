#include "memory/staging.h"

#include "base/system.h"

namespace hybridopt {
namespace {

constexpr uint64_t kPageBytes = 4096;

}  // namespace

uint64_t StagingRing::SlotBytes(uint64_t grad_bytes, uint64_t param_bytes) {
  return system::RoundUp(grad_bytes, kPageBytes) + system::RoundUp(param_bytes, kPageBytes);
}

StagingRing::StagingRing(Device& device, std::byte* memory, uint32_t slots, uint64_t grad_bytes,
                         uint64_t param_bytes)
    : device_(&device),
      memory_(memory),
      slots_(slots),
      grad_bytes_(system::RoundUp(grad_bytes, kPageBytes)),
      slot_bytes_(SlotBytes(grad_bytes, param_bytes)) {
  for (uint32_t slot = 0; slot < slots; ++slot) {
    ReleaseGrads(slot);
    ReleaseParams(slot);
  }
}

void StagingRing::ReleaseGrads(uint32_t slot) { device_->DiscardHost(grads(slot), grad_bytes_); }

void StagingRing::ReleaseParams(uint32_t slot) {
  device_->DiscardHost(params(slot), slot_bytes_ - grad_bytes_);
}

}  // namespace hybridopt
