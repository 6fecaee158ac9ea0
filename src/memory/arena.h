// Arena: one mapping of host memory for optimizer state. Its pages are placed by whoever touches
// them first, which core arranges to be the worker that will update them.
//
//   | master of p0 | p1 | ... | pad | moment0 of p0 | p1 | ... | pad | moment1 of p0 | p1 | ... |
//
// (core/placement.cpp computes the offsets; the arena knows only bytes.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/prim.h"
#include "base/status.h"

namespace hybridopt {

class Arena {
 public:
  Arena() = default;
  static Result<Arena> Map(uint64_t bytes);  // 0 bytes: an empty arena
  ~Arena();
  Arena(Arena&& other) noexcept { *this = std::move(other); }
  Arena& operator=(Arena&& other) noexcept;

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace hybridopt
