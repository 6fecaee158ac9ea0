// Arena: one mapping of host memory for optimizer state.
//
//   | master of p0 | p1 | ... | pad | moment0 of p0 | p1 | ... | pad | moment1 of p0 | p1 | ... |
//
// (state/placement.cpp computes the offsets; the arena knows only bytes.)
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/numa.h"
#include "base/prim.h"
#include "base/status.h"

namespace hybridopt {

inline constexpr uint32_t kNodeNotKnown = UINT32_MAX;

// Bytes on each NUMA node, as in offload_plan.
struct NodeBytes {
  std::array<uint64_t, 64> on_node{};

  // Nodes above those of the array are not counted.
  void Add(uint64_t node, uint64_t bytes) {
    if (node < on_node.size()) on_node[node] += bytes;
  }
};

// Where an arena's pages should lie. It is a wish: a node that is full costs speed and nothing
// else.
struct PageWish {
  struct Share {
    uint32_t node;   // kNodeNotKnown: some node
    uint32_t parts;  // of the sum over all shares
  };

  const Numa* numa = nullptr;        // null: this system has no libnuma
  std::optional<PagePolicy> policy;  // none: the kernel is told nothing
  std::vector<uint32_t> nodes;       // of the policy
  std::vector<Share> shares;         // where the pages will lie; empty: not known
  bool huge_pages = true;

  // Adds where `bytes` with this wish will lie.
  void AddPlanned(uint64_t bytes, NodeBytes* sum) const;
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

  // Adds where bytes [begin, end) lie, as the kernel says. Pages that no thread has touched lie
  // nowhere. Of a large range it asks for a sample of pages, each of which stands for those around
  // it.
  void AddNodeBytes(uint64_t begin, uint64_t end, NodeBytes* sum) const;
  static constexpr uint64_t kSampledPages = 4096;

 private:
  void Use(void* data, uint64_t bytes, const PageWish& wish);

  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
  const Numa* numa_ = nullptr;
};

}  // namespace hybridopt
