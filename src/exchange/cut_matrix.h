// CutMatrix: a matrix, or a stack of them, of which each rank has a part. Pure: who is the home of
// each, which ranks send their part to it, and what ranks tell each other about their parts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/shard.h"
#include "base/status.h"
#include "kernels/dtypes.h"

namespace hybridopt {

// A matrix as the caller gives it.
struct MatrixInput {
  offload_exchange_matrix_t matrix;
  std::optional<offload_shard_t> shard;
};

struct CutMatrix {
  std::string name;
  int32_t dtype = 0;
  int32_t grad_dtype = 0;
  // By rank: the boxes of its elements, in their order; there are no ranges.
  std::vector<Shard> parts;
  int32_t home = -1;
  // By rank: the rank that sends these elements to the home. Ranks that have the same elements have
  // the same sender; a part without elements has none (-1).
  std::vector<int32_t> senders;
  // By rank: where the rows of its part are in the whole. Only on the home.
  std::vector<std::vector<Stripe>> stripes;

  bool has_part(int32_t rank) const { return of(rank).range_count > 0; }
  const Shard& of(int32_t rank) const { return parts[static_cast<size_t>(rank)]; }
  int32_t sender_for(int32_t rank) const { return senders[static_cast<size_t>(rank)]; }
  uint64_t element_bytes_max() const { return std::max(DtypeBytes(dtype), DtypeBytes(grad_dtype)); }
};

// The matrices with the parts of this rank; those of the others are not known yet. Chooses all
// homes, which depend on shapes alone. INVALID_ARGUMENT names the matrix.
Result<std::vector<CutMatrix>> ReadMatrices(std::span<const MatrixInput> inputs, int32_t rank,
                                            int32_t world);

// What a rank tells the others: its matrices and its parts of them.
std::vector<int32_t> PartsAsWords(std::span<const CutMatrix> matrices, int32_t rank);
// Reads what `rank` has told; `own` is this rank. INVALID_ARGUMENT if that has other matrices.
Status ReadParts(std::span<CutMatrix> matrices, int32_t own, int32_t rank,
                 std::span<const int32_t> words);
// Chooses the senders, once all parts are known, and finds the rows of matrices whose home is
// `rank`. INVALID_ARGUMENT if parts overlap, or leave out elements.
Status ChooseSenders(std::span<CutMatrix> matrices, int32_t rank);

}  // namespace hybridopt
