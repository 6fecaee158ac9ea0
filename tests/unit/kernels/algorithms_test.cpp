// Compares the rows of kernels/algorithms.h with the code that reads them.
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

// A group in which every number that the algorithm reads has its largest allowed value.
offload_group_t GroupOf(const Algorithm& row) {
  offload_group_t group{};
  group.struct_size = sizeof(group);
  for (const GroupField& field : kGroupFields)
    if (field.number != nullptr && field.ReadersOf(row.value) != nullptr) group.*field.number = 0.5;
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
  // 0 is the value of a field that the caller has not set.
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

TEST(Algorithms, FieldsHaveNamesOfTheirOwnAndAreReadInOneWay) {
  std::set<std::string> names;
  for (const GroupField& field : kGroupFields) {
    EXPECT_TRUE(names.insert(field.name).second) << field.name;
    EXPECT_EQ((field.number != nullptr) + (field.flag != nullptr) + (field.list != nullptr), 1)
        << field.name;
    EXPECT_NE(field.readers[0].algorithms, 0u) << field.name;
    EXPECT_EQ(field.readers[0].algorithms & field.readers[1].algorithms, 0u) << field.name;
  }
}

// Numbers that are read elsewhere: at commit, and for each matrix (FitToMatrix, StepPlan).
bool IsReadElsewhere(const Algorithm& row, GroupNumber number) {
  return number == row.initial_moment0 || number == &offload_group_t::update_rms;
}

// A number that the algorithm does not read changes no coefficient, and each that it reads changes
// one.
TEST(Algorithms, CoefficientsDependOnTheNumbersThatAnAlgorithmReads) {
  for (const Algorithm& row : kAlgorithms) {
    for (const GroupField& field : kGroupFields) {
      if (field.number == nullptr) continue;
      offload_group_t group = GroupOf(row);
      const Coefficients before = MakeCoefficients(row.value, group, 3);
      group.*field.number = 0.75;
      const Coefficients after = MakeCoefficients(row.value, group, 3);
      const bool changes = std::memcmp(&before, &after, sizeof(before)) != 0;
      const bool is_read = field.ReadersOf(row.value) != nullptr;
      EXPECT_EQ(changes, is_read && !IsReadElsewhere(row, field.number))
          << row.name << " " << field.name;
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
    if (IsOfMatrices(row.value)) continue;         // no kernel of elements
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
