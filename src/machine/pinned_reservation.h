// PinnedReservation: bytes that count towards the context's cap of pinned memory while it lives.
// Each owner of pinned memory has one: it reserves all bytes that it wants, then gives back those
// that the system has not pinned.
#pragma once

#include <cstdint>
#include <utility>

#include "machine/context.h"

namespace hybridopt {

class PinnedReservation {
 public:
  PinnedReservation() = default;  // of 0 bytes
  static Result<PinnedReservation> Take(Context& context, uint64_t bytes) {
    HYBRIDOPT_TRY(context.ReservePinned(bytes));
    PinnedReservation taken;
    taken.context_ = &context;
    taken.bytes_ = bytes;
    return taken;
  }
  ~PinnedReservation() { ShrinkTo(0); }
  PinnedReservation(PinnedReservation&& other) noexcept { *this = std::move(other); }
  PinnedReservation& operator=(PinnedReservation&& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  uint64_t bytes() const { return bytes_; }
  void ShrinkTo(uint64_t bytes) {
    if (context_ != nullptr) context_->ReleasePinned(bytes_ - bytes);
    bytes_ = bytes;
  }

 private:
  Context* context_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace hybridopt
