// Every instruction set from this one source: Google Highway includes it again for each target
// and the end of the file lists the tables. Only targets with a true fused multiply-add are built,
// because only they give the bits of reference.cpp; the line order of the rules is the same there.
//
// Only Highway's headers are used: its library keeps process-wide state about the CPU.
#define HWY_COMPILE_ALL_ATTAINABLE
#define HWY_DISABLE_PCLMUL_AES
// SSE has no fused multiply-add. AVX3_DL would add nothing that is used here; nor would AVX-512's
// instructions for bf16, which flush denormals to zero. HWY_SVE takes vectors of any length: SVE2
// and the targets for one length would add nothing either.
#define HWY_DISABLED_TARGETS                                                              \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | \
   HWY_WASM | HWY_WASM_EMU256)

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/simd.cpp"
#include <hwy/foreach_target.h>
// foreach_target.h comes first; it includes this file again, once per target.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/convert.h"
#include "kernels/kernels.h"
#include "kernels/rounding.h"
#include "kernels/table.h"

#ifdef __FAST_MATH__
#error "The arithmetic is exact: build without -ffast-math."
#endif

// The static target that Highway insists on may be one without fused multiply-add: no code then.
#if HWY_NATIVE_FMA

HWY_BEFORE_NAMESPACE();
namespace hybridopt {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::ScalableTag<uint32_t>;
using U16 = hn::ScalableTag<uint16_t>;
using HalfU16 = hn::Rebind<uint16_t, F32>;
using HalfF16 = hn::Rebind<hwy::float16_t, F32>;
using Float = hn::Vec<F32>;

// A constant, but where only the CPU knows how long its vectors are (SVE). There, vectors are no
// members of structs and arrays either.
HWY_INLINE HWY_MAYBE_UNUSED uint64_t Lanes() { return hn::Lanes(F32()); }
// The loop's unit: two vectors of fp32, one full vector of bf16 or fp16.
HWY_INLINE HWY_MAYBE_UNUSED uint64_t Unit() { return 2 * Lanes(); }
constexpr uint64_t kUnitMax = 2 * HWY_LANES(float);

template <int32_t kDtype>
using Stored = typename Element<kDtype>::Stored;

// One vector of elements on its way through a rule.
struct Value {
  Float& grad;
  Float& param;
  Float& moment0;
  Float& moment1;
};

HWY_INLINE Float Broadcast(float value) { return hn::Set(F32(), value); }

HWY_INLINE Float Lerp(Float old, Float next, float keep, float weight) {
  return weight < 0.5f ? hn::MulAdd(Broadcast(weight), hn::Sub(next, old), old)
                       : hn::MulAdd(Broadcast(keep), hn::Sub(old, next), next);
}

// Not Min, which instruction sets define differently for NaN.
HWY_INLINE Float Saturate(Float value) {
  const Float max = Broadcast(FLT_MAX);
  return hn::IfThenElse(hn::Lt(value, max), value, max);
}

HWY_INLINE void Adam(const Coefficients& c, const Value& x) {
  const Float grad = hn::MulAdd(Broadcast(c.l2_decay), x.param, x.grad);
  x.moment0 = Lerp(x.moment0, grad, c.keep0, c.weight0);
  const Float square = Saturate(hn::Mul(grad, grad));
  x.moment1 = Lerp(x.moment1, square, c.keep1, c.weight1);
  const Float root = hn::Sqrt(x.moment1);
  const Float denominator =
      hn::MulAdd(root, Broadcast(c.inverse_sqrt_bias_correction2), Broadcast(c.eps));
  const Float quotient = hn::Div(x.moment0, denominator);
  Float update = hn::MulAdd(Broadcast(c.step_size), quotient, Broadcast(0.0f));
  update = hn::MulAdd(Broadcast(c.decoupled_decay), x.param, update);
  x.param = hn::Sub(x.param, update);
}

HWY_INLINE void SgdMomentum(const Coefficients& c, const Value& x) {
  const Float grad = hn::MulAdd(Broadcast(c.l2_decay), x.param, x.grad);
  const Float weighted = hn::Mul(Broadcast(c.weight0), grad);
  x.moment0 = hn::MulAdd(Broadcast(c.keep0), x.moment0, weighted);
  const Float direction =
      c.nesterov ? hn::MulAdd(Broadcast(c.nesterov_momentum), x.moment0, grad) : x.moment0;
  const Float update = hn::MulAdd(Broadcast(c.step_size), direction, Broadcast(0.0f));
  x.param = hn::Sub(x.param, update);
}

HWY_INLINE void SgdPlain(const Coefficients& c, const Value& x) {
  const Float grad = hn::MulAdd(Broadcast(c.l2_decay), x.param, x.grad);
  const Float update = hn::MulAdd(Broadcast(c.step_size), grad, Broadcast(0.0f));
  x.param = hn::Sub(x.param, update);
}

HWY_INLINE void Lion(const Coefficients& c, const Value& x) {
  const Float zero = Broadcast(0.0f);
  const Float interpolated = Lerp(x.moment0, x.grad, c.keep0, c.weight0);
  const Float not_positive = hn::IfThenElse(hn::Lt(interpolated, zero), Broadcast(-1.0f), zero);
  const Float sign = hn::IfThenElse(hn::Gt(interpolated, zero), Broadcast(1.0f), not_positive);
  Float update = hn::MulAdd(Broadcast(c.step_size), sign, zero);
  update = hn::MulAdd(Broadcast(c.decoupled_decay), x.param, update);
  x.param = hn::Sub(x.param, update);
  x.moment0 = Lerp(x.moment0, x.grad, c.keep1, c.weight1);
}

HWY_INLINE void Adagrad(const Coefficients& c, const Value& x) {
  const Float grad = hn::MulAdd(Broadcast(c.l2_decay), x.param, x.grad);
  x.moment0 = Saturate(hn::MulAdd(grad, grad, x.moment0));
  const Float root = hn::Sqrt(x.moment0);
  const Float denominator = hn::Add(root, Broadcast(c.eps));
  const Float quotient = hn::Div(grad, denominator);
  const Float update = hn::MulAdd(Broadcast(c.step_size), quotient, Broadcast(0.0f));
  x.param = hn::Sub(x.param, update);
}

template <Rule kRule>
HWY_INLINE void Apply(const Coefficients& c, const Value& x) {
  if constexpr (kRule == Rule::kAdam) Adam(c, x);
  if constexpr (kRule == Rule::kSgdMomentum) SgdMomentum(c, x);
  if constexpr (kRule == Rule::kSgdPlain) SgdPlain(c, x);
  if constexpr (kRule == Rule::kLion) Lion(c, x);
  if constexpr (kRule == Rule::kAdagrad) Adagrad(c, x);
}

template <int32_t kDtype>
HWY_INLINE Float LoadWide(const Stored<kDtype>* source) {
  if constexpr (kDtype == OFFLOAD_FP32) {
    return hn::LoadU(F32(), source);
  } else if constexpr (kDtype == OFFLOAD_BF16) {
    const auto wide = hn::PromoteTo(U32(), hn::LoadU(HalfU16(), source));
    return hn::BitCast(F32(), hn::ShiftLeft<16>(wide));
  } else {
    return hn::PromoteTo(F32(), hn::BitCast(HalfF16(), hn::LoadU(HalfU16(), source)));
  }
}

// bf16 in the upper half of each lane; the lower half is rubbish. `half` and `ties_to_even` are
// 0x7FFF and 1, or 0x8000 and 0 for ties away from zero.
HWY_INLINE hn::Vec<U16> RoundToBf16(Float value, hn::Vec<U32> half, hn::Vec<U32> ties_to_even) {
  const auto bits = hn::BitCast(U32(), value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), ties_to_even);
  const auto rounded = hn::Add(hn::Add(bits, half), odd);
  const auto quiet_nan = hn::Or(bits, hn::Set(U32(), 0x00400000));
  const auto is_nan = hn::RebindMask(U32(), hn::IsNaN(value));
  return hn::BitCast(U16(), hn::IfThenElse(is_nan, quiet_nan, rounded));
}

