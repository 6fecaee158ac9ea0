#include "checkpoint/reshard.h"

#include <algorithm>
#include <array>
#include <string>

#include "base/check.h"

namespace hybridopt::checkpoint {
namespace {

using Extents = std::array<int64_t, kMaxDimensions>;

uint64_t Product(const Extents& extents, uint32_t begin, uint32_t end) {
  uint64_t product = 1;
  for (uint32_t d = begin; d < end; ++d) product *= static_cast<uint64_t>(extents[d]);
  return product;
}

// A box and where its elements begin, counted through the shard's boxes.
struct PlacedBox {
  const Box* box;
  uint64_t first;
};

std::vector<PlacedBox> PlaceBoxes(const Shard& shard) {
  std::vector<PlacedBox> placed;
  uint64_t first = 0;
  for (const Box& box : shard.boxes) {
    placed.push_back({&box, first});
    first += Product(box.extent, 0, shard.dimensions);
  }
  return placed;
}

// The elements that two boxes share, as rows: stretches that lie side by side in both boxes. Rows
// count in row-major order, so that their places in both boxes ascend.
class CommonRows {
 public:
  CommonRows(uint32_t dimensions, const Box& a, const Box& b) : dimensions_(dimensions) {
    for (uint32_t d = 0; d < dimensions; ++d) {
      begin_[d] = std::max(a.offset[d], b.offset[d]);
      const int64_t end = std::min(a.offset[d] + a.extent[d], b.offset[d] + b.extent[d]);
      extent_[d] = std::max<int64_t>(end - begin_[d], 0);
    }
    // A row spans the last dimension, and those before it while both boxes are spanned as a whole.
    row_begin_ = dimensions - 1;
    while (row_begin_ > 0 && extent_[row_begin_] == a.extent[row_begin_] &&
           extent_[row_begin_] == b.extent[row_begin_])
      --row_begin_;
    elements_ = Product(extent_, row_begin_, dimensions);
    count_ = elements_ == 0 ? 0 : Product(extent_, 0, row_begin_);
  }

  uint64_t count() const { return count_; }
  uint64_t elements() const { return elements_; }  // of a row

  // Where a row begins, counted in one of the two boxes.
  uint64_t Place(uint64_t row, const Box& box) const {
    uint64_t place = 0, stride = 1;
    for (uint32_t d = dimensions_; d-- > 0;) {
      uint64_t at = 0;
      if (d < row_begin_) {
        at = row % static_cast<uint64_t>(extent_[d]);
        row /= static_cast<uint64_t>(extent_[d]);
      }
      place += (at + static_cast<uint64_t>(begin_[d] - box.offset[d])) * stride;
      stride *= static_cast<uint64_t>(box.extent[d]);
    }
    return place;
  }

