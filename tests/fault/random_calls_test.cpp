// Many random calls, good and bad, on several contexts and optimizers at once. No call crashes;
// every failure has a known status and a text; what was refused has changed nothing, which a model
// that counts, and remembers what is where, is asked about. Of the lifecycle's calls it also knows
// which must be done and which refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "../sanitizers.h"
#include "../temporary_directory.h"
#include "trainer.h"

namespace hybridopt::fault {
namespace {

constexpr uint64_t kCalls = 120'000;
constexpr uint64_t kSeeds = 8;
constexpr uint64_t kArrayBytes = 4096;
constexpr uint32_t kGradArrays = 6;
constexpr uint64_t kQueuedCalls = 256;  // at most
constexpr uint64_t kQueuedSteps = 8;
constexpr uint32_t kDataArrays = 8;  // per optimizer: two optimizers may not share params

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  uint64_t Below(uint64_t end) { return Next() % end; }
  bool Chance(uint64_t percent) { return Below(100) < percent; }
  template <typename T>
  T OneOf(std::initializer_list<T> values) {
    return values.begin()[Below(values.size())];
  }

 private:
  uint64_t state_;
};

struct ContextModel {
  int32_t kind;
  uint32_t optimizers = 0;
  bool doomed = false;  // a gradient was freed while it was bound: steps may fail
  std::vector<void*> grads;
  std::vector<offload_stream_t> streams;
};

enum class Held { kNone, kStored, kAccumulated };

// What is where of one param.
struct ParamModel {
  uint64_t count = 0;
  int32_t dtype = 0, grad_dtype = 0;
  void* data = nullptr;
  const void* grad = nullptr;
  bool params_out = false, states_out = false;
  Held held = Held::kNone;  // gradient on the host

  uint64_t param_bytes() const { return count * ElementBytes(dtype); }
  uint64_t grad_bytes() const { return count * ElementBytes(grad_dtype); }
  uint64_t held_bytes() const {
    if (held == Held::kNone) return 0;
    return held == Held::kStored ? grad_bytes() : count * 4;
  }
};

struct OptimizerModel {
  offload_context_t context;
  int32_t algorithm;
  uint32_t movable = 0;
  uint32_t groups = 0;
  std::vector<ParamModel> params;
  bool committed = false;
  uint64_t steps = 0;  // queued since create
  uint64_t steps_counted_max =
      0;                   // no count of applied steps is above: loads bring those of others
  std::string checkpoint;  // its last save's
  bool saving = false;     // a save has been queued since all was last seen done
  // Queued since all was last seen done: at most so many are queued now.
  uint64_t calls_queued_max = 0, steps_queued_max = 0;
  uint64_t device_state_bytes = 0;  // as stats said after commit
  std::vector<void*> data;
  std::vector<offload_ticket_t> tickets;

  bool all_states_out() const {
    return std::all_of(params.begin(), params.end(), [](const auto& p) { return p.states_out; });
  }
};

// ------------------------------------------------------------------ the tables of LIFECYCLE.md --

enum class Move {
  kOffloadParams,
  kReloadParams,
  kOffloadGrads,
  kAccumulateGrads,
  kDropGrads,
  kReloadGrads,
  kOffloadStates,
  kReloadStates,
  kRefreshMasters
};
constexpr size_t kMoves = 9;
enum class Effect { kNothing, kDone, kRefused };

Effect EffectOf(Move move, const ParamModel& param) {
  const auto done_if = [](bool needed) { return needed ? Effect::kDone : Effect::kNothing; };
  const bool bound = param.grad != nullptr;
  switch (move) {
    case Move::kOffloadParams:
      return done_if(!param.params_out);
    case Move::kReloadParams:
      if (param.params_out && param.data == nullptr && param.count > 0) return Effect::kRefused;
      return done_if(param.params_out);
    case Move::kOffloadGrads:
      return bound && param.held != Held::kNone ? Effect::kRefused : done_if(bound);
    case Move::kAccumulateGrads:
      return bound && param.held == Held::kStored ? Effect::kRefused : done_if(bound);
    case Move::kDropGrads:
      return done_if(bound || param.held != Held::kNone);
    case Move::kReloadGrads:
      if (param.held == Held::kNone) return Effect::kNothing;
      if (!bound) return Effect::kRefused;
      return param.held == Held::kAccumulated && param.grad_dtype != OFFLOAD_FP32 ? Effect::kRefused
                                                                                  : Effect::kDone;
    case Move::kOffloadStates:
      return done_if(!param.states_out);
    case Move::kReloadStates:
      return done_if(param.states_out);
    case Move::kRefreshMasters:
      return param.params_out || param.states_out ? Effect::kRefused : Effect::kDone;
  }
  return Effect::kRefused;
}

void Apply(Move move, ParamModel& param) {
  if (EffectOf(move, param) != Effect::kDone) return;
  switch (move) {
    case Move::kOffloadParams:
      param.params_out = true;
      param.data = nullptr;
      break;
    case Move::kReloadParams:
      param.params_out = false;
      break;
    case Move::kOffloadGrads:
    case Move::kAccumulateGrads:
    case Move::kDropGrads:
      param.held = move == Move::kOffloadGrads      ? Held::kStored
                   : move == Move::kAccumulateGrads ? Held::kAccumulated
                                                    : Held::kNone;
      param.grad = nullptr;
      break;
    case Move::kReloadGrads:
      param.held = Held::kNone;
      break;
    case Move::kOffloadStates:
    case Move::kReloadStates:
      param.states_out = move == Move::kOffloadStates;
      break;
    case Move::kRefreshMasters:
      break;
  }
}

bool MovableAllows(Move move, uint32_t movable) {
  switch (move) {
    case Move::kOffloadParams:
    case Move::kReloadParams:
      return (movable & OFFLOAD_MOVABLE_PARAMS) != 0;
    case Move::kOffloadGrads:
    case Move::kReloadGrads:
      return (movable & (OFFLOAD_MOVABLE_GRADS | OFFLOAD_MOVABLE_ACCUMULATE)) != 0;
    case Move::kAccumulateGrads:
      return (movable & OFFLOAD_MOVABLE_ACCUMULATE) != 0;
    case Move::kOffloadStates:
    case Move::kReloadStates:
      return (movable & OFFLOAD_MOVABLE_STATES) != 0;
    default:
      return true;
  }
}

bool StepAllowed(const OptimizerModel& model) {
  for (const ParamModel& param : model.params) {
    const bool bound = param.grad != nullptr, held = param.held != Held::kNone;
    if (param.states_out || (bound && held) || ((bound || held) && param.params_out)) return false;
  }
  return true;
}

// In memory where the system has such a place: this is about calls, not about disks.
std::string CheckpointParent() {
  constexpr char kInMemory[] = "/dev/shm";
  return std::filesystem::is_directory(kInMemory) ? kInMemory
                                                  : std::filesystem::temp_directory_path().string();
}

void CountRun(void* counter) { static_cast<std::atomic<uint64_t>*>(counter)->fetch_add(1); }

class World {
 public:
  explicit World(uint64_t seed) : random_(seed) {}

  void Call() {
    if (random_.Below(3000) == 0) return FreeBoundGradient();
    uint64_t left = random_.Below(kWeights);
    call_ = 0;
    while (left >= kEveryCall[call_].weight) left -= kEveryCall[call_++].weight;
    const auto call = kEveryCall[call_].call;
    (this->*call)();
  }

  void DestroyAll() {
    for (const auto& [handle, model] : optimizers_)
      EXPECT_EQ(offload_optimizer_destroy(handle), OFFLOAD_OK);
    for (const auto& [handle, model] : contexts_)
      EXPECT_EQ(offload_context_destroy(handle), OFFLOAD_OK);
  }

