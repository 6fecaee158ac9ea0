#include "runtime/worker_pool.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/system.h"

namespace hybridopt {
namespace {

constexpr uint32_t kThreadsMax = 1024;

// About 50 us: if the next job comes soon, as the jobs of chunks do, a worker does not sleep in
// between. Workers spin only if there are more CPUs than threads. With as many threads as CPUs a
// spinning worker takes the CPU that another thread needs: a job of 7 us then takes 160 us
// (measured). Under a CPU quota, spinning would use up the quota.
constexpr uint32_t kSpins = 1000;

void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether `job` has finished. Jobs are numbered, and the numbers wrap around.
bool HasFinished(WorkerPool::Job finished, WorkerPool::Job job) {
  return static_cast<int32_t>(finished - job) >= 0;
}

// Returns the value of `word` once it differs from `old`.
uint32_t AwaitChange(const std::atomic<uint32_t>& word, uint32_t old, uint32_t spins) {
  for (uint32_t spin = 0; spin < spins; ++spin) {
    const uint32_t value = word.load(std::memory_order_acquire);
    if (value != old) return value;
    Pause();
  }
  word.wait(old, std::memory_order_acquire);
  return word.load(std::memory_order_acquire);
}

}  // namespace

struct WorkerPool::State {
  struct Worker {
    State* state = nullptr;
    uint32_t index = 0;
    system::Thread thread;

    void Run() { state->RunWorker(index); }
  };
  struct alignas(64) Slot {
    std::optional<Work> work;          // none: the thread ends
    std::atomic<uint32_t> running{0};  // workers that have not done their part
  };

  State(uint32_t threads_asked, Nodes nodes_given, uint32_t cpu_limit);
  Status Start();
  void Stop(uint32_t count);
  void AwaitFinished(Job job) const;
  Slot& SlotOf(Job job) { return slots[job % kJobsMax]; }
  void RunWorker(uint32_t index);
  bool KeepToNode(uint32_t index) const;
  void WorkThroughJobs(uint32_t index);
  bool HandOut(const Work& work, Job* job);

  const uint64_t fork_generation = system::ForkGeneration();
  const Nodes nodes;
  const uint32_t cpus;
  const PoolShape shape;
  const uint32_t spins;

  std::mutex handing_out;  // guards `started` and the members below, except atomics
  bool started = false;
  uint32_t waiting = 0;  // threads that wait in Begin for room
  std::vector<Worker> workers;
  std::array<Slot, kJobsMax> slots;
  std::atomic<bool> seated = true;

