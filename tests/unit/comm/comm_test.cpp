// Comm: the arguments of the caller's functions, and what is done with their results.
#include "comm/comm.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

namespace hybridopt {
namespace {

// A table that records its calls and returns the values of the test.
struct FakeRanks {
  offload_comm_t Table() {
    offload_comm_t table{};
    table.struct_size = sizeof(table);
    table.rank = 1;
    table.world = 3;
    table.user = this;
    table.sum = [](void* user, double* values, uint32_t count, int64_t timeout_ns) {
      auto& fake = *static_cast<FakeRanks*>(user);
      fake.calls.push_back("sum");
      fake.timeouts_ns.push_back(timeout_ns);
      EXPECT_EQ(count, 1u);
      fake.summand = *values;
      *values += fake.others_sum;
      return fake.sum_status;
    };
    table.max = [](void* user, int32_t* values, uint32_t count, int64_t timeout_ns) {
      auto& fake = *static_cast<FakeRanks*>(user);
      fake.calls.push_back("max");
      fake.timeouts_ns.push_back(timeout_ns);
      EXPECT_EQ(count, 1u);
      fake.flag = *values;
      *values = std::max(*values, fake.others_max);
      if (fake.in_max) fake.in_max();
      return fake.max_status;
    };
    table.barrier = [](void* user, int64_t) {
      static_cast<FakeRanks*>(user)->calls.push_back("barrier");
      return int32_t{OFFLOAD_OK};
    };
    return table;
  }

