#include "state/residence.h"

#include <cmath>

namespace hybridopt {
namespace {

uint64_t AutomaticElements(const ParamTable& table) {
  uint64_t elements = 0;
  for (const Param& param : table.params())
    if (param.placement == OFFLOAD_PLACE_AUTO) elements += param.count;
  return elements;
}

// The tier of a param that is placed in one.
Tier TierOfPlacement(int32_t placement, bool unified) {
  if (placement == OFFLOAD_PLACE_DISK) return Tier::kDisk;
  return placement == OFFLOAD_PLACE_DEVICE && !unified ? Tier::kDevice : Tier::kHost;
}

// How many elements each tier gets.
ByTier<uint64_t> Shares(uint64_t elements, const ByTier<double>& fractions) {
  ByTier<uint64_t> shares;
  uint64_t left = elements;
  for (Tier tier : kTiers) {
    if (tier == Tier::kHost) continue;
    const double wanted = std::floor(fractions[tier] * static_cast<double>(elements));
    shares[tier] = std::min(left, static_cast<uint64_t>(wanted));
    left -= shares[tier];
  }
  shares[Tier::kHost] = left;
  return shares;
}

// Takes the `count` elements of one param out of the `shares` of the tiers, and returns where the
// param's range on each tier ends. Each tier gets contiguous elements over all params: when the
// rest of its share is smaller than the next unit, this rest goes to the next tier.
ByTier<uint64_t> Take(uint64_t count, const Unit& unit, ByTier<uint64_t>& shares) {
  ByTier<uint64_t> ends;
  uint64_t begin = 0, left_over = 0;
  for (Tier tier : kTiers) {
    shares[tier] += left_over;
    const uint64_t wanted = std::min(shares[tier], count - begin);
    const uint64_t end =
        begin + wanted == count ? count : std::max(begin, unit.RoundDown(begin + wanted));
    left_over = end == count ? 0 : shares[tier] - (end - begin);
    shares[tier] -= end - begin + left_over;
    ends[tier] = begin = end;
  }
  return ends;
}

}  // namespace

Residence::Residence(const ParamTable& table, const StateShape& shape,
                     const ByTier<double>& fractions) {
  const uint64_t automatic = AutomaticElements(table);
  ByTier<double> wanted = fractions;
  if (shape.options.unified) wanted[Tier::kDevice] = 0;
  ByTier<uint64_t> shares = Shares(automatic, wanted);
  ends_.reserve(table.size());
  for (uint32_t id = 0; id < table.size(); ++id) {
    const Param& param = table.param(id);
    ByTier<uint64_t> whole;  // for a param that one tier holds
    whole[TierOfPlacement(param.placement, shape.options.unified)] = param.count;
    const bool shared = param.placement == OFFLOAD_PLACE_AUTO;
    ends_.push_back(Take(param.count, shape.params[id].unit, shared ? shares : whole));
  }
  for (uint32_t id = 0; id < table.size(); ++id)
    for (Tier tier : kTiers) elements_[tier] += range(id, tier).count;
  CountBytes(shape);
}

uint64_t Residence::chunked_elements() const {
  uint64_t elements = 0;
  for (const TierRow& row : kTierRows)
    if (row.is_chunked) elements += elements_[row.tier];
  return elements;
}

void Residence::CountBytes(const StateShape& shape) {
  for (Tier tier : kTiers) {
    for (uint32_t index = 0; index < kStateSlots; ++index) {
      const StateSlot slot{index};
      Bytes& bytes = bytes_[tier][slot];
      for (uint32_t id : shape.region_order) {
        const ParamShape& param = shape.params[id];
        const ElementRange held = range(id, tier);
        if (held.count == 0 || !param.Keeps(tier, slot)) continue;
        if (bytes.size() == 0) bytes.begin = param.ByteAt(tier, slot, held.begin);
        bytes.end = param.ByteAt(tier, slot, held.end());
      }
    }
  }
}

}  // namespace hybridopt
