// Optimizer's takes of changes (state_io/change_log.h): this file checks the calls, and lays out
// the buffer of a take.
#include "base/system.h"
#include "optimizer/optimizer.h"
#include "state_io/change_reader.h"

namespace hybridopt {
namespace {

constexpr uint64_t kBufferAlignment = 8;

Status CheckOptions(const offload_changes_options_t& options) {
  constexpr uint32_t kKnown = OFFLOAD_CHANGES_IN_TENSOR | OFFLOAD_CHANGES_GAPS;
  if ((options.flags & ~kKnown) != 0)
    return Status::Error(OFFLOAD_UNSUPPORTED, "options.flags is 0x%x, known to this call is 0x%x",
                         options.flags, kKnown);
  if (!(options.dense_above >= 0 && options.dense_above <= 1))  // written so that NaN fails
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.dense_above is %g, expected a fraction from 0 to 1 (0 = dense "
                         "where indices and values would take as many bytes as the whole param)",
                         options.dense_above);
  if (options.buffer == nullptr && options.buffer_bytes > 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.buffer is NULL, expected the address of %llu bytes of host "
                         "memory (options.buffer_bytes)",
                         static_cast<unsigned long long>(options.buffer_bytes));
  if (reinterpret_cast<uintptr_t>(options.buffer) % kBufferAlignment != 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.buffer is %p, expected a multiple of %llu", options.buffer,
                         static_cast<unsigned long long>(kBufferAlignment));
  return {};
}

// Whether the whole param is to be sent, instead of its changed elements.
bool IsDense(const offload_changes_options_t& options, const Param& param,
             const ChangedIndices& indices) {
  if (options.dense_above > 0)
    return static_cast<double>(indices.count) >
           options.dense_above * static_cast<double>(param.count);
  const uint64_t value_bytes = DtypeBytes(param.dtype);
  return indices.count > 0 &&
         indices.count * (indices.bytes + value_bytes) >= param.count * value_bytes;
}

}  // namespace

Status Optimizer::CheckTracking() const {
  HYBRIDOPT_TRY(CheckCommitted());
  HYBRIDOPT_TRY(committed_->timeline->CheckPoison());
  if (committed_->changes->on()) return {};
  return Status::Error(OFFLOAD_INVALID_STATE,
                       "changes are not tracked; set options.track_changes to 1 at create");
}

Result<std::vector<uint32_t>> Optimizer::ParamsToTake(std::span<const uint32_t> params) const {
  if (params.data() == nullptr) return committed_->all_ids;
  HYBRIDOPT_TRY(CheckParams("params", params));
  std::vector<bool> named(table_.size());
  for (uint32_t id : params) {
    if (named[id])
      return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                           "params names id %u ('%.200s') twice; name each param once", id,
                           table_.param(id).name.c_str());
    named[id] = true;
  }
  return std::vector<uint32_t>(params.begin(), params.end());
}

Status Optimizer::AwaitCaller(StreamHandle stream) {
  if (context_->device().unified()) return {};
  HYBRIDOPT_TRY(context_->device().Record(committed_->lanes->moved[0], stream));
  return committed_->lanes->Wait(committed_->lanes->moved[0], "the stream given to a take");
}

Status Optimizer::CheckBuffer(const offload_changes_options_t& options, uint64_t bytes) const {
  if (bytes <= options.buffer_bytes) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "options.buffer_bytes is %llu, but the changes take %llu bytes; give a "
                       "larger buffer, name fewer params, or set options.dense_above lower",
                       static_cast<unsigned long long>(options.buffer_bytes),
                       static_cast<unsigned long long>(bytes));
}

