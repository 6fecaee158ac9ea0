// The table of docs/CONFIGURATION.md, one test for each row: a wrong setting is refused by the call
// that makes it, the text says what would be right, and following this advice works.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../sanitizers.h"
#include "../temporary_directory.h"
#include "child.h"
#include "trainer.h"

namespace hybridopt::fault {
namespace {

// --- Contexts ---

// The value of a handle that no call has written.
void* const kUnwritten = reinterpret_cast<void*>(uint64_t{0x5a5a});

int32_t CreateAndDestroy(const offload_context_options_t& options) {
  const auto unwritten = static_cast<offload_context_t>(kUnwritten);
  offload_context_t context = unwritten;
  const int32_t status = offload_context_create(&options, &context);
  if (status == OFFLOAD_OK) {
    EXPECT_OFFLOAD_OK(offload_context_destroy(context));
  } else {
    EXPECT_EQ(context, unwritten);
  }
  return status;
}

// `wrong` spoils the options of a sound sim context; `right` is what the text tells to do instead.
using EditContext = std::function<void(offload_context_options_t&)>;
void ExpectContextRefused(int32_t status, const std::vector<std::string>& words,
                          const EditContext& wrong, const EditContext& right) {
  auto options = Make<offload_context_options_t>();
  options.device_kind = OFFLOAD_DEVICE_SIM;
  options.sim_memory_bytes = uint64_t{1} << 20;
  options.log = DropLog;
  wrong(options);
  ExpectError(CreateAndDestroy(options), status, words);
  right(options);
  EXPECT_OFFLOAD_OK(CreateAndDestroy(options));
}

TEST(Configuration, UnknownDevice) {
  for (const int32_t wrong : {-1, 3, 9})
    ExpectContextRefused(
        OFFLOAD_INVALID_ARGUMENT,
        {"options.device_kind is " + std::to_string(wrong), "OFFLOAD_DEVICE_HOST (0), _SIM (1)"},
        [&](auto& o) { o.device_kind = wrong; }, [](auto& o) { o.device_kind = 1; });
}

TEST(Configuration, DeviceIndexWithoutSuchADevice) {
  ExpectContextRefused(
      OFFLOAD_INVALID_ARGUMENT, {"options.device_index is 1", "expected 0"},
      [](auto& o) { o.device_index = 1; }, [](auto& o) { o.device_index = 0; });
}

// Hides the GPU, if there is one: no other test of this program uses it.
TEST(Configuration, CudaThatIsNotThere) {
  setenv("CUDA_VISIBLE_DEVICES", "", 1);
  ExpectContextRefused(
      OFFLOAD_UNSUPPORTED,
      {"options.device_kind is OFFLOAD_DEVICE_CUDA", "OFFLOAD_DEVICE_HOST or OFFLOAD_DEVICE_SIM"},
      [](auto& o) {
        o.device_kind = OFFLOAD_DEVICE_CUDA;
        o.sim_memory_bytes = 0;
      },
      [](auto& o) { o.device_kind = OFFLOAD_DEVICE_SIM; });
}

TEST(Configuration, TooManyThreads) {
  ExpectContextRefused(
      OFFLOAD_INVALID_ARGUMENT, {"options.threads is 1025", "at most 1024", "0 = one per CPU"},
      [](auto& o) { o.threads = 1025; }, [](auto& o) { o.threads = 1024; });
}

TEST(Configuration, PageableNeitherAllowedNorNot) {
  ExpectContextRefused(
      OFFLOAD_INVALID_ARGUMENT,
      {"options.allow_pageable is 2", "0 (commit fails", "1 (it is used unpinned)"},
      [](auto& o) { o.allow_pageable = 2; }, [](auto& o) { o.allow_pageable = 1; });
}

TEST(Configuration, DeviceTimeoutOutOfRange) {
  for (const uint64_t wrong : {uint64_t{1} << 63, UINT64_MAX})
    ExpectContextRefused(
        OFFLOAD_INVALID_ARGUMENT,
        {"options.device_timeout_ns is " + std::to_string(wrong), "at most 2^63 - 1"},
        [&](auto& o) { o.device_timeout_ns = wrong; },
        [](auto& o) { o.device_timeout_ns = (uint64_t{1} << 63) - 1; });
}

TEST(Configuration, SimOptionsOnAnotherDevice) {
  for (uint64_t offload_context_options_t::*field :
       {&offload_context_options_t::sim_memory_bytes, &offload_context_options_t::sim_seed,
        &offload_context_options_t::sim_delay_ns_max,
        &offload_context_options_t::sim_pinned_bytes_max})
    ExpectContextRefused(
        OFFLOAD_INVALID_ARGUMENT,
        {"options.sim_* are set", "not OFFLOAD_DEVICE_SIM", "leave them 0"},
        [&](auto& o) {
          o.device_kind = OFFLOAD_DEVICE_HOST;
          o.sim_memory_bytes = 0;
          o.*field = 1;
        },
        [&](auto& o) { o.*field = 0; });
}

TEST(Configuration, SimMemoryTooSmall) {
  ExpectContextRefused(
      OFFLOAD_INVALID_ARGUMENT, {"options.sim_memory_bytes is 4095", "at least 4096"},
      [](auto& o) { o.sim_memory_bytes = 4095; }, [](auto& o) { o.sim_memory_bytes = 4096; });
}

TEST(Configuration, SimMemoryThatTheHostDoesNotHave) {
  for (const auto& [wrong, asked] :
       {std::pair(uint64_t{1} << 60, "1152921504606846976 bytes"), std::pair(UINT64_MAX, "bytes")})
    ExpectContextRefused(
        OFFLOAD_OUT_OF_HOST_MEMORY, {"asked for", asked, "available", "Ask for less"},
        [&, wrong = wrong](auto& o) { o.sim_memory_bytes = wrong; },
        [](auto& o) { o.sim_memory_bytes = uint64_t{1} << 20; });
}

TEST(Configuration, SimDelayTooLong) {
  ExpectContextRefused(
      OFFLOAD_INVALID_ARGUMENT, {"options.sim_delay_ns_max is 1000000001", "at most 1 s"},
      [](auto& o) { o.sim_delay_ns_max = 1000000001; },
      [](auto& o) { o.sim_delay_ns_max = 1000000000; });
}

TEST(Configuration, UnknownNumaPolicy) {
  for (int32_t wrong : {-1, 2})
    ExpectContextRefused(
        OFFLOAD_INVALID_ARGUMENT,
        {"options.numa_policy is " + std::to_string(wrong),
         "OFFLOAD_NUMA_NEAR (0:", "OFFLOAD_NUMA_INTERLEAVED (1:"},
        [&](auto& o) { o.numa_policy = wrong; },
        [](auto& o) { o.numa_policy = OFFLOAD_NUMA_INTERLEAVED; });
}

TEST(Configuration, NumaNodeThatIsNotThere) {
  ExpectContextRefused(
      OFFLOAD_INVALID_ARGUMENT,
      {"options.numa_nodes names node 63",
       "nodes with CPUs that this process may "
       "use are ",
       "or 0 to have them chosen"},
      [](auto& o) { o.numa_nodes = uint64_t{1} << 63; }, [](auto& o) { o.numa_nodes = 0; });
}

TEST(Configuration, LocalRankOutsideItsWorld) {
  ExpectContextRefused(
      OFFLOAD_INVALID_ARGUMENT,
      {"options.local_rank is 2 and options.local_world is 2", "expected local_rank < local_world"},
      [](auto& o) { o.local_rank = o.local_world = 2; }, [](auto& o) { o.local_rank = 1; });
}

// --- The environment ---

// Sets a variable for the duration of a test.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    setenv(name, value, 1);
  }
  ~Variable() {
    if (before_.has_value())
      setenv(name_, before_->c_str(), 1);
    else
      unsetenv(name_);
  }

