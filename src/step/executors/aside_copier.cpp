#include "step/executors/aside_copier.h"

#include <cstring>

namespace hybridopt {

Status AsideCopier::Start() {
  if (shape_.options.unified || shape_.options.save_buffer_bytes == 0) return {};
  HYBRIDOPT_ASSIGN(share_copied_, device_.CreateEvent("device's state put aside"));
  HYBRIDOPT_ASSIGN(chunk_copied_, device_.CreateEvent("a chunk's params put aside"));
  return {};
}

AsideCopier::~AsideCopier() {
  for (EventHandle event : {share_copied_, chunk_copied_})
    if (event != nullptr) device_.DestroyEvent(event);
}

// The save waits for the event of each segment, so that it can go on while this waits for room.
Status AsideCopier::QueueDeviceShare(Capture& capture) {
  const TraceRange range(lanes_.trace(), TraceRow::kSteps, "put the device's state aside");
  for (uint32_t id = 0; id < table_.size(); ++id) {
    const uint64_t end = plan_.device_count(id);
    Status status;
    capture.ForEachSegment(id, [&](uint64_t begin, uint64_t count) {
      const auto ranges = [&](Capture::Visit visit) { visit(id, begin, count); };
      if (begin >= end || !status.ok() || !capture.PutAside(ranges)) return;
      status = Copy(capture, id, {begin, count}, lanes_.compute);
      if (status.ok()) status = device_.Record(share_copied_, lanes_.compute);
      status.ok() ? capture.CopiedBehind(ranges, share_copied_) : capture.Withdraw(ranges);
    });
    HYBRIDOPT_TRY(status);
  }
  return {};
}

void AsideCopier::DeviceShareCopied(Capture& capture) const {
  capture.Copied([&](Capture::Visit visit) {
    for (uint32_t id = 0; id < table_.size(); ++id)
      if (const uint64_t count = plan_.device_count(id); count > 0) visit(id, 0, count);
  });
}

Status AsideCopier::PutChunkAside(Capture& capture, uint32_t chunk, StreamHandle stream) {
  const TraceRange range(lanes_.trace(), TraceRow::kDeviceRing, "put aside", chunk);
  const auto ranges = [&](Capture::Visit visit) {
    for (const Fragment& fragment : plan_.fragments(chunk))
      if (plan_.param(fragment.param).active) visit(fragment.param, fragment.begin, fragment.count);
  };
  if (!capture.PutAside(ranges)) return {};
  const auto copy = [&]() -> Status {
    for (const Fragment& fragment : plan_.fragments(chunk))
      if (plan_.param(fragment.param).active)
        HYBRIDOPT_TRY(Copy(capture, fragment.param, {fragment.begin, fragment.count}, stream));
    if (!plan_.params_come_down()) return {};  // all of it was on the host
    HYBRIDOPT_TRY(device_.Record(chunk_copied_, stream));
    return lanes_.Wait(chunk_copied_, "params put aside");
  };
  const Status status = copy();
  status.ok() ? capture.Copied(ranges) : capture.Withdraw(ranges);
  return status;
}

Status AsideCopier::PutBorrowedAside(Capture& capture) {
  const auto borrowed = Capture::Arrays::kBorrowed;
  for (uint32_t id = 0; id < table_.size(); ++id) {
    Status status;
    if (!capture.borrows(id)) continue;
    capture.ForEachSegment(id, [&](uint64_t begin, uint64_t count) {
      const auto ranges = [&](Capture::Visit visit) { visit(id, begin, count); };
      if (!status.ok() || !capture.PutAside(ranges, borrowed)) return;
      status = Copy(capture, id, {begin, count}, lanes_.compute);
      if (status.ok()) status = device_.Record(share_copied_, lanes_.compute);
      if (status.ok()) status = lanes_.Wait(share_copied_, "params put aside");
      status.ok() ? capture.Copied(ranges, borrowed) : capture.Withdraw(ranges);
    });
    HYBRIDOPT_TRY(status);
  }
  return {};
}

// Copies what the capture has given room to, of these elements.
Status AsideCopier::Copy(const Capture& capture, uint32_t id, const ElementRange& range,
                         StreamHandle stream) {
  // The save's stream may still write what is borrowed.
  if (capture.borrows(id) && capture.ready() != nullptr)
    HYBRIDOPT_TRY(device_.StreamWait(stream, capture.ready()));
  Status status;
  residence_.ForEachTier(id, range, [&](Tier tier, const ElementRange& here) {
    for (StateSlot slot : {kMaster, kMoment0, kMoment1})
      if (status.ok()) status = CopyArray(capture, id, tier, slot, here, stream);
  });
  return status;
}

Status AsideCopier::CopyArray(const Capture& capture, uint32_t id, Tier tier, StateSlot slot,
                              const ElementRange& range, StreamHandle stream) {
  const ParamShape& shaped = shape_.params[id];
  const StateSlot stored = slot == kMaster ? shaped.master_slot() : slot;
  const uint64_t param_bytes = DtypeBytes(table_.param(id).dtype);
  const auto* const params = static_cast<const std::byte*>(plan_.param(id).addresses.data);
  const bool is_on_device = tier == Tier::kDevice || !shaped.Keeps(tier, stored);
  struct Run {
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    uint64_t bytes = 0;
  };
  Status status;
  const auto bring = [&](const Run& run, bool from_device) {
    if (!status.ok() || run.bytes == 0) return;
    if (from_device)
      status = device_.CopyToHost(stream, run.to, run.from, run.bytes);
    else
      std::memcpy(run.to, run.from, run.bytes);
  };
  Run run;  // slots that follow each other get one copy
  capture.ForEachCopy(
      id, slot, range.begin, range.count,
      [&](uint64_t first, uint64_t count, std::byte* copy, std::byte* params_copy) {
        const std::byte* const param = params + first * param_bytes;
        const std::byte* state = memory_.At(tier, id, stored, first);
        if (state == nullptr) state = param;  // its own master
        if (run.bytes == 0 || run.to + run.bytes != copy || run.from + run.bytes != state) {
          bring(run, is_on_device);
          run = {copy, state, 0};
        }
        run.bytes += shaped.Bytes(stored, first, count);
        if (stored == kMasterLow) bring({params_copy, param, count * param_bytes}, true);
      });
  bring(run, is_on_device);
  return status;
}

}  // namespace hybridopt
