// Cut matrices: homes, what ranks tell each other about their parts, and who sends.
#include "exchange/cut_matrix.h"

#include <gtest/gtest.h>

namespace hybridopt {
namespace {

using Sizes = std::array<int64_t, 2>;

// A matrix of which this rank has some rows.
struct Source {
  Source(Sizes shape, int64_t begin, int64_t end)
      : shape(shape), offsets{begin, 0}, extents{end - begin, shape[1]} {}

  MatrixInput Input() const {
    MatrixInput input{};
    input.matrix.dtype = input.matrix.grad_dtype = OFFLOAD_FP32;
    input.matrix.name = "weight";
    input.shard.emplace();
    input.shard->dimensions = 2;
    input.shard->box_count = 1;
    input.shard->global_shape = shape.data();
    input.shard->box_offsets = offsets.data();
    input.shard->box_extents = extents.data();
    return input;
  }

  Sizes shape, offsets, extents;
};

std::vector<CutMatrix> Read(const Source& source, int32_t rank, int32_t world) {
  const MatrixInput input = source.Input();
  return std::move(ReadMatrices({&input, 1}, rank, world).value());
}

// What rank 0 knows when all ranks have told their rows.
std::vector<CutMatrix> Told(Sizes shape, const std::vector<std::array<int64_t, 2>>& rows) {
  const auto world = static_cast<int32_t>(rows.size());
  std::vector<CutMatrix> matrices = Read({shape, rows[0][0], rows[0][1]}, 0, world);
  for (int32_t rank = 1; rank < world; ++rank) {
    const auto& [begin, end] = rows[static_cast<size_t>(rank)];
    const std::vector<CutMatrix> others = Read({shape, begin, end}, rank, world);
    EXPECT_TRUE(ReadParts(matrices, 0, rank, PartsAsWords(others, rank)).ok());
  }
  return matrices;
}

TEST(CutMatrix, NumbersAboveThirtyTwoBitsArriveWhole) {
  constexpr int64_t kRows = (int64_t{3} << 33) + 5, kCut = (int64_t{1} << 33) + 1;
  std::vector<CutMatrix> matrices = Told({kRows, 7}, {{0, kCut}, {kCut, kRows}});
  const Shard& part = matrices[0].of(1);
  ASSERT_EQ(part.boxes.size(), 1u);
  EXPECT_EQ(part.boxes[0].offset[0], kCut);
  EXPECT_EQ(part.boxes[0].size[0], kRows - kCut);
  EXPECT_EQ(part.range_count, static_cast<uint64_t>(kRows - kCut) * 7);
  EXPECT_TRUE(ChooseSenders(matrices, 0).ok());
}

TEST(CutMatrix, ARangeIsToldAsBoxes) {
  const Source source({5, 4}, 0, 5);
  MatrixInput input = source.Input();
  input.shard->flags = OFFLOAD_SHARD_RANGE;
  input.shard->range_begin = 2;
  input.shard->range_count = 9;
  const std::vector<CutMatrix> sent = std::move(ReadMatrices({&input, 1}, 1, 2).value());
  std::vector<CutMatrix> matrices = Read({{5, 4}, 0, 0}, 0, 2);
  ASSERT_TRUE(ReadParts(matrices, 0, 1, PartsAsWords(sent, 1)).ok());
  const Shard& part = matrices[0].of(1);
  EXPECT_EQ(part.range_begin, 0u);
  ASSERT_EQ(part.range_count, 9u);
  for (uint64_t i = 0; i < 9; ++i) EXPECT_EQ(part.GlobalIndex(i), 2 + i);
}

// The home is rank 0. Of ranks with the same rows the home sends, or else the first of these ranks.
TEST(CutMatrix, OneOfTheRanksWithTheSamePartSends) {
  std::vector<CutMatrix> matrices =
      Told({9, 3}, {{4, 6}, {0, 4}, {6, 9}, {0, 4}, {4, 6}, {9, 9}, {6, 9}});
  ASSERT_TRUE(ChooseSenders(matrices, 0).ok());
  EXPECT_EQ(matrices[0].home, 0);
  EXPECT_EQ(matrices[0].senders, (std::vector<int32_t>{0, 1, 2, 1, 0, -1, 2}));
}

TEST(CutMatrix, TheHomeSendsEvenIfAnotherOneComesBefore) {
  std::vector<CutMatrix> matrices = Told({4, 3}, {{0, 4}, {0, 4}, {0, 4}});
  matrices[0].home = 2;
  ASSERT_TRUE(ChooseSenders(matrices, 0).ok());
  EXPECT_EQ(matrices[0].senders, (std::vector<int32_t>{2, 2, 2}));
}

}  // namespace
}  // namespace hybridopt
