// PinnedRoom: host memory to and from which the device copies asynchronously, in one or several
// pieces. While the room lives, its pinned bytes count towards the context's cap of pinned memory:
// the room first reserves all bytes that it wants, then gives back the bytes that the system did
// not pin.
//
// If the device does not copy to or from host memory, the room is not pinned and counts as 0 bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "machine/context.h"
#include "memory/pinned_arena.h"

namespace hybridopt {

class PinnedRoom {
 public:
  PinnedRoom() = default;  // 0 bytes
  // One piece. If the system does not pin it, it is pageable memory, if the context allows that.
  // `shrinks` is what errors advise to make smaller; the string must outlive the room.
  static Result<PinnedRoom> Take(Context& context, uint64_t bytes, const char* shrinks);
  // One piece. If the system does not pin it, or the cap does not allow it, the piece is pageable
  // memory, which only makes copies slower.
  static Result<PinnedRoom> TakeAnyway(Context& context, uint64_t bytes);
  // One piece of pageable memory.
  static Result<PinnedRoom> TakePageable(Context& context, uint64_t bytes);

  // For several pieces: reserves the bytes of all pieces. Then the caller calls Add for each piece,
  // and Settle.
  static Result<PinnedRoom> Reserve(Context& context, uint64_t bytes, const char* shrinks);
  // Adds a piece of *units units. If the system does not pin that, tries half as many units, and so
  // on down to `least`. *units becomes the number of units of the piece.
  Status Add(uint64_t unit_bytes, uint32_t* units, uint32_t least, bool allow_pageable);
  // Gives back the reserved bytes that are not pinned.
  void Settle();

  ~PinnedRoom() {
    pieces_.clear();
    ReleaseReserved(0);
  }
  PinnedRoom(PinnedRoom&& other) noexcept { *this = std::move(other); }
  PinnedRoom& operator=(PinnedRoom&& other) noexcept;

  std::span<const PinnedArena> pieces() const { return pieces_; }
  // The first piece; NULL if the room has 0 bytes.
  std::byte* data() const { return pieces_.empty() ? nullptr : pieces_[0].data(); }
  // Whether the device copies to or from some piece that is not pinned.
  bool pageable() const;
  // The bytes that count towards the cap.
  uint64_t pinned_bytes() const { return reserved_bytes_; }
  void AddNodeBytes(NodeBytes* sum) const;

 private:
  Result<PinnedArena> Map(uint64_t bytes, bool allow_pageable) const;
  void ReleaseReserved(uint64_t kept_bytes);

  Context* context_ = nullptr;
  const char* shrinks_ = "";
  uint64_t reserved_bytes_ = 0;
  bool pins_ = false;
  std::vector<PinnedArena> pieces_;
};

}  // namespace hybridopt
