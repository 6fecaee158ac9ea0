// SwapMemory: pinned host memory for what the offload calls copy from the device: params,
// gradients, and the states of the device share. Commit takes the memory; its pages are first
// touched when they are used. It has nothing to do with the operating system's swap: nothing of it
// is on a disk.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "machine/pinned_room.h"
#include "state/residence.h"

namespace hybridopt {

// Host memory for the states of the device share under one residence: the first bytes of each
// device region, one region after the other.
class SwapStates {
 public:
  static Result<SwapStates> Take(Context& context, const StateShape& shape,
                                 const Residence& residence);
  static uint64_t Bytes(const StateShape& shape, const Residence& residence);

  std::byte* At(const ParamShape& param, StateSlot slot, uint64_t element) const {
    return room_.data() + begin_[slot] + param.ByteAt(Tier::kDevice, slot, element);
  }
  std::byte* data() const { return room_.data(); }
  void AddNodeBytes(NodeBytes* sum) const { room_.AddNodeBytes(sum); }

 private:
  PinnedRoom room_;
  std::array<uint64_t, kStateSlots> begin_{};
};

class SwapMemory {
 public:
  static Result<std::unique_ptr<SwapMemory>> Create(Context& context, const StateShape& shape,
                                                    const Residence& residence);
  static uint64_t Bytes(const StateShape& shape, const Residence& residence) {
    return shape.swap_params_bytes + shape.swap_grads_bytes + SwapStates::Bytes(shape, residence);
  }

  std::byte* Params(uint32_t id) const {
    return params_.data() + shape_.params[id].swap_params_offset;
  }
  std::byte* Grads(uint32_t id) const {
    return grads_.data() + shape_.params[id].swap_grads_offset;
  }
  std::byte* State(uint32_t id, StateSlot slot, uint64_t element) const {
    return states_.At(shape_.params[id], slot, element);
  }
  SwapStates& states() { return states_; }
  const SwapStates& states() const { return states_; }
  void AddNodeBytes(NodeBytes* sum) const {
    params_.AddNodeBytes(sum);
    grads_.AddNodeBytes(sum);
    states_.AddNodeBytes(sum);
  }

 private:
  explicit SwapMemory(const StateShape& shape) : shape_(shape) {}

  const StateShape& shape_;
  PinnedRoom params_;
  PinnedRoom grads_;
  SwapStates states_;
};

}  // namespace hybridopt
