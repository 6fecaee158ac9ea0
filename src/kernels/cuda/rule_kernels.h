// The update kernels of each rule. Each rule has a file in rules/, so that they are compiled beside
// each other: together they take minutes.
#pragma once

#include "kernels/cuda/cuda_kernels.h"

namespace hybridopt::cuda {

using UpdateKernel = void (*)(const UpdateRow* rows, uint32_t row_count, const Verdict* verdict);
using ChooseKernel = UpdateKernel (*)(const UpdateKind& kind);
inline constexpr uint32_t kUpdateThreads = 256;  // of a block, which updates one tile

// The kernel of a kind whose rule is kRule.
template <Rule kRule>
UpdateKernel KernelOfRule(const UpdateKind& kind);

}  // namespace hybridopt::cuda
