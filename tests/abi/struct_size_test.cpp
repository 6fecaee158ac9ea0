// Callers of older and of newer releases hand in shorter and longer structs. Every struct lies
// directly before a page that faults, so that one byte too many read or written ends the test.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "../temporary_directory.h"
#include "offload.h"

namespace {

constexpr uint32_t kRefusedSizes[] = {0, 1, 2, 3, uint32_t{1} << 30, UINT32_MAX};
constexpr uint32_t kExtraBytes[] = {8, 64, 256};

// `bytes` bytes, filled and aligned to 8, that end where a page without access begins (the next
// multiple of 8 does, to be exact).
class GuardedBytes {
 public:
  GuardedBytes(size_t bytes, unsigned char fill)
      : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))), pages_(Map(page_), Unmap{page_}) {
    data_ = pages_.get() + page_ - (bytes + 7) / 8 * 8;
    std::memset(data_, fill, bytes);
  }

  unsigned char* data() { return data_; }
  template <typename Struct>
  Struct* as() {
    return reinterpret_cast<Struct*>(data_);
  }

 private:
  struct Unmap {
    size_t page;
    void operator()(unsigned char* pages) const { munmap(pages, 2 * page); }
  };
  static unsigned char* Map(size_t page) {
    void* pages =
        mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(pages, MAP_FAILED);
    EXPECT_EQ(mprotect(static_cast<char*>(pages) + page, page, PROT_NONE), 0);
    return static_cast<unsigned char*>(pages);
  }

  size_t page_;
  std::unique_ptr<unsigned char, Unmap> pages_;
  unsigned char* data_;
};

// The first struct_size bytes of `value`, zero beyond its end; at least the size field itself.
template <typename Struct>
GuardedBytes Resized(Struct value, uint32_t struct_size) {
  const uint32_t bytes = std::clamp<uint32_t>(struct_size, 4, 4096);
  value.struct_size = struct_size;
  GuardedBytes resized(bytes, 0);
  std::memcpy(resized.data(), &value, std::min<size_t>(bytes, sizeof(value)));
  return resized;
}

template <typename Struct>
Struct Empty() {
  Struct value{};
  value.struct_size = sizeof(value);
  return value;
}

std::string Outcome(int32_t status) {
  if (status == OFFLOAD_OK) return "OK";
  return std::string(offload_status_name(status)) + ": " + offload_last_error();
}

void ExpectSizeRefused(int32_t status, uint32_t size) {
  EXPECT_EQ(status, OFFLOAD_INVALID_ARGUMENT) << "struct_size " << size;
  const std::string text = offload_last_error();
  EXPECT_NE(text.find("struct_size"), std::string::npos) << text;
  EXPECT_NE(text.find(std::to_string(size)), std::string::npos) << text;
}

