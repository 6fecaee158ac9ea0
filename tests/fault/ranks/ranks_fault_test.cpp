// Ranks that die, hang, fail or never come: within the timeout the others get an error that names
// rank, call and timeout; nothing has changed on any rank; handles can be destroyed; each failure
// is logged once.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../../differential/sharded.h"
#include "../../temporary_directory.h"
#include "../../thread_comm.h"
#include "../trainer.h"

namespace hybridopt {
namespace {

using Fault = ThreadComm::Fault;

constexpr uint32_t kWorld = 3;
constexpr uint32_t kBad = 1;  // the rank with the fault
constexpr uint64_t kTimeoutNs = 1'000'000'000;
constexpr int64_t kLongNs = 60'000'000'000;  // only a hang takes this long
constexpr size_t kSteps = 4;

::testing::AssertionResult Says(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << '"' << text << "\" lacks \"" << part << '"';
}

// Rank numbers as the texts give them.
std::string RankText(uint32_t rank) {
  return "rank " + std::to_string(rank) + " of " + std::to_string(kWorld) + ": ";
}
std::string TimeoutText(const char* call) {
  return std::string("comm.") + call +
         ": another rank did not answer within 1.0 s (options.comm_timeout_ns)";
}

// Three ranks that share a model.
class RanksFaultTest : public ::testing::TestWithParam<int32_t> {
 protected:
  void SetUp() override {
    sharded_ = RandomSharded(OFFLOAD_ADAMW, kWorld, kSteps, 5);
    for (uint32_t rank = 0; rank < kWorld; ++rank) Create(rank);
  }

  void Create(uint32_t rank) {
    ContextSetting context;
    context.device_kind = GetParam();
    context.threads = 2;
    context.device_timeout_ns = kLongNs;
    ranks_[rank] =
        std::make_unique<ShardedRank>(*sharded_, rank, comm_.Table(static_cast<int32_t>(rank)),
                                      context, OptimizerSetting{0.5, 1024, 2}, 0, kTimeoutNs);
  }

  offload_optimizer_t Handle(uint32_t rank) { return ranks_[rank]->rig().handle(); }

  // Every step calls the other ranks.
  StepInput Input(uint32_t rank, size_t step) const {
    StepInput input = ranks_[rank]->local().steps[step];
    input.flags = 0;
    return input;
  }
  void Queue(uint32_t rank, size_t step) { ranks_[rank]->Queue(Input(rank, step)); }
  void QueueAll(size_t step) {
    for (uint32_t rank = 0; rank < kWorld; ++rank) Queue(rank, step);
  }
  int32_t Wait(uint32_t rank) { return offload_optimizer_wait(Handle(rank), 0, kLongNs); }

  // A step that all ranks make.
  void GoodStep(size_t step) {
    QueueAll(step);
    for (uint32_t rank = 0; rank < kWorld; ++rank)
      ASSERT_EQ(Wait(rank), OFFLOAD_OK) << offload_last_error();
  }

  // The rank's queued step has failed with this text and has changed nothing; the handle is
  // poisoned with the same text, and queries still answer.
  void ExpectFailed(uint32_t rank, const std::string& text, const Bytes& before) {
    EXPECT_EQ(Wait(rank), OFFLOAD_COMM_FAILED);
    EXPECT_TRUE(Says(offload_last_error(), RankText(rank) + text));
    auto result = Make<offload_step_result_t>();
    EXPECT_EQ(offload_optimizer_step_result(Handle(rank), 0, &result), OFFLOAD_COMM_FAILED);
    EXPECT_EQ(offload_optimizer_step(Handle(rank), nullptr, nullptr), OFFLOAD_POISONED);
    EXPECT_TRUE(Says(offload_last_error(), RankText(rank) + text));
    EXPECT_EQ(ranks_[rank]->Bits(), before) << "rank " << rank;
    auto stats = Make<offload_stats_t>();
    EXPECT_EQ(offload_optimizer_get_stats(Handle(rank), &stats), OFFLOAD_OK);
    EXPECT_EQ(stats.steps_skipped, 0u);
  }

  // The second step's call hangs on one rank. The other ranks can be destroyed while it hangs.
  void HangIn(uint64_t call, const char* name) {
    comm_.Inject(kBad, call, Fault::kHang);
    GoodStep(0);
    const std::vector<Bytes> before = AllBits();
    QueueAll(1);
    for (uint32_t rank : {0u, 2u}) {
      ExpectFailed(rank, TimeoutText(name), before[rank]);
      ranks_[rank].reset();
    }
    EXPECT_EQ(offload_optimizer_wait(Handle(kBad), 0, 1), OFFLOAD_TIMED_OUT);
    comm_.Release();
    ExpectFailed(kBad, TimeoutText(name), before[kBad]);
  }

