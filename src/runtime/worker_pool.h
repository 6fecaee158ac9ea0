// WorkerPool: threads that stay on their NUMA node and work through one queue of jobs. Each worker
// does its part of every job, in order; it does not wait for the other workers before it begins the
// next job.
#pragma once

#include <cstdint>
#include <memory>

#include "base/function_ref.h"
#include "base/status.h"
#include "runtime/topology.h"

namespace hybridopt {

class WorkerPool {
 public:
  // The threads run on the CPUs of `nodes`. A cgroup may grant only the time of cpu_limit CPUs (0:
  // no limit). threads 0: one per CPU; at most 1024. Starts no thread.
  WorkerPool(uint32_t threads, Nodes nodes, uint32_t cpu_limit);
  explicit WorkerPool(uint32_t threads);  // on all CPUs this process may use
  ~WorkerPool();  // joins the threads; in a forked child it leaves them alone
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  uint32_t threads() const;
  uint32_t cpus() const;  // of the nodes given
  bool seated() const;    // false if the system refused to keep a thread on its node

  // The number of a job that has been handed out. Jobs finish in the order in which they began.
  using Job = uint32_t;
  static constexpr uint32_t kJobsMax = 128;  // at a time: more than an optimizer ever begins ahead

  struct Work {
    FunctionRef<void(uint32_t)> body;  // every worker, 0 to threads() - 1, calls it once
    FunctionRef<void()> finished;      // the worker that is the last to finish its part calls this
  };
  // Hands out a job: each worker does its part after its parts of the earlier jobs. Begin does not
  // wait for that; it waits only while kJobsMax jobs have not finished. `*job` is written before a
  // worker begins. The functions and what they use must live until Await has returned; they must
  // not throw, nor wait for a job. Thread-safe. Errors: OUT_OF_HOST_MEMORY if the first call cannot
  // start the threads (a later call tries again), INVALID_STATE in a child of fork.
  Status Begin(const Work& work, Job* job);
  // The same, for a worker: returns false if Begin would wait, or if another thread waits in Begin.
  // To be called only while a job has not finished.
  bool TryBegin(const Work& work, Job* job);
  // Returns when the job's `finished` has returned.
  void Await(Job job);
  // Begins a job, and waits for it.
  Status Run(FunctionRef<void(uint32_t)> body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// How many threads a pool has, and whether CPUs are left over when all of them run. None is left
// over if a cgroup grants fewer CPUs than the affinity mask has, because it limits time, not CPUs.
struct PoolShape {
  uint32_t threads;
  bool spare_cpus;
};
PoolShape ChoosePoolShape(uint32_t threads_asked, uint32_t cpus, uint32_t cpu_limit);

// The range [begin, end) of `count` elements that worker `index` of `workers` works on. The
// workers' ranges are in order, cover all elements and are cut at multiples of `grain` elements.
struct WorkRange {
  uint64_t begin;
  uint64_t end;
};
WorkRange RangeOfWorker(uint64_t count, uint64_t grain, uint32_t index, uint32_t workers);

}  // namespace hybridopt
