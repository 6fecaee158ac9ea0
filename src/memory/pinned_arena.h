// PinnedArena: an arena that the device may copy to and from while the host goes on.
#pragma once

#include "device/device.h"
#include "memory/arena.h"

namespace hybridopt {

class PinnedArena {
 public:
  PinnedArena() = default;
  static Result<PinnedArena> Map(Device& device, uint64_t bytes);  // 0 bytes: an empty arena
  ~PinnedArena();
  PinnedArena(PinnedArena&& other) noexcept { *this = std::move(other); }
  PinnedArena& operator=(PinnedArena&& other) noexcept;

  std::byte* data() const { return arena_.data(); }
  uint64_t bytes() const { return arena_.bytes(); }

 private:
  Device* device_ = nullptr;  // set while pinned
  Arena arena_;
};

}  // namespace hybridopt
