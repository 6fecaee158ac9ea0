// Residence: which tier holds the state of each element. Pure. It is the one answer to "how many
// elements are on the device", and it may change between two steps (offload_optimizer_set_device_
// fraction).
//
// The state of each param is in at most two ranges: elements [0, device_count) are on the device,
// the others on the host. The device fraction applies to params that are placed OFFLOAD_PLACE_AUTO:
// it puts the first of their elements, in registration order, on the device.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "state/shape.h"

namespace hybridopt {

class Residence {
 public:
  Residence() = default;
  // `device_fraction` is the fraction of the elements of all params that are placed
  // OFFLOAD_PLACE_AUTO.
  Residence(const ParamTable& table, const StateShape& shape, double device_fraction);

  uint64_t device_count(uint32_t param) const { return device_counts_[param]; }
  uint64_t device_elements() const { return device_elements_; }
  uint64_t host_elements() const { return host_elements_; }

  // The bytes of a slot's region that have memory: on the device the first bytes of the region, on
  // the host the bytes [begin, end).
  struct Bytes {
    uint64_t begin = 0;
    uint64_t end = 0;
    uint64_t size() const { return end - begin; }
  };
  const Bytes& bytes(Tier tier, StateSlot slot) const {
    return (tier == Tier::kDevice ? device_bytes_ : host_bytes_)[slot];
  }

  bool operator==(const Residence& other) const { return device_counts_ == other.device_counts_; }

 private:
  void CountBytes(const ParamTable& table, const StateShape& shape);

  std::vector<uint64_t> device_counts_;  // per param
  uint64_t device_elements_ = 0;
  uint64_t host_elements_ = 0;
  std::array<Bytes, kStateSlots> device_bytes_{};
  std::array<Bytes, kStateSlots> host_bytes_{};
};

}  // namespace hybridopt
