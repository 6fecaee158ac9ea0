#include "device/sim_stream.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/system.h"

namespace hybridopt {
namespace {

// The interval at which a sleeping thread checks whether its device has stopped.
constexpr int64_t kSleepNsMax = 1'000'000;

// splitmix64.
uint64_t NextRandom(uint64_t& state) {
  uint64_t z = state += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

uint64_t SeedOfStream(uint64_t seed, uint64_t number) {
  uint64_t state = NextRandom(seed) ^ number;
  return NextRandom(state);
}

}  // namespace

SimStream::SimStream(const char* label, uint64_t number, const SimOptions& options,
                     const SimExecutor& executor, SimFault& fault)
    : label_(label),
      delay_ns_max_(std::min<uint64_t>(options.delay_ns_max, INT64_MAX / 2)),
      timeout_ns_(options.timeout_ns),
      executor_(executor),
      fault_(fault),
      random_state_(SeedOfStream(options.seed, number)) {}

Status SimStream::Start() {
  std::lock_guard lock(mutex_);
  return StartLocked();
}

Status SimStream::StartLocked() {
  if (started_) return Status();
  ring_ = std::make_unique<sim::Command[]>(kQueueCommands);
  HYBRIDOPT_ASSIGN(thread_, system::Thread::Start<&SimStream::RunCommands>(label_.c_str(), this));
  started_ = true;
  return Status();
}

Result<uint64_t> SimStream::Push(const sim::Command& command) {
  std::unique_lock lock(mutex_);
  if (!closed_) HYBRIDOPT_TRY(StartLocked());
  const auto has_room = [&] { return queued_ - completed_ < kQueueCommands || closed_; };
  if (!Await(lock, has_room, timeout_ns_))
    return NoProgress(
        "stream \"" + label_ + "\" has " + std::to_string(kQueueCommands) + " commands queued and",
        timeout_ns_, "; nothing was queued behind them");
  if (closed_) {
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "stream \"%s\" was destroyed while in use",
                         label_.c_str());
  }
  ring_[queued_ % kQueueCommands] = command;
  ++queued_;
  queued_changed_.notify_one();
  return queued_;
}

uint64_t SimStream::Queued() const {
  std::lock_guard lock(mutex_);
  return queued_;
}

bool SimStream::WaitUntil(uint64_t sequence, int64_t timeout_ns) const {
  std::unique_lock lock(mutex_);
  return Await(
      lock, [&] { return completed_ >= sequence; }, timeout_ns);
}

bool SimStream::Await(std::unique_lock<std::mutex>& lock, FunctionRef<bool()> reached,
                      int64_t timeout_ns) const {
  if (timeout_ns < 0 || timeout_ns > INT64_MAX / 2) {
    completed_changed_.wait(lock, reached);
    return true;
  }
  return completed_changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), reached);
}

void SimStream::Close() {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    queued_changed_.notify_one();
    completed_changed_.notify_all();
    if (!started_) return;
  }
  thread_.Join();
  ring_.reset();
}

void SimStream::Abandon() {
  abandoned_ = true;
  Close();
}

bool SimStream::End(int64_t timeout_ns) {
  abandoned_ = true;
  std::unique_lock lock(mutex_);
  closed_ = true;
  queued_changed_.notify_one();
  completed_changed_.notify_all();
  return !started_ || Await(
                          lock, [&] { return ended_; }, timeout_ns);
}

void SimStream::RunCommands() {
  // Delays and polls are short. A thread that sleeps gives up its CPU for just the delay; a thread
  // that yields loses it for a whole time slice if another program has work.
  system::SetTimerSlack(1);
  RunCommandsUntilClosed();
  std::lock_guard lock(mutex_);
  ended_ = true;
  completed_changed_.notify_all();
}

void SimStream::RunCommandsUntilClosed() {
  std::unique_lock lock(mutex_);
  while (true) {
    queued_changed_.wait(lock, [&] { return completed_ < queued_ || closed_; });
    if (completed_ == queued_) return;
    // Push does not write this slot again before the command has completed.
    const sim::Command& command = ring_[completed_ % kQueueCommands];
    lock.unlock();
    if (!abandoned_) Delay();
    if (!fault_.stopped() && !abandoned_) {
      const Status status =
          CatchExceptions("the command", [&] { return executor_.Execute(command, abandoned_); });
      if (!status.ok()) fault_.Fail(sim::NameOf(command), label_.c_str(), status);
    }
    lock.lock();
    ++completed_;
    completed_changed_.notify_all();
  }
}

void SimStream::Delay() {
  if (delay_ns_max_ == 0) return;
  const auto delay_ns = static_cast<int64_t>(NextRandom(random_state_) % (delay_ns_max_ + 1));
  const int64_t end_ns = system::NowNs() + delay_ns;
  while (!fault_.stopped()) {
    const int64_t left_ns = end_ns - system::NowNs();
    if (left_ns <= 0) return;
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(left_ns, kSleepNsMax)));
  }
}

}  // namespace hybridopt
