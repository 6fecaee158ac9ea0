// Page placement is asked of the kernel itself (move_pages, get_mempolicy), where it answers.
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

#include "runtime/topology.h"

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

// The node of each page, or an empty list where the system does not tell.
std::vector<int> NodesOfPages(std::byte* data, uint64_t bytes) {
  const uint64_t page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  std::vector<void*> pages;
  for (uint64_t at = 0; at < bytes; at += page_bytes) pages.push_back(data + at);
  std::vector<int> nodes(pages.size(), -1);
  if (syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, nodes.data(), 0) != 0)
    return {};
  return nodes;
}

uint32_t FirstMemoryNode() {
  for (const prim::NumaNode& node : prim::NumaNodes())
    if (node.has_memory) return node.id;
  return 0;
}

// Whether this system lets anybody place pages.
bool MayPlace() {
  Result<void*> page = prim::MapPages(1);
  const Status status =
      prim::PreferNodes(page.value(), 1, prim::PageHome::kNode, {FirstMemoryNode()});
  prim::UnmapPages(page.value(), 1);
  return status.ok();
}

// What has been discarded is zero again when it comes back; what was kept keeps its bits.
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
  // The pages that a range shares with what stays are kept.
  arena.Discard(2 * kMiB, 3 * kMiB + 10);
  EXPECT_EQ(arena.data()[3 * kMiB], std::byte{0x5a});
}

TEST(ArenaTest, OfNoBytesIsEmpty) {
  const Result<Arena> arena = Arena::Map(0, {{0}, true, true});
  ASSERT_TRUE(arena.ok());
  EXPECT_EQ(arena.value().data(), nullptr);
  EXPECT_EQ(arena.value().bytes(), 0u);
}

TEST(ArenaTest, MovesWithItsPages) {
  Arena first = std::move(Arena::Map(3 * kMiB).value());
  std::byte* const data = first.data();
  data[0] = std::byte{1};
  Arena second(std::move(first));
  EXPECT_EQ(second.data(), data);
  EXPECT_EQ(first.data(), nullptr);
  first = std::move(second);
  EXPECT_EQ(first.data(), data);
  EXPECT_EQ(first.bytes(), 3 * kMiB);
}

TEST(ArenaTest, HasNoPolicyWithoutAWish) {
  const Arena arena = std::move(Arena::Map(kMiB).value());
  const std::optional<Policy> policy = PolicyOf(arena.data());
  if (!policy.has_value()) GTEST_SKIP() << "get_mempolicy: " << std::strerror(errno);
  EXPECT_EQ(policy->mode, MPOL_DEFAULT);
}

TEST(ArenaTest, TellsTheKernelItsWishAndNeverMore) {
  if (!MayPlace()) GTEST_SKIP() << "this system refuses mbind";
  const uint32_t node = FirstMemoryNode();
  ASSERT_LT(node, 64u);
  const struct {
    PageWish wish;
    int mode;
    unsigned long nodes;
  } cases[] = {
      {{{node}, true, true}, MPOL_PREFERRED, 1ul << node},
      {{{node}, false, true}, MPOL_PREFERRED, 1ul << node},
      // Nodes that are not there are the kernel's to leave out, so one real node can stand for two.
      {{{node, 1000}, false, true}, MPOL_INTERLEAVE, 1ul << node},
      {{{node, 1000}, true, true}, MPOL_PREFERRED, 0},
  };
  for (const auto& c : cases) {
    for (const uint64_t bytes : {uint64_t{1}, 5 * kMiB}) {
      const Arena arena = std::move(Arena::Map(bytes, c.wish).value());
      for (std::byte* at : {arena.data(), arena.data() + bytes - 1}) {
        const std::optional<Policy> policy = PolicyOf(at);
        if (!policy.has_value()) GTEST_SKIP() << "get_mempolicy: " << std::strerror(errno);
        // Preferring the toucher's node reads as "local" in newer kernels.
        const bool local = c.mode == MPOL_PREFERRED && c.nodes == 0 && policy->mode == MPOL_LOCAL;
        EXPECT_TRUE(policy->mode == c.mode || local) << policy->mode;
        EXPECT_EQ(policy->nodes, c.nodes);
        EXPECT_NE(policy->mode, MPOL_BIND);
      }
    }
  }
  EXPECT_EQ(PolicyOf(nullptr), std::nullopt);  // MPOL_F_ADDR of no address
}

TEST(ArenaTest, PagesLieOnTheNodePreferred) {
  if (!MayPlace()) GTEST_SKIP() << "this system refuses mbind";
  for (const prim::NumaNode& node : prim::NumaNodes()) {
    if (!node.has_memory) continue;
    const uint64_t bytes = 4 * kMiB;
    const Arena arena = std::move(Arena::Map(bytes, {{node.id}, true, true}).value());
    std::memset(arena.data(), 1, bytes);
    const std::vector<int> nodes = NodesOfPages(arena.data(), bytes);
    if (nodes.empty()) GTEST_SKIP() << "move_pages: " << std::strerror(errno);
    // A node that is full may give some to another: preferring is not binding.
    EXPECT_GE(std::count(nodes.begin(), nodes.end(), static_cast<int>(node.id)) * 2,
              static_cast<int64_t>(nodes.size()));
  }
}

TEST(ArenaTest, PagesAreUntouchedAndZero) {
  const uint64_t bytes = 4 * kMiB;
  const Arena arena = std::move(Arena::Map(bytes, {{FirstMemoryNode()}, true, false}).value());
  for (int node : NodesOfPages(arena.data(), bytes)) ASSERT_EQ(node, -ENOENT);
  EXPECT_EQ(std::count(arena.data(), arena.data() + bytes, std::byte{0}),
            static_cast<int64_t>(bytes));
}

TEST(ArenaTest, AWishThatCannotBeMetCostsNothingElse) {
  const Arena arena = std::move(Arena::Map(kMiB, {{1000}, true, true}).value());
  std::memset(arena.data(), 7, kMiB);
  EXPECT_EQ(std::count(arena.data(), arena.data() + kMiB, std::byte{7}),
            static_cast<int64_t>(kMiB));
}

}  // namespace
}  // namespace hybridopt
