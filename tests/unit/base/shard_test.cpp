// Shards against brute force: a global tensor small enough to mark every element.
#include "base/shard.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "../../random.h"

namespace hybridopt {
namespace {

struct Arrays {
  std::vector<int64_t> shape, offsets, extents;
  offload_shard_t shard{};

  const offload_shard_t& Source() {
    shard.struct_size = sizeof(shard);
    shard.dimensions = static_cast<uint32_t>(shape.size());
    shard.box_count = static_cast<uint32_t>(offsets.size() / shape.size());
    shard.global_shape = shape.data();
    shard.box_offsets = offsets.data();
    shard.box_extents = extents.data();
    return shard;
  }
};

// The result of brute force for a shard: whether it is legal, and the number of elements in its
// boxes.
struct Marked {
  bool legal = true;
  uint64_t count = 0;
};

// Calls visit(coordinates) for every element of a box.
template <typename Visit>
void ForEachElement(const int64_t* offset, const int64_t* extent, size_t dimensions,
                    Visit&& visit) {
  std::vector<int64_t> at(offset, offset + dimensions);
  for (size_t d = 0; d < dimensions; ++d)
    if (extent[d] <= 0) return;
  while (true) {
    visit(at);
    size_t d = dimensions;
    while (d > 0 && ++at[d - 1] == offset[d - 1] + extent[d - 1]) {
      at[d - 1] = offset[d - 1];
      --d;
    }
    if (d == 0) return;
  }
}

Marked Mark(const Arrays& arrays) {
  Marked marked;
  std::set<std::vector<int64_t>> taken;
  const size_t dimensions = arrays.shape.size();
  for (int64_t extent : arrays.shape) marked.legal &= extent >= 0;
  for (size_t box = 0; box * dimensions < arrays.offsets.size(); ++box) {
    const int64_t* offset = &arrays.offsets[box * dimensions];
    const int64_t* extent = &arrays.extents[box * dimensions];
    for (size_t d = 0; d < dimensions; ++d)
      marked.legal &= offset[d] >= 0 && extent[d] >= 0 && offset[d] + extent[d] <= arrays.shape[d];
    ForEachElement(offset, extent, dimensions, [&](const std::vector<int64_t>& at) {
      marked.legal &= taken.insert(at).second;
      marked.count += 1;
    });
  }
  return marked;
}

TEST(Shard, AgreesWithBruteForceOnRandomBoxesAndRanges) {
  Random random(7);
  const auto below = [&](int64_t end) {
    return static_cast<int64_t>(random.Below(static_cast<uint64_t>(end)));
  };
  uint64_t legal = 0, illegal = 0;
  for (int round = 0; round < 20'000; ++round) {
    Arrays arrays;
    const int64_t dimensions = 1 + below(4);
    for (int64_t d = 0; d < dimensions; ++d) arrays.shape.push_back(below(6) - (below(40) == 0));
    const int64_t boxes = 1 + below(3);
    for (int64_t i = 0; i < boxes * dimensions; ++i) {
      const int64_t shape = arrays.shape[i % dimensions];
      arrays.offsets.push_back(below(std::max<int64_t>(shape, 0) + 1) - (below(60) == 0));
      const int64_t room = std::max<int64_t>(shape - arrays.offsets.back(), 0);
      arrays.extents.push_back(below(room + 1) + (below(40) == 0) - (below(60) == 0));
    }
    const Marked marked = Mark(arrays);

    // Whole boxes.
    Result<Shard> whole = ValidateShard(arrays.Source(), marked.count);
    ASSERT_EQ(whole.ok(), marked.legal) << round << ": " << whole.status().message();
    (marked.legal ? legal : illegal) += 1;
    if (!marked.legal) {
      EXPECT_EQ(whole.status().code(), OFFLOAD_INVALID_ARGUMENT);
      EXPECT_EQ(whole.status().message().find("shard."), 0u) << whole.status().message();
      continue;
    }
    const Shard& shard = whole.value();
    EXPECT_EQ(shard.range_begin, 0u);
    EXPECT_EQ(shard.range_count, marked.count);
    ASSERT_EQ(shard.boxes.size(), static_cast<size_t>(boxes));
    for (int64_t i = 0; i < boxes * dimensions; ++i) {
      EXPECT_EQ(shard.boxes[i / dimensions].offset[i % dimensions], arrays.offsets[i]);
      EXPECT_EQ(shard.boxes[i / dimensions].size[i % dimensions], arrays.extents[i]);
    }
    EXPECT_FALSE(ValidateShard(arrays.Source(), marked.count + 1).ok());

    // A range in them.
    arrays.shard.flags = OFFLOAD_SHARD_RANGE;
    arrays.shard.range_begin = static_cast<uint64_t>(below(10));
    arrays.shard.range_count = static_cast<uint64_t>(below(10));
    const bool inside = arrays.shard.range_begin + arrays.shard.range_count <= marked.count;
    Result<Shard> ranged = ValidateShard(arrays.Source(), arrays.shard.range_count);
    ASSERT_EQ(ranged.ok(), inside) << round << ": " << ranged.status().message();
    if (!inside) continue;
    EXPECT_EQ(ranged.value().range_begin, arrays.shard.range_begin);
    EXPECT_EQ(ranged.value().range_count, arrays.shard.range_count);
  }
  EXPECT_GT(legal, 1000u);
  EXPECT_GT(illegal, 1000u);
}

TEST(Shard, MayBeEmpty) {
  Arrays arrays{{0, INT64_MAX, INT64_MAX}, {0, 0, 0}, {0, 5, 7}, {}};  // no overflow: it is empty
  EXPECT_TRUE(ValidateShard(arrays.Source(), 0).ok());
  Arrays flat{{4}, {4}, {0}, {}};
  EXPECT_TRUE(ValidateShard(flat.Source(), 0).ok());
  Arrays range{{4}, {0}, {4}, {}};
  range.shard.flags = OFFLOAD_SHARD_RANGE;
  range.shard.range_begin = 4;
  EXPECT_TRUE(ValidateShard(range.Source(), 0).ok());
}

TEST(Shard, EmptyBoxesOverlapNothing) {
  Arrays arrays{{4, 4}, {0, 0, 1, 1, 1, 1}, {4, 4, 0, 2, 2, 0}, {}};
  EXPECT_TRUE(ValidateShard(arrays.Source(), 16).ok());
}

TEST(Shard, CountsAsFarAs63Bits) {
  Arrays arrays{{int64_t{1} << 31, int64_t{1} << 31}, {0, 0}, {int64_t{1} << 31, 1}, {}};
  EXPECT_TRUE(ValidateShard(arrays.Source(), uint64_t{1} << 31).ok());
  arrays.shape = {int64_t{1} << 32, int64_t{1} << 31};
  const Status status = ValidateShard(arrays.Source(), uint64_t{1} << 31).status();
  EXPECT_EQ(status.code(), OFFLOAD_INVALID_ARGUMENT);
  EXPECT_NE(status.message().find("63 bits"), std::string::npos);
}

TEST(Shard, WholeTensorIsOneBoxOfOneDimension) {
  const Shard shard = WholeTensor(12);
  EXPECT_EQ(shard.dimensions, 1u);
  EXPECT_EQ(shard.global_shape[0], 12);
  ASSERT_EQ(shard.boxes.size(), 1u);
  EXPECT_EQ(shard.boxes[0].offset[0], 0);
  EXPECT_EQ(shard.boxes[0].size[0], 12);
  EXPECT_EQ(shard.range_begin, 0u);
  EXPECT_EQ(shard.range_count, 12u);
}

}  // namespace
}  // namespace hybridopt