  double others_sum = 0;
  int32_t others_max = 0;
  int32_t sum_status = OFFLOAD_OK;
  int32_t max_status = OFFLOAD_OK;
  std::vector<std::string> calls;
  std::vector<int64_t> timeouts_ns;
  double summand = -1;
  int32_t flag = -1;
  std::function<void()> in_max;
};

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(CommTest, WithoutATableThereIsOneRankAndNothingIsAsked) {
  const Comm comm;
  EXPECT_FALSE(comm.present());
  EXPECT_EQ(comm.world(), 1);
  double sum = 2;
  bool finite = true;
  EXPECT_TRUE(comm.AgreeOnNorm(&sum, &finite).ok());
  EXPECT_EQ(sum, 2);
  EXPECT_TRUE(finite);
  finite = false;
  EXPECT_TRUE(comm.AgreeOnNorm(&sum, &finite).ok());
  EXPECT_FALSE(finite);
}

TEST(CommTest, OneSumAndOneMaxWithTheTimeout) {
  FakeRanks fake;
  fake.others_sum = 3;
  const Comm comm(fake.Table(), 77);
  EXPECT_TRUE(comm.present());
  EXPECT_EQ(comm.rank(), 1);
  EXPECT_EQ(comm.world(), 3);
  double sum = 2;
  bool finite = true;
  EXPECT_TRUE(comm.AgreeOnNorm(&sum, &finite).ok());
  EXPECT_EQ(sum, 5);
  EXPECT_TRUE(finite);
  EXPECT_EQ(fake.calls, (std::vector<std::string>{"sum", "max"}));
  EXPECT_EQ(fake.timeouts_ns, (std::vector<int64_t>{77, 77}));
  EXPECT_EQ(fake.flag, 0);
}

// A library that computes sums may lose a NaN, or change an Inf: only the flag is reliable.
TEST(CommTest, ANonFiniteSumTravelsAsAFlagAlone) {
  for (double bad : {kNaN, kInf, -kInf}) {
    FakeRanks fake;
    const Comm comm(fake.Table(), 1);
    double sum = bad;
    bool finite = false;
    EXPECT_TRUE(comm.AgreeOnNorm(&sum, &finite).ok());
    EXPECT_FALSE(finite);
    EXPECT_EQ(fake.summand, 0);
    EXPECT_EQ(fake.flag, 1);
  }
}

TEST(CommTest, AnotherRanksFlagIsHeard) {
  FakeRanks fake;
  fake.others_max = 1;
  const Comm comm(fake.Table(), 1);
  double sum = 2;
  bool finite = true;
  EXPECT_TRUE(comm.AgreeOnNorm(&sum, &finite).ok());
  EXPECT_FALSE(finite);
}

// Each rank's sum is finite, but their total is not: every rank gets the same result.
TEST(CommTest, ASumThatOverflowsIsNotFinite) {
  FakeRanks fake;
  fake.others_sum = std::numeric_limits<double>::max();
  const Comm comm(fake.Table(), 1);
  double sum = std::numeric_limits<double>::max();
  bool finite = true;
  EXPECT_TRUE(comm.AgreeOnNorm(&sum, &finite).ok());
  EXPECT_FALSE(finite);
}

TEST(CommTest, FailuresNameRankAndCall) {
  const struct {
    int32_t sum_status, max_status;
    const char* text;
    size_t calls;
  } cases[] = {
      {OFFLOAD_TIMED_OUT, OFFLOAD_OK,
       "rank 1 of 3: comm.sum: another rank did not answer within 2.5 s "
       "(options.comm_timeout_ns)",
       1},
      {OFFLOAD_OK, OFFLOAD_TIMED_OUT,
       "rank 1 of 3: comm.max: another rank did not answer within 2.5 s "
       "(options.comm_timeout_ns)",
       2},
      {OFFLOAD_COMM_FAILED, OFFLOAD_OK,
       "rank 1 of 3: comm.sum returned 31; another rank has failed or is gone", 1},
      {OFFLOAD_OK, -7, "rank 1 of 3: comm.max returned -7; another rank has failed or is gone", 2},
      {1, OFFLOAD_OK, "rank 1 of 3: comm.sum returned 1; another rank has failed or is gone", 1},
      {OFFLOAD_INVALID_ARGUMENT, OFFLOAD_OK,
       "rank 1 of 3: comm.sum returned 10; another rank has failed or is gone", 1},
  };
  for (const auto& c : cases) {
    FakeRanks fake;
    fake.sum_status = c.sum_status;
    fake.max_status = c.max_status;
    const Comm comm(fake.Table(), 2'500'000'000);
    double sum = 1;
    bool finite = true;
    const Status status = comm.AgreeOnNorm(&sum, &finite);
    EXPECT_EQ(status.code(), OFFLOAD_COMM_FAILED);
    EXPECT_EQ(status.message(), c.text);
    EXPECT_EQ(fake.calls.size(), c.calls);  // nothing more is asked of ranks that have failed
  }
}

// The destroying thread has gone on meanwhile, and the caller may have freed its memory.
TEST(CommTest, ACallThatWasGivenUpHasFailedWhateverItReturns) {
  FakeRanks fake;
  const Comm comm(fake.Table(), 1);
  fake.in_max = [&] {
    while (comm.GiveUpIfStuck().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  const std::vector<std::string> calls = {"sum", "max"};
  for (int call = 0; call < 2; ++call) {
    double sum = 2;
    bool finite = true;
    const Status status = comm.AgreeOnNorm(&sum, &finite);
    EXPECT_EQ(status.code(), OFFLOAD_COMM_FAILED);
    EXPECT_NE(status.message().find("comm.max has not returned 1.0 s after its timeout"),
              std::string::npos)
        << status.message();
    EXPECT_EQ(fake.calls, calls) << "no other call is made";
  }
}

TEST(CommTest, ChecksTheTable) {
  using Table = offload_comm_t;
  const struct {
    std::function<void(Table&)> spoil;
    int32_t code;
    const char* text;
  } cases[] = {
      {[](Table&) {}, OFFLOAD_OK, ""},
      {[](Table& t) { t.rank = t.world = 0; }, OFFLOAD_INVALID_ARGUMENT,
       "comm.rank is 0 and comm.world is 0, expected 0 <= rank < world"},
      {[](Table& t) { t.rank = 3; }, OFFLOAD_INVALID_ARGUMENT,
       "comm.rank is 3 and comm.world is 3, expected 0 <= rank < world"},
      {[](Table& t) { t.rank = -1; }, OFFLOAD_INVALID_ARGUMENT,
       "comm.rank is -1 and comm.world is 3, expected 0 <= rank < world"},
      {[](Table& t) { t.world = -2; }, OFFLOAD_INVALID_ARGUMENT,
       "comm.rank is 1 and comm.world is -2, expected 0 <= rank < world"},
      {[](Table& t) { t.reserved = 5; }, OFFLOAD_UNSUPPORTED, "comm.reserved is 5, expected 0"},
      {[](Table& t) { t.sum = nullptr; }, OFFLOAD_INVALID_ARGUMENT,
       "comm.sum is NULL, expected a function"},
      {[](Table& t) { t.max = nullptr; }, OFFLOAD_INVALID_ARGUMENT,
       "comm.max is NULL, expected a function"},
      {[](Table& t) { t.barrier = nullptr; }, OFFLOAD_INVALID_ARGUMENT,
       "comm.barrier is NULL, expected a function"},
  };
  for (const auto& c : cases) {
    Table table = FakeRanks().Table();
    c.spoil(table);
    const Status status = Comm::Check(table);
    EXPECT_EQ(status.code(), c.code);
    EXPECT_EQ(status.message(), c.text);
  }
}

}  // namespace
}  // namespace hybridopt
