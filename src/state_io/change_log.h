// ChangeLog: which elements of each param may differ from their values when their changes were last
// acknowledged. An executor sets bits where it makes its updates, so no executor waits for another
// one:
//
//   device   | fresh |                a bit for each element, set by updates on the device
//            | pending |              of the last take, if it has not been acknowledged
//              |  brought down before the device memory is given up, and for params on the host
//   host     v fresh |                the same, set by the CPU workers
//            | pending |              of all takes that have not been acknowledged
//
// A take makes fresh bits pending. On the device the two arrays of a param change their parts; what
// is pending there from an earlier take is brought down first. After an acknowledgement nothing is
// pending. It does not write the bits: they are *stale*, nobody reads them, and the next take that
// makes bits of the param pending replaces them. Bits that become fresh in between stay. A param
// may also be marked whole: then nothing is known about its elements.
//
// Executors set bits on the timeline. Everything else is called by the caller's thread, or by the
// timeline's work while no step runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/changes/changes.h"
#include "kernels/changes/tiles.h"
#include "machine/lanes.h"
#include "state/shape.h"

namespace hybridopt {

class ChangeLog {
 public:
  // All params are marked whole.
  ChangeLog(Context& context, const StateShape& shape, Lanes& lanes);
  static uint64_t HostBytes(const StateShape& shape);
  // The words of the device's bits.
  static uint64_t DeviceWords(const StateShape& shape) { return 2 * shape.change_words; }

  bool on() const { return shape_.options.tracks_changes; }
  // The bits of a param from its element 0 on; without words if changes are not tracked.
  NotedBits OnHost(uint32_t id) const {
    if (host_words_ != nullptr) MarkNoted(id);
    return {host_words_, FirstBit(id)};
  }
  NotedBits OnDevice(uint32_t id) const {
    if (lanes_.device_changes == nullptr) return {};
    return {DeviceArray(params_[id].fresh_array), FirstBit(id)};
  }

  // Makes the lanes use other scratch memory, which may be none, and moves the device's bits there.
  Status UseScratch(LaneScratch& scratch);
  // Clears the bits of new device memory.
  Status ClearDevice();

  // Marks a param whole, until a take that follows this call is acknowledged.
  void MarkWhole(uint32_t id) {
    if (on()) params_[id].whole = true;
  }

  // Moves all bits of a param from the device to the host.
  Status BringDown(uint32_t id) { return BringDown(std::span(&id, 1)); }
  // Whether a take must give all elements.
  bool Whole(uint32_t id) const { return params_[id].whole || params_[id].pending_whole; }
  // The fresh and pending bits on the host; no words where there is no bit.
  ChangedBits HostBits(uint32_t id) const {
    const uint64_t first = FirstWord(id);
    return {{params_[id].has_pending ? pending_.data() + first : nullptr,
             params_[id].noted != 0 ? fresh_.data() + first : nullptr}};
  }
  // The same on the device.
  ChangedBits DeviceBits(uint32_t id) const {
    if (lanes_.device_changes == nullptr) return {};
    const Tracked& param = params_[id];
    return {
        {DeviceArray(param.fresh_array) + FirstWord(id),
         param.pending_on_device ? DeviceArray(1 - param.fresh_array) + FirstWord(id) : nullptr}};
  }
  uint64_t WordsOf(uint32_t id) const {
    const uint64_t end = id + 1 < shape_.params.size() ? shape_.params[id + 1].first_change_word
                                                       : shape_.change_words;
    return end - FirstWord(id);
  }
  // The hash of the param when its changes were last acknowledged; NULL: they never have been.
  const uint64_t* base_hash(uint32_t id) const {
    return params_[id].has_base ? &params_[id].base_hash : nullptr;
  }

  // Records a take of these params, which have these hashes: no bit of them is fresh any more.
  // Returns its number.
  Result<uint64_t> Take(std::span<const uint32_t> ids, std::span<const uint64_t> hashes);
  // Ends what was pending in that take. If a later take has named a param too, its bits
  // stay until that take is acknowledged. INVALID_ARGUMENT if there was no such take.
  Status Acknowledge(uint64_t take);

 private:
  struct Tracked {
    bool whole = true;
    bool pending_whole = false;
    bool has_base = false;
    bool has_pending = false;        // if not, those in pending_ are stale
    bool pending_on_device = false;  // if not, those in the other array on the device are stale
    uint8_t fresh_array = 0;         // which array on the device, 0 or 1, has the fresh bits
    uint8_t noted = 0;               // 0: no bit on the host is fresh; set by the workers
    uint64_t take = 0;               // the last one; 0: it has been acknowledged, or has failed
    uint64_t taken_hash = 0;
    uint64_t base_hash = 0;
  };

  uint64_t FirstWord(uint32_t id) const { return shape_.params[id].first_change_word; }
  uint64_t FirstBit(uint32_t id) const { return FirstWord(id) * 64; }
  // A load comes first, so that the cache line can stay in every worker's cache.
  void MarkNoted(uint32_t id) const {
    const std::atomic_ref<uint8_t> noted(tracked_[id].noted);
    if (noted.load(std::memory_order_relaxed) == 0) noted.store(1, std::memory_order_relaxed);
  }
  uint64_t* DeviceArray(uint32_t array) const {
    return lanes_.device_changes + array * shape_.change_words;
  }
  // Params whose words follow each other, and whose bits on the device are in the same arrays.
  struct Run {
    uint64_t first_word;
    uint64_t words;
    uint32_t fresh_array;
    bool pending_on_device;
  };
  std::vector<Run> RunsOf(std::span<const uint32_t> ids) const;
  Status BringDown(std::span<const uint32_t> ids);
  Status BringDownPending(std::span<const uint32_t> ids);
  // Sets the bits of an array on the device in one on the host.
  Status CopyDown(uint32_t array, const Run& run, std::vector<uint64_t>& to);
  Status ClearDevice(uint32_t array, uint64_t first_word, uint64_t words);
  Status AwaitDevice();
  Status MakePending(uint32_t id);
  Status MakePendingOnDevice(std::span<const uint32_t> ids);

  Context& context_;
  const StateShape& shape_;
  Lanes& lanes_;
  std::vector<Tracked> params_;
  Tracked* const tracked_ = params_.data();  // for MarkNoted
  std::vector<uint64_t> fresh_;
  std::vector<uint64_t> pending_;
  uint64_t* host_words_ = nullptr;  // those of fresh_; NULL: changes are not tracked
  uint64_t takes_ = 0;
};

}  // namespace hybridopt
