// Checks offload_optimizer_options_t, and sets the defaults of options that decide the StateShape.
// Optimizer sets the default of comm_timeout_ns, chunk_table.h that of stream_ring_bytes.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "device/device.h"
#include "state/shape.h"

namespace hybridopt {

// INVALID_ARGUMENT or UNSUPPORTED names the field.
Status CheckOptimizerOptions(const offload_optimizer_options_t& options, const Device& device);

// The value of save_buffer_bytes that leaves the size to the library.
inline constexpr uint64_t kAutoSaveBuffer = UINT64_MAX;

ShapeOptions ShapeOptionsOf(const offload_optimizer_options_t& options, const Device& device);

// INVALID_ARGUMENT unless `fraction` is from 0 (all state on the host) to 1 (all state on the
// device). The error calls the value `what`.
Status CheckDeviceFraction(double fraction, const char* what);

}  // namespace hybridopt
