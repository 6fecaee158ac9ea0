// Bad input through the public ABI: one row each. A row says which call, which status, and which
// words the message must have: the field, what was got, what was expected. Then a valid sequence
// must go on as if nothing had happened: same plan, same bits as a run that was left alone.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "handle_calls.h"
#include "trainer.h"

namespace hybridopt::fault {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

void* Address(uint64_t bits) { return reinterpret_cast<void*>(bits); }
void* Behind(void* data, int64_t bytes) { return static_cast<char*>(data) + bytes; }

// When the call comes: with two of three params registered, or after commit and one step.
enum class Phase { kRegistering, kCommitted };

struct Row {
  const char* name;
  int32_t status;
  std::vector<std::string> words;
  std::function<int32_t(Trainer&)> call;
  int32_t algorithm = OFFLOAD_ADAMW;
};

std::string RowName(const testing::TestParamInfo<Row>& info) { return info.param.name; }
void PrintTo(const Row& row, std::ostream* out) { *out << row.name; }

// What a run ends in: the bytes it planned, and the bits.
struct Outcome {
  offload_plan_t plan;
  std::vector<unsigned char> bits;
};

Outcome Finish(Trainer& trainer, Phase phase) {
  if (phase == Phase::kRegistering) {
    trainer.AddParams(2, 3);
    trainer.Commit();
    trainer.Steps(0, 1);
  }
  // A bind of the same gradients: nothing of a refused bind may be left behind.
  std::vector<offload_binding_t> bindings;
  for (uint32_t i = 0; i < trainer.size(); ++i) {
    bindings.push_back(Make<offload_binding_t>());
    bindings.back().param = i;
    bindings.back().grad = trainer.grads[i];
  }
  EXPECT_OFFLOAD_OK(offload_optimizer_bind(trainer.optimizer, bindings.data(), trainer.size()));
  trainer.Steps(1, 3);
  Outcome outcome{Make<offload_plan_t>(), trainer.Bits()};
  EXPECT_OFFLOAD_OK(offload_optimizer_plan(trainer.optimizer, &outcome.plan));
  outcome.plan.host_available_bytes = 0;  // of the machine, not of this run
  return outcome;
}

void Begin(Trainer& trainer, Phase phase) {
  trainer.AddParams(0, 2);
  if (phase == Phase::kRegistering) return;
  trainer.AddParams(2, 3);
  trainer.Commit();
  trainer.Steps(0, 1);
}

void ExpectRefused(int32_t status, const Row& row) {
  const std::string message = offload_last_error();
  EXPECT_STREQ(offload_status_name(status), offload_status_name(row.status)) << message;
  for (const std::string& word : row.words)
    EXPECT_NE(message.find(word), std::string::npos) << "no '" << word << "' in: " << message;
}

void RunRow(const Row& row, int32_t device_kind, Phase phase) {
  RunOptions run;
  run.device_kind = device_kind;
  run.algorithm = row.algorithm;
  Trainer alone(run), trainer(run);
  Begin(alone, phase);
  Begin(trainer, phase);
  ExpectRefused(row.call(trainer), row);
  const Outcome expected = Finish(alone, phase), got = Finish(trainer, phase);
  EXPECT_EQ(std::memcmp(&expected.plan, &got.plan, sizeof(got.plan)), 0);
  EXPECT_EQ(expected.bits, got.bits);
}

class Registering : public testing::TestWithParam<Row> {};
class Committed : public testing::TestWithParam<Row> {};
class OnSim : public testing::TestWithParam<Row> {};
class Anytime : public testing::TestWithParam<Row> {};

TEST_P(Registering, IsRefusedAndChangesNothing) {
  RunRow(GetParam(), OFFLOAD_DEVICE_HOST, Phase::kRegistering);
  RunRow(GetParam(), OFFLOAD_DEVICE_SIM, Phase::kRegistering);
}
TEST_P(Committed, IsRefusedAndChangesNothing) {
  RunRow(GetParam(), OFFLOAD_DEVICE_HOST, Phase::kCommitted);
  RunRow(GetParam(), OFFLOAD_DEVICE_SIM, Phase::kCommitted);
}
TEST_P(OnSim, IsRefusedAndChangesNothing) {
  RunRow(GetParam(), OFFLOAD_DEVICE_SIM, Phase::kRegistering);
}
TEST_P(Anytime, IsRefusedAndChangesNothing) {
  for (int32_t device_kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM})
    for (Phase phase : {Phase::kRegistering, Phase::kCommitted})
      RunRow(GetParam(), device_kind, phase);
}

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

