// hybridopt_bench: compares the library's speed with that of the memory of this machine.
// bench/README.md explains the rows, docs/PERFORMANCE.md how to read them.
#include <CLI/CLI.hpp>
#include <iostream>

#include "library.h"
#include "report.h"
#include "suites.h"

namespace bench {
namespace {

// Options that measure something else instead of the CPU.
struct Instead {
  bool gpu = false;
  bool gpu_executors = false;
  bool optimizers = false;
  bool saves = false;
  bool disk = false;
};

Report Measure(const Settings& settings, const Instead& instead) {
  const Neighbours neighbours;
  Report report{};
  report.machine = DescribeMachine();
  report.library = offload_build_info();
  report.isa = Context(OFFLOAD_DEVICE_HOST, settings.threads).Info().isa;
  report.elements = settings.elements;
  report.rounds = settings.rounds;
  if (instead.gpu || instead.gpu_executors) {
    report.elements = settings.gpu_elements;
    if (instead.gpu) MeasureGpu(settings, report);
    MeasureGpuExecutors(settings, report);
  } else if (instead.optimizers) {
    MeasureOptimizers(settings, report);
  } else if (instead.saves) {
    MeasureSaves(settings, report);
  } else if (instead.disk) {
    MeasureDisk(settings, report);
  } else {
    MeasureAdamW28(settings, report);
    MeasureOverhead(settings, report);
    MeasureShapes(settings, report);
    MeasureSim(settings, report);
    MeasureLifecycle(settings, report);
    MeasureCheckpoint(settings, report);
  }
  report.machine.cpus_of_others = neighbours.CpusBusy();
  return report;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  bench::Settings settings;
  bool json = false;
  bench::Instead instead;
  CLI::App app("Measures hybridopt against what the memory of this machine can give.");
  app.add_option("--elements", settings.elements, "elements of the long array")
      ->check(CLI::Range(uint64_t{1} << 16, uint64_t{1} << 40))
      ->capture_default_str();
  app.add_option("--rounds", settings.rounds, "rounds; every contender runs once in each")
      ->check(CLI::Range(3, 10000))
      ->capture_default_str();
  app.add_option("--threads", settings.threads,
                 "what 'all threads' means; 0: one per CPU this process may use")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  app.add_flag("--gpu", instead.gpu, "measure the GPU instead");
  app.add_flag("--gpu-executors", instead.gpu_executors,
               "of --gpu only who updates the state on the host, and what that leaves to others")
      ->excludes("--gpu");
  app.add_flag("--optimizers", instead.optimizers,
               "measure many small optimizers of one context instead")
      ->excludes("--gpu")
      ->excludes("--gpu-executors");
  app.add_flag("--saves", instead.saves, "measure steps behind saves instead")
      ->excludes("--gpu")
      ->excludes("--gpu-executors")
      ->excludes("--optimizers");
  app.add_flag("--disk", instead.disk, "measure steps with state on disk instead")
      ->excludes("--gpu")
      ->excludes("--gpu-executors")
      ->excludes("--optimizers")
      ->excludes("--saves");
  app.add_option("--gpu-elements", settings.gpu_elements,
                 "elements of the whole steps on the GPU; takes 40 bytes of host memory each")
      ->check(CLI::Range(uint64_t{1} << 20, uint64_t{1} << 40))
      ->capture_default_str();
  app.add_option("--chunk-elements", settings.chunk_elements,
                 "elements of a chunk on the GPU; 0: as the library chooses")
      ->capture_default_str();
  app.add_option("--checkpoint-mib", settings.checkpoint_mib,
                 "MiB of state to save and load, or on disk; 0 leaves saves and loads out")
      ->check(CLI::Range(uint64_t{0}, uint64_t{1} << 24))
      ->capture_default_str();
  app.add_option("--checkpoint-dir", settings.checkpoint_dir,
                 "where checkpoints and state on disk are written")
      ->check(CLI::ExistingDirectory)
      ->capture_default_str();
  app.add_flag("--json", json, "print one JSON object instead of the table");
  CLI11_PARSE(app, argc, argv);

  const bench::Report report = bench::Measure(settings, instead);
  (json ? bench::PrintJson : bench::PrintTable)(std::cout, report);
}
