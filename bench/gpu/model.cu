#include <dlfcn.h>
#include <library_types.h>

#include <atomic>
#include <random>
#include <thread>

#include "gpu/device.h"
#include "gpu/model.h"

namespace bench {
namespace {

// Products of 2^13 x 2^13 matrices: 1.1 TFLOP each, about 1.5 ms on an H200.
constexpr int kSide = 8192;
constexpr uint64_t kMatrixBytes = uint64_t{2} * kSide * kSide;
constexpr int kProducts = 64;
// Passes over 1.5 GiB: about 0.4 ms each. Together they take a quarter of the time.
constexpr uint64_t kPassElements = uint64_t{1} << 28;
constexpr int kPasses = 64;

// The functions of cuBLAS that the products need, and the values of its enums.
class Cublas {
 public:
  Cublas() {
    for (const char* name : {"libcublas.so.13", "libcublas.so.12"}) {
      library_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (library_ != nullptr) break;
      const char* const error = dlerror();
      why_ += std::string(why_.empty() ? "" : "; ") + (error != nullptr ? error : name);
    }
    if (library_ == nullptr || Find()) return;
    why_ = "libcublas lacks a function, or does not start";
    library_ = nullptr;
  }
  ~Cublas() {
    if (library_ != nullptr) destroy_(handle_);
  }
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;

  bool usable() const { return library_ != nullptr; }
  const std::string& why() const { return why_; }

  // c = a * b, all bf16 and square, with fp32 sums.
  void Multiply(const Stream& stream, const void* a, const void* b, void* c) const {
    const float one = 1, zero = 0;
    const int status = set_stream_(handle_, stream.get()) != 0
                           ? -1
                           : multiply_(handle_, kNotTransposed, kNotTransposed, kSide, kSide, kSide,
                                       &one, a, CUDA_R_16BF, kSide, b, CUDA_R_16BF, kSide, &zero, c,
                                       CUDA_R_16BF, kSide, kCompute32F, kDefaultAlgorithm);
    if (status == 0) return;
    std::fprintf(stderr, "hybridopt_bench: cublasGemmEx: status %d\n", status);
    std::exit(1);
  }

 private:
  static constexpr int kNotTransposed = 0;
  static constexpr int kCompute32F = 68;
  static constexpr int kDefaultAlgorithm = -1;

  bool Find() {
    const auto create = reinterpret_cast<int (*)(void**)>(dlsym(library_, "cublasCreate_v2"));
    destroy_ = reinterpret_cast<decltype(destroy_)>(dlsym(library_, "cublasDestroy_v2"));
    set_stream_ = reinterpret_cast<decltype(set_stream_)>(dlsym(library_, "cublasSetStream_v2"));
    multiply_ = reinterpret_cast<decltype(multiply_)>(dlsym(library_, "cublasGemmEx"));
    return create != nullptr && destroy_ != nullptr && set_stream_ != nullptr &&
           multiply_ != nullptr && create(&handle_) == 0;
  }

  void* library_ = nullptr;
  void* handle_ = nullptr;
  std::string why_;
  int (*destroy_)(void*) = nullptr;
  int (*set_stream_)(void*, cudaStream_t) = nullptr;
  int (*multiply_)(void*, int, int, int, int, int, const void*, const void*, cudaDataType, int,
                   const void*, cudaDataType, int, const void*, void*, cudaDataType, int, int,
                   int) = nullptr;
};

// Fills an array with bf16 numbers whose absolute values lie between 0.5 and 1. Equal numbers would
// not do: a GPU multiplies them faster, with less power.
void FillAtRandom(const DeviceBuffer& buffer) {
  std::vector<uint16_t> values(uint64_t{1} << 24);
  std::minstd_rand random(1);
  for (uint16_t& value : values) {
    const uint32_t bits = static_cast<uint32_t>(random());
    value = static_cast<uint16_t>(0x3f00 | (bits >> 8 & 0x7f) | (bits >> 16 & 1) << 15);
  }
  for (uint64_t begin = 0; begin < kPassElements; begin += values.size())
    REQUIRE_CUDA(cudaMemcpy(buffer.bytes() + 2 * begin, values.data(), 2 * values.size(),
                            cudaMemcpyHostToDevice));
}

// Reads two arrays and writes one; each thread handles eight bf16 elements.
__global__ void Pass(const uint4* a, const uint4* b, uint4* c, uint64_t count) {
  const uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const uint4 x = a[i], y = b[i];
  c[i] = make_uint4(x.x ^ y.x, x.y ^ y.y, x.z ^ y.z, x.w ^ y.w);
}

}  // namespace

struct ModelWork::Parts {
  const Cublas cublas;
  const DeviceBuffer a{2 * kPassElements}, b{2 * kPassElements}, c{2 * kPassElements};
  const Stream stream;
  const StreamClock clock;

