#include "memory/arena.h"

namespace hybridopt {

Result<Arena> Arena::Map(uint64_t bytes) {
  Arena arena;
  if (bytes == 0) return arena;
  HYBRIDOPT_ASSIGN(void* data, prim::MapPages(bytes));
  arena.data_ = static_cast<std::byte*>(data);
  arena.bytes_ = bytes;
  return arena;
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
