// EarlyUpdates: updates chunks before their step is called, while the backward pass still runs. It
// assumes what that step will be: every param has the gradient that the host holds; groups and step
// counts are the present ones; grad_scale is that of the previous step; the step neither clips nor
// is skipped.
//
//   timeline     offload grads | offload grads | offload grads | step: keep, or undo and update
//   CPU workers                | chunk 9 | chunk 8 | chunk 7 | |
//   up stream                                                  | params of chunk 7, 8, 9
//
// A chunk is *accepted* when the host has all of its gradients and its state, and the memory for
// early updates has room for a copy of its state and for its new params. The workers copy each
// piece of the old state to that memory before they update the piece in place. The params on the
// device do not change, because the backward pass reads them. A step whose request and verdict are
// the assumed ones *keeps* the updates, and copies the new params to the device. Any other work or
// call *undoes* them first: it copies the old state back, and no chunk is accepted until a step has
// ended. So all work except offloads of gradients finds the state as if no chunk had been updated
// early.
//
// The functions are called by the timeline's work, one at a time. While no work is queued, a call
// of the caller may also call Undo.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "machine/context.h"
#include "machine/lanes.h"
#include "place/swap_memory.h"
#include "step/executors/chunk_queue.h"
#include "step/executors/chunk_update.h"

namespace hybridopt {

class EarlyUpdates {
 public:
  // Steps change the plan; between steps EarlyUpdates makes the plan for its own use.
  EarlyUpdates(Context& context, const ParamTable& table, const StateShape& shape, StepPlan& plan,
               Lanes& lanes, const StepCounts& step_counts, ChunkQueue& queue,
               ChunkProgress& progress, const ChunkUpdater& updater);
  ~EarlyUpdates();
  EarlyUpdates(const EarlyUpdates&) = delete;
  EarlyUpdates& operator=(const EarlyUpdates&) = delete;
  // Waits for the workers. To be called before any object that they use is destroyed.
  void Close();

  // Bytes of the memory for early updates, and of the tables.
  static uint64_t RoomBytes(const ParamTable& table, const StateShape& shape);
  static uint64_t Bytes(const ParamTable& table, const StateShape& shape);

  Status Start();    // takes the memory for early updates, at commit
  void UseChunks();  // to be called after the chunks have changed
  bool on() const { return room_.data() != nullptr; }
  void AddNodeBytes(NodeBytes* sum) const { room_.AddNodeBytes(sum); }
  // How many elements to update before the next step. The gradients of this number of elements
  // should be offloaded. Any thread may call this.
  uint64_t elements_wanted() const {
    return on() && quiet_steps_ == 0 ? elements_wanted_.load() : 0;
  }

  // To be called when an offload will bring gradients: begins an assumption, or continues it.
  // Returns false if no chunk is accepted now.
  bool Assume(std::span<const offload_group_t> groups);
  // To be called for each gradient before the offload queues its copies. Accepts the chunks for
  // which this is the last missing gradient, except chunks that the running save has not read yet.
  // If params of these chunks are halves of masters, queues copies of the params; the offload waits
  // for these copies together with its own. `data` is the param's address.
  Status Coming(uint32_t param, void* data, const Capture* capture);
  // Lets the workers begin the accepted chunks: their gradients and params have arrived.
  Status BeginArrived();

  // Undoes all updates that no step has kept, and accepts no more chunks before the next step.
  Status Undo();

  // ---- In a step, in this order. No chunk is updated early from Stop to End.

  // Waits for the chunks that workers have begun. Undoes all updates if the request is not the
  // assumed one. To be called before the plan is made for the request.
  Status Stop(const StepRequest& request);
  void TakeFromQueue();
  // Keeps the updates if the verdict is the assumed one. Otherwise undoes them, gives their chunks
  // back to the queue, and returns false.
  Result<bool> Keep(const Verdict& verdict);
  // Queues the copy of the params of the next kept chunk. Any thread of the step may call this.
  // After a failure it only returns that failure.
  Status SendNext();
  const Status& sent() const { return status_; }  // the failure of SendNext, if there was one
  // Queues the copies of the remaining kept chunks, and waits until all their params are on the
  // device.
  Status Finish(offload_step_result_t* result);
  // To be called when the step has ended without an error: another assumption may begin.
  void End(const StepRequest& request, offload_step_result_t* result);

