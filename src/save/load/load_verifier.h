// LoadVerifier: reads all blocks from which an optimizer is loaded and compares their hashes,
// before the load changes anything. When the load reads the units again, the verifier checks that
// their bytes have not changed.
#pragma once

#include <vector>

#include "base/function_ref.h"
#include "checkpoint/block_reader.h"
#include "checkpoint/read_hashes.h"
#include "save/load/load_units.h"

namespace hybridopt {

class LoadVerifier {
 public:
  LoadVerifier(const LoadSources& sources, const LoadUnits& units);

  // The extents that Verify reads, in order.
  const std::vector<checkpoint::Extent>& extents() const { return extents_; }
  // `reader` has these extents. Calls progress after each extent. CHECKPOINT_CORRUPT names the
  // first block with a wrong hash.
  Status Verify(checkpoint::BlockReader& reader, FunctionRef<void(uint64_t bytes)> progress);
  // OK if these bytes of a unit are the bytes that Verify has read.
  Status CheckUnchanged(const LoadUnit& unit, const std::byte* data) const;

 private:
  Status Damaged(const LoadUnit& block) const;

  const LoadSources& sources_;
  const LoadUnits& units_;
  std::vector<checkpoint::Extent> extents_;
  std::vector<uint32_t> extent_counts_;  // per block: its number of extents
  checkpoint::ReadHashes verified_;
};

}  // namespace hybridopt
