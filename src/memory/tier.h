// Tier: where state can be stored. Each tier has one row, and src/place/ has its memory. The order
// is that of a param's ranges: its first elements are on the first tier.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "offload.h"

namespace hybridopt {

// The values are those of the ABI.
enum class Tier : uint8_t {
  kDevice = OFFLOAD_TIER_DEVICE,
  kHost = OFFLOAD_TIER_HOST,
  kDisk = OFFLOAD_TIER_DISK
};
constexpr size_t IndexOf(Tier tier) { return static_cast<size_t>(tier); }

struct TierRow {
  Tier tier;
  const char* name;
  // true: state on this tier is cut into chunks. CPU workers update a chunk in place, or the device
  // updates it in the device's ring. The chunks of the disk are in the host's ring meanwhile.
  // false: the device updates the state of this tier in place.
  bool is_chunked;
};

inline constexpr std::array kTierRows = {TierRow{Tier::kDevice, "device", false},
                                         TierRow{Tier::kHost, "host", true},
                                         TierRow{Tier::kDisk, "disk", true}};
inline constexpr uint32_t kTierCount = kTierRows.size();

constexpr const TierRow& RowOf(Tier tier) { return kTierRows[IndexOf(tier)]; }

// One value for each tier.
template <typename T>
struct ByTier {
  std::array<T, kTierCount> values{};

  constexpr T& operator[](Tier tier) { return values[IndexOf(tier)]; }
  constexpr const T& operator[](Tier tier) const { return values[IndexOf(tier)]; }
  bool operator==(const ByTier&) const = default;
};

inline constexpr std::array<Tier, kTierCount> kTiers = [] {
  std::array<Tier, kTierCount> tiers{};
  for (uint32_t i = 0; i < kTierCount; ++i) tiers[i] = kTierRows[i].tier;
  return tiers;
}();

constexpr bool TierRowsAreInOrder() {
  for (uint32_t i = 0; i < kTierCount; ++i)
    if (static_cast<uint32_t>(kTiers[i]) != i) return false;
  return true;
}
static_assert(TierRowsAreInOrder());

}  // namespace hybridopt
