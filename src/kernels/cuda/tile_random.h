// The random bits of a tile's elements (stochastic_rounding.h), for any order of the elements in
// the tensor.
#pragma once

#include <cstdint>

#include "kernels/cuda/piece.h"
#include "kernels/kernels.h"
#include "kernels/stochastic_rounding.h"

namespace hybridopt::cuda {

// In nearly all tiles all indices have the same upper half. Then the elements share a tweak, and
// their counters differ as their indices do: by 1, plus a gap from row to row. Only the first
// element needs a 64-bit division, and only elements in later rows need a 32-bit division.
class TileRandom {
 public:
  // The random bits of elements [begin, begin + count) of the span.
  __device__ TileRandom(const UpdateSpan& span, uint64_t begin, uint32_t count)
      : span_(span), begin_(begin) {
    const ElementOrder& order = span.order;
    uint64_t column = order.column + begin;
    if (column >= order.row_length) column %= order.row_length;
    const uint64_t left = order.row_length - column;
    left_ = left < count ? static_cast<uint32_t>(left) : count;
    row_length_ = order.row_length < count ? static_cast<uint32_t>(order.row_length) : count;
    gap_ = static_cast<uint32_t>(order.row_stride - order.row_length);
    const uint64_t first = IndexOf(order, begin);
    share_tweak_ = first >> 32 == IndexOf(order, begin + count - 1) >> 32;  // indices ascend
    counter_ = CounterOf(span.rounding, first);
    tweak_ = TweakOf(span.rounding, first);
  }

  // Whether At may be called; otherwise Of must be called.
  __device__ bool share_tweak() const { return share_tweak_; }

  // The bits of the span's elements from `first` on; `first` is in the tile.
  template <uint32_t kCount>
  __device__ Piece<uint32_t, kCount> At(uint64_t first) const {
    const auto offset = static_cast<uint32_t>(first) - static_cast<uint32_t>(begin_);
    uint32_t counter = counter_ + offset;
    uint32_t left = left_ - offset;
    if (offset >= left_) {
      const uint32_t row = (offset - left_) / row_length_;
      counter += (row + 1) * gap_;
      left = (row + 1) * row_length_ + left_ - offset;
    }
    Piece<uint32_t, kCount> random;
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      random.at[i] = RandomBits(counter, tweak_);
      counter += 1;
      if (--left == 0) {
        counter += gap_;
        left = row_length_;
      }
    }
    return random;
  }

  __device__ uint32_t Of(uint64_t element) const {
    const uint64_t index = IndexOf(span_.order, element);
    return RandomBits(CounterOf(span_.rounding, index), TweakOf(span_.rounding, index));
  }

 private:
  const UpdateSpan& span_;
  const uint64_t begin_;
  uint32_t left_;        // elements of the first row in this tile
  uint32_t row_length_;  // of the later rows, cut to the tile
  uint32_t gap_;         // the indices between the end of one row and the next row
  uint32_t counter_;     // of the first element
  uint32_t tweak_;
  bool share_tweak_;
};

}  // namespace hybridopt::cuda
