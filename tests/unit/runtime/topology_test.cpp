#include "runtime/topology.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "../../fake_root.h"

namespace hybridopt {
namespace {

using Cpus = std::vector<uint32_t>;

Cpus Range(uint32_t begin, uint32_t end) {
  Cpus cpus(end - begin);
  std::iota(cpus.begin(), cpus.end(), begin);
  return cpus;
}

std::string List(uint32_t begin, uint32_t end) {
  return std::to_string(begin) + "-" + std::to_string(end - 1);
}

// A machine of `nodes` nodes with `cpus_each` CPUs each, and near its end one PCI device a node.
void WriteMachine(const FakeRoot& root, uint32_t nodes, uint32_t cpus_each) {
  root.WriteNodeList("online", List(0, nodes));
  root.WriteNodeList("has_memory", List(0, nodes));
  for (uint32_t node = 0; node < nodes; ++node) {
    std::string distances;
    for (uint32_t other = 0; other < nodes; ++other)
      distances += (other == node ? "10 " : other / 4 == node / 4 ? "12 " : "32 ");
    const std::string cpus = List(node * cpus_each, (node + 1) * cpus_each);
    root.WriteNode(node, cpus, distances);
    root.WritePciDevice("0000:0" + std::to_string(node) + ":00.0", static_cast<int>(node), cpus);
  }
}

// A Grace machine: two nodes with CPUs, and the accelerators' memory as nodes without.
void WriteGrace(const FakeRoot& root) {
  root.WriteNodeList("online", "0-1,2,10");
  root.WriteNodeList("has_memory", "0-2,10");
  root.WriteNode(0, "0-71", "10 40 80 120");
  root.WriteNode(1, "72-143", "40 10 120 80");
  root.WriteNode(2, "", "80 120 10 160");
  root.WriteNode(10, "", "120 80 160 10");
}

Cpus AllCpus(const Nodes& nodes) {
  Cpus cpus;
  for (const system::NumaNode& node : nodes)
    cpus.insert(cpus.end(), node.cpus.begin(), node.cpus.end());
  return cpus;
}

Cpus Ids(const Nodes& nodes) {
  Cpus ids;
  for (const system::NumaNode& node : nodes) ids.push_back(node.id);
  return ids;
}

// --- Nodes ---

TEST(NodesOfTest, KeepsTheNodesAndCpusThatThisProcessMayUse) {
  const FakeRoot root;
  WriteMachine(root, 8, 4);
  EXPECT_EQ(Ids(NodesOf(Range(0, 32), root.path())), Range(0, 8));
  EXPECT_EQ(AllCpus(NodesOf(Range(0, 32), root.path())), Range(0, 32));
  const Nodes some = NodesOf({3, 5, 6, 30}, root.path());
  EXPECT_EQ(Ids(some), (Cpus{0, 1, 7}));
  EXPECT_EQ(some[1].cpus, (Cpus{5, 6}));
  EXPECT_EQ(Ids(NodesOf({9}, root.path())), Cpus{2});
}

TEST(NodesOfTest, LeavesOutNodesWithoutCpusAsOnGrace) {
  const FakeRoot root;
  WriteGrace(root);
  EXPECT_EQ(Ids(NodesOf(Range(0, 144), root.path())), (Cpus{0, 1}));
}

TEST(NodesOfTest, ASystemThatSaysNothingIsOneNode) {
  const FakeRoot root;
  const Nodes nodes = NodesOf({1, 2}, root.path());
  ASSERT_EQ(nodes.size(), 1u);
  EXPECT_EQ(nodes[0].cpus, (Cpus{1, 2}));
}

TEST(NodesOfTest, OfThisMachineHaveAllAllowedCpus) {
  Cpus cpus = AllCpus(NodesOf(system::AllowedCpus()));
  std::sort(cpus.begin(), cpus.end());
  EXPECT_EQ(cpus, system::AllowedCpus());
}

// --- Devices ---

TEST(NodesNearTest, IsTheNodeOfTheDevice) {
  for (uint32_t count : {1u, 2u, 8u}) {
    const FakeRoot root;
    WriteMachine(root, count, 4);
    const Nodes nodes = NodesOf(Range(0, 4 * count), root.path());
    for (uint32_t node = 0; node < count; ++node)
      EXPECT_EQ(Ids(NodesNear(nodes, "0000:0" + std::to_string(node) + ":00.0", root.path())),
                Cpus{node});
  }
}

TEST(NodesNearTest, IsTheNearestByDistanceWhereTheDevicesOwnNodeHasNoCpusHere) {
  const FakeRoot root;
  WriteMachine(root, 8, 4);
  // Node 5 is not allowed; 4, 6 and 7 are equally near to it, the others far.
  Cpus allowed = Range(0, 32);
  allowed.erase(allowed.begin() + 20, allowed.begin() + 24);
  EXPECT_EQ(Ids(NodesNear(NodesOf(allowed, root.path()), "0000:05:00.0", root.path())),
            (Cpus{4, 6, 7}));
  const FakeRoot grace;
  WriteGrace(grace);
  grace.WritePciDevice("0009:01:00.0", 10, "");  // in its own memory's node
  EXPECT_EQ(Ids(NodesNear(NodesOf(Range(0, 144), grace.path()), "0009:01:00.0", grace.path())),
            Cpus{1});
}

TEST(NodesNearTest, IsThatOfTheLocalCpusWhereTheNodeIsNotKnown) {
  const FakeRoot root;
  WriteMachine(root, 8, 4);
  root.WritePciDevice("0000:aa:00.0", -1, "6-9");
  EXPECT_EQ(Ids(NodesNear(NodesOf(Range(0, 32), root.path()), "0000:aa:00.0", root.path())),
            (Cpus{1, 2}));
}

TEST(NodesNearTest, IsNoneForADeviceOfNoKnownPlace) {
  const FakeRoot root;
  WriteMachine(root, 2, 4);
  root.WritePciDevice("0000:aa:00.0", -1, "");
  const Nodes nodes = NodesOf(Range(0, 8), root.path());
  EXPECT_TRUE(NodesNear(nodes, "", root.path()).empty());
  EXPECT_TRUE(NodesNear(nodes, "0000:bb:00.0", root.path()).empty());
  EXPECT_TRUE(NodesNear(nodes, "0000:aa:00.0", root.path()).empty());
}

// --- Ranks ---

TEST(PartOfRankTest, PartsAreDisjointCoverAndAreBalancedWithinOne) {
  for (uint32_t node_count : {1u, 2u, 8u})
    for (uint32_t cpus_each : {1u, 2u, 3u, 16u}) {
      const FakeRoot root;
      WriteMachine(root, node_count, cpus_each);
      const uint32_t cpus = node_count * cpus_each;
      const Nodes nodes = NodesOf(Range(0, cpus), root.path());
      for (uint32_t world = 1; world <= std::min(9u, cpus); ++world) {
        Cpus covered;
        size_t least = SIZE_MAX, most = 0;
        for (uint32_t rank = 0; rank < world; ++rank) {
          const Cpus part = AllCpus(PartOfRank(nodes, rank, world));
          covered.insert(covered.end(), part.begin(), part.end());
          least = std::min(least, part.size());
          most = std::max(most, part.size());
        }
        EXPECT_EQ(covered, Range(0, cpus)) << node_count << " " << cpus_each << " " << world;
        EXPECT_LE(most - least, 1u) << node_count << " " << cpus_each << " " << world;
      }
    }
}

TEST(PartOfRankTest, RanksThatDivideTheNodesNeverStraddleTwo) {
  const FakeRoot root;
  WriteMachine(root, 2, 12);
  const Nodes nodes = NodesOf(Range(0, 24), root.path());
  for (uint32_t world : {2u, 4u, 6u, 8u})
    for (uint32_t rank = 0; rank < world; ++rank) {
      const Nodes part = PartOfRank(nodes, rank, world);
      ASSERT_EQ(part.size(), 1u);
      EXPECT_EQ(part[0].id, rank * 2 / world);
    }
}

TEST(PartOfRankTest, MoreRanksThanCpusGetOneEachAndShareEvenly) {
  for (uint32_t cpus : {1u, 2u, 3u, 5u, 8u})
    for (uint32_t world = cpus; world <= 3 * cpus + 1; ++world) {
      const Nodes nodes = {{0, Range(0, cpus)}};
      std::map<uint32_t, uint32_t> ranks;
      for (uint32_t rank = 0; rank < world; ++rank) {
        const Cpus part = AllCpus(PartOfRank(nodes, rank, world));
        ASSERT_EQ(part.size(), 1u);
        ++ranks[part[0]];
      }
      ASSERT_EQ(ranks.size(), cpus);
      for (const auto& [cpu, count] : ranks) {
        EXPECT_GE(count, world / cpus);
        EXPECT_LE(count, (world + cpus - 1) / cpus);
      }
    }
}

// --- Threads ---

TEST(NodeOfThreadTest, ThreadsKeepToTheirNode) {
  const Nodes nodes = {{0, Range(0, 2)}, {1, Range(2, 6)}};
  for (uint32_t index = 0; index < 9; ++index)
    EXPECT_EQ(NodeOfThread(nodes, index, 9).cpus, nodes[index < 3 ? 0 : 1].cpus) << index;
}

// --- Seats ---

// LOCAL_RANK and LOCAL_WORLD_SIZE for the length of a test.
class Environment {
 public:
  Environment(const char* rank, const char* world) {
    Set("LOCAL_RANK", rank, rank_before_);
    Set("LOCAL_WORLD_SIZE", world, world_before_);
  }
  ~Environment() {
    Restore("LOCAL_RANK", rank_before_);
    Restore("LOCAL_WORLD_SIZE", world_before_);
  }

