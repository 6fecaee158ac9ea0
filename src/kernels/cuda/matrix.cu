// What the update of a matrix needs beside its products (kernels/matrix/matrix_update.h): the same
// operations as newton_schulz.cpp, in the same order.
#include "kernels/convert.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/ordered_sum.h"
#include "kernels/cuda/piece.h"
#include "kernels/cuda/tile_random.h"
#include "kernels/matrix/matrix_update.h"

namespace hybridopt::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kQuad = 4;
constexpr uint64_t kBlocksMax = 8192;

uint32_t BlocksOf(uint64_t threads) {
  const uint64_t blocks = (threads + kThreads - 1) / kThreads;
  return static_cast<uint32_t>(blocks < kBlocksMax ? blocks : kBlocksMax);
}

// Updates the momenta of kCount elements from `first` on, and writes what they give to `out`.
template <int32_t kGradDtype, Format kFormat, bool kRandomly, uint32_t kCount>
__device__ void UpdateMomenta(const UpdateSpan& span, const Coefficients& c, uint64_t first,
                              uint16_t* out) {
  using Grad = Element<kGradDtype>;
  using Moment = Codec<kFormat>;
  const auto grads = LoadPiece<kCount>(static_cast<const typename Grad::Stored*>(span.grad), first);
  auto* const stored = static_cast<typename Moment::Stored*>(span.moment0);
  auto momenta = LoadPiece<kCount>(stored, first);
  Piece<uint16_t, kCount> updates;
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) {
    uint32_t random = 0;
    if constexpr (kRandomly) {
      const uint64_t index = IndexOf(span.order, first + i);
      random = RandomBits(CounterOf(span.rounding, index), TweakOf(span.rounding, index)) & 0xFFFF;
    }
    float momentum = Moment::Decode(momenta.at[i]);
    const float grad = __fmul_rn(Grad::Widen(grads.at[i]), c.grad_factor);
    updates.at[i] = Fp32ToBf16(UpdateMomentum(c, grad, momentum));
    momenta.at[i] = Moment::template EncodeMoment<false>(momentum, kRandomly, random);
  }
  StorePiece(stored, first, momenta);
  StorePiece(out, first, updates);
}

template <int32_t kGradDtype, Format kFormat, bool kRandomly>
__global__ void __launch_bounds__(kThreads)
    Momentum(UpdateSpan span, Coefficients c, bool quads, const Verdict* verdict, uint16_t* out) {
  if (verdict->skip != 0) return;
  c.grad_factor = __fmul_rn(c.grad_factor, verdict->grad_factor);
  const uint64_t thread = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  const uint64_t threads = uint64_t{gridDim.x} * kThreads;
  const uint64_t in_quads = quads ? span.count / kQuad * kQuad : 0;
  for (uint64_t i = thread * kQuad; i < in_quads; i += threads * kQuad)
    UpdateMomenta<kGradDtype, kFormat, kRandomly, kQuad>(span, c, i, out);
  for (uint64_t i = in_quads + thread; i < span.count; i += threads)
    UpdateMomenta<kGradDtype, kFormat, kRandomly, 1>(span, c, i, out);
}

using MomentumKernel = void (*)(UpdateSpan, Coefficients, bool, const Verdict*, uint16_t*);

template <int32_t kGradDtype>
MomentumKernel MomentumKernelOf(Format format, bool stochastic) {
  if (format == Format::kFp32) return Momentum<kGradDtype, Format::kFp32, false>;
  return stochastic ? Momentum<kGradDtype, Format::kBf16, true>
                    : Momentum<kGradDtype, Format::kBf16, false>;
}

MomentumKernel MomentumKernelOf(int32_t grad_dtype, Format format, bool stochastic) {
  switch (grad_dtype) {
    case OFFLOAD_FP32:
      return MomentumKernelOf<OFFLOAD_FP32>(format, stochastic);
    case OFFLOAD_BF16:
      return MomentumKernelOf<OFFLOAD_BF16>(format, stochastic);
    default:
      return MomentumKernelOf<OFFLOAD_FP16>(format, stochastic);
  }
}

// One thread block adds the block sums in order.
__global__ void __launch_bounds__(kThreads)
    Divisor(const double* block_sums, uint64_t count, float eps, const Verdict* verdict,
            MatrixScalars* scalars) {
  const double sum = SumInOrder<kThreads>(block_sums, count);
  if (threadIdx.x != 0) return;
  scalars->divisor = DivisorOf(sum, eps);
  scalars->verdict = *verdict;
  scalars->verdict.grad_factor = 1.0f;
}

__global__ void __launch_bounds__(kThreads)
    Divide(uint16_t* x, uint64_t count, const MatrixScalars* scalars) {
  const float divisor = scalars->divisor;
  const uint64_t threads = uint64_t{gridDim.x} * kThreads;
  for (uint64_t i = uint64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += threads)
    x[i] = RoundProduct(__fdiv_rn(Bf16ToFp32(x[i]), divisor));
}

}  // namespace

cudaError_t LaunchMomentum(cudaStream_t stream, const MatrixUpdate& update, bool quads,
                           const Verdict* verdict, uint16_t* out) {
  const MomentumKernel kernel = MomentumKernelOf(
      update.types.grad_dtype, update.types.formats.moment0, update.span.rounding.stochastic);
  kernel<<<BlocksOf(update.span.count / kQuad + 1), kThreads, 0, stream>>>(
      update.span, update.coefficients, quads, verdict, out);
  return cudaGetLastError();
}

cudaError_t LaunchDivide(cudaStream_t stream, const double* block_sums, uint64_t count, float eps,
                         const Verdict* verdict, MatrixScalars* scalars, uint16_t* x) {
  Divisor<<<1, kThreads, 0, stream>>>(block_sums, NormBlocksOf(count), eps, verdict, scalars);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  Divide<<<BlocksOf(count), kThreads, 0, stream>>>(x, count, scalars);
  return cudaGetLastError();
}

cudaError_t LoadMatrixKernels() {
  cudaFuncAttributes attributes;
  for (const int32_t dtype : {OFFLOAD_FP32, OFFLOAD_BF16, OFFLOAD_FP16})
    for (const Format format : {Format::kFp32, Format::kBf16})
      for (const bool stochastic : {false, true}) {
        const cudaError_t error =
            cudaFuncGetAttributes(&attributes, MomentumKernelOf(dtype, format, stochastic));
        if (error != cudaSuccess) return error;
      }
  const cudaError_t error = cudaFuncGetAttributes(&attributes, Divisor);
  return error != cudaSuccess ? error : cudaFuncGetAttributes(&attributes, Divide);
}

}  // namespace hybridopt::cuda
