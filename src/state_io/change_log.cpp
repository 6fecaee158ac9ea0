#include "state_io/change_log.h"

#include <algorithm>
#include <utility>

#include "state_io/shared_work.h"
#include "state_io/transfer.h"

namespace hybridopt {

ChangeLog::ChangeLog(Context& context, const StateShape& shape, Lanes& lanes)
    : context_(context),
      shape_(shape),
      lanes_(lanes),
      params_(shape.options.tracks_changes ? shape.params.size() : 0),
      fresh_(shape.change_words),
      pending_(shape.change_words) {
  if (!fresh_.empty()) host_words_ = fresh_.data();
}

uint64_t ChangeLog::HostBytes(const StateShape& shape) {
  if (!shape.options.tracks_changes) return 0;
  return 2 * shape.change_words * sizeof(uint64_t) + shape.params.size() * sizeof(Tracked);
}

Status ChangeLog::UseScratch(LaneScratch& scratch) {
  HYBRIDOPT_TRY(BringDown());
  lanes_.UseScratch(scratch);
  return ClearDevice();
}

Status ChangeLog::ClearDevice() {
  if (lanes_.device_changes == nullptr) return {};
  HYBRIDOPT_TRY(lanes_.device().Fill(lanes_.compute, lanes_.device_changes, 2 * shape_.change_words,
                                     Pattern{sizeof(uint32_t)}));
  HYBRIDOPT_TRY(lanes_.device().Record(lanes_.moved[0], lanes_.compute));
  return lanes_.Wait(lanes_.moved[0], "bits of changes being cleared");
}

// Bits are cleared only after they have been copied. After a failure in between they are set in
// both places.
Status ChangeLog::BringDown() {
  if (lanes_.device_changes == nullptr) return {};
  HYBRIDOPT_ASSIGN(Transfer transfer, Transfer::Create(context_, "a take of changes"));
  constexpr uint64_t kPieceWords = Transfer::kStagingBytes / sizeof(uint64_t);
  const auto* const brought = reinterpret_cast<const uint64_t*>(transfer.staging());
  for (uint64_t done = 0; done < shape_.change_words;) {
    const uint64_t now = std::min(shape_.change_words - done, kPieceWords);
    HYBRIDOPT_TRY(transfer.CopyDown(transfer.staging(), lanes_.device_changes + done,
                                    now * sizeof(uint64_t)));
    for (uint64_t i = 0; i < now; ++i) fresh_[done + i] |= brought[i];
    done += now;
  }
  return ClearDevice();
}

Status ChangeLog::MakePending(uint32_t id) {
  Tracked& param = params_[id];
  param.pending_whole = param.pending_whole || std::exchange(param.whole, false);
  const uint64_t first = FirstBit(id) / 64;
  return ShareWork(context_, WordsOf(id), sizeof(uint64_t), [&](uint64_t begin, uint64_t end) {
    for (uint64_t word = first + begin; word < first + end; ++word)
      pending_[word] |= std::exchange(fresh_[word], 0);
  });
}

uint64_t ChangeLog::Take(std::span<const uint32_t> ids, std::span<const uint64_t> hashes) {
  takes_ += 1;
  for (size_t i = 0; i < ids.size(); ++i) {
    params_[ids[i]].take = takes_;
    params_[ids[i]].taken_hash = hashes[i];
  }
  return takes_;
}

Status ChangeLog::Acknowledge(uint64_t take) {
  if (take == 0 || take > takes_)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "take is %llu, but this optimizer has given out %llu takes; use the "
                         "number that offload_optimizer_changes has given",
                         static_cast<unsigned long long>(take),
                         static_cast<unsigned long long>(takes_));
  for (uint32_t id = 0; id < params_.size(); ++id) {
    Tracked& param = params_[id];
    if (param.take != take) continue;
    const uint64_t first = FirstBit(id) / 64;
    std::fill_n(pending_.begin() + static_cast<int64_t>(first), WordsOf(id), 0);
    param.take = 0;
    param.pending_whole = false;
    param.has_base = true;
    param.base_hash = param.taken_hash;
  }
  return {};
}

}  // namespace hybridopt