  void DieIn(uint64_t call, const char* name) {
    comm_.Inject(kBad, call, Fault::kDie);
    GoodStep(0);
    const std::vector<Bytes> before = AllBits();
    QueueAll(1);
    const std::string text =
        std::string("comm.") + name + " returned 31; another rank has failed or is gone";
    for (uint32_t rank = 0; rank < kWorld; ++rank) ExpectFailed(rank, text, before[rank]);
  }

  std::vector<Bytes> AllBits() const {
    std::vector<Bytes> bits;
    for (const auto& rank : ranks_) bits.push_back(rank->Bits());
    return bits;
  }

  std::unique_ptr<Sharded> sharded_;
  ThreadComm comm_{kWorld};
  std::unique_ptr<ShardedRank> ranks_[kWorld];
};

INSTANTIATE_TEST_SUITE_P(Devices, RanksFaultTest,
                         ::testing::Values(OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM),
                         [](const auto& info) {
                           return info.param == OFFLOAD_DEVICE_HOST ? "Host" : "Sim";
                         });

TEST_P(RanksFaultTest, ARankThatNeverStepsTimesTheOthersOut) {
  GoodStep(0);
  const std::vector<Bytes> before = AllBits();
  for (uint32_t rank : {0u, 2u}) Queue(rank, 1);
  for (uint32_t rank : {0u, 2u}) ExpectFailed(rank, TimeoutText("sum"), before[rank]);
  // A rank that comes too late finds no other rank.
  Queue(kBad, 1);
  ExpectFailed(kBad, TimeoutText("sum"), before[kBad]);
}

// This rank's table does not even keep its own timeout.
TEST_P(RanksFaultTest, ARankThatHangsInTheSumTimesTheOthersOut) { HangIn(2, "sum"); }
TEST_P(RanksFaultTest, ARankThatHangsInTheMaxTimesTheOthersOut) { HangIn(3, "max"); }

TEST_P(RanksFaultTest, ARankThatDiesInTheSumFailsTheOthersAtOnce) { DieIn(2, "sum"); }
// All ranks have the sum by now, and still no rank steps.
TEST_P(RanksFaultTest, ARankThatDiesBetweenSumAndMaxLeavesNobodyHalfDone) { DieIn(3, "max"); }

// Every other number that a function returns is a failure of the other ranks, and never OK.
TEST_P(RanksFaultTest, AnyOtherStatusIsAFailure) {
  const int32_t statuses[] = {OFFLOAD_INVALID_ARGUMENT, 999, -1};
  for (uint32_t rank = 0; rank < kWorld; ++rank)
    comm_.Inject(static_cast<int32_t>(rank), 0, Fault::kFail, statuses[rank]);
  const std::vector<Bytes> before = AllBits();
  QueueAll(0);
  for (uint32_t rank = 0; rank < kWorld; ++rank)
    ExpectFailed(rank, "comm.sum returned " + std::to_string(statuses[rank]), before[rank]);
}

// Completed steps stay completed, steps after the failure do not begin.
TEST_P(RanksFaultTest, QueuedStepsBehindAFailureAreNotBegun) {
  comm_.Inject(kBad, 2, Fault::kDie);
  std::vector<offload_ticket_t> tickets;
  for (size_t step = 0; step < 3; ++step) {
    const size_t block = step == 0 ? 0 : ranks_[0]->rig().AddBlock(step);
    tickets.push_back(ranks_[0]->Queue(Input(0, step), block));
  }
  for (uint32_t rank : {1u, 2u}) Queue(rank, 0);
  EXPECT_EQ(offload_optimizer_wait(Handle(0), tickets[0], kLongNs), OFFLOAD_OK);
  for (uint32_t rank : {1u, 2u}) EXPECT_EQ(Wait(rank), OFFLOAD_OK);
  for (uint32_t rank : {1u, 2u}) Queue(rank, 1);
  for (size_t step : {1, 2})
    EXPECT_EQ(offload_optimizer_wait(Handle(0), tickets[step], kLongNs), OFFLOAD_COMM_FAILED);
  auto stats = Make<offload_stats_t>();
  MUST(offload_optimizer_get_stats(Handle(0), &stats));
  EXPECT_EQ(stats.steps_applied, 1u);
  EXPECT_EQ(comm_.calls(0), 3u);
  // The bits after the first step, from a run without failures.
  const Bytes got = ranks_[0]->Bits();
  ThreadComm good(kWorld);
  std::unique_ptr<ShardedRank> others[kWorld];
  ContextSetting context;
  context.device_kind = GetParam();
  for (uint32_t rank = 0; rank < kWorld; ++rank)
    others[rank] =
        std::make_unique<ShardedRank>(*sharded_, rank, good.Table(static_cast<int32_t>(rank)),
                                      context, OptimizerSetting{0.5, 1024, 2});
  for (uint32_t rank = 0; rank < kWorld; ++rank) others[rank]->Queue(Input(rank, 0));
  for (auto& other : others) MUST(offload_optimizer_wait(other->rig().handle(), 0, kLongNs));
  EXPECT_EQ(got, others[0]->Bits());
}

// A stream that waits for the step must not wait for ever.
TEST_P(RanksFaultTest, StreamsThatWaitAreReleased) {
  if (GetParam() == OFFLOAD_DEVICE_HOST) GTEST_SKIP() << "its only stream is the caller's thread";
  for (uint32_t rank : {0u, 2u}) {
    Queue(rank, 0);
    MUST(offload_optimizer_stream_wait(Handle(rank), 0, nullptr, nullptr, 0));
  }
  for (uint32_t rank : {0u, 2u}) {
    EXPECT_EQ(offload_stream_synchronize(ranks_[rank]->context(), nullptr, kLongNs), OFFLOAD_OK);
    EXPECT_EQ(Wait(rank), OFFLOAD_COMM_FAILED);
  }
}

// The opposite case: a rank whose device fails does not come, and the other ranks get an error.
TEST_P(RanksFaultTest, ARankWhoseDeviceFailsTimesTheOthersOut) {
  if (GetParam() == OFFLOAD_DEVICE_HOST) GTEST_SKIP() << "host memory cannot be taken away";
  const std::vector<Bytes> before = AllBits();
  for (uint32_t rank : {0u, 2u}) Queue(rank, 0);
  Rig& rig = ranks_[kBad]->rig();
  const size_t block = rig.AddBlock(9);
  ranks_[kBad]->Put(Input(kBad, 0), block);
  rig.FreeBlock(block);  // gradients that are gone when the step comes to them
  rig.Queue(Input(kBad, 0));
  EXPECT_EQ(Wait(kBad), OFFLOAD_DEVICE_FAILED);
  for (uint32_t rank : {0u, 2u}) ExpectFailed(rank, TimeoutText("sum"), before[rank]);
}

// ------------------------------------------------------------------------------- bad arguments --

int32_t Nothing(void*, int64_t) { return OFFLOAD_OK; }
int32_t NoSum(void*, double*, uint32_t, int64_t) { return OFFLOAD_OK; }
int32_t NoMax(void*, int32_t*, uint32_t, int64_t) { return OFFLOAD_OK; }

struct Arguments {
  offload_comm_t comm = Make<offload_comm_t>();
  offload_optimizer_options_t options = Make<offload_optimizer_options_t>();
};

struct Row {
  const char* name;
  int32_t code;
  std::vector<std::string> texts;
  std::function<void(Arguments&)> spoil;
};

class RanksInputTest : public ::testing::TestWithParam<Row> {};

TEST_P(RanksInputTest, IsRefusedWithItsReason) {
  const TestContext context({});
  Arguments arguments;
  arguments.comm.rank = 1;
  arguments.comm.world = 2;
  arguments.comm.sum = NoSum;
  arguments.comm.max = NoMax;
  arguments.comm.barrier = Nothing;
  arguments.options.algorithm = OFFLOAD_ADAMW;
  arguments.options.comm = &arguments.comm;
  GetParam().spoil(arguments);
  offload_optimizer_t optimizer = nullptr;
  EXPECT_EQ(offload_optimizer_create(context.handle(), &arguments.options, &optimizer),
            GetParam().code);
  if (GetParam().code == OFFLOAD_OK) {
    MUST(offload_optimizer_destroy(optimizer));
    return;
  }
  EXPECT_EQ(optimizer, nullptr);
  for (const std::string& text : GetParam().texts) EXPECT_TRUE(Says(offload_last_error(), text));
}

INSTANTIATE_TEST_SUITE_P(
    Rows, RanksInputTest,
    ::testing::Values(Row{"Good", OFFLOAD_OK, {}, [](Arguments&) {}},
                      Row{"RankIsWorld",
                          OFFLOAD_INVALID_ARGUMENT,
                          {"comm.rank is 2 and comm.world is 2", "0 <= rank < world"},
                          [](Arguments& a) { a.comm.rank = 2; }},
                      Row{"RankNegative",
                          OFFLOAD_INVALID_ARGUMENT,
                          {"comm.rank is -1", "0 <= rank < world"},
                          [](Arguments& a) { a.comm.rank = -1; }},
                      Row{"WorldZero",
                          OFFLOAD_INVALID_ARGUMENT,
                          {"comm.world is 0", "0 <= rank < world"},
                          [](Arguments& a) { a.comm.rank = a.comm.world = 0; }},
                      Row{"SumNull",
                          OFFLOAD_INVALID_ARGUMENT,
                          {"comm.sum is NULL", "expected a function"},
                          [](Arguments& a) { a.comm.sum = nullptr; }},
                      Row{"MaxNull",
                          OFFLOAD_INVALID_ARGUMENT,
                          {"comm.max is NULL", "expected a function"},
                          [](Arguments& a) { a.comm.max = nullptr; }},
                      Row{"BarrierNull",
                          OFFLOAD_INVALID_ARGUMENT,
                          {"comm.barrier is NULL", "expected a function"},
                          [](Arguments& a) { a.comm.barrier = nullptr; }},
                      Row{"Reserved",
                          OFFLOAD_UNSUPPORTED,
                          {"comm.reserved is 3", "expected 0"},
                          [](Arguments& a) { a.comm.reserved = 3; }},
                      Row{"Reserved1",
                          OFFLOAD_UNSUPPORTED,
                          {"comm.reserved1 is 4", "expected 0"},
                          [](Arguments& a) { a.comm.reserved1 = 4; }},
                      Row{"ExchangeOnHost",
                          OFFLOAD_INVALID_ARGUMENT,
                          {"comm.exchange_on_host is -1", "expected 0 or 1"},
                          [](Arguments& a) { a.comm.exchange_on_host = -1; }},
                      // A table without an exchange, as those of older callers.
                      Row{"StructSizeOld",
                          OFFLOAD_OK,
                          {},
                          [](Arguments& a) {
                            a.comm.struct_size = offsetof(offload_comm_t, exchange);
                          }},
                      Row{"StructSizeZero",
                          OFFLOAD_INVALID_ARGUMENT,
                          {"options.comm.struct_size is 0"},
                          [](Arguments& a) { a.comm.struct_size = 0; }},
                      // An older caller's table ends before its functions: they read as NULL.
                      Row{"StructSizeShort",
                          OFFLOAD_INVALID_ARGUMENT,
                          {"comm.sum is NULL"},
                          [](Arguments& a) { a.comm.struct_size = offsetof(offload_comm_t, sum); }},
                      Row{"TimeoutTooLong",
                          OFFLOAD_INVALID_ARGUMENT,
                          {"options.comm_timeout_ns is 9223372036854775808", "at most 2^63 - 1"},
                          [](Arguments& a) { a.options.comm_timeout_ns = uint64_t{1} << 63; }},
                      Row{"TimeoutLongest",
                          OFFLOAD_OK,
                          {},
                          [](Arguments& a) { a.options.comm_timeout_ns = INT64_MAX; }}),
    [](const auto& info) { return info.param.name; });

// Half a norm would clip differently on every rank.
TEST(RanksClipTest, ClippingAPartOfATensorNeedsATable) {
  const auto sharded = RandomSharded(OFFLOAD_ADAMW, 2, 1, 3);
  const TestContext context({});
  for (bool with_table : {false, true}) {
    ThreadComm comm(1);
    const offload_comm_t table = comm.Table(0);
    std::vector<offload_shard_t> shards;
    RankSetting setting;
    setting.comm = with_table ? &table : nullptr;
    for (size_t id = 0; id < sharded->whole.params.size(); ++id)
      shards.push_back(sharded->piece(id, 0).Abi());
    for (const offload_shard_t& shard : shards) setting.shards.push_back(&shard);
    Rig rig(context, sharded->local(0), {}, setting);
    auto options = Make<offload_step_options_t>();
    options.grad_norm_max = 1;
    if (with_table) {
      MUST(offload_optimizer_step(rig.handle(), &options, nullptr));
      continue;
    }
    EXPECT_EQ(offload_optimizer_step(rig.handle(), &options, nullptr), OFFLOAD_INVALID_ARGUMENT);
    EXPECT_TRUE(Says(offload_last_error(), "options.grad_norm_max is 1"));
    EXPECT_TRUE(Says(offload_last_error(), "is a part of its tensor"));
    EXPECT_TRUE(Says(offload_last_error(), "give a comm table at create"));
  }
}

// -------------------------------------------------------------------------- what is logged --

// The errors that the library has logged since Clear().
class Errors {
 public:
  static void Log(void*, int32_t level, const char* text) {
    if (level != OFFLOAD_LOG_ERROR) return;
    std::lock_guard lock(mutex_);
    texts_.emplace_back(text);
  }
  static void Clear() {
    std::lock_guard lock(mutex_);
    texts_.clear();
  }
  static std::vector<std::string> Texts() {
    std::lock_guard lock(mutex_);
    return texts_;
  }

