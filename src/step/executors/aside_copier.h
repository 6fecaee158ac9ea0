// AsideCopier: puts aside what the device has of the state that a save has still to read
// (place/capture.h). Streams copy it to the save's buffer, in front of the updates that overwrite
// it. The CPU workers do the same with the chunks that they update (ChunkUpdater).
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

  // Queues the copies of all that the step updates on the device, on the stream that updates it.
  // Waits for the save while the buffer is full.
  Status QueueDeviceShare(Capture& capture);
  // To be called when that stream has done the update.
  void DeviceShareCopied(Capture& capture) const;
  // Returns when the state of the chunk has been copied, which is on the host and which `stream`
  // updates in the device's ring.
  Status PutChunkAside(Capture& capture, uint32_t chunk, StreamHandle stream);
  // Returns when all that the save borrows has been read or copied.
  Status PutBorrowedAside(Capture& capture);

 private:
  Status Copy(const Capture& capture, uint32_t id, const ElementRange& range, StreamHandle stream);
  Status CopyArray(const Capture& capture, uint32_t id, Tier tier, StateSlot slot,
                   const ElementRange& range, StreamHandle stream);

  const ParamTable& table_;
  const StateShape& shape_;
  const Residence& residence_;
  const StateMemory& memory_;
  const StepPlan& plan_;
  Lanes& lanes_;
  Device& device_;  // outlives the lanes
  // NULL: there is no buffer, or no device memory.
  EventHandle share_copied_ = nullptr;
  EventHandle chunk_copied_ = nullptr;
};

}  // namespace hybridopt
