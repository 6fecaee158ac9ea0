#include "memory/arena.h"

namespace hybridopt {
namespace {

prim::PageHome HomeOf(const PageWish& wish) {
  if (wish.nodes.size() == 1) return prim::PageHome::kNode;
  return wish.owners_touch_first ? prim::PageHome::kToucher : prim::PageHome::kInterleaved;
}

}  // namespace

Result<Arena> Arena::Map(uint64_t bytes, const PageWish& wish) {
  Arena arena;
  if (bytes == 0) return arena;
  HYBRIDOPT_ASSIGN(void* data, prim::MapPages(bytes, wish.huge_pages));
  arena.data_ = static_cast<std::byte*>(data);
  arena.bytes_ = bytes;
  if (!wish.nodes.empty()) (void)prim::PreferNodes(data, bytes, HomeOf(wish), wish.nodes);
  return arena;
}

Result<Arena> Arena::Reserve(uint64_t bytes, const PageWish& wish) {
  Arena arena;
  if (bytes == 0) return arena;
  HYBRIDOPT_ASSIGN(void* data, prim::ReserveAddresses(bytes, wish.huge_pages));
  arena.data_ = static_cast<std::byte*>(data);
  arena.bytes_ = bytes;
  if (!wish.nodes.empty()) (void)prim::PreferNodes(data, bytes, HomeOf(wish), wish.nodes);
  return arena;
}

Status Arena::Back(uint64_t begin, uint64_t end) {
  return begin < end ? prim::BackPages(data_ + begin, end - begin) : Status();
}

void Arena::Discard(uint64_t begin, uint64_t end) {
  if (begin < end) prim::DiscardPages(data_ + begin, end - begin);
}

Arena::~Arena() {
  if (data_ != nullptr) prim::UnmapPages(data_, bytes_);
}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace hybridopt