 private:
  static inline std::mutex mutex_;
  static inline std::vector<std::string> texts_;
};

// Two ranks of one process, each with a trained optimizer of its own params.
class TwoRanks {
 public:
  TwoRanks() {
    for (int32_t rank = 0; rank < 2; ++rank) {
      fault::RunOptions run;
      run.device_kind = OFFLOAD_DEVICE_HOST;
      run.comm = &tables_[rank];
      run.name_prefix = rank == 0 ? "a" : "b";
      run.log = Errors::Log;
      trainers_.push_back(std::make_unique<fault::Trainer>(run));
      trainers_.back()->AddParams();
      trainers_.back()->Commit();
      trainers_.back()->UploadGrads(0);
    }
    Step();
    EXPECT_TRUE(Ends());
  }

  // A call may be refused, if an earlier one has failed already.
  void Step() {
    for (const auto& trainer : trainers_)
      (void)offload_optimizer_step(trainer->optimizer, nullptr, nullptr);
  }
  void Save(const std::string& path) {
    auto options = Make<offload_save_options_t>();
    options.path = path.c_str();
    for (const auto& trainer : trainers_)
      (void)offload_optimizer_save(trainer->optimizer, &options, nullptr);
  }
  void Load(const std::string& path) {
    auto options = Make<offload_load_options_t>();
    options.path = path.c_str();
    for (const auto& trainer : trainers_)
      (void)offload_optimizer_load(trainer->optimizer, &options, nullptr);
  }
  // From the call with this number on, counted from now, rank 1 is gone.
  void Lose(uint64_t call) { comm_.Inject(1, comm_.calls(1) + call, ThreadComm::Fault::kDie); }

