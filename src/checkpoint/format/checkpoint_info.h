// The content of a manifest in the ABI's structs.
#pragma once

#include "base/function_ref.h"
#include "checkpoint/format/format.h"
#include "offload.h"

namespace hybridopt::checkpoint {

offload_checkpoint_info_t InfoOf(const Manifest& manifest);

// Calls visit for every stored array, in the order of the manifest.
void ForEachTensor(const Manifest& manifest,
                   FunctionRef<void(const offload_checkpoint_tensor_t&)> visit);

}  // namespace hybridopt::checkpoint
