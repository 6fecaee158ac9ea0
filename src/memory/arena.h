// Arena: one mapping of host memory for optimizer state.
//
//   | master of p0 | p1 | ... | pad | moment0 of p0 | p1 | ... | pad | moment1 of p0 | p1 | ... |
//
// (state/placement.cpp computes the offsets; the arena knows only bytes.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/prim.h"
#include "base/status.h"

namespace hybridopt {

// Where an arena's pages should lie. A wish: a system that refuses it, or a full node, costs speed
// and nothing else.
struct PageWish {
  std::vector<uint32_t> nodes;  // empty: none
  // With several nodes: whoever touches a page first is who will use it, and it should lie with
  // him. Otherwise nobody owns a page, and they are dealt out to the nodes in turn.
  bool owners_touch_first = false;
  bool huge_pages = true;
};

class Arena {
 public:
  Arena() = default;
  static Result<Arena> Map(uint64_t bytes, const PageWish& wish = {});  // 0 bytes: an empty arena
  // Addresses alone, which fault until Back gives them memory.
  static Result<Arena> Reserve(uint64_t bytes, const PageWish& wish = {});
  ~Arena();
  Arena(Arena&& other) noexcept { *this = std::move(other); }
  Arena& operator=(Arena&& other) noexcept;

  // Memory for the pages that bytes [begin, end) touch; what they hold stays, what is new is zero.
  Status Back(uint64_t begin, uint64_t end);
  // Gives back the memory of the pages that lie wholly inside [begin, end).
  void Discard(uint64_t begin, uint64_t end);

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace hybridopt
