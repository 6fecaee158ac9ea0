// Shards of random layouts: tensor, pipeline and data parallel, ZeRO ranges, interleaved and
// strided boxes, replicas, uneven and empty ones, in one to eight dimensions. The results are
// compared with brute force.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../../layouts.h"
#include "../../random.h"
#include "../../scale.h"
#include "base/shard.h"

namespace hybridopt {
namespace {

constexpr int kLayouts = 2000;

struct Layout {
  explicit Layout(uint64_t seed) : random(seed) {
    shape = RandomShape(1500, random);
    pieces = RandomLayout(shape, 1 + random.Below(16), random);
  }
  Random random;
  std::vector<int64_t> shape;
  std::vector<Piece> pieces;
};

Shard Validated(const Piece& piece) {
  Result<Shard> shard = ValidateShard(piece.Abi(), piece.count);
  EXPECT_TRUE(shard.ok()) << shard.status().message();
  return shard.ok() ? shard.value() : WholeTensor(0);
}

TEST(ShardLayoutTest, ElementsAreWhereBruteForceFindsThem) {
  for (int seed = 0; seed < Scaled(kLayouts); ++seed) {
    const Layout layout(static_cast<uint64_t>(seed));
    for (const Piece& piece : layout.pieces) {
      const Shard shard = Validated(piece);
      const std::vector<uint64_t> expected = GlobalIndices(piece);
      ASSERT_EQ(shard.range_count, expected.size()) << "seed " << seed;
      for (uint64_t i = 0; i < expected.size(); ++i)
        ASSERT_EQ(shard.GlobalIndex(i), expected[i]) << "seed " << seed << ", element " << i;
      ASSERT_EQ(shard.partial(), piece.count < ElementsOf(layout.shape)) << "seed " << seed;
    }
  }
}

TEST(ShardLayoutTest, StripesSayWhereElementsAre) {
  int of_many_rows = 0;
  for (int seed = 0; seed < Scaled(kLayouts); ++seed) {
    const Layout layout(static_cast<uint64_t>(seed));
    for (const Piece& piece : layout.pieces) {
      const Shard shard = Validated(piece);
      std::vector<Stripe> stripes;
      AddStripes(shard, stripes);
      uint64_t element = 0;
      for (const Stripe& stripe : stripes) {
        ASSERT_EQ(stripe.begin, element) << "seed " << seed;
        ASSERT_GT(stripe.count, 0u);
        for (uint64_t k = 0; k < stripe.count; ++k, ++element) {
          const uint64_t c = stripe.column + k;
          ASSERT_EQ(
              stripe.first + c / stripe.row_length * stripe.row_stride + c % stripe.row_length,
              shard.GlobalIndex(element))
              << "seed " << seed << ", element " << element;
        }
        of_many_rows += stripe.count > 2 * stripe.row_length;
      }
      ASSERT_EQ(element, piece.count) << "seed " << seed;
    }
  }
  EXPECT_GT(of_many_rows, Scaled(kLayouts) / 10);
}

TEST(ShardLayoutTest, AllRanksTogetherHoldEachElementOnce) {
  for (int seed = 0; seed < Scaled(kLayouts); ++seed) {
    const Layout layout(static_cast<uint64_t>(seed));
    std::vector<int> holders(ElementsOf(layout.shape), 0);
    for (const Piece& piece : layout.pieces) {
      if (piece.replica) continue;
      const Shard shard = Validated(piece);
      for (uint64_t i = 0; i < piece.count; ++i) holders[shard.GlobalIndex(i)] += 1;
    }
    ASSERT_EQ(holders, std::vector<int>(holders.size(), 1)) << "seed " << seed;
  }
}

// The tests above mean something only if all kinds of layouts occur.
TEST(ShardLayoutTest, TheRandomLayoutsAreOfAllKinds) {
  std::vector<int> dimensions(9), worlds(17);
  int several_boxes = 0, across_boxes = 0, empty = 0, replicas = 0, ranged = 0, empty_boxes = 0;
  for (int seed = 0; seed < kLayouts; ++seed) {
    const Layout layout(static_cast<uint64_t>(seed));
    dimensions[layout.shape.size()] += 1;
    worlds[layout.pieces.size()] += 1;
    for (const Piece& piece : layout.pieces) {
      several_boxes += piece.box_count > 1;
      empty += piece.count == 0;
      replicas += piece.replica;
      ranged += piece.ranged;
      Piece first = piece;
      first.ranged = false;
      first.box_count = 1;
      const uint64_t in_first = GlobalIndices(first).size();
      across_boxes += piece.ranged && piece.range_begin > 0 && piece.range_begin < in_first &&
                      piece.range_begin + piece.count > in_first;
      empty_boxes += piece.box_count > 1 && in_first == 0;
    }
  }
  for (size_t d = 1; d <= 8; ++d) EXPECT_GT(dimensions[d], 100) << d;
  for (size_t world = 1; world <= 16; ++world) EXPECT_GT(worlds[world], 50) << world;
  for (int kind : {several_boxes, across_boxes, empty, replicas, ranged, empty_boxes})
    EXPECT_GT(kind, 100);
}

// ----------------------------------------------------------------------------------- mutations --

// The refusal's text, or "accepted".
std::string Refusal(const Piece& piece, uint64_t count) {
  const Result<Shard> shard = ValidateShard(piece.Abi(), count);
  if (shard.ok()) return "accepted";
  EXPECT_EQ(shard.status().code(), OFFLOAD_INVALID_ARGUMENT);
  return shard.status().message();
}

::testing::AssertionResult Says(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << '"' << text << "\" lacks \"" << part << '"';
}

// Each random layout's shards with one thing wrong, at a random place.
class MutationTest : public ::testing::Test {
 protected:
  // Calls spoil(piece, box, dimension, random) on a copy of each piece. The refusal must have the
  // text that spoil returns. An empty text: this piece cannot be spoilt in this way.
  template <typename Spoil>
  void Run(Spoil spoil) {
    int refused = 0;
    for (int seed = 0; seed < Scaled(kLayouts / 2); ++seed) {
      Layout layout(static_cast<uint64_t>(seed));
      for (Piece piece : layout.pieces) {
        const size_t box = layout.random.Below(piece.box_count);
        const size_t dimension = layout.random.Below(piece.shape.size());
        const std::string expected =
            spoil(piece, box * piece.shape.size() + dimension, layout.random);
        if (expected.empty()) continue;
        ASSERT_TRUE(Says(Refusal(piece, piece.count), expected)) << "seed " << seed;
        refused += 1;
      }
    }
    EXPECT_GT(refused, Scaled(kLayouts / 4));
  }

