// ChangeIndices: how a take stores the indices of one param's changed elements.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/shard.h"
#include "kernels/changes/tiles.h"

namespace hybridopt {

// The indices of a param's changed elements, taken together.
struct IndexSummary {
  uint64_t largest = 0;
  uint64_t largest_gap = 0;  // from an index to the next one, and from 0 to the first one
  bool ascending = true;
};

class ChangeIndices {
 public:
  // Indices count in the shard, or in the whole tensor.
  ChangeIndices(const Shard& shard, bool in_tensor);

  // Whether Summary needs all bits. If not, the summary of the elements is that of their indices.
  bool needs_bits(bool gaps) const;
  // The summary of the elements whose bits are set; bits has `words` words.
  IndexSummary Summary(const ChangedBits& bits, uint64_t words) const;

  // `gaps` asks for gaps, which need ascending indices.
  void Choose(const IndexSummary& summary, bool gaps);
  // Makes every index take 8 bytes.
  void Widen() { bytes_ = sizeof(uint64_t); }
  uint32_t bytes() const { return bytes_; }  // of one index: 1, 2, 4 or 8
  // Whether each index is stored as its distance from the one before, the first from 0.
  bool gaps() const { return gaps_; }

  // Writes the indices of elements begin + offsets[i]. `before` is the changed element before them,
  // and 1 more; 0: there is none.
  void Write(uint64_t begin, std::span<const uint16_t> offsets, uint64_t before,
             std::byte* to) const;

 private:
  uint64_t IndexOf(const Stripe& stripe, uint64_t element) const;
  const Stripe* StripeOf(uint64_t element) const;
  template <typename Index>
  void WriteAs(uint64_t begin, std::span<const uint16_t> offsets, uint64_t before,
               std::byte* to) const;

  std::vector<Stripe> stripes_;  // empty: an index is the element
  uint32_t bytes_ = 4;
  bool gaps_ = false;
};

}  // namespace hybridopt
