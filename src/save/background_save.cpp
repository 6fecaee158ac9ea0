#include "save/background_save.h"

#include <chrono>
#include <utility>
#include <vector>

#include "checkpoint/file_io.h"
#include "save/file_failure.h"
#include "save/optimizer_manifest.h"

namespace hybridopt {

using checkpoint::PendingDirectory;

// ---------------------------------------------------------------------------------------- begin --

Status BackgroundSave::Begin(FunctionRef<Result<std::unique_ptr<Saver>>()> lay_out,
                             Timeline& timeline, uint64_t sequence) {
  std::string path;  // the path of the pending directory
  Status failure;    // of this rank; the save's end tells it to the other ranks
  if (Status status = MakeDirectory(lay_out, &path, &failure); !status.ok()) {
    RemoveOwnDirectory();  // in case the ranks could not do it together
    saver_.reset();
    directory_.reset();
    return status;
  }
  timeline_ = &timeline;
  sequence_ = sequence;
  publishing_ = false;
  written_ = false;
  // Hold comes before Start: the saver may have ended before Start returns.
  timeline.Hold(sequence, comm_.world() == 1 ? 0 : agreement_.RoundNs(), capture()->borrows());
  saver_->Start(std::move(path), std::move(failure), *this);
  return {};
}

// Rank 0 makes the directory and sends the directory's number to the other ranks.
Status BackgroundSave::MakeDirectory(FunctionRef<Result<std::unique_ptr<Saver>>()> lay_out,
                                     std::string* path, Status* failure) {
  const auto prepare = [&]() -> Status {
    HYBRIDOPT_ASSIGN(saver_, lay_out());
    if (comm_.rank() != 0) return {};
    HYBRIDOPT_ASSIGN(directory_, PendingDirectory::Make(context_.files(), saver_->request().path));
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
    directory_.emplace(PendingDirectory::Join(context_.files(), saver_->request().path, told));
    *path = directory_->path();
    return {};
  });
  return {};
}

// ------------------------------------------------------------------------ on the saver's thread --

void BackgroundSave::BorrowedRead() { timeline_->ReleaseStreams(); }

void BackgroundSave::Written() {
  saver_->capture().End();
  timeline_->ReleaseStreams();
  {
    std::lock_guard lock(mutex_);
    written_ = true;
  }
  written_changed_.notify_all();
  timeline_->Wake();
}

// --------------------------------------------------------------------------------------- rounds --

// Waits for at most timeout_ns; a negative timeout waits without limit.
void BackgroundSave::AwaitWritten(int64_t timeout_ns) {
  const auto written = [this] { return written_.load(); };
  std::unique_lock lock(mutex_);
  if (timeout_ns < 0)
    written_changed_.wait(lock, written);
  else
    written_changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), written);
}

// One round of the ranks. *step and the returned status are the same on all ranks.
Status BackgroundSave::Meet(bool at_step, bool* step) {
  int32_t missing[2] = {written_ ? 0 : 1, at_step ? 0 : 1};
  if (Status asked = comm_.AgreeOnMax(missing, 2); !asked.ok()) return End(std::move(asked));
  if (missing[0] == 0) return EndTogether();
  *step = missing[1] == 0;
  return {};
}

// Whether a param that the save borrows has another address by now. A step copies what it
// overwrites, and that is not what the save reads then.
bool BackgroundSave::BorrowsElsewhere(std::span<const Addresses> addresses) const {
  const std::vector<ParamLocation>& locations = saver_->request().locations;
  for (uint32_t id = 0; id < locations.size(); ++id)
    if (saver_->capture().borrows(id) && locations[id].data != addresses[id].data) return true;
  return false;
}

Status BackgroundSave::BeforeStep(std::span<const Addresses> addresses) {
  if (saver_ != nullptr && BorrowsElsewhere(addresses)) HYBRIDOPT_TRY(AwaitBorrowed().status());
  // With one rank the step follows the save chunk by chunk. With several ranks a step that waits
  // for this rank's disk would let the others wait until they time out, so the ranks meet in rounds
  // until the steps of all can put aside what they overwrite.
  for (bool step = false; saver_ != nullptr && !step;) {
    const bool at_step = comm_.world() == 1 || capture()->AwaitRoom(agreement_.RoundNs());
    HYBRIDOPT_TRY(Meet(at_step, &step));
  }
  return {};
}

