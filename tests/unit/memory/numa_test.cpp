// libnuma: the system's own if there is one, and libraries that replace it (fake_numa.c).
#include "memory/numa.h"

#include <gtest/gtest.h>
#include <linux/mempolicy.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <vector>

#include "../../numa/fake_numa_library.h"
#include "base/system.h"

namespace hybridopt {
namespace {

std::string WhyNot(const std::string& file) {
  const Result<Numa> numa = Numa::Open(file.c_str());
  EXPECT_FALSE(numa.ok());
  EXPECT_EQ(numa.status().code(), OFFLOAD_UNSUPPORTED);
  return numa.status().message();
}

bool Has(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

TEST(NumaOpen, TellsThatThereIsNoLibrary) {
  const std::string text = WhyNot("libnuma-of-nobody.so.1");
  EXPECT_TRUE(Has(text, "libnuma cannot be opened (libnuma-of-nobody.so.1: ")) << text;
  EXPECT_TRUE(Has(text, "No such file")) << text;
  EXPECT_TRUE(Has(text, "install it (Debian: libnuma1)")) << text;
}

TEST(NumaOpen, TellsWhatAnIncompleteLibraryLacks) {
  EXPECT_EQ(WhyNot(FakeNumaPath("incomplete")),
            "libnuma has no get_mempolicy; install libnuma 2.0 or newer (Debian: libnuma1)");
}

TEST(NumaOpen, TellsThatTheSystemHasNoPolicy) {
  const std::string text = WhyNot(FakeNumaPath("refused"));
  EXPECT_TRUE(Has(text, "libnuma finds no NUMA policy in this system (Operation not permitted)"))
      << text;
}

TEST(NumaMemoryNodes, AreAllowedAndHaveMemory) {
  const FakeNuma fake(0b101101);
  fake.machine().empty_nodes = 0b010000;
  EXPECT_EQ(fake.numa().MemoryNodes(), (std::vector<uint32_t>{0, 2, 3, 5}));
}

TEST(NumaMemoryNodes, AreUnknownIfTheSystemRefuses) {
  const FakeNuma fake(0b101101);
  fake.machine().get_mempolicy_error = ENOSYS;
  EXPECT_EQ(fake.numa().MemoryNodes(), std::vector<uint32_t>());
}

// mbind as libnuma passes it on. (The fake aborts on flags and on another size of the mask.)
TEST(NumaSetPolicy, PrefersAndNeverBinds) {
  const FakeNuma fake(0b1111);
  const struct {
    PagePolicy policy;
    std::vector<uint32_t> nodes;
    int mode;
    unsigned long mask;
  } cases[] = {
      {PagePolicy::kNode, {3}, MPOL_PREFERRED, 0b1000},
      {PagePolicy::kToucher, {}, MPOL_PREFERRED, 0},
      {PagePolicy::kInterleaved, {0, 2, 3}, MPOL_INTERLEAVE, 0b1101},
      {PagePolicy::kInterleaved, {1}, MPOL_INTERLEAVE, 0b0010},
  };
  char memory[100];
  for (const auto& c : cases) {
    ASSERT_TRUE(fake.numa().SetPolicy(memory, sizeof(memory), c.policy, c.nodes).ok());
    const fake_numa_range_t* const range = fake.RangeOf(memory + 99);
    ASSERT_NE(range, nullptr);
    EXPECT_EQ(range->data, memory);
    EXPECT_EQ(range->bytes, sizeof(memory));
    EXPECT_EQ(range->mode, c.mode);
    EXPECT_EQ(range->nodes, c.mask);
  }
}

TEST(NumaSetPolicy, TellsWhatTheSystemRefuses) {
  const FakeNuma fake(1);
  fake.machine().mbind_error = EPERM;
  char memory = 0;
  const Status status = fake.numa().SetPolicy(&memory, 1, PagePolicy::kNode, {0});
  EXPECT_EQ(status.code(), OFFLOAD_UNSUPPORTED);
  EXPECT_EQ(status.message(), "mbind was refused (Operation not permitted)");
}

TEST(NumaNodesOfPages, AreAskedForAndPagesAreNotMoved) {
  const FakeNuma fake(0b110);
  char memory[3 * 4096];
  ASSERT_TRUE(fake.numa().SetPolicy(memory, sizeof(memory), PagePolicy::kInterleaved, {1, 2}).ok());
  int elsewhere = 0;
  void* pages[] = {memory, memory + 4096, memory + 2 * 4096, &elsewhere};
  int nodes[] = {7, 7, 7, 7};
  ASSERT_TRUE(fake.numa().NodesOfPages(pages, nodes).ok());
  EXPECT_EQ(std::vector<int>(nodes, nodes + 4), (std::vector<int>{1, 2, 1, -ENOENT}));
}

TEST(NumaNodesOfPages, TellWhatTheSystemRefuses) {
  const FakeNuma fake(1);
  fake.machine().move_pages_error = ENOSYS;
  char memory = 0;
  void* page = &memory;
  int node = 0;
  const Status status = fake.numa().NodesOfPages({&page, 1}, {&node, 1});
  EXPECT_EQ(status.code(), OFFLOAD_UNSUPPORTED);
  EXPECT_EQ(status.message(), "move_pages was refused (Function not implemented)");
}

// The system's own library on the system's own memory.
TEST(NumaOfThisSystem, PlacesPagesAndFindsThem) {
  const Result<Numa> numa = Numa::Open();
  if (!numa.ok()) GTEST_SKIP() << numa.status().message();
  const std::vector<uint32_t> memory_nodes = numa.value().MemoryNodes();
  ASSERT_FALSE(memory_nodes.empty());
  EXPECT_TRUE(std::is_sorted(memory_nodes.begin(), memory_nodes.end()));
  for (const uint32_t node : memory_nodes) {
    void* page = system::MapPages(1).value();
    const Status status = numa.value().SetPolicy(page, 1, PagePolicy::kNode, {node});
    if (!status.ok()) GTEST_SKIP() << status.message();
    int found = 0;
    const Status asked = numa.value().NodesOfPages({&page, 1}, {&found, 1});
    if (!asked.ok()) GTEST_SKIP() << asked.message();
    EXPECT_EQ(found, -ENOENT) << "nobody has touched it";
    *static_cast<volatile char*>(page) = 1;
    ASSERT_TRUE(numa.value().NodesOfPages({&page, 1}, {&found, 1}).ok());
    EXPECT_TRUE(found == static_cast<int>(node) || memory_nodes.size() > 1);
    system::UnmapPages(page, 1);
  }
}

}  // namespace
}  // namespace hybridopt
