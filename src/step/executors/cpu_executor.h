// CpuExecutor: the part of one step that the CPU workers do on a device with memory of its own,
// chunk by chunk through the staging ring.
//
//   down stream  | 0 | 1 | 2 | 3 |                  gradients (and split params) to the host
//   worker 0         | 0 | 1 | 2 | 3 |              its part of the update of each chunk
//   worker 1         | 0 |  1  | 2 | 3 |            at its own pace
//   up stream            | 0 |   | 1 | 2 | 3 |      params to the device
//
// A chunk is *taken* from the queue (chunk_queue.h) when the grads half of a slot is free. It is
// *given* to the workers when its gradients have arrived, its state has come from disk if it is
// there, and the params half of the slot is free too. It is *sent* up when all workers have done
// their part, and *retired* when its params are on the device. If a param's masters are split, the
// param is their upper half, so it is copied down with its gradient, to the params half of the
// slot. In such a step a chunk is taken only after the previous chunk of that slot has been
// retired.
//
// The worker that does the last part of a chunk advances the pipeline: it sends that chunk, copies
// the next one down, and gives all chunks whose gradients have arrived, at most as many as the ring
// has slots. Meanwhile the step's own thread sleeps; it waits for the device only while the workers
// have no chunk. So no thread waits for a thread whose CPU another program uses for a while.
//
// One thread at a time advances the pipeline: the step's own thread while all given chunks have
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
#include "place/state_memory.h"
#include "step/executors/chunk_queue.h"
#include "step/executors/chunk_update.h"

namespace hybridopt {

class CpuExecutor {
 public:
  // `disk` is NULL if no state is on disk.
  CpuExecutor(Context& context, const ParamTable& table, const StepPlan& plan, Lanes& lanes,
              const StateMemory& memory, ChunkQueue& queue, ChunkProgress& progress,
              const ChunkUpdater& updater);
  void UseRing();  // to be called when the lanes have another ring

  // To be called for a new step, before its verdict: forgets the chunks of the step before.
  void Reset() { taken_ = copied_ahead_ = given_ = sent_ = retired_ = 0; }
  // Takes a chunk before the verdict is known. Returns false if the ring is full or the queue is
  // empty.
  bool TakeAhead();
  // The number of copies that CopyAhead will queue.
  uint64_t CopiesAhead() const;
  // Queues the copies of the gradients of all chunks that were taken ahead since the last
  // CopyAhead. Then either Run updates these chunks, or, in a step that is skipped,
  // AwaitCopiedAhead waits for the copies.
  Status CopyAhead(offload_step_result_t* result);
  Status AwaitCopiedAhead();
  // Updates chunks until the queue is empty. Reports the progress of each chunk in order, on this
  // thread or on a worker. The workers use `step` until Run returns.
  Status Run(const HostStep& step, offload_step_result_t* result);

 private:
  // A slot of the ring. `chunk` is the last chunk that was given to the workers in this slot.
  // `taken` is the last chunk that was taken into it: its gradients may be copied down while the
  // params of `chunk` are copied up.
  struct Slot {
    CpuExecutor* executor;
    ChunkWork work;
    uint32_t chunk = 0;
    uint32_t taken = 0;
    uint64_t queued_up = 0;  // the link's queued_up_bytes() after the chunk's copies

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
  Status AwaitState(uint32_t chunk);
  Status AwaitRetire();
  Status GiveNext();
  void AwaitWorkers();
  // These run on a worker.
  void Update(Slot& slot, uint32_t worker);
  void AfterUpdate();
  Status MoveOn(uint32_t number);
  Result<bool> MayRetire();
  Result<bool> MayGive();
  // These run on the step's own thread or on a worker.
  WorkerPool::Work PrepareNext();
  Status Retire();
  bool Take();
  Status TakeAndBringDown();
  Status BringDown(uint32_t number, offload_step_result_t* result);
  Status SendUp(uint32_t number);

  uint32_t SlotOf(uint32_t number) const { return number % lanes_.ring().slots(); }
  // Whether the next chunk's slot is free, that is, whether the previous chunk of that slot has
  // been retired.
  bool HasSlot() const { return given_ < retired_ + lanes_.ring().slots(); }

  Context& context_;
  Device& device_;
  const ParamTable& table_;
  const StepPlan& plan_;
  Lanes& lanes_;
  const StateMemory& memory_;
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
  WorkerPool::Job job_ = 0;  // of the last chunk that was given
  int64_t busy_since_ns_ = 0;
  int64_t idle_since_ns_ = 0;
  std::atomic_flag busy_;  // some given chunk has not been sent
};

}  // namespace hybridopt
