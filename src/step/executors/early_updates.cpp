#include "step/executors/early_updates.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>

#include "base/system.h"

namespace hybridopt {
namespace {

// The bytes of old state and new params if all elements were updated early.
uint64_t BytesOfAll(const ParamTable& table, const StateShape& shape) {
  uint64_t bytes = 0;
  for (uint32_t id = 0; id < table.size(); ++id) {
    const Param& param = table.param(id);
    bytes += shape.params[id].BytesOn(Tier::kHost, 0, param.count);
    bytes += param.count * DtypeBytes(param.dtype);
  }
  return bytes;
}

}  // namespace

EarlyUpdates::EarlyUpdates(Context& context, const ParamTable& table, const StateShape& shape,
                           StepPlan& plan, Lanes& lanes, const StepCounts& step_counts,
                           ChunkQueue& queue, ChunkProgress& progress, const ChunkUpdater& updater)
    : context_(context),
      device_(context.device()),
      table_(table),
      shape_(shape),
      plan_(plan),
      lanes_(lanes),
      step_counts_(step_counts),
      queue_(queue),
      progress_(progress),
      updater_(updater),
      fork_generation_(system::ForkGeneration()) {}

EarlyUpdates::~EarlyUpdates() {
  if (!on() || fork_generation_ != system::ForkGeneration()) return;
  for (EventHandle event : written_)
    if (event != nullptr) device_.DestroyEvent(event);
}

// A child of fork has no workers, so the work that they held cannot end there.
void EarlyUpdates::Close() {
  if (on() && fork_generation_ == system::ForkGeneration()) AwaitWorkers();
}

// At most the bytes that all chunks need, including the alignment of each array of each fragment.
uint64_t EarlyUpdates::RoomBytes(const ParamTable& table, const StateShape& shape) {
  if (shape.options.early_bytes == 0) return 0;
  constexpr uint64_t kPaddingBytes = 2 * kArrayAlignmentBytes * (kStateSlots + 1);
  return std::min(shape.options.early_bytes,
                  BytesOfAll(table, shape) + (ChunksMost(shape) + table.size()) * kPaddingBytes);
}

uint64_t EarlyUpdates::Bytes(const ParamTable& table, const StateShape& shape) {
  if (shape.options.early_bytes == 0) return 0;
  return table.size() * (sizeof(Addresses) + sizeof(HostGrad) + sizeof(uint32_t)) +
         shape.coefficients * sizeof(Coefficients) +
         ChunksMost(shape) * (sizeof(uint32_t) + sizeof(Early));
}

Status EarlyUpdates::Start() {
  room_bytes_ = RoomBytes(table_, shape_);
  if (room_bytes_ == 0) return {};
  HYBRIDOPT_ASSIGN(room_, PinnedRoom::Take(context_, room_bytes_, "early_update_bytes"));
  for (EventHandle& event : written_) {
    HYBRIDOPT_ASSIGN(event, device_.CreateEvent("early params uploaded"));
  }
  for (uint32_t job = 0; job < kJobs; ++job)
    jobs_.push_back({this, ChunkWork(context_.workers().threads())});
  request_.addresses.resize(table_.size());
  request_.host_grads.resize(table_.size(), HostGrad::kStored);
  request_.groups.resize(table_.groups().size());
  coefficients_.reserve(shape_.coefficients);
  first_chunk_.resize(table_.size());
  UseChunks();
  return {};
}

void EarlyUpdates::UseChunks() {
  if (!on()) return;
  missing_.resize(plan_.chunk_count());
  chunks_.reserve(plan_.chunk_count());
  first_chunk_ = plan_.chunks().last_chunk_end;
  for (uint32_t chunk = plan_.chunk_count(); chunk-- > 0;)
    for (const Fragment& fragment : plan_.fragments(chunk)) first_chunk_[fragment.param] = chunk;
  Forget();
}

// Requires that no worker is at work.
void EarlyUpdates::Forget() {
  assumed_ = false;
  used_bytes_ = accepted_elements_ = 0;
  chunks_.clear();
  for (uint32_t chunk = 0; chunk < plan_.chunk_count(); ++chunk)
    missing_[chunk] = static_cast<uint32_t>(plan_.fragments(chunk).size());
  ready_ = begun_ = ended_ = 0;
}

// ---------------------------------------------------------------------------- between the steps --

bool EarlyUpdates::Assume(std::span<const offload_group_t> groups) {
  if (!on() || closed_ || quiet_steps_ > 0) return false;
  if (assumed_) return true;
  assumed_ = true;
  std::copy(groups.begin(), groups.end(), request_.groups.begin());
  std::fill(request_.addresses.begin(), request_.addresses.end(), Addresses{nullptr, nullptr});
  plan_.Make(request_, step_counts_);
  grad_factor_ = AssumeFinite(grad_scale_).grad_factor;
  plan_.ScaleCoefficients(grad_factor_, &coefficients_);
  return true;
}

Status EarlyUpdates::Coming(uint32_t param, void* data, const Capture* capture) {
  request_.addresses[param].data = data;
  const uint32_t end = plan_.chunks().last_chunk_end[param];
  for (uint32_t chunk = first_chunk_[param]; chunk < end; ++chunk)
    if (--missing_[chunk] == 0) HYBRIDOPT_TRY(Accept(chunk, capture));
  return {};
}

Status EarlyUpdates::Accept(uint32_t chunk, const Capture* capture) {
  if (accepted_elements_ >= elements_wanted_ || plan_.chunks().chunks[chunk].on_disk) return {};
  for (const Fragment& fragment : plan_.fragments(chunk)) {
    if (capture != nullptr && !capture->HasRead(fragment.param, fragment.begin, fragment.count))
      return {};
    if (plan_.ParamComesDown(fragment.param) && request_.addresses[fragment.param].data == nullptr)
      return {};
  }
  Early early{};
  const uint64_t bytes = Place(chunk, &early);
  if (bytes > room_bytes_ - used_bytes_) return {};
  HYBRIDOPT_TRY(BringParams(early));
  used_bytes_ += bytes;
  accepted_elements_ += ElementsOf(early);
  chunks_.push_back(early);
  return {};
}

// Places the chunk's data after the used part of the memory, and returns the bytes that they need.
// Each area starts at an aligned address, so its arrays are aligned as they are on the host.
uint64_t EarlyUpdates::Place(uint32_t chunk, Early* early) const {
  early->chunk = chunk;
  const Fragment& last = plan_.fragments(chunk).back();
  const uint64_t param_bytes =
      last.param_offset + last.count * DtypeBytes(table_.param(last.param).dtype);
  const Chunk& areas = plan_.chunks().chunks[chunk];
  for (uint32_t index = 0; index < kStateSlots; ++index)
    early->old[index] = room_.data() + used_bytes_ + areas.StateArea(index);
  const uint64_t offset = used_bytes_ + areas.StateArea(kStateSlots);
  early->params = room_.data() + offset;
  return offset + system::RoundUp(param_bytes, kArrayAlignmentBytes) - used_bytes_;
}

// If params are halves of masters, copies the params to the memory in which the update will read
// them.
Status EarlyUpdates::BringParams(const Early& early) {
  if (!plan_.params_come_down()) return {};
  TraceWork work(lanes_.trace(), TraceRow::kCopiesDown, lanes_.down, "params down", early.chunk);
  for (const Fragment& fragment : plan_.fragments(early.chunk)) {
    if (!plan_.ParamComesDown(fragment.param)) continue;
    const uint64_t element_bytes = DtypeBytes(table_.param(fragment.param).dtype);
    const auto* const data = static_cast<std::byte*>(request_.addresses[fragment.param].data);
    HYBRIDOPT_TRY(device_.CopyToHost(lanes_.down, early.params + fragment.param_offset,
                                     data + fragment.begin * element_bytes,
                                     fragment.count * element_bytes));
    work.AddBytes(fragment.count * element_bytes);
  }
  return {};
}

Status EarlyUpdates::BeginArrived() {
  std::optional<WorkerPool::Work> work;
  {
    std::lock_guard lock(mutex_);
    ready_ = static_cast<uint32_t>(chunks_.size());
    if (begun_ > ended_ || begun_ == ready_) return {};  // workers begin the next chunk
    work = NextWork();
  }
  // Not with mutex_ held: Begin may wait for a worker that waits for mutex_.
  Status status = context_.workers().Begin(*work, &job_);
  if (!status.ok()) begun_ = ended_;
  return status;
}

Status EarlyUpdates::Undo() {
  if (!assumed_) return {};
  const TraceRange range(lanes_.trace(), TraceRow::kSteps, "undo early updates");
  AwaitWorkers();
  if (!kept_) HYBRIDOPT_TRY(Restore());
  Forget();
  closed_ = true;
  return {};
}

Status EarlyUpdates::Restore() {
  for (uint32_t number = 0; number < begun_; ++number) {
    const Early& early = chunks_[number];
    WorkPieces& pieces = jobs_[0].work.pieces;
    pieces.Reset({0, ElementsOf(early)}, kWorkGrainElements, kWorkPieceElements);
    HYBRIDOPT_TRY(pieces.Share(context_.workers(), [&](uint32_t worker) {
      const TraceRange range(lanes_.trace(), WorkerRow(worker), "undo", early.chunk);
      updater_.Restore(plan_.fragments(early.chunk), ElementsOf(early), early.old, pieces, worker);
    }));
    undone_elements_ += ElementsOf(early);
  }
  return {};
}

// ------------------------------------------------------------------------------------- workers --

void EarlyUpdates::Update(Job& job, uint32_t worker) {
  const Early& early = chunks_[job.number];
  const TraceRange range(lanes_.trace(), WorkerRow(worker), "update early", early.chunk);
  const ChunkBuffers buffers{nullptr, early.params, &early.old};
  updater_.Update({plan_, coefficients_, nullptr}, early.chunk, buffers, job.work, worker);
}

// Requires mutex_.
WorkerPool::Work EarlyUpdates::NextWork() {
  Job& job = jobs_[begun_ % kJobs];
  job.number = begun_++;
  const Early& early = chunks_[job.number];
  updater_.Begin(plan_, early.chunk, {0, ElementsOf(early)}, job.work);
  return {job, job};
}

// Jobs end in the order in which they began.
void EarlyUpdates::AfterUpdate() {
  std::lock_guard lock(mutex_);
  ended_ += 1;
  while (begun_ < ready_ && begun_ - ended_ < kJobs) {
    if (context_.workers().TryBegin(NextWork(), &job_)) continue;
    begun_ -= 1;  // the workers' queue is full; the next BeginArrived begins this chunk
    break;
  }
  if (begun_ == ended_) rested_.notify_all();
}

// Stops the workers from beginning more chunks, and waits for the chunks that they have begun.
void EarlyUpdates::AwaitWorkers() {
  bool any = false;
  {
    std::unique_lock lock(mutex_);
    ready_ = begun_;
    rested_.wait(lock, [this] { return begun_ == ended_; });
    any = begun_ > 0;
  }
  if (any) context_.workers().Await(job_);  // the last worker may not have returned yet
}

// --------------------------------------------------------------------------------- in the step --

Status EarlyUpdates::Stop(const StepRequest& request) {
  if (!assumed_) return {};
  {
    const TraceRange range(lanes_.trace(), TraceRow::kSteps, "await early updates");
    AwaitWorkers();
  }
  Learn();
  chunks_.resize(begun_);
  return IsAsAssumed(request) ? Status() : Undo();
}

// Sets how many elements to update before the next step: if the workers have not finished all
// accepted chunks, the elements that they have finished; otherwise a quarter more than now.
void EarlyUpdates::Learn() {
  if (chunks_.empty()) return;
  uint64_t elements = 0;
  for (uint32_t number = 0; number < begun_; ++number) elements += ElementsOf(chunks_[number]);
  if (begun_ == chunks_.size()) elements += elements / 4;
  elements_wanted_ = elements + shape_.options.chunk_elements;
}

// The gradients need no check: they are those that have arrived, because every other move of
// gradients undoes.
bool EarlyUpdates::IsAsAssumed(const StepRequest& request) const {
  if (std::memcmp(request.groups.data(), request_.groups.data(),
                  request.groups.size() * sizeof(offload_group_t)) != 0)
    return false;
  for (const Early& early : chunks_)
    for (const Fragment& fragment : plan_.fragments(early.chunk))
      if (plan_.ParamComesDown(fragment.param) &&
          request.addresses[fragment.param].data != request_.addresses[fragment.param].data)
        return false;
  return true;
}

void EarlyUpdates::TakeFromQueue() {
  for (const Early& early : chunks_) queue_.TakeThis(early.chunk, Executor::kEarly);
}

Result<bool> EarlyUpdates::Keep(const Verdict& verdict) {
  const bool is_as_assumed = verdict.skip == 0 && std::bit_cast<uint32_t>(verdict.grad_factor) ==
                                                      std::bit_cast<uint32_t>(grad_factor_);
  if (!chunks_.empty() && !is_as_assumed) {
    for (const Early& early : chunks_) queue_.GiveBack(early.chunk);
    HYBRIDOPT_TRY(Undo());
    return false;
  }
  std::sort(chunks_.begin(), chunks_.end(),
            [](const Early& a, const Early& b) { return a.chunk < b.chunk; });
  std::lock_guard lock(send_mutex_);
  kept_ = !chunks_.empty();
  return true;
}

Status EarlyUpdates::SendNext() {
  if (!on()) return {};
  std::lock_guard lock(send_mutex_);
  if (!kept_ || sent_ == chunks_.size() || !status_.ok()) return status_;
  const EventHandle written = written_[sent_ % kEvents];
  status_ = Send(chunks_[sent_], written);
  if (!status_.ok()) return status_;
  progress_.Issued(chunks_[sent_].chunk, written);
  sent_ += 1;
  return {};
}

// These copies give way to no prefetch, because the forward pass waits for the params, and because
// a worker must not wait here.
Status EarlyUpdates::Send(const Early& early, EventHandle written) {
  TraceWork work(lanes_.trace(), TraceRow::kCopiesUp, lanes_.up, "params up", early.chunk);
  for (const Fragment& fragment : plan_.fragments(early.chunk)) {
    const uint64_t element_bytes = DtypeBytes(table_.param(fragment.param).dtype);
    const uint64_t bytes = fragment.count * element_bytes;
    auto* const data = static_cast<std::byte*>(plan_.param(fragment.param).addresses.data);
    HYBRIDOPT_TRY(device_.CopyToDevice(lanes_.up, data + fragment.begin * element_bytes,
                                       early.params + fragment.param_offset, bytes));
    lanes_.link().QueuedUp(bytes);
    sent_bytes_ += bytes;
    work.AddBytes(bytes);
  }
  work.End();
  return device_.Record(written, lanes_.up);
}

Status EarlyUpdates::Finish(offload_step_result_t* result) {
  if (!kept_) return {};
  HYBRIDOPT_TRY(status_);
  while (sent_ < chunks_.size()) HYBRIDOPT_TRY(SendNext());
  {
    const TraceRange range(lanes_.trace(), TraceRow::kSteps, "await early params up");
    HYBRIDOPT_TRY(lanes_.Wait(written_[(sent_ - 1) % kEvents], "params going up"));
  }
  result->params_up_bytes += sent_bytes_;
  for (const Early& early : chunks_) {
    result->early_elements += ElementsOf(early);
    HYBRIDOPT_TRY(progress_.Finished(early.chunk));
  }
  device_.DiscardHost(room_.data(), used_bytes_);
  return {};
}

void EarlyUpdates::End(const StepRequest& request, offload_step_result_t* result) {
  if (!on()) return;
  result->undone_elements = undone_elements_;
  if (undone_elements_ > 0) {
    quiet_steps_ = next_quiet_steps_;
    next_quiet_steps_ = std::min(2 * next_quiet_steps_, kMostQuietSteps);
  } else if (quiet_steps_ > 0) {
    quiet_steps_ -= 1;
  } else if (kept_) {
    next_quiet_steps_ = 1;
  }
  grad_scale_ = request.grad_scale;
  closed_ = kept_ = false;
  undone_elements_ = sent_ = sent_bytes_ = 0;
  Forget();
}

}  // namespace hybridopt
