#include "core/lanes.h"

namespace hybridopt {
namespace {

constexpr uint64_t kVerdictBytes = 256;

uint64_t BlockSumsBytes(const Placement& placement) {
  return (placement.norm_blocks * sizeof(double) + 255) / 256 * 256;
}

}  // namespace

uint64_t Lanes::PinnedBytes(const Placement& placement) {
  return StagingRing::Bytes(placement.staging_slots, placement.slot_grad_bytes,
                            placement.slot_param_bytes) +
         StagingRing::Bytes(1, kVerdictBytes + BlockSumsBytes(placement), 0);
}

uint64_t Lanes::DeviceScratchBytes(const Placement& placement) {
  // Whole units of device memory, so that the plan says what the device counts.
  const uint64_t grads_bytes = (placement.device_grad_elements * sizeof(float) + 255) / 256 * 256;
  return kVerdictBytes + BlockSumsBytes(placement) + grads_bytes;
}

Result<std::unique_ptr<Lanes>> Lanes::Create(Context& context, const Placement& placement) {
  std::unique_ptr<Lanes> lanes(new Lanes(context));
  lanes->placement_ = &placement;
  if (!context.device().unified()) HYBRIDOPT_TRY(lanes->CreateAll(placement));
  return lanes;
}

Status Lanes::CreateAll(const Placement& placement) {
  HYBRIDOPT_TRY(context_.ReservePinned(PinnedBytes(placement)));
  pinned_bytes_ = PinnedBytes(placement);
  const PageWish& pages = context_.pinned_pages();
  HYBRIDOPT_ASSIGN(ring_,
                   StagingRing::Create(device(), placement.staging_slots, placement.slot_grad_bytes,
                                       placement.slot_param_bytes, pages));
  HYBRIDOPT_ASSIGN(
      verdict_page_,
      StagingRing::Create(device(), 1, kVerdictBytes + BlockSumsBytes(placement), 0, pages));
  host_verdict = reinterpret_cast<Verdict*>(verdict_page_.grads(0));
  host_block_sums = reinterpret_cast<double*>(verdict_page_.grads(0) + kVerdictBytes);
  HYBRIDOPT_ASSIGN(void* scratch, TakeScratch());
  UseScratch(scratch);
  HYBRIDOPT_ASSIGN(down, NewStream("gradients down"));
  HYBRIDOPT_ASSIGN(up, NewStream("params up"));
  HYBRIDOPT_ASSIGN(compute, NewStream("device update"));
  HYBRIDOPT_TRY(NewTimedEvent("device updated", &device_updated));
  HYBRIDOPT_TRY(NewEvent("verdict known", &verdict_known));
  for (EventHandle& event : moved) HYBRIDOPT_TRY(NewEvent("moved", &event));
  ready_.resize(Timeline::kCapacity * kMaxProducers);
  for (EventHandle& event : ready_) HYBRIDOPT_TRY(NewEvent("gradients ready", &event));
  landed.resize(placement.staging_slots);
  uploaded.resize(placement.staging_slots);
  for (uint32_t slot = 0; slot < placement.staging_slots; ++slot) {
    HYBRIDOPT_TRY(NewTimedEvent("gradients landed", &landed[slot]));
    HYBRIDOPT_TRY(NewTimedEvent("params uploaded", &uploaded[slot]));
  }
  return {};
}

Lanes::~Lanes() {
  // Streams first: they may still be copying into the memory below. After a failure they may be
  // waiting for a stream of the caller's that never ends; nobody wants that work any more.
  for (StreamHandle stream : streams_) device().AbandonStream(stream);
  for (EventHandle event : events_) device().DestroyEvent(event);
  FreeScratch();
  context_.ReleasePinned(pinned_bytes_);
}

Result<void*> Lanes::TakeScratch() {
  if (device().unified()) return static_cast<void*>(nullptr);
  return device().Allocate(DeviceScratchBytes(*placement_));
}

void Lanes::UseScratch(void* scratch) {
  scratch_ = scratch;
  std::byte* const bytes = static_cast<std::byte*>(scratch);
  device_verdict = reinterpret_cast<Verdict*>(bytes);
  block_sums = reinterpret_cast<double*>(bytes + kVerdictBytes);
  device_grads = reinterpret_cast<float*>(bytes + kVerdictBytes + BlockSumsBytes(*placement_));
}

void Lanes::FreeScratch() {
  if (scratch_ != nullptr) (void)device().Free(scratch_);
  scratch_ = nullptr;
}

Result<StreamHandle> Lanes::NewStream(const char* label) {
  HYBRIDOPT_ASSIGN(StreamHandle stream, device().CreateStream(label));
  streams_.push_back(stream);
  return stream;
}

Status Lanes::NewEvent(const char* label, EventHandle* event) {
  HYBRIDOPT_ASSIGN(*event, device().CreateEvent(label));
  events_.push_back(*event);
  return {};
}

Status Lanes::NewTimedEvent(const char* label, TimedEvent* event) {
  HYBRIDOPT_TRY(NewEvent(label, &event->begin));
  return NewEvent(label, &event->end);
}

Status Lanes::Wait(EventHandle event, const char* what) {
  Status status = device().Wait(event, context_.device_timeout_ns());
  if (status.code() != OFFLOAD_TIMED_OUT) return status;
  return Status::Error(OFFLOAD_DEVICE_FAILED,
                       "the device made no progress for %.1f s while waiting for %s "
                       "(device_timeout_ns of the context); is the stream given to the step stuck?",
                       static_cast<double>(context_.device_timeout_ns()) * 1e-9, what);
}

Result<double> Lanes::Seconds(const TimedEvent& event) {
  return device().Elapsed(event.begin, event.end);
}

}  // namespace hybridopt
