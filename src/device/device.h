// The device port: memory, streams, events, copies and kernels of one device. The pipeline in
// step/step.cpp is written against this alone, so that what holds on the simulated device holds on
// a real one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "kernels/kernels.h"

namespace hybridopt {

// A point in a stream. Created by the device; bound to its latest record.
struct DeviceEvent;
using EventHandle = DeviceEvent*;
using StreamHandle = offload_stream_t;

// One span for a device-side update. The span's pointers are device addresses.
struct DeviceUpdate {
  UpdateSpan span;
  int32_t grad_dtype;
  int32_t param_dtype;
  uint32_t coefficients;  // index; that entry's grad_factor holds only maximize's sign
  StateLayout layout = StateLayout::kFp32;

  SpanTypes types() const { return {grad_dtype, param_dtype, layout}; }
};

// All updates of one launch. The arrays stay as they are until the launch has run.
struct UpdateLaunch {
  Rule rule;  // one rule for all; SGD params with and without momentum come in two launches
  std::span<const DeviceUpdate> updates;
  std::span<const Coefficients> coefficients;
  const Verdict* verdict;  // device address: skip it all, or multiply by its grad_factor
  // Whether other work on the device goes first: the launch then uses a small part of it.
  bool background = false;
};

// One param's gradient in a norm launch.
struct NormInput {
  const void* grad;  // device address
  uint64_t count;
  int32_t dtype;
  uint64_t first_block;  // where its block sums go in block_sums
};

// The norm of all gradients and the verdict on it, in the fixed tree of kernels.h.
struct NormLaunch {
  std::span<const NormInput> inputs;  // in registration order; stays as it is until it has run
  double* block_sums;                 // device scratch, one double per block
  double grad_scale;
  double grad_norm_max;
  Verdict* verdict;  // device address, written last; NULL: only the sums are wanted
};

// Memory of the device that has been taken and lies behind no address yet.
struct DevicePages {
  uint64_t bytes = 0;             // whole pages
  std::vector<uint64_t> handles;  // the device's own names for them
};

struct DeviceMemory {
  uint64_t total_bytes;
  uint64_t free_bytes;
};

// Commands on one stream run in order; different streams are unordered but for events. Functions
// that queue return before the command has run. A failure of a command is sticky and asynchronous:
// it shows in a later call, in Reached or in Wait, as DEVICE_FAILED with the cause. Thread-safe.
class Device {
 public:
  virtual ~Device() = default;
  // To be called before the destructor: drops what is queued and has not begun, and waits for what
  // has. False if some work does not end in time: the device must then never be destroyed.
  virtual bool Stop() { return true; }

  virtual int32_t kind() const = 0;
  virtual const char* name() const = 0;
  // Its PCI address, "0000:17:00.0", from which its NUMA node is looked up; "" if it has none.
  virtual const char* pci_id() const { return ""; }
  // True where params and gradients are in host memory and the host updates them in place. Then
  // only memory, the NULL stream and its Run are used.
  virtual bool unified() const = 0;
  // True where streams share queues of the hardware: one that waits for a flag may then hold up the
  // very work that raises it, so callers' streams are not made to wait for flags.
  virtual bool shares_queues() const { return false; }

  virtual Result<DeviceMemory> Memory() const = 0;
  virtual Result<void*> Allocate(uint64_t bytes) = 0;         // aligned to 256 bytes
  virtual Status Free(void* data) = 0;                        // NULL is fine
  virtual Result<void*> Map(void* data, uint64_t bytes) = 0;  // see offload_device_map

  // A range of addresses for memory that grows and shrinks at its end. No memory lies behind it
  // until AppendPages. Unreserve frees what does.
  virtual Result<void*> Reserve(uint64_t bytes) = 0;
  virtual void Unreserve(void* range) = 0;
  // The unit in which memory comes and goes behind a range of so many bytes; a power of two.
  virtual uint64_t page_bytes(uint64_t range_bytes) const = 0;
  // Takes `bytes`, whole pages of such a range. OUT_OF_DEVICE_MEMORY where there is no room.
  virtual Result<DevicePages> TakePages(uint64_t range_bytes, uint64_t bytes) = 0;
  virtual void FreePages(DevicePages& pages) = 0;  // that no range has
  // Puts the pages behind the first bytes of the range that have no memory yet. `pages` is empty
  // afterwards, unless it fails.
  virtual Status AppendPages(void* range, DevicePages& pages) = 0;
  // Frees all but the first `bytes`, whole pages, of the memory behind the range.
  virtual void TruncatePages(void* range, uint64_t bytes) = 0;

  // INVALID_ARGUMENT if the range is known not to be memory of this device now.
  virtual Status CheckRange(const void* data, uint64_t bytes) const = 0;

