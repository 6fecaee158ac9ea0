// InitialState: what the arrays of a param's state have before its first step.
#pragma once

#include "state/shape.h"

namespace hybridopt {

// Masters beside params have lost nothing. The first moment begins with `first_moment`
// (InitialMoment0 of the param's group, as fp32), the second with 0. Other masters are the params.
inline Pattern InitialPattern(const ParamShape& param, StateSlot slot, float first_moment) {
  return PatternOf(param.format[slot], slot == kMoment0 ? first_moment : 0.0f);
}

}  // namespace hybridopt
