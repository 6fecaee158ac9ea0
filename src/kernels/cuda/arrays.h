// The arrays of a span whose types are known at compile time, and the update of several elements at
// a time.
#pragma once

#include <cstdint>

#include "kernels/changes/changes.h"
#include "kernels/convert.h"
#include "kernels/cuda/element.h"
#include "kernels/cuda/piece.h"
#include "kernels/cuda/tile_random.h"
#include "kernels/kernels.h"
#include "kernels/stochastic_rounding.h"
#include "kernels/table.h"

namespace hybridopt::cuda {

// The random bits of a tile's elements; zeros unless kRandomly.
template <bool kRandomly>
class TileBits {
 public:
  __device__ TileBits(const UpdateSpan&, uint64_t, uint32_t) {}

  __device__ bool pieces() const { return true; }
  template <uint32_t kCount>
  __device__ Piece<uint32_t, kCount> At(uint64_t) const {
    return {};
  }
};

template <>
class TileBits<true> {
 public:
  __device__ TileBits(const UpdateSpan& span, uint64_t begin, uint32_t count)
      : random_(span, begin, count) {}

  // Whether At can return the bits of several elements at a time.
  __device__ bool pieces() const { return random_.share_tweak(); }
  template <uint32_t kCount>
  __device__ Piece<uint32_t, kCount> At(uint64_t first) const {
    if constexpr (kCount == 1) return {random_.Of(first)};
    return random_.At<kCount>(first);
  }

 private:
  const TileRandom random_;
};

// kTiesAway: bf16 params are rounded with ties away from zero, as masters beside params require.
template <Rule kRule, SpanTypes kTypes, bool kRandomly, bool kTiesAway>
class TileArrays {
  using Grad = Element<kTypes.grad_dtype>;
  using Param = Element<kTypes.param_dtype>;
  using Master = Codec<kTypes.formats.master>;
  using Moment0 = Codec<kTypes.formats.moment0>;
  using Moment1 = Codec<kTypes.formats.moment1>;
  static_assert(Master::kBesideParam ? kTiesAway
                                     : kTypes.param_dtype == OFFLOAD_BF16 || !kTiesAway);

 public:
  // The arrays of elements [begin, begin + count) of the span.
  __device__ TileArrays(const UpdateSpan& span, const NotedBits& noted, uint64_t begin,
                        uint32_t count)
      : bits_(span, begin, count),
        noted_(noted),
        grad_(static_cast<const typename Grad::Stored*>(span.grad)),
        param_(static_cast<typename Param::Stored*>(span.param)),
        master_(static_cast<typename Master::Stored*>(span.master)),
        moment0_(static_cast<typename Moment0::Stored*>(span.moment0)),
        moment1_(static_cast<typename Moment1::Stored*>(span.moment1)) {}

  // Whether several elements may be updated at once.
  __device__ bool pieces() const { return bits_.pieces(); }

  // Load reads all that a rule needs of some elements, before any result is written; Store writes
  // the results.
  template <uint32_t kCount>
  struct Loaded {
    Piece<typename Grad::Stored, kCount> grad;
    Piece<typename Param::Stored, kCount> param;
    Piece<typename Master::Stored, kCount> master;
    Piece<typename Moment0::Stored, kCount> moment0;
    Piece<typename Moment1::Stored, kCount> moment1;
  };

  template <uint32_t kCount>
  __device__ Loaded<kCount> Load(uint64_t first) const {
    Loaded<kCount> loaded;
    loaded.grad = LoadPiece<kCount>(grad_, first);
    loaded.master = LoadPiece<kCount>(master_, first);
    if constexpr (Master::kBesideParam) loaded.param = LoadPiece<kCount>(param_, first);
    if constexpr (kHasMoment0<kRule>) loaded.moment0 = LoadPiece<kCount>(moment0_, first);
    if constexpr (kHasMoment1<kRule>) loaded.moment1 = LoadPiece<kCount>(moment1_, first);
    return loaded;
  }