  // Calls made so far, by function and status.
  using Tally = std::map<std::pair<std::string, int32_t>, uint64_t>;
  const Tally& tally() const { return tally_; }
  // Params really moved, by Move.
  using Moved = std::array<uint64_t, kMoves>;
  const Moved& moved() const { return moved_; }
  uint64_t loaded() const { return loaded_; }

 private:
  // ------------------------------------------------------------------------------------ judging --

  // Any failure has a text and a status that fits; gives whether the call succeeded.
  bool Judge(int32_t status, bool doomed = false) {
    tally_[{kEveryCall[call_].name, status}] += 1;
    if (status == OFFLOAD_OK) return true;
    EXPECT_STRNE(offload_last_error(), "") << status;
    const bool usual = status == OFFLOAD_INVALID_ARGUMENT || status == OFFLOAD_INVALID_STATE ||
                       status == OFFLOAD_UNSUPPORTED || status == OFFLOAD_OUT_OF_HOST_MEMORY ||
                       status == OFFLOAD_OUT_OF_DEVICE_MEMORY || status == OFFLOAD_TIMED_OUT;
    const bool failed = status == OFFLOAD_DEVICE_FAILED || status == OFFLOAD_POISONED;
    EXPECT_TRUE(usual || (doomed && failed)) << status << ": " << offload_last_error();
    return false;
  }

  // The same for a call on an optimizer; after a refusal the model must still hold.
  bool Judge(int32_t status, offload_optimizer_t optimizer) {
    const auto found = optimizers_.find(optimizer);
    if (found == optimizers_.end()) {
      // Noise can look like a handle of another process.
      EXPECT_TRUE(status == OFFLOAD_INVALID_ARGUMENT || status == OFFLOAD_INVALID_STATE);
      return Judge(status);
    }
    const bool doomed = contexts_.at(found->second.context).doomed;
    if (Judge(status, doomed)) return true;
    if (random_.Chance(5)) Compare(optimizer, found->second);
    return false;
  }
  bool Judge(int32_t status, offload_context_t context) {
    const auto found = contexts_.find(context);
    if (found == contexts_.end()) {
      // Noise can look like a handle of another process.
      EXPECT_TRUE(status == OFFLOAD_INVALID_ARGUMENT || status == OFFLOAD_INVALID_STATE);
      return Judge(status);
    }
    return Judge(status, found->second.doomed);
  }

  void Compare(offload_optimizer_t optimizer, const OptimizerModel& model) {
    auto plan = Make<offload_plan_t>();
    ASSERT_OFFLOAD_OK(offload_optimizer_plan(optimizer, &plan));
    uint64_t elements = 0;
    for (const ParamModel& param : model.params) elements += param.count;
    EXPECT_EQ(plan.param_count, model.params.size());
    EXPECT_EQ(plan.element_count, elements);
    EXPECT_EQ(plan.host_elements + plan.device_elements, elements);
    auto stats = Make<offload_stats_t>();
    ASSERT_OFFLOAD_OK(offload_optimizer_get_stats(optimizer, &stats));
    EXPECT_EQ(stats.host_bytes > 0, model.committed);
    CompareStats(stats, model);
  }

  void CompareStats(const offload_stats_t& stats, const OptimizerModel& model) {
    EXPECT_LE(stats.queued, std::min(model.calls_queued_max, kQueuedCalls));
    EXPECT_LE(stats.steps_applied + stats.steps_skipped, model.steps);
    uint64_t params_there = 0, params_out = 0, grads_there = 0, grads_held = 0;
    bool any_states_out = false;
    for (const ParamModel& param : model.params) {
      if (param.data != nullptr) params_there += param.param_bytes();
      if (param.params_out) params_out += param.param_bytes();
      if (param.grad != nullptr) grads_there += param.grad_bytes();
      grads_held += param.held_bytes();
      any_states_out |= param.states_out;
    }
    EXPECT_EQ(stats.params_on_device_bytes, params_there);
    EXPECT_EQ(stats.params_on_host_bytes, params_out);
    EXPECT_EQ(stats.grads_on_device_bytes, grads_there);
    EXPECT_EQ(stats.grads_on_host_bytes, grads_held);
    if (!model.committed) return;
    EXPECT_LE(stats.states_on_device_bytes, model.device_state_bytes);
    if (!any_states_out) {
      EXPECT_EQ(stats.states_on_device_bytes, model.device_state_bytes);
    }
    if (model.all_states_out()) {
      EXPECT_EQ(stats.states_on_device_bytes, 0u);
    }
  }
  void CompareStats(offload_optimizer_t optimizer) {
    auto stats = Make<offload_stats_t>();
    ASSERT_OFFLOAD_OK(offload_optimizer_get_stats(optimizer, &stats));
    CompareStats(stats, optimizers_.at(optimizer));
  }

  // Waits until nothing of a context is queued, so that its arrays may be written.
  void Settle(offload_context_t context) {
    for (auto& [handle, model] : optimizers_) {
      if (model.context != context || !model.committed) continue;
      int32_t status = offload_optimizer_wait(handle, 0, -1);
      while (IsOfATransfer(status)) status = offload_optimizer_wait(handle, 0, -1);
      if (status != OFFLOAD_OK) {
        EXPECT_TRUE(contexts_.at(context).doomed) << offload_last_error();
        continue;
      }
      AllSeenDone(model);
      auto stats = Make<offload_stats_t>();
      EXPECT_OFFLOAD_OK(offload_optimizer_get_stats(handle, &stats));
      EXPECT_EQ(stats.steps_applied + stats.steps_skipped, model.steps);
    }
  }

  static void AllSeenDone(OptimizerModel& model) {
    model.calls_queued_max = model.steps_queued_max = 0;
    model.saving = false;
  }
  // What a load of no checkpoint, or of another model's, ends with; it is told by whoever waits.
  static bool IsOfATransfer(int32_t status) {
    return status == OFFLOAD_IO_FAILED || status == OFFLOAD_CHECKPOINT_MISMATCH;
  }

  // -------------------------------------------------------------------------------- making input
  // --

  void* Garbage() {
    return reinterpret_cast<void*>(
        random_.OneOf<uint64_t>({1, random_.Next(), random_.Next() >> 8, uint64_t{1} << 56,
                                 uint64_t{2} << 56, UINT64_MAX}));
  }

  // Mostly a live one, sometimes NULL, a destroyed one, one of the other kind or noise.
  template <typename Handle, typename Model>
  Handle Pick(const std::map<Handle, Model>& live, const std::vector<void*>& dead,
              void* other_kind) {
    if (!live.empty() && random_.Chance(90))
      return std::next(live.begin(), static_cast<int64_t>(random_.Below(live.size())))->first;
    switch (random_.Below(4)) {
      case 0:
        return nullptr;
      case 1:
        return dead.empty() ? nullptr : static_cast<Handle>(dead[random_.Below(dead.size())]);
      case 2:
        return static_cast<Handle>(other_kind);
      default:
        return static_cast<Handle>(Garbage());
    }
  }
  offload_context_t PickContext() {
    void* other = optimizers_.empty() ? nullptr : optimizers_.begin()->first;
    return Pick(contexts_, dead_contexts_, other);
  }
  offload_optimizer_t PickOptimizer() {
    void* other = contexts_.empty() ? nullptr : contexts_.begin()->first;
    return Pick(optimizers_, dead_optimizers_, other);
  }

  offload_stream_t PickStream(offload_context_t context) {
    if (random_.Chance(70)) return nullptr;
    const auto found = contexts_.find(context);
    if (found != contexts_.end() && !found->second.streams.empty() && random_.Chance(80))
      return found->second.streams[random_.Below(found->second.streams.size())];
    return random_.Chance(50) || dead_streams_.empty()
               ? Garbage()
               : dead_streams_[random_.Below(dead_streams_.size())];
  }

