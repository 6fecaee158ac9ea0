// MatrixUpdate: the update of one matrix by Muon, which needs all elements of the matrix at once.
// The CPU makes it with newton_schulz.h, a GPU with products of cuBLASLt.
//
//   momentum B   B = lerp(B, g, 1 - momentum)
//   update U     Nesterov: lerp(g, B, momentum); else B. Rounded to bf16
//   X            U, transposed if the matrix has more rows than columns, divided by its Frobenius
//                norm, which is at least eps
//   each step    A = X X'; P = b A + c A A; X = a X + P X. Each is rounded to bf16; sums are fp32
//   param p      p -= step_size * (X + l2_decay * p)
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "kernels/changes/changes.h"
#include "kernels/convert.h"
#include "kernels/kernels.h"

namespace hybridopt {

struct MatrixShape {
  uint64_t rows;
  uint64_t cols;

  uint64_t count() const { return rows * cols; }
  uint64_t short_side() const { return rows < cols ? rows : cols; }
  uint64_t long_side() const { return rows < cols ? cols : rows; }
  bool is_tall() const { return rows > cols; }
};

// Which rows of a larger matrix are those of a part of it: runs of `rows` rows that follow each
// other, and `period` rows from the begin of one run to that of the next. 0: all of the part's rows
// follow each other.
struct RowRuns {
  uint64_t rows = 0;
  uint64_t period = 0;
};

// A matrix that is updated by itself: all of a matrix of a param, or a part of its rows.
struct MatrixPart {
  uint64_t first_row = 0;
  MatrixShape shape = {};
  RowRuns runs = {};

  uint64_t begin() const { return first_row * shape.cols; }  // its first element
  // The elements from its first one to its last one, those of other parts between them included.
  uint64_t extent() const {
    if (runs.rows == 0) return shape.count();
    return ((shape.rows / runs.rows - 1) * runs.period + runs.rows) * shape.cols;
  }
};

// Calls visit(at, offset, count) for the elements [begin, begin + count) of a part: `count`
// elements from the element begin + offset on lie from the place `at` on, counted from the part's
// begin.
template <typename Visit>
void ForEachRun(const MatrixShape& shape, const RowRuns& runs, uint64_t begin, uint64_t count,
                Visit&& visit) {
  if (runs.rows == 0) return visit(begin, uint64_t{0}, count);
  const uint64_t run = runs.rows * shape.cols, period = runs.period * shape.cols;
  for (uint64_t offset = 0; offset < count;) {
    const uint64_t in_run = (begin + offset) % run;
    const uint64_t part = std::min(run - in_run, count - offset);
    visit((begin + offset) / run * period + in_run, offset, part);
    offset += part;
  }
}

// The coefficients of one step of Newton-Schulz.
struct NsStep {
  float a;
  float b;
  float c;
};

// torch.optim.Muon's.
inline constexpr NsStep kNsDefault = {3.4445f, -4.7750f, 2.0315f};

struct MatrixUpdate {
  // The matrix in row-major order, and moment0 is the momentum. count is that of the shape, or the
  // extent of a part that has runs.
  UpdateSpan span;
  SpanTypes types;
  MatrixShape shape;
  RowRuns runs = {};
  // keep0 is the momentum, weight0 is 1 - momentum; nesterov and eps. step_size is the adjusted
  // learning rate; l2_decay is lr * weight_decay / step_size, so that the decay is lr *
  // weight_decay (FitToMatrix).
  Coefficients coefficients;
  std::span<const NsStep> steps;
  NotedBits noted;
  // As many bytes as the device needs for this shape, aligned to 256 bytes. Its content is not kept
  // from one update to the next.
  void* workspace;
};

// The rule with which X updates the params, as their gradient.
inline constexpr Rule kMatrixRule = Rule::kSgdPlain;

// The coefficients of that rule: X is neither unscaled nor clipped.
inline Coefficients OfMatrixRule(const MatrixUpdate& update) {
  Coefficients coefficients = update.coefficients;
  coefficients.grad_factor = 1.0f;
  return coefficients;
}

// The Lerp of rules.inc, for all processors.
HYBRIDOPT_EVERYWHERE inline float LerpOf(float old, float next, float keep, float weight) {
  return weight < 0.5f ? std::fma(weight, next - old, old) : std::fma(keep, old - next, next);
}

// Returns U for one element, and updates its momentum. `grad` has been multiplied by grad_factor.
HYBRIDOPT_EVERYWHERE inline float UpdateMomentum(const Coefficients& c, float grad,
                                                 float& momentum) {
  momentum = LerpOf(momentum, grad, c.keep0, c.weight0);
  return c.nesterov ? LerpOf(grad, momentum, c.weight0, c.keep0) : momentum;
}

// Every NaN of a product becomes this one, because processors differ in which NaN an operation
// returns.
inline constexpr uint16_t kBf16Nan = 0x7FC0;

HYBRIDOPT_EVERYWHERE inline uint16_t RoundProduct(float value) {
  return value == value ? Fp32ToBf16(value) : kBf16Nan;
}

// What U is divided by: the norm, but at least eps, rounded to bf16.
HYBRIDOPT_EVERYWHERE inline float DivisorOf(double sum_squares, float eps) {
  const float norm = static_cast<float>(std::sqrt(sum_squares));
  return Bf16ToFp32(Fp32ToBf16(norm < eps ? eps : norm));
}

}  // namespace hybridopt
