// Where threads and memory sit, and that a system which refuses any of it costs speed and no bit.
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <string>

#include "base/prim.h"
#include "child.h"
#include "machine/context.h"
#include "machine/lanes.h"
#include "runtime/topology.h"
#include "state/residence.h"
#include "state/swap_memory.h"
#include "step/chunk_table.h"
#include "trainer.h"

namespace hybridopt::fault {
namespace {

constexpr uint64_t kSteps = 3;

offload_context_info_t Info(offload_context_t context) {
  auto info = Make<offload_context_info_t>();
  EXPECT_OFFLOAD_OK(offload_context_get_info(context, &info));
  return info;
}

RunOptions OptionsFor(int32_t device_kind, uint32_t threads = 2) {
  RunOptions options;
  options.device_kind = device_kind;
  options.threads = threads;
  options.sim_delay_ns_max = 0;
  options.counts = {30000, 1, 25000};
  return options;
}

// A run of a few steps, in the environment that this process has now.
struct Outcome {
  std::vector<unsigned char> bits;
  offload_context_info_t info;
};
Outcome RunSteps(const RunOptions& options) {
  Trainer trainer(options);
  trainer.AddParams();
  trainer.Commit();
  trainer.Steps(1, 1 + kSteps);
  return {trainer.Bits(), Info(trainer.context)};
}

// Both devices give the bits they give without the restriction.
struct Reference {
  std::vector<unsigned char> host = RunSteps(OptionsFor(OFFLOAD_DEVICE_HOST)).bits;
  std::vector<unsigned char> sim = RunSteps(OptionsFor(OFFLOAD_DEVICE_SIM)).bits;
  const std::vector<unsigned char>& of(int32_t kind) const {
    return kind == OFFLOAD_DEVICE_HOST ? host : sim;
  }
};

// Runs on both devices in a restricted child; check(info) looks at what was reached.
template <typename Restrict, typename Check>
void ExpectSameBitsUnder(Restrict&& restrict, Check&& check, uint32_t threads = 2) {
  const Reference reference;
  InChild([&] {
    restrict();
    for (int32_t kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
      SCOPED_TRACE(kind);
      const Outcome outcome = RunSteps(OptionsFor(kind, threads));
      EXPECT_TRUE(outcome.bits == reference.of(kind));
      check(outcome.info);
    }
  });
}

bool MayPlace() {
  auto options = Make<offload_context_options_t>();
  offload_context_t context = nullptr;
  EXPECT_OFFLOAD_OK(offload_context_create(&options, &context));
  const bool placed = Info(context).numa_rung == OFFLOAD_NUMA_PLACED;
  EXPECT_OFFLOAD_OK(offload_context_destroy(context));
  return placed;
}

bool Says(const offload_context_info_t& info, const std::string& words) {
  return std::string(info.notes).find(words) != std::string::npos;
}

// The number of a line "key: number" in this process's status.
std::string StatusLine(const std::string& file, const std::string& key) {
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);)
    if (line.rfind(key + ":", 0) == 0)
      return line.substr(line.find_first_not_of(" \t", key.size() + 1));
  return "";
}

// --- The ladder ---

TEST(NumaLadder, TheBestRungHereIsPlacedAndSaysNothing) {
  if (!MayPlace()) GTEST_SKIP() << "this system refuses mbind";
  for (int32_t kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    const Outcome outcome = RunSteps(OptionsFor(kind, 1));
    EXPECT_EQ(outcome.info.numa_rung, OFFLOAD_NUMA_PLACED);
    EXPECT_NE(outcome.info.numa_nodes, 0u);
    EXPECT_FALSE(Says(outcome.info, "placed")) << outcome.info.notes;
    if (prim::HugePagesAvailable() && outcome.info.nodes == 1) {
      EXPECT_STREQ(outcome.info.notes, "");
    }
  }
}

TEST(NumaLadder, WithoutMbindThreadsStillTouchTheirPagesFirst) {
  ExpectSameBitsUnder(
      [] {
        Restrict({{SYS_mbind, SECCOMP_RET_ERRNO | EPERM},
                  {SYS_set_mempolicy, SECCOMP_RET_ERRNO | EPERM}});
      },
      [](const offload_context_info_t& info) {
        EXPECT_EQ(info.numa_rung, OFFLOAD_NUMA_FIRST_TOUCH);
        EXPECT_TRUE(Says(info, "memory is not placed: mbind was refused (Operation not permitted)"))
            << info.notes;
      });
}

