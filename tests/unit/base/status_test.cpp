#include "base/status.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

namespace hybridopt {
namespace {

Status Refuse() { return Status::Error(OFFLOAD_INVALID_ARGUMENT, "lr = %g: above 0 needed", -1.0); }

TEST(StatusTest, OkIsTheDefaultAndHasNoText) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), OFFLOAD_OK);
  EXPECT_EQ(status.message(), "");
}

TEST(StatusTest, AnErrorKeepsCodeAndText) {
  const Status status = Refuse();
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.code(), OFFLOAD_INVALID_ARGUMENT);
  EXPECT_EQ(status.message(), "lr = -1: above 0 needed");
}

TEST(StatusTest, ALongTextIsCutAndNotOverrun) {
  const std::string name(5000, 'x');
  const Status status = Status::Error(OFFLOAD_INTERNAL, "%s", name.c_str());
  EXPECT_EQ(status.message(), name.substr(0, 1023));
}

TEST(StatusTest, TextOfTheCallerIsNotAFormat) {
  EXPECT_EQ(Status::Error(OFFLOAD_INTERNAL, "%s", "100 %s %n").message(), "100 %s %n");
}

TEST(StatusTest, ACopyIsIndependent) {
  Status status = Refuse();
  const Status copy = status;
  status = Status();
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(copy.code(), OFFLOAD_INVALID_ARGUMENT);
  EXPECT_EQ(copy.message(), "lr = -1: above 0 needed");
}

TEST(ResultTest, HoldsAValueThatOnlyMoves) {
  Result<std::unique_ptr<int>> result = std::make_unique<int>(7);
  ASSERT_TRUE(result.ok());
  EXPECT_TRUE(result.status().ok());
  const std::unique_ptr<int> value = std::move(result.value());
  EXPECT_EQ(*value, 7);
}

TEST(ResultTest, HoldsANullPointerAsAValue) {
  EXPECT_TRUE(Result<void*>(nullptr).ok());
  EXPECT_TRUE(Result<int>(0).ok());
}

TEST(ResultTest, HoldsTheReasonForNoValue) {
  const Result<int> result = Refuse();
  EXPECT_FALSE(result.ok());
  EXPECT_EQ(result.status().code(), OFFLOAD_INVALID_ARGUMENT);
  EXPECT_EQ(result.status().message(), "lr = -1: above 0 needed");
}

TEST(ResultDeathTest, NoValueNeedsAReason) {
  EXPECT_DEATH((void)Result<int>(Status()), "broken invariant !status_.ok\\(\\)");
}

Status TryBoth(const Status& first, const Status& second, int* reached) {
  HYBRIDOPT_TRY(first);
  ++*reached;
  HYBRIDOPT_TRY(second);
  ++*reached;
  return Status();
}

TEST(TryTest, ReturnsTheFirstFailureAtOnce) {
  int reached = 0;
  EXPECT_TRUE(TryBoth(Status(), Status(), &reached).ok());
  EXPECT_EQ(reached, 2);
  reached = 0;
  EXPECT_EQ(TryBoth(Status(), Refuse(), &reached).message(), Refuse().message());
  EXPECT_EQ(reached, 1);
  reached = 0;
  EXPECT_EQ(TryBoth(Refuse(), Status(), &reached).code(), OFFLOAD_INVALID_ARGUMENT);
  EXPECT_EQ(reached, 0);
}

Result<int> Half(int number, int* calls) {
  ++*calls;
  if (number % 2 != 0) return Status::Error(OFFLOAD_INVALID_ARGUMENT, "%d is odd", number);
  return number / 2;
}

Result<int> Quarter(int number, int* calls) {
  HYBRIDOPT_ASSIGN(const int half, Half(number, calls));
  int quarter = 0;
  HYBRIDOPT_ASSIGN(quarter, Half(half, calls));
  return quarter;
}

TEST(AssignTest, TakesTheValueOrReturnsTheFailureAndEvaluatesOnce) {
  int calls = 0;
  EXPECT_EQ(Quarter(12, &calls).value(), 3);
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(Quarter(6, &calls).status().message(), "3 is odd");
  EXPECT_EQ(calls, 4);
  EXPECT_EQ(Quarter(5, &calls).status().message(), "5 is odd");
  EXPECT_EQ(calls, 5);
}

}  // namespace
}  // namespace hybridopt
