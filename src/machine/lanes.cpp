#include "machine/lanes.h"

#include <algorithm>

#include "base/system.h"

namespace hybridopt {
namespace {

constexpr uint64_t kVerdictBytes = 256;
constexpr uint32_t kMinRingSlots = 2;  // one chunk comes down while the workers update another

constexpr uint64_t kScratchAlignmentBytes = 256;

constexpr char kWaiter[] = "the optimizer";                     // in errors
constexpr char kShrinks[] = "chunk_elements or staging_slots";  // pinned memory

uint64_t BlockSumsBytes(const LaneSizes& sizes) {
  return system::RoundUp(sizes.norm_blocks * sizeof(double), kScratchAlignmentBytes);
}

uint64_t ChangeBytes(const LaneSizes& sizes) {
  return system::RoundUp(sizes.change_words * sizeof(uint64_t), kScratchAlignmentBytes);
}

uint64_t MatrixBytes(const LaneSizes& sizes) {
  return system::RoundUp(sizes.matrix_bytes, kScratchAlignmentBytes);
}

uint64_t MatrixOffset(const LaneSizes& sizes) {
  return kVerdictBytes + BlockSumsBytes(sizes) + ChangeBytes(sizes) +
         system::RoundUp(sizes.device_grad_elements * sizeof(float), kScratchAlignmentBytes);
}

// The offset at which the device's ring begins.
uint64_t RingOffset(const LaneSizes& sizes) { return MatrixOffset(sizes) + MatrixBytes(sizes); }

uint64_t SlotBytes(const LaneSizes& sizes) {
  return StagingRing::SlotBytes(sizes.slot_grad_bytes, sizes.slot_param_bytes);
}

uint64_t RingBytes(const LaneSizes& sizes) { return sizes.staging_slots * SlotBytes(sizes); }

uint64_t VerdictPageBytes(const LaneSizes& sizes) {
  return StagingRing::SlotBytes(kVerdictBytes + BlockSumsBytes(sizes), 0);
}

Status Create(Device& device, const char* label, TimedEvent* event) {
  HYBRIDOPT_ASSIGN(event->begin, device.CreateEvent(label));
  HYBRIDOPT_ASSIGN(event->end, device.CreateEvent(label));
  return {};
}

void Destroy(Device& device, const TimedEvent& event) {
  for (EventHandle handle : {event.begin, event.end})
    if (handle != nullptr) device.DestroyEvent(handle);
}

}  // namespace

uint64_t Lanes::PinnedBytes(const LaneSizes& sizes) {
  return RingBytes(sizes) + VerdictPageBytes(sizes);
}

uint64_t Lanes::DeviceScratchBytes(const LaneSizes& sizes) {
  // Rounded to whole units of device memory, so that the plan has the same bytes as the device
  // reports.
  return RingOffset(sizes) + sizes.stream_ring_bytes;
}

// ----------------------------------------------------------------------------- ring and scratch --

Result<LaneRing> LaneRing::Take(Context& context, const LaneSizes& sizes) {
  LaneRing ring;
  ring.context_ = &context;
  HYBRIDOPT_TRY(ring.Pin(sizes));
  ring.landed_.resize(ring.staging_.slots());
  ring.uploaded_.resize(ring.staging_.slots());
  for (uint32_t slot = 0; slot < ring.staging_.slots(); ++slot) {
    HYBRIDOPT_TRY(Create(context.device(), "gradients landed", &ring.landed_[slot]));
    HYBRIDOPT_TRY(Create(context.device(), "params uploaded", &ring.uploaded_[slot]));
  }
  return ring;
}

// Tries in turn: all slots pinned; fewer slots; no slot pinned, if the caller allows that.
Status LaneRing::Pin(const LaneSizes& sizes) {
  HYBRIDOPT_ASSIGN(room_, PinnedRoom::Reserve(*context_, RingBytes(sizes), kShrinks));
  uint32_t slots = sizes.staging_slots;
  Status added = room_.Add(SlotBytes(sizes), &slots, kMinRingSlots, false);
  if (added.code() == OFFLOAD_OUT_OF_HOST_MEMORY && context_->allow_pageable()) {
    slots = sizes.staging_slots;
    added = room_.Add(SlotBytes(sizes), &slots, kMinRingSlots, true);
  }
  HYBRIDOPT_TRY(added);
  if (room_.pageable())
    context_->Note("staging is pageable: the system did not pin it");
  else if (slots < sizes.staging_slots)
    context_->Note("staging has fewer slots than asked for: the system did not pin more");
  room_.Settle();
  if (room_.data() == nullptr) return {};
  staging_ = StagingRing(context_->device(), room_.data(), slots, sizes.slot_grad_bytes,
                         sizes.slot_param_bytes);
  return {};
}

LaneRing::~LaneRing() {
  if (context_ == nullptr) return;
  for (const std::vector<TimedEvent>* events : {&landed_, &uploaded_})
    for (const TimedEvent& event : *events) Destroy(context_->device(), event);
}

LaneRing& LaneRing::operator=(LaneRing&& other) noexcept {
  std::swap(context_, other.context_);
  std::swap(room_, other.room_);
  std::swap(staging_, other.staging_);
  std::swap(landed_, other.landed_);
  std::swap(uploaded_, other.uploaded_);
  return *this;
}

Result<LaneScratch> LaneScratch::Take(Context& context, const LaneSizes& sizes) {
  LaneScratch scratch;
  HYBRIDOPT_ASSIGN(scratch.data_, context.device().Allocate(Lanes::DeviceScratchBytes(sizes)));
  scratch.device_ = &context.device();
  scratch.device_grad_elements_ = sizes.device_grad_elements;
  scratch.matrix_offset_ = MatrixOffset(sizes);
  scratch.ring_offset_ = RingOffset(sizes);
  scratch.ring_bytes_ = sizes.stream_ring_bytes;
  HYBRIDOPT_TRY(scratch.MakeEvents(sizes.stream_slots));
  return scratch;
}

Status LaneScratch::MakeEvents(uint32_t slots) {
  slots_.resize(slots);
  for (StreamSlot& slot : slots_) {
    HYBRIDOPT_TRY(Create(*device_, "state up", &slot.up));
    HYBRIDOPT_TRY(Create(*device_, "state updated", &slot.updated));
    HYBRIDOPT_TRY(Create(*device_, "state down", &slot.down));
  }
  return {};
}

LaneScratch::~LaneScratch() {
  if (data_ == nullptr) return;
  for (const StreamSlot& slot : slots_)
    for (const TimedEvent& event : {slot.up, slot.updated, slot.down}) Destroy(*device_, event);
  (void)device_->Free(data_);
}

// ------------------------------------------------------------------------------------ creation --

Result<std::unique_ptr<Lanes>> Lanes::Create(Context& context, const LaneSizes& sizes) {
  std::unique_ptr<Lanes> lanes(new Lanes(context));
  if (!context.device().unified()) HYBRIDOPT_TRY(lanes->CreateAll(sizes));
  return lanes;
}

Status Lanes::CreateAll(const LaneSizes& sizes) {
  HYBRIDOPT_TRY(context_.CheckPinned(PinnedBytes(sizes), kShrinks));
  block_sums_bytes_ = BlockSumsBytes(sizes);
  change_bytes_ = ChangeBytes(sizes);
  matrix_bytes_ = MatrixBytes(sizes);
  HYBRIDOPT_ASSIGN(verdict_page_, PinnedRoom::Take(context_, VerdictPageBytes(sizes), kShrinks));
  host_verdict = reinterpret_cast<Verdict*>(verdict_page_.data());
  host_block_sums = reinterpret_cast<double*>(verdict_page_.data() + kVerdictBytes);
  HYBRIDOPT_ASSIGN(ring_, LaneRing::Take(context_, sizes));
  HYBRIDOPT_ASSIGN(LaneScratch scratch, LaneScratch::Take(context_, sizes));
  HYBRIDOPT_TRY(CreateStreams(sizes.streams_state));
  UseScratch(scratch);
  HYBRIDOPT_TRY(NewEvent("device updated", &device_updated.begin));
  HYBRIDOPT_TRY(NewEvent("device updated", &device_updated.end));
  HYBRIDOPT_TRY(NewEvent("verdict known", &verdict_known));
  HYBRIDOPT_TRY(NewEvent("verdict set", &verdict_set));
  for (EventHandle& event : moved) HYBRIDOPT_TRY(NewEvent("moved", &event));
  HYBRIDOPT_TRY(NewEvent("gradients summed", &grads_summed));
  ready_.resize(Timeline::kCapacity * kMaxProducers);
  for (EventHandle& event : ready_) HYBRIDOPT_TRY(NewEvent("caller ready", &event));
  return NewEvent("caller ready", &kept_ready_);
}

Status Lanes::CreateStreams(bool streams_state) {
  HYBRIDOPT_ASSIGN(down, NewStream("down"));
  HYBRIDOPT_ASSIGN(up, NewStream("up"));
  HYBRIDOPT_ASSIGN(compute, NewStream("device update"));
  if (!streams_state) return {};
  HYBRIDOPT_ASSIGN(state_update, NewStream(kBackgroundStreamLabel));
  return {};
}

Lanes::~Lanes() {
  // Streams are destroyed first: they may still copy into the memory below. After a failure they
  // may be waiting for a stream of the caller that never ends; their queued work is dropped.
  for (StreamHandle stream : streams_) device().AbandonStream(stream);
  for (EventHandle event : events_) device().DestroyEvent(event);
}

void Lanes::AwaitStreams() {
  for (StreamHandle stream : streams_)
    (void)context_.device().Synchronize(stream, context_.device_timeout_ns());
}

void Lanes::UseRing(LaneRing& ring) {
  std::lock_guard lock(exchange_);
  std::swap(ring_, ring);
}

void Lanes::UseScratch(LaneScratch& scratch) {
  std::lock_guard lock(exchange_);
  std::swap(scratch_, scratch);
  std::byte* const data = scratch_.data();
  const bool present = data != nullptr;
  device_verdict = reinterpret_cast<Verdict*>(data);
  block_sums = present ? reinterpret_cast<double*>(data + kVerdictBytes) : nullptr;
  std::byte* const changes = present ? data + kVerdictBytes + block_sums_bytes_ : nullptr;
  device_changes = change_bytes_ > 0 ? reinterpret_cast<uint64_t*>(changes) : nullptr;
  device_grads = present ? reinterpret_cast<float*>(changes + change_bytes_) : nullptr;
  const bool has_matrices = present && matrix_bytes_ > 0;
  matrix_workspace = has_matrices ? scratch_.matrix_data() : nullptr;
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

Status Lanes::Wait(EventHandle event, const char* what) {
  return context_.AwaitEvent(event, kWaiter, what);
}

Status Lanes::WaitForCaller(EventHandle event, const char* what,
                            FunctionRef<Result<bool>()> await_borrowed) {
  Status status = device().Wait(event, context_.device_timeout_ns());
  if (status.code() != OFFLOAD_TIMED_OUT) return status;
  HYBRIDOPT_ASSIGN(const bool borrowed, await_borrowed());
  return borrowed ? Wait(event, what) : context_.NoProgressOnEvent(status, kWaiter, what);
}

Result<double> Lanes::Seconds(const TimedEvent& event) {
  return device().Elapsed(event.begin, event.end);
}

}  // namespace hybridopt
