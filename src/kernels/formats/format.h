// Format: how one array of a param's state is stored. Kernels are instantiated from formats. All
// other code asks the format's row, or works with fp32 numbers.
//
// Each format has one file in this folder, with its codec twice: for one number, for the
// specification and for the GPU's kernels; and for vectors, where HYBRIDOPT_IN_VECTORS is defined
// (simd_unit.h includes table.inc again, inside the namespace of each instruction set). A new
// format is such a file and three lines of table.inc. If its units have several elements, it also
// needs an initial value of a whole unit (PatternOf), and kernels that read whole units.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "base/check.h"
#include "kernels/convert.h"

namespace hybridopt {

enum class Format : uint8_t;  // table.inc has its values

inline constexpr int32_t kNotOffered = -1;

struct FormatRow {
  Format format;
  const char* name;
  uint64_t unit_bytes;         // of unit_elements
  uint64_t unit_elements = 1;  // an array is cut between units only
  int32_t view_dtype;          // enum offload_dtype: the elements that a view of the array shows
  // Checkpoints store masters as fp32, and moments in this dtype; a checkpoint's "layout" has this
  // name.
  int32_t stored_dtype = OFFLOAD_FP32;
  const char* stored_layout = "fp32";
  // The options by which users choose the format: for masters of bf16 params, and for moments.
  int32_t master_layout = kNotOffered;  // enum offload_master_layout
  int32_t moment_dtype = kNotOffered;   // enum offload_dtype
  // "Beside the param": the array has only the part of the master that its bf16 param has lost by
  // rounding. Such params round exact ties away from zero.
  bool beside_param = false;
  // A step rounds the number when it stores it, at random or to nearest.
  bool is_rounded = false;

  // Stores fp32 numbers, rounded to nearest. The addresses need not be aligned.
  void (*encode)(const std::byte* values, uint64_t count, std::byte* stored);
  // Returns the stored numbers in `values`. `params` is NULL unless beside_param.
  void (*decode)(const std::byte* stored, const std::byte* params, uint64_t count, float* values);
  // Only if beside_param: rounds the numbers that encode() stores to their params.
  void (*encode_params)(const std::byte* values, uint64_t count, std::byte* params) = nullptr;

  constexpr uint64_t Bytes(uint64_t count) const {
    return (count + unit_elements - 1) / unit_elements * unit_bytes;
  }
};

// The codec of one number. Each format has
//   Stored                               what an element is stored as
//   kBesideParam, kIsRounded             as in the row
//   Decode(stored) or, if kBesideParam, Decode(stored, param)
//   Keep(value, stochastic, random)      what a master of the value is after a step: `random` has 8
//                                        random bits
//   Encode(value)                        of a value that Keep has given
// and if moments can have it
//   EncodeMoment<kIsSum>(value, stochastic, random)
//                                        `random` has 16 random bits; a sum of squares stays finite
template <Format kFormat>
struct Codec;

template <typename T>
T LoadElement(const std::byte* array, uint64_t index) {
  T element;
  std::memcpy(&element, array + index * sizeof(T), sizeof(T));
  return element;
}

template <typename T>
void StoreElement(std::byte* array, uint64_t index, T element) {
  std::memcpy(array + index * sizeof(T), &element, sizeof(T));
}

// The loops are simple, so that the compiler can vectorize them.
template <Format kFormat>
void EncodeArray(const std::byte* values, uint64_t count, std::byte* stored) {
  using C = Codec<kFormat>;
  for (uint64_t i = 0; i < count; ++i)
    StoreElement(stored, i, C::Encode(C::Keep(LoadElement<float>(values, i), false, 0)));
}

template <Format kFormat>
void DecodeArray(const std::byte* stored, const std::byte* params, uint64_t count, float* values) {
  using C = Codec<kFormat>;
  for (uint64_t i = 0; i < count; ++i) {
    const auto element = LoadElement<typename C::Stored>(stored, i);
    if constexpr (C::kBesideParam)
      values[i] = C::Decode(element, LoadElement<uint16_t>(params, i));
    else
      values[i] = C::Decode(element);
  }
}

template <Format kFormat>
void EncodeParams(const std::byte* values, uint64_t count, std::byte* params) {
  for (uint64_t i = 0; i < count; ++i) {
    const float kept = Codec<kFormat>::Keep(LoadElement<float>(values, i), false, 0);
    StoreElement(params, i, Fp32ToBf16TiesAway(kept));
  }
}

#include "kernels/formats/table.inc"

inline constexpr int32_t kFormatCount = std::size(kFormats);

constexpr const FormatRow& RowOf(Format format) { return kFormats[static_cast<int32_t>(format)]; }

constexpr bool RowsAreInOrder() {
  for (int32_t i = 0; i < kFormatCount; ++i)
    if (kFormats[i].format != Format{static_cast<uint8_t>(i)}) return false;
  return true;
}
static_assert(RowsAreInOrder());

// NULL if `master_layout` is none of enum offload_master_layout.
constexpr const FormatRow* FindMasterFormat(int32_t master_layout) {
  for (const FormatRow& row : kFormats)
    if (row.master_layout != kNotOffered && row.master_layout == master_layout) return &row;
  return nullptr;
}

// NULL for a dtype that moments cannot have.
constexpr const FormatRow* FindMomentFormat(int32_t dtype) {
  for (const FormatRow& row : kFormats)
    if (row.moment_dtype != kNotOffered && row.moment_dtype == dtype) return &row;
  return nullptr;
}

// The formats of the arrays of one param's state.
struct StateFormats {
  Format master = Format::kFp32;
  Format moment0 = Format::kFp32;
  Format moment1 = Format::kFp32;
  bool operator==(const StateFormats&) const = default;
};

// The stored bits of one element, with which arrays are filled.
struct Pattern {
  uint32_t bytes;  // 1, 2 or 4
  uint32_t bits = 0;
};

// The pattern of a number, rounded to nearest. If the format is "beside the param", the pattern of
// 0 says that the param has lost nothing of the master.
inline Pattern PatternOf(Format format, float value) {
  Pattern pattern{static_cast<uint32_t>(RowOf(format).unit_bytes)};
  HYBRIDOPT_CHECK(RowOf(format).unit_elements == 1 && pattern.bytes <= sizeof(pattern.bits));
  RowOf(format).encode(reinterpret_cast<const std::byte*>(&value), 1,
                       reinterpret_cast<std::byte*>(&pattern.bits));
  return pattern;
}

// A NULL array is allowed and does nothing.
inline void FillArray(void* array, uint64_t count, const Pattern& pattern) {
  if (array == nullptr) return;
  switch (pattern.bytes) {
    case 4:
      std::fill_n(static_cast<uint32_t*>(array), count, pattern.bits);
      return;
    case 2:
      std::fill_n(static_cast<uint16_t*>(array), count, static_cast<uint16_t>(pattern.bits));
      return;
    default:
      HYBRIDOPT_CHECK(pattern.bytes == 1);
      std::fill_n(static_cast<uint8_t*>(array), count, static_cast<uint8_t>(pattern.bits));
  }
}

}  // namespace hybridopt
