// Every instruction set from this one source: Google Highway includes it again for each target
// and the end of the file lists the tables. Only targets with a true fused multiply-add are built,
// because only they give the bits of reference.cpp; the line order of the rules is the same there.
//
// Only Highway's headers are used: its library keeps process-wide state about the CPU.
#define HWY_COMPILE_ALL_ATTAINABLE
#define HWY_DISABLE_PCLMUL_AES
// SSE has no fused multiply-add. AVX3_DL would add nothing that is used here. SVE and RVV have
// vectors of unknown length, which the norm's lanes are not written for.
#define HWY_DISABLED_TARGETS                                                              \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | \
   HWY_RVV | HWY_WASM | HWY_WASM_EMU256)

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

#include "kernels/convert.h"
#include "kernels/kernels.h"
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

constexpr uint64_t kLanes = HWY_LANES(float);
// The loop's unit: two vectors of fp32, one full vector of bf16 or fp16.
constexpr uint64_t kUnit = 2 * kLanes;

template <int32_t kDtype>
using Stored = typename Element<kDtype>::Stored;

// One vector of elements on its way through a rule.
struct Value {
  Float grad;
  Float param;
  Float moment0;
  Float moment1;
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

HWY_INLINE void Adam(const Coefficients& c, Value& x) {
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

HWY_INLINE void SgdMomentum(const Coefficients& c, Value& x) {
  const Float grad = hn::MulAdd(Broadcast(c.l2_decay), x.param, x.grad);
  const Float weighted = hn::Mul(Broadcast(c.weight0), grad);
  x.moment0 = hn::MulAdd(Broadcast(c.keep0), x.moment0, weighted);
  const Float direction =
      c.nesterov ? hn::MulAdd(Broadcast(c.nesterov_momentum), x.moment0, grad) : x.moment0;
  const Float update = hn::MulAdd(Broadcast(c.step_size), direction, Broadcast(0.0f));
  x.param = hn::Sub(x.param, update);
}

HWY_INLINE void SgdPlain(const Coefficients& c, Value& x) {
  const Float grad = hn::MulAdd(Broadcast(c.l2_decay), x.param, x.grad);
  const Float update = hn::MulAdd(Broadcast(c.step_size), grad, Broadcast(0.0f));
  x.param = hn::Sub(x.param, update);
}

HWY_INLINE void Lion(const Coefficients& c, Value& x) {
  const Float zero = Broadcast(0.0f);
  const Float interpolated = Lerp(x.moment0, x.grad, c.keep0, c.weight0);
  const Float not_positive = hn::IfThenElse(hn::Lt(interpolated, zero), Broadcast(-1.0f), zero);
  const Float sign = hn::IfThenElse(hn::Gt(interpolated, zero), Broadcast(1.0f), not_positive);
  Float update = hn::MulAdd(Broadcast(c.step_size), sign, zero);
  update = hn::MulAdd(Broadcast(c.decoupled_decay), x.param, update);
  x.param = hn::Sub(x.param, update);
  x.moment0 = Lerp(x.moment0, x.grad, c.keep1, c.weight1);
}

HWY_INLINE void Adagrad(const Coefficients& c, Value& x) {
  const Float grad = hn::MulAdd(Broadcast(c.l2_decay), x.param, x.grad);
  x.moment0 = Saturate(hn::MulAdd(grad, grad, x.moment0));
  const Float root = hn::Sqrt(x.moment0);
  const Float denominator = hn::Add(root, Broadcast(c.eps));
  const Float quotient = hn::Div(grad, denominator);
  const Float update = hn::MulAdd(Broadcast(c.step_size), quotient, Broadcast(0.0f));
  x.param = hn::Sub(x.param, update);
}

template <Rule kRule>
HWY_INLINE void Apply(const Coefficients& c, Value& x) {
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

// bf16 in the upper half of each lane; the lower half is rubbish.
HWY_INLINE hn::Vec<U16> RoundToBf16(Float value) {
  const auto bits = hn::BitCast(U32(), value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(U32(), 1));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(U32(), 0x7FFF)), odd);
  const auto quiet_nan = hn::Or(bits, hn::Set(U32(), 0x00400000));
  const auto is_nan = hn::RebindMask(U32(), hn::IsNaN(value));
  return hn::BitCast(U16(), hn::IfThenElse(is_nan, quiet_nan, rounded));
}

// Rounds and packs one unit.
template <int32_t kDtype>
HWY_INLINE hn::Vec<U16> Pack(Float low, Float high) {
  if constexpr (kDtype == OFFLOAD_BF16) {
    return hn::ConcatOdd(U16(), RoundToBf16(high), RoundToBf16(low));
  } else {
    const auto low_half = hn::BitCast(HalfU16(), hn::DemoteTo(HalfF16(), low));
    const auto high_half = hn::BitCast(HalfU16(), hn::DemoteTo(HalfF16(), high));
    return hn::Combine(U16(), high_half, low_half);
  }
}

// Updates the vector at `begin`; returns its params.
template <Rule kRule, int32_t kGradDtype>
HWY_INLINE Float UpdateVector(const Coefficients& c, const UpdateSpan& span, uint64_t begin) {
  const auto* grad = static_cast<const Stored<kGradDtype>*>(span.grad);
  auto* master = static_cast<float*>(span.master);
  auto* moment0 = static_cast<float*>(span.moment0);
  auto* moment1 = static_cast<float*>(span.moment1);
  Value x = {};
  x.grad = hn::Mul(LoadWide<kGradDtype>(grad + begin), Broadcast(c.grad_factor));
  x.param = hn::LoadU(F32(), master + begin);
  if constexpr (kHasMoment0<kRule>) x.moment0 = hn::LoadU(F32(), moment0 + begin);
  if constexpr (kHasMoment1<kRule>) x.moment1 = hn::LoadU(F32(), moment1 + begin);
  Apply<kRule>(c, x);
  if constexpr (kHasMoment0<kRule>) hn::StoreU(x.moment0, F32(), moment0 + begin);
  if constexpr (kHasMoment1<kRule>) hn::StoreU(x.moment1, F32(), moment1 + begin);
  hn::StoreU(x.param, F32(), master + begin);
  return x.param;
}

// Updates whole units: span.count is a multiple of kUnit. The arguments are copies, so that no
// store below can alias them.
template <Rule kRule, int32_t kGradDtype, int32_t kParamDtype>
void UpdateUnits(const Coefficients c, const UpdateSpan span) {
  auto* param = static_cast<Stored<kParamDtype>*>(span.param);
  const bool in_place = span.param == span.master;
  // The step does not read the low-precision param again: it goes past the caches.
  const bool stream = reinterpret_cast<uintptr_t>(param) % sizeof(hn::Vec<U16>) == 0;
  for (uint64_t i = 0; i < span.count; i += kUnit) {
    const Float low = UpdateVector<kRule, kGradDtype>(c, span, i);
    const Float high = UpdateVector<kRule, kGradDtype>(c, span, i + kLanes);
    if constexpr (kParamDtype != OFFLOAD_FP32) {
      const auto packed = Pack<kParamDtype>(low, high);
      if (stream) {
        hn::Stream(packed, U16(), param + i);
      } else {
        hn::StoreU(packed, U16(), param + i);
      }
    } else if (!in_place) {
      hn::StoreU(low, F32(), param + i);
      hn::StoreU(high, F32(), param + i + kLanes);
    }
  }
}

// A padded copy of the last elements of an array.
template <typename T>
struct Tail {
  T values[kUnit] = {};