 private:
  const char* const name_;
  std::optional<std::string> before_;
};

TEST(Configuration, RanksOfTheEnvironmentMakeNoSense) {
  const Variable rank("LOCAL_RANK", "8"), world("LOCAL_WORLD_SIZE", "8");
  ExpectContextRefused(
      OFFLOAD_INVALID_ARGUMENT,
      {"LOCAL_RANK \"8\" and LOCAL_WORLD_SIZE \"8\"",
       "or set options.local_rank and options.local_world"},
      [](auto&) {}, [](auto& o) { o.local_world = 1; });
}

TEST(Configuration, UnknownInstructionSet) {
  const Variable isa("HYBRIDOPT_ISA", "sse9");
  ExpectContextRefused(
      OFFLOAD_INVALID_ARGUMENT,
      {"HYBRIDOPT_ISA is \"sse9\"", "expected one of reference,", "unset it to get the best"},
      [](auto&) {}, [](auto&) { unsetenv("HYBRIDOPT_ISA"); });
}

TEST(Configuration, InstructionSetOfAnotherCpu) {
#if defined(__aarch64__)
  const char* other = "avx2";
#else
  const char* other = "neon";
#endif
  const Variable isa("HYBRIDOPT_ISA", other);
  ExpectContextRefused(
      OFFLOAD_UNSUPPORTED, {"HYBRIDOPT_ISA is", "this CPU or this build cannot run", "it can use"},
      [](auto&) {}, [](auto&) { setenv("HYBRIDOPT_ISA", "reference", 1); });
}

