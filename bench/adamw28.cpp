#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "library.h"
#include "loops.h"
#include "pages.h"
#include "suites.h"
#include "team.h"

namespace bench {
namespace {

constexpr double kBytes = 28;              // bf16 grad in, three fp32 arrays in and out, bf16 out
constexpr double kBytesTwoReads = 28 + 2;  // the norm reads the gradients once more
constexpr double kGradNormMax = 1;         // far below the norm of these gradients: it clips
// The distance between arrays that are read and written together, modulo a page. It puts them into
// different banks of the memory, so that the ceiling is not lower than it could be.
constexpr uint64_t kStaggerBytes = (96 << 10) + 21 * 64;

// A gradient near 0.01 or -0.01. Every run has the same values.
uint16_t GradAt(uint64_t i) {
  const uint64_t mixed = (i + 1) * 0x9e3779b97f4a7c15u;
  const float magnitude = 0.005f + 0.01f * static_cast<float>(mixed >> 40) / (1 << 24);
  const float value = (mixed & 1) != 0 ? magnitude : -magnitude;
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
}

// Params and gradients for all contenders, and state for the comparison loops. Each range is first
// touched by the thread that will work on it.
class Arrays {
 public:
  Arrays(uint64_t elements, Team& team)
      : bytes_(elements * sizeof(float) + kStaggerBytes),
        grad_(elements * sizeof(uint16_t)),
        param_(elements * sizeof(uint16_t) + kStaggerBytes),
        state_(3 * bytes_) {
    uint16_t* grad = grad_.at<uint16_t>();
    team.Split(elements, [&, all = get()](uint64_t begin, uint64_t end) {
      for (uint64_t i = begin; i < end; ++i) grad[i] = GradAt(i);
      std::fill(all.param + begin, all.param + end, uint16_t{0x3f80});  // 1.0
      std::fill(all.master + begin, all.master + end, 1.0f);
      std::fill(all.exp_avg + begin, all.exp_avg + end, 0.0f);
      std::fill(all.exp_avg_sq + begin, all.exp_avg_sq + end, 0.0f);
    });
  }
  AdamWArrays get() const {
    return {grad_.at<uint16_t>(), param_.at<uint16_t>(kStaggerBytes), state_.at<float>(),
            state_.at<float>(bytes_), state_.at<float>(2 * bytes_)};
  }

 private:
  uint64_t bytes_;  // of one state array, with the distance to the next one
  Pages grad_;
  Pages param_;
  Pages state_;
};

// Checks, before anything is timed, that the library and the plain loop compute the same values.
void RequireSameWork(const Optimizer& optimizer, const AdamWArrays& arrays, uint64_t elements) {
  const float* master = optimizer.Master();
  for (uint64_t i = 0; i < elements; ++i) {
    const float moved = 1.0f - arrays.master[i];
    if (std::fabs(moved) > 1e-4f &&
        std::fabs(master[i] - arrays.master[i]) < 1e-2f * std::fabs(moved))
      continue;
    std::fprintf(stderr,
                 "hybridopt_bench: element %llu is %.9g after a step of the library and %.9g after "
                 "one of the plain loop, from 1: they do not do the same work\n",
                 static_cast<unsigned long long>(i), static_cast<double>(master[i]),
                 static_cast<double>(arrays.master[i]));
    std::exit(1);
  }
}

// The order within a round. Contenders that are compared with each other run one after the other.
enum Contender { kCached, kStreamed, kOurs, kOursChecked, kOursClipped, kPlain };
struct Described {
  const char* name;
  double bytes;
};
constexpr Described kContenders[] = {
    {"memory only, param through the caches", kBytes},
    {"memory only, param past the caches", kBytes},
    {"hybridopt AdamW", kBytes},
    {"hybridopt AdamW, finite check", kBytesTwoReads},
    {"hybridopt AdamW, clipped", kBytesTwoReads},
    {"plain AdamW loop", kBytes},
};

void AddFigures(const std::vector<Times>& times, const Times& ceiling, uint64_t elements,
                const std::string& suffix, Report& report) {
  const auto add = [&](const std::string& key, const Times& values, const char* unit,
                       const char* goal) {
    report.figures.push_back({key + suffix, SpreadOf(values), unit, goal});
  };
  const auto params_per_s = [&](const Times& seconds) {
    return Paired(seconds, seconds,
                  [&](double s, double) { return static_cast<double>(elements) / s; });
  };
  const auto cost = [&](Contender contender) {
    return Paired(times[contender], times[kOurs], [](double x, double y) { return x / y - 1; });
  };
  add("adamw28_vs_memory", Ratios(ceiling, times[kOurs]), "", "at least 0.95");
  add("plain_vs_memory", Ratios(ceiling, times[kPlain]), "", "");
  add("adamw28_params_per_s", params_per_s(times[kOurs]), "params/s", "");
  add("finite_check_cost", cost(kOursChecked), "of a step", "");
  add("clip_cost", cost(kOursClipped), "of a step", "");
}

void MeasureAt(const Settings& settings, uint32_t threads, const std::string& suffix,
               Report& report) {
  const Context context(OFFLOAD_DEVICE_HOST, threads);
  const offload_context_info_t info = context.Info();
  Team team(info.threads, info.threads <= info.cpus_allowed);
  const uint64_t elements = settings.elements;
  const Arrays owner(elements, team);
  const AdamWArrays arrays = owner.get();
  Optimizer optimizer(context, arrays.param, arrays.grad, {1, elements, elements});
  report.machine.huge_page_share = HugePageShare();

  uint64_t step = 0;
  const auto loop = [&](Loop function) {
    step += 1;
    team.Split(elements, [&](uint64_t begin, uint64_t end) {
      function(arrays, AdamWFactors(), step, begin, end);
    });
  };
  optimizer.Step(OFFLOAD_STEP_ASSUME_FINITE);
  loop(PlainAdamW);
  RequireSameWork(optimizer, arrays, elements);

  std::vector<std::function<void()>> contenders(std::size(kContenders));
  contenders[kCached] = [&] { loop(MemoryCached); };
  contenders[kStreamed] = [&] { loop(MemoryStreamed); };
  contenders[kOurs] = [&] { optimizer.Step(OFFLOAD_STEP_ASSUME_FINITE); };
  contenders[kOursChecked] = [&] { optimizer.Step(0); };
  contenders[kOursClipped] = [&] { optimizer.Step(0, kGradNormMax); };
  contenders[kPlain] = [&] { loop(PlainAdamW); };
  const std::vector<Times> times = TimeRounds("AdamW" + suffix, settings.rounds, contenders);

  // The ceiling is the faster of the two ways to write the param.
  const bool streamed = SpreadOf(times[kStreamed]).median <= SpreadOf(times[kCached]).median;
  const Times& ceiling = times[streamed ? kStreamed : kCached];
  for (size_t i = 0; i < contenders.size(); ++i)
    report.rows.push_back({kContenders[i].name, info.threads, elements, kContenders[i].bytes,
                           SpreadOf(times[i]), SpreadOf(Ratios(ceiling, times[i]))});
  AddFigures(times, ceiling, elements, suffix, report);
}

}  // namespace

void MeasureAdamW28(const Settings& settings, Report& report) {
  MeasureAt(settings, 1, "_1t", report);
  MeasureAt(settings, settings.threads, "_allt", report);
}

}  // namespace bench
