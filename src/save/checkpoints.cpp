#include "save/checkpoints.h"

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

#include "base/profiler_range.h"
#include "base/utf8.h"
#include "checkpoint/file_io.h"
#include "save/optimizer_manifest.h"

namespace hybridopt {
namespace {

using checkpoint::PendingDirectory;

// Whether a failure ends only the save or load: a full disk does, a broken device or a lost rank
// poisons the optimizer.
bool ConcernsFilesOnly(const Status& status) {
  return status.code() != OFFLOAD_DEVICE_FAILED && status.code() != OFFLOAD_COMM_FAILED;
}

// Turns std::bad_alloc into a status, so that this rank still takes part in the other ranks'
// rounds, and the optimizer can be used further.
template <typename Call>
auto CatchBadAlloc(const char* what, Call&& call) -> decltype(call()) try {
  return call();
} catch (const std::bad_alloc&) {
  return Status::Error(OFFLOAD_OUT_OF_HOST_MEMORY,
                       "out of host memory for the tables of a %s; nothing was changed", what);
}

}  // namespace

// ---------------------------------------------------------------------------------------- begin --

Status Checkpoints::Save(SaveRequest request, EventHandle ready, Timeline& timeline,
                         uint64_t sequence) {
  HYBRIDOPT_TRY(Complete(timeline));  // only one save runs at a time
  std::string path;                   // of the pending directory
  Status failure;  // of this rank; the other ranks learn it when the save has ended
  Status status = Begin(std::move(request), ready, &path, &failure);
  if (!status.ok()) {
    RemoveOwnDirectory();  // another rank has ended
    saver_.reset();
    directory_.reset();
    return Refuse(std::move(status), timeline, sequence);
  }
  sequence_ = sequence;
  publishing_ = false;
  // Hold comes before Start: the saver may have ended before Start returns.
  timeline.Hold(sequence, comm_.world() == 1 ? 0 : agreement_.RoundNs(), capture()->borrows());
  saver_->Start(
      std::move(path), std::move(failure), [&timeline] { timeline.ReleaseStreams(); },
      [&timeline] { timeline.Wake(); });
  return {};
}

SavePoint Checkpoints::PointOf(EventHandle ready) const {
  SavePoint point{};
  point.step = step_counts_.applied();
  for (uint32_t id = 0; id < table_.size(); ++id) point.step_counts.push_back(step_counts_.of(id));
  point.rank = static_cast<uint32_t>(comm_.rank());
  point.world = static_cast<uint32_t>(comm_.world());
  point.ready = ready;
  return point;
}

Status Checkpoints::CheckRoom() const {
  SaveRequest request;
  for (uint32_t id = 0; id < table_.size(); ++id) {
    // Only a save refuses such a name.
    if (!IsUtf8(table_.param(id).name)) return {};
    request.locations.push_back({table_.addresses()[id].data, false, false});
  }
  request.groups.assign(table_.groups().begin(), table_.groups().end());
  return Saver::Create(context_, table_, shape_, locator_, std::move(request), PointOf(nullptr))
      .status();
}

// Rank 0 makes the directory and sends its number to the others.
Status Checkpoints::Begin(SaveRequest request, EventHandle ready, std::string* path,
                          Status* failure) {
  std::string target;
  const auto prepare = [&]() -> Status {
    target = request.path;
    HYBRIDOPT_ASSIGN(saver_, Saver::Create(context_, table_, shape_, locator_, std::move(request),
                                           PointOf(ready)));
    if (comm_.rank() != 0) return {};
    HYBRIDOPT_ASSIGN(directory_, PendingDirectory::Make(context_.files(), target));
    *path = directory_->path();
    return {};
  };
  Status status;
  HYBRIDOPT_TRY(agreement_.DoTogether([&] { return CatchBadAlloc("save", prepare); }, &status));
  if (!status.ok()) {
    HYBRIDOPT_TRY(RemoveDirectory());
    return status;
  }
  const uint64_t made = directory_.has_value() ? directory_->number() : 0;
  int32_t number[2] = {static_cast<int32_t>(made >> 31), static_cast<int32_t>(made & INT32_MAX)};
  HYBRIDOPT_TRY(comm_.AgreeOnMax(number, 2));
  if (comm_.rank() == 0) return {};
  const uint64_t told = static_cast<uint64_t>(number[0]) << 31 | static_cast<uint64_t>(number[1]);
  *failure = CatchBadAlloc("save", [&]() -> Status {
    directory_.emplace(PendingDirectory::Join(context_.files(), target, told));
    *path = directory_->path();
    return {};
  });
  return {};
}

// The next save to that path removes what cannot be removed now.
void Checkpoints::RemoveOwnDirectory() {
  if (comm_.rank() == 0 && directory_.has_value())
    (void)CatchBadAlloc("save", [this]() -> Status {
      directory_->Remove();
      return {};
    });
}

// Removes the directory of a failed save, on all ranks together: a slow disk may take long for
// that.
Status Checkpoints::RemoveDirectory() {
  Status removed;
  Status asked = agreement_.DoTogether(
      [this] {
        RemoveOwnDirectory();
        return Status();
      },
      &removed);
  directory_.reset();
  return asked;
}

// ------------------------------------------------------------------------------------- complete --

// One round of the ranks. All ranks get the same result.
Status Checkpoints::Meet(bool at_step, bool* step, Timeline& timeline) {
  int32_t missing[2] = {saver_->ended() ? 0 : 1, at_step ? 0 : 1};
  if (Status asked = comm_.AgreeOnMax(missing, 2); !asked.ok())
    return End(std::move(asked), timeline);
  if (missing[0] == 0) return CompleteAgreed(timeline);
  *step = missing[1] == 0;
  return {};
}

Status Checkpoints::BeforeStep(Timeline& timeline) {
  // With one rank the step follows the save chunk by chunk. With several ranks a step that waits
  // for this rank's disk would let the others wait until they time out, so the ranks meet in rounds
  // first.
  for (bool step = false; saver_ != nullptr && !step;) {
    const bool at_step = comm_.world() == 1 || capture()->AwaitAll(agreement_.RoundNs());
    HYBRIDOPT_TRY(Meet(at_step, &step, timeline));
  }
  return {};
}

Status Checkpoints::AwaitCapture(Timeline& timeline) {
  bool step = false;
  while (saver_ != nullptr && !capture()->AwaitAll(agreement_.RoundNs()))
    HYBRIDOPT_TRY(Meet(false, &step, timeline));
  return {};
}

Result<bool> Checkpoints::AwaitBorrowed(Timeline& timeline) {
  if (saver_ == nullptr || !capture()->borrows()) return false;
  bool step = false;
  while (saver_ != nullptr && !capture()->AwaitBorrowed(agreement_.RoundNs()))
    HYBRIDOPT_TRY(Meet(false, &step, timeline));
  return true;
}

Status Checkpoints::Settle(Timeline& timeline) {
  bool step = false;
  return saver_ == nullptr ? Status() : Meet(false, &step, timeline);
}

// Completes the running save, if there is one, before the ranks do other work together.
Status Checkpoints::Complete(Timeline& timeline) {
  for (bool step = false; saver_ != nullptr;) {
    saver_->AwaitEnd(agreement_.RoundNs());
    HYBRIDOPT_TRY(Meet(false, &step, timeline));
  }
  return {};
}

Status Checkpoints::CompleteAgreed(Timeline& timeline) {
  Status outcome = saver_->Join();
  Status asked = agreement_.OnFailure(&outcome);
  if (asked.ok() && outcome.ok())
    asked = agreement_.DoTogether([this] { return comm_.rank() == 0 ? PublishOnce() : Status(); },
                                  &outcome);
  if (asked.ok() && !outcome.ok()) asked = RemoveDirectory();
  return End(asked.ok() ? std::move(outcome) : std::move(asked), timeline);
}

Status Checkpoints::CompleteAlone(Timeline& timeline) {
  if (saver_ == nullptr) return {};
  Status outcome = saver_->Join();
  if (outcome.ok() && comm_.world() > 1)
    outcome = Status::Error(OFFLOAD_COMM_FAILED,
                            "rank %d: later queued work failed before all ranks had written; the "
                            "save was given up",
                            comm_.rank());
  if (outcome.ok()) outcome = PublishOnce();
  (void)End(std::move(outcome), timeline);
  return {};
}

// Reports the outcome for the save's ticket. Returns a failure that concerns more than files.
Status Checkpoints::End(Status outcome, Timeline& timeline) {
  (void)saver_->Join();
  if (!outcome.ok()) RemoveOwnDirectory();
  saver_.reset();
  directory_.reset();
  if (!outcome.ok()) {
    context_.Log(OFFLOAD_LOG_ERROR, outcome.message().c_str());
    timeline.Report(sequence_, outcome);
  }
  if (ConcernsFilesOnly(outcome)) outcome = {};
  timeline.Release(outcome);
  return outcome;
}

// Tries to publish once only: after an exception half way a second attempt might find nothing left
// to publish.
Status Checkpoints::PublishOnce() {
  if (std::exchange(publishing_, true))
    return Status::Error(OFFLOAD_INTERNAL, "a save was given up after an exception at its end");
  return CatchBadAlloc("save", [this] { return Publish(); });
}

// All work before the rename prepares it, so that after a crash either the whole checkpoint has its
// name, or no checkpoint has.
Status Checkpoints::Publish() {
  const ProfilerRange range("publish save");
  system::Files& files = context_.files();
  const std::string& path = directory_->path();
  HYBRIDOPT_TRY(checkpoint::SyncDirectory(files, path));
  HYBRIDOPT_ASSIGN(const checkpoint::Manifest manifest, WholeManifest());
  HYBRIDOPT_ASSIGN(const std::string text, checkpoint::EncodeManifest(manifest));
  HYBRIDOPT_TRY(checkpoint::WriteSmallFile(files, path + "/" + checkpoint::kManifestFile, text));
  HYBRIDOPT_TRY(checkpoint::SyncDirectory(files, path));
  return directory_->Publish();
}

// Merges rank 0's own part with those that the other ranks have written beside their files.
Result<checkpoint::Manifest> Checkpoints::WholeManifest() {
  std::vector<checkpoint::Manifest> parts;
  parts.push_back(saver_->TakeManifest());
  system::Files& files = context_.files();
  const auto world = static_cast<uint32_t>(comm_.world());
  for (uint32_t rank = 1; rank < world; ++rank) {
    const std::string path = directory_->path() + "/" + PartFileName(rank, world);
    HYBRIDOPT_ASSIGN(const std::string text,
                     checkpoint::ReadSmallFile(files, path, checkpoint::kManifestBytesMax));
    HYBRIDOPT_ASSIGN(checkpoint::Manifest part, checkpoint::ParseManifest(text));
    parts.push_back(std::move(part));
    const int error = checkpoint::Uninterrupted([&] { return files.Remove(path); });
    if (error != 0) return checkpoint::IoError("remove", path, error);
  }
  return checkpoint::MergeManifests(std::move(parts));
}

// ----------------------------------------------------------------------------------------- load --

Status Checkpoints::Load(const LoadRequest& request, EventHandle ready, Timeline& timeline,
                         uint64_t sequence) {
  HYBRIDOPT_TRY(Complete(timeline));
  const ProfilerRange range("load");
  std::optional<Loader> loader;
  Status status;
  HYBRIDOPT_TRY(Prepare(request, &loader, &status));
  if (!status.ok()) return Refuse(std::move(status), timeline, sequence);
  HYBRIDOPT_TRY(agreement_.DoTogether([&] { return loader->Replace(ready); }, &status));
  if (status.ok()) {
    loader->SetCounts(step_counts_);
    return {};
  }
  int32_t replaced = loader->has_replaced() ? 1 : 0;
  HYBRIDOPT_TRY(comm_.AgreeOnMax(&replaced, 1));
  if (replaced == 0) return Refuse(std::move(status), timeline, sequence);
  return Status::Error(status.code(),
                       "state was being replaced when it failed, and is a mixture now: %s",
                       status.message().c_str());
}

// Reports a load that was refused: no rank has changed anything.
Status Checkpoints::Refuse(Status refusal, Timeline& timeline, uint64_t sequence) {
  context_.Log(OFFLOAD_LOG_ERROR, refusal.message().c_str());
  timeline.Report(sequence, refusal);
  return ConcernsFilesOnly(refusal) ? Status() : refusal;
}

// Makes every check that may refuse the load, on all ranks, before one of them changes anything.
// Returns an error if the ranks could not communicate.
Status Checkpoints::Prepare(const LoadRequest& request, std::optional<Loader>* loader,
                            Status* refusal) {
  std::vector<int32_t> known;
  const auto open = [&]() -> Status {
    loader->emplace(context_, table_, shape_, locator_, request);
    HYBRIDOPT_TRY((*loader)->Open());
    known = (*loader)->Known();
    return {};
  };
  HYBRIDOPT_TRY(agreement_.DoTogether([&] { return CatchBadAlloc("load", open); }, refusal));
  if (!refusal->ok()) return {};
  HYBRIDOPT_TRY(AgreeOnCheckpoint(**loader, &known, refusal));
  if (!refusal->ok()) return {};
  const auto verify = [&]() -> Status {
    HYBRIDOPT_TRY((*loader)->CheckAllKnown(known));
    return (*loader)->Verify();
  };
  return agreement_.DoTogether([&] { return CatchBadAlloc("load", verify); }, refusal);
}

// Checks that all ranks read the same checkpoint. Writes into `known` which of its params at least
// one rank has.
Status Checkpoints::AgreeOnCheckpoint(const Loader& loader, std::vector<int32_t>* known,
                                      Status* refusal) const {
  const auto fingerprint = static_cast<int32_t>(loader.fingerprint());
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
