// Timings: measures how long streams copied and waited, by the device's clock, and tells the link
// which copies are under way. The event pairs form a ring: while all pairs are in use, a new
// interval is not timed, and the link is not told of it.
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

  // An interval of a stream's work begins and ends; no other interval begins in between. Before
  // Create nothing is timed.
  Status Begin(Interval interval, uint64_t bytes, StreamHandle stream);
  // The same for copies to the device, which wait for the work on `caller` and for `down`.
  Status BeginUp(uint64_t bytes, StreamHandle stream, StreamHandle caller, EventHandle down);
  Status End(StreamHandle stream);
  // Adds up the intervals whose end the device has reached.
  Status Collect();
  // Bytes of steps and moves that were queued ahead of copies to the device, summed over all these
  // copies.
  uint64_t ahead_bytes() const { return ahead_bytes_; }
  const Total& total(Interval interval) const { return totals_[static_cast<size_t>(interval)]; }

 private:
  struct Pair {
    EventHandle begin = nullptr;
    EventHandle end = nullptr;
    EventHandle ready = nullptr;  // for copies to the device: recorded after the caller's work
    EventHandle down = nullptr;   // for copies to the device: the ticket's event `down`
    Interval interval = Interval::kDown;
    uint64_t bytes = 0;
  };
  void Ended(const Pair& pair);
  Pair& pair(uint64_t number) { return pairs_[number % kPairs]; }

  Device* device_ = nullptr;
  Link* link_ = nullptr;
  std::vector<Pair> pairs_;
  uint64_t first_ = 0;  // the number of the first interval that has not been added up
  uint64_t count_ = 0;  // intervals that have ended
  bool begun_ = false;  // the interval with the number count_ has begun
  std::array<Total, 4> totals_;
  uint64_t ahead_bytes_ = 0;
};

}  // namespace hybridopt
