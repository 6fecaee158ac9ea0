// The product of two matrices for every instruction set; the tables of simd_kernels.h have it. A
// tile is computed from blocks of both matrices that are widened to fp32. The sums of a tile stay
// in memory, as fp32, from one block to the next, so each sum is that of product.cpp.
#include "kernels/simd/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/simd/simd_product.cpp"
#include <hwy/foreach_target.h>
// foreach_target.h comes first; it includes this file again, once per target.
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "kernels/convert.h"
#include "kernels/matrix/matrix_update.h"
#include "kernels/matrix/product.h"

#if HWY_NATIVE_FMA

HWY_BEFORE_NAMESPACE();
namespace hybridopt {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// Two vectors are at most a third of a tile.
using F32 = hn::CappedTag<float, 16>;
using U32 = hn::RebindToUnsigned<F32>;
using HalfU16 = hn::Rebind<uint16_t, F32>;
using Float = hn::Vec<F32>;

constexpr uint64_t kDepth = 192;  // of the blocks
constexpr uint64_t kRowsAtOnce = 6;
static_assert(kProductTile % kRowsAtOnce == 0 && kProductTile % 32 == 0);

// The working memory of one tile. `left` has one row of kDepth for each row of the tile, or, if the
// left matrix is stored so, one row of kProductTile for each index of the depth.
struct alignas(64) Blocks {
  float left[kProductTile * kDepth];
  float right[kDepth * kProductTile];
  float sums[kProductTile * kProductTile];
};

HWY_INLINE Float Widened(const uint16_t* source) {
  const auto wide = hn::PromoteTo(U32(), hn::LoadU(HalfU16(), source));
  return hn::BitCast(F32(), hn::ShiftLeft<16>(wide));
}

HWY_INLINE void Widen(const uint16_t* source, uint64_t count, float* to) {
  const uint64_t lanes = hn::Lanes(F32());
  uint64_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(Widened(source + i), F32(), to + i);
  for (; i < count; ++i) to[i] = Bf16ToFp32(source[i]);
}

// Adds the products of `depth` elements to kRowsAtOnce rows of sums, two vectors each. Element
// (row, k) of `left` is at row * kRow + k * kStep. Each sum is a variable, because SVE vectors
// cannot be array elements.
template <uint64_t kRow, uint64_t kStep>
HWY_INLINE void AddProducts(const float* left, const float* right, uint64_t depth, float* sums) {
  const F32 f;
  const uint64_t lanes = hn::Lanes(f);
  const auto at = [&](uint64_t row, uint64_t vector) {
    return sums + row * kProductTile + vector * lanes;
  };
  Float a0 = hn::LoadU(f, at(0, 0)), b0 = hn::LoadU(f, at(0, 1));
  Float a1 = hn::LoadU(f, at(1, 0)), b1 = hn::LoadU(f, at(1, 1));
  Float a2 = hn::LoadU(f, at(2, 0)), b2 = hn::LoadU(f, at(2, 1));
  Float a3 = hn::LoadU(f, at(3, 0)), b3 = hn::LoadU(f, at(3, 1));
  Float a4 = hn::LoadU(f, at(4, 0)), b4 = hn::LoadU(f, at(4, 1));
  Float a5 = hn::LoadU(f, at(5, 0)), b5 = hn::LoadU(f, at(5, 1));
  for (uint64_t k = 0; k < depth; ++k) {
    const Float a = hn::LoadU(f, right), b = hn::LoadU(f, right + lanes);
    right += kProductTile;
    Float one = hn::Set(f, left[0 * kRow]);
    a0 = hn::MulAdd(one, a, a0), b0 = hn::MulAdd(one, b, b0);
    one = hn::Set(f, left[1 * kRow]);
    a1 = hn::MulAdd(one, a, a1), b1 = hn::MulAdd(one, b, b1);
    one = hn::Set(f, left[2 * kRow]);
    a2 = hn::MulAdd(one, a, a2), b2 = hn::MulAdd(one, b, b2);
    one = hn::Set(f, left[3 * kRow]);
    a3 = hn::MulAdd(one, a, a3), b3 = hn::MulAdd(one, b, b3);
    one = hn::Set(f, left[4 * kRow]);
    a4 = hn::MulAdd(one, a, a4), b4 = hn::MulAdd(one, b, b4);
    one = hn::Set(f, left[5 * kRow]);
    a5 = hn::MulAdd(one, a, a5), b5 = hn::MulAdd(one, b, b5);
    left += kStep;
  }
  hn::StoreU(a0, f, at(0, 0)), hn::StoreU(b0, f, at(0, 1));
  hn::StoreU(a1, f, at(1, 0)), hn::StoreU(b1, f, at(1, 1));
  hn::StoreU(a2, f, at(2, 0)), hn::StoreU(b2, f, at(2, 1));
  hn::StoreU(a3, f, at(3, 0)), hn::StoreU(b3, f, at(3, 1));
  hn::StoreU(a4, f, at(4, 0)), hn::StoreU(b4, f, at(4, 1));
  hn::StoreU(a5, f, at(5, 0)), hn::StoreU(b5, f, at(5, 1));
}

template <uint64_t kRow, uint64_t kStep>
void AddBlocks(const ProductTile& tile, uint64_t depth, Blocks& blocks) {
  const uint64_t pair = 2 * hn::Lanes(F32());
  for (uint64_t j = 0; j < tile.cols; j += pair)
    for (uint64_t i = 0; i < tile.rows; i += kRowsAtOnce)
      AddProducts<kRow, kStep>(blocks.left + i * kRow, blocks.right + j, depth,
                               blocks.sums + i * kProductTile + j);
}

// Adds the products of the depth's elements [begin, begin + depth).
void AddDepth(const MatrixProduct& product, const ProductTile& tile, uint64_t begin, uint64_t depth,
              Blocks& blocks) {
  for (uint64_t k = 0; k < depth; ++k)
    Widen(product.right + (begin + k) * product.cols + tile.col, tile.cols,
          blocks.right + k * kProductTile);
  if (product.left_depth_stride == 1) {
    for (uint64_t i = 0; i < tile.rows; ++i)
      Widen(product.left + (tile.row + i) * product.left_row_stride + begin, depth,
            blocks.left + i * kDepth);
    AddBlocks<kDepth, 1>(tile, depth, blocks);
  } else {
    for (uint64_t k = 0; k < depth; ++k)
      Widen(product.left + (begin + k) * product.left_depth_stride + tile.row, tile.rows,
            blocks.left + k * kProductTile);
    AddBlocks<1, kProductTile>(tile, depth, blocks);
  }
}

// Rounds as RoundProduct does.
HWY_INLINE void StoreRounded(Float value, uint16_t* to) {
  const auto bits = hn::BitCast(U32(), value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(U32(), 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(U32(), 0x7FFF)), odd));
  const auto is_nan = hn::RebindMask(U32(), hn::IsNaN(value));
  const auto result = hn::IfThenElse(is_nan, hn::Set(U32(), kBf16Nan), rounded);
  hn::StoreU(hn::TruncateTo(HalfU16(), result), HalfU16(), to);
}

