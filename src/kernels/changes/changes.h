// Notes which elements of a param an update changes, with one bit for each element.
//
// A 16-bit param with separate masters equals its rounded master. So an update computes its old
// value from the master, which it reads anyway, and does not read the param, which it only writes:
// that would cost 2 bytes an element more.
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

// Updates a span of these types as `rule` says, and notes what changes.
void UpdateAndNote(const KernelTable& kernels, Rule rule, const SpanTypes& types,
                   const Coefficients& coefficients, const UpdateSpan& span,
                   const NotedBits& noted);

// Makes masters follow params as FollowParamsFunction does, and notes each param that differs from
// its rounded master.
void FollowAndNote(const KernelTable& kernels, int32_t dtype, const void* params, uint64_t count,
                   float* masters, const NotedBits& noted);

}  // namespace hybridopt
