// TransferMemory: the blocks of memory that a save or load holds while it runs. They are pinned if
// there is a device, and the system and the context's cap allow it; without pinning copies are only
// slower.
#pragma once

#include <utility>

#include "machine/context.h"
#include "memory/pinned_arena.h"

namespace hybridopt {

class TransferMemory {
 public:
  TransferMemory() = default;
  static Result<TransferMemory> Take(Context& context, uint64_t bytes) {
    TransferMemory memory;
    // Direct access to a disk transfers contiguous memory at once; with small pages it is half as
    // fast.
    const PageWish& wish = context.pinned_pages();
    if (!context.device().unified() && context.ReservePinned(bytes).ok()) {
      memory.context_ = &context;
      memory.pinned_bytes_ = bytes;
      HYBRIDOPT_ASSIGN(memory.pinned_, PinnedArena::Map(context.device(), bytes, wish, true));
      return memory;
    }
    HYBRIDOPT_ASSIGN(memory.pageable_, Arena::Map(bytes, wish));
    return memory;
  }
  ~TransferMemory() {
    if (context_ != nullptr) context_->ReleasePinned(pinned_bytes_);
  }
  TransferMemory(TransferMemory&& other) noexcept { *this = std::move(other); }
  TransferMemory& operator=(TransferMemory&& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(pinned_bytes_, other.pinned_bytes_);
    std::swap(pinned_, other.pinned_);
    std::swap(pageable_, other.pageable_);
    return *this;
  }

  std::byte* data() const { return context_ != nullptr ? pinned_.data() : pageable_.data(); }

 private:
  Context* context_ = nullptr;  // set if the memory counts as pinned
  uint64_t pinned_bytes_ = 0;
  PinnedArena pinned_;
  Arena pageable_;
};

}  // namespace hybridopt