// Packs the upper halves of a unit's lanes.
HWY_INLINE hn::Vec<U16> PackUpper(hn::Vec<U16> low, hn::Vec<U16> high) {
  return hn::ConcatOdd(U16(), high, low);
}

// Rounds and packs one unit.
template <int32_t kDtype>
HWY_INLINE hn::Vec<U16> Pack(Float low, Float high, const Rounding& rounding) {
  if constexpr (kDtype == OFFLOAD_BF16) {
    const auto half = hn::Set(U32(), rounding.ties_away ? 0x8000 : 0x7FFF);
    const auto ties_to_even = hn::Set(U32(), rounding.ties_away ? 0 : 1);
    return PackUpper(RoundToBf16(low, half, ties_to_even), RoundToBf16(high, half, ties_to_even));
  } else {
    const auto low_half = hn::BitCast(HalfU16(), hn::DemoteTo(HalfF16(), low));
    const auto high_half = hn::BitCast(HalfU16(), hn::DemoteTo(HalfF16(), high));
    return hn::Combine(U16(), high_half, low_half);
  }
}

// How the kernel stores moments. What is one fixed thing for a whole span is no branch in its loop.
enum class MomentForm { kFp32, kNearest, kStochastic };

// A run's roundings: of the param, and its first element's counter and tweak.
struct RunRounding {
  Rounding rounding;
  uint32_t counter;
  uint32_t tweak;
};