 private:
  const uint32_t dimensions_;
  uint32_t row_begin_;
  Extents begin_;
  Extents extent_;
  uint64_t elements_;
  uint64_t count_;
};

// The segments of one stored box in one wanted box, cut to the ranges of both shards.
Status VisitBoxes(uint32_t piece, const Shard& stored, const PlacedBox& from, const Shard& wanted,
                  const PlacedBox& to, FunctionRef<Status(const Segment&)> visit) {
  const CommonRows rows(stored.dimensions, *from.box, *to.box);
  // Rows before the first that reaches into both ranges end before one of them begins.
  uint64_t first = 0;
  for (uint64_t left = rows.count(); left > 0;) {
    const uint64_t middle = first + left / 2;
    const bool before =
        from.first + rows.Place(middle, *from.box) + rows.elements() <= stored.range_begin ||
        to.first + rows.Place(middle, *to.box) + rows.elements() <= wanted.range_begin;
    if (before) {
      left -= middle - first + 1;
      first = middle + 1;
    } else {
      left = middle - first;
    }
  }
  for (uint64_t row = first; row < rows.count(); ++row) {
    const uint64_t source = from.first + rows.Place(row, *from.box);
    const uint64_t destination = to.first + rows.Place(row, *to.box);
    const uint64_t skip = std::max(stored.range_begin - std::min(stored.range_begin, source),
                                   wanted.range_begin - std::min(wanted.range_begin, destination));
    const uint64_t source_end = stored.range_begin + stored.range_count;
    const uint64_t destination_end = wanted.range_begin + wanted.range_count;
    const uint64_t end = std::min({rows.elements(), source_end - std::min(source_end, source),
                                   destination_end - std::min(destination_end, destination)});
    if (skip >= end) break;  // past the end of a range, and so are all later rows
    HYBRIDOPT_TRY(visit({piece, source + skip - stored.range_begin,
                         destination + skip - wanted.range_begin, end - skip}));
  }
  return {};
}

// The box around all boxes: shards whose hulls are apart share nothing.
Box Hull(const Shard& shard) {
  Box hull = shard.boxes[0];
  for (const Box& box : shard.boxes) {
    for (uint32_t d = 0; d < shard.dimensions; ++d) {
      const int64_t end = std::max(hull.offset[d] + hull.extent[d], box.offset[d] + box.extent[d]);
      hull.offset[d] = std::min(hull.offset[d], box.offset[d]);
      hull.extent[d] = end - hull.offset[d];
    }
  }
  return hull;
}

bool Apart(const Box& a, const Box& b, uint32_t dimensions) {
  for (uint32_t d = 0; d < dimensions; ++d)
    if (a.offset[d] + a.extent[d] <= b.offset[d] || b.offset[d] + b.extent[d] <= a.offset[d])
      return true;
  return false;
}

bool BoxesMeet(const Shard& a, const Shard& b) {
  if (Apart(Hull(a), Hull(b), a.dimensions)) return false;
  for (const Box& x : a.boxes)
    for (const Box& y : b.boxes)
      if (CommonRows(a.dimensions, x, y).count() > 0) return true;
  return false;
}

bool SameBoxes(const Shard& a, const Shard& b) {
  return std::equal(
      a.boxes.begin(), a.boxes.end(), b.boxes.begin(), b.boxes.end(),
      [&](const Box& x, const Box& y) {
        return std::equal(x.offset.begin(), x.offset.begin() + a.dimensions, y.offset.begin()) &&
               std::equal(x.extent.begin(), x.extent.begin() + a.dimensions, y.extent.begin());
      });
}

// "(3, 0, 17)" for a row-major index in the global tensor.
std::string Coordinates(const Shard& shard, uint64_t index) {
  std::string text;
  for (uint32_t d = shard.dimensions; d-- > 0;) {
    const auto extent = static_cast<uint64_t>(shard.global_shape[d]);
    text = std::to_string(index % extent) + (text.empty() ? "" : ", ") + text;
    index /= extent;
  }
  return "(" + text + ")";
}

Status Doubled(std::span<const Shard* const> stored, uint32_t a, uint32_t b,
               uint64_t element_of_b) {
  return Status::Error(OFFLOAD_CHECKPOINT_CORRUPT,
                       "stored shards %u and %u both hold element %s of the tensor", std::min(a, b),
                       std::max(a, b),
                       Coordinates(*stored[b], stored[b]->GlobalIndex(element_of_b)).c_str());
}

// Fails if two shards share an element.
Status CheckPair(std::span<const Shard* const> stored, uint32_t a, uint32_t b) {
  return ForEachSegment({&stored[a], 1}, *stored[b], [&](const Segment& segment) {
    return Doubled(stored, a, b, segment.destination);
  });
}

// Shards of the same boxes share elements where their ranges overlap: those that begin one after
// the other are enough to look at. `members` is sorted by where ranges begin.
Status CheckRanges(std::span<const Shard* const> stored, const std::vector<uint32_t>& members) {
  for (size_t i = 1; i < members.size(); ++i) {
    const Shard& before = *stored[members[i - 1]];
    const Shard& after = *stored[members[i]];
    if (after.range_begin < before.range_begin + before.range_count)
      return Doubled(stored, members[i - 1], members[i], 0);
  }
  return {};
}

// How many elements from the first wanted one on a stored shard holds.
uint64_t HeldFromStart(const Shard& stored, const Shard& wanted,
                       const std::vector<PlacedBox>& wanted_boxes) {
  uint64_t held = 0;
  for (const PlacedBox& from : PlaceBoxes(stored)) {
    for (const PlacedBox& to : wanted_boxes) {
      // Elements ascend: the first segment of a pair of boxes tells.
      (void)VisitBoxes(0, stored, from, wanted, to, [&](const Segment& segment) {
        if (segment.destination == 0) held = segment.count;
        return Status::Error(OFFLOAD_INTERNAL, "seen enough");
      });
      if (held > 0) return held;
    }
  }
  return 0;
}

// The first wanted element that no stored shard holds; one is missing.
uint64_t FirstMissing(std::span<const Shard* const> stored, const Shard& wanted) {
  const std::vector<PlacedBox> wanted_boxes = PlaceBoxes(wanted);
  Shard rest = wanted;
  for (uint64_t held = 1; held > 0;) {
    held = 0;
    for (size_t i = 0; held == 0 && i < stored.size(); ++i)
      held = HeldFromStart(*stored[i], rest, wanted_boxes);
    rest.range_begin += held;
    rest.range_count -= held;
  }
  return rest.range_begin - wanted.range_begin;
}

}  // namespace

Status ForEachSegment(std::span<const Shard* const> stored, const Shard& wanted,
                      FunctionRef<Status(const Segment&)> visit) {
  const std::vector<PlacedBox> wanted_boxes = PlaceBoxes(wanted);
  const Box wanted_hull = Hull(wanted);
  for (uint32_t piece = 0; piece < stored.size(); ++piece) {
    const Shard& shard = *stored[piece];
    HYBRIDOPT_CHECK(shard.dimensions == wanted.dimensions);
    if (Apart(Hull(shard), wanted_hull, wanted.dimensions)) continue;
    for (const PlacedBox& from : PlaceBoxes(shard))
      for (const PlacedBox& to : wanted_boxes)
        HYBRIDOPT_TRY(VisitBoxes(piece, shard, from, wanted, to, visit));
  }
  return {};
}

Status CheckDisjoint(std::span<const Shard* const> stored) {
  std::vector<std::vector<uint32_t>> families;  // of the same boxes
  for (uint32_t i = 0; i < stored.size(); ++i) {
    if (stored[i]->range_count == 0) continue;
    const auto family = std::find_if(families.begin(), families.end(), [&](const auto& members) {
      return SameBoxes(*stored[members[0]], *stored[i]);
    });
    if (family == families.end())
      families.push_back({i});
    else
      family->push_back(i);
  }
  for (size_t a = 0; a < families.size(); ++a) {
    std::sort(families[a].begin(), families[a].end(), [&](uint32_t x, uint32_t y) {
      return stored[x]->range_begin < stored[y]->range_begin;
    });
    HYBRIDOPT_TRY(CheckRanges(stored, families[a]));
    for (size_t b = 0; b < a; ++b) {
      if (!BoxesMeet(*stored[families[a][0]], *stored[families[b][0]])) continue;
      for (const uint32_t x : families[a])
        for (const uint32_t y : families[b]) HYBRIDOPT_TRY(CheckPair(stored, y, x));
    }
  }
  return {};
}

Status CheckCoverage(std::span<const Shard* const> stored, const Shard& wanted) {
  HYBRIDOPT_TRY(CheckDisjoint(stored));
  // Nothing twice: all of them are there if their number is right.
  uint64_t found = 0;
  HYBRIDOPT_TRY(ForEachSegment(stored, wanted, [&](const Segment& segment) -> Status {
    found += segment.count;
    return {};
  }));
  if (found == wanted.range_count) return {};
  const uint64_t missing = FirstMissing(stored, wanted);
  return Status::Error(OFFLOAD_CHECKPOINT_MISMATCH,
                       "element %s of the tensor is in none of the %llu stored shards",
                       Coordinates(wanted, wanted.GlobalIndex(missing)).c_str(),
                       static_cast<unsigned long long>(stored.size()));
}

}  // namespace hybridopt::checkpoint
