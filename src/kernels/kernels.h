// The arithmetic: one update step and one norm over contiguous spans. reference.cpp is the
// specification; every other implementation (simd.cpp here, the device kernels elsewhere) gives
// the same bits. docs/NUMERICS.md has the formulas and why the operations come in this order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "kernels/algorithms.h"

namespace hybridopt {

// Norms sum in a fixed tree. A block is this many elements of one param (the last may be shorter).
// Inside a block, lane l of kNormLanes sums the squares of elements l, l + kNormLanes, ... in
// double and in order; then the lanes are added in a tree: lane l += lane l + half, for half =
// kNormLanes/2, ..., 1. The blocks of a param are added in order, then the params in registration
// order.
inline constexpr uint64_t kNormBlockElements = 4096;
constexpr uint64_t NormBlocksOf(uint64_t count) {
  return (count + kNormBlockElements - 1) / kNormBlockElements;
}
inline constexpr uint32_t kNormLanes = 16;

inline constexpr int32_t kDtypeCount = 3;  // enum offload_dtype, from 1

// How the state of a param is stored.
//   split         the fp32 master is the bf16 param (its upper half, rounded) and a 16-bit lower
//   half bf16 moments  exp_avg and the like are rounded to bf16 when they are stored
enum class StateLayout : int32_t { kFp32, kSplit, kBf16Moments, kSplitBf16Moments };
inline constexpr int32_t kStateLayoutCount = 4;
constexpr bool IsSplit(StateLayout layout) {
  return layout == StateLayout::kSplit || layout == StateLayout::kSplitBf16Moments;
}
constexpr bool HasBf16Moments(StateLayout layout) {
  return layout == StateLayout::kBf16Moments || layout == StateLayout::kSplitBf16Moments;
}

// All that is the same for every element of one param in one step. Computed in double, rounded
// once. Fields that a rule does not name stay zero.
struct Coefficients {
  float grad_factor;      // all: unscale, clip and maximize's sign; multiplies the gradient first
  float l2_decay;         // Adam, SGD, Adagrad: grad += l2_decay * param
  float decoupled_decay;  // AdamW, Lion, Signum: lr * weight_decay
  float step_size;        // Adam: lr / bias_correction1; Adagrad: decayed lr; others: lr
  float keep0;            // Adam, Lion: beta1; Signum: momentum; SGD: the same, 0 in a first step
  float weight0;          // of what is new: 1 - keep0; SGD: 1 - dampening, 1 in a first step
  float keep1;            // Adam, Lion: beta2
  float weight1;          // Adam, Lion: 1 - beta2
  float inverse_sqrt_bias_correction2;  // Adam
  float eps;                            // Adam, Adagrad
  float nesterov_momentum;              // SGD: momentum if nesterov
  int32_t nesterov;                     // SGD
};

// How values are rounded when they are stored.
struct Rounding {
  bool stochastic = false;  // bf16 moments: at random (rounding.h); else to nearest
  bool ties_away = false;   // bf16 params: exact ties go away from zero, as split masters need it
  uint32_t key0 = 0;        // of this param in this step, where stochastic
  uint32_t key1 = 0;
};

// Where a span's elements lie in their whole tensor: in rows, which are row_stride apart. Element k
// is the one at first + (c / row_length) * row_stride + c % row_length with c = column + k.
struct ElementOrder {
  uint64_t first = 0;
  uint64_t row_length = UINT64_MAX;
  uint64_t row_stride = 0;
  uint64_t column = 0;
};

// One contiguous run of elements. `master` is the fp32 value that is updated, or, where masters are
// split, its lower halves (uint16_t); `param` receives it rounded to its dtype. Moments are float
// or bf16. For an fp32 param updated in place
// both are the same address. `moment0` is exp_avg, momentum_buffer or sum, `moment1` is exp_avg_sq;
// NULL where the rule has none. Arrays need only their element's natural alignment (2 or 4 bytes)
// and do not overlap otherwise.
struct UpdateSpan {
  const void* grad;
  void* param;
  void* master;
  void* moment0;
  void* moment1;
  uint64_t count;
  Rounding rounding = {};
  ElementOrder order = {};  // read where rounding is stochastic
};

// What a span's arrays hold.
struct SpanTypes {
  int32_t grad_dtype;
  int32_t param_dtype;
  StateLayout layout;

