#include "kernels/changes/changes.h"

#include <algorithm>
#include <atomic>
#include <cstddef>

namespace hybridopt {
namespace {

// Sets the bits of `bits` in the words of `noted`; the first bit is that of `noted`. The first and
// the last word may hold bits that other threads set; the words between them do not.
void SetBits(const uint64_t* bits, uint64_t count, const NotedBits& noted) {
  const uint64_t first_word = noted.first / 64, last_word = (noted.first + count - 1) / 64;
  const uint64_t shift = noted.first % 64;
  const auto set = [&](uint64_t word, uint64_t value) {
    if (value == 0) return;
    if (word == first_word || word == last_word)
      std::atomic_ref<uint64_t>(noted.words[word]).fetch_or(value, std::memory_order_relaxed);
    else
      noted.words[word] |= value;
  };
  for (uint64_t i = 0; i < NotedWords(count); ++i) {
    set(first_word + i, bits[i] << shift);
    if (shift > 0) set(first_word + i + 1, bits[i] >> (64 - shift));
  }
}

// Calls write(begin, count, bits) for one part of `count` elements after the other, and sets the
// bits that it has written.
template <typename Write>
void NoteInParts(uint64_t count, const NotedBits& noted, Write&& write) {
  for (uint64_t done = 0; done < count; done += kNotedMost) {
    const uint64_t now = std::min(count - done, kNotedMost);
    uint64_t bits[NotedWords(kNotedMost)];
    bits[NotedWords(now) - 1] = 0;  // `write` may write a part of the last word
    write(done, now, reinterpret_cast<uint8_t*>(bits));
    SetBits(bits, now, noted.From(done));
  }
}

}  // namespace

void UpdateAndNote(const KernelTable& kernels, Rule rule, const SpanTypes& types,
                   const Coefficients& coefficients, const UpdateSpan& span,
                   const NotedBits& noted) {
  const UpdateFunction update = kernels.Update(rule, types);
  if (noted.words == nullptr) return update(coefficients, span);
  NoteInParts(span.count, noted, [&](uint64_t begin, uint64_t count, uint8_t* bits) {
    UpdateSpan part = Advanced(span, types, begin);
    part.count = count;
    part.changed = bits;
    update(coefficients, part);
  });
}

void FollowAndNote(const KernelTable& kernels, int32_t dtype, const void* params, uint64_t count,
                   float* masters, const NotedBits& noted) {
  const FollowParamsFunction follow = kernels.FollowParams(dtype);
  if (noted.words == nullptr) return follow(params, count, masters, nullptr);
  NoteInParts(count, noted, [&](uint64_t begin, uint64_t now, uint8_t* bits) {
    follow(static_cast<const std::byte*>(params) + begin * DtypeBytes(dtype), now, masters + begin,
           bits);
  });
}

}  // namespace hybridopt