// rounding.h's RandomBits of the vector whose first element's counter is `counter`.
HWY_INLINE hn::Vec<U32> RandomBitsOfVector(uint32_t counter, uint32_t tweak) {
  auto x = hn::Iota(U32(), counter);
  x = hn::Xor(x, hn::ShiftRight<16>(x));
  x = hn::Mul(x, hn::Set(U32(), kHashFactor0));
  x = hn::Xor(x, hn::Set(U32(), tweak));
  x = hn::Xor(x, hn::ShiftRight<15>(x));
  x = hn::Mul(x, hn::Set(U32(), kHashFactor1));
  return hn::Xor(x, hn::ShiftRight<16>(x));
}

// A moment in bf16 in the upper half of each lane. `random` is below 2^16.
template <MomentForm kForm, bool kIsSum>
HWY_INLINE hn::Vec<U16> RoundMoment(Float value, hn::Vec<U32> random) {
  if constexpr (kIsSum) {
    const Float max = Broadcast(0x1.FEp127f);
    value = hn::IfThenElse(hn::Lt(value, max), value, max);  // no NaN is left
  }
  const auto bits = hn::BitCast(U32(), value);
  auto rounded = hn::Add(bits, random);
  if constexpr (kForm == MomentForm::kNearest) {
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(U32(), 1));
    rounded = hn::Add(hn::Add(bits, odd), hn::Set(U32(), 0x7FFF));
  }
  if constexpr (kIsSum) return hn::BitCast(U16(), rounded);
  const auto quiet_nan = hn::Or(bits, hn::Set(U32(), 0x00400000));
  const auto is_nan = hn::RebindMask(U32(), hn::IsNaN(value));
  return hn::BitCast(U16(), hn::IfThenElse(is_nan, quiet_nan, rounded));
}

template <MomentForm kForm>
using StoredMoment = std::conditional_t<kForm == MomentForm::kFp32, float, uint16_t>;

template <MomentForm kForm>
HWY_INLINE Float LoadMoment(const void* moments, uint64_t begin) {
  const auto* stored = static_cast<const StoredMoment<kForm>*>(moments);
  return LoadWide < kForm == MomentForm::kFp32 ? OFFLOAD_FP32 : OFFLOAD_BF16 > (stored + begin);
}

// Stores a unit of moments. kUpper: the upper half of the random bits is this moment's.
template <MomentForm kForm, bool kIsSum, bool kUpper>
HWY_INLINE void StoreMoments(Float low, Float high, hn::Vec<U32> random_low,
                             hn::Vec<U32> random_high, void* moments, uint64_t begin) {
  auto* stored = static_cast<StoredMoment<kForm>*>(moments) + begin;
  if constexpr (kForm == MomentForm::kFp32) {
    hn::StoreU(low, F32(), stored);
    hn::StoreU(high, F32(), stored + Lanes());
  } else {
    const auto mine = [](hn::Vec<U32> random) HWY_ATTR {
      if constexpr (kUpper) return hn::ShiftRight<16>(random);
      return hn::And(random, hn::Set(U32(), 0xFFFF));
    };
    const auto rounded_low = RoundMoment<kForm, kIsSum>(low, mine(random_low));
    const auto rounded_high = RoundMoment<kForm, kIsSum>(high, mine(random_high));
    hn::StoreU(PackUpper(rounded_low, rounded_high), U16(), stored);
  }
}

template <bool kSplit>
HWY_INLINE Float LoadMaster(const UpdateSpan& span, uint64_t begin) {
  if constexpr (kSplit) {
    const auto* high = static_cast<const uint16_t*>(span.param) + begin;
    const auto* low = static_cast<const int16_t*>(span.master) + begin;
    const hn::RebindToSigned<U32> i32;
    const auto lost = hn::PromoteTo(i32, hn::LoadU(hn::RebindToSigned<HalfU16>(), low));
    const auto rounded = hn::BitCast(i32, LoadWide<OFFLOAD_BF16>(high));
    return hn::BitCast(F32(), hn::Add(rounded, lost));
  } else {
    return hn::LoadU(F32(), static_cast<const float*>(span.master) + begin);
  }
}

