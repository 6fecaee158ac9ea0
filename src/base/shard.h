// Shard: the validated copy of an offload_shard_t.
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

  // Whether other elements of the tensor exist.
  bool partial() const;
  // The row-major index in the whole tensor of this shard's element, which counts from 0 through
  // the range. Looks through the boxes one by one.
  uint64_t GlobalIndex(uint64_t element) const;
};

// Elements [begin, begin + count) of a shard. In the whole tensor they lie in rows: element begin +
// k has the index first + (c / row_length) * row_stride + c % row_length with c = column + k.
struct Stripe {
  uint64_t begin;
  uint64_t count;
  uint64_t first;
  uint64_t row_length;
  uint64_t row_stride;
  uint64_t column;
};

// Appends the stripes of a shard, in order: mostly one for each box.
void AddStripes(const Shard& shard, std::vector<Stripe>& stripes);

// Appends the elements of a shard as boxes without a range, which cuts the first and the last box
// into at most 2 * dimensions - 1 each.
void AppendBoxes(const Shard& shard, std::vector<Box>& boxes);

// Copies and checks a shard of `count` elements. Errors name the field, but not the param.
Result<Shard> ValidateShard(const offload_shard_t& shard, uint64_t count);

// What a param without a shard owns: all of a one-dimensional tensor.
Shard WholeTensor(uint64_t count);

}  // namespace hybridopt
