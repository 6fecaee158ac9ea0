// Box overlap: whether boxes share an element, and which boxes share one with a given box.
// Comparing all pairs would take too long for the shards of a large world, and for the boxes that a
// forged checkpoint may list.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/function_ref.h"
#include "base/shard.h"

namespace hybridopt {

struct OverlapSearch {
  std::optional<std::pair<uint32_t, uint32_t>> found;  // indices of two boxes, the lower one first
  uint64_t looked_at = 0;  // boxes and pairs of boxes that were compared: the cost of the search
};

// Finds two boxes that share an element, if there are any; boxes without elements share none. If
// none of n boxes overlap the cost is about n log n for each dimension that separates some of them.
OverlapSearch FindOverlap(std::span<const Box> boxes, uint32_t dimensions);

// A tree of hulls: the hull of a node is the box around some of the boxes, and its two children
// have the hulls of half of these each. A box that does not overlap a hull is not compared with the
// boxes in it.
class BoxTree {
 public:
  BoxTree(std::span<const Box> boxes, uint32_t dimensions);  // the boxes outlive it

  // Calls visit with the index of each box that shares an element with this one, in any order.
  void ForEachOverlapping(const Box& box, FunctionRef<void(uint32_t)> visit);
  // Hulls and boxes that were compared with a given box: the cost of all calls.
  uint64_t looked_at() const { return looked_at_; }

 private:
  struct Node {
    Box hull;
    uint32_t begin, end;  // of members_
    uint32_t right;       // the second child; the first is the next node. 0 = a leaf
  };
  void Build(uint32_t begin, uint32_t end);
  uint32_t BestDimension(uint32_t begin, uint32_t end);
  void SplitInHalves(uint32_t begin, uint32_t end, uint32_t d);
  bool Overlaps(const Box& a, const Box& b);
  void Visit(uint32_t node, const Box& box, FunctionRef<void(uint32_t)> visit);

  const std::span<const Box> boxes_;
  const uint32_t dimensions_;
  std::vector<uint32_t> members_;  // indices of the boxes that have elements, sorted into the nodes
  std::vector<Node> nodes_;
  uint64_t looked_at_ = 0;
};

}  // namespace hybridopt
