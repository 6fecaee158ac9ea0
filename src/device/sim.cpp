// The simulated device: an accelerator made of threads. Queued commands run later, on other
// threads, and on memory that the host cannot access, so that a missing wait or copy has the same
// effect as on a real accelerator.
#include <atomic>
#include <cinttypes>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/system.h"
#include "device/device.h"
#include "device/sim_command.h"
#include "device/sim_memory.h"
#include "device/sim_stream.h"
#include "kernels/matrix/newton_schulz.h"

namespace hybridopt {
namespace {

// The port: checks arguments, keeps the tables of streams and events, and queues.
class SimDevice final : public Device {
 public:
  SimDevice(const SimOptions& options, const KernelTable& kernels,
            std::unique_ptr<SimMemory> memory);
  ~SimDevice() override;

  int32_t kind() const override { return OFFLOAD_DEVICE_SIM; }
  const char* name() const override { return "simulated accelerator"; }
  bool unified() const override { return false; }

  Result<DeviceMemory> Memory() const override { return memory_->Usage(); }
  Result<void*> Allocate(uint64_t bytes) override;
  Status Free(void* data) override { return memory_->Free(data); }
  Result<void*> Map(void* data, uint64_t bytes) override {
    return memory_->Translate(data, bytes, 1);
  }
  Result<void*> Reserve(uint64_t bytes) override;
  void Unreserve(void* range) override { memory_->Unreserve(range); }
  uint64_t page_bytes(uint64_t) const override { return SimMemory::kPageBytes; }
  Result<DevicePages> TakePages(uint64_t range_bytes, uint64_t bytes) override;
  void FreePages(DevicePages& pages) override { memory_->FreePages(pages); }
  Status AppendPages(void* range, DevicePages& pages) override;
  void TruncatePages(void* range, uint64_t bytes) override { memory_->TruncatePages(range, bytes); }
  Status CheckRange(const void* data, uint64_t bytes) const override;

  Status PinHost(void* data, uint64_t bytes) override;
  void UnpinHost(void* data) override;
  void DiscardHost(void* data, uint64_t bytes) override { std::memset(data, 0xff, bytes); }
  uint64_t pin_piece_bytes() const override { return uint64_t{64} << 10; }
  Result<std::atomic<uint64_t>*> NewFlag() override;

  Result<StreamHandle> CreateStream(const char* label) override;
  Status DestroyStream(StreamHandle stream) override;
  bool Stop() override;
  void AbandonStream(StreamHandle stream) override;
  Status CheckStream(StreamHandle stream) const override { return Find(stream).status(); }
  Result<EventHandle> CreateEvent(const char* label) override;
  void DestroyEvent(EventHandle event) override;

  Status Record(EventHandle event, StreamHandle stream) override;
  Status StreamWait(StreamHandle stream, EventHandle event) override;
  Status StreamWaitFlag(StreamHandle stream, const std::atomic<uint64_t>* flag,
                        uint64_t value) override;
  Result<bool> Reached(EventHandle event) override;
  Status Wait(EventHandle event, int64_t timeout_ns) override;
  Result<double> Elapsed(EventHandle begin, EventHandle end) override;
  Status Synchronize(StreamHandle stream, int64_t timeout_ns) override;
  Status AwaitAllStreams() override;

