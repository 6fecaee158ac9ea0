// Checkpoints: an optimizer's saves and loads, and what its ranks agree on for them. All functions
// run in turns of the timeline; the saver has a thread of its own.
//
// A save begins in its order on the timeline and then runs in the background. A later turn of the
// timeline completes it, because only turns may call comm functions: all ranks must call them in
// the same order. While a save runs all ranks meet in rounds. The result of a round, and so the
// next action, is the same on all ranks:
//
//   all ranks have written                 the completion
//   all are at a step and have read        the step, as without a save
//     all that it will overwrite
//   else                                   another round
//
// A rank that has nothing to do, or waits for its own disk, takes part in rounds at an interval. So
// one disk may be slower than the others without a limit, and only a rank that has ended causes a
// timeout. All other work on files is done by Agreement::DoTogether, which has rounds of its own.
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

  // UNSUPPORTED if the names and shapes of the params do not fit into the head of a file.
  Status CheckRoom() const;

  // Begins a save, which completes in the background. A failure that concerns only the files is
  // reported to the timeline; a returned error poisons it.
  Status Save(SaveRequest request, EventHandle ready, Timeline& timeline, uint64_t sequence);

  // Loads, or changes nothing. A failure that concerns only the files is reported to the timeline;
  // a returned error poisons it.
  Status Load(const LoadRequest& request, EventHandle ready, Timeline& timeline, uint64_t sequence);

  // To be called before every step.
  Status BeforeStep(Timeline& timeline);
  // The capture that a step must not overtake; NULL if no save runs.
  Capture* capture() const { return saver_ != nullptr ? &saver_->capture() : nullptr; }
  // To be called before other work that changes state or the params' memory.
  Status AwaitCapture(Timeline& timeline);
  // Waits until the running save has read all that it borrows; false if no save borrows anything.
  Result<bool> AwaitBorrowed(Timeline& timeline);

  // One round of the ranks while the timeline has no other work.
  Status Settle(Timeline& timeline);
  // The same after later work failed, when other ranks can no longer be called.
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
  bool publishing_ = false;  // Publish has been tried, and is not tried again
};

}  // namespace hybridopt
