// The interface of the kernels: updates and norms over contiguous spans. reference.cpp is the
// specification; every other implementation (simd/ here, kernels/cuda on the GPU) gives the same
// bits. docs/NUMERICS.md has the formulas and the reasons for the order of operations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "kernels/algorithms.h"
#include "kernels/dtypes.h"
#include "kernels/formats/format.h"

namespace hybridopt {

// Norms add squares in a fixed tree. A norm block is this number of elements of one param (the last
// block may be shorter). Inside a block, lane l of kNormLanes sums the squares of elements l, l +
// kNormLanes, ... in double and in order. Then the lanes are added in a tree: lane l += lane l +
// half, for half = kNormLanes/2, ..., 1. The blocks of a param are added in order, then the params
// in registration order.
inline constexpr uint64_t kNormBlockElements = 4096;
constexpr uint64_t NormBlocksOf(uint64_t count) {
  return (count + kNormBlockElements - 1) / kNormBlockElements;
}
inline constexpr uint32_t kNormLanes = 16;

inline constexpr int32_t kDtypeCount = 3;  // enum offload_dtype, from 1

// The values that are the same for every element of one param in one step. Computed in double,
// rounded once. Fields that a rule does not use are zero.
struct Coefficients {
  float grad_factor;      // all: unscale, clip and maximize's sign; multiplies the gradient first
  float l2_decay;         // Adam, SGD, Adagrad, Muon: grad += l2_decay * param
  float decoupled_decay;  // AdamW, Lion, Signum: lr * weight_decay
  float step_size;        // Adam: lr / bias_correction1; Adagrad: decayed lr; others: lr
  float keep0;            // Adam, Lion: beta1; Signum, Muon: momentum; SGD: also, 0 in a first step
  // Weight of the new value: 1 - keep0; SGD: 1 - dampening, 1 in a first step.
  float weight0;
  float keep1;                          // Adam, Lion: beta2
  float weight1;                        // Adam, Lion: 1 - beta2
  float inverse_sqrt_bias_correction2;  // Adam
  float eps;                            // Adam, Adagrad, Muon
  float nesterov_momentum;              // SGD: momentum if nesterov
  int32_t nesterov;                     // SGD, Muon
};

// How values are rounded when they are stored.
struct Rounding {
  // Formats that round: at random (stochastic_rounding.h), or to nearest.
  bool stochastic = false;
  // Bf16 params: exact ties round away from zero, as formats beside the param require.
  bool ties_away = false;
  uint32_t key0 = 0;  // key of this param in this step, if stochastic
  uint32_t key1 = 0;
};

// The indices of a span's elements in their whole tensor, in which they form rows that are
// row_stride apart. Element k has the index first + (c / row_length) * row_stride + c % row_length
// with c = column + k.
struct ElementOrder {
  uint64_t first = 0;
  uint64_t row_length = UINT64_MAX;
  uint64_t row_stride = 0;
  uint64_t column = 0;
};

// The addresses of a contiguous range of elements. `master` has the masters, or what the params
// beside them lack of them. `param` gets the new masters, rounded to its dtype; if an fp32 param is
// its own master, `param` and `master` are the same address. `moment0` is exp_avg, momentum_buffer
// or sum, `moment1` is exp_avg_sq; NULL if the rule has none. An array needs only the natural
// alignment of its elements (1, 2 or 4 bytes). Otherwise arrays must not overlap.
struct UpdateSpan {
  const void* grad;
  void* param;
  void* master;
  void* moment0;
  void* moment1;
  uint64_t count;
  Rounding rounding = {};
  ElementOrder order = {};  // used if rounding is stochastic
  // The update writes a bit for each element here: bit i % 8 of byte i / 8 is 1 if the param may be
  // another one than before. Of params of 16 bits beside masters a NaN, and in bf16 a master that
  // is a tie, counts as another param: other code may have other bits for the NaN, and may have
  // rounded the tie the other way. NULL: nothing is noted, and that is how count may be larger than
  // kNotedMost. Updates on the device note elsewhere.
  uint8_t* changed = nullptr;
};
inline constexpr uint64_t kNotedMost = 4096;

// The types of a span's arrays.
struct SpanTypes {
  int32_t grad_dtype;
  int32_t param_dtype;
  StateFormats formats;
};

// Calls visit for each combination of dtypes and formats for which there are kernels.
template <typename Visit>
constexpr void ForEachSpanTypes(Visit&& visit) {
  for (const FormatRow& moment : kFormats)
    for (const FormatRow& master : kFormats)
      for (int32_t grad = 1; grad <= kDtypeCount; ++grad)
        for (int32_t param = 1; param <= kDtypeCount; ++param)
          if (moment.moment_dtype != kNotOffered && master.master_layout != kNotOffered &&
              (param == OFFLOAD_BF16 || !master.beside_param))
            visit(SpanTypes{grad, param, {master.format, moment.format, moment.format}});
}

// The span without its first `begin` elements; `count` is not changed.
inline UpdateSpan Advanced(const UpdateSpan& span, const SpanTypes& types, uint64_t begin) {
  const auto at = [](void* array, uint64_t bytes) -> void* {
    return array == nullptr ? nullptr : static_cast<char*>(array) + bytes;
  };
  UpdateSpan rest = span;
  rest.grad = static_cast<const char*>(span.grad) + begin * DtypeBytes(types.grad_dtype);
  rest.param = at(span.param, begin * DtypeBytes(types.param_dtype));
  rest.master = at(span.master, RowOf(types.formats.master).Bytes(begin));
  rest.moment0 = at(span.moment0, RowOf(types.formats.moment0).Bytes(begin));
  rest.moment1 = at(span.moment1, RowOf(types.formats.moment1).Bytes(begin));
  rest.order.column += begin;
  rest.changed = static_cast<uint8_t*>(at(span.changed, begin / 8));  // begin: a multiple of 8
  return rest;
}

using UpdateFunction = void (*)(const Coefficients&, const UpdateSpan&);

// Writes the sums of squares of the ceil(count / kNormBlockElements) norm blocks of `grad`, which
// is not unscaled. A sum is Inf or NaN exactly if an element of the block is.
using SumSquaresFunction = void (*)(const void* grad, uint64_t count, double* block_sums);

// Widens count elements to fp32, exactly.
using ToFp32Function = void (*)(const void* source, uint64_t count, float* destination);

// sum += grad, where grad is widened exactly: one fp32 addition for each element.
using AccumulateFunction = void (*)(const void* grad, uint64_t count, float* sum);

// Makes a master equal to its param, unless the param has the bits of the rounded master; then the
// master keeps all its bits. A bf16 param may have been rounded with ties to even or away from
// zero, because masters may come from another layout. An fp32 param is copied. Writes to `changed`,
// if it is not NULL, which params may be other ones than before, as UpdateSpan::changed says.
using FollowParamsFunction = void (*)(const void* param, uint64_t count, float* master,
                                      uint8_t* changed);

// Copies bytes that will not be read soon, past the caches: writes whole cache lines without
// reading them first.
using CopyPastCachesFunction = void (*)(void* to, const void* from, uint64_t bytes);

// Computes one tile of a product (matrix/product.h).
struct MatrixProduct;
using MultiplyTileFunction = void (*)(const MatrixProduct& product, uint64_t tile);

// A number for each combination of a rule and types. The format of the second moment follows from
// that of the first.
constexpr uint32_t IndexOf(Rule rule, const SpanTypes& types) {
  int32_t index = static_cast<int32_t>(types.formats.master);
  index = index * kFormatCount + static_cast<int32_t>(types.formats.moment0);
  index = index * kRuleCount + static_cast<int32_t>(rule);
  index = index * kDtypeCount + types.grad_dtype - 1;
  return static_cast<uint32_t>(index * kDtypeCount + types.param_dtype - 1);
}
inline constexpr uint32_t kIndexCount =
    kFormatCount * kFormatCount * kRuleCount * kDtypeCount * kDtypeCount;

// One T for each IndexOf. NULL if there is no such kernel: masters beside a param that is not bf16,
// and formats that masters or moments cannot have.
template <typename T>
struct ByTypes {
  T at[kIndexCount];

