// PinnedRoom: host memory to and from which the device copies asynchronously, in one or several
// pieces. What is pinned of it counts towards the context's cap of pinned memory while it lives:
// the room reserves all bytes that it wants, then gives back those that the system has not pinned.
//
// Where no device copies to or from host memory, it is not pinned and counts nothing.
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
  PinnedRoom() = default;  // of 0 bytes
  // One piece. If the system does not pin it, it is pageable if the context allows that. `shrinks`
  // is what errors say to make smaller; it must outlive the room.
  static Result<PinnedRoom> Take(Context& context, uint64_t bytes, const char* shrinks);
  // One piece, which is pageable if the system or the cap does not let it be pinned: copies are
  // only slower then.
  static Result<PinnedRoom> TakeAnyway(Context& context, uint64_t bytes);

  // For several pieces: reserves the bytes of all. Then come Add for each piece, and Settle.
  static Result<PinnedRoom> Reserve(Context& context, uint64_t bytes, const char* shrinks);
  // Adds a piece of *units units. If the system does not pin it, of half as many, and so on down to
  // `least`; *units tells how many the piece has.
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
  // Of the first piece; NULL: there is no byte.
  std::byte* data() const { return pieces_.empty() ? nullptr : pieces_[0].data(); }
  // Whether some piece is not pinned although a device copies to or from it.
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
