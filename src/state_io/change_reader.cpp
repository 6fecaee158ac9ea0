#include "state_io/change_reader.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>

#include "state_io/content_hash.h"
#include "state_io/shared_work.h"

namespace hybridopt {
namespace {

uint32_t BytesFor(uint64_t largest) {
  if (largest <= UINT8_MAX) return 1;
  if (largest <= UINT16_MAX) return 2;
  return largest <= UINT32_MAX ? 4 : 8;
}

// Appends to `values` the elements of a part of the param whose bits are set. Bit 0 is that of the
// part's first element.
std::byte* Collect(const std::byte* part, uint64_t element_bytes, std::span<const uint64_t> bits,
                   std::byte* values) {
  ForEachBit(bits, [&](uint64_t element) {
    std::memcpy(values, part + element * element_bytes, element_bytes);
    values += element_bytes;
  });
  return values;
}

}  // namespace

ChangeIndexer::ChangeIndexer(const Shard& shard, std::span<const uint64_t> bits, bool in_tensor,
                             bool gaps)
    : bits_(bits) {
  if (in_tensor && shard.partial()) AddStripes(shard, stripes_);
  uint64_t last = 0, largest = 0, largest_gap = 0;
  bool ascending = true;
  ForEachIndex([&](uint64_t index) {
    ascending = ascending && index >= last;
    largest = std::max(largest, index);
    largest_gap = std::max(largest_gap, index - last);
    last = index;
    indices_.count += 1;
  });
  indices_.gaps = gaps && ascending;
  indices_.bytes = indices_.gaps ? BytesFor(largest_gap) : std::max(BytesFor(largest), 4u);
}

template <typename Visit>
void ChangeIndexer::ForEachIndex(Visit&& visit) const {
  if (stripes_.empty()) return ForEachBit(bits_, visit);
  auto stripe = stripes_.begin();
  ForEachBit(bits_, [&](uint64_t element) {
    while (element >= stripe->begin + stripe->count) ++stripe;
    const uint64_t column = stripe->column + (element - stripe->begin);
    visit(stripe->first + column / stripe->row_length * stripe->row_stride +
          column % stripe->row_length);
  });
}

template <typename Index>
void ChangeIndexer::WriteAs(std::byte* to) const {
  uint64_t last = 0;
  ForEachIndex([&](uint64_t index) {
    const auto stored = static_cast<Index>(indices_.gaps ? index - last : index);
    std::memcpy(to, &stored, sizeof(stored));
    to += sizeof(stored);
    last = index;
  });
}

void ChangeIndexer::Write(std::byte* to) const {
  switch (indices_.bytes) {
    case 1:
      return WriteAs<uint8_t>(to);
    case 2:
      return WriteAs<uint16_t>(to);
    case 4:
      return WriteAs<uint32_t>(to);
    default:
      return WriteAs<uint64_t>(to);
  }
}

Result<uint64_t> ChangeReader::Read(uint32_t id, const ParamLocation& location,
                                    std::span<const uint64_t> bits, std::byte* values) {
  const uint64_t element_bytes = DtypeBytes(table_.param(id).dtype);
  const uint64_t bytes = table_.param(id).count * element_bytes;
  if (bytes == 0) return HashOfParts(0, 0);
  const ParamRange range = locator_.Params(id, 0, location);
  if (!range.on_device) {
    Collect(range.data, element_bytes, bits, values);
    return HashOnHost(range.data, bytes);
  }
  constexpr uint64_t kPieceBytes = Transfer::kStagingBytes;
  uint64_t sum = 0;
  for (uint64_t done = 0; done < bytes; done += kPieceBytes) {
    const uint64_t now = std::min(bytes - done, kPieceBytes);
    HYBRIDOPT_TRY(transfer_.CopyDown(transfer_.staging(), range.data + done, now));
    sum += HashOfPart(transfer_.staging(), now, done / sizeof(uint64_t));
    if (bits.empty()) continue;
    const uint64_t first_word = done / element_bytes / 64;
    const uint64_t words =
        std::min<uint64_t>(bits.size() - first_word, kPieceBytes / element_bytes / 64);
    values = Collect(transfer_.staging(), element_bytes, bits.subspan(first_word, words), values);
  }
  return HashOfParts(sum, bytes);
}

Result<uint64_t> ChangeReader::HashOnHost(const std::byte* data, uint64_t bytes) const {
  std::atomic<uint64_t> sum = 0;
  const uint64_t words = (bytes + sizeof(uint64_t) - 1) / sizeof(uint64_t);
  HYBRIDOPT_TRY(
      ShareWork(transfer_.context(), words, sizeof(uint64_t), [&](uint64_t begin, uint64_t end) {
        const uint64_t first = begin * sizeof(uint64_t);
        const uint64_t last = std::min(end * sizeof(uint64_t), bytes);
        sum += HashOfPart(data + first, last - first, begin);
      }));
  return HashOfParts(sum, bytes);
}

}  // namespace hybridopt