// One half of a unit, NaNs with their quiet bit set and their lower half 0.
HWY_INLINE hn::Vec<U32> WithoutLowNan(Float value) {
  const auto bits = hn::BitCast(U32(), value);
  const auto upper = hn::Set(U32(), 0xFFFF0000);
  const auto nan = hn::And(hn::Or(bits, hn::Set(U32(), 0x00400000)), upper);
  return hn::IfThenElse(hn::RebindMask(U32(), hn::IsNaN(value)), nan, bits);
}

// Stores a unit of masters as their two halves. Both have just been read: no store past the caches.
HWY_INLINE void StoreHalves(Float low, Float high, const UpdateSpan& span, uint64_t begin) {
  const auto low_bits = WithoutLowNan(low), high_bits = WithoutLowNan(high);
  const auto half = hn::Set(U32(), 0x8000);
  const auto params = PackUpper(hn::BitCast(U16(), hn::Add(low_bits, half)),
                                hn::BitCast(U16(), hn::Add(high_bits, half)));
  const auto lower =
      hn::ConcatEven(U16(), hn::BitCast(U16(), high_bits), hn::BitCast(U16(), low_bits));
  hn::StoreU(params, U16(), static_cast<uint16_t*>(span.param) + begin);
  hn::StoreU(lower, U16(), static_cast<uint16_t*>(span.master) + begin);
}

// Updates the vector at `begin`, but stores nothing.
template <Rule kRule, int32_t kGradDtype, bool kSplit, MomentForm kForm>
HWY_INLINE void UpdateVector(const Coefficients& c, const UpdateSpan& span, uint64_t begin,
                             const Value& x) {
  const auto* grad = static_cast<const Stored<kGradDtype>*>(span.grad);
  x.grad = hn::Mul(LoadWide<kGradDtype>(grad + begin), Broadcast(c.grad_factor));
  x.param = LoadMaster<kSplit>(span, begin);
  if constexpr (kHasMoment0<kRule>) x.moment0 = LoadMoment<kForm>(span.moment0, begin);
  if constexpr (kHasMoment1<kRule>) x.moment1 = LoadMoment<kForm>(span.moment1, begin);
  Apply<kRule>(c, x);
}

template <Rule kRule, MomentForm kForm>
HWY_INLINE void StoreUnitMoments(const Value& low, const Value& high, const UpdateSpan& span,
                                 const RunRounding& run, uint64_t begin) {
  auto random_low = hn::Zero(U32()), random_high = hn::Zero(U32());
  if constexpr (kForm == MomentForm::kStochastic) {
    const uint32_t counter = run.counter + static_cast<uint32_t>(begin);
    random_low = RandomBitsOfVector(counter, run.tweak);
    random_high = RandomBitsOfVector(counter + static_cast<uint32_t>(Lanes()), run.tweak);
  }
  if constexpr (kHasMoment0<kRule>)
    StoreMoments<kForm, kMoment0IsSum<kRule>, false>(low.moment0, high.moment0, random_low,
                                                     random_high, span.moment0, begin);
  if constexpr (kHasMoment1<kRule>)
    StoreMoments<kForm, true, true>(low.moment1, high.moment1, random_low, random_high,
                                    span.moment1, begin);
}

// Updates whole units: span.count is a multiple of Unit(). The arguments are copies, so that no
// store below can alias them.
template <Rule kRule, int32_t kGradDtype, int32_t kParamDtype, bool kSplit, MomentForm kForm>
void UpdateUnits(const Coefficients c, const UpdateSpan span, const RunRounding run) {
  auto* param = static_cast<Stored<kParamDtype>*>(span.param);
  const bool in_place = span.param == span.master;
  // The step does not read the low-precision param again: it goes past the caches.
  const bool stream = reinterpret_cast<uintptr_t>(param) % (Unit() * sizeof(uint16_t)) == 0;
  for (uint64_t i = 0; i < span.count; i += Unit()) {
    Float grad0 = Broadcast(0), param0 = grad0, first0 = grad0, second0 = grad0;
    Float grad1 = grad0, param1 = grad0, first1 = grad0, second1 = grad0;
    const Value low = {grad0, param0, first0, second0};
    const Value high = {grad1, param1, first1, second1};
    UpdateVector<kRule, kGradDtype, kSplit, kForm>(c, span, i, low);
    UpdateVector<kRule, kGradDtype, kSplit, kForm>(c, span, i + Lanes(), high);
    StoreUnitMoments<kRule, kForm>(low, high, span, run, i);
    if constexpr (kSplit) {
      StoreHalves(low.param, high.param, span, i);
      continue;
    }
    auto* master = static_cast<float*>(span.master);
    hn::StoreU(low.param, F32(), master + i);
    hn::StoreU(high.param, F32(), master + i + Lanes());
    if constexpr (kParamDtype != OFFLOAD_FP32) {
      const auto packed = Pack<kParamDtype>(low.param, high.param, run.rounding);
      if (stream) {
        hn::Stream(packed, U16(), param + i);
      } else {
        hn::StoreU(packed, U16(), param + i);
      }
    } else if (!in_place) {
      hn::StoreU(low.param, F32(), param + i);
      hn::StoreU(high.param, F32(), param + i + Lanes());
    }
  }
}

