// One row for each hyperparameter of a group: its name, the algorithms that read it and the values
// that it may have. One row for each algorithm: its names, the rule that updates its params and the
// moments that it keeps. StateShape, the check of groups, the kernels' tables, checkpoints and
// error texts use these rows; bindings/generate_abi.py reads them from this file. CONTRIBUTING.md
// lists what a new algorithm or a new hyperparameter needs.
#pragma once

#include <cstdint>

#include "offload.h"

namespace hybridopt {

struct Coefficients;

// The formulas of an update; an index of the kernel tables.
enum class Rule : int32_t {
  kAdam,
  kSgdMomentum,
  kSgdPlain,
  kLion,
  kAdagrad,
  kSignum,
  kCautiousAdam,
  kMuon  // of whole matrices: it has no kernel in the tables (kernels/matrix)
};
// The rules of elements; rules of matrices have larger values.
inline constexpr int32_t kRuleCount = static_cast<int32_t>(Rule::kCautiousAdam) + 1;
inline constexpr int32_t kAllRuleCount = static_cast<int32_t>(Rule::kMuon) + 1;

// The kinds of state in checkpoints. Masters are stored as fp32, so MASTER_LOW is not one of these
// kinds.
struct StoredKind {
  int32_t value;  // enum offload_state_kind
  const char* name;
  bool is_sum_of_squares = false;  // never below 0; the kernels keep it finite
};
inline constexpr StoredKind kStoredKinds[] = {
    {OFFLOAD_STATE_MASTER, "master"},
    {OFFLOAD_STATE_EXP_AVG, "exp_avg"},
    {OFFLOAD_STATE_EXP_AVG_SQ, "exp_avg_sq", true},
    {OFFLOAD_STATE_MOMENTUM_BUFFER, "momentum_buffer"},
    {OFFLOAD_STATE_SUM, "sum", true},
};

// A set of algorithms: one bit for each value of enum offload_algorithm.
template <typename... Values>
constexpr uint32_t Of(Values... algorithms) {
  return ((uint32_t{1} << algorithms) | ...);
}
inline constexpr uint32_t kAllAlgorithms = UINT32_MAX;

// The values that a number may have. Each value must also be finite in fp32.
enum NumberRange { kAtLeastZero, kAboveZero, kZeroToBelowOne, kFinite };

// Algorithms that read a field, and the values that the field may have for them. A flag has no
// range.
struct Readers {
  uint32_t algorithms = 0;
  NumberRange range = kAtLeastZero;
};

using GroupNumber = double offload_group_t::*;
using GroupFlag = int32_t offload_group_t::*;

// Steps of Newton-Schulz, and how many of them may have coefficients of their own.
inline constexpr int32_t kNsStepsMost = 99;
inline constexpr int32_t kNsStepsDefault = 5;
inline constexpr int32_t kNsListMost = 10;

// Lists of three numbers; a row of zeros ends one.
using GroupList = double (offload_group_t::*)[kNsListMost][3];

// A hyperparameter of a group: a number, a list, or an integer from 0 to `most`, which is a flag if
// `most` is 1. If an algorithm does not read the field, the field must be 0.
struct GroupField {
  const char* name;  // in errors, in checkpoints and in the bindings
  GroupNumber number = nullptr;
  GroupFlag flag = nullptr;
  GroupList list = nullptr;
  int32_t most = 1;  // of a flag
  Readers readers[2] = {};

  constexpr GroupField(const char* name, GroupNumber number, Readers first, Readers second = {})
      : name(name), number(number), readers{first, second} {}
  constexpr GroupField(const char* name, GroupFlag flag, uint32_t algorithms, int32_t most = 1)
      : name(name), flag(flag), most(most), readers{{algorithms}} {}
  constexpr GroupField(const char* name, GroupList list, uint32_t algorithms)
      : name(name), list(list), readers{{algorithms, kFinite}} {}

