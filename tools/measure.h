// What the commands doctor and bench measure of this machine, through the library's ABI: the rates
// of memory, of updates by each executor, of the link to a GPU, of pinning and of a disk.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "handles.h"
#include "memory/arena.h"
#include "runtime/worker_pool.h"

namespace tool {

using hybridopt::Result;
using hybridopt::Status;

// How the state of a bf16 param may be stored.
struct Layout {
  const char* name;  // in JSON
  const char* text;  // for people
  int32_t master_layout;
  int32_t moment_dtype;
  // What a step of AdamW reads and writes of the host's memory for each param there: gradient,
  // param, state; with split masters the param twice.
  double step_bytes;
};
inline constexpr Layout kLayouts[] = {
    {"fp32", "fp32 state", OFFLOAD_MASTER_FP32, OFFLOAD_FP32, 28},
    {"split", "split masters", OFFLOAD_MASTER_SPLIT, OFFLOAD_FP32, 26},
    {"small", "split masters, bf16 moments", OFFLOAD_MASTER_SPLIT, OFFLOAD_BF16, 18},
};

// Who updates the state, and where it is.
struct Executor {
  const char* name;  // in JSON
  const char* text;  // for people, behind a rate
  bool on_host;      // params in the host's memory, without a device
  double device_fraction;
  int32_t host_executors;
};
inline constexpr Executor kExecutors[] = {
    {"host", "", true, 0, OFFLOAD_EXECUTORS_AUTO},
    {"cpu", " by CPU threads", false, 0, OFFLOAD_EXECUTORS_CPU},
    {"streamed", " by the device with streams", false, 0, OFFLOAD_EXECUTORS_STREAMED},
    {"both", " by both", false, 0, OFFLOAD_EXECUTORS_AUTO},
    {"device", " with state on the device", false, 1, OFFLOAD_EXECUTORS_AUTO},
};
// Of host memory, for each param: gradient, param and state in fp32.
inline constexpr uint64_t kTrainingBytes = 16;

// A context that writes nothing to standard error.
Result<std::unique_ptr<Context>> MakeContext(int32_t device_kind, uint64_t sim_memory_bytes = 0);
Result<offload_context_info_t> InfoOf(const Context& context);

double MedianOf(std::vector<double> values);

// The memory of the host as update threads use it: each reads and writes its part of an array, and
// computes next to nothing.
class MemoryRate {
 public:
  static Result<std::unique_ptr<MemoryRate>> Make(uint32_t threads, uint64_t bytes);
  // Bytes a second in one pass over the array: read and written ones together.
  Result<double> Measure();

 private:
  MemoryRate(uint32_t threads, hybridopt::Arena array) : pool_(threads), array_(std::move(array)) {}

  hybridopt::WorkerPool pool_;
  hybridopt::Arena array_;
};

// A training of one bf16 param with AdamW.
class SmallTraining {
 public:
  static Result<std::unique_ptr<SmallTraining>> Make(const Context& context, const Layout& layout,
                                                     const Executor& executor, uint64_t elements);
  // The seconds of one step, from the call until it is done. `flags` as in offload_step_options.
  Result<double> Step(uint32_t flags);
  // The median of several steps of which the gradients are checked, in about a second.
  Result<double> MedianStep();
  Status Save(const std::string& path);
  ~SmallTraining();

 private:
  explicit SmallTraining(const Context& context) : context_(context) {}
  Status TakeOnHost(uint32_t threads, uint64_t bytes);
  Status TakeOnDevice(uint64_t bytes);

  const Context& context_;
  hybridopt::Arena host_;      // params, then gradients
  void* on_device_ = nullptr;  // the same of a device
  std::byte* params_ = nullptr;
  std::unique_ptr<Optimizer> optimizer_;
};

struct LinkRates {  // bytes a second
  double down = 0;
  double up = 0;
  double both = 0;  // both ways at once, added up
};
Result<LinkRates> MeasureLink(const Context& context, uint64_t bytes);

// How long it takes to get host memory that is pinned.
struct PinnedRung {
  uint64_t bytes = 0;
  uint64_t pinned_bytes = 0;  // less than asked for: more was not pinned
  double seconds = 0;
};
// Rungs of growing size, each four times the one before, up to `bytes_max`; the last one is the
// first that is not pinned as a whole, or takes more than some seconds.
Result<std::vector<PinnedRung>> ClimbPinned(const Context& context, uint64_t bytes_max);

struct DiskRates {  // bytes a second
  double write = 0;
  double read = 0;
  uint64_t bytes = 0;
};
// Saves a checkpoint in `directory`, reads all of it back and removes it.
Result<DiskRates> MeasureDisk(const Context& host, const std::string& directory, uint64_t elements);

}  // namespace tool