  Status CopyToHost(StreamHandle stream, void* host, const void* device, uint64_t bytes) override;
  Status CopyToDevice(StreamHandle stream, void* device, const void* host, uint64_t bytes) override;
  Status CopyRows(StreamHandle stream, const RowsCopy& copy) override {
    return Queue(stream, sim::CopyRows{copy}).status();
  }
  Status Fill(StreamHandle stream, void* device, uint64_t count, const Pattern& pattern) override {
    return Queue(stream, sim::Fill{device, count, pattern}).status();
  }
  Status FollowParams(StreamHandle stream, const void* params, int32_t dtype, uint64_t count,
                      float* masters) override {
    return Queue(stream, sim::FollowParams{params, dtype, count, masters}).status();
  }
  Status Norm(StreamHandle stream, const NormLaunch& launch) override {
    return Queue(stream, sim::Norm{launch}).status();
  }
  Status SetVerdict(StreamHandle stream, const Verdict& value, Verdict* device) override {
    return Queue(stream, sim::SetVerdict{value, device}).status();
  }
  Status Update(StreamHandle stream, const UpdateLaunch& launch) override {
    return Queue(stream, sim::Update{launch}).status();
  }
  Status CheckMatrices() const override { return {}; }
  uint64_t MatrixWorkspaceBytes(const MatrixShape& shape) const override {
    return NewtonSchulzBytes(shape);
  }
  Status UpdateMatrices(StreamHandle stream, const UpdateLaunch& launch) override {
    return Queue(stream, sim::UpdateMatrices{launch}).status();
  }
  Status SurveyChanges(StreamHandle stream, const ChangeSurvey& launch) override {
    return Queue(stream, sim::SurveyChanges{launch}).status();
  }
  Status CollectChanges(StreamHandle stream, const ChangeCollection& launch) override {
    return Queue(stream, sim::CollectChanges{launch}).status();
  }
  Status Run(StreamHandle stream, offload_stream_function_t function, void* user) override;

 private:
  // The position of an event's latest record; no stream: never recorded.
  struct Point {
    const SimStream* stream;
    uint64_t sequence;
    int64_t time_ns;
  };

  Result<bool> Reached(const Point& point, int64_t timeout_ns) const;
  std::unique_ptr<SimStream> MakeStream(const char* label);
  Result<SimStream*> Find(StreamHandle stream) const;
  Result<SimStream*> Forget(StreamHandle stream);
  Result<SimEvent*> Find(EventHandle event) const;
  Result<Point> LatestRecord(EventHandle event) const;
  Result<int64_t> TimeOf(EventHandle event) const;
  std::string LabelOf(EventHandle event) const;
  Result<uint64_t> Queue(StreamHandle stream, const sim::Command& command);
  Status CheckHost(const void* host, uint64_t bytes) const;

  const SimOptions options_;
  const uint64_t fork_generation_ = system::ForkGeneration();
  SimFault fault_;
  std::unique_ptr<SimMemory> memory_;
  const SimExecutor executor_;

