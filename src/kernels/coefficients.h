// What a step multiplies by: the group's hyperparameters and a param's own step count, worked out
// in double and rounded once.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace hybridopt {

// The coefficients of a param's step number `step`, counted from 1 with this step included.
// grad_factor holds only maximize's sign: multiply it by the verdict's.
Coefficients MakeCoefficients(int32_t algorithm, const offload_group_t& group, uint64_t step);

}  // namespace hybridopt
