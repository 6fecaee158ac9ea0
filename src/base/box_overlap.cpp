#include "base/box_overlap.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

namespace hybridopt {
namespace {

// Lists this short are compared pair by pair.
constexpr size_t kFew = 16;

bool Empty(const Box& box, uint32_t dimensions) {
  const auto end = box.size.begin() + dimensions;
  return std::find(box.size.begin(), end, 0) != end;
}

int64_t EndOf(const Box& box, uint32_t d) { return box.offset[d] + box.size[d]; }

// Two boxes overlap if in every dimension one of the two begins inside the other. So the search in
// one dimension compares intervals [begin, end) of boxes with points: a point is where another box
// begins. The search recurses on halves of the points. An interval that contains all points of a
// half overlaps the boxes of these points in this dimension; this interval goes on to the search in
// the next dimension. An interval that contains only some points of a half has an end between them;
// at each depth this happens in at most two halves.
class Searcher {
 public:
  Searcher(std::span<const Box> boxes, uint32_t dimensions) : boxes_(boxes) {
    for (uint32_t i = 0; i < boxes.size(); ++i)
      if (!Empty(boxes[i], dimensions)) members_.push_back(i);
    for (uint32_t d = 0; d < dimensions; ++d)
      if (Separates(d)) dimensions_[dimension_count_++] = d;
  }

  OverlapSearch Run() {
    std::vector<uint32_t> points = members_;
    if (dimension_count_ > 0)
      (void)Meet(members_, points, dimension_count_ - 1);
    else if (members_.size() > 1)
      (void)Found(members_[0], members_[1]);
    return search_;
  }

 private:
  using Indices = std::span<uint32_t>;

  int64_t Begin(uint32_t box, uint32_t d) const { return boxes_[box].offset[d]; }
  int64_t End(uint32_t box, uint32_t d) const { return EndOf(boxes_[box], d); }

  // Whether the dimension separates some of the boxes: false if all boxes have a coordinate in
  // common.
  bool Separates(uint32_t d) const {
    int64_t last_begin = INT64_MIN, first_end = INT64_MAX;
    for (const uint32_t box : members_) {
      last_begin = std::max(last_begin, Begin(box, d));
      first_end = std::min(first_end, End(box, d));
    }
    return last_begin >= first_end;
  }

  bool Found(uint32_t a, uint32_t b) {
    search_.found = std::minmax(a, b);
    return true;
  }

  // Whether a box of `intervals` overlaps a box of `points` in dimensions 0 to `index`, where in
  // dimension `index` the box of `points` begins inside the box of `intervals`. In the dimensions
  // after `index` all these boxes overlap already. Reorders both lists.
  bool Meet(Indices intervals, Indices points, uint32_t index) {
    if (std::min(intervals.size(), points.size()) <= kFew)
      return MeetInPairs(intervals, points, index);
    search_.looked_at += intervals.size() + points.size();
    const uint32_t d = dimensions_[index];
    const auto by_begin = [&](uint32_t a, uint32_t b) { return Begin(a, d) < Begin(b, d); };
    const auto [first, last] = std::minmax_element(points.begin(), points.end(), by_begin);
    const int64_t least = Begin(*first, d), most = Begin(*last, d);
    intervals = MoveToFront(
        intervals, [&](uint32_t box) { return Begin(box, d) <= most && End(box, d) > least; });
    const Indices over_all = MoveToFront(
        intervals, [&](uint32_t box) { return Begin(box, d) <= least && End(box, d) > most; });
    if (index == 0) {
      if (!over_all.empty())
        return Found(over_all[0], points[0] != over_all[0] ? points[0] : points[1]);
    } else if (Meet(over_all, points, index - 1) || Meet(points, over_all, index - 1)) {
      return true;
    }
    const Indices others = intervals.subspan(over_all.size());
    if (others.empty()) return false;
    const int64_t middle = Middle(points, d, least);
    const Indices left = MoveToFront(points, [&](uint32_t box) { return Begin(box, d) < middle; });
    return Meet(others, left, index) || Meet(others, points.subspan(left.size()), index);
  }

  bool MeetInPairs(Indices intervals, Indices points, uint32_t index) {
    search_.looked_at += intervals.size() * points.size();
    for (const uint32_t a : intervals)
      for (const uint32_t b : points)
        if (a != b && Overlap(a, b, index)) return Found(a, b);
    return false;
  }

  bool Overlap(uint32_t a, uint32_t b, uint32_t index) const {
    for (uint32_t i = 0; i <= index; ++i) {
      const uint32_t d = dimensions_[i];
      if (Begin(a, d) >= End(b, d) || Begin(b, d) >= End(a, d)) return false;
    }
    return true;
  }

  // Moves the boxes for which `is` is true to the front and returns them.
  template <typename Is>
  static Indices MoveToFront(Indices all, Is&& is) {
    const auto end = std::partition(all.begin(), all.end(), is);
    return all.first(static_cast<size_t>(end - all.begin()));
  }

