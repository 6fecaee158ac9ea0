#include <algorithm>
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

// GPT-2 124M, whole: 148 tensors, most of them biases and norms of 768.
Counts Gpt2() {
  constexpr uint64_t kWidth = 768;
  Counts counts = {50257 * kWidth, 1024 * kWidth};
  for (int layer = 0; layer < 12; ++layer)
    Append(counts, {kWidth, kWidth, kWidth * 3 * kWidth, 3 * kWidth, kWidth * kWidth, kWidth,
                    kWidth, kWidth, kWidth * 4 * kWidth, 4 * kWidth, 4 * kWidth * kWidth, kWidth});
  Append(counts, {kWidth, kWidth});
  return counts;
}

// What one of 8 tensor-parallel ranks holds of 4 of Llama-3 8B's 32 layers: an eighth of the rank.
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

// What one of 8 expert-parallel ranks holds of 2 of Qwen3-30B-A3B's 48 layers: 16 of 128 experts,
// each a tensor of its own.
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

void MeasureModel(const Settings& settings, const Model& model, uint32_t threads,
                  const std::string& suffix, Report& report) {
  const uint64_t elements = std::accumulate(model.counts.begin(), model.counts.end(), uint64_t{0});
  uint64_t space = 0;
  for (uint64_t count : model.counts) space += AlignedCount(count);
  const Pages grad_pages(space * sizeof(uint16_t)), param_pages(space * sizeof(uint16_t));
  uint16_t* grads = grad_pages.at<uint16_t>();
  uint16_t* params = param_pages.at<uint16_t>();
  std::fill_n(grads, space, uint16_t{0x3c00});   // 0.0078
  std::fill_n(params, space, uint16_t{0x3f80});  // 1.0
  const Context context(OFFLOAD_DEVICE_HOST, threads);
  Optimizer flat(context, params, grads, Counts{elements});
  Optimizer shaped(context, params, grads, model.counts);
  Optimizer half(context, params, grads, model.counts);
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

}  // namespace

void MeasureShapes(const Settings& settings, Report& report) {
  for (const Model& model :
       {Model{"GPT-2 124M", "gpt2", Gpt2()}, Model{"Llama-3 8B, 1/64", "llama3", Llama3()},
        Model{"Qwen3-30B-A3B, 1/192", "qwen3", Qwen3()}}) {
    MeasureModel(settings, model, 1, "_1t", report);
    MeasureModel(settings, model, settings.threads, "_allt", report);
  }
}

}  // namespace bench
