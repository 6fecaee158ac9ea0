#include "memory/arena.h"

#include <algorithm>

namespace hybridopt {
namespace {

// Mixes the bits of an index, so that the sampled pages of an interleaved range are not all on one
// node.
uint64_t Mixed(uint64_t index) {
  index = (index ^ index >> 30) * 0xbf58476d1ce4e5b9u;
  index = (index ^ index >> 27) * 0x94d049bb133111ebu;
  return index ^ index >> 31;
}

}  // namespace

void PageWish::AddPlanned(uint64_t bytes, NodeBytes* sum) const {
  uint64_t all_parts = 0, parts = 0;
  for (const Share& share : shares) all_parts += share.parts;
  for (const Share& share : shares) {
    // Each cut is rounded down, and the next share begins at that cut, so the shares add up to all
    // bytes.
    const auto until = [&](uint64_t cut) {
      return bytes / all_parts * cut + bytes % all_parts * cut / all_parts;
    };
    sum->Add(share.node, until(parts + share.parts) - until(parts));
    parts += share.parts;
  }
}

Result<Arena> Arena::Map(uint64_t bytes, const PageWish& wish) {
  Arena arena;
  if (bytes == 0) return arena;
  HYBRIDOPT_ASSIGN(void* data, system::MapPages(bytes, wish.huge_pages));
  arena.Use(data, bytes, wish);
  return arena;
}

void Arena::Use(void* data, uint64_t bytes, const PageWish& wish) {
  data_ = static_cast<std::byte*>(data);
  bytes_ = bytes;
  numa_ = wish.numa;
  if (wish.policy) (void)wish.numa->SetPolicy(data, bytes, *wish.policy, wish.nodes);
}

Result<Arena> Arena::Reserve(uint64_t bytes, const PageWish& wish) {
  Arena arena;
  if (bytes == 0) return arena;
  HYBRIDOPT_ASSIGN(void* data, system::ReserveAddresses(bytes, wish.huge_pages));
  arena.Use(data, bytes, wish);
  return arena;
}

Status Arena::Back(uint64_t begin, uint64_t end) {
  return begin < end ? system::BackPages(data_ + begin, end - begin) : Status();
}

void Arena::Discard(uint64_t begin, uint64_t end) {
  if (begin < end) system::DiscardPages(data_ + begin, end - begin);
}

Arena::~Arena() {
  if (data_ != nullptr) system::UnmapPages(data_, bytes_);
}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(numa_, other.numa_);
  return *this;
}

void Arena::AddNodeBytes(uint64_t begin, uint64_t end, NodeBytes* sum) const {
  if (numa_ == nullptr || begin >= end) return;
  const uint64_t page_bytes = system::PageBytes();
  const uint64_t first_page = begin / page_bytes;
  const uint64_t pages = (end - 1) / page_bytes + 1 - first_page;
  const uint64_t samples = std::min(pages, kSampledPages);
  // The first of the pages that a sample represents.
  const auto first = [&](uint64_t sample) {
    return first_page + pages / samples * sample + pages % samples * sample / samples;
  };
  std::vector<void*> sampled(samples);
  for (uint64_t i = 0; i < samples; ++i)
    sampled[i] = data_ + (first(i) + Mixed(i) % (first(i + 1) - first(i))) * page_bytes;
  std::vector<int> nodes(samples);
  if (!numa_->NodesOfPages(sampled, nodes).ok()) return;
  for (uint64_t i = 0; i < samples; ++i) {
    if (nodes[i] < 0) continue;
    const uint64_t from = std::max(first(i) * page_bytes, begin);
    const uint64_t to = std::min(first(i + 1) * page_bytes, end);
    sum->Add(static_cast<uint64_t>(nodes[i]), to - from);
  }
}

}  // namespace hybridopt
