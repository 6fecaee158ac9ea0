#include "save/agreement.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "base/system.h"

namespace hybridopt {
namespace {

constexpr int64_t kRoundNs = 20'000'000;

// Encodes a failure as one number, so that a maximum over all ranks keeps its rank and its code
// together: the lower bits hold the status, the bits above them the rank + 1.
constexpr int kCodeBits = 8;
constexpr int32_t kCodeMask = (1 << kCodeBits) - 1;

// The failure of another rank, as a status of this rank with the same code.
Status FailureOfRank(int32_t rank, int32_t code) {
  return Status::Error(code,
                       "rank %d has failed, so no rank goes on with this checkpoint; that rank's "
                       "own error says why",
                       rank);
}

Status Guarded(FunctionRef<Status()> part) {
  return CatchExceptions("work on the files of a checkpoint", part);
}

// Runs a part on a thread of its own, while the calling thread meets the other ranks.
class PartThread {
 public:
  explicit PartThread(FunctionRef<Status()> part) : part_(part) {
    Result<system::Thread> thread = system::Thread::Start<&PartThread::Run>("hybridopt/file", this);
    if (thread.ok()) {
      thread_ = std::move(thread.value());
    } else {
      outcome_ = thread.status();
      ended_ = true;
    }
  }
  ~PartThread() { (void)Join(); }
  PartThread(const PartThread&) = delete;
  PartThread& operator=(const PartThread&) = delete;

  // Waits at most timeout_ns for the part to end. Returns whether it has ended.
  bool AwaitEnd(int64_t timeout_ns) {
    std::unique_lock lock(mutex_);
    return end_changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns),
                                 [this] { return ended_; });
  }
  Status Join() {
    thread_.Join();
    return outcome_;
  }

 private:
  void Run() {
    outcome_ = Guarded(part_);
    {
      std::lock_guard lock(mutex_);
      ended_ = true;
    }
    end_changed_.notify_all();
  }

  const FunctionRef<Status()> part_;
  Status outcome_;  // written by the part's thread until the part has ended
  system::Thread thread_;
  std::mutex mutex_;
  std::condition_variable end_changed_;
  bool ended_ = false;  // guarded by mutex_
};

}  // namespace

int64_t Agreement::RoundNs() const {
  return comm_.world() == 1 ? -1 : std::min(kRoundNs, comm_.timeout_ns() / 4 + 1);
}

Status Agreement::OnFailure(Status* status) const {
  int32_t failure = status->ok() ? 0 : (comm_.rank() + 1) << kCodeBits | status->code();
  HYBRIDOPT_TRY(comm_.AgreeOnMax(&failure, 1));
  if (failure != 0 && status->ok())
    *status = FailureOfRank((failure >> kCodeBits) - 1, failure & kCodeMask);
  return {};
}

Status Agreement::DoTogether(FunctionRef<Status()> part, Status* outcome) const {
  if (comm_.world() == 1) {
    *outcome = Guarded(part);
    return {};
  }
  Status asked;
  {
    PartThread thread(part);
    for (int32_t working = 1; asked.ok() && working != 0;) {
      working = thread.AwaitEnd(RoundNs()) ? 0 : 1;
      asked = comm_.AgreeOnMax(&working, 1);
    }
    *outcome = thread.Join();
  }
  return asked.ok() ? OnFailure(outcome) : asked;
}

}  // namespace hybridopt
