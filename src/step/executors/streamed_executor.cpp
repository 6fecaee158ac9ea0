#include "step/executors/streamed_executor.h"

#include <algorithm>

#include "base/profiler_range.h"
#include "base/system.h"
#include "step/executors/device_updates.h"

namespace hybridopt {
namespace {

// An upper bound: one update for each fragment, and one more for each stripe that begins inside a
// fragment, and one for each matrix.
uint64_t StreamedUpdatesMost(const StateShape& shape) {
  if (!shape.options.streams_state) return 0;
  return shape.params.size() + ChunksMost(shape) + shape.stripes.size() + shape.matrices;
}

}  // namespace

StreamedExecutor::StreamedExecutor(SideThreads& side_threads, const ParamTable& table,
                                   const StateShape& shape, const StepPlan& plan,
                                   const StateMemory& memory, Lanes& lanes, ChunkQueue& queue,
                                   ChunkProgress& progress, AsideCopier& aside,
                                   const ChangeLog& changes)
    : side_threads_(side_threads),
      table_(table),
      shape_(shape),
      plan_(plan),
      memory_(memory),
      lanes_(lanes),
      device_(lanes.device()),
      queue_(queue),
      progress_(progress),
      aside_(aside),
      changes_(changes) {
  chunks_.reserve(kMaxStreamSlots);
  positions_.reserve(kMaxStreamSlots);
  queued_up_.reserve(kMaxStreamSlots);
  updates_.reserve(StreamedUpdatesMost(shape));
}

StreamedExecutor::~StreamedExecutor() {
  if (owns_work_) side_threads_.RemoveOwner();
}

uint64_t StreamedExecutor::Bytes(const StateShape& shape) {
  return StreamedUpdatesMost(shape) * sizeof(DeviceUpdate);
}

Status StreamedExecutor::Start() {
  if (!shape_.options.streams_state) return {};
  HYBRIDOPT_TRY(side_threads_.AddOwner());
  owns_work_ = true;
  return {};
}

// ------------------------------------------------------------------------- before the verdict --

void StreamedExecutor::Reset() {
  taken_ = copied_ahead_ = finished_ = 0;
  chunks_.resize(memory_.pinned() ? lanes_.stream_slots().size() : 0);
  positions_.resize(chunks_.size());
  queued_up_.resize(chunks_.size());
  room_ = RingRoom(lanes_.stream_ring().size());
  updates_.clear();
  done_ = {};
}

bool StreamedExecutor::TakeAhead() { return MayTake() && Take(); }

// Takes the next chunk from the queue if its state is there and the ring has room for it. Where CPU
// workers take chunks on disk, these are the last ones that the queue offers, because it has been
// told that the CPU is preferred for them.
bool StreamedExecutor::Take() {
  std::optional<uint64_t> position;
  const std::optional<uint32_t> chunk = queue_.TakeIf(Executor::kStreamed, [&](uint32_t next) {
    const Chunk& offered = plan_.chunks().chunks[next];
    if (offered.on_disk && !StateIsInMemory(next)) return false;
    position = room_.Take(offered.stream_bytes());
    return position.has_value();
  });
  if (!chunk.has_value()) return false;
  chunks_[SlotOf(taken_)] = *chunk;
  positions_[SlotOf(taken_)] = *position;
  taken_ += 1;
  return true;
}

// Of a chunk on disk. What the disk has failed to read is not there; AwaitDisk returns the failure.
bool StreamedExecutor::StateIsInMemory(uint32_t chunk) const {
  DiskMemory& disk = *memory_.disk();
  return shape_.options.streams_disk() && disk.IsReady(chunk) && disk.Await(chunk).ok();
}

Status StreamedExecutor::CopyAhead() {
  for (; copied_ahead_ < taken_; ++copied_ahead_) HYBRIDOPT_TRY(QueueUp(copied_ahead_));
  return {};
}

Status StreamedExecutor::AwaitCopiedAhead() {
  for (uint32_t slot = 0; slot < taken_; ++slot) {
    HYBRIDOPT_TRY(lanes_.Wait(lanes_.stream_slots()[slot].up.end, "state going up"));
    lanes_.link().ArrivedUpTo(queued_up_[slot]);
  }
  return {};
}

// ----------------------------------------------------------------------------- on the thread --

Status StreamedExecutor::Begin(const HostStep& step) {
  if (taken_ == 0 && !(on() && shape_.options.streams_disk())) return {};
  HYBRIDOPT_TRY(device_.Record(lanes_.verdict_set, lanes_.compute));
  HYBRIDOPT_TRY(device_.StreamWait(lanes_.state_update, lanes_.verdict_set));
  step_ = &step;
  side_threads_.Begin(*this);
  return {};
}

Status StreamedExecutor::Await(offload_step_result_t* result) {
  if (step_ == nullptr) return {};
  const int64_t begin_ns = system::NowNs();
  side_threads_.Await(*this);
  step_ = nullptr;
  result->streamed_elements = done_.streamed_elements;
  result->state_up_bytes = done_.state_up_bytes;
  result->state_down_bytes = done_.state_down_bytes;
  result->state_up_seconds = done_.state_up_seconds;
  result->streamed_update_seconds = done_.streamed_update_seconds;
  result->state_down_seconds = done_.state_down_seconds;
  // The idle time is counted for the executor that ended first, because it waited for the other
  // one.
  const double ahead_seconds = static_cast<double>(begin_ns - end_ns_) * 1e-9;
  result->streamed_idle_seconds = std::max(ahead_seconds, 0.0);
  result->cpu_idle_seconds = std::max(-ahead_seconds, 0.0);
  return status_;
}

void StreamedExecutor::Do() {
  status_ = CatchExceptions("a chunk", [this] { return UpdateChunks(); });
  if (!status_.ok()) queue_.Stop();
  end_ns_ = system::NowNs();
}

Status StreamedExecutor::UpdateChunks() {
  for (uint32_t queued = 0;;) {
    if (finished_ == taken_) HYBRIDOPT_TRY(AwaitDisk());
    while (MayTake() && Take()) HYBRIDOPT_TRY(QueueUp(taken_ - 1));
    if (finished_ == taken_) return {};
    for (; queued < taken_; ++queued) {
      const uint32_t chunk = chunks_[SlotOf(queued)];
      HYBRIDOPT_TRY(QueueAside(queued));
      HYBRIDOPT_TRY(QueueUpdate(queued));
      progress_.Issued(chunk, lanes_.stream_slots()[SlotOf(queued)].updated.end);
      HYBRIDOPT_TRY(QueueDown(queued));
    }
    HYBRIDOPT_TRY(Finish(finished_));
    finished_ += 1;
    room_.GiveBack(finished_ < taken_ ? std::optional(positions_[SlotOf(finished_)])
                                      : std::nullopt);
  }
}

// Waits until the state of the next chunk is in memory, if the disk has it. Nothing that the disk
// could wait for may be under way.
Status StreamedExecutor::AwaitDisk() {
  if (!shape_.options.streams_disk()) return {};
  std::optional<uint32_t> next;
  queue_.TakeIf(Executor::kStreamed, [&](uint32_t chunk) {
    next = chunk;
    return false;
  });
  if (!next.has_value()) return {};
  const TraceRange range(lanes_.trace(), TraceRow::kDeviceRing, "await state from disk", *next);
  return memory_.disk()->Await(*next);
}

Status StreamedExecutor::Finish(uint32_t number) {
  const StreamSlot& slot = lanes_.stream_slots()[SlotOf(number)];
  const uint32_t chunk = chunks_[SlotOf(number)];
  {
    const TraceRange range(lanes_.trace(), TraceRow::kDeviceRing, "await state down", chunk);
    HYBRIDOPT_TRY(lanes_.Wait(slot.down.end, "state coming down"));
  }
  if (step_->capture != nullptr) aside_.ChunkCopied(*step_->capture, chunk);
  lanes_.link().ArrivedUpTo(queued_up_[SlotOf(number)]);
  HYBRIDOPT_ASSIGN(const double up_seconds, lanes_.Seconds(slot.up));
  HYBRIDOPT_ASSIGN(const double update_seconds, lanes_.Seconds(slot.updated));
  HYBRIDOPT_ASSIGN(const double down_seconds, lanes_.Seconds(slot.down));
  done_.state_up_seconds += up_seconds;
  done_.streamed_update_seconds += update_seconds;
  done_.state_down_seconds += down_seconds;
  done_.streamed_elements += plan_.active_count(chunk);
  if (DiskMemory* const disk = memory_.disk(); disk != nullptr) disk->Updated(chunk);
  return progress_.Finished(chunk);
}

// ----------------------------------------------------------------------------------- the chunks --

Status StreamedExecutor::QueueUp(uint32_t number) {
  const StreamSlot& slot = lanes_.stream_slots()[SlotOf(number)];
  lanes_.link().GiveWay(ChunkOf(number).stream_bytes());
  const uint32_t chunk = chunks_[SlotOf(number)];
  const ProfilerRange range("queue state up", chunk);
  TraceWork work(lanes_.trace(), TraceRow::kCopiesUp, lanes_.up, "state up", chunk);
  const uint64_t before_bytes = done_.state_up_bytes;
  HYBRIDOPT_TRY(device_.Record(slot.up.begin, lanes_.up));
  HYBRIDOPT_TRY(CopyStates(number, Direction::kUp));
  work.AddBytes(done_.state_up_bytes - before_bytes);
  HYBRIDOPT_TRY(CopyHeldGrads(number, &work));
  queued_up_[SlotOf(number)] = lanes_.link().queued_up_bytes();
  work.End();
  return device_.Record(slot.up.end, lanes_.up);
}

Status StreamedExecutor::QueueAside(uint32_t number) {
  if (step_->capture == nullptr) return {};
  HYBRIDOPT_TRY(device_.StreamWait(lanes_.down, lanes_.stream_slots()[SlotOf(number)].up.end));
  return aside_.QueueChunk(*step_->capture, chunks_[SlotOf(number)], DataOf(number));
}

Status StreamedExecutor::QueueUpdate(uint32_t number) {
  const StreamSlot& slot = lanes_.stream_slots()[SlotOf(number)];
  HYBRIDOPT_TRY(device_.StreamWait(lanes_.state_update, slot.up.end));
  TraceWork work(lanes_.trace(), TraceRow::kStateUpdate, lanes_.state_update, "update state",
                 chunks_[SlotOf(number)]);
  HYBRIDOPT_TRY(device_.Record(slot.updated.begin, lanes_.state_update));
  for (int32_t rule = 0; rule < kAllRuleCount; ++rule) {
    const size_t first = updates_.size();
    for (const Fragment& fragment : plan_.fragments(chunks_[SlotOf(number)]))
      if (plan_.param(fragment.param).active && plan_.param(fragment.param).rule == Rule{rule})
        AddUpdates(shape_, shape_.params[fragment.param], fragment.begin,
                   UpdateOf(fragment, ChunkOf(number), DataOf(number)), updates_);
    HYBRIDOPT_TRY(Launch(Rule{rule}, first));
  }
  work.End();
  return device_.Record(slot.updated.end, lanes_.state_update);
}

Status StreamedExecutor::QueueDown(uint32_t number) {
  const StreamSlot& slot = lanes_.stream_slots()[SlotOf(number)];
  lanes_.link().QueuedDown();
  HYBRIDOPT_TRY(device_.StreamWait(lanes_.down, slot.updated.end));
  TraceWork work(lanes_.trace(), TraceRow::kCopiesDown, lanes_.down, "state down",
                 chunks_[SlotOf(number)]);
  const uint64_t before_bytes = done_.state_down_bytes;
  HYBRIDOPT_TRY(device_.Record(slot.down.begin, lanes_.down));
  HYBRIDOPT_TRY(CopyStates(number, Direction::kDown));
  work.AddBytes(done_.state_down_bytes - before_bytes);
  work.End();
  return device_.Record(slot.down.end, lanes_.down);
}

// Launches the updates listed from index `first` on.
Status StreamedExecutor::Launch(Rule rule, size_t first) {
  if (updates_.size() == first) return {};
  UpdateLaunch launch{};
  launch.rule = rule;
  launch.updates = std::span(updates_).subspan(first);
  launch.coefficients = plan_.coefficients();
  launch.verdict = lanes_.device_verdict;
  launch.workspace = lanes_.matrix_workspace;
  return rule == Rule::kMuon ? device_.UpdateMatrices(lanes_.state_update, launch)
                             : device_.Update(lanes_.state_update, launch);
}

// The update reads and writes state in the ring, where `data` is the chunk's; gradient and param
// are at the caller's addresses.
DeviceUpdate StreamedExecutor::UpdateOf(const Fragment& fragment, const Chunk& chunk,
                                        std::byte* data) const {
  const uint32_t id = fragment.param;
  const StepParam& param = plan_.param(id);
  const ParamShape& shaped = shape_.params[id];
  const auto state = [&](StateSlot kind) -> std::byte* {
    if (!shaped.Keeps(fragment.tier, kind)) return nullptr;
    return data + chunk.StateOf(fragment, kind);
  };
  const uint64_t grad_begin = fragment.begin * DtypeBytes(param.grad_dtype);
  const uint64_t param_begin = fragment.begin * DtypeBytes(table_.param(id).dtype);
  DeviceUpdate update{};
  update.span.grad = param.host_grad != nullptr
                         ? HeldGrad(fragment, chunk, data)
                         : static_cast<const std::byte*>(param.addresses.grad) + grad_begin;
  update.span.param = static_cast<std::byte*>(param.addresses.data) + param_begin;
  update.span.master = state(shaped.master_slot());
  update.span.moment0 = state(kMoment0);
  update.span.moment1 = state(kMoment1);
  update.span.count = fragment.count;
  update.span.rounding = param.rounding;
  update.grad_dtype = param.grad_dtype;
  update.param_dtype = table_.param(id).dtype;
  update.coefficients = param.coefficients;
  update.formats = shaped.formats();
  update.noted = changes_.OnDevice(id).From(fragment.begin);
  update.ns_steps = param.ns_steps;
  return update;
}

// -------------------------------------------------------------------------------------- copies --

// Fragments that are contiguous both on the host and in the ring are moved by one copy. They are
// pinned in one piece, because more than padding lies between two pieces.
Status StreamedExecutor::CopyStates(uint32_t number, Direction direction) {
  for (uint32_t index = 0; index < kStateSlots; ++index) {
    const StateSlot kind{index};
    std::byte* const area = DataOf(number) + ChunkOf(number).StateArea(kind);
    std::byte* host = nullptr;
    uint64_t offset = 0, bytes = 0;
    for (const Fragment& fragment : plan_.fragments(chunks_[SlotOf(number)])) {
      const ParamShape& shaped = shape_.params[fragment.param];
      const bool travels = plan_.param(fragment.param).active && shaped.Keeps(fragment.tier, kind);
      std::byte* const fragment_host =
          travels ? memory_.At(fragment.tier, fragment.param, kind, fragment.begin) : nullptr;
      const uint64_t padding = fragment.state_offset[kind] - offset - bytes;
      const bool goes_on = travels && bytes > 0 && padding < kArrayAlignmentBytes &&
                           host + bytes + padding == fragment_host;
      if (!goes_on) {
        HYBRIDOPT_TRY(Copy(direction, host, area + offset, bytes));
        host = fragment_host;
        offset = fragment.state_offset[kind];
        bytes = 0;
      }
      if (travels)
        bytes = fragment.state_offset[kind] - offset +
                shaped.Bytes(kind, fragment.begin, fragment.count);
    }
    HYBRIDOPT_TRY(Copy(direction, host, area + offset, bytes));
  }
  return {};
}

Status StreamedExecutor::Copy(Direction direction, std::byte* host, std::byte* device,
                              uint64_t bytes) {
  if (bytes == 0) return {};
  (direction == Direction::kUp ? done_.state_up_bytes : done_.state_down_bytes) += bytes;
  if (direction == Direction::kUp) lanes_.link().QueuedUp(bytes);
  return direction == Direction::kUp ? device_.CopyToDevice(lanes_.up, device, host, bytes)
                                     : device_.CopyToHost(lanes_.down, host, device, bytes);
}

// The area has 4 bytes for each element, enough for every dtype of gradients.
std::byte* StreamedExecutor::HeldGrad(const Fragment& fragment, const Chunk& chunk,
                                      std::byte* data) {
  return data + chunk.StateArea(kStateSlots) + fragment.first_element * sizeof(float);
}

Status StreamedExecutor::CopyHeldGrads(uint32_t number, TraceWork* work) {
  for (const Fragment& fragment : plan_.fragments(chunks_[SlotOf(number)])) {
    const StepParam& param = plan_.param(fragment.param);
    if (!param.active || param.host_grad == nullptr) continue;
    const uint64_t element_bytes = DtypeBytes(param.grad_dtype);
    HYBRIDOPT_TRY(device_.CopyToDevice(
        lanes_.up, HeldGrad(fragment, ChunkOf(number), DataOf(number)),
        param.host_grad + fragment.begin * element_bytes, fragment.count * element_bytes));
    lanes_.link().QueuedUp(fragment.count * element_bytes);
    work->AddBytes(fragment.count * element_bytes);
  }
  return {};
}

}  // namespace hybridopt
