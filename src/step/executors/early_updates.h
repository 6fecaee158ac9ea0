// EarlyUpdates: updates chunks before their step comes, while the backward pass still runs. It
// assumes what that step will be: that every param has the gradient which the host holds, the
// groups and step counts of now, the grad_scale of the step before, no clipping and no skip.
//
//   timeline     offload grads | offload grads | offload grads | step: keep, or undo and update
//   CPU workers                | chunk 9 | chunk 8 | chunk 7 | |
//   up stream                                                  | params of chunk 7, 8, 9
//
// A chunk is *accepted* when the host has all of its gradients and the room has space for it: for
// its state as it was, and for its new params. The workers put each piece of the old state aside
// before they update it in place. The params on the device stay as they are, because the backward
// pass reads them. A step whose request and verdict are those assumed *keeps* the updates, and
// copies the params up. Whatever else comes first *undoes* them: it copies the old state back, and
// accepts no chunk until a step has ended. So all work but offloads of gradients finds the state as
// if nothing had happened.
//
// The functions are called by the timeline's work, one at a time. Undo may also be called by a call
// of the caller's while no work is queued.
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
  // Steps change the plan; EarlyUpdates makes it between them.
  EarlyUpdates(Context& context, const ParamTable& table, const StateShape& shape, StepPlan& plan,
               Lanes& lanes, const StepCounts& step_counts, ChunkQueue& queue,
               ChunkProgress& progress, const ChunkUpdater& updater);
  ~EarlyUpdates();
  EarlyUpdates(const EarlyUpdates&) = delete;
  EarlyUpdates& operator=(const EarlyUpdates&) = delete;

  // Bytes of the room, and of the tables.
  static uint64_t RoomBytes(const ParamTable& table, const StateShape& shape);
  static uint64_t Bytes(const ParamTable& table, const StateShape& shape);

  Status Start();    // takes the room, at commit
  void UseChunks();  // to be called after the chunks have changed
  bool on() const { return room_.data() != nullptr; }
  void AddNodeBytes(NodeBytes* sum) const { room_.AddNodeBytes(sum); }
  // How many elements are to be updated before the next step: those whose gradients should come to
  // the host. Any thread.
  uint64_t elements_wanted() const {
    return on() && quiet_steps_ == 0 ? elements_wanted_.load() : 0;
  }

  // For gradients that an offload is about to bring. Begins an assumption, or goes on with it;
  // false if no chunk is accepted now.
  bool Assume(std::span<const offload_group_t> groups);
  // To be called for each gradient before the offload queues its copies. Accepts the chunks that
  // wait for this gradient last, and queues the copies of their params that are halves of masters:
  // the offload waits for these copies with its own. `data` is the param's address. A chunk that
  // the running save has still to read is not accepted.
  Status Coming(uint32_t param, void* data, const Capture* capture);
  // Lets the workers begin with what has been accepted: its gradients and params have landed.
  Status BeginArrived();

  // Undoes all updates that are not kept, and accepts no more before the next step.
  Status Undo();

  // ---- In a step, in this order. No chunk is updated early from Stop to End.

  // Waits for the chunks that workers have begun. Undoes all if the request is not that assumed. To
  // be called before the plan is made for the request.
  Status Stop(const StepRequest& request);
  void TakeFromQueue();
  // Keeps the updates if the verdict is that assumed. Otherwise undoes them, gives their chunks
  // back to the queue, and returns false.
  Result<bool> Keep(const Verdict& verdict);
  // Queues the params of the next chunk that was kept. Any thread of the step. After a failure it
  // returns that, and queues no more.
  Status SendNext();
  const Status& sent() const { return status_; }  // the failure of SendNext, if there was one
  // Queues the others, and waits until all are on the device.
  Status Finish(offload_step_result_t* result);
  // The step has ended well: another assumption may begin.
  void End(const StepRequest& request, offload_step_result_t* result);

 private:
  struct Early {
    uint32_t chunk;
    StateAreas old;  // the state as it was
    std::byte* params;
  };
  // What the workers do with one chunk.
  struct Job {
    EarlyUpdates* early;
    WorkPieces pieces;
    uint32_t number = 0;  // index into chunks_

    void operator()(uint32_t worker) { early->Update(*this, worker); }
    void operator()() { early->AfterUpdate(); }
  };
  // One chunk is ready when the workers have done another. More would stand before other work.
  static constexpr uint32_t kJobs = 2;
  // Uploads use these in turns: to wait for a later one than needed is right too.
  static constexpr uint32_t kEvents = 16;
  // After an undo some steps get no early updates, twice as many after each undo that follows, and
  // at most these.
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
  bool closed_ = false;                    // since an undo
  std::atomic<uint32_t> quiet_steps_ = 0;  // that get no early updates
  uint32_t next_quiet_steps_ = 1;          // after the next undo
  double grad_scale_ = 1;                  // of the last step
  StepRequest request_;
  float grad_factor_ = 1;
  std::vector<Coefficients> coefficients_;
  std::vector<uint32_t> first_chunk_;  // per param
  std::vector<uint32_t> missing_;      // per chunk: gradients that have not arrived
  uint64_t used_bytes_ = 0;            // of the room
  uint64_t accepted_elements_ = 0;
  std::vector<Early> chunks_;     // accepted, and in a step those that are updated
  uint64_t undone_elements_ = 0;  // since the last step
  // Gradients that come to the host unused take the link from others, so no more are wanted than
  // the workers have shown that they can do.
  std::atomic<uint64_t> elements_wanted_ = UINT64_MAX;

  // How far the workers are. Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable rested_;
  uint32_t ready_ = 0;  // chunks that workers may begin
  uint32_t begun_ = 0;
  uint32_t ended_ = 0;
  std::vector<Job> jobs_;
  WorkerPool::Job job_ = 0;  // that was begun last

  // Of the step that keeps updates. Guarded by send_mutex_.
  std::mutex send_mutex_;
  bool kept_ = false;
  uint32_t sent_ = 0;
  uint64_t sent_bytes_ = 0;
  Status status_;  // of SendNext
};

}  // namespace hybridopt
