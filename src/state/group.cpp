#include "state/group.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "kernels/algorithms.h"

namespace hybridopt {
namespace {

Status CheckNumber(const Algorithm& algorithm, const offload_group_t& group,
                   const NamedNumber& number) {
  const double value = group.*number.field;
  const auto* read = std::find_if(std::begin(algorithm.reads), std::end(algorithm.reads),
                                  [&](const ReadNumber& r) { return r.field == number.field; });
  if (read == std::end(algorithm.reads)) {
    if (value == 0) return {};
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "group.%s is %g, but %s does not use it; leave it 0", number.name, value,
                         algorithm.name);
  }
  // The kernels compute in fp32, so the value must be finite, and above 0 where that is required,
  // after it is rounded to fp32 too. The comparison is written so that NaN fails it.
  const float rounded = static_cast<float>(value);
  if (read->range == NumberRange::kZeroToBelowOne) {
    if (value >= 0 && value < 1) return {};
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "group.%s is %g, expected 0 <= %s < 1",
                         number.name, value, number.name);
  }
  const bool above_zero = read->range == NumberRange::kAboveZero;
  if (std::isfinite(rounded) && (above_zero ? rounded > 0 : value >= 0)) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "group.%s is %g, expected a number that is finite and %s in fp32",
                       number.name, value, above_zero ? "above 0" : "at least 0");
}

Status CheckSwitch(const char* name, int32_t value) {
  if (value == 0 || value == 1) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT, "group.%s is %d, expected 0 or 1", name, value);
}

}  // namespace

Status ValidateGroup(int32_t algorithm_value, const offload_group_t& group) {
  const Algorithm& algorithm = *AlgorithmOf(algorithm_value);
  for (const NamedNumber& number : kGroupNumbers)
    HYBRIDOPT_TRY(CheckNumber(algorithm, group, number));
  HYBRIDOPT_TRY(CheckSwitch("maximize", group.maximize));
  HYBRIDOPT_TRY(CheckSwitch("nesterov", group.nesterov));
  if (group.reserved != 0)
    return Status::Error(OFFLOAD_UNSUPPORTED, "group.reserved is %u, expected 0", group.reserved);
  if (group.nesterov != 0 && !algorithm.reads_nesterov)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "group.nesterov is 1, but %s does not use it; leave it 0", algorithm.name);
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

}  // namespace hybridopt
