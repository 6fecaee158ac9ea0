// Lifecycle: where each param's data, its gradient and its states of the device share are, and
// which calls are allowed from there. The tables are in transitions.h. Pure: Lifecycle decides
// whether a call is allowed and records the decision, in the order of the calls; Mover
// (move/mover.h) does the work later.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "state/move_table.h"
#include "state/param_table.h"
#include "state/transitions.h"

namespace hybridopt {

// Whether the host holds a gradient of a param, and in which dtype.
enum class HostGrad : uint8_t {
  kNone,
  kStored,      // in its own dtype, as it was on the device
  kAccumulated  // in fp32
};

class Lifecycle {
 public:
  // `movable` is a combination of enum offload_movable. `device_state_bytes` has the bytes of each
  // param's states on the device.
  Lifecycle(const ParamTable& table, uint32_t movable, std::vector<uint64_t> device_state_bytes);

  // Returns the params of `ids` that the move has to move, without those that are at its
  // destination already. INVALID_STATE if the move is not allowed for one of `ids`. Changes
  // nothing.
  Result<std::vector<uint32_t>> Check(Move move, std::span<const uint32_t> ids) const;
  // Records the move of `ids`, which Check has returned.
  void Apply(Move move, std::span<const uint32_t> ids);

  // Sets the bytes of each param's states on the device from now on.
  void SetDeviceStateBytes(std::vector<uint64_t> bytes);

  // Whether a step may be queued now, with the addresses that the table has.
  Status CheckStep() const;
  // Whether a load may be queued now. A load writes the same params and states as a step.
  Status CheckLoad() const;
  // Records that a step uses up the gradients that the host holds.
  void ApplyStep();

  HostGrad host_grad(uint32_t id) const { return params_[id].host_grad; }
  bool params_on_host(uint32_t id) const { return params_[id].params_on_host; }
  bool states_on_host(uint32_t id) const { return params_[id].states_on_host; }
  // Bytes that have been offloaded and not reloaded. Any thread may call these.
  uint64_t params_on_host_bytes() const { return params_on_host_bytes_; }
  uint64_t grads_on_host_bytes() const { return grads_on_host_bytes_; }
  uint64_t states_on_host_bytes() const { return states_on_host_bytes_; }

  size_t states_on_host_count() const { return states_on_host_count_; }
  bool any_states_on_host() const { return states_on_host_count_ > 0; }

 private:
  struct ParamState {
    bool params_on_host = false;
    bool states_on_host = false;
    HostGrad host_grad = HostGrad::kNone;
  };
  // Where the resources of the param are.
  ParamsAt ParamsLocation(uint32_t id) const;
  GradAt GradLocation(uint32_t id) const;
  StatesAt StatesLocation(uint32_t id) const;
  // Returns true if the call changes the param, false if it has no effect, or the error with which
  // the call is refused.
  template <typename At>
  Result<bool> Judge(const Transition<At>& transition, uint32_t id) const;
  // The same for a move, decided by all three tables.
  Result<bool> CheckOne(Move move, uint32_t id) const;
  Status CheckMovable(Move move) const;
  void SetHostGrad(uint32_t id, HostGrad held);
  void SetParamsOnHost(uint32_t id, bool on_host);
  void SetStatesOnHost(uint32_t id, bool on_host);

  const ParamTable& table_;
  const uint32_t movable_;
  std::vector<uint64_t> device_state_bytes_;
  std::vector<ParamState> params_;
  size_t states_on_host_count_ = 0;
  std::atomic<uint64_t> params_on_host_bytes_ = 0;
  std::atomic<uint64_t> grads_on_host_bytes_ = 0;
  std::atomic<uint64_t> states_on_host_bytes_ = 0;
};

}  // namespace hybridopt
