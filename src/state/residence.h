// Residence: which tier holds the state of each element. Pure. It may change between two steps
// (offload_optimizer_set_device_fraction).
//
// The state of each param is in consecutive ranges, one for each tier, in the order of the tiers:
//
//   param    | device | host .......... | disk ... |
//
// A range may be empty. The elements of params that are placed OFFLOAD_PLACE_AUTO are divided
// together: in registration order, the first elements go to the first tier. A range ends where a
// unit ends: if the next unit does not fit, it goes to the next tier.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "state/shape.h"

namespace hybridopt {

// Elements [begin, begin + count) of a param.
struct ElementRange {
  uint64_t begin = 0;
  uint64_t count = 0;

  uint64_t end() const { return begin + count; }
  bool operator==(const ElementRange&) const = default;
};

class Residence {
 public:
  Residence() = default;
  // `fractions`: which part of the elements of all params that are placed OFFLOAD_PLACE_AUTO goes
  // to each tier. The host's value is ignored: the host gets the rest.
  Residence(const ParamTable& table, const StateShape& shape, const ByTier<double>& fractions);

  ElementRange range(uint32_t param, Tier tier) const {
    const size_t index = IndexOf(tier);
    const uint64_t begin = index == 0 ? 0 : ends_[param].values[index - 1];
    return {begin, ends_[param].values[index] - begin};
  }
  Tier TierOf(uint32_t param, uint64_t element) const {
    const auto& ends = ends_[param].values;
    return kTiers[static_cast<size_t>(std::upper_bound(ends.begin(), ends.end() - 1, element) -
                                      ends.begin())];
  }
  uint64_t elements(Tier tier) const { return elements_[tier]; }
  // Elements on tiers whose elements are cut into chunks.
  uint64_t chunked_elements() const;

  // Calls visit(tier, range) for each tier that holds some of these elements of a param.
  template <typename Visit>
  void ForEachTier(uint32_t param, const ElementRange& wanted, Visit&& visit) const {
    for (Tier tier : kTiers) {
      const ElementRange all = range(param, tier);
      const uint64_t begin = std::max(all.begin, wanted.begin);
      const uint64_t end = std::min(all.end(), wanted.end());
      if (begin < end) visit(tier, ElementRange{begin, end - begin});
    }
  }

  // The bytes of a slot's region that have memory: from the first to the last byte of the tier's
  // elements.
  struct Bytes {
    uint64_t begin = 0;
    uint64_t end = 0;
    uint64_t size() const { return end - begin; }
  };
  const Bytes& bytes(Tier tier, StateSlot slot) const { return bytes_[tier][slot]; }

  bool operator==(const Residence& other) const { return ends_ == other.ends_; }

 private:
  void CountBytes(const StateShape& shape);

  std::vector<ByTier<uint64_t>> ends_;  // per param: where the range of each tier ends
  ByTier<uint64_t> elements_;
  ByTier<std::array<Bytes, kStateSlots>> bytes_;
};

}  // namespace hybridopt