  mutable std::mutex mutex_;  // guards all below; no command takes it
  // All streams that were ever made; the first is the NULL stream.
  std::vector<std::unique_ptr<SimStream>> streams_;
  std::unordered_set<void*> live_streams_;  // of all streams but the NULL stream
  std::deque<SimEvent> events_;
  std::vector<SimEvent*> free_events_;
  std::unordered_set<void*> live_events_;
  std::map<uintptr_t, uint64_t> pinned_;  // address -> bytes
  uint64_t pinned_bytes_ = 0;
  std::deque<std::atomic<uint64_t>> flags_;
};

SimDevice::SimDevice(const SimOptions& options, const KernelTable& kernels,
                     std::unique_ptr<SimMemory> memory)
    : options_(options), memory_(std::move(memory)), executor_(*memory_, kernels, fault_) {
  streams_.push_back(MakeStream("NULL"));
}

Status StillBusy(const SimStream& stream, int64_t timeout_ns) {
  return Status::Error(OFFLOAD_TIMED_OUT,
                       "work queued on stream \"%s\" was not done within %" PRId64
                       " ns; it goes on, wait again",
                       stream.label().c_str(), timeout_ns);
}

SimDevice::~SimDevice() {
  if (fork_generation_ != system::ForkGeneration()) {
    // The threads exist only in the parent process, and may have held any lock when this process
    // was forked.
    for (auto& stream : streams_) static_cast<void>(stream.release());
    static_cast<void>(memory_.release());
    return;
  }
  fault_.Stop();
  for (auto& stream : streams_) stream->Close();
}

bool SimDevice::Stop() {
  if (fork_generation_ != system::ForkGeneration()) return true;
  fault_.Stop();
  const int64_t begin_ns = system::NowNs();
  for (auto& stream : streams_) {
    const int64_t left_ns = options_.timeout_ns - (system::NowNs() - begin_ns);
    if (!stream->End(std::max<int64_t>(left_ns, 0))) return false;
  }
  return true;
}

Result<void*> SimDevice::Allocate(uint64_t bytes) {
  HYBRIDOPT_TRY(fault_.status());
  return memory_->Allocate(bytes);
}

Result<void*> SimDevice::Reserve(uint64_t bytes) {
  HYBRIDOPT_TRY(fault_.status());
  return memory_->Reserve(bytes);
}

Result<DevicePages> SimDevice::TakePages(uint64_t, uint64_t bytes) {
  HYBRIDOPT_TRY(fault_.status());
  return memory_->TakePages(bytes);
}

Status SimDevice::AppendPages(void* range, DevicePages& pages) {
  HYBRIDOPT_TRY(fault_.status());
  return memory_->AppendPages(range, pages);
}

Status SimDevice::CheckRange(const void* data, uint64_t bytes) const {
  if (bytes == 0) return Status();
  return memory_->Translate(data, bytes, 1).status();
}

// The simulation needs no pinning; it refuses what a real device would refuse.
Status SimDevice::PinHost(void* data, uint64_t bytes) {
  HYBRIDOPT_TRY(fault_.status());
  HYBRIDOPT_TRY(CheckHost(data, bytes));
  const auto begin = reinterpret_cast<uintptr_t>(data);
  std::lock_guard lock(mutex_);
  const auto next = pinned_.lower_bound(begin);
  const bool meets_next = next != pinned_.end() && next->first - begin < bytes;
  const bool meets_previous =
      next != pinned_.begin() && begin - std::prev(next)->first < std::prev(next)->second;
  if (bytes == 0 || meets_next || meets_previous) {
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "cannot pin %" PRIu64
                         " bytes at %p, expected host memory of which "
                         "nothing is pinned yet",
                         bytes, data);
  }
  if (bytes > options_.pinned_bytes_max - pinned_bytes_) {
    return Status::Error(OFFLOAD_OUT_OF_HOST_MEMORY,
                         "cannot pin %" PRIu64 " bytes, %" PRIu64 " of at most %" PRIu64
                         " are pinned (sim_pinned_bytes_max)",
                         bytes, pinned_bytes_, options_.pinned_bytes_max);
  }
  pinned_.emplace(begin, bytes);
  pinned_bytes_ += bytes;
  return Status();
}

void SimDevice::UnpinHost(void* data) {
  std::lock_guard lock(mutex_);
  const auto pinned = pinned_.find(reinterpret_cast<uintptr_t>(data));
  HYBRIDOPT_CHECK(pinned != pinned_.end());
  pinned_bytes_ -= pinned->second;
  pinned_.erase(pinned);
}

Result<std::atomic<uint64_t>*> SimDevice::NewFlag() {
  std::lock_guard lock(mutex_);
  return &flags_.emplace_back(0);
}

std::unique_ptr<SimStream> SimDevice::MakeStream(const char* label) {
  return std::make_unique<SimStream>(label, streams_.size(), options_, executor_, fault_);
}

Result<StreamHandle> SimDevice::CreateStream(const char* label) {
  HYBRIDOPT_TRY(fault_.status());
  std::lock_guard lock(mutex_);
  std::unique_ptr<SimStream> stream = MakeStream(label);
  HYBRIDOPT_TRY(stream->Start());
  streams_.push_back(std::move(stream));
  StreamHandle handle = streams_.back().get();
  live_streams_.insert(handle);
  return handle;
}

Status SimDevice::DestroyStream(StreamHandle stream) {
  if (stream == nullptr) return Status();
  HYBRIDOPT_ASSIGN(SimStream * found, Find(stream));
  if (!found->WaitUntil(found->Queued(), options_.timeout_ns))
    return StillBusy(*found, options_.timeout_ns);
  HYBRIDOPT_TRY(Forget(stream).status());
  found->Close();
  return Status();
}

void SimDevice::AbandonStream(StreamHandle stream) {
  if (stream == nullptr) return;
  Result<SimStream*> found = Forget(stream);
  if (found.ok()) found.value()->Abandon();
}

// Removes a stream's handle, so that no more commands can be queued on it.
Result<SimStream*> SimDevice::Forget(StreamHandle stream) {
  HYBRIDOPT_ASSIGN(SimStream * found, Find(stream));
  std::lock_guard lock(mutex_);
  live_streams_.erase(stream);
  return found;
}

Result<EventHandle> SimDevice::CreateEvent(const char* label) {
  HYBRIDOPT_TRY(fault_.status());
  std::lock_guard lock(mutex_);
  if (free_events_.empty()) {
    // Reserves room now, so that DestroyEvent, which must not fail, need not allocate.
    free_events_.reserve(events_.size() + 1);
    free_events_.push_back(&events_.emplace_back());
  }
  SimEvent* event = free_events_.back();
  std::lock_guard event_lock(event->mutex);
  event->label = label;
  live_events_.insert(event);
  free_events_.pop_back();  // last, because the calls above may throw
  return reinterpret_cast<EventHandle>(event);
}

void SimDevice::DestroyEvent(EventHandle event) {
  if (event == nullptr) return;
  std::lock_guard lock(mutex_);
  HYBRIDOPT_CHECK(live_events_.erase(event) == 1);
  auto* released = reinterpret_cast<SimEvent*>(event);
  free_events_.push_back(released);
  std::lock_guard event_lock(released->mutex);
  ++released->number;  // records that are still queued belong to no event now
  released->stream = nullptr;
}

Result<SimStream*> SimDevice::Find(StreamHandle stream) const {
  std::lock_guard lock(mutex_);
  if (stream == nullptr) return streams_.front().get();
  if (live_streams_.count(stream) == 1) return static_cast<SimStream*>(stream);
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "stream is %p, expected NULL or a stream that this device created and that "
                       "has not been destroyed",
                       stream);
}

