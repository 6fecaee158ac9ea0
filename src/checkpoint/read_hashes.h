// ReadHashes: hashes of the bytes that one pass over files has read, so that a second pass can
// check that it reads the same bytes. There is one hash for each read unit of an array; both passes
// cut arrays into the same read units.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hybridopt::checkpoint {

class ReadHashes {
 public:
  explicit ReadHashes(uint64_t unit_bytes) : unit_bytes_(unit_bytes) {}
  uint64_t unit_bytes() const { return unit_bytes_; }

  // For the first pass, in ascending order of files and offsets: adds `bytes` at `offset`, where a
  // unit begins. Only the last unit may be short. Returns the hash of the last unit.
  uint64_t Add(uint32_t file, uint64_t offset, const std::byte* data, uint64_t bytes);

  // For the second pass: returns whether `data` equals the bytes that Add got for this range, which
  // must begin and end where units do.
  bool Match(uint32_t file, uint64_t offset, const std::byte* data, uint64_t bytes) const;

 private:
  struct Unit {
    uint32_t file;
    uint64_t offset;
    uint64_t hash;
  };

  uint64_t unit_bytes_;
  std::vector<Unit> units_;
};

}  // namespace hybridopt::checkpoint
