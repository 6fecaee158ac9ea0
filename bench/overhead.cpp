#include <algorithm>

#include "library.h"
#include "pages.h"
#include "suites.h"

namespace bench {
namespace {

constexpr uint64_t kParams = 10'000;
constexpr uint64_t kParamElements = 1'000;
constexpr uint64_t kElements = kParams * kParamElements;
// Allocators align every array to a cache line or more. Packed params, which follow each other
// without a gap, begin at any address.
constexpr uint64_t kAlignedStride = 1'024;
constexpr double kBytes = 28;
constexpr uint32_t kRoundsFactor = 4;  // these steps are short, and their differences small

enum Contender { kFlat, kSmall, kSmallBound, kPacked };
constexpr const char* kContenders[] = {
    "1 param of 10,000,000",
    "10,000 params of 1,000",
    "10,000 params of 1,000, all bound anew",
    "10,000 params of 1,000, packed",
};

void MeasureAt(const Settings& settings, uint32_t threads, const std::string& suffix,
               Report& report) {
  const Context context(OFFLOAD_DEVICE_HOST, threads);
  constexpr uint64_t kSpace = kParams * kAlignedStride;
  const Pages grad_pages(kSpace * sizeof(uint16_t)), param_pages(kSpace * sizeof(uint16_t));
  uint16_t* grads = grad_pages.at<uint16_t>();
  uint16_t* params = param_pages.at<uint16_t>();
  std::fill_n(grads, kSpace, uint16_t{0x3c00});   // 0.0078
  std::fill_n(params, kSpace, uint16_t{0x3f80});  // 1.0
  Optimizer flat(context, params, grads, {1, kElements, kElements});
  Optimizer small(context, params, grads, {kParams, kParamElements, kAlignedStride});
  Optimizer packed(context, params, grads, {kParams, kParamElements, kParamElements});

  std::vector<std::function<void()>> contenders(std::size(kContenders));
  contenders[kFlat] = [&] { flat.Step(OFFLOAD_STEP_ASSUME_FINITE); };
  contenders[kSmall] = [&] { small.Step(OFFLOAD_STEP_ASSUME_FINITE); };
  contenders[kSmallBound] = [&] {
    small.BindAll();
    small.Step(OFFLOAD_STEP_ASSUME_FINITE);
  };
  contenders[kPacked] = [&] { packed.Step(OFFLOAD_STEP_ASSUME_FINITE); };
  const std::vector<Times> times =
      TimeRounds("small params" + suffix, kRoundsFactor * settings.rounds, contenders);

  for (size_t i = 0; i < contenders.size(); ++i)
    report.rows.push_back({kContenders[i], context.Info().threads, kElements, kBytes,
                           SpreadOf(times[i]), SpreadOf(Ratios(times[kFlat], times[i]))});
  const auto add = [&](const std::string& key, Contender contender, const char* goal) {
    const Times extra = Paired(times[contender], times[kFlat], [](double seconds, double flat_s) {
      return (seconds - flat_s) / static_cast<double>(kParams) * 1e6;
    });
    report.figures.push_back({key + suffix, SpreadOf(extra), "us/param", goal});
  };
  add("overhead_us_per_param", kSmall, "at most 0.2");
  add("overhead_with_bind_us_per_param", kSmallBound, "");
  add("overhead_packed_us_per_param", kPacked, "");
}

}  // namespace

void MeasureOverhead(const Settings& settings, Report& report) {
  MeasureAt(settings, 1, "_1t", report);
  MeasureAt(settings, settings.threads, "_allt", report);
}

}  // namespace bench
