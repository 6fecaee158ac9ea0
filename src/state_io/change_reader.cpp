#include "state_io/change_reader.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/system.h"
#include "kernels/changes/content_hash.h"
#include "state_io/shared_work.h"

namespace hybridopt {
namespace {

constexpr uint64_t kTileBytes = kChangeTileElements * sizeof(uint16_t);  // about

// Calls visit(tile, number) for each tile [begin, end) of ranges; `number` is its place in them.
template <typename Visit>
void ForEachTile(std::span<const TileRange> ranges, uint64_t begin, uint64_t end, Visit&& visit) {
  uint64_t first = 0;  // the number of the range's first tile
  for (const TileRange& range : ranges) {
    const uint64_t last = std::min(first + range.tiles, end);
    for (uint64_t number = std::max(first, begin); number < last; ++number)
      visit(TileRange{range.param, range.first_tile + (number - first), 1}, number);
    first += range.tiles;
    if (first >= end) return;
  }
}

// The bytes of a slot that the values of a collection take; its offsets follow.
uint64_t ValuesBytes(uint64_t elements, uint64_t element_bytes) {
  return system::RoundUp(elements * element_bytes, sizeof(uint64_t));
}

uint64_t CollectedBytes(uint64_t elements, uint64_t element_bytes) {
  return ValuesBytes(elements, element_bytes) + elements * sizeof(uint16_t);
}

}  // namespace

uint64_t ChangeTable::HostBytes(const StateShape& shape) {
  if (!shape.options.tracks_changes) return 0;
  uint64_t tiles = 0;
  uint64_t end = shape.change_words;
  for (auto param = shape.params.rbegin(); param != shape.params.rend(); ++param) {
    tiles += ChangeTiles((end - param->first_change_word) * 64);
    end = param->first_change_word;
  }
  return tiles * (sizeof(ChangeTile) + sizeof(ChangePlace));
}

ChangeReader::ChangeReader(Context& context, std::vector<ChangeSource> sources, ChangeTable& table)
    : context_(context), sources_(std::move(sources)), tiles_(table.tiles), places_(table.places) {
  uint64_t tiles = 0;
  for (const ChangeSource& source : sources_) {
    first_tile_.push_back(tiles);
    tiles += ChangeTiles(source.count);
  }
  tiles_.resize(tiles);
}

Status ChangeReader::Survey() {
  HYBRIDOPT_TRY(SurveyHost());
  return ReadDevice(false);
}

ChangeFindings ChangeReader::Find(size_t param) const {
  const ChangeSource& source = sources_[param];
  ChangeFindings found;
  uint64_t next = 0;  // 1 more than the last changed element
  uint64_t sum = 0;
  for (uint64_t i = 0; i < ChangeTiles(source.count); ++i) {
    const ChangeTile& tile = tiles_[first_tile_[param] + i];
    sum += tile.hash;
    if (tile.count == 0) continue;
    const uint64_t begin = i * kChangeTileElements;
    const uint64_t before = next == 0 ? 0 : next - 1;
    found.elements.largest_gap = std::max(
        {found.elements.largest_gap, begin + tile.first - before, uint64_t{tile.largest_gap}});
    found.elements.largest = begin + tile.last;
    next = found.elements.largest + 1;
    found.count += tile.count;
  }
  found.hash = HashOfParts(sum, source.count * source.element_bytes);
  return found;
}

Status ChangeReader::Collect(std::span<const ChangeTarget> targets, bool to_device) {
  targets_ = targets;
  to_device_ = to_device;
  SetPlaces();
  HYBRIDOPT_TRY(CollectHost());
  return ReadDevice(true);
}

void ChangeReader::SetPlaces() {
  places_.resize(tiles_.size());
  for (size_t param = 0; param < sources_.size(); ++param) {
    ChangePlace place{};
    for (uint64_t i = 0; i < ChangeTiles(sources_[param].count); ++i) {
      const ChangeTile& tile = tiles_[first_tile_[param] + i];
      places_[first_tile_[param] + i] = place;
      place.position += tile.count;
      if (tile.count > 0) place.before = i * kChangeTileElements + tile.last + 1;
    }
  }
}

// ------------------------------------------------------------------------------ params on the host

std::vector<TileRange> ChangeReader::RangesOnHost() const {
  std::vector<TileRange> ranges;
  for (uint32_t param = 0; param < sources_.size(); ++param)
    if (!sources_[param].on_device && (targets_.empty() || targets_[param].indices != nullptr))
      ranges.push_back({param, 0, ChangeTiles(sources_[param].count)});
  return ranges;
}

ChangePart ChangeReader::PartOf(const TileRange& range) const {
  const ChangeSource& source = sources_[range.param];
  const uint64_t begin = range.first_tile * kChangeTileElements;
  const uint64_t count = std::min(range.tiles * kChangeTileElements, source.count - begin);
  return {source.data + begin * source.element_bytes, count, range.first_tile, source.element_bytes,
          source.host_bits.From(range.first_tile * kChangeTileWords)};
}

// The workers share the tiles.
Status ChangeReader::ForEachTileOnHost(FunctionRef<void(const TileRange&)> visit) const {
  const std::vector<TileRange> ranges = RangesOnHost();
  uint64_t tiles = 0;
  for (const TileRange& range : ranges) tiles += range.tiles;
  return ShareWork(
      context_, tiles, kTileBytes,
      [&](uint64_t begin, uint64_t end) {
        ForEachTile(ranges, begin, end, [&](const TileRange& tile, uint64_t) { visit(tile); });
      },
      1);
}

Status ChangeReader::SurveyHost() {
  return ForEachTileOnHost(
      [this](const TileRange& tile) { tiles_[NumberOf(tile)] = SurveyTile(PartOf(tile), 0); });
}

Status ChangeReader::CollectHost() {
  return ForEachTileOnHost([this](const TileRange& tile) {
    if (tiles_[NumberOf(tile)].count == 0) return;
    std::array<uint16_t, kChangeTileElements> offsets;
    alignas(8) std::array<std::byte, kChangeTileElements * sizeof(uint32_t)> values;
    const uint32_t count = CollectTile(PartOf(tile), 0, offsets.data(), values.data());
    WriteTile(tile, std::span(offsets).first(count), values.data());
  });
}

// Tiles have words of bits of their own, so workers may write different tiles at a time.
void ChangeReader::WriteTile(const TileRange& tile, std::span<const uint16_t> offsets,
                             const std::byte* values) const {
  const ChangeTarget& target = targets_[tile.param];
  const uint64_t element_bytes = sources_[tile.param].element_bytes;
  const ChangePlace& place = places_[NumberOf(tile)];
  target.indices->Write(tile.first_tile * kChangeTileElements, offsets, place.before,
                        target.indices_at + place.position * target.indices->bytes());
  std::memcpy(target.values_at + place.position * element_bytes, values,
              offsets.size() * element_bytes);
}

// ---------------------------------------------------------------------------- params on the device

Status ChangeReader::ReadDevice(bool collects) {
  uint64_t all_tiles = 0;
  bool host_bits = false;
  for (const ChangeSource& source : sources_) {
    if (!source.on_device) continue;
    all_tiles += ChangeTiles(source.count);
    host_bits = host_bits || source.host_bits.any();
  }
  if (all_tiles == 0) return {};
  if (slots_.stream() == nullptr) {
    HYBRIDOPT_ASSIGN(slots_, ChangeSlots::Create(context_, all_tiles, host_bits));
  }
  uint32_t turn = 0;
  for (uint32_t param = 0; param < sources_.size(); ++param) {
    const ChangeSource& source = sources_[param];
    if (!source.on_device || (collects && targets_[param].indices == nullptr)) continue;
    for (TileRange left{param, 0, ChangeTiles(source.count)}; left.tiles > 0;) {
      const uint64_t added = Append(slots_.slot(turn), left, collects);
      left.first_tile += added;
      left.tiles -= added;
      if (left.tiles == 0) break;
      HYBRIDOPT_TRY(Queue(slots_.slot(turn), collects));
      turn = (turn + 1) % ChangeSlots::kSlots;
      HYBRIDOPT_TRY(Finish(slots_.slot(turn), collects));
    }
  }
  HYBRIDOPT_TRY(Queue(slots_.slot(turn), collects));
  HYBRIDOPT_TRY(Finish(slots_.slot((turn + 1) % ChangeSlots::kSlots), collects));
  return Finish(slots_.slot(turn), collects);
}

uint64_t ChangeReader::Append(ChangeSlot& slot, const TileRange& range, bool collects) const {
  const uint64_t element_bytes = sources_[range.param].element_bytes;
  const bool other_elements = slot.tiles > 0 && slot.element_bytes != element_bytes;
  if (slot.ranges.size() == kChangePartsMost || (collects && other_elements)) return 0;
  slot.element_bytes = element_bytes;
  TileRange added = range;
  added.tiles = std::min(range.tiles, slots_.tiles_most() - slot.tiles);
  if (collects) added.tiles = AddElements(slot, added);
  if (added.tiles == 0) return 0;
  slot.ranges.push_back(added);
  slot.tiles += added.tiles;
  return added.tiles;
}

uint64_t ChangeReader::AddElements(ChangeSlot& slot, const TileRange& range) const {
  auto* const starts = reinterpret_cast<uint32_t*>(slot.host) + slot.tiles;
  const ChangeTile* const tiles = &tiles_[NumberOf(range)];
  for (uint64_t i = 0; i < range.tiles; ++i) {
    const uint64_t end = slot.elements + tiles[i].count;
    if (!to_device_ && CollectedBytes(end, slot.element_bytes) > slots_.down_bytes()) return i;
    starts[i] = static_cast<uint32_t>(slot.elements);
    slot.elements = end;
  }
  return range.tiles;
}

Status ChangeReader::Queue(ChangeSlot& slot, bool collects) {
  if (slot.tiles == 0 || (collects && slot.elements == 0)) return {};
  HYBRIDOPT_TRY(SendBits(slot));
  slot.queued = true;
  return collects ? QueueCollection(slot) : QueueSurvey(slot);
}

// Sends the bits on the host of the slot's tiles, and makes the parts of the launch.
Status ChangeReader::SendBits(ChangeSlot& slot) {
  auto* const words = reinterpret_cast<uint64_t*>(slot.host + slots_.bits_offset());
  const auto* const sent = reinterpret_cast<const uint64_t*>(slot.device + slots_.bits_offset());
  bool sends = false;
  uint64_t tiles = 0;
  for (const TileRange& range : slot.ranges) {
    const ChangeSource& source = sources_[range.param];
    ChangePart& part = slot.parts.emplace_back(PartOf(range));
    part.bits = source.device_bits.From(range.first_tile * kChangeTileWords);
    if (source.host_bits.any()) part.bits.words[2] = sent + tiles * kChangeTileWords;
    sends = sends || source.host_bits.any();
    tiles += range.tiles;
  }
  if (!sends) return {};
  HYBRIDOPT_TRY(ShareWork(
      context_, tiles, kChangeTileWords * sizeof(uint64_t),
      [&](uint64_t begin, uint64_t end) {
        ForEachTile(slot.ranges, begin, end, [&](const TileRange& tile, uint64_t number) {
          const ChangePart part = PartOf(tile);
          if (!part.bits.any()) return;
          for (uint64_t word = 0; word < (part.count + 63) / 64; ++word)
            words[number * kChangeTileWords + word] = part.bits.At(word);
        });
      },
      1));
  return slots_.CopyUp(slot, slots_.bits_offset(), tiles * kChangeTileWords * sizeof(uint64_t));
}

Status ChangeReader::QueueSurvey(const ChangeSlot& slot) {
  auto* const tiles = reinterpret_cast<ChangeTile*>(slot.device + slots_.down_offset());
  HYBRIDOPT_TRY(context_.device().SurveyChanges(slots_.stream(), {slot.parts, tiles}));
  return slots_.CopyDown(slot, slots_.down_offset(), slot.tiles * sizeof(ChangeTile));
}

Status ChangeReader::QueueCollection(ChangeSlot& slot) {
  HYBRIDOPT_TRY(slots_.CopyUp(slot, 0, slot.tiles * sizeof(uint32_t)));
  const auto* const starts = reinterpret_cast<const uint32_t*>(slot.device);
  if (to_device_) {
    SetOutputs(slot);
    HYBRIDOPT_TRY(
        context_.device().CollectChanges(slots_.stream(), {slot.parts, starts, nullptr, nullptr}));
    return slots_.NoteQueued(slot);
  }
  std::byte* const values = slot.device + slots_.down_offset();
  auto* const offsets =
      reinterpret_cast<uint16_t*>(values + ValuesBytes(slot.elements, slot.element_bytes));
  HYBRIDOPT_TRY(
      context_.device().CollectChanges(slots_.stream(), {slot.parts, starts, offsets, values}));
  return slots_.CopyDown(slot, slots_.down_offset(),
                         CollectedBytes(slot.elements, slot.element_bytes));
}

void ChangeReader::SetOutputs(ChangeSlot& slot) const {
  for (size_t i = 0; i < slot.ranges.size(); ++i) {
    const ChangeTarget& target = targets_[slot.ranges[i].param];
    const uint64_t position = places_[NumberOf(slot.ranges[i])].position;
    const uint32_t index_bytes = target.indices->bytes();
    slot.parts[i].output = {target.indices_at + position * index_bytes,
                            target.values_at + position * slot.element_bytes, index_bytes};
  }
}

Status ChangeReader::Finish(ChangeSlot& slot, bool collects) {
  if (slot.queued) HYBRIDOPT_TRY(slots_.Await(slot));
  if (!collects)
    KeepSurvey(slot);
  else if (!to_device_)
    HYBRIDOPT_TRY(WriteCollected(slot));
  slot.queued = false;
  slot.ranges.clear();
  slot.parts.clear();
  slot.tiles = slot.elements = 0;
  return {};
}

void ChangeReader::KeepSurvey(const ChangeSlot& slot) {
  const auto* found = reinterpret_cast<const ChangeTile*>(slot.host + slots_.down_offset());
  for (const TileRange& range : slot.ranges) {
    std::copy_n(found, range.tiles, &tiles_[NumberOf(range)]);
    found += range.tiles;
  }
}

Status ChangeReader::WriteCollected(const ChangeSlot& slot) const {
  const std::byte* const values = slot.host + slots_.down_offset();
  const auto* const offsets =
      reinterpret_cast<const uint16_t*>(values + ValuesBytes(slot.elements, slot.element_bytes));
  const auto* const starts = reinterpret_cast<const uint32_t*>(slot.host);
  return ShareWork(
      context_, slot.tiles, kTileBytes,
      [&](uint64_t begin, uint64_t end) {
        ForEachTile(slot.ranges, begin, end, [&](const TileRange& tile, uint64_t number) {
          const std::span found(offsets + starts[number], tiles_[NumberOf(tile)].count);
          WriteTile(tile, found, values + starts[number] * slot.element_bytes);
        });
      },
      1);
}

}  // namespace hybridopt
