// StreamedExecutor: updates chunks whose state is on the host on the device, where their gradients
// and params are. The state goes through a ring there:
//
//   state up      | 0 | 1 | 2 | 3 |          masters and moments to a slot of the ring
//   state update      | 0 | 1 | 2 | 3 |      in place: the slot, and the caller's params
//   state down            | 0 | 1 | 2 | 3 |  back to where they came from
//
// The ways up and down share the streams of all copies (machine/lanes.h); updates have one of their
// own. Events order them, and nothing here waits for the caller's. State goes up before the verdict
// on the gradients is known; the kernels read the verdict on the device, and are queued, like all
// that comes down, only when the step is known not to be skipped. A chunk that a running save has
// not read yet waits until it has: neither params nor state are written before.
//
// A thread of its own takes chunks (chunk_queue.h) as slots become free, so it needs nothing of the
// CPU workers, and they nothing of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/function_ref.h"
#include "machine/lanes.h"
#include "runtime/side_thread.h"
#include "step/executors/chunk_queue.h"
#include "step/executors/chunk_update.h"
#include "storage/state_memory.h"

namespace hybridopt {

class StreamedExecutor {
 public:
  StreamedExecutor(const ParamTable& table, const StateShape& shape, const StepPlan& plan,
                   const StateMemory& memory, Lanes& lanes, ChunkQueue& queue,
                   const ChunkUpdater& updater);
  static uint64_t Bytes(const StateShape& shape);
  // Starts the thread, where this executor may ever work.
  Status Start();

  // Of a new step, before its verdict: forgets the last one's chunks.
  void Reset();
  // Whether it takes chunks in this step: there is a ring, and the state is pinned.
  bool on() const { return !chunks_.empty(); }
  // Takes a chunk ahead; false where the ring is full or the queue has no more.
  bool TakeAhead();
  // Queues the way up of what was taken ahead. What Begin does with it comes later, or never: then
  // AwaitPrefetched ends it.
  Status Prefetch();
  Status AwaitPrefetched();
  // Does the rest on the thread, until the queue has no more chunks, and calls finished(chunk) for
  // each that it took, in order. The verdict is set behind what is on the compute stream now.
  // `step` and `finished` live until Await, which adds what was done to the result.
  Status Begin(const HostStep& step, FunctionRef<Status(uint32_t)> finished);
  Status Await(offload_step_result_t* result);

 private:
  enum class Direction { kUp, kDown };
  struct Task {
    const HostStep& step;
    FunctionRef<Status(uint32_t)> finished;
  };

  struct Body {
    StreamedExecutor* executor;
    void operator()() { executor->WorkOnThread(); }
  };

  void WorkOnThread();
  Status Work();
  bool Take();
  Status QueueUp(uint32_t number);
  Status QueueUpdate(uint32_t number);
  Status QueueDown(uint32_t number);
  Status Finish(uint32_t number);
  Status Launch(Rule rule, size_t first);
  Status CopyStates(uint32_t number, Direction direction);
  Status Copy(Direction direction, std::byte* host, std::byte* device, uint64_t bytes);
  Status CopyHeldGrads(uint32_t number);
  DeviceUpdate UpdateOf(const Fragment& fragment, std::byte* slot) const;
  std::byte* HeldGrad(const Fragment& fragment, std::byte* slot) const;

  uint32_t SlotOf(uint32_t number) const {
    return number % static_cast<uint32_t>(lanes_.stream_slots().size());
  }

  const ParamTable& table_;
  const StateShape& shape_;
  const StepPlan& plan_;
  const StateMemory& memory_;
  Lanes& lanes_;
  Device& device_;
  ChunkQueue& queue_;
  const ChunkUpdater& updater_;
  SideThread thread_;
  Body body_{this};  // of the thread

  // Of the running step. Chunks are numbered as they are taken, and use the slots in turn.
  std::optional<Task> task_;
  std::vector<uint32_t> chunks_;       // in the slots; their capacity is taken with the executor
  std::vector<DeviceUpdate> updates_;  // likewise: launches read these while others are added
  uint32_t taken_ = 0;
  uint32_t finished_ = 0;
  Status status_;  // of the thread's work
  offload_step_result_t done_{};
  int64_t end_ns_ = 0;
};

}  // namespace hybridopt
