#include "runtime/side_threads.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/system.h"

namespace hybridopt {

struct SideThreads::State {
  State() { threads.reserve(kMost); }
  ~State();
  void DoGiven();

  const uint64_t fork_generation = system::ForkGeneration();
  std::mutex mutex;               // guards all below
  std::condition_variable given;  // idle threads wait for it
  std::condition_variable done;   // Await waits for it
  std::vector<system::Thread> threads;
  Work* first_given = nullptr;
  uint32_t idle = 0;  // threads that neither do work nor have been given any
  uint32_t owners = 0;
  bool ending = false;
};

SideThreads::State::~State() {
  {
    std::lock_guard lock(mutex);
    ending = true;
  }
  given.notify_all();
  for (system::Thread& thread : threads) thread.Join();
}

// The body of each thread.
void SideThreads::State::DoGiven() {
  std::unique_lock lock(mutex);
  while (true) {
    given.wait(lock, [this] { return first_given != nullptr || ending; });
    if (first_given == nullptr) return;
    Work& work = *std::exchange(first_given, first_given->next_);
    lock.unlock();
    work.Do();
    lock.lock();
    work.state_ = Work::State::kDone;
    idle += 1;
    done.notify_all();
  }
}

SideThreads::SideThreads() : state_(std::make_unique<State>()) {}

SideThreads::~SideThreads() {
  // A child of fork does not have the threads, which may have held the mutex.
  if (state_->fork_generation != system::ForkGeneration()) (void)state_.release();
}

Status SideThreads::AddOwner() {
  std::lock_guard lock(state_->mutex);
  const size_t before = state_->threads.size();
  const size_t wanted = std::min(state_->owners + 1, kMost);
  HYBRIDOPT_TRY((system::StartThreads<&State::DoGiven>("hybridopt/side", state_.get(), wanted,
                                                       &state_->threads)));
  state_->idle += static_cast<uint32_t>(state_->threads.size() - before);
  state_->owners += 1;
  return {};
}

void SideThreads::RemoveOwner() {
  std::lock_guard lock(state_->mutex);
  state_->owners -= 1;
}

void SideThreads::Begin(Work& work) {
  std::lock_guard lock(state_->mutex);
  HYBRIDOPT_CHECK(work.state_ == Work::State::kResting);
  if (state_->idle == 0) return;
  state_->idle -= 1;
  work.state_ = Work::State::kGiven;
  work.next_ = std::exchange(state_->first_given, &work);
  state_->given.notify_one();
}

void SideThreads::Await(Work& work) {
  std::unique_lock lock(state_->mutex);
  if (work.state_ == Work::State::kResting) {
    lock.unlock();
    work.Do();
    return;
  }
  state_->done.wait(lock, [&] { return work.state_ == Work::State::kDone; });
  work.state_ = Work::State::kResting;
}

uint32_t SideThreads::threads() const {
  std::lock_guard lock(state_->mutex);
  return static_cast<uint32_t>(state_->threads.size());
}

}  // namespace hybridopt
