// hybridopt_tune finds the sizes that suit a machine, for state on the host that is updated by CPU
// threads, by the GPU, or by both. It varies chunks, rings and stream priorities, one at a time
// from the defaults, and prints a line for each. To vary what is a constant in the library, it
// replaces the device's functions or the kernels. bench/README.md says how to read the table.
#include <CLI/CLI.hpp>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

#include "../tests/forwarding_device.h"
#include "gpu/model.h"
#include "library.h"
#include "machine.h"
#include "machine/context.h"
#include "optimizer/handle_table.h"
#include "rounds.h"

namespace bench {
namespace {

struct Settings {
  uint64_t elements = uint64_t{1} << 28;
  uint32_t rounds = 5;
  uint32_t threads = 0;
  bool sim = false;
};

// The values that one line of the table tries. 0 means the library's choice.
struct Knobs {
  uint64_t chunk_elements = 0;
  uint32_t staging_slots = 0;
  uint32_t ring_slots = 0;
  // The stream for streamed updates has the priority of the callers' streams; else the lowest one.
  bool priority_of_callers = false;
  // Params are written to the staging ring through the caches; else past them.
  bool params_through_caches = false;
};

// The knobs of the optimizer that is running.
Knobs knobs;

class TunedDevice final : public hybridopt::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;