  double Number() {
    if (random_.Chance(90)) return static_cast<double>(random_.Below(100)) / 100;
    return random_.OneOf<double>({-1.0, 1e-50, 1e300, 1.0, -0.0,
                                  std::numeric_limits<double>::quiet_NaN(),
                                  std::numeric_limits<double>::infinity()});
  }

  uint32_t StructSize(size_t bytes) {
    if (random_.Chance(98)) return static_cast<uint32_t>(bytes);
    return random_.OneOf<uint32_t>({0, 1, 3, 1 << 20, UINT32_MAX});
  }

  // Hyperparameters that fit the algorithm, nearly always.
  offload_group_t Group(int32_t algorithm) {
    auto group = Make<offload_group_t>();
    group.struct_size = StructSize(sizeof(group));
    group.lr = Number();
    group.weight_decay = Number();
    group.maximize = static_cast<int32_t>(random_.Below(random_.Chance(98) ? 2 : 5));
    if (algorithm <= OFFLOAD_ADAM || algorithm == OFFLOAD_LION) {
      group.beta1 = Number();
      group.beta2 = Number();
    }
    if (algorithm <= OFFLOAD_ADAM || algorithm == OFFLOAD_ADAGRAD)
      group.eps = 1e-8 + std::abs(Number());
    if (algorithm == OFFLOAD_SGD && random_.Chance(70)) {
      group.momentum = Number();
      group.nesterov = static_cast<int32_t>(random_.Below(2));
      if (random_.Chance(20)) group.dampening = Number();
    }
    if (algorithm == OFFLOAD_ADAGRAD) group.initial_accumulator_value = Number();
    if (random_.Chance(2)) group.momentum = 0.5;
    if (random_.Chance(1)) group.reserved = 1;
    return group;
  }

  // An address of `bytes` bytes in one of `arrays`, or a bad one. What the host device cannot know
  // to be bad (a wild pointer) is not given to it.
  void* Pointer(const std::vector<void*>& arrays, uint64_t bytes, int32_t kind) {
    if (random_.Chance(4)) return nullptr;
    if (kind == OFFLOAD_DEVICE_SIM && random_.Chance(3))
      return random_.Chance(50) ? Garbage() : static_cast<void*>(host_array_.data());
    if (arrays.empty() || bytes > kArrayBytes) return nullptr;
    const uint64_t room = kArrayBytes - bytes;
    uint64_t offset = random_.Below(room / 4 + 1) * 4;
    if (random_.Chance(2) && room > offset) offset += 1;
    return static_cast<char*>(arrays[random_.Below(arrays.size())]) + offset;
  }

  struct ParamRoom {
    offload_param_t param;
    offload_shard_t shard;
    std::string name;
    std::array<int64_t, 3> shape, offsets, extents;
  };

  void FillParam(ParamRoom& room, const OptimizerModel& model, const ContextModel& context) {
    offload_param_t& param = room.param = Make<offload_param_t>();
    param.group = static_cast<uint32_t>(
        random_.Below(model.groups + (random_.Chance(95) ? 0 : 2) + (model.groups == 0)));
    param.dtype = 1 + static_cast<int32_t>(random_.Below(3));
    param.grad_dtype = 1 + static_cast<int32_t>(random_.Below(3));
    param.placement = static_cast<int32_t>(random_.Below(3));
    param.count = random_.Below(random_.Chance(80) ? 100 : kArrayBytes / 4);
    param.data = Pointer(model.data, param.count * ElementBytes(param.dtype), context.kind);
    param.grad = Pointer(context.grads, param.count * ElementBytes(param.grad_dtype), context.kind);
    room.name = "p" + std::to_string(random_.Below(1000));
    param.name = room.name.c_str();
    if (random_.Chance(20)) AddShard(room);
    if (random_.Chance(90)) return;
    switch (random_.Below(9)) {
      case 0:
        param.name = random_.Chance(50) ? nullptr : "";
        break;
      case 1:
        room.name.assign(2000, 'x');
        param.name = room.name.c_str();
        break;
      case 2:
        param.dtype = static_cast<int32_t>(random_.Next());
        break;
      case 3:
        param.grad_dtype = random_.OneOf({0, 4, -1, INT32_MIN});
        break;
      case 4:
        param.placement = random_.OneOf({-1, 3, INT32_MAX});
        break;
      case 5:
        param.reserved = 1;
        break;
      case 6:
        param.count = random_.OneOf<uint64_t>({(uint64_t{1} << 44) + 1, UINT64_MAX});
        break;
      case 7:
        param.group = UINT32_MAX;
        break;
      default:
        param.struct_size = random_.OneOf<uint32_t>({0, 1, 3, 1 << 20, UINT32_MAX});
    }
  }

  void AddShard(ParamRoom& room) {
    room.shard = Make<offload_shard_t>();
    room.shard.struct_size = StructSize(sizeof(offload_shard_t));
    room.shard.dimensions = static_cast<uint32_t>(random_.Below(4));
    room.shard.box_count = random_.Chance(95) ? 1 : 0;
    room.shard.flags = static_cast<uint32_t>(random_.Below(random_.Chance(95) ? 2 : 8));
    for (size_t d = 0; d < 3; ++d) {
      room.shape[d] = static_cast<int64_t>(random_.Below(20));
      room.offsets[d] = static_cast<int64_t>(random_.Below(3));
      room.extents[d] = random_.Chance(95) ? static_cast<int64_t>(random_.Below(10))
                                           : random_.OneOf<int64_t>({-1, INT64_MAX, INT64_MIN});
    }
    if (random_.Chance(50)) {  // one that fits
      room.shard.dimensions = 1;
      room.shard.flags = 0;
      room.shape[0] = room.extents[0] = static_cast<int64_t>(room.param.count);
      room.offsets[0] = 0;
    }
    if (room.shard.flags == OFFLOAD_SHARD_RANGE) {
      room.shard.range_begin = random_.Below(10);
      room.shard.range_count = room.param.count;
    }
    room.shard.global_shape = random_.Chance(98) ? room.shape.data() : nullptr;
    room.shard.box_offsets = room.offsets.data();
    room.shard.box_extents = room.extents.data();
    room.param.shard = &room.shard;
  }

  // --------------------------------------------------------------------------------------- calls
  // --

  void CreateContext() {
    auto options = Make<offload_context_options_t>();
    options.struct_size = StructSize(sizeof(options));
    options.device_kind = static_cast<int32_t>(random_.Below(2));
    options.threads = 1 + static_cast<uint32_t>(random_.Below(2));
    options.log = DropLog;
    if (options.device_kind == OFFLOAD_DEVICE_SIM) {
      options.sim_memory_bytes = 512 << 10;
      options.sim_seed = random_.Next();
      options.sim_delay_ns_max = random_.Chance(30) ? 5000 : 0;
    }
    if (random_.Chance(30)) options.pinned_bytes_max = 1 << random_.Below(22);
    if (random_.Chance(10)) options.device_kind = random_.OneOf({-1, 2, 3, 99});
    if (random_.Chance(5)) options.threads = random_.OneOf<uint32_t>({1025, UINT32_MAX});
    if (random_.Chance(5)) options.device_index = -1;
    if (contexts_.size() >= 4) options.struct_size = 0;  // enough of them
    offload_context_t context = nullptr;
    if (!Judge(offload_context_create(&options, random_.Chance(98) ? &context : nullptr))) return;
    ContextModel model{options.device_kind, 0, false, {}, {}};
    for (uint32_t i = 0; i < kGradArrays; ++i) model.grads.push_back(NewArray(context));
    contexts_.emplace(context, std::move(model));
  }

