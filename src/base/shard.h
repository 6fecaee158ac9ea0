// Shard: the validated copy of an offload_shard_t. Its elements are those of its boxes, one box
// after the other, or a range [range_begin, range_begin + range_count) of these.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/status.h"

namespace hybridopt {

inline constexpr uint32_t kMaxDimensions = 8;
inline constexpr uint32_t kMaxBoxes = 4096;

struct Box {
  std::array<int64_t, kMaxDimensions> offset;
  std::array<int64_t, kMaxDimensions> size;
};

struct Shard {
  uint32_t dimensions;
  std::array<int64_t, kMaxDimensions> global_shape;
  std::vector<Box> boxes;
  uint64_t range_begin;
  uint64_t range_count;

  // The number of elements of the tensor.
  uint64_t global_count() const;
  // Whether the tensor has elements that are not in this shard.
  bool partial() const;
  // The row-major index in the whole tensor of one of the shard's elements, which are counted from
  // 0. Takes time proportional to the number of boxes.
  uint64_t GlobalIndex(uint64_t element) const;
};

// Elements [begin, begin + count) of a shard that form rows at equal distances in the whole tensor:
// element begin + k has the index first + (c / row_length) * row_stride + c % row_length with c =
// column + k.
struct Stripe {
  uint64_t begin;
  uint64_t count;
  uint64_t first;
  uint64_t row_length;
  uint64_t row_stride;
  uint64_t column;
};

// Appends the stripes of a shard, in order. Most boxes are one stripe.
void AddStripes(const Shard& shard, std::vector<Stripe>& stripes);

// Appends the elements of a shard as boxes, without its range: where the range begins or ends
// inside a box, that box is cut into at most 2 * dimensions - 1 boxes.
void AppendBoxes(const Shard& shard, std::vector<Box>& boxes);

// Copies and checks a shard. Errors name the field, but not the param.
Result<Shard> ValidateShard(const offload_shard_t& shard);
// The same for a shard that must have `count` elements.
Result<Shard> ValidateShard(const offload_shard_t& shard, uint64_t count);

// The shard of a param that has none: all of a one-dimensional tensor.
Shard WholeTensor(uint64_t count);

}  // namespace hybridopt
