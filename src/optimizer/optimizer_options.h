// Checks offload_optimizer_options_t, and sets the defaults of options that decide the StateShape.
// Optimizer sets the default of comm_timeout_ns, chunk_table.h that of stream_ring_bytes.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "device/device.h"
#include "memory/tier.h"
#include "state/shape.h"

namespace hybridopt {

// INVALID_ARGUMENT or UNSUPPORTED names the field.
Status CheckOptimizerOptions(const offload_optimizer_options_t& options, const Device& device);

// For optimizers with matrices that only the device may update: INVALID_ARGUMENT if the options ask
// for CPU workers.
Status CheckNoCpuUpdates(const offload_optimizer_options_t& options, const Device& device);

// Why CPU workers may not update the host share, and what to do instead: the beginning and the end
// of error texts.
struct StreamedOnly {
  const char* why;
  const char* way_out;
};
StreamedOnly StreamedOnlyOf(const offload_optimizer_options_t& options);

// The value of save_buffer_bytes that leaves the size to the library.
inline constexpr uint64_t kAutoSaveBuffer = UINT64_MAX;

ShapeOptions ShapeOptionsOf(const offload_optimizer_options_t& options, const Device& device);

// What the options say about the share of each tier; see Residence.
ByTier<double> FractionsOf(const offload_optimizer_options_t& options);

// INVALID_ARGUMENT unless both fractions are from 0 to 1, and at most 1 together, and the options
// name directories for state on disk. The error puts `of` in front of the fractions' names.
Status CheckFractions(const ByTier<double>& fractions, const offload_optimizer_options_t& options,
                      const char* of);

}  // namespace hybridopt
