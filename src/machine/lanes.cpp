#include "machine/lanes.h"

#include <algorithm>

namespace hybridopt {
namespace {

constexpr uint64_t kVerdictBytes = 256;
constexpr uint32_t kMinRingSlots = 2;  // one comes down while the other is worked on

uint64_t BlockSumsBytes(const LaneSizes& sizes) {
  return (sizes.norm_blocks * sizeof(double) + 255) / 256 * 256;
}

}  // namespace

uint64_t Lanes::PinnedBytes(const LaneSizes& sizes) {
  return StagingRing::Bytes(sizes.staging_slots, sizes.slot_grad_bytes, sizes.slot_param_bytes) +
         StagingRing::Bytes(1, kVerdictBytes + BlockSumsBytes(sizes), 0);
}

uint64_t Lanes::DeviceScratchBytes(const LaneSizes& sizes) {
  // Whole units of device memory, so that the plan says what the device counts.
  const uint64_t grads_bytes = (sizes.device_grad_elements * sizeof(float) + 255) / 256 * 256;
  return kVerdictBytes + BlockSumsBytes(sizes) + grads_bytes;
}

Result<std::unique_ptr<Lanes>> Lanes::Create(Context& context, const LaneSizes& sizes) {
  std::unique_ptr<Lanes> lanes(new Lanes(context, sizes));
  if (!context.device().unified()) HYBRIDOPT_TRY(lanes->CreateAll());
  return lanes;
}

Status Lanes::CreateAll() {
  HYBRIDOPT_TRY(context_.ReservePinned(PinnedBytes(sizes_)));
  pinned_bytes_ = PinnedBytes(sizes_);
  HYBRIDOPT_ASSIGN(verdict_page_,
                   StagingRing::Create(device(), 1, kVerdictBytes + BlockSumsBytes(sizes_), 0,
                                       context_.pinned_pages(), context_.allow_pageable()));
  HYBRIDOPT_TRY(CreateRing());  // last: it can do with less
  const uint64_t pinned_bytes = ring_.pinned_bytes() + verdict_page_.pinned_bytes();
  context_.ReleasePinned(pinned_bytes_ - pinned_bytes);
  pinned_bytes_ = pinned_bytes;
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
  HYBRIDOPT_TRY(NewEvent("params ready", &kept_ready_));
  landed.resize(ring_.slots());
  uploaded.resize(ring_.slots());
  for (uint32_t slot = 0; slot < ring_.slots(); ++slot) {
    HYBRIDOPT_TRY(NewTimedEvent("gradients landed", &landed[slot]));
    HYBRIDOPT_TRY(NewTimedEvent("params uploaded", &uploaded[slot]));
  }
  return {};
}

// The rungs: all slots pinned; fewer of them; none pinned, if the caller allows that.
Status Lanes::CreateRing() {
  const auto create = [&](uint32_t slots, bool allow_pageable) {
    return StagingRing::Create(device(), slots, sizes_.slot_grad_bytes, sizes_.slot_param_bytes,
                               context_.pinned_pages(), allow_pageable);
  };
  uint32_t slots = sizes_.staging_slots;
  Result<StagingRing> ring = create(slots, false);
  while (ring.status().code() == OFFLOAD_OUT_OF_HOST_MEMORY && slots > kMinRingSlots) {
    slots = std::max(kMinRingSlots, slots / 2);
    ring = create(slots, false);
  }
  if (ring.status().code() == OFFLOAD_OUT_OF_HOST_MEMORY && context_.allow_pageable())
    ring = create(sizes_.staging_slots, true);
  HYBRIDOPT_ASSIGN(ring_, std::move(ring));
  if (ring_.pinned_bytes() < ring_.bytes())
    context_.Note("staging is pageable: the system did not pin it");
  else if (slots < sizes_.staging_slots)
    context_.Note("staging has fewer slots than asked for: the system did not pin more");
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
  return device().Allocate(DeviceScratchBytes(sizes_));
}

void Lanes::UseScratch(void* scratch) {
  scratch_ = scratch;
  std::byte* const bytes = static_cast<std::byte*>(scratch);
  device_verdict = reinterpret_cast<Verdict*>(bytes);
  block_sums = reinterpret_cast<double*>(bytes + kVerdictBytes);
  device_grads = reinterpret_cast<float*>(bytes + kVerdictBytes + BlockSumsBytes(sizes_));
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
  return status.code() == OFFLOAD_TIMED_OUT ? NoProgress(what) : status;
}

Status Lanes::WaitForCaller(EventHandle event, const char* what,
                            FunctionRef<Result<bool>()> await_borrowed) {
  Status status = device().Wait(event, context_.device_timeout_ns());
  if (status.code() != OFFLOAD_TIMED_OUT) return status;
  HYBRIDOPT_ASSIGN(const bool borrowed, await_borrowed());
  return borrowed ? Wait(event, what) : NoProgress(what);
}

Status Lanes::NoProgress(const char* what) const {
  return Status::Error(OFFLOAD_DEVICE_FAILED,
                       "the device made no progress for %.1f s while waiting for %s "
                       "(device_timeout_ns of the context); is the stream given to the step stuck?",
                       static_cast<double>(context_.device_timeout_ns()) * 1e-9, what);
}

Result<double> Lanes::Seconds(const TimedEvent& event) {
  return device().Elapsed(event.begin, event.end);
}

}  // namespace hybridopt
