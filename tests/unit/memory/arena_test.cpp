// Page placement is asked of the kernel itself (get_mempolicy), where it answers, and of a fake
// libnuma for machines of several nodes.
#include "memory/arena.h"

#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <vector>

#include "../../numa/fake_numa_library.h"

namespace hybridopt {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

// The policy of the range that holds `data`, and its nodes 0 to 63.
struct Policy {
  int mode;
  unsigned long nodes;
};
std::optional<Policy> PolicyOf(void* data) {
  int mode = -1;
  unsigned long mask[1024 / 64] = {};
  if (syscall(SYS_get_mempolicy, &mode, mask, 1024, data, MPOL_F_ADDR) != 0) return std::nullopt;
  return Policy{mode, mask[0]};
}

PageWish Wish(const Numa& numa, PagePolicy policy, std::vector<uint32_t> nodes) {
  PageWish wish;
  wish.numa = &numa;
  wish.policy = policy;
  wish.nodes = std::move(nodes);
  return wish;
}

void AddAll(const Arena& arena, NodeBytes* sum) { arena.AddNodeBytes(0, arena.bytes(), sum); }

// Discarded memory is zero when it comes back; other memory keeps its bits.
TEST(ArenaTest, ReservedAddressesAreBackedAndDiscarded) {
  Arena arena = std::move(Arena::Reserve(8 * kMiB).value());
  ASSERT_TRUE(arena.Back(kMiB, 8 * kMiB).ok());
  std::memset(arena.data() + kMiB, 0x5a, 7 * kMiB);
  arena.Discard(kMiB, 3 * kMiB);
  EXPECT_EQ(arena.data()[3 * kMiB], std::byte{0x5a});
  EXPECT_DEATH(arena.data()[2 * kMiB] = std::byte{1}, "");
  ASSERT_TRUE(arena.Back(2 * kMiB, 3 * kMiB).ok());
  EXPECT_EQ(arena.data()[2 * kMiB], std::byte{0});
  EXPECT_EQ(arena.data()[8 * kMiB - 1], std::byte{0x5a});
  // Pages that a range shares with other memory are kept.
  arena.Discard(2 * kMiB, 3 * kMiB + 10);
  EXPECT_EQ(arena.data()[3 * kMiB], std::byte{0x5a});
}

TEST(ArenaTest, OfNoBytesIsEmpty) {
  const FakeNuma fake(1);
  const Result<Arena> arena = Arena::Map(0, Wish(fake.numa(), PagePolicy::kNode, {0}));
  ASSERT_TRUE(arena.ok());
  EXPECT_EQ(arena.value().data(), nullptr);
  EXPECT_EQ(arena.value().bytes(), 0u);
  EXPECT_EQ(fake.machine().range_count, 0u);
  NodeBytes sum;
  AddAll(arena.value(), &sum);
  EXPECT_EQ(sum.on_node[0], 0u);
}

TEST(ArenaTest, MovesWithItsPages) {
  const FakeNuma fake(1);
  Arena first = std::move(Arena::Map(3 * kMiB, Wish(fake.numa(), PagePolicy::kNode, {0})).value());
  std::byte* const data = first.data();
  data[0] = std::byte{1};
  Arena second(std::move(first));
  EXPECT_EQ(second.data(), data);
  EXPECT_EQ(first.data(), nullptr);
  first = std::move(second);
  EXPECT_EQ(first.data(), data);
  EXPECT_EQ(first.bytes(), 3 * kMiB);
  NodeBytes sum;
  AddAll(second, &sum);
  EXPECT_EQ(sum.on_node[0], 0u);
  AddAll(first, &sum);
  EXPECT_EQ(sum.on_node[0], 3 * kMiB);
}

TEST(ArenaTest, HasNoPolicyWithoutAWish) {
  const Arena arena = std::move(Arena::Map(kMiB).value());
  const std::optional<Policy> policy = PolicyOf(arena.data());
  if (!policy.has_value()) GTEST_SKIP() << "get_mempolicy: " << std::strerror(errno);
  EXPECT_EQ(policy->mode, MPOL_DEFAULT);
}

// The system's own libnuma; skipped where it or the system refuses.
TEST(ArenaTest, TellsTheKernelItsWishAndNeverMore) {
  const Result<Numa> numa = Numa::Open();
  if (!numa.ok()) GTEST_SKIP() << numa.status().message();
  const uint32_t node = numa.value().MemoryNodes().at(0);
  ASSERT_LT(node, 64u);
  const struct {
    PagePolicy policy;
    std::vector<uint32_t> nodes;
    int mode;
    unsigned long mask;
  } cases[] = {
      {PagePolicy::kNode, {node}, MPOL_PREFERRED, 1ul << node},
      {PagePolicy::kInterleaved, {node}, MPOL_INTERLEAVE, 1ul << node},
      {PagePolicy::kToucher, {}, MPOL_PREFERRED, 0},
  };
  for (const auto& c : cases) {
    for (const uint64_t bytes : {uint64_t{1}, 5 * kMiB}) {
      const PageWish wish = Wish(numa.value(), c.policy, c.nodes);
      const Arena arena = std::move(Arena::Map(bytes, wish).value());
      if (!numa.value().SetPolicy(arena.data(), bytes, c.policy, c.nodes).ok())
        GTEST_SKIP() << "this system refuses mbind";
      for (std::byte* at : {arena.data(), arena.data() + bytes - 1}) {
        const std::optional<Policy> policy = PolicyOf(at);
        if (!policy.has_value()) GTEST_SKIP() << "get_mempolicy: " << std::strerror(errno);
        // Newer kernels report a preference for the toucher's node as "local".
        const bool local = c.policy == PagePolicy::kToucher && policy->mode == MPOL_LOCAL;
        EXPECT_TRUE(policy->mode == c.mode || local) << policy->mode;
        EXPECT_EQ(policy->nodes, c.mask);
      }
    }
  }
  EXPECT_EQ(PolicyOf(nullptr), std::nullopt);  // MPOL_F_ADDR of no address
}

TEST(ArenaTest, PagesAreUntouchedAndZero) {
  const Result<Numa> numa = Numa::Open();
  const uint64_t bytes = 4 * kMiB;
  PageWish wish;
  wish.numa = numa.ok() ? &numa.value() : nullptr;
  wish.huge_pages = false;
  const Arena arena = std::move(Arena::Map(bytes, wish).value());
  NodeBytes sum;
  AddAll(arena, &sum);
  for (const uint64_t on_node : sum.on_node) EXPECT_EQ(on_node, 0u);
  EXPECT_EQ(std::count(arena.data(), arena.data() + bytes, std::byte{0}),
            static_cast<int64_t>(bytes));
}

TEST(ArenaTest, AWishThatCannotBeMetCostsNothingElse) {
  const FakeNuma fake(1);
  fake.machine().mbind_error = ENOMEM;
  const Arena arena =
      std::move(Arena::Map(kMiB, Wish(fake.numa(), PagePolicy::kNode, {0})).value());
  std::memset(arena.data(), 7, kMiB);
  EXPECT_EQ(std::count(arena.data(), arena.data() + kMiB, std::byte{7}),
            static_cast<int64_t>(kMiB));
}

// --- Where pages lie ---

TEST(ArenaNodeBytes, OfASmallArenaCountEveryPage) {
  const FakeNuma fake(0b1101);
  const uint64_t page = system::PageBytes();
  const Arena arena = std::move(
      Arena::Map(7 * page + 1, Wish(fake.numa(), PagePolicy::kInterleaved, {0, 2, 3})).value());
  NodeBytes sum;
  AddAll(arena, &sum);
  EXPECT_EQ(sum.on_node[0], 3 * page);
  EXPECT_EQ(sum.on_node[1], 0u);
  EXPECT_EQ(sum.on_node[2], 2 * page + 1);  // the last page, of which one byte is ours
  EXPECT_EQ(sum.on_node[3], 2 * page);
}

TEST(ArenaNodeBytes, OfARangeCountItsBytesOnly) {
  const FakeNuma fake(0b11);
  const uint64_t page = system::PageBytes();
  const Arena arena = std::move(
      Arena::Reserve(8 * page, Wish(fake.numa(), PagePolicy::kInterleaved, {0, 1})).value());
  NodeBytes sum;
  arena.AddNodeBytes(2 * page + 100, 4 * page + 10, &sum);
  EXPECT_EQ(sum.on_node[0], page - 100 + 10);
  EXPECT_EQ(sum.on_node[1], page);
  arena.AddNodeBytes(5 * page + 1, 5 * page + 1, &sum);
  EXPECT_EQ(sum.on_node[1], page);
}

// A sample at the distance of the interleaving would find all pages on one node.
TEST(ArenaNodeBytes, OfALargeArenaAreASample) {
  const FakeNuma fake(0b1111);
  for (const uint64_t factor : {2, 4, 31}) {
    const uint64_t bytes = Arena::kSampledPages * system::PageBytes() * factor + 12345;
    const Arena arena = std::move(
        Arena::Map(bytes, Wish(fake.numa(), PagePolicy::kInterleaved, {0, 1, 2, 3})).value());
    NodeBytes sum;
    AddAll(arena, &sum);
    uint64_t all = 0;
    for (uint32_t node = 0; node < 4; ++node) {
      EXPECT_NEAR(static_cast<double>(sum.on_node[node]) / static_cast<double>(bytes), 0.25, 0.03);
      all += sum.on_node[node];
    }
    EXPECT_EQ(all, bytes);
  }
}

TEST(ArenaNodeBytes, OfANodeAboveTheArrayAreLeftOut) {
  const FakeNuma fake(1);
  const Arena arena =
      std::move(Arena::Map(kMiB, Wish(fake.numa(), PagePolicy::kToucher, {})).value());
  fake.machine().toucher = 64;
  NodeBytes sum;
  AddAll(arena, &sum);
  for (const uint64_t on_node : sum.on_node) EXPECT_EQ(on_node, 0u);
  fake.machine().toucher = 63;
  AddAll(arena, &sum);
  EXPECT_EQ(sum.on_node[63], kMiB);
}

TEST(ArenaNodeBytes, AreNoneWhereTheSystemDoesNotTell) {
  const FakeNuma fake(1);
  fake.machine().move_pages_error = EPERM;
  const Arena told = std::move(Arena::Map(kMiB, Wish(fake.numa(), PagePolicy::kNode, {0})).value());
  const Arena without = std::move(Arena::Map(kMiB).value());
  NodeBytes sum;
  AddAll(told, &sum);
  AddAll(without, &sum);
  EXPECT_EQ(sum.on_node[0], 0u);
}

}  // namespace
}  // namespace hybridopt
