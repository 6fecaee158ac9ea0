#include <cstring>

#include "library.h"
#include "pages.h"
#include "suites.h"
#include "team.h"

namespace bench {
namespace {

constexpr uint64_t kElements = uint64_t{22} << 20;
constexpr uint64_t kHalfBytes = kElements * sizeof(uint16_t);  // bf16 params, and bf16 gradients
constexpr uint64_t kStateBytes = kElements * 3 * sizeof(float);
constexpr uint64_t kSpareBytes = uint64_t{32} << 20;

void* Upload(const Context& context, uint16_t value) {
  void* data = nullptr;
  Require(offload_device_alloc(context.get(), kHalfBytes, &data), "offload_device_alloc");
  const std::vector<uint16_t> values(kElements, value);
  Require(offload_device_upload(context.get(), data, values.data(), kHalfBytes, nullptr),
          "offload_device_upload");
  return data;
}

// Moves all states to the host and back, compared with as many threads that copy as many bytes.
void MeasureStates(const Settings& settings, Report& report) {
  const Context context(OFFLOAD_DEVICE_SIM, settings.threads,
                        2 * kHalfBytes + kStateBytes + kSpareBytes);
  const offload_context_info_t info = context.Info();
  void* params = Upload(context, 0x3f80);  // 1.0
  void* grads = Upload(context, 0x3c00);   // 0.0078
  Optimizer optimizer(context, params, grads, {1, kElements, kElements},
                      {1.0, OFFLOAD_MOVABLE_STATES, 0});
  Team team(info.threads, info.threads <= info.cpus_allowed);
  const Pages near_pages(kStateBytes), far_pages(kStateBytes);
  const auto copy = [&](std::byte* to, const std::byte* from) {
    team.Split(kStateBytes, [&](uint64_t begin, uint64_t end) {
      std::memcpy(to + begin, from + begin, end - begin);
    });
  };
  std::byte* const near = near_pages.at<std::byte>();
  std::byte* const far = far_pages.at<std::byte>();

  const std::vector<Times> times = TimeRounds("states out and back", settings.rounds,
                                              {[&] {
                                                 copy(far, near);
                                                 copy(near, far);
                                               },
                                               [&] {
                                                 optimizer.Run(offload_optimizer_offload_states);
                                                 optimizer.Run(offload_optimizer_reload_states);
                                               }});
  const offload_stats_t stats = optimizer.Stats();
  if (stats.offloaded_bytes != (settings.rounds + 1) * kStateBytes) {
    std::fprintf(stderr, "hybridopt_bench: %llu bytes were offloaded, expected %llu\n",
                 static_cast<unsigned long long>(stats.offloaded_bytes),
                 static_cast<unsigned long long>((settings.rounds + 1) * kStateBytes));
    std::exit(1);
  }
  const char* names[] = {"memcpy of the states, there and back",
                         "sim, states offloaded and reloaded"};
  constexpr double kBytes = 2 * 3 * sizeof(float);  // the states of a parameter, both ways
  for (size_t i = 0; i < times.size(); ++i)
    report.rows.push_back({names[i], info.threads, kElements, kBytes, SpreadOf(times[i]),
                           SpreadOf(Ratios(times[0], times[i]))});
  report.figures.push_back(
      {"offload_reload_vs_memcpy", SpreadOf(Ratios(times[0], times[1])), "", "at least 0.85"});
}

// A step whose gradients were offloaded before it began, compared with a step that fetches them.
void MeasureHostGrads(const Settings& settings, Report& report) {
  const Context context(OFFLOAD_DEVICE_SIM, settings.threads, 2 * kHalfBytes + kSpareBytes);
  void* params = Upload(context, 0x3f80);  // 1.0
  void* grads = Upload(context, 0x3c00);   // 0.0078
  Optimizer optimizer(context, params, grads, {1, kElements, kElements},
                      {0.0, OFFLOAD_MOVABLE_GRADS, 0});
  // Only the time of the step counts, not that of the offloading before it; the library's own clock
  // separates them.
  std::vector<Times> times(2);
  const auto step = [&](size_t contender) {
    optimizer.Step(0);
    times[contender].push_back(optimizer.LastResult().total_seconds);
  };
  TimeRounds("gradients on the host", settings.rounds,
             {[&] {
                optimizer.BindAll();
                step(0);
              },
              [&] {
                optimizer.BindAll();
                optimizer.Run(offload_optimizer_offload_grads);
                step(1);
              }});
  for (Times& all : times) all.erase(all.begin());  // the warm-up
  const char* names[] = {"sim, step from device gradients", "sim, step from offloaded gradients"};
  for (size_t i = 0; i < times.size(); ++i)
    report.rows.push_back({names[i], context.Info().threads, kElements, 0, SpreadOf(times[i]),
                           SpreadOf(Ratios(times[0], times[i]))});
  report.figures.push_back(
      {"step_host_grads_vs_device_grads", SpreadOf(Ratios(times[0], times[1])), "", ""});
}

}  // namespace

void MeasureLifecycle(const Settings& settings, Report& report) {
  MeasureStates(settings, report);
  MeasureHostGrads(settings, report);
}

}  // namespace bench
