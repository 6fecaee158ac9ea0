// Optimizer's views of its state, its step counts and its statistics.
#include "checkpoint/format/format.h"
#include "kernels/algorithms.h"
#include "optimizer/optimizer.h"
#include "state_io/state_reader.h"

namespace hybridopt {

Status Optimizer::CheckParam(uint32_t param) const {
  if (param < table_.size()) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT, "param is %u, but only %u params have been added",
                       param, table_.size());
}

Status Optimizer::CheckParams(const char* what, std::span<const uint32_t> params) const {
  for (uint32_t id : params)
    if (id >= table_.size())
      return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                           "%s names id %u, but only %u params have been added", what, id,
                           table_.size());
  return {};
}

// The slot of a kind of state, for a param whose masters have this format.
Result<StateSlot> Optimizer::FindSlot(uint32_t param, int32_t kind, Format master) const {
  const Rule rule = committed_->shape.params[param].rule;
  for (uint32_t index = 0; index < kStateSlots; ++index) {
    const StateSlot slot{index};
    if (StateKindOf(table_.algorithm(param), slot) == kind && HasState(rule, master, slot))
      return slot;
  }
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "kind is %d, which %s does not keep for param '%.200s'; see enum "
                       "offload_state_kind",
                       kind, AlgorithmOf(table_.algorithm(param))->name,
                       table_.param(param).name.c_str());
}

Result<offload_state_view_t> Optimizer::State(uint32_t param_id, int32_t kind) const {
  HYBRIDOPT_TRY(CheckCommitted());
  HYBRIDOPT_TRY(ClaimState());
  HYBRIDOPT_TRY(CheckParam(param_id));
  const Param& param = table_.param(param_id);
  const ParamShape& shaped = committed_->shape.params[param_id];
  const uint64_t device_count = committed_->residence.range(param_id, Tier::kDevice).count;
  if (kind == OFFLOAD_STATE_MASTER && shaped.beside_param())
    return Status::Error(
        OFFLOAD_INVALID_ARGUMENT,
        "kind is OFFLOAD_STATE_MASTER, but the masters of param '%.200s' are split "
        "(options.master_layout); ask for OFFLOAD_STATE_MASTER_LOW and join it "
        "with the param",
        param.name.c_str());
  HYBRIDOPT_ASSIGN(const StateSlot slot, FindSlot(param_id, kind, shaped.formats().master));
  offload_state_view_t view{};
  view.dtype = RowOf(shaped.format[slot]).view_dtype;
  view.device_count = device_count;
  if (shaped.Keeps(Tier::kDisk, slot))
    view.disk_count = committed_->residence.range(param_id, Tier::kDisk).count;
  view.host_count = param.count - device_count - view.disk_count;
  view.step_count = committed_->step_counts.of(param_id);
  if (view.device_count > 0 && committed_->lifecycle->states_on_host(param_id))
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "the states of param '%.200s' are on the host; call "
                         "offload_optimizer_reload_states first",
                         param.name.c_str());
  // An fp32 param without a master of its own is its own master.
  const bool own_master = slot == kMaster && param.dtype == OFFLOAD_FP32 &&
                          (view.device_count > 0 || context_->device().unified());
  if (own_master && committed_->lifecycle->params_on_host(param_id))
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "param '%.200s' is its own master and is on the host; bind and "
                         "reload_params first",
                         param.name.c_str());
  if (view.device_count > 0 && !committed_->memory->has_device() && !own_master)
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "the states of param '%.200s' were on their way back when "
                         "queued work failed; they are lost",
                         param.name.c_str());
  const StateLocator locator = committed_->Locator();
  const ParamLocation location = LocationOf(param_id);
  if (view.device_count > 0)
    view.device_data = locator.At(param_id, slot, 0, view.device_count, location).data;
  if (view.host_count > 0)
    view.host_data = locator.At(param_id, slot, device_count, view.host_count, location).data;
  return view;
}

// Makes all checks of a read or a write.
Result<StateElements> Optimizer::ElementsOf(const StateKindElements& asked,
                                            const float* values) const {
  HYBRIDOPT_TRY(CheckCommitted());
  HYBRIDOPT_TRY(committed_->timeline->CheckPoison());
  HYBRIDOPT_TRY(CheckParam(asked.param));
  const Param& param = table_.param(asked.param);
  if (asked.kind == OFFLOAD_STATE_MASTER_LOW)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "kind is OFFLOAD_STATE_MASTER_LOW, a part of numbers; ask for "
                         "OFFLOAD_STATE_MASTER, which is the whole masters in every layout");
  HYBRIDOPT_ASSIGN(const StateSlot slot, FindSlot(asked.param, asked.kind, Format::kFp32));
  if (asked.first > param.count || asked.count > param.count - asked.first)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "first is %llu and count is %llu, but param '%.200s' has %llu elements",
                         static_cast<unsigned long long>(asked.first),
                         static_cast<unsigned long long>(asked.count), param.name.c_str(),
                         static_cast<unsigned long long>(param.count));
  if (asked.count > 0 && values == nullptr)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "values is NULL, expected the address of %llu fp32 numbers in host memory",
                         static_cast<unsigned long long>(asked.count));
  if (reinterpret_cast<uintptr_t>(values) % alignof(float) != 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "values is %p, expected a multiple of %zu: it has fp32 numbers",
                         static_cast<const void*>(values), alignof(float));
  return StateElements{asked.param, slot, asked.first, asked.count};
}

