// Matrices cut between ranks, which an exchange brings together on their homes: after each step of
// Muon every part on every rank has the bits of the run of one rank with the whole matrices. In
// worlds of 1, 2 and 4; on the host device, and on the simulated one with messages through host
// memory and with messages between devices.
#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "../temporary_directory.h"
#include "../thread_comm.h"
#include "cut_matrices.h"

namespace hybridopt {
namespace {

constexpr size_t kSteps = 4;

// ---------------------------------------------------------------------------------------- cuts --

using Shape = std::vector<int64_t>;
using Pieces = std::vector<Piece>;

Piece Boxed(const Shape& shape, const std::vector<Interval>& intervals) {
  Piece piece;
  piece.shape = shape;
  piece.box_count = 1;
  for (const auto& [begin, end] : intervals) {
    piece.offsets.push_back(begin);
    piece.extents.push_back(end - begin);
  }
  piece.count = ElementsOf(piece.extents);
  return piece;
}

std::vector<Interval> WholeOf(const Shape& shape) {
  std::vector<Interval> intervals;
  for (const int64_t extent : shape) intervals.push_back({0, extent});
  return intervals;
}

// As torch.chunk cuts: the last parts are short, or empty.
Interval Chunk(int64_t extent, int64_t part, int64_t parts) {
  const int64_t even = (extent + parts - 1) / parts;
  return {std::min(extent, part * even), std::min(extent, (part + 1) * even)};
}

// The piece of each rank: what `cut` leaves of the intervals of the whole.
template <typename Cut>
Pieces OfEachRank(const Shape& shape, int64_t world, Cut&& cut) {
  Pieces pieces;
  for (int64_t rank = 0; rank < world; ++rank) {
    std::vector<Interval> intervals = WholeOf(shape);
    cut(rank, intervals);
    pieces.push_back(Boxed(shape, intervals));
  }
  return pieces;
}

Pieces Along(size_t dimension, const Shape& shape, int64_t world) {
  return OfEachRank(shape, world, [&](int64_t rank, std::vector<Interval>& intervals) {
    intervals[dimension] = Chunk(shape[dimension], rank, world);
  });
}
Pieces Rows(const Shape& shape, int64_t world) { return Along(shape.size() - 2, shape, world); }
Pieces Cols(const Shape& shape, int64_t world) { return Along(shape.size() - 1, shape, world); }
Pieces Stacks(const Shape& shape, int64_t world) { return Along(0, shape, world); }

// The last two dimensions are cut, so that every rank has a block.
Pieces Blocks(const Shape& shape, int64_t world) {
  const int64_t across = world > 1 ? 2 : 1;
  return OfEachRank(shape, world, [&](int64_t rank, std::vector<Interval>& intervals) {
    intervals[shape.size() - 2] = Chunk(shape[shape.size() - 2], rank / across, world / across);
    intervals[shape.size() - 1] = Chunk(shape[shape.size() - 1], rank % across, across);
  });
}

// Rank 0 has one row, the last one the others.
Pieces Uneven(const Shape& shape, int64_t world) {
  return OfEachRank(shape, world, [&](int64_t rank, std::vector<Interval>& intervals) {
    intervals[0] = {rank == 0 ? 0 : 1, rank == world - 1 ? shape[0] : 1};
  });
}

Pieces OnTheLast(const Shape& shape, int64_t world) {
  return OfEachRank(shape, world, [&](int64_t rank, std::vector<Interval>& intervals) {
    if (rank != world - 1) intervals[0] = {0, 0};
  });
}

Pieces Everywhere(const Shape& shape, int64_t world) {
  return Pieces(static_cast<size_t>(world), Boxed(shape, WholeOf(shape)));
}

// Cut between pairs of ranks, the second of which has what the first has.
Pieces Pairs(const Shape& shape, int64_t world) {
  return OfEachRank(shape, world, [&](int64_t rank, std::vector<Interval>& intervals) {
    intervals[1] = Chunk(shape[1], rank / 2, (world + 1) / 2);
  });
}

// Ranges of growing length, which begin and end inside rows.
Pieces Ranges(const Shape& shape, int64_t world) {
  Pieces pieces;
  const auto of = static_cast<uint64_t>(world * world);
  const uint64_t count = ElementsOf(shape);
  for (uint64_t rank = 0; rank < static_cast<uint64_t>(world); ++rank) {
    Piece piece = Boxed(shape, WholeOf(shape));
    piece.ranged = true;
    piece.range_begin = count * rank * rank / of;
    piece.count = count * (rank + 1) * (rank + 1) / of - piece.range_begin;
    pieces.push_back(piece);
  }
  return pieces;
}

using Cutter = std::function<Pieces(const Shape&, int64_t world)>;

CutProblem Problem(int64_t world, uint64_t seed) {
  Random random(seed);
  const Cutter at_random = [&](const Shape& shape, int64_t ranks) {
    return RandomLayout(shape, static_cast<uint64_t>(ranks), random);
  };
  struct Row {
    const char* name;
    Shape shape;
    Cutter cut;
  };
  const std::vector<Row> rows = {{"rows", {13, 20}, Rows},
                                 {"cols", {16, 10}, Cols},
                                 {"blocks", {14, 9}, Blocks},
                                 {"uneven", {11, 6}, Uneven},
                                 {"empty", {12, 5}, OnTheLast},
                                 {"everywhere", {8, 9}, Everywhere},
                                 {"pairs", {9, 15}, Pairs},
                                 {"ranges", {10, 7}, Ranges},
                                 {"stacks", {5, 6, 4}, Stacks},
                                 {"rows of stacks", {3, 7, 5}, Rows},
                                 {"blocks of stacks", {2, 8, 6}, Blocks},
                                 {"ranges of stacks", {3, 5, 7}, Ranges},
                                 {"no rows", {0, 5}, Rows},
                                 {"one element", {1, 1}, Cols},
                                 {"random matrix", {18, 12}, at_random},
                                 {"random stack", {4, 6, 10}, at_random}};
  constexpr int32_t kTypes[][2] = {{OFFLOAD_BF16, OFFLOAD_FP32},
                                   {OFFLOAD_FP32, OFFLOAD_FP32},
                                   {OFFLOAD_BF16, OFFLOAD_BF16},
                                   {OFFLOAD_FP32, OFFLOAD_BF16}};
  CutProblem problem{{}, seed, kSteps - 2};
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto& types = kTypes[(i + seed) % 4];
    problem.tensors.push_back(
        {rows[i].name, rows[i].shape, types[0], types[1], rows[i].cut(rows[i].shape, world)});
  }
  return problem;
}

// --------------------------------------------------------------------------------------- worlds --

struct Way {
  const char* name;
  int32_t device;
  bool between_devices;
};

std::vector<Way> Ways() {
  if (TestsRunOnCuda()) return {{"CUDA through the host", OFFLOAD_DEVICE_CUDA, false}};
  return {{"host", OFFLOAD_DEVICE_HOST, false},
          {"sim through the host", OFFLOAD_DEVICE_SIM, false},
          {"sim between devices", OFFLOAD_DEVICE_SIM, true}};
}

class World {
 public:
  World(const CutProblem& problem, int32_t world, const Way& way)
      : exchanges_(world), steps_(world) {
    for (int32_t rank = 0; rank < world; ++rank) {
      ContextSetting setting;
      setting.device_kind = way.device;
      setting.seed = static_cast<uint64_t>(rank);
      setting.delay_ns_max = 20'000;
      ranks_.push_back(std::make_unique<CutRank>(problem, rank, setting));
      if (way.between_devices) exchanges_.ExchangeOnDevice(rank, ranks_.back()->context());
    }
  }

