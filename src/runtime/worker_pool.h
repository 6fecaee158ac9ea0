// Threads that stay on their NUMA node and work through one queue of jobs. Each does its part of
// every job, in order and at its own pace: none waits for the others before it goes on to the next
// job.
#pragma once

#include <cstdint>
#include <memory>

#include "base/function_ref.h"
#include "base/status.h"
#include "runtime/topology.h"

namespace hybridopt {

class WorkerPool {
 public:
  // On the CPUs of `nodes`, of which a cgroup may grant only cpu_limit (0 = all). threads 0 = one
  // per CPU; at most 1024. Starts nothing.
  WorkerPool(uint32_t threads, Nodes nodes, uint32_t cpu_limit);
  explicit WorkerPool(uint32_t threads);  // on all CPUs this process may use
  ~WorkerPool();  // joins the threads; in a forked child it leaves them alone
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  uint32_t threads() const;
  uint32_t cpus() const;  // of the nodes given
  bool seated() const;    // false if the system refused to keep a thread on its node

  // A job that has been handed out. Jobs finish in the order in which they were.
  using Job = uint32_t;
  static constexpr uint32_t kJobsMax = 128;  // at a time: more than an optimizer ever begins ahead

  struct Work {
    FunctionRef<void(uint32_t)> body;  // every worker, 0 to threads() - 1, calls it once
    FunctionRef<void()> finished;      // then the worker that was last calls this
  };
  // Hands out a job: workers do their parts behind the jobs before it. Returns without waiting for
  // that, but while kJobsMax are under way. `*job` is written before anybody begins. What the
  // functions refer to must live until Await has returned; they must not throw, nor wait for a job.
  // Thread-safe. Errors: OUT_OF_HOST_MEMORY if the first call cannot start the threads (a later one
  // tries again), INVALID_STATE in a child of fork.
  Status Begin(const Work& work, Job* job);
  // The same, for a worker: returns false where Begin would wait, and where somebody waits in
  // Begin. Only while a job is under way.
  bool TryBegin(const Work& work, Job* job);
  // Returns when the job's `finished` has returned.
  void Await(Job job);
  // Begins a job, and waits for it.
  Status Run(FunctionRef<void(uint32_t)> body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// How many threads a pool has, and whether CPUs are left over when all of them run. A cgroup that
// grants fewer CPUs than the affinity mask grants time, and none is left over.
struct PoolShape {
  uint32_t threads;
  bool spare_cpus;
};
PoolShape ChoosePoolShape(uint32_t threads_asked, uint32_t cpus, uint32_t cpu_limit);

// The part [begin, end) of `count` elements that worker `index` of `workers` works on: contiguous,
// in order, covering all, cut at multiples of `grain` elements.
struct WorkRange {
  uint64_t begin;
  uint64_t end;
};
WorkRange RangeOfWorker(uint64_t count, uint64_t grain, uint32_t index, uint32_t workers);

}  // namespace hybridopt
