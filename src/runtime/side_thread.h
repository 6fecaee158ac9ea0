// SideThread: a thread of its own for one owner, which gives it one function at a time and goes on
// while the thread runs it.
#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>

#include "base/function_ref.h"
#include "base/status.h"
#include "base/system.h"

namespace hybridopt {

class SideThread {
 public:
  SideThread() = default;  // Start starts the thread
  // Ends the thread, which must have no work then. It must not be called in a forked child: the
  // thread does not exist there, and the condition variable on which it waited in the parent cannot
  // be destroyed. A forked child destroys no object that the parent made.
  ~SideThread();
  SideThread(const SideThread&) = delete;
  SideThread& operator=(const SideThread&) = delete;

  // Debuggers show `name`. Returns OUT_OF_HOST_MEMORY where the system refuses another thread.
  Status Start(const char* name);
  // Has the thread call `work`. `work` must not throw, and must live until Await has returned. The
  // owner calls Await once after each Begin.
  void Begin(FunctionRef<void()> work);
  // Waits until `work` has returned.
  void Await();

 private:
  void Loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<FunctionRef<void()>> work_;  // guarded by mutex_
  bool stopping_ = false;                    // guarded by mutex_
  system::Thread thread_;
};

}  // namespace hybridopt