  constexpr uint64_t master_bytes() const { return IsSplit(layout) ? 2 : 4; }
  constexpr uint64_t moment_bytes() const { return HasBf16Moments(layout) ? 2 : 4; }
};

// The span without its first `begin` elements; its count stays as it is.
UpdateSpan Advanced(const UpdateSpan& span, const SpanTypes& types, uint64_t begin);

using UpdateFunction = void (*)(const Coefficients&, const UpdateSpan&);

// Writes the sums of squares of the ceil(count / kNormBlockElements) blocks of `grad`, as it is
// (not unscaled). A sum is Inf or NaN exactly if an element of the block is.
using SumSquaresFunction = void (*)(const void* grad, uint64_t count, double* block_sums);

// Widens count elements to fp32, exactly.
using ToFp32Function = void (*)(const void* source, uint64_t count, float* destination);

// sum += grad, widened exactly; one fp32 addition an element.
using AccumulateFunction = void (*)(const void* grad, uint64_t count, float* sum);

// One implementation for one instruction set.
struct KernelTable {
  const char* isa;
  // Updates may store params past the caches, weakly ordered. The thread that made them calls this
  // before it tells anybody that they are done.
  void (*publish)();
  // [layout][rule][grad dtype][param dtype]; NULL where a split layout meets a param that is not
  // bf16
  UpdateFunction update[kStateLayoutCount][kRuleCount][kDtypeCount][kDtypeCount];
  SumSquaresFunction sum_squares[kDtypeCount];
  ToFp32Function to_fp32[kDtypeCount];
  AccumulateFunction accumulate[kDtypeCount];

  UpdateFunction Update(Rule rule, int32_t grad_dtype, int32_t param_dtype) const {
    return Update(rule, {grad_dtype, param_dtype, StateLayout::kFp32});
  }
  UpdateFunction Update(Rule rule, const SpanTypes& types) const {
    return update[static_cast<int32_t>(types.layout)][static_cast<int32_t>(rule)]
                 [types.grad_dtype - 1][types.param_dtype - 1];
  }
  SumSquaresFunction SumSquares(int32_t dtype) const { return sum_squares[dtype - 1]; }
  ToFp32Function ToFp32(int32_t dtype) const { return to_fp32[dtype - 1]; }
  AccumulateFunction Accumulate(int32_t dtype) const { return accumulate[dtype - 1]; }
};

// The scalar specification (kernels/reference.cpp).
const KernelTable& ReferenceKernels();

// Every SIMD implementation that is compiled in and that this CPU runs, best first
// (kernels/simd.cpp). Empty where the CPU has no fused multiply-add.
std::span<const KernelTable* const> SimdKernels();

// The table to use: the best there is, or what HYBRIDOPT_ISA in the environment names.
// INVALID_ARGUMENT for an unknown name, UNSUPPORTED for one this CPU cannot run; both texts list
// what can be used here (kernels/select.cpp).
Result<const KernelTable*> SelectKernels();

// array[0, count) = value, rounded to the dtype (to nearest). NULL is allowed and does nothing.
void FillArray(void* array, int32_t dtype, uint64_t count, float value);

constexpr uint64_t DtypeBytes(int32_t dtype) { return dtype == OFFLOAD_FP32 ? 4 : 2; }
const char* DtypeName(int32_t dtype);

// What the norm decides about a step. Lives in device memory for the device's updates.
struct Verdict {
  double grad_norm;   // of the unscaled gradients
  double grad_clip;   // 1 if not clipped
  float grad_factor;  // grad_clip / grad_scale, rounded once
  int32_t skip;       // 1: a gradient is Inf or NaN
};

// The verdict on a total sum of squares; grad_norm_max 0 means no clipping. The clip factor is
// PyTorch's: grad_norm_max / (norm + 1e-6), at most 1.
Verdict Decide(double sum_squares, double grad_scale, double grad_norm_max);

// The verdict when nobody asked for the norm.
Verdict AssumeFinite(double grad_scale);

}  // namespace hybridopt
