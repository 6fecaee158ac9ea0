// The kernels of the CUDA device: the operations of reference.cpp in the same order, one launch for
// many params. The values that differ between params are in the rows of a table in device memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/changes/changes.h"
#include "kernels/changes/tiles.h"
#include "kernels/kernels.h"
#include "kernels/matrix/matrix_update.h"

namespace hybridopt::cuda {

// The elements of each row are cut into tiles of this many elements; one thread block updates a
// tile at a time.
inline constexpr uint64_t kTileElements = 8192;

// One span of an update.
struct alignas(16) UpdateRow {
  UpdateSpan span;  // device addresses; count > 0
  NotedBits noted;  // of the span's first element
  Coefficients coefficients;
  uint32_t first_tile;  // tiles of all rows before this one
  uint32_t vectors;     // 1: all arrays are aligned so that four elements can be read at once
};

// The values that all rows of a launch share.
struct UpdateKind {
  Rule rule;
  SpanTypes types;
  bool ties_away;
  bool stochastic;
};

// One gradient of a norm.
struct alignas(16) NormRow {
  const void* grad;  // device address
  uint64_t count;    // > 0
  uint64_t first_block;
  uint32_t first_group;  // thread blocks of all rows before this one
  uint8_t dtype;
  uint8_t vectors;  // 1: grad is a multiple of 16 bytes
};

// The number of thread blocks that sum a gradient.
uint32_t NormGroups(uint64_t count, int32_t dtype);

// One part of a survey or a collection of changes.
struct alignas(16) ChangeRow {
  ChangePart part;       // count > 0
  uint32_t first_block;  // thread blocks of all rows before this one; each tile has one
  uint32_t words;        // 1: elements is a multiple of 8 bytes
};

// How a launch makes the verdict from block sums. If a table is too long for one launch, several
// launches share it; each passes its sum to the next launch in the verdict.
struct NormTotal {
  bool first;
  bool last;
  double grad_scale;
  double grad_norm_max;
};

// What the update of a matrix computes on the device beside the matrices.
struct MatrixScalars {
  float divisor;    // of U
  Verdict verdict;  // on the update of the params by X: skips as the launch's verdict does
};

cudaError_t LaunchUpdate(cudaStream_t stream, const UpdateKind& kind, const UpdateRow* rows,
                         uint32_t row_count, uint32_t tiles, const Verdict* verdict);
cudaError_t LaunchBlockSums(cudaStream_t stream, const NormRow* rows, uint32_t row_count,
                            uint32_t groups, double* block_sums);
// The launch overwrites the block sums.
cudaError_t LaunchVerdictOfSums(cudaStream_t stream, const NormRow* rows, uint32_t row_count,
                                double* block_sums, const NormTotal& total, Verdict* verdict);
cudaError_t LaunchSetVerdict(cudaStream_t stream, const Verdict& value, Verdict* verdict);
cudaError_t LaunchFill(cudaStream_t stream, void* destination, uint64_t count,
                       const Pattern& pattern);
cudaError_t LaunchFollowParams(cudaStream_t stream, const void* params, int32_t dtype,
                               uint64_t count, float* masters);
// Updates the momentum and writes U to `out`, unless the verdict skips. `quads`: all arrays are
// aligned so that four elements can be read at once.
cudaError_t LaunchMomentum(cudaStream_t stream, const MatrixUpdate& update, bool quads,
                           const Verdict* verdict, uint16_t* out);
// Divides the `count` elements of U, whose block sums these are, by its norm.
cudaError_t LaunchDivide(cudaStream_t stream, const double* block_sums, uint64_t count, float eps,
                         const Verdict* verdict, MatrixScalars* scalars, uint16_t* u);

// One thread block for each tile, of which there is at least one.
cudaError_t LaunchSurveyChanges(cudaStream_t stream, const ChangeRow* rows, uint32_t row_count,
                                uint32_t blocks, ChangeTile* tiles);
cudaError_t LaunchCollectChanges(cudaStream_t stream, const ChangeRow* rows, uint32_t row_count,
                                 uint32_t blocks, uint64_t element_bytes, const uint32_t* starts,
                                 uint16_t* offsets, std::byte* values);

// Loads all kernels into the current context. Otherwise a kernel would be loaded at its first
// launch, which could wait for a stream that itself waits for that launch.
cudaError_t LoadKernels();

}  // namespace hybridopt::cuda
