// Threads that stay on their CPUs and run one function together. Ranges are fixed by worker index,
// so that the same worker meets the same memory in every step.
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
  bool pinned() const;    // true if no two threads share a CPU
  bool seated() const;    // false if the system refused to keep a thread on its node

  // Calls body(index) once on each worker, index 0 to threads() - 1, and returns when all have
  // returned. Callers from several threads take turns. body must not throw and must not call Run.
  // Errors: OUT_OF_HOST_MEMORY if the first call cannot start the threads (a later one tries
  // again), INVALID_STATE in a child of fork.
  Status Run(FunctionRef<void(uint32_t)> body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// How many threads a pool has, and whether each gets a CPU of its own. A cgroup that grants fewer
// CPUs than the affinity mask shares them with others: the scheduler then knows better.
struct PoolShape {
  uint32_t threads;
  bool pinned;
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
