#include "core/state_memory.h"

namespace hybridopt {

Result<std::unique_ptr<StateMemory>> StateMemory::Create(Device& device,
                                                         const Placement& placement) {
  std::unique_ptr<StateMemory> memory(new StateMemory(device, placement));
  HYBRIDOPT_ASSIGN(memory->arena_, Arena::Map(placement.host_arena_bytes));
  if (placement.device_block_bytes > 0) {
    HYBRIDOPT_ASSIGN(memory->block_, device.Allocate(placement.device_block_bytes));
  }
  return memory;
}

StateMemory::~StateMemory() {
  if (block_ != nullptr) (void)device_.Free(block_);
}

float* StateMemory::Host(uint32_t param, StateSlot slot) const {
  const uint64_t offset = placement_.params[param].host_offset[slot];
  return offset == kNoState ? nullptr : reinterpret_cast<float*>(arena_.data() + offset);
}

float* StateMemory::OnDevice(uint32_t param, StateSlot slot) const {
  const uint64_t offset = placement_.params[param].device_offset[slot];
  return offset == kNoState ? nullptr
                            : reinterpret_cast<float*>(static_cast<std::byte*>(block_) + offset);
}

}  // namespace hybridopt