  // Returns where one of the boxes begins, above `least`, so that this point splits the points into
  // halves as evenly as possible.
  int64_t Middle(Indices points, uint32_t d, int64_t least) const {
    const auto median = points.begin() + static_cast<ptrdiff_t>(points.size() / 2);
    std::nth_element(points.begin(), median, points.end(),
                     [&](uint32_t a, uint32_t b) { return Begin(a, d) < Begin(b, d); });
    if (Begin(*median, d) > least) return Begin(*median, d);
    int64_t next = INT64_MAX;
    for (const uint32_t box : points)
      if (Begin(box, d) > least) next = std::min(next, Begin(box, d));
    return next;
  }

  const std::span<const Box> boxes_;
  std::vector<uint32_t> members_;  // the boxes with elements
  std::array<uint32_t, kMaxDimensions> dimensions_{};
  uint32_t dimension_count_ = 0;
  OverlapSearch search_;
};

}  // namespace

OverlapSearch FindOverlap(std::span<const Box> boxes, uint32_t dimensions) {
  return Searcher(boxes, dimensions).Run();
}

// ----------------------------------------------------------------------------------- the tree --

BoxTree::BoxTree(std::span<const Box> boxes, uint32_t dimensions)
    : boxes_(boxes), dimensions_(dimensions) {
  for (uint32_t i = 0; i < boxes.size(); ++i)
    if (!Empty(boxes[i], dimensions)) members_.push_back(i);
  if (!members_.empty()) Build(0, static_cast<uint32_t>(members_.size()));
}

void BoxTree::Build(uint32_t begin, uint32_t end) {
  Box hull = boxes_[members_[begin]];
  for (uint32_t i = begin; i < end; ++i) {
    const Box& box = boxes_[members_[i]];
    for (uint32_t d = 0; d < dimensions_; ++d) {
      const int64_t hull_end = std::max(EndOf(hull, d), EndOf(box, d));
      hull.offset[d] = std::min(hull.offset[d], box.offset[d]);
      hull.size[d] = hull_end - hull.offset[d];
    }
  }
  const size_t node = nodes_.size();
  nodes_.push_back({hull, begin, end, 0});
  if (end - begin <= kFew) return;
  SplitInHalves(begin, end, BestDimension(begin, end));
  const uint32_t middle = begin + (end - begin) / 2;
  Build(begin, middle);
  nodes_[node].right = static_cast<uint32_t>(nodes_.size());
  Build(middle, end);
}

// The dimension in which the hulls of both halves overlap by the smallest fraction of their common
// length.
uint32_t BoxTree::BestDimension(uint32_t begin, uint32_t end) {
  const uint32_t middle = begin + (end - begin) / 2;
  uint32_t best = 0;
  double least = HUGE_VAL;
  for (uint32_t d = 0; d < dimensions_; ++d) {
    SplitInHalves(begin, end, d);
    int64_t left_end = INT64_MIN, right_end = INT64_MIN, first = INT64_MAX;
    for (uint32_t i = begin; i < middle; ++i) {
      left_end = std::max(left_end, EndOf(boxes_[members_[i]], d));
      first = std::min(first, boxes_[members_[i]].offset[d]);
    }
    for (uint32_t i = middle; i < end; ++i)
      right_end = std::max(right_end, EndOf(boxes_[members_[i]], d));
    const int64_t right_begin = boxes_[members_[middle]].offset[d];
    const auto span = static_cast<double>(std::max(left_end, right_end) - first);
    const double shared = static_cast<double>(std::max<int64_t>(left_end - right_begin, 0)) / span;
    if (shared >= least) continue;
    least = shared;
    best = d;
  }
  return best;
}

// Splits the boxes into two halves, ordered by where they begin in dimension d. The first box of
// the second half is the one that begins first in that half.
void BoxTree::SplitInHalves(uint32_t begin, uint32_t end, uint32_t d) {
  const auto first = members_.begin() + begin;
  std::nth_element(
      first, first + (end - begin) / 2, members_.begin() + end,
      [&](uint32_t a, uint32_t b) { return boxes_[a].offset[d] < boxes_[b].offset[d]; });
}

bool BoxTree::Overlaps(const Box& a, const Box& b) {
  looked_at_ += 1;
  for (uint32_t d = 0; d < dimensions_; ++d)
    if (a.offset[d] >= EndOf(b, d) || b.offset[d] >= EndOf(a, d)) return false;
  return true;
}

void BoxTree::ForEachOverlapping(const Box& box, FunctionRef<void(uint32_t)> visit) {
  if (!nodes_.empty() && !Empty(box, dimensions_)) Visit(0, box, visit);
}

void BoxTree::Visit(uint32_t node, const Box& box, FunctionRef<void(uint32_t)> visit) {
  const Node& here = nodes_[node];
  if (!Overlaps(here.hull, box)) return;
  if (here.right != 0) {
    Visit(node + 1, box, visit);
    Visit(here.right, box, visit);
    return;
  }
  for (uint32_t i = here.begin; i < here.end; ++i)
    if (Overlaps(boxes_[members_[i]], box)) visit(members_[i]);
}

}  // namespace hybridopt
