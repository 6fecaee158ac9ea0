// Which elements of a param an update changes, one bit an element. An update in kernels.h stores
// params and says nothing of what they were; with a NotedBits around it, this says it.
//
// A param in 16 bits whose masters are apart is its master, rounded. So what it was comes from the
// master, which the update has just read, and not from the param, which it only writes: to read
// that too would cost 2 bytes an element more. Elements are taken a few at a time, so that masters
// are still in the caches when they are looked at again.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace hybridopt {

// Where an update sets a bit for each element that it changes: that of the span's element i is bit
// first + i. Bits only get set here. Other threads may set bits beside them in the same words.
struct NotedBits {
  uint64_t* words = nullptr;  // NULL: changes are not noted
  uint64_t first = 0;

  NotedBits From(uint64_t element) const { return {words, first + element}; }
};

// Words that hold the bits of one param: no word has bits of two.
constexpr uint64_t NotedWords(uint64_t elements) { return (elements + 63) / 64; }

// What an update can find out about a param.
constexpr ParamSource SourceOf(const SpanTypes& types) {
  if (RowOf(types.formats.master).beside_param) return ParamSource::kBesideMaster;
  if (types.param_dtype == OFFLOAD_FP32) return ParamSource::kFp32;
  return types.param_dtype == OFFLOAD_BF16 ? ParamSource::kRoundedToBf16
                                           : ParamSource::kRoundedToFp16;
}

// Updates a span of these types as `rule` says, and notes what changes.
void UpdateAndNote(const KernelTable& kernels, Rule rule, const SpanTypes& types,
                   const Coefficients& coefficients, const UpdateSpan& span,
                   const NotedBits& noted);

// Makes masters follow params as FollowParamsFunction does, and notes each param that its master
// had not been rounded to.
void FollowAndNote(const KernelTable& kernels, int32_t dtype, const void* params, uint64_t count,
                   float* masters, const NotedBits& noted);

}  // namespace hybridopt
