// Lanes: the streams, events, staging slots and device scratch that one optimizer's pipeline runs
// on. All of it is made at commit. Later moves and changes of the device fraction may replace the
// ring and the scratch memory; a step only uses them.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "base/function_ref.h"
#include "machine/context.h"
#include "machine/link.h"
#include "machine/pinned_room.h"
#include "machine/timeline.h"
#include "machine/trace/trace.h"
#include "memory/staging.h"

namespace hybridopt {

// Two events on a stream: the device measures the time between them.
struct TimedEvent {
  EventHandle begin = nullptr;
  EventHandle end = nullptr;
};

// Default size of the device's ring, in chunks of the largest size: one is copied up, one is
// updated, one is copied down. More would keep more state under way on the link, and the gradients
// that the CPU workers need would wait for that state: a fourth chunk makes a step up to 7 % slower
// if the CPU and the device both update. If only the device updates, a fourth one keeps the copies
// up under way while chunks of unequal sizes wait for each other.
inline constexpr uint32_t kDefaultStreamChunks = 3;
inline constexpr uint32_t kDefaultStreamChunksAlone = 4;
// With fewer chunks the copies of the ring would wait for each other.
inline constexpr uint32_t kMinStreamChunks = 2;
inline constexpr uint32_t kMaxStreamSlots = 64;

// The sizes from which the lanes of an optimizer are made.
struct LaneSizes {
  uint32_t staging_slots = 0;  // 0: no ring
  uint64_t slot_grad_bytes = 0;
  uint64_t slot_param_bytes = 0;
  uint64_t norm_blocks = 0;
  uint64_t change_words = 0;          // of bits on the device, two for each element
  uint64_t device_grad_elements = 0;  // room in fp32 for gradients that a step copies up
  uint64_t matrix_bytes = 0;          // workspace of updates of matrices
  bool streams_state = false;         // state may go through the device's ring, now or later
  uint32_t stream_slots = 0;          // most chunks in the device's ring; 0: no ring
  uint64_t stream_ring_bytes = 0;

  void DropStreamRing() { stream_slots = 0, stream_ring_bytes = 0; }
};

// The events of a chunk in the device's ring.
struct StreamSlot {
  TimedEvent up;       // the state has been copied up
  TimedEvent updated;  // the state has been updated
  TimedEvent down;     // the state has been copied down
};

// The staging ring with the events of its slots.
class LaneRing {
 public:
  LaneRing() = default;
  static Result<LaneRing> Take(Context& context, const LaneSizes& sizes);
  ~LaneRing();
  LaneRing(LaneRing&& other) noexcept { *this = std::move(other); }
  LaneRing& operator=(LaneRing&& other) noexcept;

  StagingRing& staging() { return staging_; }
  const StagingRing& staging() const { return staging_; }
  void AddNodeBytes(NodeBytes* sum) const { room_.AddNodeBytes(sum); }
  const TimedEvent& landed(uint32_t slot) const { return landed_[slot]; }
  const TimedEvent& uploaded(uint32_t slot) const { return uploaded_[slot]; }

 private:
  Status Pin(const LaneSizes& sizes);

  Context* context_ = nullptr;
  PinnedRoom room_;  // the memory of staging_
  StagingRing staging_;
  std::vector<TimedEvent> landed_;    // per slot: the copies of gradients to the host have ended
  std::vector<TimedEvent> uploaded_;  // per slot: the copies of params to the device have ended
};

// Device memory for norm sums, the verdict, the bits of elements that the device changes, gradients
// that the host holds and a step copies up, and the ring through which state streams.
//
//   | verdict | block sums | changes | gradients copied up | workspace of matrices |
//   ring |
class LaneScratch {
 public:
  LaneScratch() = default;
  static Result<LaneScratch> Take(Context& context, const LaneSizes& sizes);
  ~LaneScratch();
  LaneScratch(LaneScratch&& other) noexcept { *this = std::move(other); }
  LaneScratch& operator=(LaneScratch&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(device_grad_elements_, other.device_grad_elements_);
    std::swap(ring_offset_, other.ring_offset_);
    std::swap(matrix_offset_, other.matrix_offset_);
    std::swap(ring_bytes_, other.ring_bytes_);
    std::swap(slots_, other.slots_);
    return *this;
  }
  uint64_t device_grad_elements() const { return device_grad_elements_; }
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::span<const StreamSlot> slots() const { return slots_; }
  std::byte* matrix_data() const { return data() + matrix_offset_; }
  std::span<std::byte> ring() const { return {data() + ring_offset_, ring_bytes_}; }

 private:
  Status MakeEvents(uint32_t slots);

  Device* device_ = nullptr;
  void* data_ = nullptr;  // device
  uint64_t device_grad_elements_ = 0;
  uint64_t matrix_offset_ = 0;
  uint64_t ring_offset_ = 0;
  uint64_t ring_bytes_ = 0;
  std::vector<StreamSlot> slots_;
};

class Lanes {
 public:
  static Result<std::unique_ptr<Lanes>> Create(Context& context, const LaneSizes& sizes);
  ~Lanes();

  // Bytes of the staging ring, in host memory.
  static uint64_t PinnedBytes(const LaneSizes& sizes);
  // Bytes of all memory that is taken on the device.
  static uint64_t DeviceScratchBytes(const LaneSizes& sizes);

