// Random ways to divide a tensor among ranks, and the elements that each rank gets, computed in a
// slow and simple way. Tests compare the library's interpretation of a shard with it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "offload.h"

namespace hybridopt {

// One rank's part of a tensor. The arrays live here; Abi() points into them.
struct Piece {
  std::vector<int64_t> shape;
  std::vector<int64_t> offsets;  // [box_count][dimensions]
  std::vector<int64_t> extents;
  uint32_t box_count = 0;
  bool ranged = false;
  uint64_t range_begin = 0;
  uint64_t count = 0;
  bool replica = false;  // another rank has the same elements and counts them

  offload_shard_t Abi() const {
    offload_shard_t shard{};
    shard.struct_size = sizeof(shard);
    shard.dimensions = static_cast<uint32_t>(shape.size());
    shard.box_count = box_count;
    shard.flags = ranged ? OFFLOAD_SHARD_RANGE : 0;
    shard.global_shape = shape.data();
    shard.box_offsets = offsets.data();
    shard.box_extents = extents.data();
    shard.range_begin = range_begin;
    shard.range_count = ranged ? count : 0;
    return shard;
  }
};

inline uint64_t ElementsOf(const std::vector<int64_t>& shape) {
  uint64_t count = 1;
  for (int64_t extent : shape) count *= static_cast<uint64_t>(extent);
  return count;
}

// Whether the box holds the element of this row-major index, worked out from the last dimension.
inline bool Holds(const Piece& piece, uint32_t box, uint64_t index) {
  for (size_t d = piece.shape.size(); d-- > 0;) {
    const auto extent = static_cast<uint64_t>(piece.shape[d]);
    const auto coordinate = static_cast<int64_t>(index % extent);
    index /= extent;
    const int64_t begin = piece.offsets[box * piece.shape.size() + d];
    if (coordinate < begin || coordinate >= begin + piece.extents[box * piece.shape.size() + d])
      return false;
  }
  return true;
}

// The row-major global indices of a piece's elements, in its order: for every box every element of
// the tensor is tested.
inline std::vector<uint64_t> GlobalIndices(const Piece& piece) {
  std::vector<uint64_t> indices;
  const uint64_t elements = ElementsOf(piece.shape);
  for (uint32_t box = 0; box < piece.box_count; ++box)
    for (uint64_t index = 0; index < elements; ++index)
      if (Holds(piece, box, index)) indices.push_back(index);
  if (!piece.ranged) return indices;
  const auto begin = indices.begin() + static_cast<ptrdiff_t>(piece.range_begin);
  return {begin, begin + static_cast<ptrdiff_t>(piece.count)};
}

// ------------------------------------------------------------------------------ random layouts --

using Interval = std::pair<int64_t, int64_t>;  // begin, end
using Deal = std::vector<std::vector<Interval>>;

// Cuts [begin, end) into `parts` in order: even as torch.chunk has it (the last ones short or
// empty), or anywhere.
template <typename Random>
std::vector<Interval> Cut(int64_t begin, int64_t end, uint64_t parts, Random& random) {
  std::vector<int64_t> cuts = {begin, end};
  const auto length = static_cast<uint64_t>(end - begin);
  const uint64_t even = (length + parts - 1) / parts;
  const bool anywhere = random.OneIn(2);
  for (uint64_t i = 1; i < parts; ++i) {
    const uint64_t cut = anywhere ? random.Below(length + 1) : std::min(length, i * even);
    cuts.push_back(begin + static_cast<int64_t>(cut));
  }
  std::sort(cuts.begin(), cuts.end());
  std::vector<Interval> intervals;
  for (uint64_t i = 0; i < parts; ++i) intervals.push_back({cuts[i], cuts[i + 1]});
  return intervals;
}

// Divides one dimension among the members of one mesh axis.
template <typename Random>
Deal DealDimension(int64_t extent, uint64_t members, Random& random) {
  Deal deal(members);
  switch (random.Below(4)) {
    case 0: {  // pipeline stages, experts: one member has it all
      deal[random.Below(members)].push_back({0, extent});
      break;
    }
    case 1: {  // interleaved: each of some sections (query, key, value) is split
      for (const Interval& section : Cut(0, extent, 1 + random.Below(3), random)) {
        const std::vector<Interval> parts = Cut(section.first, section.second, members, random);
        for (uint64_t i = 0; i < members; ++i) deal[i].push_back(parts[i]);
      }
      break;
    }
    case 2: {  // strided: small blocks in turn, as virtual pipeline stages have it
      const int64_t block = extent / 32 + static_cast<int64_t>(1 + random.Below(3));
      uint64_t turn = 0;
      for (int64_t begin = 0; begin < extent; begin += block)
        deal[turn++ % members].push_back({begin, std::min(extent, begin + block)});
      break;
    }
    default: {  // contiguous: tensor parallel
      const std::vector<Interval> parts = Cut(0, extent, members, random);
      for (uint64_t i = 0; i < members; ++i) deal[i].push_back(parts[i]);
    }
  }
  return deal;
}

inline std::vector<Interval> Intersect(const std::vector<Interval>& a,
                                       const std::vector<Interval>& b) {
  std::vector<Interval> common;
  for (const Interval& x : a)
    for (const Interval& y : b)
      if (std::max(x.first, y.first) < std::min(x.second, y.second))
        common.push_back({std::max(x.first, y.first), std::min(x.second, y.second)});
  return common;
}

// Every combination of one interval per dimension is a box; if there is no combination, there is
// one empty box. Sometimes there is an empty box among the others.
template <typename Random>
Piece MakeBoxes(const std::vector<int64_t>& shape,
                const std::vector<std::vector<Interval>>& intervals, Random& random) {
  std::vector<std::vector<Interval>> boxes = {{}};
  for (const std::vector<Interval>& choices : intervals) {
    std::vector<std::vector<Interval>> longer;
    for (const auto& box : boxes) {
      for (const Interval& choice : choices) {
        longer.push_back(box);
        longer.back().push_back(choice);
      }
    }
    boxes = std::move(longer);
  }
  if (boxes.empty() || random.OneIn(8)) {
    boxes.push_back({});
    for (int64_t extent : shape) boxes.back().push_back({extent / 2, extent});
    boxes.back()[random.Below(shape.size())] = {0, 0};
  }
  if (random.OneIn(3)) random.Shuffle(boxes);
  Piece piece;
  piece.shape = shape;
  piece.box_count = static_cast<uint32_t>(boxes.size());
  for (const auto& box : boxes) {
    uint64_t elements = 1;
    for (const auto& [begin, end] : box) {
      piece.offsets.push_back(begin);
      piece.extents.push_back(end - begin);
      elements *= static_cast<uint64_t>(end - begin);
    }
    piece.count += elements;
  }
  return piece;
}

template <typename Random>
uint64_t RandomDivisor(uint64_t number, Random& random) {
  uint64_t divisor = 1 + random.Below(number);
  while (number % divisor != 0) ++divisor;
  return divisor;
}

// The pieces of all ranks of a random mesh: up to three axes that split dimensions, perhaps the
// same one, and a data-parallel axis that splits the boxes' elements (ZeRO) or holds replicas.
template <typename Random>
std::vector<Piece> RandomLayout(const std::vector<int64_t>& shape, uint64_t world, Random& random) {
  const uint64_t data_parallel = RandomDivisor(world, random);
  std::array<uint64_t, 3> axes = {RandomDivisor(world / data_parallel, random), 1, 1};
  axes[1] = RandomDivisor(world / data_parallel / axes[0], random);
  axes[2] = world / data_parallel / axes[0] / axes[1];
  std::array<size_t, 3> dimensions{};
  std::array<Deal, 3> deals;
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    dimensions[axis] = random.Below(shape.size());
    deals[axis] = DealDimension(shape[dimensions[axis]], axes[axis], random);
  }
  const bool replicas = random.OneIn(3);
  std::vector<Piece> pieces;
  for (uint64_t shard = 0; shard < world / data_parallel; ++shard) {
    std::vector<std::vector<Interval>> intervals;
    for (int64_t extent : shape) intervals.push_back({{0, extent}});
    uint64_t rest = shard;
    for (size_t axis = 0; axis < axes.size(); ++axis) {
      auto& own = intervals[dimensions[axis]];
      own = Intersect(own, deals[axis][rest % axes[axis]]);
      rest /= axes[axis];
    }
    const Piece whole = MakeBoxes(shape, intervals, random);
    const auto ranges = Cut(0, static_cast<int64_t>(whole.count), data_parallel, random);
    const uint64_t owner = random.Below(data_parallel);
    for (uint64_t i = 0; i < data_parallel; ++i) {
      Piece piece = whole;
      piece.replica = replicas && i != owner;
      if (!replicas && (data_parallel > 1 || random.OneIn(2))) {
        piece.ranged = true;
        piece.range_begin = static_cast<uint64_t>(ranges[i].first);
        piece.count = static_cast<uint64_t>(ranges[i].second - ranges[i].first);
      }
      pieces.push_back(std::move(piece));
    }
  }
  return pieces;
}

// One to eight dimensions, at most `elements_max` elements, now and then none.
template <typename Random>
std::vector<int64_t> RandomShape(uint64_t elements_max, Random& random) {
  std::vector<int64_t> shape(1 + random.Below(8));
  uint64_t left = elements_max;
  for (int64_t& extent : shape) {
    extent = static_cast<int64_t>(1 + random.Below(std::min<uint64_t>(left, 1 + random.Below(12))));
    if (random.OneIn(200)) extent = 0;
    if (extent > 0) left /= static_cast<uint64_t>(extent);
  }
  random.Shuffle(shape);
  return shape;
}

}  // namespace hybridopt
