// Program: a short random use of the public ABI, drawn from a number: how the contexts are made,
// and which calls each thread of the caller makes. It can be printed, and calls can be left out.
// The remaining calls still form a program, because a trainer (trainer.h) knows which result each
// call must have in the present state.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../random.h"
#include "../thread_comm.h"
#include "offload.h"

namespace hybridopt::schedule {

enum class Kind {
  kStep,
  kStepWithInf,
  kWait,
  kWaitBriefly,
  kLook,
  kStreamWait,
  kGetStats,
  kCompare,
  kOffloadParams,
  kReloadParams,
  kOffloadGrads,
  kOffloadStates,
  kReloadStates,
  kSetFraction,
  kSave,
  kLoad,
  kFailDevice,
  // Calls of a user of a stash.
  kPush,
  kRelease,
  kPrefetch,
  kPop,
  kDrop,
  kRollback,
  kWaitForStash,
  kSynchronize,
  kKinds
};

struct Call {
  Kind kind;
  uint64_t number =
      0;  // decides what the call needs: which ticket, which checkpoint, which fraction
};

// The calls of one thread. A trainer may make all calls, an observer makes none that queue work,
// and a user of the stash has calls of its own.
struct Script {
  uint32_t trainer = 0;  // or the number of the user
  std::vector<Call> calls;
};

struct Program {
  // Draws a program. `family` decides what it tests.
  enum class Family { kHost, kSim, kRanks };
  Program(Family drawn_family, uint64_t drawn_number);

  // Leaves out the calls with these numbers, counted through all scripts.
  void Remove(const std::vector<uint32_t>& removed);
  uint32_t call_count() const;
  bool comm_may_fail() const {
    return comm_fault != ThreadComm::Fault::kNone && comm_fault != ThreadComm::Fault::kDelay;
  }
  bool may_fail() const;  // the device or a rank
  std::string Text() const;

  Family family;
  uint64_t number;
  bool sim = false;
  uint32_t world = 1;     // trainers that are ranks of one model, each with a context of its own
  uint32_t trainers = 1;  // otherwise: of one context
  uint32_t threads = 1;
  uint32_t variant = 0;                   // of the problem
  offload_optimizer_options_t options{};  // without the comm
  uint64_t sim_delay_ns_max = 0;
  bool waits_at_end = true;  // before destroy
  // The fault of rank 1 at its n-th call of the comm. A call that hangs returns in the end.
  ThreadComm::Fault comm_fault = ThreadComm::Fault::kNone;
  uint64_t comm_fault_call = 0;
  std::vector<Script> owners;     // one for each trainer
  std::vector<Script> observers;  // threads that wait and poll
  // The users of one stash in the trainers' context, on the simulated device.
  std::vector<Script> stash_users;
};

}  // namespace hybridopt::schedule
