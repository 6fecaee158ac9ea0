// Steps, waits for them, and queries about an optimizer.
#include <gtest/gtest.h>

#include "calls.h"

namespace hybridopt::fault::random_calls {
namespace {

void Step(World& world) {
  Random& random = world.random;
  const offload_optimizer_t optimizer = world.PickOptimizer();
  OptimizerModel* model = world.Find(optimizer);
  auto options = Make<offload_step_options_t>();
  options.struct_size = world.StructSize(sizeof(options));
  options.grad_scale = world.Number();
  options.grad_norm_max = world.Number();
  options.flags = static_cast<uint32_t>(random.Below(random.Chance(95) ? 2 : 99));
  if (model != nullptr) options.stream = world.PickStream(model->context);
  offload_ticket_t ticket = 0;
  const bool given = random.Chance(80);
  const int32_t status = offload_optimizer_step(optimizer, given ? &options : nullptr, &ticket);
  const bool done = world.Judge(status, optimizer);
  if (model == nullptr) return;
  const bool allowed = model->committed && StepAllowed(*model);
  const bool room =
      model->calls_queued_max < kQueuedCalls && model->steps_queued_max < kQueuedSteps;
  if (!given && allowed && room && !world.IsDoomed(model->context)) {
    EXPECT_TRUE(done) << offload_last_error();
  }
  if (done) {
    EXPECT_TRUE(allowed);
    EXPECT_NE(ticket, 0u);
    model->steps += 1;
    model->steps_counted_max += 1;
    model->steps_queued_max += 1;
    for (ParamModel& param : model->params) param.held = Held::kNone;
    world.Queued(*model, ticket);
  }
  world.CompareStats(optimizer);
}

void StepResult(World& world) {
  const offload_optimizer_t optimizer = world.PickOptimizer();
  auto result = Make<offload_step_result_t>();
  result.struct_size = world.StructSize(sizeof(result));
  const int32_t status =
      offload_optimizer_step_result(optimizer, world.PickTicket(optimizer), &result);
  if (!world.Judge(status, optimizer)) return;
  EXPECT_LE(result.step, world.optimizers.at(optimizer).steps_counted_max);
}

void Wait(World& world) {
  const offload_optimizer_t optimizer = world.PickOptimizer();
  const auto timeout_ns = world.random.OneOf<int64_t>({0, 1, 100'000, -1, INT64_MIN, INT64_MAX});
  const offload_ticket_t ticket = world.PickTicket(optimizer);
  const int32_t status = offload_optimizer_wait(optimizer, ticket, timeout_ns);
  if (timeout_ns < 0) {
    EXPECT_NE(status, OFFLOAD_TIMED_OUT);
  }
  if (IsOfATransfer(status)) {
    EXPECT_NE(std::string(offload_last_error()).find(world.directory.path()), std::string::npos)
        << offload_last_error();
    return;
  }
  if (!world.Judge(status, optimizer)) return;
  OptimizerModel& model = world.optimizers.at(optimizer);
  EXPECT_TRUE(model.committed);
  if (ticket == 0) model.AllSeenDone();
}

void StreamWait(World& world) {
  Random& random = world.random;
  const offload_optimizer_t optimizer = world.PickOptimizer();
  const OptimizerModel* model = world.Find(optimizer);
  uint32_t params[3];
  for (uint32_t& param : params) param = static_cast<uint32_t>(random.Below(8));
  const offload_ticket_t ticket = world.PickTicket(optimizer);
  const offload_stream_t stream = world.PickStream(model == nullptr ? nullptr : model->context);
  const bool given = random.Chance(70);
  world.Judge(offload_optimizer_stream_wait(optimizer, ticket, stream, given ? params : nullptr,
                                            static_cast<uint32_t>(random.Below(4))),
              optimizer);
}

void State(World& world) {
  Random& random = world.random;
  const offload_optimizer_t optimizer = world.PickOptimizer();
  auto view = Make<offload_state_view_t>();
  view.struct_size = world.StructSize(sizeof(view));
  const uint32_t param = static_cast<uint32_t>(random.Below(6));
  const int32_t kind = random.OneOf({0, 1, 2, 3, 4, 5, -1, INT32_MAX});
  const int32_t status =
      offload_optimizer_state(optimizer, param, kind, random.Chance(98) ? &view : nullptr);
  if (!world.Judge(status, optimizer)) return;
  const OptimizerModel& model = world.optimizers.at(optimizer);
  EXPECT_EQ(view.device_count + view.host_count, model.params.at(param).count);
  EXPECT_LE(view.step_count, model.steps_counted_max);
  // Nothing is queued: the view may be read, and a sanitizer looks at where it points.
  const auto* values = static_cast<const unsigned char*>(view.host_data);
  volatile unsigned char seen = 0;
  if (view.host_count > 0) seen = values[0];
  if (view.host_count > 0) seen = values[4 * view.host_count - 1];
  static_cast<void>(seen);
}

void Stats(World& world) {
  const offload_optimizer_t optimizer = world.PickOptimizer();
  auto stats = Make<offload_stats_t>();
  stats.struct_size = world.StructSize(sizeof(stats));
  if (!world.Judge(offload_optimizer_get_stats(optimizer, &stats), optimizer)) return;
  world.CompareStats(stats, world.optimizers.at(optimizer));
}

constexpr Call kCalls[] = {
    {"step", Step, 20},  {"step_result", StepResult, 8},
    {"wait", Wait, 12},  {"stream_wait", StreamWait, 8},
    {"state", State, 8}, {"get_stats", Stats, 8},
};

}  // namespace

std::span<const Call> StepCalls() { return kCalls; }

}  // namespace hybridopt::fault::random_calls
