// Memory runs out: each allocation is made to fail once, in the library's own threads and in the
// caller's calls. No process ends, every call returns an error that says what happened, everything
// that was not reported as failed has the bits of a run with enough memory, and a checkpoint is
// whole or does not exist. A call that failed because the caller's thread had no memory has changed
// nothing: when it is repeated, it does its work.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "../temporary_directory.h"
#include "../thread_comm.h"
#include "trainer.h"

namespace {

// The n-th allocation of the library's threads fails, counted from 0.
constexpr uint64_t kNotCounted = UINT64_MAX;
constexpr uint64_t kNone = UINT64_MAX - 1;
std::atomic<uint64_t> failing_allocation = kNotCounted;
std::atomic<uint64_t> allocations = 0;
// The test's own thread, and library threads that run the test's functions, always have memory.
thread_local bool has_memory = false;

// Inside of a call of the caller, if only these count.
std::atomic<bool> counts_calls = false;
thread_local bool in_call = false;

bool Fails() {
  if (has_memory || failing_allocation == kNotCounted) return false;
  if (counts_calls && !in_call) return false;
  return allocations.fetch_add(1) == failing_allocation;
}

void* Allocate(size_t bytes, size_t alignment) {
  if (Fails()) return nullptr;
  return std::aligned_alloc(alignment,
                            (std::max<size_t>(bytes, 1) + alignment - 1) / alignment * alignment);
}

void* AllocateOrThrow(size_t bytes, size_t alignment) {
  void* const data = Allocate(bytes, alignment);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

constexpr size_t kAlignment = __STDCPP_DEFAULT_NEW_ALIGNMENT__;

}  // namespace

void* operator new(size_t bytes) { return AllocateOrThrow(bytes, kAlignment); }
void* operator new[](size_t bytes) { return AllocateOrThrow(bytes, kAlignment); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return AllocateOrThrow(bytes, static_cast<size_t>(alignment));
}
void* operator new[](size_t bytes, std::align_val_t alignment) {
  return AllocateOrThrow(bytes, static_cast<size_t>(alignment));
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return Allocate(bytes, kAlignment);
}
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept {
  return Allocate(bytes, kAlignment);
}
void operator delete(void* data) noexcept { std::free(data); }
void operator delete[](void* data) noexcept { std::free(data); }
void operator delete(void* data, size_t) noexcept { std::free(data); }
void operator delete[](void* data, size_t) noexcept { std::free(data); }
void operator delete(void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete[](void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete(void* data, size_t, std::align_val_t) noexcept { std::free(data); }
void operator delete[](void* data, size_t, std::align_val_t) noexcept { std::free(data); }

namespace hybridopt::fault {
namespace {

constexpr uint32_t kRanks = 2;

// The functions of one rank, with enough memory on every thread.
struct CommWithMemory {
  explicit CommWithMemory(const offload_comm_t& functions) : inner(functions) {}

  offload_comm_t Table() {
    offload_comm_t table = inner;
    table.user = this;
    table.sum = [](void* self, double* values, uint32_t count, int64_t timeout_ns) {
      return Call(self, [&](const offload_comm_t& comm) {
        return comm.sum(comm.user, values, count, timeout_ns);
      });
    };
    table.max = [](void* self, int32_t* values, uint32_t count, int64_t timeout_ns) {
      return Call(self, [&](const offload_comm_t& comm) {
        return comm.max(comm.user, values, count, timeout_ns);
      });
    };
    table.barrier = [](void* self, int64_t timeout_ns) {
      return Call(self,
                  [&](const offload_comm_t& comm) { return comm.barrier(comm.user, timeout_ns); });
    };
    return table;
  }
  template <typename Function>
  static int32_t Call(void* self, Function&& function) {
    const bool before = std::exchange(has_memory, true);
    const int32_t status = function(static_cast<CommWithMemory*>(self)->inner);
    has_memory = before;
    return status;
  }

  const offload_comm_t inner;
};

// The outcome of one run.
struct Outcome {
  std::vector<std::string> errors;  // of calls that failed
  std::vector<unsigned char> bits;  // of all ranks, if no call failed
  uint64_t allocations = 0;         // that the library's threads made
};

// Calls that are made in order, on all ranks. After a failed call a rank makes no more calls.
class Program {
 public:
  Program(const RunOptions& run, uint32_t ranks, uint64_t comm_timeout_ns)
      : comm_(static_cast<int32_t>(ranks)) {
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      comms_.emplace_back(comm_.Table(static_cast<int32_t>(rank)));
      tables_.push_back(comms_.back().Table());
    }
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      RunOptions own = run;
      own.comm = ranks > 1 ? &tables_[rank] : nullptr;
      own.comm_timeout_ns = comm_timeout_ns;
      own.name_prefix = rank == 0 ? "a" : "b";
      trainers_.push_back(std::make_unique<Trainer>(own));
      trainers_.back()->AddParams();
      trainers_.back()->UploadGrads(rank);
    }
    failed_.resize(ranks);
  }

  void OnAll(const char* what, const std::function<int32_t(Trainer&)>& call) {
    for (uint32_t rank = 0; rank < trainers_.size(); ++rank) {
      if (failed_[rank]) continue;
      const int32_t status = call(*trainers_[rank]);
      if (status == OFFLOAD_OK) continue;
      failed_[rank] = true;
      Note(what, status);
    }
  }
  void Note(const char* what, int32_t status) {
    outcome_.errors.push_back(std::string(what) + ": " + offload_status_name(status) + ": " +
                              offload_last_error());
  }
  void Commit() {
    OnAll("commit", [](Trainer& t) { return offload_optimizer_commit(t.optimizer, nullptr); });
  }
  void Step() {
    OnAll("step", [](Trainer& t) {
      auto options = Make<offload_step_options_t>();
      options.grad_norm_max = 1;
      return offload_optimizer_step(t.optimizer, &options, nullptr);
    });
  }
  void Wait() {
    OnAll("wait", [](Trainer& t) { return offload_optimizer_wait(t.optimizer, 0, -1); });
  }
  void Move(int32_t (*move)(offload_optimizer_t, const offload_move_options_t*,
                            offload_ticket_t*)) {
    OnAll("move", [&](Trainer& t) { return move(t.optimizer, nullptr, nullptr); });
  }
  void Bind() {
    OnAll("bind", [](Trainer& t) {
      std::vector<offload_binding_t> bindings;
      for (uint32_t i = 0; i < t.size(); ++i)
        bindings.push_back({sizeof(offload_binding_t), i, t.data[i], t.grads[i]});
      return offload_optimizer_bind(t.optimizer, bindings.data(), t.size());
    });
  }
  void Save(const std::string& path) {
    OnAll("save", [&](Trainer& t) {
      auto options = Make<offload_save_options_t>();
      options.path = path.c_str();
      return offload_optimizer_save(t.optimizer, &options, nullptr);
    });
  }
  void Load(const std::string& path) {
    OnAll("load", [&](Trainer& t) {
      auto options = Make<offload_load_options_t>();
      options.path = path.c_str();
      return offload_optimizer_load(t.optimizer, &options, nullptr);
    });
  }

  // To be called when every allocation succeeds again.
  Outcome End() {
    for (const auto& trainer : trainers_) {
      (void)offload_optimizer_wait(trainer->optimizer, 0, -1);
      if (!outcome_.errors.empty()) continue;
      const std::vector<unsigned char> bits = trainer->Bits();
      outcome_.bits.insert(outcome_.bits.end(), bits.begin(), bits.end());
    }
    trainers_.clear();  // expects that destroy succeeds
    outcome_.allocations = allocations;
    return outcome_;
  }

 private:
  ThreadComm comm_;
  std::deque<CommWithMemory> comms_;
  std::vector<offload_comm_t> tables_;
  std::vector<std::unique_ptr<Trainer>> trainers_;
  std::vector<bool> failed_;
  Outcome outcome_;
};

struct Scenario {
  const char* name;
  RunOptions run;
  uint32_t ranks;
  void (*calls)(Program& program, const std::string& directory);
};

void Steps(Program& program, const std::string&) {
  program.Commit();
  for (int step = 0; step < 3; ++step) program.Step();
  program.Wait();
}

void Moves(Program& program, const std::string&) {
  program.Commit();
  program.Step();
  program.Move(offload_optimizer_offload_grads);
  program.Move(offload_optimizer_offload_states);
  program.Move(offload_optimizer_offload_params);
  program.Wait();
  program.Bind();
  program.Move(offload_optimizer_reload_states);
  program.Move(offload_optimizer_reload_params);
  program.Move(offload_optimizer_reload_grads);
  program.Step();
  program.Wait();
}

void Checkpoints(Program& program, const std::string& directory) {
  program.Commit();
  program.Step();
  program.Save(directory + "/saved");
  program.Step();
  program.Wait();
  program.Load(directory + "/saved");
  program.Step();
  program.Wait();
}

RunOptions Options(int32_t device_kind) {
  RunOptions run;
  run.device_kind = device_kind;
  run.movable = OFFLOAD_MOVABLE_PARAMS | OFFLOAD_MOVABLE_GRADS | OFFLOAD_MOVABLE_STATES;
  return run;
}

const Scenario kScenarios[] = {
    {"steps on the host", Options(OFFLOAD_DEVICE_HOST), 1, Steps},
    {"steps on sim", Options(OFFLOAD_DEVICE_SIM), 1, Steps},
    {"moves on sim", Options(OFFLOAD_DEVICE_SIM), 1, Moves},
    {"checkpoints on the host", Options(OFFLOAD_DEVICE_HOST), 1, Checkpoints},
    {"checkpoints on sim", Options(OFFLOAD_DEVICE_SIM), 1, Checkpoints},
    {"checkpoints of two ranks", Options(OFFLOAD_DEVICE_SIM), kRanks, Checkpoints},
};

Outcome RunScenario(const Scenario& scenario, uint64_t failing) {
  const TemporaryDirectory directory;
  // The other ranks wait this long for a rank that is lost because it had no memory.
  const uint64_t comm_timeout_ns = failing == kNone ? 60'000'000'000 : 100'000'000;
  Program program(scenario.run, scenario.ranks, comm_timeout_ns);
  allocations = 0;
  failing_allocation = failing;
  scenario.calls(program, directory.path());
  const Outcome outcome = program.End();
  failing_allocation = kNotCounted;
  // Only whole checkpoints have a name. A rank that was lost leaves pending directories.
  if (std::filesystem::exists(directory / "saved")) {
    EXPECT_OFFLOAD_OK(offload_checkpoint_verify((directory / "saved").c_str(), nullptr));
  }
  return outcome;
}

// Whether a call may fail with this status: because memory ran out here or on another rank, or
// because that rank is lost.
bool IsExplained(const std::string& error, bool ranks) {
  for (const char* cause : {"out of host memory", "OUT_OF_HOST_MEMORY"})
    if (error.find(cause) != std::string::npos) return true;
  return ranks && error.find("COMM_FAILED") != std::string::npos;
}

TEST(AllocationFailure, InALibraryThreadIsToldAndEndsNoProcess) {
  has_memory = true;
  for (const Scenario& scenario : kScenarios) {
    SCOPED_TRACE(scenario.name);
    const Outcome good = RunScenario(scenario, kNone);
    ASSERT_EQ(good.errors, std::vector<std::string>());
    const uint64_t stride = std::max<uint64_t>(1, good.allocations / Scaled(30));
    uint64_t failures = 0;
    for (uint64_t failing = 0; failing < good.allocations; failing += stride) {
      SCOPED_TRACE("allocation " + std::to_string(failing) + " of " +
                   std::to_string(good.allocations));
      const Outcome outcome = RunScenario(scenario, failing);
      for (const std::string& error : outcome.errors)
        EXPECT_TRUE(IsExplained(error, scenario.ranks > 1)) << error;
      if (outcome.errors.empty()) {
        EXPECT_TRUE(outcome.bits == good.bits);
      }
      failures += outcome.errors.empty() ? 0 : 1;
    }
    RecordProperty(scenario.name,
                   std::to_string(failures) + " of " + std::to_string(good.allocations) + " told");
  }
}

// ------------------------------------------------------------------------- the caller's thread --

// Repeats a call until it succeeds. Only one allocation fails, so the second try succeeds.
class Retrier {
 public:
  template <typename Call>
  void operator()(const char* what, Call&& call) {
    int32_t status = Try(call);
    if (status == OFFLOAD_OUT_OF_HOST_MEMORY) {
      failures += 1;
      EXPECT_NE(std::string(offload_last_error()), "");
      status = Try(call);
    }
    EXPECT_EQ(status, OFFLOAD_OK) << what << ": " << offload_last_error();
  }

  uint64_t failures = 0;

 private:
  template <typename Call>
  int32_t Try(Call& call) {
    has_memory = false;
    in_call = true;
    const int32_t status = call();
    in_call = false;
    has_memory = true;
    return status;
  }
};

constexpr uint32_t kParams = 40;  // enough for tables to grow
constexpr uint64_t kElements = 64;

// The memory of a program on one device: two places for params and one for gradients.
struct Memory {
  explicit Memory(int32_t device_kind) {
    auto options = Make<offload_context_options_t>();
    options.device_kind = device_kind;
    options.threads = 2;
    options.sim_memory_bytes = device_kind == OFFLOAD_DEVICE_SIM ? uint64_t{1} << 20 : 0;
    options.log = DropLog;
    EXPECT_OFFLOAD_OK(offload_context_create(&options, &context));
    for (void** array : {&params, &others, &grads})
      EXPECT_OFFLOAD_OK(offload_device_alloc(context, kBytes, array));
    std::vector<unsigned char> bytes(kBytes);
    FillPattern(bytes, OFFLOAD_FP32, 1);
    for (void* array : {params, others}) Upload(array, bytes);
    FillPattern(bytes, OFFLOAD_FP32, 2);
    Upload(grads, bytes);
  }
  ~Memory() {
    for (void* array : {params, others, grads})
      EXPECT_OFFLOAD_OK(offload_device_free(context, array));
    EXPECT_OFFLOAD_OK(offload_context_destroy(context));
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void Upload(void* array, const std::vector<unsigned char>& bytes) const {
    EXPECT_OFFLOAD_OK(offload_device_upload(context, array, bytes.data(), kBytes, nullptr));
  }
  std::vector<unsigned char> Bits() const {
    std::vector<unsigned char> bits(2 * kBytes);
    EXPECT_OFFLOAD_OK(offload_device_download(context, bits.data(), params, kBytes, nullptr));
    EXPECT_OFFLOAD_OK(
        offload_device_download(context, bits.data() + kBytes, others, kBytes, nullptr));
    return bits;
  }

  static constexpr uint64_t kBytes = kParams * kElements * sizeof(float);
  offload_context_t context = nullptr;
  void* params = nullptr;
  void* others = nullptr;
  void* grads = nullptr;
};

void* PlaceOf(void* array, uint32_t param) {
  return static_cast<float*>(array) + param * kElements;
}

void AddParams(Retrier& retry, offload_optimizer_t optimizer, const Memory& memory) {
  std::vector<std::string> names;
  for (uint32_t i = 0; i < kParams; ++i)
    names.push_back("a name that is too long for a string without memory of its own " +
                    std::to_string(i));
  std::vector<offload_param_t> params(kParams, Make<offload_param_t>());
  for (uint32_t i = 0; i < kParams; ++i) {
    params[i].name = names[i].c_str();
    params[i].dtype = params[i].grad_dtype = OFFLOAD_FP32;
    params[i].count = kElements;
    params[i].data = PlaceOf(memory.params, i);
    params[i].grad = PlaceOf(memory.grads, i);
  }
  retry("add_params", [&] {
    return offload_optimizer_add_params(optimizer, params.data(), kParams / 2, nullptr);
  });
  for (uint32_t i = kParams / 2; i < kParams; ++i)
    retry("add_params",
          [&] { return offload_optimizer_add_params(optimizer, &params[i], 1, nullptr); });
}

// All params except the first one move to the other place; the last two exchange their addresses.
void Bind(Retrier& retry, offload_optimizer_t optimizer, const Memory& memory) {
  std::vector<offload_binding_t> bindings;
  for (uint32_t i = 1; i < kParams; ++i) {
    const uint32_t place = i < kParams - 2 ? i : 2 * kParams - 3 - i;
    bindings.push_back(
        {sizeof(offload_binding_t), i, PlaceOf(memory.others, place), PlaceOf(memory.grads, i)});
  }
  retry("bind", [&] {
    return offload_optimizer_bind(optimizer, bindings.data(),
                                  static_cast<uint32_t>(bindings.size()));
  });
}

void SaveAndLoad(Retrier& retry, offload_optimizer_t optimizer, const std::string& path) {
  auto save = Make<offload_save_options_t>();
  save.path = path.c_str();
  retry("save", [&] { return offload_optimizer_save(optimizer, &save, nullptr); });
  retry("wait", [&] { return offload_optimizer_wait(optimizer, 0, -1); });
  auto load = Make<offload_load_options_t>();
  load.path = path.c_str();
  retry("load", [&] { return offload_optimizer_load(optimizer, &load, nullptr); });
  retry("wait", [&] { return offload_optimizer_wait(optimizer, 0, -1); });
}

void MoveStates(Retrier& retry, offload_optimizer_t optimizer) {
  retry("offload_states",
        [&] { return offload_optimizer_offload_states(optimizer, nullptr, nullptr); });
  retry("reload_states",
        [&] { return offload_optimizer_reload_states(optimizer, nullptr, nullptr); });
}

struct CallsOutcome {
  std::vector<unsigned char> bits;
  uint64_t allocations = 0;
  uint64_t failures = 0;
};

CallsOutcome RunCalls(int32_t device_kind, uint64_t failing) {
  const TemporaryDirectory directory;
  const Memory memory(device_kind);
  Retrier retry;
  counts_calls = true;
  allocations = 0;
  failing_allocation = failing;
  offload_optimizer_t optimizer = nullptr;
  auto options = Make<offload_optimizer_options_t>();
  options.device_fraction = 0.5;
  options.algorithm = OFFLOAD_ADAMW;
  options.chunk_elements = 1024;
  options.staging_slots = 2;
  options.movable = OFFLOAD_MOVABLE_STATES;
  options.save_buffer_bytes = device_kind == OFFLOAD_DEVICE_HOST ? UINT64_MAX : 1 << 20;
  retry("create", [&] { return offload_optimizer_create(memory.context, &options, &optimizer); });
  auto group = Make<offload_group_t>();
  group.lr = 0.01;
  group.beta1 = 0.9;
  group.beta2 = 0.99;
  group.eps = 1e-8;
  uint32_t group_id = 0;
  retry("add_group", [&] { return offload_optimizer_add_group(optimizer, &group, &group_id); });
  EXPECT_EQ(group_id, 0u) << "a group was added twice";
  AddParams(retry, optimizer, memory);
  retry("commit", [&] { return offload_optimizer_commit(optimizer, nullptr); });
  const auto step = [&] { return offload_optimizer_step(optimizer, nullptr, nullptr); };
  retry("step", step);
  retry("wait", [&] { return offload_optimizer_wait(optimizer, 0, -1); });
  Bind(retry, optimizer, memory);
  retry("step", step);
  SaveAndLoad(retry, optimizer, directory / "saved");
  float values[kElements];
  retry("read_state", [&] {
    return offload_optimizer_read_state(optimizer, 0, OFFLOAD_STATE_EXP_AVG, 0, kElements, values);
  });
  MoveStates(retry, optimizer);
  retry("step", step);
  retry("wait", [&] { return offload_optimizer_wait(optimizer, 0, -1); });
  CallsOutcome outcome{{}, allocations, retry.failures};
  failing_allocation = kNotCounted;
  counts_calls = false;
  EXPECT_OFFLOAD_OK(offload_optimizer_destroy(optimizer));
  outcome.bits = memory.Bits();
  return outcome;
}

TEST(AllocationFailure, InACallChangesNothingAndTheCallCanBeMadeAgain) {
  has_memory = true;
  for (const int32_t device_kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    SCOPED_TRACE(device_kind);
    const CallsOutcome good = RunCalls(device_kind, kNone);
    ASSERT_EQ(good.failures, 0u);
    const uint64_t stride = std::max<uint64_t>(1, good.allocations / Scaled(150));
    uint64_t failures = 0;
    for (uint64_t failing = 0; failing < good.allocations; failing += stride) {
      SCOPED_TRACE("allocation " + std::to_string(failing) + " of " +
                   std::to_string(good.allocations));
      const CallsOutcome outcome = RunCalls(device_kind, failing);
      EXPECT_TRUE(outcome.bits == good.bits);
      failures += outcome.failures;
    }
    EXPECT_GT(failures, 0u) << "no allocation was made to fail";
    RecordProperty(device_kind == OFFLOAD_DEVICE_HOST ? "host" : "sim",
                   std::to_string(failures) + " failures, " + std::to_string(good.allocations) +
                       " allocations");
  }
}

uint64_t FreeBytes(offload_context_t context) {
  auto info = Make<offload_context_info_t>();
  EXPECT_OFFLOAD_OK(offload_context_get_info(context, &info));
  return info.device_memory_free_bytes;
}

// Device memory or a stream that cannot be recorded is not taken either. On the host a leak checker
// sees this, on sim the amount of free memory.
TEST(AllocationFailure, OfWhatACallerIsGivenTakesNothing) {
  has_memory = true;
  for (const int32_t device_kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    SCOPED_TRACE(device_kind);
    const Memory memory(device_kind);
    const bool has_streams = device_kind == OFFLOAD_DEVICE_SIM;
    const uint64_t before = FreeBytes(memory.context);
    uint64_t failures = 0;
    counts_calls = true;
    for (uint64_t failing = 0, made = 1; failing < made; ++failing) {
      Retrier retry;
      allocations = 0;
      failing_allocation = failing;
      void* data = nullptr;
      offload_stream_t stream = nullptr;
      retry("alloc", [&] { return offload_device_alloc(memory.context, 512, &data); });
      if (has_streams)
        retry("stream_create", [&] { return offload_stream_create(memory.context, &stream); });
      made = allocations;
      failing_allocation = kNotCounted;
      failures += retry.failures;
      EXPECT_OFFLOAD_OK(offload_stream_destroy(memory.context, stream));
      EXPECT_OFFLOAD_OK(offload_device_free(memory.context, data));
      EXPECT_EQ(FreeBytes(memory.context), before) << "allocation " << failing;
    }
    counts_calls = false;
    EXPECT_GT(failures, 0u);
  }
}

}  // namespace
}  // namespace hybridopt::fault
