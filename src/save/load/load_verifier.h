// LoadVerifier: reads all blocks from which an optimizer is loaded and compares their hashes,
// before the load changes anything. What the load reads after that it compares with what this has
// read.
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

  // What Verify reads, in order.
  const std::vector<checkpoint::Extent>& extents() const { return extents_; }
  // `reader` has these extents. Calls progress after each of them. CHECKPOINT_CORRUPT names the
  // first block whose hash is another.
  Status Verify(checkpoint::BlockReader& reader, FunctionRef<void(uint64_t bytes)> progress);
  // Whether these bytes of a unit are those that Verify has read.
  Status CheckUnchanged(const LoadUnit& unit, const std::byte* data) const;

 private:
  Status Damaged(const LoadUnit& block) const;

  const LoadSources& sources_;
  const LoadUnits& units_;
  std::vector<checkpoint::Extent> extents_;
  std::vector<uint32_t> extent_counts_;  // of each block
  checkpoint::ReadHashes verified_;
};

}  // namespace hybridopt