 private:
  static void Set(const char* name, const char* value, std::optional<std::string>& before) {
    if (const char* old = std::getenv(name)) before = old;
    Restore(name, value != nullptr ? std::optional<std::string>(value) : std::nullopt);
  }
  static void Restore(const char* name, const std::optional<std::string>& value) {
    if (value.has_value())
      setenv(name, value->c_str(), 1);
    else
      unsetenv(name);
  }
  std::optional<std::string> rank_before_, world_before_;
};

class SeatsTest : public testing::Test {
 protected:
  SeatsTest() { WriteMachine(root_, 2, 8); }
  Result<Seats> Choose(const SeatRequest& request) const {
    return ChooseSeats(request, Range(0, 16), root_.path());
  }
  Seats MustChoose(const SeatRequest& request) const {
    Result<Seats> seats = Choose(request);
    EXPECT_TRUE(seats.ok()) << seats.status().message();
    return seats.ok() ? seats.value() : Seats{};
  }
  void ExpectRefused(const SeatRequest& request, const std::string& words) const {
    const Result<Seats> seats = Choose(request);
    ASSERT_FALSE(seats.ok());
    EXPECT_EQ(seats.status().code(), OFFLOAD_INVALID_ARGUMENT);
    EXPECT_NE(seats.status().message().find(words), std::string::npos) << seats.status().message();
  }

