#include "state/residence.h"

#include <algorithm>
#include <cmath>

namespace hybridopt {

Residence::Residence(const ParamTable& table, const StateShape& shape, double device_fraction)
    : device_counts_(table.size()) {
  uint64_t automatic_count = 0;
  for (const Param& param : table.params())
    if (param.placement == OFFLOAD_PLACE_AUTO) automatic_count += param.count;
  uint64_t left =
      static_cast<uint64_t>(std::floor(device_fraction * static_cast<double>(automatic_count)));
  for (uint32_t id = 0; id < table.size() && !shape.options.unified; ++id) {
    const Param& param = table.param(id);
    if (param.placement == OFFLOAD_PLACE_DEVICE) device_counts_[id] = param.count;
    if (param.placement != OFFLOAD_PLACE_AUTO) continue;
    device_counts_[id] = std::min(left, param.count);
    left -= device_counts_[id];
  }
  for (uint64_t count : device_counts_) device_elements_ += count;
  host_elements_ = shape.element_count - device_elements_;
  CountBytes(table, shape);
}

void Residence::CountBytes(const ParamTable& table, const StateShape& shape) {
  for (uint32_t index = 0; index < kStateSlots; ++index) {
    const StateSlot slot{index};
    Bytes& device = device_bytes_[slot];
    Bytes& host = host_bytes_[slot];
    for (uint32_t id : shape.region_order) {
      const ParamShape& param = shape.params[id];
      const uint64_t count = table.param(id).count;
      if (device_counts_[id] > 0 && param.Keeps(Tier::kDevice, slot))
        device.end = param.ByteAt(Tier::kDevice, slot, device_counts_[id]);
      if (device_counts_[id] == count || !param.Keeps(Tier::kHost, slot)) continue;
      if (host.size() == 0) host.begin = param.ByteAt(Tier::kHost, slot, device_counts_[id]);
      host.end = param.ByteAt(Tier::kHost, slot, count);
    }
  }
}

}  // namespace hybridopt