  constexpr T& Of(Rule rule, const SpanTypes& types) { return at[IndexOf(rule, types)]; }
  constexpr T Of(Rule rule, const SpanTypes& types) const { return at[IndexOf(rule, types)]; }
};

// One implementation for one instruction set.
struct KernelTable {
  const char* isa;
  // Updates may store params past the caches, as copy_past_caches does, with stores that are weakly
  // ordered. A thread calls this after its updates and copies, before it reports to other threads
  // that they are done.
  void (*publish)();
  ByTypes<UpdateFunction> update;
  SumSquaresFunction sum_squares[kDtypeCount];
  ToFp32Function to_fp32[kDtypeCount];
  AccumulateFunction accumulate[kDtypeCount];
  FollowParamsFunction follow_params[kDtypeCount];
  CopyPastCachesFunction copy_past_caches;
  MultiplyTileFunction multiply_tile;

  UpdateFunction Update(Rule rule, int32_t grad_dtype, int32_t param_dtype) const {
    return update.Of(rule, {grad_dtype, param_dtype, {}});
  }
  UpdateFunction Update(Rule rule, const SpanTypes& types) const { return update.Of(rule, types); }
  SumSquaresFunction SumSquares(int32_t dtype) const { return sum_squares[dtype - 1]; }
  ToFp32Function ToFp32(int32_t dtype) const { return to_fp32[dtype - 1]; }
  AccumulateFunction Accumulate(int32_t dtype) const { return accumulate[dtype - 1]; }
  FollowParamsFunction FollowParams(int32_t dtype) const { return follow_params[dtype - 1]; }
};

// The scalar specification (kernels/reference.cpp).
const KernelTable& ReferenceKernels();

// Every compiled SIMD implementation that this CPU can run, the best one first
// (kernels/simd/simd.cpp). Empty if the CPU has no fused multiply-add.
std::span<const KernelTable* const> SimdKernels();

// The table to use: the best one, or the one that the environment variable HYBRIDOPT_ISA names.
// INVALID_ARGUMENT for an unknown name, UNSUPPORTED for one that this CPU cannot run; both texts
// list the names that can be used here (kernels/select.cpp).
Result<const KernelTable*> SelectKernels();

// What a step learns from the norm. The device's updates read it from device memory.
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
