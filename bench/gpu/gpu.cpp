// A real GPU: the speed of its memory, of its link and of the host's memory, and how much of these
// speeds a step reaches.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "gpu/device.h"
#include "library.h"
#include "pages.h"
#include "suites.h"
#include "team.h"

namespace bench {
namespace {

constexpr uint64_t kPieceBytes = uint64_t{2} << 20;  // the gradients of a chunk, or its params
constexpr uint64_t kRingBytes = uint64_t{64} << 20;

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

// All state on the device: the update kernel alone, timed by the device's clock, compared with a
// copy on the device.
void MeasureDeviceUpdate(const Settings& settings, const Context& context, Report& report) {
  constexpr uint64_t kElements = uint64_t{256} << 20;
  const DeviceModel model(kElements);
  const Stream stream;
  const DeviceBuffer from(4 * kGiB), to(4 * kGiB);
  const StreamClock clock;
  Times norms;
  for (const LayoutCase& one : kLayouts) {
    Optimizer optimizer(context, model.params.data(), model.grads.data(), {1, kElements, kElements},
                        {1.0, 0, 0, OFFLOAD_EXECUTORS_AUTO}, one.layout);
    Times copies, updates;
    for (uint32_t round = 0; round < settings.rounds + 1; ++round) {
      const double copy = clock.Time(stream, [&] {
        REQUIRE_CUDA(cudaMemcpyAsync(to.data(), from.data(), 4 * kGiB, cudaMemcpyDeviceToDevice,
                                     stream.get()));
      });
      optimizer.Step(OFFLOAD_STEP_ASSUME_FINITE);
      const double update = optimizer.LastResult().device_update_seconds;
      optimizer.Step(0, 1.0);
      if (round == 0) continue;
      copies.push_back(copy);
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
  AddFigure(report, "gpu_norm_ms", Paired(norms, norms, [](double s, double) { return s * 1e3; }),
            "ms");
}

// ---------------------------------------------------------------------------------- whole steps --

// All state on the host: the step compared with the time of the host's kernels alone and of the
// copies alone.
void MeasureAgainstFloor(const Settings& settings, const Context& context, Report& report) {
  const uint64_t elements = settings.gpu_elements;
  const uint64_t params_count = 16;
  const uint64_t each = elements / params_count;
  const DeviceModel model(elements);
  const Context host_context(OFFLOAD_DEVICE_HOST, settings.threads);
  const Pages host_params(2 * elements), host_grads(2 * elements);
  Team team(host_context.Info().threads, true);
  team.Split(elements, [&](uint64_t begin, uint64_t end) {
    std::fill(host_params.at<uint16_t>() + begin, host_params.at<uint16_t>() + end, kParam);
    std::fill(host_grads.at<uint16_t>() + begin, host_grads.at<uint16_t>() + end, kGrad);
  });
  Optimizer on_host(host_context, host_params.at<void>(), host_grads.at<void>(),
                    {params_count, each, each});
  Optimizer offloaded(context, model.params.data(), model.grads.data(), {params_count, each, each},
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

void MeasureFractions(const Settings& settings, const Context& context, Report& report) {
  const uint64_t elements = settings.gpu_elements / 4;
  const uint64_t each = elements / 16;
  const DeviceModel model(elements);
  for (double fraction : {0.0, 0.25, 0.5, 0.75, 1.0}) {
    Optimizer optimizer(context, model.params.data(), model.grads.data(), {16, each, each},
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
  MeasureFractions(settings, context, report);
  MeasureAgainstFloor(settings, context, report);
}

void MeasureGpuExecutors(const Settings& settings, Report& report) {
  const Context context(OFFLOAD_DEVICE_CUDA, settings.threads);
  report.machine.gpu = context.Info().device_name;
  MeasureExecutors(settings, context, report);
  MeasureModelBesideStreams(settings, context, report);
  MeasureTwoGpus(settings, report);
}

}  // namespace bench
