// The host share of a GPU, updated by CPU threads, by the device through which its state streams,
// or by both. Each is compared with the speed of the host's memory and of the link in the same run.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>

#include "gpu/device.h"
#include "gpu/model.h"

namespace bench {
namespace {

// ------------------------------------------------------------------------------------- ceilings --

// The memory traffic of an update, made by CPU threads over arrays in the host's memory.
class CpuTraffic {
 public:
  CpuTraffic(const LayoutCase& layout, uint64_t elements, Team& team)
      : elements_(elements),
        master_bytes_(layout.layout.masters == OFFLOAD_MASTER_SPLIT ? 2 : 4),
        moment_bytes_(layout.layout.moments == OFFLOAD_BF16 ? 2 : 4),
        loop_(StateLoopOf(master_bytes_, moment_bytes_)),
        team_(team),
        grad_(2 * elements),
        param_(2 * elements),
        master_(master_bytes_ * elements + kApartBytes),
        moment0_(moment_bytes_ * elements + 2 * kApartBytes),
        moment1_(moment_bytes_ * elements + 3 * kApartBytes) {
    Run();  // touches them first
  }

  void Run() {
    const StateArrays arrays = {grad_.at<uint16_t>(), param_.at<uint16_t>(),
                                master_.at<void>(kApartBytes), moment0_.at<void>(2 * kApartBytes),
                                moment1_.at<void>(3 * kApartBytes)};
    team_.Split(elements_, [&](uint64_t begin, uint64_t end) { loop_(arrays, begin, end); });
  }

 private:
  // Arrays whose addresses are equal modulo a large power of two would share banks of the memory.
  static constexpr uint64_t kApartBytes = (128 << 10) + 5 * 64;

  const uint64_t elements_, master_bytes_, moment_bytes_;
  const StateLoop loop_;
  Team& team_;
  const Pages grad_, param_, master_, moment0_, moment1_;
};

// Copies of state to the device and back at the same time, as StreamedExecutor makes them: large
// pieces of pinned memory, each copied once in each direction.
class StateCopies {
 public:
  StateCopies(uint64_t bytes, Team& team)
      : pieces_((bytes + kPieceBytes - 1) / kPieceBytes),
        host_(pieces_ * kPieceBytes, team),
        device_(2 * kSlots * kPieceBytes) {}

  void Run() {
    for (uint64_t piece = 0; piece < pieces_; ++piece) Queue(piece);
    Await();
  }
  // Copies until `stop`. Returns how many Runs it makes in a second.
  double RunUntil(const std::atomic<bool>& stop) {
    const double begin = Seconds();
    uint64_t piece = 0;
    while (!stop) {
      Queue(piece++ % pieces_);
      if (piece % kSlots == 0) Await();
    }
    Await();
    return static_cast<double>(piece) / static_cast<double>(pieces_) / (Seconds() - begin);
  }

 private:
  static constexpr uint64_t kPieceBytes = uint64_t{16} << 20;
  static constexpr uint64_t kSlots = 8;

  void Queue(uint64_t piece) {
    std::byte* const slot = device_.bytes() + piece % kSlots * kPieceBytes;
    std::byte* const up = host_.bytes() + piece * kPieceBytes;
    std::byte* const down = host_.bytes() + (piece + pieces_ / 2) % pieces_ * kPieceBytes;
    REQUIRE_CUDA(cudaMemcpyAsync(slot, up, kPieceBytes, cudaMemcpyHostToDevice, up_.get()));
    REQUIRE_CUDA(cudaMemcpyAsync(down, slot + kSlots * kPieceBytes, kPieceBytes,
                                 cudaMemcpyDeviceToHost, down_.get()));
  }
  void Await() const {
    up_.Await();
    down_.Await();
  }

