// BackgroundSave: the save that runs beside an optimizer's other work, from its place on the
// timeline to its end. All code that ends a save is here. The saver's thread only reads and writes,
// and tells its owner, which is this object, how far it has come.
//
//   timeline        Begin | other work | a round | a round | a round: publish, report, release
//   saver's thread        | read what is borrowed | read the rest | write |
//                                                 |               |       Written
//                                                 |               no step waits any more
//                                                 BorrowedRead: no stream waits any more
//
// A turn of the timeline ends the save, because only turns may call comm functions: all ranks must
// call them in the same order. While a save runs all ranks meet in rounds. The result of a round,
// and so the next action, is the same on all ranks:
//
//   all ranks have written                 the end
//   all are at a step and have read        the step, as without a save
//     all that it will overwrite
//   else                                   another round
//
// A rank that has nothing else to do, or waits for its own disk, takes part in rounds at an
// interval. So one disk may be much slower than the others, and only a rank that has died causes a
// timeout. All other work on files is done by Agreement::DoTogether, which has rounds of its own.
//
// All functions run in turns of the timeline, except those of Saver::Owner.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/function_ref.h"
#include "checkpoint/pending_directory.h"
#include "comm/comm.h"
#include "machine/timeline.h"
#include "save/agreement.h"
#include "save/saver.h"

namespace hybridopt {

class BackgroundSave : private Saver::Owner {
 public:
  BackgroundSave(Context& context, const Comm& comm, const Agreement& agreement)
      : context_(context), comm_(comm), agreement_(agreement) {}

  // Begins the save with this sequence number. No other save may be running. All ranks agree on one
  // directory; an error means that no rank has begun.
  Status Begin(FunctionRef<Result<std::unique_ptr<Saver>>()> lay_out, Timeline& timeline,
               uint64_t sequence);

  // The capture that a step must not overtake; NULL if no save runs.
  Capture* capture() const { return saver_ != nullptr ? &saver_->capture() : nullptr; }

  // These return at once if no save runs. They return an error only if more than the save's files
  // has failed.

  // To be called before every step, with the params' addresses in it.
  Status BeforeStep(std::span<const Addresses> addresses);
  // To be called before other work that changes state or the params' memory.
  Status AwaitCapture();
  // Waits until the save has read all borrowed memory. Returns false if the save borrows none.
  Result<bool> AwaitBorrowed();
  // Waits for the end of the save, before the ranks do other work together.
  Status AwaitEnd();
  // The timeline calls this (Timeline::Settle). It is one round of the ranks; or the end of the
  // save, if later work has failed and comm functions may no longer be called.
  Status Settle(bool failure);

 private:
  void BorrowedRead() override;
  void Written() override;

  bool BorrowsElsewhere(std::span<const Addresses> addresses) const;
  Status MakeDirectory(FunctionRef<Result<std::unique_ptr<Saver>>()> lay_out, std::string* path,
                       Status* failure);
  Status Meet(bool at_step, bool* step);
  void AwaitWritten(int64_t timeout_ns);
  Status EndTogether();
  Status EndAlone();
  Status End(Status outcome);
  Status RemoveDirectory();
  void RemoveOwnDirectory();
  Status PublishOnce();
  Status Publish();
  Result<checkpoint::Manifest> WholeManifest();

  Context& context_;
  const Comm& comm_;
  const Agreement& agreement_;

  // The state of the running save.
  Timeline* timeline_ = nullptr;
  uint64_t sequence_ = 0;
  std::optional<checkpoint::PendingDirectory> directory_;
  bool publishing_ = false;  // Publish was called; it is not called again
  std::mutex mutex_;
  std::condition_variable written_changed_;
  std::atomic<bool> written_ = false;  // or the write has failed; set with mutex_ held
  // The last member, so that it is destroyed first: until then its thread calls the owner.
  std::unique_ptr<Saver> saver_;  // NULL: no save runs
};

}  // namespace hybridopt
