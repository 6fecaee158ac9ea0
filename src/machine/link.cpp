#include "machine/link.h"

#include <algorithm>
#include <chrono>
#include <span>
#include <thread>

#include "base/profiler_range.h"
#include "base/system.h"

namespace hybridopt {
namespace {

// The pause between two looks. A slab of 4 MiB takes about 80 us.
constexpr std::chrono::microseconds kPause(20);

bool AreReached(Device& device, std::span<const EventHandle> events) {
  return std::all_of(events.begin(), events.end(), [&](EventHandle event) {
    const Result<bool> reached = device.Reached(event);
    return reached.ok() && reached.value();
  });
}

}  // namespace

// ------------------------------------------------------------------------------- what is queued --

void Link::AddRoom(uint32_t prefetches) {
  std::lock_guard lock(mutex_);
  prefetches_.reserve(room_ + prefetches);
  room_ += prefetches;
}

uint64_t Link::PrefetchQueued(const PrefetchCopies& copies) {
  std::lock_guard lock(mutex_);
  prefetches_.push_back(copies);
  queued_ += 1;
  return up_bytes_;
}

// The prefetch may be absent: IsPrefetchUnderWay removes prefetches that have ended.
void Link::PrefetchEnded(EventHandle end) {
  std::lock_guard lock(mutex_);
  const auto found = std::find_if(prefetches_.begin(), prefetches_.end(),
                                  [&](const PrefetchCopies& copies) { return copies.end == end; });
  if (found == prefetches_.end()) return;
  prefetched_bytes_ += found->bytes;
  prefetches_.erase(found);
  queued_ -= 1;
}

// ------------------------------------------------------------------------------- who goes first --

// Returns whether a prefetch is being copied now, and removes those that have ended. A stream runs
// its copies in order, so a prefetch waits if an earlier one on its stream has not ended. After the
// device has failed all prefetches count as ended; the caller's next call reports the cause.
bool Link::IsPrefetchUnderWay() {
  bool under_way = false;
  StreamHandle busy = nullptr;
  std::erase_if(prefetches_, [&](const PrefetchCopies& copies) {
    if (copies.stream == busy) return false;
    const Result<bool> ended = device_.Reached(copies.end);
    if (!ended.ok() || ended.value()) {
      prefetched_bytes_ += copies.bytes;
      return true;
    }
    busy = copies.stream;
    under_way = under_way || AreReached(device_, copies.awaited);
    return false;
  });
  queued_ = static_cast<uint32_t>(prefetches_.size());
  return under_way;
}

// Returns whether it had to wait.
bool Link::GiveWay(uint64_t bytes) {
  if (queued_ == 0) return false;
  std::unique_lock lock(mutex_);
  if (!IsPrefetchUnderWay()) return false;
  const ProfilerRange range("give way to a prefetch");
  const int64_t begin_ns = system::NowNs();
  const uint64_t before_bytes = prefetched_bytes_;
  do {
    lock.unlock();
    std::this_thread::sleep_for(kPause);
    lock.lock();
  } while (IsPrefetchUnderWay() && prefetched_bytes_ - before_bytes < kGiveWayShare * bytes &&
           system::NowNs() - begin_ns < timeout_ns_);
  return true;
}

// ------------------------------------------------------------------------------- an optimizer's --

void LinkUser::GiveWay(uint64_t bytes) {
  const int64_t begin_ns = system::NowNs();
  if (!link_.GiveWay(bytes)) return;
  gave_way_copies_ += 1;
  gave_way_ns_ += system::NowNs() - begin_ns;
}

void LinkUser::QueuedUp(uint64_t bytes) {
  link_.up_bytes_ += bytes;
  queued_up_bytes_ += bytes;
}

void LinkUser::ArrivedUpTo(uint64_t queued_up_bytes) {
  uint64_t before_bytes = arrived_up_bytes_;
  while (before_bytes < queued_up_bytes)
    if (arrived_up_bytes_.compare_exchange_weak(before_bytes, queued_up_bytes)) {
      link_.up_bytes_ -= queued_up_bytes - before_bytes;
      return;
    }
}

}  // namespace hybridopt
