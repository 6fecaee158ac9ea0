#include "kernels/changes/tiles.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/changes/content_hash.h"

namespace hybridopt {
namespace {

uint64_t ElementsOf(const ChangePart& part, uint64_t tile) {
  return std::min(kChangeTileElements, part.count - tile * kChangeTileElements);
}

const std::byte* DataOf(const ChangePart& part, uint64_t tile) {
  return static_cast<const std::byte*>(part.elements) +
         tile * kChangeTileElements * part.element_bytes;
}

// Calls visit(element) for each changed element of the tile, in order.
template <typename Visit>
void ForEachChanged(const ChangePart& part, uint64_t tile, Visit&& visit) {
  if (!part.bits.any()) return;
  const uint64_t words = (ElementsOf(part, tile) + 63) / 64;
  for (uint64_t word = 0; word < words; ++word)
    for (uint64_t left = part.bits.At(tile * kChangeTileWords + word); left != 0; left &= left - 1)
      visit(static_cast<uint16_t>(word * 64 + static_cast<uint64_t>(std::countr_zero(left))));
}

}  // namespace

ChangeTile SurveyTile(const ChangePart& part, uint64_t tile) {
  ChangeTile found{};
  const uint64_t first_word =
      (part.first_tile + tile) * (kChangeTileElements * part.element_bytes / sizeof(uint64_t));
  found.hash =
      HashOfPart(DataOf(part, tile), ElementsOf(part, tile) * part.element_bytes, first_word);
  ForEachChanged(part, tile, [&](uint16_t element) {
    if (found.count == 0)
      found.first = element;
    else
      found.largest_gap = std::max(found.largest_gap, static_cast<uint16_t>(element - found.last));
    found.last = element;
    found.count += 1;
  });
  return found;
}

uint32_t CollectTile(const ChangePart& part, uint64_t tile, uint16_t* offsets, std::byte* values) {
  const std::byte* const data = DataOf(part, tile);
  uint32_t count = 0;
  const auto collect = [&](auto stored) {
    ForEachChanged(part, tile, [&](uint16_t element) {
      std::memcpy(values + count * sizeof(stored), data + element * sizeof(stored), sizeof(stored));
      offsets[count++] = element;
    });
  };
  if (part.element_bytes == sizeof(uint16_t))
    collect(uint16_t{});
  else
    collect(uint32_t{});
  return count;
}

}  // namespace hybridopt
