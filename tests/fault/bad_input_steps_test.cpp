// Calls around steps that are refused: too early, too late, of foreign tickets; and waits that end
// before their work does.
#include <gtest/gtest.h>

#include "bad_input.h"

namespace hybridopt::fault {
namespace {

// ---------------------------------------------------------------------------- wrong time, place --

offload_ticket_t LastTicket(Trainer& t) {
  offload_ticket_t ticket = 0;
  t.UploadGrads(0);
  EXPECT_OFFLOAD_OK(offload_optimizer_step(t.optimizer, nullptr, &ticket));
  EXPECT_OFFLOAD_OK(offload_optimizer_wait(t.optimizer, ticket, -1));
  return ticket;
}

// A ticket that another optimizer gave.
offload_ticket_t ForeignTicket() {
  RunOptions run;
  run.device_kind = OFFLOAD_DEVICE_HOST;
  Trainer other(run);
  other.AddParams();
  other.Commit();
  return LastTicket(other);
}

INSTANTIATE_TEST_SUITE_P(
    TooEarly, Registering,
    testing::Values(
        Row{"Step",
            OFFLOAD_INVALID_STATE,
            {"not committed", "offload_optimizer_commit"},
            [](Trainer& t) { return offload_optimizer_step(t.optimizer, nullptr, nullptr); }},
        Row{"Wait",
            OFFLOAD_INVALID_STATE,
            {"not committed"},
            [](Trainer& t) { return offload_optimizer_wait(t.optimizer, 0, 0); }},
        Row{"StepResult",
            OFFLOAD_INVALID_STATE,
            {"not committed"},
            [](Trainer& t) {
              auto result = Make<offload_step_result_t>();
              return offload_optimizer_step_result(t.optimizer, 0, &result);
            }},
        Row{"StreamWait",
            OFFLOAD_INVALID_STATE,
            {"not committed"},
            [](Trainer& t) {
              return offload_optimizer_stream_wait(t.optimizer, 0, nullptr, nullptr, 0);
            }},
        Row{"State",
            OFFLOAD_INVALID_STATE,
            {"not committed"},
            [](Trainer& t) {
              auto view = Make<offload_state_view_t>();
              return offload_optimizer_state(t.optimizer, 0, OFFLOAD_STATE_MASTER, &view);
            }},
        Row{"ReadState",
            OFFLOAD_INVALID_STATE,
            {"not committed"},
            [](Trainer& t) { return ReadOf(t, 0, OFFLOAD_STATE_MASTER, 0, 1); }},
        Row{"WriteState",
            OFFLOAD_INVALID_STATE,
            {"not committed"},
            [](Trainer& t) { return WriteOf(t, 0, OFFLOAD_STATE_MASTER, 0, 1); }},
        Row{"SetStepCount",
            OFFLOAD_INVALID_STATE,
            {"not committed"},
            [](Trainer& t) { return offload_optimizer_set_step_count(t.optimizer, 0, 1); }},
        Row{"GradsToKeep",
            OFFLOAD_INVALID_STATE,
            {"not committed"},
            [](Trainer& t) {
              uint8_t keep[64] = {};
              return offload_optimizer_grads_to_keep(t.optimizer, keep, 64);
            }},
        Row{"CommitOnUnknownStream",
            OFFLOAD_INVALID_ARGUMENT,
            {"stream is"},
            [](Trainer& t) { return offload_optimizer_commit(t.optimizer, kUnknownStream); }}),
    RowName);

INSTANTIATE_TEST_SUITE_P(
    TooLate, Committed,
    testing::Values(Row{"GradsToKeepIntoNothing",
                        OFFLOAD_INVALID_ARGUMENT,
                        {"keep is NULL"},
                        [](Trainer& t) {
                          return offload_optimizer_grads_to_keep(t.optimizer, nullptr, 1);
                        }},
                    Row{"GradsToKeepOfOthers",
                        OFFLOAD_INVALID_ARGUMENT,
                        {"count is 0", "params have been added", "one byte each"},
                        [](Trainer& t) {
                          uint8_t keep = 0;
                          return offload_optimizer_grads_to_keep(t.optimizer, &keep, 0);
                        }},
                    Row{"AddParams",
                        OFFLOAD_INVALID_STATE,
                        {"params are fixed at commit"},
                        [](Trainer& t) {
                          const offload_param_t param = t.Param(0);
                          return offload_optimizer_add_params(t.optimizer, &param, 1, nullptr);
                        }},
                    Row{"AddGroup",
                        OFFLOAD_INVALID_STATE,
                        {"groups are fixed at commit"},
                        [](Trainer& t) {
                          uint32_t id;
                          return offload_optimizer_add_group(t.optimizer, &t.group, &id);
                        }},
                    Row{"CommitTwice",
                        OFFLOAD_INVALID_STATE,
                        {"has been committed before"},
                        [](Trainer& t) { return offload_optimizer_commit(t.optimizer, nullptr); }},
                    Row{"ContextDestroyedWithOptimizers",
                        OFFLOAD_INVALID_STATE,
                        {"context still has 1 optimizers", "destroy them first"},
                        [](Trainer& t) { return offload_context_destroy(t.context); }}),
    RowName);

template <typename Edit>
Row StepRow(const char* name, int32_t status, std::vector<std::string> words, Edit&& edit) {
  return {name, status, std::move(words), [edit](Trainer& t) {
            auto options = Make<offload_step_options_t>();
            edit(options);
            offload_ticket_t ticket = 99;
            const int32_t status = offload_optimizer_step(t.optimizer, &options, &ticket);
            EXPECT_EQ(ticket, 99u);
            return status;
          }};
}

using StepOptions = offload_step_options_t;

INSTANTIATE_TEST_SUITE_P(
    Step, Committed,
    testing::Values(
        StepRow("GradScaleNan", OFFLOAD_INVALID_ARGUMENT, {"options.grad_scale is", "nan"},
                [](StepOptions& o) { o.grad_scale = kNan; }),
        StepRow("GradScaleNegative", OFFLOAD_INVALID_ARGUMENT,
                {"options.grad_scale is -1", "above 0"}, [](StepOptions& o) { o.grad_scale = -1; }),
        StepRow("GradScaleInfinite", OFFLOAD_INVALID_ARGUMENT, {"options.grad_scale is inf"},
                [](StepOptions& o) { o.grad_scale = kInfinity; }),
        StepRow("GradNormMaxNan", OFFLOAD_INVALID_ARGUMENT, {"options.grad_norm_max is", "nan"},
                [](StepOptions& o) { o.grad_norm_max = kNan; }),
        StepRow("GradNormMaxNegative", OFFLOAD_INVALID_ARGUMENT,
                {"options.grad_norm_max is -2", "at least 0"},
                [](StepOptions& o) { o.grad_norm_max = -2; }),
        StepRow("GradNormMaxInfinite", OFFLOAD_INVALID_ARGUMENT, {"options.grad_norm_max is inf"},
                [](StepOptions& o) { o.grad_norm_max = kInfinity; }),
        StepRow("StepFlags", OFFLOAD_UNSUPPORTED, {"options.flags is 0x80", "known is 0x3"},
                [](StepOptions& o) { o.flags = 0x80; }),
        StepRow("StepStream", OFFLOAD_INVALID_ARGUMENT, {"stream is"},
                [](StepOptions& o) { o.stream = kUnknownStream; }),
        StepRow("StepStructSize", OFFLOAD_INVALID_ARGUMENT, {"options.struct_size is 70000"},
                [](StepOptions& o) { o.struct_size = 70000; }),
        Row{"WaitForeignTicket",
            OFFLOAD_INVALID_ARGUMENT,
            {"ticket is 0x", "not given out", "0 for everything queued"},
            [](Trainer& t) { return offload_optimizer_wait(t.optimizer, ForeignTicket(), 0); }},
        Row{"WaitFutureTicket",
            OFFLOAD_INVALID_ARGUMENT,
            {"ticket is 0x"},
            [](Trainer& t) {
              auto result = Make<offload_step_result_t>();
              EXPECT_OFFLOAD_OK(offload_optimizer_step_result(t.optimizer, 0, &result));
              return offload_optimizer_wait(t.optimizer, UINT64_MAX, 0);
            }},
        Row{"WaitTicketWithoutSequence",
            OFFLOAD_INVALID_ARGUMENT,
            {"ticket is 0x"},
            [](Trainer& t) { return offload_optimizer_wait(t.optimizer, uint64_t{1} << 48, 0); }},
        Row{"StepResultForeignTicket",
            OFFLOAD_INVALID_ARGUMENT,
            {"ticket is 0x"},
            [](Trainer& t) {
              auto result = Make<offload_step_result_t>();
              return offload_optimizer_step_result(t.optimizer, ForeignTicket(), &result);
            }},
        Row{"StepResultNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"result is NULL"},
            [](Trainer& t) { return offload_optimizer_step_result(t.optimizer, 0, nullptr); }},
        Row{"StreamWaitForeignTicket",
            OFFLOAD_INVALID_ARGUMENT,
            {"ticket is 0x"},
            [](Trainer& t) {
              return offload_optimizer_stream_wait(t.optimizer, ForeignTicket(), nullptr, nullptr,
                                                   0);
            }},
        Row{"StreamWaitUnknownStream",
            OFFLOAD_INVALID_ARGUMENT,
            {"stream is"},
            [](Trainer& t) {
              return offload_optimizer_stream_wait(t.optimizer, 0, kUnknownStream, nullptr, 0);
            }},
        Row{"StreamWaitUnknownParam",
            OFFLOAD_INVALID_ARGUMENT,
            {"id 3", "only 3 params"},
            [](Trainer& t) {
              const uint32_t params[] = {0, 3};
              return offload_optimizer_stream_wait(t.optimizer, 0, nullptr, params, 2);
            }},
        Row{"StateUnknownParam",
            OFFLOAD_INVALID_ARGUMENT,
            {"param is 3", "only 3 params"},
            [](Trainer& t) { return StateOf(t, 3, OFFLOAD_STATE_MASTER); }},
        Row{"StateUnknownKind",
            OFFLOAD_INVALID_ARGUMENT,
            {"kind is 6", "AdamW does not keep", "'p0'"},
            [](Trainer& t) { return StateOf(t, 0, 6); }},
        Row{"StateLowerHalvesOfWholeMasters",
            OFFLOAD_INVALID_ARGUMENT,
            {"kind is 5", "AdamW does not keep"},
            [](Trainer& t) { return StateOf(t, 0, OFFLOAD_STATE_MASTER_LOW); }},
        Row{"StateNegativeKind",
            OFFLOAD_INVALID_ARGUMENT,
            {"kind is -1", "SGD"},
            [](Trainer& t) { return StateOf(t, 0, -1); },
            OFFLOAD_SGD},
        Row{"StateOfAnotherAlgorithm",
            OFFLOAD_INVALID_ARGUMENT,
            {"kind is 1", "SGD does not keep"},
            [](Trainer& t) { return StateOf(t, 0, OFFLOAD_STATE_EXP_AVG); },
            OFFLOAD_SGD},
        Row{"StateLionHasOneMoment",
            OFFLOAD_INVALID_ARGUMENT,
            {"kind is 2", "Lion does not keep"},
            [](Trainer& t) { return StateOf(t, 0, OFFLOAD_STATE_EXP_AVG_SQ); },
            OFFLOAD_LION},
        Row{"ReadStateUnknownParam",
            OFFLOAD_INVALID_ARGUMENT,
            {"param is 3", "only 3 params"},
            [](Trainer& t) { return ReadOf(t, 3, OFFLOAD_STATE_MASTER, 0, 1); }},
        Row{"WriteStateUnknownParam",
            OFFLOAD_INVALID_ARGUMENT,
            {"param is 3", "only 3 params"},
            [](Trainer& t) { return WriteOf(t, 3, OFFLOAD_STATE_MASTER, 0, 1); }},
        Row{"ReadStateUnknownKind",
            OFFLOAD_INVALID_ARGUMENT,
            {"kind is 6", "AdamW does not keep", "'p0'"},
            [](Trainer& t) { return ReadOf(t, 0, 6, 0, 1); }},
        Row{"WriteStateUnknownKind",
            OFFLOAD_INVALID_ARGUMENT,
            {"kind is 6", "AdamW does not keep", "'p0'"},
            [](Trainer& t) { return WriteOf(t, 0, 6, 0, 1); }},
        Row{"ReadStateNegativeKind",
            OFFLOAD_INVALID_ARGUMENT,
            {"kind is -1", "SGD does not keep"},
            [](Trainer& t) { return ReadOf(t, 0, -1, 0, 1); },
            OFFLOAD_SGD},
        Row{"WriteStateNegativeKind",
            OFFLOAD_INVALID_ARGUMENT,
            {"kind is -1", "SGD does not keep"},
            [](Trainer& t) { return WriteOf(t, 0, -1, 0, 1); },
            OFFLOAD_SGD},
        Row{"ReadStateLowerHalves",
            OFFLOAD_INVALID_ARGUMENT,
            {"OFFLOAD_STATE_MASTER_LOW", "ask for OFFLOAD_STATE_MASTER"},
            [](Trainer& t) { return ReadOf(t, 0, OFFLOAD_STATE_MASTER_LOW, 0, 1); }},
        Row{"WriteStateLowerHalves",
            OFFLOAD_INVALID_ARGUMENT,
            {"OFFLOAD_STATE_MASTER_LOW", "ask for OFFLOAD_STATE_MASTER"},
            [](Trainer& t) { return WriteOf(t, 0, OFFLOAD_STATE_MASTER_LOW, 0, 1); }},
        Row{"ReadStateOfAnotherAlgorithm",
            OFFLOAD_INVALID_ARGUMENT,
            {"kind is 1", "SGD does not keep"},
            [](Trainer& t) { return ReadOf(t, 0, OFFLOAD_STATE_EXP_AVG, 0, 1); },
            OFFLOAD_SGD},
        Row{"WriteStateOfAnotherAlgorithm",
            OFFLOAD_INVALID_ARGUMENT,
            {"kind is 1", "SGD does not keep"},
            [](Trainer& t) { return WriteOf(t, 0, OFFLOAD_STATE_EXP_AVG, 0, 1); },
            OFFLOAD_SGD},
        Row{"ReadStateBeyondTheEnd",
            OFFLOAD_INVALID_ARGUMENT,
            {"first is", "count is 1", "'p0' has", "elements"},
            [](Trainer& t) { return ReadOf(t, 0, OFFLOAD_STATE_MASTER, t.Param(0).count, 1); }},
        Row{"WriteStateBeyondTheEnd",
            OFFLOAD_INVALID_ARGUMENT,
            {"first is", "count is 1", "'p0' has", "elements"},
            [](Trainer& t) { return WriteOf(t, 0, OFFLOAD_STATE_MASTER, t.Param(0).count, 1); }},
        Row{"ReadStateCountThatWrapsAround",
            OFFLOAD_INVALID_ARGUMENT,
            {"first is 1 and count is 18446744073709551615"},
            [](Trainer& t) { return ReadOf(t, 0, OFFLOAD_STATE_EXP_AVG, 1, UINT64_MAX); }},
        Row{"WriteStateCountThatWrapsAround",
            OFFLOAD_INVALID_ARGUMENT,
            {"first is 1 and count is 18446744073709551615"},
            [](Trainer& t) { return WriteOf(t, 0, OFFLOAD_STATE_EXP_AVG, 1, UINT64_MAX); }},
        Row{"ReadStateNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"values is NULL", "address of 2 fp32 numbers in host memory"},
            [](Trainer& t) {
              return offload_optimizer_read_state(t.optimizer, 0, OFFLOAD_STATE_MASTER, 0, 2,
                                                  nullptr);
            }},
        Row{"ReadStateUnaligned",
            OFFLOAD_INVALID_ARGUMENT,
            {"values is", "expected a multiple of 4"},
            [](Trainer& t) {
              auto* const odd = static_cast<float*>(Behind(host_array, 2));
              return offload_optimizer_read_state(t.optimizer, 0, OFFLOAD_STATE_MASTER, 0, 1, odd);
            }},
        Row{"WriteStateNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"values is NULL", "address of 2 fp32 numbers in host memory"},
            [](Trainer& t) {
              return offload_optimizer_write_state(t.optimizer, 0, OFFLOAD_STATE_MASTER, 0, 2,
                                                   nullptr);
            }},
        Row{"WriteStateUnaligned",
            OFFLOAD_INVALID_ARGUMENT,
            {"values is", "expected a multiple of 4"},
            [](Trainer& t) {
              auto* const odd = static_cast<const float*>(Behind(host_array, 2));
              return offload_optimizer_write_state(t.optimizer, 0, OFFLOAD_STATE_MASTER, 0, 1, odd);
            }},
        Row{"SetStepCountUnknownParam",
            OFFLOAD_INVALID_ARGUMENT,
            {"param is 3", "only 3 params"},
            [](Trainer& t) { return offload_optimizer_set_step_count(t.optimizer, 3, 1); }},
        Row{"SetStepCountTooLarge",
            OFFLOAD_INVALID_ARGUMENT,
            {"step_count is 9007199254740993", "at most 2^53"},
            [](Trainer& t) {
              return offload_optimizer_set_step_count(t.optimizer, 0, (uint64_t{1} << 53) + 1);
            }},
        Row{"StateNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"view is NULL"},
            [](Trainer& t) {
              return offload_optimizer_state(t.optimizer, 0, OFFLOAD_STATE_MASTER, nullptr);
            }}),
    RowName);

// ---------------------------------------------------------------------------------------- waits --

TEST(Wait, OfWorkThatIsHeldBackTimesOutAndTheWorkGoesOn) {
  RunOptions run;
  Trainer trainer(run), alone(run);
  Begin(trainer, Phase::kCommitted);
  Begin(alone, Phase::kCommitted);
  for (Trainer* t : {&trainer, &alone}) t->UploadGrads(9);

  Gate gate;
  offload_stream_t stream = nullptr;
  ASSERT_OFFLOAD_OK(offload_stream_create(trainer.context, &stream));
  ASSERT_OFFLOAD_OK(offload_stream_run(trainer.context, stream, Gate::Hold, &gate));
  auto options = Make<offload_step_options_t>();
  options.stream = stream;
  std::vector<offload_ticket_t> tickets(8);
  for (offload_ticket_t& ticket : tickets)
    ASSERT_OFFLOAD_OK(offload_optimizer_step(trainer.optimizer, &options, &ticket));

  // The ninth is one too many.
  offload_ticket_t ninth = 99;
  EXPECT_EQ(offload_optimizer_step(trainer.optimizer, &options, &ninth), OFFLOAD_INVALID_STATE);
  EXPECT_NE(std::string(offload_last_error()).find("8 steps are queued, at most 8"),
            std::string::npos)
      << offload_last_error();
  EXPECT_EQ(ninth, 99u);

  for (const int64_t timeout_ns : {int64_t{0}, int64_t{1'000'000}}) {
    EXPECT_EQ(offload_optimizer_wait(trainer.optimizer, tickets[0], timeout_ns), OFFLOAD_TIMED_OUT);
    EXPECT_NE(std::string(offload_last_error()).find("the work goes on"), std::string::npos);
    EXPECT_EQ(offload_optimizer_wait(trainer.optimizer, 0, timeout_ns), OFFLOAD_TIMED_OUT);
    EXPECT_EQ(offload_stream_synchronize(trainer.context, stream, timeout_ns), OFFLOAD_TIMED_OUT);
  }
  auto result = Make<offload_step_result_t>();
  EXPECT_EQ(offload_optimizer_step_result(trainer.optimizer, tickets[7], &result),
            OFFLOAD_INVALID_STATE);
  EXPECT_NE(std::string(offload_last_error()).find("still running"), std::string::npos);
  auto view = Make<offload_state_view_t>();
  EXPECT_EQ(offload_optimizer_state(trainer.optimizer, 0, OFFLOAD_STATE_MASTER, &view),
            OFFLOAD_INVALID_STATE);
  EXPECT_NE(std::string(offload_last_error()).find("offload_optimizer_wait"), std::string::npos);
  for (const auto access : {&ReadOf, &WriteOf}) {
    EXPECT_EQ(access(trainer, 0, OFFLOAD_STATE_MASTER, 0, 1), OFFLOAD_INVALID_STATE);
    EXPECT_NE(std::string(offload_last_error()).find("offload_optimizer_wait"), std::string::npos);
  }
  auto stats = Make<offload_stats_t>();
  EXPECT_OFFLOAD_OK(offload_optimizer_get_stats(trainer.optimizer, &stats));
  EXPECT_EQ(stats.queued, 8u);

  gate.open = true;
  EXPECT_OFFLOAD_OK(offload_optimizer_wait(trainer.optimizer, 0, -1));
  for (int step = 0; step < 8; ++step)
    ASSERT_OFFLOAD_OK(offload_optimizer_step(alone.optimizer, nullptr, nullptr));
  EXPECT_OFFLOAD_OK(offload_optimizer_wait(alone.optimizer, 0, INT64_MAX));
  EXPECT_EQ(trainer.Bits(), alone.Bits());
}

TEST(Wait, WithNothingQueuedHoldsNobody) {
  for (int32_t device_kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    RunOptions run;
    run.device_kind = device_kind;
    Trainer trainer(run);
    trainer.AddParams();
    trainer.Commit();
    EXPECT_OFFLOAD_OK(offload_optimizer_wait(trainer.optimizer, 0, 0));
    EXPECT_OFFLOAD_OK(offload_optimizer_stream_wait(trainer.optimizer, 0, nullptr, nullptr, 0));
    const uint32_t param = 2;
    EXPECT_OFFLOAD_OK(offload_optimizer_stream_wait(trainer.optimizer, 0, nullptr, &param, 1));
    EXPECT_OFFLOAD_OK(offload_stream_synchronize(trainer.context, nullptr, 60'000'000'000));
  }
}

TEST(StepResult, OfTheLast64StepsIsRemembered) {
  RunOptions run;
  run.device_kind = OFFLOAD_DEVICE_HOST;
  run.counts = {10};
  Trainer trainer(run);
  trainer.AddParams();
  trainer.Commit();
  auto result = Make<offload_step_result_t>();
  EXPECT_EQ(offload_optimizer_step_result(trainer.optimizer, 0, &result), OFFLOAD_INVALID_STATE);
  EXPECT_NE(std::string(offload_last_error()).find("no step has been queued"), std::string::npos);
  std::vector<offload_ticket_t> tickets;
  for (int step = 0; step < 65; ++step) tickets.push_back(LastTicket(trainer));
  EXPECT_EQ(offload_optimizer_step_result(trainer.optimizer, tickets[0], &result),
            OFFLOAD_INVALID_STATE);
  EXPECT_NE(std::string(offload_last_error()).find("last 64 steps"), std::string::npos);
  for (uint64_t step = 1; step < 65; ++step) {
    EXPECT_OFFLOAD_OK(offload_optimizer_step_result(trainer.optimizer, tickets[step], &result));
    EXPECT_EQ(result.step, step + 1);
  }
}

}  // namespace
}  // namespace hybridopt::fault
