#include "base/shard.h"

#include <algorithm>

#include "base/box_overlap.h"
#include "base/check.h"

namespace hybridopt {
namespace {

using Sizes = std::array<int64_t, kMaxDimensions>;

// The product of the first `dimensions` entries; false if it passes INT64_MAX.
bool Multiply(const Sizes& sizes, uint32_t dimensions, int64_t* product) {
  // If one factor is zero the product is zero, even if the others would overflow.
  const auto end = sizes.begin() + dimensions;
  *product = std::find(sizes.begin(), end, 0) != end ? 0 : 1;
  for (auto it = sizes.begin(); *product != 0 && it != end; ++it)
    if (__builtin_mul_overflow(*product, *it, product)) return false;
  return true;
}

uint64_t ElementsOf(const Box& box, uint32_t dimensions) {
  int64_t elements = 0;
  (void)Multiply(box.size, dimensions, &elements);
  return static_cast<uint64_t>(elements);
}

Status CheckBox(const Shard& shard, uint32_t box_index) {
  const Box& box = shard.boxes[box_index];
  for (uint32_t d = 0; d < shard.dimensions; ++d) {
    const bool inside = box.offset[d] >= 0 && box.size[d] >= 0 &&
                        box.offset[d] <= shard.global_shape[d] &&
                        box.size[d] <= shard.global_shape[d] - box.offset[d];
    if (!inside)
      return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                           "shard.box_offsets/box_extents: box %u reaches from %lld over %lld "
                           "elements in dimension %u, outside global_shape %lld",
                           box_index, static_cast<long long>(box.offset[d]),
                           static_cast<long long>(box.size[d]), d,
                           static_cast<long long>(shard.global_shape[d]));
  }
  return {};
}

Status CheckDisjoint(const Shard& shard) {
  const auto overlap = FindOverlap(shard.boxes, shard.dimensions).found;
  if (!overlap.has_value()) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "shard.box_offsets: boxes %u and %u overlap; give each element once",
                       overlap->first, overlap->second);
}

Status CheckHeader(const offload_shard_t& shard) {
  if (shard.dimensions < 1 || shard.dimensions > kMaxDimensions)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "shard.dimensions is %u, expected 1 to %u",
                         shard.dimensions, kMaxDimensions);
  if (shard.box_count < 1 || shard.box_count > kMaxBoxes)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "shard.box_count is %u, expected 1 to %u (an empty shard is one box with "
                         "a zero extent, or an empty range)",
                         shard.box_count, kMaxBoxes);
  if ((shard.flags & ~uint32_t{OFFLOAD_SHARD_RANGE}) != 0)
    return Status::Error(OFFLOAD_UNSUPPORTED, "shard.flags is 0x%x, known is 0x%x", shard.flags,
                         OFFLOAD_SHARD_RANGE);
  if (shard.global_shape == nullptr || shard.box_offsets == nullptr || shard.box_extents == nullptr)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "shard.global_shape, box_offsets or box_extents is NULL, expected arrays "
                         "of [dimensions] and [box_count][dimensions]");
  return {};
}

// The row-major index in the whole tensor of a box's element.
uint64_t IndexInTensor(const Shard& shard, const Box& box, uint64_t element) {
  uint64_t index = 0;
  uint64_t stride = 1;
  for (uint32_t d = shard.dimensions; d-- > 0;) {
    const auto size = static_cast<uint64_t>(box.size[d]);
    index += (static_cast<uint64_t>(box.offset[d]) + element % size) * stride;
    element /= size;
    stride *= static_cast<uint64_t>(shard.global_shape[d]);
  }
  return index;
}

// The rows that a box with elements forms in its tensor: they have row_length elements, and
// rows_per_stripe of them are at equal distances.
struct BoxRows {
  uint64_t row_length = 1;
  uint64_t row_stride = 1;
  uint64_t rows_per_stripe = 1;
};

BoxRows RowsOf(const Shard& shard, const Box& box) {
  BoxRows rows;
  const auto full = [&](uint32_t d) { return box.size[d] == shard.global_shape[d]; };
  uint32_t d = shard.dimensions;
  // A row spans the last dimension. Where the box fills a dimension, the row also spans the
  // dimension before it.
  do {
    d -= 1;
    rows.row_length *= static_cast<uint64_t>(box.size[d]);
    rows.row_stride *= static_cast<uint64_t>(shard.global_shape[d]);
  } while (d > 0 && full(d));
  // The rows are at equal distances along the next dimension. Where the box fills that dimension,
  // the rows are also at equal distances along the dimension before it.
  while (d > 0) {
    d -= 1;
    rows.rows_per_stripe *= static_cast<uint64_t>(box.size[d]);
    if (!full(d)) break;
  }
  return rows;
}

// Appends elements [begin, end) of a box whose size is 1 in each dimension before d.
void CutBox(const Box& box, uint32_t dimensions, uint32_t d, uint64_t begin, uint64_t end,
            std::vector<Box>& boxes) {
  if (begin >= end) return;
  uint64_t row = 1;  // elements for each coordinate in dimension d
  for (uint32_t inner = d + 1; inner < dimensions; ++inner)
    row *= static_cast<uint64_t>(box.size[inner]);
  const auto part = [&](uint64_t first, uint64_t count) {
    Box rows = box;
    rows.offset[d] += static_cast<int64_t>(first);
    rows.size[d] = static_cast<int64_t>(count);
    return rows;
  };
  const uint64_t first = (begin + row - 1) / row;  // coordinate of the first whole row
  const uint64_t last = end / row;
  if (first > last)
    return CutBox(part(last, 1), dimensions, d + 1, begin - last * row, end - last * row, boxes);
  CutBox(part(first - 1, 1), dimensions, d + 1, begin + row - first * row, row, boxes);
  if (first < last) boxes.push_back(part(first, last - first));
  CutBox(part(last, 1), dimensions, d + 1, 0, end - last * row, boxes);
}

}  // namespace

