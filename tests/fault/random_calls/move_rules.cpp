#include "move_rules.h"

#include <algorithm>

namespace hybridopt::fault::random_calls {
namespace {

using Event = hybridopt::Call;  // Call is one of random_calls_test.cpp here

ParamsAt ParamsLocation(const ParamModel& param) {
  if (!param.params_out) return ParamsAt::kDevice;
  // An empty param needs no address.
  return param.data == nullptr && param.count > 0 ? ParamsAt::kHost : ParamsAt::kHostBound;
}

GradAt GradLocation(const ParamModel& param) {
  constexpr GradAt kLocations[][2] = {{GradAt::kNone, GradAt::kBound},
                                      {GradAt::kStored, GradAt::kStoredBound},
                                      {GradAt::kAccumulated, GradAt::kAccumulatedBound}};
  return kLocations[static_cast<size_t>(param.held)][param.grad != nullptr];
}

StatesAt StatesLocation(const ParamModel& param) {
  return param.states_out ? StatesAt::kHost : StatesAt::kDevice;
}

// Calls visit(transition) for each resource that the call concerns.
template <typename Visit>
void VisitTransitions(Event call, const ParamModel& param, Visit visit) {
  const auto look_up = [&](const auto& table, auto location) {
    if (const auto* row = FindRow(table, call)) visit(row->From(location));
  };
  look_up(params_table::kRows, ParamsLocation(param));
  look_up(grad_table::kRows, GradLocation(param));
  look_up(states_table::kRows, StatesLocation(param));
}

Effect EffectOf(Event call, const ParamModel& param) {
  Effect strongest = Effect::kNothing;
  VisitTransitions(call, param, [&](const auto& transition) {
    Effect effect = transition.effect;
    if (effect == Effect::kDoneIfFp32)
      effect = param.grad_dtype == OFFLOAD_FP32 ? Effect::kDone : Effect::kRefused;
    strongest = std::max(strongest, effect);
  });
  return strongest;
}

void GoTo(ParamsAt next, ParamModel& param) { param.params_out = next != ParamsAt::kDevice; }
void GoTo(StatesAt next, ParamModel& param) { param.states_out = next == StatesAt::kHost; }
void GoTo(GradAt next, ParamModel& param) {
  const bool stored = next == GradAt::kStored || next == GradAt::kStoredBound;
  const bool none = next == GradAt::kNone || next == GradAt::kBound;
  param.held = none ? Held::kNone : stored ? Held::kStored : Held::kAccumulated;
}

}  // namespace

Effect EffectOf(Move move, const ParamModel& param) { return EffectOf(CallOf(move), param); }

void Apply(Move move, ParamModel& param) {
  if (EffectOf(move, param) != Effect::kDone) return;
  VisitTransitions(CallOf(move), param,
                   [&](const auto& transition) { GoTo(transition.next, param); });
  const MoveRow& row = RowOf(move);
  if (!row.gives_up_address) return;
  if (row.resource == Resource::kParams) param.data = nullptr;
  if (row.resource == Resource::kGrads) param.grad = nullptr;
}

bool MovableAllows(Move move, uint32_t movable) {
  return RowOf(move).movable == 0 || (RowOf(move).movable & movable) != 0;
}

bool StepAllowed(const OptimizerModel& model) {
  return std::none_of(model.params.begin(), model.params.end(), [](const ParamModel& param) {
    // Without a gradient the step leaves the param alone, but the states of all must be there.
    const bool takes_part = GradLocation(param) != GradAt::kNone;
    return takes_part ? EffectOf(Event::kStep, param) == Effect::kRefused : param.states_out;
  });
}

}  // namespace hybridopt::fault::random_calls