  // Makes host memory fit for asynchronous copies, as this device needs it. OUT_OF_HOST_MEMORY
  // where the system does not pin so much.
  virtual Status PinHost(void* data, uint64_t bytes) = 0;
  virtual void UnpinHost(void* data) = 0;
  // Large memory is pinned in pieces of so many bytes, so that little is pinned anew when it grows
  // or shrinks. A power of two.
  virtual uint64_t pin_piece_bytes() const { return uint64_t{1} << 30; }
  // A word, 0 at first, that streams can wait for. It lives as long as the device: a stream may
  // still be about to look at it when whoever asked for it has gone.
  virtual Result<std::atomic<uint64_t>*> NewFlag() = 0;

  // `label` names what the stream or event is for; it shows in errors.
  virtual Result<StreamHandle> CreateStream(const char* label) = 0;
  virtual Status DestroyStream(StreamHandle stream) = 0;  // finishes its work first, if it can
  // Destroys it without its queued work: what has not begun is dropped, and a wait for another
  // stream ends. Returns when the stream touches no memory any more.
  virtual void AbandonStream(StreamHandle stream) = 0;
  virtual Status CheckStream(StreamHandle stream) const = 0;  // INVALID_ARGUMENT if not ours
  virtual Result<EventHandle> CreateEvent(const char* label) = 0;
  virtual void DestroyEvent(EventHandle event) = 0;

  virtual Status Record(EventHandle event, StreamHandle stream) = 0;
  // Later work on `stream` waits for what `event` was last recorded behind at the time of this
  // call; an event never recorded is complete.
  virtual Status StreamWait(StreamHandle stream, EventHandle event) = 0;
  // Later work on `stream` waits until *flag >= value, both below 2^63. The flag outlives the
  // stream's work; a real device can only look at those of NewFlag.
  virtual Status StreamWaitFlag(StreamHandle stream, const std::atomic<uint64_t>* flag,
                                uint64_t value) = 0;
  // Whether the event's latest record has been reached. Does not wait.
  virtual Result<bool> Reached(EventHandle event) = 0;
  // Blocks the calling thread until the event's latest record has been reached. TIMED_OUT after
  // timeout_ns; negative: no limit.
  virtual Status Wait(EventHandle event, int64_t timeout_ns) = 0;
  // Seconds between two reached records of events on one stream.
  virtual Result<double> Elapsed(EventHandle begin, EventHandle end) = 0;
  virtual Status Synchronize(StreamHandle stream, int64_t timeout_ns) = 0;

  virtual Status CopyToHost(StreamHandle stream, void* host, const void* device,
                            uint64_t bytes) = 0;
  virtual Status CopyToDevice(StreamHandle stream, void* device, const void* host,
                              uint64_t bytes) = 0;
  // Every element becomes value, rounded to the dtype (to nearest).
  virtual Status Fill(StreamHandle stream, void* device, int32_t dtype, uint64_t count,
                      float value) = 0;
  virtual Status ToFp32(StreamHandle stream, const void* source, int32_t dtype, uint64_t count,
                        float* destination) = 0;  // all device addresses
  virtual Status Norm(StreamHandle stream, const NormLaunch& launch) = 0;
  virtual Status SetVerdict(StreamHandle stream, const Verdict& value, Verdict* device) = 0;
  virtual Status Update(StreamHandle stream, const UpdateLaunch& launch) = 0;
  // How much of the host share goes at a time where the caller does not say.
  virtual uint64_t default_chunk_elements() const { return uint64_t{1} << 20; }
  virtual Status Run(StreamHandle stream, offload_stream_function_t function, void* user) = 0;
};

// The label of streams that callers ask for. A device keeps its pipeline's own apart from them.
inline constexpr char kCallersStreamLabel[] = "caller";
// The label of a stream whose kernels give way to all others.
inline constexpr char kBackgroundStreamLabel[] = "state update";

// Params and gradients in host memory (device/host.cpp).
std::unique_ptr<Device> CreateHostDevice();

struct SimOptions {
  uint64_t memory_bytes;
  uint64_t seed;
  uint64_t delay_ns_max;
  uint64_t pinned_bytes_max = UINT64_MAX;  // PinHost refuses what goes beyond
  int64_t timeout_ns = INT64_MAX;          // streams that take longer are stuck
};

// An accelerator made of threads (device/sim.cpp). Its kernels are `kernels`.
Result<std::unique_ptr<Device>> CreateSimDevice(const SimOptions& options,
                                                const KernelTable& kernels);

struct CudaOptions {
  int32_t device_index = 0;  // among those that are visible
  int64_t timeout_ns;        // work that takes longer has failed
};

// An NVIDIA GPU (device/cuda), UNSUPPORTED where there is none, no driver, or no CUDA in this
// build.
Result<std::unique_ptr<Device>> CreateCudaDevice(const CudaOptions& options);

}  // namespace hybridopt
