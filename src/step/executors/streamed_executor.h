// StreamedExecutor: the device updates chunks whose state is on the host. Their gradients and
// params are on the device already; their state is copied through a ring in device memory:
//
//   state up      | 0 | 1 | 2 | 3 |          masters and moments to the ring
//   state update      | 0 | 1 | 2 | 3 |      in place: the ring, and the caller's params
//   state down            | 0 | 1 | 2 | 3 |  back to where they came from
//
// The copies up and down use the same streams as all other copies (machine/lanes.h); updates have a
// stream of their own. Events order these streams; none of them waits for the caller's stream.
// State is copied up before the verdict is known. The kernels read the verdict on the device.
// Kernels and copies down are queued only when the step is known not to be skipped. If a running
// save still has to read a chunk, the chunk waits: neither its params nor its state are written
// before.
//
// State on disk goes through the ring of the disk too (place/disk_memory.h), if no CPU worker takes
// chunks. A chunk is taken when its state has been read; when its new state has come down, it is
// written. While nothing else is under way, the executor waits for the disk.
//
// A side thread of the context takes chunks (chunk_queue.h) as the ring gets room. So the executor
// and the CPU workers do not wait for each other.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "machine/lanes.h"
#include "place/state_memory.h"
#include "runtime/side_threads.h"
#include "step/executors/aside_copier.h"
#include "step/executors/chunk_queue.h"
#include "step/executors/chunk_update.h"
#include "step/executors/ring_room.h"

namespace hybridopt {

class StreamedExecutor final : private SideThreads::Work {
 public:
  StreamedExecutor(SideThreads& side_threads, const ParamTable& table, const StateShape& shape,
                   const StepPlan& plan, const StateMemory& memory, Lanes& lanes, ChunkQueue& queue,
                   ChunkProgress& progress, AsideCopier& aside, const ChangeLog& changes);
  ~StreamedExecutor() override;
  static uint64_t Bytes(const StateShape& shape);
  // Reserves a side thread if this optimizer may use the executor.
  Status Start();

  // To be called for a new step, before its verdict: forgets the chunks of the step before.
  void Reset();
  // Whether the executor takes chunks in this step: there is a ring, and the state is pinned.
  bool on() const { return !chunks_.empty(); }
  // Takes a chunk before the verdict is known. Returns false if the ring is full or the queue is
  // empty.
  bool TakeAhead();
  // Queues the copies up of all chunks that were taken ahead since the last CopyAhead. Then either
  // Begin updates these chunks, or, in a step that is skipped, AwaitCopiedAhead waits for the
  // copies.
  Status CopyAhead();
  Status AwaitCopiedAhead();
  // Updates chunks on a side thread until the queue is empty, and reports the progress of each
  // chunk in order. The updates wait for what is on the compute stream now: it sets the device's
  // verdict, and updates matrices in the workspace that matrices of chunks use too. `step` must
  // live until Await, which adds times and counts to the result.
  Status Begin(const HostStep& step);
  Status Await(offload_step_result_t* result);

 private:
  enum class Direction { kUp, kDown };

  void Do() override;
  Status UpdateChunks();
  bool MayTake() const { return taken_ - finished_ < chunks_.size(); }
  bool Take();
  bool StateIsInMemory(uint32_t chunk) const;
  Status AwaitDisk();
  Status QueueUp(uint32_t number);
  Status QueueAside(uint32_t number);
  Status QueueUpdate(uint32_t number);
  Status QueueDown(uint32_t number);
  Status Finish(uint32_t number);
  Status Launch(Rule rule, size_t first);
  Status CopyStates(uint32_t number, Direction direction);
  Status Copy(Direction direction, std::byte* host, std::byte* device, uint64_t bytes);
  Status CopyHeldGrads(uint32_t number, TraceWork* work);
  DeviceUpdate UpdateOf(const Fragment& fragment, const Chunk& chunk, std::byte* data) const;
  static std::byte* HeldGrad(const Fragment& fragment, const Chunk& chunk, std::byte* data);

  uint32_t SlotOf(uint32_t number) const {
    return number % static_cast<uint32_t>(lanes_.stream_slots().size());
  }
  const Chunk& ChunkOf(uint32_t number) const {
    return plan_.chunks().chunks[chunks_[SlotOf(number)]];
  }
  std::byte* DataOf(uint32_t number) const {
    return lanes_.stream_ring().data() + room_.OffsetOf(positions_[SlotOf(number)]);
  }

  SideThreads& side_threads_;
  const ParamTable& table_;
  const StateShape& shape_;
  const StepPlan& plan_;
  const StateMemory& memory_;
  Lanes& lanes_;
  Device& device_;
  ChunkQueue& queue_;
  ChunkProgress& progress_;
  AsideCopier& aside_;
  const ChangeLog& changes_;

  bool owns_work_ = false;  // whether Start has reserved a side thread

  // State of the running step. Chunks are numbered in the order in which they are taken, and use
  // the slots in turn.
  const HostStep* step_ = nullptr;   // null: there is nothing to do
  std::vector<uint32_t> chunks_;     // per slot; the constructor reserves the capacity
  std::vector<uint64_t> positions_;  // per slot: where the chunk is in the ring
  std::vector<uint64_t> queued_up_;  // per slot: the link's queued_up_bytes() after its copies
  RingRoom room_;
  std::vector<DeviceUpdate> updates_;  // running launches read these while more are appended
  uint32_t taken_ = 0;
  uint32_t copied_ahead_ = 0;
  uint32_t finished_ = 0;
  Status status_;  // the outcome of Do
  offload_step_result_t done_{};
  int64_t end_ns_ = 0;
};

}  // namespace hybridopt
