// TicketNumbers: the numbers of one owner of tickets, an optimizer or a stash. An owner counts what
// it gives tickets for; each count becomes a number of 48 bits that no other owner of the process
// has or will have, so that a ticket that comes to the wrong owner is refused. An owner takes
// numbers in blocks, and each block is given out once:
//
//   47            16 15              0
//   |    block     |  count in block  |
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/status.h"

namespace hybridopt {

// The blocks that have not been given out. Any thread may take one.
class TicketSupply {
 public:
  static constexpr uint64_t kBlocksMax = (uint64_t{1} << 32) - 1;

  constexpr explicit TicketSupply(uint64_t blocks = kBlocksMax) : last_(blocks) {}
  // Returns the number of a block, above 0, that no call has returned before. INVALID_STATE when
  // there is none left.
  Result<uint64_t> Take();

 private:
  const uint64_t last_;
  std::atomic<uint64_t> taken_ = 0;
};

// Not thread-safe.
class TicketNumbers {
 public:
  static constexpr int kNumberBits = 48;
  static constexpr uint64_t kBlockCounts = uint64_t{1} << 16;

  TicketNumbers();  // from the supply of the process
  explicit TicketNumbers(TicketSupply& supply) : supply_(&supply) {}

  // Makes sure that NumberOf knows all counts up to this one. INVALID_STATE when the process has
  // used up all numbers. Counts follow one another: at most one block is taken.
  Status Reserve(uint64_t count);
  uint64_t NumberOf(uint64_t count) const {
    return blocks_[count / kBlockCounts] * kBlockCounts + count % kBlockCounts;
  }
  // Nothing if the number is not one of this owner's.
  std::optional<uint64_t> CountOf(uint64_t number) const;

 private:
  TicketSupply* supply_;
  std::vector<uint64_t> blocks_;  // ascending
};

}  // namespace hybridopt