  static std::string BoxText(const Piece& piece, size_t at) {
    const size_t dimensions = piece.shape.size();
    return "shard.box_offsets/box_extents: box " + std::to_string(at / dimensions) +
           " reaches from " + std::to_string(piece.offsets[at]) + " over " +
           std::to_string(piece.extents[at]) + " elements in dimension " +
           std::to_string(at % dimensions) + ", outside global_shape " +
           std::to_string(piece.shape[at % dimensions]);
  }
};

TEST_F(MutationTest, ABoxThatReachesOutside) {
  Run([](Piece& piece, size_t at, Random& random) {
    const int64_t room =
        piece.shape[at % piece.shape.size()] - piece.offsets[at] - piece.extents[at];
    std::vector<int64_t>& field = random.OneIn(2) ? piece.offsets : piece.extents;
    field[at] += room + static_cast<int64_t>(1 + random.Below(3));
    return BoxText(piece, at);
  });
}

TEST_F(MutationTest, ANegativeOffsetOrExtent) {
  Run([](Piece& piece, size_t at, Random& random) {
    std::vector<int64_t>& field = random.OneIn(2) ? piece.offsets : piece.extents;
    field[at] = random.OneIn(4) ? INT64_MIN : -static_cast<int64_t>(1 + random.Below(3));
    return BoxText(piece, at);
  });
}

// Offset plus extent wraps around.
TEST_F(MutationTest, AnOffsetOrExtentThatOverflows) {
  Run([](Piece& piece, size_t at, Random& random) {
    switch (random.Below(3)) {
      case 0:
        piece.offsets[at] = INT64_MAX;
        break;
      case 1:
        piece.extents[at] = INT64_MAX;
        break;
      default:
        piece.offsets[at] = piece.extents[at] = INT64_MAX;
    }
    return BoxText(piece, at);
  });
}

// Repeats one box, or one element of it.
TEST_F(MutationTest, BoxesThatOverlap) {
  Run([](Piece& piece, size_t at, Random& random) -> std::string {
    const auto dimensions = static_cast<ptrdiff_t>(piece.shape.size());
    const ptrdiff_t box = static_cast<ptrdiff_t>(at) / dimensions;
    std::vector<int64_t> offsets(piece.offsets.begin() + box * dimensions,
                                 piece.offsets.begin() + (box + 1) * dimensions);
    std::vector<int64_t> extents(piece.extents.begin() + box * dimensions,
                                 piece.extents.begin() + (box + 1) * dimensions);
    if (ElementsOf(extents) == 0) return "";
    if (random.OneIn(2)) {
      for (ptrdiff_t d = 0; d < dimensions; ++d) {
        const auto corner = static_cast<size_t>(d);
        offsets[corner] += extents[corner] - 1;
        extents[corner] = 1;
      }
    }
    piece.offsets.insert(piece.offsets.end(), offsets.begin(), offsets.end());
    piece.extents.insert(piece.extents.end(), extents.begin(), extents.end());
    piece.box_count += 1;
    return "shard.box_offsets: boxes " + std::to_string(box) + " and " +
           std::to_string(piece.box_count - 1) + " overlap; give each element once";
  });
}

TEST_F(MutationTest, ARangeBehindTheBoxes) {
  Run([](Piece& piece, size_t, Random& random) {
    Piece all = piece;
    all.ranged = false;
    const uint64_t boxes_count = GlobalIndices(all).size();
    piece.ranged = true;
    switch (random.Below(3)) {
      case 0:
        piece.range_begin = boxes_count + 1 + random.Below(3);
        break;
      case 1:
        piece.count = boxes_count - piece.range_begin + 1 + random.Below(3);
        break;
      default:  // begin plus count wraps around
        piece.range_begin = 1 + random.Below(3);
        piece.count = UINT64_MAX - random.Below(piece.range_begin);
    }
    return "shard.range_begin " + std::to_string(piece.range_begin) + " + range_count " +
           std::to_string(piece.count) + " passes the " + std::to_string(boxes_count) +
           " elements of its boxes";
  });
}

TEST_F(MutationTest, ACountThatIsNotTheShards) {
  for (int seed = 0; seed < Scaled(kLayouts / 2); ++seed) {
    Layout layout(static_cast<uint64_t>(seed));
    for (const Piece& piece : layout.pieces) {
      for (uint64_t count : {piece.count + 1, piece.count - 1, uint64_t{0}}) {
        if (count == piece.count) continue;
        ASSERT_TRUE(Says(Refusal(piece, count),
                         "count is " + std::to_string(count) + ", but the shard holds " +
                             std::to_string(piece.count) + " elements; they must be equal"))
            << "seed " << seed;
      }
    }
  }
}

TEST_F(MutationTest, ANegativeShape) {
  Run([](Piece& piece, size_t at, Random& random) {
    const size_t dimension = at % piece.shape.size();
    piece.shape[dimension] = random.OneIn(4) ? INT64_MIN : -1;
    return "shard.global_shape[" + std::to_string(dimension) + "] is " +
           std::to_string(piece.shape[dimension]) + ", expected at least 0";
  });
}

TEST_F(MutationTest, AShapeWhoseProductOverflows) {
  Run([](Piece& piece, size_t at, Random& random) -> std::string {
    // A zero among them makes the product zero, which is allowed.
    for (int64_t& extent : piece.shape) extent = std::max<int64_t>(extent, 2);
    if (piece.shape.size() == 1) return "";
    piece.shape[at % piece.shape.size()] =
        INT64_MAX / 2 + 1 + static_cast<int64_t>(random.Below(9));
    return "shard.global_shape: its product does not fit 63 bits";
  });
}

TEST_F(MutationTest, ARangeWithoutItsFlag) {
  Run([](Piece& piece, size_t, Random& random) -> std::string {
    if (piece.ranged) return "";
    piece.range_begin = 1 + random.Below(3);
    return "shard.range_begin/range_count are set without OFFLOAD_SHARD_RANGE";
  });
}

// --------------------------------------------------------------------------------------- edges --

TEST(ShardTest, TheLargestShapesCount) {
  Piece piece;
  piece.shape = {INT64_MAX};
  piece.offsets = {INT64_MAX - 2};
  piece.extents = {2};
  piece.box_count = 1;
  piece.count = 2;
  const Shard shard = Validated(piece);
  EXPECT_TRUE(shard.partial());
  EXPECT_EQ(shard.GlobalIndex(1), uint64_t{INT64_MAX} - 1);
}

// A dimension of size 0 makes an empty tensor, even if the others are large.
TEST(ShardTest, AnEmptyTensorOfHugeExtents) {
  Piece piece;
  piece.shape = {INT64_MAX, 0, INT64_MAX};
  piece.offsets = {0, 0, 0};
  piece.extents = piece.shape;
  piece.box_count = 1;
  EXPECT_FALSE(Validated(piece).partial());
}

// An update takes time and memory for each stripe and row, so stripes and rows must be as long as
// possible.
TEST(ShardTest, RowsAreJoinedBeyondTheDimensionsThatABoxFills) {
  const auto stripes_of = [](std::vector<int64_t> extents) {
    Piece piece;
    piece.shape = {8, 5, 6};
    piece.offsets = {2, 0, 0};
    piece.extents = extents;
    piece.box_count = 1;
    piece.count = ElementsOf(extents);
    std::vector<Stripe> stripes;
    AddStripes(Validated(piece), stripes);
    return stripes;
  };
  std::vector<Stripe> stripes = stripes_of({4, 5, 6});
  ASSERT_EQ(stripes.size(), 1u);
  EXPECT_EQ(stripes[0].row_length, 120u);
  stripes = stripes_of({4, 3, 6});
  ASSERT_EQ(stripes.size(), 1u);
  EXPECT_EQ(stripes[0].row_length, 18u);
  EXPECT_EQ(stripes[0].row_stride, 30u);
}

TEST(ShardTest, WholeTensorIsInOrder) {
  const Shard shard = WholeTensor(5);
  EXPECT_FALSE(shard.partial());
  for (uint64_t i = 0; i < 5; ++i) EXPECT_EQ(shard.GlobalIndex(i), i);
}

// Any order of boxes is legal; elements count through them as given.
TEST(ShardTest, BoxesCountInTheOrderGiven) {
  Piece piece;
  piece.shape = {2, 4};
  piece.offsets = {0, 2, 0, 0};
  piece.extents = {2, 2, 2, 2};
  piece.box_count = 2;
  piece.ranged = true;
  piece.range_begin = 3;
  piece.count = 4;
  const Shard shard = Validated(piece);
  const uint64_t expected[] = {7, 0, 1, 4};
  for (uint64_t i = 0; i < 4; ++i) EXPECT_EQ(shard.GlobalIndex(i), expected[i]);
}

}  // namespace
}  // namespace hybridopt
