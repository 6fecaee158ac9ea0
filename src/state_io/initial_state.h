// InitialState: the content of a param's state arrays before its first step.
#pragma once

#include "state/shape.h"

namespace hybridopt {

// Every master equals its param. So an array of masters that are stored beside params says that the
// param has the whole master. The first moment begins with `first_moment` (InitialMoment0 of the
// param's group, as fp32), the second moment with 0.
inline Pattern InitialPattern(const ParamShape& param, StateSlot slot, float first_moment) {
  return PatternOf(param.format[slot], slot == kMoment0 ? first_moment : 0.0f);
}

}  // namespace hybridopt
