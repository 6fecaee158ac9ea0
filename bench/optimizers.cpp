#include <filesystem>
#include <fstream>
#include <memory>

#include "library.h"
#include "suites.h"

namespace bench {
namespace {

constexpr uint64_t kElements = 1'000;
constexpr uint64_t kStride = 1'024;
constexpr uint64_t kSimMemoryBytes = uint64_t{64} << 20;
constexpr uint32_t kRoundsFactor = 4;  // these steps are short

// The number of the library's threads in this process. Streams of the simulated device are threads
// too, but they belong to the device and have other names.
uint32_t LibraryThreads() {
  uint32_t threads = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    threads += name.starts_with("hybridopt/") ? 1 : 0;
  }
  return threads;
}

// An array of bf16 on the device, with room for one param of each optimizer.
uint16_t* NewArray(const Context& context, uint64_t optimizers, uint16_t value) {
  const std::vector<uint16_t> values(optimizers * kStride, value);
  const uint64_t bytes = values.size() * sizeof(uint16_t);
  void* data = nullptr;
  Require(offload_device_alloc(context.get(), bytes, &data), "offload_device_alloc");
  Require(offload_device_upload(context.get(), data, values.data(), bytes, nullptr),
          "offload_device_upload");
  return static_cast<uint16_t*>(data);
}

void MeasureSome(int32_t device_kind, uint64_t count, const Settings& settings, Report& report) {
  const bool sim = device_kind == OFFLOAD_DEVICE_SIM;
  const std::string which = std::string(sim ? "sim_" : "host_") + std::to_string(count);
  const Context context(device_kind, settings.threads, sim ? kSimMemoryBytes : 0);
  uint16_t* const params = NewArray(context, count, 0x3f80);  // 1.0
  uint16_t* const grads = NewArray(context, count, 0x3c00);   // 0.0078
  std::vector<std::unique_ptr<Optimizer>> optimizers;
  for (uint64_t i = 0; i < count; ++i)
    optimizers.push_back(std::make_unique<Optimizer>(context, params + i * kStride,
                                                     grads + i * kStride,
                                                     Optimizer::Shape{1, kElements, kElements}));
  const auto step_all = [&] {
    for (const auto& optimizer : optimizers)
      Require(offload_optimizer_step(optimizer->get(), nullptr, nullptr), "offload_optimizer_step");
    for (const auto& optimizer : optimizers)
      Require(offload_optimizer_wait(optimizer->get(), 0, -1), "offload_optimizer_wait");
  };
  const std::vector<Times> times =
      TimeRounds("optimizers " + which, kRoundsFactor * settings.rounds, {step_all});
  const uint32_t threads = LibraryThreads();
  report.rows.push_back({std::to_string(count) + " optimizers of 1 param" + (sim ? ", sim" : ""),
                         context.Info().threads,
                         count * kElements,
                         0,
                         SpreadOf(times[0]),
                         {}});
  Times each_ms;
  for (const double seconds : times[0])
    each_ms.push_back(seconds * 1e3 / static_cast<double>(count));
  report.figures.push_back(
      {"optimizers_" + which + "_ms_per_step", SpreadOf(each_ms), "ms", sim ? "" : "at most 0.05"});
  report.figures.push_back(
      {"optimizers_" + which + "_threads", SpreadOf({static_cast<double>(threads)}), "", ""});
}

}  // namespace

void MeasureOptimizers(const Settings& settings, Report& report) {
  for (const int32_t device_kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM})
    for (const uint64_t count : {1, 10, 50}) MeasureSome(device_kind, count, settings, report);
}

}  // namespace bench
