// Arrays of arbitrary numbers in a device's memory, for tests that compare every bit.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "../../random.h"
#include "device_calls.h"
#include "kernels/convert.h"
#include "kernels/kernels.h"

namespace hybridopt {

// Finite numbers of every magnitude, zeros and denormals among them. Lower halves have arbitrary
// bits.
inline uint32_t AnyFiniteBits(int32_t dtype, Random& random) {
  const auto bits = random.Bits();
  if (bits % 16 == 0) return 0;
  if (dtype == OFFLOAD_FP32) return (bits & 0x7f800000) == 0x7f800000 ? bits & 0xff7fffff : bits;
  const uint32_t half = bits & 0xffff;
  if (dtype == OFFLOAD_U16) return half;
  const uint32_t exponent = dtype == OFFLOAD_BF16 ? 0x7f80 : 0x7c00;
  return (half & exponent) == exponent ? half & ~0x0400u & ~0x0080u : half;
}

inline std::vector<std::byte> AnyArray(int32_t dtype, uint64_t count, Random& random) {
  std::vector<std::byte> array(count * DtypeBytes(dtype));
  for (uint64_t i = 0; i < count; ++i) {
    const uint32_t bits = AnyFiniteBits(dtype, random);
    std::memcpy(&array[i * DtypeBytes(dtype)], &bits, DtypeBytes(dtype));
  }
  return array;
}

// The bits of an array, with every NaN replaced by the same one: no device promises which NaN an
// operation makes.
inline std::vector<uint32_t> BitsOf(const std::vector<std::byte>& array, int32_t dtype) {
  const uint64_t bytes = DtypeBytes(dtype);
  std::vector<uint32_t> values(array.size() / bytes);
  for (size_t i = 0; i < values.size(); ++i) {
    std::memcpy(&values[i], &array[i * bytes], bytes);
    float value = std::bit_cast<float>(values[i]);
    if (dtype == OFFLOAD_BF16) value = Bf16ToFp32(static_cast<uint16_t>(values[i]));
    if (dtype == OFFLOAD_FP16) value = Fp16ToFp32(static_cast<uint16_t>(values[i]));
    if (std::isnan(value)) values[i] = 0xffffffff;
  }
  return values;
}

inline constexpr uint64_t kGuardElements = 8;

// An array on the device that begins `skew` elements after an address that is aligned for vectors,
// with guards around it.
struct SkewedArray {
  SkewedArray(Device& device, int32_t dtype, uint64_t skew, std::vector<std::byte> values)
      : dtype(dtype), skew(skew), image(GuardBytes(skew), std::byte{0x5a}) {
    image.insert(image.end(), values.begin(), values.end());
    image.resize(image.size() + GuardBytes(0), std::byte{0x5a});
    block = Upload(device, image);
  }
  uint64_t GuardBytes(uint64_t more) const { return (kGuardElements + more) * DtypeBytes(dtype); }
  void* device_data() const { return block + GuardBytes(skew); }
  std::byte* host_data() { return image.data() + GuardBytes(skew); }
  std::vector<std::byte> Now(Device& device) const { return Download(device, block, image.size()); }

  int32_t dtype;
  uint64_t skew;
  std::vector<std::byte> image;  // the expected content
  std::byte* block = nullptr;
};

}  // namespace hybridopt
