// Matrices: updates of matrices on the GPU, with products of cuBLASLt. The bits of an update depend
// on the kind of GPU and the version of cuBLASLt alone: each product has one algorithm for each
// shape, no sum is split between thread blocks, and the addresses in the workspace always have the
// same alignment.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "base/status.h"
#include "device/cuda/cublaslt.h"
#include "device/cuda/driver.h"
#include "device/device.h"
#include "kernels/matrix/matrix_update.h"

namespace hybridopt::cuda {

class Matrices {
 public:
  // `device` updates params and sums squares for this object.
  Matrices(Device& device, Fault& fault) : device_(device), fault_(fault) {}
  ~Matrices();  // to be called in a Scope
  Matrices(const Matrices&) = delete;
  Matrices& operator=(const Matrices&) = delete;

  static uint64_t WorkspaceBytes(const MatrixShape& shape);
  // Opens cuBLASLt. UNSUPPORTED, with the way out, if there is none.
  Status Open();
  // "cuBLASLt 130200". Requires Open.
  std::string Version();
  // Chooses the algorithms for a shape, and queues each of its products once: cuBLASLt loads a
  // kernel at its first launch, and that could wait for a stream which itself waits for the launch.
  // To be called before such streams exist.
  Status Prepare(StreamHandle stream, const MatrixShape& shape, void* workspace);
  // Queues the update of one matrix.
  Status Update(StreamHandle stream, const MatrixUpdate& update, const Verdict* verdict);

 private:
  // A product D = alpha * A * B + beta * C of column-major matrices. A row-major matrix is the
  // column-major matrix of its transpose.
  struct ProductShape {
    uint64_t rows, cols, depth;
    bool transposed_a, transposed_b;

    auto Key() const { return std::tie(rows, cols, depth, transposed_a, transposed_b); }
    bool operator<(const ProductShape& other) const { return Key() < other.Key(); }
  };
  struct Product {
    LtOperation operation = nullptr;
    LtLayout a = nullptr, b = nullptr, d = nullptr;
    LtAlgorithm algorithm = {};
  };
  struct Operands {
    float alpha;
    const void* a;
    const void* b;
    float beta;
    const void* c;
    void* d;
  };

  Result<const Product*> Find(const ProductShape& shape);
  Status Make(const ProductShape& shape, Product* product);
  Status Choose(const ProductShape& shape, Product* product);
  void Destroy(const Product& product);
  Status Multiply(StreamHandle stream, const ProductShape& shape, const Operands& operands,
                  void* workspace);
  Status Orthogonalize(StreamHandle stream, const MatrixUpdate& update);
  Status UpdateMomenta(StreamHandle stream, const MatrixUpdate& update, const Verdict* verdict,
                       uint16_t* u);
  Status Divide(StreamHandle stream, const MatrixUpdate& update, const Verdict* verdict);
  Status Apply(StreamHandle stream, const MatrixUpdate& update);

  Device& device_;
  Fault& fault_;
  std::mutex mutex_;  // guards all below; a product in the map does not change
  OpenedCublasLt lt_ = {};
  std::map<ProductShape, Product> products_;
};

}  // namespace hybridopt::cuda
