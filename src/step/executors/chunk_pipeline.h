// ChunkPipeline: the cpu's part of one step on a device with memory of its own, chunk by chunk
// through the staging ring.
//
//   down stream  | 0 | 1 | 2 | 3 |                  gradients (and split params) to the host
//   worker 0         | 0 | 1 | 2 | 3 |              its part of the update of each chunk
//   worker 1         | 0 |  1  | 2 | 3 |            at its own pace
//   up stream            | 0 |   | 1 | 2 | 3 |      params to the device
//
// A chunk is *taken* from the queue (chunk_queue.h) when its slot's grads half is free, *given* to
// the workers when its gradients have landed and the slot's params half is free too, *sent* up when
// all workers have done their part, and *retired* when its params are there. A param whose masters
// are split comes down with its gradient: it is their upper halves. It takes the params half of the
// slot, so in such a step a chunk is taken only when the slot's last one is retired.
// The worker that does the last part of a chunk moves the pipeline on: it sends that chunk, brings
// down the next one, and gives what has landed, ahead of the other workers as far as the ring
// reaches. The step's own thread sleeps meanwhile: it waits for the device when the workers have
// nothing to do. So nobody waits for a thread whose CPU is needed by something else for a while.
//
// One thread at a time acts: the step's while nothing is given that is not sent, the worker that is
// last otherwise.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/function_ref.h"
#include "machine/context.h"
#include "machine/lanes.h"
#include "step/executors/chunk_queue.h"
#include "step/executors/chunk_update.h"

namespace hybridopt {

class ChunkPipeline {
 public:
  ChunkPipeline(Context& context, const ParamTable& table, const StepPlan& plan, Lanes& lanes,
                ChunkQueue& queue, const ChunkUpdater& updater);
  void UseRing();  // says that the lanes have another one

  // Of a new step, before its verdict: forgets the last one's chunks.
  void Reset() { taken_ = given_ = sent_ = retired_ = 0; }
  // Takes a chunk ahead; false where the ring is full or the queue has no more.
  bool TakeAhead();
  // Copies that Prefetch will queue.
  uint64_t PrefetchCopies() const;
  // Queues the gradients of what was taken ahead. What Run does with them comes later, or never:
  // then AwaitPrefetched ends it.
  Status Prefetch(offload_step_result_t* result);
  Status AwaitPrefetched();
  // Does the rest, until the queue has no more chunks, and calls retired(chunk) for each that it
  // took, in order; maybe on a worker. `step` is the workers' until this returns.
  Status Run(const HostStep& step, FunctionRef<Status(uint32_t)> retired,
             offload_step_result_t* result);

 private:
  // A slot of the ring, with the chunk that the workers are given in it and the one that was taken
  // last, whose gradients may come down while the other's params go up.
  struct Slot {
    ChunkPipeline* pipeline;
    WorkPieces pieces;
    uint32_t chunk = 0;
    uint32_t taken = 0;

    void operator()(uint32_t worker) { pipeline->Update(*this, worker); }
    void operator()() { pipeline->AfterUpdate(); }
  };
  struct Task {
    const HostStep& step;
    FunctionRef<Status(uint32_t)> retired;
    offload_step_result_t* result;
  };

  // The step's own thread.
  Status GiveAll();
  Status AwaitNext();
  Status GiveNext();
  void AwaitWorkers();
  // Workers.
  void Update(Slot& slot, uint32_t worker);
  void AfterUpdate();
  Status MoveOn(uint32_t number);
  Result<bool> MayRetire();
  Result<bool> MayGive();
  // Both.
  WorkerPool::Work PrepareNext();
  Status Retire();
  bool Take();
  Status TakeAndBringDown();
  Status BringDown(uint32_t number, offload_step_result_t* result);
  Status SendUp(uint32_t number);

  uint32_t SlotOf(uint32_t number) const { return number % lanes_.ring().slots(); }
  // Whether the next chunk's slot is free: whoever had it is retired.
  bool HasSlot() const { return given_ < retired_ + lanes_.ring().slots(); }

  Context& context_;
  Device& device_;
  const ParamTable& table_;
  const StepPlan& plan_;
  Lanes& lanes_;
  ChunkQueue& queue_;
  const ChunkUpdater& updater_;
  std::vector<Slot> slots_;

  // Of the running step. Chunks are numbered as they are taken, and use the slots in turn.
  std::optional<Task> task_;
  uint32_t taken_ = 0;  // so far
  uint32_t given_ = 0;
  uint32_t sent_ = 0;
  uint32_t retired_ = 0;
  Status status_;            // the first failure on a worker: from then on nothing is given
  WorkerPool::Job job_ = 0;  // of the chunk given last
  int64_t busy_since_ns_ = 0;
  int64_t idle_since_ns_ = 0;
  std::atomic_flag busy_;  // something is given that is not sent
};

}  // namespace hybridopt
