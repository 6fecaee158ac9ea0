// The slabs of a stash: chains without fragments, neighbours in one run, pieces kept apart.
#include "stash/slab_pool.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

namespace hybridopt {
namespace {

constexpr uint64_t kSlabBytes = 4096;
constexpr uint32_t kPieceSlabs = 16;  // the simulated device pins 64 KiB at a time

struct Copy {
  std::byte* data;
  uint64_t offset;
  uint64_t bytes;
};

class SlabPoolTest : public testing::Test {
 protected:
  SlabPoolTest()
      : context_({}, std::move(CreateSimDevice({1 << 20, 1, 0}, ReferenceKernels()).value()),
                 ReferenceKernels()) {}

  SlabPool Pool(uint32_t slabs) {
    return std::move(SlabPool::Create(context_, {kSlabBytes, slabs}).value());
  }
  static std::vector<Copy> Copies(const SlabPool& pool, const SlabChain& chain, uint64_t bytes) {
    std::vector<Copy> runs;
    EXPECT_TRUE(pool.ForEachRun(chain, bytes,
                                [&](std::byte* data, uint64_t offset, uint64_t run) -> Status {
                                  runs.push_back({data, offset, run});
                                  return {};
                                })
                    .ok());
    return runs;
  }

  Context context_;
};

TEST_F(SlabPoolTest, NeighboursAreOneRunAndPiecesAreNot) {
  SlabPool pool = Pool(2 * kPieceSlabs + 4);
  const SlabChain all = pool.Take(2 * kPieceSlabs + 4);
  EXPECT_EQ(pool.free_slabs(), 0u);
  const uint64_t bytes = all.count * kSlabBytes - 5;
  const std::vector<Copy> runs = Copies(pool, all, bytes);
  ASSERT_EQ(runs.size(), 3u);
  uint64_t offset = 0;
  for (const Copy& run : runs) {
    EXPECT_EQ(run.offset, offset);
    offset += run.bytes;
    for (const uint64_t at : {uint64_t{0}, run.bytes - 1})
      EXPECT_EQ(run.data[at], std::byte{0xff}) << "fresh slabs are poisoned";
  }
  EXPECT_EQ(runs[0].bytes, kPieceSlabs * kSlabBytes);
  EXPECT_EQ(runs[1].bytes, kPieceSlabs * kSlabBytes);
  EXPECT_EQ(runs[2].bytes, 4 * kSlabBytes - 5);
  EXPECT_EQ(Copies(pool, all, 1).size(), 1u);
  EXPECT_EQ(Copies(pool, all, kSlabBytes)[0].bytes, kSlabBytes);
  EXPECT_EQ(Copies(pool, all, kSlabBytes + 1)[0].bytes, kSlabBytes + 1);
  pool.Give(all);
}

// Taken in one order and given back in the opposite one: the next round finds neighbours again.
TEST_F(SlabPoolTest, TheOppositeOrderKeepsNeighboursTogether) {
  SlabPool pool = Pool(kPieceSlabs);
  for (int round = 0; round < 3; ++round) {
    std::vector<SlabChain> chains;
    for (const uint32_t count : {3, 1, 5, 2, 5}) {
      chains.push_back(pool.Take(count));
      EXPECT_EQ(Copies(pool, chains.back(), count * kSlabBytes).size(), 1u);
    }
    EXPECT_EQ(pool.free_slabs(), 0u);
    for (; !chains.empty(); chains.pop_back()) pool.Give(chains.back());
    EXPECT_EQ(pool.free_slabs(), kPieceSlabs);
  }
}

// In any order of frees, all free slabs can be taken, and no slab is given out twice.
TEST_F(SlabPoolTest, AnyOrderLeavesNoFragments) {
  SlabPool pool = Pool(kPieceSlabs + 3);
  std::vector<SlabChain> chains;
  for (uint32_t i = 0; i < 6; ++i) chains.push_back(pool.Take(3));
  for (const size_t index : {4, 0, 2}) pool.Give(chains[index]);
  EXPECT_EQ(pool.free_slabs(), 10u);
  std::vector<SlabChain> held = {chains[1], chains[3], chains[5], pool.Take(10)};
  EXPECT_EQ(pool.free_slabs(), 0u);
  std::set<std::byte*> seen;
  for (const SlabChain& chain : held)
    for (const Copy& run : Copies(pool, chain, chain.count * kSlabBytes))
      for (uint64_t at = 0; at < run.bytes; at += kSlabBytes)
        EXPECT_TRUE(seen.insert(run.data + at).second) << "a slab of two chains";
  EXPECT_EQ(seen.size(), kPieceSlabs + 3);
}

TEST_F(SlabPoolTest, TheFirstFailureOfAVisitEndsTheRuns) {
  SlabPool pool = Pool(2 * kPieceSlabs);
  const SlabChain all = pool.Take(2 * kPieceSlabs);
  int visits = 0;
  const Status status =
      pool.ForEachRun(all, all.count * kSlabBytes, [&](std::byte*, uint64_t, uint64_t) -> Status {
        visits += 1;
        return Status::Error(OFFLOAD_DEVICE_FAILED, "first");
      });
  EXPECT_EQ(status.code(), OFFLOAD_DEVICE_FAILED);
  EXPECT_EQ(visits, 1);
}

TEST_F(SlabPoolTest, TakesPinnedMemoryOfTheContextAndGivesItBack) {
  const uint64_t all = context_.PinnedBytesLeft();
  {
    SlabPool pool = Pool(5);
    EXPECT_EQ(pool.pinned_bytes(), 5 * kSlabBytes);
    EXPECT_EQ(context_.Info().value().pinned_bytes, 5 * kSlabBytes);
    SlabPool moved = std::move(pool);
    EXPECT_EQ(context_.Info().value().pinned_bytes, 5 * kSlabBytes);
  }
  EXPECT_EQ(context_.Info().value().pinned_bytes, 0u);
  EXPECT_EQ(context_.PinnedBytesLeft(), all);
}

}  // namespace
}  // namespace hybridopt