  void* NewArray(offload_context_t context) {
    void* data = nullptr;
    EXPECT_OFFLOAD_OK(offload_device_alloc(context, kArrayBytes, &data));
    std::vector<unsigned char> bytes(kArrayBytes);
    FillPattern(bytes, OFFLOAD_BF16, random_.Next());
    EXPECT_OFFLOAD_OK(offload_device_upload(context, data, bytes.data(), bytes.size(), nullptr));
    return data;
  }

  void DestroyContext() {
    const offload_context_t context = PickContext();
    const bool used = contexts_.count(context) > 0 && contexts_.at(context).optimizers > 0;
    const int32_t status = offload_context_destroy(context);
    if (used) {
      EXPECT_EQ(status, OFFLOAD_INVALID_STATE);
    }
    if (!Judge(status, context)) return;
    for (offload_stream_t stream : contexts_.at(context).streams) dead_streams_.push_back(stream);
    contexts_.erase(context);
    dead_contexts_.push_back(context);
  }

  void ContextInfo() {
    const offload_context_t context = PickContext();
    auto info = Make<offload_context_info_t>();
    info.struct_size = StructSize(sizeof(info));
    if (!Judge(offload_context_get_info(context, random_.Chance(98) ? &info : nullptr), context))
      return;
    EXPECT_EQ(info.optimizers, contexts_.at(context).optimizers);
  }

  void CreateOptimizer() {
    const offload_context_t context = PickContext();
    auto options = Make<offload_optimizer_options_t>();
    options.struct_size = StructSize(sizeof(options));
    options.algorithm = static_cast<int32_t>(random_.Chance(95) ? 1 + random_.Below(5) : 6);
    options.device_fraction = Number();
    options.chunk_elements = random_.OneOf<uint64_t>({0, 1024, 1024, 1024, 7, UINT64_MAX});
    options.staging_slots = random_.OneOf<uint32_t>({0, 2, 2, 3, 64, 1, UINT32_MAX});
    if (random_.Chance(70)) options.movable = static_cast<uint32_t>(random_.Below(16));
    if (optimizers_.size() >= 8) options.movable = 16;  // enough of them
    offload_optimizer_t optimizer = nullptr;
    const int32_t status = offload_optimizer_create(context, &options, &optimizer);
    if (!Judge(status, context)) return;
    OptimizerModel model{};
    model.context = context;
    model.algorithm = options.algorithm;
    model.movable = options.movable;
    if (!contexts_.at(context).doomed)
      for (uint32_t i = 0; i < kDataArrays; ++i) model.data.push_back(TryNewArray(context));
    std::erase(model.data, nullptr);
    contexts_.at(context).optimizers += 1;
    optimizers_.emplace(optimizer, std::move(model));
  }

  // NULL when the device is full.
  void* TryNewArray(offload_context_t context) {
    void* data = nullptr;
    const int32_t status = offload_device_alloc(context, kArrayBytes, &data);
    if (!Judge(status, context)) return nullptr;
    EXPECT_OFFLOAD_OK(offload_device_free(context, data));
    return NewArray(context);
  }

  void DestroyOptimizer() {
    const offload_optimizer_t optimizer = PickOptimizer();
    if (!Judge(offload_optimizer_destroy(optimizer), optimizer)) return;
    const OptimizerModel& model = optimizers_.at(optimizer);
    for (void* data : model.data) EXPECT_OFFLOAD_OK(offload_device_free(model.context, data));
    contexts_.at(model.context).optimizers -= 1;
    optimizers_.erase(optimizer);
    dead_optimizers_.push_back(optimizer);
  }

  int32_t AlgorithmOf(offload_optimizer_t optimizer) {
    const auto found = optimizers_.find(optimizer);
    return found == optimizers_.end() ? OFFLOAD_SGD : found->second.algorithm;
  }

  void AddGroup() {
    const offload_optimizer_t optimizer = PickOptimizer();
    const offload_group_t group = Group(AlgorithmOf(optimizer));
    uint32_t id = 0;
    const int32_t status = offload_optimizer_add_group(
        optimizer, random_.Chance(98) ? &group : nullptr, random_.Chance(98) ? &id : nullptr);
    if (!Judge(status, optimizer)) return;
    OptimizerModel& model = optimizers_.at(optimizer);
    EXPECT_FALSE(model.committed);
    EXPECT_EQ(id, model.groups);
    model.groups += 1;
  }

  void SetGroup() {
    const offload_optimizer_t optimizer = PickOptimizer();
    const offload_group_t group = Group(AlgorithmOf(optimizer));
    const uint32_t id = static_cast<uint32_t>(random_.Below(4));
    if (!Judge(offload_optimizer_set_group(optimizer, id, &group), optimizer)) return;
    EXPECT_LT(id, optimizers_.at(optimizer).groups);
  }

  void AddParams() {
    const offload_optimizer_t optimizer = PickOptimizer();
    const auto found = optimizers_.find(optimizer);
    const uint32_t count = static_cast<uint32_t>(random_.Below(4));
    std::vector<ParamRoom> rooms(count);
    std::vector<offload_param_t> params(count);
    static const OptimizerModel no_optimizer{};
    static const ContextModel no_context{OFFLOAD_DEVICE_HOST, 0, false, {}, {}};
    for (uint32_t i = 0; i < count; ++i) {
      const bool live = found != optimizers_.end();
      FillParam(rooms[i], live ? found->second : no_optimizer,
                live ? contexts_.at(found->second.context) : no_context);
      params[i] = rooms[i].param;
    }
    if (count == 1 && random_.Chance(10))  // an older caller's
      params[0].struct_size = 8 * static_cast<uint32_t>(random_.Below(sizeof(offload_param_t) / 8));
    uint32_t first = 0;
    const int32_t status = offload_optimizer_add_params(
        optimizer, random_.Chance(98) ? params.data() : nullptr, count, &first);
    if (!Judge(status, optimizer)) return;
    EXPECT_FALSE(found->second.committed);
    EXPECT_EQ(first, found->second.params.size());
    for (const offload_param_t& param : params) {
      offload_param_t read{};  // what a shorter struct lacks is zero
      std::memcpy(&read, &param, std::min<size_t>(param.struct_size, sizeof(read)));
      ParamModel known;
      known.count = read.count;
      known.dtype = read.dtype;
      known.grad_dtype = read.grad_dtype;
      known.data = read.data;
      known.grad = read.grad;
      found->second.params.push_back(known);
    }
  }

  void Bind() {
    const offload_optimizer_t optimizer = PickOptimizer();
    const auto found = optimizers_.find(optimizer);
    std::vector<offload_binding_t> bindings(random_.Below(5));
    for (offload_binding_t& binding : bindings) {
      binding = Make<offload_binding_t>();
      binding.struct_size = StructSize(sizeof(binding));
      binding.param = static_cast<uint32_t>(random_.Below(6));
      if (found == optimizers_.end()) continue;
      const ContextModel& context = contexts_.at(found->second.context);
      const std::vector<ParamModel>& params = found->second.params;
      const bool known = binding.param < params.size();
      // 4 bytes each are enough for every dtype.
      const uint64_t bytes = known ? 4 * params[binding.param].count : 4;
      if (random_.Chance(80)) binding.grad = Pointer(context.grads, bytes, context.kind);
      if (random_.Chance(known && params[binding.param].params_out ? 90 : 30))
        binding.data = Pointer(found->second.data, bytes, context.kind);
    }
    // A param must not come to lie where a save still reads another.
    if (found != optimizers_.end() && found->second.saving) Settle(found->second.context);
    const int32_t status =
        offload_optimizer_bind(optimizer, random_.Chance(98) ? bindings.data() : nullptr,
                               static_cast<uint32_t>(bindings.size()));
    const bool done = Judge(status, optimizer);
    if (found == optimizers_.end()) return;
    for (const offload_binding_t& binding : bindings) {
      if (!done) break;
      ParamModel& param = found->second.params.at(binding.param);
      if (binding.data != nullptr) param.data = binding.data;
      param.grad = binding.grad;
    }
    CompareStats(optimizer);
  }