// --- Optimizers ---

RunOptions OnSim() {
  RunOptions options;
  options.device_kind = OFFLOAD_DEVICE_SIM;
  return options;
}

int32_t CreateAndDestroy(offload_context_t context, const offload_optimizer_options_t& options) {
  const auto unwritten = static_cast<offload_optimizer_t>(kUnwritten);
  offload_optimizer_t optimizer = unwritten;
  const int32_t status = offload_optimizer_create(context, &options, &optimizer);
  if (status == OFFLOAD_OK) {
    EXPECT_OFFLOAD_OK(offload_optimizer_destroy(optimizer));
  } else {
    EXPECT_EQ(optimizer, unwritten);
  }
  return status;
}

using EditOptimizer = std::function<void(offload_optimizer_options_t&)>;
void ExpectOptimizerRefused(int32_t status, const std::vector<std::string>& words,
                            const EditOptimizer& wrong, const EditOptimizer& right) {
  const Trainer trainer(OnSim());
  auto options = Make<offload_optimizer_options_t>();
  options.algorithm = OFFLOAD_ADAMW;
  wrong(options);
  ExpectError(CreateAndDestroy(trainer.context, options), status, words);
  right(options);
  EXPECT_OFFLOAD_OK(CreateAndDestroy(trainer.context, options));
}

TEST(Configuration, UnknownAlgorithm) {
  for (const int32_t wrong : {-1, 0, 99})
    ExpectOptimizerRefused(
        OFFLOAD_INVALID_ARGUMENT,
        {"options.algorithm is " + std::to_string(wrong),
         "expected OFFLOAD_ADAMW (1), _ADAM (2), _SGD (3), _LION (4), _ADAGRAD (5), _SIGNUM (6) or "
         "_MUON (7)"},
        [&](auto& o) { o.algorithm = wrong; }, [](auto& o) { o.algorithm = 1; });
}

TEST(Configuration, FractionOutsideZeroToOne) {
  const std::pair<double, const char*> cases[] = {
      {-0.1, "-0.1"}, {-1e-9, "-1e-09"}, {1.5, "1.5"}, {std::nan(""), "nan"}, {HUGE_VAL, "inf"}};
  for (const auto& [wrong, text] : cases)
    ExpectOptimizerRefused(
        OFFLOAD_INVALID_ARGUMENT,
        {"options.device_fraction is " + std::string(text),
         "expected 0 (all state on the host) to 1"},
        [&, wrong = wrong](auto& o) { o.device_fraction = wrong; },
        [](auto& o) { o.device_fraction = 1; });
}

TEST(Configuration, ChunksOutsideTheirRange) {
  for (const uint64_t wrong : {uint64_t{1}, uint64_t{1023}, (uint64_t{1} << 28) + 1})
    ExpectOptimizerRefused(
        OFFLOAD_INVALID_ARGUMENT,
        {"options.chunk_elements is " + std::to_string(wrong),
         "expected 1024 to 2^28 (0 = 2^20, on CUDA 2^22)"},
        [&](auto& o) { o.chunk_elements = wrong; }, [](auto& o) { o.chunk_elements = 1024; });
}

TEST(Configuration, StagingBelowTheMinimum) {
  for (const uint32_t wrong : {1u, 65u})
    ExpectOptimizerRefused(
        OFFLOAD_INVALID_ARGUMENT,
        {"options.staging_slots is " + std::to_string(wrong), "expected 2 to 64 (0 = 8)"},
        [&](auto& o) { o.staging_slots = wrong; }, [](auto& o) { o.staging_slots = 2; });
}

TEST(Configuration, UnknownHostExecutors) {
  for (const int32_t wrong : {-1, 3})
    ExpectOptimizerRefused(
        OFFLOAD_INVALID_ARGUMENT,
        {"options.host_executors is " + std::to_string(wrong),
         "expected OFFLOAD_EXECUTORS_AUTO (0), _CPU (1) or _STREAMED (2)"},
        [&](auto& o) { o.host_executors = wrong; }, [](auto& o) { o.host_executors = 1; });
}

TEST(Configuration, StreamedWithoutDeviceMemory) {
  RunOptions options;
  options.device_kind = OFFLOAD_DEVICE_HOST;
  Trainer trainer(options);
  auto streamed = Make<offload_optimizer_options_t>();
  streamed.algorithm = OFFLOAD_ADAMW;
  streamed.host_executors = OFFLOAD_EXECUTORS_STREAMED;
  offload_optimizer_t optimizer = nullptr;
  ExpectError(offload_optimizer_create(trainer.context, &streamed, &optimizer),
              OFFLOAD_INVALID_ARGUMENT,
              {"options.host_executors is OFFLOAD_EXECUTORS_STREAMED", "no memory of its own",
               "use OFFLOAD_EXECUTORS_AUTO"});
}

