// Exchanges of matrices that go wrong: options, parts that do not fit together, arguments, ranks
// that do not come, memory that is not there, streams that are stuck. Each error has its text, and
// what is refused has changed nothing.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <thread>

#include "../../thread_comm.h"
#include "../trainer.h"

namespace hybridopt {
namespace {

using fault::ExpectError;
using fault::Gate;
using fault::Make;

constexpr uint64_t kLongNs = 60'000'000'000;
constexpr uint64_t kShortNs = 50'000'000;

// A matrix of 4 x 6, of which a rank has some rows, and the options that give it.
struct Input {
  explicit Input(int64_t first_row = 0, int64_t rows = 4) : offsets{first_row, 0}, sizes{rows, 6} {
    shard.dimensions = 2;
    shard.box_count = 1;
    shard.global_shape = shape;
    shard.box_offsets = offsets;
    shard.box_extents = sizes;
    matrix.dtype = OFFLOAD_BF16;
    matrix.grad_dtype = OFFLOAD_FP32;
    matrix.name = "weight";
    matrix.shard = &shard;
    options.matrix_count = 1;
    options.matrices = &matrix;
    options.comm = &comm;
    options.comm_timeout_ns = kLongNs;
  }
  Input(const Input&) = delete;
  Input& operator=(const Input&) = delete;

