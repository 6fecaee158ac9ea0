// The update, in one launch, of many params with the same rule and formats. A thread block finds
// the row of each tile. Each combination of formats, dtypes and rounding has its own kernel, which
// needs registers only for that combination. The files in rules/ instantiate KernelOfRule.
#pragma once

#include "kernels/cuda/arrays.h"
#include "kernels/cuda/rule_kernels.h"
#include "kernels/table.h"

namespace hybridopt::cuda {
namespace {

// The least number of blocks for each processor: fewer blocks do not have enough loads in flight to
// use the full memory bandwidth.
constexpr uint32_t kBlocksOfProcessor = 4;
constexpr uint32_t kQuad = 4;
constexpr uint32_t kStride = kUpdateThreads * kQuad;  // elements that a thread block reads at once

// The last row that starts at this tile or before it.
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

template <Rule kRule, SpanTypes kTypes, bool kRandomly, bool kTiesAway>
__device__ void UpdateTile(const UpdateRow& row, uint32_t tile, float grad_factor) {
  Coefficients c = row.coefficients;
  c.grad_factor = __fmul_rn(c.grad_factor, grad_factor);
  const uint64_t begin = uint64_t{tile - row.first_tile} * kTileElements;
  const uint64_t end = min(begin + kTileElements, row.span.count);
  const TileArrays<kRule, kTypes, kRandomly, kTiesAway> arrays(row.span, row.noted, begin,
                                                               static_cast<uint32_t>(end - begin));
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
  for (uint64_t i = done + threadIdx.x; i < end; i += kUpdateThreads) {
    auto one = arrays.template Load<1>(i);
    arrays.UpdateAndStore(c, i, one);
  }
}

// Each thread block updates one tile. nvcc does not take a struct as template argument of a kernel.
template <Rule kRule, int32_t kGradDtype, int32_t kParamDtype, Format kMaster, Format kMoment0,
          Format kMoment1, bool kRandomly, bool kTiesAway>
__global__ void __launch_bounds__(kUpdateThreads, kBlocksOfProcessor)
    Update(const UpdateRow* __restrict__ rows, uint32_t row_count, const Verdict* verdict) {
  if (verdict->skip != 0) return;
  constexpr SpanTypes kTypes = {kGradDtype, kParamDtype, {kMaster, kMoment0, kMoment1}};
  UpdateTile<kRule, kTypes, kRandomly, kTiesAway>(RowOfTile(rows, row_count, blockIdx.x),
                                                  blockIdx.x, verdict->grad_factor);
}

template <Rule kRule, SpanTypes kTypes, bool kRandomly, bool kTiesAway>
constexpr UpdateKernel kKernel =
    Update<kRule, kTypes.grad_dtype, kTypes.param_dtype, kTypes.formats.master,
           kTypes.formats.moment0, kTypes.formats.moment1, kRandomly, kTiesAway>;

template <Rule kRule, SpanTypes kTypes, bool kRandomly>
UpdateKernel KernelOf(const UpdateKind& kind) {
  if constexpr (RowOf(kTypes.formats.master).beside_param) {
    return kKernel<kRule, kTypes, kRandomly, true>;
  } else {
    if constexpr (kTypes.param_dtype == OFFLOAD_BF16)
      if (kind.ties_away) return kKernel<kRule, kTypes, kRandomly, true>;
    return kKernel<kRule, kTypes, kRandomly, false>;
  }
}

// Update chooses the kernel for a rule and types.
struct ChosenByTypes {
  template <Rule kRule, SpanTypes kTypes>
  static UpdateKernel Update(const UpdateKind& kind) {
    if constexpr (RoundsState<kRule>(kTypes.formats))
      if (kind.stochastic) return KernelOf<kRule, kTypes, true>(kind);
    return KernelOf<kRule, kTypes, false>(kind);
  }
};

}  // namespace

template <Rule kRule>
UpdateKernel KernelOfRule(const UpdateKind& kind) {
  static constexpr ByTypes<ChooseKernel> kKernels =
      MakeUpdatesOfRule<ChosenByTypes, kRule, ChooseKernel>();
  return kKernels.Of(kRule, kind.types)(kind);
}

}  // namespace hybridopt::cuda