Result<SimEvent*> SimDevice::Find(EventHandle event) const {
  std::lock_guard lock(mutex_);
  if (live_events_.count(event) == 1) return reinterpret_cast<SimEvent*>(event);
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "event is %p, expected one that this device created and that has not been "
                       "destroyed",
                       static_cast<void*>(event));
}

Result<SimDevice::Point> SimDevice::LatestRecord(EventHandle event) const {
  HYBRIDOPT_ASSIGN(SimEvent * found, Find(event));
  std::lock_guard lock(found->mutex);
  return Point{found->stream, found->sequence, found->time_ns};
}

Result<uint64_t> SimDevice::Queue(StreamHandle stream, const sim::Command& command) {
  HYBRIDOPT_ASSIGN(SimStream * found, Find(stream));
  HYBRIDOPT_TRY(fault_.status());
  return found->Push(command);
}

Status SimDevice::Record(EventHandle event, StreamHandle stream) {
  HYBRIDOPT_ASSIGN(SimStream * found_stream, Find(stream));
  HYBRIDOPT_ASSIGN(SimEvent * found, Find(event));
  uint64_t number = 0;
  {
    std::lock_guard lock(found->mutex);
    number = ++found->number;
  }
  // After the lock is released: Queue may block until the stream has reached an older record.
  HYBRIDOPT_ASSIGN(const uint64_t sequence, Queue(stream, sim::Record{found, number}));
  std::lock_guard lock(found->mutex);
  if (found->number == number) {
    found->stream = found_stream;
    found->sequence = sequence;
  }
  return Status();
}

Status SimDevice::StreamWait(StreamHandle stream, EventHandle event) {
  HYBRIDOPT_TRY(CheckStream(stream));
  HYBRIDOPT_ASSIGN(const Point point, LatestRecord(event));
  if (point.stream == nullptr) return fault_.status();
  return Queue(stream, sim::WaitStream{point.stream, point.sequence}).status();
}

Status SimDevice::StreamWaitFlag(StreamHandle stream, const std::atomic<uint64_t>* flag,
                                 uint64_t value) {
  HYBRIDOPT_CHECK(flag != nullptr);
  return Queue(stream, sim::WaitFlag{flag, value}).status();
}

Result<bool> SimDevice::Reached(EventHandle event) {
  HYBRIDOPT_ASSIGN(const Point point, LatestRecord(event));
  return Reached(point, 0);
}

Result<bool> SimDevice::Reached(const Point& point, int64_t timeout_ns) const {
  HYBRIDOPT_TRY(fault_.status());
  const bool reached =
      point.stream == nullptr || point.stream->WaitUntil(point.sequence, timeout_ns);
  HYBRIDOPT_TRY(fault_.status());
  return reached;
}

