// CpuExecutor: the part of one step that the CPU workers do on a device with memory of its own,
// chunk by chunk through the staging ring.
//
//   down stream  | 0 | 1 | 2 | 3 |                  gradients (and split params) to the host
//   worker 0         | 0 | 1 | 2 | 3 |              its part of the update of each chunk
//   worker 1         | 0 |  1  | 2 | 3 |            at its own pace
//   up stream            | 0 |   | 1 | 2 | 3 |      params to the device
//
// A chunk is *taken* from the queue (chunk_queue.h) when the grads half of a slot is free, *given*
// to the workers when its gradients have landed and the params half of the slot is free too, *sent*
// up when all workers have done their part, and *retired* when its params are on the device. A
// param whose masters are split comes down with its gradient, because it is their upper halves. It
// is stored in the params half of the slot, so in such a step a chunk is taken only after the chunk
// before it in that slot has been retired. The worker that does the last part of a chunk moves the
// pipeline on: it sends that chunk, brings the next one down, and gives all chunks that have
// landed, as many as the ring has slots. Meanwhile the step's own thread sleeps; only when the
// workers have no chunk does it wait for the device. So no thread waits for another one whose CPU
// another program uses for a while.
//
// One thread at a time moves the pipeline on: the step's own thread while all given chunks have
// been sent, otherwise the worker that does the last part of a chunk.
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

class CpuExecutor {
 public:
  CpuExecutor(Context& context, const ParamTable& table, const StepPlan& plan, Lanes& lanes,
              ChunkQueue& queue, ChunkProgress& progress, const ChunkUpdater& updater);
  void UseRing();  // to be called after the lanes have got another ring

  // To be called for a new step, before its verdict: forgets the chunks of the step before.
  void Reset() { taken_ = copied_ahead_ = given_ = sent_ = retired_ = 0; }
  // Takes a chunk ahead of the verdict; false if the ring is full or the queue is empty.
  bool TakeAhead();
  // How many copies CopyAhead will queue.
  uint64_t CopiesAhead() const;
  // Queues the copies of the gradients of all chunks that were taken ahead since the last
  // CopyAhead. Then either Run updates these chunks, or, in a step that is skipped,
  // AwaitCopiedAhead waits for the copies.
  Status CopyAhead(offload_step_result_t* result);
  Status AwaitCopiedAhead();
  // Updates chunks until the queue is empty. Tells of each, in order, on this thread or on a
  // worker. The workers use `step` until Run returns.
  Status Run(const HostStep& step, offload_step_result_t* result);

 private:
  // A slot of the ring. `chunk` is the one that was given to the workers in it, `taken` the one
  // that was taken into it last: its gradients may come down while the params of `chunk` go up.
  struct Slot {
    CpuExecutor* executor;
    WorkPieces pieces;
    uint32_t chunk = 0;
    uint32_t taken = 0;
    uint64_t queued_up = 0;  // queued_up_bytes() of the link behind the chunk's copies

    void operator()(uint32_t worker) { executor->Update(*this, worker); }
    void operator()() { executor->AfterUpdate(); }
  };
  struct Task {
    const HostStep& step;
    offload_step_result_t* result;
  };

  // These run on the step's own thread.
  Status GiveAll();
  Status AwaitNext();
  Status GiveNext();
  void AwaitWorkers();
  // These run on a worker.
  void Update(Slot& slot, uint32_t worker);
  void AfterUpdate();
  Status MoveOn(uint32_t number);
  Result<bool> MayRetire();
  Result<bool> MayGive();
  // These run on either.
  WorkerPool::Work PrepareNext();
  Status Retire();
  bool Take();
  Status TakeAndBringDown();
  Status BringDown(uint32_t number, offload_step_result_t* result);
  Status SendUp(uint32_t number);

  uint32_t SlotOf(uint32_t number) const { return number % lanes_.ring().slots(); }
  // Whether the next chunk's slot is free: the chunk before it in that slot has been retired.
  bool HasSlot() const { return given_ < retired_ + lanes_.ring().slots(); }

  Context& context_;
  Device& device_;
  const ParamTable& table_;
  const StepPlan& plan_;
  Lanes& lanes_;
  ChunkQueue& queue_;
  ChunkProgress& progress_;
  const ChunkUpdater& updater_;
  std::vector<Slot> slots_;

  // State of the running step. Chunks are numbered in the order in which they are taken, and use
  // the slots in turn.
  std::optional<Task> task_;
  uint32_t taken_ = 0;  // chunks so far
  uint32_t copied_ahead_ = 0;
  uint32_t given_ = 0;
  uint32_t sent_ = 0;
  uint32_t retired_ = 0;
  Status status_;            // the first failure on a worker: after it no chunk is given
  WorkerPool::Job job_ = 0;  // of the chunk that was given last
  int64_t busy_since_ns_ = 0;
  int64_t idle_since_ns_ = 0;
  std::atomic_flag busy_;  // some given chunk has not been sent
};

}  // namespace hybridopt
