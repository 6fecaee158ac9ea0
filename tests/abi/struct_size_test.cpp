// Callers of older and of newer releases pass shorter and longer structs. Each struct of each call
// of offload.h has a row in a table, and the rules are written once for all rows. Every struct lies
// directly before a page that faults, so reading or writing one byte too many ends the test.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <ostream>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "../temporary_directory.h"
#include "offload.h"

namespace {

constexpr uint32_t kRefusedSizes[] = {0, 1, 2, 3, uint32_t{1} << 30, UINT32_MAX};
constexpr uint32_t kExtraBytes[] = {8, 64, 256};

// `bytes` bytes, filled and aligned to 8, that end where a page without access begins (more
// exactly, the next multiple of 8 does).
class GuardedBytes {
 public:
  GuardedBytes(size_t bytes, unsigned char fill)
      : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))), pages_(Map(page_), Unmap{page_}) {
    data_ = pages_.get() + page_ - (bytes + 7) / 8 * 8;
    std::memset(data_, fill, bytes);
  }

  unsigned char* data() { return data_; }

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

using Bytes = std::vector<unsigned char>;

template <typename Struct>
Struct Empty() {
  Struct value{};
  value.struct_size = sizeof(value);
  return value;
}

template <typename Struct>
Bytes BytesOf(const Struct& value) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(&value);
  return Bytes(bytes, bytes + sizeof(value));
}

void SetSize(unsigned char* value, uint32_t struct_size) {
  std::memcpy(value, &struct_size, sizeof(struct_size));
}

// The first struct_size bytes of `value`, zero beyond its end; at least the size field itself.
GuardedBytes Resized(const Bytes& value, uint32_t struct_size) {
  const uint32_t bytes = std::clamp<uint32_t>(struct_size, 4, 4096);
  GuardedBytes resized(bytes, 0);
  std::memcpy(resized.data(), value.data(), std::min<size_t>(bytes, value.size()));
  SetSize(resized.data(), struct_size);
  return resized;
}

std::string Outcome(int32_t status) {
  if (status == OFFLOAD_OK) return "OK";
  return std::string(offload_status_name(status)) + ": " + offload_last_error();
}

void ExpectErrorNamesStructSize() {
  const std::string text = offload_last_error();
  EXPECT_NE(text.find("struct_size"), std::string::npos) << text;
}

void ExpectSizeRefused(int32_t status, uint32_t size) {
  EXPECT_EQ(status, OFFLOAD_INVALID_ARGUMENT) << "struct_size " << size;
  ExpectErrorNamesStructSize();
  const std::string text = offload_last_error();
  EXPECT_NE(text.find(std::to_string(size)), std::string::npos) << text;
}

