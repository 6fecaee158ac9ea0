// Makes a KernelTable, and the table of its updates, from the templates of one implementation.
#pragma once

#include <utility>

#include "kernels/kernels.h"

namespace hybridopt {

template <Rule kRule>
inline constexpr bool kHasMoment0 = MomentOf(kRule, 0) != kNoMoment;
template <Rule kRule>
inline constexpr bool kHasMoment1 = MomentOf(kRule, 1) != kNoMoment;

// Whether a moment is a sum of squares, which is never below zero and which kernels keep finite.
template <Rule kRule>
inline constexpr bool kMoment0IsSum = IsSumOfSquares(MomentOf(kRule, 0));
template <Rule kRule>
inline constexpr bool kMoment1IsSum = IsSumOfSquares(MomentOf(kRule, 1));

// A rule without moments needs only one of the combinations that differ only in the formats of
// moments.
template <Rule kRule>
constexpr StateFormats KernelFormats(const StateFormats& formats) {
  return kHasMoment0<kRule> ? formats : StateFormats{.master = formats.master};
}

// Whether a kernel with these types rounds state, so that a step's random bits have an effect.
template <Rule kRule>
constexpr bool RoundsState(const StateFormats& formats) {
  return RowOf(formats.master).is_rounded ||
         (kHasMoment0<kRule> && RowOf(formats.moment0).is_rounded);
}

template <typename Kernels, Rule kRule, SpanTypes kAsked, typename T>
constexpr void FillOne(ByTypes<T>& update) {
  constexpr SpanTypes kTypes = {kAsked.grad_dtype, kAsked.param_dtype,
                                KernelFormats<kRule>(kAsked.formats)};
  if constexpr (kTypes.param_dtype == OFFLOAD_BF16 || !RowOf(kTypes.formats.master).beside_param)
    update.Of(kRule, kAsked) = Kernels::template Update<kRule, kTypes>;
}

template <typename Kernels, Rule kRule, StateFormats kFormats, int32_t kGradDtype, typename T>
constexpr void FillParamDtypes(ByTypes<T>& update) {
  FillOne<Kernels, kRule, SpanTypes{kGradDtype, OFFLOAD_FP32, kFormats}>(update);
  FillOne<Kernels, kRule, SpanTypes{kGradDtype, OFFLOAD_BF16, kFormats}>(update);
  FillOne<Kernels, kRule, SpanTypes{kGradDtype, OFFLOAD_FP16, kFormats}>(update);
}

template <typename Kernels, Rule kRule, Format kMaster, Format kMoment, typename T>
constexpr void FillGradDtypes(ByTypes<T>& update) {
  if constexpr (RowOf(kMaster).master_layout != kNotOffered &&
                RowOf(kMoment).moment_dtype != kNotOffered) {
    constexpr StateFormats kFormats = {kMaster, kMoment, kMoment};
    FillParamDtypes<Kernels, kRule, kFormats, OFFLOAD_FP32>(update);
    FillParamDtypes<Kernels, kRule, kFormats, OFFLOAD_BF16>(update);
    FillParamDtypes<Kernels, kRule, kFormats, OFFLOAD_FP16>(update);
  }
}

template <typename Kernels, Rule kRule, Format kMaster, typename T, int32_t... kMoments>
constexpr void FillMoments(ByTypes<T>& update, std::integer_sequence<int32_t, kMoments...>) {
  (FillGradDtypes<Kernels, kRule, kMaster, Format{kMoments}>(update), ...);
}

template <typename Kernels, Rule kRule, typename T, int32_t... kMasters>
constexpr void FillMasters(ByTypes<T>& update, std::integer_sequence<int32_t, kMasters...> all) {
  (FillMoments<Kernels, kRule, Format{kMasters}>(update, all), ...);
}

template <typename Kernels, typename T, int32_t... kRules>
constexpr void FillRules(ByTypes<T>& update, std::integer_sequence<int32_t, kRules...>) {
  (FillMasters<Kernels, Rule{kRules}>(update, std::make_integer_sequence<int32_t, kFormatCount>()),
   ...);
}

// Kernels has the static member template Update<rule, types>.
template <typename Kernels, Rule kRule, typename T>
constexpr ByTypes<T> MakeUpdatesOfRule() {
  ByTypes<T> update = {};
  FillMasters<Kernels, kRule>(update, std::make_integer_sequence<int32_t, kFormatCount>());
  return update;
}

// The same for all rules.
template <typename Kernels, typename T>
constexpr ByTypes<T> MakeUpdates() {
  ByTypes<T> update = {};
  FillRules<Kernels>(update, std::make_integer_sequence<int32_t, kRuleCount>());
  return update;
}

template <typename Kernels, int32_t kDtype>
constexpr void FillDtype(KernelTable& table) {
  table.sum_squares[kDtype - 1] = Kernels::template SumSquares<kDtype>;
  table.to_fp32[kDtype - 1] = Kernels::template ToFp32<kDtype>;
  table.accumulate[kDtype - 1] = Kernels::template Accumulate<kDtype>;
  table.follow_params[kDtype - 1] = Kernels::template FollowParams<kDtype>;
}

// Kernels has the static member templates Update<rule, types>, SumSquares<dtype>, ToFp32<dtype>,
// Accumulate<dtype> and FollowParams<dtype>, and the functions Publish, CopyPastCaches and
// MultiplyTile.
template <typename Kernels>
constexpr KernelTable MakeTable(const char* isa) {
  KernelTable table = {};
  table.isa = isa;
  table.publish = Kernels::Publish;
  table.copy_past_caches = Kernels::CopyPastCaches;
  table.update = MakeUpdates<Kernels, UpdateFunction>();
  FillDtype<Kernels, OFFLOAD_FP32>(table);
  FillDtype<Kernels, OFFLOAD_BF16>(table);
  FillDtype<Kernels, OFFLOAD_FP16>(table);
  table.multiply_tile = Kernels::MultiplyTile;
  return table;
}

}  // namespace hybridopt
