#include "world.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <limits>

#include "../../sanitizers.h"
#include "calls.h"

namespace hybridopt::fault::random_calls {
namespace {

// In memory, if the system has such a file system: the test is about calls, not about disks.
std::string CheckpointParent() {
  constexpr char kInMemory[] = "/dev/shm";
  return std::filesystem::is_directory(kInMemory) ? kInMemory
                                                  : std::filesystem::temp_directory_path().string();
}

uint64_t WeightOfEveryCall() {
  uint64_t sum = 0;
  for (const Call& call : EveryCall()) sum += call.weight;
  return sum;
}

}  // namespace

const std::vector<Call>& EveryCall() {
  static const std::vector<Call> calls = [] {
    std::vector<Call> all;
    for (const auto part : {ContextCalls(), RegistrationCalls(), StepCalls(), MoveCalls(),
                            CheckpointCalls(), DeviceCalls(), StashCalls()})
      all.insert(all.end(), part.begin(), part.end());
    return all;
  }();
  return calls;
}

World::World(uint64_t number) : World(Random(number)) {}
World::World(const Random& drawn) : random(drawn), directory(CheckpointParent()) {}

void World::MakeCall() {
  if (random.OneIn(3000)) return FreeBoundGradient();
  static const uint64_t weights = WeightOfEveryCall();
  uint64_t left = random.Below(weights);
  call_ = EveryCall().data();
  while (left >= call_->weight) left -= (call_++)->weight;
  call_->make(*this);
}

// A mistake of the caller, possibly while a copy reads the gradient. The thread sanitizer would
// report this race of the caller.
void World::FreeBoundGradient() {
  if (HYBRIDOPT_TSAN) return;
  for (auto& [handle, model] : contexts) {
    if (model.kind != OFFLOAD_DEVICE_SIM || model.grads.empty()) continue;
    model.doomed = true;
    const int32_t status = offload_device_free(handle, model.grads.back());
    EXPECT_TRUE(status == OFFLOAD_OK || status == OFFLOAD_DEVICE_FAILED) << offload_last_error();
    model.grads.pop_back();
    return;
  }
}

void World::DestroyAll() {
  for (const auto& [handle, model] : optimizers)
    EXPECT_OFFLOAD_OK(offload_optimizer_destroy(handle));
  for (const auto& [handle, model] : stashes) EXPECT_OFFLOAD_OK(offload_stash_destroy(handle));
  for (const auto& [handle, model] : contexts) EXPECT_OFFLOAD_OK(offload_context_destroy(handle));
}

// ------------------------------------------------------------------------------------- judging --

const char* World::call_name() const { return call_->name; }

bool World::Judge(int32_t status, bool doomed) {
  tally[{call_name(), status}] += 1;
  if (status == OFFLOAD_OK) return true;
  EXPECT_STRNE(offload_last_error(), "") << status;
  const bool usual = status == OFFLOAD_INVALID_ARGUMENT || status == OFFLOAD_INVALID_STATE ||
                     status == OFFLOAD_UNSUPPORTED || status == OFFLOAD_OUT_OF_HOST_MEMORY ||
                     status == OFFLOAD_OUT_OF_DEVICE_MEMORY || status == OFFLOAD_TIMED_OUT;
  const bool failed = status == OFFLOAD_DEVICE_FAILED || status == OFFLOAD_POISONED;
  EXPECT_TRUE(usual || (doomed && failed)) << status << ": " << offload_last_error();
  return false;
}

bool World::Judge(int32_t status, offload_optimizer_t optimizer) {
  const OptimizerModel* model = Find(optimizer);
  if (model == nullptr) {
    // Noise can look like a handle of another process.
    EXPECT_TRUE(status == OFFLOAD_INVALID_ARGUMENT || status == OFFLOAD_INVALID_STATE);
    return Judge(status);
  }
  if (Judge(status, IsDoomed(model->context))) return true;
  if (random.Chance(5)) Compare(optimizer, *model);
  return false;
}

bool World::Judge(int32_t status, offload_context_t context) {
  const ContextModel* model = Find(context);
  if (model == nullptr) {
    // Noise can look like a handle of another process.
    EXPECT_TRUE(status == OFFLOAD_INVALID_ARGUMENT || status == OFFLOAD_INVALID_STATE);
    return Judge(status);
  }
  return Judge(status, model->doomed);
}

void World::Compare(offload_optimizer_t optimizer, const OptimizerModel& model) {
  auto plan = Make<offload_plan_t>();
  ASSERT_OFFLOAD_OK(offload_optimizer_plan(optimizer, &plan));
  uint64_t elements = 0;
  for (const ParamModel& param : model.params) elements += param.count;
  EXPECT_EQ(plan.param_count, model.params.size());
  EXPECT_EQ(plan.element_count, elements);
  EXPECT_EQ(plan.elements[OFFLOAD_TIER_HOST] + plan.elements[OFFLOAD_TIER_DEVICE], elements);
  auto stats = Make<offload_stats_t>();
  ASSERT_OFFLOAD_OK(offload_optimizer_get_stats(optimizer, &stats));
  EXPECT_EQ(stats.host_bytes > 0, model.committed);
  CompareStats(stats, model);
}

void World::CompareStats(const offload_stats_t& stats, const OptimizerModel& model) {
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
  EXPECT_EQ(stats.params_bytes[OFFLOAD_TIER_DEVICE], params_there);
  EXPECT_EQ(stats.params_bytes[OFFLOAD_TIER_HOST], params_out);
  EXPECT_EQ(stats.grads_bytes[OFFLOAD_TIER_DEVICE], grads_there);
  EXPECT_EQ(stats.grads_bytes[OFFLOAD_TIER_HOST], grads_held);
  if (!model.committed) return;
  EXPECT_LE(stats.state_bytes[OFFLOAD_TIER_DEVICE], model.device_state_bytes);
  if (!any_states_out) {
    EXPECT_EQ(stats.state_bytes[OFFLOAD_TIER_DEVICE], model.device_state_bytes);
  }
  if (model.all_states_out()) {
    EXPECT_EQ(stats.state_bytes[OFFLOAD_TIER_DEVICE], 0u);
  }
}

void World::CompareStats(offload_optimizer_t optimizer) {
  auto stats = Make<offload_stats_t>();
  ASSERT_OFFLOAD_OK(offload_optimizer_get_stats(optimizer, &stats));
  CompareStats(stats, optimizers.at(optimizer));
}

// -------------------------------------------------------------------------------- what is known --

void World::Queued(OptimizerModel& model, offload_ticket_t ticket) {
  model.calls_queued_max += 1;
  model.tickets.push_back(ticket);
  last_ticket_ = ticket;
}

void World::Settle(offload_context_t context) {
  for (auto& [handle, model] : optimizers) {
    if (model.context != context || !model.committed) continue;
    int32_t status = offload_optimizer_wait(handle, 0, -1);
    while (IsOfATransfer(status)) status = offload_optimizer_wait(handle, 0, -1);
    if (status != OFFLOAD_OK) {
      EXPECT_TRUE(IsDoomed(context)) << offload_last_error();
      continue;
    }
    model.AllSeenDone();
    auto stats = Make<offload_stats_t>();
    EXPECT_OFFLOAD_OK(offload_optimizer_get_stats(handle, &stats));
    EXPECT_EQ(stats.steps_applied + stats.steps_skipped, model.steps);
  }
}

bool World::IsDoomed(offload_context_t context) const {
  const auto found = contexts.find(context);
  return found != contexts.end() && found->second.doomed;
}

OptimizerModel* World::Find(offload_optimizer_t optimizer) {
  const auto found = optimizers.find(optimizer);
  return found == optimizers.end() ? nullptr : &found->second;
}

ContextModel* World::Find(offload_context_t context) {
  const auto found = contexts.find(context);
  return found == contexts.end() ? nullptr : &found->second;
}

// -------------------------------------------------------------------------------- drawing input --

namespace {

// Usually a live handle, sometimes NULL, a destroyed one, one of the other kind or noise.
template <typename Handle, typename Model>
Handle Pick(World& world, const std::map<Handle, Model>& live, const std::vector<void*>& dead,
            void* other_kind) {
  Random& random = world.random;
  if (!live.empty() && random.Chance(90))
    return std::next(live.begin(), static_cast<int64_t>(random.Below(live.size())))->first;
  switch (random.Below(4)) {
    case 0:
      return nullptr;
    case 1:
      return dead.empty() ? nullptr : static_cast<Handle>(dead[random.Below(dead.size())]);
    case 2:
      return static_cast<Handle>(other_kind);
    default:
      return static_cast<Handle>(world.Garbage());
  }
}

}  // namespace

offload_context_t World::PickContext() {
  void* other = optimizers.empty() ? nullptr : optimizers.begin()->first;
  return Pick(*this, contexts, dead_contexts, other);
}

offload_optimizer_t World::PickOptimizer() {
  void* other = contexts.empty() ? nullptr : contexts.begin()->first;
  return Pick(*this, optimizers, dead_optimizers, other);
}

offload_stash_t World::PickStash() {
  void* other = contexts.empty() ? nullptr : contexts.begin()->first;
  return Pick(*this, stashes, dead_stashes, other);
}

offload_stream_t World::PickStream(offload_context_t context) {
  if (random.Chance(70)) return nullptr;
  const ContextModel* model = Find(context);
  if (model != nullptr && !model->streams.empty() && random.Chance(80))
    return model->streams[random.Below(model->streams.size())];
  return random.Chance(50) || dead_streams.empty()
             ? Garbage()
             : dead_streams[random.Below(dead_streams.size())];
}

offload_ticket_t World::PickTicket(offload_optimizer_t optimizer) {
  const OptimizerModel* model = Find(optimizer);
  if (model != nullptr && !model->tickets.empty() && random.Chance(60)) {
    const auto& tickets = model->tickets;
    return tickets[tickets.size() - 1 - random.Below(std::min<size_t>(tickets.size(), 80))];
  }
  return random.OneOf<offload_ticket_t>({0, 0, last_ticket_, last_ticket_ + 1, random.Next()});
}

void* World::Pointer(const std::vector<void*>& arrays, uint64_t bytes, int32_t device_kind) {
  if (random.Chance(4)) return nullptr;
  if (device_kind == OFFLOAD_DEVICE_SIM && random.Chance(3))
    return random.Chance(50) ? Garbage() : static_cast<void*>(host_array.data());
  if (arrays.empty() || bytes > kArrayBytes) return nullptr;
  const uint64_t room = kArrayBytes - bytes;
  uint64_t offset = random.Below(room / 4 + 1) * 4;
  if (random.Chance(2) && room > offset) offset += 1;
  return static_cast<char*>(arrays[random.Below(arrays.size())]) + offset;
}

void* World::Garbage() {
  return reinterpret_cast<void*>(random.OneOf<uint64_t>(
      {1, random.Next(), random.Next() >> 8, uint64_t{1} << 56, uint64_t{2} << 56, UINT64_MAX}));
}

double World::Number() {
  if (random.Chance(90)) return static_cast<double>(random.Below(100)) / 100;
  return random.OneOf<double>({-1.0, 1e-50, 1e300, 1.0, -0.0,
                               std::numeric_limits<double>::quiet_NaN(),
                               std::numeric_limits<double>::infinity()});
}

uint32_t World::StructSize(size_t bytes) {
  if (random.Chance(98)) return static_cast<uint32_t>(bytes);
  return random.OneOf<uint32_t>({0, 1, 3, 1 << 20, UINT32_MAX});
}

}  // namespace hybridopt::fault::random_calls
