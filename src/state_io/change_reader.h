// ChangeReader: reads one param for a take of changes, wherever the param is: the hash of the whole
// param, and the indices and new values of its changed elements.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/shard.h"
#include "place/state_locator.h"
#include "state_io/transfer.h"

namespace hybridopt {

// Calls visit(element) for each bit that is set, in order.
template <typename Visit>
void ForEachBit(std::span<const uint64_t> words, Visit&& visit) {
  for (uint64_t word = 0; word < words.size(); ++word)
    for (uint64_t left = words[word]; left != 0; left &= left - 1)
      visit(word * 64 + static_cast<uint64_t>(std::countr_zero(left)));
}

// The changed elements of a param, and how their indices are stored.
struct ChangedIndices {
  uint64_t count = 0;
  uint32_t bytes = 4;  // of one index: 1, 2, 4 or 8
  bool gaps = false;   // each is stored as its distance from the one before, the first from 0
};

class ChangeIndexer {
 public:
  // Indices count in the shard, or in the whole tensor. `gaps` asks for gaps, which need ascending
  // indices.
  ChangeIndexer(const Shard& shard, std::span<const uint64_t> bits, bool in_tensor, bool gaps);
  const ChangedIndices& indices() const { return indices_; }
  void Write(std::byte* to) const;

 private:
  template <typename Visit>
  void ForEachIndex(Visit&& visit) const;
  template <typename Index>
  void WriteAs(std::byte* to) const;

  std::vector<Stripe> stripes_;  // empty: an index is the element
  std::span<const uint64_t> bits_;
  ChangedIndices indices_;
};

class ChangeReader {
 public:
  ChangeReader(Transfer& transfer, const ParamTable& table, const StateLocator& locator)
      : transfer_(transfer), table_(table), locator_(locator) {}

  // Returns the hash of the param, and writes the values of the elements whose bits are set.
  Result<uint64_t> Read(uint32_t id, const ParamLocation& location, std::span<const uint64_t> bits,
                        std::byte* values);

 private:
  Result<uint64_t> HashOnHost(const std::byte* data, uint64_t bytes) const;

  Transfer& transfer_;
  const ParamTable& table_;
  const StateLocator& locator_;
};

}  // namespace hybridopt
