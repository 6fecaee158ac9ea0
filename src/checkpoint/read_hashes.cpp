#include "checkpoint/read_hashes.h"

#include <algorithm>
#include <string_view>
#include <tuple>

#include "base/check.h"
#include "checkpoint/format/hash.h"

namespace hybridopt::checkpoint {
namespace {

uint64_t HashOf(const std::byte* data, uint64_t bytes) {
  return Xxh3(std::string_view(reinterpret_cast<const char*>(data), bytes));
}

}  // namespace

uint64_t ReadHashes::Add(uint32_t file, uint64_t offset, const std::byte* data, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes; at += unit_bytes_) {
    HYBRIDOPT_CHECK(units_.empty() || std::tuple(units_.back().file, units_.back().offset) <
                                          std::tuple(file, offset + at));
    units_.push_back({file, offset + at, HashOf(data + at, std::min(unit_bytes_, bytes - at))});
  }
  return units_.back().hash;
}

bool ReadHashes::Match(uint32_t file, uint64_t offset, const std::byte* data,
                       uint64_t bytes) const {
  const auto before = [](const Unit& unit, const std::tuple<uint32_t, uint64_t>& place) {
    return std::tuple(unit.file, unit.offset) < place;
  };
  auto unit = std::lower_bound(units_.begin(), units_.end(), std::tuple(file, offset), before);
  for (uint64_t at = 0; at < bytes; at += unit_bytes_, ++unit) {
    HYBRIDOPT_CHECK(unit != units_.end() && unit->file == file && unit->offset == offset + at);
    if (unit->hash != HashOf(data + at, std::min(unit_bytes_, bytes - at))) return false;
  }
  return true;
}

}  // namespace hybridopt::checkpoint
