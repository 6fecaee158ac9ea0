// Cuts a span into what the vector kernels update: ranges of whole units. This is compiled once,
// not for each rule, types and instruction set, which halves the time that these take to compile.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace hybridopt {

// How the values of a range are rounded: the param's Rounding, and counter and tweak of the range's
// first element.
struct RangeRounding {
  Rounding rounding;
  uint32_t counter;
  uint32_t tweak;
};

// Updates elements whose indices are consecutive. Their number is a multiple of the unit.
using UpdateUnitsFunction = void (*)(Coefficients, UpdateSpan, RangeRounding);

struct UnitsFunctions {
  UpdateUnitsFunction plain = nullptr;
  UpdateUnitsFunction noting = nullptr;  // for spans with a place for changes

  UpdateUnitsFunction Of(const UpdateSpan& span) const {
    return span.changed == nullptr ? plain : noting;
  }
};

// The kernels of one rule and types.
struct UnitKernels {
  SpanTypes types;
  uint64_t unit;  // elements, at most kUnitMost
  UnitsFunctions to_nearest;
  UnitsFunctions at_random;  // NULL if nothing is rounded that a step stores
};
inline constexpr uint64_t kUnitMost = 128;

void UpdateInUnits(const UnitKernels& kernels, const Coefficients& c, const UpdateSpan& span);

}  // namespace hybridopt
