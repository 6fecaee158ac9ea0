// Loader: loads the state of a checkpoint into an optimizer. The optimizer that saved it may have
// had another world, sharding or device fraction. Verify reads and checks all bytes and changes
// nothing; only then Replace writes. So the files are read twice, unless the caller passes
// NO_VERIFY. There are two reasons. Users who offload state have no memory for a second copy of it.
// And if Replace found a damaged block, the state that it had already overwritten would be lost.
// Before Replace uses a unit, it checks that the unit has the bytes that Verify has read.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/open_files.h"
#include "machine/context.h"
#include "machine/pinned_room.h"
#include "place/state_locator.h"
#include "save/load/load_sources.h"
#include "save/load/load_units.h"
#include "save/load/load_verifier.h"
#include "state/step_counts.h"
#include "state_io/state_writer.h"
#include "state_io/transfer.h"

namespace hybridopt {

// A queued load.
struct LoadRequest {
  std::string path;
  uint32_t flags = 0;
  uint32_t io_depth = 0;  // above 0
  offload_progress_function_t progress = nullptr;
  void* progress_user = nullptr;
  std::vector<ParamLocation> locations;  // per param
  std::vector<double> first_moments;     // per group: the initial value of the first moments
};

class Loader {
 public:
  Loader(Context& context, const ParamTable& table, const StateShape& shape,
         const StateLocator& locator, const LoadRequest& request)
      : context_(context),
        table_(table),
        locator_(locator),
        request_(request),
        sources_(table, locator_, request.flags),
        units_(table, locator_, sources_),
        writer_(transfer_, table, shape, locator_, StateWriter::Values::kStay) {}

  // Opens the checkpoint and compares its content with this optimizer.
  Status Open();
  const LoadSources& sources() const { return sources_; }
  // Takes the memory for reading, and compares the hashes of all blocks that will be read.
  Status Verify();

  // Writes state and params, after the caller's work before `ready`. After a failure they may be
  // partly old and partly new.
  Status Replace(EventHandle ready);
  bool has_replaced() const { return writer_.has_written(); }
  // Sets the step counts to those of the checkpoint.
  void SetCounts(StepCounts& step_counts) const;

 private:
  void CompareProducts() const;
  Status TakeMemory();
  checkpoint::BlockReader ReaderOf(const std::vector<checkpoint::Extent>& extents);
  Status FillMoments();
  void Progress(uint64_t bytes);
  bool Has(uint32_t flag) const { return (request_.flags & flag) != 0; }

  Context& context_;
  const ParamTable& table_;
  const StateLocator locator_;
  const LoadRequest& request_;
  LoadSources sources_;
  LoadUnits units_;
  std::optional<LoadVerifier> verifier_;  // none if the caller passes NO_VERIFY

  std::optional<checkpoint::OpenFiles> files_;
  uint32_t blocks_ = 0;  // the number of blocks in memory_
  PinnedRoom memory_;
  Transfer transfer_;  // until it is destroyed its copies may read memory_
  StateWriter writer_;
  uint64_t bytes_done_ = 0;
  uint64_t bytes_total_ = 0;
};

}  // namespace hybridopt
