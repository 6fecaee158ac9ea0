// Arena: one mapping of host memory for optimizer state.
//
//   | master of p0 | p1 | ... | pad | moment0 of p0 | p1 | ... | pad | moment1 of p0 | p1 | ... |
//
// (StateShape has the offsets; the arena knows only bytes.)
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/system.h"
#include "memory/numa.h"

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

// The nodes on which an arena's pages should be. It is a wish: if a node is full its pages go to
// another one, which only costs speed.
struct PageWish {
  struct Share {
    uint32_t node;   // kNodeNotKnown: any node
    uint32_t parts;  // of the sum of `parts` over all shares
  };

  const Numa* numa = nullptr;        // null: this system has no libnuma
  std::optional<PagePolicy> policy;  // none: no policy is set
  std::vector<uint32_t> nodes;       // of the policy
  std::vector<Share> shares;         // on which nodes the pages will be; empty: not known
  bool huge_pages = true;

  // Adds the bytes on each node, for memory of `bytes` with this wish.
  void AddPlanned(uint64_t bytes, NodeBytes* sum) const;
};

class Arena {
 public:
  Arena() = default;
  static Result<Arena> Map(uint64_t bytes, const PageWish& wish = {});  // 0 bytes: an empty arena
  // Reserves addresses only. They fault until Back gives them memory.
  static Result<Arena> Reserve(uint64_t bytes, const PageWish& wish = {});
  ~Arena();
  Arena(Arena&& other) noexcept { *this = std::move(other); }
  Arena& operator=(Arena&& other) noexcept;

  // Gives memory to the pages of bytes [begin, end). Pages that have memory keep their content; new
  // pages are zero.
  Status Back(uint64_t begin, uint64_t end);
  // Frees the memory of the pages that are wholly inside [begin, end).
  void Discard(uint64_t begin, uint64_t end);

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

  // Adds the bytes of [begin, end) on each node, as the kernel reports them. Pages that no thread
  // has touched are on no node. In a large range only a sample of pages is asked for; each
  // represents the pages around it.
  void AddNodeBytes(uint64_t begin, uint64_t end, NodeBytes* sum) const;
  static constexpr uint64_t kSampledPages = 4096;

 private:
  void Use(void* data, uint64_t bytes, const PageWish& wish);

  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
  const Numa* numa_ = nullptr;
};

}  // namespace hybridopt
