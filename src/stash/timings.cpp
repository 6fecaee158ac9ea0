#include "stash/timings.h"

namespace hybridopt {

Status Timings::Create(Device& device, Link& link) {
  link.AddRoom(kPairs);
  device_ = &device;
  link_ = &link;
  pairs_.resize(kPairs);
  for (Pair& pair : pairs_) {
    HYBRIDOPT_ASSIGN(pair.begin, device.CreateEvent("stash interval"));
    HYBRIDOPT_ASSIGN(pair.end, device.CreateEvent("stash interval"));
    HYBRIDOPT_ASSIGN(pair.ready, device.CreateEvent("stash prefetch ready"));
  }
  return {};
}

Timings::~Timings() {
  if (device_ == nullptr) return;
  for (; first_ < count_; ++first_) Ended(pair(first_));
  link_->RemoveRoom(kPairs);
  for (const Pair& pair : pairs_)
    for (EventHandle event : {pair.begin, pair.end, pair.ready})
      if (event != nullptr) device_->DestroyEvent(event);
}

Status Timings::Begin(Interval interval, uint64_t bytes, StreamHandle stream) {
  begun_ = false;
  if (device_ == nullptr) return {};
  if (count_ - first_ == kPairs) HYBRIDOPT_TRY(Collect());
  if (count_ - first_ == kPairs) return {};
  Pair& next = pair(count_);
  HYBRIDOPT_TRY(device_->Record(next.begin, stream));
  next.interval = interval;
  next.bytes = bytes;
  begun_ = true;
  return {};
}

Status Timings::BeginUp(uint64_t bytes, StreamHandle stream, StreamHandle caller,
                        EventHandle down) {
  HYBRIDOPT_TRY(Begin(Interval::kUp, bytes, stream));
  if (!begun_) return {};
  Pair& next = pair(count_);
  next.down = down;
  return device_->Record(next.ready, caller);
}

Status Timings::End(StreamHandle stream) {
  if (!begun_) return {};
  begun_ = false;
  const Pair& next = pair(count_);
  HYBRIDOPT_TRY(device_->Record(next.end, stream));
  count_ += 1;
  if (next.interval == Interval::kDown) link_->PushQueued(next.bytes);
  if (next.interval == Interval::kUp)
    ahead_bytes_ += link_->PrefetchQueued({stream, {next.ready, next.down}, next.end, next.bytes});
  return {};
}

// Tells the link that the copies of the interval have ended.
void Timings::Ended(const Pair& pair) {
  if (pair.interval == Interval::kDown) link_->PushEnded(pair.bytes);
  if (pair.interval == Interval::kUp) link_->PrefetchEnded(pair.end);
}

// Intervals are added up in the order in which they began: an interval waits for the intervals
// before it.
Status Timings::Collect() {
  for (; first_ < count_; ++first_) {
    const Pair& next = pair(first_);
    HYBRIDOPT_ASSIGN(const bool reached, device_->Reached(next.end));
    if (!reached) return {};
    HYBRIDOPT_ASSIGN(const double seconds, device_->Elapsed(next.begin, next.end));
    Total& total = totals_[static_cast<size_t>(next.interval)];
    total.seconds += seconds;
    total.bytes += next.bytes;
    Ended(next);
  }
  return {};
}

}  // namespace hybridopt