  // Each of these exchanges its argument with the ring or scratch memory in use: afterwards the
  // argument has the old one. To be called only while no work uses the ring or the scratch memory.
  void UseRing(LaneRing& ring);
  void UseScratch(LaneScratch& scratch);
  // While the returned lock is held, UseRing and UseScratch wait. So a thread other than the
  // timeline's can use the events of the ring and of the scratch memory.
  [[nodiscard]] std::unique_lock<std::mutex> KeepEvents() { return std::unique_lock(exchange_); }
  bool has_scratch() const { return scratch_.data() != nullptr; }
  uint64_t device_grad_elements() const { return scratch_.device_grad_elements(); }
  // The device's ring.
  std::span<const StreamSlot> stream_slots() const { return scratch_.slots(); }
  std::span<std::byte> stream_ring() const { return scratch_.ring(); }

  // The events that are recorded after the work of the caller for which a request waits.
  std::span<const EventHandle> ReadyEvents(uint32_t slot) const {
    if (ready_.empty()) return {};  // the device has no queues
    return std::span(ready_).subspan(slot * kMaxProducers, kMaxProducers);
  }
  // Takes the first event out of a slot, for work in the background that still needs this event
  // when the slot is used again. The next call gives that event back, in exchange for the event of
  // its own slot.
  EventHandle KeepReadyEvent(uint32_t slot) {
    if (ready_.empty()) return nullptr;
    std::swap(ready_[slot * kMaxProducers], kept_ready_);
    return kept_ready_;
  }
  static constexpr uint32_t kMaxProducers = 4;
  // How many commands may be queued on a stream after work of the caller. Launch queues hold 1024.
  static constexpr uint64_t kMaxCommandsAhead = 512;

  // Waits for work of the pipeline, for a bounded time: after that the device counts as failed.
  Status Wait(EventHandle event, const char* what);
  // The same for work on a stream of the caller. That stream may itself be waiting until a save has
  // read the caller's memory, and a slow disk is no failure of the device. So when the time runs
  // out, WaitForCaller calls `await_borrowed`, which waits until the save has read that memory and
  // returns whether there was such a save. If there was, WaitForCaller waits for the event once
  // more, for the full time.
  Status WaitForCaller(EventHandle event, const char* what,
                       FunctionRef<Result<bool>()> await_borrowed);
  Result<double> Seconds(const TimedEvent& event);

  Device& device() { return context_.device(); }
  LinkUser& link() { return link_; }
  Trace& trace() { return trace_; }
  StagingRing& ring() { return ring_.staging(); }
  void AddNodeBytes(NodeBytes* sum) const {
    ring_.AddNodeBytes(sum);
    verdict_page_.AddNodeBytes(sum);
  }
  const TimedEvent& landed(uint32_t slot) const { return ring_.landed(slot); }
  const TimedEvent& uploaded(uint32_t slot) const { return ring_.uploaded(slot); }

  // Waits until the streams have done their queued work, or for device_timeout_ns.
  void AwaitStreams();

  // All copies of one direction share a stream. A copy engine serves several streams in turns of
  // milliseconds: when state had a stream of its own, gradients and params waited for it, and so
  // did the CPU threads.
  StreamHandle down = nullptr;          // device to host
  StreamHandle up = nullptr;            // host to device
  StreamHandle compute = nullptr;       // norm and updates on the device
  StreamHandle state_update = nullptr;  // updates in the device's ring; NULL: no ring
  TimedEvent device_updated;
  EventHandle verdict_known = nullptr;  // on the host: the verdict, or the block sums for it
  EventHandle verdict_set = nullptr;    // the verdict is on the device, made there or on the host
  EventHandle moved[2] = {};  // the copies of offload and reload, on each of their two streams
  EventHandle grads_summed = nullptr;  // on the host: block sums of gradients being moved
  double* block_sums = nullptr;        // device
  Verdict* device_verdict = nullptr;   // device
  uint64_t* device_changes = nullptr;  // device: the bits of state_io/change_log.h
  float* device_grads = nullptr;       // device: gradients copied up for a step
  void* matrix_workspace = nullptr;    // device: of one update of a matrix at a time
  Verdict* host_verdict = nullptr;     // pinned
  double* host_block_sums = nullptr;   // pinned: block_sums, for a verdict made on the host

 private:
  explicit Lanes(Context& context)
      : context_(context), link_(context.link()), trace_(context.device()) {}
  Status CreateAll(const LaneSizes& sizes);
  Status CreateStreams(bool streams_state);
  Result<StreamHandle> NewStream(const char* label);
  Status NewEvent(const char* label, EventHandle* event);

  Context& context_;
  LinkUser link_;
  Trace trace_;                        // of the optimizer
  std::vector<StreamHandle> streams_;  // to destroy
  std::vector<EventHandle> events_;    // to destroy
  std::vector<EventHandle> ready_;     // kMaxProducers per slot of the timeline
  EventHandle kept_ready_ = nullptr;   // the event that KeepReadyEvent has taken
  uint64_t block_sums_bytes_ = 0;
  uint64_t change_bytes_ = 0;
  uint64_t matrix_bytes_ = 0;
  PinnedRoom verdict_page_;  // host_verdict, host_block_sums
  std::mutex exchange_;
  LaneRing ring_;
  LaneScratch scratch_;
};

}  // namespace hybridopt
