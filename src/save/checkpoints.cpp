#include "save/checkpoints.h"

#include <algorithm>
#include <utility>

#include "base/system.h"
#include "base/utf8.h"
#include "save/file_failure.h"

namespace hybridopt {

// --------------------------------------------------------------------------------------- buffer --

uint64_t Checkpoints::BufferBytes(const ParamTable& table, const StateShape& shape) {
  if (shape.options.save_buffer_bytes == 0) return 0;
  return std::min(shape.options.save_buffer_bytes, Capture::BufferBytesMost(table, shape));
}

Status Checkpoints::TakeBuffer(uint64_t bytes) {
  if (bytes == 0) return {};
  HYBRIDOPT_ASSIGN(buffer_, PinnedRoom::TakeAnyway(context_, bytes));
  buffer_bytes_ = bytes;
  return {};
}

// Commit planned with the memory that was free then; other code may have taken it since.
void Checkpoints::TakeBufferAtSave() {
  if (buffer_bytes_ > 0) return;
  (void)CatchBadAlloc("save", [this]() -> Status {
    const uint64_t planned = BufferBytes(saved_.table, saved_.shape);
    const Status taken =
        TakeBuffer(std::min(planned, AutoBufferBytes(context_, system::AvailableBytes())));
    if (buffer_bytes_ < planned)
      context_.Note("the buffer for saves is smaller than planned: less memory is free now");
    return taken;
  });
}

// ----------------------------------------------------------------------------------------- save --

Status Checkpoints::Save(SaveRequest request, EventHandle ready, Timeline& timeline,
                         uint64_t sequence) {
  HYBRIDOPT_TRY(save_.AwaitEnd());  // only one save runs at a time
  TakeBufferAtSave();
  const auto lay_out = [&] {
    return Saver::Create(context_, saved_, std::move(request), PointOf(ready), buffer());
  };
  Status refusal = save_.Begin(lay_out, timeline, sequence);
  return refusal.ok() ? refusal : ReportFailure(context_, timeline, sequence, std::move(refusal));
}

SavePoint Checkpoints::PointOf(EventHandle ready) const {
  SavePoint point{};
  point.step = step_counts_.applied();
  for (uint32_t id = 0; id < saved_.table.size(); ++id)
    point.step_counts.push_back(step_counts_.of(id));
  point.rank = static_cast<uint32_t>(comm_.rank());
  point.world = static_cast<uint32_t>(comm_.world());
  point.ready = ready;
  return point;
}

Status Checkpoints::CheckRoom() const {
  SaveRequest request;
  for (uint32_t id = 0; id < saved_.table.size(); ++id) {
    // A save refuses such a name; steps and loads do not need to.
    if (!IsUtf8(saved_.table.param(id).name)) return {};
    request.locations.push_back({saved_.table.addresses()[id].data, false, false});
  }
  request.groups.assign(saved_.table.groups().begin(), saved_.table.groups().end());
  return Saver::Create(context_, saved_, std::move(request), PointOf(nullptr), {}).status();
}

// ----------------------------------------------------------------------------------------- load --

Status Checkpoints::Load(const LoadRequest& request, EventHandle ready, Timeline& timeline,
                         uint64_t sequence) {
  HYBRIDOPT_TRY(save_.AwaitEnd());
  const TraceRange range(saved_.trace, TraceRow::kSteps, "load");
  std::optional<Loader> loader;
  Status status;
  HYBRIDOPT_TRY(Prepare(request, &loader, &status));
  if (!status.ok()) return ReportFailure(context_, timeline, sequence, std::move(status));
  HYBRIDOPT_TRY(agreement_.DoTogether([&] { return loader->Replace(ready); }, &status));
  if (status.ok()) {
    loader->SetCounts(step_counts_);
    return {};
  }
  int32_t replaced = loader->has_replaced() ? 1 : 0;
  HYBRIDOPT_TRY(comm_.AgreeOnMax(&replaced, 1));
  if (replaced == 0) return ReportFailure(context_, timeline, sequence, std::move(status));
  return Status::Error(status.code(),
                       "state was being replaced when it failed, and is a mixture now: %s",
                       status.message().c_str());
}

// Makes, on all ranks, every check that may refuse the load, before any rank changes anything.
// Returns an error if the ranks could not communicate.
Status Checkpoints::Prepare(const LoadRequest& request, std::optional<Loader>* loader,
                            Status* refusal) {
  std::vector<int32_t> known;
  const auto open = [&]() -> Status {
    loader->emplace(context_, saved_.table, saved_.shape, saved_.locator, request);
    HYBRIDOPT_TRY((*loader)->Open());
    known = (*loader)->sources().Known();
    return {};
  };
  HYBRIDOPT_TRY(agreement_.DoTogether([&] { return CatchBadAlloc("load", open); }, refusal));
  if (!refusal->ok()) return {};
  HYBRIDOPT_TRY(AgreeOnCheckpoint(**loader, &known, refusal));
  if (!refusal->ok()) return {};
  const auto verify = [&]() -> Status {
    HYBRIDOPT_TRY((*loader)->sources().CheckAllKnown(known));
    return (*loader)->Verify();
  };
  return agreement_.DoTogether([&] { return CatchBadAlloc("load", verify); }, refusal);
}

// Checks that all ranks read the same checkpoint. *known becomes, for each param of the checkpoint,
// whether at least one rank has that param.
Status Checkpoints::AgreeOnCheckpoint(const Loader& loader, std::vector<int32_t>* known,
                                      Status* refusal) const {
  const auto fingerprint = static_cast<int32_t>(loader.sources().fingerprint());
  int32_t ends[2] = {fingerprint, -fingerprint};
  HYBRIDOPT_TRY(comm_.AgreeOnMax(ends, 2));
  if (ends[0] != -ends[1]) {
    *refusal = Status::Error(OFFLOAD_CHECKPOINT_MISMATCH,
                             "rank %d: the ranks load different checkpoints; give all of them the "
                             "same options.path on a file system they share",
                             comm_.rank());
    return {};
  }
  if (known->empty()) return {};
  return comm_.AgreeOnMax(known->data(), static_cast<uint32_t>(known->size()));
}

}  // namespace hybridopt
