// StatePlaces: where the elements of a param's states lie at some point of the timeline: on the
// device, in the host arena, in the room for what is offloaded, or in the param itself.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "state/lifecycle.h"
#include "state/placement.h"
#include "state/state_memory.h"
#include "state/swap_memory.h"

namespace hybridopt {

// Where a param's bits and its device share's states are, as of one call.
struct Residency {
  void* data;  // the param's address; NULL while it is offloaded
  bool params_on_host;
  bool states_on_host;
};

// Elements that lie side by side. Of split masters `data` are the lower halves.
struct StateStretch {
  std::byte* data;
  uint64_t count;
  bool on_device;
  bool is_param;               // the param is its own master
  std::byte* upper = nullptr;  // split masters: the params that are their upper halves
  bool upper_on_device = false;
};

class StatePlaces {
 public:
  StatePlaces(const ParamTable& table, const Placement& placement, const StateMemory& memory,
              const SwapMemory& swap, bool unified)
      : table_(table), placement_(placement), memory_(memory), swap_(swap), unified_(unified) {}

  // The stretch that starts at an element, with at most `count` of them.
  StateStretch At(uint32_t id, StateSlot slot, uint64_t first, uint64_t count,
                  const Residency& residency) const {
    const ParamPlace& place = placement_.params[id];
    const bool on_device = first < place.device_count;
    if (slot == kMaster && IsSplit(on_device ? place.device_layout : place.host_layout)) {
      StateStretch halves = At(id, kMasterLow, first, count, residency);
      halves.upper = ParamAt(id, residency) + first * sizeof(uint16_t);
      halves.upper_on_device = !unified_ && !residency.params_on_host;
      return halves;
    }
    const uint64_t element_bytes = DtypeBytes(place.state_dtype[slot]);
    const bool device_share = first < place.device_count;
    if (device_share) count = std::min(count, place.device_count - first);
    const uint64_t offset = device_share ? place.device_offset[slot] : place.host_offset[slot];
    if (offset == kNoState) {  // the param is its own master
      return {ParamAt(id, residency) + first * element_bytes, count,
              !unified_ && !residency.params_on_host, true};
    }
    if (!device_share)
      return {memory_.Host(id, slot) + (first - place.device_count) * element_bytes, count, false,
              false};
    if (residency.states_on_host)
      return {swap_.states() + offset + first * element_bytes, count, false, false};
    return {memory_.OnDevice(id, slot) + first * element_bytes, count, true, false};
  }

  int32_t KindOf(StateSlot slot) const { return StateKindOf(table_.algorithm(), slot); }
  // Whether the param has this state at all; masters count as one, whole or split.
  bool Has(uint32_t id, StateSlot slot) const {
    return table_.param(id).count > 0 && StateKindOf(table_.algorithm(), slot) >= 0 &&
           HasState(placement_.params[id].rule, StateLayout::kFp32, slot);
  }

 private:
  std::byte* ParamAt(uint32_t id, const Residency& residency) const {
    return residency.params_on_host ? swap_.Params(id) : static_cast<std::byte*>(residency.data);
  }

  const ParamTable& table_;
  const Placement& placement_;
  const StateMemory& memory_;
  const SwapMemory& swap_;
  const bool unified_;
};

}  // namespace hybridopt
