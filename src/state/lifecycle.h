// Lifecycle: where each param's bits, gradient and device-share states are, and what may be done
// to them from there: transitions.h has the tables. Pure: it decides, and remembers decisions in
// the order of the calls; moves.h does the work.
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
  // `movable` is enum offload_movable, or-ed. `device_state_bytes` is what each param's states take
  // on the device.
  Lifecycle(const ParamTable& table, uint32_t movable, std::vector<uint64_t> device_state_bytes);

  // The params of `ids` for which the move has something to do; those that are there already are
  // left out. INVALID_STATE if the move is not allowed for any of them; then nothing has changed.
  Result<std::vector<uint32_t>> Check(Move move, std::span<const uint32_t> ids) const;
  // Remembers the move; `ids` came from Check.
  void Apply(Move move, std::span<const uint32_t> ids);

  // What each param's states take on the device from now on.
  void SetDeviceStateBytes(std::vector<uint64_t> bytes);

  // Whether a step may be queued now, over the addresses the table has.
  Status CheckStep() const;
  // Whether a load may be queued now: it writes params and states where a step would.
  Status CheckLoad() const;
  // The step uses up what the host holds of gradients.
  void ApplyStep();

  HostGrad host_grad(uint32_t id) const { return params_[id].host_grad; }
  bool params_on_host(uint32_t id) const { return params_[id].params_on_host; }
  bool states_on_host(uint32_t id) const { return params_[id].states_on_host; }
  // Bytes that were offloaded and not brought back. Any thread.
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
  ParamsAt ParamsPlace(uint32_t id) const;
  GradAt GradPlace(uint32_t id) const;
  StatesAt StatesPlace(uint32_t id) const;
  // Whether the effect of a call on the param is something, nothing, or why it is refused.
  template <typename At>
  Result<bool> Judge(const Transition<At>& transition, uint32_t id) const;
  // The same of what all three tables say of the move.
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
