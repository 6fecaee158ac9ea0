// The device port: memory, streams, events, copies and kernels of one device. The step pipeline
// uses only this interface, so that what tests show on the simulated device holds on a real one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/status.h"
#include "kernels/changes/changes.h"
#include "kernels/changes/tiles.h"
#include "kernels/kernels.h"
#include "kernels/matrix/matrix_update.h"

namespace hybridopt {

// A point in a stream: where the event was last recorded. The device creates it.
struct DeviceEvent;
using EventHandle = DeviceEvent*;
using StreamHandle = offload_stream_t;

// One span, or one matrix, that the device updates. The span's pointers are device addresses.
struct DeviceUpdate {
  UpdateSpan span;
  int32_t grad_dtype;
  int32_t param_dtype;
  // Index into the launch's coefficients; grad_factor there is only the sign of maximize.
  uint32_t coefficients;
  StateFormats formats = {};
  NotedBits noted = {};                   // at a device address; of the span's first element
  MatrixShape matrix = {};                // in a launch of matrices: the span's
  RowRuns runs = {};                      // the same
  std::span<const NsStep> ns_steps = {};  // the same

  SpanTypes types() const { return {grad_dtype, param_dtype, formats}; }
};

// All updates of one launch. The arrays must not change until the launch has run.
struct UpdateLaunch {
  Rule rule;  // the rule of all updates; SGD params with and without momentum need two launches
  std::span<const DeviceUpdate> updates;
  std::span<const Coefficients> coefficients;
  // Device address: skip all updates, or multiply gradients by its grad_factor.
  const Verdict* verdict;
  // A launch of matrices: a device address, aligned to 256 bytes, of as many bytes as the largest
  // matrix needs. The stream's launches share it.
  void* workspace = nullptr;
};

// The update of one matrix of a launch, at the launch's addresses.
inline MatrixUpdate MatrixOf(const UpdateLaunch& launch, const DeviceUpdate& one) {
  HYBRIDOPT_CHECK(one.coefficients < launch.coefficients.size());
  MatrixUpdate matrix{};
  matrix.span = one.span;
  matrix.types = one.types();
  matrix.shape = one.matrix;
  matrix.runs = one.runs;
  matrix.coefficients = launch.coefficients[one.coefficients];
  matrix.steps = one.ns_steps;
  matrix.noted = one.noted;
  matrix.workspace = launch.workspace;
  return matrix;
}

// One param's gradient in a norm launch.
struct NormInput {
  const void* grad;  // device address
  uint64_t count;
  int32_t dtype;
  uint64_t first_block;  // the index of its first block sum in block_sums
};

// The norm of all gradients and the verdict on it, in the fixed tree of kernels.h.
struct NormLaunch {
  // In registration order; must not change until the launch has run.
  std::span<const NormInput> inputs;
  double* block_sums;  // device scratch, one double per block
  double grad_scale;
  double grad_norm_max;
  Verdict* verdict;  // device address, written last; NULL: the launch makes only the sums
};

// Parts of params whose tiles a take of changes surveys, at device addresses. At most
// kChangePartsMost; the array must not change until the launch has run.
struct ChangeSurvey {
  std::span<const ChangePart> parts;
  ChangeTile* tiles;  // device address: all parts' tiles, in order
};

// The changed elements of parts, all of them with elements of the same size. Either all parts have
// an output, which gets indices and values, or `offsets` and `values` get those of all parts.
struct ChangeCollection {
  std::span<const ChangePart> parts;
  const uint32_t* starts;  // device address: for each tile, how many elements come before it
  uint16_t* offsets;       // device address: each changed element, counted in its tile
  std::byte* values;       // device address: their values
};

inline constexpr size_t kChangePartsMost = 1024;

// Rows of equal length that are copied within device memory. They begin to_stride and from_stride
// bytes apart, and no row overlaps another one.
struct RowsCopy {
  void* to;
  uint64_t to_stride;
  const void* from;
  uint64_t from_stride;
  uint64_t row_bytes;
  uint64_t rows;

  // From the first byte of the first row to the last byte of the last one.
  uint64_t to_bytes() const { return Extent(to_stride); }
  uint64_t from_bytes() const { return Extent(from_stride); }

 private:
  uint64_t Extent(uint64_t stride) const {
    return rows == 0 || row_bytes == 0 ? 0 : (rows - 1) * stride + row_bytes;
  }
};

// Device memory that has been taken and has no address yet.
struct DevicePages {
  uint64_t bytes = 0;             // whole pages
  std::vector<uint64_t> handles;  // the device's handles of the pages
};

struct DeviceMemory {
  uint64_t total_bytes;
  uint64_t free_bytes;
};

// Commands on one stream run in order; only events order commands of different streams. Functions
// that queue a command return before it has run. A failure of a command is sticky and asynchronous:
// a later call, Reached or Wait returns it as DEVICE_FAILED with the cause. Thread-safe.
class Device {
 public:
  virtual ~Device() = default;
  // To be called before the destructor: drops queued commands that have not begun, and waits for
  // the others. False if some work does not end in time: the device must then never be
  // destroyed.
  virtual bool Stop() { return true; }

