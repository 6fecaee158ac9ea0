// StateMemory: the masters and moments of one optimizer, on the host and on the device.
#pragma once

#include <cstdint>
#include <memory>

#include "machine/context.h"
#include "memory/arena.h"
#include "state/placement.h"

namespace hybridopt {

class StateMemory {
 public:
  // Takes the memory; its content is unspecified until moves.h fills it. `placement` outlives it.
  static Result<std::unique_ptr<StateMemory>> Create(Context& context, const Placement& placement);
  ~StateMemory();

  // The device's block can be given away and taken again, with its content elsewhere meanwhile.
  Result<void*> TakeBlock();  // allocates; NULL if there is no device share
  void UseBlock(void* block) { block_ = block; }
  void FreeBlock();
  std::byte* block() const { return static_cast<std::byte*>(block_); }

  // The first element of that share's array, or NULL where the param keeps none. Its elements are
  // of the placement's state_dtype.
  std::byte* Host(uint32_t param, StateSlot slot) const;
  std::byte* OnDevice(uint32_t param, StateSlot slot) const;  // a device address

 private:
  StateMemory(Device& device, const Placement& placement)
      : device_(device), placement_(placement) {}

  Device& device_;
  const Placement& placement_;
  Arena arena_;
  void* block_ = nullptr;  // device
};

}  // namespace hybridopt
