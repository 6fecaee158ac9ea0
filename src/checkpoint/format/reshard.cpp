#include "checkpoint/format/reshard.h"

#include <algorithm>
#include <array>
#include <string>

#include "base/box_overlap.h"
#include "base/check.h"

namespace hybridopt::checkpoint {
namespace {

using Sizes = std::array<int64_t, kMaxDimensions>;

uint64_t Product(const Sizes& sizes, uint32_t begin, uint32_t end) {
  uint64_t product = 1;
  for (uint32_t d = begin; d < end; ++d) product *= static_cast<uint64_t>(sizes[d]);
  return product;
}

// The elements that two boxes share. If they share none, the size of some dimension is 0.
Box Common(const Box& a, const Box& b, uint32_t dimensions) {
  Box common{};
  for (uint32_t d = 0; d < dimensions; ++d) {
    common.offset[d] = std::max(a.offset[d], b.offset[d]);
    const int64_t end = std::min(a.offset[d] + a.size[d], b.offset[d] + b.size[d]);
    common.size[d] = std::max<int64_t>(end - common.offset[d], 0);
  }
  return common;
}

uint64_t CommonElements(const Box& a, const Box& b, uint32_t dimensions) {
  return Product(Common(a, b, dimensions).size, 0, dimensions);
}

// A box, and the index of its first element among the elements of all boxes of the shard.
struct IndexedBox {
  const Box* box;
  uint64_t first;
};

std::vector<IndexedBox> IndexBoxes(const Shard& shard) {
  std::vector<IndexedBox> boxes;
  uint64_t first = 0;
  for (const Box& box : shard.boxes) {
    boxes.push_back({&box, first});
    first += Product(box.size, 0, shard.dimensions);
  }
  return boxes;
}

// The elements that two boxes share, as rows: ranges that are contiguous in both boxes. Rows are
// numbered in row-major order, so that their begins ascend in both boxes.
class CommonRows {
 public:
  CommonRows(uint32_t dimensions, const Box& a, const Box& b)
      : dimensions_(dimensions), common_(Common(a, b, dimensions)) {
    // A row spans the last dimension. Where the row spans a whole dimension of both boxes, it also
    // spans the dimension before it.
    row_begin_ = dimensions - 1;
    while (row_begin_ > 0 && common_.size[row_begin_] == a.size[row_begin_] &&
           common_.size[row_begin_] == b.size[row_begin_])
      --row_begin_;
    elements_ = Product(common_.size, row_begin_, dimensions);
    count_ = elements_ == 0 ? 0 : Product(common_.size, 0, row_begin_);
  }

  uint64_t count() const { return count_; }
  uint64_t elements() const { return elements_; }  // of a row

  // The index of a row's first element in one of the two boxes.
  uint64_t Begin(uint64_t row, const Box& box) const {
    uint64_t index = 0, stride = 1;
    for (uint32_t d = dimensions_; d-- > 0;) {
      uint64_t at = 0;
      if (d < row_begin_) {
        at = row % static_cast<uint64_t>(common_.size[d]);
        row /= static_cast<uint64_t>(common_.size[d]);
      }
      index += (at + static_cast<uint64_t>(common_.offset[d] - box.offset[d])) * stride;
      stride *= static_cast<uint64_t>(box.size[d]);
    }
    return index;
  }

