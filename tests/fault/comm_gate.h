// A comm table that blocks the work of a step.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "trainer.h"

namespace hybridopt::fault {

// A comm table of one rank whose functions return only while the gate is open. Until then they
// block the work of a step.
struct CommGate {
  offload_comm_t Table() {
    auto table = Make<offload_comm_t>();
    table.world = 1;
    table.user = this;
    table.sum = [](void* gate, double*, uint32_t, int64_t) { return Pass(gate); };
    table.max = [](void* gate, int32_t*, uint32_t, int64_t) { return Pass(gate); };
    table.barrier = [](void* gate, int64_t) { return Pass(gate); };
    return table;
  }
  static int32_t Pass(void* gate) {
    static_cast<CommGate*>(gate)->entered = true;
    Gate::Hold(&static_cast<CommGate*>(gate)->gate);
    return OFFLOAD_OK;
  }
  void AwaitEntered() const {
    while (!entered) std::this_thread::yield();
  }

  std::atomic<bool> entered = false;
  Gate gate;
};

}  // namespace hybridopt::fault
