// PinnedArena: an arena to and from which the device copies asynchronously.
#pragma once

#include "device/device.h"
#include "memory/arena.h"

namespace hybridopt {

class PinnedArena {
 public:
  PinnedArena() = default;
  // 0 bytes: an empty arena. Pinning touches every page from the calling thread, so the wish
  // decides on which nodes they are. allow_pageable: if the system does not pin the memory, it is
  // mapped without pinning.
  static Result<PinnedArena> Map(Device& device, uint64_t bytes, const PageWish& wish = {},
                                 bool allow_pageable = false);
  // An arena of the same kind that is not pinned.
  static Result<PinnedArena> MapPageable(uint64_t bytes, const PageWish& wish);
  ~PinnedArena();
  PinnedArena(PinnedArena&& other) noexcept { *this = std::move(other); }
  PinnedArena& operator=(PinnedArena&& other) noexcept;

  std::byte* data() const { return arena_.data(); }
  uint64_t bytes() const { return arena_.bytes(); }
  void AddNodeBytes(NodeBytes* sum) const { arena_.AddNodeBytes(0, arena_.bytes(), sum); }
  uint64_t pinned_bytes() const { return device_ != nullptr ? arena_.bytes() : 0; }

 private:
  Device* device_ = nullptr;  // set while pinned
  Arena arena_;
};

}  // namespace hybridopt
