#include "runtime/work_pieces.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "runtime/worker_pool.h"

namespace hybridopt {
namespace {

using Ranges = std::vector<std::pair<uint64_t, uint64_t>>;

// The pieces that a worker gets while no other worker takes any.
Ranges TakeAll(WorkPieces& pieces, uint32_t worker) {
  Ranges taken;
  pieces.Take(worker, [&](const WorkRange& piece) { taken.emplace_back(piece.begin, piece.end); });
  return taken;
}

TEST(WorkPiecesTest, AWorkerTakesItsOwnPartFirstAndThenWhatTheOthersHaveLeft) {
  WorkPieces pieces(3);
  pieces.Reset({1000, 1300}, 10, 40);  // parts of 100
  EXPECT_EQ(TakeAll(pieces, 1), (Ranges{{1100, 1140},
                                        {1140, 1180},
                                        {1180, 1200},
                                        {1200, 1240},
                                        {1240, 1280},
                                        {1280, 1300},
                                        {1000, 1040},
                                        {1040, 1080},
                                        {1080, 1100}}));
  EXPECT_EQ(TakeAll(pieces, 0), Ranges{});
  pieces.Reset({0, 300}, 10, 40);
  EXPECT_EQ(TakeAll(pieces, 2).size(), 9u);  // a new job is a new start
}

TEST(WorkPiecesTest, NothingToDoIsNothingToTake) {
  WorkPieces pieces(2);
  EXPECT_EQ(TakeAll(pieces, 0), Ranges{});
  pieces.Reset({5, 5}, 64, 128);
  EXPECT_EQ(TakeAll(pieces, 1), Ranges{});
  pieces.Reset({0, 1}, 64, 128);
  EXPECT_EQ(TakeAll(pieces, 1), (Ranges{{0, 1}}));
}

// Worker 0 is held in its first piece: all the rest must be done by others.
TEST(WorkPiecesTest, NobodyWaitsForAWorkerThatIsHeldUp) {
  constexpr uint64_t kCount = 3000;
  WorkerPool pool(3);
  WorkPieces pieces(3);
  pieces.Reset({0, kCount}, 1, 10);
  std::atomic<bool> begun{false};  // worker 0 has its first piece
  std::atomic<uint64_t> others{0};
  std::vector<uint8_t> times(kCount);  // plain: no two workers may take the same piece
  const Status status = pool.Run([&](uint32_t worker) {
    if (worker != 0) begun.wait(false);
    pieces.Take(worker, [&](const WorkRange& piece) {
      for (uint64_t i = piece.begin; i < piece.end; ++i) times[i] += 1;
      if (worker != 0) {
        others += piece.end - piece.begin;
        others.notify_all();
      } else {
        begun = true;
        begun.notify_all();
        for (uint64_t seen = others; seen < kCount - 10; seen = others) others.wait(seen);
      }
    });
  });
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(others, kCount - 10);
  EXPECT_EQ(times, std::vector<uint8_t>(kCount, 1));
}

TEST(WorkPiecesTest, EveryElementIsTakenOnce) {
  WorkerPool pool(4);
  WorkPieces pieces(4);
  for (uint64_t count : {1u, 63u, 64u, 65u, 1000u, 40000u}) {
    for (int round = 0; round < 20; ++round) {
      std::vector<uint8_t> times(count);
      pieces.Reset({0, count}, 64, 128);
      ASSERT_TRUE(pool.Run([&](uint32_t worker) {
                        pieces.Take(worker, [&](const WorkRange& piece) {
                          for (uint64_t i = piece.begin; i < piece.end; ++i) times[i] += 1;
                        });
                      })
                      .ok());
      ASSERT_EQ(times, std::vector<uint8_t>(count, 1)) << count;
    }
  }
}

}  // namespace
}  // namespace hybridopt