// Writes one row of a tile, whose sums these are.
void FinishRow(const MatrixProduct& product, const float* sums, uint64_t begin, uint64_t count) {
  float addends[kProductTile] = {};
  uint16_t row[kProductTile];
  if (product.addend != nullptr) Widen(product.addend + begin, count, addends);
  const Float product_factor = hn::Set(F32(), product.product_factor);
  const Float addend_factor = hn::Set(F32(), product.addend_factor);
  for (uint64_t j = 0; j < count; j += hn::Lanes(F32())) {
    Float value = hn::LoadU(F32(), sums + j);
    if (product.addend != nullptr)
      value =
          hn::MulAdd(product_factor, value, hn::Mul(addend_factor, hn::LoadU(F32(), addends + j)));
    StoreRounded(value, row + j);
  }
  std::memcpy(product.out + begin, row, count * sizeof(uint16_t));
}

}  // namespace

void MultiplyTile(const MatrixProduct& product, uint64_t index) {
  const ProductTile tile = TileAt(product, index);
  Blocks blocks;
  std::memset(blocks.sums, 0, sizeof(blocks.sums));
  // The rows and columns behind a tile that is smaller are computed too, and dropped.
  if (tile.rows < kProductTile) std::memset(blocks.left, 0, sizeof(blocks.left));
  if (tile.cols < kProductTile) std::memset(blocks.right, 0, sizeof(blocks.right));
  for (uint64_t begin = 0; begin < product.depth; begin += kDepth)
    AddDepth(product, tile, begin, std::min(kDepth, product.depth - begin), blocks);
  for (uint64_t i = 0; i < tile.rows; ++i)
    FinishRow(product, blocks.sums + i * kProductTile, (tile.row + i) * product.cols + tile.col,
              tile.cols);
  if (product.symmetric) MirrorTile(product, tile);
}

}  // namespace HWY_NAMESPACE
}  // namespace hybridopt
HWY_AFTER_NAMESPACE();

#endif  // HWY_NATIVE_FMA
