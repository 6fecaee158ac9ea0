// A stream of the simulated device: a queue of commands and the thread that runs them in order.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "base/function_ref.h"
#include "base/status.h"
#include "base/system.h"
#include "device/sim_command.h"

namespace hybridopt {

// The thread starts with the first command. The object outlives the destruction of its stream
// (Close), because events still ask it which commands have completed.
class SimStream {
 public:
  static constexpr uint64_t kQueueCommands = 1024;

  // Before each command the thread waits for a random time of 0 to options.delay_ns_max, from a
  // generator that is seeded with options.seed and `number`.
  SimStream(const char* label, uint64_t number, const SimOptions& options,
            const SimExecutor& executor, SimFault& fault);
  ~SimStream() { Close(); }
  SimStream(const SimStream&) = delete;
  SimStream& operator=(const SimStream&) = delete;

  const std::string& label() const { return label_; }

  Status Start();  // starts the thread now instead of with the first command
  // Queues a command and returns its sequence number. Blocks while the queue is full, as the launch
  // queues of real devices do: DEVICE_FAILED if no command completes within options.timeout_ns.
  Result<uint64_t> Push(const sim::Command& command);
  uint64_t Queued() const;  // the sequence number of the last command; 0 if there was none
  // Blocks until the command of that number has completed; false after timeout_ns (negative: no
  // limit).
  bool WaitUntil(uint64_t sequence, int64_t timeout_ns) const;
  // Completes what is queued and ends the thread. Later commands are refused.
  void Close();
  // Drops the commands that have not begun, and ends the thread as Close does.
  void Abandon();
  // For a device that has been stopped: does the same as Abandon, but returns false if the thread
  // is still running after timeout_ns.
  bool End(int64_t timeout_ns);

 private:
  Status StartLocked();
  bool Await(std::unique_lock<std::mutex>& lock, FunctionRef<bool()> reached,
             int64_t timeout_ns) const;
  void RunCommands();
  void RunCommandsUntilClosed();
  void Delay();

  const std::string label_;
  const uint64_t delay_ns_max_;
  const int64_t timeout_ns_;
  const SimExecutor& executor_;
  SimFault& fault_;
  uint64_t random_state_;  // of the thread

  mutable std::mutex mutex_;
  std::condition_variable queued_changed_;             // the stream's thread waits for it
  mutable std::condition_variable completed_changed_;  // all other threads wait for it
  std::unique_ptr<sim::Command[]> ring_;               // command n is at n % kQueueCommands
  uint64_t queued_ = 0;
  uint64_t completed_ = 0;
  bool started_ = false;
  bool closed_ = false;
  bool ended_ = false;  // the thread has ended
  std::atomic<bool> abandoned_ = false;
  system::Thread thread_;
};

}  // namespace hybridopt
