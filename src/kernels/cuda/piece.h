// Neighbouring elements that are read or written in one access.
#pragma once

#include <cstdint>

namespace hybridopt::cuda {

template <typename T, uint32_t kCount>
struct alignas(kCount * sizeof(T)) Piece {
  T at[kCount];
};

template <uint32_t kCount, typename T>
__device__ Piece<T, kCount> LoadPiece(const T* array, uint64_t first) {
  return *reinterpret_cast<const Piece<T, kCount>*>(array + first);
}

template <uint32_t kCount, typename T>
__device__ void StorePiece(T* array, uint64_t first, const Piece<T, kCount>& piece) {
  *reinterpret_cast<Piece<T, kCount>*>(array + first) = piece;
}

}  // namespace hybridopt::cuda