// A context with an optimizer over one param of four elements.
struct World {
  explicit World(int32_t device_kind = OFFLOAD_DEVICE_HOST) {
    auto options = Empty<offload_context_options_t>();
    options.device_kind = device_kind;
    options.threads = 1;
    EXPECT_EQ(Outcome(offload_context_create(&options, &context)), "OK");
  }
  ~World() {
    if (optimizer != nullptr) {
      EXPECT_EQ(Outcome(offload_optimizer_destroy(optimizer)), "OK");
    }
    EXPECT_EQ(Outcome(offload_context_destroy(context)), "OK");
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  static offload_optimizer_options_t OptimizerOptions() {
    auto options = Empty<offload_optimizer_options_t>();
    options.algorithm = OFFLOAD_SGD;
    return options;
  }
  static offload_group_t Group() {
    auto group = Empty<offload_group_t>();
    group.lr = 0.5;
    group.momentum = 0.25;
    return group;
  }
  offload_param_t Param() {
    auto param = Empty<offload_param_t>();
    param.dtype = OFFLOAD_FP32;
    param.grad_dtype = OFFLOAD_FP32;
    param.name = "weight";
    param.data = data.data();
    param.grad = grad.data();
    param.count = data.size();
    return param;
  }

  void CreateOptimizer(uint32_t movable = 0) {
    auto options = OptimizerOptions();
    options.movable = movable;
    EXPECT_EQ(Outcome(offload_optimizer_create(context, &options, &optimizer)), "OK");
  }
  void AddGroup() {
    const auto group = Group();
    EXPECT_EQ(Outcome(offload_optimizer_add_group(optimizer, &group, &group_id)), "OK");
  }
  void Commit(uint32_t movable = 0) {
    CreateOptimizer(movable);
    AddGroup();
    const auto param = Param();
    EXPECT_EQ(Outcome(offload_optimizer_add_params(optimizer, &param, 1, nullptr)), "OK");
    EXPECT_EQ(Outcome(offload_optimizer_commit(optimizer, nullptr)), "OK");
  }
  void Step() {
    EXPECT_EQ(Outcome(offload_optimizer_step(optimizer, nullptr, nullptr)), "OK");
    EXPECT_EQ(Outcome(offload_optimizer_wait(optimizer, 0, -1)), "OK");
  }

  std::array<float, 4> data = {1, 2, 3, 4};
  std::array<float, 4> grad = {1, 1, 1, 1};
  offload_context_t context = nullptr;
  offload_optimizer_t optimizer = nullptr;
  uint32_t group_id = 0;
};

// ------------------------------------------------------------------------------ input structs --
// Each has a valid value in which every later field matters, and a call that takes it.

struct ContextOptions {
  using Struct = offload_context_options_t;
  static Struct Valid() {
    auto options = Empty<Struct>();
    options.device_kind = OFFLOAD_DEVICE_SIM;
    options.sim_memory_bytes = uint64_t{1} << 24;
    return options;
  }
  static int32_t Call(const Struct* options) {
    offload_context_t context = nullptr;
    const int32_t status = offload_context_create(options, &context);
    if (context != nullptr) {
      EXPECT_EQ(Outcome(offload_context_destroy(context)), "OK");
    }
    return status;
  }
};

struct OptimizerOptions {
  using Struct = offload_optimizer_options_t;
  static Struct Valid() {
    auto options = Empty<Struct>();
    options.algorithm = OFFLOAD_LION;
    options.device_fraction = 0.5;
    options.chunk_elements = 4096;
    options.staging_slots = 3;
    options.movable = OFFLOAD_MOVABLE_PARAMS | OFFLOAD_MOVABLE_ACCUMULATE;
    options.comm_timeout_ns = 1'000'000'000;
    return options;
  }
  static int32_t Call(const Struct* options) {
    World world;
    return offload_optimizer_create(world.context, options, &world.optimizer);
  }
};

struct StashOptions {
  using Struct = offload_stash_options_t;
  static Struct Valid() {
    auto options = Empty<Struct>();
    options.lanes = 2;
    options.budget_bytes = 8192;
    options.slab_bytes = 4096;
    options.min_bytes = 1;
    options.tickets_max = 3;
    return options;
  }
  static int32_t Call(const Struct* options) {
    World world;
    offload_stash_t stash = nullptr;
    const int32_t status = offload_stash_create(world.context, options, &stash);
    if (stash != nullptr) {
      EXPECT_EQ(Outcome(offload_stash_destroy(stash)), "OK");
    }
    return status;
  }
};

struct Comm {
  using Struct = offload_comm_t;
  static Struct Valid() {
    auto comm = Empty<Struct>();
    comm.rank = 1;
    comm.world = 2;
    comm.sum = [](void*, double*, uint32_t, int64_t) -> int32_t { return OFFLOAD_OK; };
    comm.max = [](void*, int32_t*, uint32_t, int64_t) -> int32_t { return OFFLOAD_OK; };
    comm.barrier = [](void*, int64_t) -> int32_t { return OFFLOAD_OK; };
    return comm;
  }
  static int32_t Call(const Struct* comm) {
    auto options = World::OptimizerOptions();
    options.comm = comm;
    return OptimizerOptions::Call(&options);
  }
};

struct Group {
  using Struct = offload_group_t;
  static Struct Valid() { return World::Group(); }
  static int32_t Call(const Struct* group) {
    World world;
    world.CreateOptimizer();
    return offload_optimizer_add_group(world.optimizer, group, &world.group_id);
  }
};

struct GroupAgain {
  using Struct = offload_group_t;
  static Struct Valid() { return World::Group(); }
  static int32_t Call(const Struct* group) {
    World world;
    world.CreateOptimizer();
    world.AddGroup();
    return offload_optimizer_set_group(world.optimizer, 0, group);
  }
};

struct Param {
  using Struct = offload_param_t;
  static Struct Valid() {
    static World world;  // lends its arrays only
    return world.Param();
  }
  static int32_t Call(const Struct* param) {
    World world;
    world.CreateOptimizer();
    world.AddGroup();
    return offload_optimizer_add_params(world.optimizer, param, 1, nullptr);
  }
};

struct Shard {
  using Struct = offload_shard_t;
  static Struct Valid() {
    static const int64_t shape[] = {4, 4};
    static const int64_t offset[] = {1, 0};
    static const int64_t extent[] = {2, 4};
    auto shard = Empty<Struct>();
    shard.dimensions = 2;
    shard.box_count = 1;
    shard.flags = OFFLOAD_SHARD_RANGE;
    shard.global_shape = shape;
    shard.box_offsets = offset;
    shard.box_extents = extent;
    shard.range_begin = 2;
    shard.range_count = 4;
    return shard;
  }
  static int32_t Call(const Struct* shard) {
    World world;
    world.CreateOptimizer();
    world.AddGroup();
    auto param = world.Param();
    param.shard = shard;
    return offload_optimizer_add_params(world.optimizer, &param, 1, nullptr);
  }
};

struct Binding {
  using Struct = offload_binding_t;
  static Struct Valid() {
    static float data[4];
    static const float grad[4] = {};
    auto binding = Empty<Struct>();
    binding.data = data;
    binding.grad = grad;
    return binding;
  }
  static int32_t Call(const Struct* binding) {
    World world;
    world.Commit();
    return offload_optimizer_bind(world.optimizer, binding, 1);
  }
};

struct StepOptions {
  using Struct = offload_step_options_t;
  static Struct Valid() {
    auto options = Empty<Struct>();
    options.grad_scale = 2;
    options.grad_norm_max = 0.5;
    return options;
  }
  static int32_t Call(const Struct* options) {
    World world;
    world.Commit();
    return offload_optimizer_step(world.optimizer, options, nullptr);
  }
};

// Moves need room that was asked for at create.
struct MoveOptions {
  using Struct = offload_move_options_t;
  static Struct Valid() {
    static const uint32_t params[] = {0};
    static const offload_stream_t streams[] = {nullptr};
    auto options = Empty<Struct>();
    options.flags = OFFLOAD_MOVE_ACCUMULATE;
    options.params = params;
    options.param_count = 1;
    options.stream_count = 1;
    options.streams = streams;
    return options;
  }
  static int32_t Call(const Struct* options) {
    World world;
    world.Commit(OFFLOAD_MOVABLE_ACCUMULATE);
    return offload_optimizer_offload_grads(world.optimizer, options, nullptr);
  }
};

void* CheckpointUser() {
  static int user;
  return &user;
}

// Its directory goes with the program.
const std::string& CheckpointPath() {
  static const hybridopt::TemporaryDirectory directory;
  static const std::string path = directory / "checkpoint";
  return path;
}

struct SaveOptions {
  using Struct = offload_save_options_t;
  static Struct Valid() {
    auto options = Empty<Struct>();
    options.flags = OFFLOAD_SAVE_MASTERS_ONLY;
    options.path = CheckpointPath().c_str();
    options.progress = [](void*, uint64_t, uint64_t) {};
    options.progress_user = CheckpointUser();
    options.io_depth = 1;
    return options;
  }
  static int32_t Call(const Struct* options) {
    World world;
    world.Commit();
    std::filesystem::remove_all(CheckpointPath());
    const int32_t status = offload_optimizer_save(world.optimizer, options, nullptr);
    return status == OFFLOAD_OK ? offload_optimizer_wait(world.optimizer, 0, -1) : status;
  }
};

struct LoadOptions {
  using Struct = offload_load_options_t;
  static Struct Valid() {
    const offload_save_options_t saved = SaveOptions::Valid();
    EXPECT_EQ(Outcome(SaveOptions::Call(&saved)), "OK");
    auto options = Empty<Struct>();
    options.flags = OFFLOAD_LOAD_FRESH_MOMENTS;
    options.path = CheckpointPath().c_str();
    options.progress = [](void*, uint64_t, uint64_t) {};
    options.progress_user = CheckpointUser();
    options.io_depth = 1;
    return options;
  }
  static int32_t Call(const Struct* options) {
    World world;
    world.Commit();
    const int32_t status = offload_optimizer_load(world.optimizer, options, nullptr);
    return status == OFFLOAD_OK ? offload_optimizer_wait(world.optimizer, 0, -1) : status;
  }
};

struct VerifyOptions {
  using Struct = offload_verify_options_t;
  static Struct Valid() {
    const offload_save_options_t saved = SaveOptions::Valid();
    EXPECT_EQ(Outcome(SaveOptions::Call(&saved)), "OK");
    auto options = Empty<Struct>();
    options.io_depth = 1;
    options.progress = [](void*, uint64_t, uint64_t) {};
    options.progress_user = CheckpointUser();
    return options;
  }
  static int32_t Call(const Struct* options) {
    return offload_checkpoint_verify(CheckpointPath().c_str(), options);
  }
};

struct TypeName {
  template <typename Type>
  static std::string GetName(int) {
    std::string name = __PRETTY_FUNCTION__;  // "... [with Type = {anonymous}::Group; ...]"
    const size_t begin = name.find("::", name.find("Type = ")) + 2;
    return name.substr(begin, name.find_first_of(";]", begin) - begin);
  }
};

template <typename Input>
class InputStructSize : public testing::Test {};
using Inputs =
    testing::Types<ContextOptions, OptimizerOptions, Comm, Group, GroupAgain, Param, Shard, Binding,
                   StepOptions, MoveOptions, SaveOptions, LoadOptions, VerifyOptions, StashOptions>;
TYPED_TEST_SUITE(InputStructSize, Inputs, TypeName);

TYPED_TEST(InputStructSize, TooSmallForItselfOrAbsurdIsRefused) {
  for (const uint32_t size : kRefusedSizes) {
    GuardedBytes input = Resized(TypeParam::Valid(), size);
    ExpectSizeRefused(TypeParam::Call(input.as<typename TypeParam::Struct>()), size);
  }
}

TYPED_TEST(InputStructSize, ShorterReadsAsZerosAtTheEnd) {
  using Struct = typename TypeParam::Struct;
  const Struct valid = TypeParam::Valid();
  for (uint32_t size = 8; size <= sizeof(Struct); size += 8) {
    Struct zeroed = Empty<Struct>();
    std::memcpy(&zeroed, &valid, size);
    zeroed.struct_size = sizeof(zeroed);
    GuardedBytes input = Resized(valid, size);
    const std::string expected = Outcome(TypeParam::Call(&zeroed));
    EXPECT_EQ(Outcome(TypeParam::Call(input.as<Struct>())), expected) << "struct_size " << size;
    if (size == sizeof(Struct)) {
      EXPECT_EQ(expected, "OK");
    }
  }
}

TYPED_TEST(InputStructSize, LongerWithZeroTailIsAccepted) {
  using Struct = typename TypeParam::Struct;
  for (const uint32_t extra : kExtraBytes) {
    GuardedBytes input = Resized(TypeParam::Valid(), sizeof(Struct) + extra);
    EXPECT_EQ(Outcome(TypeParam::Call(input.as<Struct>())), "OK") << extra << " bytes longer";
  }
}

TYPED_TEST(InputStructSize, AnyNonzeroByteInTheTailIsUnsupported) {
  using Struct = typename TypeParam::Struct;
  for (const uint32_t extra : kExtraBytes) {
    const uint32_t size = sizeof(Struct) + extra;
    for (uint32_t byte = sizeof(Struct); byte < size; ++byte) {
      GuardedBytes input = Resized(TypeParam::Valid(), size);
      input.data()[byte] = 1;
      EXPECT_EQ(TypeParam::Call(input.as<Struct>()), OFFLOAD_UNSUPPORTED) << "byte " << byte;
      const std::string text = offload_last_error();
      EXPECT_NE(text.find("struct_size"), std::string::npos) << text;
    }
  }
}

// What lies behind a shorter struct is not only not read, the defaults really take effect.

TEST(ShorterInput, ContextOptionsGetTheDefaultCapacity) {
  GuardedBytes input = Resized(ContextOptions::Valid(), 48);  // ends before sim_memory_bytes
  offload_context_t context = nullptr;
  ASSERT_EQ(Outcome(offload_context_create(input.as<offload_context_options_t>(), &context)), "OK");
  auto info = Empty<offload_context_info_t>();
  EXPECT_EQ(Outcome(offload_context_get_info(context, &info)), "OK");
  EXPECT_EQ(info.device_kind, OFFLOAD_DEVICE_SIM);
  EXPECT_EQ(info.device_memory_bytes, uint64_t{1} << 30);
  EXPECT_EQ(Outcome(offload_context_destroy(context)), "OK");
}

TEST(ShorterInput, GroupWithoutMomentumHasNoMomentumBuffer) {
  for (const bool cut : {false, true}) {
    World world;
    world.CreateOptimizer();
    GuardedBytes group = Resized(World::Group(), cut ? 56 : sizeof(offload_group_t));
    ASSERT_EQ(Outcome(offload_optimizer_add_group(world.optimizer, group.as<offload_group_t>(),
                                                  &world.group_id)),
              "OK");
    const auto param = world.Param();
    ASSERT_EQ(Outcome(offload_optimizer_add_params(world.optimizer, &param, 1, nullptr)), "OK");
    auto plan = Empty<offload_plan_t>();
    ASSERT_EQ(Outcome(offload_optimizer_plan(world.optimizer, &plan)), "OK");
    EXPECT_EQ(plan.state_bytes[OFFLOAD_TIER_HOST][OFFLOAD_STATE_MOMENTUM_BUFFER] == 0, cut);
  }
}

TEST(ShorterInput, ParamWithoutShardIgnoresWhatLiesBehindIt) {
  auto shard = Shard::Valid();
  shard.range_count = 1;  // is not the param's count
  for (const bool cut : {false, true}) {
    auto param = Param::Valid();
    param.shard = &shard;
    const uint32_t shorter = offsetof(offload_param_t, shard);
    GuardedBytes input = Resized(param, cut ? shorter : sizeof(param));
    EXPECT_EQ(Param::Call(input.as<offload_param_t>()),
              cut ? OFFLOAD_OK : OFFLOAD_INVALID_ARGUMENT);
  }
}

TEST(ShorterInput, OptimizerOptionsWithoutMovableMoveNothing) {
  for (const bool cut : {false, true}) {
    World world;
    auto options = World::OptimizerOptions();
    options.movable = OFFLOAD_MOVABLE_PARAMS;
    const uint32_t shorter = offsetof(offload_optimizer_options_t, movable);
    GuardedBytes input = Resized(options, cut ? shorter : sizeof(options));
    ASSERT_EQ(Outcome(offload_optimizer_create(
                  world.context, input.as<offload_optimizer_options_t>(), &world.optimizer)),
              "OK");
    world.AddGroup();
    const auto param = world.Param();
    ASSERT_EQ(Outcome(offload_optimizer_add_params(world.optimizer, &param, 1, nullptr)), "OK");
    auto plan = Empty<offload_plan_t>();
    ASSERT_EQ(Outcome(offload_optimizer_plan(world.optimizer, &plan)), "OK");
    EXPECT_EQ(plan.host_params_bytes == 0, cut);
  }
}

TEST(ShorterInput, MoveOptionsWithoutParamsMoveAll) {
  for (const bool cut : {false, true}) {
    World world;
    world.Commit(OFFLOAD_MOVABLE_PARAMS);
    auto options = Empty<offload_move_options_t>();
    const uint32_t unknown = 7;  // shows whether it is read
    options.params = &unknown;
    options.param_count = 1;
    GuardedBytes input = Resized(options, cut ? 8 : sizeof(options));
    EXPECT_EQ(offload_optimizer_offload_params(world.optimizer, input.as<offload_move_options_t>(),
                                               nullptr),
              cut ? OFFLOAD_OK : OFFLOAD_INVALID_ARGUMENT);
    ASSERT_EQ(Outcome(offload_optimizer_wait(world.optimizer, 0, -1)), "OK");
    auto stats = Empty<offload_stats_t>();
    ASSERT_EQ(Outcome(offload_optimizer_get_stats(world.optimizer, &stats)), "OK");
    EXPECT_EQ(stats.params_bytes[OFFLOAD_TIER_HOST], cut ? sizeof(world.data) : 0u);
  }
}

TEST(ShorterInput, BindingWithoutGradientLeavesTheParamUntouched) {
  World world;
  world.Commit();
  auto binding = Empty<offload_binding_t>();
  binding.grad = world.grad.data();
  const auto before = world.data;
  GuardedBytes input = Resized(binding, 16);  // ends before grad
  ASSERT_EQ(Outcome(offload_optimizer_bind(world.optimizer, input.as<offload_binding_t>(), 1)),
            "OK");
  world.Step();
  EXPECT_EQ(world.data, before);
  ASSERT_EQ(Outcome(offload_optimizer_bind(world.optimizer, &binding, 1)), "OK");
  world.Step();
  EXPECT_NE(world.data, before);
}

TEST(ShorterInput, StepOptionsWithoutNormDoNotClip) {
  for (const bool cut : {false, true}) {
    World world;
    world.Commit();
    GuardedBytes input = Resized(StepOptions::Valid(), cut ? 16 : sizeof(offload_step_options_t));
    ASSERT_EQ(Outcome(offload_optimizer_step(world.optimizer, input.as<offload_step_options_t>(),
                                             nullptr)),
              "OK");
    ASSERT_EQ(Outcome(offload_optimizer_wait(world.optimizer, 0, -1)), "OK");
    auto result = Empty<offload_step_result_t>();
    ASSERT_EQ(Outcome(offload_optimizer_step_result(world.optimizer, 0, &result)), "OK");
    EXPECT_EQ(result.grad_clip == 1.0, cut);
    // The gradient over the scale of 2, times the clip, times lr.
    EXPECT_EQ(world.data[0] == 0.75f, cut);
  }
}

// ------------------------------------------------------------------------------------- arrays --

// Two copies of `first` and `second`, struct_size bytes apart.
template <typename Struct>
GuardedBytes Pair(Struct first, Struct second, uint32_t first_size, uint32_t second_size) {
  first.struct_size = first_size;
  second.struct_size = second_size;
  GuardedBytes pair(2 * size_t{first_size}, 0);
  const size_t bytes = std::min<size_t>(first_size, sizeof(Struct));
  std::memcpy(pair.data(), &first, bytes);
  std::memcpy(pair.data() + first_size, &second, bytes);
  return pair;
}

TEST(StructArray, ParamsLieStructSizeBytesApart) {
  const uint32_t full = sizeof(offload_param_t);
  for (const uint32_t size : {full - 8, full, full + 8, full + 64}) {
    World world;
    world.CreateOptimizer();
    world.AddGroup();
    auto first = world.Param();
    auto second = world.Param();
    std::array<float, 3> other = {};
    second.name = "bias";
    second.data = other.data();
    second.count = other.size();
    GuardedBytes params = Pair(first, second, size, size);
    ASSERT_EQ(Outcome(offload_optimizer_add_params(world.optimizer, params.as<offload_param_t>(), 2,
                                                   nullptr)),
              "OK");
    auto plan = Empty<offload_plan_t>();
    ASSERT_EQ(Outcome(offload_optimizer_plan(world.optimizer, &plan)), "OK");
    EXPECT_EQ(plan.param_count, 2u);
    EXPECT_EQ(plan.element_count, 7u);
  }
}

TEST(StructArray, BindingsLieStructSizeBytesApart) {
  const uint32_t full = sizeof(offload_binding_t);
  for (const uint32_t size : {full, full + 8, full + 64}) {
    World world;
    world.Commit();
    auto first = Empty<offload_binding_t>();
    auto second = Empty<offload_binding_t>();
    second.param = 7;  // shows that the second one is found where it lies
    GuardedBytes bindings = Pair(first, second, size, size);
    EXPECT_EQ(offload_optimizer_bind(world.optimizer, bindings.as<offload_binding_t>(), 2),
              OFFLOAD_INVALID_ARGUMENT);
    const std::string text = offload_last_error();
    EXPECT_NE(text.find("7"), std::string::npos) << text;
  }
}

TEST(StructArray, ElementsOfDifferentSizesAreRefused) {
  World world;
  world.CreateOptimizer();
  world.AddGroup();
  auto second = world.Param();
  second.name = "bias";
  second.data = nullptr;
  second.count = 0;
  const uint32_t full = sizeof(offload_param_t);
  GuardedBytes params = Pair(world.Param(), second, full, full - 8);
  EXPECT_EQ(offload_optimizer_add_params(world.optimizer, params.as<offload_param_t>(), 2, nullptr),
            OFFLOAD_INVALID_ARGUMENT);
  const std::string text = offload_last_error();
  EXPECT_NE(text.find("struct_size"), std::string::npos) << text;
  auto plan = Empty<offload_plan_t>();
  EXPECT_EQ(Outcome(offload_optimizer_plan(world.optimizer, &plan)), "OK");
  EXPECT_EQ(plan.param_count, 0u);
}

// ----------------------------------------------------------------------------- output structs --

struct ContextInfo {
  using Struct = offload_context_info_t;
  static int32_t Call(World& world, Struct* info) {
    return offload_context_get_info(world.context, info);
  }
};

struct Plan {
  using Struct = offload_plan_t;
  static int32_t Call(World& world, Struct* plan) {
    return offload_optimizer_plan(world.optimizer, plan);
  }
};

struct StepResult {
  using Struct = offload_step_result_t;
  static int32_t Call(World& world, Struct* result) {
    return offload_optimizer_step_result(world.optimizer, 0, result);
  }
};

struct StateView {
  using Struct = offload_state_view_t;
  static int32_t Call(World& world, Struct* view) {
    return offload_optimizer_state(world.optimizer, 0, OFFLOAD_STATE_MOMENTUM_BUFFER, view);
  }
};

struct Stats {
  using Struct = offload_stats_t;
  static int32_t Call(World& world, Struct* stats) {
    return offload_optimizer_get_stats(world.optimizer, stats);
  }
};

struct StashPlan {
  using Struct = offload_stash_plan_t;
  static int32_t Call(World& world, Struct* plan) {
    const offload_stash_options_t options = StashOptions::Valid();
    return offload_stash_plan(world.context, &options, plan);
  }
};

struct StashStats {
  using Struct = offload_stash_stats_t;
  static int32_t Call(World& world, Struct* stats) {
    const offload_stash_options_t options = StashOptions::Valid();
    offload_stash_t stash = nullptr;
    EXPECT_EQ(Outcome(offload_stash_create(world.context, &options, &stash)), "OK");
    const int32_t status = offload_stash_get_stats(stash, stats);
    const std::string text = offload_last_error();
    EXPECT_EQ(Outcome(offload_stash_destroy(stash)), "OK");
    EXPECT_EQ(offload_last_error(), text);
    return status;
  }
};

// The output of a call with this struct_size, in a buffer that held `fill` before.
template <typename Output>
std::vector<unsigned char> OutputBytes(World& world, uint32_t size, unsigned char fill) {
  using Struct = typename Output::Struct;
  GuardedBytes output(size, fill);
  std::memcpy(output.data(), &size, sizeof(size));
  EXPECT_EQ(Outcome(Output::Call(world, output.as<Struct>())), "OK") << "struct_size " << size;
  std::vector<unsigned char> bytes(output.data(), output.data() + size);
  if constexpr (requires(Struct plan) { plan.host_available_bytes; }) {  // moves meanwhile
    const size_t begin = offsetof(Struct, host_available_bytes);
    for (size_t i = begin; i < std::min<size_t>(begin + 8, size); ++i) bytes[i] = 0;
  }
  return bytes;
}

template <typename Output>
class OutputStructSize : public testing::Test {
 protected:
  OutputStructSize() {
    world_.Commit();
    world_.Step();
  }
  World world_;
};
using Outputs =
    testing::Types<ContextInfo, Plan, StepResult, StateView, Stats, StashPlan, StashStats>;
TYPED_TEST_SUITE(OutputStructSize, Outputs, TypeName);

TYPED_TEST(OutputStructSize, TooSmallForItselfOrAbsurdIsRefusedAndNothingIsWritten) {
  for (const uint32_t size : kRefusedSizes) {
    GuardedBytes output(64, 0xab);
    std::memcpy(output.data(), &size, sizeof(size));
    const std::vector<unsigned char> before(output.data(), output.data() + 64);
    ExpectSizeRefused(TypeParam::Call(this->world_, output.as<typename TypeParam::Struct>()), size);
    EXPECT_EQ(std::vector<unsigned char>(output.data(), output.data() + 64), before);
  }
}

TYPED_TEST(OutputStructSize, EveryByteIsWritten) {
  const uint32_t full = sizeof(typename TypeParam::Struct);
  EXPECT_EQ(OutputBytes<TypeParam>(this->world_, full, 0xab),
            OutputBytes<TypeParam>(this->world_, full, 0x54));
}

TYPED_TEST(OutputStructSize, ShorterGetsTheBeginning) {
  const uint32_t full = sizeof(typename TypeParam::Struct);
  const auto expected = OutputBytes<TypeParam>(this->world_, full, 0xab);
  for (uint32_t size = 8; size < full; size += 8) {
    const auto bytes = OutputBytes<TypeParam>(this->world_, size, 0x54);
    EXPECT_TRUE(std::equal(bytes.begin() + 4, bytes.end(), expected.begin() + 4))
        << "struct_size " << size;
    EXPECT_EQ(std::memcmp(bytes.data(), &size, sizeof(size)), 0) << "struct_size changed";
  }
}

TYPED_TEST(OutputStructSize, LongerKeepsItsTail) {
  const uint32_t full = sizeof(typename TypeParam::Struct);
  const auto expected = OutputBytes<TypeParam>(this->world_, full, 0xab);
  for (const uint32_t extra : kExtraBytes) {
    const uint32_t size = full + extra;
    const auto bytes = OutputBytes<TypeParam>(this->world_, size, 0xab);
    EXPECT_TRUE(std::equal(bytes.begin() + 4, bytes.begin() + full, expected.begin() + 4));
    EXPECT_EQ(std::count(bytes.begin() + full, bytes.end(), 0xab), extra);
  }
}

}  // namespace
