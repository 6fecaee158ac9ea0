#include "checkpoint/format/hash.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

// Compiles xxHash into this file: there is no library to link, and no symbol is exported.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace hybridopt::checkpoint {
namespace {

XXH3_state_t* State(std::byte* memory) { return reinterpret_cast<XXH3_state_t*>(memory); }

}  // namespace

uint64_t Xxh3(std::string_view bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

BlockHasher::BlockHasher(uint64_t block_bytes) : block_bytes_(block_bytes) {
  static_assert(sizeof(state_) >= sizeof(XXH3_state_t));
  HYBRIDOPT_CHECK(block_bytes > 0);
}

void BlockHasher::Reset(uint64_t bytes) {
  left_ = bytes;
  block_left_ = 0;
  hashes_.clear();
  hashes_.reserve(BlockCount(bytes, block_bytes_));
}

void BlockHasher::Add(const void* data, uint64_t bytes) {
  HYBRIDOPT_CHECK(bytes <= left_);
  const auto* next = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    if (block_left_ == 0) {
      block_left_ = std::min(block_bytes_, left_);
      XXH3_INITSTATE(State(state_));
      XXH3_64bits_reset(State(state_));
    }
    const uint64_t now = std::min(bytes, block_left_);
    XXH3_64bits_update(State(state_), next, now);
    next += now;
    bytes -= now;
    left_ -= now;
    block_left_ -= now;
    if (block_left_ == 0) hashes_.push_back(XXH3_64bits_digest(State(state_)));
  }
}

std::vector<uint64_t> BlockHasher::Take() {
  HYBRIDOPT_CHECK(left_ == 0);
  return std::move(hashes_);
}

}  // namespace hybridopt::checkpoint