Status Optimizer::Changes(std::span<const uint32_t> params,
                          const offload_changes_options_t& options, offload_changes_t& out) {
  HYBRIDOPT_TRY(CheckTracking());
  HYBRIDOPT_TRY(CheckOptions(options));
  HYBRIDOPT_TRY(context_->device().CheckStream(options.stream));
  HYBRIDOPT_ASSIGN(const std::vector<uint32_t> ids, ParamsToTake(params));
  HYBRIDOPT_TRY(ClaimState());
  for (uint32_t id : ids)
    if (table_.param(id).count > 0 && LocationOf(id).data == nullptr &&
        !committed_->lifecycle->params_on_host(id))
      return Status::Error(OFFLOAD_INVALID_STATE,
                           "param '%.200s' has no address; call offload_optimizer_bind first",
                           table_.param(id).name.c_str());
  HYBRIDOPT_TRY(AwaitCaller(options.stream));
  ChangeLog& log = *committed_->changes;
  HYBRIDOPT_TRY(log.BringDown());
  changes_.clear();
  std::vector<ChangeIndexer> indexers;
  for (uint32_t id : ids) {
    HYBRIDOPT_TRY(log.MakePending(id));
    const Param& param = table_.param(id);
    const ChangeIndexer& indexer = indexers.emplace_back(
        param.shard, log.Pending(id), (options.flags & OFFLOAD_CHANGES_IN_TENSOR) != 0,
        (options.flags & OFFLOAD_CHANGES_GAPS) != 0);
    const ChangedIndices& indices = indexer.indices();
    offload_change_t& change = changes_.emplace_back();
    change.struct_size = sizeof(change);
    change.param = id;
    change.dtype = param.dtype;
    change.dense = param.count > 0 && (log.PendingWhole(id) || IsDense(options, param, indices));
    change.count = change.dense != 0 ? param.count : indices.count;
    if (change.dense != 0) continue;
    change.index_bytes = indices.bytes;
    change.gaps = indices.gaps;
    change.indices_offset = out.bytes;
    change.values_offset =
        system::RoundUp(out.bytes + indices.count * indices.bytes, kBufferAlignment);
    out.bytes = system::RoundUp(change.values_offset + indices.count * DtypeBytes(param.dtype),
                                kBufferAlignment);
  }
  HYBRIDOPT_TRY(CheckBuffer(options, out.bytes));
  HYBRIDOPT_TRY(ReadChanges(options, indexers));
  std::vector<uint64_t> hashes;
  for (const offload_change_t& change : changes_) hashes.push_back(change.hash);
  out.take = log.Take(ids, hashes);
  out.param_count = static_cast<uint32_t>(changes_.size());
  out.params = changes_.data();
  return {};
}

// Fills the caller's buffer and the hashes.
Status Optimizer::ReadChanges(const offload_changes_options_t& options,
                              std::span<const ChangeIndexer> indexers) {
  HYBRIDOPT_ASSIGN(Transfer transfer, Transfer::Create(*context_, "a take of changes"));
  const StateLocator locator = committed_->Locator();
  ChangeReader reader(transfer, table_, locator);
  const ChangeLog& log = *committed_->changes;
  auto* const buffer = static_cast<std::byte*>(options.buffer);
  for (size_t i = 0; i < changes_.size(); ++i) {
    offload_change_t& change = changes_[i];
    const bool sparse = change.dense == 0 && change.count > 0;
    if (sparse) indexers[i].Write(buffer + change.indices_offset);
    HYBRIDOPT_ASSIGN(change.hash,
                     reader.Read(change.param, LocationOf(change.param),
                                 sparse ? log.Pending(change.param) : std::span<const uint64_t>(),
                                 sparse ? buffer + change.values_offset : nullptr));
    if (const uint64_t* const base = log.base_hash(change.param); base != nullptr) {
      change.base_hash = *base;
      change.has_base = 1;
    }
  }
  return {};
}

Status Optimizer::AcknowledgeChanges(uint64_t take) {
  HYBRIDOPT_TRY(CheckTracking());
  return committed_->changes->Acknowledge(take);
}

Status Optimizer::MarkChanged(std::span<const uint32_t> params) {
  HYBRIDOPT_TRY(CheckTracking());
  for (uint32_t id : params) HYBRIDOPT_TRY(CheckParam(id));
  for (uint32_t id :
       params.data() == nullptr ? std::span<const uint32_t>(committed_->all_ids) : params)
    committed_->changes->MarkWhole(id);
  return {};
}

// Marks params with a new address, which may have other content; not if a reload follows, because
// that brings the content.
void Optimizer::MarkRebound(std::span<const offload_binding_t> bindings) {
  for (const offload_binding_t& binding : bindings)
    if (binding.param < table_.size() && binding.data != nullptr &&
        binding.data != table_.addresses()[binding.param].data &&
        !committed_->lifecycle->params_on_host(binding.param))
      committed_->changes->MarkWhole(binding.param);
}

}  // namespace hybridopt
