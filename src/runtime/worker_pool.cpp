#include "runtime/worker_pool.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/prim.h"

namespace hybridopt {
namespace {

constexpr uint32_t kThreadsMax = 1024;

// Some 50 us: Runs that follow each other closely, as those of chunks do, need no sleep in between.
// Only with a CPU to spare: with as many threads as CPUs one of them spins where another has to
// run, and a Run that took 7 us takes 160 (measured). Under a CPU quota spinning would eat it.
constexpr uint32_t kSpins = 1000;

void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
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
    State* state;
    uint32_t index;
    pthread_t thread;
  };

  State(uint32_t threads_asked, Nodes nodes_given, uint32_t cpu_limit);
  Status Start();
  void Stop(uint32_t count);
  static void* ThreadMain(void* worker);

  const uint64_t fork_generation = prim::ForkGeneration();
  const Nodes nodes;
  const uint32_t cpus;
  const PoolShape shape;
  const uint32_t spins;

  std::mutex turn;  // held for a whole Run; guards started and body
  bool started = false;
  std::vector<Worker> workers;
  const FunctionRef<void(uint32_t)>* body = nullptr;  // null in a new job: the thread ends
  std::atomic<bool> pinned;
  std::atomic<bool> seated = true;

  // Counts jobs. A worker that has seen another value has work to do; storing it hands out body.
  alignas(64) std::atomic<uint32_t> job{0};
  // The job that all workers have finished last.
  alignas(64) std::atomic<uint32_t> finished{0};
  alignas(64) std::atomic<uint32_t> running{0};
};

WorkerPool::State::State(uint32_t threads_asked, Nodes nodes_given, uint32_t cpu_limit)
    : nodes(std::move(nodes_given)),
      cpus(CpuCount(nodes)),
      shape(ChoosePoolShape(threads_asked, cpus, cpu_limit)),
      spins(shape.pinned && shape.threads < cpus ? kSpins : 0),
      workers(shape.threads),
      pinned(shape.pinned) {}

Status WorkerPool::State::Start() {
  job = finished = 0;
  for (uint32_t index = 0; index < shape.threads; ++index) {
    workers[index] = {this, index, {}};
    Result<pthread_t> thread = prim::StartThread(ThreadMain, &workers[index]);
    if (!thread.ok()) {
      Stop(index);
      return Status::Error(thread.status().code(), "worker thread %u of %u did not start: %s",
                           index + 1, shape.threads, thread.status().message().c_str());
    }
    workers[index].thread = thread.value();
  }
  started = true;
  return Status();
}

void WorkerPool::State::Stop(uint32_t count) {
  body = nullptr;
  job.fetch_add(1);
  job.notify_all();
  for (uint32_t index = 0; index < count; ++index) prim::JoinThread(workers[index].thread);
}

void* WorkerPool::State::ThreadMain(void* worker) {
  State& state = *static_cast<Worker*>(worker)->state;
  const uint32_t index = static_cast<Worker*>(worker)->index;
  prim::ResetFloatingPointMode();
  char name[16];
  std::snprintf(name, sizeof(name), "hybridopt/%u", index);
  prim::NameThisThread(name);
  // Unpinned threads get the CPUs of their node, not those of the thread that called Run first.
  if (!prim::PinThisThread(
          CpusOfThread(state.nodes, index, state.shape.threads, state.shape.pinned)))
    state.pinned = state.seated = false;

  uint32_t job = 0;
  while (true) {
    job = AwaitChange(state.job, job, state.spins);
    if (state.body == nullptr) return nullptr;
    (*state.body)(index);
    if (state.running.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      state.finished.store(job);
      state.finished.notify_one();
    }
  }
}

WorkerPool::WorkerPool(uint32_t threads, Nodes nodes, uint32_t cpu_limit)
    : state_(std::make_unique<State>(threads, std::move(nodes), cpu_limit)) {}

WorkerPool::WorkerPool(uint32_t threads)
    : WorkerPool(threads, NodesOf(prim::AllowedCpus()), prim::CgroupCpuLimit()) {}

WorkerPool::~WorkerPool() {
  const bool forked = prim::ForkGeneration() != state_->fork_generation;
  if (!forked && state_->started) state_->Stop(state_->shape.threads);
}

uint32_t WorkerPool::threads() const { return state_->shape.threads; }
uint32_t WorkerPool::cpus() const { return state_->cpus; }
bool WorkerPool::pinned() const { return state_->pinned; }
bool WorkerPool::seated() const { return state_->seated; }

Status WorkerPool::Run(FunctionRef<void(uint32_t)> body) {
  State& state = *state_;
  // Looked at before the mutex, which a thread that the child does not have may hold for ever.
  if (prim::ForkGeneration() != state.fork_generation)
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "this process was forked after its worker pool was made, and threads do "
                         "not survive fork: make a new context in the child");
  std::lock_guard turn(state.turn);
  if (!state.started) HYBRIDOPT_TRY(state.Start());
  state.body = &body;
  state.running.store(state.shape.threads, std::memory_order_relaxed);
  const uint32_t before = state.finished.load(std::memory_order_relaxed);
  state.job.fetch_add(1);
  state.job.notify_all();
  AwaitChange(state.finished, before, state.spins);
  return Status();
}

PoolShape ChoosePoolShape(uint32_t threads_asked, uint32_t cpus, uint32_t cpu_limit) {
  const bool limited = cpu_limit != 0 && cpu_limit < cpus;
  const uint32_t usable = std::max(limited ? cpu_limit : cpus, 1u);
  const uint32_t threads = std::min(threads_asked == 0 ? usable : threads_asked, kThreadsMax);
  return {threads, !limited && threads <= cpus};
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
