// cuBLASLt, found at run time: the library does not link to it. Programs that use PyTorch have it.
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace hybridopt::cuda {

// The types and values of cuBLASLt that are used here, which are the same in its releases 12 and
// 13, so that no header of it is needed.
struct LtHandleOf;
struct LtOperationOf;
struct LtLayoutOf;
struct LtPreferenceOf;
using LtHandle = LtHandleOf*;
using LtOperation = LtOperationOf*;
using LtLayout = LtLayoutOf*;
using LtPreference = LtPreferenceOf*;
using LtOutcome = int;  // 0 is success

struct LtAlgorithm {
  uint64_t data[8];
};
struct LtHeuristic {
  LtAlgorithm algorithm;
  size_t workspace_bytes;
  LtOutcome outcome;
  float waves;
  int reserved[4];
};

inline constexpr int kLtCompute32F = 68;
inline constexpr int kLtTransposeA = 3, kLtTransposeB = 4;            // of an operation
inline constexpr int kLtWorkspaceBytesMax = 1, kLtReductionMask = 3;  // of a preference
inline constexpr int kLtSplitK = 2, kLtReduction = 3;                 // of an algorithm
inline constexpr int32_t kLtTransposed = 1;
inline constexpr uint32_t kLtNoReduction = 0;

struct CublasLt {
  size_t (*get_version)();
  LtOutcome (*create)(LtHandle*);
  LtOutcome (*destroy)(LtHandle);
  LtOutcome (*operation_create)(LtOperation*, int compute, cudaDataType scale);
  LtOutcome (*operation_destroy)(LtOperation);
  LtOutcome (*operation_set)(LtOperation, int attribute, const void*, size_t);
  LtOutcome (*layout_create)(LtLayout*, cudaDataType, uint64_t rows, uint64_t cols, int64_t stride);
  LtOutcome (*layout_destroy)(LtLayout);
  LtOutcome (*preference_create)(LtPreference*);
  LtOutcome (*preference_destroy)(LtPreference);
  LtOutcome (*preference_set)(LtPreference, int attribute, const void*, size_t);
  LtOutcome (*heuristic)(LtHandle, LtOperation, LtLayout a, LtLayout b, LtLayout c, LtLayout d,
                         LtPreference, int asked, LtHeuristic*, int* found);
  LtOutcome (*algorithm_get)(const LtAlgorithm*, int attribute, void*, size_t, size_t* written);
  LtOutcome (*multiply)(LtHandle, LtOperation, const void* alpha, const void* a, LtLayout,
                        const void* b, LtLayout, const void* beta, const void* c, LtLayout, void* d,
                        LtLayout, const LtAlgorithm*, void* workspace, size_t, cudaStream_t);
};

// A cuBLASLt that can be used in the current context, and a handle of it.
struct OpenedCublasLt {
  CublasLt functions;
  LtHandle handle;
};

// Takes the copy that the process has loaded, else the newest one that the system finds.
// UNSUPPORTED, with the way out, if there is none. Once loaded it stays loaded.
Result<OpenedCublasLt> OpenCublasLt();

}  // namespace hybridopt::cuda
