#include "state_io/change_indices.h"

#include <algorithm>
#include <cstring>

namespace hybridopt {
namespace {

uint32_t BytesFor(uint64_t largest) {
  if (largest <= UINT8_MAX) return 1;
  if (largest <= UINT16_MAX) return 2;
  return largest <= UINT32_MAX ? 4 : 8;
}

}  // namespace

ChangeIndices::ChangeIndices(const Shard& shard, bool in_tensor) {
  if (in_tensor && shard.partial()) AddStripes(shard, stripes_);
}

uint64_t ChangeIndices::IndexOf(const Stripe& stripe, uint64_t element) const {
  const uint64_t column = stripe.column + (element - stripe.begin);
  return stripe.first + column / stripe.row_length * stripe.row_stride + column % stripe.row_length;
}

const Stripe* ChangeIndices::StripeOf(uint64_t element) const {
  const auto next =
      std::upper_bound(stripes_.begin(), stripes_.end(), element,
                       [](uint64_t wanted, const Stripe& stripe) { return wanted < stripe.begin; });
  return &*(next - 1);
}

bool ChangeIndices::needs_bits(bool gaps) const {
  if (stripes_.empty()) return false;
  if (gaps) return true;
  for (const Stripe& stripe : stripes_)
    if (IndexOf(stripe, stripe.begin + stripe.count - 1) > UINT32_MAX) return true;
  return false;
}

IndexSummary ChangeIndices::Summary(const ChangedBits& bits, uint64_t words) const {
  IndexSummary summary;
  uint64_t last = 0;
  const Stripe* stripe = stripes_.data();
  for (uint64_t word = 0; word < words; ++word)
    for (uint64_t left = bits.At(word); left != 0; left &= left - 1) {
      const uint64_t element = word * 64 + static_cast<uint64_t>(std::countr_zero(left));
      while (element >= stripe->begin + stripe->count) ++stripe;
      const uint64_t index = IndexOf(*stripe, element);
      summary.ascending = summary.ascending && index >= last;
      summary.largest = std::max(summary.largest, index);
      summary.largest_gap = std::max(summary.largest_gap, index - last);
      last = index;
    }
  return summary;
}

void ChangeIndices::Choose(const IndexSummary& summary, bool gaps) {
  gaps_ = gaps && summary.ascending;
  bytes_ = gaps_ ? BytesFor(summary.largest_gap) : std::max(BytesFor(summary.largest), 4u);
}

template <typename Index>
void ChangeIndices::WriteAs(uint64_t begin, std::span<const uint16_t> offsets, uint64_t before,
                            std::byte* to) const {
  if (offsets.empty()) return;
  const Stripe* stripe = stripes_.empty() ? nullptr : StripeOf(begin + offsets.front());
  uint64_t last = 0;
  if (gaps_ && before > 0)
    last = stripe == nullptr ? before - 1 : IndexOf(*StripeOf(before - 1), before - 1);
  for (uint16_t offset : offsets) {
    uint64_t index = begin + offset;
    if (stripe != nullptr) {
      while (index >= stripe->begin + stripe->count) ++stripe;
      index = IndexOf(*stripe, index);
    }
    const auto stored = static_cast<Index>(gaps_ ? index - last : index);
    std::memcpy(to, &stored, sizeof(stored));
    to += sizeof(stored);
    last = index;
  }
}

void ChangeIndices::Write(uint64_t begin, std::span<const uint16_t> offsets, uint64_t before,
                          std::byte* to) const {
  switch (bytes_) {
    case 1:
      return WriteAs<uint8_t>(begin, offsets, before, to);
    case 2:
      return WriteAs<uint16_t>(begin, offsets, before, to);
    case 4:
      return WriteAs<uint32_t>(begin, offsets, before, to);
    default:
      return WriteAs<uint64_t>(begin, offsets, before, to);
  }
}

}  // namespace hybridopt
