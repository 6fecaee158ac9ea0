#include "core/swap_memory.h"

namespace hybridopt {

uint64_t SwapMemory::Bytes(const Placement& placement) {
  return placement.swap_params_bytes + placement.swap_grads_bytes + placement.swap_states_bytes;
}

Result<std::unique_ptr<SwapMemory>> SwapMemory::Create(Context& context,
                                                       const Placement& placement) {
  std::unique_ptr<SwapMemory> swap(new SwapMemory(context, placement));
  Device& device = context.device();
  // Host memory that no device copies to or from need not be pinned, and does not count as such.
  if (!device.unified()) {
    HYBRIDOPT_TRY(context.ReservePinned(Bytes(placement)));
    swap->pinned_bytes_ = Bytes(placement);
  }
  const PageWish& pages = context.pinned_pages();
  HYBRIDOPT_ASSIGN(swap->params_, PinnedArena::Map(device, placement.swap_params_bytes, pages));
  HYBRIDOPT_ASSIGN(swap->grads_, PinnedArena::Map(device, placement.swap_grads_bytes, pages));
  HYBRIDOPT_ASSIGN(swap->states_, PinnedArena::Map(device, placement.swap_states_bytes, pages));
  return swap;
}

}  // namespace hybridopt