  void QueueProducts() const {
    for (int i = 0; i < kProducts; ++i) cublas.Multiply(stream, a.data(), b.data(), c.data());
  }
  void QueuePasses() const {
    constexpr uint32_t kThreads = 256;
    constexpr uint64_t kCount = kPassElements / 8;
    for (int i = 0; i < kPasses; ++i)
      Pass<<<kCount / kThreads, kThreads, 0, stream.get()>>>(static_cast<const uint4*>(a.data()),
                                                             static_cast<const uint4*>(b.data()),
                                                             static_cast<uint4*>(c.data()), kCount);
    REQUIRE_CUDA(cudaGetLastError());
  }
};

ModelWork::ModelWork() : parts_(std::make_unique<Parts>()) {
  static_assert(2 * kPassElements >= kMatrixBytes);
  FillAtRandom(parts_->a);
  FillAtRandom(parts_->b);
  Run();
}
ModelWork::~ModelWork() = default;

bool ModelWork::products() const { return parts_->cublas.usable(); }
const std::string& ModelWork::why_no_products() const { return parts_->cublas.why(); }

std::array<double, 3> ModelWork::Run() {
  double products = 0;
  if (this->products())
    products = parts_->clock.Time(parts_->stream, [this] { parts_->QueueProducts(); });
  const double passes = parts_->clock.Time(parts_->stream, [this] { parts_->QueuePasses(); });
  return {products + passes, products, passes};
}

namespace {

// Makes steps one after the other on a thread of its own until it is destroyed.
class Stepper {
 public:
  explicit Stepper(Optimizer& optimizer) : begin_(Seconds()) {
    thread_ = std::thread([this, &optimizer] {
      while (!stop_) {
        optimizer.Step(OFFLOAD_STEP_ASSUME_FINITE);
        steps_ += 1;
        steps_.notify_one();
      }
    });
    steps_.wait(0);  // from now on state streams at full rate
  }
  // Ends the steps and returns how many seconds one step took.
  double Stop() {
    stop_ = true;
    thread_.join();
    return (Seconds() - begin_) / static_cast<double>(steps_);
  }

 private:
  const double begin_;
  std::atomic<bool> stop_ = false;
  std::atomic<uint64_t> steps_ = 0;
  std::thread thread_;
};

}  // namespace

BesideStreams RunBesideStreams(ModelWork& work, Optimizer& streamed, uint32_t rounds) {
  BesideStreams beside;
  streamed.Step(OFFLOAD_STEP_ASSUME_FINITE);
  for (uint32_t round = 0; round < rounds; ++round) {
    const std::array<double, 3> work_alone = work.Run();
    const double begin = Seconds();
    streamed.Step(OFFLOAD_STEP_ASSUME_FINITE);
    const double step_alone = Seconds() - begin;
    Stepper stepper(streamed);
    const std::array<double, 3> work_beside = work.Run();
    beside.streams.push_back(step_alone / stepper.Stop());
    beside.all.push_back(work_alone[0] / work_beside[0]);
    if (work.products()) beside.products.push_back(work_alone[1] / work_beside[1]);
    beside.passes.push_back(work_alone[2] / work_beside[2]);
  }
  return beside;
}

}  // namespace bench