// A struct with `extra` bytes behind it, of which the last is not zero.
template <typename Struct>
struct WithTail {
  Struct value = Make<Struct>();
  unsigned char tail[8] = {};
  WithTail() {
    value.struct_size = sizeof(WithTail);
    tail[7] = 1;
  }
};

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
        ContextRow("DeviceKind", OFFLOAD_INVALID_ARGUMENT,
                   {"options.device_kind is 3", "expected OFFLOAD_DEVICE_HOST"},
                   [](ContextOptions& o) { o.device_kind = 3; }),
        ContextRow("DeviceKindNegative", OFFLOAD_INVALID_ARGUMENT, {"options.device_kind is -1"},
                   [](ContextOptions& o) { o.device_kind = -1; }),
        ContextRow("Cuda", OFFLOAD_UNSUPPORTED, {"options.device_kind", "CUDA"},
                   [](ContextOptions& o) { o.device_kind = OFFLOAD_DEVICE_CUDA; }),
        ContextRow("DeviceIndex", OFFLOAD_INVALID_ARGUMENT,
                   {"options.device_index is 1", "expected 0"},
                   [](ContextOptions& o) { o.device_index = 1; }),
        ContextRow("Threads", OFFLOAD_INVALID_ARGUMENT,
                   {"options.threads is 1025", "expected at most 1024"},
                   [](ContextOptions& o) { o.threads = 1025; }),
        ContextRow("DeviceTimeout", OFFLOAD_INVALID_ARGUMENT,
                   {"options.device_timeout_ns is 18446744073709551615", "expected"},
                   [](ContextOptions& o) { o.device_timeout_ns = UINT64_MAX; }),
        ContextRow("SimFieldsOnHost", OFFLOAD_INVALID_ARGUMENT, {"options.sim_", "leave them 0"},
                   [](ContextOptions& o) { o.sim_seed = 1; }),
        ContextRow("SimMemoryTooSmall", OFFLOAD_INVALID_ARGUMENT,
                   {"options.sim_memory_bytes is 100", "expected at least 4096"},
                   [](ContextOptions& o) {
                     o.device_kind = OFFLOAD_DEVICE_SIM;
                     o.sim_memory_bytes = 100;
                   }),
        ContextRow("SimMemoryTooLarge", OFFLOAD_OUT_OF_HOST_MEMORY,
                   {"asked for 1152921504606846976 bytes", "available"},
                   [](ContextOptions& o) {
                     o.device_kind = OFFLOAD_DEVICE_SIM;
                     o.sim_memory_bytes = uint64_t{1} << 60;
                   }),
        ContextRow("SimMemoryAll", OFFLOAD_OUT_OF_HOST_MEMORY, {"asked for", "available"},
                   [](ContextOptions& o) {
                     o.device_kind = OFFLOAD_DEVICE_SIM;
                     o.sim_memory_bytes = UINT64_MAX;
                   }),
        ContextRow("SimDelay", OFFLOAD_INVALID_ARGUMENT,
                   {"options.sim_delay_ns_max is 2000000000", "expected at most 1 s"},
                   [](ContextOptions& o) {
                     o.device_kind = OFFLOAD_DEVICE_SIM;
                     o.sim_delay_ns_max = 2'000'000'000;
                   }),
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
        OptimizerRow("AlgorithmMissing", OFFLOAD_INVALID_ARGUMENT,
                     {"options.algorithm is 0", "expected OFFLOAD_ADAMW"},
                     [](OptimizerOptions& o) { o.algorithm = 0; }),
        OptimizerRow("AlgorithmUnknown", OFFLOAD_INVALID_ARGUMENT, {"options.algorithm is 6"},
                     [](OptimizerOptions& o) { o.algorithm = 6; }),
        OptimizerRow("FractionNegative", OFFLOAD_INVALID_ARGUMENT,
                     {"options.device_fraction is -0.1", "expected 0"},
                     [](OptimizerOptions& o) { o.device_fraction = -0.1; }),
        OptimizerRow("FractionAboveOne", OFFLOAD_INVALID_ARGUMENT,
                     {"options.device_fraction is 1.5"},
                     [](OptimizerOptions& o) { o.device_fraction = 1.5; }),
        OptimizerRow("FractionNan", OFFLOAD_INVALID_ARGUMENT, {"options.device_fraction is", "nan"},
                     [](OptimizerOptions& o) { o.device_fraction = kNan; }),
        OptimizerRow("ChunkTooSmall", OFFLOAD_INVALID_ARGUMENT,
                     {"options.chunk_elements is 1023", "expected 1024 to 2^28"},
                     [](OptimizerOptions& o) { o.chunk_elements = 1023; }),
        OptimizerRow("ChunkTooLarge", OFFLOAD_INVALID_ARGUMENT,
                     {"options.chunk_elements is 268435457"},
                     [](OptimizerOptions& o) { o.chunk_elements = (uint64_t{1} << 28) + 1; }),
        OptimizerRow("OneSlot", OFFLOAD_INVALID_ARGUMENT,
                     {"options.staging_slots is 1", "expected 2 to 64"},
                     [](OptimizerOptions& o) { o.staging_slots = 1; }),
        OptimizerRow("ManySlots", OFFLOAD_INVALID_ARGUMENT, {"options.staging_slots is 65"},
                     [](OptimizerOptions& o) { o.staging_slots = 65; }),
        OptimizerRow("UnknownMasterLayout", OFFLOAD_INVALID_ARGUMENT,
                     {"options.master_layout is 2", "OFFLOAD_MASTER_FP32 (0) or _SPLIT (1)"},
                     [](OptimizerOptions& o) { o.master_layout = 2; }),
        OptimizerRow("MomentsInFp16", OFFLOAD_INVALID_ARGUMENT,
                     {"options.moment_dtype is 3", "OFFLOAD_FP32 (1) or OFFLOAD_BF16 (2)"},
                     [](OptimizerOptions& o) { o.moment_dtype = OFFLOAD_FP16; }),
        OptimizerRow("UnknownRounding", OFFLOAD_INVALID_ARGUMENT,
                     {"options.moment_rounding is 2", "OFFLOAD_ROUND_STOCHASTIC (0)"},
                     [](OptimizerOptions& o) { o.moment_rounding = 2; }),
        OptimizerRow("RoundingOfFp32", OFFLOAD_INVALID_ARGUMENT,
                     {"OFFLOAD_ROUND_NEAREST", "fp32 moments are not rounded", "moment_dtype"},
                     [](OptimizerOptions& o) { o.moment_rounding = OFFLOAD_ROUND_NEAREST; }),
        OptimizerRow("SeedWithoutRandom", OFFLOAD_INVALID_ARGUMENT,
                     {"options.rounding_seed is 7", "nothing is rounded at random"},
                     [](OptimizerOptions& o) {
                       o.rounding_seed = 7;
                       o.moment_dtype = OFFLOAD_BF16;
                       o.moment_rounding = OFFLOAD_ROUND_NEAREST;
                     }),
        OptimizerRow("OptimizerReserved", OFFLOAD_UNSUPPORTED, {"options.reserved is 1"},
                     [](OptimizerOptions& o) { o.reserved = 1; }),
        OptimizerRow("UnknownMovable", OFFLOAD_UNSUPPORTED, {"options.movable is 0x17", "0xf"},
                     [](OptimizerOptions& o) { o.movable = 0x17; })),
    RowName);

// --------------------------------------------------------------------------------------- groups --