TEST(Configuration, StreamRingWithoutARing) {
  ExpectOptimizerRefused(
      OFFLOAD_INVALID_ARGUMENT,
      {"options.stream_ring_bytes is 4096", "host_executors is OFFLOAD_EXECUTORS_CPU",
       "leave it 0"},
      [](auto& o) {
        o.stream_ring_bytes = 4096;
        o.host_executors = OFFLOAD_EXECUTORS_CPU;
      },
      [](auto& o) { o.host_executors = OFFLOAD_EXECUTORS_AUTO; });
}

TEST(Configuration, UnknownMovable) {
  ExpectOptimizerRefused(
      OFFLOAD_UNSUPPORTED, {"options.movable is 0x17", "known is 0xf"},
      [](auto& o) { o.movable = 0x17; }, [](auto& o) { o.movable = 0xf; });
}

offload_comm_t LoneComm() {
  auto comm = Make<offload_comm_t>();
  comm.world = 1;
  comm.sum = [](void*, double*, uint32_t, int64_t) -> int32_t { return OFFLOAD_OK; };
  comm.max = [](void*, int32_t*, uint32_t, int64_t) -> int32_t { return OFFLOAD_OK; };
  comm.barrier = [](void*, int64_t) -> int32_t { return OFFLOAD_OK; };
  return comm;
}

TEST(Configuration, CommTableIncomplete) {
  for (const char* name : {"sum", "max", "barrier"}) {
    offload_comm_t comm = LoneComm();
    const offload_comm_t whole = comm;
    if (std::string(name) == "sum") comm.sum = nullptr;
    if (std::string(name) == "max") comm.max = nullptr;
    if (std::string(name) == "barrier") comm.barrier = nullptr;
    ExpectOptimizerRefused(
        OFFLOAD_INVALID_ARGUMENT, {"comm." + std::string(name) + " is NULL", "expected a function"},
        [&](auto& o) { o.comm = &comm; }, [&](auto& o) { o.comm = &whole; });
  }
}

TEST(Configuration, CommRankOutsideItsWorld) {
  const struct { int32_t rank, world; } cases[] = {{1, 1}, {-1, 2}, {0, 0}, {0, -3}};
  for (const auto& c : cases) {
    offload_comm_t comm = LoneComm();
    const offload_comm_t sound = comm;
    comm.rank = c.rank;
    comm.world = c.world;
    ExpectOptimizerRefused(
        OFFLOAD_INVALID_ARGUMENT,
        {"comm.rank is " + std::to_string(c.rank) + " and comm.world is " + std::to_string(c.world),
         "expected 0 <= rank < world"},
        [&](auto& o) { o.comm = &comm; }, [&](auto& o) { o.comm = &sound; });
  }
}

TEST(Configuration, CommTimeoutOutOfRange) {
  ExpectOptimizerRefused(
      OFFLOAD_INVALID_ARGUMENT,
      {"options.comm_timeout_ns is 18446744073709551615", "at most 2^63 - 1"},
      [](auto& o) { o.comm_timeout_ns = UINT64_MAX; }, [](auto& o) { o.comm_timeout_ns = 1; });
}

TEST(Configuration, HyperparameterOfAnotherAlgorithm) {
  Trainer trainer(OnSim());
  offload_group_t group = trainer.group;
  group.momentum = 0.9;
  uint32_t id = 0;
  ExpectError(offload_optimizer_add_group(trainer.optimizer, &group, &id), OFFLOAD_INVALID_ARGUMENT,
              {"group.momentum is 0.9", "AdamW does not use it", "leave it 0"});
  group.momentum = 0;
  EXPECT_OFFLOAD_OK(offload_optimizer_add_group(trainer.optimizer, &group, &id));
}

TEST(Configuration, HyperparameterOutOfRange) {
  Trainer trainer(OnSim());
  offload_group_t group = trainer.group;
  group.beta2 = 1;
  uint32_t id = 0;
  ExpectError(offload_optimizer_add_group(trainer.optimizer, &group, &id), OFFLOAD_INVALID_ARGUMENT,
              {"group.beta2 is 1", "expected 0 <= beta2 < 1"});
  group.beta2 = 0.999;
  EXPECT_OFFLOAD_OK(offload_optimizer_add_group(trainer.optimizer, &group, &id));
}

// --- Commit ---

offload_plan_t Plan(offload_optimizer_t optimizer) {
  auto plan = Make<offload_plan_t>();
  EXPECT_OFFLOAD_OK(offload_optimizer_plan(optimizer, &plan));
  return plan;
}

