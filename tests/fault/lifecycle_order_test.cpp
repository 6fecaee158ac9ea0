// Possible errors in the order of lifecycle calls and streams: work that is still queued when
// memory is freed, streams that never advance, tickets that complete too early.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "offload.h"
#include "trainer.h"

namespace hybridopt::fault {
namespace {

constexpr int64_t kLongNs = 60'000'000'000;

void Must(int32_t status) { ASSERT_EQ(status, OFFLOAD_OK) << offload_last_error(); }

// An optimizer of fp32 params of equal size on the sim, all with gradients of one value.
struct Rig {
  Rig(uint32_t param_count, uint64_t elements, double device_fraction, uint64_t delay_ns_max,
      uint64_t device_timeout_ns) {
    auto context_options = Make<offload_context_options_t>();
    context_options.device_kind = OFFLOAD_DEVICE_SIM;
    context_options.threads = 2;
    context_options.sim_seed = 5;
    context_options.sim_delay_ns_max = delay_ns_max;
    context_options.device_timeout_ns = device_timeout_ns;
    Must(offload_context_create(&context_options, &context));
    Must(offload_stream_create(context, &stream));
    auto options = Make<offload_optimizer_options_t>();
    options.algorithm = OFFLOAD_ADAMW;
    options.device_fraction = device_fraction;
    options.movable = OFFLOAD_MOVABLE_PARAMS | OFFLOAD_MOVABLE_GRADS | OFFLOAD_MOVABLE_STATES;
    Must(offload_optimizer_create(context, &options, &optimizer));
    auto group = Make<offload_group_t>();
    group.lr = 1e-3;
    group.beta1 = 0.9;
    group.beta2 = 0.999;
    group.eps = 1e-8;
    uint32_t group_id = 0;
    Must(offload_optimizer_add_group(optimizer, &group, &group_id));
    const std::vector<float> ones(elements, 1.0f);
    for (uint32_t id = 0; id < param_count; ++id) {
      for (std::vector<void*>* list : {&data, &grads}) {
        void* memory = nullptr;
        Must(offload_device_alloc(context, elements * sizeof(float), &memory));
        list->push_back(memory);
      }
      if (id == 0)
        Must(offload_device_upload(context, grads[0], ones.data(), elements * sizeof(float),
                                   nullptr));
      const std::string name = "p" + std::to_string(id);
      auto param = Make<offload_param_t>();
      param.dtype = param.grad_dtype = OFFLOAD_FP32;
      param.name = name.c_str();
      param.data = data[id];
      param.grad = grads[id];
      param.count = elements;
      Must(offload_optimizer_add_params(optimizer, &param, 1, nullptr));
    }
    Must(offload_optimizer_commit(optimizer, nullptr));
  }
  ~Rig() {
    gate.open = true;
    if (optimizer != nullptr) {
      EXPECT_EQ(offload_optimizer_destroy(optimizer), OFFLOAD_OK);
    }
    EXPECT_EQ(offload_context_destroy(context), OFFLOAD_OK);
  }

  offload_move_options_t Behind(const offload_stream_t* streams, uint32_t flags) const {
    auto options = Make<offload_move_options_t>();
    options.flags = flags;
    options.streams = streams;
    options.stream_count = 1;
    return options;
  }