  // Numbers of jobs. A store to `begun` hands out the slot of that job.
  alignas(64) std::atomic<Job> begun{0};
  alignas(64) std::atomic<Job> finished{0};
};

WorkerPool::State::State(uint32_t threads_asked, Nodes nodes_given, uint32_t cpu_limit)
    : nodes(std::move(nodes_given)),
      cpus(CpuCount(nodes)),
      shape(ChoosePoolShape(threads_asked, cpus, cpu_limit)),
      spins(shape.spare_cpus ? kSpins : 0),
      workers(shape.threads) {}

Status WorkerPool::State::Start() {
  begun = finished = 0;
  for (uint32_t index = 0; index < shape.threads; ++index) {
    Worker& worker = workers[index];
    worker.state = this;
    worker.index = index;
    char name[32];
    std::snprintf(name, sizeof(name), "hybridopt/%u", index);
    Result<system::Thread> thread = system::Thread::Start<&Worker::Run>(name, &worker);
    if (!thread.ok()) {
      Stop(index);
      return Status::Error(thread.status().code(), "worker thread %u of %u did not start: %s",
                           index + 1, shape.threads, thread.status().message().c_str());
    }
    worker.thread = std::move(thread.value());
  }
  started = true;
  return Status();
}

void WorkerPool::State::Stop(uint32_t count) {
  SlotOf(begun + 1).work.reset();
  begun.fetch_add(1);
  begun.notify_all();
  for (uint32_t index = 0; index < count; ++index) workers[index].thread.Join();
}

void WorkerPool::State::AwaitFinished(Job job) const {
  Job seen = finished.load(std::memory_order_acquire);
  while (!HasFinished(seen, job)) seen = AwaitChange(finished, seen, spins);
}

void WorkerPool::State::RunWorker(uint32_t index) {
  if (!KeepToNode(index)) seated = false;
  WorkThroughJobs(index);
}

// Lets the calling worker run on all CPUs of its node, instead of on those that it inherited from
// the thread that started it. It is not bound to a single CPU, so that it can move to another one
// when its CPU is needed by another program. False if the system refuses, or if there is no memory
// for the list of CPUs.
bool WorkerPool::State::KeepToNode(uint32_t index) const {
  try {
    return system::PinThisThread(NodeOfThread(nodes, index, shape.threads).cpus);
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void WorkerPool::State::WorkThroughJobs(uint32_t index) {
  for (Job done = 0;;) {
    const Job last = AwaitChange(begun, done, spins);
    while (done != last) {
      Slot& slot = SlotOf(++done);
      if (!slot.work) return;
      slot.work->body(index);
      // Each worker does the jobs in order, so the last worker of this job finds all earlier jobs
      // finished.
      if (slot.running.fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
      slot.work->finished();
      finished.store(done);
      finished.notify_all();
    }
  }
}

// False if there is no room. Called with handing_out locked.
bool WorkerPool::State::HandOut(const Work& work, Job* job) {
  const Job next = begun.load(std::memory_order_relaxed) + 1;
  if (!HasFinished(finished.load(std::memory_order_acquire), next - kJobsMax)) return false;
  Slot& slot = SlotOf(next);
  slot.work = work;
  slot.running.store(shape.threads, std::memory_order_relaxed);
  *job = next;
  begun.store(next);
  begun.notify_all();
  return true;
}

WorkerPool::WorkerPool(uint32_t threads, Nodes nodes, uint32_t cpu_limit)
    : state_(std::make_unique<State>(threads, std::move(nodes), cpu_limit)) {}

WorkerPool::WorkerPool(uint32_t threads)
    : WorkerPool(threads, NodesOf(system::AllowedCpus()), system::CgroupCpuLimit()) {}

WorkerPool::~WorkerPool() {
  const bool forked = system::ForkGeneration() != state_->fork_generation;
  if (!forked && state_->started) state_->Stop(state_->shape.threads);
}

uint32_t WorkerPool::threads() const { return state_->shape.threads; }
uint32_t WorkerPool::cpus() const { return state_->cpus; }
bool WorkerPool::seated() const { return state_->seated; }

Status WorkerPool::Begin(const Work& work, Job* job) {
  State& state = *state_;
  // This check comes before the lock: in a child of fork the mutex may be held by a thread that
  // does not exist there.
  if (system::ForkGeneration() != state.fork_generation)
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "this process was forked after its worker pool was made, and threads do "
                         "not survive fork: make a new context in the child");
  std::unique_lock lock(state.handing_out);
  if (!state.started) HYBRIDOPT_TRY(state.Start());
  while (!state.HandOut(work, job)) {
    const Job oldest = state.begun.load(std::memory_order_relaxed) + 1 - kJobsMax;
    state.waiting += 1;
    lock.unlock();  // a worker that finishes a job may need the mutex to hand out another job
    state.AwaitFinished(oldest);
    lock.lock();
    state.waiting -= 1;
  }
  return {};
}

bool WorkerPool::TryBegin(const Work& work, Job* job) {
  std::lock_guard lock(state_->handing_out);
  return state_->waiting == 0 && state_->HandOut(work, job);
}

void WorkerPool::Await(Job job) { state_->AwaitFinished(job); }

Status WorkerPool::Run(FunctionRef<void(uint32_t)> body) {
  const auto nothing = [] {};
  Job job = 0;
  HYBRIDOPT_TRY(Begin({body, nothing}, &job));
  Await(job);
  return {};
}

PoolShape ChoosePoolShape(uint32_t threads_asked, uint32_t cpus, uint32_t cpu_limit) {
  const bool limited = cpu_limit != 0 && cpu_limit < cpus;
  const uint32_t usable = std::max(limited ? cpu_limit : cpus, 1u);
  const uint32_t threads = std::min(threads_asked == 0 ? usable : threads_asked, kThreadsMax);
  return {threads, !limited && threads < cpus};
}

WorkRange RangeOfWorker(uint64_t count, uint64_t grain, uint32_t index, uint32_t workers) {
  HYBRIDOPT_CHECK(grain > 0 && index < workers);
  const uint64_t grains = count / grain + (count % grain != 0);
  // The first `extra` workers take one grain more.
  const uint64_t each = grains / workers, extra = grains % workers;
  const auto cut = [&](uint64_t worker) {
    const uint64_t at = each * worker + std::min(worker, extra);
    return at == grains ? count : at * grain;
  };
  return {cut(index), cut(index + uint64_t{1})};
}

}  // namespace hybridopt
