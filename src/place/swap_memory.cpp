#include "place/swap_memory.h"

#include "base/system.h"

namespace hybridopt {
namespace {

constexpr uint64_t kRegionAlignmentBytes = 256;

Result<PinnedRoom> TakeRoom(Context& context, uint64_t bytes) {
  HYBRIDOPT_ASSIGN(PinnedRoom room, PinnedRoom::Take(context, bytes, "movable"));
  if (room.pageable())
    context.Note("room for what is offloaded is pageable: the system did not pin all of it");
  return room;
}

}  // namespace

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
  HYBRIDOPT_ASSIGN(states.room_, TakeRoom(context, Bytes(shape, residence)));
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
  HYBRIDOPT_ASSIGN(swap->params_, TakeRoom(context, shape.swap_params_bytes));
  HYBRIDOPT_ASSIGN(swap->grads_, TakeRoom(context, shape.swap_grads_bytes));
  HYBRIDOPT_ASSIGN(swap->states_, SwapStates::Take(context, shape, residence));
  return swap;
}

}  // namespace hybridopt