  hybridopt::Result<hybridopt::StreamHandle> CreateStream(const char* label) override {
    const bool background = std::strcmp(label, hybridopt::kBackgroundStreamLabel) == 0;
    return ForwardingDevice::CreateStream(
        background && knobs.priority_of_callers ? hybridopt::kCallersStreamLabel : label);
  }
};

// -------------------------------------------------------------------------------------- kernels --

constexpr hybridopt::SpanTypes kTypes = {OFFLOAD_BF16, OFFLOAD_BF16, {}};
hybridopt::UpdateFunction past_the_caches;

// The library stores bf16 params past the caches if they are aligned. So this kernel stores them
// into an unaligned block, which stays in the first-level cache.
void UpdateThroughCaches(const hybridopt::Coefficients& coefficients,
                         const hybridopt::UpdateSpan& span) {
  if (!knobs.params_through_caches) return past_the_caches(coefficients, span);
  constexpr uint64_t kBlockElements = 2048;
  alignas(64) uint16_t room[kBlockElements + 1];
  uint16_t* const block = room + 1;
  for (uint64_t begin = 0; begin < span.count; begin += kBlockElements) {
    hybridopt::UpdateSpan part = hybridopt::Advanced(span, kTypes, begin);
    part.count = std::min(span.count - begin, kBlockElements);
    void* const param = part.param;
    part.param = block;
    past_the_caches(coefficients, part);
    std::memcpy(param, block, part.count * sizeof(uint16_t));
  }
}

const hybridopt::KernelTable& TunedKernels() {
  static const hybridopt::KernelTable tuned = [] {
    hybridopt::KernelTable table = *hybridopt::SelectKernels().value();
    hybridopt::UpdateFunction& update =
        table.update.Of(hybridopt::RuleOf(OFFLOAD_ADAMW, 0), kTypes);
    past_the_caches = update;
    update = UpdateThroughCaches;
    return table;
  }();
  return tuned;
}

// ---------------------------------------------------------------------------------------- tries --

struct Layout {
  const char* name;
  Optimizer::Layout layout;
  uint64_t state_bytes;
};
constexpr Layout kFp32 = {"fp32", {OFFLOAD_MASTER_FP32, OFFLOAD_FP32}, 12};
constexpr Layout kSmall = {"split masters, bf16 moments", {OFFLOAD_MASTER_SPLIT, OFFLOAD_BF16}, 6};

offload_context_t MakeContext(const Settings& settings) {
  offload_context_options_t options{};
  options.threads = settings.threads;
  const uint64_t sim_bytes = 8 * settings.elements + (uint64_t{1} << 30);
  hybridopt::Result<std::unique_ptr<hybridopt::Device>> device =
      settings.sim ? hybridopt::CreateSimDevice({sim_bytes, 0, 0}, TunedKernels())
                   : hybridopt::CreateCudaDevice({0, int64_t{600} * 1'000'000'000});
  if (!device.ok()) {
    std::fprintf(stderr, "hybridopt_tune: %s\n", device.status().message().c_str());
    std::exit(1);
  }
  hybridopt::SeatRequest request{};
  request.local_world = 1;
  request.pci_id = device.value()->pci_id();
  using Contexts = hybridopt::HandleTable<hybridopt::Context, hybridopt::HandleKind::kContext>;
  const hybridopt::Result<void*> handle =
      Contexts::Instance().Insert(std::make_shared<hybridopt::Context>(
          options, std::make_unique<TunedDevice>(std::move(device.value())), TunedKernels(),
          hybridopt::ChooseSeats(request).value()));
  if (!handle.ok()) {
    std::fprintf(stderr, "hybridopt_tune: %s\n", handle.status().message().c_str());
    std::exit(1);
  }
  return static_cast<offload_context_t>(handle.value());
}

class Tuner {
 public:
  explicit Tuner(const Settings& settings) : settings_(settings), context_(MakeContext(settings)) {
    for (void** array : {&params_, &grads_}) {
      Require(offload_device_alloc(context_.get(), 2 * settings.elements, array),
              "offload_device_alloc");
      const std::vector<uint16_t> values(settings.elements, 0x3c00);
      Require(
          offload_device_upload(context_.get(), *array, values.data(), 2 * values.size(), nullptr),
          "offload_device_upload");
    }
    std::printf("%s, %u threads, %llu Mi elements, %u rounds; G params/s, median and quartiles\n",
                context_.Info().device_name, context_.Info().threads,
                static_cast<unsigned long long>(settings.elements >> 20), settings.rounds);
  }
  ~Tuner() {
    for (void* array : {params_, grads_})
      Require(offload_device_free(context_.get(), array), "offload_device_free");
  }
  Tuner(const Tuner&) = delete;
  Tuner& operator=(const Tuner&) = delete;

  uint32_t threads() const { return context_.Info().threads; }

  // Measures the rates of the executors and prints them as one line.
  void Try(const std::string& what, const Layout& layout, const Knobs& tried, bool cpu,
           bool streamed) {
    std::string line;
    if (cpu) line += "  cpu " + Rate(layout, tried, OFFLOAD_EXECUTORS_CPU);
    if (streamed) line += "  streamed " + Rate(layout, tried, OFFLOAD_EXECUTORS_STREAMED);
    if (cpu || streamed) line += "  both " + Rate(layout, tried, OFFLOAD_EXECUTORS_AUTO);
    Print(what, layout, line);
  }

  // Measures how much of its own speed a model keeps beside the streams, and the streams beside the
  // model.
  void TryBesideModel(const std::string& what, const Layout& layout, const Knobs& tried) {
    const std::string rate = Rate(layout, tried, OFFLOAD_EXECUTORS_STREAMED);
    std::string line = "  streamed " + rate;
    if (!settings_.sim) {
      if (!work_.has_value()) work_.emplace();
      const auto optimizer = Make(layout, tried, OFFLOAD_EXECUTORS_STREAMED);
      const BesideStreams beside = RunBesideStreams(*work_, *optimizer, settings_.rounds);
      if (!beside.products.empty()) line += "  products " + Text(beside.products);
      line += "  passes " + Text(beside.passes) + "  streams " + Text(beside.streams);
    }
    Print(what, layout, line);
  }

 private:
  std::unique_ptr<Optimizer> Make(const Layout& layout, const Knobs& tried, int32_t executors) {
    knobs = tried;
    const uint64_t chunk = tried.chunk_elements != 0 ? tried.chunk_elements : kDefaultChunk;
    Optimizer::Lifecycle lifecycle;
    lifecycle.chunk_elements = tried.chunk_elements;
    lifecycle.host_executors = executors;
    if (executors != OFFLOAD_EXECUTORS_STREAMED) lifecycle.staging_slots = tried.staging_slots;
    if (executors != OFFLOAD_EXECUTORS_CPU)  // a slot may have some padding
      lifecycle.stream_ring_bytes = tried.ring_slots * (chunk * layout.state_bytes + (64 << 10));
    constexpr uint64_t kParams = 16;
    const uint64_t each = settings_.elements / kParams;
    return std::make_unique<Optimizer>(
        context_, params_, grads_, Optimizer::Shape{kParams, each, each}, lifecycle, layout.layout);
  }

  std::string Rate(const Layout& layout, const Knobs& tried, int32_t executors) {
    const auto optimizer = Make(layout, tried, executors);
    Times rates, share, cpu_idle, streamed_idle, stall;
    for (uint32_t round = 0; round < settings_.rounds + 1; ++round) {
      const double begin = Seconds();
      optimizer->Step(OFFLOAD_STEP_ASSUME_FINITE);
      if (round == 0) continue;
      rates.push_back(static_cast<double>(settings_.elements) / (Seconds() - begin) * 1e-9);
      const offload_step_result_t result = optimizer->LastResult();
      share.push_back(static_cast<double>(result.streamed_elements) /
                      static_cast<double>(settings_.elements));
      cpu_idle.push_back(result.cpu_idle_seconds * 1e3);
      streamed_idle.push_back(result.streamed_idle_seconds * 1e3);
      stall.push_back(result.stall_seconds * 1e3);
    }
    if (executors != OFFLOAD_EXECUTORS_AUTO) return Text(rates);
    char text[128];
    std::snprintf(text, sizeof(text),
                  "%s, %.0f %% streamed, idle ms %.1f cpu %.1f streamed, stall %.1f",
                  Text(rates).c_str(), SpreadOf(share).median * 100, SpreadOf(cpu_idle).median,
                  SpreadOf(streamed_idle).median, SpreadOf(stall).median);
    return text;
  }

  static std::string Text(const Times& values) {
    const Spread spread = SpreadOf(values);
    char text[64];
    std::snprintf(text, sizeof(text), "%5.2f (%.2f .. %.2f)", spread.median, spread.q1, spread.q3);
    return text;
  }
  static void Print(const std::string& what, const Layout& layout, const std::string& line) {
    std::printf("%-27s %-34s%s\n", layout.name, what.c_str(), line.c_str());
    std::fflush(stdout);
  }

  static constexpr uint64_t kDefaultChunk = uint64_t{1} << 22;  // of a CUDA device

  const Settings settings_;
  const Context context_;
  void* params_ = nullptr;
  void* grads_ = nullptr;
  std::optional<ModelWork> work_;
};

std::string Mi(uint64_t elements) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g Mi", static_cast<double>(elements) / (1 << 20));
  return text;
}

void TryChunks(Tuner& tuner, const Layout& layout) {
  for (uint64_t chunk : {1 << 18, 1 << 19, 1 << 20, 1 << 21, 1 << 22}) {
    Knobs knobs;
    knobs.chunk_elements = chunk;
    tuner.Try("chunk " + Mi(chunk), layout, knobs, true, true);
  }
}

void TryStaging(Tuner& tuner, const Layout& layout) {
  for (uint64_t chunk : {1 << 20, 1 << 22}) {
    for (uint32_t slots : {4, 16}) {
      Knobs knobs;
      knobs.chunk_elements = chunk;
      knobs.staging_slots = slots;
      tuner.Try("chunk " + Mi(chunk) + ", staging slots " + std::to_string(slots), layout, knobs,
                true, false);
    }
  }
}

void TryParamsThroughCaches(Tuner& tuner, const Layout& layout) {
  for (uint64_t chunk : {1 << 18, 1 << 20, 1 << 22}) {
    Knobs knobs;
    knobs.chunk_elements = chunk;
    knobs.params_through_caches = true;
    tuner.Try("chunk " + Mi(chunk) + ", params through caches", layout, knobs, true, false);
  }
}

void TryRings(Tuner& tuner, const Layout& layout) {
  for (uint32_t slots : {2, 3, 8}) {
    Knobs knobs;
    knobs.ring_slots = slots;
    tuner.Try("ring slots " + std::to_string(slots), layout, knobs, false, true);
  }
}

void TryPriorities(Tuner& tuner, const Layout& layout) {
  tuner.TryBesideModel("lowest priority", layout, {});
  Knobs knobs;
  knobs.priority_of_callers = true;
  tuner.TryBesideModel("priority of callers' streams", layout, knobs);
}

// With fewer threads the CPU leaves more of the host's memory rate to the streams, which need fewer
// bytes of it per param.
void TryFewerThreads(const Settings& settings, uint32_t all) {
  for (uint32_t quarters : {3, 2}) {
    Settings fewer = settings;
    fewer.threads = std::max(1u, all * quarters / 4);
    Tuner tuner(fewer);
    const std::string text = "threads " + std::to_string(fewer.threads);
    tuner.Try(text, kFp32, {}, true, false);
    tuner.Try(text, kSmall, {}, true, false);
  }
}

void TryAll(const Settings& settings) {
  uint32_t threads = 0;
  {
    Tuner tuner(settings);
    threads = tuner.threads();
    TryChunks(tuner, kFp32);
    TryParamsThroughCaches(tuner, kFp32);
    TryStaging(tuner, kFp32);
    TryRings(tuner, kFp32);
    TryPriorities(tuner, kFp32);
    TryChunks(tuner, kSmall);
    TryPriorities(tuner, kSmall);
  }
  TryFewerThreads(settings, threads);
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  bench::Settings settings;
  CLI::App app("Tries sizes of chunks and rings for state on the host of a GPU.");
  app.add_option("--elements", settings.elements, "elements of the model")
      ->check(CLI::Range(uint64_t{1} << 20, uint64_t{1} << 40))
      ->capture_default_str();
  app.add_option("--rounds", settings.rounds, "steps of each try that count")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--threads", settings.threads, "CPU threads; 0: as many as the library takes")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  app.add_flag("--sim", settings.sim,
               "on the simulated device: shows that this program works, and nothing else");
  CLI11_PARSE(app, argc, argv);

  bench::TryAll(settings);
}
