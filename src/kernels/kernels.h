// The interface of the kernels: updates and norms over contiguous spans. reference.cpp is the
// specification; every other implementation (simd.cpp here, kernels/cuda on the GPU) gives the same
// bits. docs/NUMERICS.md has the formulas and the reasons for the order of operations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "kernels/algorithms.h"
#include "kernels/dtypes.h"

namespace hybridopt {

// Norms add squares in a fixed tree. A norm block is this many elements of one param (the last may
// be shorter). Inside a block, lane l of kNormLanes sums the squares of elements l, l + kNormLanes,
// ... in double and in order; then the lanes are added in a tree: lane l += lane l + half, for half
// = kNormLanes/2, ..., 1. The blocks of a param are added in order, then the params in registration
// order.
inline constexpr uint64_t kNormBlockElements = 4096;
constexpr uint64_t NormBlocksOf(uint64_t count) {
  return (count + kNormBlockElements - 1) / kNormBlockElements;
}
inline constexpr uint32_t kNormLanes = 16;

inline constexpr int32_t kDtypeCount = 3;  // enum offload_dtype, from 1

// How the state of a param is stored.
//   split         the bf16 param is the rounded upper half of the fp32 master; the state has only
//                 its 16-bit lower half
//   bf16 moments  exp_avg and the like are rounded to bf16 when they are stored
enum class StateLayout : int32_t { kFp32, kSplit, kBf16Moments, kSplitBf16Moments };
inline constexpr int32_t kStateLayoutCount = 4;
constexpr bool IsSplit(StateLayout layout) {
  return layout == StateLayout::kSplit || layout == StateLayout::kSplitBf16Moments;
}
constexpr bool HasBf16Moments(StateLayout layout) {
  return layout == StateLayout::kBf16Moments || layout == StateLayout::kSplitBf16Moments;
}

// The values that are the same for every element of one param in one step. Computed in double,
// rounded once. Fields that a rule does not use are zero.
struct Coefficients {
  float grad_factor;      // all: unscale, clip and maximize's sign; multiplies the gradient first
  float l2_decay;         // Adam, SGD, Adagrad: grad += l2_decay * param
  float decoupled_decay;  // AdamW, Lion, Signum: lr * weight_decay
  float step_size;        // Adam: lr / bias_correction1; Adagrad: decayed lr; others: lr
  float keep0;            // Adam, Lion: beta1; Signum: momentum; SGD: the same, 0 in a first step
  // Weight of the new value: 1 - keep0; SGD: 1 - dampening, 1 in a first step.
  float weight0;
  float keep1;                          // Adam, Lion: beta2
  float weight1;                        // Adam, Lion: 1 - beta2
  float inverse_sqrt_bias_correction2;  // Adam
  float eps;                            // Adam, Adagrad
  float nesterov_momentum;              // SGD: momentum if nesterov
  int32_t nesterov;                     // SGD
};

// How values are rounded when they are stored.
struct Rounding {
  bool stochastic = false;  // bf16 moments: stochastically (stochastic_rounding.h); else to nearest
  // Bf16 params: exact ties round away from zero, as split masters need it.
  bool ties_away = false;
  uint32_t key0 = 0;  // key of this param in this step, if stochastic
  uint32_t key1 = 0;
};

// The indices of a span's elements in their whole tensor, where they form rows that are row_stride
// apart. Element k has the index first + (c / row_length) * row_stride + c % row_length with c =
// column + k.
struct ElementOrder {
  uint64_t first = 0;
  uint64_t row_length = UINT64_MAX;
  uint64_t row_stride = 0;
  uint64_t column = 0;
};

// The addresses of a contiguous range of elements. `master` has the fp32 values that are updated,
// or, if masters are split, their lower halves (uint16_t). `param` gets the values rounded to its
// dtype; for an fp32 param that is its own master it is the same address as `master`. Moments are
// float or bf16. `moment0` is exp_avg, momentum_buffer or sum, `moment1` is exp_avg_sq; NULL if the
// rule has none. Arrays need only their element's natural alignment (2 or 4 bytes) and do not
// overlap otherwise.
struct UpdateSpan {
  const void* grad;
  void* param;
  void* master;
  void* moment0;
  void* moment1;
  uint64_t count;
  Rounding rounding = {};
  ElementOrder order = {};  // used if rounding is stochastic
};

// The types of a span's arrays.
struct SpanTypes {
  int32_t grad_dtype;
  int32_t param_dtype;
  StateLayout layout;

