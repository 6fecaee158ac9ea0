// The arrays of a span whose types are known at compile time, and the update of several elements at
// once.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "kernels/convert.h"
#include "kernels/cuda/element.h"
#include "kernels/cuda/piece.h"
#include "kernels/cuda/tile_random.h"
#include "kernels/kernels.h"
#include "kernels/stochastic_rounding.h"
#include "kernels/table.h"

namespace hybridopt::cuda {

// How a tile's moments are stored. Sums of squares are kept finite.
template <MomentForm kForm>
class Moments {
 public:
  using Stored = std::conditional_t<kForm == MomentForm::kFp32, float, uint16_t>;
  __device__ Moments(const UpdateSpan&, uint64_t, uint32_t) {}

  __device__ bool pieces() const { return true; }
  template <uint32_t kCount>
  __device__ Piece<uint32_t, kCount> RandomAt(uint64_t) const {
    return {};
  }
};

template <>
class Moments<MomentForm::kStochastic> {
 public:
  using Stored = uint16_t;
  __device__ Moments(const UpdateSpan& span, uint64_t begin, uint32_t count)
      : random_(span, begin, count) {}

  // Whether RandomAt can give the bits of several elements at once.
  __device__ bool pieces() const { return random_.share_tweak(); }
  template <uint32_t kCount>
  __device__ Piece<uint32_t, kCount> RandomAt(uint64_t first) const {
    if constexpr (kCount == 1) return {random_.Of(first)};
    return random_.At<kCount>(first);
  }

 private:
  const TileRandom random_;
};

__device__ inline float WidenMoment(float stored) { return stored; }
__device__ inline float WidenMoment(uint16_t stored) { return Bf16ToFp32(stored); }

// `random` is 16 bits.
template <MomentForm kForm, bool kIsSum>
__device__ typename Moments<kForm>::Stored RoundMoment(float value, uint32_t random) {
  if constexpr (kForm == MomentForm::kFp32) return value;
  if constexpr (kIsSum) value = value < kBf16Max ? value : kBf16Max;
  if constexpr (kForm == MomentForm::kNearest) return Fp32ToBf16(value);
  // The comparison also replaces NaN in a sum of squares.
  if constexpr (kIsSum)
    return static_cast<uint16_t>((std::bit_cast<uint32_t>(value) + random) >> 16);
  return Fp32ToBf16Randomly(value, random);
}

// kTiesAway: how params of bf16 are rounded; split masters need it.
template <Rule kRule, bool kSplit, MomentForm kForm, int32_t kGradDtype, int32_t kParamDtype,
          bool kTiesAway>
class TileArrays {
  static_assert(kSplit ? kTiesAway : kParamDtype == OFFLOAD_BF16 || !kTiesAway);
  using Grad = Element<kGradDtype>;
  using Param = Element<kParamDtype>;
  using Master = std::conditional_t<kSplit, uint16_t, float>;
  using Moment = typename Moments<kForm>::Stored;

 public:
  // The arrays of elements [begin, begin + count) of the span.
  __device__ TileArrays(const UpdateSpan& span, uint64_t begin, uint32_t count)
      : moments_(span, begin, count),
        grad_(static_cast<const typename Grad::Stored*>(span.grad)),
        param_(static_cast<typename Param::Stored*>(span.param)),
        master_(static_cast<Master*>(span.master)),
        moment0_(static_cast<Moment*>(span.moment0)),
        moment1_(static_cast<Moment*>(span.moment1)) {}

  // Whether several elements may be updated at once.
  __device__ bool pieces() const { return moments_.pieces(); }

  // Load reads all that a rule needs of some elements, before any result is written; Store writes
  // the results.
  template <uint32_t kCount>
  struct Loaded {
    Piece<typename Grad::Stored, kCount> grad;
    Piece<typename Param::Stored, kCount> param;
    Piece<Master, kCount> master;
    Piece<Moment, kCount> moment0;
    Piece<Moment, kCount> moment1;
  };

  template <uint32_t kCount>
  __device__ Loaded<kCount> Load(uint64_t first) const {
    Loaded<kCount> loaded;
    loaded.grad = LoadPiece<kCount>(grad_, first);
    loaded.master = LoadPiece<kCount>(master_, first);
    if constexpr (kSplit) loaded.param = LoadPiece<kCount>(param_, first);
    if constexpr (kHasMoment0<kRule>) loaded.moment0 = LoadPiece<kCount>(moment0_, first);
    if constexpr (kHasMoment1<kRule>) loaded.moment1 = LoadPiece<kCount>(moment1_, first);
    return loaded;
  }

  template <uint32_t kCount>
  __device__ void UpdateAndStore(const Coefficients& c, uint64_t first,
                                 Loaded<kCount>& loaded) const {
    const Piece<uint32_t, kCount> random = moments_.template RandomAt<kCount>(first);
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      const float grad = Grad::Widen(loaded.grad.at[i]);
      float param = 0.0f, moment0 = 0.0f, moment1 = 0.0f;
      if constexpr (kSplit) {
        param = JoinHalves(loaded.param.at[i], loaded.master.at[i]);
      } else {
        param = loaded.master.at[i];
      }
      if constexpr (kHasMoment0<kRule>) moment0 = WidenMoment(loaded.moment0.at[i]);
      if constexpr (kHasMoment1<kRule>) moment1 = WidenMoment(loaded.moment1.at[i]);
      Apply<kRule>(c, __fmul_rn(grad, c.grad_factor), param, moment0, moment1);
      if constexpr (kHasMoment0<kRule>)
        loaded.moment0.at[i] =
            RoundMoment<kForm, kMoment0IsSum<kRule>>(moment0, random.at[i] & 0xFFFF);
      if constexpr (kHasMoment1<kRule>)
        loaded.moment1.at[i] =
            RoundMoment<kForm, kMoment1IsSum<kRule>>(moment1, random.at[i] >> 16);
      if constexpr (kSplit) {
        loaded.master.at[i] = LowHalf(param);
      } else {
        loaded.master.at[i] = param;
      }
      if constexpr (kTiesAway) {
        loaded.param.at[i] = Fp32ToBf16TiesAway(param);
      } else {
        loaded.param.at[i] = Param::Round(param);
      }
    }
    if constexpr (kHasMoment0<kRule>) StorePiece(moment0_, first, loaded.moment0);
    if constexpr (kHasMoment1<kRule>) StorePiece(moment1_, first, loaded.moment1);
    StorePiece(master_, first, loaded.master);
    StorePiece(param_, first, loaded.param);
  }

 private:
  const Moments<kForm> moments_;
  const typename Grad::Stored* const grad_;
  typename Param::Stored* const param_;
  Master* const master_;
  Moment* const moment0_;
  Moment* const moment1_;
};

}  // namespace hybridopt::cuda
