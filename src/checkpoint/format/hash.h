// XXH3, and a hasher for the blocks of an array that arrives in pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace hybridopt::checkpoint {

// XXH3 of 64 bits, seed 0.
uint64_t Xxh3(std::string_view bytes);

// One hash for each block of an array that comes in pieces of any size; the last block may be
// short. Reset allocates for the whole array; Add does not allocate.
class BlockHasher {
 public:
  explicit BlockHasher(uint64_t block_bytes);

  // Begins an array of `bytes`.
  void Reset(uint64_t bytes);
  void Add(const void* data, uint64_t bytes);
  // The hashes, once all bytes have been added.
  std::vector<uint64_t> Take();

 private:
  const uint64_t block_bytes_;
  uint64_t left_ = 0;        // bytes of the array that have not been added
  uint64_t block_left_ = 0;  // bytes of the block that have not been added
  std::vector<uint64_t> hashes_;
  alignas(64) std::byte state_[576];
};

// How many blocks an array has.
constexpr uint64_t BlockCount(uint64_t bytes, uint64_t block_bytes) {
  return bytes / block_bytes + (bytes % block_bytes != 0);
}

}  // namespace hybridopt::checkpoint
