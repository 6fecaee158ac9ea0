// What offload_optimizer_options_t says, checked, and with its defaults filled in.
#pragma once

#include "base/status.h"
#include "device/device.h"
#include "state/placement.h"

namespace hybridopt {

// INVALID_ARGUMENT or UNSUPPORTED names the field.
Status CheckOptimizerOptions(const offload_optimizer_options_t& options);

PlacementOptions PlacementOptionsOf(const offload_optimizer_options_t& options,
                                    const Device& device);

}  // namespace hybridopt