  template <uint32_t kCount>
  __device__ void UpdateAndStore(const Coefficients& c, uint64_t first,
                                 Loaded<kCount>& loaded) const {
    const Piece<uint32_t, kCount> random = bits_.template At<kCount>(first);
    const bool notes = noted_.words != nullptr;
    uint32_t changed = 0;
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      const float grad = Grad::Widen(loaded.grad.at[i]);
      float param = 0.0f, moment0 = 0.0f, moment1 = 0.0f;
      if constexpr (Master::kBesideParam) {
        param = Master::Decode(loaded.master.at[i], loaded.param.at[i]);
      } else {
        param = Master::Decode(loaded.master.at[i]);
      }
      typename Param::Stored before{};
      bool may_differ = false;  // other code may have another NaN, or a tie rounded the other way
      if (notes) {
        before = Master::kBesideParam ? loaded.param.at[i] : RoundParam(param);
        if constexpr (kTypes.param_dtype != OFFLOAD_FP32 && !Master::kBesideParam)
          may_differ = param != param;
        if constexpr (kTypes.param_dtype == OFFLOAD_BF16 && !kTiesAway)
          may_differ = may_differ || IsTieOfBf16(param);
      }
      if constexpr (kHasMoment0<kRule>) moment0 = Moment0::Decode(loaded.moment0.at[i]);
      if constexpr (kHasMoment1<kRule>) moment1 = Moment1::Decode(loaded.moment1.at[i]);
      Apply<kRule>(c, __fmul_rn(grad, c.grad_factor), param, moment0, moment1);
      if constexpr (kHasMoment0<kRule>)
        loaded.moment0.at[i] = Moment0::template EncodeMoment<kMoment0IsSum<kRule>>(
            moment0, kRandomly, random.at[i] & 0xFFFF);
      if constexpr (kHasMoment1<kRule>)
        loaded.moment1.at[i] = Moment1::template EncodeMoment<kMoment1IsSum<kRule>>(
            moment1, kRandomly, random.at[i] >> 16);
      param = Master::Keep(param, kRandomly, MasterBits(random.at[i]));
      loaded.master.at[i] = Master::Encode(param);
      loaded.param.at[i] = RoundParam(param);
      if (notes && (may_differ || BitsOf(before) != BitsOf(loaded.param.at[i]))) changed |= 1u << i;
    }
    if (changed != 0) Note<kCount>(first, changed);
    if constexpr (kHasMoment0<kRule>) StorePiece(moment0_, first, loaded.moment0);
    if constexpr (kHasMoment1<kRule>) StorePiece(moment1_, first, loaded.moment1);
    StorePiece(master_, first, loaded.master);
    StorePiece(param_, first, loaded.param);
  }

 private:
  __device__ static typename Param::Stored RoundParam(float value) {
    if constexpr (kTiesAway) {
      return Fp32ToBf16TiesAway(value);
    } else {
      return Param::Round(value);
    }
  }
  __device__ static uint32_t BitsOf(float stored) { return __float_as_uint(stored); }
  __device__ static uint32_t BitsOf(uint16_t stored) { return stored; }

  // Sets the bits of those of kCount elements that `changed` has. Other threads and streams set
  // bits of the same words.
  template <uint32_t kCount>
  __device__ void Note(uint64_t first, uint32_t changed) const {
    auto* const words = reinterpret_cast<uint32_t*>(noted_.words);
    const uint64_t bit = noted_.first + first;
    const uint64_t bits = uint64_t{changed} << (bit % 32);
    if (static_cast<uint32_t>(bits) != 0) atomicOr(&words[bit / 32], static_cast<uint32_t>(bits));
    if ((bits >> 32) != 0) atomicOr(&words[bit / 32 + 1], static_cast<uint32_t>(bits >> 32));
  }

  const TileBits<kRandomly> bits_;
  const NotedBits noted_;
  const typename Grad::Stored* const grad_;
  typename Param::Stored* const param_;
  typename Master::Stored* const master_;
  typename Moment0::Stored* const moment0_;
  typename Moment1::Stored* const moment1_;
};

}  // namespace hybridopt::cuda
