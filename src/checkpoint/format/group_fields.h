// The hyperparameters of a group by the names they have in JSON: the one list for all code that
// writes or reads them.
#pragma once

#include "kernels/algorithms.h"

namespace hybridopt::checkpoint {

// Calls number(name, field) or flag(name, field) for each hyperparameter, in the order of the
// manifest.
template <typename Group, typename Number, typename Flag>
void ForEachGroupField(Group& group, Number&& number, Flag&& flag) {
  for (const NamedNumber& one : kGroupNumbers) number(one.name, group.*one.field);
  flag("nesterov", group.nesterov);
  flag("maximize", group.maximize);
}

}  // namespace hybridopt::checkpoint
