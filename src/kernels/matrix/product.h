// A product of bf16 matrices with fp32 sums. Each sum begins with 0 and adds the products of the
// depth in ascending order, each by one fma. So its bits depend neither on the size of tiles and
// vectors nor on who computes which tile.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/kernels.h"

namespace hybridopt {

// out = product_factor * (left * right) + addend_factor * addend, as one fma of each sum and one
// product; without addend, out = left * right. All matrices but `left` are row-major and have
// `cols` columns.
struct MatrixProduct {
  const uint16_t*
      left;  // element (row, depth) is at row * left_row_stride + depth * left_depth_stride
  uint64_t left_row_stride;  // this or the other one is 1
  uint64_t left_depth_stride;
  const uint16_t* right;   // `depth` rows
  const uint16_t* addend;  // `rows` rows, or NULL
  uint16_t* out;           // `rows` rows; overlaps none of the others
  uint64_t rows;
  uint64_t cols;
  uint64_t depth;
  float product_factor;
  float addend_factor;
  // The result equals its transpose, bit for bit: only the tiles on and below the diagonal are
  // computed, and then mirrored.
  bool symmetric;
};

// The rows, and the columns, of a tile.
inline constexpr uint64_t kProductTile = 96;

// The part of `out` that one call computes.
struct ProductTile {
  uint64_t row;
  uint64_t col;
  uint64_t rows;
  uint64_t cols;
};

constexpr uint64_t TilesOf(uint64_t count) { return (count + kProductTile - 1) / kProductTile; }

// How many tiles are computed.
constexpr uint64_t TileCount(const MatrixProduct& product) {
  const uint64_t rows = TilesOf(product.rows);
  return product.symmetric ? rows * (rows + 1) / 2 : rows * TilesOf(product.cols);
}

// Tile number `index` of TileCount.
inline ProductTile TileAt(const MatrixProduct& product, uint64_t index) {
  uint64_t row = 0, col = 0;
  if (product.symmetric) {
    while ((row + 1) * (row + 2) / 2 <= index) ++row;
    col = index - row * (row + 1) / 2;
  } else {
    row = index / TilesOf(product.cols);
    col = index % TilesOf(product.cols);
  }
  row *= kProductTile;
  col *= kProductTile;
  return {row, col, std::min(kProductTile, product.rows - row),
          std::min(kProductTile, product.cols - col)};
}

// Copies a tile of a symmetric product to the other side of the diagonal.
void MirrorTile(const MatrixProduct& product, const ProductTile& tile);

// The specification of MultiplyTileFunction (kernels.h).
void MultiplyTile(const MatrixProduct& product, uint64_t index);

}  // namespace hybridopt
