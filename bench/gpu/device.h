// Shared by the suites for a GPU: device memory, streams, and the layouts of state.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "library.h"
#include "pages.h"
#include "report.h"
#include "suites.h"
#include "team.h"

namespace bench {

constexpr uint64_t kGiB = uint64_t{1} << 30;

inline void RequireCuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "hybridopt_bench: %s: %s\n", call, cudaGetErrorString(error));
  std::exit(1);
}
#define REQUIRE_CUDA(call) RequireCuda((call), #call)

class DeviceBuffer {
 public:
  explicit DeviceBuffer(uint64_t bytes) { REQUIRE_CUDA(cudaMalloc(&data_, bytes)); }
  ~DeviceBuffer() { (void)cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  void* data() const { return data_; }
  std::byte* bytes() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_ = nullptr;
};

class Stream {
 public:
  Stream() { REQUIRE_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { (void)cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }
  void Await() const { REQUIRE_CUDA(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

// Measures the time between two points of a stream with the device's clock.
class StreamClock {
 public:
  StreamClock() {
    REQUIRE_CUDA(cudaEventCreate(&begin_));
    REQUIRE_CUDA(cudaEventCreate(&end_));
  }
  ~StreamClock() {
    (void)cudaEventDestroy(begin_);
    (void)cudaEventDestroy(end_);
  }
  StreamClock(const StreamClock&) = delete;
  StreamClock& operator=(const StreamClock&) = delete;

  // Queues work by calling `queue()`, waits for it, and returns its duration in seconds.
  template <typename Queue>
  double Time(const Stream& stream, Queue&& queue) const {
    REQUIRE_CUDA(cudaEventRecord(begin_, stream.get()));
    queue();
    REQUIRE_CUDA(cudaEventRecord(end_, stream.get()));
    stream.Await();
    float milliseconds = 0;
    REQUIRE_CUDA(cudaEventElapsedTime(&milliseconds, begin_, end_));
    return milliseconds * 1e-3;
  }

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

// Pinned host memory in huge pages, for copies from and to the device. The threads of the team
// touch it first.
class PinnedPages {
 public:
  PinnedPages(uint64_t bytes, Team& team) : pages_(bytes) {
    team.Split(bytes, [this](uint64_t begin, uint64_t end) {
      std::memset(pages_.at<std::byte>() + begin, 1, end - begin);
    });
    REQUIRE_CUDA(cudaHostRegister(pages_.at<void>(), bytes, cudaHostRegisterPortable));
  }
  ~PinnedPages() { (void)cudaHostUnregister(pages_.at<void>()); }
  PinnedPages(const PinnedPages&) = delete;
  PinnedPages& operator=(const PinnedPages&) = delete;
  std::byte* bytes() const { return pages_.at<std::byte>(); }

 private:
  const Pages pages_;
};

// Fills an array on the device with one bf16 value.
inline void FillHalves(void* device, uint64_t elements, uint16_t value) {
  const std::vector<uint16_t> values(std::min<uint64_t>(elements, uint64_t{1} << 26), value);
  for (uint64_t begin = 0; begin < elements; begin += values.size()) {
    const uint64_t count = std::min<uint64_t>(values.size(), elements - begin);
    REQUIRE_CUDA(cudaMemcpy(static_cast<uint16_t*>(device) + begin, values.data(), 2 * count,
                            cudaMemcpyHostToDevice));
  }
}

constexpr uint16_t kParam = 0x3f80;  // 1.0
constexpr uint16_t kGrad = 0x3c00;   // 0.0078

// The params and gradients of a model on the device.
struct DeviceModel {
  explicit DeviceModel(uint64_t elements) : params(2 * elements), grads(2 * elements) {
    FillHalves(params.data(), elements, kParam);
    FillHalves(grads.data(), elements, kGrad);
  }
  DeviceBuffer params, grads;
};

inline void AddFigure(Report& report, const std::string& key, const Times& values, const char* unit,
                      const char* goal = "") {
  report.figures.push_back({key, SpreadOf(values), unit, goal});
}

inline Times Rates(const Times& seconds, double bytes) {
  return Paired(seconds, seconds, [=](double s, double) { return bytes / s * 1e-9; });
}

constexpr double kBytes = 28;

// A layout of state, the bytes that an update moves for each element, and the bytes of the state of
// each element.
struct LayoutCase {
  const char* name;
  Optimizer::Layout layout;
  double bytes;
  uint64_t state_bytes;
  // The goal for the speed of CPU threads and device together, relative to CPU threads alone.
  const char* both_goal = "";
  const char* two_gpus_goal = "";  // the same goal where two GPUs share a host
};
constexpr LayoutCase kLayouts[] = {
    {"adamw28", {OFFLOAD_MASTER_FP32, OFFLOAD_FP32}, kBytes, 12, "at least 1.4", "at least 1.75"},
    {"split26", {OFFLOAD_MASTER_SPLIT, OFFLOAD_FP32}, 26, 10},
    {"moments20", {OFFLOAD_MASTER_FP32, OFFLOAD_BF16}, 20, 8},
    {"both18", {OFFLOAD_MASTER_SPLIT, OFFLOAD_BF16}, 18, 6, "at least 1.6", "at least 1.8"},
};

// A part of MeasureGpuExecutors: the host share updated by CPU threads, by the device and by both,
// compared with ceilings of the same run (gpu/executors.cpp).
void MeasureExecutors(const Settings& settings, const Context& context, Report& report);
// Measures how much of its speed a forward and backward pass keeps while state streams.
void MeasureModelBesideStreams(const Settings& settings, const Context& context, Report& report);
// The same with two GPUs that share the host's CPUs and memory. If the machine does not have two,
// it says so.
void MeasureTwoGpus(const Settings& settings, Report& report);

}  // namespace bench
