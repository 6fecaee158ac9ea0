// Checkpoints: an optimizer's saves and loads, and what its ranks agree on for them. Everything
// here runs on the timeline's thread; the saver has one of its own.
//
// A save begins where it stands on the timeline, goes on in the background, and is completed later
// on the timeline's thread again, because only there may other ranks be asked: their calls must
// come in the same order everywhere. So while a save runs all ranks meet in rounds, and what comes
// next is the same on all:
//
//   nobody is writing any more             the completion
//   everybody is at a step and has read    the step, as without a save
//     all that it would overwrite
//   else                                   another round
//
// A rank that has nothing to do, or waits for its own disk, takes part now and then: a disk may be
// slower than others for as long as it likes, and only a rank that is gone is missed. All other
// work on files is done together (agreement.h), which has rounds of its own.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/pending_directory.h"
#include "comm/comm.h"
#include "machine/timeline.h"
#include "save/agreement.h"
#include "save/loader.h"
#include "save/saver.h"

namespace hybridopt {

class Checkpoints {
 public:
  Checkpoints(Context& context, const ParamTable& table, const StateShape& shape,
              const StateLocator& locator, StepCounts& step_counts, const Comm& comm)
      : context_(context),
        table_(table),
        shape_(shape),
        locator_(locator),
        step_counts_(step_counts),
        comm_(comm),
        agreement_(comm) {}

  // UNSUPPORTED if a save could not tell all names and shapes in its file.
  Status CheckRoom() const;

  // Begins a save, which completes in the background. What concerns only the files is reported
  // to the timeline; what comes back is poison.
  Status Save(SaveRequest request, EventHandle ready, Timeline& timeline, uint64_t sequence);

  // Loads, or changes nothing. What concerns only the files is reported to the timeline; what comes
  // back is poison.
  Status Load(const LoadRequest& request, EventHandle ready, Timeline& timeline, uint64_t sequence);

  // To be called before every step.
  Status BeforeStep(Timeline& timeline);
  // What a step must not overtake; NULL if no save is running.
  Capture* capture() const { return saver_ != nullptr ? &saver_->capture() : nullptr; }
  // Before anything else touches state, or the params' memory.
  Status AwaitCapture(Timeline& timeline);
  // Until a running save has read what is the caller's; false if none borrows anything.
  Result<bool> AwaitBorrowed(Timeline& timeline);

  // A round of the ranks while nothing else is to be done.
  Status Settle(Timeline& timeline);
  // The same after later work failed. Other ranks can then no longer be asked.
  Status CompleteAlone(Timeline& timeline);

 private:
  Status Refuse(Status refusal, Timeline& timeline, uint64_t sequence);
  Status Prepare(const LoadRequest& request, std::optional<Loader>* loader, Status* refusal);
  Status AgreeOnCheckpoint(const Loader& loader, std::vector<int32_t>* known,
                           Status* refusal) const;
  SavePoint PointOf(EventHandle ready) const;
  Status Begin(SaveRequest request, EventHandle ready, std::string* path, Status* failure);
  Status Meet(bool at_step, bool* step, Timeline& timeline);
  Status Complete(Timeline& timeline);
  Status CompleteAgreed(Timeline& timeline);
  Status RemoveDirectory();
  void RemoveOwnDirectory();
  Status Publish();
  Status PublishOnce();
  Result<checkpoint::Manifest> WholeManifest();
  Status End(Status outcome, Timeline& timeline);

  Context& context_;
  const ParamTable& table_;
  const StateShape& shape_;
  const StateLocator locator_;
  StepCounts& step_counts_;
  const Comm& comm_;
  const Agreement agreement_;

  std::unique_ptr<Saver> saver_;  // of the running save
  std::optional<checkpoint::PendingDirectory> directory_;
  uint64_t sequence_ = 0;
  bool publishing_ = false;  // has been tried, and is not tried again
};

}  // namespace hybridopt
