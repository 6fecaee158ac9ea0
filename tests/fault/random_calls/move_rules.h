// What state/transitions.h says of the params that random_calls_test.cpp remembers. unit.lifecycle
// has each cell of those tables once more.
#pragma once

#include <cstdint>

#include "model.h"
#include "state/transitions.h"

namespace hybridopt::fault::random_calls {

// kDone, kNothing or kRefused.
Effect EffectOf(Move move, const ParamModel& param);
// Does to `param` what the move does, if it does anything.
void Apply(Move move, ParamModel& param);
// Whether an optimizer with these `movable` flags may be asked for the move.
bool MovableAllows(Move move, uint32_t movable);
bool StepAllowed(const OptimizerModel& model);

}  // namespace hybridopt::fault::random_calls
