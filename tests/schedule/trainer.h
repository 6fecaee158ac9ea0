// Trainer: one optimizer of a program, the thread that owns it, and a checker. The checker has its
// own knowledge of docs/LIFECYCLE.md: from the calls so far it computes what the next call must
// return, which bits must be there when a ticket completes, and which arrays the library may
// access. If something else happens, it ends the run.
#pragma once

#include <atomic>
#include <cstdint>
#include <latch>
#include <memory>
#include <string>
#include <vector>

#include "array.h"
#include "offload.h"
#include "problem.h"
#include "program.h"

namespace hybridopt::schedule {

// The information that other threads have of a trainer.
struct Watched {
  std::atomic<offload_optimizer_t> optimizer = nullptr;  // NULL until commit
  std::atomic<uint64_t> applied_min = 0;                 // steps that have been waited for
  std::atomic<bool> destroyed = false;                   // or about to be
  // An observer has got the error of a failure. A failure that does not poison is returned only
  // once.
  std::atomic<bool> told = false;
};

// The calls of an observer.
void Observe(const Script& script, Watched& watched, bool may_fail);

class Trainer {
 public:
  // It saves in `directory`. comm may be NULL.
  Trainer(const Program& program, uint32_t number, offload_context_t context, ThreadComm* comm,
          std::string directory);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // Registers and commits, awaits that all trainers have done so, makes all calls, destroys.
  void Run(std::latch& committed);
  Watched& watched() { return watched_; }
  bool failed() const { return failed_; }
  // Whether destroy has ended although a function of the comm had not returned: then optimizer and
  // context stay as long as the process.
  bool left_behind() const { return left_behind_; }

 private:
  struct Retired {
    std::unique_ptr<Array> array;
    offload_ticket_t ticket;  // the array is the caller's again when it completes
  };
  struct Saved {
    std::string path;
    uint64_t steps;
  };
  using Arrays = std::unique_ptr<Array>[kParams];

  void Create();
  void AddParams();
  void Do(const Call& call);
  void Step(bool with_inf);
  bool MayStep() const { return !params_out_ && !states_out_; }
  void MakeGrads(bool with_inf);
  void Bind(bool data_too);
  void DropGrads();
  void OffloadGrads();
  void OffloadParams();
  void ReloadParams();
  void MoveStates(bool out);
  void SetFraction(uint64_t number);
  void Save();
  void Load(uint64_t number);
  void StreamWait();
  void FailDevice();
  void Wait(uint64_t number, int64_t timeout_ns);
  bool WaitForAll();
  void GetStats();
  void Compare();
  void CompareData();
  void CompareStates();
  void Destroy();
  void ReturnLate();

  // Checks the status of a call that queues work. Returns true if it has queued work.
  bool Queued(const char* call, int32_t status, bool allowed, offload_ticket_t ticket);
  void CheckText(const char* call, int32_t status) const;
  // The same for a call that waits.
  bool Waited(const char* call, int32_t status);
  bool WaitedForWork(const char* call, int32_t status);
  void Completed(offload_ticket_t ticket);
  void Lend();
  void Retire(Arrays& arrays, offload_ticket_t ticket);
  offload_move_options_t Streams() const;
  [[noreturn]] void Wrong(const std::string& what) const;

  const Program& program_;
  const uint32_t number_;
  const uint32_t rank_;
  const offload_context_t context_;
  ThreadComm* const comm_;
  const offload_comm_t table_;
  const std::string directory_;
  const bool may_fail_;
  Watched watched_;
  offload_optimizer_t optimizer_ = nullptr;
  offload_stream_t stream_ = nullptr;
  Arrays data_;
  Arrays grads_;  // bound arrays whose content is not needed
  std::vector<Retired> retired_;
  std::vector<Saved> saved_;
  std::vector<offload_ticket_t> tickets_;

  // The state after all queued work.
  uint64_t steps_ = 0;
  bool params_out_ = false;
  bool states_out_ = false;
  bool grads_out_ = false;
  uint64_t grads_steps_ = 0;  // the number of steps that the gradients on the host are for
  uint64_t applied_ = 0;
  uint64_t skipped_ = 0;
  uint64_t queued_steps_ = 0;  // at most
  bool left_behind_ = false;
  bool failed_ = false;    // this thread has got an error
  bool poisoned_ = false;  // the error of queued work
};

}  // namespace hybridopt::schedule