// A padded copy of the last elements of an array.
template <typename T>
struct Tail {
  T values[kUnitMax] = {};

  void CopyIn(const void* source, uint64_t begin, uint64_t count) {
    std::memcpy(values, static_cast<const T*>(source) + begin, count * sizeof(T));
  }
  void CopyOut(void* destination, uint64_t begin, uint64_t count) const {
    std::memcpy(static_cast<T*>(destination) + begin, values, count * sizeof(T));
  }
};

// The last elements, fewer than a unit, run the loop's own code on padded copies. Padding is zero,
// which every rule maps to finite numbers.
template <Rule kRule, int32_t kGradDtype, int32_t kParamDtype, bool kSplit, MomentForm kForm>
void UpdateTail(const Coefficients& c, const UpdateSpan& span, const RunRounding& run,
                uint64_t begin, uint64_t count) {
  Tail<Stored<kGradDtype>> grad;
  Tail<Stored<kParamDtype>> param;
  Tail<std::conditional_t<kSplit, uint16_t, float>> master;
  Tail<StoredMoment<kForm>> moment0;
  Tail<StoredMoment<kForm>> moment1;
  grad.CopyIn(span.grad, begin, count);
  if constexpr (kSplit) param.CopyIn(span.param, begin, count);
  master.CopyIn(span.master, begin, count);
  if constexpr (kHasMoment0<kRule>) moment0.CopyIn(span.moment0, begin, count);
  if constexpr (kHasMoment1<kRule>) moment1.CopyIn(span.moment1, begin, count);
  RunRounding rest = run;
  rest.counter += static_cast<uint32_t>(begin);
  UpdateUnits<kRule, kGradDtype, kParamDtype, kSplit, kForm>(
      c, {grad.values, param.values, master.values, moment0.values, moment1.values, Unit()}, rest);
  if constexpr (kHasMoment0<kRule>) moment0.CopyOut(span.moment0, begin, count);
  if constexpr (kHasMoment1<kRule>) moment1.CopyOut(span.moment1, begin, count);
  master.CopyOut(span.master, begin, count);
  param.CopyOut(span.param, begin, count);
}

// Updates elements whose indices follow each other.
template <Rule kRule, int32_t kGradDtype, int32_t kParamDtype, bool kSplit, MomentForm kForm>
void UpdateRun(const Coefficients& c, const UpdateSpan& span, const RunRounding& run) {
  const uint64_t tail = span.count % Unit();
  UpdateSpan units = span;
  units.count = span.count - tail;
  UpdateUnits<kRule, kGradDtype, kParamDtype, kSplit, kForm>(c, units, run);
  if (tail != 0)
    UpdateTail<kRule, kGradDtype, kParamDtype, kSplit, kForm>(c, span, run, units.count, tail);
}

// The norm's lanes are vectors of double. An fma of an exact product rounds as the addition does.
using F64 = hn::CappedTag<double, kNormLanes>;
using Double = hn::Vec<F64>;

template <int32_t kDtype>
HWY_INLINE Double LoadDouble(const Stored<kDtype>* source) {
  const hn::Rebind<float, F64> f32;
  if constexpr (kDtype == OFFLOAD_FP32) {
    return hn::PromoteTo(F64(), hn::LoadU(f32, source));
  } else {
    const auto stored = hn::LoadU(hn::Rebind<uint16_t, F64>(), source);
    if constexpr (kDtype == OFFLOAD_BF16) {
      const auto wide = hn::PromoteTo(hn::Rebind<uint32_t, F64>(), stored);
      return hn::PromoteTo(F64(), hn::BitCast(f32, hn::ShiftLeft<16>(wide)));
    } else {
      const hn::Rebind<hwy::float16_t, F64> f16;
      return hn::PromoteTo(F64(), hn::PromoteTo(f32, hn::BitCast(f16, stored)));
    }
  }
}

