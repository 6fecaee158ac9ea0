// A real GPU: what its memory, its link and the host's memory give, and what of that a step takes.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "library.h"
#include "loops.h"
#include "pages.h"
#include "suites.h"
#include "team.h"

namespace bench {
namespace {

constexpr double kBytes = 28;
constexpr uint64_t kPieceBytes = uint64_t{2} << 20;  // a chunk's gradients, or its params
constexpr uint64_t kRingBytes = uint64_t{64} << 20;
constexpr uint64_t kGiB = uint64_t{1} << 30;

void RequireCuda(cudaError_t error, const char* call) {
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

// bf16 values on the device, the same everywhere.
void FillHalves(void* device, uint64_t elements, uint16_t value) {
  const std::vector<uint16_t> values(std::min<uint64_t>(elements, kRingBytes), value);
  for (uint64_t begin = 0; begin < elements; begin += values.size()) {
    const uint64_t count = std::min<uint64_t>(values.size(), elements - begin);
    REQUIRE_CUDA(cudaMemcpy(static_cast<uint16_t*>(device) + begin, values.data(), 2 * count,
                            cudaMemcpyHostToDevice));
  }
}

constexpr uint16_t kParam = 0x3f80;  // 1.0
constexpr uint16_t kGrad = 0x3c00;   // 0.0078

void AddFigure(Report& report, const std::string& key, const Times& values, const char* unit,
               const char* goal = "") {
  report.figures.push_back({key, SpreadOf(values), unit, goal});
}

Times Rates(const Times& seconds, double bytes) {
  return Paired(seconds, seconds, [=](double s, double) { return bytes / s * 1e-9; });
}

// ------------------------------------------------------------------------------------- ceilings --

// Copies of a step over `bytes` each way, through pinned rings, piece by piece.
class Link {
 public:
  explicit Link(uint64_t bytes) : bytes_(bytes), device_(2 * kRingBytes) {
    REQUIRE_CUDA(cudaMallocHost(&host_, 2 * kRingBytes));
    std::memset(host_, 1, 2 * kRingBytes);
  }
  ~Link() { (void)cudaFreeHost(host_); }

  void Copy(bool down, bool up) const {
    auto* const host = static_cast<std::byte*>(host_);
    auto* const device = static_cast<std::byte*>(device_.data());
    for (uint64_t begin = 0; begin < bytes_; begin += kPieceBytes) {
      const uint64_t at = begin % kRingBytes;
      if (down)
        REQUIRE_CUDA(cudaMemcpyAsync(host + at, device + at, kPieceBytes, cudaMemcpyDeviceToHost,
                                     down_.get()));
      if (up)
        REQUIRE_CUDA(cudaMemcpyAsync(device + kRingBytes + at, host + kRingBytes + at, kPieceBytes,
                                     cudaMemcpyHostToDevice, up_.get()));
    }
    down_.Await();
    up_.Await();
  }

 private:
  const uint64_t bytes_;
  void* host_ = nullptr;
  DeviceBuffer device_;
  Stream down_;
  Stream up_;
};

void MeasureLink(const Settings& settings, Report& report) {
  constexpr uint64_t kLinkBytes = 2 * kGiB;
  const Link link(kLinkBytes);
  const DeviceBuffer from(4 * kGiB), to(4 * kGiB);
  const Stream stream;
  REQUIRE_CUDA(cudaMemset(from.data(), 1, 4 * kGiB));
  const std::vector<Times> times =
      TimeRounds("link", settings.rounds,
                 {[&] { link.Copy(true, false); }, [&] { link.Copy(false, true); },
                  [&] { link.Copy(true, true); },
                  [&] {
                    REQUIRE_CUDA(cudaMemcpyAsync(to.data(), from.data(), 4 * kGiB,
                                                 cudaMemcpyDeviceToDevice, stream.get()));
                    stream.Await();
                  }});
  AddFigure(report, "gpu_copy_down_gb_per_s", Rates(times[0], kLinkBytes), "GB/s");
  AddFigure(report, "gpu_copy_up_gb_per_s", Rates(times[1], kLinkBytes), "GB/s");
  AddFigure(report, "gpu_copy_both_gb_per_s", Rates(times[2], 2 * kLinkBytes), "GB/s");
  AddFigure(report, "gpu_device_copy_gb_per_s", Rates(times[3], 8 * kGiB), "GB/s");
}

void MeasurePinning(Report& report) {
  const Pages pages(kGiB);
  std::memset(pages.at<std::byte>(), 1, kGiB);
  const std::vector<Times> times = TimeRounds(
      "pinning", 5, {[&] {
        REQUIRE_CUDA(cudaHostRegister(pages.at<std::byte>(), kGiB, cudaHostRegisterPortable));
        REQUIRE_CUDA(cudaHostUnregister(pages.at<std::byte>()));
      }});
  AddFigure(report, "gpu_pin_and_unpin_s_per_gib", times[0], "s/GiB");
}

// --------------------------------------------------------------------------------- device share --

// How state is stored, the bytes an update moves for a param, and those of its state.
struct LayoutCase {
  const char* name;
  Optimizer::Layout layout;
  double bytes;
  uint64_t state_bytes;
  const char* both_goal = "";  // of CPU threads and the device against CPU threads alone
};
constexpr LayoutCase kLayouts[] = {
    {"adamw28", {OFFLOAD_MASTER_FP32, OFFLOAD_FP32}, kBytes, 12, "at least 1.4"},
    {"split26", {OFFLOAD_MASTER_SPLIT, OFFLOAD_FP32}, 26, 10},
    {"moments20", {OFFLOAD_MASTER_FP32, OFFLOAD_BF16}, 20, 8},
    {"both18", {OFFLOAD_MASTER_SPLIT, OFFLOAD_BF16}, 18, 6, "at least 1.6"},
};

// All state on the device: the update kernel alone, by the device's clock, against a device copy.
void MeasureDeviceUpdate(const Settings& settings, const Context& context, Report& report) {
  constexpr uint64_t kElements = uint64_t{256} << 20;
  const DeviceBuffer params(2 * kElements), grads(2 * kElements);
  FillHalves(params.data(), kElements, kParam);
  FillHalves(grads.data(), kElements, kGrad);
  const Stream stream;
  const DeviceBuffer from(4 * kGiB), to(4 * kGiB);
  cudaEvent_t begin, end;
  REQUIRE_CUDA(cudaEventCreate(&begin));
  REQUIRE_CUDA(cudaEventCreate(&end));
  Times norms;
  for (const LayoutCase& one : kLayouts) {
    Optimizer optimizer(context, params.data(), grads.data(), {1, kElements, kElements},
                        {1.0, 0, 0, OFFLOAD_EXECUTORS_AUTO}, one.layout);
    Times copies, updates;
    for (uint32_t round = 0; round < settings.rounds + 1; ++round) {
      REQUIRE_CUDA(cudaEventRecord(begin, stream.get()));
      REQUIRE_CUDA(cudaMemcpyAsync(to.data(), from.data(), 4 * kGiB, cudaMemcpyDeviceToDevice,
                                   stream.get()));
      REQUIRE_CUDA(cudaEventRecord(end, stream.get()));
      stream.Await();
      float milliseconds = 0;
      REQUIRE_CUDA(cudaEventElapsedTime(&milliseconds, begin, end));
      optimizer.Step(OFFLOAD_STEP_ASSUME_FINITE);
      const double update = optimizer.LastResult().device_update_seconds;
      optimizer.Step(0, 1.0);
      if (round == 0) continue;
      copies.push_back(milliseconds * 1e-3);
      updates.push_back(update);
      norms.push_back(optimizer.LastResult().norm_seconds);
    }
    const double bytes = one.bytes * kElements;
    const std::string key = std::string("gpu_") + one.name;
    AddFigure(report, key + "_gb_per_s", Rates(updates, bytes), "GB/s");
    AddFigure(
        report, key + "_vs_device_copy",
        Paired(copies, updates,
               [&](double copy, double update) { return bytes / update / (8.0 * kGiB / copy); }),
        "", "at least 0.9");
  }
  REQUIRE_CUDA(cudaEventDestroy(begin));
  REQUIRE_CUDA(cudaEventDestroy(end));
  AddFigure(report, "gpu_norm_ms", Paired(norms, norms, [](double s, double) { return s * 1e3; }),
            "ms");
}

// ---------------------------------------------------------------------------------- whole steps --

// All state on the host, against what the host's kernels and the copies take alone.
void MeasureAgainstFloor(const Settings& settings, const Context& context, Report& report) {
  const uint64_t elements = settings.gpu_elements;
  const uint64_t params_count = 16;
  const uint64_t each = elements / params_count;
  const DeviceBuffer params(2 * elements), grads(2 * elements);
  FillHalves(params.data(), elements, kParam);
  FillHalves(grads.data(), elements, kGrad);
  const Context host_context(OFFLOAD_DEVICE_HOST, settings.threads);
  const Pages host_params(2 * elements), host_grads(2 * elements);
  Team team(host_context.Info().threads, true);
  team.Split(elements, [&](uint64_t begin, uint64_t end) {
    std::fill(host_params.at<uint16_t>() + begin, host_params.at<uint16_t>() + end, kParam);
    std::fill(host_grads.at<uint16_t>() + begin, host_grads.at<uint16_t>() + end, kGrad);
  });
  Optimizer on_host(host_context, host_params.at<void>(), host_grads.at<void>(),
                    {params_count, each, each});
  Optimizer offloaded(context, params.data(), grads.data(), {params_count, each, each},
                      {0, 0, settings.chunk_elements, OFFLOAD_EXECUTORS_CPU});
  const Link link(2 * elements);
  report.machine.huge_page_share = HugePageShare();
  std::vector<offload_step_result_t> results;
  const std::vector<Times> times =
      TimeRounds("whole steps", settings.rounds,
                 {[&] { on_host.Step(OFFLOAD_STEP_ASSUME_FINITE); }, [&] { link.Copy(true, true); },
                  [&] {
                    offloaded.Step(OFFLOAD_STEP_ASSUME_FINITE);
                    results.push_back(offloaded.LastResult());
                  },
                  [&] { offloaded.Step(0, 1.0); }});
  const Times floor = Paired(times[0], times[1], [](double a, double b) { return std::max(a, b); });
  const uint32_t threads = context.Info().threads;
  const auto add_row = [&](const char* name, const Times& seconds, double bytes) {
    report.rows.push_back(
        {name, threads, elements, bytes, SpreadOf(seconds), SpreadOf(Ratios(floor, seconds))});
  };
  add_row("host kernels alone", times[0], kBytes);
  add_row("copies alone, both ways at once", times[1], 4);
  add_row("step, all state offloaded", times[2], kBytes);
  add_row(".. clipped", times[3], kBytes);
  AddFigure(report, "step_100_vs_floor", Ratios(times[2], floor), "", "at most 1.10");
  AddFigure(report, "step_100_clipped_vs_floor", Ratios(times[3], floor), "");
  Times update, down, up, stall;
  for (const offload_step_result_t& result : results) {
    update.push_back(result.update_seconds * 1e3);
    down.push_back(result.grads_down_seconds * 1e3);
    up.push_back(result.params_up_seconds * 1e3);
    stall.push_back(result.stall_seconds * 1e3);
  }
  AddFigure(report, "step_100_update_ms", update, "ms");
  AddFigure(report, "step_100_grads_down_ms", down, "ms");
  AddFigure(report, "step_100_params_up_ms", up, "ms");
  AddFigure(report, "step_100_stall_ms", stall, "ms");
}

// All state on the host: CPU threads alone, the device alone, and both, against copies of the state
// both ways.
void MeasureExecutors(const Settings& settings, const Context& context, Report& report) {
  const uint64_t elements = settings.gpu_elements / 2;
  const Optimizer::Shape shape{16, elements / 16, elements / 16};
  const DeviceBuffer params(2 * elements), grads(2 * elements);
  FillHalves(params.data(), elements, kParam);
  FillHalves(grads.data(), elements, kGrad);
  for (const LayoutCase& one : kLayouts) {
    const auto make = [&](int32_t executors) {
      return std::make_unique<Optimizer>(
          context, params.data(), grads.data(), shape,
          Optimizer::Lifecycle{0, 0, settings.chunk_elements, executors}, one.layout);
    };
    const auto cpu = make(OFFLOAD_EXECUTORS_CPU);
    const auto streamed = make(OFFLOAD_EXECUTORS_STREAMED);
    const auto both = make(OFFLOAD_EXECUTORS_AUTO);
    const Link link(one.state_bytes * elements);
    Times shares, cpu_idle, streamed_idle;
    const std::vector<Times> times =
        TimeRounds("executors", settings.rounds,
                   {[&] { cpu->Step(OFFLOAD_STEP_ASSUME_FINITE); },
                    [&] { streamed->Step(OFFLOAD_STEP_ASSUME_FINITE); },
                    [&] {
                      both->Step(OFFLOAD_STEP_ASSUME_FINITE);
                      const offload_step_result_t result = both->LastResult();
                      shares.push_back(static_cast<double>(result.streamed_elements) /
                                       static_cast<double>(elements));
                      cpu_idle.push_back(result.cpu_idle_seconds * 1e3);
                      streamed_idle.push_back(result.streamed_idle_seconds * 1e3);
                    },
                    [&] { link.Copy(true, true); }});
    const std::string key = std::string("gpu_") + one.name + "_";
    const auto count = static_cast<double>(elements);
    AddFigure(report, key + "cpu_gparams_per_s", Rates(times[0], count), "G/s");
    AddFigure(report, key + "streamed_gparams_per_s", Rates(times[1], count), "G/s");
    AddFigure(report, key + "both_gparams_per_s", Rates(times[2], count), "G/s");
    AddFigure(report, key + "streamed_vs_copies", Ratios(times[3], times[1]), "", "at least 0.9");
    AddFigure(report, key + "both_vs_cpu", Ratios(times[0], times[2]), "", one.both_goal);
    AddFigure(report, key + "streamed_share", shares, "");
    AddFigure(report, key + "cpu_idle_ms", cpu_idle, "ms");
    AddFigure(report, key + "streamed_idle_ms", streamed_idle, "ms");
  }
}

void MeasureFractions(const Settings& settings, const Context& context, Report& report) {
  const uint64_t elements = settings.gpu_elements / 4;
  const uint64_t each = elements / 16;
  const DeviceBuffer params(2 * elements), grads(2 * elements);
  FillHalves(params.data(), elements, kParam);
  FillHalves(grads.data(), elements, kGrad);
  for (double fraction : {0.0, 0.25, 0.5, 0.75, 1.0}) {
    Optimizer optimizer(context, params.data(), grads.data(), {16, each, each},
                        {fraction, 0, settings.chunk_elements});
    const std::vector<Times> times =
        TimeRounds("fractions", settings.rounds, {[&] { optimizer.Step(0, 1.0); }});
    char name[64];
    std::snprintf(name, sizeof(name), "clipped step, fraction %.2f, %.2f GB on it", fraction,
                  static_cast<double>(optimizer.Stats().device_bytes) * 1e-9);
    report.rows.push_back({name, context.Info().threads, elements, 0, SpreadOf(times[0]), {}});
  }
}

}  // namespace

void MeasureGpu(const Settings& settings, Report& report) {
  const Context context(OFFLOAD_DEVICE_CUDA, settings.threads);
  report.machine.gpu = context.Info().device_name;
  MeasureLink(settings, report);
  MeasurePinning(report);
  MeasureDeviceUpdate(settings, context, report);
  MeasureExecutors(settings, context, report);
  MeasureFractions(settings, context, report);
  MeasureAgainstFloor(settings, context, report);
}

}  // namespace bench
