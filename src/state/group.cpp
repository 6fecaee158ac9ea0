#include "state/group.h"

#include <cmath>

namespace hybridopt {
namespace {

constexpr unsigned Bit(int32_t algorithm) { return 1u << algorithm; }
constexpr unsigned kAllAlgorithms = Bit(OFFLOAD_ADAMW) | Bit(OFFLOAD_ADAM) | Bit(OFFLOAD_SGD) |
                                    Bit(OFFLOAD_LION) | Bit(OFFLOAD_ADAGRAD);
constexpr unsigned kAdamFamily = Bit(OFFLOAD_ADAMW) | Bit(OFFLOAD_ADAM);

struct NumberRule {
  const char* name;
  double offload_group_t::*field;
  unsigned algorithms;  // that use the field
  double below;         // exclusive upper bound
  bool above_zero;      // else at least zero
};

constexpr NumberRule kNumberRules[] = {
    {"lr", &offload_group_t::lr, kAllAlgorithms, INFINITY, false},
    {"beta1", &offload_group_t::beta1, kAdamFamily | Bit(OFFLOAD_LION), 1.0, false},
    {"beta2", &offload_group_t::beta2, kAdamFamily | Bit(OFFLOAD_LION), 1.0, false},
    {"eps", &offload_group_t::eps, kAdamFamily | Bit(OFFLOAD_ADAGRAD), INFINITY, true},
    {"weight_decay", &offload_group_t::weight_decay, kAllAlgorithms, INFINITY, false},
    {"momentum", &offload_group_t::momentum, Bit(OFFLOAD_SGD), INFINITY, false},
    {"dampening", &offload_group_t::dampening, Bit(OFFLOAD_SGD), INFINITY, false},
    {"lr_decay", &offload_group_t::lr_decay, Bit(OFFLOAD_ADAGRAD), INFINITY, false},
    {"initial_accumulator_value", &offload_group_t::initial_accumulator_value, Bit(OFFLOAD_ADAGRAD),
     INFINITY, false},
};

Status CheckNumber(int32_t algorithm, const offload_group_t& group, const NumberRule& rule) {
  const double value = group.*rule.field;
  if ((rule.algorithms & Bit(algorithm)) == 0) {
    if (value == 0) return {};
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "group.%s is %g, but %s does not use it; leave it 0", rule.name, value,
                         AlgorithmName(algorithm));
  }
  // The kernels compute in fp32: there the value must still be finite, and above 0 where it has to
  // be. Written so that NaN fails.
  const float rounded = static_cast<float>(value);
  const bool low_enough = std::isinf(rule.below) ? std::isfinite(rounded) : value < rule.below;
  const bool high_enough = rule.above_zero ? rounded > 0 : value >= 0;
  if (low_enough && high_enough) return {};
  if (std::isinf(rule.below))
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "group.%s is %g, expected a number that is finite and %s in fp32",
                         rule.name, value, rule.above_zero ? "above 0" : "at least 0");
  return Status::Error(OFFLOAD_INVALID_ARGUMENT, "group.%s is %g, expected 0 <= %s < %g", rule.name,
                       value, rule.name, rule.below);
}

Status CheckSwitch(const char* name, int32_t value) {
  if (value == 0 || value == 1) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT, "group.%s is %d, expected 0 or 1", name, value);
}

}  // namespace

Status ValidateGroup(int32_t algorithm, const offload_group_t& group) {
  for (const NumberRule& rule : kNumberRules) HYBRIDOPT_TRY(CheckNumber(algorithm, group, rule));
  HYBRIDOPT_TRY(CheckSwitch("maximize", group.maximize));
  HYBRIDOPT_TRY(CheckSwitch("nesterov", group.nesterov));
  if (group.reserved != 0)
    return Status::Error(OFFLOAD_UNSUPPORTED, "group.reserved is %u, expected 0", group.reserved);
  if (group.nesterov != 0 && algorithm != OFFLOAD_SGD)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "group.nesterov is 1, but %s does not use it; leave it 0",
                         AlgorithmName(algorithm));
  if (group.nesterov != 0 && (group.momentum == 0 || group.dampening != 0))
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "group.nesterov is 1 with momentum %g and dampening %g, expected momentum "
                         "above 0 and dampening 0",
                         group.momentum, group.dampening);
  if (group.dampening != 0 && group.momentum == 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "group.dampening is %g with momentum 0, expected momentum above 0",
                         group.dampening);
  return {};
}

const char* AlgorithmName(int32_t algorithm) {
  switch (algorithm) {
    case OFFLOAD_ADAMW:
      return "AdamW";
    case OFFLOAD_ADAM:
      return "Adam";
    case OFFLOAD_SGD:
      return "SGD";
    case OFFLOAD_LION:
      return "Lion";
    case OFFLOAD_ADAGRAD:
      return "Adagrad";
    default:
      return nullptr;
  }
}

}  // namespace hybridopt
