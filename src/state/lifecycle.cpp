#include "state/lifecycle.h"

namespace hybridopt {
namespace {

Status Refuse(const Param& param, uint32_t id, const char* text) {
  return Status::Error(OFFLOAD_INVALID_STATE, "param %u '%.200s': %s", id, param.name.c_str(),
                       text);
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

Result<bool> Lifecycle::CheckOne(Move move, uint32_t id) const {
  const ParamState& state = params_[id];
  const Param& param = table_.param(id);
  switch (move) {
    case Move::kOffloadParams:
      return !state.params_on_host;
    case Move::kReloadParams:
      if (!state.params_on_host) return false;
      if (table_.addresses()[id].data == nullptr && param.count > 0)
        return Refuse(param, id,
                      "its device address was given up by offload_params; tell the new one with "
                      "offload_optimizer_bind, then reload");
      return true;
    case Move::kRefreshMasters:
      if (state.params_on_host)
        return Refuse(param, id,
                      "its params are on the host, where nobody can have loaded weights into "
                      "them; bind and reload_params first");
      if (state.states_on_host)
        return Refuse(param, id, "its states are on the host; reload_states first");
      return true;
    case Move::kOffloadStates:
      return !state.states_on_host;
    case Move::kReloadStates:
      return state.states_on_host;
    default:
      return CheckGrads(move, id);
  }
}

Result<bool> Lifecycle::CheckGrads(Move move, uint32_t id) const {
  const HostGrad held = params_[id].host_grad;
  const Param& param = table_.param(id);
  const bool bound = table_.addresses()[id].grad != nullptr;
  switch (move) {
    case Move::kOffloadGrads:
      if (bound && held == HostGrad::kAccumulated)
        return Refuse(param, id,
                      "an accumulation is under way on the host, which a plain offload_grads would "
                      "overwrite; add with OFFLOAD_MOVE_ACCUMULATE, or give it up with "
                      "OFFLOAD_MOVE_DROP");
      if (bound && held == HostGrad::kStored)
        return Refuse(param, id,
                      "the host already holds a gradient of it that no step has used; step, "
                      "reload_grads, or give it up with OFFLOAD_MOVE_DROP");
      return bound;
    case Move::kAccumulateGrads:
      if (bound && held == HostGrad::kStored)
        return Refuse(param, id,
                      "the host holds a gradient of it that was offloaded without "
                      "OFFLOAD_MOVE_ACCUMULATE; use the flag from the first micro-batch on");
      return bound;
    case Move::kDropGrads:
      return bound || held != HostGrad::kNone;
    case Move::kReloadGrads:
      if (held == HostGrad::kNone) return false;
      if (!bound)
        return Refuse(param, id,
                      "its gradient's device address was given up by offload_grads; tell the new "
                      "one with offload_optimizer_bind, then reload");
      if (held == HostGrad::kAccumulated && param.grad_dtype != OFFLOAD_FP32)
        return Refuse(param, id,
                      "its gradient was accumulated in fp32, which its own dtype cannot hold; let "
                      "the step read it on the host");
      return true;
    default:
      return false;
  }
}

void Lifecycle::Apply(Move move, std::span<const uint32_t> ids) {
  for (uint32_t id : ids) {
    switch (move) {
      case Move::kOffloadParams:
        SetParamsOnHost(id, true);
        break;
      case Move::kReloadParams:
        SetParamsOnHost(id, false);
        break;
      case Move::kOffloadGrads:
        SetHostGrad(id, HostGrad::kStored);
        break;
      case Move::kAccumulateGrads:
        SetHostGrad(id, HostGrad::kAccumulated);
        break;
      case Move::kDropGrads:
      case Move::kReloadGrads:
        SetHostGrad(id, HostGrad::kNone);
        break;
      case Move::kOffloadStates:
        SetStatesOnHost(id, true);
        break;
      case Move::kReloadStates:
        SetStatesOnHost(id, false);
        break;
      case Move::kRefreshMasters:
        break;
    }
  }
}

void Lifecycle::SetDeviceStateBytes(std::vector<uint64_t> bytes) {
  for (uint32_t id = 0; id < params_.size(); ++id)
    if (params_[id].states_on_host) states_on_host_bytes_ += bytes[id] - device_state_bytes_[id];
  device_state_bytes_ = std::move(bytes);
}

void Lifecycle::SetParamsOnHost(uint32_t id, bool on_host) {
  const uint64_t bytes = table_.param(id).count * DtypeBytes(table_.param(id).dtype);
  params_on_host_bytes_ += on_host ? bytes : -bytes;
  params_[id].params_on_host = on_host;
}

void Lifecycle::SetStatesOnHost(uint32_t id, bool on_host) {
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
  for (uint32_t id = 0; id < params_.size(); ++id) {
    const ParamState& state = params_[id];
    const bool bound = table_.addresses()[id].grad != nullptr;
    const bool held = state.host_grad != HostGrad::kNone;
    if (!bound && !held) continue;  // the step leaves it alone, wherever it is
    if (state.params_on_host)
      return Refuse(table_.param(id), id,
                    "it has a gradient, but its params are on the host; bind and reload_params "
                    "first");
    if (bound && held)
      return Refuse(table_.param(id), id,
                    "it has a gradient on the host and another one was bound since; add it with "
                    "OFFLOAD_MOVE_ACCUMULATE, reload_grads over it, or bind NULL");
  }
  return {};
}

Status Lifecycle::CheckLoad() const {
  for (uint32_t id = 0; id < params_.size(); ++id) {
    if (params_[id].params_on_host)
      return Refuse(table_.param(id), id,
                    "a load writes the params at their addresses, and this one's is given up; bind "
                    "and reload_params first");
    if (params_[id].states_on_host)
      return Refuse(table_.param(id), id, "its states are on the host; reload_states first");
  }
  return {};
}

void Lifecycle::ApplyStep() {
  for (uint32_t id = 0; id < params_.size(); ++id) SetHostGrad(id, HostGrad::kNone);
}

}  // namespace hybridopt