  const uint64_t pieces_;
  const PinnedPages host_;
  const DeviceBuffer device_;
  const Stream up_, down_;
};

// Both ceilings at the same time. Rates are in passes over all elements per second.
struct Together {
  double cpu = 0;
  double copies = 0;
};
Together RunTogether(CpuTraffic& traffic, StateCopies& copies) {
  Together rates;
  std::atomic<bool> stop = false;
  std::thread copier([&] { rates.copies = copies.RunUntil(stop); });
  const double begin = Seconds();
  traffic.Run();
  rates.cpu = 1 / (Seconds() - begin);
  stop = true;
  copier.join();
  return rates;
}

// ------------------------------------------------------------------------------------ executors --

constexpr uint64_t kParams = 16;

std::unique_ptr<Optimizer> MakeOptimizer(const Settings& settings, const Context& context,
                                         const DeviceModel& model, uint64_t elements,
                                         const LayoutCase& layout, int32_t executors) {
  return std::make_unique<Optimizer>(
      context, model.params.data(), model.grads.data(),
      Optimizer::Shape{kParams, elements / kParams, elements / kParams},
      Optimizer::Lifecycle{0, 0, settings.chunk_elements, executors, 0, 0, 0}, layout.layout);
}

void StepOnce(Optimizer& optimizer) { optimizer.Step(OFFLOAD_STEP_ASSUME_FINITE); }

// The figures that a step with both executors reports.
struct BothResults {
  Times share, cpu_idle, streamed_idle, stall;

