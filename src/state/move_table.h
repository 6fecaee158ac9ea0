// The table of moves: what each move copies, and what it needs. Lifecycle reads from the table what
// is allowed, the mover reads what to copy, and Optimizer reads which addresses a call gives up and
// what it waits for. docs/LIFECYCLE.md lists which move is allowed in which state.
#pragma once

#include <array>
#include <cstdint>

#include "offload.h"

namespace hybridopt {

enum class Move : uint8_t {
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

enum class Resource : uint8_t { kParams, kGrads, kStates };
// In which direction the move copies; kNowhere: it copies nothing between device and host.
enum class Direction : uint8_t { kNowhere, kDown, kUp };

struct MoveRow {
  Move move;
  const char* name;   // in profilers
  Resource resource;  // whose address the move uses
  Direction direction;
  uint32_t movable;  // enum offload_movable: the move needs one of these bits; 0: it needs no
                     // memory on the host
  const char* movable_name;
  bool gives_up_address;  // of the resource on the device
  // Whether the move reads, writes or frees memory that a save reads: masters, moments, and params
  // that are their own masters.
  bool touches_state;
};

inline constexpr uint32_t kGradsMovable = OFFLOAD_MOVABLE_GRADS | OFFLOAD_MOVABLE_ACCUMULATE;

inline constexpr std::array<MoveRow, 9> kMoves = {{
    {Move::kOffloadParams, "offload params", Resource::kParams, Direction::kDown,
     OFFLOAD_MOVABLE_PARAMS, "OFFLOAD_MOVABLE_PARAMS", true, true},
    {Move::kReloadParams, "reload params", Resource::kParams, Direction::kUp,
     OFFLOAD_MOVABLE_PARAMS, "OFFLOAD_MOVABLE_PARAMS", false, true},
    {Move::kOffloadGrads, "offload grads", Resource::kGrads, Direction::kDown, kGradsMovable,
     "OFFLOAD_MOVABLE_GRADS", true, false},
    {Move::kAccumulateGrads, "accumulate grads", Resource::kGrads, Direction::kDown,
     OFFLOAD_MOVABLE_ACCUMULATE, "OFFLOAD_MOVABLE_ACCUMULATE", true, false},
    {Move::kDropGrads, "drop grads", Resource::kGrads, Direction::kNowhere, 0, nullptr, true,
     false},
    {Move::kReloadGrads, "reload grads", Resource::kGrads, Direction::kUp, kGradsMovable,
     "OFFLOAD_MOVABLE_GRADS", false, false},
    {Move::kOffloadStates, "offload states", Resource::kStates, Direction::kDown,
     OFFLOAD_MOVABLE_STATES, "OFFLOAD_MOVABLE_STATES", false, true},
    {Move::kReloadStates, "reload states", Resource::kStates, Direction::kUp,
     OFFLOAD_MOVABLE_STATES, "OFFLOAD_MOVABLE_STATES", false, true},
    {Move::kRefreshMasters, "refresh masters", Resource::kParams, Direction::kNowhere, 0, nullptr,
     false, true},
}};

constexpr const MoveRow& RowOf(Move move) { return kMoves[static_cast<size_t>(move)]; }

constexpr bool RowsStandInOrder() {
  for (size_t row = 0; row < kMoves.size(); ++row)
    if (static_cast<size_t>(kMoves[row].move) != row) return false;
  return true;
}
static_assert(RowsStandInOrder());

// What a queued move does to one param.
struct MoveItem {
  uint32_t param;
  void* address;  // the address of its data or gradient at the time of the call
  void* data;     // the address of its data
  bool first;     // in an accumulation: this gradient is the first, the host holds no sum yet
};

}  // namespace hybridopt