  // Waits for both ranks. Returns whether everything was done.
  bool Ends() {
    bool done = true;
    for (const auto& trainer : trainers_)
      done = fault::WaitOrAbort(trainer->optimizer, 0) == OFFLOAD_OK && done;
    return done;
  }

 private:
  ThreadComm comm_{2};
  const offload_comm_t tables_[2] = {comm_.Table(0), comm_.Table(1)};
  std::vector<std::unique_ptr<fault::Trainer>> trainers_;
};

// The work that is queued while a rank is lost.
enum class Work { kSave, kLoad, kSaveAndStep };

class RanksLogTest : public testing::TestWithParam<Work> {
 protected:
  // Queues the work, whose call `call` to the other rank fails. Returns whether it was done all the
  // same. Everything has ended and is destroyed then.
  bool Run(uint64_t call) {
    TwoRanks ranks;
    const std::string path = directory_ / ("saved" + std::to_string(call));
    if (GetParam() == Work::kLoad) {
      ranks.Save(path);
      EXPECT_TRUE(ranks.Ends());
    }
    Errors::Clear();
    ranks.Lose(call);
    if (GetParam() == Work::kLoad)
      ranks.Load(path);
    else
      ranks.Save(path);
    if (GetParam() == Work::kSaveAndStep) ranks.Step();
    return ranks.Ends();
  }

