// The hyperparameters of a group by the names they have in JSON: one list for all who write or read
// them.
#pragma once

#include "offload.h"

namespace hybridopt::checkpoint {

// Calls number(name, field) and flag(name, field) for each, in the order of the manifest.
template <typename Group, typename Number, typename Flag>
void ForEachGroupField(Group& group, Number&& number, Flag&& flag) {
  number("lr", group.lr);
  number("beta1", group.beta1);
  number("beta2", group.beta2);
  number("eps", group.eps);
  number("weight_decay", group.weight_decay);
  number("momentum", group.momentum);
  number("dampening", group.dampening);
  number("lr_decay", group.lr_decay);
  number("initial_accumulator_value", group.initial_accumulator_value);
  flag("nesterov", group.nesterov);
  flag("maximize", group.maximize);
}

}  // namespace hybridopt::checkpoint
