// The NUMA placement of threads and memory. If the system refuses any of it, the library is slower
// but no bit changes.
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <numeric>
#include <set>
#include <sstream>
#include <string>

#include "../numa/fake_numa_library.h"
#include "../temporary_directory.h"
#include "base/system.h"
#include "child.h"
#include "machine/context.h"
#include "machine/lanes.h"
#include "optimizer/optimizer.h"
#include "optimizer/plan.h"
#include "place/state_memory.h"
#include "place/swap_memory.h"
#include "runtime/topology.h"
#include "state/chunk_table.h"
#include "state/residence.h"
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

// Both devices give the same bits as without the restriction.
struct Reference {
  std::vector<unsigned char> host = RunSteps(OptionsFor(OFFLOAD_DEVICE_HOST)).bits;
  std::vector<unsigned char> sim = RunSteps(OptionsFor(OFFLOAD_DEVICE_SIM)).bits;
  const std::vector<unsigned char>& of(int32_t kind) const {
    return kind == OFFLOAD_DEVICE_HOST ? host : sim;
  }
};

// Runs on both devices in a restricted child; check(info) examines the context's info.
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
  if (!MayPlace()) GTEST_SKIP() << "no libnuma, or a system that refuses mbind";
  for (int32_t kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    const Outcome outcome = RunSteps(OptionsFor(kind, 1));
    EXPECT_EQ(outcome.info.numa_rung, OFFLOAD_NUMA_PLACED);
    EXPECT_NE(outcome.info.numa_nodes, 0u);
    EXPECT_FALSE(Says(outcome.info, "placed")) << outcome.info.notes;
    if (system::HugePagesAvailable() && outcome.info.nodes == 1) {
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
  if (!MayPlace() || NodesOf(system::AllowedCpus()).size() != 1)
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

// The process's own policy does not change, and a full node never refuses a page.
TEST(NumaLadder, NeverSetsAPolicyOfTheProcessAndNeverBindsStrictly) {
  ExpectSameBitsUnder(
      [] {
        Restrict({{SYS_set_mempolicy, SECCOMP_RET_KILL_PROCESS},
                  {SYS_migrate_pages, SECCOMP_RET_KILL_PROCESS},
                  {SYS_mbind, SECCOMP_RET_KILL_PROCESS, MPOL_BIND}});
      },
      [](const offload_context_info_t&) {});
}

// A test of the test above.
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

constexpr char kBitsVariable[] = "HYBRIDOPT_TEST_BITS";

// This program runs once more, with a file first in the search for libnuma that is no library.
TEST(NumaLadder, WithoutLibnumaThreadsStillTouchTheirPagesFirst) {
  const TemporaryDirectory directory;
  std::ofstream(directory / "libnuma.so.1") << "no library";
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  const std::string bits_path = directory / "bits";
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    setenv("LD_LIBRARY_PATH", directory.path().c_str(), 1);
    setenv(kBitsVariable, bits_path.c_str(), 1);
    execl(program.c_str(), program.c_str(), "--gtest_also_run_disabled_tests",
          "--gtest_filter=WithoutLibnuma.*", nullptr);
    std::_Exit(127);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  std::ifstream file(bits_path, std::ios::binary);
  const std::vector<unsigned char> bits{std::istreambuf_iterator<char>(file), {}};
  const Reference reference;
  std::vector<unsigned char> expected;
  for (const auto* of : {&reference.host, &reference.host, &reference.sim, &reference.sim})
    expected.insert(expected.end(), of->begin(), of->end());
  EXPECT_TRUE(bits == expected);
}

// The program that the test above runs.
TEST(WithoutLibnuma, DISABLED_SaysSoAndWritesItsBits) {
  EXPECT_FALSE(Numa::Open().ok());
  std::ofstream file(std::getenv(kBitsVariable), std::ios::binary);
  for (int32_t kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    for (int32_t policy : {OFFLOAD_NUMA_NEAR, OFFLOAD_NUMA_INTERLEAVED}) {
      std::string warnings;
      auto options = Make<offload_context_options_t>();
      options.device_kind = kind;
      options.threads = 2;
      options.numa_policy = policy;
      options.log_user = &warnings;
      options.log = [](void* user, int32_t level, const char* text) {
        if (level == OFFLOAD_LOG_WARNING) *static_cast<std::string*>(user) += text;
      };
      offload_context_t context = nullptr;
      ASSERT_OFFLOAD_OK(offload_context_create(&options, &context));
      {
        Trainer trainer(OptionsFor(kind), context);
        trainer.AddParams();
        trainer.Commit();
        trainer.Steps(1, 1 + kSteps);
        const std::vector<unsigned char> bits = trainer.Bits();
        file.write(reinterpret_cast<const char*>(bits.data()),
                   static_cast<std::streamsize>(bits.size()));
        auto plan = Make<offload_plan_t>();
        EXPECT_OFFLOAD_OK(offload_optimizer_plan(trainer.optimizer, &plan));
        EXPECT_EQ(plan.numa_unknown_bytes, plan.host_bytes);
      }
      const offload_context_info_t info = Info(context);
      EXPECT_EQ(info.numa_rung, OFFLOAD_NUMA_FIRST_TOUCH);
      EXPECT_EQ(info.numa_policy, OFFLOAD_NUMA_NEAR);
      EXPECT_EQ(info.numa_memory_nodes, 0u);
      EXPECT_TRUE(Says(info, "memory is not placed: libnuma cannot be opened")) << info.notes;
      const bool asked = policy == OFFLOAD_NUMA_INTERLEAVED;
      const std::string refusal = "memory is not interleaved: libnuma cannot be opened";
      EXPECT_EQ(Says(info, refusal), asked) << info.notes;
      EXPECT_EQ(warnings.find(refusal) != std::string::npos, asked) << warnings;
      ASSERT_OFFLOAD_OK(offload_context_destroy(context));
    }
  }
}

// --- Limits ---

TEST(Limits, OneCpuOfTheMachine) {
  const uint32_t cpu = system::AllowedCpus().back();
  ExpectSameBitsUnder(
      [&] {
        if (!system::PinThisThread({cpu})) std::_Exit(kSkipped);
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
  if (!MayPlace()) GTEST_SKIP() << "no libnuma, or a system that refuses mbind";
  const std::vector<uint32_t> memory_nodes = Numa::Open().value().MemoryNodes();
  for (const system::NumaNode& node : NodesOf(system::AllowedCpus())) {
    if (node.id >= 64 || !std::binary_search(memory_nodes.begin(), memory_nodes.end(), node.id))
      continue;
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
std::shared_ptr<Context> ContextOn(int32_t kind, const Nodes& nodes, const Result<Numa>& numa,
                                   int32_t policy = OFFLOAD_NUMA_NEAR) {
  auto options = Make<offload_context_options_t>();
  options.device_kind = kind;
  options.numa_policy = policy;
  options.log = DropLog;
  const KernelTable& kernels = *SelectKernels().value();
  std::unique_ptr<Device> device = CreateHostDevice();
  if (kind == OFFLOAD_DEVICE_SIM)
    device = std::move(CreateSimDevice({uint64_t{1} << 20, 0, 0}, kernels).value());
  Seats seats;
  seats.nodes = nodes;
  for (const system::NumaNode& node : nodes) seats.interleaved.push_back(node.id);
  return std::make_shared<Context>(options, std::move(device), kernels, seats, numa);
}

TEST(Placement, SeveralNodesAreAskedForWhereTheyAreNeeded) {
  const FakeNuma fake(0b011);
  for (int32_t kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    const std::shared_ptr<Context> context =
        ContextOn(kind, {{0, {0}}, {1, {1}}, {2, {2}}}, fake.result());
    EXPECT_EQ(context->state_pages().policy, PagePolicy::kToucher);
    EXPECT_EQ(context->pinned_pages().policy, PagePolicy::kInterleaved);
    EXPECT_EQ(context->pinned_pages().nodes, (std::vector<uint32_t>{0, 1}));
    EXPECT_TRUE(context->pinned_pages().huge_pages);
    // Chunks, which only a device with memory of its own has, are too small for huge pages.
    EXPECT_EQ(context->state_pages().huge_pages, kind == OFFLOAD_DEVICE_HOST);
    const offload_context_info_t info = context->Info().value();
    EXPECT_EQ(info.numa_nodes, 7u);
    EXPECT_EQ(info.numa_memory_nodes, 3u);
    EXPECT_EQ(info.numa_policy, OFFLOAD_NUMA_NEAR);
    EXPECT_EQ(Says(info, "no huge pages"),
              kind == OFFLOAD_DEVICE_SIM || !system::HugePagesAvailable())
        << info.notes;
  }
}

// All memory of an optimizer of one param.
struct OptimizerMemory {
  explicit OptimizerMemory(Context& context) : table(OFFLOAD_SGD, context.device()) {
    offload_group_t group{};
    group.momentum = 0.9;
    EXPECT_TRUE(table.AddGroup(group).ok());
    ParamInput input{};
    input.param.name = "p";
    input.param.dtype = input.param.grad_dtype = OFFLOAD_FP32;
    input.param.count = 2048;
    input.param.data = context.AllocateForCaller(2048 * sizeof(float)).value();
    EXPECT_TRUE(table.AddParams({&input, 1}).ok());
    constexpr uint32_t kMovable =
        OFFLOAD_MOVABLE_PARAMS | OFFLOAD_MOVABLE_GRADS | OFFLOAD_MOVABLE_STATES;
    shape = MakeStateShape(table, {false, 1024, 2, kMovable});
    const Residence residence(table, shape, {{0.5}});
    state = std::move(StateMemory::Create(context, shape, residence).value());
    lanes = std::move(
        Lanes::Create(context, LaneSizesOf(shape, residence, CutChunks(table, shape, residence)))
            .value());
    swap = std::move(SwapMemory::Create(context, shape, residence).value());
  }
  std::vector<const void*> Pinned() const {
    return {lanes->ring().grads(0), lanes->host_verdict, swap->Params(0), swap->Grads(0),
            swap->states().data()};
  }

  ParamTable table;
  StateShape shape;
  std::unique_ptr<StateMemory> state;
  std::unique_ptr<Lanes> lanes;
  std::unique_ptr<SwapMemory> swap;
};

void ExpectPolicy(const FakeNuma& fake, const void* data, int mode, unsigned long nodes) {
  const fake_numa_range_t* const range = fake.RangeOf(data);
  ASSERT_NE(range, nullptr);
  EXPECT_EQ(range->mode, mode);
  EXPECT_EQ(range->nodes, nodes);
}

// Staging, and room for what is offloaded: the thread that pins this memory touches it, so no
// worker owns a page.
TEST(Placement, OnSeveralNodesStateLiesWithItsToucherAndPinnedMemoryIsInterleaved) {
  const FakeNuma fake(0b11);
  const std::shared_ptr<Context> context =
      ContextOn(OFFLOAD_DEVICE_SIM, {{0, {0}}, {1, {1}}}, fake.result());
  const OptimizerMemory memory(*context);
  ExpectPolicy(fake, memory.state->At(Tier::kHost, 0, kMaster), MPOL_PREFERRED, 0);
  for (const void* data : memory.Pinned()) ExpectPolicy(fake, data, MPOL_INTERLEAVE, 0b11);
}

TEST(Placement, InterleavedMeansAllOfIt) {
  const FakeNuma fake(0b1011);
  const std::shared_ptr<Context> context =
      ContextOn(OFFLOAD_DEVICE_SIM, {{0, {0}}, {1, {1}}, {2, {2}}, {3, {3}}}, fake.result(),
                OFFLOAD_NUMA_INTERLEAVED);
  const OptimizerMemory memory(*context);
  ExpectPolicy(fake, memory.state->At(Tier::kHost, 0, kMaster), MPOL_INTERLEAVE, 0b1011);
  for (const void* data : memory.Pinned()) ExpectPolicy(fake, data, MPOL_INTERLEAVE, 0b1011);
  const offload_context_info_t info = context->Info().value();
  EXPECT_EQ(info.numa_policy, OFFLOAD_NUMA_INTERLEAVED);
  EXPECT_EQ(info.numa_memory_nodes, 0b1011u);
  EXPECT_EQ(info.numa_rung, OFFLOAD_NUMA_PLACED);
  EXPECT_FALSE(Says(info, "memory is not")) << info.notes;
  EXPECT_FALSE(Says(info, "several nodes share")) << info.notes;
}

TEST(Placement, ThePlanSaysHowMuchLiesOnWhichNode) {
  const FakeNuma fake(0b111);
  for (const int32_t policy : {OFFLOAD_NUMA_NEAR, OFFLOAD_NUMA_INTERLEAVED}) {
    const std::shared_ptr<Context> context =
        ContextOn(OFFLOAD_DEVICE_HOST, {{0, {0}}, {2, {1}}}, fake.result(), policy);
    auto options = Make<offload_optimizer_options_t>();
    options.algorithm = OFFLOAD_ADAMW;
    Optimizer optimizer(context, options);
    auto group = Make<offload_group_t>();
    group.eps = 1;
    ASSERT_TRUE(optimizer.AddGroup(group).ok());
    std::vector<float> data(100'000), grad(data.size());
    auto param = Make<offload_param_t>();
    param.dtype = param.grad_dtype = OFFLOAD_FP32;
    param.name = "weight";
    param.data = data.data();
    param.grad = grad.data();
    param.count = data.size();
    const ParamInput input{param, {}};
    ASSERT_TRUE(optimizer.AddParams({&input, 1}).ok());
    const offload_plan_t before = optimizer.Plan().value();
    ASSERT_TRUE(optimizer.Commit(nullptr).ok());
    const uint64_t pages_bytes = before.host_bytes - before.host_scratch_bytes;
    EXPECT_EQ(before.numa_bytes[0], pages_bytes / 2);
    EXPECT_EQ(before.numa_bytes[2], pages_bytes - pages_bytes / 2);
    EXPECT_EQ(before.numa_unknown_bytes, before.host_scratch_bytes);
    // Threads of node 2 alone: this process does not really run there, so the fake library says so.
    fake.machine().toucher = 2;
    const offload_plan_t after = optimizer.Plan().value();
    const uint64_t state_bytes =
        std::accumulate(std::begin(after.state_bytes[OFFLOAD_TIER_HOST]),
                        std::end(after.state_bytes[OFFLOAD_TIER_HOST]), uint64_t{0});
    EXPECT_EQ(after.numa_bytes[0] + after.numa_bytes[2], state_bytes);
    EXPECT_EQ(after.numa_unknown_bytes, after.host_bytes - state_bytes);
    if (policy == OFFLOAD_NUMA_NEAR) {
      EXPECT_EQ(after.numa_bytes[2], state_bytes);
    } else {
      EXPECT_GT(after.numa_bytes[0], state_bytes / 2 - 2 * 4096);
      EXPECT_LT(after.numa_bytes[0], state_bytes / 2 + 2 * 4096);
    }
  }
}

// If threads may run on any node, memory may lie on any node.
TEST(Placement, SeveralNodesNeedThreadsThatKeepToThem) {
  const FakeNuma fake(0b11);
  for (const int32_t policy : {OFFLOAD_NUMA_NEAR, OFFLOAD_NUMA_INTERLEAVED}) {
    const std::shared_ptr<Context> context =
        ContextOn(OFFLOAD_DEVICE_HOST, {{0, {60000}}, {1, {60001}}}, fake.result(), policy);
    EXPECT_EQ(context->Info().value().numa_rung, OFFLOAD_NUMA_PLACED);
    ASSERT_TRUE(context->workers().Run([](uint32_t) {}).ok());
    EXPECT_EQ(context->Info().value().numa_rung,
              policy == OFFLOAD_NUMA_NEAR ? OFFLOAD_NUMA_NONE : OFFLOAD_NUMA_PLACED);
  }
}

TEST(Placement, NodesWithoutMemoryAreNotAskedForAny) {
  const FakeNuma fake(0b10);
  const std::shared_ptr<Context> context =
      ContextOn(OFFLOAD_DEVICE_HOST, {{0, {0}}}, fake.result());
  EXPECT_FALSE(context->state_pages().policy.has_value());
  EXPECT_FALSE(context->pinned_pages().policy.has_value());
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
  const std::vector<uint32_t> all = system::AllowedCpus();
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
      EXPECT_EQ(CpusOfUpdateThreads(),
                std::multiset<std::string>{std::to_string(
                    NodeOfThread(PartOfRank(NodesOf(all), rank, cpus), 0, 1).cpus[0])});
    });
    used.insert(std::to_string(NodeOfThread(PartOfRank(NodesOf(all), rank, cpus), 0, 1).cpus[0]));
  }
  EXPECT_EQ(used, expected);
}

TEST(Ranks, AThreadCountIsHonouredWithinThePart) {
  const uint32_t cpus = static_cast<uint32_t>(system::AllowedCpus().size());
  InChild([&] {
    SetRank(cpus - 1, cpus);
    const Outcome outcome = RunSteps(OptionsFor(OFFLOAD_DEVICE_HOST, 3));
    EXPECT_EQ(outcome.info.threads, 3u);
    EXPECT_EQ(outcome.info.cpus, 1u);
    EXPECT_EQ(outcome.info.threads_seated, 1);
  });
}

TEST(Ranks, MoreThanCpusShareThemAndSaySo) {
  const uint32_t cpus = static_cast<uint32_t>(system::AllowedCpus().size());
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
