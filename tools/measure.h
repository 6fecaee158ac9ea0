// Measurements of this machine for the commands doctor and bench, made through the library's ABI:
// the rates of memory, of updates by each executor, of the link to a GPU, of pinning and of a disk.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "handles.h"
#include "memory/arena.h"
#include "runtime/work_pieces.h"
#include "runtime/worker_pool.h"

namespace tool {

using hybridopt::Result;
using hybridopt::Status;

// A layout of the state of a bf16 param.
struct Layout {
  const char* name;  // in JSON
  const char* text;  // for people
  int32_t master_layout;
  int32_t moment_dtype;
  // The bytes of the host's memory that a step of AdamW reads and writes for each element there:
  // gradient, param, state; with split masters the param twice.
  double step_bytes;
};
inline constexpr Layout kLayouts[] = {
    {"fp32", "fp32 state", OFFLOAD_MASTER_FP32, OFFLOAD_FP32, 28},
    {"split", "split masters", OFFLOAD_MASTER_SPLIT, OFFLOAD_FP32, 26},
    {"small", "split masters, bf16 moments", OFFLOAD_MASTER_SPLIT, OFFLOAD_BF16, 18},
};

// An executor, and where the state is that it updates.
struct Executor {
  const char* name;  // in JSON
  const char* text;  // for people, after a rate
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
// The host memory of each element: gradient, param and state in fp32.
inline constexpr uint64_t kTrainingBytes = 16;
inline constexpr double kNoisyCpus = 0.1;  // fraction of all CPUs that other processes keep busy

// How much is measured.
struct Sizes {
  uint64_t elements = 0;      // of the param that is trained
  uint64_t memory_bytes = 0;  // of the other measurements
  uint64_t pinned_bytes = 0;  // the largest size that is tried
};
// `memory_bytes` is the limit that --memory gives; 0: an eighth of what is available.
Result<Sizes> SizesOf(uint64_t memory_bytes);

// A context that writes nothing to standard error.
Result<std::unique_ptr<Context>> MakeContext(int32_t device_kind, uint64_t sim_memory_bytes = 0);
// The device that --device names; the GPU if the name is empty.
Result<std::unique_ptr<Context>> OpenDevice(const std::string& device);
// The same, or NULL where there is none: for "none", and for an empty name without a GPU.
Result<std::unique_ptr<Context>> OpenDeviceOrNone(const std::string& device);
Result<offload_context_info_t> InfoOf(const Context& context);

double MedianOf(std::vector<double> values);

// Measures the rate of the host's memory as update threads use it: they read and write an array in
// the pieces and the order of an update, and compute almost nothing.
class MemoryRate {
 public:
  static Result<std::unique_ptr<MemoryRate>> Make(uint32_t threads, uint64_t bytes);
  // Makes one pass over the array. Returns its rate in bytes per second; bytes read and bytes
  // written count both.
  Result<double> Measure();

 private:
  MemoryRate(uint32_t threads, hybridopt::Arena array)
      : pool_(threads), pieces_(threads), array_(std::move(array)) {}

  hybridopt::WorkerPool pool_;
  hybridopt::WorkPieces pieces_;
  hybridopt::Arena array_;
};

// A training of one bf16 param with AdamW.
class SmallTraining {
 public:
  static Result<std::unique_ptr<SmallTraining>> Make(const Context& context, const Layout& layout,
                                                     const Executor& executor, uint64_t elements);
  // The duration in seconds of one step, from the call to its completion. `flags` are those of
  // offload_step_options.
  Result<double> Step(uint32_t flags);
  // The median duration of several steps that check their gradients; takes about a second.
  Result<double> MedianStep();
  // What the last step did.
  Result<offload_step_result_t> LastResult() const;
  Status Save(const std::string& path);
  // Steps between the two are recorded (docs/TRACE.md), and then written to the file.
  Status StartTrace();
  Status StopTrace(const std::string& path);
  ~SmallTraining();

 private:
  explicit SmallTraining(const Context& context) : context_(context) {}
  Status TakeOnHost(uint32_t threads, uint64_t bytes);
  Status TakeOnDevice(uint64_t bytes);

  const Context& context_;
  hybridopt::Arena host_;      // params, then gradients
  void* on_device_ = nullptr;  // the same arrays on the device
  std::byte* params_ = nullptr;
  std::unique_ptr<Optimizer> optimizer_;
};

struct LinkRates {  // bytes a second
  double down = 0;
  double up = 0;
  double both = 0;  // the sum of both directions, used at the same time
};
Result<LinkRates> MeasureLink(const Context& context, uint64_t bytes);

// How long it took to allocate pinned host memory of one size.
struct PinnedRung {
  uint64_t bytes = 0;
  uint64_t pinned_bytes = 0;  // less than `bytes` if not all of it could be pinned
  double seconds = 0;
};
// Allocates growing sizes, each four times the one before, up to `bytes_max`. The last one is the
// first that cannot be pinned as a whole or takes more than some seconds.
Result<std::vector<PinnedRung>> ClimbPinned(const Context& context, uint64_t bytes_max);

struct DiskRates {  // bytes a second
  double write = 0;
  double read = 0;
  uint64_t bytes = 0;
};
// Saves a checkpoint in `directory`, reads all of it back and removes it.
Result<DiskRates> MeasureDisk(const Context& host, const std::string& directory, uint64_t elements);

}  // namespace tool
