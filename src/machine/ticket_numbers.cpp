#include "machine/ticket_numbers.h"

#include <algorithm>

#include "base/check.h"

namespace hybridopt {
namespace {

constinit TicketSupply process_supply;

}  // namespace

Result<uint64_t> TicketSupply::Take() {
  for (uint64_t taken = taken_; taken < last_;)
    if (taken_.compare_exchange_weak(taken, taken + 1)) return taken + 1;
  return Status::Error(OFFLOAD_INVALID_STATE,
                       "this process has used up all numbers for tickets: %llu optimizers and "
                       "stashes, or %llu tickets of each; start a new process",
                       static_cast<unsigned long long>(last_),
                       static_cast<unsigned long long>(TicketNumbers::kBlockCounts));
}

TicketNumbers::TicketNumbers() : TicketNumbers(process_supply) {}

Status TicketNumbers::Reserve(uint64_t count) {
  const uint64_t blocks = count / kBlockCounts + 1;
  if (blocks <= blocks_.size()) return {};
  HYBRIDOPT_CHECK(blocks == blocks_.size() + 1);
  if (blocks_.capacity() < blocks) blocks_.reserve(2 * blocks);  // first, because it may throw
  HYBRIDOPT_ASSIGN(const uint64_t block, supply_->Take());
  blocks_.push_back(block);
  return {};
}

std::optional<uint64_t> TicketNumbers::CountOf(uint64_t number) const {
  const auto found = std::lower_bound(blocks_.begin(), blocks_.end(), number / kBlockCounts);
  if (found == blocks_.end() || *found != number / kBlockCounts) return std::nullopt;
  return static_cast<uint64_t>(found - blocks_.begin()) * kBlockCounts + number % kBlockCounts;
}

}  // namespace hybridopt
