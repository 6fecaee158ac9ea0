// Transitions: what each call does to a param, depending on where its data, its gradient and its
// states are. Lifecycle decides by these tables. The program tests/docs/lifecycle_tables.cpp prints
// them into docs/LIFECYCLE.md.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "state/move_table.h"

namespace hybridopt {

// Where the three resources of a param are. "Bound": the caller has bound a device address.
enum class ParamsAt : uint8_t { kDevice, kHost, kHostBound };
enum class GradAt : uint8_t {
  kNone,
  kBound,        // on the device
  kStored,       // on the host, in its own dtype, as it was on the device
  kStoredBound,  // and another gradient is bound on the device
  kAccumulated,  // on the host, a sum in fp32
  kAccumulatedBound
};
enum class StatesAt : uint8_t { kDevice, kHost };

// The column heads of docs/LIFECYCLE.md.
inline constexpr std::array<const char*, 3> kParamsAtNames = {
    "on the device", "on the host, no address", "on the host, address bound"};
inline constexpr std::array<const char*, 6> kGradAtNames = {
    "none", "none, bound", "stored", "stored, bound", "accumulated", "accumulated, bound"};
inline constexpr std::array<const char*, 2> kStatesAtNames = {"on the device", "on the host"};

// The calls. Those of enum Move come first, with the same values.
enum class Call : uint8_t {
  kOffloadParams,
  kReloadParams,
  kOffloadGrads,
  kAccumulateGrads,
  kDropGrads,
  kReloadGrads,
  kOffloadStates,
  kReloadStates,
  kRefreshMasters,
  kStep,
  kStepWithoutGrad,  // of a param that has no gradient
  kLoad,
  kSave,
  kBind,      // with an address for this resource
  kBindNull,  // with NULL for this resource
  kView,      // offload_optimizer_state
  kReadState,
  kWriteState,
  kSetDeviceFraction
};
constexpr Call CallOf(Move move) { return static_cast<Call>(move); }
static_assert(CallOf(Move::kRefreshMasters) == Call::kRefreshMasters);

enum class Effect : uint8_t {
  kNothing,     // allowed, and nothing happens
  kDone,        // allowed
  kDoneIfFp32,  // allowed if the gradient's dtype is fp32, otherwise refused
  kRefused      // INVALID_STATE
};

template <typename At>
struct Transition {
  Effect effect;
  At next;  // where the resource is after the call
  const char*
      summary;  // for docs/LIFECYCLE.md; null: the name of `next`, or "no" if there is no way out
  const char* error;  // if the call is refused: what is wrong and the way out, appended to the
                      // param's name. Null where the caller of Lifecycle writes the error.
};

template <typename At, size_t kLocations>
struct TransitionRow {
  Call call;
  const char* name;  // for docs/LIFECYCLE.md
  std::array<Transition<At>, kLocations> by_location;