Status BackgroundSave::AwaitCapture() {
  bool step = false;
  while (saver_ != nullptr && !capture()->AwaitAll(agreement_.RoundNs()))
    HYBRIDOPT_TRY(Meet(false, &step));
  return {};
}

Result<bool> BackgroundSave::AwaitBorrowed() {
  if (saver_ == nullptr || !capture()->borrows()) return false;
  bool step = false;
  while (saver_ != nullptr && !capture()->AwaitBorrowed(agreement_.RoundNs()))
    HYBRIDOPT_TRY(Meet(false, &step));
  return true;
}

Status BackgroundSave::AwaitEnd() {
  for (bool step = false; saver_ != nullptr;) {
    AwaitWritten(agreement_.RoundNs());
    HYBRIDOPT_TRY(Meet(false, &step));
  }
  return {};
}

Status BackgroundSave::Settle(bool failure) {
  bool step = false;
  if (saver_ == nullptr) return {};
  return failure ? EndAlone() : Meet(false, &step);
}

// -------------------------------------------------------------------------------------- the end --

Status BackgroundSave::EndTogether() {
  Status outcome = saver_->Join();
  Status asked = agreement_.OnFailure(&outcome);
  if (asked.ok() && outcome.ok())
    asked = agreement_.DoTogether([this] { return comm_.rank() == 0 ? PublishOnce() : Status(); },
                                  &outcome);
  if (asked.ok() && !outcome.ok()) asked = RemoveDirectory();
  return End(asked.ok() ? std::move(outcome) : std::move(asked));
}

Status BackgroundSave::EndAlone() {
  Status outcome = saver_->Join();
  if (outcome.ok() && comm_.world() > 1)
    outcome = Status::Error(OFFLOAD_COMM_FAILED,
                            "rank %d: later queued work failed before all ranks had written; the "
                            "save was given up",
                            comm_.rank());
  if (outcome.ok()) outcome = PublishOnce();
  // The optimizer is poisoned already, so this failure only ends the save.
  if (Status ended = End(std::move(outcome)); !ended.ok())
    context_.Log(OFFLOAD_LOG_ERROR, ended.message().c_str());
  return {};
}

// Reports the outcome for the save's ticket. Returns the failure if more than the save's files has
// failed.
Status BackgroundSave::End(Status outcome) {
  (void)saver_->Join();
  if (!outcome.ok()) RemoveOwnDirectory();
  saver_.reset();
  directory_.reset();
  if (!outcome.ok()) outcome = ReportFailure(context_, *timeline_, sequence_, std::move(outcome));
  timeline_->Release(outcome);
  return outcome;
}

// If files cannot be removed now, the next save to this path removes them.
void BackgroundSave::RemoveOwnDirectory() {
  if (comm_.rank() == 0 && directory_.has_value())
    (void)CatchBadAlloc("save", [this]() -> Status {
      directory_->Remove();
      return {};
    });
}

// Removes the directory of a failed save. All ranks take part, because rank 0 may need long on a
// slow disk.
Status BackgroundSave::RemoveDirectory() {
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

// Publishes at most once: after an exception in the middle, a second attempt might find no
// directory to publish.
Status BackgroundSave::PublishOnce() {
  if (std::exchange(publishing_, true))
    return Status::Error(OFFLOAD_INTERNAL, "a save was given up after an exception at its end");
  return CatchBadAlloc("save", [this] { return Publish(); });
}

// The rename comes last: after a crash at any point there is either the whole checkpoint under its
// name, or no checkpoint.
Status BackgroundSave::Publish() {
  const TraceRange range(saver_->trace(), TraceRow::kSteps, "publish save");
  system::Files& files = context_.files();
  const std::string& path = directory_->path();
  HYBRIDOPT_TRY(checkpoint::SyncDirectory(files, path));
  HYBRIDOPT_ASSIGN(const checkpoint::Manifest manifest, WholeManifest());
  HYBRIDOPT_ASSIGN(const std::string text, checkpoint::EncodeManifest(manifest));
  HYBRIDOPT_TRY(checkpoint::WriteSmallFile(files, path + "/" + checkpoint::kManifestFile, text));
  HYBRIDOPT_TRY(checkpoint::SyncDirectory(files, path));
  return directory_->Publish();
}

// Merges rank 0's own part with the parts that the other ranks have written beside their files.
Result<checkpoint::Manifest> BackgroundSave::WholeManifest() {
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

}  // namespace hybridopt
