#include "kernels/matrix/product.h"

#include <cmath>

#include "kernels/convert.h"
#include "kernels/matrix/matrix_update.h"

namespace hybridopt {

void MirrorTile(const MatrixProduct& product, const ProductTile& tile) {
  if (tile.row == tile.col) return;
  for (uint64_t j = tile.col; j < tile.col + tile.cols; ++j)
    for (uint64_t i = tile.row; i < tile.row + tile.rows; ++i)
      product.out[j * product.cols + i] = product.out[i * product.cols + j];
}

void MultiplyTile(const MatrixProduct& product, uint64_t index) {
  const ProductTile tile = TileAt(product, index);
  for (uint64_t i = tile.row; i < tile.row + tile.rows; ++i) {
    float sums[kProductTile] = {};
    for (uint64_t k = 0; k < product.depth; ++k) {
      const float left =
          Bf16ToFp32(product.left[i * product.left_row_stride + k * product.left_depth_stride]);
      const uint16_t* const right = product.right + k * product.cols + tile.col;
      for (uint64_t j = 0; j < tile.cols; ++j)
        sums[j] = std::fma(left, Bf16ToFp32(right[j]), sums[j]);
    }
    const uint64_t begin = i * product.cols + tile.col;
    for (uint64_t j = 0; j < tile.cols; ++j) {
      float value = sums[j];
      if (product.addend != nullptr)
        value = std::fma(product.product_factor, value,
                         product.addend_factor * Bf16ToFp32(product.addend[begin + j]));
      product.out[begin + j] = RoundProduct(value);
    }
  }
  if (product.symmetric) MirrorTile(product, tile);
}

}  // namespace hybridopt
