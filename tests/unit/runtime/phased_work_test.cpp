// Work in phases that threads share.
#include "runtime/phased_work.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

namespace hybridopt {
namespace {

// Each phase adds what the phase before has made, so that a piece that begins too early, runs twice
// or is left out gives another sum.
struct Sums {
  explicit Sums(std::vector<uint64_t> phases) : pieces(std::move(phases)) {
    made.resize(pieces.size());
    for (size_t i = 0; i < pieces.size(); ++i) made[i].resize(pieces[i]);
    work.Begin(pieces.empty() ? 0 : pieces[0]);
  }

  void Take() {
    work.Take(
        [&](uint64_t piece) {
          uint64_t sum = piece + 1;
          if (phase > 0)
            for (const uint64_t before : made[phase - 1]) sum += before;
          made[phase][piece] += sum;
        },
        [&] { return ++phase < pieces.size() ? pieces[phase] : 0; });
  }

  std::vector<uint64_t> pieces;
  std::vector<std::vector<uint64_t>> made;
  size_t phase = 0;
  PhasedWork work;
};

TEST(PhasedWork, APhaseBeginsWhenAllPiecesOfThePhaseBeforeAreDone) {
  const std::vector<uint64_t> phases = {3, 1, 7, 2, 1, 5};
  Sums alone(phases);
  alone.Take();
  EXPECT_EQ(alone.phase, phases.size());
  for (int round = 0; round < 200; ++round) {
    Sums shared(phases);
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) threads.emplace_back([&] { shared.Take(); });
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(shared.made, alone.made);
  }
}

// The first piece to be taken ends last. It gives the next phase time to begin too early.
TEST(PhasedWork, AllPiecesHaveBeenTakenButOneIsNotDone) {
  std::atomic<bool> other_done = false, next_began = false;
  bool began_early = false;
  uint32_t phase = 0;
  PhasedWork work;
  work.Begin(2);
  const auto take = [&] {
    work.Take(
        [&](uint64_t piece) {
          if (phase == 1) return next_began.store(true);
          if (piece == 0) return other_done.store(true);
          while (!other_done) std::this_thread::yield();
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          began_early = next_began;
        },
        [&]() -> uint64_t { return ++phase == 1 ? 1 : 0; });
  };
  std::thread other(take);
  take();
  other.join();
  EXPECT_FALSE(began_early);
  EXPECT_TRUE(next_began);
  EXPECT_EQ(phase, 2u);
}

TEST(PhasedWork, WithoutPiecesThereIsNothingToDo) {
  Sums none({});
  none.Take();
  EXPECT_EQ(none.phase, 0u);
}

TEST(PhasedWork, WorkCanBeginAgain) {
  Sums sums({2, 2});
  sums.Take();
  const auto first = sums.made;
  for (auto& made : sums.made) std::fill(made.begin(), made.end(), 0);
  sums.phase = 0;
  sums.work.Begin(2);
  sums.Take();
  EXPECT_EQ(sums.made, first);
}

}  // namespace
}  // namespace hybridopt
