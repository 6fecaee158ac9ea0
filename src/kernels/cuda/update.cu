// The update of many params of one kind in one launch. A thread block finds the row of each tile.
// Each combination of layout, dtypes and rounding has a kernel of its own, which needs registers
// only for that combination.
#include <utility>

#include "kernels/cuda/arrays.h"
#include "kernels/cuda/cuda_kernels.h"

namespace hybridopt::cuda {
namespace {

constexpr uint32_t kThreads = 256;
// The least number of blocks for each processor: fewer have too few loads in flight for its memory.
constexpr uint32_t kBlocksOfProcessor = 4;
constexpr uint32_t kQuad = 4;
constexpr uint32_t kStride = kThreads * kQuad;  // elements that a thread block reads at once

// The last row that starts at this tile or before.
__device__ const UpdateRow& RowOfTile(const UpdateRow* rows, uint32_t row_count, uint32_t tile) {
  uint32_t first = 0;
  uint32_t last = row_count - 1;
  while (first < last) {
    const uint32_t middle = (first + last + 1) / 2;
    if (rows[middle].first_tile <= tile) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  return rows[first];
}

template <Rule kRule, bool kSplit, MomentForm kForm, int32_t kGradDtype, int32_t kParamDtype,
          bool kTiesAway>
__device__ void UpdateTile(const UpdateRow& row, uint32_t tile, float grad_factor) {
  Coefficients c = row.coefficients;
  c.grad_factor = __fmul_rn(c.grad_factor, grad_factor);
  const uint64_t begin = uint64_t{tile - row.first_tile} * kTileElements;
  const uint64_t end = min(begin + kTileElements, row.span.count);
  const TileArrays<kRule, kSplit, kForm, kGradDtype, kParamDtype, kTiesAway> arrays(
      row.span, begin, static_cast<uint32_t>(end - begin));
  uint64_t done = begin;
  if (row.vectors && arrays.pieces()) {
    done = end / kQuad * kQuad;
    // Two quads at a time, so that both loads are in flight before the first result is needed.
    uint64_t first = begin + threadIdx.x * kQuad;
    for (; first + kStride < done; first += 2 * kStride) {
      auto a = arrays.template Load<kQuad>(first);
      auto b = arrays.template Load<kQuad>(first + kStride);
      arrays.UpdateAndStore(c, first, a);
      arrays.UpdateAndStore(c, first + kStride, b);
    }
    if (first < done) {
      auto a = arrays.template Load<kQuad>(first);
      arrays.UpdateAndStore(c, first, a);
    }
  }
  for (uint64_t i = done + threadIdx.x; i < end; i += kThreads) {
    auto one = arrays.template Load<1>(i);
    arrays.UpdateAndStore(c, i, one);
  }
}

// Each thread block updates one tile.
template <Rule kRule, bool kSplit, MomentForm kForm, int32_t kGradDtype, int32_t kParamDtype,
          bool kTiesAway>
__global__ void __launch_bounds__(kThreads, kBlocksOfProcessor)
    Update(const UpdateRow* __restrict__ rows, uint32_t row_count, const Verdict* verdict) {
  if (verdict->skip != 0) return;
  UpdateTile<kRule, kSplit, kForm, kGradDtype, kParamDtype, kTiesAway>(
      RowOfTile(rows, row_count, blockIdx.x), blockIdx.x, verdict->grad_factor);
}

using UpdateKernel = void (*)(const UpdateRow*, uint32_t, const Verdict*);

template <Rule kRule, bool kSplit, MomentForm kForm, int32_t kGradDtype>
UpdateKernel KernelOf(const UpdateKind& kind) {
  if constexpr (kSplit) {
    return Update<kRule, kSplit, kForm, kGradDtype, OFFLOAD_BF16, true>;
  } else {
    switch (kind.types.param_dtype) {
      case OFFLOAD_FP32:
        return Update<kRule, kSplit, kForm, kGradDtype, OFFLOAD_FP32, false>;
      case OFFLOAD_BF16:
        if (kind.ties_away) return Update<kRule, kSplit, kForm, kGradDtype, OFFLOAD_BF16, true>;
        return Update<kRule, kSplit, kForm, kGradDtype, OFFLOAD_BF16, false>;
      default:
        return Update<kRule, kSplit, kForm, kGradDtype, OFFLOAD_FP16, false>;
    }
  }
}

template <Rule kRule, bool kSplit, MomentForm kForm>
UpdateKernel KernelOf(const UpdateKind& kind) {
  switch (kind.types.grad_dtype) {
    case OFFLOAD_FP32:
      return KernelOf<kRule, kSplit, kForm, OFFLOAD_FP32>(kind);
    case OFFLOAD_BF16:
      return KernelOf<kRule, kSplit, kForm, OFFLOAD_BF16>(kind);
    default:
      return KernelOf<kRule, kSplit, kForm, OFFLOAD_FP16>(kind);
  }
}

template <Rule kRule, bool kSplit>
UpdateKernel KernelOf(const UpdateKind& kind) {
  // A rule without moments needs only one of the forms of storing them.
  if constexpr (kHasMoment0<kRule>) {
    if (HasBf16Moments(kind.types.layout)) {
      if (kind.stochastic) return KernelOf<kRule, kSplit, MomentForm::kStochastic>(kind);
      return KernelOf<kRule, kSplit, MomentForm::kNearest>(kind);
    }
  }
  return KernelOf<kRule, kSplit, MomentForm::kFp32>(kind);
}

template <Rule kRule>
UpdateKernel KernelOfRule(const UpdateKind& kind) {
  return IsSplit(kind.types.layout) ? KernelOf<kRule, true>(kind) : KernelOf<kRule, false>(kind);
}

template <int32_t... kRules>
UpdateKernel KernelOf(const UpdateKind& kind, std::integer_sequence<int32_t, kRules...>) {
  constexpr UpdateKernel (*kOfRules[])(const UpdateKind&) = {KernelOfRule<Rule{kRules}>...};
  return kOfRules[static_cast<int32_t>(kind.rule)](kind);
}

UpdateKernel KernelOf(const UpdateKind& kind) {
  return KernelOf(kind, std::make_integer_sequence<int32_t, kRuleCount>());
}

}  // namespace

cudaError_t LaunchUpdate(cudaStream_t stream, const UpdateKind& kind, const UpdateRow* rows,
                         uint32_t row_count, uint32_t tiles, const Verdict* verdict) {
  KernelOf(kind)<<<tiles, kThreads, 0, stream>>>(rows, row_count, verdict);
  return cudaGetLastError();
}

namespace {

cudaError_t LoadUpdateKernel(const UpdateKind& kind) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, KernelOf(kind));
}

}  // namespace

cudaError_t LoadUpdateKernels() {
  for (int32_t rule = 0; rule < kRuleCount; ++rule)
    for (int32_t layout = 0; layout < kStateLayoutCount; ++layout)
      for (int32_t grad_dtype = 1; grad_dtype <= kDtypeCount; ++grad_dtype)
        for (int32_t param_dtype = 1; param_dtype <= kDtypeCount; ++param_dtype)
          for (bool ties_away : {false, true})
            for (bool stochastic : {false, true}) {
              const SpanTypes types = {grad_dtype, param_dtype, StateLayout{layout}};
              const cudaError_t error =
                  LoadUpdateKernel({Rule{rule}, types, ties_away, stochastic});
              if (error != cudaSuccess) return error;
            }
  return cudaSuccess;
}

}  // namespace hybridopt::cuda
