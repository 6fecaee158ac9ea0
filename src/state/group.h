// Group: checks the hyperparameters that the params of a group share.
#pragma once

#include "base/status.h"

namespace hybridopt {

// Checks every field but the algorithm against its row in kernels/algorithms.h. Errors name the
// field.
Status ValidateGroup(int32_t algorithm, const offload_group_t& group);

}  // namespace hybridopt
