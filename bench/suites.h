// The suites. Each adds its rows and figures to the report. To add a contender, add an entry to the
// list of its suite; to measure something else, add a function here and a file for it.
#pragma once

#include <cstdint>
#include <string>

#include "report.h"

namespace bench {

struct Settings {
  uint64_t elements = uint64_t{64} << 20;
  uint32_t rounds = 61;
  uint32_t threads = 0;  // in rows for "all threads"; 0: as many as the library uses by default
  uint64_t gpu_elements = uint64_t{1} << 30;
  uint64_t chunk_elements = 0;     // of the GPU's pipeline; 0: the library's choice
  uint64_t checkpoint_mib = 4096;  // of state that is saved and loaded; 0: that suite is left out
  std::string checkpoint_dir = ".";
};

// The whole update of one long array, compared with the memory ceiling and with a plain loop
// (adamw28.cpp).
void MeasureAdamW28(const Settings& settings, Report& report);

// How much longer a step over many small params takes than a step over one array (overhead.cpp).
void MeasureOverhead(const Settings& settings, Report& report);

// The step over the params of real models, compared with one array of as many elements
// (shapes.cpp).
void MeasureShapes(const Settings& settings, Report& report);

// The pipeline on the simulated device: shows that it works and where its time goes (sim.cpp).
void MeasureSim(const Settings& settings, Report& report);

// Moves on the simulated device: states to the host and back, compared with a plain copy; and a
// step that finds its gradients on the host (lifecycle.cpp).
void MeasureLifecycle(const Settings& settings, Report& report);

// Many optimizers in one context, each with one small param: the time of a step, and the number of
// the library's threads (optimizers.cpp).
void MeasureOptimizers(const Settings& settings, Report& report);

// A real GPU: the ceilings of its memory and link, and whole steps compared with them (gpu.cpp).
void MeasureGpu(const Settings& settings, Report& report);

// The host share of a GPU updated by each executor, and the speed that each leaves to a model
// (gpu/executors.cpp).
void MeasureGpuExecutors(const Settings& settings, Report& report);

// Saves and loads, compared with plain readers and writers of as many bytes
// (storage/checkpoint.cpp).
void MeasureCheckpoint(const Settings& settings, Report& report);

// Steps behind a save, with buffers of several sizes (storage/checkpoint.cpp).
void MeasureSaves(const Settings& settings, Report& report);

// A step with all state on disk, compared with plain readers and writers of as many bytes
// (storage/disk.cpp).
void MeasureDisk(const Settings& settings, Report& report);

}  // namespace bench