template <int32_t kDtype>
HWY_INLINE Double AddSquares(const Stored<kDtype>* grad, Double sums) {
  const Double value = LoadDouble<kDtype>(grad);
  return hn::MulAdd(value, value, sums);
}

// AddRows adds the squares of the first `count` elements (rows of kNormLanes) of kBlocks blocks to
// the lanes of each.
#if HWY_HAVE_SCALABLE
// Blocks go side by side: a lane's additions must wait for each other, those of other blocks need
// not.
constexpr uint64_t kBlocksTogether = 4;

// One vector of lanes after the other: what is no array element can be a variable.
template <int32_t kDtype, uint64_t kBlocks>
HWY_INLINE void AddRows(const Stored<kDtype>* grad, uint64_t count, double (*lanes)[kNormLanes]) {
  static_assert(kBlocks == 1 || kBlocks == kBlocksTogether);
  const Stored<kDtype>* blocks[kBlocksTogether];
  for (uint64_t block = 0; block < kBlocksTogether; ++block)
    blocks[block] = grad + block % kBlocks * kNormBlockElements;
  for (uint64_t k = 0; k < kNormLanes; k += hn::Lanes(F64())) {
    Double sums0 = hn::LoadU(F64(), lanes[0] + k);
    Double sums1 = hn::LoadU(F64(), lanes[1 % kBlocks] + k);
    Double sums2 = hn::LoadU(F64(), lanes[2 % kBlocks] + k);
    Double sums3 = hn::LoadU(F64(), lanes[3 % kBlocks] + k);
    for (uint64_t i = k; i < count; i += kNormLanes) {
      sums0 = AddSquares<kDtype>(blocks[0] + i, sums0);
      if constexpr (kBlocks == 1) continue;
      sums1 = AddSquares<kDtype>(blocks[1] + i, sums1);
      sums2 = AddSquares<kDtype>(blocks[2] + i, sums2);
      sums3 = AddSquares<kDtype>(blocks[3] + i, sums3);
    }
    hn::StoreU(sums0, F64(), lanes[0] + k);
    if constexpr (kBlocks == 1) continue;
    hn::StoreU(sums1, F64(), lanes[1 % kBlocks] + k);
    hn::StoreU(sums2, F64(), lanes[2 % kBlocks] + k);
    hn::StoreU(sums3, F64(), lanes[3 % kBlocks] + k);
  }
}
#else
// Memory is read in order: two blocks side by side would be two streams, each too short for the
// CPU to fetch ahead, at half the speed (docs/PERFORMANCE.md).
constexpr uint64_t kBlocksTogether = 1;

// The squares of two vectors of elements. bf16 widens cheapest in pairs, the even ones shifted up
// and the odd ones masked, so that its lanes alternate between both.
template <int32_t kDtype>
HWY_INLINE void AddPairOfSquares(const Stored<kDtype>* grad, Double& sums0, Double& sums1) {
  if constexpr (kDtype == OFFLOAD_BF16) {
    const hn::Rebind<uint32_t, F64> u32;
    const hn::Rebind<float, F64> f32;
    const auto pairs =
        hn::BitCast(u32, hn::LoadU(hn::Repartition<uint16_t, decltype(u32)>(), grad));
    const auto even = hn::ShiftLeft<16>(pairs);
    const auto odd = hn::And(pairs, hn::Set(u32, 0xFFFF0000));
    const Double value0 = hn::PromoteTo(F64(), hn::BitCast(f32, even));
    const Double value1 = hn::PromoteTo(F64(), hn::BitCast(f32, odd));
    sums0 = hn::MulAdd(value0, value0, sums0);
    sums1 = hn::MulAdd(value1, value1, sums1);
  } else {
    sums0 = AddSquares<kDtype>(grad, sums0);
    sums1 = AddSquares<kDtype>(grad + hn::Lanes(F64()), sums1);
  }
}

template <int32_t kDtype>
HWY_INLINE void LoadLanes(const double* lanes, Double& sums0, Double& sums1) {
  if constexpr (kDtype == OFFLOAD_BF16) {
    hn::LoadInterleaved2(F64(), lanes, sums0, sums1);
  } else {
    sums0 = hn::LoadU(F64(), lanes);
    sums1 = hn::LoadU(F64(), lanes + hn::Lanes(F64()));
  }
}