  const TemporaryDirectory directory_;
};

std::string NameOfWork(const testing::TestParamInfo<Work>& info) {
  const char* const names[] = {"Save", "Load", "SaveAndStep"};
  return names[static_cast<size_t>(info.param)];
}

INSTANTIATE_TEST_SUITE_P(Works, RanksLogTest,
                         testing::Values(Work::kSave, Work::kLoad, Work::kSaveAndStep), NameOfWork);

TEST_P(RanksLogTest, IsToldOnceOfWhatEndsAnOptimizer) {
  constexpr uint64_t kCallsLeast = 3, kCallsMost = 1000;
  uint64_t call = 0;
  for (; call < kCallsMost && !Run(call); ++call) {
    std::vector<std::string> texts = Errors::Texts();
    EXPECT_GE(texts.size(), 2u) << "call " << call << ": each rank has failed";
    std::sort(texts.begin(), texts.end());
    const auto twice = std::adjacent_find(texts.begin(), texts.end());
    EXPECT_TRUE(twice == texts.end()) << "call " << call << ", twice: " << *twice;
  }
  EXPECT_GE(call, kCallsLeast);
  EXPECT_LT(call, kCallsMost);
  EXPECT_TRUE(Errors::Texts().empty()) << Errors::Texts()[0];  // of the run without a failure
}

}  // namespace
}  // namespace hybridopt