 private:
  struct Early {
    uint32_t chunk;
    StateAreas old;  // the state as it was
    std::byte* params;
  };
  // The workers' job for one chunk.
  struct Job {
    EarlyUpdates* early;
    ChunkWork work;
    uint32_t number = 0;  // index into chunks_

    void operator()(uint32_t worker) { early->Update(*this, worker); }
    void operator()() { early->AfterUpdate(); }
  };
  // Two jobs: while the workers do one, the next is ready. More jobs would delay other work in the
  // workers' queue.
  static constexpr uint32_t kJobs = 2;
  // Copies to the device use these events in turns. A wait for an event that was recorded again
  // only takes longer.
  static constexpr uint32_t kEvents = 16;
  // After an undo a number of steps get no early updates. This number doubles with each further
  // undo, up to this limit.
  static constexpr uint32_t kMostQuietSteps = 64;

  Status Accept(uint32_t chunk, const Capture* capture);
  void Learn();
  uint64_t Place(uint32_t chunk, Early* early) const;
  Status BringParams(const Early& early);
  bool IsAsAssumed(const StepRequest& request) const;
  WorkerPool::Work NextWork();
  void Update(Job& job, uint32_t worker);
  void AfterUpdate();
  void AwaitWorkers();
  Status Restore();
  Status Send(const Early& early, EventHandle written);
  void Forget();
  uint64_t ElementsOf(const Early& early) const {
    return plan_.chunks().chunks[early.chunk].element_count;
  }

  Context& context_;
  Device& device_;
  const ParamTable& table_;
  const StateShape& shape_;
  StepPlan& plan_;
  Lanes& lanes_;
  const StepCounts& step_counts_;
  ChunkQueue& queue_;
  ChunkProgress& progress_;
  const ChunkUpdater& updater_;
  const uint64_t fork_generation_;
  PinnedRoom room_;
  uint64_t room_bytes_ = 0;
  std::array<EventHandle, kEvents> written_{};

  // The assumption. UseChunks reserves the capacity of all lists.
  bool assumed_ = false;
  bool closed_ = false;                    // an undo has happened since the last step
  std::atomic<uint32_t> quiet_steps_ = 0;  // the coming steps without early updates
  uint32_t next_quiet_steps_ = 1;          // quiet_steps_ after the next undo
  double grad_scale_ = 1;                  // of the last step
  StepRequest request_;
  float grad_factor_ = 1;
  std::vector<Coefficients> coefficients_;
  std::vector<uint32_t> first_chunk_;  // per param: its first chunk
  std::vector<uint32_t> missing_;      // per chunk: gradients that have not arrived
  uint64_t used_bytes_ = 0;            // of the memory for early updates
  uint64_t accepted_elements_ = 0;
  std::vector<Early> chunks_;     // accepted; during a step: updated
  uint64_t undone_elements_ = 0;  // since the last step
  // A gradient that is offloaded but not used early delays other copies. So at most as many
  // elements are wanted as the workers have been able to update.
  std::atomic<uint64_t> elements_wanted_ = UINT64_MAX;

  // The workers' progress. Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable rested_;
  uint32_t ready_ = 0;  // chunks that workers may begin
  uint32_t begun_ = 0;
  uint32_t ended_ = 0;
  std::vector<Job> jobs_;
  WorkerPool::Job job_ = 0;  // the last job that was begun

  // For the step that keeps updates. Guarded by send_mutex_.
  std::mutex send_mutex_;
  bool kept_ = false;
  uint32_t sent_ = 0;
  uint64_t sent_bytes_ = 0;
  Status status_;  // the outcome of SendNext
};

}  // namespace hybridopt
