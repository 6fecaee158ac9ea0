// gpu.h: what the GPU's parts of the examples share: errors end the program, products are cuBLAS's.
#ifndef HYBRIDOPT_EXAMPLES_GPU_H
#define HYBRIDOPT_EXAMPLES_GPU_H

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "program.h"

// Calls of CUDA and of cuBLAS that have to succeed go through here.
inline void must_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  fail(std::string(call) + "\n" + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}
inline void must_cublas(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  fail(std::string(call) + "\n" + cublasGetStatusName(status) + ": " +
       cublasGetStatusString(status));
}
#define MUST_CUDA(call) must_cuda(call, #call)
#define MUST_CUBLAS(call) must_cublas(call, #call)

using bf16 = __nv_bfloat16;

// A stream of the program's own, with cuBLAS on it. The same products give the same bits on every
// run: one stream uses the handle, it has its memory from us, and sums are kept in fp32.
class GpuStream {
 public:
  GpuStream() {
    MUST_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    MUST_CUBLAS(cublasCreate(&cublas_));
    MUST_CUBLAS(cublasSetStream(cublas_, stream_));
    MUST_CUDA(cudaMalloc(&workspace_, kWorkspaceBytes));
    MUST_CUBLAS(cublasSetWorkspace(cublas_, workspace_, kWorkspaceBytes));
    MUST_CUBLAS(cublasSetMathMode(cublas_, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION));
  }
  ~GpuStream() {
    MUST_CUDA(cudaStreamSynchronize(stream_));
    MUST_CUBLAS(cublasDestroy(cublas_));
    MUST_CUDA(cudaFree(workspace_));
    MUST_CUDA(cudaStreamDestroy(stream_));
  }
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;

  cudaStream_t get() const { return stream_; }

  // A matrix by rows, `step` numbers from one to the next; of several, `distance` from matrix to
  // matrix. Only what product() makes is written.
  struct Matrix {
    void* data;
    cudaDataType_t type;
    int step;
    int64_t distance;
    Matrix(const float* rows, int row_step, int64_t matrix_distance = 0)
        : Matrix(const_cast<float*>(rows), CUDA_R_32F, row_step, matrix_distance) {}
    Matrix(const bf16* rows, int row_step, int64_t matrix_distance = 0)
        : Matrix(const_cast<bf16*>(rows), CUDA_R_16BF, row_step, matrix_distance) {}

   private:
    Matrix(void* rows, cudaDataType_t number, int row_step, int64_t matrix_distance)
        : data(rows), type(number), step(row_step), distance(matrix_distance) {}
  };

  // Queues c = scale a b + keep c, where a is [m, k] and b [k, n] or their transposes, `count`
  // times.
  void product(bool transpose_a, bool transpose_b, int m, int n, int k, float scale, Matrix a,
               Matrix b, float keep, Matrix c, int count = 1) const {
    // cuBLAS stores matrices by columns, so it reads a matrix that is stored by rows as its
    // transpose. So this asks cuBLAS for the transpose of c, which is the transpose of b times the
    // transpose of a.
    MUST_CUBLAS(cublasGemmStridedBatchedEx(
        cublas_, transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N,
        n, m, k, &scale, b.data, b.type, b.step, b.distance, a.data, a.type, a.step, a.distance,
        &keep, c.data, c.type, c.step, c.distance, count, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  }

 private:
  static constexpr size_t kWorkspaceBytes = size_t{32} << 20;  // what NVIDIA recommends for sm_90

  cudaStream_t stream_ = nullptr;
  cublasHandle_t cublas_ = nullptr;
  void* workspace_ = nullptr;
};

// Adds a value of each of the kThreads threads of a block up, or combines them otherwise, always in
// the same order. All threads call it and all get the result.
template <int kThreads, typename Combine>
__device__ float reduce(float value, Combine combine) {
  static_assert((kThreads & (kThreads - 1)) == 0, "halves need a power of two");
  __shared__ float part[kThreads];
  __syncthreads();  // everyone has read the result of the last call
  part[threadIdx.x] = value;
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half)
      part[threadIdx.x] = combine(part[threadIdx.x], part[threadIdx.x + half]);
  }
  __syncthreads();
  return part[0];
}

template <int kThreads>
__device__ float sum_of(float value) {
  return reduce<kThreads>(value, [](float a, float b) { return a + b; });
}

template <int kThreads>
__device__ float max_of(float value) {
  return reduce<kThreads>(value, [](float a, float b) { return fmaxf(a, b); });
}

#endif  // HYBRIDOPT_EXAMPLES_GPU_H
