// The requests to the kernel for a context's memory, on machines that a fake libnuma simulates.
#include "memory/numa_policy.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <string>
#include <vector>

#include "../../numa/fake_numa_library.h"

namespace hybridopt {
namespace {

using Ids = std::vector<uint32_t>;

NumaPolicyAsked Near(std::vector<PageWish::Share> threads) {
  return {OFFLOAD_NUMA_NEAR, std::move(threads), {}};
}
NumaPolicyAsked Interleaved(Ids nodes) {
  return {OFFLOAD_NUMA_INTERLEAVED, {{0, 1}}, std::move(nodes)};
}

// Where 1,000 bytes will lie; the last entry is what is not known.
std::vector<uint64_t> Planned(const PageWish& wish, size_t nodes) {
  NodeBytes sum;
  wish.AddPlanned(1000, &sum);
  std::vector<uint64_t> planned(sum.on_node.begin(), sum.on_node.begin() + nodes);
  uint64_t known = 0;
  for (uint64_t bytes : sum.on_node) known += bytes;
  planned.push_back(1000 - known);
  return planned;
}

TEST(NumaPolicyTest, ThreadsOnOneNodeHaveTheirMemoryThere) {
  const FakeNuma fake(0b1111);
  const NumaPolicy wishes = ChooseNumaPolicy(Near({{2, 8}}), fake.result());
  EXPECT_TRUE(wishes.placed());
  EXPECT_EQ(wishes.policy, OFFLOAD_NUMA_NEAR);
  EXPECT_EQ(wishes.note, "");
  for (const PageWish* wish : {&wishes.state, &wishes.pinned}) {
    EXPECT_EQ(wish->numa, &fake.numa());
    EXPECT_EQ(wish->policy, PagePolicy::kNode);
    EXPECT_EQ(wish->nodes, Ids{2});
    EXPECT_TRUE(wish->huge_pages);
    EXPECT_EQ(Planned(*wish, 4), (std::vector<uint64_t>{0, 0, 1000, 0, 0}));
  }
}

TEST(NumaPolicyTest, ThreadsOnSeveralNodesTouchTheirStateAndSharePinnedMemory) {
  const FakeNuma fake(0b1111);
  const NumaPolicy wishes = ChooseNumaPolicy(Near({{0, 3}, {1, 1}}), fake.result());
  EXPECT_EQ(wishes.state.policy, PagePolicy::kToucher);
  EXPECT_EQ(wishes.state.nodes, Ids{});
  EXPECT_EQ(Planned(wishes.state, 2), (std::vector<uint64_t>{750, 250, 0}));
  EXPECT_EQ(wishes.pinned.policy, PagePolicy::kInterleaved);
  EXPECT_EQ(wishes.pinned.nodes, (Ids{0, 1}));
  EXPECT_EQ(Planned(wishes.pinned, 2), (std::vector<uint64_t>{500, 500, 0}));
}

TEST(NumaPolicyTest, HugePagesAreLeftOutWhereNodesShareChunks) {
  const FakeNuma fake(0b11);
  for (const bool shares_chunks : {false, true}) {
    NumaPolicyAsked one = Near({{0, 2}}), two = Near({{0, 1}, {1, 1}}),
                    spread = Interleaved({0, 1});
    spread.threads = two.threads;
    one.shares_chunks = two.shares_chunks = spread.shares_chunks = shares_chunks;
    EXPECT_TRUE(ChooseNumaPolicy(one, fake.result()).state.huge_pages);
    EXPECT_EQ(ChooseNumaPolicy(two, fake.result()).state.huge_pages, !shares_chunks);
    EXPECT_TRUE(ChooseNumaPolicy(two, fake.result()).pinned.huge_pages);
    EXPECT_TRUE(ChooseNumaPolicy(spread, fake.result()).state.huge_pages);
  }
}

TEST(NumaPolicyTest, MemoryOfAThreadWhoseNodeHasNoneLiesSomewhere) {
  const FakeNuma fake(0b011);
  const NumaPolicy wishes = ChooseNumaPolicy(Near({{0, 1}, {1, 1}, {2, 2}}), fake.result());
  EXPECT_EQ(wishes.state.policy, PagePolicy::kToucher);
  EXPECT_EQ(Planned(wishes.state, 3), (std::vector<uint64_t>{250, 250, 0, 500}));
  EXPECT_EQ(wishes.pinned.nodes, (Ids{0, 1}));
  const NumaPolicy none = ChooseNumaPolicy(Near({{2, 2}}), fake.result());
  EXPECT_FALSE(none.placed());
  EXPECT_EQ(none.note,
            "memory is not placed: the nodes of the update threads have no memory that this "
            "process may use; ");
}

TEST(NumaPolicyTest, InterleavedMemoryGoesToAllNodesAskedForThatHaveSome) {
  const FakeNuma fake(0b110111);
  const NumaPolicy wishes = ChooseNumaPolicy(Interleaved({0, 2, 3, 4}), fake.result());
  EXPECT_EQ(wishes.policy, OFFLOAD_NUMA_INTERLEAVED);
  EXPECT_EQ(wishes.note, "");
  for (const PageWish* wish : {&wishes.state, &wishes.pinned}) {
    EXPECT_EQ(wish->policy, PagePolicy::kInterleaved);
    EXPECT_EQ(wish->nodes, (Ids{0, 2, 4}));
    EXPECT_EQ(Planned(*wish, 5), (std::vector<uint64_t>{333, 0, 333, 0, 334, 0}));
  }
}

// The choice falls back to memory near the threads, and from there further; each fall-back has a
// note.
TEST(NumaPolicyTest, WhatCannotBeInterleavedLiesNearTheThreads) {
  const FakeNuma fake(0b0101);
  const NumaPolicy wishes = ChooseNumaPolicy(Interleaved({0, 1, 3}), fake.result());
  EXPECT_EQ(wishes.policy, OFFLOAD_NUMA_NEAR);
  EXPECT_EQ(wishes.state.policy, PagePolicy::kNode);
  EXPECT_EQ(wishes.state.nodes, Ids{0});
  EXPECT_EQ(wishes.note,
            "memory is not interleaved: that takes the memory of two nodes or more, and this "
            "process may use that of 1 (numa_nodes counted); ");
}

TEST(NumaPolicyTest, ARefusalOfMbindIsTold) {
  const FakeNuma fake(0b11);
  fake.machine().mbind_error = EPERM;
  const NumaPolicy wishes = ChooseNumaPolicy(Interleaved({0, 1}), fake.result());
  EXPECT_FALSE(wishes.placed());
  EXPECT_EQ(wishes.policy, OFFLOAD_NUMA_NEAR);
  EXPECT_EQ(wishes.note,
            "memory is not interleaved: mbind was refused (Operation not permitted); "
            "memory is not placed: mbind was refused (Operation not permitted); ");
  for (const PageWish* wish : {&wishes.state, &wishes.pinned}) {
    EXPECT_FALSE(wish->policy.has_value());
    EXPECT_EQ(wish->numa, &fake.numa()) << "where pages lie can still be asked";
    EXPECT_EQ(Planned(*wish, 2), (std::vector<uint64_t>{0, 0, 1000}));
  }
}

TEST(NumaPolicyTest, WithoutLibnumaTheKernelIsToldNothing) {
  const Result<Numa> none = Status::Error(OFFLOAD_UNSUPPORTED, "there is none");
  const NumaPolicy wishes = ChooseNumaPolicy(Near({{0, 1}}), none);
  EXPECT_FALSE(wishes.placed());
  EXPECT_EQ(wishes.state.numa, nullptr);
  EXPECT_EQ(wishes.note, "memory is not placed: there is none; ");
  EXPECT_EQ(ChooseNumaPolicy(Interleaved({0, 1}), none).note,
            "memory is not interleaved: there is none; memory is not placed: there is none; ");
}

TEST(NumaPolicyTest, PlannedBytesAddUpToTheLastOne) {
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, uint64_t{12345678901}, UINT64_MAX / 2}) {
    PageWish wish;
    wish.shares = {{0, 3}, {1, 1}, {5, 3}, {63, 7}};
    NodeBytes sum;
    wish.AddPlanned(bytes, &sum);
    uint64_t known = 0;
    for (uint64_t part : sum.on_node) known += part;
    EXPECT_EQ(known, bytes);
  }
}

}  // namespace
}  // namespace hybridopt