  virtual int32_t kind() const = 0;
  virtual const char* name() const = 0;
  // The PCI address of the device, "0000:17:00.0", by which its NUMA node is found; "" if it has
  // none.
  virtual const char* pci_id() const { return ""; }
  // True if params and gradients are in host memory and the host updates them in place. Then the
  // library uses only memory, the NULL stream and its Run.
  virtual bool unified() const = 0;
  // True if streams share queues of the hardware: a stream that waits for a flag may then block the
  // very work that raises the flag, so callers' streams do not wait for flags.
  virtual bool shares_queues() const { return false; }

  virtual Result<DeviceMemory> Memory() const = 0;
  virtual Result<void*> Allocate(uint64_t bytes) = 0;         // aligned to 256 bytes
  virtual Status Free(void* data) = 0;                        // data may be NULL
  virtual Result<void*> Map(void* data, uint64_t bytes) = 0;  // see offload_device_map

  // Reserves a range of addresses for memory that grows and shrinks at its end. The range has no
  // memory until AppendPages. Unreserve frees the memory too.
  virtual Result<void*> Reserve(uint64_t bytes) = 0;
  virtual void Unreserve(void* range) = 0;
  // The page size of a range of `range_bytes`: the unit in which memory is appended and freed. A
  // power of two.
  virtual uint64_t page_bytes(uint64_t range_bytes) const = 0;
  // Takes `bytes` of memory, whole pages of such a range. OUT_OF_DEVICE_MEMORY if these are not
  // free.
  virtual Result<DevicePages> TakePages(uint64_t range_bytes, uint64_t bytes) = 0;
  virtual void FreePages(DevicePages& pages) = 0;  // frees pages that no range has
  // Appends the pages to the memory of the range. `pages` is empty afterwards, unless the call
  // fails.
  virtual Status AppendPages(void* range, DevicePages& pages) = 0;
  // Frees the memory of the range behind its first `bytes`, which are whole pages.
  virtual void TruncatePages(void* range, uint64_t bytes) = 0;

  // INVALID_ARGUMENT if the range is known not to be memory of this device now.
  virtual Status CheckRange(const void* data, uint64_t bytes) const = 0;

  // Pins host memory, so that this device can copy it asynchronously. OUT_OF_HOST_MEMORY if the
  // system does not pin these bytes: the text ends with the limit that was reached, because callers
  // append "raise that limit".
  virtual Status PinHost(void* data, uint64_t bytes) = 0;
  virtual void UnpinHost(void* data) = 0;
  // Large memory is pinned in pieces of about this size, so that few bytes are pinned again when it
  // grows or shrinks. No copy may have memory of two pieces, so each array is in one piece.
  virtual uint64_t pin_piece_bytes() const { return uint64_t{1} << 30; }
  // To be called when the content of this host memory is not needed any more. The simulated device
  // fills it with NaN, so that a consumer that did not wait produces wrong bits, which tests see.
  virtual void DiscardHost(void*, uint64_t) {}
  // Makes a word, 0 at first, that streams can wait for. It lives as long as the device, because a
  // stream may still read it after the object that asked for it has been destroyed.
  virtual Result<std::atomic<uint64_t>*> NewFlag() = 0;

  // `label` names what the stream or event is for; errors show it.
  virtual Result<StreamHandle> CreateStream(const char* label) = 0;
  // Finishes the stream's queued work first, if that is possible.
  virtual Status DestroyStream(StreamHandle stream) = 0;
  // Destroys a stream without finishing its queued work: commands that have not begun are dropped,
  // and a wait for another stream ends. Returns when the stream touches no memory any more.
  virtual void AbandonStream(StreamHandle stream) = 0;
  // INVALID_ARGUMENT if this device did not make it.
  virtual Status CheckStream(StreamHandle stream) const = 0;
  virtual Result<EventHandle> CreateEvent(const char* label) = 0;
  virtual void DestroyEvent(EventHandle event) = 0;

  virtual Status Record(EventHandle event, StreamHandle stream) = 0;
  // Later work on `stream` waits for the work behind which `event` was last recorded at the time of
  // this call; an event that was never recorded is complete.
  virtual Status StreamWait(StreamHandle stream, EventHandle event) = 0;
  // Later work on `stream` waits until *flag >= value, both below 2^63. The flag must outlive the
  // stream's work; a real device can read only flags that NewFlag has returned.
  virtual Status StreamWaitFlag(StreamHandle stream, const std::atomic<uint64_t>* flag,
                                uint64_t value) = 0;
  // Whether the stream has reached the event's latest record. Does not wait.
  virtual Result<bool> Reached(EventHandle event) = 0;
  // Blocks the calling thread until the stream has reached the event's latest record. TIMED_OUT,
  // with a text that names the stream, after timeout_ns; negative: no limit.
  virtual Status Wait(EventHandle event, int64_t timeout_ns) = 0;
  // Seconds between two reached records of events on one stream.
  virtual Result<double> Elapsed(EventHandle begin, EventHandle end) = 0;
  virtual Status Synchronize(StreamHandle stream, int64_t timeout_ns) = 0;
  // Blocks until no stream of the device has work, those of other libraries among them: to be
  // called before memory of which any stream may make use is freed.
  virtual Status AwaitAllStreams() = 0;

