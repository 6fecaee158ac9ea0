// CheckpointMemory: the blocks of memory that a save or load holds while it runs. They are pinned
// if there is a device, and the system and the context's cap allow it; without pinning copies are
// only slower.
#pragma once

#include <utility>

#include "machine/context.h"
#include "machine/pinned_reservation.h"
#include "memory/pinned_arena.h"

namespace hybridopt {

class CheckpointMemory {
 public:
  static Result<CheckpointMemory> Take(Context& context, uint64_t bytes) {
    CheckpointMemory memory;
    // Direct access to a disk transfers contiguous memory at once; with small pages it is half as
    // fast.
    const PageWish& wish = context.pinned_pages();
    if (!context.device().unified()) {
      Result<PinnedReservation> reservation = PinnedReservation::Take(context, bytes);
      if (reservation.ok()) {
        memory.reservation_ = std::move(reservation.value());
        HYBRIDOPT_ASSIGN(memory.pinned_, PinnedArena::Map(context.device(), bytes, wish, true));
        return memory;
      }
    }
    HYBRIDOPT_ASSIGN(memory.pageable_, Arena::Map(bytes, wish));
    return memory;
  }

  std::byte* data() const { return pinned_.data() != nullptr ? pinned_.data() : pageable_.data(); }

 private:
  PinnedReservation reservation_;  // of `pinned_`
  PinnedArena pinned_;
  Arena pageable_;
};

}  // namespace hybridopt