Status Optimizer::ReadState(const StateKindElements& asked, float* values) {
  HYBRIDOPT_ASSIGN(const StateElements elements, ElementsOf(asked, values));
  HYBRIDOPT_TRY(ClaimState());
  if (elements.count == 0) return {};
  HYBRIDOPT_ASSIGN(Transfer transfer, Transfer::Create(*context_, "a read of state"));
  StateReader reader(transfer);
  const StateLocator locator = committed_->Locator();
  for (uint64_t done = 0; done < elements.count;) {
    const StateRange range = locator.At(elements.param, elements.slot, elements.first + done,
                                        elements.count - done, LocationOf(elements.param));
    HYBRIDOPT_TRY(reader.ReadForCaller(range, values + done));
    done += range.count;
  }
  return {};
}

Status Optimizer::WriteState(const StateKindElements& asked, const float* values) {
  HYBRIDOPT_ASSIGN(const StateElements elements, ElementsOf(asked, values));
  HYBRIDOPT_TRY(ClaimState());
  if (elements.count == 0) return {};
  if (elements.slot == kMaster) committed_->changes->MarkWhole(elements.param);
  HYBRIDOPT_ASSIGN(Transfer transfer, Transfer::Create(*context_, "a write of state"));
  const StateLocator locator = committed_->Locator();
  StateWriter writer(transfer, table_, committed_->shape, locator, StateWriter::Values::kOfCaller);
  Status status = CatchExceptions("a write of state", [&]() -> Status {
    HYBRIDOPT_TRY(writer.Write(elements, LocationOf(elements.param), OFFLOAD_FP32,
                               reinterpret_cast<const std::byte*>(values)));
    return writer.End();
  });
  if (status.ok()) return {};
  status = Status::Error(status.code(),
                         "state was being written when it failed, and is a mixture now: %s",
                         status.message().c_str());
  committed_->timeline->Fail(status);
  return status;
}

Status Optimizer::SetStepCount(uint32_t param, uint64_t step_count) {
  HYBRIDOPT_TRY(CheckCommitted());
  HYBRIDOPT_TRY(committed_->timeline->CheckPoison());
  HYBRIDOPT_TRY(CheckParam(param));
  if (step_count > checkpoint::kStepsMax)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "step_count is %llu, expected at most 2^53",
                         static_cast<unsigned long long>(step_count));
  HYBRIDOPT_TRY(ClaimState());
  committed_->step_counts.set(param, step_count);
  return {};
}

offload_stats_t Optimizer::Stats() const {
  std::lock_guard lock(results_mutex_);
  offload_stats_t stats = stats_;
  stats.params_bytes[OFFLOAD_TIER_DEVICE] = table_.data_bytes();
  stats.grads_bytes[OFFLOAD_TIER_DEVICE] = table_.grad_bytes();
  if (!is_committed_) return stats;
  const Lifecycle& lifecycle = *committed_->lifecycle;
  stats.params_bytes[OFFLOAD_TIER_HOST] = lifecycle.params_on_host_bytes();
  stats.grads_bytes[OFFLOAD_TIER_HOST] = lifecycle.grads_on_host_bytes();
  for (Tier tier : kTiers) stats.state_bytes[IndexOf(tier)] = committed_->state_bytes[tier];
  stats.state_bytes[OFFLOAD_TIER_DEVICE] -= lifecycle.states_on_host_bytes();
  stats.state_bytes[OFFLOAD_TIER_HOST] += lifecycle.states_on_host_bytes();
  stats.disk_read_bytes = committed_->memory->disk_totals().read_bytes;
  stats.disk_written_bytes = committed_->memory->disk_totals().written_bytes;
  stats.queued = committed_->timeline->queued();
  const LinkUser& link = committed_->lanes->link();
  stats.gave_way_copies = link.gave_way_copies();
  stats.gave_way_seconds = link.gave_way_seconds();
  stats.pushes_ahead_bytes = link.pushes_ahead_bytes();
  return stats;
}

Status Optimizer::GradsToKeep(std::span<uint8_t> keep) const {
  HYBRIDOPT_TRY(CheckCommitted());
  HYBRIDOPT_TRY(committed_->timeline->CheckPoison());
  if (keep.size() != table_.size())
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "count is %zu, but %u params have been added; give room for one byte each",
                         keep.size(), table_.size());
  const auto& options = committed_->shape.options;
  // Without CPU workers the whole host share is streamed. Otherwise the last step has shown which
  // part is.
  double share = options.streams_state && !options.cpu_updates ? 1 : 0;
  if (options.streams_state && options.cpu_updates) {
    std::lock_guard lock(results_mutex_);
    share = streamed_share_;
  }
  ChooseGradsToKeep(table_, committed_->shape, committed_->decided.residence, share,
                    committed_->pipeline->early_elements_wanted(), keep);
  return {};
}

}  // namespace hybridopt
