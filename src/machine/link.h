// Link: the way between host and device, which the stashes, steps and moves of a context share.
// What the model waits for next goes first:
//
//   to the device   1. prefetches of a stash, and params that a step has updated
//                   2. a step's state and gradients, and moves: these give way to prefetches
//   to the host     all copies alike; the link only counts
//
// A device has no priorities for copies: copies of several streams share the link in turns, and a
// GPU's turns are long. While a step queued one copy after the other, a prefetch of 64 MiB began 16
// ms late on an H200. So a copy of class 2 is not queued while a prefetch is under way. A prefetch
// is under way from the time when only the link holds it up until it has ended. Only threads of the
// library wait for prefetches, never a call of the caller and never a worker.
//
// A prefetch that still waits for the caller's stream, or for its own copy to the host, is not
// under way, and no copy gives way to it. Otherwise the link would stand idle, and there could be a
// deadlock: the caller's stream may be waiting for the very step that gives way.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "device/device.h"

namespace hybridopt {

// The copies of one prefetch.
struct PrefetchCopies {
  StreamHandle stream = nullptr;
  std::array<EventHandle, 2> awaited{};  // what they wait for
  EventHandle end = nullptr;             // recorded behind them
  uint64_t bytes = 0;
};

// Thread-safe.
class Link {
 public:
  // While one prefetch follows another, a copy gives way to this multiple of its own bytes. So a
  // step has at least a quarter of the link.
  static constexpr uint64_t kGiveWayShare = 3;

  Link(Device& device, int64_t timeout_ns) : device_(device), timeout_ns_(timeout_ns) {}

  // AddRoom: a stash that may have this number of prefetches at one time was created. RemoveRoom:
  // it was destroyed.
  void AddRoom(uint32_t prefetches);
  void RemoveRoom(uint32_t prefetches) { room_ -= prefetches; }
  bool has_prefetches() const { return room_ > 0; }  // whether prefetches are possible

  // To be called when all copies of a prefetch have been queued. Returns the bytes of steps and
  // moves that are queued ahead of it. PrefetchEnded must follow before the prefetch's events are
  // recorded again or destroyed.
  uint64_t PrefetchQueued(const PrefetchCopies& copies);
  void PrefetchEnded(EventHandle end);

  void PushQueued(uint64_t bytes) { pushes_bytes_ += bytes; }
  void PushEnded(uint64_t bytes) { pushes_bytes_ -= bytes; }

 private:
  friend class LinkUser;
  bool GiveWay(uint64_t bytes);
  bool IsPrefetchUnderWay();  // requires mutex_

  Device& device_;
  const int64_t timeout_ns_;
  std::atomic<uint32_t> room_ = 0;
  std::atomic<uint64_t> pushes_bytes_ = 0;  // of pushes that are queued and have not ended
  std::atomic<uint64_t> up_bytes_ = 0;      // the same for steps and moves to the device
  std::atomic<uint32_t> queued_ = 0;        // the size of prefetches_, for readers without mutex_
  std::mutex mutex_;
  std::vector<PrefetchCopies> prefetches_;  // not known to have ended
  uint64_t prefetched_bytes_ = 0;           // of prefetches that have ended
};

// One optimizer's steps and moves as users of the link, with counts of how long they have waited
// for it. Thread-safe.
class LinkUser {
 public:
  explicit LinkUser(Link& link) : link_(link) {}
  ~LinkUser() { ArrivedUpTo(queued_up_bytes_); }
  LinkUser(const LinkUser&) = delete;
  LinkUser& operator=(const LinkUser&) = delete;

  // To be called before `bytes` that may go after a prefetch are queued to the device. While
  // prefetches are under way, waits until kGiveWayShare times as many bytes of prefetches have been
  // copied, or until the device's timeout has passed; in that case the copy itself will fail.
  void GiveWay(uint64_t bytes);

  // Counts bytes that were queued to the device. One stream copies them all, so they arrive in
  // order: when a copy has arrived, all bytes that were counted before it have arrived too.
  void QueuedUp(uint64_t bytes);
  uint64_t queued_up_bytes() const { return queued_up_bytes_; }
  void ArrivedUpTo(uint64_t queued_up_bytes);
  // To be called when a step queues a chunk to the host: adds up the bytes of pushes that are
  // queued ahead of it.
  void QueuedDown() { pushes_ahead_bytes_ += link_.pushes_bytes_; }

  uint64_t gave_way_copies() const { return gave_way_copies_; }
  double gave_way_seconds() const { return static_cast<double>(gave_way_ns_) * 1e-9; }
  uint64_t pushes_ahead_bytes() const { return pushes_ahead_bytes_; }

 private:
  Link& link_;
  std::atomic<uint64_t> queued_up_bytes_ = 0;
  std::atomic<uint64_t> arrived_up_bytes_ = 0;
  std::atomic<uint64_t> gave_way_copies_ = 0;
  std::atomic<int64_t> gave_way_ns_ = 0;
  std::atomic<uint64_t> pushes_ahead_bytes_ = 0;
};

}  // namespace hybridopt
