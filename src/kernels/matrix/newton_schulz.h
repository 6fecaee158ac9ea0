// The update of one matrix on the CPU, in phases. The pieces of a phase are independent, so that
// many workers share them; a phase begins when all pieces of the phase before it are done. The bits
// are the same at any number of workers and with any kernels.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"
#include "kernels/matrix/matrix_update.h"

namespace hybridopt {

// The bytes of MatrixUpdate::workspace.
uint64_t NewtonSchulzBytes(const MatrixShape& shape);

class NewtonSchulz {
 public:
  NewtonSchulz(const KernelTable& kernels, const MatrixUpdate& update);

  uint32_t phases() const;
  uint64_t pieces(uint32_t phase) const;  // may be 0
  // The first phase reads the gradient and writes the momentum. Only the last one reads and writes
  // master and param.
  void RunPiece(uint32_t phase, uint64_t piece) const;

 private:
  enum class Kind { kMomentum, kDivisor, kDivide, kGram, kPolynomial, kNext, kTurn, kApply };
  struct Phase {
    Kind kind;
    uint32_t step;  // of Newton-Schulz
  };

  Phase PhaseOf(uint32_t phase) const;
  MatrixProduct ProductOf(const Phase& phase) const;
  void RunMomentum(uint64_t piece) const;
  void RunDivide(uint64_t piece) const;
  void RunTurn(uint64_t piece) const;
  void RunApply(uint64_t piece) const;
  uint16_t* iterate(uint32_t step) const { return iterates_[step % 2]; }

  const KernelTable& kernels_;
  const MatrixUpdate& update_;
  const uint32_t steps_;
  const uint64_t short_;
  const uint64_t long_;
  // Parts of the workspace. An iterate is X with one row for each element of the long side: then
  // both products with X read rows. The second one first has U.
  uint16_t* iterates_[2];
  uint16_t* gram_;
  uint16_t* polynomial_;
  double* block_sums_;
  float* divisor_;
};

// The whole update by the calling thread.
void UpdateMatrix(const KernelTable& kernels, const MatrixUpdate& update);

}  // namespace hybridopt
