// Resharding between random layouts, compared with brute force, which finds the place of each
// element of each shard in the global tensor.
#include "checkpoint/format/reshard.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "../../layouts.h"
#include "../../random.h"
#include "../../scale.h"

namespace hybridopt::checkpoint {
namespace {

struct Layout {
  Layout(const std::vector<int64_t>& shape, Random& random) {
    for (Piece& piece : RandomLayout(shape, 1 + random.Below(12), random)) {
      if (piece.replica) continue;
      Result<Shard> shard = ValidateShard(piece.Abi(), piece.count);
      EXPECT_TRUE(shard.ok()) << shard.status().message();
      indices.push_back(GlobalIndices(piece));
      shards.push_back(std::move(shard.value()));
    }
  }
  std::vector<const Shard*> Pointers() const {
    std::vector<const Shard*> pointers;
    for (const Shard& shard : shards) pointers.push_back(&shard);
    return pointers;
  }
  std::vector<Shard> shards;
  std::vector<std::vector<uint64_t>> indices;  // global, of each shard's elements
};

std::string Coordinates(const std::vector<int64_t>& shape, uint64_t index) {
  std::string text;
  for (size_t d = shape.size(); d-- > 0;) {
    text =
        std::to_string(index % static_cast<uint64_t>(shape[d])) + (text.empty() ? "" : ", ") + text;
    index /= static_cast<uint64_t>(shape[d]);
  }
  return "element (" + text + ")";
}

constexpr auto kIgnore = [](const Segment&) -> Status { return {}; };

// Two layouts of one random tensor.
struct Pair {
  explicit Pair(uint64_t seed)
      : random(seed),
        shape(RandomShape(600, random)),
        stored(shape, random),
        wanted(shape, random) {}
  Random random;
  std::vector<int64_t> shape;
  Layout stored, wanted;
};

TEST(ReshardTest, EverySegmentIsTheSameElementsAndEachWantedOneComesOnce) {
  uint64_t segments = 0, elements = 0;
  for (int seed = 0; seed < Scaled(3000); ++seed) {
    Pair pair(static_cast<uint64_t>(seed));
    const auto stored = pair.stored.Pointers();
    for (size_t w = 0; w < pair.wanted.shards.size(); ++w) {
      const std::vector<uint64_t>& wanted = pair.wanted.indices[w];
      std::vector<int> copies(wanted.size(), 0);
      const Status status =
          ForEachSegment(stored, pair.wanted.shards[w], [&](const Segment& segment) -> Status {
            const std::vector<uint64_t>& source = pair.stored.indices[segment.shard];
            segments += 1;
            EXPECT_GT(segment.count, 0u);
            EXPECT_LE(segment.source + segment.count, source.size()) << "seed " << seed;
            EXPECT_LE(segment.destination + segment.count, wanted.size()) << "seed " << seed;
            if (testing::Test::HasFailure()) return Status::Error(OFFLOAD_INTERNAL, "stop");
            for (uint64_t i = 0; i < segment.count; ++i) {
              EXPECT_EQ(source[segment.source + i], wanted[segment.destination + i])
                  << "seed " << seed;
              copies[segment.destination + i] += 1;
            }
            return {};
          });
      ASSERT_TRUE(status.ok());
      ASSERT_EQ(copies, std::vector<int>(copies.size(), 1)) << "seed " << seed;
      elements += copies.size();
      const Status coverage = CheckCoverage(stored, pair.wanted.shards[w]);
      ASSERT_TRUE(coverage.ok()) << "seed " << seed << ": " << coverage.message();
    }
  }
  // The layouts are not trivial, and rows are not cut into single elements.
  EXPECT_GT(segments, elements / 50);
  EXPECT_LT(segments, elements / 2);
}

TEST(ReshardTest, TheFirstMissingElementIsNamed) {
  int missed = 0;
  for (int seed = 0; seed < Scaled(3000); ++seed) {
    Pair pair(static_cast<uint64_t>(seed) + 1'000'000);
    // Leave out some shards.
    std::vector<const Shard*> stored;
    std::vector<int> held(ElementsOf(pair.shape), 0);
    for (size_t i = 0; i < pair.stored.shards.size(); ++i) {
      if (pair.random.OneIn(3)) continue;
      stored.push_back(&pair.stored.shards[i]);
      for (uint64_t index : pair.stored.indices[i]) held[index] += 1;
    }
    for (size_t w = 0; w < pair.wanted.shards.size(); ++w) {
      const std::vector<uint64_t>& wanted = pair.wanted.indices[w];
      const auto missing =
          std::find_if(wanted.begin(), wanted.end(), [&](uint64_t index) { return !held[index]; });
      const Status status = CheckCoverage(stored, pair.wanted.shards[w]);
      ASSERT_EQ(status.ok(), missing == wanted.end()) << "seed " << seed;
      if (status.ok()) continue;
      missed += 1;
      ASSERT_EQ(status.code(), OFFLOAD_CHECKPOINT_MISMATCH);
      ASSERT_EQ(status.message(), Coordinates(pair.shape, *missing) +
                                      " of the tensor is in none of the " +
                                      std::to_string(stored.size()) + " stored shards")
          << "seed " << seed;
    }
  }
  EXPECT_GT(missed, Scaled(3000));
}

TEST(ReshardTest, AnElementThatIsStoredTwiceIsNamedWithBothShards) {
  int doubled = 0, disjoint = 0;
  for (int seed = 0; seed < Scaled(3000); ++seed) {
    Pair pair(static_cast<uint64_t>(seed) + 2'000'000);
    // Some shards of both layouts together.
    std::vector<const Shard*> stored;
    std::vector<std::vector<uint64_t>> indices;
    for (const Layout* layout : {&pair.stored, &pair.wanted}) {
      for (size_t i = 0; i < layout->shards.size(); ++i) {
        if (pair.random.OneIn(2)) continue;
        stored.push_back(&layout->shards[i]);
        indices.push_back(layout->indices[i]);
      }
    }
    std::map<std::string, std::vector<size_t>> holders;
    bool twice = false;
    for (size_t i = 0; i < indices.size(); ++i) {
      for (uint64_t index : indices[i]) {
        holders[Coordinates(pair.shape, index)].push_back(i);
        twice = twice || holders[Coordinates(pair.shape, index)].size() > 1;
      }
    }
    const Status status = CheckDisjoint(stored);
    ASSERT_EQ(status.ok(), !twice) << "seed " << seed << ": " << status.message();
    (twice ? doubled : disjoint) += 1;
    if (!twice) continue;
    ASSERT_EQ(status.code(), OFFLOAD_CHECKPOINT_CORRUPT);
    bool named = false;
    for (const auto& [element, shards] : holders)
      for (size_t a : shards)
        for (size_t b : shards)
          named = named || status.message() == "stored shards " + std::to_string(a) + " and " +
                                                   std::to_string(b) + " both hold " + element +
                                                   " of the tensor";
    ASSERT_TRUE(named) << "seed " << seed << ": " << status.message();
    ASSERT_EQ(CheckCoverage(stored, pair.wanted.shards[0]).code(), OFFLOAD_CHECKPOINT_CORRUPT);
  }
  EXPECT_GT(doubled, Scaled(500));
  EXPECT_GT(disjoint, Scaled(200));
}

Shard Matrix(int64_t rows, int64_t columns, Box box) {
  Shard shard{};
  shard.dimensions = 2;
  shard.global_shape = {rows, columns};
  shard.boxes = {box};
  shard.range_count = static_cast<uint64_t>(box.size[0] * box.size[1]);
  return shard;
}

TEST(ReshardTest, WholeRowsBecomeOneSegment) {
  const Shard top = Matrix(1000, 64, {{0, 0}, {600, 64}});
  const Shard bottom = Matrix(1000, 64, {{600, 0}, {400, 64}});
  const Shard middle = Matrix(1000, 64, {{500, 0}, {200, 64}});
  const Shard* stored[] = {&top, &bottom};
  std::vector<Segment> segments;
  ASSERT_TRUE(ForEachSegment(stored, middle, [&](const Segment& segment) -> Status {
                segments.push_back(segment);
                return {};
              }).ok());
  ASSERT_EQ(segments.size(), 2u);
  EXPECT_EQ(segments[0].source, 500u * 64);
  EXPECT_EQ(segments[0].destination, 0u);
  EXPECT_EQ(segments[0].count, 100u * 64);
  EXPECT_EQ(segments[1].source, 0u);
  EXPECT_EQ(segments[1].destination, 100u * 64);
  EXPECT_EQ(segments[1].count, 100u * 64);
}

// A range far inside a large tensor of single columns is found without walking there, and a missing
// element far inside without a pass for each row.
TEST(ReshardTest, LargeTensorsTakeStepsForTheirSegmentsOnly) {
  const int64_t rows = int64_t{1} << 40;
  const Shard left = Matrix(rows, 2, {{0, 0}, {rows, 1}});
  Shard right = Matrix(rows, 2, {{0, 1}, {rows, 1}});
  Shard wanted = Matrix(rows, 2, {{0, 0}, {rows, 2}});
  wanted.range_begin = (uint64_t{1} << 40) + 1;
  wanted.range_count = 5;
  const Shard* stored[] = {&left, &right};
  std::vector<Segment> segments;
  ASSERT_TRUE(ForEachSegment(stored, wanted, [&](const Segment& segment) -> Status {
                segments.push_back(segment);
                return {};
              }).ok());
  ASSERT_EQ(segments.size(), 5u);
  EXPECT_EQ(segments[0].source, (uint64_t{1} << 39) + 1);
  EXPECT_TRUE(CheckCoverage(stored, wanted).ok());
  wanted.range_count = 200'000;
  right.range_count = (uint64_t{1} << 39) + 99'000;
  EXPECT_EQ(CheckCoverage(stored, wanted).message(),
            "element (" + std::to_string(right.range_count) +
                ", 1) of the tensor is in none of the 2 stored shards");
}

// Cases that once took minutes or did not end: thousands of shards, and shards of thousands of
// boxes.
TEST(ReshardTest, ManyShardsAreCheckedTogether) {
  const int64_t rows = 3 * Scaled(20'000);
  std::vector<Shard> shards;
  for (int64_t row = 0; row < rows; row += 3) shards.push_back(Matrix(rows, 7, {{row, 0}, {3, 7}}));
  for (size_t i = 1; i < shards.size(); i += 2) {  // every second one by boxes, cut inside a row
    shards[i].boxes.push_back(shards[i].boxes[0]);
    shards[i].boxes[0].size[1] = 3;
    shards[i].boxes[1].offset[1] = 3;
    shards[i].boxes[1].size[1] = 4;
  }
  std::vector<const Shard*> stored;
  for (const Shard& shard : shards) stored.push_back(&shard);
  Shard whole = Matrix(rows, 7, {{0, 0}, {rows, 7}});
  EXPECT_TRUE(CheckCoverage(stored, whole).ok());
  shards.back().range_count -= 1;
  EXPECT_EQ(CheckCoverage(stored, whole).message(),
            "element (" + std::to_string(rows - 1) + ", 6) of the tensor is in none of the " +
                std::to_string(shards.size()) + " stored shards");
  shards.back().range_count += 1;
  shards[shards.size() - 2].boxes[0].size[0] = 4;
  shards[shards.size() - 2].range_count += 1;
  EXPECT_EQ(CheckDisjoint(stored).message(), "stored shards " + std::to_string(shards.size() - 2) +
                                                 " and " + std::to_string(shards.size() - 1) +
                                                 " both hold element (" + std::to_string(rows - 3) +
                                                 ", 0) of the tensor");
}

TEST(ReshardTest, AFailureOfVisitStopsAndReachesTheCaller) {
  const Shard whole = Matrix(8, 4, {{0, 0}, {8, 4}});
  const Shard column = Matrix(8, 4, {{0, 1}, {8, 1}});
  const Shard* stored[] = {&whole};
  int visited = 0;
  const Status status = ForEachSegment(stored, column, [&](const Segment&) -> Status {
    if (++visited < 3) return {};
    return Status::Error(OFFLOAD_IO_FAILED, "disk");
  });
  EXPECT_EQ(visited, 3);
  EXPECT_EQ(status.message(), "disk");
}

TEST(ReshardTest, NothingIsWantedOrStored) {
  const Shard whole = Matrix(3, 4, {{0, 0}, {3, 4}});
  Shard empty = whole;
  empty.range_count = 0;
  const Shard* stored[] = {&whole};
  const Shard* stored_empty[] = {&empty};
  EXPECT_TRUE(CheckCoverage({}, empty).ok());
  EXPECT_TRUE(CheckCoverage(stored, empty).ok());
  EXPECT_TRUE(ForEachSegment(stored_empty, empty, kIgnore).ok());
  EXPECT_EQ(CheckCoverage({}, whole).message(),
            "element (0, 0) of the tensor is in none of the 0 stored shards");
}

}  // namespace
}  // namespace hybridopt::checkpoint