template <int32_t kDtype>
HWY_INLINE void StoreLanes(Double sums0, Double sums1, double* lanes) {
  if constexpr (kDtype == OFFLOAD_BF16) {
    hn::StoreInterleaved2(sums0, sums1, F64(), lanes);
  } else {
    hn::StoreU(sums0, F64(), lanes);
    hn::StoreU(sums1, F64(), lanes + hn::Lanes(F64()));
  }
}

template <int32_t kDtype, uint64_t kBlocks>
HWY_INLINE void AddRows(const Stored<kDtype>* grad, uint64_t count, double (*lanes)[kNormLanes]) {
  static_assert(kBlocks == 1);
  constexpr uint64_t kPairElements = 2 * HWY_LANES(double);
  constexpr uint64_t kPairs = kNormLanes / kPairElements;
  Double sums0[kPairs], sums1[kPairs];
#pragma GCC unroll 4
  for (uint64_t k = 0; k < kPairs; ++k)
    LoadLanes<kDtype>(lanes[0] + k * kPairElements, sums0[k], sums1[k]);
  for (uint64_t i = 0; i < count; i += kNormLanes) {
#pragma GCC unroll 4
    for (uint64_t k = 0; k < kPairs; ++k)
      AddPairOfSquares<kDtype>(grad + i + k * kPairElements, sums0[k], sums1[k]);
  }
#pragma GCC unroll 4
  for (uint64_t k = 0; k < kPairs; ++k)
    StoreLanes<kDtype>(sums0[k], sums1[k], lanes[0] + k * kPairElements);
}
#endif

HWY_INLINE double SumLanes(double* lanes) {
  for (uint32_t half = kNormLanes / 2; half > 0; half /= 2) {
    for (uint32_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return std::isnan(lanes[0]) ? std::numeric_limits<double>::quiet_NaN() : lanes[0];
}

template <int32_t kDtype>
void SumWholeBlocks(const Stored<kDtype>* grad, double* block_sums) {
  double lanes[kBlocksTogether][kNormLanes] = {};
  AddRows<kDtype, kBlocksTogether>(grad, kNormBlockElements, lanes);
  for (uint64_t block = 0; block < kBlocksTogether; ++block)
    block_sums[block] = SumLanes(lanes[block]);
}

// The sum of one block of at most kNormBlockElements. Padding adds zeros, which change no bit.
template <int32_t kDtype>
double SumBlock(const Stored<kDtype>* grad, uint64_t count) {
  double lanes[1][kNormLanes] = {};
  const uint64_t whole = count - count % kNormLanes;
  AddRows<kDtype, 1>(grad, whole, lanes);
  if (whole < count) {
    Stored<kDtype> padded[kNormLanes] = {};
    std::memcpy(padded, grad + whole, (count - whole) * sizeof(padded[0]));
    AddRows<kDtype, 1>(padded, kNormLanes, lanes);
  }
  return SumLanes(lanes[0]);
}

struct Kernels {
  template <Rule kRule, int32_t kGradDtype, int32_t kParamDtype, StateLayout kLayout>
  static void Update(const Coefficients& c, const UpdateSpan& span) {
    constexpr bool kSplit = IsSplit(kLayout);
    if constexpr (!HasBf16Moments(kLayout)) {
      UpdateRun<kRule, kGradDtype, kParamDtype, kSplit, MomentForm::kFp32>(c, span,
                                                                           {span.rounding, 0, 0});
    } else if (!span.rounding.stochastic) {
      UpdateRun<kRule, kGradDtype, kParamDtype, kSplit, MomentForm::kNearest>(
          c, span, {span.rounding, 0, 0});
    } else {
      ForEachRun(span.order, span.count, [&](uint64_t begin, uint64_t count, uint64_t index) {
        UpdateSpan run = Advanced(span, {kGradDtype, kParamDtype, kLayout}, begin);
        run.count = count;
        UpdateRun<kRule, kGradDtype, kParamDtype, kSplit, MomentForm::kStochastic>(
            c, run,
            {span.rounding, CounterOf(span.rounding, index), TweakOf(span.rounding, index)});
      });
    }
  }

  static void Publish() { hwy::FlushStream(); }

  template <int32_t kDtype>
  static void SumSquares(const void* grad, uint64_t count, double* block_sums) {
    const auto* elements = static_cast<const Stored<kDtype>*>(grad);
    constexpr uint64_t kElementsTogether = kBlocksTogether * kNormBlockElements;
    uint64_t i = 0;
    for (; i + kElementsTogether <= count; i += kElementsTogether, block_sums += kBlocksTogether)
      SumWholeBlocks<kDtype>(elements + i, block_sums);
    for (; i < count; i += kNormBlockElements)
      *block_sums++ = SumBlock<kDtype>(elements + i, std::min(count - i, kNormBlockElements));
  }

  template <int32_t kDtype>
  static void ToFp32(const void* source, uint64_t count, float* destination) {
    const auto* elements = static_cast<const Stored<kDtype>*>(source);
    const uint64_t whole = count - count % Lanes();
    for (uint64_t i = 0; i < whole; i += Lanes()) {
      hn::StoreU(LoadWide<kDtype>(elements + i), F32(), destination + i);
    }
    if (whole == count) return;
    Tail<Stored<kDtype>> narrow;
    Tail<float> wide;
    narrow.CopyIn(source, whole, count - whole);
    hn::StoreU(LoadWide<kDtype>(narrow.values), F32(), wide.values);
    wide.CopyOut(destination, whole, count - whole);
  }

  template <int32_t kDtype>
  static void Accumulate(const void* grad, uint64_t count, float* sum) {
    const auto* elements = static_cast<const Stored<kDtype>*>(grad);
    const uint64_t whole = count - count % Lanes();
    for (uint64_t i = 0; i < whole; i += Lanes()) {
      const Float old = hn::LoadU(F32(), sum + i);
      hn::StoreU(hn::Add(old, LoadWide<kDtype>(elements + i)), F32(), sum + i);
    }
    if (whole == count) return;
    Tail<Stored<kDtype>> narrow;
    Tail<float> wide;
    narrow.CopyIn(grad, whole, count - whole);
    wide.CopyIn(sum, whole, count - whole);
    const Float old = hn::LoadU(F32(), wide.values);
    hn::StoreU(hn::Add(old, LoadWide<kDtype>(narrow.values)), F32(), wide.values);
    wide.CopyOut(sum, whole, count - whole);
  }
};

#if HWY_TARGET == HWY_AVX3
constexpr const char* kIsa = "avx512";
#elif HWY_TARGET == HWY_AVX2
constexpr const char* kIsa = "avx2";
#elif HWY_TARGET == HWY_SVE
constexpr const char* kIsa = "sve";
#else
constexpr const char* kIsa = "neon";
#endif

}  // namespace

extern const KernelTable kTable;
constexpr KernelTable kTable = MakeTable<Kernels>(kIsa);

}  // namespace HWY_NAMESPACE
}  // namespace hybridopt
HWY_AFTER_NAMESPACE();

