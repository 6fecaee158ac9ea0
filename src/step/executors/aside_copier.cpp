#include "step/executors/aside_copier.h"

#include <cstring>

namespace hybridopt {

Status AsideCopier::Start() {
  if (shape_.options.unified || shape_.options.save_buffer_bytes == 0) return {};
  HYBRIDOPT_ASSIGN(copied_, device_.CreateEvent("state put aside"));
  return {};
}

AsideCopier::~AsideCopier() {
  if (copied_ != nullptr) device_.DestroyEvent(copied_);
}

// The save waits for the event of each segment, so that it can go on while this waits for room.
Status AsideCopier::QueueDeviceShare(Capture& capture) {
  const TraceRange range(lanes_.trace(), TraceRow::kSteps, "put the device's state aside");
  bool any = false;
  for (uint32_t id = 0; id < table_.size(); ++id) {
    const uint64_t end = plan_.device_count(id);
    Status status;
    capture.ForEachSegment(id, [&](uint64_t begin, uint64_t count) {
      const auto ranges = [&](Capture::Visit visit) { visit(id, begin, count); };
      if (begin >= end || !status.ok() || !capture.PutAside(ranges)) return;
      status = Copy(capture, id, {begin, count});
      if (status.ok()) status = RecordCopied();
      status.ok() ? capture.CopiedBehind(ranges, copied_) : capture.Withdraw(ranges);
      any = true;
    });
    HYBRIDOPT_TRY(status);
  }
  return any ? device_.StreamWait(lanes_.compute, copied_) : Status();
}

void AsideCopier::DeviceShareCopied(Capture& capture) const {
  capture.Copied([&](Capture::Visit visit) {
    for (uint32_t id = 0; id < table_.size(); ++id)
      if (const uint64_t count = plan_.device_count(id); count > 0) visit(id, 0, count);
  });
}

Status AsideCopier::QueueChunk(Capture& capture, uint32_t chunk, const std::byte* data) {
  const TraceRange range(lanes_.trace(), TraceRow::kDeviceRing, "put aside", chunk);
  const auto ranges = [&](Capture::Visit visit) { VisitChunk(chunk, visit); };
  if (!capture.PutAside(ranges)) return {};
  TraceWork work(lanes_.trace(), TraceRow::kCopiesDown, lanes_.down, "put aside", chunk);
  const uint64_t before_bytes = down_bytes_;
  Status status;
  for (const Fragment& fragment : plan_.fragments(chunk))
    if (status.ok() && plan_.param(fragment.param).active)
      status = QueueFragment(capture, plan_.chunks().chunks[chunk], fragment, data);
  work.AddBytes(down_bytes_ - before_bytes);
  work.End();
  if (status.ok()) status = RecordCopied();
  status.ok() ? capture.CopiedBehind(ranges, copied_) : capture.Withdraw(ranges);
  HYBRIDOPT_TRY(status);
  return device_.StreamWait(lanes_.state_update, copied_);
}

void AsideCopier::ChunkCopied(Capture& capture, uint32_t chunk) const {
  capture.Copied([&](Capture::Visit visit) { VisitChunk(chunk, visit); });
}

void AsideCopier::VisitChunk(uint32_t chunk, Capture::Visit visit) const {
  for (const Fragment& fragment : plan_.fragments(chunk))
    if (plan_.param(fragment.param).active) visit(fragment.param, fragment.begin, fragment.count);
}

Status AsideCopier::QueueFragment(const Capture& capture, const Chunk& chunk,
                                  const Fragment& fragment, const std::byte* data) {
  const ParamShape& shaped = shape_.params[fragment.param];
  const auto in_ring = [&](StateSlot stored, uint64_t element) -> const std::byte* {
    if (!shaped.Keeps(fragment.tier, stored)) return nullptr;
    return data + chunk.StateOf(fragment, stored) +
           shaped.Bytes(stored, fragment.begin, element - fragment.begin);
  };
  return CopyArrays(capture, fragment.param, {fragment.begin, fragment.count}, {true, in_ring});
}

Status AsideCopier::PutBorrowedAside(Capture& capture) {
  const auto borrowed = Capture::Arrays::kBorrowed;
  for (uint32_t id = 0; id < table_.size(); ++id) {
    Status status;
    if (!capture.borrows(id)) continue;
    capture.ForEachSegment(id, [&](uint64_t begin, uint64_t count) {
      const auto ranges = [&](Capture::Visit visit) { visit(id, begin, count); };
      if (!status.ok() || !capture.PutAside(ranges, borrowed)) return;
      status = Copy(capture, id, {begin, count});
      if (status.ok()) status = RecordCopied();
      if (status.ok()) status = lanes_.Wait(copied_, "params put aside");
      status.ok() ? capture.Copied(ranges, borrowed) : capture.Withdraw(ranges);
    });
    HYBRIDOPT_TRY(status);
  }
  return {};
}

// Copies what the capture has given room to, of these elements, from where their state is.
Status AsideCopier::Copy(const Capture& capture, uint32_t id, const ElementRange& range) {
  Status status;
  residence_.ForEachTier(id, range, [&](Tier tier, const ElementRange& here) {
    const auto at = [&](StateSlot stored, uint64_t element) -> const std::byte* {
      return memory_.At(tier, id, stored, element);
    };
    if (status.ok()) status = CopyArrays(capture, id, here, {tier == Tier::kDevice, at});
  });
  return status;
}

Status AsideCopier::CopyArrays(const Capture& capture, uint32_t id, const ElementRange& range,
                               const From& from) {
  // The save's stream may still write what is borrowed.
  if (capture.borrows(id) && capture.ready() != nullptr)
    HYBRIDOPT_TRY(device_.StreamWait(lanes_.down, capture.ready()));
  for (StateSlot slot : {kMaster, kMoment0, kMoment1})
    HYBRIDOPT_TRY(CopyArray(capture, id, slot, range, from));
  return {};
}

Status AsideCopier::CopyArray(const Capture& capture, uint32_t id, StateSlot slot,
                              const ElementRange& range, const From& from) {
  const ParamShape& shaped = shape_.params[id];
  const StateSlot stored = slot == kMaster ? shaped.master_slot() : slot;
  const uint64_t param_bytes = DtypeBytes(table_.param(id).dtype);
  const auto* const params = static_cast<const std::byte*>(plan_.param(id).addresses.data);
  struct Run {
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    uint64_t bytes = 0;
    bool on_device = true;
  };
  Status status;
  const auto bring = [&](const Run& run) {
    if (!status.ok() || run.bytes == 0) return;
    if (!run.on_device) {
      std::memcpy(run.to, run.from, run.bytes);
      return;
    }
    status = device_.CopyToHost(lanes_.down, run.to, run.from, run.bytes);
    down_bytes_ += run.bytes;
  };
  Run run;  // slots that follow each other get one copy
  capture.ForEachCopy(
      id, slot, range.begin, range.count,
      [&](uint64_t first, uint64_t count, std::byte* copy, std::byte* params_copy) {
        const std::byte* const param = params + first * param_bytes;
        const std::byte* state = from.at(stored, first);
        const bool is_param = state == nullptr;  // its own master
        if (is_param) state = param;
        if (run.bytes == 0 || run.to + run.bytes != copy || run.from + run.bytes != state) {
          bring(run);
          run = {copy, state, 0, from.on_device || is_param};
        }
        run.bytes += shaped.Bytes(stored, first, count);
        if (stored == kMasterLow) bring({params_copy, param, count * param_bytes, true});
      });
  bring(run);
  return status;
}

}  // namespace hybridopt
