#include "machine/trace/trace.h"

#include <algorithm>
#include <cmath>

#include "runtime/thread_value.h"

namespace hybridopt {

namespace {

TraceRow RowOfThisCaller() {
  static std::atomic<uintptr_t> threads = 0;
  static const ThreadValue number;  // from 1; threads for which there is no memory are number 0
  if (number.get() == nullptr) (void)number.Set(reinterpret_cast<void*>(++threads));
  const auto counted = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(number.get()));
  return TraceRow{static_cast<uint32_t>(TraceRow::kCallers) + counted};
}

}  // namespace

Trace::~Trace() {
  for (const Work& work : works_)
    for (EventHandle event : {work.begin, work.end})
      if (event != nullptr) device_.DestroyEvent(event);
  if (anchor_ != nullptr) device_.DestroyEvent(anchor_);
}

Status Trace::Start(uint64_t ring_bytes) {
  if (!device_.unified()) HYBRIDOPT_TRY(MakeEvents());
  std::vector<TraceEvent> ring(ring_bytes / sizeof(TraceEvent));
  {
    std::lock_guard lock(work_mutex_);
    clock_error_ns_ = 0;
  }
  std::lock_guard lock(ring_mutex_);
  ring_ = std::move(ring);
  added_ = dropped_ = 0;
  begin_ns_ = system::NowNs();
  on_ = true;
  return {};
}

// The events stay until the optimizer ends: a stream may still reach them after Stop.
Status Trace::MakeEvents() {
  std::lock_guard lock(work_mutex_);
  if (anchor_ == nullptr) {
    HYBRIDOPT_ASSIGN(anchor_, device_.CreateEvent("trace"));
  }
  if (works_.empty()) works_.resize(kWorkMost);
  for (Work& work : works_) {
    for (EventHandle* event : {&work.begin, &work.end}) {
      if (*event != nullptr) continue;
      HYBRIDOPT_ASSIGN(*event, device_.CreateEvent("trace"));
    }
  }
  return {};
}

void Trace::Stop() {
  if (!on()) return;
  Collect();
  {
    // What is not queued by now belongs to failed work.
    std::lock_guard lock(work_mutex_);
    for (; collected_ < begun_; ++collected_) Drop();
    anchor_ns_ = 0;
  }
  std::lock_guard lock(ring_mutex_);
  on_ = false;
  end_ns_ = system::NowNs();
}

TraceRecord Trace::Record() {
  TraceRecord record;
  {
    std::lock_guard lock(work_mutex_);
    record.clock_error_ns = clock_error_ns_;
  }
  std::lock_guard lock(ring_mutex_);
  const uint64_t kept = std::min<uint64_t>(added_, ring_.size());
  record.events.assign(ring_.begin(), ring_.begin() + static_cast<ptrdiff_t>(kept));
  // What began together is in the order of the rows, and what contains the other comes first.
  std::sort(record.events.begin(), record.events.end(),
            [](const TraceEvent& a, const TraceEvent& b) {
              if (a.begin_ns != b.begin_ns) return a.begin_ns < b.begin_ns;
              return a.row != b.row ? a.row < b.row : a.end_ns > b.end_ns;
            });
  record.dropped = dropped_ + added_ - kept;
  record.ring_bytes = ring_.size() * sizeof(TraceEvent);
  record.begin_ns = begin_ns_;
  record.end_ns = end_ns_;
  return record;
}

void Trace::Forget() {
  std::lock_guard lock(ring_mutex_);
  ring_ = {};
}

void Trace::Add(const TraceEvent& event) {
  std::lock_guard lock(ring_mutex_);
  if (!on()) return;  // Stop was faster
  ring_[added_++ % ring_.size()] = event;
}

void Trace::Drop() {
  std::lock_guard lock(ring_mutex_);
  if (on()) dropped_ += 1;
}

// -------------------------------------------------------------------------------------- streams --

void Trace::SetAnchor(StreamHandle idle) {
  constexpr int64_t kMostNs = 1'000'000'000;
  if (!on() || device_.unified()) return;
  Collect();
  const int64_t before_ns = system::NowNs();
  const bool reached = device_.Record(anchor_, idle).ok() && device_.Wait(anchor_, kMostNs).ok();
  std::lock_guard lock(work_mutex_);
  anchor_ns_ = reached ? before_ns : 0;
  if (reached) clock_error_ns_ = std::max(clock_error_ns_, system::NowNs() - before_ns);
}

Trace::Work* Trace::Begin(const TraceEvent& event, StreamHandle stream) {
  Work* work = nullptr;
  {
    std::lock_guard lock(work_mutex_);
    if (begun_ - collected_ == works_.size()) CollectLocked();
    if (begun_ - collected_ < works_.size()) work = &works_[begun_++ % works_.size()];
    if (work == nullptr) {
      Drop();
      return nullptr;
    }
    work->queued = work->failed = false;
    work->event = event;
    work->event.step = step();
  }
  const bool failed = !device_.Record(work->begin, stream).ok();
  std::lock_guard lock(work_mutex_);
  work->failed = failed;
  return work;
}

void Trace::End(Work& work, StreamHandle stream, uint64_t bytes) {
  const bool failed = !device_.Record(work.end, stream).ok();
  std::lock_guard lock(work_mutex_);
  work.event.bytes = bytes;
  work.failed = work.failed || failed;
  work.queued = true;
}

void Trace::Collect() {
  std::lock_guard lock(work_mutex_);
  CollectLocked();
}

// Collects work in the order in which it began, up to the first that is under way: with many chunks
// the streams are rarely idle. The next call continues there.
void Trace::CollectLocked() {
  for (; collected_ < begun_; ++collected_) {
    Work& work = works_[collected_ % works_.size()];
    if (!work.queued) return;
    if (!work.failed) {
      const Result<bool> ended = device_.Reached(work.end);
      if (ended.ok() && !ended.value()) return;
    }
    Place(work) ? Add(work.event) : Drop();
  }
}

// Turns the device's times into times of the host's clock. Returns false if that is not possible.
bool Trace::Place(Work& work) {
  if (work.failed || anchor_ns_ == 0) return false;
  const Result<double> before = device_.Elapsed(anchor_, work.begin);
  const Result<double> taken = device_.Elapsed(work.begin, work.end);
  if (!before.ok() || !taken.ok()) return false;
  work.event.begin_ns = anchor_ns_ + std::llround(before.value() * 1e9);
  work.event.end_ns = work.event.begin_ns + std::llround(taken.value() * 1e9);
  return true;
}

// -------------------------------------------------------------------------------------- threads --

void TraceSpan::Begin(TraceRow row, const char* name, uint32_t chunk) {
  if (row == TraceRow::kCallers) row = RowOfThisCaller();
  event_ = {name, system::NowNs(), 0, 0, trace_.step(), row, chunk};
}

void TraceSpan::End() {
  event_.end_ns = system::NowNs();
  trace_.Add(event_);
}

}  // namespace hybridopt