// The bytes of state, staging and so on in the stats.
uint64_t BytesHeld(offload_optimizer_t optimizer) {
  auto stats = Make<offload_stats_t>();
  EXPECT_OFFLOAD_OK(offload_optimizer_get_stats(optimizer, &stats));
  return stats.host_bytes + stats.device_bytes;
}

offload_context_info_t Info(offload_context_t context) {
  auto info = Make<offload_context_info_t>();
  EXPECT_OFFLOAD_OK(offload_context_get_info(context, &info));
  return info;
}

// Each commit is refused, as the plan has predicted, and no memory is kept.
void ExpectCommitRefused(const Trainer& trainer, int32_t status,
                         const std::vector<std::string>& words) {
  EXPECT_EQ(Plan(trainer.optimizer).fits, 0);
  const offload_context_info_t before = Info(trainer.context);
  for (int attempt = 0; attempt < 2; ++attempt)
    ExpectError(offload_optimizer_commit(trainer.optimizer, nullptr), status, words);
  EXPECT_EQ(BytesHeld(trainer.optimizer), 0u);
  const offload_context_info_t after = Info(trainer.context);
  EXPECT_EQ(std::memcmp(&before, &after, sizeof(after)), 0);
}

TEST(Configuration, NothingToOptimize) {
  Trainer trainer(OnSim());
  ExpectError(offload_optimizer_commit(trainer.optimizer, nullptr), OFFLOAD_INVALID_STATE,
              {"no params", "call offload_optimizer_add_params"});
  trainer.AddParams();
  trainer.Commit();
}

// A context whose cap on pinned memory is `bytes`, with an optimizer that may move `movable`.
struct CappedTrainer {
  CappedTrainer(uint64_t bytes, const RunOptions& run) {
    auto options = Make<offload_context_options_t>();
    options.device_kind = OFFLOAD_DEVICE_SIM;
    options.sim_memory_bytes = uint64_t{1} << 20;
    options.pinned_bytes_max = bytes;
    options.log = DropLog;
    EXPECT_OFFLOAD_OK(offload_context_create(&options, &context));
    trainer.emplace(run, context);
  }
  CappedTrainer(uint64_t bytes, uint32_t movable, int32_t host_executors = OFFLOAD_EXECUTORS_AUTO)
      : CappedTrainer(bytes, With(host_executors)) {
    if (movable == 0) return;
    auto optimizer_options = Make<offload_optimizer_options_t>();
    optimizer_options.algorithm = OFFLOAD_ADAMW;
    optimizer_options.chunk_elements = 1024;
    optimizer_options.staging_slots = 2;
    optimizer_options.movable = movable;
    EXPECT_OFFLOAD_OK(offload_optimizer_destroy(trainer->optimizer));
    EXPECT_OFFLOAD_OK(offload_optimizer_create(context, &optimizer_options, &trainer->optimizer));
    uint32_t id = 0;
    EXPECT_OFFLOAD_OK(offload_optimizer_add_group(trainer->optimizer, &trainer->group, &id));
  }
  ~CappedTrainer() {
    trainer.reset();
    EXPECT_OFFLOAD_OK(offload_context_destroy(context));
  }
  static RunOptions With(int32_t host_executors) {
    RunOptions run = OnSim();
    run.host_executors = host_executors;
    return run;
  }
  offload_context_t context = nullptr;
  std::optional<Trainer> trainer;
};

// The cap that the text names is enough, and one byte less is not.
TEST(Configuration, PinnedCapTooSmall) {
  for (const uint32_t movable : {0u, uint32_t{OFFLOAD_MOVABLE_PARAMS}}) {
    uint64_t enough = 0;
    {
      CappedTrainer capped(4096, movable);
      capped.trainer->AddParams();
      const offload_plan_t plan = Plan(capped.trainer->optimizer);
      EXPECT_EQ(plan.pinned_bytes_left, 4096u);
      enough = plan.staging_bytes + plan.host_params_bytes;
      ExpectCommitRefused(*capped.trainer, OFFLOAD_INVALID_ARGUMENT,
                          {"options.pinned_bytes_max of the context is 4096",
                           "raise it to at least " + std::to_string(enough),
                           "make chunk_elements, staging_slots, movable, early_update_bytes, "
                           "save_buffer_bytes or disk_ring_bytes smaller"});
    }
    CappedTrainer almost(enough - 1, movable);
    almost.trainer->AddParams();
    ExpectCommitRefused(*almost.trainer, OFFLOAD_INVALID_ARGUMENT,
                        {"raise it to at least " + std::to_string(enough)});
    CappedTrainer raised(enough, movable);
    raised.trainer->AddParams();
    raised.trainer->Commit();
  }
}