  virtual Status CopyToHost(StreamHandle stream, void* host, const void* device,
                            uint64_t bytes) = 0;
  virtual Status CopyToDevice(StreamHandle stream, void* device, const void* host,
                              uint64_t bytes) = 0;
  virtual Status CopyRows(StreamHandle stream, const RowsCopy& copy) = 0;
  // Sets every element to the pattern.
  virtual Status Fill(StreamHandle stream, void* device, uint64_t count,
                      const Pattern& pattern) = 0;
  // As FollowParamsFunction of kernels.h; the arrays are at device addresses.
  virtual Status FollowParams(StreamHandle stream, const void* params, int32_t dtype,
                              uint64_t count, float* masters) = 0;
  virtual Status Norm(StreamHandle stream, const NormLaunch& launch) = 0;
  virtual Status SetVerdict(StreamHandle stream, const Verdict& value, Verdict* device) = 0;
  virtual Status Update(StreamHandle stream, const UpdateLaunch& launch) = 0;
  // UNSUPPORTED, with the way out, if this device cannot update matrices.
  virtual Status CheckMatrices() const = 0;
  // What multiplies matrices here, with its version, if it gives them other bits than the CPU
  // workers do: then only the device may update them. "" if the bits are those of the workers. Not
  // before CheckMatrices.
  virtual std::string matrix_products() const { return {}; }
  // The bytes of UpdateLaunch::workspace for a matrix.
  virtual uint64_t MatrixWorkspaceBytes(const MatrixShape& shape) const = 0;
  // To be called once for each shape before UpdateMatrices, and before a stream waits for a flag:
  // the first product of a shape may load code, which waits for all streams.
  virtual Status PrepareMatrices(StreamHandle, const MatrixShape&, void* workspace) {
    (void)workspace;
    return {};
  }
  // The same as Update for whole matrices; the rule is Rule::kMuon.
  virtual Status UpdateMatrices(StreamHandle stream, const UpdateLaunch& launch) = 0;
  // As SurveyTile and CollectTile.
  virtual Status SurveyChanges(StreamHandle stream, const ChangeSurvey& launch) = 0;
  virtual Status CollectChanges(StreamHandle stream, const ChangeCollection& launch) = 0;
  // The default of chunk_elements.
  virtual uint64_t default_chunk_elements() const { return uint64_t{1} << 20; }
  virtual Status Run(StreamHandle stream, offload_stream_function_t function, void* user) = 0;
};

// The failure of a wait that has taken device_timeout_ns; `timeout_ns` is its value. The text
// begins with `subject` and ends with `rest`.
inline Status NoProgress(const std::string& subject, int64_t timeout_ns, const std::string& rest) {
  return Status::Error(OFFLOAD_DEVICE_FAILED,
                       "%s made no progress for %.1f s (device_timeout_ns of the context)%s",
                       subject.c_str(), static_cast<double>(timeout_ns) * 1e-9, rest.c_str());
}

// The label of streams that are made for callers. A device may treat the pipeline's own streams
// differently.
inline constexpr char kCallersStreamLabel[] = "caller";
// The label of a stream whose kernels have a lower priority than all others.
inline constexpr char kBackgroundStreamLabel[] = "state update";

// Params and gradients in host memory (device/host.cpp).
std::unique_ptr<Device> CreateHostDevice();

struct SimOptions {
  uint64_t memory_bytes;
  uint64_t seed;
  uint64_t delay_ns_max;
  uint64_t pinned_bytes_max = UINT64_MAX;  // PinHost refuses to exceed this
  int64_t timeout_ns = INT64_MAX;          // a stream that takes longer counts as stuck
};

// An accelerator made of threads (device/sim.cpp). Its kernels are `kernels`.
Result<std::unique_ptr<Device>> CreateSimDevice(const SimOptions& options,
                                                const KernelTable& kernels);

struct CudaOptions {
  int32_t device_index = 0;  // among the visible devices
  int64_t timeout_ns;        // work that takes longer counts as failed
};

// An NVIDIA GPU (device/cuda). UNSUPPORTED if there is no GPU or no driver, or if this build has no
// CUDA.
Result<std::unique_ptr<Device>> CreateCudaDevice(const CudaOptions& options);

}  // namespace hybridopt