  offload_context_t context = nullptr;
  offload_stream_t stream = nullptr;
  offload_optimizer_t optimizer = nullptr;
  std::vector<void*> data;
  std::vector<void*> grads;
  Gate gate;
};

// The verdict on gradients on the host is copied to the device. A skipped step must wait for this
// copy: the next call may free the memory.
TEST(SkippedStep, LeavesNothingQueuedOnMemoryThatGoesNext) {
  Rig rig(1, 3000, 0, 3'000'000, 0);
  std::vector<float> grad(3000, std::numeric_limits<float>::infinity());
  Must(offload_device_upload(rig.context, rig.grads[0], grad.data(), grad.size() * sizeof(float),
                             nullptr));
  for (int round = 0; round < 5; ++round) {
    auto binding = Make<offload_binding_t>();
    binding.grad = rig.grads[0];
    Must(offload_optimizer_bind(rig.optimizer, &binding, 1));
    Must(offload_optimizer_offload_grads(rig.optimizer, nullptr, nullptr));
    offload_ticket_t step = 0;
    Must(offload_optimizer_step(rig.optimizer, nullptr, &step));
    Must(offload_optimizer_offload_states(rig.optimizer, nullptr, nullptr));
    Must(offload_optimizer_reload_states(rig.optimizer, nullptr, nullptr));
    Must(offload_optimizer_wait(rig.optimizer, 0, kLongNs));
    auto result = Make<offload_step_result_t>();
    Must(offload_optimizer_step_result(rig.optimizer, step, &result));
    EXPECT_EQ(result.skipped, 1);
  }
}

// More copies than a launch queue holds, after a stream that is blocked: the step and the move fail
// in time, and destroy returns.
TEST(StuckStream, WithMoreCopiesThanALaunchQueueHolds) {
  for (const bool move : {false, true}) {
    Rig rig(3000, 8, 0, 0, 1'000'000'000);
    Must(offload_stream_run(rig.context, rig.stream, Gate::Hold, &rig.gate));
    offload_ticket_t ticket = 0;
    if (move) {
      const offload_move_options_t options = rig.Behind(&rig.stream, 0);
      Must(offload_optimizer_offload_params(rig.optimizer, &options, &ticket));
    } else {
      auto options = Make<offload_step_options_t>();
      options.stream = rig.stream;
      Must(offload_optimizer_step(rig.optimizer, &options, &ticket));
    }
    EXPECT_EQ(offload_optimizer_wait(rig.optimizer, ticket, kLongNs), OFFLOAD_DEVICE_FAILED);
    const std::string text = offload_last_error();
    for (const char* word : {"no progress for 1.0 s", "event \"caller ready\" on stream \"caller\"",
                             move ? "the streams given to a move" : "the gradients"})
      EXPECT_NE(text.find(word), std::string::npos) << text;
    Must(offload_optimizer_destroy(rig.optimizer));
    rig.optimizer = nullptr;
    EXPECT_FALSE(rig.gate.open);
  }
}

// A dropped gradient may be freed when the ticket says so: not while its producer still writes it.
TEST(DroppedGradients, TheTicketWaitsForTheProducer) {
  Rig rig(2, 100, 0, 0, 0);
  Must(offload_stream_run(rig.context, rig.stream, Gate::Hold, &rig.gate));
  const offload_move_options_t options = rig.Behind(&rig.stream, OFFLOAD_MOVE_DROP);
  offload_ticket_t ticket = 0;
  Must(offload_optimizer_offload_grads(rig.optimizer, &options, &ticket));
  EXPECT_EQ(offload_optimizer_wait(rig.optimizer, ticket, 20'000'000), OFFLOAD_TIMED_OUT);
  rig.gate.open = true;
  EXPECT_EQ(offload_optimizer_wait(rig.optimizer, ticket, kLongNs), OFFLOAD_OK);
}

TEST(DeviceFree, DoesNotFreeTheLibrarysMemory) {
  Rig rig(1, 100, 1, 0, 0);
  auto view = Make<offload_state_view_t>();
  Must(offload_optimizer_state(rig.optimizer, 0, OFFLOAD_STATE_EXP_AVG, &view));
  ASSERT_NE(view.device_data, nullptr);
  EXPECT_EQ(offload_device_free(rig.context, view.device_data), OFFLOAD_INVALID_ARGUMENT);
  EXPECT_NE(std::string(offload_last_error()).find("offload_device_alloc"), std::string::npos);
  Must(offload_optimizer_step(rig.optimizer, nullptr, nullptr));
  Must(offload_optimizer_wait(rig.optimizer, 0, kLongNs));
}

// An fp32 param of the device share is its own master. Bound anew but not reloaded, its address
// holds nothing yet.
TEST(StateView, OfAParamThatIsNotBackIsRefused) {
  Rig rig(1, 100, 1, 0, 0);
  Must(offload_optimizer_offload_params(rig.optimizer, nullptr, nullptr));
  auto binding = Make<offload_binding_t>();
  binding.data = rig.data[0];
  Must(offload_optimizer_bind(rig.optimizer, &binding, 1));
  Must(offload_optimizer_wait(rig.optimizer, 0, kLongNs));
  auto view = Make<offload_state_view_t>();
  EXPECT_EQ(offload_optimizer_state(rig.optimizer, 0, OFFLOAD_STATE_MASTER, &view),
            OFFLOAD_INVALID_STATE);
  EXPECT_NE(std::string(offload_last_error()).find("reload_params"), std::string::npos);
  EXPECT_EQ(offload_optimizer_state(rig.optimizer, 0, OFFLOAD_STATE_EXP_AVG, &view), OFFLOAD_OK);
  Must(offload_optimizer_reload_params(rig.optimizer, nullptr, nullptr));
  Must(offload_optimizer_wait(rig.optimizer, 0, kLongNs));
  EXPECT_EQ(offload_optimizer_state(rig.optimizer, 0, OFFLOAD_STATE_MASTER, &view), OFFLOAD_OK);
  EXPECT_EQ(view.device_data, rig.data[0]);
}

// NULL names all params, an empty list none.
TEST(EmptyList, MovesNothing) {
  Rig rig(2, 100, 0, 0, 0);
  const uint32_t none[1] = {0};
  auto options = Make<offload_move_options_t>();
  options.params = none;
  Must(offload_optimizer_offload_params(rig.optimizer, &options, nullptr));
  Must(offload_optimizer_wait(rig.optimizer, 0, kLongNs));
  auto stats = Make<offload_stats_t>();
  Must(offload_optimizer_get_stats(rig.optimizer, &stats));
  EXPECT_EQ(stats.offloaded_bytes, 0u);
  EXPECT_EQ(stats.params_bytes[OFFLOAD_TIER_HOST], 0u);
}

}  // namespace
}  // namespace hybridopt::fault