// Adding and setting a group refuse alike.
std::vector<Row> GroupRows() {
  struct Case {
    const char* name;
    int32_t algorithm;
    int32_t status;
    std::vector<std::string> words;
    std::function<void(offload_group_t&)> edit;
  };
  const std::vector<Case> cases = {
      {"LrNan",
       OFFLOAD_ADAMW,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.lr is", "nan", "expected"},
       [](auto& g) { g.lr = kNan; }},
      {"LrNegative",
       OFFLOAD_ADAMW,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.lr is -1", "at least 0"},
       [](auto& g) { g.lr = -1; }},
      {"LrInfinite",
       OFFLOAD_SGD,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.lr is inf", "finite"},
       [](auto& g) { g.lr = kInfinity; }},
      {"LrTooLarge",
       OFFLOAD_LION,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.lr is 1e+300", "fp32"},
       [](auto& g) { g.lr = 1e300; }},
      {"WeightDecayNegative",
       OFFLOAD_ADAGRAD,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.weight_decay"},
       [](auto& g) { g.weight_decay = -1e-3; }},
      {"Beta1One",
       OFFLOAD_ADAMW,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.beta1 is 1", "< 1"},
       [](auto& g) { g.beta1 = 1; }},
      {"Beta2One",
       OFFLOAD_ADAM,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.beta2 is 1"},
       [](auto& g) { g.beta2 = 1; }},
      {"Beta2Nan",
       OFFLOAD_LION,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.beta2", "nan"},
       [](auto& g) { g.beta2 = kNan; }},
      {"Beta1Negative",
       OFFLOAD_LION,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.beta1 is -0.5"},
       [](auto& g) { g.beta1 = -0.5; }},
      {"EpsZero",
       OFFLOAD_ADAMW,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.eps is 0", "above 0"},
       [](auto& g) { g.eps = 0; }},
      {"EpsVanishes",
       OFFLOAD_ADAGRAD,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.eps is 1e-50", "above 0 in fp32"},
       [](auto& g) { g.eps = 1e-50; }},
      {"EpsNegative",
       OFFLOAD_ADAM,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.eps is -1e-08"},
       [](auto& g) { g.eps = -1e-8; }},
      {"MomentumUnused",
       OFFLOAD_ADAMW,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.momentum is 0.9", "AdamW does not use it", "leave it 0"},
       [](auto& g) { g.momentum = 0.9; }},
      {"EpsUnused",
       OFFLOAD_LION,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.eps", "Lion"},
       [](auto& g) { g.eps = 1e-8; }},
      {"BetaUnused",
       OFFLOAD_SGD,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.beta1", "SGD"},
       [](auto& g) { g.beta1 = 0.9; }},
      {"UnusedNan",
       OFFLOAD_SGD,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.eps", "SGD"},
       [](auto& g) { g.eps = kNan; }},
      {"LrDecayUnused",
       OFFLOAD_ADAM,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.lr_decay", "Adam"},
       [](auto& g) { g.lr_decay = 0.1; }},
      {"AccumulatorNegative",
       OFFLOAD_ADAGRAD,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.initial_accumulator_value is -1"},
       [](auto& g) { g.initial_accumulator_value = -1; }},
      {"NesterovTwo",
       OFFLOAD_SGD,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.nesterov is 2", "0 or 1"},
       [](auto& g) { g.nesterov = 2; }},
      {"NesterovUnused",
       OFFLOAD_ADAMW,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.nesterov is 1", "AdamW"},
       [](auto& g) { g.nesterov = 1; }},
      {"NesterovWithoutMomentum",
       OFFLOAD_SGD,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.nesterov is 1 with momentum 0", "above 0"},
       [](auto& g) {
         g.nesterov = 1;
         g.momentum = 0;
       }},
      {"NesterovWithDampening",
       OFFLOAD_SGD,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.nesterov is 1", "dampening 0.1"},
       [](auto& g) {
         g.nesterov = 1;
         g.dampening = 0.1;
       }},
      {"DampeningWithoutMomentum",
       OFFLOAD_SGD,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.dampening is 0.5 with momentum 0"},
       [](auto& g) {
         g.momentum = 0;
         g.dampening = 0.5;
       }},
      {"MaximizeNegative",
       OFFLOAD_ADAMW,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.maximize is -1"},
       [](auto& g) { g.maximize = -1; }},
      {"GroupReserved",
       OFFLOAD_ADAMW,
       OFFLOAD_UNSUPPORTED,
       {"group.reserved is 1"},
       [](auto& g) { g.reserved = 1; }},
      {"GroupStructSize",
       OFFLOAD_ADAMW,
       OFFLOAD_INVALID_ARGUMENT,
       {"group.struct_size is 3"},
       [](auto& g) { g.struct_size = 3; }},
  };
  std::vector<Row> rows;
  for (const Case& one : cases) {
    rows.push_back({one.name, one.status, one.words,
                    [edit = one.edit](Trainer& t) {
                      offload_group_t group = t.group;
                      edit(group);
                      uint32_t id = 99;
                      const int32_t status = offload_optimizer_add_group(t.optimizer, &group, &id);
                      EXPECT_EQ(id, 99u);
                      EXPECT_EQ(offload_optimizer_set_group(t.optimizer, 0, &group), status);
                      return status;
                    },
                    one.algorithm});
  }
  return rows;
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
            }}),
    RowName);

// --------------------------------------------------------------------------------------- params --

// Adds a good param, a bad one and a good one: all or none.
template <typename Edit>
Row ParamRow(const char* name, int32_t status, std::vector<std::string> words, Edit&& edit) {
  words.push_back("params[1]");
  return {name, status, std::move(words), [edit](Trainer& t) {
            std::vector<offload_param_t> params(3, t.Param(2));
            for (offload_param_t& param : params) param.count = 1;
            params[0].data = Behind(t.data[2], 400);
            params[2].data = Behind(t.data[2], 800);
            params[0].name = "first";
            params[1].name = "bad";
            params[2].name = "last";
            edit(t, params[1]);
            uint32_t id = 99;
            const int32_t status = offload_optimizer_add_params(t.optimizer, params.data(), 3, &id);
            EXPECT_EQ(id, 99u);
            return status;
          }};
}

const std::string kLongName(1024, 'n');

// A shard that fits a param of count 1; rows spoil one field each.
struct ShardArrays {
  int64_t shape[2] = {4, 4};
  int64_t offsets[4] = {0, 0, 2, 2};
  int64_t extents[4] = {1, 1, 1, 1};
  offload_shard_t shard = Make<offload_shard_t>();
};

template <typename Edit>
Row ShardRow(const char* name, int32_t status, std::vector<std::string> words, Edit&& edit) {
  return ParamRow(name, status, std::move(words), [edit](Trainer&, offload_param_t& param) {
    static ShardArrays arrays;  // read before the call returns
    arrays = ShardArrays();
    arrays.shard.dimensions = 2;
    arrays.shard.box_count = 1;
    arrays.shard.global_shape = arrays.shape;
    arrays.shard.box_offsets = arrays.offsets;
    arrays.shard.box_extents = arrays.extents;
    edit(arrays);
    param.shard = &arrays.shard;
  });
}