  CutRank& operator[](int32_t rank) { return *ranks_[static_cast<size_t>(rank)]; }
  int32_t world() const { return static_cast<int32_t>(ranks_.size()); }
  ThreadComm& exchanges() { return exchanges_; }

  // All ranks at the same time, each on a thread of its own.
  void ForAll(const std::function<void(CutRank&)>& work) {
    std::vector<std::thread> threads;
    for (auto& rank : ranks_) threads.emplace_back([&] { work(*rank); });
    for (std::thread& thread : threads) thread.join();
  }
  void Open() {
    std::vector<std::thread> threads;
    for (int32_t rank = 0; rank < world(); ++rank)
      threads.emplace_back(
          [this, rank] { (*this)[rank].Open(exchanges_.Table(rank), steps_.Table(rank)); });
    for (std::thread& thread : threads) thread.join();
  }
  std::string Difference(const std::vector<Bytes>& expected) const {
    for (const auto& rank : ranks_)
      if (std::string difference = rank->Difference(expected); !difference.empty())
        return difference;
    return "";
  }

 private:
  ThreadComm exchanges_, steps_;
  std::vector<std::unique_ptr<CutRank>> ranks_;
};

ContextSetting OnOneRank() {
  ContextSetting setting;
  setting.device_kind = DevicesUnderTest()[0];
  return setting;
}

TEST(ExchangeTest, PartsHaveTheBitsOfWholeMatrices) {
  uint64_t seed = 0;
  for (int round = 0; round < Scaled(3); ++round) {
    for (const int32_t ranks : {1, 2, 4}) {
      const CutProblem problem = Problem(ranks, ++seed);
      const auto expected = TrainWhole(problem, kSteps, OnOneRank());
      EXPECT_EQ(expected[problem.skipped], expected[problem.skipped + 1]);
      EXPECT_NE(expected[0], expected[1]);
      for (const Way& way : Ways()) {
        World world(problem, ranks, way);
        world.Open();
        for (size_t step = 0; step < kSteps; ++step) {
          world.ForAll([&](CutRank& rank) { rank.Step(step); });
          ASSERT_EQ(world.Difference(expected[step + 1]), "")
              << way.name << ", " << ranks << " ranks, seed " << seed << ", step " << step;
        }
      }
    }
  }
}

// Homes are given out as the Python package does it (with_homes in ranks/homes.py).
TEST(ExchangeTest, TheCostliestMatrixGoesToTheRankWithLeastWork) {
  const std::vector<Shape> shapes = {{10, 10}, {20, 30}, {30, 20}, {4, 5, 6}, {10, 100}, {20, 20}};
  // Work: 1000, 12000, 12000, 600, 10000, 8000
  const int32_t homes[] = {0, 0, 1, 1, 2, 2};
  CutProblem problem;
  for (const Shape& shape : shapes)
    problem.tensors.push_back({"matrix " + std::to_string(problem.tensors.size()), shape,
                               OFFLOAD_BF16, OFFLOAD_FP32, Rows(shape, 3)});
  World world(problem, 3, Ways().back());
  world.Open();
  for (size_t t = 0; t < shapes.size(); ++t)
    for (int32_t rank = 0; rank < 3; ++rank) EXPECT_EQ(world[rank].Home(t), homes[t]) << t;
}

// Homes save whole matrices, so one rank goes on where two have stopped.
TEST(ExchangeTest, ACheckpointOfTwoRanksIsLoadedByOne) {
  constexpr size_t kSaved = 1;
  const CutProblem problem = Problem(2, 77);
  const auto expected = TrainWhole(problem, kSteps, OnOneRank());
  const TemporaryDirectory directory;
  const std::string path = directory / "saved";
  {
    World world(problem, 2, Ways().back());
    world.Open();
    for (size_t step = 0; step < kSaved; ++step)
      world.ForAll([&](CutRank& rank) { rank.Step(step); });
    world.ForAll([&](CutRank& rank) { rank.Save(path); });
  }
  const TestContext context(OnOneRank());
  WholeMatrices matrices(context.handle(), nullptr, 0);
  for (size_t t = 0; t < problem.tensors.size(); ++t) {
    matrices.Add(problem.tensors[t]);
    matrices.param(t).Upload(problem.Params(t));
  }
  matrices.Commit();
  matrices.Load(path);
  for (size_t step = kSaved; step < kSteps; ++step) {
    for (size_t t = 0; t < problem.tensors.size(); ++t)
      matrices.grad(t).Upload(problem.Grads(t, step));
    matrices.Step();
  }
  for (size_t t = 0; t < problem.tensors.size(); ++t)
    EXPECT_EQ(matrices.param(t).Download(), expected[kSteps][t]) << problem.tensors[t].name;
}

// A rank that is the home of no matrix takes part all the same.
TEST(ExchangeTest, RanksWithoutAMatrixStepWithTheOthers) {
  CutProblem problem;
  problem.tensors.push_back({"alone", {9, 8}, OFFLOAD_BF16, OFFLOAD_FP32, Rows({9, 8}, 4)});
  const auto expected = TrainWhole(problem, kSteps, OnOneRank());
  World world(problem, 4, Ways().back());
  world.Open();
  EXPECT_EQ(world[0].homes(), 1u);
  EXPECT_EQ(world[3].homes(), 0u);
  for (size_t step = 0; step < kSteps; ++step)
    world.ForAll([&](CutRank& rank) { rank.Step(step); });
  EXPECT_EQ(world.Difference(expected[kSteps]), "");
}

}  // namespace
}  // namespace hybridopt
