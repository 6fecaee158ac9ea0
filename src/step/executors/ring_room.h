// RingRoom: which bytes of a ring chunks have. Chunks take bytes in order and give them back in the
// same order. The bytes of a chunk follow each other, so a chunk that does not fit behind the
// newest one begins at the ring's begin, and the bytes between stay unused:
//
//   ring   | chunk 5 | chunk 6 |     free     | chunk 3 |  chunk 4  | unused |
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "base/check.h"

namespace hybridopt {

class RingRoom {
 public:
  explicit RingRoom(uint64_t bytes = 0) : size_(bytes) {}

  // Takes `bytes`, and returns a position; none if they are not free. An empty ring has room for
  // every chunk that is not larger than the ring.
  std::optional<uint64_t> Take(uint64_t bytes) {
    HYBRIDOPT_CHECK(bytes <= size_);
    uint64_t position = end_;
    if (position % Ring() + bytes > size_) position += Ring() - position % Ring();
    const uint64_t oldest = oldest_ == end_ ? position : oldest_;  // no byte is taken
    if (position + bytes - oldest > size_) return std::nullopt;
    oldest_ = oldest;
    end_ = position + bytes;
    return position;
  }
  // The offset in the ring of a position.
  uint64_t OffsetOf(uint64_t position) const { return position % Ring(); }
  // Gives back the bytes of the oldest chunk. `next` is the position of the chunk behind it; none
  // if there is no such chunk.
  void GiveBack(std::optional<uint64_t> next) { oldest_ = std::max(oldest_, next.value_or(end_)); }

 private:
  // A ring of chunks without state has no bytes.
  uint64_t Ring() const { return size_ > 0 ? size_ : 1; }

  uint64_t size_;
  // Positions count on when the ring begins again.
  uint64_t oldest_ = 0;  // where the oldest chunk with bytes begins
  uint64_t end_ = 0;     // where the newest chunk ends
};

}  // namespace hybridopt
