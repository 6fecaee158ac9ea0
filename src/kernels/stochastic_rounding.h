// The random bits of stochastic rounding. With it, the mean of many roundings is the number itself.
// A moment in bf16 needs it if an update changes the moment by less than half a bf16 step. The
// random bits are a function of a key and of the element's index in its whole tensor. There is no
// other state, so the division of the work into threads, chunks, devices or ranks does not change a
// bit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/convert.h"
#include "kernels/kernels.h"

namespace hybridopt {

// Odd numbers, found by a search among random ones (docs/NUMERICS.md has the criteria).
inline constexpr uint32_t kHashFactor0 = 0x07BE90C7;
inline constexpr uint32_t kHashFactor1 = 0x3D73EB59;
inline constexpr uint32_t kHashFactor2 = 0x45AA351B;
inline constexpr uint32_t kHashFactor3 = 0x6F4A955D;

// 32 random bits for one element: moment0 is rounded with the lower half, moment1 with the upper
// half, and the master with MasterBits. simd_unit.h computes the same bits in vectors;
// cuda/tile_random.h computes the counter by counting. If counters have the same upper half, the
// first line is a sum that grows by a constant. The key is both in the counter and in the tweak, so
// that the sequence of one key is not a shifted copy of the sequence of another key.
HYBRIDOPT_EVERYWHERE inline uint32_t RandomBits(uint32_t counter, uint32_t tweak) {
  uint32_t x = counter * kHashFactor0 + (counter >> 16) * kHashFactor1;
  x ^= tweak;
  x ^= x >> 13;
  x *= kHashFactor2;
  x ^= x >> 16;
  return x;
}

// 8 random bits from those of RandomBits. For each lower half of `random`, the upper halves
// together give each value equally often. So the rounding of a master is independent of the
// rounding of moment0.
HYBRIDOPT_EVERYWHERE inline uint32_t MasterBits(uint32_t random) {
  return random * kHashFactor3 >> 24;
}

// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014). 0 stays 0.
HYBRIDOPT_EVERYWHERE inline uint64_t Mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}
inline constexpr uint64_t kGoldenRatio = 0x9E3779B97F4A7C15;

// Mixes the upper bits of an element's index: the result changes every 2^32 elements, and with it
// the counter and the tweak of RandomBits.
HYBRIDOPT_EVERYWHERE inline uint64_t BlockKey(uint64_t index) {
  return Mix64((index >> 32) * kGoldenRatio);
}
HYBRIDOPT_EVERYWHERE inline uint32_t CounterOf(const Rounding& rounding, uint64_t index) {
  return static_cast<uint32_t>(index) + (rounding.key0 ^ static_cast<uint32_t>(BlockKey(index)));
}
HYBRIDOPT_EVERYWHERE inline uint32_t TweakOf(const Rounding& rounding, uint64_t index) {
  return rounding.key1 ^ static_cast<uint32_t>(BlockKey(index) >> 32);
}

// The key of one param in its step number `step`. Every step, param and seed has its own random
// sequence.
inline Rounding StochasticRounding(uint64_t seed, uint64_t name_hash, uint64_t step) {
  const uint64_t key = Mix64(Mix64(Mix64(seed + kGoldenRatio) ^ name_hash) + step * kGoldenRatio);
  return {.stochastic = true,
          .ties_away = false,
          .key0 = static_cast<uint32_t>(key),
          .key1 = static_cast<uint32_t>(key >> 32)};
}

// The index of one element of a span. Most elements are in the first row and need no division,
// which is slow on GPUs in 64 bits.
HYBRIDOPT_EVERYWHERE inline uint64_t IndexOf(const ElementOrder& order, uint64_t element) {
  const uint64_t column = order.column + element;
  if (column < order.row_length) return order.first + column;
  return order.first + column / order.row_length * order.row_stride + column % order.row_length;
}

// Calls visit(begin, count, index) for each range of span elements whose indices are consecutive
// and have the same upper 32 bits: element `begin` has the index `index`.
template <typename Visit>
void ForEachIndexRange(const ElementOrder& order, uint64_t span_count, Visit&& visit) {
  uint64_t row = order.column / order.row_length;
  uint64_t column = order.column % order.row_length;
  for (uint64_t begin = 0; begin < span_count;) {
    const uint64_t index = order.first + row * order.row_stride + column;
    const uint64_t in_row = std::min(order.row_length - column, span_count - begin);
    const uint64_t count = std::min(in_row, (uint64_t{1} << 32) - (index & 0xFFFFFFFF));
    visit(begin, count, index);
    begin += count;
    column += count;
    if (column == order.row_length) {
      column = 0;
      row += 1;
    }
  }
}

}  // namespace hybridopt
