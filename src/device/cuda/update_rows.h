// UpdateRows: what the port's updates are to the kernels.
#pragma once

#include "device/device.h"
#include "kernels/cuda/launch.h"

namespace hybridopt::cuda {

UpdateKind KindOf(Rule rule, const DeviceUpdate& update);

// Kinds of one rule's updates, numbered.
inline constexpr uint32_t kUpdateKindCount = kStateLayoutCount * kDtypeCount * kDtypeCount * 4;
uint32_t NumberOf(const UpdateKind& kind);

// `first_tile`: tiles of the rows before.
UpdateRow RowOf(const DeviceUpdate& update, const Coefficients& coefficients, uint32_t first_tile);

}  // namespace hybridopt::cuda
