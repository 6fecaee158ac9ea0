#include "state_io/change_log.h"

#include <algorithm>
#include <numeric>
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
  std::vector<uint32_t> all(params_.size());
  std::iota(all.begin(), all.end(), 0);
  HYBRIDOPT_TRY(BringDown(all));
  lanes_.UseScratch(scratch);
  return ClearDevice();
}

Status ChangeLog::ClearDevice() {
  HYBRIDOPT_TRY(ClearDevice(0, 0, DeviceWords(shape_)));
  return AwaitDevice();
}

Status ChangeLog::ClearDevice(uint32_t array, uint64_t first_word, uint64_t words) {
  if (lanes_.device_changes == nullptr || words == 0) return {};
  return lanes_.device().Fill(lanes_.compute, DeviceArray(array) + first_word, 2 * words,
                              Pattern{sizeof(uint32_t)});
}

Status ChangeLog::AwaitDevice() {
  if (lanes_.device_changes == nullptr) return {};
  HYBRIDOPT_TRY(lanes_.device().Record(lanes_.moved[0], lanes_.compute));
  return lanes_.Wait(lanes_.moved[0], "bits of changes being cleared");
}

std::vector<ChangeLog::Run> ChangeLog::RunsOf(std::span<const uint32_t> ids) const {
  std::vector<Run> runs;
  for (uint32_t id : ids) {
    const Tracked& param = params_[id];
    if (!runs.empty() && runs.back().first_word + runs.back().words == FirstWord(id) &&
        runs.back().fresh_array == param.fresh_array &&
        runs.back().pending_on_device == param.pending_on_device)
      runs.back().words += WordsOf(id);
    else
      runs.push_back({FirstWord(id), WordsOf(id), param.fresh_array, param.pending_on_device});
  }
  return runs;
}

// Bits are cleared only after they have been copied. After a failure in between they are set in
// both places.
Status ChangeLog::BringDown(std::span<const uint32_t> ids) {
  if (lanes_.device_changes == nullptr) return {};
  HYBRIDOPT_TRY(BringDownPending(ids));
  for (uint32_t id : ids) params_[id].noted = 1;
  for (const Run& run : RunsOf(ids)) {
    HYBRIDOPT_TRY(CopyDown(run.fresh_array, run, fresh_));
    HYBRIDOPT_TRY(ClearDevice(run.fresh_array, run.first_word, run.words));
  }
  return AwaitDevice();
}

Status ChangeLog::BringDownPending(std::span<const uint32_t> ids) {
  const std::vector<Run> runs = RunsOf(ids);
  for (uint32_t id : ids) {
    Tracked& param = params_[id];
    if (!param.pending_on_device || std::exchange(param.has_pending, true)) continue;
    std::fill_n(pending_.data() + FirstWord(id), WordsOf(id), 0);
  }
  for (const Run& run : runs)
    if (run.pending_on_device) HYBRIDOPT_TRY(CopyDown(1 - run.fresh_array, run, pending_));
  for (uint32_t id : ids) params_[id].pending_on_device = false;
  return {};
}

Status ChangeLog::CopyDown(uint32_t array, const Run& run, std::vector<uint64_t>& to) {
  if (run.words == 0) return {};
  HYBRIDOPT_ASSIGN(Transfer transfer, Transfer::Create(context_, "bits of changes"));
  constexpr uint64_t kPieceWords = Transfer::kStagingBytes / sizeof(uint64_t);
  const auto* const brought = reinterpret_cast<const uint64_t*>(transfer.staging());
  for (uint64_t done = 0; done < run.words;) {
    const uint64_t first = run.first_word + done;
    const uint64_t now = std::min(run.words - done, kPieceWords);
    HYBRIDOPT_TRY(
        transfer.CopyDown(transfer.staging(), DeviceArray(array) + first, now * sizeof(uint64_t)));
    for (uint64_t i = 0; i < now; ++i) to[first + i] |= brought[i];
    done += now;
  }
  return {};
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

// The array with stale bits is cleared, and then becomes the one with the fresh bits.
Status ChangeLog::MakePendingOnDevice(std::span<const uint32_t> ids) {
  HYBRIDOPT_TRY(BringDownPending(ids));
  for (const Run& run : RunsOf(ids))
    HYBRIDOPT_TRY(ClearDevice(1 - run.fresh_array, run.first_word, run.words));
  HYBRIDOPT_TRY(AwaitDevice());
  for (uint32_t id : ids) {
    params_[id].fresh_array = static_cast<uint8_t>(1 - params_[id].fresh_array);
    params_[id].pending_on_device = true;
  }
  return {};
}

Result<uint64_t> ChangeLog::Take(std::span<const uint32_t> ids, std::span<const uint64_t> hashes) {
  // If this take fails, bits of it may be pending that an earlier one did not give.
  for (uint32_t id : ids) params_[id].take = 0;
  for (uint32_t id : ids) HYBRIDOPT_TRY(MakePending(id));
  if (lanes_.device_changes != nullptr) HYBRIDOPT_TRY(MakePendingOnDevice(ids));
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
    param.has_pending = param.pending_on_device = false;
    param.take = 0;
    param.pending_whole = false;
    param.has_base = true;
    param.base_hash = param.taken_hash;
  }
  return {};
}

}  // namespace hybridopt
