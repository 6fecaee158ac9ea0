// Optimizers, groups and params, up to commit.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>

#include "calls.h"

namespace hybridopt::fault::random_calls {
namespace {

// An array for params; NULL when the device is full.
void* TryNewArray(World& world, offload_context_t context) {
  void* data = nullptr;
  if (!world.Judge(offload_device_alloc(context, kArrayBytes, &data), context)) return nullptr;
  std::vector<unsigned char> bytes(kArrayBytes);
  FillPattern(bytes, OFFLOAD_BF16, world.random.Next());
  EXPECT_OFFLOAD_OK(offload_device_upload(context, data, bytes.data(), bytes.size(), nullptr));
  return data;
}

void CreateOptimizer(World& world) {
  Random& random = world.random;
  const offload_context_t context = world.PickContext();
  auto options = Make<offload_optimizer_options_t>();
  options.struct_size = world.StructSize(sizeof(options));
  options.algorithm = static_cast<int32_t>(random.Chance(95) ? 1 + random.Below(6) : 7);
  options.device_fraction = world.Number();
  options.chunk_elements = random.OneOf<uint64_t>({0, 1024, 1024, 1024, 7, UINT64_MAX});
  options.staging_slots = random.OneOf<uint32_t>({0, 2, 2, 3, 64, 1, UINT32_MAX});
  options.host_executors =
      random.Chance(98) ? static_cast<int32_t>(random.Below(3)) : random.OneOf<int32_t>({-1, 3});
  // The smallest holds the state of 2 chunks.
  if (options.host_executors != OFFLOAD_EXECUTORS_CPU && random.Chance(30))
    options.stream_ring_bytes = random.OneOf<uint64_t>({1 << 16, 1 << 18, 1 << 20, 1, UINT64_MAX});
  if (random.Chance(70)) options.movable = static_cast<uint32_t>(random.Below(16));
  const bool updates_early = (options.movable & OFFLOAD_MOVABLE_GRADS) != 0 &&
                             options.host_executors != OFFLOAD_EXECUTORS_STREAMED &&
                             world.contexts.contains(context) &&
                             world.contexts.at(context).kind != OFFLOAD_DEVICE_HOST;
  if (random.Chance(updates_early ? 60 : 2))
    options.early_update_bytes = random.OneOf<uint64_t>({1 << 14, 1 << 18, UINT64_MAX});
  if (world.optimizers.size() >= 8) options.movable = 16;  // enough of them
  offload_optimizer_t optimizer = nullptr;
  if (!world.Judge(offload_optimizer_create(context, &options, &optimizer), context)) return;
  OptimizerModel model{};
  model.context = context;
  model.algorithm = options.algorithm;
  model.movable = options.movable;
  if (!world.IsDoomed(context))
    for (uint32_t i = 0; i < kDataArrays; ++i) model.data.push_back(TryNewArray(world, context));
  std::erase(model.data, nullptr);
  world.contexts.at(context).optimizers += 1;
  world.optimizers.emplace(optimizer, std::move(model));
}

void DestroyOptimizer(World& world) {
  const offload_optimizer_t optimizer = world.PickOptimizer();
  if (!world.Judge(offload_optimizer_destroy(optimizer), optimizer)) return;
  const OptimizerModel& model = world.optimizers.at(optimizer);
  for (void* data : model.data) EXPECT_OFFLOAD_OK(offload_device_free(model.context, data));
  world.contexts.at(model.context).optimizers -= 1;
  world.optimizers.erase(optimizer);
  world.dead_optimizers.push_back(optimizer);
}

// -------------------------------------------------------------------------------------- groups --

// Hyperparameters that fit the optimizer's algorithm, nearly always.
offload_group_t Group(World& world, offload_optimizer_t optimizer) {
  Random& random = world.random;
  const OptimizerModel* model = world.Find(optimizer);
  const int32_t algorithm = model == nullptr ? OFFLOAD_SGD : model->algorithm;
  auto group = Make<offload_group_t>();
  group.struct_size = world.StructSize(sizeof(group));
  group.lr = world.Number();
  group.weight_decay = world.Number();
  group.maximize = static_cast<int32_t>(random.Below(random.Chance(98) ? 2 : 5));
  if (algorithm <= OFFLOAD_ADAM || algorithm == OFFLOAD_LION) {
    group.beta1 = world.Number();
    group.beta2 = world.Number();
  }
  if (algorithm <= OFFLOAD_ADAM || algorithm == OFFLOAD_ADAGRAD)
    group.eps = 1e-8 + std::abs(world.Number());
  if (algorithm == OFFLOAD_SGD && random.Chance(70)) {
    group.momentum = world.Number();
    group.nesterov = static_cast<int32_t>(random.Below(2));
    if (random.Chance(20)) group.dampening = world.Number();
  }
  if (algorithm == OFFLOAD_ADAGRAD) group.initial_accumulator_value = world.Number();
  if (algorithm == OFFLOAD_SIGNUM) group.momentum = world.Number();
  if (random.Chance(2)) group.momentum = 0.5;
  if (algorithm == OFFLOAD_ADAMW || random.Chance(1))
    group.cautious_weight_decay = static_cast<int32_t>(random.Below(2));
  return group;
}

void AddGroup(World& world) {
  const offload_optimizer_t optimizer = world.PickOptimizer();
  const offload_group_t group = Group(world, optimizer);
  uint32_t id = 0;
  const bool given = world.random.Chance(98), take_id = world.random.Chance(98);
  const int32_t status =
      offload_optimizer_add_group(optimizer, given ? &group : nullptr, take_id ? &id : nullptr);
  if (!world.Judge(status, optimizer)) return;
  OptimizerModel& model = world.optimizers.at(optimizer);
  EXPECT_FALSE(model.committed);
  EXPECT_EQ(id, model.groups);
  model.groups += 1;
}

void SetGroup(World& world) {
  const offload_optimizer_t optimizer = world.PickOptimizer();
  const offload_group_t group = Group(world, optimizer);
  const uint32_t id = static_cast<uint32_t>(world.random.Below(4));
  if (!world.Judge(offload_optimizer_set_group(optimizer, id, &group), optimizer)) return;
  EXPECT_LT(id, world.optimizers.at(optimizer).groups);
}

// -------------------------------------------------------------------------------------- params --

// A param with all memory to which it points.
struct ParamRoom {
  offload_param_t param;
  offload_shard_t shard;
  std::string name;
  std::array<int64_t, 3> shape, offsets, extents;
};

void AddShard(World& world, ParamRoom& room) {
  Random& random = world.random;
  room.shard = Make<offload_shard_t>();
  room.shard.struct_size = world.StructSize(sizeof(offload_shard_t));
  room.shard.dimensions = static_cast<uint32_t>(random.Below(4));
  room.shard.box_count = random.Chance(95) ? 1 : 0;
  room.shard.flags = static_cast<uint32_t>(random.Below(random.Chance(95) ? 2 : 8));
  for (size_t d = 0; d < 3; ++d) {
    room.shape[d] = static_cast<int64_t>(random.Below(20));
    room.offsets[d] = static_cast<int64_t>(random.Below(3));
    room.extents[d] = random.Chance(95) ? static_cast<int64_t>(random.Below(10))
                                        : random.OneOf<int64_t>({-1, INT64_MAX, INT64_MIN});
  }
  if (random.Chance(50)) {  // one that fits
    room.shard.dimensions = 1;
    room.shard.flags = 0;
    room.shape[0] = room.extents[0] = static_cast<int64_t>(room.param.count);
    room.offsets[0] = 0;
  }
  if (room.shard.flags == OFFLOAD_SHARD_RANGE) {
    room.shard.range_begin = random.Below(10);
    room.shard.range_count = room.param.count;
  }
  room.shard.global_shape = random.Chance(98) ? room.shape.data() : nullptr;
  room.shard.box_offsets = room.offsets.data();
  room.shard.box_extents = room.extents.data();
  room.param.shard = &room.shard;
}

// Makes one field wrong.
void SpoilParam(Random& random, ParamRoom& room) {
  offload_param_t& param = room.param;
  switch (random.Below(9)) {
    case 0:
      param.name = random.Chance(50) ? nullptr : "";
      break;
    case 1:
      room.name.assign(2000, 'x');
      param.name = room.name.c_str();
      break;
    case 2:
      param.dtype = static_cast<int32_t>(random.Next());
      break;
    case 3:
      param.grad_dtype = random.OneOf({0, 4, -1, INT32_MIN});
      break;
    case 4:
      param.placement = random.OneOf({-1, 3, INT32_MAX});
      break;
    case 5:
      param.split_count = 1 + static_cast<uint32_t>(random.Below(UINT32_MAX));  // of nothing
      break;
    case 6:
      param.count = random.OneOf<uint64_t>({(uint64_t{1} << 44) + 1, UINT64_MAX});
      break;
    case 7:
      param.group = UINT32_MAX;
      break;
    default:
      param.struct_size = random.OneOf<uint32_t>({0, 1, 3, 1 << 20, UINT32_MAX});
  }
}

void FillParam(World& world, ParamRoom& room, const OptimizerModel& model,
               const ContextModel& context) {
  Random& random = world.random;
  offload_param_t& param = room.param = Make<offload_param_t>();
  param.group = static_cast<uint32_t>(
      random.Below(model.groups + (random.Chance(95) ? 0 : 2) + (model.groups == 0)));
  param.dtype = 1 + static_cast<int32_t>(random.Below(3));
  param.grad_dtype = 1 + static_cast<int32_t>(random.Below(3));
  param.placement = static_cast<int32_t>(random.Below(3));
  param.count = random.Below(random.Chance(80) ? 100 : kArrayBytes / 4);
  param.data = world.Pointer(model.data, param.count * ElementBytes(param.dtype), context.kind);
  param.grad =
      world.Pointer(context.grads, param.count * ElementBytes(param.grad_dtype), context.kind);
  room.name = "p" + std::to_string(random.Below(1000));
  param.name = room.name.c_str();
  if (random.Chance(20)) AddShard(world, room);
  if (random.Chance(10)) SpoilParam(random, room);
}

// The model of a param after registration.
ParamModel Registered(const offload_param_t& param) {
  offload_param_t read{};  // fields that a shorter struct lacks are zero
  std::memcpy(&read, &param, std::min<size_t>(param.struct_size, sizeof(read)));
  ParamModel known;
  known.count = read.count;
  known.dtype = read.dtype;
  known.grad_dtype = read.grad_dtype;
  known.data = read.data;
  known.grad = read.grad;
  return known;
}

void AddParams(World& world) {
  Random& random = world.random;
  const offload_optimizer_t optimizer = world.PickOptimizer();
  OptimizerModel* model = world.Find(optimizer);
  const uint32_t count = static_cast<uint32_t>(random.Below(4));
  std::vector<ParamRoom> rooms(count);
  std::vector<offload_param_t> params(count);
  static const OptimizerModel no_optimizer{};
  static const ContextModel no_context{OFFLOAD_DEVICE_HOST, 0, 0, false, {}, {}};
  for (uint32_t i = 0; i < count; ++i) {
    FillParam(world, rooms[i], model != nullptr ? *model : no_optimizer,
              model != nullptr ? world.contexts.at(model->context) : no_context);
    params[i] = rooms[i].param;
  }
  if (count == 1 && random.Chance(10))  // an older caller's
    params[0].struct_size = 8 * static_cast<uint32_t>(random.Below(sizeof(offload_param_t) / 8));
  uint32_t first = 0;
  const int32_t status = offload_optimizer_add_params(
      optimizer, random.Chance(98) ? params.data() : nullptr, count, &first);
  if (!world.Judge(status, optimizer)) return;
  EXPECT_FALSE(model->committed);
  EXPECT_EQ(first, model->params.size());
  for (const offload_param_t& param : params) model->params.push_back(Registered(param));
}

void Bind(World& world) {
  Random& random = world.random;
  const offload_optimizer_t optimizer = world.PickOptimizer();
  OptimizerModel* model = world.Find(optimizer);
  std::vector<offload_binding_t> bindings(random.Below(5));
  for (offload_binding_t& binding : bindings) {
    binding = Make<offload_binding_t>();
    binding.struct_size = world.StructSize(sizeof(binding));
    binding.param = static_cast<uint32_t>(random.Below(6));
    if (model == nullptr) continue;
    const ContextModel& context = world.contexts.at(model->context);
    const bool known = binding.param < model->params.size();
    // 4 bytes each are enough for every dtype.
    const uint64_t bytes = known ? 4 * model->params[binding.param].count : 4;
    if (random.Chance(80)) binding.grad = world.Pointer(context.grads, bytes, context.kind);
    if (random.Chance(known && model->params[binding.param].params_out ? 90 : 30))
      binding.data = world.Pointer(model->data, bytes, context.kind);
  }
  // A param must not get memory in which a save still reads another param.
  if (model != nullptr && model->saving) world.Settle(model->context);
  const int32_t status =
      offload_optimizer_bind(optimizer, random.Chance(98) ? bindings.data() : nullptr,
                             static_cast<uint32_t>(bindings.size()));
  const bool done = world.Judge(status, optimizer);
  if (model == nullptr) return;
  for (const offload_binding_t& binding : bindings) {
    if (!done) break;
    ParamModel& param = model->params.at(binding.param);
    if (binding.data != nullptr) param.data = binding.data;
    param.grad = binding.grad;
  }
  world.CompareStats(optimizer);
}

// -------------------------------------------------------------------------------------- commit --

void Plan(World& world) {
  const offload_optimizer_t optimizer = world.PickOptimizer();
  auto plan = Make<offload_plan_t>();
  plan.struct_size = world.StructSize(sizeof(plan));
  if (world.Judge(offload_optimizer_plan(optimizer, &plan), optimizer))
    world.Compare(optimizer, world.optimizers.at(optimizer));
}

void Commit(World& world) {
  const offload_optimizer_t optimizer = world.PickOptimizer();
  OptimizerModel* model = world.Find(optimizer);
  const offload_context_t context = model == nullptr ? nullptr : model->context;
  if (world.IsDoomed(context)) return;
  const int32_t status = offload_optimizer_commit(optimizer, world.PickStream(context));
  if (!world.Judge(status, optimizer)) return;
  EXPECT_FALSE(model->committed);
  EXPECT_FALSE(model->params.empty());
  auto stats = Make<offload_stats_t>();
  EXPECT_OFFLOAD_OK(offload_optimizer_get_stats(optimizer, &stats));
  model->device_state_bytes = stats.state_bytes[OFFLOAD_TIER_DEVICE];
  model->committed = true;
}

// The calls with their weights. Objects are made so often that many exist, and destroyed so rarely
// that they live long.
constexpr Call kCalls[] = {
    {"optimizer_create", CreateOptimizer, 4},
    {"optimizer_destroy", DestroyOptimizer, 1},
    {"add_group", AddGroup, 8},
    {"set_group", SetGroup, 8},
    {"add_params", AddParams, 12},
    {"bind", Bind, 12},
    {"plan", Plan, 3},
    {"commit", Commit, 3},
};

}  // namespace

std::span<const Call> RegistrationCalls() { return kCalls; }

}  // namespace hybridopt::fault::random_calls
