#include "machine/host_norm_sums.h"

#include <algorithm>

namespace hybridopt {
namespace {

constexpr uint64_t kPieceBlocks = 16;

uint64_t EndOf(const NormInput& input) { return input.first_block + NormBlocksOf(input.count); }

}  // namespace

Status HostNormSums::Sum(Context& context, std::span<const NormInput> inputs) {
  if (inputs.empty()) return {};
  pieces_.Reset({inputs.front().first_block, EndOf(inputs.back())}, 1, kPieceBlocks);
  return pieces_.Share(context.workers(), [&](uint32_t worker) {
    pieces_.Take(worker,
                 [&](const WorkRange& piece) { SumPiece(context.kernels(), inputs, piece); });
  });
}

// Computes the block sums of one piece: blocks [piece.begin, piece.end), counted over all params.
// `inputs` may leave out params whose blocks are among these.
void HostNormSums::SumPiece(const KernelTable& kernels, std::span<const NormInput> inputs,
                            const WorkRange& piece) {
  auto input = std::upper_bound(
      inputs.begin(), inputs.end(), piece.begin,
      [](uint64_t block, const NormInput& candidate) { return block < EndOf(candidate); });
  for (; input != inputs.end() && input->first_block < piece.end; ++input) {
    const uint64_t begin = std::max(piece.begin, input->first_block) - input->first_block;
    const uint64_t end = std::min(piece.end, EndOf(*input)) - input->first_block;
    const uint64_t first = begin * kNormBlockElements;
    const uint64_t last = std::min(input->count, end * kNormBlockElements);
    kernels.SumSquares(input->dtype)(
        static_cast<const std::byte*>(input->grad) + first * DtypeBytes(input->dtype), last - first,
        blocks_.data() + input->first_block + begin);
  }
}

}  // namespace hybridopt
