#include "memory/pinned_arena.h"

namespace hybridopt {

Result<PinnedArena> PinnedArena::Map(Device& device, uint64_t bytes, const PageWish& wish,
                                     bool allow_pageable) {
  PinnedArena pinned;
  HYBRIDOPT_ASSIGN(pinned.arena_, Arena::Map(bytes, wish));
  if (bytes == 0) return pinned;
  const Status status = device.PinHost(pinned.arena_.data(), bytes);
  if (status.ok()) pinned.device_ = &device;
  const bool pageable = allow_pageable && status.code() == OFFLOAD_OUT_OF_HOST_MEMORY;
  if (!status.ok() && !pageable) return status;
  return pinned;
}

Result<PinnedArena> PinnedArena::MapPageable(uint64_t bytes, const PageWish& wish) {
  PinnedArena pageable;
  HYBRIDOPT_ASSIGN(pageable.arena_, Arena::Map(bytes, wish));
  return pageable;
}

PinnedArena::~PinnedArena() {
  if (device_ != nullptr) device_->UnpinHost(arena_.data());
}

PinnedArena& PinnedArena::operator=(PinnedArena&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(arena_, other.arena_);
  return *this;
}

}  // namespace hybridopt
