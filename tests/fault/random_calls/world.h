// Contexts, optimizers and stashes with their models, and the code that all random calls share: it
// chooses the handle, address or number for a call, and checks the outcome.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "../../random.h"
#include "../../temporary_directory.h"
#include "model.h"
#include "move_rules.h"

namespace hybridopt::fault::random_calls {

struct Call;

class World {
 public:
  explicit World(uint64_t number);
  explicit World(const Random& drawn);

  // Makes one call, drawn from EveryCall().
  void MakeCall();
  void DestroyAll();

  // Checks of outcomes. Every failure must have a text and a fitting status; returns whether the
  // call succeeded.
  bool Judge(int32_t status, bool doomed = false);
  // The same for a call with this handle; after a refusal the model must still be right.
  bool Judge(int32_t status, offload_optimizer_t optimizer);
  bool Judge(int32_t status, offload_context_t context);
  void Compare(offload_optimizer_t optimizer, const OptimizerModel& model);
  void CompareStats(const offload_stats_t& stats, const OptimizerModel& model);
  void CompareStats(offload_optimizer_t optimizer);
  const char* call_name() const;

  // Notes a call that `model` has queued.
  void Queued(OptimizerModel& model, offload_ticket_t ticket);
  // Waits until no work of a context is queued, so that its arrays may be written.
  void Settle(offload_context_t context);
  // No memory of a doomed context is used: queued work may still read a freed gradient there.
  bool IsDoomed(offload_context_t context) const;
  // The model, or nullptr for a handle that is not live.
  OptimizerModel* Find(offload_optimizer_t optimizer);
  ContextModel* Find(offload_context_t context);

  // Draws input: mostly good, sometimes bad.
  offload_context_t PickContext();
  offload_optimizer_t PickOptimizer();
  offload_stash_t PickStash();
  offload_stream_t PickStream(offload_context_t context);
  // A ticket of this optimizer, of any optimizer, none, or noise.
  offload_ticket_t PickTicket(offload_optimizer_t optimizer);
  // An address of `bytes` bytes in one of `arrays`, or a bad address. The host device cannot
  // recognize every bad address (a wild pointer), so it gets only those that it can recognize.
  void* Pointer(const std::vector<void*>& arrays, uint64_t bytes, int32_t device_kind);
  void* Garbage();
  double Number();
  uint32_t StructSize(size_t bytes);

  Random random;
  std::map<offload_context_t, ContextModel> contexts;
  std::map<offload_optimizer_t, OptimizerModel> optimizers;
  std::map<offload_stash_t, StashModel> stashes;
  std::vector<void*> dead_contexts, dead_optimizers, dead_streams, dead_stashes;
  std::vector<std::pair<offload_context_t, void*>> extra_arrays;  // arrays that no optimizer uses
  std::vector<unsigned char> host_array = std::vector<unsigned char>(kArrayBytes);

  const TemporaryDirectory directory;  // checkpoints are named by their numbers
  uint64_t saved = 0;                  // the number of used names
  uint64_t saved_steps_max = 0;        // no checkpoint holds a higher count of steps
  std::atomic<uint64_t> progress_calls = 0;
  std::atomic<uint64_t> stream_runs = 0;

  // Counts of what the test has covered: calls made so far, by function and status.
  using Tally = std::map<std::pair<std::string, int32_t>, uint64_t>;
  Tally tally;
  std::array<uint64_t, kMoves.size()> moved{};  // params that a move really moved
  uint64_t loaded = 0;                          // loads that a call has waited for
  uint64_t popped = 0;                          // stash tickets whose bytes have been compared

 private:
  // Frees a gradient that is bound. On the simulated device queued work then fails; on the host the
  // program would crash.
  void FreeBoundGradient();

  const Call* call_ = nullptr;  // the running one
  offload_ticket_t last_ticket_ = 0;
};

// The statuses of a load from a path without a checkpoint, or with another model's; a wait for the
// load returns them.
inline bool IsOfATransfer(int32_t status) {
  return status == OFFLOAD_IO_FAILED || status == OFFLOAD_CHECKPOINT_MISMATCH;
}

}  // namespace hybridopt::fault::random_calls
