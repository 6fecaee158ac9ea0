#include "state/state_memory.h"

namespace hybridopt {

Result<std::unique_ptr<StateMemory>> StateMemory::Create(Context& context,
                                                         const Placement& placement) {
  std::unique_ptr<StateMemory> memory(new StateMemory(context.device(), placement));
  HYBRIDOPT_ASSIGN(memory->arena_, Arena::Map(placement.host_arena_bytes, context.state_pages()));
  HYBRIDOPT_ASSIGN(memory->block_, memory->TakeBlock());
  return memory;
}

StateMemory::~StateMemory() { FreeBlock(); }

Result<void*> StateMemory::TakeBlock() {
  if (placement_.device_block_bytes == 0) return static_cast<void*>(nullptr);
  return device_.Allocate(placement_.device_block_bytes);
}

void StateMemory::FreeBlock() {
  if (block_ != nullptr) (void)device_.Free(block_);
  block_ = nullptr;
}

std::byte* StateMemory::Host(uint32_t param, StateSlot slot) const {
  const uint64_t offset = placement_.params[param].host_offset[slot];
  return offset == kNoState ? nullptr : arena_.data() + offset;
}

std::byte* StateMemory::OnDevice(uint32_t param, StateSlot slot) const {
  const uint64_t offset = placement_.params[param].device_offset[slot];
  return offset == kNoState ? nullptr : block() + offset;
}

}  // namespace hybridopt
