// The hyperparameters that an algorithm accepts: every field against every algorithm.
#include "state/group.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "kernels/algorithms.h"

namespace hybridopt {
namespace {

bool UsesBetas(int32_t algorithm) {
  return algorithm == OFFLOAD_ADAMW || algorithm == OFFLOAD_ADAM || algorithm == OFFLOAD_LION;
}
bool UsesEps(int32_t algorithm) {
  return algorithm == OFFLOAD_ADAMW || algorithm == OFFLOAD_ADAM || algorithm == OFFLOAD_ADAGRAD ||
         algorithm == OFFLOAD_MUON;
}

// The smallest values that an algorithm accepts: all zero, except eps.
offload_group_t Least(int32_t algorithm) {
  offload_group_t group{};
  group.struct_size = sizeof(group);
  if (UsesEps(algorithm)) group.eps = 1e-8;
  return group;
}

struct Field {
  const char* name;
  double offload_group_t::*field;
  bool (*used)(int32_t algorithm);
};

const Field kFields[] = {
    {"lr", &offload_group_t::lr, [](int32_t) { return true; }},
    {"weight_decay", &offload_group_t::weight_decay, [](int32_t) { return true; }},
    {"beta1", &offload_group_t::beta1, UsesBetas},
    {"beta2", &offload_group_t::beta2, UsesBetas},
    {"eps", &offload_group_t::eps, UsesEps},
    {"momentum", &offload_group_t::momentum,
     [](int32_t a) { return a == OFFLOAD_SGD || a == OFFLOAD_SIGNUM || a == OFFLOAD_MUON; }},
    {"dampening", &offload_group_t::dampening, [](int32_t a) { return a == OFFLOAD_SGD; }},
    {"lr_decay", &offload_group_t::lr_decay, [](int32_t a) { return a == OFFLOAD_ADAGRAD; }},
    {"initial_accumulator_value", &offload_group_t::initial_accumulator_value,
     [](int32_t a) { return a == OFFLOAD_ADAGRAD; }},
    {"update_rms", &offload_group_t::update_rms, [](int32_t a) { return a == OFFLOAD_MUON; }},
};

void ExpectRefused(int32_t algorithm, const offload_group_t& group, const std::string& field) {
  const Status status = ValidateGroup(algorithm, group);
  EXPECT_EQ(status.code(), OFFLOAD_INVALID_ARGUMENT)
      << AlgorithmOf(algorithm)->name << " " << field;
  EXPECT_EQ(status.message().find("group." + field + " is "), 0u) << status.message();
}

TEST(Group, TakesWhatTheAlgorithmUsesAndRefusesTheRest) {
  for (const Algorithm& row : kAlgorithms) {
    const int32_t algorithm = row.value;
    EXPECT_TRUE(ValidateGroup(algorithm, Least(algorithm)).ok()) << AlgorithmOf(algorithm)->name;
    for (const Field& one : kFields) {
      offload_group_t group = Least(algorithm);
      if (std::string(one.name) == "dampening" && algorithm == OFFLOAD_SGD) group.momentum = 0.9;
      group.*one.field = 0.5;
      if (one.used(algorithm)) {
        const Status status = ValidateGroup(algorithm, group);
        EXPECT_TRUE(status.ok()) << status.message();
      } else {
        ExpectRefused(algorithm, group, one.name);
      }
      for (const double bad : {-1e-9, -1.0, -std::numeric_limits<double>::infinity(),
                               std::numeric_limits<double>::infinity(),
                               std::numeric_limits<double>::quiet_NaN(), 1e39}) {
        group.*one.field = bad;
        ExpectRefused(algorithm, group, one.name);
      }
    }
  }
}

TEST(Group, BetasStayBelowOneInDouble) {
  for (const int32_t algorithm : {OFFLOAD_ADAMW, OFFLOAD_ADAM, OFFLOAD_LION})
    for (auto field : {&offload_group_t::beta1, &offload_group_t::beta2}) {
      offload_group_t group = Least(algorithm);
      group.*field = std::nextafter(1.0, 0.0);
      EXPECT_TRUE(ValidateGroup(algorithm, group).ok());
      group.*field = 1.0;
      ExpectRefused(algorithm, group, field == &offload_group_t::beta1 ? "beta1" : "beta2");
    }
}

TEST(Group, SignumsMomentumStaysBelowOneInDouble) {
  offload_group_t group = Least(OFFLOAD_SIGNUM);
  group.momentum = std::nextafter(1.0, 0.0);
  EXPECT_TRUE(ValidateGroup(OFFLOAD_SIGNUM, group).ok());
  group.momentum = 1.0;
  ExpectRefused(OFFLOAD_SIGNUM, group, "momentum");
  group = Least(OFFLOAD_SGD);  // whose momentum is a factor
  group.momentum = 1.0;
  EXPECT_TRUE(ValidateGroup(OFFLOAD_SGD, group).ok());
}

TEST(Group, NewtonSchulzHasFiniteCoefficientsOfEitherSign) {
  for (const Algorithm& row : kAlgorithms) {
    offload_group_t group = Least(row.value);
    for (const double good : {-4.775, 2.0315}) {
      group.ns_coefficients[0][1] = good;
      if (row.value == OFFLOAD_MUON)
        EXPECT_TRUE(ValidateGroup(row.value, group).ok()) << row.name;
      else
        ExpectRefused(row.value, group, "ns_coefficients");
    }
  }
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), -1e39}) {
    offload_group_t group = Least(OFFLOAD_MUON);
    group.ns_coefficients[0][1] = 1;
    group.ns_coefficients[1][2] = bad;
    ExpectRefused(OFFLOAD_MUON, group, "ns_coefficients[1][2]");
  }
}