Result<Shard> ValidateShard(const offload_shard_t& source) {
  HYBRIDOPT_TRY(CheckHeader(source));
  Shard shard{};
  shard.dimensions = source.dimensions;
  for (uint32_t d = 0; d < shard.dimensions; ++d) {
    shard.global_shape[d] = source.global_shape[d];
    if (shard.global_shape[d] < 0)
      return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                           "shard.global_shape[%u] is %lld, expected at least 0", d,
                           static_cast<long long>(shard.global_shape[d]));
  }
  int64_t global_count = 0;
  if (!Multiply(shard.global_shape, shard.dimensions, &global_count))
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "shard.global_shape: its product does not fit 63 bits");
  shard.boxes.resize(source.box_count);
  for (uint32_t b = 0; b < source.box_count; ++b) {
    Box& box = shard.boxes[b];
    std::copy_n(source.box_offsets + uint64_t{b} * shard.dimensions, shard.dimensions,
                box.offset.begin());
    std::copy_n(source.box_extents + uint64_t{b} * shard.dimensions, shard.dimensions,
                box.size.begin());
    HYBRIDOPT_TRY(CheckBox(shard, b));
  }
  HYBRIDOPT_TRY(CheckDisjoint(shard));
  uint64_t boxes_count = 0;
  // The boxes are inside global_shape and disjoint, so neither a product nor the sum of the
  // products exceeds the product of global_shape.
  for (const Box& box : shard.boxes) boxes_count += ElementsOf(box, shard.dimensions);
  const bool ranged = (source.flags & OFFLOAD_SHARD_RANGE) != 0;
  shard.range_begin = ranged ? source.range_begin : 0;
  shard.range_count = ranged ? source.range_count : boxes_count;
  if (!ranged && (source.range_begin != 0 || source.range_count != 0))
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "shard.range_begin/range_count are set without OFFLOAD_SHARD_RANGE in "
                         "shard.flags; set the flag, or leave them 0");
  if (shard.range_begin > boxes_count || shard.range_count > boxes_count - shard.range_begin)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "shard.range_begin %llu + range_count %llu passes the %llu elements of "
                         "its boxes",
                         static_cast<unsigned long long>(shard.range_begin),
                         static_cast<unsigned long long>(shard.range_count),
                         static_cast<unsigned long long>(boxes_count));
  return shard;
}

Result<Shard> ValidateShard(const offload_shard_t& source, uint64_t count) {
  HYBRIDOPT_ASSIGN(Shard shard, ValidateShard(source));
  if (shard.range_count != count)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "count is %llu, but the shard holds %llu elements; they must be equal",
                         static_cast<unsigned long long>(count),
                         static_cast<unsigned long long>(shard.range_count));
  return shard;
}

uint64_t Shard::global_count() const {
  int64_t count = 0;
  (void)Multiply(global_shape, dimensions, &count);  // no overflow: checked when it was made
  return static_cast<uint64_t>(count);
}

bool Shard::partial() const { return range_count < global_count(); }

uint64_t Shard::GlobalIndex(uint64_t element) const {
  HYBRIDOPT_CHECK(element < range_count);
  uint64_t left = range_begin + element;
  for (const Box& box : boxes) {
    const uint64_t box_elements = ElementsOf(box, dimensions);
    if (left >= box_elements) {
      left -= box_elements;
      continue;
    }
    return IndexInTensor(*this, box, left);
  }
  HYBRIDOPT_CHECK(false);  // the range lies inside the boxes
  return 0;
}

void AddStripes(const Shard& shard, std::vector<Stripe>& stripes) {
  uint64_t box_begin = 0;  // counted over all boxes
  const uint64_t range_end = shard.range_begin + shard.range_count;
  for (const Box& box : shard.boxes) {
    const uint64_t box_end = box_begin + ElementsOf(box, shard.dimensions);
    uint64_t begin = std::max(box_begin, shard.range_begin);
    const uint64_t end = std::min(box_end, range_end);
    if (begin < end) {
      const BoxRows rows = RowsOf(shard, box);
      const uint64_t stripe_elements = rows.row_length * rows.rows_per_stripe;
      while (begin < end) {
        const uint64_t column = (begin - box_begin) % stripe_elements;
        const uint64_t count = std::min(stripe_elements - column, end - begin);
        stripes.push_back({begin - shard.range_begin, count,
                           IndexInTensor(shard, box, begin - box_begin - column), rows.row_length,
                           rows.row_stride, column});
        begin += count;
      }
    }
    box_begin = box_end;
  }
}

void AppendBoxes(const Shard& shard, std::vector<Box>& boxes) {
  uint64_t before = 0;
  const uint64_t range_end = shard.range_begin + shard.range_count;
  for (const Box& box : shard.boxes) {
    const uint64_t elements = ElementsOf(box, shard.dimensions);
    const uint64_t begin = std::max(before, shard.range_begin);
    const uint64_t end = std::min(before + elements, range_end);
    if (begin < end) CutBox(box, shard.dimensions, 0, begin - before, end - before, boxes);
    before += elements;
  }
}

Shard WholeTensor(uint64_t count) {
  Shard shard{};
  shard.dimensions = 1;
  shard.global_shape[0] = static_cast<int64_t>(count);
  shard.boxes.resize(1);
  shard.boxes[0].size[0] = static_cast<int64_t>(count);
  shard.range_count = count;
  return shard;
}

}  // namespace hybridopt
