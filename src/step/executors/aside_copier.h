// AsideCopier: puts aside what the device updates of the state that a save has still to read
// (place/capture.h): its own share, and chunks in its ring. The stream of all copies down copies it
// to the save's buffer, in front of the updates that overwrite it. The CPU workers do the same with
// the chunks that they update (ChunkUpdater).
#pragma once

#include "device/device.h"
#include "machine/lanes.h"
#include "place/capture.h"
#include "place/state_memory.h"
#include "step/step_plan.h"

namespace hybridopt {

class AsideCopier {
 public:
  AsideCopier(const ParamTable& table, const StateShape& shape, const Residence& residence,
              const StateMemory& memory, const StepPlan& plan, Lanes& lanes)
      : table_(table),
        shape_(shape),
        residence_(residence),
        memory_(memory),
        plan_(plan),
        lanes_(lanes),
        device_(lanes.device()) {}
  ~AsideCopier();
  AsideCopier(const AsideCopier&) = delete;
  AsideCopier& operator=(const AsideCopier&) = delete;

  // To be called once, before the rest.
  Status Start();

  // These queue copies, in front of what is queued afterwards on the stream that updates what they
  // copy. They wait for the save while the buffer is full.
  Status QueueDeviceShare(Capture& capture);
  // `data` is where the ring has the chunk's state when the stream of copies down gets there.
  Status QueueChunk(Capture& capture, uint32_t chunk, const std::byte* data);
  // To be called when the updates have been done.
  void DeviceShareCopied(Capture& capture) const;
  void ChunkCopied(Capture& capture, uint32_t chunk) const;
  // Returns when all that the save borrows has been read or copied.
  Status PutBorrowedAside(Capture& capture);

 private:
  // Where the copied state is.
  struct From {
    bool on_device;
    FunctionRef<const std::byte*(StateSlot stored, uint64_t element)> at;
  };
  void VisitChunk(uint32_t chunk, Capture::Visit visit) const;
  Status QueueFragment(const Capture& capture, const Chunk& chunk, const Fragment& fragment,
                       const std::byte* data);
  Status Copy(const Capture& capture, uint32_t id, const ElementRange& range);
  Status CopyArrays(const Capture& capture, uint32_t id, const ElementRange& range,
                    const From& from);
  Status CopyArray(const Capture& capture, uint32_t id, StateSlot slot, const ElementRange& range,
                   const From& from);
  // What is queued now on the stream of copies down has been done when it reaches copied_.
  Status RecordCopied() { return device_.Record(copied_, lanes_.down); }

  const ParamTable& table_;
  const StateShape& shape_;
  const Residence& residence_;
  const StateMemory& memory_;
  const StepPlan& plan_;
  Lanes& lanes_;
  Device& device_;                // outlives the lanes
  EventHandle copied_ = nullptr;  // NULL: there is no buffer, or no device memory
  uint64_t down_bytes_ = 0;       // that have been copied from the device
};

}  // namespace hybridopt
