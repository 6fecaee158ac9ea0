#include "kernels/convert.h"

#include <algorithm>

#include "kernels/kernels.h"

namespace hybridopt {

void FillArray(void* array, int32_t dtype, uint64_t count, float value) {
  if (array == nullptr) return;
  if (dtype == OFFLOAD_FP32) {
    std::fill_n(static_cast<float*>(array), count, value);
  } else {
    const uint16_t bits = dtype == OFFLOAD_BF16 ? Fp32ToBf16(value) : Fp32ToFp16(value);
    std::fill_n(static_cast<uint16_t*>(array), count, bits);
  }
}

UpdateSpan Advanced(const UpdateSpan& span, const SpanTypes& types, uint64_t begin) {
  const auto at = [begin](void* array, uint64_t bytes) -> void* {
    return array == nullptr ? nullptr : static_cast<char*>(array) + begin * bytes;
  };
  UpdateSpan rest = span;
  rest.grad = static_cast<const char*>(span.grad) + begin * DtypeBytes(types.grad_dtype);
  rest.param = at(span.param, DtypeBytes(types.param_dtype));
  rest.master = at(span.master, types.master_bytes());
  rest.moment0 = at(span.moment0, types.moment_bytes());
  rest.moment1 = at(span.moment1, types.moment_bytes());
  rest.order.column += begin;
  return rest;
}

}  // namespace hybridopt
