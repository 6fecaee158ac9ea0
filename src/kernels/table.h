// Makes a KernelTable from the templates of one implementation.
#pragma once

#include <utility>

#include "kernels/kernels.h"

namespace hybridopt {

template <Rule kRule>
inline constexpr bool kHasMoment0 = MomentOf(kRule, 0) != kNoMoment;
template <Rule kRule>
inline constexpr bool kHasMoment1 = MomentOf(kRule, 1) != kNoMoment;

// How a kernel stores moments. It is a template parameter, so that a kernel's loop has no branch
// for it.
enum class MomentForm { kFp32, kNearest, kStochastic };

// Whether a moment is a sum of squares, which is never below zero and which kernels keep finite.
template <Rule kRule>
inline constexpr bool kMoment0IsSum = IsSumOfSquares(MomentOf(kRule, 0));
template <Rule kRule>
inline constexpr bool kMoment1IsSum = IsSumOfSquares(MomentOf(kRule, 1));

template <typename Kernels, Rule kRule, int32_t kGradDtype, StateLayout kAsked>
constexpr void FillParamDtypes(KernelTable& table) {
  // A rule without moments needs only one of the layouts that differ in moments.
  constexpr StateLayout kLayout = kHasMoment0<kRule> ? kAsked
                                  : IsSplit(kAsked)  ? StateLayout::kSplit
                                                     : StateLayout::kFp32;
  UpdateFunction* row =
      table.update[static_cast<int32_t>(kAsked)][static_cast<int32_t>(kRule)][kGradDtype - 1];
  row[OFFLOAD_BF16 - 1] = Kernels::template Update<kRule, kGradDtype, OFFLOAD_BF16, kLayout>;
  if constexpr (!IsSplit(kLayout)) {
    row[OFFLOAD_FP32 - 1] = Kernels::template Update<kRule, kGradDtype, OFFLOAD_FP32, kLayout>;
    row[OFFLOAD_FP16 - 1] = Kernels::template Update<kRule, kGradDtype, OFFLOAD_FP16, kLayout>;
  }
}

template <typename Kernels, Rule kRule, StateLayout kLayout>
constexpr void FillGradDtypes(KernelTable& table) {
  FillParamDtypes<Kernels, kRule, OFFLOAD_FP32, kLayout>(table);
  FillParamDtypes<Kernels, kRule, OFFLOAD_BF16, kLayout>(table);
  FillParamDtypes<Kernels, kRule, OFFLOAD_FP16, kLayout>(table);
}

template <typename Kernels, Rule kRule>
constexpr void FillRule(KernelTable& table) {
  FillGradDtypes<Kernels, kRule, StateLayout::kFp32>(table);
  FillGradDtypes<Kernels, kRule, StateLayout::kSplit>(table);
  FillGradDtypes<Kernels, kRule, StateLayout::kBf16Moments>(table);
  FillGradDtypes<Kernels, kRule, StateLayout::kSplitBf16Moments>(table);
}

template <typename Kernels, int32_t... kRules>
constexpr void FillRules(KernelTable& table, std::integer_sequence<int32_t, kRules...>) {
  (FillRule<Kernels, Rule{kRules}>(table), ...);
}

template <typename Kernels, int32_t kDtype>
constexpr void FillDtype(KernelTable& table) {
  table.sum_squares[kDtype - 1] = Kernels::template SumSquares<kDtype>;
  table.to_fp32[kDtype - 1] = Kernels::template ToFp32<kDtype>;
  table.accumulate[kDtype - 1] = Kernels::template Accumulate<kDtype>;
  if constexpr (kDtype != OFFLOAD_FP32)
    table.follow_params[kDtype - 1] = Kernels::template FollowParams<kDtype>;
}

// Kernels has the static member templates Update<rule, grad dtype, param dtype, layout>,
// SumSquares<dtype>, ToFp32<dtype>, Accumulate<dtype> and FollowParams<dtype of 16 bits>, and the
// functions Publish and CopyPastCaches.
template <typename Kernels>
constexpr KernelTable MakeTable(const char* isa) {
  KernelTable table = {};
  table.isa = isa;
  table.publish = Kernels::Publish;
  table.copy_past_caches = Kernels::CopyPastCaches;
  FillRules<Kernels>(table, std::make_integer_sequence<int32_t, kRuleCount>());
  FillDtype<Kernels, OFFLOAD_FP32>(table);
  FillDtype<Kernels, OFFLOAD_BF16>(table);
  FillDtype<Kernels, OFFLOAD_FP16>(table);
  return table;
}

}  // namespace hybridopt
