// Gatherer reads the elements of one kind of state in any order, from all files that hold their
// shards, with a fixed amount of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "base/function_ref.h"
#include "checkpoint/format/reshard.h"
#include "checkpoint/reader.h"
#include "memory/arena.h"

namespace tool {

using hybridopt::FunctionRef;
using hybridopt::Result;
using hybridopt::Shard;
using hybridopt::Status;

class Gatherer {
 public:
  // Both must outlive the Gatherer. `verified` holds what the reader's Verify has read; call that
  // before Read.
  static Result<Gatherer> Make(const hybridopt::checkpoint::Reader& reader,
                               const hybridopt::checkpoint::ReadHashes& verified);
  // The size of the units in which an array is read and compared with what was verified.
  static constexpr uint64_t kUnitBytes = uint64_t{1} << 20;

  // OK if every element of a kind is stored exactly once, all in one dtype. CHECKPOINT_MISMATCH or
  // _CORRUPT names the param.
  Result<int32_t> Check(const hybridopt::checkpoint::StoredParam& param, int32_t kind) const;

  // Passes on the bytes of the wanted shard's elements in order, piece by piece, each with whole
  // elements. Call it only after Check has returned OK. CHECKPOINT_CORRUPT if a file has changed
  // since it was verified.
  Status Read(const hybridopt::checkpoint::StoredParam& param, int32_t kind, const Shard& wanted,
              FunctionRef<Status(const std::byte* data, uint64_t bytes)> take);

 private:
  Gatherer(const hybridopt::checkpoint::Reader& reader,
           const hybridopt::checkpoint::ReadHashes& verified, hybridopt::Arena memory)
      : reader_(&reader), verified_(&verified), memory_(std::move(memory)) {}
  std::byte* window() const { return memory_.data(); }
  std::byte* block() const;
  Status CopySegments(const hybridopt::checkpoint::StoredParam& param,
                      const hybridopt::checkpoint::StoredTensor& tensor,
                      std::span<const hybridopt::checkpoint::Segment> segments);
  Result<const std::byte*> ReadUnit(const hybridopt::checkpoint::StoredParam& param,
                                    const hybridopt::checkpoint::StoredTensor& tensor,
                                    uint64_t begin, uint64_t end);
  Result<hybridopt::checkpoint::File*> FileOf(uint32_t file);

  const hybridopt::checkpoint::Reader* reader_;
  const hybridopt::checkpoint::ReadHashes* verified_;
  hybridopt::Arena memory_;                                // the window, followed by the block
  std::map<uint32_t, hybridopt::checkpoint::File> files_;  // open now
};

// The whole tensor as one shard.
Shard WholeShard(const std::vector<int64_t>& shape);

}  // namespace tool
