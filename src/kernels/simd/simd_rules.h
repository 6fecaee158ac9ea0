// Vectors of fp32, the operations in which rules.inc is written, and the rules. A part of
// simd_kernels.h, which includes it again for each target, as Highway requires.
#if defined(HYBRIDOPT_KERNELS_SIMD_RULES_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HYBRIDOPT_KERNELS_SIMD_RULES_H
#undef HYBRIDOPT_KERNELS_SIMD_RULES_H
#else
#define HYBRIDOPT_KERNELS_SIMD_RULES_H
#endif

#include <hwy/highway.h>

#include <cfloat>

#include "kernels/convert.h"
#include "kernels/kernels.h"

#if HWY_NATIVE_FMA

HWY_BEFORE_NAMESPACE();
namespace hybridopt {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::ScalableTag<uint32_t>;
using U16 = hn::ScalableTag<uint16_t>;
using I32 = hn::ScalableTag<int32_t>;
using I16 = hn::ScalableTag<int16_t>;
using HalfU16 = hn::Rebind<uint16_t, F32>;
using HalfF16 = hn::Rebind<hwy::float16_t, F32>;
using Float = hn::Vec<F32>;

// A constant, except for SVE, whose vector length is known only at run time. SVE vectors also
// cannot be members of structs and arrays.
HWY_INLINE HWY_MAYBE_UNUSED uint64_t Lanes() { return hn::Lanes(F32()); }
// The unit that a loop handles at a time: two vectors of fp32, or one full vector of bf16 or fp16.
HWY_INLINE HWY_MAYBE_UNUSED uint64_t Unit() { return 2 * Lanes(); }
constexpr uint64_t kUnitMax = 2 * HWY_LANES(float);

template <int32_t kDtype>
using Stored = typename Element<kDtype>::Stored;

// The values of one vector of elements that a rule reads and writes.
struct Value {
  Float& grad;
  Float& param;
  Float& moment0;
  Float& moment1;
};

// The operations in which rules.inc is written, on a vector.
#define HYBRIDOPT_RULE HWY_INLINE
HWY_INLINE Float Broadcast(float value) { return hn::Set(F32(), value); }
HWY_INLINE Float Sum(Float a, Float b) { return hn::Add(a, b); }
HWY_INLINE Float Difference(Float a, Float b) { return hn::Sub(a, b); }
HWY_INLINE Float Product(Float a, Float b) { return hn::Mul(a, b); }
HWY_INLINE Float Quotient(Float a, Float b) { return hn::Div(a, b); }
HWY_INLINE Float Root(Float value) { return hn::Sqrt(value); }
HWY_INLINE Float Fma(Float a, Float b, Float c) { return hn::MulAdd(a, b, c); }

HWY_INLINE Float Lerp(Float old, Float next, float keep, float weight) {
  const Float factor = Broadcast(weight < 0.5f ? weight : keep);
  return weight < 0.5f ? hn::MulAdd(factor, hn::Sub(next, old), old)
                       : hn::MulAdd(factor, hn::Sub(old, next), next);
}

// value < max ? value : max. Instruction sets define Min differently for NaN; x86 defines it like
// this.
HWY_INLINE Float AtMost(Float value, Float max) {
#if HWY_ARCH_X86
  return hn::Min(value, max);
#else
  return hn::IfThenElse(hn::Lt(value, max), value, max);
#endif
}

HWY_INLINE Float Saturate(Float value) { return AtMost(value, Broadcast(FLT_MAX)); }

HWY_INLINE Float IfAbove(Float a, Float b, Float yes, Float no) {
  return hn::IfThenElse(hn::Gt(a, b), yes, no);
}

#include "kernels/rules.inc"

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace hybridopt
HWY_AFTER_NAMESPACE();

#endif  // HWY_NATIVE_FMA

#endif  // per-target include guard
