// SideThread: a thread that does one piece of work at a time beside the thread that gives it.
#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>

#include "base/function_ref.h"
#include "base/prim.h"
#include "base/status.h"

namespace hybridopt {

class SideThread {
 public:
  SideThread() = default;  // starts nothing
  // Ends the thread, which has no work then. Not in a forked child, where the thread does not exist
  // and what it waited on cannot be destroyed; there the objects of the parent stay as they are.
  ~SideThread();
  SideThread(const SideThread&) = delete;
  SideThread& operator=(const SideThread&) = delete;

  // Debuggers show the name. OUT_OF_HOST_MEMORY where the system refuses another thread.
  Status Start(const char* name);
  // Has the thread call `work`, which lives until Await has returned and does not throw. Each Begin
  // is followed by one Await.
  void Begin(FunctionRef<void()> work);
  void Await();

 private:
  void Loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<FunctionRef<void()>> work_;  // guarded by mutex_
  bool stopping_ = false;                    // guarded by mutex_
  prim::Thread thread_;
};

}  // namespace hybridopt
