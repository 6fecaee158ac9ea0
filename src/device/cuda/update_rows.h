// UpdateRows: turns the updates of the device port into rows for the kernels.
#pragma once

#include "device/device.h"
#include "kernels/cuda/cuda_kernels.h"

namespace hybridopt::cuda {

UpdateKind KindOf(Rule rule, const DeviceUpdate& update);

inline constexpr uint32_t kUpdateKindCount = kIndexCount * 4;
uint32_t NumberOf(const UpdateKind& kind);

// `first_tile` is the number of tiles of all rows before this one.
UpdateRow RowOf(const DeviceUpdate& update, const Coefficients& coefficients, uint32_t first_tile);

}  // namespace hybridopt::cuda
