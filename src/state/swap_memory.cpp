#include "state/swap_memory.h"

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
  const auto map = [&](uint64_t bytes) {
    return PinnedArena::Map(device, bytes, context.pinned_pages(), context.allow_pageable());
  };
  HYBRIDOPT_ASSIGN(swap->params_, map(placement.swap_params_bytes));
  HYBRIDOPT_ASSIGN(swap->grads_, map(placement.swap_grads_bytes));
  HYBRIDOPT_ASSIGN(swap->states_, map(placement.swap_states_bytes));
  if (device.unified()) return swap;
  const uint64_t pinned_bytes =
      swap->params_.pinned_bytes() + swap->grads_.pinned_bytes() + swap->states_.pinned_bytes();
  if (pinned_bytes < Bytes(placement))
    context.Note("room for what is offloaded is pageable: the system did not pin all of it");
  context.ReleasePinned(swap->pinned_bytes_ - pinned_bytes);
  swap->pinned_bytes_ = pinned_bytes;
  return swap;
}

}  // namespace hybridopt
