// StateLocator: finds the address of a param's state at some point of the timeline: on the device,
// in the host's arena, on disk, in the swap memory for offloaded states, or in the param itself.
#pragma once

#include <algorithm>
#include <cstdint>

#include "place/state_memory.h"
#include "place/swap_memory.h"
#include "state/lifecycle.h"
#include "state/residence.h"

namespace hybridopt {

// The locations of a param and of its device-share states at the time of a call.
struct ParamLocation {
  void* data;  // the param's address; NULL while it is offloaded
  bool params_on_host;
  bool states_on_host;
};

// A contiguous range of state elements.
struct StateRange {
  std::byte* data;
  Format format;
  uint64_t count;
  bool on_device;
  bool is_param;  // the param is its own master
  // If the format is "beside the param": the params, without which the range cannot be decoded.
  std::byte* params = nullptr;
  bool params_on_device = false;
  // If it is on disk: `data` is NULL until Bring has brought the range into memory, where it stays
  // until another range of the same array is brought.
  DiskMemory* disk = nullptr;
  uint32_t disk_param = 0;
  StateSlot disk_slot = kMaster;
  uint64_t disk_first = 0;

  Status Bring() {
    if (disk == nullptr) return {};
    HYBRIDOPT_TRY(disk->Hold(disk_param, disk_slot, disk_first));
    data = disk->At(disk_param, disk_slot, disk_first);
    return {};
  }
  Status BringToWrite() {
    HYBRIDOPT_TRY(Bring());
    if (disk != nullptr) disk->Wrote(disk_slot);
    return {};
  }
};

struct ParamRange {
  std::byte* data;
  bool on_device;
};

class StateLocator {
 public:
  // `residence` belongs to the timeline: a queued change of residence changes it when it runs.
  StateLocator(const ParamTable& table, const StateShape& shape, const Residence& residence,
               const StateMemory& memory, const SwapMemory& swap)
      : StateLocator(table, shape, residence, memory, swap, swap.states()) {}
  // `states` is the memory for offloaded states that fits `residence`.
  StateLocator(const ParamTable& table, const StateShape& shape, const Residence& residence,
               const StateMemory& memory, const SwapMemory& swap, const SwapStates& states)
      : table_(table),
        shape_(shape),
        residence_(residence),
        memory_(memory),
        swap_(swap),
        swap_states_(states) {}

  // The range that starts at element `first`, with at most `count` elements, on one tier, and on
  // disk in one chunk.
  StateRange At(uint32_t id, StateSlot slot, uint64_t first, uint64_t count,
                const ParamLocation& location) const {
    const ParamShape& param = shape_.params[id];
    const bool params_on_device = !shape_.options.unified && !location.params_on_host;
    if (slot == kMaster && param.beside_param()) {
      StateRange range = At(id, kMasterLow, first, count, location);
      range.params = ParamAt(id, location) + first * sizeof(uint16_t);
      range.params_on_device = params_on_device;
      return range;
    }
    const Tier tier = residence_.TierOf(id, first);
    count = std::min(count, residence_.range(id, tier).end() - first);
    const Format format = param.format[slot];
    if (!param.Keeps(tier, slot))  // the param is its own master
      return {ParamAt(id, location) + param.BytesBefore(slot, first), format, count,
              params_on_device, true};
    if (tier == Tier::kDevice && location.states_on_host)
      return {swap_states_.At(param, slot, first), format, count, false, false};
    if (tier == Tier::kDisk) return OnDisk(id, slot, first, count, format);
    return {memory_.At(tier, id, slot, first), format, count, tier == Tier::kDevice, false};
  }

  // The elements of a param from element `first` on.
  ParamRange Params(uint32_t id, uint64_t first, const ParamLocation& location) const {
    return {ParamAt(id, location) + first * DtypeBytes(table_.param(id).dtype),
            !shape_.options.unified && !location.params_on_host};
  }

  int32_t KindOf(uint32_t id, StateSlot slot) const {
    return StateKindOf(table_.algorithm(id), slot);
  }
  // The state on disk; NULL if there is none.
  DiskMemory* disk() const { return memory_.disk(); }
  // Whether the param has this state, in any format. Masters count even if they are stored beside
  // the param.
  bool Has(uint32_t id, StateSlot slot) const {
    return table_.param(id).count > 0 && KindOf(id, slot) >= 0 &&
           HasState(shape_.params[id].rule, Format::kFp32, slot);
  }

 private:
  StateRange OnDisk(uint32_t id, StateSlot slot, uint64_t first, uint64_t count,
                    Format format) const {
    const Fragment& fragment = memory_.disk()->FragmentOf(id, first);
    StateRange range{nullptr, format, std::min(count, fragment.begin + fragment.count - first),
                     false, false};
    range.disk = memory_.disk();
    range.disk_param = id;
    range.disk_slot = slot;
    range.disk_first = first;
    return range;
  }
  std::byte* ParamAt(uint32_t id, const ParamLocation& location) const {
    return location.params_on_host ? swap_.Params(id) : static_cast<std::byte*>(location.data);
  }

  const ParamTable& table_;
  const StateShape& shape_;
  const Residence& residence_;
  const StateMemory& memory_;
  const SwapMemory& swap_;
  const SwapStates& swap_states_;
};

}  // namespace hybridopt
