#include "state/lifecycle.h"

namespace hybridopt {
namespace {

HostGrad HostGradAt(GradAt location) {
  switch (location) {
    case GradAt::kNone:
    case GradAt::kBound:
      return HostGrad::kNone;
    case GradAt::kStored:
    case GradAt::kStoredBound:
      return HostGrad::kStored;
    default:
      return HostGrad::kAccumulated;
  }
}

}  // namespace

Lifecycle::Lifecycle(const ParamTable& table, uint32_t movable,
                     std::vector<uint64_t> device_state_bytes)
    : table_(table),
      movable_(movable),
      device_state_bytes_(std::move(device_state_bytes)),
      params_(table.size()) {}

Status Lifecycle::CheckMovable(Move move) const {
  const MoveRow& row = RowOf(move);
  if (row.movable == 0 || (movable_ & row.movable) != 0) return {};
  return Status::Error(OFFLOAD_INVALID_STATE,
                       "options.movable is 0x%x, and this call needs %s; say so at create, because "
                       "the room for it is taken at commit",
                       movable_, row.movable_name);
}

Result<std::vector<uint32_t>> Lifecycle::Check(Move move, std::span<const uint32_t> ids) const {
  HYBRIDOPT_TRY(CheckMovable(move));
  std::vector<uint32_t> moving;
  moving.reserve(ids.size());
  std::vector<bool> seen(params_.size());
  for (uint32_t id : ids) {
    if (seen[id]) continue;
    seen[id] = true;
    HYBRIDOPT_ASSIGN(const bool needed, CheckOne(move, id));
    if (needed) moving.push_back(id);
  }
  return moving;
}

ParamsAt Lifecycle::ParamsLocation(uint32_t id) const {
  if (!params_[id].params_on_host) return ParamsAt::kDevice;
  const bool bound = table_.addresses()[id].data != nullptr || table_.param(id).count == 0;
  return bound ? ParamsAt::kHostBound : ParamsAt::kHost;
}

GradAt Lifecycle::GradLocation(uint32_t id) const {
  const bool bound = table_.addresses()[id].grad != nullptr;
  switch (params_[id].host_grad) {
    case HostGrad::kStored:
      return bound ? GradAt::kStoredBound : GradAt::kStored;
    case HostGrad::kAccumulated:
      return bound ? GradAt::kAccumulatedBound : GradAt::kAccumulated;
    default:
      return bound ? GradAt::kBound : GradAt::kNone;
  }
}

StatesAt Lifecycle::StatesLocation(uint32_t id) const {
  return params_[id].states_on_host ? StatesAt::kHost : StatesAt::kDevice;
}

template <typename At>
Result<bool> Lifecycle::Judge(const Transition<At>& transition, uint32_t id) const {
  const Param& param = table_.param(id);
  const bool is_refused =
      transition.effect == Effect::kRefused ||
      (transition.effect == Effect::kDoneIfFp32 && param.grad_dtype != OFFLOAD_FP32);
  if (is_refused)
    return Status::Error(OFFLOAD_INVALID_STATE, "param %u '%.200s': %s", id, param.name.c_str(),
                         transition.error);
  return transition.effect != Effect::kNothing;
}

Result<bool> Lifecycle::CheckOne(Move move, uint32_t id) const {
  bool is_needed = false;
  const auto check = [&](const auto& table, auto location) -> Status {
    const auto* row = FindRow(table, CallOf(move));
    if (row == nullptr) return {};
    HYBRIDOPT_ASSIGN(const bool is_done, Judge(row->From(location), id));
    is_needed |= is_done;
    return {};
  };
  HYBRIDOPT_TRY(check(params_table::kRows, ParamsLocation(id)));
  HYBRIDOPT_TRY(check(grad_table::kRows, GradLocation(id)));
  HYBRIDOPT_TRY(check(states_table::kRows, StatesLocation(id)));
  return is_needed;
}

void Lifecycle::Apply(Move move, std::span<const uint32_t> ids) {
  const auto* const params_row = FindRow(params_table::kRows, CallOf(move));
  const auto* const grad_row = FindRow(grad_table::kRows, CallOf(move));
  const auto* const states_row = FindRow(states_table::kRows, CallOf(move));
  for (uint32_t id : ids) {
    if (params_row != nullptr)
      SetParamsOnHost(id, params_row->From(ParamsLocation(id)).next != ParamsAt::kDevice);
    if (grad_row != nullptr) SetHostGrad(id, HostGradAt(grad_row->From(GradLocation(id)).next));
    if (states_row != nullptr)
      SetStatesOnHost(id, states_row->From(StatesLocation(id)).next == StatesAt::kHost);
  }
}

void Lifecycle::SetDeviceStateBytes(std::vector<uint64_t> bytes) {
  for (uint32_t id = 0; id < params_.size(); ++id)
    if (params_[id].states_on_host) states_on_host_bytes_ += bytes[id] - device_state_bytes_[id];
  device_state_bytes_ = std::move(bytes);
}

void Lifecycle::SetParamsOnHost(uint32_t id, bool on_host) {
  if (params_[id].params_on_host == on_host) return;
  const uint64_t bytes = table_.param(id).count * DtypeBytes(table_.param(id).dtype);
  params_on_host_bytes_ += on_host ? bytes : -bytes;
  params_[id].params_on_host = on_host;
}

void Lifecycle::SetStatesOnHost(uint32_t id, bool on_host) {
  if (params_[id].states_on_host == on_host) return;
  states_on_host_bytes_ += on_host ? device_state_bytes_[id] : -device_state_bytes_[id];
  states_on_host_count_ += on_host ? 1 : -1;
  params_[id].states_on_host = on_host;
}

void Lifecycle::SetHostGrad(uint32_t id, HostGrad held) {
  const Param& param = table_.param(id);
  const auto bytes_of = [&](HostGrad grad) -> uint64_t {
    if (grad == HostGrad::kNone) return 0;
    return param.count * DtypeBytes(grad == HostGrad::kStored ? param.grad_dtype : OFFLOAD_FP32);
  };
  grads_on_host_bytes_ += bytes_of(held) - bytes_of(params_[id].host_grad);
  params_[id].host_grad = held;
}

Status Lifecycle::CheckStep() const {
  if (any_states_on_host())
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "states of %zu params were given up by offload_states; call "
                         "offload_optimizer_reload_states first",
                         states_on_host_count_);
  constexpr auto kParamsRow = FindRow(params_table::kRows, Call::kStep);
  constexpr auto kGradRow = FindRow(grad_table::kRows, Call::kStep);
  for (uint32_t id = 0; id < params_.size(); ++id) {
    const GradAt grad = GradLocation(id);
    if (grad == GradAt::kNone)
      continue;  // the step does not update this param, so its data may be anywhere
    HYBRIDOPT_TRY(Judge(kParamsRow->From(ParamsLocation(id)), id).status());
    HYBRIDOPT_TRY(Judge(kGradRow->From(grad), id).status());
  }
  return {};
}

Status Lifecycle::CheckLoad() const {
  constexpr auto kParamsRow = FindRow(params_table::kRows, Call::kLoad);
  constexpr auto kStatesRow = FindRow(states_table::kRows, Call::kLoad);
  for (uint32_t id = 0; id < params_.size(); ++id) {
    HYBRIDOPT_TRY(Judge(kParamsRow->From(ParamsLocation(id)), id).status());
    HYBRIDOPT_TRY(Judge(kStatesRow->From(StatesLocation(id)), id).status());
  }
  return {};
}

void Lifecycle::ApplyStep() {
  constexpr auto kGradRow = FindRow(grad_table::kRows, Call::kStep);
  for (uint32_t id = 0; id < params_.size(); ++id)
    SetHostGrad(id, HostGradAt(kGradRow->From(GradLocation(id)).next));
}

}  // namespace hybridopt