  void Plan() {
    const offload_optimizer_t optimizer = PickOptimizer();
    auto plan = Make<offload_plan_t>();
    plan.struct_size = StructSize(sizeof(plan));
    if (Judge(offload_optimizer_plan(optimizer, &plan), optimizer))
      Compare(optimizer, optimizers_.at(optimizer));
  }

  void Commit() {
    const offload_optimizer_t optimizer = PickOptimizer();
    const auto found = optimizers_.find(optimizer);
    const offload_context_t context = found == optimizers_.end() ? nullptr : found->second.context;
    if (IsDoomed(context)) return;
    const int32_t status = offload_optimizer_commit(optimizer, PickStream(context));
    if (!Judge(status, optimizer)) return;
    EXPECT_FALSE(found->second.committed);
    EXPECT_FALSE(found->second.params.empty());
    auto stats = Make<offload_stats_t>();
    EXPECT_OFFLOAD_OK(offload_optimizer_get_stats(optimizer, &stats));
    found->second.device_state_bytes = stats.states_on_device_bytes;
    found->second.committed = true;
  }

  void Step() {
    const offload_optimizer_t optimizer = PickOptimizer();
    const auto found = optimizers_.find(optimizer);
    auto options = Make<offload_step_options_t>();
    options.struct_size = StructSize(sizeof(options));
    options.grad_scale = Number();
    options.grad_norm_max = Number();
    options.flags = static_cast<uint32_t>(random_.Below(random_.Chance(95) ? 2 : 99));
    if (found != optimizers_.end()) options.stream = PickStream(found->second.context);
    offload_ticket_t ticket = 0;
    const bool given = random_.Chance(80);
    const int32_t status = offload_optimizer_step(optimizer, given ? &options : nullptr, &ticket);
    const bool done = Judge(status, optimizer);
    if (found == optimizers_.end()) return;
    OptimizerModel& model = found->second;
    const bool allowed = model.committed && StepAllowed(model);
    const bool room =
        model.calls_queued_max < kQueuedCalls && model.steps_queued_max < kQueuedSteps;
    if (!given && allowed && room && !contexts_.at(model.context).doomed) {
      EXPECT_TRUE(done) << offload_last_error();
    }
    if (done) {
      EXPECT_TRUE(allowed);
      EXPECT_NE(ticket, 0u);
      model.steps += 1;
      model.steps_counted_max += 1;
      model.steps_queued_max += 1;
      for (ParamModel& param : model.params) param.held = Held::kNone;
      Queued(model, ticket);
    }
    CompareStats(optimizer);
  }

  void Queued(OptimizerModel& model, offload_ticket_t ticket) {
    model.calls_queued_max += 1;
    model.tickets.push_back(ticket);
    last_ticket_ = ticket;
  }

  // Arguments of a lifecycle call, and what may be said against them; nothing: it must be done.
  struct MoveInput {
    offload_move_options_t options = Make<offload_move_options_t>();
    uint32_t params[4] = {};
    offload_stream_t streams[5] = {};
    std::set<int32_t> reasons;
    bool certain = true;  // whether the streams are known to be good or bad
  };
  using MoveFunction = int32_t (*)(offload_optimizer_t, const offload_move_options_t*,
                                   offload_ticket_t*);

  void FillMoveFlags(MoveInput& input, uint32_t known) {
    uint32_t& flags = input.options.flags;
    if (known != 0) flags = random_.OneOf<uint32_t>({0, 0, 1, 1, 2});
    if (random_.Chance(4)) flags = random_.OneOf<uint32_t>({1, 2, 3, 3, 4, 1u << 31, UINT32_MAX});
    if ((flags & ~known) != 0) {
      input.reasons.insert(OFFLOAD_UNSUPPORTED);
    } else if (flags == (OFFLOAD_MOVE_ACCUMULATE | OFFLOAD_MOVE_DROP)) {
      input.reasons.insert(OFFLOAD_INVALID_ARGUMENT);
    }
  }

  void FillMoveParams(MoveInput& input, size_t size) {
    offload_move_options_t& options = input.options;
    options.params = random_.Chance(97) ? input.params : nullptr;
    if (random_.Chance(60))
      options.param_count = random_.Chance(60) ? 1 : static_cast<uint32_t>(random_.Below(5));
    if (options.param_count > 0 && options.params == nullptr)
      input.reasons.insert(OFFLOAD_INVALID_ARGUMENT);
    if (options.param_count == 0)  // all of them, or none, at an address that is not read
      options.params = random_.Chance(90) ? nullptr : static_cast<uint32_t*>(Garbage());
    for (uint32_t i = 0; i < options.param_count; ++i) {
      const bool known = size > 0 && random_.Chance(98);
      input.params[i] = known ? static_cast<uint32_t>(random_.Below(size))
                              : random_.OneOf({static_cast<uint32_t>(size), UINT32_MAX});
      if (input.params[i] >= size) input.reasons.insert(OFFLOAD_INVALID_ARGUMENT);
    }
  }

  // Mostly of the context; or of another one, destroyed, or none.
  void FillMoveStreams(MoveInput& input, offload_context_t context) {
    offload_move_options_t& options = input.options;
    options.streams = random_.Chance(97) ? input.streams : nullptr;
    if (random_.Chance(50)) options.stream_count = static_cast<uint32_t>(random_.Below(5));
    if (random_.Chance(2)) options.stream_count = random_.OneOf<uint32_t>({5, UINT32_MAX});
    if (options.stream_count > 4 || (options.stream_count > 0 && options.streams == nullptr)) {
      input.reasons.insert(OFFLOAD_INVALID_ARGUMENT);
      return;
    }
    const std::vector<offload_stream_t>& own = contexts_.at(context).streams;
    for (uint32_t i = 0; i < options.stream_count; ++i) {
      offload_stream_t& stream = input.streams[i];
      if (random_.Chance(95)) {
        if (!own.empty() && random_.Chance(70)) stream = own[random_.Below(own.size())];
        continue;
      }
      const auto& other =
          std::next(contexts_.begin(), static_cast<int64_t>(random_.Below(contexts_.size())))
              ->second;
      if (!other.streams.empty()) stream = other.streams[0];
      if (random_.Chance(30)) stream = PickStream(context);
      if (stream == nullptr || std::count(own.begin(), own.end(), stream) > 0) continue;
      input.reasons.insert(OFFLOAD_INVALID_ARGUMENT);
      // A new stream, perhaps one of the library's, may have the place of a destroyed one.
      if (std::count(dead_streams_.begin(), dead_streams_.end(), stream) > 0) input.certain = false;
    }
  }

  // The params that the call means, as far as there are such.
  static std::vector<ParamModel*> Named(OptimizerModel& model, const MoveInput& input) {
    std::set<ParamModel*> named;
    for (uint32_t i = 0; i < input.options.param_count; ++i)
      if (input.params[i] < model.params.size()) named.insert(&model.params[input.params[i]]);
    if (input.options.params == nullptr)
      for (ParamModel& param : model.params) named.insert(&param);
    return {named.begin(), named.end()};
  }

  // Whether two params would come back to one place, which would be the caller's race.
  static bool ReloadsOverlap(const std::vector<ParamModel*>& params) {
    uintptr_t end = 0;
    std::map<uintptr_t, uintptr_t> ranges;
    for (const ParamModel* param : params) {
      if (param->held == Held::kNone || param->grad == nullptr || param->count == 0) continue;
      const auto begin = reinterpret_cast<uintptr_t>(param->grad);
      if (!ranges.emplace(begin, begin + param->grad_bytes()).second) return true;
    }
    for (const auto& [begin, range_end] : ranges) {
      if (begin < end) return true;
      end = range_end;
    }
    return false;
  }

