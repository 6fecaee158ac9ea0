#include <algorithm>
#include <deque>
#include <numeric>

#include "library.h"
#include "pages.h"
#include "suites.h"

namespace bench {
namespace {

constexpr double kBytes = 28;

using Counts = std::vector<uint64_t>;

void Append(Counts& counts, const Counts& more) {
  counts.insert(counts.end(), more.begin(), more.end());
}

// All of GPT-2 124M: 148 tensors, most of them biases and norms of 768 elements.
Counts Gpt2() {
  constexpr uint64_t kWidth = 768;
  Counts counts = {50257 * kWidth, 1024 * kWidth};
  for (int layer = 0; layer < 12; ++layer)
    Append(counts, {kWidth, kWidth, kWidth * 3 * kWidth, 3 * kWidth, kWidth * kWidth, kWidth,
                    kWidth, kWidth, kWidth * 4 * kWidth, 4 * kWidth, 4 * kWidth * kWidth, kWidth});
  Append(counts, {kWidth, kWidth});
  return counts;
}

// What one of 8 tensor-parallel ranks holds of 4 of the 32 layers of Llama-3 8B, which is an eighth
// of the rank's whole part.
Counts Llama3() {
  constexpr uint64_t kWidth = 4096, kHidden = 14336, kKeys = 1024, kRanks = 8;
  Counts counts = {128256 * kWidth / kRanks / 8};
  for (int layer = 0; layer < 4; ++layer)
    Append(counts,
           {kWidth, kWidth * kWidth / kRanks, kWidth * kKeys / kRanks, kWidth * kKeys / kRanks,
            kWidth * kWidth / kRanks, kWidth, kWidth * kHidden / kRanks, kWidth * kHidden / kRanks,
            kWidth * kHidden / kRanks});
  return counts;
}

// What one of 8 expert-parallel ranks holds of 2 of the 48 layers of Qwen3-30B-A3B: 16 of 128
// experts, each of which has its own tensors.
Counts Qwen3() {
  constexpr uint64_t kWidth = 2048, kExpert = 768, kHeads = 4096, kKeys = 512, kRanks = 8;
  Counts counts;
  for (int layer = 0; layer < 2; ++layer) {
    Append(counts,
           {kWidth, kWidth * kHeads / kRanks, kWidth * kKeys / kRanks, kWidth * kKeys / kRanks, 128,
            128, kHeads * kWidth / kRanks, kWidth, kWidth * 128});
    for (int expert = 0; expert < 16; ++expert)
      Append(counts, {kWidth * kExpert, kWidth * kExpert, kWidth * kExpert});
  }
  return counts;
}

struct Model {
  const char* name;
  const char* key;
  Counts counts;
};

// Params and gradients of a model; each param begins where the one before it ends.
class Arrays {
 public:
  explicit Arrays(const Counts& counts)
      : space_(std::accumulate(
            counts.begin(), counts.end(), uint64_t{0},
            [](uint64_t sum, uint64_t count) { return sum + AlignedCount(count); })),
        grads_(space_ * sizeof(uint16_t)),
        params_(space_ * sizeof(uint16_t)) {
    std::fill_n(grads(), space_, uint16_t{0x3c00});   // 0.0078
    std::fill_n(params(), space_, uint16_t{0x3f80});  // 1.0
  }
  uint16_t* grads() const { return grads_.at<uint16_t>(); }
  uint16_t* params() const { return params_.at<uint16_t>(); }

