// Compares the rows of kernels/algorithms.h with what the code that reads them does.
#include "kernels/algorithms.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <string>

#include "kernels/coefficients.h"
#include "kernels/kernels.h"

namespace hybridopt {
namespace {

// Every number of a group that the algorithm reads, as large as all of them may be.
offload_group_t GroupOf(const Algorithm& row) {
  offload_group_t group{};
  group.struct_size = sizeof(group);
  for (const ReadNumber& read : row.reads)
    if (read.field != nullptr) group.*read.field = 0.5;
  return group;
}

TEST(Algorithms, ValuesAndNamesAreUnique) {
  std::set<int32_t> values;
  std::set<std::string> names;
  for (const Algorithm& row : kAlgorithms) {
    EXPECT_TRUE(values.insert(row.value).second) << row.name;
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_EQ(AlgorithmOf(row.value), &row);
  }
  // A caller that has not set the field gets 0.
  for (const int32_t unknown : {-1, 0, *values.rbegin() + 1, INT32_MAX})
    EXPECT_EQ(AlgorithmOf(unknown), nullptr) << unknown;
}

TEST(Algorithms, MomentsAreStoredKindsAndStandFirst) {
  for (const Algorithm& row : kAlgorithms) {
    bool ended = false;
    for (const int32_t kind : row.moments) {
      ended = ended || kind == kNoMoment;
      EXPECT_EQ(kind == kNoMoment, ended) << row.name;
      if (ended) continue;
      const bool stored = std::any_of(std::begin(kStoredKinds), std::end(kStoredKinds),
                                      [&](const StoredKind& s) { return s.value == kind; });
      EXPECT_TRUE(stored) << row.name << " " << kind;
    }
    EXPECT_TRUE(row.initial_moment0 == nullptr || row.moments[0] != kNoMoment) << row.name;
  }
}

TEST(Algorithms, ARuleWithoutMomentumKeepsNoMoment) {
  for (const Algorithm& row : kAlgorithms) {
    if (row.rule_without_momentum == row.rule) continue;
    for (int32_t i = 0; i < kMomentsMax; ++i)
      EXPECT_EQ(MomentOf(row.rule_without_momentum, i), kNoMoment) << row.name;
  }
}

// An algorithm reads no number of a group twice, and reads only numbers that a row of kGroupNumbers
// names.
TEST(Algorithms, NumbersAreReadOnceAndHaveNames) {
  for (const Algorithm& row : kAlgorithms) {
    std::set<std::string> names;
    for (const ReadNumber& read : row.reads) {
      if (read.field == nullptr) continue;
      for (const NamedNumber& number : kGroupNumbers) {
        if (number.field != read.field) continue;
        EXPECT_TRUE(names.insert(number.name).second) << row.name << " " << number.name;
      }
    }
    const auto count = std::count_if(std::begin(row.reads), std::end(row.reads),
                                     [](const ReadNumber& r) { return r.field != nullptr; });
    EXPECT_EQ(names.size(), static_cast<size_t>(count)) << row.name;
  }
}

// Whether any number that the row does not name changes a coefficient, and each that it names does.
// initial_accumulator_value is read at commit instead.
TEST(Algorithms, CoefficientsDependOnTheNumbersThatARowReads) {
  for (const Algorithm& row : kAlgorithms) {
    for (const NamedNumber& number : kGroupNumbers) {
      const bool read = std::any_of(std::begin(row.reads), std::end(row.reads),
                                    [&](const ReadNumber& r) { return r.field == number.field; });
      offload_group_t group = GroupOf(row);
      const Coefficients before = MakeCoefficients(row.value, group, 3);
      group.*number.field = 0.75;
      const Coefficients after = MakeCoefficients(row.value, group, 3);
      const bool changes = std::memcmp(&before, &after, sizeof(before)) != 0;
      EXPECT_EQ(changes, read && number.field != row.initial_moment0)
          << row.name << " " << number.name;
    }
  }
}

TEST(Algorithms, StepsChangeTheCoefficientsOfThoseThatCountThem) {
  for (const Algorithm& row : kAlgorithms) {
    const offload_group_t group = GroupOf(row);
    const Coefficients second = MakeCoefficients(row.value, group, 2);
    const Coefficients third = MakeCoefficients(row.value, group, 3);
    EXPECT_EQ(std::memcmp(&second, &third, sizeof(second)) != 0, row.counts_steps) << row.name;
  }
}

TEST(Algorithms, ANanMomentReachesTheParamWhereARowSaysSo) {
  for (const Algorithm& row : kAlgorithms) {
    if (IsSumOfSquares(row.moments[0])) continue;  // which stays a number
    const Coefficients c = MakeCoefficients(row.value, GroupOf(row), 2);
    const float grad = 1.0f;
    float param = 1.0f, moment0 = std::numeric_limits<float>::quiet_NaN(), moment1 = 1.0f;
    const UpdateSpan span = {&grad, &param, &param, &moment0, &moment1, 1};
    ReferenceKernels().Update(row.rule, OFFLOAD_FP32, OFFLOAD_FP32)(c, span);
    EXPECT_TRUE(std::isnan(moment0)) << row.name;
    EXPECT_EQ(std::isnan(param), row.nan_reaches_param) << row.name;
  }
}

}  // namespace
}  // namespace hybridopt
