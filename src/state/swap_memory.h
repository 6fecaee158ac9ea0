// SwapMemory: pinned room on the host for what offload_* brings down: params, gradients, and the
// device share's states. Taken at commit; its pages are touched when first used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "machine/context.h"
#include "memory/pinned_arena.h"
#include "state/placement.h"

namespace hybridopt {

class SwapMemory {
 public:
  static Result<std::unique_ptr<SwapMemory>> Create(Context& context, const Placement& placement);
  ~SwapMemory() { context_.ReleasePinned(pinned_bytes_); }
  static uint64_t Bytes(const Placement& placement);

  std::byte* Params(uint32_t id) const {
    return params_.data() + placement_.params[id].swap_params_offset;
  }
  std::byte* Grads(uint32_t id) const {
    return grads_.data() + placement_.params[id].swap_grads_offset;
  }
  std::byte* states() const { return states_.data(); }  // laid out as the device's block

 private:
  SwapMemory(Context& context, const Placement& placement)
      : context_(context), placement_(placement) {}

  Context& context_;
  const Placement& placement_;
  uint64_t pinned_bytes_ = 0;
  PinnedArena params_;
  PinnedArena grads_;
  PinnedArena states_;
};

}  // namespace hybridopt
