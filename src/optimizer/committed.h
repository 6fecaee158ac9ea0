// Committed: everything that an optimizer has from commit on: its memory, the parts that work with
// this memory, the queued requests, and the timeline that runs them.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "comm/comm.h"
#include "machine/context.h"
#include "machine/host_norm_sums.h"
#include "machine/lanes.h"
#include "machine/timeline.h"
#include "move/master_fill.h"
#include "move/mover.h"
#include "move/residence_change.h"
#include "optimizer/plan.h"
#include "place/state_memory.h"
#include "save/checkpoints.h"
#include "state/lifecycle.h"
#include "state/param_table.h"
#include "state_io/change_log.h"
#include "state_io/change_reader.h"
#include "step/step.h"

namespace hybridopt {

// The content of one slot of the timeline. A request of std::monostate does nothing.
using Request = std::variant<std::monostate, StepRequest*, MoveRequest, ResidenceRequest,
                             SaveRequest, LoadRequest>;

struct Committed {
  // Takes the memory and makes everything except the timeline. The state has no values yet.
  static Result<std::unique_ptr<Committed>> Make(Context& context, const ParamTable& table,
                                                 const Comm& comm,
                                                 const offload_optimizer_options_t& options,
                                                 StateShape shape, Arrangement decided);
  Committed(Context& context, const ParamTable& table, StateShape shape, Arrangement decided);
  ~Committed();

  // Pins the state, or adds a note to the context that says why it is not pinned.
  Status PinForStreams();
  // Finds state where it is after the work that has run so far.
  StateLocator Locator() const { return {table, shape, residence, *memory, *swap}; }
  // To be called after `decided` has changed.
  void CountStateBytes();
  // The bytes on each NUMA node. No work may be queued, because it might move the memory.
  NodeBytes FoundNodeBytes() const;

  Context& context;
  const ParamTable& table;

  const StateShape shape;
  Arrangement decided;              // as the calls so far have decided it
  uint64_t residence_sequence = 0;  // the last call that changed `decided`
  Residence residence;              // the timeline's: as it is after the work that has run
  ChunkTable chunks;                // the same

  std::unique_ptr<StateMemory> memory;
  std::unique_ptr<SwapMemory> swap;
  std::unique_ptr<HostNormSums> host_norm_sums;
  StepCounts step_counts;
  std::unique_ptr<ChangeLog> changes;
  ChangeTable change_table;
  std::unique_ptr<StepPipeline> pipeline;
  std::unique_ptr<MasterFill> master_fill;
  std::unique_ptr<Mover> mover;
  std::unique_ptr<ResidenceChanger> residence_changer;
  std::unique_ptr<Checkpoints> checkpoints;
  std::unique_ptr<Lanes> lanes;  // declared after all memory that its streams may use
  std::unique_ptr<Lifecycle> lifecycle;

  std::array<Request, Timeline::kCapacity> requests;
  std::array<StepRequest, StepPipeline::kMaxQueuedSteps> steps;  // used in turns
  std::atomic<uint64_t> steps_queued = 0;                        // since commit
  std::atomic<uint64_t> steps_done = 0;
  std::atomic<uint64_t> last_step = 0;  // the sequence number of the last step

  std::vector<uint32_t> all_ids;
  std::optional<uint32_t> partial_param;  // the first param with only a part of its tensor
  std::vector<bool> momentum_free;        // per group: committed without a momentum_buffer
  bool device_memory_held = true;         // as of the calls made so far
  std::atomic<uint64_t> planned_device_bytes = 0;
  std::atomic<uint64_t> pinned_state_bytes = 0;  // held for the device's ring
  ByTier<uint64_t> state_bytes;                  // of the elements on each tier, without padding

  std::unique_ptr<Timeline> timeline;  // the destructor ends its work first

 private:
  Status TakeMemory(const std::vector<std::string>& disk_paths);
  void MakeParts(const Comm& comm, const offload_optimizer_options_t& options);
  void FillTables();
};

}  // namespace hybridopt
