// Notes which elements of a param an update changes, with one bit for each element. An update in
// kernels.h stores params and does not report their old values; a NotedBits added to it does.
//
// A 16-bit param with separate masters equals its rounded master. So its old value is computed from
// the master, which the update has just read, and not read from the param, which the update only
// writes: reading it too would cost 2 bytes an element more. Elements are handled a few at a time,
// so that masters are still in the caches when they are read again.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace hybridopt {

// The place where an update sets a bit for each element that it changes: the bit of the span's
// element i is bit first + i. An update never clears bits. Other threads may set other bits in the
// same words.
struct NotedBits {
  uint64_t* words = nullptr;  // NULL: changes are not noted
  uint64_t first = 0;

  NotedBits From(uint64_t element) const { return {words, first + element}; }
};

// The number of words that hold the bits of one param. No word has bits of two params.
constexpr uint64_t NotedWords(uint64_t elements) { return (elements + 63) / 64; }

// How an update finds the old values of a param.
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

// Makes masters follow params as FollowParamsFunction does, and notes each param that differs from
// its rounded master.
void FollowAndNote(const KernelTable& kernels, int32_t dtype, const void* params, uint64_t count,
                   float* masters, const NotedBits& noted);

}  // namespace hybridopt
