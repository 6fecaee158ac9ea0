#include "move_rules.h"

namespace hybridopt::fault::random_calls {

Effect EffectOf(Move move, const ParamModel& param) {
  const auto done_if = [](bool needed) { return needed ? Effect::kDone : Effect::kNothing; };
  const bool bound = param.grad != nullptr;
  switch (move) {
    case Move::kOffloadParams:
      return done_if(!param.params_out);
    case Move::kReloadParams:
      if (param.params_out && param.data == nullptr && param.count > 0) return Effect::kRefused;
      return done_if(param.params_out);
    case Move::kOffloadGrads:
      return bound && param.held != Held::kNone ? Effect::kRefused : done_if(bound);
    case Move::kAccumulateGrads:
      return bound && param.held == Held::kStored ? Effect::kRefused : done_if(bound);
    case Move::kDropGrads:
      return done_if(bound || param.held != Held::kNone);
    case Move::kReloadGrads:
      if (param.held == Held::kNone) return Effect::kNothing;
      if (!bound) return Effect::kRefused;
      return param.held == Held::kAccumulated && param.grad_dtype != OFFLOAD_FP32 ? Effect::kRefused
                                                                                  : Effect::kDone;
    case Move::kOffloadStates:
      return done_if(!param.states_out);
    case Move::kReloadStates:
      return done_if(param.states_out);
    case Move::kRefreshMasters:
      return param.params_out || param.states_out ? Effect::kRefused : Effect::kDone;
  }
  return Effect::kRefused;
}

void Apply(Move move, ParamModel& param) {
  if (EffectOf(move, param) != Effect::kDone) return;
  switch (move) {
    case Move::kOffloadParams:
      param.params_out = true;
      param.data = nullptr;
      break;
    case Move::kReloadParams:
      param.params_out = false;
      break;
    case Move::kOffloadGrads:
    case Move::kAccumulateGrads:
    case Move::kDropGrads:
      param.held = move == Move::kOffloadGrads      ? Held::kStored
                   : move == Move::kAccumulateGrads ? Held::kAccumulated
                                                    : Held::kNone;
      param.grad = nullptr;
      break;
    case Move::kReloadGrads:
      param.held = Held::kNone;
      break;
    case Move::kOffloadStates:
    case Move::kReloadStates:
      param.states_out = move == Move::kOffloadStates;
      break;
    case Move::kRefreshMasters:
      break;
  }
}

bool MovableAllows(Move move, uint32_t movable) {
  switch (move) {
    case Move::kOffloadParams:
    case Move::kReloadParams:
      return (movable & OFFLOAD_MOVABLE_PARAMS) != 0;
    case Move::kOffloadGrads:
    case Move::kReloadGrads:
      return (movable & (OFFLOAD_MOVABLE_GRADS | OFFLOAD_MOVABLE_ACCUMULATE)) != 0;
    case Move::kAccumulateGrads:
      return (movable & OFFLOAD_MOVABLE_ACCUMULATE) != 0;
    case Move::kOffloadStates:
    case Move::kReloadStates:
      return (movable & OFFLOAD_MOVABLE_STATES) != 0;
    default:
      return true;
  }
}

bool StepAllowed(const OptimizerModel& model) {
  for (const ParamModel& param : model.params) {
    const bool bound = param.grad != nullptr, held = param.held != Held::kNone;
    if (param.states_out || (bound && held) || ((bound || held) && param.params_out)) return false;
  }
  return true;
}

}  // namespace hybridopt::fault::random_calls
