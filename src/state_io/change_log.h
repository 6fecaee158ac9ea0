// ChangeLog: which elements of each param may differ from what they were when their changes were
// last acknowledged. Each bit is where the update is made that sets it, so no executor waits for
// another one:
//
//   device   | fresh |                a bit for each element, set by updates on the device
//              |  brought down by a take, and before the device memory is given up
//   host     v fresh |                the same, set by the CPU workers
//            | pending |              of takes that have not been acknowledged
//
// A take makes fresh bits pending, an acknowledgement clears those. What becomes fresh in between
// stays. Beside its bits a param may be marked whole: nothing is known about its elements.
//
// Executors set bits on the timeline; all else is called by the caller's thread, or by the
// timeline's work while no step runs.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/changes/changes.h"
#include "machine/lanes.h"
#include "state/shape.h"

namespace hybridopt {

class ChangeLog {
 public:
  // All params are marked whole.
  ChangeLog(Context& context, const StateShape& shape, Lanes& lanes);
  static uint64_t HostBytes(const StateShape& shape);

  bool on() const { return shape_.options.tracks_changes; }
  // The bits of a param from its element 0 on; without words if changes are not tracked.
  NotedBits OnHost(uint32_t id) const { return {host_words_, FirstBit(id)}; }
  NotedBits OnDevice(uint32_t id) const { return {lanes_.device_changes, FirstBit(id)}; }

  // Has the lanes use other scratch memory, which may be none: the bits there move on.
  Status UseScratch(LaneScratch& scratch);
  // Clears the bits of new device memory.
  Status ClearDevice();

  // Marks params whole, until a take behind this call is acknowledged.
  void MarkWhole(uint32_t id) {
    if (on()) params_[id].whole = true;
  }

  // To be called before the others: brings all bits of the device down.
  Status BringDown();
  // Makes what is fresh of a param pending.
  Status MakePending(uint32_t id);
  bool PendingWhole(uint32_t id) const { return params_[id].pending_whole; }
  std::span<const uint64_t> Pending(uint32_t id) const {
    return std::span(pending_).subspan(FirstBit(id) / 64, WordsOf(id));
  }
  // The hash of the param when its changes were last acknowledged; NULL: they never were.
  const uint64_t* base_hash(uint32_t id) const {
    return params_[id].has_base ? &params_[id].base_hash : nullptr;
  }

  // Counts a take of what is pending of these params, which have these hashes.
  uint64_t Take(std::span<const uint32_t> ids, std::span<const uint64_t> hashes);
  // Clears what was pending in that take. What a later take has given of a param stays until that
  // one is acknowledged. INVALID_ARGUMENT if there was no such take.
  Status Acknowledge(uint64_t take);

 private:
  struct Tracked {
    bool whole = true;
    bool pending_whole = false;
    bool has_base = false;
    uint64_t take = 0;  // the last one; 0: it has been acknowledged
    uint64_t taken_hash = 0;
    uint64_t base_hash = 0;
  };

  uint64_t FirstBit(uint32_t id) const { return shape_.params[id].first_change_word * 64; }
  uint64_t WordsOf(uint32_t id) const {
    const uint64_t end = id + 1 < shape_.params.size() ? shape_.params[id + 1].first_change_word
                                                       : shape_.change_words;
    return end - shape_.params[id].first_change_word;
  }

  Context& context_;
  const StateShape& shape_;
  Lanes& lanes_;
  std::vector<Tracked> params_;
  std::vector<uint64_t> fresh_;
  std::vector<uint64_t> pending_;
  uint64_t* host_words_ = nullptr;  // those of fresh_; NULL: changes are not tracked
  uint64_t takes_ = 0;
};

}  // namespace hybridopt
