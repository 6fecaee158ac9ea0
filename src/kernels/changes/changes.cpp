#include "kernels/changes/changes.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>

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

}  // namespace

void UpdateAndNote(const KernelTable& kernels, Rule rule, const SpanTypes& types,
                   const Coefficients& coefficients, const UpdateSpan& span,
                   const NotedBits& noted) {
  const UpdateFunction update = kernels.Update(rule, types);
  if (noted.words == nullptr) return update(coefficients, span);
  for (uint64_t done = 0; done < span.count; done += kNotedMost) {
    UpdateSpan now = Advanced(span, types, done);
    now.count = std::min(span.count - done, kNotedMost);
    uint64_t bits[NotedWords(kNotedMost)];
    bits[NotedWords(now.count) - 1] = 0;  // the update may write a part of the last word
    now.changed = reinterpret_cast<uint8_t*>(bits);
    update(coefficients, now);
    SetBits(bits, now.count, noted.From(done));
  }
}

void FollowAndNote(const KernelTable& kernels, int32_t dtype, const void* params, uint64_t count,
                   float* masters, const NotedBits& noted) {
  const auto follow = kernels.FollowParams(dtype);
  if (noted.words == nullptr) return follow(params, count, masters);
  const FindChangesFunction find_changes = kernels.FindChanges(dtype);
  constexpr uint64_t kPart = 512;  // masters that stay in the first cache
  for (uint64_t done = 0; done < count; done += kPart) {
    const uint64_t now = std::min(count - done, kPart);
    alignas(64) float before[kPart];
    uint64_t bits[NotedWords(kPart) + 1];
    std::memcpy(before, masters + done, now * sizeof(float));
    follow(static_cast<const std::byte*>(params) + done * DtypeBytes(dtype), now, masters + done);
    find_changes(before, masters + done, now, bits);
    SetBits(bits, now, noted.From(done));
  }
}

}  // namespace hybridopt
