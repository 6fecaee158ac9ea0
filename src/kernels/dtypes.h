// One row for each dtype of the ABI: what the host's code must know about the dtype. The kernels
// convert elements by templates (convert.h).
#pragma once

#include <cstdint>

#include "base/check.h"
#include "offload.h"

namespace hybridopt {

struct DtypeRow {
  int32_t dtype;
  uint64_t bytes;  // of an element
  const char* name;
  const char* stored_name;  // in safetensors files
  bool is_of_params;        // also of gradients; the other dtypes are only for state
};

inline constexpr DtypeRow kDtypeRows[] = {
    {OFFLOAD_FP32, 4, "fp32", "F32", true}, {OFFLOAD_BF16, 2, "bf16", "BF16", true},
    {OFFLOAD_FP16, 2, "fp16", "F16", true}, {OFFLOAD_U16, 2, "u16", "U16", false},
    {OFFLOAD_I8, 1, "i8", "I8", false},
};

// NULL if `dtype` is none of enum offload_dtype.
constexpr const DtypeRow* FindDtype(int32_t dtype) {
  for (const DtypeRow& row : kDtypeRows)
    if (row.dtype == dtype) return &row;
  return nullptr;
}

constexpr bool IsParamDtype(int32_t dtype) {
  const DtypeRow* const row = FindDtype(dtype);
  return row != nullptr && row->is_of_params;
}

// For values from the caller, which may be no dtype.
constexpr const char* DtypeName(int32_t dtype) {
  const DtypeRow* const row = FindDtype(dtype);
  return row != nullptr ? row->name : "unknown";
}

// These require a valid dtype.
constexpr uint64_t DtypeBytes(int32_t dtype) {
  const DtypeRow* const row = FindDtype(dtype);
  HYBRIDOPT_CHECK(row != nullptr);
  return row->bytes;
}
constexpr const char* StoredDtypeName(int32_t dtype) {
  const DtypeRow* const row = FindDtype(dtype);
  HYBRIDOPT_CHECK(row != nullptr);
  return row->stored_name;
}

}  // namespace hybridopt
