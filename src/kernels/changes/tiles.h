// Tiles: a take of changes reads a param tile by tile, in any order, on the host or on a device. A
// survey tells of each tile its part of the param's hash, and how many elements have changed; then
// a collection reads these elements. Both give the same on every device.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hybridopt {

// A tile's bits begin with a whole word, and its elements with a whole word of the hash.
inline constexpr uint64_t kChangeTileElements = 8192;
inline constexpr uint64_t kChangeTileWords = kChangeTileElements / 64;

constexpr uint64_t ChangeTiles(uint64_t elements) {
  return (elements + kChangeTileElements - 1) / kChangeTileElements;
}

// A bit for each element, which is set if one of three arrays has it.
struct ChangedBits {
  const uint64_t* words[3] = {};  // NULL: this array has no bit

  bool any() const { return words[0] != nullptr || words[1] != nullptr || words[2] != nullptr; }
  uint64_t At(uint64_t word) const {
    uint64_t bits = 0;
    for (const uint64_t* array : words) bits |= array != nullptr ? array[word] : 0;
    return bits;
  }
  ChangedBits From(uint64_t word) const {
    ChangedBits from;
    for (int i = 0; i < 3; ++i) from.words[i] = words[i] != nullptr ? words[i] + word : nullptr;
    return from;
  }
};

// Device memory for the indices and values of changed elements, in order.
struct ChangeOutput {
  std::byte* indices = nullptr;  // counted in the param
  std::byte* values = nullptr;
  uint32_t index_bytes = 0;  // of one index: 4 or 8
};

// Tiles of one param that follow each other. Only the param's last tile may be shorter.
struct ChangePart {
  const void* elements;  // of these tiles
  uint64_t count;
  uint64_t first_tile;     // the index in the param of the first of these tiles
  uint64_t element_bytes;  // 2 or 4
  ChangedBits bits;        // from these tiles on
  ChangeOutput output{};   // of a collection by the device

  uint64_t tiles() const { return ChangeTiles(count); }
};

// What a survey tells of a tile. Elements are counted from the begin of the tile.
struct ChangeTile {
  uint64_t hash;         // as HashOfPart gives it
  uint16_t count;        // changed elements. If there is none, the others are 0
  uint16_t first;        // the first changed element
  uint16_t last;         // the last changed element
  uint16_t largest_gap;  // from a changed element to the next one
};

// `tile` counts from the begin of the part.
ChangeTile SurveyTile(const ChangePart& part, uint64_t tile);
// Writes which elements have changed, and their values, in order. Returns their number.
uint32_t CollectTile(const ChangePart& part, uint64_t tile, uint16_t* offsets, std::byte* values);

}  // namespace hybridopt