  static Move MoveOf(Move move, uint32_t flags) {
    if (move != Move::kOffloadGrads) return move;
    if ((flags & OFFLOAD_MOVE_DROP) != 0) return Move::kDropGrads;
    return (flags & OFFLOAD_MOVE_ACCUMULATE) != 0 ? Move::kAccumulateGrads : move;
  }

  template <Move kMove, MoveFunction kFunction>
  void Lifecycle() {
    const offload_optimizer_t optimizer = PickOptimizer();
    const auto found = optimizers_.find(optimizer);
    if (found == optimizers_.end()) {
      Judge(kFunction(optimizer, nullptr, nullptr), optimizer);
      return;
    }
    OptimizerModel& model = found->second;
    if (kMove == Move::kReloadStates && IsDoomed(model.context)) return;
    MoveInput input;
    FillMoveFlags(input, kMove == Move::kOffloadGrads ? 3 : 0);
    FillMoveParams(input, model.params.size());
    FillMoveStreams(input, model.context);
    input.options.struct_size = StructSize(sizeof(input.options));
    if (input.options.struct_size != sizeof(input.options))
      input.reasons.insert({OFFLOAD_INVALID_ARGUMENT, OFFLOAD_UNSUPPORTED});
    const bool given = random_.Chance(85);
    if (!given) input = MoveInput();
    const std::vector<ParamModel*> named = Named(model, input);
    const Move move = MoveOf(kMove, input.options.flags);
    if (move == Move::kReloadGrads) {
      if (ReloadsOverlap(named)) return;
      Settle(model.context);  // others may read gradients of theirs at the same place
    }
    AddReasons(move, model, named, input.reasons);
    offload_ticket_t ticket = 0;
    const bool take_ticket = random_.Chance(90);
    const int32_t status =
        kFunction(optimizer, given ? &input.options : nullptr, take_ticket ? &ticket : nullptr);
    JudgeMove(status, move, optimizer, input);
    EXPECT_EQ(ticket != 0, take_ticket && status == OFFLOAD_OK);
    if (status == OFFLOAD_OK) {
      for (ParamModel* param : named) {
        if (EffectOf(move, *param) == Effect::kDone) moved_[static_cast<size_t>(move)] += 1;
        Apply(move, *param);
      }
      Queued(model, take_ticket ? ticket : 0);
    }
    CompareStats(optimizer);
    if (move == Move::kReloadGrads) Settle(model.context);
  }

  // What optimizer and params say against the move.
  static void AddReasons(Move move, const OptimizerModel& model,
                         const std::vector<ParamModel*>& named, std::set<int32_t>& reasons) {
    const bool refused = std::any_of(named.begin(), named.end(), [&](const ParamModel* param) {
      return EffectOf(move, *param) == Effect::kRefused;
    });
    if (!model.committed || !MovableAllows(move, model.movable) || refused)
      reasons.insert(OFFLOAD_INVALID_STATE);
  }

  void JudgeMove(int32_t status, Move move, offload_optimizer_t optimizer, const MoveInput& input) {
    const bool done = Judge(status, optimizer);
    const OptimizerModel& model = optimizers_.at(optimizer);
    const ContextModel& context = contexts_.at(model.context);
    if (context.doomed || !input.certain) return;
    if (!input.reasons.empty()) {
      EXPECT_EQ(input.reasons.count(status), 1u)
          << kEveryCall[call_].name << " gave " << offload_status_name(status) << ", expected "
          << offload_status_name(*input.reasons.begin());
      return;
    }
    if (done) return;
    const bool device_full = status == OFFLOAD_OUT_OF_DEVICE_MEMORY &&
                             move == Move::kReloadStates && context.kind == OFFLOAD_DEVICE_SIM &&
                             model.all_states_out();
    const bool queue_full =
        status == OFFLOAD_INVALID_STATE && model.calls_queued_max >= kQueuedCalls;
    EXPECT_TRUE(device_full || queue_full)
        << kEveryCall[call_].name << " gave " << status << ": " << offload_last_error();
  }

  // Of this optimizer, of any optimizer, none, or noise.
  offload_ticket_t PickTicket(offload_optimizer_t optimizer) {
    const auto found = optimizers_.find(optimizer);
    if (found != optimizers_.end() && !found->second.tickets.empty() && random_.Chance(60)) {
      const auto& tickets = found->second.tickets;
      return tickets[tickets.size() - 1 - random_.Below(std::min<size_t>(tickets.size(), 80))];
    }
    return random_.OneOf<offload_ticket_t>({0, 0, last_ticket_, last_ticket_ + 1, random_.Next()});
  }

  void StepResult() {
    const offload_optimizer_t optimizer = PickOptimizer();
    auto result = Make<offload_step_result_t>();
    result.struct_size = StructSize(sizeof(result));
    const int32_t status = offload_optimizer_step_result(optimizer, PickTicket(optimizer), &result);
    if (!Judge(status, optimizer)) return;
    EXPECT_LE(result.step, optimizers_.at(optimizer).steps_counted_max);
  }