INSTANTIATE_TEST_SUITE_P(
    Param, Registering,
    testing::Values(Row{"ParamsNull",
                        OFFLOAD_INVALID_ARGUMENT,
                        {"params is NULL"},
                        [](Trainer& t) {
                          return offload_optimizer_add_params(t.optimizer, nullptr, 1, nullptr);
                        }},
                    ParamRow("ParamStructSize", OFFLOAD_INVALID_ARGUMENT,
                             {"struct_size is 8", "first element"},
                             [](Trainer&, offload_param_t& p) { p.struct_size = 8; }),
                    ParamRow("GroupUnknown", OFFLOAD_INVALID_ARGUMENT,
                             {"group is 1", "1 groups have been added", "'bad'"},
                             [](Trainer&, offload_param_t& p) { p.group = 1; }),
                    ParamRow("DtypeMissing", OFFLOAD_INVALID_ARGUMENT,
                             {"dtype is 0", "OFFLOAD_FP32"},
                             [](Trainer&, offload_param_t& p) { p.dtype = 0; }),
                    ParamRow("GradDtypeUnknown", OFFLOAD_INVALID_ARGUMENT, {"grad_dtype is 4"},
                             [](Trainer&, offload_param_t& p) { p.grad_dtype = 4; }),
                    ParamRow("DtypeNegative", OFFLOAD_INVALID_ARGUMENT, {"dtype is -1"},
                             [](Trainer&, offload_param_t& p) { p.dtype = -1; }),
                    ParamRow("PlacementUnknown", OFFLOAD_INVALID_ARGUMENT,
                             {"placement is 3", "expected"},
                             [](Trainer&, offload_param_t& p) { p.placement = 3; }),
                    ParamRow("ParamReserved", OFFLOAD_UNSUPPORTED, {"reserved is 1"},
                             [](Trainer&, offload_param_t& p) { p.reserved = 1; }),
                    ParamRow("NameNull", OFFLOAD_INVALID_ARGUMENT, {"name is NULL", "unique"},
                             [](Trainer&, offload_param_t& p) { p.name = nullptr; }),
                    ParamRow("NameEmpty", OFFLOAD_INVALID_ARGUMENT, {"name is empty"},
                             [](Trainer&, offload_param_t& p) { p.name = ""; }),
                    ParamRow("NameTooLong", OFFLOAD_INVALID_ARGUMENT, {"name is longer than 1023"},
                             [](Trainer&, offload_param_t& p) { p.name = kLongName.c_str(); }),
                    ParamRow("NameTaken", OFFLOAD_INVALID_ARGUMENT,
                             {"name is taken by param 1", "'p1'"},
                             [](Trainer&, offload_param_t& p) { p.name = "p1"; }),
                    ParamRow("NameTwiceInOneCall", OFFLOAD_INVALID_ARGUMENT,
                             {"name is taken by param 2"},
                             [](Trainer&, offload_param_t& p) { p.name = "first"; }),
                    ParamRow("DataNull", OFFLOAD_INVALID_ARGUMENT, {"data is NULL", "1 elements"},
                             [](Trainer&, offload_param_t& p) { p.data = nullptr; }),
                    ParamRow("CountHuge", OFFLOAD_INVALID_ARGUMENT,
                             {"count is 18446744073709551615", "expected at most 2^44"},
                             [](Trainer&, offload_param_t& p) { p.count = UINT64_MAX; }),
                    ParamRow("DataMisaligned", OFFLOAD_INVALID_ARGUMENT,
                             {"data: address", "not aligned", "2-byte", "bf16"},
                             [](Trainer& t, offload_param_t& p) { p.data = Behind(t.data[2], 1); }),
                    ParamRow("GradMisaligned", OFFLOAD_INVALID_ARGUMENT,
                             {"grad: address", "4-byte", "fp32"},
                             [](Trainer& t, offload_param_t& p) {
                               p.grad = Behind(t.grads[2], 2);
                             }),
                    ParamRow("DataSame", OFFLOAD_INVALID_ARGUMENT,
                             {"overlaps the data of param 0 'p0'", "tied weights"},
                             [](Trainer& t, offload_param_t& p) {
                               p.data = t.data[0];
                               p.grad = nullptr;
                               p.count = 3000;
                             }),
                    ParamRow(
                        "DataInside", OFFLOAD_INVALID_ARGUMENT, {"overlaps the data of param 0"},
                        [](Trainer& t, offload_param_t& p) { p.data = Behind(t.data[0], 100); }),
                    ParamRow("DataLastElement", OFFLOAD_INVALID_ARGUMENT,
                             {"overlaps the data of param 0"},
                             [](Trainer& t, offload_param_t& p) {
                               p.data = Behind(t.data[0], 5998);
                             }),
                    ParamRow("DataReachesNext", OFFLOAD_INVALID_ARGUMENT,
                             {"overlaps the data of param 2"},
                             [](Trainer&, offload_param_t& p) { p.count = 201; }),
                    ShardRow("ShardStructSize", OFFLOAD_INVALID_ARGUMENT,
                             {"params[1].shard.struct_size is 1"},
                             [](ShardArrays& a) { a.shard.struct_size = 1; }),
                    ShardRow("DimensionsZero", OFFLOAD_INVALID_ARGUMENT,
                             {"shard.dimensions is 0", "expected 1 to 8"},
                             [](ShardArrays& a) { a.shard.dimensions = 0; }),
                    ShardRow("DimensionsNine", OFFLOAD_INVALID_ARGUMENT, {"shard.dimensions is 9"},
                             [](ShardArrays& a) { a.shard.dimensions = 9; }),
                    ShardRow("NoBox", OFFLOAD_INVALID_ARGUMENT,
                             {"shard.box_count is 0", "expected 1"},
                             [](ShardArrays& a) { a.shard.box_count = 0; }),
                    ShardRow("BoxesHuge", OFFLOAD_INVALID_ARGUMENT,
                             {"shard.box_count is 4294967295"},
                             [](ShardArrays& a) { a.shard.box_count = UINT32_MAX; }),
                    ShardRow("ShardFlags", OFFLOAD_UNSUPPORTED,
                             {"shard.flags is 0x2", "known is 0x1"},
                             [](ShardArrays& a) { a.shard.flags = 2; }),
                    ShardRow("ShapeNull", OFFLOAD_INVALID_ARGUMENT, {"shard.global_shape", "NULL"},
                             [](ShardArrays& a) { a.shard.global_shape = nullptr; }),
                    ShardRow("OffsetsNull", OFFLOAD_INVALID_ARGUMENT, {"box_offsets", "NULL"},
                             [](ShardArrays& a) { a.shard.box_offsets = nullptr; }),
                    ShardRow("ExtentsNull", OFFLOAD_INVALID_ARGUMENT, {"box_extents", "NULL"},
                             [](ShardArrays& a) { a.shard.box_extents = nullptr; }),
                    ShardRow("ShapeNegative", OFFLOAD_INVALID_ARGUMENT,
                             {"shard.global_shape[1] is -4", "at least 0"},
                             [](ShardArrays& a) { a.shape[1] = -4; }),
                    ShardRow("ShapeOverflows", OFFLOAD_INVALID_ARGUMENT,
                             {"shard.global_shape", "63 bits"},
                             [](ShardArrays& a) { a.shape[0] = a.shape[1] = INT64_MAX; }),
                    ShardRow("BoxOutside", OFFLOAD_INVALID_ARGUMENT,
                             {"box 0", "from 4 over 1", "dimension 0", "outside global_shape 4"},
                             [](ShardArrays& a) { a.offsets[0] = 4; }),
                    ShardRow("BoxOffsetNegative", OFFLOAD_INVALID_ARGUMENT, {"box 0", "from -1"},
                             [](ShardArrays& a) { a.offsets[1] = -1; }),
                    ShardRow("BoxExtentNegative", OFFLOAD_INVALID_ARGUMENT, {"box 0", "over -1"},
                             [](ShardArrays& a) { a.extents[0] = -1; }),
                    ShardRow("BoxEndOverflows", OFFLOAD_INVALID_ARGUMENT, {"box 0", "from 1 over"},
                             [](ShardArrays& a) {
                               a.offsets[0] = 1;
                               a.extents[0] = INT64_MAX;
                             }),
                    ShardRow("BoxesOverlap", OFFLOAD_INVALID_ARGUMENT, {"boxes 0 and 1 overlap"},
                             [](ShardArrays& a) {
                               a.shard.box_count = 2;
                               a.extents[0] = a.extents[1] = 3;
                             }),
                    ShardRow("CountMismatch", OFFLOAD_INVALID_ARGUMENT,
                             {"count is 1", "shard holds 4", "must be equal"},
                             [](ShardArrays& a) { a.extents[1] = 4; }),
                    ShardRow("CountMismatchOfBoxes", OFFLOAD_INVALID_ARGUMENT,
                             {"count is 1", "holds 2"},
                             [](ShardArrays& a) { a.shard.box_count = 2; }),
                    ShardRow("RangeWithoutFlag", OFFLOAD_INVALID_ARGUMENT,
                             {"shard.range_begin/range_count", "OFFLOAD_SHARD_RANGE"},
                             [](ShardArrays& a) { a.shard.range_count = 1; }),
                    ShardRow("RangeOutside", OFFLOAD_INVALID_ARGUMENT,
                             {"shard.range_begin 1 + range_count 1", "1 elements"},
                             [](ShardArrays& a) {
                               a.shard.flags = OFFLOAD_SHARD_RANGE;
                               a.shard.range_begin = a.shard.range_count = 1;
                             }),
                    ShardRow("RangeOverflows", OFFLOAD_INVALID_ARGUMENT, {"shard.range_begin 1"},
                             [](ShardArrays& a) {
                               a.shard.flags = OFFLOAD_SHARD_RANGE;
                               a.shard.range_begin = 1;
                               a.shard.range_count = UINT64_MAX;
                             }),
                    ShardRow("RangeCountMismatch", OFFLOAD_INVALID_ARGUMENT,
                             {"count is 1", "holds 0"},
                             [](ShardArrays& a) { a.shard.flags = OFFLOAD_SHARD_RANGE; })),
    RowName);

