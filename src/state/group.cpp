#include "state/group.h"

#include <cmath>

#include "kernels/algorithms.h"

namespace hybridopt {
namespace {

Status CheckNumber(const char* name, double value, NumberRange range) {
  // The kernels compute in fp32. So the value must be finite, and above 0 if the field requires
  // that, even after it is rounded to fp32. The comparison is written so that NaN fails it.
  const float rounded = static_cast<float>(value);
  if (range == kZeroToBelowOne) {
    if (value >= 0 && value < 1) return {};
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "group.%s is %g, expected 0 <= %s < 1", name,
                         value, name);
  }
  if (range == kFinite && !std::isfinite(rounded))
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "group.%s is %g, expected a number that is finite in fp32", name, value);
  if (range == kFinite) return {};
  const bool above_zero = range == kAboveZero;
  if (std::isfinite(rounded) && (above_zero ? rounded > 0 : value >= 0)) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "group.%s is %g, expected a number that is finite and %s in fp32", name,
                       value, above_zero ? "above 0" : "at least 0");
}

// Each number must be finite, and nothing may stand behind the row of zeros that ends the list.
Status CheckList(const char* name, const double (&list)[kNsListMost][3], int32_t steps) {
  const int32_t rows = RowsOf(list);
  for (int32_t i = 0; i < kNsListMost; ++i)
    for (int32_t j = 0; j < 3; ++j) {
      const double value = list[i][j];
      if (!std::isfinite(static_cast<float>(value)))
        return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                             "group.%s[%d][%d] is %g, expected a number that is finite in fp32",
                             name, i, j, value);
      if (i > rows && value != 0)
        return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                             "group.%s[%d][%d] is %g, but row %d is zeros, which ends the list; "
                             "leave out no row",
                             name, i, j, value, rows);
    }
  if (rows <= steps) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "group.%s has %d rows, but group.ns_steps is %d; set ns_steps to at least "
                       "%d, or leave out rows",
                       name, rows, steps, rows);
}

Status CheckField(const Algorithm& algorithm, const offload_group_t& group,
                  const GroupField& field) {
  const Readers* readers = field.ReadersOf(algorithm.value);
  if (field.list != nullptr) {
    if (readers != nullptr) return CheckList(field.name, group.*field.list, NsStepsOf(group));
    if (field.IsZero(group)) return {};
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "group.%s is not zero, but %s does not use it; leave it 0", field.name,
                         algorithm.name);
  }
  const double value = field.In(group);
  if (readers == nullptr && value != 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "group.%s is %g, but %s does not use it; leave it 0", field.name, value,
                         algorithm.name);
  if (readers == nullptr) return {};
  if (field.number != nullptr) return CheckNumber(field.name, value, readers->range);
  if (value >= 0 && value <= field.most) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT, "group.%s is %d, expected 0 %s %d", field.name,
                       group.*field.flag, field.is_flag() ? "or" : "to", field.most);
}

}  // namespace

Status ValidateGroup(int32_t algorithm_value, const offload_group_t& group) {
  const Algorithm& algorithm = *AlgorithmOf(algorithm_value);
  for (const GroupField& field : kGroupFields) HYBRIDOPT_TRY(CheckField(algorithm, group, field));
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
