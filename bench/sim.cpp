#include <algorithm>

#include "library.h"
#include "suites.h"

namespace bench {
namespace {

constexpr uint64_t kElements = uint64_t{16} << 20;
constexpr uint64_t kBytes = kElements * sizeof(uint16_t);  // of the params, and of the gradients
constexpr uint64_t kSpareBytes = uint64_t{16} << 20;

void* Upload(const Context& context, uint16_t value) {
  void* data = nullptr;
  Require(offload_device_alloc(context.get(), kBytes, &data), "offload_device_alloc");
  const std::vector<uint16_t> values(kElements, value);
  Require(offload_device_upload(context.get(), data, values.data(), kBytes, nullptr),
          "offload_device_upload");
  return data;
}

struct Lane {
  const char* key;
  double offload_step_result_t::*seconds;
};
constexpr Lane kLanes[] = {
    {"sim_step_ms", &offload_step_result_t::total_seconds},
    {"sim_grads_down_ms", &offload_step_result_t::grads_down_seconds},
    {"sim_update_ms", &offload_step_result_t::update_seconds},
    {"sim_params_up_ms", &offload_step_result_t::params_up_seconds},
    {"sim_stall_ms", &offload_step_result_t::stall_seconds},
};

}  // namespace

void MeasureSim(const Settings& settings, Report& report) {
  const Context context(OFFLOAD_DEVICE_SIM, settings.threads, 2 * kBytes + kSpareBytes);
  void* params = Upload(context, 0x3f80);  // 1.0
  void* grads = Upload(context, 0x3c00);   // 0.0078
  std::vector<Times> lanes(std::size(kLanes));
  std::vector<Times> times;
  {
    Optimizer optimizer(context, params, grads, {1, kElements, kElements});
    times = TimeRounds("sim", settings.rounds, {[&] {
                         optimizer.Step(OFFLOAD_STEP_ASSUME_FINITE);
                         const offload_step_result_t result = optimizer.LastResult();
                         for (size_t i = 0; i < lanes.size(); ++i)
                           lanes[i].push_back(result.*kLanes[i].seconds * 1e3);
                       }});
  }
  report.rows.push_back(
      {"sim, all state offloaded", context.Info().threads, kElements, 0, SpreadOf(times[0]), {}});
  for (size_t i = 0; i < lanes.size(); ++i)
    report.figures.push_back({kLanes[i].key, SpreadOf(lanes[i]), "ms", ""});
}

}  // namespace bench
