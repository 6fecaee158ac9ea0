// Makes a KernelTable out of the templates of one implementation.
#pragma once

#include "kernels/kernels.h"

namespace hybridopt {

template <Rule kRule>
inline constexpr bool kHasMoment0 = kRule != Rule::kSgdPlain;
template <Rule kRule>
inline constexpr bool kHasMoment1 = kRule == Rule::kAdam;

template <typename Kernels, Rule kRule, int32_t kGradDtype>
constexpr void FillParamDtypes(KernelTable& table) {
  UpdateFunction* row = table.update[static_cast<int32_t>(kRule)][kGradDtype - 1];
  row[OFFLOAD_FP32 - 1] = Kernels::template Update<kRule, kGradDtype, OFFLOAD_FP32>;
  row[OFFLOAD_BF16 - 1] = Kernels::template Update<kRule, kGradDtype, OFFLOAD_BF16>;
  row[OFFLOAD_FP16 - 1] = Kernels::template Update<kRule, kGradDtype, OFFLOAD_FP16>;
}

template <typename Kernels, Rule kRule>
constexpr void FillRule(KernelTable& table) {
  FillParamDtypes<Kernels, kRule, OFFLOAD_FP32>(table);
  FillParamDtypes<Kernels, kRule, OFFLOAD_BF16>(table);
  FillParamDtypes<Kernels, kRule, OFFLOAD_FP16>(table);
}

template <typename Kernels, int32_t kDtype>
constexpr void FillDtype(KernelTable& table) {
  table.sum_squares[kDtype - 1] = Kernels::template SumSquares<kDtype>;
  table.to_fp32[kDtype - 1] = Kernels::template ToFp32<kDtype>;
  table.accumulate[kDtype - 1] = Kernels::template Accumulate<kDtype>;
}

// Kernels has the static member templates Update<rule, grad dtype, param dtype>,
// SumSquares<dtype>, ToFp32<dtype> and Accumulate<dtype>.
template <typename Kernels>
constexpr KernelTable MakeTable(const char* isa) {
  KernelTable table = {};
  table.isa = isa;
  FillRule<Kernels, Rule::kAdam>(table);
  FillRule<Kernels, Rule::kSgdMomentum>(table);
  FillRule<Kernels, Rule::kSgdPlain>(table);
  FillRule<Kernels, Rule::kLion>(table);
  FillRule<Kernels, Rule::kAdagrad>(table);
  FillDtype<Kernels, OFFLOAD_FP32>(table);
  FillDtype<Kernels, OFFLOAD_BF16>(table);
  FillDtype<Kernels, OFFLOAD_FP16>(table);
  return table;
}

}  // namespace hybridopt
