// ContentHash: a hash of bytes that is a sum over their words of 8 bytes, so that parts may be
// hashed in any order, by any thread or device. offload.h has its definition, which must not
// change.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace hybridopt {

constexpr uint64_t MixBits(uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB;
  return bits ^ (bits >> 31);
}

// The sum for a part of the bytes that begins with word `first_word` of the whole. All parts but
// the last one consist of whole words. NULL is allowed for 0 bytes.
inline uint64_t HashOfPart(const void* data, uint64_t bytes, uint64_t first_word) {
  constexpr uint64_t kDistance = 0x9E3779B97F4A7C15;
  const auto* next = static_cast<const std::byte*>(data);
  uint64_t sum = 0;
  uint64_t offset = (first_word + 1) * kDistance;
  for (; bytes >= sizeof(uint64_t); bytes -= sizeof(uint64_t), next += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, next, sizeof(word));
    sum += MixBits(word + offset);
    offset += kDistance;
  }
  if (bytes == 0) return sum;
  uint64_t last = 0;
  std::memcpy(&last, next, bytes);
  return sum + MixBits(last + offset);
}

// The hash of the whole, from the sum over all its parts.
constexpr uint64_t HashOfParts(uint64_t sum, uint64_t bytes) { return sum + MixBits(bytes); }

}  // namespace hybridopt
