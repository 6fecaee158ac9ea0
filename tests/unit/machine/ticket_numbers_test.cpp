// Numbers for tickets: none is given out twice, and each owner recognizes its own.
#include "machine/ticket_numbers.h"

#include <gtest/gtest.h>

#include <set>
#include <thread>
#include <vector>

namespace hybridopt {
namespace {

constexpr uint64_t kBlock = TicketNumbers::kBlockCounts;

TEST(TicketNumbers, OwnersThatTakeBlocksByTurnsKnowTheirOwnNumbersAlone) {
  TicketSupply supply;
  TicketNumbers owners[] = {TicketNumbers(supply), TicketNumbers(supply)};
  const uint64_t counts[] = {0, 1, kBlock - 1, kBlock, kBlock + 1, 3 * kBlock - 1};
  for (uint64_t count = 0; count < 3 * kBlock; count += kBlock)
    for (TicketNumbers& owner : owners) ASSERT_TRUE(owner.Reserve(count).ok());
  std::set<uint64_t> numbers;
  for (const uint64_t count : counts) {
    for (TicketNumbers& owner : owners) {
      const uint64_t number = owner.NumberOf(count);
      EXPECT_TRUE(numbers.insert(number).second) << number;
      EXPECT_GT(number, 0u);
      EXPECT_LT(number, uint64_t{1} << TicketNumbers::kNumberBits);
      EXPECT_EQ(owner.CountOf(number), count);
      EXPECT_EQ(owners[&owner == owners ? 1 : 0].CountOf(number), std::nullopt);
    }
  }
  for (const uint64_t foreign : {uint64_t{0}, kBlock - 1, 7 * kBlock, UINT64_MAX})
    EXPECT_EQ(owners[0].CountOf(foreign), std::nullopt) << foreign;
}

TEST(TicketNumbers, LaterCountsHaveHigherNumbers) {
  TicketSupply supply;
  TicketNumbers one(supply), other(supply);
  uint64_t last = 0;
  for (uint64_t count = 0; count < 4 * kBlock; ++count) {
    ASSERT_TRUE(one.Reserve(count).ok());
    if (count % kBlock == 0) {
      ASSERT_TRUE(other.Reserve(count).ok());
    }
    ASSERT_GT(one.NumberOf(count), last);
    last = one.NumberOf(count);
  }
}

TEST(TicketNumbers, AreRefusedWhenTheyAreUsedUp) {
  TicketSupply supply(2);
  TicketNumbers one(supply), other(supply);
  ASSERT_TRUE(one.Reserve(0).ok());
  ASSERT_TRUE(other.Reserve(0).ok());
  for (int again = 0; again < 2; ++again) {
    const Status refused = one.Reserve(kBlock);
    EXPECT_EQ(refused.code(), OFFLOAD_INVALID_STATE);
    EXPECT_EQ(
        refused.message(),
        "this process has used up all numbers for tickets: 2 optimizers and stashes, or 65536 "
        "tickets of each; start a new process");
  }
  EXPECT_TRUE(one.Reserve(kBlock - 1).ok());
  EXPECT_EQ(one.CountOf(one.NumberOf(kBlock - 1)), kBlock - 1);
}

TEST(TicketNumbers, ThreadsTakeNoBlockTwice) {
  constexpr uint64_t kEach = 1000;
  TicketSupply supply(4 * kEach);
  std::vector<uint64_t> taken[4];
  std::vector<std::thread> threads;
  for (auto& own : taken)
    threads.emplace_back([&supply, &own] {
      for (uint64_t i = 0; i < kEach; ++i) own.push_back(supply.Take().value());
    });
  for (std::thread& thread : threads) thread.join();
  std::set<uint64_t> all;
  for (const auto& own : taken) all.insert(own.begin(), own.end());
  EXPECT_EQ(all.size(), 4 * kEach);
  EXPECT_EQ(*all.begin(), 1u);
  EXPECT_EQ(*all.rbegin(), 4 * kEach);
  EXPECT_FALSE(supply.Take().ok());
}

}  // namespace
}  // namespace hybridopt
