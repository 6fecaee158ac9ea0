// Trace: what the threads and streams of one optimizer do and when, for a picture of its steps. A
// bounded ring keeps the latest events.
//
//   row of a thread    TraceSpan    from its constructor to the end of the scope
//                      TraceRange   the same, and a range for profilers
//   row of a stream    TraceWork    two events on the stream; the device tells when it reached them
//
// The device tells only how much time lies between two events. So each step and each move records
// one event, the anchor, on a stream that is idle, and reads the host's clock before and after it:
// the device's events are shown relative to the anchor, at most `clock_error_ns` too early.
//
// While no trace is recorded, a range or work costs one relaxed load. While one is recorded, it
// allocates nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "base/profiler_range.h"
#include "base/system.h"
#include "device/device.h"

namespace hybridopt {

// The rows of the picture, from the top.
enum class TraceRow : uint32_t {
  kSteps,              // the runner: steps and moves, and what they wait for
  kDeviceRing,         // the side thread of the streamed executor
  kSave,               // the thread of a save
  kCopiesDown,         // the streams of the lanes
  kCopiesUp,           //
  kDeviceUpdate,       //
  kStateUpdate,        //
  kWorkers,            // and one row for each worker
  kCallers = 1u << 20  // one row for each calling thread
};
inline TraceRow WorkerRow(uint32_t worker) {
  return TraceRow{static_cast<uint32_t>(TraceRow::kWorkers) + worker};
}

struct TraceEvent {
  static constexpr uint32_t kNoChunk = UINT32_MAX;

  const char* name = nullptr;  // a literal
  int64_t begin_ns = 0;        // of the host's clock
  int64_t end_ns = 0;
  uint64_t bytes = 0;  // that were copied
  uint64_t step = 0;   // the step that ran, or the next one
  TraceRow row = TraceRow::kSteps;
  uint32_t chunk = kNoChunk;
};

// What has been recorded.
struct TraceRecord {
  std::vector<TraceEvent> events;  // in the order of their beginnings
  uint64_t dropped = 0;            // older events that had no room
  uint64_t ring_bytes = 0;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  int64_t clock_error_ns = 0;
};

class Trace {
 public:
  static constexpr uint64_t kDefaultRingBytes = uint64_t{16} << 20;
  static constexpr uint64_t kLeastRingBytes = uint64_t{4} << 10;
  static constexpr uint64_t kMostRingBytes = uint64_t{4} << 30;
  // Work of streams that may be under way at one time. Of more work nothing is recorded, and it
  // counts as dropped.
  static constexpr uint32_t kWorkMost = 512;

  explicit Trace(Device& device) : device_(device) {}
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // `ring_bytes` is between the bounds above. These three are for one thread at a time.
  Status Start(uint64_t ring_bytes);
  void Stop();  // later events are not recorded
  // To be called after Stop. What has been recorded stays until Forget.
  TraceRecord Record();
  void Forget();
  bool started() const { return !ring_.empty(); }

  bool on() const { return on_.load(std::memory_order_relaxed); }
  void Add(const TraceEvent& event);
  // The step that events belong to which begin from now on.
  void SetStep(uint64_t step) { step_.store(step, std::memory_order_relaxed); }
  uint64_t step() const { return step_.load(std::memory_order_relaxed); }
  // To be called by work of the timeline, before it queues work on `idle`, a stream without work.
  void SetAnchor(StreamHandle idle);
  // Adds the events of all work that streams have done. To be called when they have done it.
  void Collect();

 private:
  friend class TraceWork;
  struct Work {
    TraceEvent event;
    EventHandle begin = nullptr;
    EventHandle end = nullptr;
    bool queued = false;  // all of it
    bool failed = false;
  };

  Work* Begin(const TraceEvent& event, StreamHandle stream);
  void End(Work& work, StreamHandle stream, uint64_t bytes);
  void CollectLocked();
  bool Place(Work& work);
  void Drop();
  Status MakeEvents();

  Device& device_;
  std::atomic<bool> on_ = false;
  std::atomic<uint64_t> step_ = 1;

  std::mutex ring_mutex_;
  std::vector<TraceEvent> ring_;  // guarded by ring_mutex_, as the four below
  uint64_t added_ = 0;
  uint64_t dropped_ = 0;  // without those that the ring has overwritten
  int64_t begin_ns_ = 0;
  int64_t end_ns_ = 0;

  // No call that may wait for the device is made with this mutex held.
  std::mutex work_mutex_;
  std::vector<Work> works_;  // guarded by work_mutex_, as the five below; made by the first Start
  uint64_t begun_ = 0;       // works_ are used in turns
  uint64_t collected_ = 0;
  EventHandle anchor_ = nullptr;
  int64_t anchor_ns_ = 0;  // 0: there is no anchor
  int64_t clock_error_ns_ = 0;
};

// What a thread does from here to the end of the scope.
class TraceSpan {
 public:
  TraceSpan(Trace& trace, TraceRow row, const char* name, uint32_t chunk = TraceEvent::kNoChunk)
      : trace_(trace) {
    if (trace.on()) Begin(row, name, chunk);
  }
  ~TraceSpan() {
    if (event_.begin_ns != 0) End();
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

  void SetBytes(uint64_t bytes) { event_.bytes = bytes; }

 private:
  void Begin(TraceRow row, const char* name, uint32_t chunk);
  void End();

  Trace& trace_;
  TraceEvent event_;
};

// The same, for profilers too.
class TraceRange : public TraceSpan {
 public:
  TraceRange(Trace& trace, TraceRow row, const char* name)
      : TraceSpan(trace, row, name), profiled_(name) {}
  TraceRange(Trace& trace, TraceRow row, const char* name, uint32_t chunk)
      : TraceSpan(trace, row, name, chunk), profiled_(name, chunk) {}

 private:
  const ProfilerRange profiled_;
};

// Records the work that is queued on a stream from here to End, or to the end of the scope. Call
// End before recording the event for which others wait: then the trace does not show them as
// beginning before this work ends.
class TraceWork {
 public:
  TraceWork(Trace& trace, TraceRow row, StreamHandle stream, const char* name,
            uint32_t chunk = TraceEvent::kNoChunk)
      : trace_(trace), stream_(stream) {
    if (trace.on()) work_ = trace.Begin({name, 0, 0, 0, 0, row, chunk}, stream);
  }
  ~TraceWork() { End(); }
  TraceWork(const TraceWork&) = delete;
  TraceWork& operator=(const TraceWork&) = delete;

  void AddBytes(uint64_t bytes) { bytes_ += bytes; }
  void End() {
    if (work_ != nullptr) trace_.End(*std::exchange(work_, nullptr), stream_, bytes_);
  }

 private:
  Trace& trace_;
  const StreamHandle stream_;
  Trace::Work* work_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace hybridopt
