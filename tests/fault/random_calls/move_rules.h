// The tables of docs/LIFECYCLE.md, written down once more: what each call does to a param.
#pragma once

#include <cstddef>
#include <cstdint>

#include "model.h"

namespace hybridopt::fault::random_calls {

enum class Move {
  kOffloadParams,
  kReloadParams,
  kOffloadGrads,
  kAccumulateGrads,
  kDropGrads,
  kReloadGrads,
  kOffloadStates,
  kReloadStates,
  kRefreshMasters
};
constexpr size_t kMoves = 9;
enum class Effect { kNothing, kDone, kRefused };

Effect EffectOf(Move move, const ParamModel& param);
// Does to `param` what the move does, if it does anything.
void Apply(Move move, ParamModel& param);
// Whether an optimizer with these `movable` flags may be asked for the move.
bool MovableAllows(Move move, uint32_t movable);
bool StepAllowed(const OptimizerModel& model);

}  // namespace hybridopt::fault::random_calls