TEST(NumaLadder, AKernelWithoutMbindIsLikeOneThatRefusesIt) {
  ExpectSameBitsUnder(
      [] {
        Restrict({{SYS_mbind, SECCOMP_RET_ERRNO | ENOSYS}});
      },
      [](const offload_context_info_t& info) {
        EXPECT_EQ(info.numa_rung, OFFLOAD_NUMA_FIRST_TOUCH);
        EXPECT_TRUE(Says(info, "Function not implemented")) << info.notes;
      });
}

TEST(NumaLadder, WithoutMbindAndAffinityMemoryLiesWhereItLies) {
  ExpectSameBitsUnder(
      [] {
        Restrict({{SYS_mbind, SECCOMP_RET_ERRNO | EPERM},
                  {SYS_sched_setaffinity, SECCOMP_RET_ERRNO | EPERM}});
      },
      [](const offload_context_info_t& info) {
        EXPECT_EQ(info.numa_rung, OFFLOAD_NUMA_NONE);
        EXPECT_EQ(info.threads_seated, 0);
        EXPECT_TRUE(Says(info, "memory is not placed")) << info.notes;
        EXPECT_TRUE(Says(info, "threads do not keep to their node: the system refused"))
            << info.notes;
      });
}

TEST(NumaLadder, WithoutAffinityMemoryOfOneNodeIsStillPlaced) {
  if (!MayPlace() || NodesOf(prim::AllowedCpus()).size() != 1)
    GTEST_SKIP() << "more nodes, or no mbind";
  ExpectSameBitsUnder(
      [] {
        Restrict({{SYS_sched_setaffinity, SECCOMP_RET_ERRNO | EPERM}});
      },
      [](const offload_context_info_t& info) {
        EXPECT_EQ(info.numa_rung, OFFLOAD_NUMA_PLACED);
        EXPECT_EQ(info.threads_seated, 0);
      });
}

// Yours stays yours: the process's policy is not touched, and a node that is full never refuses.
TEST(NumaLadder, NeverSetsAPolicyOfTheProcessAndNeverBindsStrictly) {
  ExpectSameBitsUnder(
      [] {
        Restrict({{SYS_set_mempolicy, SECCOMP_RET_KILL_PROCESS},
                  {SYS_migrate_pages, SECCOMP_RET_KILL_PROCESS},
                  {SYS_mbind, SECCOMP_RET_KILL_PROCESS, MPOL_BIND}});
      },
      [](const offload_context_info_t&) {});
}

// The test above, tested.
TEST(NumaLadder, AStrictBindWouldHaveBeenNoticed) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    Restrict({{SYS_mbind, SECCOMP_RET_KILL_PROCESS, MPOL_BIND}});
    void* page = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    unsigned long node = 1;
    syscall(SYS_mbind, page, 4096, MPOL_PREFERRED, &node, 65, 0);
    syscall(SYS_mbind, page, 4096, MPOL_BIND, &node, 65, 0);
    std::_Exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kSkipped) GTEST_SKIP() << "no seccomp";
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGSYS) << status;
}

TEST(NumaLadder, NeedsNoLibnuma) {
  const bool placed = MayPlace();
  ExpectSameBitsUnder([] {},
                      [&](const offload_context_info_t& info) {
                        EXPECT_EQ(info.numa_rung == OFFLOAD_NUMA_PLACED, placed);
                        std::ifstream maps("/proc/self/maps");
                        std::stringstream text;
                        text << maps.rdbuf();
                        EXPECT_EQ(text.str().find("libnuma"), std::string::npos);
                      });
}

// --- Limits ---

TEST(Limits, OneCpuOfTheMachine) {
  const uint32_t cpu = prim::AllowedCpus().back();
  ExpectSameBitsUnder(
      [&] {
        if (!prim::PinThisThread({cpu})) std::_Exit(kSkipped);
      },
      [](const offload_context_info_t& info) {
        EXPECT_EQ(info.cpus_allowed, 1u);
        EXPECT_EQ(info.cpus, 1u);
        EXPECT_EQ(info.threads, 1u);
        EXPECT_EQ(info.nodes, 1u);
      },
      0);
}

