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
  HYBRIDOPT_TRY(BringDown(0, shape_.change_words));
  lanes_.UseScratch(scratch);
  return ClearDevice();
}

Status ChangeLog::ClearDevice() {
  HYBRIDOPT_TRY(ClearDevice(0, shape_.change_words));
  return AwaitDevice();
}

Status ChangeLog::ClearDevice(uint64_t first_word, uint64_t words) {
  if (lanes_.device_changes == nullptr || words == 0) return {};
  return lanes_.device().Fill(lanes_.compute, lanes_.device_changes + first_word, 2 * words,
                              Pattern{sizeof(uint32_t)});
}

Status ChangeLog::AwaitDevice() {
  if (lanes_.device_changes == nullptr) return {};
  HYBRIDOPT_TRY(lanes_.device().Record(lanes_.moved[0], lanes_.compute));
  return lanes_.Wait(lanes_.moved[0], "bits of changes being cleared");
}

// Bits are cleared only after they have been copied. After a failure in between they are set in
// both places.
Status ChangeLog::BringDown(uint64_t first_word, uint64_t words) {
  if (lanes_.device_changes == nullptr || words == 0) return {};
  HYBRIDOPT_ASSIGN(Transfer transfer, Transfer::Create(context_, "bits of changes"));
  constexpr uint64_t kPieceWords = Transfer::kStagingBytes / sizeof(uint64_t);
  const auto* const brought = reinterpret_cast<const uint64_t*>(transfer.staging());
  for (uint64_t done = 0; done < words;) {
    const uint64_t now = std::min(words - done, kPieceWords);
    HYBRIDOPT_TRY(transfer.CopyDown(transfer.staging(), lanes_.device_changes + first_word + done,
                                    now * sizeof(uint64_t)));
    uint64_t* const to = fresh_.data() + first_word + done;
    for (uint64_t i = 0; i < now; ++i) to[i] |= brought[i];
    done += now;
  }
  for (uint32_t id = 0; id < params_.size(); ++id)
    if (FirstWord(id) < first_word + words && FirstWord(id) + WordsOf(id) > first_word)
      params_[id].noted = 1;
  HYBRIDOPT_TRY(ClearDevice(first_word, words));
  return AwaitDevice();
}

// Makes fresh bits on the host pending.
Status ChangeLog::MakePending(uint32_t id) {
  if (params_[id].noted == 0) return {};
  const bool keeps = std::exchange(params_[id].has_pending, true);
  const uint64_t first = FirstWord(id);
  HYBRIDOPT_TRY(
      ShareWork(context_, WordsOf(id), sizeof(uint64_t), [&](uint64_t begin, uint64_t end) {
        for (uint64_t word = first + begin; word < first + end; ++word)
          pending_[word] = (keeps ? pending_[word] : 0) | std::exchange(fresh_[word], 0);
      }));
  params_[id].noted = 0;
  return {};
}

Result<uint64_t> ChangeLog::Take(std::span<const uint32_t> ids, std::span<const uint64_t> hashes) {
  // If this take fails, bits of it may be pending that an earlier one did not give.
  for (uint32_t id : ids) params_[id].take = 0;
  for (size_t i = 0; i < ids.size();) {
    // Params that follow each other are cleared by one command.
    const uint64_t first = FirstWord(ids[i]);
    uint64_t end = first;
    for (; i < ids.size() && FirstWord(ids[i]) == end; ++i) {
      HYBRIDOPT_TRY(MakePending(ids[i]));
      end += WordsOf(ids[i]);
    }
    HYBRIDOPT_TRY(ClearDevice(first, end - first));
  }
  HYBRIDOPT_TRY(AwaitDevice());
  takes_ += 1;
  for (size_t i = 0; i < ids.size(); ++i) {
    Tracked& param = params_[ids[i]];
    param.pending_whole = param.pending_whole || std::exchange(param.whole, false);
    param.take = takes_;
    param.taken_hash = hashes[i];
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
    param.has_pending = false;
    param.take = 0;
    param.pending_whole = false;
    param.has_base = true;
    param.base_hash = param.taken_hash;
  }
  return {};
}

}  // namespace hybridopt