  void Add(const offload_step_result_t& result) {
    share.push_back(static_cast<double>(result.streamed_elements) /
                    static_cast<double>(result.streamed_elements + result.cpu_elements));
    cpu_idle.push_back(result.cpu_idle_seconds * 1e3);
    streamed_idle.push_back(result.streamed_idle_seconds * 1e3);
    stall.push_back(result.stall_seconds * 1e3);
  }
};

// Times; each has one entry for every round.
struct LayoutTimes {
  Times cpu, streamed, both, traffic, copies;
  std::vector<Together> together;
};

// The best rate of both executors together that the ceilings of a round allow, in passes over all
// elements per second. For each rate of the CPU threads two things limit the rate of the streams.
// One is the host's memory: its limit is interpolated between the ceilings. The other is the link
// to the host, which also carries the gradients for the CPU threads (and the upper halves of split
// masters). The link to the device carries no more than that.
double BestSplit(const LayoutCase& layout, double cpu_alone, double copies_alone,
                 const Together& together) {
  const double down_bytes = layout.layout.masters == OFFLOAD_MASTER_SPLIT ? 4 : 2;
  const double taken = down_bytes / static_cast<double>(layout.state_bytes);  // of the link
  const auto on_line = [](double x, double x0, double y0, double x1, double y1) {
    return x1 > x0 ? y0 + (x - x0) / (x1 - x0) * (y1 - y0) : std::max(y0, y1);
  };
  double best = 0;
  constexpr int kSteps = 1000;
  for (int step = 0; step <= kSteps; ++step) {
    const double cpu = cpu_alone * step / kSteps;
    const double memory =
        std::max(on_line(cpu, 0, copies_alone, cpu_alone, 0),
                 cpu < together.cpu ? on_line(cpu, 0, copies_alone, together.cpu, together.copies)
                                    : on_line(cpu, together.cpu, together.copies, cpu_alone, 0));
    const double streams = std::min(memory, copies_alone - cpu * taken);
    best = std::max(best, cpu + std::max(streams, 0.0));
  }
  return best;
}

// `ceiling_elements`: how many elements one pass of the ceilings covers.
void AddLayoutFigures(const LayoutCase& layout, uint64_t elements, uint64_t ceiling_elements,
                      const LayoutTimes& times, Report& report) {
  const std::string key = std::string("gpu_") + layout.name + "_";
  const auto count = static_cast<double>(elements);
  const auto ceiling_count = static_cast<double>(ceiling_elements);
  AddFigure(report, key + "cpu_gparams_per_s", Rates(times.cpu, count), "G/s");
  AddFigure(report, key + "streamed_gparams_per_s", Rates(times.streamed, count), "G/s");
  AddFigure(report, key + "both_gparams_per_s", Rates(times.both, count), "G/s");
  AddFigure(report, key + "ceiling_cpu_gparams_per_s", Rates(times.traffic, ceiling_count), "G/s");
  AddFigure(report, key + "ceiling_copies_gparams_per_s", Rates(times.copies, ceiling_count),
            "G/s");
  Times cpu, copies, memory, best, floor;
  for (size_t round = 0; round < times.together.size(); ++round) {
    const Together& rates = times.together[round];
    cpu.push_back(rates.cpu * ceiling_count * 1e-9);
    copies.push_back(rates.copies * ceiling_count * 1e-9);
    memory.push_back(cpu.back() * layout.bytes +
                     copies.back() * static_cast<double>(2 * layout.state_bytes));
    best.push_back(BestSplit(layout, 1 / times.traffic[round], 1 / times.copies[round], rates) *
                   ceiling_count * 1e-9);
    floor.push_back(count * 1e-9 / best.back());
  }
  AddFigure(report, key + "ceiling_at_once_cpu_gparams_per_s", cpu, "G/s");
  AddFigure(report, key + "ceiling_at_once_copies_gparams_per_s", copies, "G/s");
  AddFigure(report, key + "ceiling_at_once_gb_per_s", memory, "GB/s");
  AddFigure(report, key + "ceiling_both_gparams_per_s", best, "G/s");
  const auto scaled = [&](const Times& ceiling, const Times& seconds) {
    return Paired(ceiling, seconds,
                  [&](double c, double s) { return c * count / ceiling_count / s; });
  };
  AddFigure(report, key + "cpu_vs_ceiling", scaled(times.traffic, times.cpu), "");
  AddFigure(report, key + "streamed_vs_copies", scaled(times.copies, times.streamed), "",
            "at least 0.9");
  AddFigure(report, key + "both_vs_cpu", Ratios(times.cpu, times.both), "", layout.both_goal);
  AddFigure(report, key + "both_vs_floor", Ratios(times.both, floor), "", "at most 1.15");
}

void AddBothFigures(const LayoutCase& layout, const BothResults& results, Report& report) {
  const std::string key = std::string("gpu_") + layout.name + "_both_";
  AddFigure(report, key + "streamed_share", results.share, "");
  AddFigure(report, key + "cpu_idle_ms", results.cpu_idle, "ms");
  AddFigure(report, key + "streamed_idle_ms", results.streamed_idle, "ms");
  AddFigure(report, key + "stall_ms", results.stall, "ms");
}

void MeasureLayout(const Settings& settings, const Context& context, const LayoutCase& layout,
                   const DeviceModel& model, uint64_t elements, Report& report) {
  const auto make = [&](int32_t executors) {
    return MakeOptimizer(settings, context, model, elements, layout, executors);
  };
  const auto cpu = make(OFFLOAD_EXECUTORS_CPU);
  const auto streamed = make(OFFLOAD_EXECUTORS_STREAMED);
  const auto both = make(OFFLOAD_EXECUTORS_AUTO);
  const uint64_t ceiling_elements = elements / 2 / 64 * 64;
  Team team(context.Info().threads, true);
  CpuTraffic traffic(layout, ceiling_elements, team);
  StateCopies copies(layout.state_bytes * ceiling_elements, team);
  BothResults results;
  std::vector<Together> together;
  const std::vector<Times> times =
      TimeRounds("executors", settings.rounds,
                 {[&] { StepOnce(*cpu); }, [&] { StepOnce(*streamed); },
                  [&] {
                    StepOnce(*both);
                    results.Add(both->LastResult());
                  },
                  [&] { traffic.Run(); }, [&] { copies.Run(); },
                  [&] { together.push_back(RunTogether(traffic, copies)); }});
  together.erase(together.begin());  // TimeRounds leaves out the first round too
  AddLayoutFigures(layout, elements, ceiling_elements,
                   {times[0], times[1], times[2], times[3], times[4], together}, report);
  AddBothFigures(layout, results, report);
}

}  // namespace

void MeasureExecutors(const Settings& settings, const Context& context, Report& report) {
  const uint64_t elements = settings.gpu_elements / 2;
  const DeviceModel model(elements);
  for (const LayoutCase& layout : kLayouts)
    MeasureLayout(settings, context, layout, model, elements, report);
}

// ----------------------------------------------------------------------------- beside the model --

void MeasureModelBesideStreams(const Settings& settings, const Context& context, Report& report) {
  ModelWork work;
  if (!work.products())
    std::fprintf(stderr, "hybridopt_bench: no matrix products beside streams: %s\n",
                 work.why_no_products().c_str());
  const uint64_t elements = settings.gpu_elements / 4;
  const DeviceModel model(elements);
  for (const LayoutCase& layout : {kLayouts[0], kLayouts[3]}) {
    const auto optimizer =
        MakeOptimizer(settings, context, model, elements, layout, OFFLOAD_EXECUTORS_STREAMED);
    const BesideStreams beside = RunBesideStreams(work, *optimizer, settings.rounds);
    const std::string key = std::string("gpu_") + layout.name + "_";
    AddFigure(report, key + "model_beside_streams", beside.all, "", "at least 0.96");
    if (work.products()) AddFigure(report, key + "products_beside_streams", beside.products, "");
    AddFigure(report, key + "passes_beside_streams", beside.passes, "");
    AddFigure(report, key + "streams_beside_model", beside.streams, "");
  }
}

// ------------------------------------------------------------------------------------- two GPUs --

namespace {

constexpr int32_t kGpus = 2;

// One of two GPUs, with its part of the CPUs, as a rank has them.
struct Gpu {
  Gpu(int32_t index, uint64_t elements, const Settings& settings)
      : context(index, static_cast<uint32_t>(index), kGpus, settings.threads / kGpus) {
    REQUIRE_CUDA(cudaSetDevice(index));
    model = std::make_unique<DeviceModel>(elements);
  }
  const Context context;
  std::unique_ptr<DeviceModel> model;
};

// Makes one step of each optimizer, all at the same time.
void StepAll(const std::vector<std::unique_ptr<Optimizer>>& optimizers) {
  std::vector<std::thread> ranks;
  for (const auto& optimizer : optimizers)
    ranks.emplace_back([&optimizer] { StepOnce(*optimizer); });
  for (std::thread& rank : ranks) rank.join();
}

}  // namespace

void MeasureTwoGpus(const Settings& settings, Report& report) {
  int count = 0;
  REQUIRE_CUDA(cudaGetDeviceCount(&count));
  if (count < kGpus) {
    std::fprintf(stderr, "hybridopt_bench: two GPUs at once: left out, there is %d\n", count);
    return;
  }
  const uint64_t elements = settings.gpu_elements / 2;
  std::vector<std::unique_ptr<Gpu>> gpus;
  for (int32_t index = 0; index < kGpus; ++index)
    gpus.push_back(std::make_unique<Gpu>(index, elements, settings));
  for (const LayoutCase& layout : {kLayouts[0], kLayouts[3]}) {
    const auto make = [&](int32_t executors) {
      std::vector<std::unique_ptr<Optimizer>> optimizers;
      for (const auto& gpu : gpus)
        optimizers.push_back(
            MakeOptimizer(settings, gpu->context, *gpu->model, elements, layout, executors));
      return optimizers;
    };
    const auto cpu = make(OFFLOAD_EXECUTORS_CPU);
    const auto streamed = make(OFFLOAD_EXECUTORS_STREAMED);
    const auto both = make(OFFLOAD_EXECUTORS_AUTO);
    const std::vector<Times> times =
        TimeRounds("two GPUs", settings.rounds,
                   {[&] { StepAll(cpu); }, [&] { StepAll(streamed); }, [&] { StepAll(both); }});
    const std::string key = std::string("two_gpus_") + layout.name + "_";
    const double all = static_cast<double>(kGpus * elements);
    AddFigure(report, key + "cpu_gparams_per_s", Rates(times[0], all), "G/s");
    AddFigure(report, key + "streamed_gparams_per_s", Rates(times[1], all), "G/s");
    AddFigure(report, key + "both_gparams_per_s", Rates(times[2], all), "G/s");
    AddFigure(report, key + "both_vs_cpu", Ratios(times[0], times[2]), "", layout.two_gpus_goal);
    for (int32_t index = 0; index < kGpus; ++index) {
      const offload_step_result_t result = both[static_cast<size_t>(index)]->LastResult();
      AddFigure(report, key + "streamed_share_" + std::to_string(index),
                {static_cast<double>(result.streamed_elements) / static_cast<double>(elements)},
                "");
    }
  }
  REQUIRE_CUDA(cudaSetDevice(0));
}

}  // namespace bench
