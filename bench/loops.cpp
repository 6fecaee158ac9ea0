#include "loops.h"

// Only the instruction set of the machine that compiles this.
#define HWY_COMPILE_ONLY_STATIC
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <bit>
#include <cmath>

namespace bench {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::ScalableTag<uint32_t>;
using U16 = hn::ScalableTag<uint16_t>;
using HalfU16 = hn::Rebind<uint16_t, F32>;

// Adds the squared gradient to one vector of each state array: one instruction for each array. The
// values remain normal numbers for the plain loop, which works on the same arrays.
HWY_INLINE hn::Vec<F32> TouchVector(const AdamWArrays& arrays, uint64_t at) {
  const auto wide = hn::PromoteTo(U32(), hn::LoadU(HalfU16(), arrays.grad + at));
  const auto grad = hn::BitCast(F32(), hn::ShiftLeft<16>(wide));
  const auto touch = [&](float* state) HWY_ATTR {
    const auto value = hn::MulAdd(grad, grad, hn::LoadU(F32(), state + at));
    hn::StoreU(value, F32(), state + at);
    return value;
  };
  touch(arrays.exp_avg);
  touch(arrays.exp_avg_sq);
  return touch(arrays.master);
}

template <bool kStream>
HWY_INLINE void Touch(const AdamWArrays arrays, uint64_t begin, uint64_t end) {
  const uint64_t lanes = hn::Lanes(F32());
  for (uint64_t i = begin; i < end; i += 2 * lanes) {
    const auto low = TouchVector(arrays, i);
    const auto high = TouchVector(arrays, i + lanes);
    // Takes the upper halves: bf16 without rounding.
    const auto packed = hn::ConcatOdd(U16(), hn::BitCast(U16(), high), hn::BitCast(U16(), low));
    if constexpr (kStream) {
      hn::Stream(packed, U16(), arrays.param + i);
    } else {
      hn::StoreU(packed, U16(), arrays.param + i);
    }
  }
  if constexpr (kStream) hwy::FlushStream();
}

using Bits = hn::ScalableTag<uint32_t>;

// Adds `value` to kBytes bytes.
template <uint64_t kBytes>
HWY_INLINE void AddToBits(void* array, uint64_t offset, hn::Vec<Bits> value) {
  auto* const words = reinterpret_cast<uint32_t*>(static_cast<char*>(array) + offset);
  for (uint64_t i = 0; i < kBytes / 4; i += hn::Lanes(Bits()))
    hn::StoreU(hn::Add(hn::LoadU(Bits(), words + i), value), Bits(), words + i);
}

template <uint64_t kMasterBytes, uint64_t kMomentBytes>
void TouchState(const StateArrays& state, uint64_t begin, uint64_t end) {
  constexpr uint64_t kUnit = 64;
  const StateArrays arrays = state;
  for (uint64_t i = begin; i < end; i += kUnit) {
    auto value = hn::Zero(Bits());
    const auto* const grad = reinterpret_cast<const uint32_t*>(arrays.grad + i);
    for (uint64_t word = 0; word < kUnit / 2; word += hn::Lanes(Bits()))
      value = hn::Add(value, hn::LoadU(Bits(), grad + word));
    AddToBits<kUnit * kMasterBytes>(arrays.master, i * kMasterBytes, value);
    AddToBits<kUnit * kMomentBytes>(arrays.moment0, i * kMomentBytes, value);
    AddToBits<kUnit * kMomentBytes>(arrays.moment1, i * kMomentBytes, value);
    if constexpr (kMasterBytes == 2) {
      AddToBits<kUnit * 2>(arrays.param, i * 2, value);
    } else {
      auto* const param = reinterpret_cast<uint32_t*>(arrays.param + i);
      for (uint64_t word = 0; word < kUnit / 2; word += hn::Lanes(Bits()))
        hn::Stream(value, Bits(), param + word);
    }
  }
  hwy::FlushStream();
}

float FromBf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// Rounds to nearest even. Unlike a library, it need not handle NaN.
uint16_t ToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace

void MemoryStreamed(const AdamWArrays& arrays, const AdamWFactors&, uint64_t, uint64_t begin,
                    uint64_t end) {
  Touch<true>(arrays, begin, end);
}

void MemoryCached(const AdamWArrays& arrays, const AdamWFactors&, uint64_t, uint64_t begin,
                  uint64_t end) {
  Touch<false>(arrays, begin, end);
}

StateLoop StateLoopOf(uint64_t master_bytes, uint64_t moment_bytes) {
  if (master_bytes == 2) return moment_bytes == 2 ? TouchState<2, 2> : TouchState<2, 4>;
  return moment_bytes == 2 ? TouchState<4, 2> : TouchState<4, 4>;
}

void PlainAdamW(const AdamWArrays& arrays, const AdamWFactors& factors, uint64_t step,
                uint64_t begin, uint64_t end) {
  const uint16_t* __restrict grad = arrays.grad;
  uint16_t* __restrict param = arrays.param;
  float* __restrict master = arrays.master;
  float* __restrict exp_avg = arrays.exp_avg;
  float* __restrict exp_avg_sq = arrays.exp_avg_sq;
  const double correction1 = 1 - std::pow(factors.beta1, static_cast<double>(step));
  const double correction2 = 1 - std::pow(factors.beta2, static_cast<double>(step));
  const float beta1 = static_cast<float>(factors.beta1);
  const float beta2 = static_cast<float>(factors.beta2);
  const float weight1 = static_cast<float>(1 - factors.beta1);
  const float weight2 = static_cast<float>(1 - factors.beta2);
  const float step_size = static_cast<float>(factors.lr / correction1);
  const float root_factor = static_cast<float>(1 / std::sqrt(correction2));
  const float eps = static_cast<float>(factors.eps);
  const float keep = static_cast<float>(1 - factors.lr * factors.weight_decay);
  for (uint64_t i = begin; i < end; ++i) {
    const float g = FromBf16(grad[i]);
    const float m = beta1 * exp_avg[i] + weight1 * g;
    const float v = beta2 * exp_avg_sq[i] + weight2 * g * g;
    const float w = keep * master[i] - step_size * m / (std::sqrt(v) * root_factor + eps);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    master[i] = w;
    param[i] = ToBf16(w);
  }
}

}  // namespace bench
