// Group: hyperparameters that params share, checked.
#pragma once

#include "base/status.h"

namespace hybridopt {

// Checks every field against what the algorithm uses. Errors name the field.
Status ValidateGroup(int32_t algorithm, const offload_group_t& group);

// "AdamW" and so on; NULL for a value that is not an algorithm.
const char* AlgorithmName(int32_t algorithm);

}  // namespace hybridopt
