// Applies the tables of state/transitions.h to the params of random_calls_test.cpp. unit.lifecycle
// tests each cell of these tables by itself.
#pragma once

#include <cstdint>

#include "model.h"
#include "state/transitions.h"

namespace hybridopt::fault::random_calls {

// kDone, kNothing or kRefused.
Effect EffectOf(Move move, const ParamModel& param);
// Applies the effect of the move, if there is one, to `param`.
void Apply(Move move, ParamModel& param);
// Whether an optimizer with these `movable` flags may be asked for the move.
bool MovableAllows(Move move, uint32_t movable);
bool StepAllowed(const OptimizerModel& model);

}  // namespace hybridopt::fault::random_calls