// Host and sim lock no memory, so a small limit is no limit for them.
TEST(Limits, NoLockedMemory) {
  ExpectSameBitsUnder(
      [] {
        const rlimit none{0, 0};
        if (setrlimit(RLIMIT_MEMLOCK, &none) != 0) std::_Exit(kSkipped);
        // Root may lock all the same.
        if (geteuid() == 0 && setresuid(61234, 61234, 61234) != 0) std::_Exit(kSkipped);
      },
      [](const offload_context_info_t&) {
        EXPECT_EQ(StatusLine("/proc/self/status", "VmLck"), "0 kB");
      });
}

// --- Page placement ---

// The policy of the range that holds `data`, as the kernel numbers them; -1 if it does not say.
int PolicyOf(const void* data) {
  int mode = -1;
  syscall(SYS_get_mempolicy, &mode, nullptr, 0, data, MPOL_F_ADDR);
  return mode;
}

// The nodes that the pages of a range lie on; empty where the system does not tell.
std::set<int> NodesOfPages(const void* data, uint64_t bytes) {
  const uint64_t page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) & ~(page_bytes - 1);
  std::vector<void*> pages;
  for (uintptr_t at = begin; at < reinterpret_cast<uintptr_t>(data) + bytes; at += page_bytes)
    pages.push_back(reinterpret_cast<void*>(at));
  std::vector<int> nodes(pages.size(), -1);
  if (syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, nodes.data(), 0) != 0)
    return {};
  return {nodes.begin(), nodes.end()};
}

TEST(Placement, StateLiesOnTheNodesOfTheThreads) {
  if (!MayPlace()) GTEST_SKIP() << "this system refuses mbind";
  for (const prim::NumaNode& node : NodesOf(prim::AllowedCpus())) {
    if (node.id >= 64 || !node.has_memory) continue;
    auto options = Make<offload_context_options_t>();
    options.numa_nodes = uint64_t{1} << node.id;
    offload_context_t context = nullptr;
    ASSERT_OFFLOAD_OK(offload_context_create(&options, &context));
    {
      Trainer trainer(OptionsFor(OFFLOAD_DEVICE_HOST), context);
      trainer.AddParams();
      trainer.Commit();
      EXPECT_EQ(Info(context).numa_nodes, options.numa_nodes);
      for (uint32_t param : {0u, 2u})
        for (int32_t kind : {OFFLOAD_STATE_MASTER, OFFLOAD_STATE_EXP_AVG}) {
          auto view = Make<offload_state_view_t>();
          ASSERT_OFFLOAD_OK(offload_optimizer_state(trainer.optimizer, param, kind, &view));
          const std::set<int> nodes = NodesOfPages(view.host_data, 4 * view.host_count);
          EXPECT_EQ(PolicyOf(view.host_data), MPOL_PREFERRED);
          if (nodes.empty()) continue;
          EXPECT_EQ(nodes, std::set<int>{static_cast<int>(node.id)});
        }
    }
    ASSERT_OFFLOAD_OK(offload_context_destroy(context));
  }
}

// A context on a machine of the test's making.
std::shared_ptr<Context> ContextOn(int32_t kind, const Nodes& nodes) {
  auto options = Make<offload_context_options_t>();
  options.device_kind = kind;
  const KernelTable& kernels = *SelectKernels().value();
  std::unique_ptr<Device> device = CreateHostDevice();
  if (kind == OFFLOAD_DEVICE_SIM)
    device = std::move(CreateSimDevice({uint64_t{1} << 20, 0, 0}, kernels).value());
  Seats seats;
  seats.nodes = nodes;
  return std::make_shared<Context>(options, std::move(device), kernels, seats);
}