  constexpr bool is_flag() const { return flag != nullptr && most == 1; }
  // Of a field that is no list.
  constexpr double In(const offload_group_t& group) const {
    return number != nullptr ? group.*number : group.*flag;
  }
  constexpr bool IsZero(const offload_group_t& group) const {
    if (list == nullptr) return In(group) == 0;
    for (const auto& row : group.*list)
      for (const double value : row)
        if (value != 0) return false;
    return true;
  }
  // The readers and range for an algorithm; NULL if the algorithm does not read the field.
  constexpr const Readers* ReadersOf(int32_t algorithm) const {
    for (const Readers& one : readers)
      if ((one.algorithms & Of(algorithm)) != 0) return &one;
    return nullptr;
  }
};

// In the order of a checkpoint's manifest.
inline constexpr GroupField kGroupFields[] = {
    {"lr", &offload_group_t::lr, {kAllAlgorithms}},
    {"beta1",
     &offload_group_t::beta1,
     {Of(OFFLOAD_ADAMW, OFFLOAD_ADAM, OFFLOAD_LION), kZeroToBelowOne}},
    {"beta2",
     &offload_group_t::beta2,
     {Of(OFFLOAD_ADAMW, OFFLOAD_ADAM, OFFLOAD_LION), kZeroToBelowOne}},
    {"eps",
     &offload_group_t::eps,
     {Of(OFFLOAD_ADAMW, OFFLOAD_ADAM, OFFLOAD_ADAGRAD, OFFLOAD_MUON), kAboveZero}},
    {"weight_decay", &offload_group_t::weight_decay, {kAllAlgorithms}},
    {"momentum",
     &offload_group_t::momentum,
     {Of(OFFLOAD_SGD)},
     {Of(OFFLOAD_SIGNUM, OFFLOAD_MUON), kZeroToBelowOne}},
    {"dampening", &offload_group_t::dampening, {Of(OFFLOAD_SGD)}},
    {"lr_decay", &offload_group_t::lr_decay, {Of(OFFLOAD_ADAGRAD)}},
    {"initial_accumulator_value",
     &offload_group_t::initial_accumulator_value,
     {Of(OFFLOAD_ADAGRAD)}},
    {"nesterov", &offload_group_t::nesterov, Of(OFFLOAD_SGD, OFFLOAD_MUON)},
    {"maximize", &offload_group_t::maximize, kAllAlgorithms},
    {"cautious_weight_decay", &offload_group_t::cautious_weight_decay, Of(OFFLOAD_ADAMW)},
    {"ns_steps", &offload_group_t::ns_steps, Of(OFFLOAD_MUON), kNsStepsMost},
    {"update_rms", &offload_group_t::update_rms, {Of(OFFLOAD_MUON)}},
    {"ns_coefficients", &offload_group_t::ns_coefficients, Of(OFFLOAD_MUON)},
};

// The rows of a list before the row of zeros that ends it.
constexpr int32_t RowsOf(const double (&list)[kNsListMost][3]) {
  int32_t rows = 0;
  while (rows < kNsListMost && (list[rows][0] != 0 || list[rows][1] != 0 || list[rows][2] != 0))
    ++rows;
  return rows;
}
constexpr int32_t NsStepsOf(const offload_group_t& group) {
  return group.ns_steps != 0 ? group.ns_steps : kNsStepsDefault;
}

// Version 1 of the checkpoint format began with the first 11 fields; every manifest has them. A
// manifest has a later field only for groups in which it is not 0, so that releases that do not
// know the field can read all other manifests.
constexpr bool IsInEveryManifest(const GroupField& field) { return &field - kGroupFields < 11; }

inline constexpr int32_t kMomentsMax = 2;
inline constexpr int32_t kNoMoment = -1;

// Writes the coefficients of a param's step number `step` (kernels/coefficients.cpp).
using CoefficientsFunction = void (*)(const offload_group_t&, uint64_t step, Coefficients&);
void SetAdamW(const offload_group_t& group, uint64_t step, Coefficients& coefficients);
void SetAdam(const offload_group_t& group, uint64_t step, Coefficients& coefficients);
void SetSgd(const offload_group_t& group, uint64_t step, Coefficients& coefficients);
void SetLion(const offload_group_t& group, uint64_t step, Coefficients& coefficients);
void SetAdagrad(const offload_group_t& group, uint64_t step, Coefficients& coefficients);
void SetSignum(const offload_group_t& group, uint64_t step, Coefficients& coefficients);
void SetMuon(const offload_group_t& group, uint64_t step, Coefficients& coefficients);

struct Algorithm {
  int32_t value;     // enum offload_algorithm: OFFLOAD_ and the name in capitals
  const char* name;  // in errors and in checkpoints
  Rule rule;
  // The rule for a group whose momentum is 0 at commit; it has no moments.
  Rule rule_without_momentum = rule;
  // The rule for a group with cautious_weight_decay; it has the same moments.
  Rule rule_if_cautious = rule;
  CoefficientsFunction set_coefficients;
  int32_t moments[kMomentsMax] = {kNoMoment, kNoMoment};  // enum offload_state_kind
  GroupNumber initial_moment0 = nullptr;                  // initial first moment; NULL: 0
  bool counts_steps = false;      // the update depends on the number of the param's step
  bool nan_reaches_param = true;  // a moment that becomes NaN makes the param NaN in that step
};

inline constexpr Algorithm kAlgorithms[] = {
    {.value = OFFLOAD_ADAMW,
     .name = "AdamW",
     .rule = Rule::kAdam,
     .rule_if_cautious = Rule::kCautiousAdam,
     .set_coefficients = SetAdamW,
     .moments = {OFFLOAD_STATE_EXP_AVG, OFFLOAD_STATE_EXP_AVG_SQ},
     .counts_steps = true},
    {.value = OFFLOAD_ADAM,
     .name = "Adam",
     .rule = Rule::kAdam,
     .set_coefficients = SetAdam,
     .moments = {OFFLOAD_STATE_EXP_AVG, OFFLOAD_STATE_EXP_AVG_SQ},
     .counts_steps = true},
    {.value = OFFLOAD_SGD,
     .name = "SGD",
     .rule = Rule::kSgdMomentum,
     .rule_without_momentum = Rule::kSgdPlain,
     .set_coefficients = SetSgd,
     .moments = {OFFLOAD_STATE_MOMENTUM_BUFFER, kNoMoment}},
    {.value = OFFLOAD_LION,
     .name = "Lion",
     .rule = Rule::kLion,
     .set_coefficients = SetLion,
     .moments = {OFFLOAD_STATE_EXP_AVG, kNoMoment},
     .nan_reaches_param = false},
    {.value = OFFLOAD_ADAGRAD,
     .name = "Adagrad",
     .rule = Rule::kAdagrad,
     .set_coefficients = SetAdagrad,
     .moments = {OFFLOAD_STATE_SUM, kNoMoment},
     .initial_moment0 = &offload_group_t::initial_accumulator_value,
     .counts_steps = true},
    {.value = OFFLOAD_SIGNUM,
     .name = "Signum",
     .rule = Rule::kSignum,
     .set_coefficients = SetSignum,
     .moments = {OFFLOAD_STATE_EXP_AVG, kNoMoment}},
    {.value = OFFLOAD_MUON,
     .name = "Muon",
     .rule = Rule::kMuon,
     .set_coefficients = SetMuon,
     .moments = {OFFLOAD_STATE_MOMENTUM_BUFFER, kNoMoment}},
};

// The row of a value of enum offload_algorithm; NULL for any other value.
constexpr const Algorithm* AlgorithmOf(int32_t value) {
  for (const Algorithm& algorithm : kAlgorithms)
    if (algorithm.value == value) return &algorithm;
  return nullptr;
}

// The first row that has this rule. Rows with the same rule keep the same moments.
constexpr const Algorithm& AlgorithmOf(Rule rule) {
  for (const Algorithm& algorithm : kAlgorithms)
    if (algorithm.rule == rule || algorithm.rule_without_momentum == rule ||
        algorithm.rule_if_cautious == rule)
      return algorithm;
  return kAlgorithms[0];  // every rule has a row: see the assertion below
}

// The moment that a rule keeps, or kNoMoment.
constexpr int32_t MomentOf(Rule rule, int32_t index) {
  const Algorithm& algorithm = AlgorithmOf(rule);
  return algorithm.rule == rule || algorithm.rule_if_cautious == rule ? algorithm.moments[index]
                                                                      : kNoMoment;
}

constexpr bool IsSumOfSquares(int32_t kind) {
  for (const StoredKind& stored : kStoredKinds)
    if (stored.value == kind) return stored.is_sum_of_squares;
  return false;
}

// The rule for a group. `momentum` is the group's at commit.
constexpr Rule RuleOf(int32_t algorithm, double momentum) {
  const Algorithm& row = *AlgorithmOf(algorithm);
  return momentum > 0.0 ? row.rule : row.rule_without_momentum;
}

// Whether an algorithm updates matrices, each as a whole, instead of elements.
constexpr bool IsOfMatrices(int32_t algorithm) {
  return AlgorithmOf(algorithm)->rule == Rule::kMuon;
}

// The rule of a step. `at_commit` is the rule of the group at commit.
constexpr Rule RuleOfStep(int32_t algorithm, Rule at_commit, const offload_group_t& group) {
  return group.cautious_weight_decay != 0 ? AlgorithmOf(algorithm)->rule_if_cautious : at_commit;
}

// The initial first moment of a group's params.
constexpr double InitialMoment0(int32_t algorithm, const offload_group_t& group) {
  const GroupNumber field = AlgorithmOf(algorithm)->initial_moment0;
  return field != nullptr ? group.*field : 0.0;
}

constexpr bool RowsAgree() {
  for (int32_t rule = 0; rule < kAllRuleCount; ++rule) {
    const Algorithm& first = AlgorithmOf(Rule{rule});
    if (first.rule != Rule{rule} && first.rule_without_momentum != Rule{rule} &&
        first.rule_if_cautious != Rule{rule})
      return false;
  }
  for (const Algorithm& row : kAlgorithms) {
    const Algorithm& first = AlgorithmOf(row.rule);
    if (row.nan_reaches_param != first.nan_reaches_param) return false;
    for (int32_t i = 0; i < kMomentsMax; ++i)
      if (row.moments[i] != first.moments[i]) return false;
  }
  return true;
}
static_assert(RowsAgree(),
              "every rule is some row's; rows that share one differ in what it stores");

}  // namespace hybridopt