  int64_t shape[3] = {4, 6, 1};
  int64_t offsets[3];
  int64_t sizes[3];
  offload_shard_t shard = Make<offload_shard_t>();
  offload_exchange_matrix_t matrix = Make<offload_exchange_matrix_t>();
  offload_comm_t comm = Make<offload_comm_t>();
  offload_exchange_options_t options = Make<offload_exchange_options_t>();
};

struct Machine {
  explicit Machine(
      int32_t device, const std::function<void(offload_context_options_t&)>& change =
                          [](offload_context_options_t&) {}) {
    auto options = Make<offload_context_options_t>();
    options.device_kind = device;
    options.threads = 1;
    options.sim_memory_bytes = device == OFFLOAD_DEVICE_SIM ? 1 << 20 : 0;
    change(options);
    EXPECT_OFFLOAD_OK(offload_context_create(&options, &context));
  }
  ~Machine() {
    if (!left_behind) {
      EXPECT_OFFLOAD_OK(offload_context_destroy(context));
    }
  }
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  offload_context_t context = nullptr;
  bool left_behind = false;
};

// ------------------------------------------------------------------------------------- options --

struct Row {
  const char* name;
  int32_t status;
  std::vector<std::string> words;
  std::function<void(Input&)> spoil;
};

const std::string kLongName(1024, 'n');

std::vector<Row> OptionRows() {
  constexpr int32_t kInvalid = OFFLOAD_INVALID_ARGUMENT;
  return {
      {"MatricesNull",
       kInvalid,
       {"options.matrices is (nil)", "an array of at least 1"},
       [](Input& i) { i.options.matrices = nullptr; }},
      {"CountZero",
       kInvalid,
       {"options.matrix_count 0"},
       [](Input& i) { i.options.matrix_count = 0; }},
      {"CommNull",
       kInvalid,
       {"options.comm is NULL", "a table with all ranks"},
       [](Input& i) { i.options.comm = nullptr; }},
      {"RankIsWorld",
       kInvalid,
       {"comm.rank is 1 and comm.world is 1"},
       [](Input& i) { i.comm.rank = 1; }},
      {"ExchangeNull",
       kInvalid,
       {"comm.exchange is NULL", "offload_mpi.h and offload_nccl.h"},
       [](Input& i) { i.comm.exchange = nullptr; }},
      // The table of a caller whose header is older.
      {"CommShort",
       kInvalid,
       {"comm.exchange is NULL"},
       [](Input& i) { i.comm.struct_size = offsetof(offload_comm_t, exchange); }},
      {"OnHostTwo",
       kInvalid,
       {"comm.exchange_on_host is 2", "expected 0 or 1"},
       [](Input& i) { i.comm.exchange_on_host = 2; }},
      {"OnDeviceOfTheHost",
       kInvalid,
       {"comm.exchange_on_host is 0, expected 1", "the host device has no memory of its own"},
       [](Input& i) { i.comm.exchange_on_host = 0; }},
      {"CommReserved",
       OFFLOAD_UNSUPPORTED,
       {"comm.reserved1 is 3", "expected 0"},
       [](Input& i) { i.comm.reserved1 = 3; }},
      {"TimeoutTooLong",
       kInvalid,
       {"options.comm_timeout_ns is 9223372036854775808", "at most 2^63 - 1"},
       [](Input& i) { i.options.comm_timeout_ns = uint64_t{1} << 63; }},
  };
}

std::vector<Row> MatrixRows() {
  constexpr int32_t kInvalid = OFFLOAD_INVALID_ARGUMENT;
  return {
      {"NameNull",
       kInvalid,
       {"matrices[0] (no name): name is NULL, expected a text"},
       [](Input& i) { i.matrix.name = nullptr; }},
      {"NameEmpty",
       kInvalid,
       {"matrices[0]", "name is empty, expected a text"},
       [](Input& i) { i.matrix.name = ""; }},
      {"NameLong",
       kInvalid,
       {"matrices[0] (no name): name is longer than 1023 bytes"},
       [](Input& i) { i.matrix.name = kLongName.c_str(); }},
      {"Dtype",
       kInvalid,
       {"matrices[0] (weight): dtype is 4 and grad_dtype is 1, expected OFFLOAD_FP32"},
       [](Input& i) { i.matrix.dtype = OFFLOAD_U16; }},
      {"GradDtype",
       kInvalid,
       {"dtype is 2 and grad_dtype is 0"},
       [](Input& i) { i.matrix.grad_dtype = 0; }},
      {"MatrixReserved",
       OFFLOAD_UNSUPPORTED,
       {"matrices[0] (weight): reserved is 7, expected 0"},
       [](Input& i) { i.matrix.reserved = 7; }},
      {"MatrixStructSize",
       kInvalid,
       {"matrices[0].struct_size is 0"},
       [](Input& i) { i.matrix.struct_size = 0; }},
      {"ShardNull",
       kInvalid,
       {"matrices[0] (weight): shard is NULL", "a box with an extent of 0"},
       [](Input& i) { i.matrix.shard = nullptr; }},
      {"ShardStructSize",
       kInvalid,
       {"matrices[0].shard.struct_size is 0"},
       [](Input& i) { i.shard.struct_size = 0; }},
      {"OneDimension",
       kInvalid,
       {"matrices[0] (weight): shard.dimensions is 1, expected 2 (rows, cols) or 3 (a stack)"},
       [](Input& i) { i.shard.dimensions = 1; }},
      {"OutsideTheShape",
       kInvalid,
       {"matrices[0] (weight): shard.box_offsets/box_extents: box 0"},
       [](Input& i) { i.sizes[0] = 5; }},
      {"TooLarge",
       kInvalid,
       {"shard.global_shape has 1152921504606846976 elements", "2^56"},
       [](Input& i) { i.shape[0] = i.shape[1] = int64_t{1} << 30; }},
      {"SmallerThanTheShape",
       kInvalid,
       {"matrices[0] (weight): the parts of all ranks have 18 of its 24 elements",
        "give each element to a rank"},
       [](Input& i) { i.sizes[0] = 3; }},
  };
}

class ExchangeOptionsTest : public ::testing::TestWithParam<Row> {};
INSTANTIATE_TEST_SUITE_P(Options, ExchangeOptionsTest, ::testing::ValuesIn(OptionRows()),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(Matrices, ExchangeOptionsTest, ::testing::ValuesIn(MatrixRows()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(ExchangeOptionsTest, AreRefusedWithTheirReason) {
  Machine machine(OFFLOAD_DEVICE_HOST);
  ThreadComm comm(1);
  Input input;
  input.comm = comm.Table(0);
  auto plan = Make<offload_exchange_plan_t>();
  EXPECT_OFFLOAD_OK(offload_exchange_plan(machine.context, &input.options, &plan));
  GetParam().spoil(input);
  offload_exchange_t exchange = nullptr;
  ExpectError(offload_exchange_create(machine.context, &input.options, &exchange),
              GetParam().status, GetParam().words);
  EXPECT_EQ(exchange, nullptr);
  if (std::string(GetParam().name) == "SmallerThanTheShape") return;  // plan asks no other rank
  ExpectError(offload_exchange_plan(machine.context, &input.options, &plan), GetParam().status,
              GetParam().words);
}

TEST(ExchangeTest, PointersThatAreNullAreRefused) {
  Machine machine(OFFLOAD_DEVICE_HOST);
  ThreadComm comm(1);
  Input input;
  input.comm = comm.Table(0);
  offload_exchange_t exchange = nullptr;
  auto plan = Make<offload_exchange_plan_t>();
  constexpr int32_t kInvalid = OFFLOAD_INVALID_ARGUMENT;
  ExpectError(offload_exchange_create(nullptr, &input.options, &exchange), kInvalid,
              {"context is NULL"});
  ExpectError(offload_exchange_create(machine.context, nullptr, &exchange), kInvalid,
              {"options is NULL"});
  ExpectError(offload_exchange_create(machine.context, &input.options, nullptr), kInvalid,
              {"exchange is NULL"});
  ExpectError(offload_exchange_plan(machine.context, nullptr, &plan), kInvalid,
              {"options is NULL"});
  ExpectError(offload_exchange_plan(machine.context, &input.options, nullptr), kInvalid,
              {"plan is NULL"});
  ASSERT_OFFLOAD_OK(offload_exchange_create(machine.context, &input.options, &exchange));
  ExpectError(offload_exchange_home(exchange, 0, nullptr), kInvalid, {"rank is NULL"});
  ExpectError(offload_context_destroy(machine.context), OFFLOAD_INVALID_STATE,
              {"0 optimizers, 0 stashes and 1 exchanges", "destroy them first"});
  EXPECT_OFFLOAD_OK(offload_exchange_destroy(exchange));
  ExpectError(offload_exchange_destroy(exchange), kInvalid, {"exchange is", "has been destroyed"});
  ExpectError(offload_exchange_gather(exchange, 0, OFFLOAD_FP32, nullptr, nullptr, nullptr),
              kInvalid, {"exchange is", "has been destroyed"});
  ExpectError(offload_exchange_scatter(nullptr, 0, OFFLOAD_FP32, nullptr, nullptr, nullptr),
              kInvalid, {"exchange is NULL"});
}

// --------------------------------------------------------------------------------------- ranks --

// What a call on each of two ranks, at the same time, has returned, and its text.
struct Outcome {
  int32_t status = OFFLOAD_OK;
  std::string text;
};

void Both(const std::function<int32_t(size_t rank)>& call, Outcome (&outcomes)[2]) {
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      outcomes[rank].status = call(rank);
      outcomes[rank].text = offload_last_error();
    });
  for (std::thread& thread : threads) thread.join();
}

void ExpectOutcome(const Outcome& outcome, int32_t status, const std::vector<std::string>& words) {
  EXPECT_STREQ(offload_status_name(outcome.status), offload_status_name(status)) << outcome.text;
  for (const std::string& word : words)
    EXPECT_NE(outcome.text.find(word), std::string::npos)
        << "'" << word << "' is not in: " << outcome.text;
}

// Two ranks with two rows each; rank 0 is the home.
class TwoRanks {
 public:
  explicit TwoRanks(int32_t device = OFFLOAD_DEVICE_HOST)
      : machines_{Machine(device), Machine(device)} {
    for (size_t rank = 0; rank < 2; ++rank)
      inputs[rank].comm = comm.Table(static_cast<int32_t>(rank));
  }
  ~TwoRanks() {
    for (offload_exchange_t exchange : exchanges)
      if (exchange != nullptr) {
        EXPECT_OFFLOAD_OK(offload_exchange_destroy(exchange));
      }
    for (size_t rank = 0; rank < 2; ++rank)
      for (void* data : {parts[rank], rank == 0 ? whole : nullptr})
        EXPECT_OFFLOAD_OK(offload_device_free(context(rank), data));
  }

  void Create(Outcome (&outcomes)[2]) {
    Both(
        [&](size_t rank) {
          return offload_exchange_create(context(rank), &inputs[rank].options, &exchanges[rank]);
        },
        outcomes);
  }
  // With memory for parts, and for the whole.
  void CreateWell() {
    Outcome outcomes[2];
    Create(outcomes);
    for (const Outcome& outcome : outcomes) ExpectOutcome(outcome, OFFLOAD_OK, {});
    for (size_t rank = 0; rank < 2; ++rank)
      EXPECT_OFFLOAD_OK(offload_device_alloc(context(rank), kPartBytes, &parts[rank]));
    EXPECT_OFFLOAD_OK(offload_device_alloc(context(0), 2 * kPartBytes, &whole));
  }
  int32_t Gather(size_t rank) {
    return offload_exchange_gather(exchanges[rank], 0, OFFLOAD_FP32, parts[rank],
                                   rank == 0 ? whole : nullptr, nullptr);
  }
  // Every rank gathers what it is told to, and the whole is right.
  void ExpectThatAllWorks() {
    std::vector<float> values(24);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
    for (size_t rank = 0; rank < 2; ++rank)
      EXPECT_OFFLOAD_OK(offload_device_upload(context(rank), parts[rank], &values[12 * rank],
                                              kPartBytes, nullptr));
    Outcome outcomes[2];
    Both([&](size_t rank) { return Gather(rank); }, outcomes);
    for (const Outcome& outcome : outcomes) ExpectOutcome(outcome, OFFLOAD_OK, {});
    std::vector<float> got(24);
    EXPECT_OFFLOAD_OK(
        offload_device_download(context(0), got.data(), whole, 2 * kPartBytes, nullptr));
    EXPECT_EQ(got, values);
  }
  offload_context_t context(size_t rank) const { return machines_[rank].context; }

  static constexpr uint64_t kPartBytes = 12 * sizeof(float);
  ThreadComm comm{2};
  Input inputs[2] = {Input(0, 2), Input(2, 2)};
  offload_exchange_t exchanges[2] = {};
  void* parts[2] = {};
  void* whole = nullptr;

 private:
  Machine machines_[2];
};

struct Mismatch {
  const char* name;
  std::vector<std::string> on_rank_0;
  std::vector<std::string> on_rank_1;
  std::function<void(TwoRanks&)> spoil;
};

std::vector<Mismatch> Mismatches() {
  const std::vector<std::string> kOther = {"has another name, shape, dtype or grad_dtype",
                                           "in the same order on all ranks", "(weight): rank 1"};
  std::vector<std::string> seen_from_1 = kOther;
  seen_from_1[2] = "(weight): rank 0";
  return {
      {"Name",
       kOther,
       {kOther[0], "matrices[0] (bias): rank 0"},
       [](TwoRanks& r) { r.inputs[1].matrix.name = "bias"; }},
      {"Dtype", kOther, seen_from_1, [](TwoRanks& r) { r.inputs[1].matrix.dtype = OFFLOAD_FP32; }},
      {"GradDtype", kOther, seen_from_1,
       [](TwoRanks& r) { r.inputs[1].matrix.grad_dtype = OFFLOAD_FP16; }},
      {"Shape", kOther, seen_from_1, [](TwoRanks& r) { r.inputs[1].shape[0] = 5; }},
      {"Dimensions", kOther, seen_from_1,
       [](TwoRanks& r) {
         r.inputs[1].shard.dimensions = 3;
         r.inputs[1].sizes[2] = 1;
         r.inputs[1].offsets[2] = 0;
       }},
      {"Count",
       {"options.matrix_count is 1, but 2 on rank 1"},
       {"options.matrix_count is 2, but 1 on rank 0"},
       [](TwoRanks& r) {
         static offload_exchange_matrix_t twice[2];
         twice[0] = twice[1] = r.inputs[1].matrix;
         r.inputs[1].options.matrix_count = 2;
         r.inputs[1].options.matrices = twice;
       }},
      {"Overlap",
       {"matrices[0] (weight): the parts of ranks 0 and 1 overlap, but are not the same"},
       {"the parts of ranks 0 and 1 overlap"},
       [](TwoRanks& r) { r.inputs[1].offsets[0] = 1; }},
      {"LeftOut",
       {"matrices[0] (weight): the parts of all ranks have 18 of its 24 elements"},
       {"18 of its 24 elements", "give each element to a rank"},
       [](TwoRanks& r) { r.inputs[1].sizes[0] = 1; }},
      // The same part twice is one part.
      {"LeftOutByBoth",
       {"the parts of all ranks have 12 of its 24 elements"},
       {"12 of its 24 elements"},
       [](TwoRanks& r) { r.inputs[1].offsets[0] = 0; }},
  };
}

class ExchangeMismatchTest : public ::testing::TestWithParam<Mismatch> {};
INSTANTIATE_TEST_SUITE_P(, ExchangeMismatchTest, ::testing::ValuesIn(Mismatches()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(ExchangeMismatchTest, IsRefusedOnAllRanks) {
  TwoRanks ranks;
  GetParam().spoil(ranks);
  Outcome outcomes[2];
  ranks.Create(outcomes);
  ExpectOutcome(outcomes[0], OFFLOAD_INVALID_ARGUMENT, GetParam().on_rank_0);
  ExpectOutcome(outcomes[1], OFFLOAD_INVALID_ARGUMENT, GetParam().on_rank_1);
}

TEST(ExchangeTest, ARefusalOnOneRankEndsTheCallOfTheOthers) {
  TwoRanks ranks;
  ranks.inputs[1].matrix.reserved = 1;
  Outcome outcomes[2];
  ranks.Create(outcomes);
  ExpectOutcome(outcomes[0], OFFLOAD_COMM_FAILED,
                {"rank 0 of 2: offload_exchange_create has failed on rank 1", "says why"});
  ExpectOutcome(outcomes[1], OFFLOAD_UNSUPPORTED, {"reserved is 1"});
}

TEST(ExchangeTest, ARankThatDoesNotCreateIsMissed) {
  TwoRanks ranks;
  ranks.inputs[0].options.comm_timeout_ns = kShortNs;
  ExpectError(
      offload_exchange_create(ranks.context(0), &ranks.inputs[0].options, &ranks.exchanges[0]),
      OFFLOAD_COMM_FAILED,
      {"rank 0 of 2: comm.max", "did not answer within 0.1 s (options.comm_timeout_ns)"});
}

// Of two calls at once: neither the home nor a sender waits for ever, and nothing works any more.
TEST(ExchangeTest, ARankThatDoesNotGatherIsMissed) {
  for (const int32_t device : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    for (const size_t rank : {0, 1}) {
      TwoRanks ranks(device);
      for (Input& input : ranks.inputs) input.options.comm_timeout_ns = kShortNs;
      ranks.inputs[1 - rank].options.comm_timeout_ns = kLongNs;
      ranks.CreateWell();
      ExpectError(ranks.Gather(rank), OFFLOAD_COMM_FAILED,
                  {"rank " + std::to_string(rank) +
                   " of 2: comm.exchange: another rank did not "
                   "answer within 0.1 s (options.comm_timeout_ns)"});
      ExpectError(ranks.Gather(rank), OFFLOAD_POISONED,
                  {"an earlier call of this exchange failed, destroy it: rank"});
      int32_t home = -1;
      EXPECT_OFFLOAD_OK(offload_exchange_home(ranks.exchanges[rank], 0, &home));
      EXPECT_EQ(home, 0);
    }
  }
}

TEST(ExchangeTest, ARankThatDiesEndsTheCallOfTheOthers) {
  TwoRanks ranks;
  ranks.CreateWell();
  ranks.comm.Inject(1, ranks.comm.calls(1), ThreadComm::Fault::kDie);
  Outcome outcomes[2];
  Both([&](size_t rank) { return ranks.Gather(rank); }, outcomes);
  for (const Outcome& outcome : outcomes)
    ExpectOutcome(outcome, OFFLOAD_COMM_FAILED, {"comm.exchange returned 31"});
}

TEST(ExchangeTest, AnExceptionOfTheTableIsAFailure) {
  TwoRanks ranks;
  for (Input& input : ranks.inputs)
    input.comm.exchange = [](void*, const offload_message_t*, uint32_t, offload_stream_t,
                             int64_t) -> int32_t { throw 7; };
  ranks.CreateWell();
  for (const size_t rank : {0, 1}) {
    ExpectError(ranks.Gather(rank), OFFLOAD_COMM_FAILED,
                {"comm.exchange", "the function ended in an exception of unknown type"});
    ExpectError(ranks.Gather(rank), OFFLOAD_POISONED, {"comm.exchange"});
  }
}

// ----------------------------------------------------------------------------------- arguments --

TEST(ExchangeTest, ArgumentsThatAreWrongAreRefusedAndChangeNothing) {
  constexpr int32_t kInvalid = OFFLOAD_INVALID_ARGUMENT;
  for (const int32_t device : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    TwoRanks ranks(device);
    ranks.CreateWell();
    const offload_exchange_t home = ranks.exchanges[0], other = ranks.exchanges[1];
    void* const part = ranks.parts[0];
    int32_t rank = 77;
    ExpectError(offload_exchange_home(home, 1, &rank), kInvalid,
                {"matrix is 1, expected less than 1"});
    EXPECT_EQ(rank, 77);
    for (const auto call : {offload_exchange_gather, offload_exchange_scatter}) {
      // The order of part and whole differs; both are wrong, or neither.
      ExpectError(call(home, 3, OFFLOAD_FP32, part, part, nullptr), kInvalid,
                  {"matrix is 3, expected less than 1"});
      ExpectError(call(home, 0, OFFLOAD_FP16, part, part, nullptr), kInvalid,
                  {"dtype is fp16 (3), expected bf16 of params or fp32 of gradients", "(weight)"});
      ExpectError(call(home, 0, 99, part, part, nullptr), kInvalid, {"dtype is unknown (99)"});
      ExpectError(call(home, 0, OFFLOAD_FP32, part, part, &rank), kInvalid, {"stream is"});
      ExpectError(call(home, 0, OFFLOAD_FP32, nullptr, nullptr, nullptr), kInvalid,
                  {"part: ", device == OFFLOAD_DEVICE_HOST ? "48 bytes at NULL" : "48 bytes"});
      ExpectError(call(other, 0, OFFLOAD_FP32, nullptr, nullptr, nullptr), kInvalid, {"part: "});
      ExpectError(call(home, 0, OFFLOAD_FP32, ranks.whole, ranks.whole, nullptr), kInvalid,
                  {"(48 bytes) overlaps whole at", "(96 bytes)", "memory of its own"});
    }
    ExpectError(offload_exchange_gather(home, 0, OFFLOAD_FP32, part, nullptr, nullptr), kInvalid,
                {"whole: ", "96 bytes"});
    ExpectError(offload_exchange_scatter(home, 0, OFFLOAD_FP32, nullptr, part, nullptr), kInvalid,
                {"whole: ", "96 bytes"});
    ranks.ExpectThatAllWorks();
  }
}

// -------------------------------------------------------------------------------------- memory --

uint64_t DeviceBytesUsed(offload_context_t context) {
  auto info = Make<offload_context_info_t>();
  EXPECT_OFFLOAD_OK(offload_context_get_info(context, &info));
  return info.device_memory_bytes - info.device_memory_free_bytes;
}
uint64_t PinnedBytes(offload_context_t context) {
  auto info = Make<offload_context_info_t>();
  EXPECT_OFFLOAD_OK(offload_context_get_info(context, &info));
  return info.pinned_bytes;
}

// A home has room for the matrix, another rank for its part; none is left after destroy.
TEST(ExchangeTest, ThePlanTellsTheMemoryOfMessages) {
  TwoRanks ranks(OFFLOAD_DEVICE_SIM);
  offload_exchange_plan_t plans[2];
  for (size_t rank = 0; rank < 2; ++rank) {
    plans[rank] = Make<offload_exchange_plan_t>();
    EXPECT_OFFLOAD_OK(
        offload_exchange_plan(ranks.context(rank), &ranks.inputs[rank].options, &plans[rank]));
    EXPECT_EQ(DeviceBytesUsed(ranks.context(rank)), 0u);
  }
  EXPECT_EQ(plans[0].home_count, 1u);
  EXPECT_EQ(plans[0].home_elements, 24u);
  EXPECT_EQ(plans[0].device_bytes, 24u * 4);
  EXPECT_EQ(plans[0].host_bytes, 24u * 4);
  EXPECT_EQ(plans[1].home_count, 0u);
  EXPECT_EQ(plans[1].home_elements, 0u);
  EXPECT_EQ(plans[1].device_bytes, 0u);
  EXPECT_EQ(plans[1].host_bytes, 12u * 4);
  Outcome outcomes[2];
  ranks.Create(outcomes);
  EXPECT_GE(DeviceBytesUsed(ranks.context(0)), plans[0].device_bytes);
  EXPECT_EQ(DeviceBytesUsed(ranks.context(1)), 0u);
  for (size_t rank = 0; rank < 2; ++rank) {
    EXPECT_GE(PinnedBytes(ranks.context(rank)), plans[rank].host_bytes);
    EXPECT_OFFLOAD_OK(offload_exchange_destroy(ranks.exchanges[rank]));
    ranks.exchanges[rank] = nullptr;
    EXPECT_EQ(DeviceBytesUsed(ranks.context(rank)), 0u);
    EXPECT_EQ(PinnedBytes(ranks.context(rank)), 0u);
  }
}

TEST(ExchangeTest, AMatrixThatHasNoRoomFailsOnAllRanks) {
  TwoRanks ranks(OFFLOAD_DEVICE_SIM);
  void* taken = nullptr;
  EXPECT_OFFLOAD_OK(offload_device_alloc(ranks.context(0), (1 << 20) - 64, &taken));
  Outcome outcomes[2];
  ranks.Create(outcomes);
  ExpectOutcome(outcomes[0], OFFLOAD_OUT_OF_DEVICE_MEMORY, {"96"});
  ExpectOutcome(outcomes[1], OFFLOAD_COMM_FAILED, {"has failed on rank 0"});
  EXPECT_OFFLOAD_OK(offload_device_free(ranks.context(0), taken));
}

TEST(ExchangeTest, MessagesCountTowardsThePinnedMemory) {
  Machine machine(OFFLOAD_DEVICE_SIM, [](auto& options) { options.pinned_bytes_max = 1; });
  ThreadComm comm(2);
  Input input(0, 2);
  input.comm = comm.Table(0);
  comm.Inject(0, 0, ThreadComm::Fault::kFail);
  offload_exchange_t exchange = nullptr;
  ExpectError(offload_exchange_create(machine.context, &input.options, &exchange),
              OFFLOAD_INVALID_ARGUMENT,
              {"options.pinned_bytes_max of the context is 1", "make the largest matrix smaller"});
}

// ------------------------------------------------------------------------------- stuck streams --

TEST(ExchangeTest, AStreamThatIsStuckIsGivenUp) {
  Machine machine(OFFLOAD_DEVICE_SIM, [](auto& options) { options.device_timeout_ns = kShortNs; });
  ThreadComm comm(1);
  Input input;
  input.comm = comm.Table(0);
  offload_exchange_t exchange = nullptr;
  ASSERT_OFFLOAD_OK(offload_exchange_create(machine.context, &input.options, &exchange));
  void *part = nullptr, *whole = nullptr;
  EXPECT_OFFLOAD_OK(offload_device_alloc(machine.context, 96, &part));
  EXPECT_OFFLOAD_OK(offload_device_alloc(machine.context, 96, &whole));
  Gate gate;
  EXPECT_OFFLOAD_OK(offload_stream_run(machine.context, nullptr, Gate::Hold, &gate));
  ExpectError(offload_exchange_gather(exchange, 0, OFFLOAD_FP32, part, whole, nullptr),
              OFFLOAD_DEVICE_FAILED,
              {"the stream made no progress for 0.1 s", "keep part and whole until the stream is"});
  ExpectError(offload_exchange_scatter(exchange, 0, OFFLOAD_FP32, whole, part, nullptr),
              OFFLOAD_POISONED, {"an earlier call of this exchange failed"});
  ExpectError(offload_exchange_destroy(exchange), OFFLOAD_DEVICE_FAILED,
              {"the exchange keeps its memory for messages for ever"});
  gate.open = true;
  EXPECT_OFFLOAD_OK(offload_stream_synchronize(machine.context, nullptr, -1));
  machine.left_behind = true;
}

}  // namespace
}  // namespace hybridopt