  constexpr const Transition<At>& From(At location) const {
    return by_location[static_cast<size_t>(location)];
  }
};

template <typename At>
constexpr Transition<At> Nothing(At location) {
  return {Effect::kNothing, location, nullptr, nullptr};
}
template <typename At>
constexpr Transition<At> Goes(At next, const char* summary = nullptr) {
  return {Effect::kDone, next, summary, nullptr};
}
template <typename At>
constexpr Transition<At> Refused(At location, const char* way_out, const char* error) {
  return {Effect::kRefused, location, way_out, error};
}

// Null if the call has nothing to do with the resource.
template <typename Table>
constexpr const typename Table::value_type* FindRow(const Table& table, Call call) {
  const auto row = std::find_if(table.begin(), table.end(),
                                [call](const auto& each) { return each.call == call; });
  return row == table.end() ? nullptr : &*row;
}

// --------------------------------------------------------------------------------------- params --

namespace params_table {
using enum ParamsAt;

constexpr auto kReloadFirst = "bind, `reload_params`";
constexpr auto kUnbound =
    "its device address was given up by offload_params; tell the new one with "
    "offload_optimizer_bind, then reload";
constexpr auto kNotLoaded =
    "its params are on the host, where nobody can have loaded weights into them; bind and "
    "reload_params first";
constexpr auto kStepNeedsParams =
    "it has a gradient, but its params are on the host; bind and reload_params first";
constexpr auto kLoadNeedsParams =
    "a load writes the params at their addresses, and this one's is given up; bind and "
    "reload_params first";

using Row = TransitionRow<ParamsAt, 3>;
inline constexpr std::array<Row, 11> kRows = {{
    {Call::kOffloadParams, "`offload_params`", {Goes(kHost), Nothing(kHost), Nothing(kHostBound)}},
    {Call::kReloadParams,
     "`reload_params`",
     {Nothing(kDevice), Refused(kHost, "bind an address", kUnbound), Goes(kDevice)}},
    {Call::kBind,
     "`bind` with data",
     {Goes(kDevice, "on the device, there"), Goes(kHostBound),
      Goes(kHostBound, "on the host, bound there")}},
    {Call::kBindNull,
     "`bind` with data NULL",
     {Nothing(kDevice), Nothing(kHost), Nothing(kHostBound)}},
    {Call::kRefreshMasters,
     "`refresh_masters`",
     {Goes(kDevice, "masters filled"), Refused(kHost, kReloadFirst, kNotLoaded),
      Refused(kHostBound, "`reload_params`", kNotLoaded)}},
    {Call::kStep,
     "`step`, with a gradient",
     {Goes(kDevice, "updated"), Refused(kHost, kReloadFirst, kStepNeedsParams),
      Refused(kHostBound, "`reload_params`", kStepNeedsParams)}},
    {Call::kStepWithoutGrad,
     "`step`, without one",
     {Goes(kDevice, "untouched"), Goes(kHost, "untouched"), Goes(kHostBound, "untouched")}},
    {Call::kSave,
     "`save`",
     {Goes(kDevice, "allowed"), Goes(kHost, "allowed: its own master is read there"),
      Goes(kHostBound, "the same")}},
    {Call::kLoad,
     "`load`",
     {Goes(kDevice, "written"), Refused(kHost, kReloadFirst, kLoadNeedsParams),
      Refused(kHostBound, "`reload_params`", kLoadNeedsParams)}},
    {Call::kReadState,
     "`read_state`",
     {Goes(kDevice, "allowed"), Goes(kHost, "allowed: its own master is read there"),
      Goes(kHostBound, "the same")}},
    {Call::kWriteState,
     "`write_state` of masters",
     {Goes(kDevice, "written"), Goes(kHost, "written there, and a reload brings it"),
      Goes(kHostBound, "the same")}},
}};
}  // namespace params_table

// ------------------------------------------------------------------------------------ gradients --

namespace grad_table {
using enum GradAt;

constexpr auto kUnused =
    "the host already holds a gradient of it that no step has used; reload_grads over this one, "
    "give both up with OFFLOAD_MOVE_DROP, or bind NULL and step";
constexpr auto kUnderWay =
    "an accumulation is under way on the host, which a plain offload_grads would overwrite; add "
    "with OFFLOAD_MOVE_ACCUMULATE, or give it up with OFFLOAD_MOVE_DROP";
constexpr auto kNotAccumulated =
    "the host holds a gradient of it that was offloaded without OFFLOAD_MOVE_ACCUMULATE; use the "
    "flag from the first micro-batch on";
constexpr auto kUnbound =
    "its gradient's device address was given up by offload_grads; tell the new one with "
    "offload_optimizer_bind, then reload";
constexpr auto kTooNarrow =
    "its gradient was accumulated in fp32, which its own dtype cannot hold; let the step read it "
    "on the host";
constexpr auto kTwo =
    "it has a gradient on the host and another one was bound since; reload_grads over that one, "
    "give "
    "both up with OFFLOAD_MOVE_DROP, or bind NULL";
constexpr auto kTwoWithSum =
    "it has a sum of gradients on the host and another gradient was bound since; add it with "
    "OFFLOAD_MOVE_ACCUMULATE, give both up with OFFLOAD_MOVE_DROP, or bind NULL";

using Row = TransitionRow<GradAt, 6>;
inline constexpr std::array<Row, 9> kRows = {{
    {Call::kBind,
     "`bind` with grad",
     {Goes(kBound), Goes(kBound), Goes(kStoredBound), Goes(kStoredBound), Goes(kAccumulatedBound),
      Goes(kAccumulatedBound)}},
    {Call::kBindNull,
     "`bind` with grad NULL",
     {Nothing(kNone), Goes(kNone), Nothing(kStored), Goes(kStored), Nothing(kAccumulated),
      Goes(kAccumulated)}},
    {Call::kOffloadGrads,
     "`offload_grads`",
     {Nothing(kNone), Goes(kStored), Nothing(kStored),
      Refused(kStoredBound, "`reload_grads`, DROP or bind NULL", kUnused), Nothing(kAccumulated),
      Refused(kAccumulatedBound, "ACCUMULATE or DROP", kUnderWay)}},
    {Call::kAccumulateGrads,
     "`offload_grads` with ACCUMULATE",
     {Nothing(kNone), Goes(kAccumulated), Nothing(kStored),
      Refused(kStoredBound, "ACCUMULATE from the first on", kNotAccumulated), Nothing(kAccumulated),
      Goes(kAccumulated, "accumulated: the bound one is added")}},
    {Call::kDropGrads,
     "`offload_grads` with DROP",
     {Nothing(kNone), Goes(kNone), Goes(kNone), Goes(kNone), Goes(kNone), Goes(kNone)}},
    {Call::kReloadGrads,
     "`reload_grads`",
     {Nothing(kNone),
      Nothing(kBound),
      Refused(kStored, "bind an address", kUnbound),
      Goes(kBound, "none, bound: with the stored values"),
      Refused(kAccumulated, "bind an address", kUnbound),
      {Effect::kDoneIfFp32, kBound, "fp32: none, bound, with the sum; bf16, fp16: **no**, step",
       kTooNarrow}}},
    {Call::kStep,
     "`step`",
     {Goes(kNone, "untouched"), Goes(kBound, "updated; none, bound"), Goes(kNone, "updated; none"),
      Refused(kStoredBound, "`reload_grads`, DROP or bind NULL", kTwo),
      Goes(kNone, "updated; none"),
      Refused(kAccumulatedBound, "ACCUMULATE, DROP or bind NULL", kTwoWithSum)}},
    {Call::kSave,
     "`save`",
     {Goes(kNone, "untouched"), Goes(kBound, "untouched"), Goes(kStored, "untouched"),
      Goes(kStoredBound, "untouched"), Goes(kAccumulated, "untouched"),
      Goes(kAccumulatedBound, "untouched")}},
    {Call::kLoad,
     "`load`",
     {Goes(kNone, "untouched"), Goes(kBound, "untouched"), Goes(kStored, "untouched"),
      Goes(kStoredBound, "untouched"), Goes(kAccumulated, "untouched"),
      Goes(kAccumulatedBound, "untouched")}},
}};
}  // namespace grad_table

// --------------------------------------------------------------------------------------- states --

namespace states_table {
using enum StatesAt;

constexpr auto kReloadFirst = "its states are on the host; reload_states first";

using Row = TransitionRow<StatesAt, 2>;
inline constexpr std::array<Row, 10> kRows = {{
    {Call::kOffloadStates, "`offload_states`", {Goes(kHost), Nothing(kHost)}},
    {Call::kReloadStates, "`reload_states`", {Nothing(kDevice), Goes(kDevice)}},
    {Call::kStep,
     "`step`",
     {Goes(kDevice, "allowed"),
      Refused(kHost,
              "`reload_states`; also refused if the states of any other param are on the host",
              nullptr)}},
    {Call::kRefreshMasters,
     "`refresh_masters`",
     {Goes(kDevice, "masters filled"), Refused(kHost, "`reload_states`", kReloadFirst)}},
    {Call::kView,
     "`offload_optimizer_state`",
     {Goes(kDevice, "a view"),
      Refused(kHost, "`reload_states`, if the param has a device share", nullptr)}},
    {Call::kReadState,
     "`read_state`",
     {Goes(kDevice, "allowed"), Goes(kHost, "allowed: read on the host")}},
    {Call::kWriteState,
     "`write_state`",
     {Goes(kDevice, "written"), Goes(kHost, "written there, and a reload brings it")}},
    {Call::kSave, "`save`", {Goes(kDevice, "allowed"), Goes(kHost, "allowed: read on the host")}},
    {Call::kLoad,
     "`load`",
     {Goes(kDevice, "written"), Refused(kHost, "`reload_states`", kReloadFirst)}},
    {Call::kSetDeviceFraction,
     "`set_device_fraction`, `set_fractions`",
     {Goes(kDevice, "content changes its tier"),
      Goes(kHost, "stays on the host; a reload brings what the new fraction gives the device")}},
}};
}  // namespace states_table

}  // namespace hybridopt