TEST(Placement, SeveralNodesAreAskedForWhereTheyAreNeeded) {
  if (!MayPlace()) GTEST_SKIP() << "this system refuses mbind";
  const uint32_t here = NodesOf(prim::AllowedCpus())[0].id;
  const Nodes two = {{here, {0}, true}, {here + 1, {1}, true}, {here + 2, {2}, false}};
  for (int32_t kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    const std::shared_ptr<Context> context = ContextOn(kind, two);
    EXPECT_EQ(context->state_pages().nodes, (std::vector<uint32_t>{here, here + 1}));
    EXPECT_TRUE(context->state_pages().owners_touch_first);
    EXPECT_EQ(context->pinned_pages().nodes, (std::vector<uint32_t>{here, here + 1}));
    EXPECT_FALSE(context->pinned_pages().owners_touch_first);
    EXPECT_TRUE(context->pinned_pages().huge_pages);
    // Chunks, which only a device with memory of its own has, are too small for huge pages.
    EXPECT_EQ(context->state_pages().huge_pages, kind == OFFLOAD_DEVICE_HOST);
    const offload_context_info_t info = context->Info().value();
    EXPECT_EQ(info.numa_nodes, uint64_t{7} << here);
    EXPECT_EQ(Says(info, "no huge pages"),
              kind == OFFLOAD_DEVICE_SIM || !prim::HugePagesAvailable())
        << info.notes;
  }
}

// Staging and room for what is offloaded: whoever pins it touches it, so nobody owns a page.
TEST(Placement, PinnedMemoryOfSeveralNodesIsInterleaved) {
  if (!MayPlace()) GTEST_SKIP() << "this system refuses mbind";
  const uint32_t here = NodesOf(prim::AllowedCpus())[0].id;
  const std::shared_ptr<Context> context =
      ContextOn(OFFLOAD_DEVICE_SIM, {{here, {0}, true}, {here + 1, {1}, true}});
  ParamTable table(OFFLOAD_SGD, context->device());
  offload_group_t group{};
  group.momentum = 0.9;
  ASSERT_TRUE(table.AddGroup(group).ok());
  ParamInput input{};
  input.param.name = "p";
  input.param.dtype = input.param.grad_dtype = OFFLOAD_FP32;
  input.param.count = 2048;
  input.param.data = context->AllocateForCaller(2048 * sizeof(float)).value();
  ASSERT_TRUE(table.AddParams({&input, 1}).ok());
  constexpr uint32_t kMovable =
      OFFLOAD_MOVABLE_PARAMS | OFFLOAD_MOVABLE_GRADS | OFFLOAD_MOVABLE_STATES;
  const StateShape shape = MakeStateShape(table, {false, 1024, 2, kMovable});
  const Residence residence(table, shape, 0.5);
  const auto lanes = std::move(
      Lanes::Create(*context, LaneSizesOf(shape, residence, CutChunks(table, shape, residence)))
          .value());
  const auto swap = std::move(SwapMemory::Create(*context, shape, residence).value());
  EXPECT_EQ(PolicyOf(lanes->ring().grads(0)), MPOL_INTERLEAVE);
  EXPECT_EQ(PolicyOf(lanes->host_verdict), MPOL_INTERLEAVE);
  EXPECT_EQ(PolicyOf(swap->Params(0)), MPOL_INTERLEAVE);
  EXPECT_EQ(PolicyOf(swap->Grads(0)), MPOL_INTERLEAVE);
  EXPECT_EQ(PolicyOf(swap->states().data()), MPOL_INTERLEAVE);
}

// Memory that lies with its first toucher is nowhere in particular if threads wander.
TEST(Placement, SeveralNodesNeedThreadsThatKeepToThem) {
  if (!MayPlace()) GTEST_SKIP() << "this system refuses mbind";
  const std::shared_ptr<Context> context =
      ContextOn(OFFLOAD_DEVICE_HOST, {{0, {60000}, true}, {1, {60001}, true}});
  EXPECT_EQ(context->Info().value().numa_rung, OFFLOAD_NUMA_PLACED);
  ASSERT_TRUE(context->workers().Run([](uint32_t) {}).ok());
  EXPECT_EQ(context->Info().value().numa_rung, OFFLOAD_NUMA_NONE);
}

