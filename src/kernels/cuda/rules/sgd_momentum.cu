#include "kernels/cuda/update_kernels.h"

namespace hybridopt::cuda {
template UpdateKernel KernelOfRule<Rule::kSgdMomentum>(const UpdateKind&);
}