TEST(Group, AListOfCoefficientsHasNoGapAndIsNotLongerThanTheSteps) {
  offload_group_t group = Least(OFFLOAD_MUON);
  for (int32_t i = 0; i < 5; ++i) group.ns_coefficients[i][0] = 2;
  EXPECT_TRUE(ValidateGroup(OFFLOAD_MUON, group).ok());
  group.ns_steps = 4;
  Status status = ValidateGroup(OFFLOAD_MUON, group);
  EXPECT_EQ(status.code(), OFFLOAD_INVALID_ARGUMENT);
  EXPECT_EQ(status.message(),
            "group.ns_coefficients has 5 rows, but group.ns_steps is 4; set ns_steps to at least "
            "5, or leave out rows");
  group.ns_steps = 6;  // the last row twice
  EXPECT_TRUE(ValidateGroup(OFFLOAD_MUON, group).ok());
  group.ns_coefficients[2][0] = 0;
  ExpectRefused(OFFLOAD_MUON, group, "ns_coefficients[3][0]");
  status = ValidateGroup(OFFLOAD_MUON, group);
  EXPECT_NE(status.message().find("row 2 is zeros, which ends the list"), std::string::npos)
      << status.message();
}

TEST(Group, NewtonSchulzHasZeroToNinetyNineSteps) {
  for (const Algorithm& row : kAlgorithms) {
    offload_group_t group = Least(row.value);
    for (const int32_t steps : {1, 99}) {
      group.ns_steps = steps;
      if (row.value == OFFLOAD_MUON)
        EXPECT_TRUE(ValidateGroup(row.value, group).ok()) << steps;
      else
        ExpectRefused(row.value, group, "ns_steps");
    }
    for (const int32_t bad : {-1, 100, INT32_MIN}) {
      group.ns_steps = bad;
      ExpectRefused(row.value, group, "ns_steps");
    }
  }
}

TEST(Group, EpsIsAboveZeroInFp32) {
  for (const int32_t algorithm : {OFFLOAD_ADAMW, OFFLOAD_ADAM, OFFLOAD_ADAGRAD, OFFLOAD_MUON}) {
    offload_group_t group = Least(algorithm);
    for (const double good : {1e-45, 1e-40, 1e-8, 1.0}) {
      group.eps = good;
      EXPECT_TRUE(ValidateGroup(algorithm, group).ok()) << good;
    }
    for (const double bad : {0.0, -0.0, 1e-46, 1e-50}) {
      group.eps = bad;
      ExpectRefused(algorithm, group, "eps");
    }
  }
}

TEST(Group, NesterovNeedsMomentumAndNoDampening) {
  for (const double momentum : {0.0, 0.9})
    for (const double dampening : {0.0, 0.1})
      for (const int32_t nesterov : {0, 1}) {
        offload_group_t group = Least(OFFLOAD_SGD);
        group.momentum = momentum;
        group.dampening = dampening;
        group.nesterov = nesterov;
        const bool good =
            nesterov == 1 ? momentum > 0 && dampening == 0 : momentum > 0 || dampening == 0;
        if (good) {
          EXPECT_TRUE(ValidateGroup(OFFLOAD_SGD, group).ok());
        } else {
          ExpectRefused(OFFLOAD_SGD, group, nesterov == 1 ? "nesterov" : "dampening");
        }
      }
  for (const int32_t algorithm :
       {OFFLOAD_ADAMW, OFFLOAD_ADAM, OFFLOAD_LION, OFFLOAD_ADAGRAD, OFFLOAD_SIGNUM}) {
    offload_group_t group = Least(algorithm);
    group.nesterov = 1;
    ExpectRefused(algorithm, group, "nesterov");
  }
}

TEST(Group, CautiousWeightDecayIsOfAdamW) {
  for (const Algorithm& row : kAlgorithms) {
    offload_group_t group = Least(row.value);
    group.cautious_weight_decay = 1;
    if (row.value != OFFLOAD_ADAMW) {
      ExpectRefused(row.value, group, "cautious_weight_decay");
      continue;
    }
    EXPECT_TRUE(ValidateGroup(row.value, group).ok());
    for (const int32_t bad : {-1, 2, INT32_MIN}) {
      group.cautious_weight_decay = bad;
      ExpectRefused(row.value, group, "cautious_weight_decay");
    }
  }
}

TEST(Group, SwitchesAreZeroOrOne) {
  for (const Algorithm& row : kAlgorithms) {
    const int32_t algorithm = row.value;
    offload_group_t group = Least(algorithm);
    group.maximize = 1;
    EXPECT_TRUE(ValidateGroup(algorithm, group).ok());
    for (const int32_t bad : {-1, 2, INT32_MIN}) {
      group.maximize = bad;
      ExpectRefused(algorithm, group, "maximize");
    }
  }
}

}  // namespace
}  // namespace hybridopt