TEST(Placement, NodesWithoutMemoryAreNotAskedForAny) {
  const std::shared_ptr<Context> context = ContextOn(OFFLOAD_DEVICE_HOST, {{0, {0}, false}});
  EXPECT_TRUE(context->state_pages().nodes.empty());
  EXPECT_TRUE(context->pinned_pages().nodes.empty());
  const offload_context_info_t info = context->Info().value();
  EXPECT_EQ(info.numa_rung, OFFLOAD_NUMA_FIRST_TOUCH);
  EXPECT_TRUE(Says(info, "have no memory that this process may use")) << info.notes;
}

// --- Ranks ---

// The CPUs of the update threads that are alive in this process.
std::multiset<std::string> CpusOfUpdateThreads() {
  std::multiset<std::string> cpus;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm") >> std::ws, name);
    const std::string prefix = "hybridopt/";
    if (name.rfind(prefix, 0) != 0 ||
        name.find_first_not_of("0123456789", prefix.size()) != std::string::npos)
      continue;
    cpus.insert(StatusLine(task.path() / "status", "Cpus_allowed_list"));
  }
  return cpus;
}

void SetRank(uint32_t rank, uint32_t world) {
  setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
  setenv("LOCAL_WORLD_SIZE", std::to_string(world).c_str(), 1);
}

TEST(Ranks, NoTwoRunOnTheSameCpu) {
  const std::vector<uint32_t> all = prim::AllowedCpus();
  const uint32_t cpus = static_cast<uint32_t>(all.size());
  std::multiset<std::string> used, expected;
  for (uint32_t cpu : all) expected.insert(std::to_string(cpu));
  for (uint32_t rank = 0; rank < cpus; ++rank) {
    InChild([&] {
      SetRank(rank, cpus);
      Trainer trainer(OptionsFor(OFFLOAD_DEVICE_HOST, 0));
      trainer.AddParams();
      trainer.Commit();
      const offload_context_info_t info = Info(trainer.context);
      EXPECT_EQ(info.local_rank, rank);
      EXPECT_EQ(info.local_world, cpus);
      EXPECT_EQ(info.cpus_allowed, cpus);
      EXPECT_EQ(info.cpus, 1u);
      EXPECT_EQ(info.threads, 1u);
      EXPECT_EQ(CpusOfUpdateThreads(), std::multiset<std::string>{std::to_string(CpusOfThread(
                                           PartOfRank(NodesOf(all), rank, cpus), 0, 1)[0])});
    });
    used.insert(std::to_string(CpusOfThread(PartOfRank(NodesOf(all), rank, cpus), 0, 1)[0]));
  }
  EXPECT_EQ(used, expected);
}

TEST(Ranks, AThreadCountIsHonouredWithinThePart) {
  const uint32_t cpus = static_cast<uint32_t>(prim::AllowedCpus().size());
  InChild([&] {
    SetRank(cpus - 1, cpus);
    const Outcome outcome = RunSteps(OptionsFor(OFFLOAD_DEVICE_HOST, 3));
    EXPECT_EQ(outcome.info.threads, 3u);
    EXPECT_EQ(outcome.info.cpus, 1u);
    EXPECT_EQ(outcome.info.threads_seated, 1);
  });
}

TEST(Ranks, MoreThanCpusShareThemAndSaySo) {
  const uint32_t cpus = static_cast<uint32_t>(prim::AllowedCpus().size());
  InChild([&] {
    SetRank(cpus, cpus + 1);
    const Outcome outcome = RunSteps(OptionsFor(OFFLOAD_DEVICE_SIM, 0));
    EXPECT_EQ(outcome.info.threads, 1u);
    EXPECT_TRUE(Says(outcome.info, std::to_string(cpus + 1) + " ranks share "))
        << outcome.info.notes;
  });
}

TEST(Ranks, TheSameBitsWhateverTheTopology) {
  const Reference reference;
  InChild([&] {
    for (uint32_t world : {1u, 2u, 3u, 9u})
      for (uint32_t rank : {0u, world / 2, world - 1})
        for (uint32_t threads : {0u, 1u, 3u}) {
          SCOPED_TRACE(std::to_string(rank) + " of " + std::to_string(world) + ", " +
                       std::to_string(threads) + " threads");
          SetRank(rank, world);
          for (int32_t kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM})
            EXPECT_TRUE(RunSteps(OptionsFor(kind, threads)).bits == reference.of(kind));
        }
  });
}

}  // namespace
}  // namespace hybridopt::fault
