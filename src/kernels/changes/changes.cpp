#include "kernels/changes/changes.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>

namespace hybridopt {
namespace {

// The number of elements of a part. The masters of a larger part would be read by themselves, and
// not while the other arrays are read: then an update of fp32 state takes 1.7 times as long with
// 4,096 elements, and 1.2 times with 512. In a smaller part the call costs too much.
constexpr uint64_t kNotedTogether = 512;

// The number of elements whose bits are set together. An atomic operation waits for the stores
// before it, which are those of the update.
constexpr uint64_t kSetTogether = 8 * kNotedTogether;

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

// The old values of a part, and the bits of all parts that are set together.
class Part {
 public:
  std::byte* before() { return before_; }
  // Where FindChanges writes the bits of the part that begins at element `done`.
  uint64_t* BitsAt(uint64_t done) { return bits_ + done % kSetTogether / 64; }
  // To be called after FindChanges, with the end of the part and of all elements.
  void Set(uint64_t end, uint64_t all, const NotedBits& noted) const {
    if (end % kSetTogether != 0 && end != all) return;
    const uint64_t begin = (end - 1) / kSetTogether * kSetTogether;
    SetBits(bits_, end - begin, noted.From(begin));
  }

 private:
  alignas(64) std::byte before_[kNotedTogether * sizeof(float)];
  uint64_t bits_[kSetTogether / 64 + 1];  // FindChanges writes up to 8 bytes behind its words
};

}  // namespace

void UpdateAndNote(const KernelTable& kernels, Rule rule, const SpanTypes& types,
                   const Coefficients& coefficients, const UpdateSpan& span,
                   const NotedBits& noted) {
  const UpdateFunction update = kernels.Update(rule, types);
  if (noted.words == nullptr) return update(coefficients, span);
  const ParamSource source = SourceOf(types);
  const bool beside = source == ParamSource::kBesideMaster;
  const FindChangesFunction find_changes = kernels.FindChanges(source);
  Part part;
  for (uint64_t done = 0; done < span.count; done += kNotedTogether) {
    UpdateSpan now = Advanced(span, types, done);
    now.count = std::min(span.count - done, kNotedTogether);
    const void* const from = beside ? now.param : now.master;
    std::memcpy(part.before(), from, now.count * (beside ? sizeof(uint16_t) : sizeof(float)));
    update(coefficients, now);
    find_changes(part.before(), from, now.count, part.BitsAt(done));
    part.Set(done + now.count, span.count, noted);
  }
}

void FollowAndNote(const KernelTable& kernels, int32_t dtype, const void* params, uint64_t count,
                   float* masters, const NotedBits& noted) {
  const auto follow = kernels.FollowParams(dtype);
  if (noted.words == nullptr) return follow(params, count, masters);
  const FindChangesFunction find_changes = kernels.FindChanges(SourceOf({OFFLOAD_FP32, dtype, {}}));
  Part part;
  for (uint64_t done = 0; done < count; done += kNotedTogether) {
    const uint64_t now = std::min(count - done, kNotedTogether);
    std::memcpy(part.before(), masters + done, now * sizeof(float));
    follow(static_cast<const std::byte*>(params) + done * DtypeBytes(dtype), now, masters + done);
    find_changes(part.before(), masters + done, now, part.BitsAt(done));
    part.Set(done + now, count, noted);
  }
}

}  // namespace hybridopt
