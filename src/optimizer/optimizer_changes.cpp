// Optimizer's takes of changes (state_io/change_log.h): this file checks the calls, and lays out
// the buffer of a take.
#include <utility>

#include "base/system.h"
#include "optimizer/optimizer.h"
#include "state_io/change_indices.h"
#include "state_io/change_reader.h"

namespace hybridopt {
namespace {

constexpr uint64_t kBufferAlignment = 8;

Status CheckOptions(const offload_changes_options_t& options) {
  constexpr uint32_t kKnown = OFFLOAD_CHANGES_IN_TENSOR | OFFLOAD_CHANGES_GAPS |
                              OFFLOAD_CHANGES_WIDE | OFFLOAD_CHANGES_ON_DEVICE;
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
                         "options.buffer is NULL, expected the address of %llu bytes "
                         "(options.buffer_bytes)",
                         static_cast<unsigned long long>(options.buffer_bytes));
  if (reinterpret_cast<uintptr_t>(options.buffer) % kBufferAlignment != 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.buffer is %p, expected a multiple of %llu", options.buffer,
                         static_cast<unsigned long long>(kBufferAlignment));
  return {};
}

bool OnDevice(const offload_changes_options_t& options) {
  return (options.flags & OFFLOAD_CHANGES_ON_DEVICE) != 0;
}

// Whether the whole param is to be sent, instead of its `count` changed elements.
bool IsDense(const offload_changes_options_t& options, const Param& param, uint64_t count,
             uint32_t index_bytes) {
  if (options.dense_above > 0)
    return static_cast<double>(count) > options.dense_above * static_cast<double>(param.count);
  const uint64_t value_bytes = DtypeBytes(param.dtype);
  return count > 0 && count * (index_bytes + value_bytes) >= param.count * value_bytes;
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

// Checks what a take into device memory needs.
Status Optimizer::CheckOnDevice(std::span<const uint32_t> ids,
                                const offload_changes_options_t& options) const {
  if (context_->device().unified())
    return Status::Error(OFFLOAD_UNSUPPORTED,
                         "options.flags has OFFLOAD_CHANGES_ON_DEVICE, but the device of this "
                         "context is the host; leave the flag out");
  if ((options.flags & (OFFLOAD_CHANGES_IN_TENSOR | OFFLOAD_CHANGES_GAPS)) != 0)
    return Status::Error(OFFLOAD_UNSUPPORTED,
                         "options.flags is 0x%x, but OFFLOAD_CHANGES_ON_DEVICE can only have "
                         "OFFLOAD_CHANGES_WIDE beside it; leave the others out, or take to host "
                         "memory",
                         options.flags);
  for (uint32_t id : ids)
    if (committed_->lifecycle->params_on_host(id))
      return Status::Error(OFFLOAD_INVALID_STATE,
                           "param '%.200s' is on the host, and options.flags has "
                           "OFFLOAD_CHANGES_ON_DEVICE; call offload_optimizer_reload_params first, "
                           "or take to host memory",
                           table_.param(id).name.c_str());
  const Status status = context_->device().CheckRange(options.buffer, options.buffer_bytes);
  if (status.ok()) return {};
  return Status::Error(status.code(), "options.buffer: %s", status.message().c_str());
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
  if (OnDevice(options)) HYBRIDOPT_TRY(CheckOnDevice(ids, options));
  HYBRIDOPT_TRY(AwaitCaller(options.stream));
  std::vector<ChangeIndices> indices;
  std::vector<ChangeSource> sources;
  for (uint32_t id : ids) {
    indices.emplace_back(table_.param(id).shard, (options.flags & OFFLOAD_CHANGES_IN_TENSOR) != 0);
    HYBRIDOPT_ASSIGN(sources.emplace_back(), SourceOfChanges(id, options, indices.back()));
  }
  ChangeReader reader(*context_, std::move(sources), committed_->change_table);
  HYBRIDOPT_TRY(reader.Survey());
  LayOutChanges(ids, options, reader, indices, out);
  HYBRIDOPT_TRY(CheckBuffer(options, out.bytes));
  return CollectChanges(ids, options, reader, indices, out);
}

// Bits that only the host can use are brought down first.
Result<ChangeSource> Optimizer::SourceOfChanges(uint32_t id,
                                                const offload_changes_options_t& options,
                                                const ChangeIndices& indices) {
  ChangeLog& log = *committed_->changes;
  const Param& param = table_.param(id);
  const ParamRange range = committed_->Locator().Params(id, 0, LocationOf(id));
  ChangeSource source{range.data, range.on_device, param.count, DtypeBytes(param.dtype), {}, {}};
  if (log.Whole(id)) return source;
  const bool gaps = (options.flags & OFFLOAD_CHANGES_GAPS) != 0;
  if (!range.on_device || indices.needs_bits(gaps)) HYBRIDOPT_TRY(log.BringDown(id));
  if (range.on_device) source.device_bits = log.DeviceBits(id);
  source.host_bits = log.HostBits(id);
  return source;
}

// Fills changes_, and chooses how indices are stored.
void Optimizer::LayOutChanges(std::span<const uint32_t> ids,
                              const offload_changes_options_t& options, const ChangeReader& reader,
                              std::span<ChangeIndices> indices, offload_changes_t& out) {
  const ChangeLog& log = *committed_->changes;
  const bool gaps = (options.flags & OFFLOAD_CHANGES_GAPS) != 0;
  changes_.clear();
  for (size_t i = 0; i < ids.size(); ++i) {
    const uint32_t id = ids[i];
    const Param& param = table_.param(id);
    const ChangeFindings found = reader.Find(i);
    indices[i].Choose(indices[i].needs_bits(gaps) && found.count > 0
                          ? indices[i].Summary(log.HostBits(id), log.WordsOf(id))
                          : found.elements,
                      gaps);
    offload_change_t& change = changes_.emplace_back();
    change.struct_size = sizeof(change);
    change.param = id;
    change.dtype = param.dtype;
    change.dense = param.count > 0 &&
                   (log.Whole(id) || IsDense(options, param, found.count, indices[i].bytes()));
    change.count = change.dense != 0 ? param.count : found.count;
    change.hash = found.hash;
    if (const uint64_t* const base = log.base_hash(id); base != nullptr) {
      change.base_hash = *base;
      change.has_base = 1;
    }
    if (change.dense != 0) continue;
    if ((options.flags & OFFLOAD_CHANGES_WIDE) != 0) indices[i].Widen();
    change.index_bytes = indices[i].bytes();
    change.gaps = indices[i].gaps();
    change.indices_offset = out.bytes;
    change.values_offset =
        system::RoundUp(out.bytes + change.count * change.index_bytes, kBufferAlignment);
    out.bytes = system::RoundUp(change.values_offset + change.count * DtypeBytes(param.dtype),
                                kBufferAlignment);
  }
}

// Fills the caller's buffer, and records the take.
Status Optimizer::CollectChanges(std::span<const uint32_t> ids,
                                 const offload_changes_options_t& options, ChangeReader& reader,
                                 std::span<const ChangeIndices> indices, offload_changes_t& out) {
  ChangeLog& log = *committed_->changes;
  auto* const buffer = static_cast<std::byte*>(options.buffer);
  std::vector<ChangeTarget> targets(ids.size());
  std::vector<uint64_t> hashes;
  for (size_t i = 0; i < ids.size(); ++i) {
    const offload_change_t& change = changes_[i];
    hashes.push_back(change.hash);
    if (change.dense != 0 || change.count == 0) continue;
    targets[i] = {&indices[i], buffer + change.indices_offset, buffer + change.values_offset};
  }
  HYBRIDOPT_TRY(reader.Collect(targets, OnDevice(options)));
  HYBRIDOPT_ASSIGN(out.take, log.Take(ids, hashes));
  out.param_count = static_cast<uint32_t>(changes_.size());
  out.params = changes_.data();
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
