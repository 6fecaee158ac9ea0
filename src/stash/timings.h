// Timings: how long streams copied and waited, as the device times it, and which copies are under
// way, which it tells the link. A ring of pairs of events: where all pairs are still in use, an
// interval is not timed, and the link does not know of it.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "machine/link.h"

namespace hybridopt {

enum class Interval : uint32_t { kDown, kUp, kReleaseWait, kPopWait };

class Timings {
 public:
  struct Total {
    double seconds = 0;
    uint64_t bytes = 0;
  };
  static constexpr uint32_t kPairs = 512;

  Timings() = default;
  Timings(const Timings&) = delete;
  Timings& operator=(const Timings&) = delete;
  ~Timings();
  Status Create(Device& device, Link& link);

  static constexpr uint64_t ScratchBytes() { return kPairs * sizeof(Pair); }

  // An interval of a stream's work begins and ends; no other interval begins in between. Without
  // Create nothing is timed.
  Status Begin(Interval interval, uint64_t bytes, StreamHandle stream);
  // The same for copies to the device, which wait for the work on `caller` and for `down`.
  Status BeginUp(uint64_t bytes, StreamHandle stream, StreamHandle caller, EventHandle down);
  Status End(StreamHandle stream);
  // Adds up the intervals that the device has come to the end of.
  Status Collect();
  // Bytes that steps and moves had queued to the device ahead of copies to it, over all of these.
  uint64_t ahead_bytes() const { return ahead_bytes_; }
  const Total& total(Interval interval) const { return totals_[static_cast<size_t>(interval)]; }

 private:
  struct Pair {
    EventHandle begin = nullptr;
    EventHandle end = nullptr;
    EventHandle ready = nullptr;  // of copies to the device: behind the caller's work
    EventHandle down = nullptr;   // the same: behind the copy to the host, an event of the ticket
    Interval interval = Interval::kDown;
    uint64_t bytes = 0;
  };
  void Ended(const Pair& pair);
  Pair& pair(uint64_t number) { return pairs_[number % kPairs]; }

  Device* device_ = nullptr;
  Link* link_ = nullptr;
  std::vector<Pair> pairs_;
  uint64_t first_ = 0;  // the number of the first interval that has not been added up
  uint64_t count_ = 0;  // of intervals that have ended
  bool begun_ = false;  // the interval count_ has begun
  std::array<Total, 4> totals_;
  uint64_t ahead_bytes_ = 0;
};

}  // namespace hybridopt