float host_array[64];

INSTANTIATE_TEST_SUITE_P(
    Address, OnSim,
    testing::Values(
        ParamRow("DataInHostMemory", OFFLOAD_INVALID_ARGUMENT,
                 {"data:", "not in this device's memory"},
                 [](Trainer&, offload_param_t& p) { p.data = host_array; }),
        ParamRow("GradInHostMemory", OFFLOAD_INVALID_ARGUMENT,
                 {"grad:", "not in this device's memory"},
                 [](Trainer&, offload_param_t& p) { p.grad = host_array; }),
        ParamRow("DataPastItsAllocation", OFFLOAD_INVALID_ARGUMENT, {"data:", "runs past the end"},
                 [](Trainer&, offload_param_t& p) { p.count = 2501; }),
        ParamRow("GradPastItsAllocation", OFFLOAD_INVALID_ARGUMENT, {"grad:", "runs past the end"},
                 [](Trainer& t, offload_param_t& p) {
                   p.grad = Behind(t.grads[1], 0);
                   p.count = 2;
                 }),
        ParamRow("DataFreed", OFFLOAD_INVALID_ARGUMENT, {"data:", "freed or never allocated"},
                 [](Trainer& t, offload_param_t& p) {
                   void* freed = nullptr;
                   EXPECT_OFFLOAD_OK(offload_device_alloc(t.context, 256, &freed));
                   EXPECT_OFFLOAD_OK(offload_device_free(t.context, freed));
                   p.data = freed;
                 }),
        ParamRow("GradAtTheEndOfTheAddressSpace", OFFLOAD_INVALID_ARGUMENT, {"grad:"},
                 [](Trainer&, offload_param_t& p) { p.grad = Address(UINT64_MAX - 3); })),
    RowName);

// ----------------------------------------------------------------------------------------- bind --

// Binds param 0 well, then badly, then param 1 well: all or none.
template <typename Edit>
Row BindRow(const char* name, int32_t status, std::vector<std::string> words, Edit&& edit) {
  return {name, status, std::move(words), [edit](Trainer& t) {
            std::vector<offload_binding_t> bindings(3, Make<offload_binding_t>());
            bindings[0].param = 0;  // its gradient taken away, its data moved
            bindings[0].data = t.grads[0];
            bindings[1].param = 0;
            bindings[1].data = t.data[0];
            bindings[1].grad = t.grads[0];
            bindings[2].param = 1;
            edit(t, bindings[1]);
            return offload_optimizer_bind(t.optimizer, bindings.data(), 3);
          }};
}

INSTANTIATE_TEST_SUITE_P(
    Bind, Anytime,
    testing::Values(
        Row{"BindingsNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"bindings is NULL"},
            [](Trainer& t) { return offload_optimizer_bind(t.optimizer, nullptr, 1); }},
        BindRow("BindUnknownParam", OFFLOAD_INVALID_ARGUMENT,
                {"bindings[1].param is 3", "params have been added"},
                [](Trainer&, offload_binding_t& b) { b.param = 3; }),
        BindRow("BindMisaligned", OFFLOAD_INVALID_ARGUMENT,
                {"bindings.data[1]", "'p0'", "not aligned"},
                [](Trainer& t, offload_binding_t& b) { b.data = Behind(t.data[0], 1); }),
        BindRow("BindGradMisaligned", OFFLOAD_INVALID_ARGUMENT,
                {"bindings.grad[1]", "'p0'", "not aligned"},
                [](Trainer& t, offload_binding_t& b) { b.grad = Behind(t.grads[0], 2); }),
        BindRow("BindOverlaps", OFFLOAD_INVALID_ARGUMENT,
                {"bindings[1]", "overlaps the data of param 0 'p0'"},
                [](Trainer& t, offload_binding_t& b) {
                  b.param = 1;
                  b.data = t.grads[0];  // where the first binding has just put param 0
                  b.grad = nullptr;
                }),
        BindRow("BindStructSize", OFFLOAD_INVALID_ARGUMENT, {"bindings[1].struct_size is 0"},
                [](Trainer&, offload_binding_t& b) { b.struct_size = 0; }),
        BindRow("BindStructSizesDiffer", OFFLOAD_INVALID_ARGUMENT,
                {"bindings[1].struct_size is 16", "must be equal"},
                [](Trainer&, offload_binding_t& b) { b.struct_size = 16; })),
    RowName);

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

