// The suites: each adds its rows and figures to the report. A new contender is one more entry in a
// suite's list; a new question is one more function here and one more file beside the others.
#pragma once

#include <cstdint>
#include <string>

#include "report.h"

namespace bench {

struct Settings {
  uint64_t elements = uint64_t{64} << 20;
  uint32_t rounds = 61;
  uint32_t threads = 0;  // of "all threads"; 0 = as many as the library takes
  uint64_t gpu_elements = uint64_t{1} << 30;
  uint64_t chunk_elements = 0;     // of the GPU's pipeline; 0 = the library's choice
  uint64_t checkpoint_mib = 4096;  // of state that is saved and loaded; 0: that suite is left out
  std::string checkpoint_dir = ".";
};

// The whole update of one long array against the memory ceiling and a plain loop (adamw28.cpp).
void MeasureAdamW28(const Settings& settings, Report& report);

// What a step over many small params costs beyond one over a single array (overhead.cpp).
void MeasureOverhead(const Settings& settings, Report& report);

// The step over the params of real models against one array of as many elements (shapes.cpp).
void MeasureShapes(const Settings& settings, Report& report);

// The pipeline on the simulated device: that it works, and where its time goes (sim.cpp).
void MeasureSim(const Settings& settings, Report& report);

// Moves on the simulated device: states out and back against a plain copy, and the step that finds
// its gradients on the host (lifecycle.cpp).
void MeasureLifecycle(const Settings& settings, Report& report);

// Many optimizers of one small param in one context: the time of a step, and how many threads the
// library has (optimizers.cpp).
void MeasureOptimizers(const Settings& settings, Report& report);

// A real GPU: ceilings of its memory and link, and whole steps against them (gpu.cpp).
void MeasureGpu(const Settings& settings, Report& report);

// Who updates the host share of a GPU, and what that leaves to others (gpu_executors.cpp).
void MeasureGpuExecutors(const Settings& settings, Report& report);

// Saves and loads against plain readers and writers of as many bytes (checkpoint.cpp).
void MeasureCheckpoint(const Settings& settings, Report& report);

}  // namespace bench
