// ChangeLog: which elements of each param may differ from their values when their changes were last
// acknowledged. An executor sets bits where it makes its updates, so no executor waits for another
// one:
//
//   device   | fresh |                a bit for each element, set by updates on the device
//              |  brought down by a take, and before the device memory is given up
//   host     v fresh |                the same, set by the CPU workers
//            | pending |              of takes that have not been acknowledged
//
// A take makes fresh bits pending, and an acknowledgement clears pending bits. Bits that become
// fresh in between stay. A param may also be marked whole: then nothing is known about its
// elements.
//
// Executors set bits on the timeline. Everything else is called by the caller's thread, or by the
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

  // Makes the lanes use other scratch memory, which may be none, and moves the device's bits there.
  Status UseScratch(LaneScratch& scratch);
  // Clears the bits of new device memory.
  Status ClearDevice();

  // Marks a param whole, until a take that follows this call is acknowledged.
  void MarkWhole(uint32_t id) {
    if (on()) params_[id].whole = true;
  }

  // Copies all bits of the device to the host. To be called before the functions below.
  Status BringDown();
  // Makes the fresh bits of a param pending.
  Status MakePending(uint32_t id);
  bool PendingWhole(uint32_t id) const { return params_[id].pending_whole; }
  std::span<const uint64_t> Pending(uint32_t id) const {
    return std::span(pending_).subspan(FirstBit(id) / 64, WordsOf(id));
  }
  // The hash of the param when its changes were last acknowledged; NULL: they never have been.
  const uint64_t* base_hash(uint32_t id) const {
    return params_[id].has_base ? &params_[id].base_hash : nullptr;
  }

  // Records a take of the pending bits of these params, which have these hashes. Returns its
  // number.
  uint64_t Take(std::span<const uint32_t> ids, std::span<const uint64_t> hashes);
  // Clears the bits that were pending in that take. If a later take has named a param too, its bits
  // stay until that take is acknowledged. INVALID_ARGUMENT if there was no such take.
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