 private:
  const uint32_t dimensions_;
  const Box common_;
  uint32_t row_begin_;
  uint64_t elements_;
  uint64_t count_;
};

// Visits the segments that one stored box and one wanted box share, cut to the ranges of both
// shards.
Status VisitBoxes(uint32_t index, const Shard& stored, const IndexedBox& from, const Shard& wanted,
                  const IndexedBox& to, FunctionRef<Status(const Segment&)> visit) {
  const CommonRows rows(stored.dimensions, *from.box, *to.box);
  // Finds the first row that overlaps both ranges. Every row before it ends before one of the
  // ranges begins.
  uint64_t first = 0;
  for (uint64_t left = rows.count(); left > 0;) {
    const uint64_t middle = first + left / 2;
    const bool before =
        from.first + rows.Begin(middle, *from.box) + rows.elements() <= stored.range_begin ||
        to.first + rows.Begin(middle, *to.box) + rows.elements() <= wanted.range_begin;
    if (before) {
      left -= middle - first + 1;
      first = middle + 1;
    } else {
      left = middle - first;
    }
  }
  for (uint64_t row = first; row < rows.count(); ++row) {
    const uint64_t source = from.first + rows.Begin(row, *from.box);
    const uint64_t destination = to.first + rows.Begin(row, *to.box);
    const uint64_t skip = std::max(stored.range_begin - std::min(stored.range_begin, source),
                                   wanted.range_begin - std::min(wanted.range_begin, destination));
    const uint64_t source_end = stored.range_begin + stored.range_count;
    const uint64_t destination_end = wanted.range_begin + wanted.range_count;
    const uint64_t end = std::min({rows.elements(), source_end - std::min(source_end, source),
                                   destination_end - std::min(destination_end, destination)});
    if (skip >= end) break;  // this row and all later rows begin after the end of a range
    HYBRIDOPT_TRY(visit({index, source + skip - stored.range_begin,
                         destination + skip - wanted.range_begin, end - skip}));
  }
  return {};
}

// "(3, 0, 17)": the coordinates of the first common element.
std::string FirstCommon(const Box& a, const Box& b, uint32_t dimensions) {
  const Box common = Common(a, b, dimensions);
  std::string text;
  for (uint32_t d = 0; d < dimensions; ++d)
    text += (d == 0 ? "" : ", ") + std::to_string(common.offset[d]);
  return "(" + text + ")";
}

// The same text for a row-major index in the global tensor.
std::string Coordinates(const Shard& shard, uint64_t index) {
  std::string text;
  for (uint32_t d = shard.dimensions; d-- > 0;) {
    const auto size = static_cast<uint64_t>(shard.global_shape[d]);
    text = std::to_string(index % size) + (text.empty() ? "" : ", ") + text;
    index /= size;
  }
  return "(" + text + ")";
}

// Stored boxes, and a tree that finds those that overlap a wanted box.
struct StoredBoxes {
  StoredBoxes(const std::vector<Box>& all, uint32_t dimensions)
      : boxes(all), tree(all, dimensions) {}
  const std::vector<Box>& boxes;
  BoxTree tree;
};

// Counts the wanted elements that the stored boxes hold.
uint64_t CountHeld(StoredBoxes& stored, const Shard& wanted) {
  std::vector<Box> boxes;
  AppendBoxes(wanted, boxes);
  uint64_t held = 0;
  for (const Box& to : boxes)
    stored.tree.ForEachOverlapping(to, [&](uint32_t from) {
      held += CommonElements(stored.boxes[from], to, wanted.dimensions);
    });
  return held;
}

// Finds, by bisection, the first wanted element that no stored box holds. At least one element is
// missing and none is held twice, so the first n elements are all held if the stored boxes hold n
// of them.
uint64_t FirstMissing(StoredBoxes& stored, const Shard& wanted) {
  Shard part = wanted;
  // The first `held` elements are all held; of the first `missing` elements at least one is not.
  uint64_t held = 0, missing = wanted.range_count;
  while (missing - held > 1) {
    part.range_count = held + (missing - held) / 2;
    (CountHeld(stored, part) == part.range_count ? held : missing) = part.range_count;
  }
  return held;
}

// Lists the boxes of all shards, cut to their ranges, and fails if two of them share an element.
Status CheckDisjointBoxes(std::span<const Shard* const> stored, std::vector<Box>& boxes) {
  std::vector<size_t> ends;  // of each shard's boxes
  for (const Shard* shard : stored) {
    AppendBoxes(*shard, boxes);
    ends.push_back(boxes.size());
  }
  if (boxes.empty()) return {};
  const auto overlap = FindOverlap(boxes, stored[0]->dimensions).found;
  if (!overlap.has_value()) return {};
  const auto shard_of = [&](uint32_t box) {
    return static_cast<unsigned>(std::upper_bound(ends.begin(), ends.end(), box) - ends.begin());
  };
  return Status::Error(
      OFFLOAD_CHECKPOINT_CORRUPT, "stored shards %u and %u both hold element %s of the tensor",
      shard_of(overlap->first), shard_of(overlap->second),
      FirstCommon(boxes[overlap->first], boxes[overlap->second], stored[0]->dimensions).c_str());
}

}  // namespace

Status ForEachSegment(std::span<const Shard* const> stored, const Shard& wanted,
                      FunctionRef<Status(const Segment&)> visit) {
  const std::vector<IndexedBox> wanted_boxes = IndexBoxes(wanted);
  BoxTree wanted_tree(wanted.boxes, wanted.dimensions);
  std::vector<uint32_t> met;
  for (uint32_t index = 0; index < stored.size(); ++index) {
    const Shard& shard = *stored[index];
    HYBRIDOPT_CHECK(shard.dimensions == wanted.dimensions);
    for (const IndexedBox& from : IndexBoxes(shard)) {
      met.clear();
      wanted_tree.ForEachOverlapping(*from.box, [&](uint32_t to) { met.push_back(to); });
      std::sort(met.begin(), met.end());
      for (const uint32_t to : met)
        HYBRIDOPT_TRY(VisitBoxes(index, shard, from, wanted, wanted_boxes[to], visit));
    }
  }
  return {};
}

Status CheckDisjoint(std::span<const Shard* const> stored) {
  std::vector<Box> boxes;
  return CheckDisjointBoxes(stored, boxes);
}

Status CheckCoverage(std::span<const Shard* const> stored, const Shard& wanted) {
  std::vector<Box> boxes;
  HYBRIDOPT_TRY(CheckDisjointBoxes(stored, boxes));
  // No element is held twice, so all of them are held if their number is right.
  StoredBoxes stored_boxes(boxes, wanted.dimensions);
  if (CountHeld(stored_boxes, wanted) == wanted.range_count) return {};
  const uint64_t missing = FirstMissing(stored_boxes, wanted);
  return Status::Error(OFFLOAD_CHECKPOINT_MISMATCH,
                       "element %s of the tensor is in none of the %llu stored shards",
                       Coordinates(wanted, wanted.GlobalIndex(missing)).c_str(),
                       static_cast<unsigned long long>(stored.size()));
}

}  // namespace hybridopt::checkpoint
