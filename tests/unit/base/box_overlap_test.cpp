// Boxes that share an element: the result of the search is compared with a comparison of all pairs,
// and its cost is counted, not timed.
#include "base/box_overlap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "../../random.h"
#include "../../scale.h"

namespace hybridopt {
namespace {

using Boxes = std::vector<Box>;

bool Meet(const Box& a, const Box& b, uint32_t dimensions) {
  for (uint32_t d = 0; d < dimensions; ++d)
    if (std::max(a.offset[d], b.offset[d]) >=
        std::min(a.offset[d] + a.size[d], b.offset[d] + b.size[d]))
      return false;
  return true;
}

bool AnyMeet(const Boxes& boxes, uint32_t dimensions) {
  for (size_t b = 0; b < boxes.size(); ++b)
    for (size_t a = 0; a < b; ++a)
      if (Meet(boxes[a], boxes[b], dimensions)) return true;
  return false;
}

template <typename Items>
void Shuffle(Items& items, Random& random) {
  for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[random.Below(i)]);
}

// Halves boxes at random until there are `count`. None overlap; a dimension separates any two of
// them.
Boxes Divided(size_t count, uint32_t dimensions, int64_t size, Random& random) {
  Boxes boxes(1);
  for (uint32_t d = 0; d < dimensions; ++d) boxes[0].size[d] = size;
  for (size_t tries = 0; boxes.size() < count && tries < 20 * count; ++tries) {
    Box& box = boxes[random.Below(boxes.size())];
    const size_t d = random.Below(dimensions);
    if (box.size[d] < 2) continue;
    Box other = box;
    const auto cut = static_cast<int64_t>(1 + random.Below(static_cast<uint64_t>(box.size[d]) - 1));
    box.size[d] = cut;
    other.offset[d] += cut;
    other.size[d] -= cut;
    boxes.push_back(other);
  }
  Shuffle(boxes, random);
  return boxes;
}

TEST(Overlap, IsFoundWhereComparingEachWithEachFindsIt) {
  Random random(11);
  int overlapping = 0, disjoint = 0;
  for (int round = 0; round < Scaled(4000); ++round) {
    const auto dimensions = static_cast<uint32_t>(1 + random.Below(5));
    const size_t count = 1 + random.Below(200);
    Boxes boxes = Divided(count, dimensions, static_cast<int64_t>(1 + random.Below(30)), random);
    // Some boxes are too large, some occur twice, some have no elements.
    while (random.OneIn(2)) {
      Box box = boxes[random.Below(boxes.size())];
      const size_t d = random.Below(dimensions);
      if (random.OneIn(2)) box.size[d] = static_cast<int64_t>(random.Below(3));
      if (random.OneIn(2)) box.offset[d] += 1;
      boxes[random.Below(boxes.size())] = box;
    }
    const auto found = FindOverlap(boxes, dimensions).found;
    ASSERT_EQ(found.has_value(), AnyMeet(boxes, dimensions)) << "round " << round;
    (found.has_value() ? overlapping : disjoint) += 1;
    if (!found.has_value()) continue;
    ASSERT_LT(found->first, found->second);
    ASSERT_LT(found->second, boxes.size());
    ASSERT_TRUE(Meet(boxes[found->first], boxes[found->second], dimensions)) << "round " << round;
  }
  EXPECT_GT(overlapping, Scaled(500));
  EXPECT_GT(disjoint, Scaled(500));
}

// Each of the two may begin first, in any dimension.
TEST(Overlap, OfTwoAmongManyIsFound) {
  Random random(12);
  int searched = 0;
  for (int round = 0; round < Scaled(400); ++round) {
    const auto dimensions = static_cast<uint32_t>(2 + random.Below(3));
    Boxes boxes = Divided(600, dimensions, 1 << 20, random);
    Box& grown = boxes[random.Below(boxes.size())];
    const size_t d = random.Below(dimensions);
    if (random.OneIn(2)) grown.offset[d] -= 1;
    grown.size[d] += 1;
    // Of the boxes that it overlaps now, one stays.
    const Box copy = grown;
    bool kept = false;
    std::erase_if(boxes, [&](const Box& box) {
      const bool same = box.offset == copy.offset && box.size == copy.size;
      return !same && Meet(box, copy, dimensions) && std::exchange(kept, true);
    });
    const auto found = FindOverlap(boxes, dimensions).found;
    ASSERT_EQ(found.has_value(), kept) << "round " << round;
    if (!kept) continue;
    searched += 1;
    ASSERT_TRUE(Meet(boxes[found->first], boxes[found->second], dimensions));
  }
  EXPECT_GT(searched, Scaled(200));
}

TEST(BoxTree, VisitsTheBoxesThatComparingEachWouldFind) {
  Random random(13);
  size_t found = 0;
  for (int round = 0; round < Scaled(1000); ++round) {
    const auto dimensions = static_cast<uint32_t>(1 + random.Below(5));
    const auto size = static_cast<int64_t>(1 + random.Below(30));
    Boxes boxes = Divided(1 + random.Below(200), dimensions, size, random);
    if (random.OneIn(4)) boxes[random.Below(boxes.size())].size[0] = 0;
    BoxTree tree(boxes, dimensions);
    for (Box box : Divided(1 + random.Below(8), dimensions, size, random)) {
      const size_t d = random.Below(dimensions);
      box.offset[d] += static_cast<int64_t>(random.Below(3));
      if (random.OneIn(8)) box.size[d] = 0;
      std::vector<uint32_t> expected, visited;
      for (uint32_t i = 0; i < boxes.size(); ++i)
        if (Meet(boxes[i], box, dimensions)) expected.push_back(i);
      tree.ForEachOverlapping(box, [&](uint32_t index) { visited.push_back(index); });
      std::sort(visited.begin(), visited.end());
      ASSERT_EQ(visited, expected) << "round " << round;
      found += expected.size();
    }
  }
  EXPECT_GT(found, static_cast<size_t>(Scaled(1000)));
  BoxTree none(Boxes{}, 3);
  none.ForEachOverlapping(Box{}, [](uint32_t) { ADD_FAILURE(); });
}

TEST(Overlap, OfTheFarEndsOfTheNumbersIsFound) {
  const Box all{{0, 0}, {INT64_MAX, INT64_MAX}};
  const Box last{{INT64_MAX - 1, INT64_MAX - 1}, {1, 1}};
  const Box empty{{INT64_MAX, 0}, {0, INT64_MAX}};
  EXPECT_TRUE(FindOverlap(Boxes{all, last}, 2).found.has_value());
  EXPECT_FALSE(FindOverlap(Boxes{all, empty, empty}, 2).found.has_value());
  EXPECT_FALSE(FindOverlap(Boxes{all}, 2).found.has_value());
  EXPECT_FALSE(FindOverlap(Boxes{}, 2).found.has_value());
}

// ------------------------------------------------------------------------------------- the cost --

struct Family {
  std::string name;
  uint32_t dimensions;
  Boxes boxes;
};

// Equal ranges of rows, as ZeRO divides them.
Family Rows(size_t count) {
  Family family{"rows", 2, Boxes(count)};
  for (size_t i = 0; i < count; ++i)
    family.boxes[i] = {{static_cast<int64_t>(3 * i), 0}, {3, 1024}};
  return family;
}

// Rows in random order in eight dimensions; the boxes fill all dimensions but one.
Family RowsOfMany(size_t count, Random& random) {
  Family family{"rows of eight dimensions", 8, Boxes(count)};
  for (size_t i = 0; i < count; ++i) {
    family.boxes[i].size = {7, 7, 7, 7, 1, 7, 7, 7};
    family.boxes[i].offset[4] = static_cast<int64_t>(i);
  }
  Shuffle(family.boxes, random);
  return family;
}

// A grid, as tensor and expert parallelism together divide a tensor.
Family Grid(size_t count, uint32_t dimensions) {
  Family family{"grid", dimensions, {}};
  const auto side = static_cast<size_t>(
      std::lround(std::pow(static_cast<double>(count), 1.0 / static_cast<double>(dimensions))));
  size_t cells = 1;
  for (uint32_t d = 0; d < dimensions; ++d) cells *= side;
  for (size_t i = 0; i < cells; ++i) {
    Box box{};
    size_t left = i;
    for (uint32_t d = 0; d < dimensions; ++d, left /= side) {
      box.offset[d] = static_cast<int64_t>(5 * (left % side));
      box.size[d] = 5;
    }
    family.boxes.push_back(box);
  }
  return family;
}

// Rods along each of three axes that do not touch: no plane separates many of them.
Family Rods(size_t count) {
  Family family{"rods", 3, {}};
  const auto side = static_cast<int64_t>(std::sqrt(static_cast<double>(count) / 3));
  for (size_t axis = 0; axis < 3; ++axis) {
    for (int64_t i = 0; i < side; ++i) {
      for (int64_t j = 0; j < side; ++j) {
        Box rod{};
        rod.size[axis] = 2 * side;
        rod.offset[(axis + 1) % 3] = 2 * i;
        rod.offset[(axis + 2) % 3] = 2 * j + 1;
        rod.size[(axis + 1) % 3] = rod.size[(axis + 2) % 3] = 1;
        family.boxes.push_back(rod);
      }
    }
  }
  return family;
}

// Boxes that are long in every dimension but one, in which each has its own place. A sweep along
// another dimension would hold most of them at once.
Family Sheets(size_t count, uint32_t dimensions, Random& random) {
  Family family{"sheets", dimensions, Boxes(count)};
  for (size_t i = 0; i < count; ++i) {
    for (uint32_t d = 0; d < dimensions; ++d) {
      family.boxes[i].offset[d] = static_cast<int64_t>(random.Below(count));
      family.boxes[i].size[d] = static_cast<int64_t>(count + random.Below(count));
    }
    const auto d = dimensions - 1;
    family.boxes[i].offset[d] = static_cast<int64_t>(i);
    family.boxes[i].size[d] = 1;
  }
  Shuffle(family.boxes, random);
  return family;
}

std::vector<Family> Families(size_t count) {
  Random random(5);
  std::vector<Family> families = {Rows(count), RowsOfMany(count, random), Rods(count)};
  for (uint32_t dimensions : {1, 2, 3, 4, 8}) {
    families.push_back(Grid(count, dimensions));
    families.push_back(Sheets(count, dimensions, random));
    families.push_back(
        {"divided", dimensions, Divided(count, dimensions, int64_t{1} << 40, random)});
  }
  return families;
}

// If the search compared pairs, with 16 times as many boxes each box would be compared 16 times as
// often.
TEST(Overlap, OfManyBoxesIsNotLookedForInPairs) {
  constexpr size_t few = 2000;  // with fewer boxes the growth does not show
  const std::vector<Family> small = Families(few), large = Families(16 * few);
  for (size_t i = 0; i < small.size(); ++i) {
    const auto looks = [](const Family& family) {
      const OverlapSearch search = FindOverlap(family.boxes, family.dimensions);
      EXPECT_FALSE(search.found.has_value()) << family.name;
      return static_cast<double>(search.looked_at) / static_cast<double>(family.boxes.size());
    };
    const double before = looks(small[i]), after = looks(large[i]);
    const std::string what = small[i].name + " in " + std::to_string(small[i].dimensions) +
                             " dimensions: " + std::to_string(before) + " looks for each, then " +
                             std::to_string(after);
    EXPECT_LT(after, 8 * before) << what;
    // These are the shapes that sharding makes.
    if (small[i].name != "divided" && small[i].dimensions <= 3) {
      EXPECT_LT(after, 16 * std::log2(16 * few)) << what;
    }
  }
}

// The boxes of one family are searched in another one of the same size. If a hull is separate, one
// comparison is enough for all boxes in it.
TEST(BoxTree, IsNotLookedThroughFromEndToEnd) {
  const auto few = static_cast<size_t>(std::max(200, Scaled(500)));
  const std::vector<Family> small = Families(few), large = Families(16 * few);
  for (size_t i = 0; i < small.size(); ++i) {
    const auto looks = [](const Family& family) {
      BoxTree tree(family.boxes, family.dimensions);
      uint64_t found = 0;
      for (const Box& box : family.boxes)
        tree.ForEachOverlapping(box, [&](uint32_t) { found += 1; });
      EXPECT_EQ(found, family.boxes.size()) << family.name;  // each meets itself alone
      return static_cast<double>(tree.looked_at()) / static_cast<double>(family.boxes.size());
    };
    const double before = looks(small[i]), after = looks(large[i]);
    // Sixteen times as many boxes: looking at all of them would cost sixteen times as much for
    // each.
    EXPECT_LT(after, 12 * before) << small[i].name << " in " << small[i].dimensions
                                  << " dimensions: " << before << " looks for each, then " << after;
  }
}

}  // namespace
}  // namespace hybridopt