// The ring that the text names is enough, and one byte less is not.
TEST(Configuration, StreamRingTooSmall) {
  RunOptions options = OnSim();
  options.stream_ring_bytes = 1;
  uint64_t enough = 0;
  {
    Trainer trainer(options);
    trainer.AddParams();
    EXPECT_EQ(Plan(trainer.optimizer).fits, 0);
    EXPECT_EQ(offload_optimizer_commit(trainer.optimizer, nullptr), OFFLOAD_INVALID_ARGUMENT);
    const std::string text = offload_last_error();
    const std::string before = "options.stream_ring_bytes is 1, expected at least ";
    ASSERT_EQ(text.substr(0, before.size()), before) << text;
    enough = std::stoull(text.substr(before.size()));
  }
  options.stream_ring_bytes = enough - 1;
  Trainer almost(options);
  almost.AddParams();
  ExpectCommitRefused(almost, OFFLOAD_INVALID_ARGUMENT,
                      {"expected at least " + std::to_string(enough), "OFFLOAD_EXECUTORS_CPU"});
  options.stream_ring_bytes = enough;
  Trainer raised(options);
  raised.AddParams();
  EXPECT_EQ(Plan(raised.optimizer).device_ring_bytes, enough);
  raised.Commit();
}

// A ring that the options do not ask for is left out; one that they ask for is refused.
TEST(Configuration, StreamRingLargerThanTheDevice) {
  RunOptions options = OnSim();
  options.device_fraction = 0;
  options.sim_memory_bytes = uint64_t{192} << 10;  // params and gradients take 33 KB
  Trainer automatic(options);
  automatic.AddParams();
  EXPECT_EQ(Plan(automatic.optimizer).device_ring_bytes, 0u);
  automatic.Commit();
  const std::string notes = Info(automatic.context).notes;
  EXPECT_NE(notes.find("more than an eighth of its free memory"), std::string::npos) << notes;

  options.stream_ring_bytes = uint64_t{1} << 30;
  options.counts = {12000};
  Trainer asked(options);
  asked.AddParams();
  ExpectCommitRefused(asked, OFFLOAD_OUT_OF_DEVICE_MEMORY, {"free device memory"});
}

// The rest of the cap is too small to pin the state.
TEST(Configuration, PinnedCapTooSmallForState) {
  CappedTrainer free(UINT64_MAX, 0);
  free.trainer->AddParams();
  const offload_plan_t plan = Plan(free.trainer->optimizer);
  const uint64_t enough = plan.staging_bytes + plan.pinned_state_bytes;
  EXPECT_GT(plan.device_ring_bytes, 0u);

  CappedTrainer almost(enough - 1, 0);
  almost.trainer->AddParams();
  EXPECT_EQ(Plan(almost.trainer->optimizer).device_ring_bytes, 0u);
  EXPECT_EQ(Plan(almost.trainer->optimizer).pinned_state_bytes, 0u);
  almost.trainer->Commit();
  auto info = Make<offload_context_info_t>();
  EXPECT_OFFLOAD_OK(offload_context_get_info(almost.context, &info));
  EXPECT_NE(std::string(info.notes).find("pinned_bytes_max is too small"), std::string::npos)
      << info.notes;

  CappedTrainer raised(enough, 0);
  raised.trainer->AddParams();
  EXPECT_EQ(Plan(raised.trainer->optimizer).device_ring_bytes, plan.device_ring_bytes);
  raised.trainer->Commit();

  CappedTrainer refused(enough - 1, 0, OFFLOAD_EXECUTORS_STREAMED);
  refused.trainer->AddParams();
  ExpectCommitRefused(*refused.trainer, OFFLOAD_INVALID_ARGUMENT,
                      {"options.host_executors is OFFLOAD_EXECUTORS_STREAMED",
                       std::to_string(plan.pinned_state_bytes) + " bytes of state must be pinned",
                       "options.pinned_bytes_max", "OFFLOAD_EXECUTORS_AUTO"});
}

