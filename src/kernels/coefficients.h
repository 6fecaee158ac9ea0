// Coefficients of a step: computed in double from the group's hyperparameters and a param's own
// step count, and rounded once.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace hybridopt {

// The coefficients for a param's step number `step`, counted from 1 and including this step.
// grad_factor is only the sign of maximize; the caller multiplies it by the verdict's grad_factor.
Coefficients MakeCoefficients(int32_t algorithm, const offload_group_t& group, uint64_t step);

// Makes coefficients of Muon those of a matrix of this shape: the learning rate is scaled with the
// shape, the weight decay is not.
void FitToMatrix(const offload_group_t& group, uint64_t rows, uint64_t cols, Coefficients& c);

}  // namespace hybridopt