Status SimDevice::Wait(EventHandle event, int64_t timeout_ns) {
  HYBRIDOPT_ASSIGN(const Point point, LatestRecord(event));
  HYBRIDOPT_ASSIGN(const bool reached, Reached(point, timeout_ns));
  if (!reached) {
    return Status::Error(OFFLOAD_TIMED_OUT,
                         "event \"%s\" on stream \"%s\" was not reached within %" PRId64 " ns",
                         LabelOf(event).c_str(), point.stream->label().c_str(), timeout_ns);
  }
  return Status();
}

std::string SimDevice::LabelOf(EventHandle event) const {
  Result<SimEvent*> found = Find(event);
  if (!found.ok()) return "destroyed";
  std::lock_guard lock(found.value()->mutex);
  return found.value()->label;
}

Result<int64_t> SimDevice::TimeOf(EventHandle event) const {
  HYBRIDOPT_ASSIGN(const Point point, LatestRecord(event));
  const bool reached = point.stream != nullptr && point.stream->WaitUntil(point.sequence, 0);
  HYBRIDOPT_TRY(fault_.status());
  if (!reached) {
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "event \"%s\" has no time: it was not recorded, or its latest record has "
                         "not been reached; wait for it first",
                         LabelOf(event).c_str());
  }
  HYBRIDOPT_ASSIGN(const Point timed, LatestRecord(event));
  return timed.time_ns;
}

Result<double> SimDevice::Elapsed(EventHandle begin, EventHandle end) {
  HYBRIDOPT_ASSIGN(const int64_t begin_ns, TimeOf(begin));
  HYBRIDOPT_ASSIGN(const int64_t end_ns, TimeOf(end));
  return static_cast<double>(end_ns - begin_ns) * 1e-9;
}

Status SimDevice::Synchronize(StreamHandle stream, int64_t timeout_ns) {
  HYBRIDOPT_ASSIGN(SimStream * found, Find(stream));
  HYBRIDOPT_TRY(fault_.status());
  const bool done = found->WaitUntil(found->Queued(), timeout_ns);
  HYBRIDOPT_TRY(fault_.status());
  return done ? Status() : StillBusy(*found, timeout_ns);
}

Status SimDevice::AwaitAllStreams() {
  std::vector<SimStream*> streams;
  {
    std::lock_guard lock(mutex_);
    for (const auto& stream : streams_) streams.push_back(stream.get());
  }
  for (SimStream* stream : streams)
    if (!stream->WaitUntil(stream->Queued(), options_.timeout_ns))
      return StillBusy(*stream, options_.timeout_ns);
  return fault_.status();
}

// A device address where a host address is expected is a bug of the caller. Real devices report it
// at once, so the simulation does too.
Status SimDevice::CheckHost(const void* host, uint64_t bytes) const {
  if (bytes == 0 || (host != nullptr && !memory_->Overlaps(host, bytes))) return Status();
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "%" PRIu64 " bytes at %p, expected host memory: this is %s", bytes, host,
                       host == nullptr ? "NULL" : "a device address");
}

Status SimDevice::CopyToHost(StreamHandle stream, void* host, const void* device, uint64_t bytes) {
  HYBRIDOPT_TRY(CheckHost(host, bytes));
  return Queue(stream, sim::CopyToHost{host, device, bytes}).status();
}

Status SimDevice::CopyToDevice(StreamHandle stream, void* device, const void* host,
                               uint64_t bytes) {
  HYBRIDOPT_TRY(CheckHost(host, bytes));
  return Queue(stream, sim::CopyToDevice{device, host, bytes}).status();
}

Status SimDevice::Run(StreamHandle stream, offload_stream_function_t function, void* user) {
  if (function == nullptr) {
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "function is NULL, expected a function to run");
  }
  return Queue(stream, sim::Run{function, user}).status();
}

}  // namespace

Result<std::unique_ptr<Device>> CreateSimDevice(const SimOptions& options,
                                                const KernelTable& kernels) {
  HYBRIDOPT_ASSIGN(std::unique_ptr<SimMemory> memory, SimMemory::Create(options.memory_bytes));
  return std::unique_ptr<Device>(new SimDevice(options, kernels, std::move(memory)));
}

}  // namespace hybridopt