// The memory of a change that leaves room to pin the state, or not: staging, the ring of the disk,
// and the state have more bytes than before. The call refuses what queued work could not do.
TEST(Configuration, PinnedCapTooSmallForAChangeOfFractions) {
  const TemporaryDirectory directory;
  struct Fractions {
    double device, disk;
  };
  for (const auto& [from, to] : std::vector<std::pair<Fractions, Fractions>>{
           {{1, 0}, {0, 0}}, {{0.5, 0}, {0, 0.25}}, {{0, 0.5}, {0, 0.25}}, {{0, 1}, {0, 0.5}}}) {
    RunOptions run = OnSim();
    run.host_executors = OFFLOAD_EXECUTORS_STREAMED;
    run.counts = {20'000};
    run.device_fraction = from.device;
    run.disk_fraction = from.disk;
    run.disk_paths = directory.path().c_str();
    uint64_t refused = 0, changed = 0;
    for (uint64_t cap = uint64_t{64} << 10; changed < 3; cap += uint64_t{16} << 10) {
      SCOPED_TRACE("to " + std::to_string(to.device) + ", cap " + std::to_string(cap));
      ASSERT_LT(cap, uint64_t{1} << 20);
      CappedTrainer capped(cap, run);
      capped.trainer->AddParams();
      if (offload_optimizer_commit(capped.trainer->optimizer, nullptr) != OFFLOAD_OK) continue;
      const int32_t status =
          offload_optimizer_set_fractions(capped.trainer->optimizer, to.device, to.disk, nullptr);
      if (status == OFFLOAD_OK) {
        changed += 1;
      } else {
        ExpectError(status, OFFLOAD_INVALID_ARGUMENT, {"options.pinned_bytes_max of the context"});
        refused += 1;
      }
      capped.trainer->Steps(0, 2);
    }
    EXPECT_GT(refused, 0u);
  }
}

TEST(Configuration, PinningRefused) {
  RunOptions options = OnSim();
  options.sim_pinned_bytes_max = 4096;
  Trainer trainer(options);
  trainer.AddParams();
  ExpectError(offload_optimizer_commit(trainer.optimizer, nullptr), OFFLOAD_OUT_OF_HOST_MEMORY,
              {"cannot pin", "of at most 4096 are pinned", "raise that limit",
               "make chunk_elements or staging_slots smaller", "allow_pageable"});
  EXPECT_EQ(BytesHeld(trainer.optimizer), 0u);
  options.allow_pageable = 1;
  Trainer allowed(options);
  allowed.AddParams();
  allowed.Commit();
}

TEST(Configuration, DeviceMemoryTooSmall) {
  RunOptions options = OnSim();
  options.device_fraction = 1;
  options.counts = {40000};
  options.sim_memory_bytes = 512 << 10;  // params and gradients take 240 KB, state would take 480
  Trainer trainer(options);
  trainer.AddParams();
  const offload_plan_t plan = Plan(trainer.optimizer);
  ExpectCommitRefused(
      trainer, OFFLOAD_OUT_OF_DEVICE_MEMORY,
      {"device_fraction 1 needs " + std::to_string(plan.device_bytes) + " bytes",
       std::to_string(plan.device_free_bytes), "are free", "lower device_fraction"});
  options.device_fraction = 0.4;
  Trainer lowered(options);
  lowered.AddParams();
  lowered.Commit();
}

// On the host device no address is read before commit, so a param can be larger than memory.
TEST(Configuration, HostMemoryNotEnoughForThePlan) {
  RunOptions options;
  options.device_kind = OFFLOAD_DEVICE_HOST;
  Trainer trainer(options);
  offload_param_t param = trainer.Param(0);
  param.count = uint64_t{1} << 42;
  ASSERT_OFFLOAD_OK(offload_optimizer_add_params(trainer.optimizer, &param, 1, nullptr));
  const offload_plan_t plan = Plan(trainer.optimizer);
  EXPECT_GT(plan.host_bytes, plan.host_available_bytes);
  EXPECT_GE(plan.host_bytes, 12 * param.count);  // master, exp_avg and exp_avg_sq in fp32
  ExpectCommitRefused(trainer, OFFLOAD_OUT_OF_HOST_MEMORY,
                      {"the plan needs " + std::to_string(plan.host_bytes) + " bytes",
                       "are available to this process (cgroup limit counted)",
                       "raise device_fraction, or free host memory"});
}

// Bytes of address space this process has.
uint64_t AddressSpaceBytes() {
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

// The machine has memory, but a limit keeps the process from it.
TEST(Configuration, AddressSpaceLimited) {
  if (HYBRIDOPT_ASAN || HYBRIDOPT_TSAN)
    GTEST_SKIP() << "sanitizers need address space of their own";
  InChild([] {
    RunOptions options;
    options.device_kind = OFFLOAD_DEVICE_HOST;
    options.counts = {8 << 20};
    Trainer trainer(options);
    trainer.AddParams();
    rlimit before;
    getrlimit(RLIMIT_AS, &before);
    const rlimit limited{AddressSpaceBytes() + (16 << 20), before.rlim_max};
    if (setrlimit(RLIMIT_AS, &limited) != 0) std::_Exit(kSkipped);
    ExpectError(offload_optimizer_commit(trainer.optimizer, nullptr), OFFLOAD_OUT_OF_HOST_MEMORY,
                {"host memory: asked for", "the system refused (Cannot allocate memory)",
                 "raise the limit", "ulimit -v"});
    EXPECT_EQ(BytesHeld(trainer.optimizer), 0u);
    setrlimit(RLIMIT_AS, &before);
    trainer.Commit();
  });
}

// --- What an optimizer was not made for ---

TEST(Configuration, ClippingAPartOfATensorWithoutAComm) {
  for (const bool with_comm : {false, true}) {
    Trainer trainer(OnSim());
    const offload_comm_t comm = LoneComm();
    if (with_comm) {
      EXPECT_OFFLOAD_OK(offload_optimizer_destroy(trainer.optimizer));
      auto options = Make<offload_optimizer_options_t>();
      options.algorithm = OFFLOAD_ADAMW;
      options.comm = &comm;
      ASSERT_OFFLOAD_OK(offload_optimizer_create(trainer.context, &options, &trainer.optimizer));
      uint32_t id = 0;
      ASSERT_OFFLOAD_OK(offload_optimizer_add_group(trainer.optimizer, &trainer.group, &id));
    }
    const int64_t shape = 6000, offset = 0, extent = 3000;
    auto shard = Make<offload_shard_t>();
    shard.dimensions = shard.box_count = 1;
    shard.global_shape = &shape;
    shard.box_offsets = &offset;
    shard.box_extents = &extent;
    offload_param_t param = trainer.Param(0);
    param.shard = &shard;
    ASSERT_OFFLOAD_OK(offload_optimizer_add_params(trainer.optimizer, &param, 1, nullptr));
    trainer.Commit();
    trainer.UploadGrads(1);
    auto step = Make<offload_step_options_t>();
    step.grad_norm_max = 1;
    const int32_t status = offload_optimizer_step(trainer.optimizer, &step, nullptr);
    if (with_comm) {
      EXPECT_OFFLOAD_OK(status);
      continue;
    }
    ExpectError(status, OFFLOAD_INVALID_ARGUMENT,
                {"options.grad_norm_max is 1", "'p0' is a part of its tensor",
                 "give a comm table at create"});
    step.grad_norm_max = 0;
    EXPECT_OFFLOAD_OK(offload_optimizer_step(trainer.optimizer, &step, nullptr));
  }
}

TEST(Configuration, MovingWhatWasNotDeclaredMovable) {
  Trainer trainer(OnSim());
  trainer.AddParams();
  trainer.Commit();
  trainer.UploadGrads(1);
  const auto plain = Make<offload_move_options_t>();
  auto adding = plain;
  adding.flags = OFFLOAD_MOVE_ACCUMULATE;
  const struct {
    int32_t (*call)(offload_optimizer_t, const offload_move_options_t*, offload_ticket_t*);
    const offload_move_options_t& options;
    const char* need;
  } cases[] = {{offload_optimizer_offload_params, plain, "OFFLOAD_MOVABLE_PARAMS"},
               {offload_optimizer_offload_grads, plain, "OFFLOAD_MOVABLE_GRADS"},
               {offload_optimizer_offload_grads, adding, "OFFLOAD_MOVABLE_ACCUMULATE"},
               {offload_optimizer_offload_states, plain, "OFFLOAD_MOVABLE_STATES"}};
  for (const auto& c : cases)
    ExpectError(c.call(trainer.optimizer, &c.options, nullptr), OFFLOAD_INVALID_STATE,
                {"options.movable is 0x0, and this call needs", c.need, "say so at create"});
}

// --- The table itself ---

// The names in backquotes that stand last in the rows of the table.
std::multiset<std::string> TestsOfTheTable(const std::filesystem::path& file) {
  std::multiset<std::string> names;
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) {
    const std::string end = "` |";
    if (line.rfind("| ", 0) != 0 || line.size() < end.size() ||
        line.compare(line.size() - end.size(), end.size(), end) != 0)
      continue;
    const size_t begin = line.rfind('`', line.size() - end.size() - 1);
    names.insert(line.substr(begin + 1, line.size() - end.size() - begin - 1));
  }
  return names;
}

TEST(ConfigurationTable, HasARowForEachTestAndATestForEachRow) {
  const auto file = std::filesystem::path(HYBRIDOPT_SOURCE_DIR) / "docs" / "CONFIGURATION.md";
  ASSERT_TRUE(std::filesystem::exists(file)) << file << " is not here";
  std::multiset<std::string> tests;
  const testing::UnitTest& unit = *testing::UnitTest::GetInstance();
  for (int suite = 0; suite < unit.total_test_suite_count(); ++suite)
    for (int test = 0; test < unit.GetTestSuite(suite)->total_test_count(); ++test)
      if (std::string(unit.GetTestSuite(suite)->name()) == "Configuration")
        tests.insert(unit.GetTestSuite(suite)->GetTestInfo(test)->name());
  EXPECT_EQ(TestsOfTheTable(file), tests);
}

}  // namespace
}  // namespace hybridopt::fault
