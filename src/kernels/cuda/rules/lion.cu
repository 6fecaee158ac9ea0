#include "kernels/cuda/update_kernels.h"

namespace hybridopt::cuda {
template UpdateKernel KernelOfRule<Rule::kLion>(const UpdateKind&);
}
