// Saves and loads.
#include <gtest/gtest.h>

#include <algorithm>

#include "calls.h"

namespace hybridopt::fault::random_calls {
namespace {

struct PathInput {
  std::string text;
  bool null = false;
  bool wrong = false;  // the call must be refused
  const char* path() const { return null ? nullptr : text.c_str(); }
};

// Mostly a new name, or an optimizer's own checkpoint.
PathInput PickPath(World& world, bool to_save, const OptimizerModel& model) {
  Random& random = world.random;
  switch (random.Below(20)) {
    case 0:
      return {"", true, true};
    case 1:
      return {"", false, true};
    case 2:
      return {world.directory.path(), false, to_save};
    case 3:
      return {world.directory / "none/new", false, to_save};
  }
  if (to_save) return {world.directory / std::to_string(world.saved)};
  if (!model.checkpoint.empty() && random.Chance(70)) return {model.checkpoint};
  return {world.directory / std::to_string(random.Below(world.saved + 1))};
}

// Fills the fields that both calls have; gives whether all of them are right.
template <typename Options>
bool FillTransfer(World& world, Options& options, uint32_t known_flags, offload_context_t context) {
  Random& random = world.random;
  options.struct_size = world.StructSize(sizeof(options));
  options.flags = static_cast<uint32_t>(random.Next()) & known_flags;
  if (random.Chance(3)) options.flags = random.OneOf<uint32_t>({8, 1u << 31, UINT32_MAX});
  options.io_depth = random.OneOf<uint32_t>({0, 1, 2, 64});
  if (random.Chance(3)) options.io_depth = random.OneOf<uint32_t>({65, UINT32_MAX});
  if (random.Chance(2)) options.reserved = 1;
  options.stream = world.PickStream(context);
  if (random.Chance(50)) {
    options.progress = [](void* user, uint64_t done, uint64_t total) {
      static_cast<std::atomic<uint64_t>*>(user)->fetch_add(done <= total ? 1 : UINT32_MAX);
    };
    options.progress_user = &world.progress_calls;
  }
  const auto& own = world.contexts.at(context).streams;
  const bool stream_good =
      options.stream == nullptr || std::count(own.begin(), own.end(), options.stream) > 0;
  return options.struct_size == sizeof(options) && (options.flags & ~known_flags) == 0 &&
         options.io_depth <= 64 && options.reserved == 0 && stream_good;
}

// Compares the outcome of a call that queues a save or load with what the model knows of its input.
bool JudgeTransfer(World& world, int32_t status, offload_optimizer_t optimizer, bool right,
                   bool wrong) {
  const bool done = world.Judge(status, optimizer);
  const OptimizerModel& model = world.optimizers.at(optimizer);
  if (!model.committed || wrong) {
    EXPECT_FALSE(done);
  } else if (right && model.calls_queued_max < kQueuedCalls && !world.IsDoomed(model.context)) {
    EXPECT_TRUE(done) << offload_last_error();
  }
  return done;
}

void Save(World& world) {
  const offload_optimizer_t optimizer = world.PickOptimizer();
  OptimizerModel* model = world.Find(optimizer);
  if (model == nullptr) {
    world.Judge(offload_optimizer_save(optimizer, nullptr, nullptr), optimizer);
    return;
  }
  const PathInput path = PickPath(world, true, *model);
  auto options = Make<offload_save_options_t>();
  const bool right = FillTransfer(world, options, OFFLOAD_SAVE_MASTERS_ONLY, model->context);
  options.path = path.path();
  const bool given = world.random.Chance(98);
  offload_ticket_t ticket = 0;
  const int32_t status = offload_optimizer_save(optimizer, given ? &options : nullptr, &ticket);
  const bool wrong = path.wrong || !given;
  if (!JudgeTransfer(world, status, optimizer, right && !wrong, wrong)) return;
  model->checkpoint = path.text;
  world.saved += 1;  // whatever becomes of it, the name is used
  model->saving = true;
  world.saved_steps_max = std::max(world.saved_steps_max, model->steps_counted_max);
  world.Queued(*model, ticket);
  world.CompareStats(optimizer);
}

void Load(World& world) {
  const offload_optimizer_t optimizer = world.PickOptimizer();
  OptimizerModel* model = world.Find(optimizer);
  if (model == nullptr) {
    world.Judge(offload_optimizer_load(optimizer, nullptr, nullptr), optimizer);
    return;
  }
  const PathInput path = PickPath(world, false, *model);
  auto options = Make<offload_load_options_t>();
  constexpr uint32_t kFlags =
      OFFLOAD_LOAD_FRESH_MOMENTS | OFFLOAD_LOAD_KEEP_STEPS | OFFLOAD_LOAD_NO_VERIFY;
  bool right = FillTransfer(world, options, kFlags, model->context);
  options.path = path.path();
  right = right && ((options.flags & OFFLOAD_LOAD_KEEP_STEPS) == 0 ||
                    (options.flags & OFFLOAD_LOAD_FRESH_MOMENTS) != 0);
  const bool away = std::any_of(model->params.begin(), model->params.end(),
                                [](const auto& p) { return p.params_out || p.states_out; });
  offload_ticket_t ticket = 0;
  const int32_t status = offload_optimizer_load(optimizer, &options, &ticket);
  const bool wrong = path.wrong || away;
  if (!JudgeTransfer(world, status, optimizer, right && !wrong, wrong)) return;
  model->steps_counted_max = std::max(model->steps_counted_max, world.saved_steps_max);
  world.Queued(*model, ticket);
  world.CompareStats(optimizer);
  if (world.random.Chance(50))
    world.loaded += offload_optimizer_wait(optimizer, ticket, -1) == OFFLOAD_OK;
}

constexpr Call kCalls[] = {
    {"save", Save, 2},
    {"load", Load, 2},
};

}  // namespace

std::span<const Call> CheckpointCalls() { return kCalls; }

}  // namespace hybridopt::fault::random_calls