  void CopyIn(const T* source, uint64_t count) { std::memcpy(values, source, count * sizeof(T)); }
  void CopyOut(T* destination, uint64_t count) const {
    std::memcpy(destination, values, count * sizeof(T));
  }
};

// The last elements, fewer than a unit, run the loop's own code on padded copies. Padding is zero,
// which every rule maps to finite numbers.
template <Rule kRule, int32_t kGradDtype, int32_t kParamDtype>
void UpdateTail(const Coefficients& c, const UpdateSpan& span, uint64_t begin, uint64_t count) {
  Tail<Stored<kGradDtype>> grad;
  Tail<Stored<kParamDtype>> param;
  Tail<float> master;
  Tail<float> moment0;
  Tail<float> moment1;
  grad.CopyIn(static_cast<const Stored<kGradDtype>*>(span.grad) + begin, count);
  master.CopyIn(static_cast<float*>(span.master) + begin, count);
  if constexpr (kHasMoment0<kRule>)
    moment0.CopyIn(static_cast<float*>(span.moment0) + begin, count);
  if constexpr (kHasMoment1<kRule>)
    moment1.CopyIn(static_cast<float*>(span.moment1) + begin, count);
  UpdateUnits<kRule, kGradDtype, kParamDtype>(
      c, {grad.values, param.values, master.values, moment0.values, moment1.values, kUnit});
  if constexpr (kHasMoment0<kRule>)
    moment0.CopyOut(static_cast<float*>(span.moment0) + begin, count);
  if constexpr (kHasMoment1<kRule>)
    moment1.CopyOut(static_cast<float*>(span.moment1) + begin, count);
  master.CopyOut(static_cast<float*>(span.master) + begin, count);
  param.CopyOut(static_cast<Stored<kParamDtype>*>(span.param) + begin, count);
}

// The norm's lanes are vectors of double. An fma of an exact product rounds as the addition does.
using F64 = hn::ScalableTag<double>;
using Double = hn::Vec<F64>;
constexpr uint64_t kDoubleLanes = HWY_LANES(double);
constexpr uint64_t kNormVectors = kNormLanes / kDoubleLanes;

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

// Adds the squares of kNormLanes elements.
template <int32_t kDtype>
HWY_INLINE void AddSquares(const Stored<kDtype>* grad, Double* lanes) {
#pragma GCC unroll 8
  for (uint64_t k = 0; k < kNormVectors; ++k) {
    const Double value = LoadDouble<kDtype>(grad + k * kDoubleLanes);
    lanes[k] = hn::MulAdd(value, value, lanes[k]);
  }
}

HWY_INLINE double SumLanes(const Double* vectors) {
  double lanes[kNormLanes];
#pragma GCC unroll 8
  for (uint64_t k = 0; k < kNormVectors; ++k) {
    hn::StoreU(vectors[k], F64(), lanes + k * kDoubleLanes);
  }
  for (uint32_t half = kNormLanes / 2; half > 0; half /= 2) {
    for (uint32_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return std::isnan(lanes[0]) ? std::numeric_limits<double>::quiet_NaN() : lanes[0];
}

// The sum of one block of at most kNormBlockElements. Padding adds zeros, which change no bit.
template <int32_t kDtype>
double SumBlock(const Stored<kDtype>* grad, uint64_t count) {
  Double lanes[kNormVectors];
#pragma GCC unroll 8
  for (uint64_t k = 0; k < kNormVectors; ++k) lanes[k] = hn::Zero(F64());
  const uint64_t whole = count - count % kNormLanes;
  for (uint64_t i = 0; i < whole; i += kNormLanes) AddSquares<kDtype>(grad + i, lanes);
  if (whole < count) {
    Stored<kDtype> padded[kNormLanes] = {};
    std::memcpy(padded, grad + whole, (count - whole) * sizeof(padded[0]));
    AddSquares<kDtype>(padded, lanes);
  }
  return SumLanes(lanes);
}

struct Kernels {
  template <Rule kRule, int32_t kGradDtype, int32_t kParamDtype>
  static void Update(const Coefficients& c, const UpdateSpan& span) {
    const uint64_t tail = span.count % kUnit;
    const uint64_t whole = span.count - tail;
    UpdateSpan units = span;
    units.count = whole;
    UpdateUnits<kRule, kGradDtype, kParamDtype>(c, units);
    if (tail != 0) UpdateTail<kRule, kGradDtype, kParamDtype>(c, span, whole, tail);
    // Streamed stores are weakly ordered: whoever is told of this update must see them.
    if constexpr (kParamDtype != OFFLOAD_FP32) hwy::FlushStream();
  }

  template <int32_t kDtype>
  static void SumSquares(const void* grad, uint64_t count, double* block_sums) {
    const auto* elements = static_cast<const Stored<kDtype>*>(grad);
    for (uint64_t i = 0; i < count; i += kNormBlockElements) {
      *block_sums++ = SumBlock<kDtype>(elements + i, std::min(count - i, kNormBlockElements));
    }
  }

  template <int32_t kDtype>
  static void ToFp32(const void* source, uint64_t count, float* destination) {
    const auto* elements = static_cast<const Stored<kDtype>*>(source);
    const uint64_t whole = count - count % kLanes;
    for (uint64_t i = 0; i < whole; i += kLanes) {
      hn::StoreU(LoadWide<kDtype>(elements + i), F32(), destination + i);
    }
    if (whole == count) return;
    Tail<Stored<kDtype>> narrow;
    Tail<float> wide;
    narrow.CopyIn(elements + whole, count - whole);
    hn::StoreU(LoadWide<kDtype>(narrow.values), F32(), wide.values);
    wide.CopyOut(destination + whole, count - whole);
  }

  template <int32_t kDtype>
  static void Accumulate(const void* grad, uint64_t count, float* sum) {
    const auto* elements = static_cast<const Stored<kDtype>*>(grad);
    const uint64_t whole = count - count % kLanes;
    for (uint64_t i = 0; i < whole; i += kLanes) {
      const Float old = hn::LoadU(F32(), sum + i);
      hn::StoreU(hn::Add(old, LoadWide<kDtype>(elements + i)), F32(), sum + i);
    }
    if (whole == count) return;
    Tail<Stored<kDtype>> narrow;
    Tail<float> wide;
    narrow.CopyIn(elements + whole, count - whole);
    wide.CopyIn(sum + whole, count - whole);
    const Float old = hn::LoadU(F32(), wide.values);
    hn::StoreU(hn::Add(old, LoadWide<kDtype>(narrow.values)), F32(), wide.values);
    wide.CopyOut(sum + whole, count - whole);
  }
};

#if HWY_TARGET == HWY_AVX3
constexpr const char* kIsa = "avx512";
#elif HWY_TARGET == HWY_AVX2
constexpr const char* kIsa = "avx2";
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
#if HWY_TARGETS & HWY_NEON
    tables[count++] = &N_NEON::kTable;
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