// A context with an optimizer over two params of four and three elements; the second one has no
// gradient.
struct World {
  World() {
    auto options = Empty<offload_context_options_t>();
    options.device_kind = OFFLOAD_DEVICE_HOST;
    options.threads = 1;
    EXPECT_EQ(Outcome(offload_context_create(&options, &context)), "OK");
  }
  ~World() {
    Destroy(optimizer, offload_optimizer_destroy);
    Destroy(stash, offload_stash_destroy);
    Destroy(exchange, offload_exchange_destroy);
    Destroy(other, offload_context_destroy);
    Destroy(context, offload_context_destroy);
  }
  template <typename Handle>
  static void Destroy(Handle handle, int32_t (*destroy)(Handle)) {
    EXPECT_EQ(handle == nullptr ? "OK" : Outcome(destroy(handle)), "OK");
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  static offload_optimizer_options_t OptimizerOptions() {
    auto options = Empty<offload_optimizer_options_t>();
    options.algorithm = OFFLOAD_SGD;
    options.track_changes = 1;
    return options;
  }
  static offload_group_t Group() {
    auto group = Empty<offload_group_t>();
    group.lr = 0.5;
    group.momentum = 0.25;
    return group;
  }
  template <size_t n>
  static offload_param_t Param(const char* name, std::array<float, n>& data, const float* grad) {
    auto param = Empty<offload_param_t>();
    param.dtype = OFFLOAD_FP32;
    param.grad_dtype = OFFLOAD_FP32;
    param.name = name;
    param.data = data.data();
    param.grad = grad;
    param.count = n;
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
  void CreateWithGroup() {
    CreateOptimizer();
    AddGroup();
  }
  void AddParams() {
    const offload_param_t params[] = {Param("weight", data, grad.data()),
                                      Param("bias", bias, nullptr)};
    EXPECT_EQ(Outcome(offload_optimizer_add_params(optimizer, params, 2, nullptr)), "OK");
  }
  void Commit(uint32_t movable = 0) {
    CreateOptimizer(movable);
    AddGroup();
    AddParams();
    EXPECT_EQ(Outcome(offload_optimizer_commit(optimizer, nullptr)), "OK");
  }
  void Wait() { EXPECT_EQ(Outcome(offload_optimizer_wait(optimizer, 0, -1)), "OK"); }
  void Step() {
    EXPECT_EQ(Outcome(offload_optimizer_step(optimizer, nullptr, nullptr)), "OK");
    Wait();
  }
  offload_plan_t Plan() {
    auto plan = Empty<offload_plan_t>();
    EXPECT_EQ(Outcome(offload_optimizer_plan(optimizer, &plan)), "OK");
    return plan;
  }

  std::array<float, 4> data = {1, 2, 3, 4};
  std::array<float, 4> grad = {1, 1, 1, 1};
  std::array<float, 3> bias = {};
  std::array<float, 4> more = {};
  offload_context_t context = nullptr;
  offload_context_t other = nullptr;
  offload_optimizer_t optimizer = nullptr;
  offload_stash_t stash = nullptr;
  offload_exchange_t exchange = nullptr;
  uint32_t group_id = 0;
};

// ---------------------------------------------------------------------------------- the tables --

// A call and a struct that it reads or writes. A world is new for each call that reads.
struct Row {
  std::string call;
  std::string type;  // of the struct, without _t
  Bytes valid;       // an input that the call accepts and in which every field matters
  std::function<int32_t(World&, void*)> run;
  size_t moving = SIZE_MAX;  // the offset in an output of 8 bytes that change from call to call
};

void PrintTo(const Row& row, std::ostream* stream) { *stream << row.call << " " << row.type; }

std::string NameOfRow(const testing::TestParamInfo<Row>& info) {
  return info.param.call.substr(8) + "_of_" + info.param.type.substr(8);  // without offload_
}

template <typename Struct>
std::string NameOfStruct() {
  std::string name = __PRETTY_FUNCTION__;  // "... [with Struct = offload_group; ...]"
  const size_t begin = name.find("Struct = ") + 9;
  return name.substr(begin, name.find_first_of(";]", begin) - begin);
}

template <typename Struct, typename Run>
Row In(const char* call, const Struct& valid, Run run) {
  return {call, NameOfStruct<Struct>(), BytesOf(valid),
          [run](World& world, void* value) { return run(world, static_cast<Struct*>(value)); }};
}

template <typename Struct, typename Run>
Row Out(const char* call, Run run) {
  Row row = In(call, Empty<Struct>(), run);
  if constexpr (requires(Struct plan) { plan.host_available_bytes; })
    row.moving = offsetof(Struct, host_available_bytes);
  if constexpr (requires(Struct changes) { changes.take; }) row.moving = offsetof(Struct, take);
  return row;
}

// A function of a handle of the world, and the struct that it writes.
template <typename Handle, typename Struct>
Row Out(const char* call, int32_t (*function)(Handle, Struct*), Handle World::*handle) {
  return Out<Struct>(call, [function, handle](World& world, Struct* output) {
    return function(world.*handle, output);
  });
}

// Memory for structs that need an address.
std::array<float, 4> lent_data;
std::array<float, 3> lent_bias;
const float kLentGrad[4] = {1, 1, 1, 1};
int progress_calls = 0;

// A name in a directory that is removed with the program.
std::string InDirectory(const char* name) {
  static const hybridopt::TemporaryDirectory directory;
  return directory / name;
}

const char* SavedPath() {
  static const std::string path = InDirectory("saved");
  return path.c_str();
}

int32_t Finished(World& world, int32_t status) {
  return status == OFFLOAD_OK ? offload_optimizer_wait(world.optimizer, 0, -1) : status;
}

int32_t Save(World& world, const offload_save_options_t* options) {
  world.Commit();
  std::filesystem::remove_all(SavedPath());
  return Finished(world, offload_optimizer_save(world.optimizer, options, nullptr));
}

offload_context_options_t ContextOptions() {
  auto options = Empty<offload_context_options_t>();
  options.device_kind = OFFLOAD_DEVICE_SIM;
  options.sim_memory_bytes = uint64_t{1} << 24;
  return options;
}

offload_optimizer_options_t OptimizerOptions() {
  auto options = Empty<offload_optimizer_options_t>();
  options.algorithm = OFFLOAD_SIGNUM;
  options.device_fraction = 0.5;
  options.chunk_elements = 4096;
  options.staging_slots = 3;
  options.movable = OFFLOAD_MOVABLE_PARAMS | OFFLOAD_MOVABLE_ACCUMULATE;
  options.comm_timeout_ns = 1'000'000'000;
  return options;
}

offload_comm_t Comm() {
  auto comm = Empty<offload_comm_t>();
  comm.rank = 1;
  comm.world = 2;
  comm.sum = [](void*, double*, uint32_t, int64_t) -> int32_t { return OFFLOAD_OK; };
  comm.max = [](void*, int32_t*, uint32_t, int64_t) -> int32_t { return OFFLOAD_OK; };
  comm.barrier = [](void*, int64_t) -> int32_t { return OFFLOAD_OK; };
  comm.exchange = [](void*, const offload_message_t*, uint32_t, offload_stream_t,
                     int64_t) -> int32_t { return OFFLOAD_OK; };
  comm.exchange_on_host = 1;
  return comm;
}

offload_shard_t Shard() {
  static const int64_t shape[] = {4, 4};
  static const int64_t offset[] = {1, 0};
  static const int64_t extent[] = {2, 4};
  auto shard = Empty<offload_shard_t>();
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

offload_param_t Param() { return World::Param("weight", lent_data, kLentGrad); }

offload_binding_t Binding() {
  auto binding = Empty<offload_binding_t>();
  binding.data = lent_data.data();
  binding.grad = kLentGrad;
  return binding;
}

offload_step_options_t StepOptions() {
  auto options = Empty<offload_step_options_t>();
  options.grad_scale = 2;
  options.grad_norm_max = 0.5;
  return options;
}

// Its progress is the same for save, load and verify.
template <typename Struct>
Struct FileOptions() {
  auto options = Empty<Struct>();
  options.progress = [](void*, uint64_t, uint64_t) { ++progress_calls; };
  options.progress_user = &progress_calls;
  options.io_depth = 1;
  return options;
}

offload_save_options_t SaveOptions() {
  auto options = FileOptions<offload_save_options_t>();
  options.flags = OFFLOAD_SAVE_MASTERS_ONLY;
  options.path = SavedPath();
  return options;
}

offload_load_options_t LoadOptions() {
  auto options = FileOptions<offload_load_options_t>();
  options.flags = OFFLOAD_LOAD_FRESH_MOMENTS;
  options.path = SavedPath();
  return options;
}

// What a take writes into the buffer.
std::array<uint64_t, 8> taken_changes;

offload_changes_options_t ChangesOptions() {
  auto options = Empty<offload_changes_options_t>();
  options.flags = OFFLOAD_CHANGES_GAPS;
  options.buffer = taken_changes.data();
  options.buffer_bytes = sizeof(taken_changes);
  options.dense_above = 0.5;
  return options;
}

offload_comm_t CommOfOne() {
  offload_comm_t comm = Comm();
  comm.rank = 0;
  comm.world = 1;
  return comm;
}

offload_exchange_matrix_t Matrix() {
  static const int64_t shape[] = {4, 4};
  static const int64_t offset[] = {0, 0};
  static auto shard = Empty<offload_shard_t>();
  shard.dimensions = 2;
  shard.box_count = 1;
  shard.global_shape = shape;
  shard.box_offsets = offset;
  shard.box_extents = shape;
  auto matrix = Empty<offload_exchange_matrix_t>();
  matrix.dtype = OFFLOAD_BF16;
  matrix.grad_dtype = OFFLOAD_FP32;
  matrix.name = "weight";
  matrix.shard = &shard;
  return matrix;
}

offload_exchange_options_t ExchangeOptions() {
  static const offload_comm_t comm = CommOfOne();
  static const offload_exchange_matrix_t matrix = Matrix();
  auto options = Empty<offload_exchange_options_t>();
  options.matrix_count = 1;
  options.matrices = &matrix;
  options.comm = &comm;
  options.comm_timeout_ns = 1'000'000'000;
  return options;
}

offload_stash_options_t StashOptions() {
  auto options = Empty<offload_stash_options_t>();
  options.lanes = 2;
  options.budget_bytes = 8192;
  options.slab_bytes = 4096;
  options.min_bytes = 1;
  options.tickets_max = 3;
  return options;
}

// For calls that read the checkpoint.
void SaveOnce() {
  if (std::filesystem::exists(SavedPath())) return;
  World world;
  const offload_save_options_t options = SaveOptions();
  EXPECT_EQ(Outcome(Save(world, &options)), "OK");
}

using MoveFunction = int32_t (*)(offload_optimizer_t, const offload_move_options_t*,
                                 offload_ticket_t*);

// `before` prepares something to move.
Row Move(const char* call, MoveFunction move, uint32_t flags = 0, MoveFunction before = nullptr) {
  static const uint32_t params[] = {0};
  static const offload_stream_t streams[] = {nullptr};
  auto options = Empty<offload_move_options_t>();
  options.flags = flags;
  options.params = params;
  options.param_count = 1;
  options.stream_count = 1;
  options.streams = streams;
  return In(call, options, [move, before](World& world, auto* value) {
    world.Commit(OFFLOAD_MOVABLE_PARAMS | OFFLOAD_MOVABLE_STATES | OFFLOAD_MOVABLE_ACCUMULATE);
    if (before != nullptr) {
      EXPECT_EQ(Outcome(before(world.optimizer, nullptr, nullptr)), "OK");
    }
    return move(world.optimizer, value, nullptr);
  });
}

// Structs that registering reads.
std::vector<Row> RegisteringInputs() {
  return {
      In("offload_context_create", ContextOptions(),
         [](World& world, auto* options) { return offload_context_create(options, &world.other); }),
      In("offload_optimizer_create", OptimizerOptions(),
         [](World& world, auto* options) {
           return offload_optimizer_create(world.context, options, &world.optimizer);
         }),
      In("offload_optimizer_create", Comm(),
         [](World& world, auto* comm) {
           auto options = World::OptimizerOptions();
           options.comm = comm;
           return offload_optimizer_create(world.context, &options, &world.optimizer);
         }),
      In("offload_optimizer_add_group", World::Group(),
         [](World& world, auto* group) {
           world.CreateOptimizer();
           return offload_optimizer_add_group(world.optimizer, group, &world.group_id);
         }),
      In("offload_optimizer_set_group", World::Group(),
         [](World& world, auto* group) {
           world.CreateWithGroup();
           return offload_optimizer_set_group(world.optimizer, 0, group);
         }),
      In("offload_optimizer_add_params", Param(),
         [](World& world, auto* param) {
           world.CreateWithGroup();
           return offload_optimizer_add_params(world.optimizer, param, 1, nullptr);
         }),
      In("offload_optimizer_add_params", Shard(),
         [](World& world, auto* shard) {
           world.CreateWithGroup();
           auto param = Param();
           param.shard = shard;
           return offload_optimizer_add_params(world.optimizer, &param, 1, nullptr);
         }),
      In("offload_stash_create", StashOptions(),
         [](World& world, auto* options) {
           return offload_stash_create(world.context, options, &world.stash);
         }),
      In("offload_stash_plan", StashOptions(),
         [](World& world, auto* options) {
           auto plan = Empty<offload_stash_plan_t>();
           return offload_stash_plan(world.context, options, &plan);
         }),
      In("offload_exchange_create", ExchangeOptions(),
         [](World& world, auto* options) {
           return offload_exchange_create(world.context, options, &world.exchange);
         }),
      In("offload_exchange_create", Matrix(),
         [](World& world, auto* matrix) {
           auto options = ExchangeOptions();
           options.matrices = matrix;
           return offload_exchange_create(world.context, &options, &world.exchange);
         }),
      In("offload_exchange_plan", ExchangeOptions(),
         [](World& world, auto* options) {
           auto plan = Empty<offload_exchange_plan_t>();
           return offload_exchange_plan(world.context, options, &plan);
         }),
  };
}

// Structs that calls on a committed optimizer, or on its checkpoint, read.
std::vector<Row> WorkingInputs() {
  return {
      In("offload_optimizer_bind", Binding(),
         [](World& world, auto* binding) {
           world.Commit();
           return offload_optimizer_bind(world.optimizer, binding, 1);
         }),
      In("offload_optimizer_step", StepOptions(),
         [](World& world, auto* options) {
           world.Commit();
           return offload_optimizer_step(world.optimizer, options, nullptr);
         }),
      Move("offload_optimizer_offload_params", offload_optimizer_offload_params),
      Move("offload_optimizer_reload_params", offload_optimizer_reload_params),
      Move("offload_optimizer_offload_grads", offload_optimizer_offload_grads,
           OFFLOAD_MOVE_ACCUMULATE),
      Move("offload_optimizer_reload_grads", offload_optimizer_reload_grads),
      Move("offload_optimizer_offload_states", offload_optimizer_offload_states),
      Move("offload_optimizer_reload_states", offload_optimizer_reload_states, 0,
           offload_optimizer_offload_states),
      Move("offload_optimizer_refresh_masters", offload_optimizer_refresh_masters),
      In("offload_optimizer_changes", ChangesOptions(),
         [](World& world, auto* options) {
           world.Commit();
           const auto whole = Empty<offload_changes_options_t>();
           auto changes = Empty<offload_changes_t>();
           EXPECT_EQ(
               Outcome(offload_optimizer_changes(world.optimizer, nullptr, 0, &whole, &changes)),
               "OK");
           EXPECT_EQ(Outcome(offload_optimizer_acknowledge_changes(world.optimizer, changes.take)),
                     "OK");
           world.grad = {1, 0, 0, 0};  // one element changes, which needs the buffer
           world.Step();
           return offload_optimizer_changes(world.optimizer, nullptr, 0, options, &changes);
         }),
      In("offload_optimizer_save", SaveOptions(), Save),
      In("offload_optimizer_load", LoadOptions(),
         [](World& world, auto* options) {
           SaveOnce();
           world.Commit();
           return Finished(world, offload_optimizer_load(world.optimizer, options, nullptr));
         }),
      In("offload_checkpoint_verify", FileOptions<offload_verify_options_t>(),
         [](World&, auto* options) {
           SaveOnce();
           return offload_checkpoint_verify(SavedPath(), options);
         }),
      In("offload_checkpoint_newest", FileOptions<offload_verify_options_t>(),
         [](World&, auto* options) {
           SaveOnce();
           char path[4096];
           return offload_checkpoint_newest(InDirectory(".").c_str(), options, path, sizeof(path));
         }),
  };
}

std::vector<Row> Inputs() {
  std::vector<Row> rows = RegisteringInputs();
  const std::vector<Row> more = WorkingInputs();
  rows.insert(rows.end(), more.begin(), more.end());
  return rows;
}

// The world has taken a step and has a stash.
std::vector<Row> Outputs() {
  return {
      Out("offload_context_get_info", offload_context_get_info, &World::context),
      Out("offload_optimizer_plan", offload_optimizer_plan, &World::optimizer),
      Out("offload_optimizer_get_stats", offload_optimizer_get_stats, &World::optimizer),
      Out("offload_stash_get_stats", offload_stash_get_stats, &World::stash),
      Out<offload_step_result_t>("offload_optimizer_step_result",
                                 [](World& world, auto* result) {
                                   return offload_optimizer_step_result(world.optimizer, 0, result);
                                 }),
      Out<offload_state_view_t>("offload_optimizer_state",
                                [](World& world, auto* view) {
                                  return offload_optimizer_state(
                                      world.optimizer, 0, OFFLOAD_STATE_MOMENTUM_BUFFER, view);
                                }),
      Out<offload_changes_t>("offload_optimizer_changes",
                             [](World& world, auto* changes) {
                               const offload_changes_options_t options = ChangesOptions();
                               return offload_optimizer_changes(world.optimizer, nullptr, 0,
                                                                &options, changes);
                             }),
      Out<offload_checkpoint_info_t>("offload_checkpoint_inspect",
                                     [](World&, auto* info) {
                                       SaveOnce();
                                       return offload_checkpoint_inspect(SavedPath(), info, nullptr,
                                                                         nullptr);
                                     }),
      Out<offload_stash_plan_t>("offload_stash_plan",
                                [](World& world, auto* plan) {
                                  const offload_stash_options_t options = StashOptions();
                                  return offload_stash_plan(world.context, &options, plan);
                                }),
      Out<offload_exchange_plan_t>("offload_exchange_plan",
                                   [](World& world, auto* plan) {
                                     const offload_exchange_options_t options = ExchangeOptions();
                                     return offload_exchange_plan(world.context, &options, plan);
                                   }),
  };
}

// std::regex would recurse once for each character of a comment, and the thread sanitizer's record
// of calls has no room for that.
std::string WithoutComments(std::string text) {
  for (size_t begin; (begin = text.find("/*")) != std::string::npos;)
    text.erase(begin, text.find("*/", begin) + 2 - begin);
  return text;
}

// The tables have a row for each struct parameter of each function of offload.h. They have every
// struct except those that the library passes to a visitor or to a function of comm, and the one
// that another points to.
TEST(Tables, HaveARowForEachStructOfEachCall) {
  std::set<std::string> pairs, structs;
  for (const std::vector<Row>& rows : {Inputs(), Outputs()}) {
    for (const Row& row : rows) {
      pairs.insert(row.call + " " + row.type);
      structs.insert(row.type);
    }
  }
  std::ifstream file(HYBRIDOPT_SOURCE_DIR "/include/offload.h");
  const std::string text = WithoutComments(std::string((std::istreambuf_iterator<char>(file)), {}));
  const auto matches = [](const std::string& where, const char* pattern, const auto& visit) {
    const std::regex regex(pattern);
    for (std::sregex_iterator i(where.begin(), where.end(), regex), end; i != end; ++i) visit(*i);
  };
  std::set<std::string> declared;
  matches(text, "\\} (offload_\\w+)_t;",
          [&](const std::smatch& match) { declared.insert(match[1].str()); });
  EXPECT_TRUE(declared.contains("offload_group"));
  matches(text, "(offload_\\w+)\\(([^;{}]*)\\);", [&](const std::smatch& function) {
    matches(function[2].str(), "(offload_\\w+)_t\\*", [&](const std::smatch& argument) {
      if (!declared.contains(argument[1].str())) return;  // a handle or a number
      const std::string pair = function[1].str() + " " + argument[1].str();
      EXPECT_TRUE(pairs.contains(pair)) << "no row for " << pair;
    });
  });
  structs.insert("offload_checkpoint_tensor");
  structs.insert("offload_change");
  structs.insert("offload_message");
  EXPECT_EQ(structs, declared);
}

// --------------------------------------------------------------------------------------- inputs --

// Adds the effects of an input struct to the text of an outcome: what the call has made or moved,
// and the values of params after a step. The text of a refused call says why.
std::string Effect(World& world, int32_t status) {
  std::ostringstream effect;
  effect << Outcome(status) << ", progress " << progress_calls;
  if (world.other != nullptr) {
    auto info = Empty<offload_context_info_t>();
    EXPECT_EQ(Outcome(offload_context_get_info(world.other, &info)), "OK");
    effect << ", device " << info.device_kind << " of " << info.device_memory_bytes << " bytes";
  }
  if (world.optimizer == nullptr) return effect.str();
  // Where the call was an early one, the rest of registering follows. Otherwise it is refused.
  const auto group = World::Group();
  uint32_t group_id = 0;
  effect << ", " << Outcome(offload_optimizer_add_group(world.optimizer, &group, &group_id));
  const auto param = World::Param("more", world.more, world.grad.data());
  effect << ", " << Outcome(offload_optimizer_add_params(world.optimizer, &param, 1, nullptr));
  const auto plan = world.Plan();
  effect << ", room for " << plan.host_params_bytes << " " << plan.host_grads_bytes << " "
         << plan.state_bytes[OFFLOAD_TIER_HOST][OFFLOAD_STATE_MOMENTUM_BUFFER];
  effect << ", " << Outcome(offload_optimizer_commit(world.optimizer, nullptr));
  effect << ", " << Outcome(offload_optimizer_wait(world.optimizer, 0, -1));
  auto stats = Empty<offload_stats_t>();
  if (offload_optimizer_get_stats(world.optimizer, &stats) == OFFLOAD_OK)
    effect << ", on the host " << stats.params_bytes[OFFLOAD_TIER_HOST] << " "
           << stats.grads_bytes[OFFLOAD_TIER_HOST];
  effect << ", " << Outcome(offload_optimizer_step(world.optimizer, nullptr, nullptr));
  effect << ", " << Outcome(offload_optimizer_wait(world.optimizer, 0, -1)) << ":";
  for (const float weight : world.data) effect << " " << weight;
  for (const float weight : world.more) effect << " " << weight;
  for (const float weight : lent_data) effect << " " << weight;
  return effect.str();
}

std::string EffectOf(const Row& row, const Bytes& valid, uint32_t struct_size) {
  World world;
  progress_calls = 0;
  lent_data = {};
  GuardedBytes input = Resized(valid, struct_size);
  return Effect(world, row.run(world, input.data()));
}

class InputStructSize : public testing::TestWithParam<Row> {
 protected:
  int32_t Run(GuardedBytes& input) {
    World world;
    return GetParam().run(world, input.data());
  }
  const Bytes& valid_ = GetParam().valid;
  const uint32_t full_ = static_cast<uint32_t>(valid_.size());
};
INSTANTIATE_TEST_SUITE_P(, InputStructSize, testing::ValuesIn(Inputs()), NameOfRow);

TEST_P(InputStructSize, TooSmallForItselfOrAbsurdIsRefused) {
  for (const uint32_t size : kRefusedSizes) {
    GuardedBytes input = Resized(valid_, size);
    ExpectSizeRefused(Run(input), size);
  }
}

TEST_P(InputStructSize, ShorterReadsAsZerosAtTheEnd) {
  for (uint32_t size = 8; size <= full_; size += 8) {
    const Bytes beginning(valid_.begin(), valid_.begin() + size);
    EXPECT_EQ(EffectOf(GetParam(), valid_, size), EffectOf(GetParam(), beginning, full_))
        << "struct_size " << size;
  }
  EXPECT_EQ(EffectOf(GetParam(), valid_, full_).substr(0, 3), "OK,");
}

TEST_P(InputStructSize, LongerWithZeroTailIsAccepted) {
  for (const uint32_t extra : kExtraBytes) {
    GuardedBytes input = Resized(valid_, full_ + extra);
    EXPECT_EQ(Outcome(Run(input)), "OK") << extra << " bytes longer";
  }
}

TEST_P(InputStructSize, AnyNonzeroByteInTheTailIsUnsupported) {
  for (const uint32_t extra : kExtraBytes) {
    for (uint32_t byte = full_; byte < full_ + extra; ++byte) {
      GuardedBytes input = Resized(valid_, full_ + extra);
      input.data()[byte] = 1;
      EXPECT_EQ(Run(input), OFFLOAD_UNSUPPORTED) << "byte " << byte;
      ExpectErrorNamesStructSize();
    }
  }
}

// If no field changes an effect, the test would not notice what the missing end of a shorter struct
// is read as.
TEST(Tables, HaveForEachInputStructACallThatShowsItsFields) {
  std::set<std::string> structs, shown;
  for (const Row& row : Inputs()) {
    structs.insert(row.type);
    const auto full = static_cast<uint32_t>(row.valid.size());
    if (EffectOf(row, row.valid, 8) != EffectOf(row, row.valid, full)) shown.insert(row.type);
  }
  EXPECT_EQ(shown, structs);
}

// --------------------------------------------------------------------------------------- arrays --

// A call that reads an array of structs. `applied` tells after the call how many elements the
// library knows.
struct Array {
  Bytes first;
  Bytes second;
  uint32_t shortest;  // struct_size
  std::function<int32_t(World&, void*)> run;
  std::function<uint64_t(World&)> applied;
  uint64_t expected;
};

std::vector<Array> Arrays() {
  auto second_binding = Binding();
  second_binding.param = 1;
  second_binding.data = lent_bias.data();
  return {{BytesOf(Param()), BytesOf(World::Param("bias", lent_bias, nullptr)),
           sizeof(offload_param_t) - 8,
           [](World& world, void* params) {
             world.CreateWithGroup();
             return offload_optimizer_add_params(world.optimizer,
                                                 static_cast<offload_param_t*>(params), 2, nullptr);
           },
           [](World& world) { return world.Plan().element_count; }, 7},
          {BytesOf(Binding()), BytesOf(second_binding), sizeof(offload_binding_t),
           [](World& world, void* bindings) {
             lent_data = {};
             lent_bias = {};
             world.Commit();
             return offload_optimizer_bind(world.optimizer,
                                           static_cast<offload_binding_t*>(bindings), 2);
           },
           [](World& world) {  // a step changes them
             world.Step();
             return static_cast<uint64_t>(4 - std::ranges::count(lent_data, 0.0f) + 3 -
                                          std::ranges::count(lent_bias, 0.0f));
           },
           7}};
}

GuardedBytes Pair(const Array& array, uint32_t first_size, uint32_t second_size) {
  GuardedBytes pair(2 * size_t{first_size}, 0);
  const size_t bytes = std::min<size_t>(first_size, array.first.size());
  std::memcpy(pair.data(), array.first.data(), bytes);
  std::memcpy(pair.data() + first_size, array.second.data(), bytes);
  SetSize(pair.data(), first_size);
  SetSize(pair.data() + first_size, second_size);
  return pair;
}

TEST(StructArray, ElementsLieStructSizeBytesApart) {
  for (const Array& array : Arrays()) {
    const auto full = static_cast<uint32_t>(array.first.size());
    for (const uint32_t size : {array.shortest, full, full + 8, full + 64}) {
      World world;
      GuardedBytes pair = Pair(array, size, size);
      ASSERT_EQ(Outcome(array.run(world, pair.data())), "OK");
      EXPECT_EQ(array.applied(world), array.expected) << "struct_size " << size;
    }
  }
}

TEST(StructArray, ElementsOfDifferentSizesAreRefusedAndNothingIsApplied) {
  for (const Array& array : Arrays()) {
    World world;
    const auto full = static_cast<uint32_t>(array.first.size());
    GuardedBytes pair = Pair(array, full, full - 8);
    EXPECT_EQ(array.run(world, pair.data()), OFFLOAD_INVALID_ARGUMENT);
    ExpectErrorNamesStructSize();
    EXPECT_EQ(array.applied(world), 0u);
  }
}

// -------------------------------------------------------------------------------------- outputs --

class OutputStructSize : public testing::TestWithParam<Row> {
 protected:
  OutputStructSize() {
    world_.Commit();
    world_.Step();
    const offload_stash_options_t options = StashOptions();
    EXPECT_EQ(Outcome(offload_stash_create(world_.context, &options, &world_.stash)), "OK");
  }

  // The output of the call with this struct_size, in a buffer that held `fill` before.
  Bytes Output(uint32_t size, unsigned char fill) {
    GuardedBytes output(size, fill);
    SetSize(output.data(), size);
    EXPECT_EQ(Outcome(GetParam().run(world_, output.data())), "OK") << "struct_size " << size;
    Bytes bytes(output.data(), output.data() + size);
    if (GetParam().moving < size)
      std::fill_n(bytes.begin() + static_cast<ptrdiff_t>(GetParam().moving), 8, 0);
    return bytes;
  }

  World world_;
  const uint32_t full_ = static_cast<uint32_t>(GetParam().valid.size());
};
INSTANTIATE_TEST_SUITE_P(, OutputStructSize, testing::ValuesIn(Outputs()), NameOfRow);

TEST_P(OutputStructSize, TooSmallForItselfOrAbsurdIsRefusedAndNothingIsWritten) {
  for (const uint32_t size : kRefusedSizes) {
    GuardedBytes output(64, 0xab);
    SetSize(output.data(), size);
    const Bytes before(output.data(), output.data() + 64);
    ExpectSizeRefused(GetParam().run(world_, output.data()), size);
    EXPECT_EQ(Bytes(output.data(), output.data() + 64), before);
  }
}

TEST_P(OutputStructSize, EveryByteIsWritten) {
  EXPECT_EQ(Output(full_, 0xab), Output(full_, 0x54));
}

TEST_P(OutputStructSize, ShorterGetsTheBeginning) {
  const Bytes expected = Output(full_, 0xab);
  for (uint32_t size = 8; size < full_; size += 8) {
    const Bytes bytes = Output(size, 0x54);
    EXPECT_TRUE(std::equal(bytes.begin() + 4, bytes.end(), expected.begin() + 4))
        << "struct_size " << size;
    EXPECT_EQ(std::memcmp(bytes.data(), &size, sizeof(size)), 0) << "struct_size changed";
  }
}

TEST_P(OutputStructSize, LongerKeepsItsTail) {
  const Bytes expected = Output(full_, 0xab);
  for (const uint32_t extra : kExtraBytes) {
    const Bytes bytes = Output(full_ + extra, 0xab);
    EXPECT_TRUE(std::equal(bytes.begin() + 4, bytes.begin() + full_, expected.begin() + 4));
    EXPECT_EQ(std::count(bytes.begin() + full_, bytes.end(), 0xab), extra);
  }
}

}  // namespace