  constexpr uint64_t master_bytes() const { return IsSplit(layout) ? 2 : 4; }
  constexpr uint64_t moment_bytes() const { return HasBf16Moments(layout) ? 2 : 4; }
};

// The span without its first `begin` elements; its count is not changed.
inline UpdateSpan Advanced(const UpdateSpan& span, const SpanTypes& types, uint64_t begin) {
  const auto at = [begin](void* array, uint64_t bytes) -> void* {
    return array == nullptr ? nullptr : static_cast<char*>(array) + begin * bytes;
  };
  UpdateSpan rest = span;
  rest.grad = static_cast<const char*>(span.grad) + begin * DtypeBytes(types.grad_dtype);
  rest.param = at(span.param, DtypeBytes(types.param_dtype));
  rest.master = at(span.master, types.master_bytes());
  rest.moment0 = at(span.moment0, types.moment_bytes());
  rest.moment1 = at(span.moment1, types.moment_bytes());
  rest.order.column += begin;
  return rest;
}

using UpdateFunction = void (*)(const Coefficients&, const UpdateSpan&);

// Writes the sums of squares of the ceil(count / kNormBlockElements) norm blocks of `grad`, which
// is not unscaled. A sum is Inf or NaN exactly if an element of the block is.
using SumSquaresFunction = void (*)(const void* grad, uint64_t count, double* block_sums);

// Widens count elements to fp32, exactly.
using ToFp32Function = void (*)(const void* source, uint64_t count, float* destination);

// sum += grad, widened exactly; one fp32 addition an element.
using AccumulateFunction = void (*)(const void* grad, uint64_t count, float* sum);

// Where a 16-bit param is not its master, rounded, makes the master equal to the param. Of bf16
// params either rounding of ties counts: masters may come from a layout that rounds them the other
// way.
using FollowParamsFunction = void (*)(const void* param, uint64_t count, float* master);

// Copies bytes that nobody reads soon. It writes whole cache lines without having read them.
using CopyPastCachesFunction = void (*)(void* to, const void* from, uint64_t bytes);

// One implementation for one instruction set.
struct KernelTable {
  const char* isa;
  // Updates may store params past the caches, as copy_past_caches does, with stores that are weakly
  // ordered. A thread calls this after its updates and copies, before it reports to other threads
  // that they are done.
  void (*publish)();
  // [layout][rule][grad dtype][param dtype]; NULL where a split layout meets a param that is not
  // bf16
  UpdateFunction update[kStateLayoutCount][kRuleCount][kDtypeCount][kDtypeCount];
  SumSquaresFunction sum_squares[kDtypeCount];
  ToFp32Function to_fp32[kDtypeCount];
  AccumulateFunction accumulate[kDtypeCount];
  FollowParamsFunction follow_params[kDtypeCount];  // NULL for fp32: such a param is its master
  CopyPastCachesFunction copy_past_caches;

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
  FollowParamsFunction FollowParams(int32_t dtype) const { return follow_params[dtype - 1]; }
};

// The scalar specification (kernels/reference.cpp).
const KernelTable& ReferenceKernels();

// Every compiled SIMD implementation that this CPU runs, best first (kernels/simd.cpp). Empty if
// the CPU has no fused multiply-add.
std::span<const KernelTable* const> SimdKernels();

// The table to use: the best one, or the one that the environment variable HYBRIDOPT_ISA names.
// INVALID_ARGUMENT for an unknown name, UNSUPPORTED for one that this CPU cannot run; both texts
// list the names that can be used here (kernels/select.cpp).
Result<const KernelTable*> SelectKernels();

// What the norm decides about a step. The device's updates read it from device memory.
struct Verdict {
  double grad_norm;   // of the unscaled gradients
  double grad_clip;   // 1 if not clipped
  float grad_factor;  // grad_clip / grad_scale, rounded once
  int32_t skip;       // 1: a gradient is Inf or NaN
};

// The verdict on a total sum of squares; grad_norm_max 0 means no clipping. The clip factor is
// PyTorch's: grad_norm_max / (norm + 1e-6), at most 1.
Verdict Decide(double sum_squares, double grad_scale, double grad_norm_max);

// The verdict of a step that needs no norm.
Verdict AssumeFinite(double grad_scale);

}  // namespace hybridopt
