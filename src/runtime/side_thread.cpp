#include "runtime/side_thread.h"

#include "base/check.h"

namespace hybridopt {

SideThread::~SideThread() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.Join();
}

Status SideThread::Start(const char* name) {
  HYBRIDOPT_CHECK(!thread_.joinable());
  HYBRIDOPT_ASSIGN(thread_, system::Thread::Start<&SideThread::Loop>(name, this));
  return {};
}

void SideThread::Begin(FunctionRef<void()> work) {
  {
    std::lock_guard lock(mutex_);
    HYBRIDOPT_CHECK(thread_.joinable() && !work_.has_value());
    work_ = work;
  }
  changed_.notify_all();
}

void SideThread::Await() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !work_.has_value(); });
}

void SideThread::Loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return work_.has_value() || stopping_; });
    if (!work_.has_value()) return;
    const FunctionRef<void()> work = *work_;
    lock.unlock();
    work();
    lock.lock();
    work_.reset();
    changed_.notify_all();
  }
}

}  // namespace hybridopt