 private:
  uint64_t space_;
  Pages grads_;
  Pages params_;
};

void MeasureModel(const Settings& settings, const Model& model, uint32_t threads,
                  const std::string& suffix, Report& report) {
  const uint64_t elements = std::accumulate(model.counts.begin(), model.counts.end(), uint64_t{0});
  const Arrays arrays(model.counts);
  const Context context(OFFLOAD_DEVICE_HOST, threads);
  Optimizer flat(context, arrays.params(), arrays.grads(), Counts{elements});
  Optimizer shaped(context, arrays.params(), arrays.grads(), model.counts);
  Optimizer half(context, arrays.params(), arrays.grads(), model.counts);
  half.DropEverySecondGrad();
  const std::vector<Times> times = TimeRounds(model.name + suffix, settings.rounds / 3 + 3,
                                              {[&] { flat.Step(OFFLOAD_STEP_ASSUME_FINITE); },
                                               [&] { shaped.Step(OFFLOAD_STEP_ASSUME_FINITE); },
                                               [&] { half.Step(OFFLOAD_STEP_ASSUME_FINITE); }});
  uint64_t active = 0;
  for (size_t i = 1; i < model.counts.size(); i += 2) active += model.counts[i];
  const std::string name = model.name;
  const auto row = [&](const std::string& text, uint64_t count, size_t contender) {
    report.rows.push_back({text, context.Info().threads, count, kBytes, SpreadOf(times[contender]),
                           SpreadOf(Ratios(times[0], times[contender]))});
  };
  row(name + ", as one param", elements, 0);
  row(name, elements, 1);
  row(".. every second without gradient", active, 2);
  report.figures.push_back({std::string(model.key) + "_vs_flat" + suffix,
                            SpreadOf(Ratios(times[0], times[1])), "", "at least 0.97"});
}

struct NamedLayout {
  const char* name;
  const char* key;
  const char* goal;
  double bytes;
  Optimizer::Layout layout;
};
constexpr NamedLayout kLayouts[] = {
    {"fp32 state", "", "", kBytes, {OFFLOAD_MASTER_FP32, OFFLOAD_FP32}},
    {"split masters", "split26", "at least 1.05", 26, {OFFLOAD_MASTER_SPLIT, OFFLOAD_FP32}},
    {"bf16 moments", "bf16_20", "at least 1.25", 20, {OFFLOAD_MASTER_FP32, OFFLOAD_BF16}},
    {"both", "split18", "at least 1.45", 18, {OFFLOAD_MASTER_SPLIT, OFFLOAD_BF16}}};

// The same params with their state in each layout, compared with fp32 state.
void MeasureLayouts(const Settings& settings, const Model& model, uint32_t threads,
                    const std::string& suffix, Report& report) {
  const uint64_t elements = std::accumulate(model.counts.begin(), model.counts.end(), uint64_t{0});
  const Arrays arrays(model.counts);
  const Context context(OFFLOAD_DEVICE_HOST, threads);
  std::deque<Optimizer> optimizers;
  std::vector<std::function<void()>> contenders;
  for (const NamedLayout& one : kLayouts) {
    Optimizer& optimizer =
        optimizers.emplace_back(context, arrays.params(), arrays.grads(), model.counts, one.layout);
    contenders.push_back([&optimizer] { optimizer.Step(OFFLOAD_STEP_ASSUME_FINITE); });
  }
  const std::vector<Times> times =
      TimeRounds(model.name + suffix + ", layouts", settings.rounds / 3 + 3, contenders);
  for (size_t i = 0; i < std::size(kLayouts); ++i) {
    const NamedLayout& one = kLayouts[i];
    const Spread speed = SpreadOf(Ratios(times[0], times[i]));
    report.rows.push_back({std::string(model.name) + ", " + one.name, context.Info().threads,
                           elements, one.bytes, SpreadOf(times[i]), speed});
    if (i == 0) continue;
    report.figures.push_back(
        {std::string(model.key) + "_" + one.key + "_vs_fp32" + suffix, speed, "", one.goal});
  }
}

}  // namespace

void MeasureShapes(const Settings& settings, Report& report) {
  for (const Model& model :
       {Model{"GPT-2 124M", "gpt2", Gpt2()}, Model{"Llama-3 8B, 1/64", "llama3", Llama3()},
        Model{"Qwen3-30B-A3B, 1/192", "qwen3", Qwen3()}}) {
    MeasureModel(settings, model, 1, "_1t", report);
    MeasureModel(settings, model, settings.threads, "_allt", report);
    MeasureLayouts(settings, model, 1, "_1t", report);
    MeasureLayouts(settings, model, settings.threads, "_allt", report);
  }
}

}  // namespace bench