constexpr offload_stream_t kUnknownStream = const_cast<char*>("no stream");

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
        Row{"SetStepCount",
            OFFLOAD_INVALID_STATE,
            {"not committed"},
            [](Trainer& t) { return offload_optimizer_set_step_count(t.optimizer, 0, 1); }},
        Row{"CommitOnUnknownStream",
            OFFLOAD_INVALID_ARGUMENT,
            {"stream is"},
            [](Trainer& t) { return offload_optimizer_commit(t.optimizer, kUnknownStream); }},
        Row{"CommitWithoutParams",
            OFFLOAD_INVALID_STATE,
            {"no params", "offload_optimizer_add_params"},
            [](Trainer& t) {
              auto options = Make<OptimizerOptions>();
              options.algorithm = OFFLOAD_SGD;
              offload_optimizer_t empty = nullptr;
              EXPECT_OFFLOAD_OK(offload_optimizer_create(t.context, &options, &empty));
              const int32_t status = offload_optimizer_commit(empty, nullptr);
              const std::string message = offload_last_error();
              EXPECT_OFFLOAD_OK(offload_optimizer_destroy(empty));
              return status;
            }}),
    RowName);

INSTANTIATE_TEST_SUITE_P(
    TooLate, Committed,
    testing::Values(Row{"AddParams",
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

int32_t StateOf(Trainer& t, uint32_t param, int32_t kind) {
  auto view = Make<offload_state_view_t>();
  view.host_count = 99;
  const int32_t status = offload_optimizer_state(t.optimizer, param, kind, &view);
  EXPECT_EQ(view.host_count, 99u);
  return status;
}

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
        StepRow("StepFlags", OFFLOAD_UNSUPPORTED, {"options.flags is 0x80", "known is 0x1"},
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

// ------------------------------------------------------------------------- device conveniences --

INSTANTIATE_TEST_SUITE_P(
    Device, Anytime,
    testing::Values(
        Row{"InfoNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"info is NULL"},
            [](Trainer& t) { return offload_context_get_info(t.context, nullptr); }},
        Row{"PlanNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"plan is NULL"},
            [](Trainer& t) { return offload_optimizer_plan(t.optimizer, nullptr); }},
        Row{"StatsNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"stats is NULL"},
            [](Trainer& t) { return offload_optimizer_get_stats(t.optimizer, nullptr); }},
        Row{"StatsStructSize",
            OFFLOAD_INVALID_ARGUMENT,
            {"stats.struct_size is 0", "expected"},
            [](Trainer& t) {
              offload_stats_t stats{};
              return offload_optimizer_get_stats(t.optimizer, &stats);
            }},
        Row{"AllocNothing",
            OFFLOAD_INVALID_ARGUMENT,
            {"bytes is 0", "at least 1"},
            [](Trainer& t) {
              void* data;
              return offload_device_alloc(t.context, 0, &data);
            }},
        Row{"AllocOutNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"data is NULL"},
            [](Trainer& t) { return offload_device_alloc(t.context, 64, nullptr); }},
        Row{"FreeUnknown",
            OFFLOAD_INVALID_ARGUMENT,
            {"data is", "has not been freed"},
            [](Trainer& t) { return offload_device_free(t.context, host_array); }},
        Row{"FreeInside",
            OFFLOAD_INVALID_ARGUMENT,
            {"data is"},
            [](Trainer& t) { return offload_device_free(t.context, Behind(t.data[0], 256)); }},
        Row{"FreeTwice",
            OFFLOAD_INVALID_ARGUMENT,
            {"data is"},
            [](Trainer& t) {
              void* data = nullptr;
              EXPECT_OFFLOAD_OK(offload_device_alloc(t.context, 64, &data));
              EXPECT_OFFLOAD_OK(offload_device_free(t.context, data));
              return offload_device_free(t.context, data);
            }},
        Row{"UploadFromNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"host_data is NULL"},
            [](Trainer& t) {
              return offload_device_upload(t.context, t.data[0], nullptr, 4, nullptr);
            }},
        Row{"UploadToNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"device_data is NULL"},
            [](Trainer& t) {
              return offload_device_upload(t.context, nullptr, host_array, 4, nullptr);
            }},
        Row{"DownloadToNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"host_data is NULL"},
            [](Trainer& t) {
              return offload_device_download(t.context, nullptr, t.data[0], 4, nullptr);
            }},
        Row{"UploadOnUnknownStream",
            OFFLOAD_INVALID_ARGUMENT,
            {"stream is"},
            [](Trainer& t) {
              return offload_device_upload(t.context, t.data[0], host_array, 4, kUnknownStream);
            }},
        Row{"DownloadOnUnknownStream",
            OFFLOAD_INVALID_ARGUMENT,
            {"stream is"},
            [](Trainer& t) {
              return offload_device_download(t.context, host_array, t.data[0], 4, kUnknownStream);
            }},
        Row{"MapOutNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"mapped is NULL"},
            [](Trainer& t) { return offload_device_map(t.context, t.data[0], 4, nullptr); }},
        Row{"MapNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"4 bytes at"},
            [](Trainer& t) {
              void* mapped;
              return offload_device_map(t.context, nullptr, 4, &mapped);
            }},
        Row{"StreamOutNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"stream is NULL"},
            [](Trainer& t) { return offload_stream_create(t.context, nullptr); }},
        Row{"StreamDestroyUnknown",
            OFFLOAD_INVALID_ARGUMENT,
            {"stream is"},
            [](Trainer& t) { return offload_stream_destroy(t.context, kUnknownStream); }},
        Row{"SynchronizeUnknown",
            OFFLOAD_INVALID_ARGUMENT,
            {"stream is"},
            [](Trainer& t) { return offload_stream_synchronize(t.context, kUnknownStream, 0); }},
        Row{"RunNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"function is NULL"},
            [](Trainer& t) { return offload_stream_run(t.context, nullptr, nullptr, nullptr); }},
        Row{"RunOnUnknownStream",
            OFFLOAD_INVALID_ARGUMENT,
            {"stream is"},
            [](Trainer& t) {
              return offload_stream_run(
                  t.context, kUnknownStream, [](void*) {}, nullptr);
            }}),
    RowName);

INSTANTIATE_TEST_SUITE_P(
    Range, OnSim,
    testing::Values(
        Row{"UploadPastTheEnd",
            OFFLOAD_INVALID_ARGUMENT,
            {"runs past the end"},
            [](Trainer& t) {
              return offload_device_upload(t.context, t.data[1], host_array, 5, nullptr);
            }},
        Row{"DownloadFromHostMemory",
            OFFLOAD_INVALID_ARGUMENT,
            {"not in this device's memory"},
            [](Trainer& t) {
              return offload_device_download(t.context, host_array, host_array + 1, 4, nullptr);
            }},
        Row{"DownloadToTheDevice",
            OFFLOAD_INVALID_ARGUMENT,
            {"expected host memory"},
            [](Trainer& t) {
              return offload_device_download(t.context, t.data[0], t.data[0], 4, nullptr);
            }},
        Row{"UploadEverything",
            OFFLOAD_INVALID_ARGUMENT,
            {"18446744073709551615 bytes"},
            [](Trainer& t) {
              return offload_device_upload(t.context, t.data[0], host_array, UINT64_MAX, nullptr);
            }},
        Row{"MapPastTheEnd",
            OFFLOAD_INVALID_ARGUMENT,
            {"runs past the end"},
            [](Trainer& t) {
              void* mapped;
              return offload_device_map(t.context, t.data[1], 5, &mapped);
            }},
        Row{"AllocTooMuch",
            OFFLOAD_OUT_OF_DEVICE_MEMORY,
            {"asked for 2097152 bytes", "1048576"},
            [](Trainer& t) {
              void* data;
              return offload_device_alloc(t.context, 2 << 20, &data);
            }},
        Row{"AllocEverything",
            OFFLOAD_OUT_OF_DEVICE_MEMORY,
            {"asked for 18446744073709551615 bytes"},
            [](Trainer& t) {
              void* data;
              return offload_device_alloc(t.context, UINT64_MAX, &data);
            }},
        Row{"StreamDestroyedTwice",
            OFFLOAD_INVALID_ARGUMENT,
            {"stream is", "has not been destroyed"},
            [](Trainer& t) {
              offload_stream_t stream = nullptr;
              EXPECT_OFFLOAD_OK(offload_stream_create(t.context, &stream));
              EXPECT_OFFLOAD_OK(offload_stream_destroy(t.context, stream));
              return offload_stream_destroy(t.context, stream);
            }},
        Row{"StreamOfAnotherContext",
            OFFLOAD_INVALID_ARGUMENT,
            {"stream is"},
            [](Trainer& t) {
              RunOptions run;
              Trainer other(run);
              offload_stream_t stream = nullptr;
              EXPECT_OFFLOAD_OK(offload_stream_create(other.context, &stream));
              return offload_stream_synchronize(t.context, stream, 0);
            }}),
    RowName);

// -------------------------------------------------------------------------------------- handles --

void ExpectHandleRefused(const std::vector<HandleCall>& calls, void* handle, const char* field,
                         const char* word) {
  for (const HandleCall& one : calls) {
    EXPECT_EQ(one.call(handle), OFFLOAD_INVALID_ARGUMENT) << one.name << " with " << handle;
    const std::string message = offload_last_error();
    EXPECT_EQ(message.find(field), 0u) << one.name << ": " << message;
    EXPECT_NE(message.find(word), std::string::npos) << one.name << ": " << message;
  }
}

TEST(Handle, NullWrongKindGarbageAndDestroyedAreRefusedByEveryCall) {
  RunOptions run;
  Trainer trainer(run), alone(run);
  Begin(trainer, Phase::kCommitted);
  Begin(alone, Phase::kCommitted);

  ExpectHandleRefused(ContextCalls(), nullptr, "context is NULL", "expected a handle");
  ExpectHandleRefused(OptimizerCalls(), nullptr, "optimizer is NULL", "expected a handle");
  ExpectHandleRefused(ContextCalls(), trainer.optimizer, "context is 0x", "not a handle");
  ExpectHandleRefused(OptimizerCalls(), trainer.context, "optimizer is 0x", "not a handle");
  ExpectHandleRefused(ContextCalls(), host_array, "context is 0x", "not a handle");
  ExpectHandleRefused(OptimizerCalls(), &trainer, "optimizer is 0x", "not a handle");
  ExpectHandleRefused(ContextCalls(), Address(UINT64_MAX), "context is 0x", "not a handle");

  offload_context_t context = nullptr;
  const auto options = Make<offload_context_options_t>();
  ASSERT_OFFLOAD_OK(offload_context_create(&options, &context));
  ASSERT_OFFLOAD_OK(offload_context_destroy(context));
  ExpectHandleRefused(ContextCalls(), context, "context is 0x", "has been destroyed");
  offload_optimizer_t optimizer = nullptr;
  auto optimizer_options = Make<offload_optimizer_options_t>();
  optimizer_options.algorithm = OFFLOAD_LION;
  ASSERT_OFFLOAD_OK(offload_optimizer_create(trainer.context, &optimizer_options, &optimizer));
  ASSERT_OFFLOAD_OK(offload_optimizer_destroy(optimizer));
  ExpectHandleRefused(OptimizerCalls(), optimizer, "optimizer is 0x", "has been destroyed");

  // A new object in the place of a destroyed one does not bring the old handle back to life.
  offload_optimizer_t newer = nullptr;
  ASSERT_OFFLOAD_OK(offload_optimizer_create(trainer.context, &optimizer_options, &newer));
  EXPECT_NE(newer, optimizer);
  ExpectHandleRefused(OptimizerCalls(), optimizer, "optimizer is 0x", "has been destroyed");
  ASSERT_OFFLOAD_OK(offload_optimizer_destroy(newer));

  EXPECT_EQ(Finish(trainer, Phase::kCommitted).bits, Finish(alone, Phase::kCommitted).bits);
}

TEST(Handle, ChangedBitsOfAGoodHandleAreRefused) {
  RunOptions run;
  Trainer trainer(run);
  for (int bit = 0; bit < 64; ++bit) {
    const uint64_t changed = reinterpret_cast<uint64_t>(trainer.optimizer) ^ (uint64_t{1} << bit);
    auto stats = Make<offload_stats_t>();
    const int32_t status =
        offload_optimizer_get_stats(static_cast<offload_optimizer_t>(Address(changed)), &stats);
    // Bits 48 to 55 say in which process of a family of forks it was made.
    EXPECT_EQ(status, bit >= 48 && bit < 56 ? OFFLOAD_INVALID_STATE : OFFLOAD_INVALID_ARGUMENT)
        << bit;
  }
}

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

// --------------------------------------------------------------------------------------- memory --

TEST(Commit, UnderAPinnedCapSaysHowMuchIsNeeded) {
  auto options = Make<offload_context_options_t>();
  options.device_kind = OFFLOAD_DEVICE_SIM;
  options.sim_memory_bytes = 1 << 20;
  options.pinned_bytes_max = 8192;
  offload_context_t context = nullptr;
  ASSERT_OFFLOAD_OK(offload_context_create(&options, &context));
  auto optimizer_options = Make<offload_optimizer_options_t>();
  optimizer_options.algorithm = OFFLOAD_LION;
  offload_optimizer_t optimizer = nullptr;
  ASSERT_OFFLOAD_OK(offload_optimizer_create(context, &optimizer_options, &optimizer));
  auto group = Make<offload_group_t>();
  group.lr = 1;
  uint32_t id = 0;
  ASSERT_OFFLOAD_OK(offload_optimizer_add_group(optimizer, &group, &id));
  auto param = Make<offload_param_t>();
  param.name = "p";
  param.dtype = param.grad_dtype = OFFLOAD_FP32;
  param.count = 4096;
  ASSERT_OFFLOAD_OK(offload_device_alloc(context, 4 * param.count, &param.data));
  ASSERT_OFFLOAD_OK(offload_optimizer_add_params(optimizer, &param, 1, nullptr));

  auto plan = Make<offload_plan_t>();
  ASSERT_OFFLOAD_OK(offload_optimizer_plan(optimizer, &plan));
  EXPECT_EQ(plan.fits, 0);
  EXPECT_EQ(plan.pinned_bytes_left, 8192u);
  auto before = Make<offload_context_info_t>();
  ASSERT_OFFLOAD_OK(offload_context_get_info(context, &before));
  EXPECT_EQ(offload_optimizer_commit(optimizer, nullptr), OFFLOAD_INVALID_ARGUMENT);
  const std::string message = offload_last_error();
  for (const std::string& word :
       {std::string("pinned_bytes_max"), std::string("8192"), std::to_string(plan.staging_bytes)})
    EXPECT_NE(message.find(word), std::string::npos) << message;
  auto after = Make<offload_context_info_t>();
  ASSERT_OFFLOAD_OK(offload_context_get_info(context, &after));
  EXPECT_EQ(std::memcmp(&before, &after, sizeof(after)), 0);

  // All of it on the device needs no staging: the way out that needs no other cap.
  ASSERT_OFFLOAD_OK(offload_optimizer_destroy(optimizer));
  optimizer_options.device_fraction = 1;
  ASSERT_OFFLOAD_OK(offload_optimizer_create(context, &optimizer_options, &optimizer));
  ASSERT_OFFLOAD_OK(offload_optimizer_add_group(optimizer, &group, &id));
  ASSERT_OFFLOAD_OK(offload_optimizer_add_params(optimizer, &param, 1, nullptr));
  EXPECT_OFFLOAD_OK(offload_optimizer_commit(optimizer, nullptr));
  ASSERT_OFFLOAD_OK(offload_optimizer_destroy(optimizer));
  ASSERT_OFFLOAD_OK(offload_context_destroy(context));
}

TEST(Commit, BeyondTheDevicesMemoryNamesTheBytesAndCanBeTriedAgain) {
  RunOptions run;
  run.device_fraction = 1;
  run.sim_memory_bytes = uint64_t{128} << 10;
  run.counts = {8192};
  Trainer trainer(run);
  trainer.AddParams();
  void* rest = nullptr;
  ASSERT_OFFLOAD_OK(offload_device_alloc(trainer.context, 40 << 10, &rest));
  auto plan = Make<offload_plan_t>();
  ASSERT_OFFLOAD_OK(offload_optimizer_plan(trainer.optimizer, &plan));
  EXPECT_EQ(plan.fits, 0);
  EXPECT_GT(plan.device_bytes, plan.device_free_bytes);
  EXPECT_EQ(offload_optimizer_commit(trainer.optimizer, nullptr), OFFLOAD_OUT_OF_DEVICE_MEMORY);
  const std::string message = offload_last_error();
  for (const std::string& word :
       {std::string("device_fraction 1"), std::to_string(plan.device_bytes),
        std::to_string(plan.device_free_bytes)})
    EXPECT_NE(message.find(word), std::string::npos) << message;
  auto after = Make<offload_plan_t>();
  ASSERT_OFFLOAD_OK(offload_optimizer_plan(trainer.optimizer, &after));
  EXPECT_EQ(after.device_free_bytes, plan.device_free_bytes);
}

TEST(Commit, BeyondTheHostsMemoryNamesTheBytes) {
  // Addresses without memory behind them: more elements than any machine has state for.
  const uint64_t bytes = uint64_t{1} << 44;
  void* addresses =
      mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (addresses == MAP_FAILED) GTEST_SKIP() << "the system grants no 16 TiB of addresses";
  auto options = Make<offload_context_options_t>();
  offload_context_t context = nullptr;
  ASSERT_OFFLOAD_OK(offload_context_create(&options, &context));
  auto optimizer_options = Make<offload_optimizer_options_t>();
  optimizer_options.algorithm = OFFLOAD_LION;
  offload_optimizer_t optimizer = nullptr;
  ASSERT_OFFLOAD_OK(offload_optimizer_create(context, &optimizer_options, &optimizer));
  auto group = Make<offload_group_t>();
  uint32_t id = 0;
  ASSERT_OFFLOAD_OK(offload_optimizer_add_group(optimizer, &group, &id));
  for (int i = 0; i < 8; ++i) {
    auto param = Make<offload_param_t>();
    const std::string name = "p" + std::to_string(i);
    param.name = name.c_str();
    param.dtype = param.grad_dtype = OFFLOAD_BF16;
    param.placement = i % 3;
    param.count = bytes / 2 / 8;
    param.data = Behind(addresses, static_cast<int64_t>(i * (bytes / 8)));
    ASSERT_OFFLOAD_OK(offload_optimizer_add_params(optimizer, &param, 1, nullptr));
  }
  auto plan = Make<offload_plan_t>();
  ASSERT_OFFLOAD_OK(offload_optimizer_plan(optimizer, &plan));
  EXPECT_EQ(plan.fits, 0);
  EXPECT_GE(plan.host_bytes, 4 * bytes);  // an fp32 master and moment for every two bytes
  EXPECT_EQ(offload_optimizer_commit(optimizer, nullptr), OFFLOAD_OUT_OF_HOST_MEMORY);
  const std::string message = offload_last_error();
  for (const std::string& word :
       {"needs " + std::to_string(plan.host_bytes) + " bytes", std::string("available")})
    EXPECT_NE(message.find(word), std::string::npos) << message;
  EXPECT_EQ(offload_optimizer_commit(optimizer, nullptr), OFFLOAD_OUT_OF_HOST_MEMORY);
  ASSERT_OFFLOAD_OK(offload_optimizer_destroy(optimizer));
  ASSERT_OFFLOAD_OK(offload_context_destroy(context));
  munmap(addresses, bytes);
}

TEST(StatusName, IsKnownForEveryStatusAndUnknownForTheRest) {
  EXPECT_STREQ(offload_status_name(OFFLOAD_OK), "OK");
  EXPECT_STREQ(offload_status_name(OFFLOAD_POISONED), "POISONED");
  for (int32_t status : {-1, 1, 13, 71, INT32_MAX, INT32_MIN})
    EXPECT_STREQ(offload_status_name(status), "UNKNOWN");
}

}  // namespace
}  // namespace hybridopt::fault
