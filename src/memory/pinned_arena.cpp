#include "memory/pinned_arena.h"

namespace hybridopt {

Result<PinnedArena> PinnedArena::Map(Device& device, uint64_t bytes, const PageWish& wish) {
  PinnedArena pinned;
  HYBRIDOPT_ASSIGN(pinned.arena_, Arena::Map(bytes, wish));
  if (bytes == 0) return pinned;
  HYBRIDOPT_TRY(device.PinHost(pinned.arena_.data(), bytes));
  pinned.device_ = &device;
  return pinned;
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
