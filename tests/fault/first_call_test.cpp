// Memory runs out in the first work of a process. Each program below is the first to use the
// library in a child process, and one allocation of that process fails, or all from that one on: no
// process ends, the call that failed says why, nothing stays open, and with memory the same program
// then does its work. The library is loaded at run time, as Python does it: what it keeps for each
// thread is then allocated on first use. A library that is linked has it from the start.
#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>

#include "../malloc_hooks.h"
#include "../scale.h"
#include "../temporary_directory.h"
#include "offload.h"

namespace {

constexpr uint64_t kNone = UINT64_MAX;
std::atomic<bool> counting = false;
std::atomic<uint64_t> allocations = 0;
std::atomic<uint64_t> failing = kNone;  // counted from 0
std::atomic<bool> all_fail = false;     // all allocations from that one on

}  // namespace

bool malloc_hooks::Fails() {
  if (!counting) return false;
  const uint64_t number = allocations.fetch_add(1);
  return all_fail ? number >= failing : number == failing;
}
void malloc_hooks::Allocated(void*) {}
void malloc_hooks::Freeing(void*) {}

namespace hybridopt::fault {
namespace {

#define FUNCTIONS(F)               \
  F(offload_checkpoint_inspect)    \
  F(offload_checkpoint_newest)     \
  F(offload_checkpoint_verify)     \
  F(offload_context_create)        \
  F(offload_context_destroy)       \
  F(offload_device_alloc)          \
  F(offload_device_upload)         \
  F(offload_last_error)            \
  F(offload_optimizer_add_group)   \
  F(offload_optimizer_add_params)  \
  F(offload_optimizer_commit)      \
  F(offload_optimizer_create)      \
  F(offload_optimizer_destroy)     \
  F(offload_optimizer_load)        \
  F(offload_optimizer_save)        \
  F(offload_optimizer_step)        \
  F(offload_optimizer_step_result) \
  F(offload_optimizer_trace_start) \
  F(offload_optimizer_trace_stop)  \
  F(offload_optimizer_wait)        \
  F(offload_pool_create)           \
  F(offload_pool_destroy)          \
  F(offload_pool_enter)            \
  F(offload_pool_torch_alloc)      \
  F(offload_pool_torch_free)       \
  F(offload_stash_create)          \
  F(offload_stash_destroy)         \
  F(offload_stash_pop)             \
  F(offload_stash_prefetch)        \
  F(offload_stash_push)            \
  F(offload_stash_wait)            \
  F(offload_status_name)

// The library: loaded, but no function of it has been called. libnuma has been loaded before: while
// that starts, it ends the process if it has no memory.
struct Library {
  Library() {
    dlopen("libnuma.so.1", RTLD_NOW | RTLD_LOCAL);
    void* const library = dlopen(HYBRIDOPT_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) std::fprintf(stderr, "%s\n", dlerror());
#define FIND(name) name = reinterpret_cast<decltype(name)>(dlsym(library, #name));
    if (library != nullptr) {
      FUNCTIONS(FIND)
    }
  }
#define DECLARE(name) decltype(&::name) name = nullptr;
  FUNCTIONS(DECLARE)
};

const Library& Loaded() {
  static const Library library;
  return library;
}

#define CALL(name, ...) Loaded().name(__VA_ARGS__)

template <typename Struct>
Struct Make() {
  Struct value{};
  value.struct_size = sizeof(Struct);
  return value;
}

// The report of a child to its parent.
struct Outcome {
  uint64_t allocations;
  int32_t status;  // of the first try
  char error[1024];
  char wrong[1280];  // "" if all is well
};

// The data of a program. Nothing here allocates: only the library's allocations count.
struct World {
  char golden[PATH_MAX];  // a checkpoint
  char folder[PATH_MAX];  // with that checkpoint in it
  char target[PATH_MAX];  // a path at which nothing exists
  int32_t device_kind = OFFLOAD_DEVICE_HOST;
  offload_context_t context = nullptr;
  offload_optimizer_t optimizer = nullptr;
  offload_stash_t stash = nullptr;
  offload_pool_t pool = nullptr;
  void* block = nullptr;  // of the pool
  void* data[3] = {};
  void* grad[3] = {};
};

#define TRY(...)                                                                   \
  do {                                                                             \
    if (const int32_t failed = (__VA_ARGS__); failed != OFFLOAD_OK) return failed; \
  } while (false)

int32_t CreateContext(World& world) {
  auto options = Make<offload_context_options_t>();
  options.device_kind = world.device_kind;
  options.threads = 2;
  options.log = [](void*, int32_t, const char*) {};
  return CALL(offload_context_create, &options, &world.context);
}

// The params of the golden checkpoint.
int32_t AddParam(World& world, int index) {
  constexpr int64_t kZeros[3] = {};
  constexpr struct {
    const char* name;
    int32_t dtype;
    uint32_t dimensions;
    int64_t shape[3];
    uint64_t count;
  } kParams[] = {{"matrix", OFFLOAD_BF16, 2, {5, 4}, 20},
                 {"bias", OFFLOAD_FP32, 1, {3}, 3},
                 {"half", OFFLOAD_FP16, 3, {2, 1, 3}, 6}};
  const auto& row = kParams[index];
  if (world.data[index] == nullptr)
    TRY(CALL(offload_device_alloc, world.context, 256, &world.data[index]));
  if (world.grad[index] == nullptr)
    TRY(CALL(offload_device_alloc, world.context, 256, &world.grad[index]));
  const char zeros[256] = {};
  for (void* array : {world.data[index], world.grad[index]})
    TRY(CALL(offload_device_upload, world.context, array, zeros, sizeof(zeros), nullptr));
  auto shard = Make<offload_shard_t>();
  shard.dimensions = row.dimensions;
  shard.box_count = 1;
  shard.global_shape = shard.box_extents = row.shape;
  shard.box_offsets = kZeros;
  auto param = Make<offload_param_t>();
  param.dtype = row.dtype;
  param.grad_dtype = OFFLOAD_FP32;
  param.name = row.name;
  param.data = world.data[index];
  param.grad = world.grad[index];
  param.count = row.count;
  param.shard = &shard;
  return CALL(offload_optimizer_add_params, world.optimizer, &param, 1, nullptr);
}

int32_t Register(World& world) {
  TRY(CreateContext(world));
  auto options = Make<offload_optimizer_options_t>();
  options.algorithm = OFFLOAD_ADAMW;
  TRY(CALL(offload_optimizer_create, world.context, &options, &world.optimizer));
  auto group = Make<offload_group_t>();
  group.lr = 0.1;
  group.eps = 1e-8;
  uint32_t id = 0;
  TRY(CALL(offload_optimizer_add_group, world.optimizer, &group, &id));
  for (int i = 0; i < 3; ++i) TRY(AddParam(world, i));
  return OFFLOAD_OK;
}

int32_t Commit(World& world) {
  TRY(Register(world));
  return CALL(offload_optimizer_commit, world.optimizer, nullptr);
}

int32_t Inspect(World& world) {
  return CALL(offload_checkpoint_inspect, world.golden, nullptr, nullptr, nullptr);
}

int32_t Verify(World& world) { return CALL(offload_checkpoint_verify, world.golden, nullptr); }

// Finds the existing checkpoint, or returns an error.
int32_t FindNewest(World& world, const offload_verify_options_t* verify) {
  char newest[PATH_MAX];
  TRY(CALL(offload_checkpoint_newest, world.folder, verify, newest, sizeof(newest)));
  return std::strcmp(newest, world.golden) == 0 ? OFFLOAD_OK : OFFLOAD_INTERNAL;
}
int32_t Newest(World& world) { return FindNewest(world, nullptr); }
int32_t NewestIntact(World& world) {
  const auto verify = Make<offload_verify_options_t>();
  return FindNewest(world, &verify);
}

// A resume: the first work on files is a load.
int32_t Load(World& world) {
  TRY(Commit(world));
  auto options = Make<offload_load_options_t>();
  options.path = world.golden;
  TRY(CALL(offload_optimizer_load, world.optimizer, &options, nullptr));
  return CALL(offload_optimizer_wait, world.optimizer, 0, -1);
}

int32_t Save(World& world) {
  TRY(Commit(world));
  auto options = Make<offload_save_options_t>();
  options.path = world.target;
  TRY(CALL(offload_optimizer_save, world.optimizer, &options, nullptr));
  return CALL(offload_optimizer_wait, world.optimizer, 0, -1);
}

int32_t Step(World& world) {
  TRY(Commit(world));
  auto options = Make<offload_step_options_t>();
  options.grad_norm_max = 1;
  TRY(CALL(offload_optimizer_step, world.optimizer, &options, nullptr));
  TRY(CALL(offload_optimizer_wait, world.optimizer, 0, -1));
  auto result = Make<offload_step_result_t>();
  TRY(CALL(offload_optimizer_step_result, world.optimizer, 0, &result));
  return result.skipped == 0 ? OFFLOAD_OK : OFFLOAD_INTERNAL;
}

// Only what commit allocates fails. It starts the update threads, of which some then run and others
// do not.
int32_t StartThreads(World& world) {
  const bool counted = counting.exchange(false);
  const int32_t registered = Register(world);
  counting = counted;
  TRY(registered);
  return CALL(offload_optimizer_commit, world.optimizer, nullptr);
}

int32_t TraceStep(World& world) {
  TRY(Commit(world));
  TRY(CALL(offload_optimizer_trace_start, world.optimizer, 4096));
  TRY(CALL(offload_optimizer_step, world.optimizer, nullptr, nullptr));
  return CALL(offload_optimizer_trace_stop, world.optimizer, world.target, nullptr);
}

int32_t UsePool(World& world) {
  TRY(CreateContext(world));
  TRY(CALL(offload_pool_create, world.context, &world.pool));
  TRY(CALL(offload_pool_enter, world.pool));
  world.block = CALL(offload_pool_torch_alloc, 4096, 0, nullptr);
  return world.block != nullptr ? OFFLOAD_OK : OFFLOAD_OUT_OF_HOST_MEMORY;
}

int32_t UseStash(World& world) {
  TRY(CreateContext(world));
  auto options = Make<offload_stash_options_t>();
  options.budget_bytes = options.slab_bytes = 4096;
  options.min_bytes = 1;
  TRY(CALL(offload_stash_create, world.context, &options, &world.stash));
  if (world.data[0] == nullptr) TRY(CALL(offload_device_alloc, world.context, 256, &world.data[0]));
  offload_stash_ticket_t ticket = 0;
  TRY(CALL(offload_stash_push, world.stash, 0, world.data[0], 256, nullptr, &ticket));
  TRY(CALL(offload_stash_prefetch, world.stash, ticket, world.data[0], 256, nullptr));
  TRY(CALL(offload_stash_pop, world.stash, ticket, nullptr, 0));
  return CALL(offload_stash_wait, world.stash, 0, -1);
}

// The text of a thread's first failure, here and in a thread of its own.
int32_t Fail(World&) {
  const auto fail = [](void*) -> void* {
    const int32_t status = CALL(offload_optimizer_wait, nullptr, 0, -1);
    const char* const text = CALL(offload_last_error);
    const bool told = std::strcmp(text, "optimizer is NULL, expected a handle") == 0;
    const bool short_of_memory = std::strncmp(text, "out of host memory", 18) == 0;
    // NULL means that the text is neither of the two texts above.
    if (status != OFFLOAD_INVALID_ARGUMENT || (!told && !short_of_memory)) return nullptr;
    static char good, no_text;
    return told ? &good : &no_text;
  };
  (void)fail(nullptr);
  pthread_t thread;
  if (pthread_create(&thread, nullptr, fail, nullptr) != 0) return OFFLOAD_OK;  // no memory for it
  void* of_thread = nullptr;
  pthread_join(thread, &of_thread);
  return of_thread != nullptr && fail(nullptr) != nullptr ? OFFLOAD_OK : OFFLOAD_INTERNAL;
}

// Destroys everything that a program has made. That needs no memory.
int32_t End(World& world) {
  if (world.block != nullptr) CALL(offload_pool_torch_free, world.block, 4096, 0, nullptr);
  world.block = nullptr;
  if (world.pool != nullptr) TRY(CALL(offload_pool_destroy, world.pool));
  world.pool = nullptr;
  if (world.stash != nullptr) TRY(CALL(offload_stash_destroy, world.stash));
  world.stash = nullptr;
  if (world.optimizer != nullptr) TRY(CALL(offload_optimizer_destroy, world.optimizer));
  world.optimizer = nullptr;
  if (world.context != nullptr) TRY(CALL(offload_context_destroy, world.context));
  world.context = nullptr;
  for (int i = 0; i < 3; ++i) world.data[i] = world.grad[i] = nullptr;
  return OFFLOAD_OK;
}

int OpenFiles() {
  int files = 0;
  for (int file = 0; file < 1024; ++file) files += fcntl(file, F_GETFD) >= 0 ? 1 : 0;
  return files;
}

// ---------------------------------------------------------------------------- the child process --

// Whether the text says that memory ran out. The system's words for that are others.
bool IsExplained(const char* error) {
  for (const char* cause :
       {"out of host memory", "Cannot allocate memory", "host memory: asked for",
        "refused another thread", "bytes of host memory"})
    if (std::strstr(error, cause) != nullptr) return true;
  return false;
}

struct Program {
  const char* name;
  int32_t (*run)(World& world);
  int32_t device_kind = OFFLOAD_DEVICE_HOST;
  bool each = false;  // each allocation fails, not only some
};

void RunInChild(const Program& program, World& world, Outcome* outcome) {
  const int files = OpenFiles();
  counting = true;
  outcome->status = program.run(world);
  std::snprintf(outcome->error, sizeof(outcome->error), "%s", CALL(offload_last_error));
  const int32_t ended = End(world);
  counting = false;
  outcome->allocations = allocations;
  const auto wrong = [&](const char* what, int32_t status) {
    std::snprintf(outcome->wrong, sizeof(outcome->wrong), "%s: %s: %s", what,
                  CALL(offload_status_name, status), CALL(offload_last_error));
  };
  if (outcome->status != OFFLOAD_OK && !IsExplained(outcome->error))
    std::snprintf(outcome->wrong, sizeof(outcome->wrong), "not told why: %s: %s",
                  CALL(offload_status_name, outcome->status), outcome->error);
  if (ended != OFFLOAD_OK) wrong("the end", ended);
  std::snprintf(world.target + std::strlen(world.target), 8, "-again");
  if (const int32_t again = program.run(world); again != OFFLOAD_OK) wrong("with memory", again);
  if (const int32_t status = End(world); status != OFFLOAD_OK) wrong("the second end", status);
  if (OpenFiles() != files) wrong("files stay open", OFFLOAD_INTERNAL);
}

// ---------------------------------------------------------------------------------- the parent --

class FirstCall : public testing::TestWithParam<Program> {
 protected:
  FirstCall()
      : outcome_(static_cast<Outcome*>(mmap(nullptr, sizeof(Outcome), PROT_READ | PROT_WRITE,
                                            MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~FirstCall() override { munmap(outcome_, sizeof(Outcome)); }

  Outcome Run(uint64_t number, bool all) {
    *outcome_ = Outcome{};
    const TemporaryDirectory directory;
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      World world;
      world.device_kind = GetParam().device_kind;
      std::snprintf(world.folder, sizeof(world.folder), "%s", Folder().c_str());
      std::snprintf(world.golden, sizeof(world.golden), "%s/adamw-world1", Folder().c_str());
      std::snprintf(world.target, sizeof(world.target), "%s/saved", directory.path().c_str());
      failing = number;
      all_fail = all;
      RunInChild(GetParam(), world, outcome_);
      std::_Exit(0);
    }
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "wait status " << status;
    EXPECT_STREQ(outcome_->wrong, "");
    return *outcome_;
  }

 private:
  // A folder with one checkpoint in it.
  static std::string Folder() {
    static const TemporaryDirectory directory;
    static const bool copied = [] {
      std::filesystem::copy(HYBRIDOPT_GOLDEN "/adamw-world1", directory / "adamw-world1");
      return true;
    }();
    EXPECT_TRUE(copied);
    return directory.path();
  }

  Outcome* const outcome_;
};

TEST_P(FirstCall, WithoutMemoryIsToldAndEndsNoProcess) {
  if (!HYBRIDOPT_SEES_MALLOC) GTEST_SKIP() << "the sanitizer's allocator is in force";
  ASSERT_NE(Loaded().offload_last_error, nullptr);
  const Outcome good = Run(kNone, false);
  ASSERT_EQ(good.status, OFFLOAD_OK) << good.error;
  const uint64_t stride =
      GetParam().each ? 1 : std::max<uint64_t>(1, good.allocations / Scaled(50));
  uint64_t told = 0;
  for (uint64_t number = 0; number < good.allocations; number += stride) {
    for (const bool all : {false, true}) {
      SCOPED_TRACE("allocation " + std::to_string(number) + " of " +
                   std::to_string(good.allocations) + (all ? " and all behind it" : ""));
      told += Run(number, all).status != OFFLOAD_OK ? 1 : 0;
      if (HasFailure()) return;
    }
  }
  RecordProperty("told", std::to_string(told) + " of " + std::to_string(good.allocations));
}

INSTANTIATE_TEST_SUITE_P(
    Programs, FirstCall,
    testing::Values(Program{"Inspect", Inspect}, Program{"Verify", Verify},
                    Program{"Newest", Newest}, Program{"NewestIntact", NewestIntact},
                    Program{"Fail", Fail}, Program{"Load", Load}, Program{"Save", Save},
                    Program{"Step", Step}, Program{"UseStash", UseStash},
                    Program{"LoadOnSim", Load, OFFLOAD_DEVICE_SIM},
                    Program{"StepOnSim", Step, OFFLOAD_DEVICE_SIM},
                    Program{"UseStashOnSim", UseStash, OFFLOAD_DEVICE_SIM},
                    Program{"StartThreads", StartThreads, OFFLOAD_DEVICE_HOST, true},
                    Program{"TraceStep", TraceStep},
                    Program{"UsePool", UsePool, OFFLOAD_DEVICE_SIM}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace hybridopt::fault