#endif  // HWY_NATIVE_FMA

#if HWY_ONCE

#if HWY_ARCH_X86
#include <cpuid.h>
#else
#include <bit>

#include "base/prim.h"
#endif

namespace hybridopt {
namespace {

#if HWY_ARCH_X86
// All that Highway lets the compiler use for a target, and that the system saves the registers.
// Some compilers' __builtin_cpu_supports does not know f16c.
bool HasF16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

bool HasAvx2() {
  return __builtin_cpu_supports("ssse3") && __builtin_cpu_supports("sse4.1") &&
         __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt") &&
         __builtin_cpu_supports("avx") && __builtin_cpu_supports("avx2") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("fma") && HasF16c();
}

bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
}
#endif

// The tables this CPU runs, best first.
struct Usable {
  const KernelTable* tables[3];
  size_t count = 0;

  Usable() {
#if HWY_TARGETS & HWY_AVX3
    if (HasAvx512()) tables[count++] = &N_AVX3::kTable;
#endif
#if HWY_TARGETS & HWY_AVX2
    if (HasAvx2()) tables[count++] = &N_AVX2::kTable;
#endif
#if HWY_TARGETS & HWY_SVE
    const uint64_t sve_bytes = prim::SveVectorBytes();
    // Vectors of NEON's length would gain nothing. A length that is no power of two, as the first
    // SVE allowed, does not divide the norm's lanes.
    if (sve_bytes > 16 && std::has_single_bit(sve_bytes)) tables[count++] = &N_SVE::kTable;
#endif
#if HWY_TARGETS & HWY_NEON
    tables[count++] = &N_NEON::kTable;
#endif
#if HWY_TARGETS & HWY_SVE
    if (sve_bytes == 16) tables[count++] = &N_SVE::kTable;
#endif
  }
};

}  // namespace

std::span<const KernelTable* const> SimdKernels() {
  static const Usable usable;
  return {usable.tables, usable.count};
}

}  // namespace hybridopt

#endif  // HWY_ONCE