  const Environment alone_{nullptr, nullptr};
  const FakeRoot root_;
};

TEST_F(SeatsTest, AloneHasEverything) {
  const Seats seats = MustChoose({});
  EXPECT_EQ(AllCpus(seats.nodes), Range(0, 16));
  EXPECT_EQ(seats.local_rank, 0u);
  EXPECT_EQ(seats.local_world, 1u);
  EXPECT_EQ(seats.cpus_allowed, 16u);
  EXPECT_EQ(seats.nodes_allowed, 2u);
  EXPECT_EQ(seats.cpu_limit, 0u);
  EXPECT_EQ(seats.note, "");
}

TEST_F(SeatsTest, RanksComeFromTheEnvironmentAndOptionsOverrideThem) {
  const Environment environment("3", "4");
  EXPECT_EQ(AllCpus(MustChoose({}).nodes), Range(12, 16));
  EXPECT_EQ(MustChoose({}).local_rank, 3u);
  EXPECT_EQ(MustChoose({}).local_world, 4u);
  SeatRequest request;
  request.local_world = 1;
  EXPECT_EQ(AllCpus(MustChoose(request).nodes), Range(0, 16));
  request.local_rank = 1;
  request.local_world = 2;
  EXPECT_EQ(AllCpus(MustChoose(request).nodes), Range(8, 16));
}

TEST_F(SeatsTest, HalfAnEnvironmentSaysNothing) {
  {
    const Environment environment("3", nullptr);
    EXPECT_EQ(MustChoose({}).local_world, 1u);
  }
  const Environment environment(nullptr, "4");
  EXPECT_EQ(MustChoose({}).local_world, 1u);
}

TEST_F(SeatsTest, RefusesARankOutsideItsWorld) {
  SeatRequest request;
  request.local_rank = request.local_world = 2;
  ExpectRefused(request, "options.local_rank is 2 and options.local_world is 2, expected");
  request.local_world = 0;
  ExpectRefused(request, "options.local_rank is 2 and options.local_world is 0");
  request.local_rank = 0;
  request.local_world = 65537;
  ExpectRefused(request, "<= 65536");
}

TEST_F(SeatsTest, RefusesAnEnvironmentThatMakesNoSense) {
  const struct {
    const char *rank, *world;
  } cases[] = {{"4", "4"}, {"0", "0"},  {"-1", "4"}, {"x", "4"},
               {"1", ""},  {"1", "4x"}, {"1", " 4"}, {"1", "99999999999"}};
  for (const auto& c : cases) {
    const Environment environment(c.rank, c.world);
    ExpectRefused({}, std::string("LOCAL_RANK \"") + c.rank + "\" and LOCAL_WORLD_SIZE \"" +
                          c.world + "\", expected numbers");
    SeatRequest request;
    request.local_world = 1;  // the way out
    EXPECT_EQ(AllCpus(MustChoose(request).nodes), Range(0, 16));
  }
}

TEST_F(SeatsTest, NodesAskedForAreCutAmongTheRanks) {
  SeatRequest request;
  request.numa_nodes = 2;
  EXPECT_EQ(AllCpus(MustChoose(request).nodes), Range(8, 16));
  request.local_world = 4;
  request.local_rank = 1;
  EXPECT_EQ(AllCpus(MustChoose(request).nodes), Range(10, 12));
  request.numa_nodes = 3;
  EXPECT_EQ(AllCpus(MustChoose(request).nodes), Range(4, 8));
}

TEST_F(SeatsTest, MemoryIsInterleavedOverNodesWithCpusOfAnyRank) {
  const auto interleaved = [](const SeatRequest& request, const Cpus& cpus, const FakeRoot& root) {
    return ChooseSeats(request, cpus, root.path()).value().interleaved;
  };
  SeatRequest request;
  EXPECT_EQ(interleaved(request, Range(0, 4), root_), (Cpus{0, 1}));
  request.numa_nodes = 1;
  EXPECT_EQ(interleaved(request, Range(0, 4), root_), Cpus{0});
  const FakeRoot grace;
  WriteGrace(grace);
  EXPECT_EQ(interleaved({}, Range(0, 144), grace), (Cpus{0, 1}));
  EXPECT_EQ(interleaved({}, Range(0, 2), FakeRoot()), Cpus{});
}

TEST_F(SeatsTest, RefusesNodesThatAreNotThere) {
  SeatRequest request;
  request.numa_nodes = 0b101;
  ExpectRefused(request,
                "options.numa_nodes names node 2, but the nodes with CPUs that this process may "
                "use are 0, 1");
  request.numa_nodes = uint64_t{1} << 63;
  ExpectRefused(request, "names node 63");
}

TEST_F(SeatsTest, AloneSitsNearTheDevice) {
  SeatRequest request;
  request.pci_id = "0000:01:00.0";
  EXPECT_EQ(AllCpus(MustChoose(request).nodes), Range(8, 16));
  EXPECT_EQ(MustChoose(request).note, "");
  request.numa_nodes = 1;  // what was asked for counts
  EXPECT_EQ(AllCpus(MustChoose(request).nodes), Range(0, 8));
}

TEST_F(SeatsTest, RanksOfDevicesInNodeOrderSitNearThemAndUseAllCpus) {
  Cpus used;
  for (uint32_t rank = 0; rank < 4; ++rank) {
    SeatRequest request{0, rank, 4, rank < 2 ? "0000:00:00.0" : "0000:01:00.0"};
    const Seats seats = MustChoose(request);
    EXPECT_EQ(Ids(seats.nodes), Cpus{rank / 2});
    EXPECT_EQ(seats.note, "");
    const Cpus part = AllCpus(seats.nodes);
    used.insert(used.end(), part.begin(), part.end());
  }
  EXPECT_EQ(used, Range(0, 16));
}

TEST_F(SeatsTest, ARankWhoseDeviceIsElsewhereKeepsItsOwnCpusAndSaysSo) {
  const Seats seats = MustChoose({0, 0, 4, "0000:01:00.0"});
  EXPECT_EQ(AllCpus(seats.nodes), Range(0, 4));
  EXPECT_EQ(seats.note, "this rank's CPUs are on node 0, its device on node 1: set numa_nodes; ");
}

TEST_F(SeatsTest, SaysThatRanksShareCpus) {
  const Seats seats = ChooseSeats({0, 2, 3, ""}, {0, 1}, root_.path()).value();
  EXPECT_EQ(AllCpus(seats.nodes), Cpus{1});
  EXPECT_EQ(seats.note, "3 ranks share 2 CPUs; ");
}

TEST_F(SeatsTest, RanksShareTheCgroupsGrant) {
  root_.Write("/proc/self/cgroup", "0::/\n");
  root_.Write("/sys/fs/cgroup/cpu.max", "600000 100000\n");
  EXPECT_EQ(MustChoose({}).cpu_limit, 6u);
  EXPECT_EQ(MustChoose({0, 0, 2, ""}).cpu_limit, 3u);
  EXPECT_EQ(MustChoose({0, 0, 9, ""}).cpu_limit, 1u);
}

}  // namespace
}  // namespace hybridopt
