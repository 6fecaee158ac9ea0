// Options of contexts, optimizers and groups that are refused. docs/CONFIGURATION.md lists others,
// which configuration_test.cpp tests.
#include <gtest/gtest.h>

#include "bad_input.h"

namespace hybridopt::fault {
namespace {

// ------------------------------------------------------------------------------------- contexts --

// A row about options of a context or an optimizer to be made; the handle must stay unwritten.
template <typename Options>
Row ContextRow(const char* name, int32_t status, std::vector<std::string> words, Options&& edit) {
  return {name, status, std::move(words), [edit](Trainer&) {
            auto options = Make<offload_context_options_t>();
            edit(options);
            const auto unwritten = reinterpret_cast<offload_context_t>(Address(0x5a5a));
            offload_context_t context = unwritten;
            const int32_t status = offload_context_create(&options, &context);
            EXPECT_EQ(context, unwritten);
            return status;
          }};
}

template <typename Options>
Row OptimizerRow(const char* name, int32_t status, std::vector<std::string> words, Options&& edit) {
  return {name, status, std::move(words), [edit](Trainer& trainer) {
            auto options = Make<offload_optimizer_options_t>();
            options.algorithm = OFFLOAD_ADAMW;
            edit(options);
            const auto unwritten = reinterpret_cast<offload_optimizer_t>(Address(0x5a5a));
            offload_optimizer_t optimizer = unwritten;
            const int32_t status = offload_optimizer_create(trainer.context, &options, &optimizer);
            EXPECT_EQ(optimizer, unwritten);
            return status;
          }};
}

using ContextOptions = offload_context_options_t;
using OptimizerOptions = offload_optimizer_options_t;

INSTANTIATE_TEST_SUITE_P(
    Create, OnSim,
    testing::Values(
        Row{"ContextOptionsNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"options is NULL"},
            [](Trainer&) {
              offload_context_t context;
              return offload_context_create(nullptr, &context);
            }},
        Row{"ContextOutNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"context is NULL"},
            [](Trainer&) {
              const auto options = Make<ContextOptions>();
              return offload_context_create(&options, nullptr);
            }},
        Row{"ContextTail",
            OFFLOAD_UNSUPPORTED,
            {"options.struct_size", "newer"},
            [](Trainer&) {
              const WithTail<ContextOptions> options;
              offload_context_t context;
              return offload_context_create(&options.value, &context);
            }},
        ContextRow("ContextStructSize", OFFLOAD_INVALID_ARGUMENT,
                   {"options.struct_size is 2", "expected", std::to_string(sizeof(ContextOptions))},
                   [](ContextOptions& o) { o.struct_size = 2; }),
        Row{"OptimizerOptionsNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"options is NULL"},
            [](Trainer& t) {
              offload_optimizer_t optimizer;
              return offload_optimizer_create(t.context, nullptr, &optimizer);
            }},
        Row{"OptimizerOutNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"optimizer is NULL"},
            [](Trainer& t) {
              const auto options = Make<OptimizerOptions>();
              return offload_optimizer_create(t.context, &options, nullptr);
            }},
        Row{"OptimizerTail",
            OFFLOAD_UNSUPPORTED,
            {"options.struct_size", "newer"},
            [](Trainer& t) {
              const WithTail<OptimizerOptions> options;
              offload_optimizer_t optimizer;
              return offload_optimizer_create(t.context, &options.value, &optimizer);
            }},
        OptimizerRow("OptimizerStructSize", OFFLOAD_INVALID_ARGUMENT, {"options.struct_size is 0"},
                     [](OptimizerOptions& o) { o.struct_size = 0; }),
        OptimizerRow("UnknownMasterLayout", OFFLOAD_INVALID_ARGUMENT,
                     {"options.master_layout is 3",
                      "OFFLOAD_MASTER_FP32 (0), _SPLIT (1) or _SPLIT24 (2)"},
                     [](OptimizerOptions& o) { o.master_layout = 3; }),
        OptimizerRow("MomentsInFp16", OFFLOAD_INVALID_ARGUMENT,
                     {"options.moment_dtype is 3", "OFFLOAD_FP32 (1) or _BF16 (2)"},
                     [](OptimizerOptions& o) { o.moment_dtype = OFFLOAD_FP16; }),
        OptimizerRow("UnknownRounding", OFFLOAD_INVALID_ARGUMENT,
                     {"options.moment_rounding is 2", "OFFLOAD_ROUND_STOCHASTIC (0)"},
                     [](OptimizerOptions& o) { o.moment_rounding = 2; }),
        OptimizerRow(
            "RoundingOfFp32", OFFLOAD_INVALID_ARGUMENT,
            {"OFFLOAD_ROUND_NEAREST", "a step rounds no state",
             "moment_dtype to OFFLOAD_BF16 (2) or master_layout to OFFLOAD_MASTER_SPLIT24 (2)"},
            [](OptimizerOptions& o) { o.moment_rounding = OFFLOAD_ROUND_NEAREST; }),
        OptimizerRow("SeedWithoutRandom", OFFLOAD_INVALID_ARGUMENT,
                     {"options.rounding_seed is 7", "a step rounds nothing at random"},
                     [](OptimizerOptions& o) {
                       o.rounding_seed = 7;
                       o.moment_dtype = OFFLOAD_BF16;
                       o.moment_rounding = OFFLOAD_ROUND_NEAREST;
                     }),
        OptimizerRow("SeedOfSplitMasters", OFFLOAD_INVALID_ARGUMENT,
                     {"options.rounding_seed is 7", "a step rounds nothing at random"},
                     [](OptimizerOptions& o) {
                       o.rounding_seed = 7;
                       o.master_layout = OFFLOAD_MASTER_SPLIT;
                     }),
        OptimizerRow("OptimizerReserved", OFFLOAD_UNSUPPORTED, {"options.reserved is 1"},
                     [](OptimizerOptions& o) { o.reserved = 1; })),
    RowName);

// --------------------------------------------------------------------------------------- groups --

// A group that no optimizer of this algorithm takes: add_group and set_group refuse it in the same
// way.
struct GroupCase {
  const char* name;
  int32_t algorithm;
  std::vector<std::string> words;
  std::function<void(offload_group_t&)> edit;
  int32_t status = OFFLOAD_INVALID_ARGUMENT;
};

std::vector<GroupCase> NumbersOutOfRange() {
  return {
      {"LrNan", OFFLOAD_ADAMW, {"group.lr is", "nan", "expected"}, [](auto& g) { g.lr = kNan; }},
      {"LrNegative", OFFLOAD_ADAMW, {"group.lr is -1", "at least 0"}, [](auto& g) { g.lr = -1; }},
      {"LrInfinite", OFFLOAD_SGD, {"group.lr is inf", "finite"}, [](auto& g) { g.lr = kInfinity; }},
      {"LrTooLarge", OFFLOAD_LION, {"group.lr is 1e+300", "fp32"}, [](auto& g) { g.lr = 1e300; }},
      {"WeightDecayNegative",
       OFFLOAD_ADAGRAD,
       {"group.weight_decay"},
       [](auto& g) { g.weight_decay = -1e-3; }},
      {"Beta1One", OFFLOAD_ADAMW, {"group.beta1 is 1", "< 1"}, [](auto& g) { g.beta1 = 1; }},
      {"Beta2Nan", OFFLOAD_LION, {"group.beta2", "nan"}, [](auto& g) { g.beta2 = kNan; }},
      {"Beta1Negative", OFFLOAD_LION, {"group.beta1 is -0.5"}, [](auto& g) { g.beta1 = -0.5; }},
      {"EpsZero", OFFLOAD_ADAMW, {"group.eps is 0", "above 0"}, [](auto& g) { g.eps = 0; }},
      {"EpsVanishes",
       OFFLOAD_ADAGRAD,
       {"group.eps is 1e-50", "above 0 in fp32"},
       [](auto& g) { g.eps = 1e-50; }},
      {"EpsNegative", OFFLOAD_ADAM, {"group.eps is -1e-08"}, [](auto& g) { g.eps = -1e-8; }},
  };
}

std::vector<GroupCase> FieldsOfOtherAlgorithms() {
  return {
      {"EpsUnused", OFFLOAD_LION, {"group.eps", "Lion"}, [](auto& g) { g.eps = 1e-8; }},
      {"BetaUnused", OFFLOAD_SGD, {"group.beta1", "SGD"}, [](auto& g) { g.beta1 = 0.9; }},
      {"UnusedNan", OFFLOAD_SGD, {"group.eps", "SGD"}, [](auto& g) { g.eps = kNan; }},
      {"LrDecayUnused",
       OFFLOAD_ADAM,
       {"group.lr_decay", "Adam"},
       [](auto& g) { g.lr_decay = 0.1; }},
      {"NesterovUnused",
       OFFLOAD_ADAMW,
       {"group.nesterov is 1", "AdamW"},
       [](auto& g) { g.nesterov = 1; }},
      {"CautiousUnused",
       OFFLOAD_ADAM,
       {"group.cautious_weight_decay is 1", "Adam does not use it; leave it 0"},
       [](auto& g) { g.cautious_weight_decay = 1; }},
  };
}

std::vector<GroupCase> AlgorithmsThatDoNotFit() {
  return {
      {"AlgorithmUnknown",
       OFFLOAD_ADAMW,
       {"group.algorithm is 77", "enum offload_algorithm", "or 0 for that of the options"},
       [](auto& g) { g.algorithm = 77; }},
      {"AlgorithmNegative",
       OFFLOAD_ADAMW,
       {"group.algorithm is -1", "enum offload_algorithm"},
       [](auto& g) { g.algorithm = -1; }},
      // The fields must be those of the group's own algorithm.
      {"AlgorithmOfOtherFields",
       OFFLOAD_ADAMW,
       {"group.beta1 is", "but SGD does not use it"},
       [](auto& g) { g.algorithm = OFFLOAD_SGD; }},
      {"StepsOfNewtonSchulz",
       OFFLOAD_ADAMW,
       {"group.ns_steps is 1", "AdamW does not use it"},
       [](auto& g) { g.ns_steps = 1; }},
  };
}

std::vector<GroupCase> FieldsThatDoNotFit() {
  return {
      {"AccumulatorNegative",
       OFFLOAD_ADAGRAD,
       {"group.initial_accumulator_value is -1"},
       [](auto& g) { g.initial_accumulator_value = -1; }},
      {"NesterovTwo",
       OFFLOAD_SGD,
       {"group.nesterov is 2", "0 or 1"},
       [](auto& g) { g.nesterov = 2; }},
      {"MomentumOneOfSignum",
       OFFLOAD_SIGNUM,
       {"group.momentum is 1", "0 <= momentum < 1"},
       [](auto& g) { g.momentum = 1; }},
      {"DampeningOfSignum",
       OFFLOAD_SIGNUM,
       {"group.dampening is 0.1", "Signum does not use it"},
       [](auto& g) { g.dampening = 0.1; }},
      {"NesterovOfSignum",
       OFFLOAD_SIGNUM,
       {"group.nesterov is 1", "Signum does not use it"},
       [](auto& g) { g.nesterov = 1; }},
      {"NesterovWithoutMomentum",
       OFFLOAD_SGD,
       {"group.nesterov is 1 with momentum 0", "above 0"},
       [](auto& g) {
         g.nesterov = 1;
         g.momentum = 0;
       }},
      {"NesterovWithDampening",
       OFFLOAD_SGD,
       {"group.nesterov is 1", "dampening 0.1"},
       [](auto& g) {
         g.nesterov = 1;
         g.dampening = 0.1;
       }},
      {"DampeningWithoutMomentum",
       OFFLOAD_SGD,
       {"group.dampening is 0.5 with momentum 0"},
       [](auto& g) {
         g.momentum = 0;
         g.dampening = 0.5;
       }},
      {"MaximizeNegative",
       OFFLOAD_ADAMW,
       {"group.maximize is -1"},
       [](auto& g) { g.maximize = -1; }},
      {"CautiousTwo",
       OFFLOAD_ADAMW,
       {"group.cautious_weight_decay is 2", "0 or 1"},
       [](auto& g) { g.cautious_weight_decay = 2; }},
      {"GroupStructSize",
       OFFLOAD_ADAMW,
       {"group.struct_size is 3"},
       [](auto& g) { g.struct_size = 3; }},
  };
}

std::vector<Row> GroupRows() {
  std::vector<Row> rows;
  for (const auto& cases : {NumbersOutOfRange(), FieldsOfOtherAlgorithms(), FieldsThatDoNotFit(),
                            AlgorithmsThatDoNotFit()}) {
    for (const GroupCase& one : cases) {
      const auto call = [edit = one.edit](Trainer& t) {
        offload_group_t group = t.group;
        edit(group);
        uint32_t id = 99;
        const int32_t status = offload_optimizer_add_group(t.optimizer, &group, &id);
        EXPECT_EQ(id, 99u);
        EXPECT_EQ(offload_optimizer_set_group(t.optimizer, 0, &group), status);
        return status;
      };
      rows.push_back({one.name, one.status, one.words, call, one.algorithm});
    }
  }
  return rows;
}
TEST(TrackChanges, IsZeroOrOne) {
  const auto create = [](int32_t track_changes, uint32_t reserved2) {
    auto context_options = Make<ContextOptions>();
    context_options.log = DropLog;
    offload_context_t context = nullptr;
    EXPECT_OFFLOAD_OK(offload_context_create(&context_options, &context));
    auto options = Make<OptimizerOptions>();
    options.algorithm = OFFLOAD_ADAMW;
    options.track_changes = track_changes;
    options.reserved2 = reserved2;
    offload_optimizer_t optimizer = nullptr;
    const int32_t status = offload_optimizer_create(context, &options, &optimizer);
    EXPECT_EQ(optimizer, nullptr);
    EXPECT_OFFLOAD_OK(offload_context_destroy(context));
    return status;
  };
  for (int32_t value : {2, -1})
    ExpectError(create(value, 0), OFFLOAD_INVALID_ARGUMENT,
                {"options.track_changes is " + std::to_string(value), "expected 0 or 1"});
  ExpectError(create(1, 7), OFFLOAD_UNSUPPORTED, {"options.reserved2 is 7, expected 0"});
}

TEST(EarlyUpdateBytes, AreRefusedWhereNothingCouldBeUpdatedEarly) {
  const auto create = [](int32_t device_kind, uint32_t movable, int32_t executors) {
    auto context_options = Make<ContextOptions>();
    context_options.device_kind = device_kind;
    context_options.log = DropLog;
    offload_context_t context = nullptr;
    EXPECT_OFFLOAD_OK(offload_context_create(&context_options, &context));
    auto options = Make<OptimizerOptions>();
    options.algorithm = OFFLOAD_ADAMW;
    options.movable = movable;
    options.host_executors = executors;
    options.early_update_bytes = 1 << 20;
    offload_optimizer_t optimizer = nullptr;
    const int32_t status = offload_optimizer_create(context, &options, &optimizer);
    if (status == OFFLOAD_OK) {
      EXPECT_OFFLOAD_OK(offload_optimizer_destroy(optimizer));
    }
    EXPECT_OFFLOAD_OK(offload_context_destroy(context));
    return status;
  };
  const uint32_t grads = OFFLOAD_MOVABLE_GRADS;
  ExpectError(
      create(OFFLOAD_DEVICE_HOST, grads, OFFLOAD_EXECUTORS_AUTO), OFFLOAD_INVALID_ARGUMENT,
      {"options.early_update_bytes is 1048576, but the device is host memory", "leave it 0"});
  ExpectError(create(OFFLOAD_DEVICE_SIM, grads, OFFLOAD_EXECUTORS_STREAMED),
              OFFLOAD_INVALID_ARGUMENT,
              {"options.early_update_bytes is 1048576, but host_executors is "
               "OFFLOAD_EXECUTORS_STREAMED",
               "use OFFLOAD_EXECUTORS_AUTO, or leave it 0"});
  ExpectError(create(OFFLOAD_DEVICE_SIM, OFFLOAD_MOVABLE_STATES, OFFLOAD_EXECUTORS_AUTO),
              OFFLOAD_INVALID_ARGUMENT,
              {"options.early_update_bytes is 1048576, but gradients are not movable",
               "add OFFLOAD_MOVABLE_GRADS to options.movable, or leave it 0"});
  for (const int32_t executors : {OFFLOAD_EXECUTORS_AUTO, OFFLOAD_EXECUTORS_CPU}) {
    EXPECT_OFFLOAD_OK(create(OFFLOAD_DEVICE_SIM, grads, executors));
    EXPECT_OFFLOAD_OK(create(OFFLOAD_DEVICE_SIM, OFFLOAD_MOVABLE_ACCUMULATE, executors));
  }
}

INSTANTIATE_TEST_SUITE_P(Group, Registering, testing::ValuesIn(GroupRows()), RowName);

INSTANTIATE_TEST_SUITE_P(
    GroupCall, Anytime,
    testing::Values(
        Row{"AddGroupNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"group is NULL"},
            [](Trainer& t) {
              uint32_t id;
              return offload_optimizer_add_group(t.optimizer, nullptr, &id);
            }},
        Row{"AddGroupIdNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"group_id is NULL"},
            [](Trainer& t) { return offload_optimizer_add_group(t.optimizer, &t.group, nullptr); }},
        Row{"AddGroupTail",
            OFFLOAD_UNSUPPORTED,
            {"group.struct_size"},
            [](Trainer& t) {
              WithTail<offload_group_t> group;
              uint32_t id;
              return offload_optimizer_add_group(t.optimizer, &group.value, &id);
            }},
        Row{"SetGroupNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"group is NULL"},
            [](Trainer& t) { return offload_optimizer_set_group(t.optimizer, 0, nullptr); }},
        Row{"SetGroupUnknown",
            OFFLOAD_INVALID_ARGUMENT,
            {"group_id is 1", "only 1 groups"},
            [](Trainer& t) { return offload_optimizer_set_group(t.optimizer, 1, &t.group); }},
        Row{"SetGroupNan",
            OFFLOAD_INVALID_ARGUMENT,
            {"group.lr", "nan"},
            [](Trainer& t) {
              offload_group_t group = t.group;
              group.lr = kNan;
              return offload_optimizer_set_group(t.optimizer, 0, &group);
            }},
        Row{"SetGroupOtherAlgorithm",
            OFFLOAD_INVALID_ARGUMENT,
            {"group.algorithm is 2 (Adam)", "group 0 was added with 1 (AdamW)", "make a new"},
            [](Trainer& t) {
              offload_group_t group = t.group;
              group.algorithm = OFFLOAD_ADAM;
              return offload_optimizer_set_group(t.optimizer, 0, &group);
            }}),
    RowName);

TEST(SetGroup, CannotGainMomentumAfterCommit) {
  for (int32_t device_kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    RunOptions run;
    run.device_kind = device_kind;
    run.algorithm = OFFLOAD_SGD;
    Trainer trainer(run), alone(run);
    for (Trainer* t : {&trainer, &alone}) {
      t->group.momentum = 0;
      ASSERT_OFFLOAD_OK(offload_optimizer_set_group(t->optimizer, 0, &t->group));
      Begin(*t, Phase::kCommitted);
    }
    offload_group_t group = trainer.group;
    group.momentum = 0.9;
    EXPECT_EQ(offload_optimizer_set_group(trainer.optimizer, 0, &group), OFFLOAD_INVALID_ARGUMENT);
    const std::string message = offload_last_error();
    for (const char* word : {"group.momentum is 0.9", "group 0", "no momentum_buffer"})
      EXPECT_NE(message.find(word), std::string::npos) << message;
    EXPECT_EQ(StateOf(trainer, 0, OFFLOAD_STATE_MOMENTUM_BUFFER), OFFLOAD_INVALID_ARGUMENT);
    EXPECT_EQ(Finish(trainer, Phase::kCommitted).bits, Finish(alone, Phase::kCommitted).bits);
  }
}

}  // namespace
}  // namespace hybridopt::fault