  void Wait() {
    const offload_optimizer_t optimizer = PickOptimizer();
    const int64_t timeout_ns = random_.OneOf<int64_t>({0, 1, 100'000, -1, INT64_MIN, INT64_MAX});
    const offload_ticket_t ticket = PickTicket(optimizer);
    const int32_t status = offload_optimizer_wait(optimizer, ticket, timeout_ns);
    if (timeout_ns < 0) {
      EXPECT_NE(status, OFFLOAD_TIMED_OUT);
    }
    if (IsOfATransfer(status)) {
      EXPECT_NE(std::string(offload_last_error()).find(directory_.path()), std::string::npos)
          << offload_last_error();
      return;
    }
    if (Judge(status, optimizer)) {
      OptimizerModel& model = optimizers_.at(optimizer);
      EXPECT_TRUE(model.committed);
      if (ticket == 0) AllSeenDone(model);
    }
  }

  void StreamWait() {
    const offload_optimizer_t optimizer = PickOptimizer();
    const auto found = optimizers_.find(optimizer);
    const offload_context_t context = found == optimizers_.end() ? nullptr : found->second.context;
    uint32_t params[3];
    for (uint32_t& param : params) param = static_cast<uint32_t>(random_.Below(8));
    const int32_t status = offload_optimizer_stream_wait(
        optimizer, PickTicket(optimizer), PickStream(context),
        random_.Chance(70) ? params : nullptr, static_cast<uint32_t>(random_.Below(4)));
    Judge(status, optimizer);
  }

  void State() {
    const offload_optimizer_t optimizer = PickOptimizer();
    auto view = Make<offload_state_view_t>();
    view.struct_size = StructSize(sizeof(view));
    const uint32_t param = static_cast<uint32_t>(random_.Below(6));
    const int32_t kind = random_.OneOf({0, 1, 2, 3, 4, 5, -1, INT32_MAX});
    const int32_t status =
        offload_optimizer_state(optimizer, param, kind, random_.Chance(98) ? &view : nullptr);
    if (!Judge(status, optimizer)) return;
    const OptimizerModel& model = optimizers_.at(optimizer);
    EXPECT_EQ(view.device_count + view.host_count, model.params.at(param).count);
    EXPECT_LE(view.step_count, model.steps_counted_max);
    // Nothing is queued: the view may be read, and a sanitizer looks at where it points.
    const auto* values = static_cast<const unsigned char*>(view.host_data);
    if (view.host_count > 0) seen_ += values[0] + values[4 * view.host_count - 1];
  }

  // ------------------------------------------------------------------------------- checkpoints --

  struct PathInput {
    std::string text;
    bool null = false;
    bool wrong = false;  // the call must be refused
    const char* path() const { return null ? nullptr : text.c_str(); }
  };
  // Mostly a new name, or an optimizer's own checkpoint.
  PathInput PickPath(bool to_save, const OptimizerModel& model) {
    switch (random_.Below(20)) {
      case 0:
        return {"", true, true};
      case 1:
        return {"", false, true};
      case 2:
        return {directory_.path(), false, to_save};
      case 3:
        return {directory_ / "none/new", false, to_save};
    }
    if (to_save) return {directory_ / std::to_string(saved_)};
    if (!model.checkpoint.empty() && random_.Chance(70)) return {model.checkpoint};
    return {directory_ / std::to_string(random_.Below(saved_ + 1))};
  }

  // Fields that both calls have; whether all of them are right.
  template <typename Options>
  bool FillTransfer(Options& options, uint32_t known_flags, offload_context_t context) {
    options.struct_size = StructSize(sizeof(options));
    options.flags = static_cast<uint32_t>(random_.Next()) & known_flags;
    if (random_.Chance(3)) options.flags = random_.OneOf<uint32_t>({8, 1u << 31, UINT32_MAX});
    options.io_depth = random_.OneOf<uint32_t>({0, 1, 2, 64});
    if (random_.Chance(3)) options.io_depth = random_.OneOf<uint32_t>({65, UINT32_MAX});
    if (random_.Chance(2)) options.reserved = 1;
    options.stream = PickStream(context);
    if (random_.Chance(50)) {
      options.progress = [](void* user, uint64_t done, uint64_t total) {
        static_cast<std::atomic<uint64_t>*>(user)->fetch_add(done <= total ? 1 : UINT32_MAX);
      };
      options.progress_user = &progress_calls_;
    }
    const auto& own = contexts_.at(context).streams;
    const bool stream_good =
        options.stream == nullptr || std::count(own.begin(), own.end(), options.stream) > 0;
    return options.struct_size == sizeof(options) && (options.flags & ~known_flags) == 0 &&
           options.io_depth <= 64 && options.reserved == 0 && stream_good;
  }

  // What a call that queues a save or load gave, against what is known of its input.
  bool JudgeTransfer(int32_t status, offload_optimizer_t optimizer, bool right, bool wrong) {
    const bool done = Judge(status, optimizer);
    OptimizerModel& model = optimizers_.at(optimizer);
    if (!model.committed || wrong) {
      EXPECT_FALSE(done);
    } else if (right && model.calls_queued_max < kQueuedCalls &&
               !contexts_.at(model.context).doomed) {
      EXPECT_TRUE(done) << offload_last_error();
    }
    return done;
  }

  void Save() {
    const offload_optimizer_t optimizer = PickOptimizer();
    const auto found = optimizers_.find(optimizer);
    if (found == optimizers_.end()) {
      Judge(offload_optimizer_save(optimizer, nullptr, nullptr), optimizer);
      return;
    }
    OptimizerModel& model = found->second;
    const PathInput path = PickPath(true, model);
    auto options = Make<offload_save_options_t>();
    const bool right = FillTransfer(options, OFFLOAD_SAVE_MASTERS_ONLY, model.context);
    options.path = path.path();
    const bool given = random_.Chance(98);
    offload_ticket_t ticket = 0;
    const int32_t status = offload_optimizer_save(optimizer, given ? &options : nullptr, &ticket);
    const bool wrong = path.wrong || !given;
    if (!JudgeTransfer(status, optimizer, right && !wrong, wrong)) return;
    model.checkpoint = path.text;
    saved_ += 1;  // whatever becomes of it, the name is used
    model.saving = true;
    most_steps_ = std::max(most_steps_, model.steps_counted_max);
    Queued(model, ticket);
    CompareStats(optimizer);
  }

  void Load() {
    const offload_optimizer_t optimizer = PickOptimizer();
    const auto found = optimizers_.find(optimizer);
    if (found == optimizers_.end()) {
      Judge(offload_optimizer_load(optimizer, nullptr, nullptr), optimizer);
      return;
    }
    OptimizerModel& model = found->second;
    const PathInput path = PickPath(false, model);
    auto options = Make<offload_load_options_t>();
    constexpr uint32_t kFlags =
        OFFLOAD_LOAD_FRESH_MOMENTS | OFFLOAD_LOAD_KEEP_STEPS | OFFLOAD_LOAD_NO_VERIFY;
    bool right = FillTransfer(options, kFlags, model.context);
    options.path = path.path();
    right = right && ((options.flags & OFFLOAD_LOAD_KEEP_STEPS) == 0 ||
                      (options.flags & OFFLOAD_LOAD_FRESH_MOMENTS) != 0);
    const bool away = std::any_of(model.params.begin(), model.params.end(),
                                  [](const auto& p) { return p.params_out || p.states_out; });
    offload_ticket_t ticket = 0;
    const int32_t status = offload_optimizer_load(optimizer, &options, &ticket);
    if (!JudgeTransfer(status, optimizer, right && !path.wrong && !away, path.wrong || away))
      return;
    model.steps_counted_max = std::max(model.steps_counted_max, most_steps_);
    Queued(model, ticket);
    CompareStats(optimizer);
    if (random_.Chance(50)) loaded_ += offload_optimizer_wait(optimizer, ticket, -1) == OFFLOAD_OK;
  }

  void Stats() {
    const offload_optimizer_t optimizer = PickOptimizer();
    auto stats = Make<offload_stats_t>();
    stats.struct_size = StructSize(sizeof(stats));
    if (!Judge(offload_optimizer_get_stats(optimizer, &stats), optimizer)) return;
    CompareStats(stats, optimizers_.at(optimizer));
  }

  void Alloc() {
    const offload_context_t context = PickContext();
    if (IsDoomed(context)) return;
    const uint64_t bytes =
        random_.OneOf<uint64_t>({0, 1, 256, 4000, uint64_t{1} << 50, UINT64_MAX});
    void* data = nullptr;
    const int32_t status =
        offload_device_alloc(context, bytes, random_.Chance(98) ? &data : nullptr);
    if (Judge(status, context)) extra_.emplace_back(context, data);
  }

  void Free() {
    const offload_context_t context = PickContext();
    if (!extra_.empty() && random_.Chance(80)) {
      const auto [owner, data] = extra_.back();
      extra_.pop_back();
      if (contexts_.count(owner) > 0) {
        Judge(offload_device_free(owner, data), owner);
        Judge(offload_device_free(owner, data), owner);  // once more
        return;
      }
    }
    Judge(offload_device_free(context, random_.Chance(50) ? nullptr : host_array_.data()), context);
  }

  void Upload() {
    const offload_context_t context = PickContext();
    if (contexts_.count(context) == 0) {
      Judge(offload_device_upload(context, host_array_.data(), host_array_.data(), 4, nullptr),
            context);
      return;
    }
    Settle(context);
    const ContextModel& model = contexts_.at(context);
    FillPattern(host_array_, OFFLOAD_BF16, random_.Next());
    if (random_.Chance(20)) host_array_[2] = host_array_[3] = 0x7f;  // not a finite number
    const uint64_t bytes = random_.Below(kArrayBytes + 1);
    const void* source = random_.Chance(97) ? host_array_.data() : nullptr;
    Judge(offload_device_upload(context, Pointer(model.grads, bytes, model.kind), source, bytes,
                                PickStream(context)),
          context);
  }

  void Download() {
    const offload_context_t context = PickContext();
    const auto found = contexts_.find(context);
    const uint64_t bytes = random_.Below(kArrayBytes + 1);
    const void* source = found == contexts_.end()
                             ? nullptr
                             : Pointer(found->second.grads, bytes, found->second.kind);
    Judge(offload_device_download(context, random_.Chance(97) ? host_array_.data() : nullptr,
                                  source, bytes, PickStream(context)),
          context);
  }

  void Map() {
    const offload_context_t context = PickContext();
    const auto found = contexts_.find(context);
    const uint64_t bytes = random_.OneOf<uint64_t>({0, 1, kArrayBytes, UINT64_MAX});
    void* data =
        found == contexts_.end() ? nullptr : Pointer(found->second.grads, 4, found->second.kind);
    void* mapped = nullptr;
    Judge(offload_device_map(context, data, bytes, random_.Chance(98) ? &mapped : nullptr),
          context);
  }

  void CreateStream() {
    const offload_context_t context = PickContext();
    offload_stream_t stream = nullptr;
    if (contexts_.count(context) > 0 && contexts_.at(context).streams.size() >= 3) return;
    if (!Judge(offload_stream_create(context, &stream), context)) return;
    if (stream != nullptr) contexts_.at(context).streams.push_back(stream);
  }

  void DestroyStream() {
    const offload_context_t context = PickContext();
    const offload_stream_t stream = PickStream(context);
    if (!Judge(offload_stream_destroy(context, stream), context)) return;
    std::erase(contexts_.at(context).streams, stream);
    dead_streams_.push_back(stream);
  }

  void Synchronize() {
    const offload_context_t context = PickContext();
    const int64_t timeout_ns = random_.OneOf<int64_t>({0, 1000, -1, INT64_MAX});
    Judge(offload_stream_synchronize(context, PickStream(context), timeout_ns), context);
  }

  void RunOnStream() {
    const offload_context_t context = PickContext();
    Judge(offload_stream_run(context, PickStream(context), random_.Chance(95) ? CountRun : nullptr,
                             &runs_),
          context);
  }

  // There no memory is taken any more: it could lie where a gradient was freed that is still read.
  bool IsDoomed(offload_context_t context) const {
    const auto found = contexts_.find(context);
    return found != contexts_.end() && found->second.doomed;
  }

  // On the simulated device queued work then fails; on the host it would be the caller's crash.
  void FreeBoundGradient() {
    for (auto& [handle, model] : contexts_) {
      if (model.kind != OFFLOAD_DEVICE_SIM || model.grads.empty()) continue;
      model.doomed = true;
      Judge(offload_device_free(handle, model.grads.back()), handle);
      model.grads.pop_back();
      return;
    }
  }

  struct Callable {
    const char* name;
    void (World::*call)();
    uint64_t weight;
  };
  // Makes, registers, steps: often enough that much is alive, seldom enough that it lives.
  static constexpr Callable kEveryCall[] = {
      {"context_create", &World::CreateContext, 2},
      {"context_destroy", &World::DestroyContext, 1},
      {"context_get_info", &World::ContextInfo, 2},
      {"optimizer_create", &World::CreateOptimizer, 4},
      {"optimizer_destroy", &World::DestroyOptimizer, 1},
      {"add_group", &World::AddGroup, 8},
      {"set_group", &World::SetGroup, 8},
      {"add_params", &World::AddParams, 12},
      {"bind", &World::Bind, 12},
      {"plan", &World::Plan, 3},
      {"commit", &World::Commit, 3},
      {"step", &World::Step, 20},
      {"step_result", &World::StepResult, 8},
      {"wait", &World::Wait, 12},
      {"stream_wait", &World::StreamWait, 8},
      {"offload_params", &World::Lifecycle<Move::kOffloadParams, offload_optimizer_offload_params>,
       3},
      {"reload_params", &World::Lifecycle<Move::kReloadParams, offload_optimizer_reload_params>, 8},
      {"offload_grads", &World::Lifecycle<Move::kOffloadGrads, offload_optimizer_offload_grads>, 8},
      {"reload_grads", &World::Lifecycle<Move::kReloadGrads, offload_optimizer_reload_grads>, 15},
      {"offload_states", &World::Lifecycle<Move::kOffloadStates, offload_optimizer_offload_states>,
       3},
      {"reload_states", &World::Lifecycle<Move::kReloadStates, offload_optimizer_reload_states>, 8},
      {"refresh_masters",
       &World::Lifecycle<Move::kRefreshMasters, offload_optimizer_refresh_masters>, 4},
      {"save", &World::Save, 2},
      {"load", &World::Load, 2},
      {"state", &World::State, 8},
      {"get_stats", &World::Stats, 8},
      {"device_alloc", &World::Alloc, 3},
      {"device_free", &World::Free, 3},
      {"device_upload", &World::Upload, 4},
      {"device_download", &World::Download, 4},
      {"device_map", &World::Map, 4},
      {"stream_create", &World::CreateStream, 2},
      {"stream_destroy", &World::DestroyStream, 1},
      {"stream_synchronize", &World::Synchronize, 4},
      {"stream_run", &World::RunOnStream, 4},
  };
  static constexpr uint64_t kWeights = [] {
    uint64_t sum = 0;
    for (const Callable& one : kEveryCall) sum += one.weight;
    return sum;
  }();

  Random random_;
  size_t call_ = 0;  // the running one
  std::map<offload_context_t, ContextModel> contexts_;
  std::map<offload_optimizer_t, OptimizerModel> optimizers_;
  std::vector<void*> dead_contexts_, dead_optimizers_, dead_streams_;
  std::vector<std::pair<offload_context_t, void*>> extra_;  // allocations
  offload_ticket_t last_ticket_ = 0;
  std::vector<unsigned char> host_array_ = std::vector<unsigned char>(kArrayBytes);
  Tally tally_;
  Moved moved_{};
  const TemporaryDirectory directory_{CheckpointParent()};  // they are named by their numbers
  uint64_t saved_ = 0;
  uint64_t most_steps_ = 0;  // that a checkpoint can hold
  uint64_t loaded_ = 0;      // that somebody has waited for
  std::atomic<uint64_t> progress_calls_ = 0;
  std::atomic<uint64_t> runs_ = 0;
  uint64_t seen_ = 0;
};

TEST(RandomCalls, NeverCrashAndChangeNothingWhenRefused) {
  // Else whatever the scale: it is what the address sanitizer is for.
  const uint64_t calls = HYBRIDOPT_TSAN ? Scaled(kCalls) : kCalls;
  World::Tally tally;
  World::Moved moved{};
  uint64_t loaded = 0;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    World world(seed);
    for (uint64_t call = 0; call < calls / kSeeds && !HasFailure(); ++call) world.Call();
    world.DestroyAll();
    for (const auto& [key, count] : world.tally()) tally[key] += count;
    for (size_t move = 0; move < kMoves; ++move) moved[move] += world.moved()[move];
    loaded += world.loaded();
    if (HasFailure()) return;
  }
  std::map<std::string, std::array<uint64_t, 2>> outcomes;  // refused, done
  uint64_t total = 0;
  for (const auto& [key, count] : tally) {
    std::printf("%8llu %-20s %s\n", static_cast<unsigned long long>(count), key.first.c_str(),
                offload_status_name(key.second));
    outcomes[key.first][key.second == OFFLOAD_OK] += count;
    total += count;
  }
  EXPECT_GE(total, calls);
  // Both good and bad input was really there.
  EXPECT_EQ(outcomes.size(), 35u);
  for (const auto& [name, count] : outcomes) {
    EXPECT_GT(count[0], 0u) << name << " was never refused";
    EXPECT_GT(count[1], 0u) << name << " never succeeded";
  }
  for (size_t move = 0; move < kMoves; ++move) {
    std::printf("%8llu params by move %zu\n", static_cast<unsigned long long>(moved[move]), move);
    if (calls < kCalls) continue;  // too few for what takes several calls in a row
    EXPECT_GT(moved[move], 0u) << "move " << move << " never had anything to do";
  }
  std::printf("%8llu loads succeeded\n", static_cast<unsigned long long>(loaded));
  if (calls >= kCalls) {
    EXPECT_GT(loaded, 0u);
  }
}

}  // namespace
}  // namespace hybridopt::fault
