// numbers.h: bf16, random numbers and hashes that are the same on every machine.
#ifndef HYBRIDOPT_EXAMPLES_NUMBERS_H
#define HYBRIDOPT_EXAMPLES_NUMBERS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

inline float widen(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// To bf16, nearest even. NaN stays NaN, so that the library sees it and skips the step.
inline uint16_t narrow(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>(value == value ? rounded : 0x7fc0);
}

// splitmix64: the same numbers on every machine, which the standard distributions do not promise.
struct Random {
  uint64_t state;
  uint64_t next() {
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  double normal() { return sqrt(-2 * log(1 - uniform())) * cos(6.283185307179586 * uniform()); }
};

// FNV-1a; begin with kHashStart, go on with the hash so far.
inline constexpr uint64_t kHashStart = 0xcbf29ce484222325u;
inline uint64_t hash_bytes(uint64_t hash, const void* data, uint64_t bytes) {
  const uint8_t* byte = static_cast<const uint8_t*>(data);
  for (uint64_t i = 0; i < bytes; ++i) hash = (hash ^ byte[i]) * 0x100000001b3u;
  return hash;
}

#endif  // HYBRIDOPT_EXAMPLES_NUMBERS_H
