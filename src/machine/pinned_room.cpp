#include "machine/pinned_room.h"

#include <algorithm>

namespace hybridopt {

Result<PinnedRoom> PinnedRoom::Reserve(Context& context, uint64_t bytes, const char* shrinks) {
  PinnedRoom room;
  if (!context.device().unified()) {
    HYBRIDOPT_TRY(context.ReservePinned(bytes, shrinks));
    room.reserved_bytes_ = bytes;
    room.pins_ = true;
  }
  room.context_ = &context;
  room.shrinks_ = shrinks;
  return room;
}

Result<PinnedRoom> PinnedRoom::Take(Context& context, uint64_t bytes, const char* shrinks) {
  HYBRIDOPT_ASSIGN(PinnedRoom room, Reserve(context, bytes, shrinks));
  uint32_t units = 1;
  HYBRIDOPT_TRY(room.Add(bytes, &units, 1, context.allow_pageable()));
  room.Settle();
  return room;
}

Result<PinnedRoom> PinnedRoom::TakeAnyway(Context& context, uint64_t bytes) {
  Result<PinnedRoom> reserved = Reserve(context, bytes, "");
  if (!reserved.ok()) return TakePageable(context, bytes);
  PinnedRoom room = std::move(reserved.value());
  uint32_t units = 1;
  HYBRIDOPT_TRY(room.Add(bytes, &units, 1, true));
  room.Settle();
  return room;
}

Result<PinnedRoom> PinnedRoom::TakePageable(Context& context, uint64_t bytes) {
  PinnedRoom room;
  room.context_ = &context;
  uint32_t units = 1;
  HYBRIDOPT_TRY(room.Add(bytes, &units, 1, true));
  return room;
}

Result<PinnedArena> PinnedRoom::Map(uint64_t bytes, bool allow_pageable) const {
  const PageWish& wish = context_->pinned_pages();
  if (!pins_) return PinnedArena::MapPageable(bytes, wish);
  Result<PinnedArena> mapped = PinnedArena::Map(context_->device(), bytes, wish, allow_pageable);
  if (mapped.status().code() != OFFLOAD_OUT_OF_HOST_MEMORY) return mapped;
  return Status::Error(OFFLOAD_OUT_OF_HOST_MEMORY,
                       "%s; raise that limit, make %s smaller, or set allow_pageable of the "
                       "context to use it unpinned",
                       mapped.status().message().c_str(), shrinks_);
}

Status PinnedRoom::Add(uint64_t unit_bytes, uint32_t* units, uint32_t least, bool allow_pageable) {
  pieces_.reserve(pieces_.size() + 1);
  while (true) {
    Result<PinnedArena> piece = Map(*units * unit_bytes, allow_pageable);
    if (piece.ok()) pieces_.push_back(std::move(piece.value()));
    if (piece.status().code() != OFFLOAD_OUT_OF_HOST_MEMORY || *units <= least)
      return piece.status();
    *units = std::max(least, *units / 2);
  }
}

void PinnedRoom::Settle() {
  uint64_t pinned_bytes = 0;
  for (const PinnedArena& piece : pieces_) pinned_bytes += piece.pinned_bytes();
  ReleaseReserved(pinned_bytes);
}

void PinnedRoom::ReleaseReserved(uint64_t kept_bytes) {
  if (reserved_bytes_ > kept_bytes) context_->ReleasePinned(reserved_bytes_ - kept_bytes);
  reserved_bytes_ = std::min(reserved_bytes_, kept_bytes);
}

bool PinnedRoom::pageable() const {
  return pins_ && std::any_of(pieces_.begin(), pieces_.end(), [](const PinnedArena& piece) {
           return piece.pinned_bytes() < piece.bytes();
         });
}

void PinnedRoom::AddNodeBytes(NodeBytes* sum) const {
  for (const PinnedArena& piece : pieces_) piece.AddNodeBytes(sum);
}

PinnedRoom& PinnedRoom::operator=(PinnedRoom&& other) noexcept {
  std::swap(context_, other.context_);
  std::swap(shrinks_, other.shrinks_);
  std::swap(reserved_bytes_, other.reserved_bytes_);
  std::swap(pins_, other.pins_);
  std::swap(pieces_, other.pieces_);
  return *this;
}

}  // namespace hybridopt
