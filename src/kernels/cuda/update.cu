// Launches the update kernels.
#include <utility>

#include "kernels/cuda/rule_kernels.h"

namespace hybridopt::cuda {
namespace {

template <int32_t... kRules>
UpdateKernel KernelOf(const UpdateKind& kind, std::integer_sequence<int32_t, kRules...>) {
  constexpr ChooseKernel kChoose[] = {KernelOfRule<Rule{kRules}>...};
  return kChoose[static_cast<int32_t>(kind.rule)](kind);
}

UpdateKernel KernelOf(const UpdateKind& kind) {
  return KernelOf(kind, std::make_integer_sequence<int32_t, kRuleCount>());
}

}  // namespace

cudaError_t LaunchUpdate(cudaStream_t stream, const UpdateKind& kind, const UpdateRow* rows,
                         uint32_t row_count, uint32_t tiles, const Verdict* verdict) {
  KernelOf(kind)<<<tiles, kUpdateThreads, 0, stream>>>(rows, row_count, verdict);
  return cudaGetLastError();
}

cudaError_t LoadUpdateKernels() {
  cudaError_t error = cudaSuccess;
  ForEachSpanTypes([&](const SpanTypes& types) {
    for (int32_t rule = 0; rule < kRuleCount; ++rule)
      for (bool ties_away : {false, true})
        for (bool stochastic : {false, true}) {
          if (error != cudaSuccess) return;
          cudaFuncAttributes attributes;
          error = cudaFuncGetAttributes(&attributes,
                                        KernelOf({Rule{rule}, types, ties_away, stochastic}));
        }
  });
  return error;
}

}  // namespace hybridopt::cuda
