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

}  // namespace hybridopt
