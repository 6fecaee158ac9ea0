#include "place/swap_memory.h"

#include "base/system.h"

namespace hybridopt {
namespace {

constexpr uint64_t kRegionAlignmentBytes = 256;

}  // namespace

Result<PinnedRoom> PinnedRoom::Take(Context& context, uint64_t bytes) {
  PinnedRoom room;
  Device& device = context.device();
  // Where no device copies to or from host memory, it need not be pinned, and does not count as
  // pinned.
  if (!device.unified()) {
    HYBRIDOPT_ASSIGN(room.reservation_, PinnedReservation::Take(context, bytes));
  }
  HYBRIDOPT_ASSIGN(room.arena_, PinnedArena::Map(device, bytes, context.pinned_pages(),
                                                 context.allow_pageable()));
  if (device.unified()) return room;
  const uint64_t pinned_bytes = room.arena_.pinned_bytes();
  if (pinned_bytes < bytes)
    context.Note("room for what is offloaded is pageable: the system did not pin all of it");
  room.reservation_.ShrinkTo(pinned_bytes);
  return room;
}

uint64_t SwapStates::Bytes(const StateShape& shape, const Residence& residence) {
  if ((shape.options.movable & OFFLOAD_MOVABLE_STATES) == 0) return 0;
  uint64_t bytes = 0;
  for (uint32_t slot = 0; slot < kStateSlots; ++slot) {
    const uint64_t end = residence.bytes(Tier::kDevice, StateSlot{slot}).end;
    bytes += system::RoundUp(end, kRegionAlignmentBytes);
  }
  return bytes;
}

Result<SwapStates> SwapStates::Take(Context& context, const StateShape& shape,
                                    const Residence& residence) {
  SwapStates states;
  HYBRIDOPT_ASSIGN(states.room_, PinnedRoom::Take(context, Bytes(shape, residence)));
  uint64_t begin = 0;
  for (uint32_t slot = 0; slot < kStateSlots; ++slot) {
    states.begin_[slot] = begin;
    const uint64_t end = residence.bytes(Tier::kDevice, StateSlot{slot}).end;
    begin += system::RoundUp(end, kRegionAlignmentBytes);
  }
  return states;
}

Result<std::unique_ptr<SwapMemory>> SwapMemory::Create(Context& context, const StateShape& shape,
                                                       const Residence& residence) {
  std::unique_ptr<SwapMemory> swap(new SwapMemory(shape));
  HYBRIDOPT_ASSIGN(swap->params_, PinnedRoom::Take(context, shape.swap_params_bytes));
  HYBRIDOPT_ASSIGN(swap->grads_, PinnedRoom::Take(context, shape.swap_grads_bytes));
  HYBRIDOPT_ASSIGN(swap->states_, SwapStates::Take(context, shape, residence));
  return swap;
}

}  // namespace hybridopt
