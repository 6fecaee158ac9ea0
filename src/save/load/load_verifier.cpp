#include "save/load/load_verifier.h"

#include "checkpoint/format/hash.h"

namespace hybridopt {

LoadVerifier::LoadVerifier(const LoadSources& sources, const LoadUnits& units)
    : sources_(sources), units_(units), verified_(units.unit_bytes()) {
  for (const LoadUnit& block : units.blocks()) {
    const std::vector<checkpoint::Extent> extents = units.ExtentsOf(block);
    extents_.insert(extents_.end(), extents.begin(), extents.end());
    extent_counts_.push_back(static_cast<uint32_t>(extents.size()));
  }
}

Status LoadVerifier::Verify(checkpoint::BlockReader& reader,
                            FunctionRef<void(uint64_t bytes)> progress) {
  checkpoint::BlockHasher hasher(sources_.reader().manifest().block_bytes);
  auto extent = extents_.begin();
  for (size_t i = 0; i < extent_counts_.size(); ++i) {
    const LoadUnit& block = units_.blocks()[i];
    const auto end = extent + extent_counts_[i];
    const bool one_unit = extent_counts_[i] == 1;
    uint64_t bytes = 0;
    for (auto each = extent; each != end; ++each) bytes += each->bytes;
    hasher.Reset(bytes);
    uint64_t hash = 0;
    for (; extent != end; ++extent) {
      HYBRIDOPT_ASSIGN(const std::byte* data, reader.Next());
      hash = verified_.Add(extent->file, extent->offset, data, extent->bytes);
      if (!one_unit) hasher.Add(data, extent->bytes);
      progress(extent->bytes);
    }
    if (!one_unit) hash = hasher.Take()[0];
    if (hash != block.tensor->hashes[block.block]) return Damaged(block);
  }
  return {};
}

Status LoadVerifier::Damaged(const LoadUnit& block) const {
  const checkpoint::Reader& reader = sources_.reader();
  return Status::Error(
      OFFLOAD_CHECKPOINT_CORRUPT,
      "'%.500s': %s is not what was written; nothing was changed; load an older checkpoint "
      "(offload_checkpoint_verify lists all damage)",
      reader.FilePath(block.tensor->file).c_str(),
      reader.BlockText(*sources_.stored(block.param), *block.tensor, block.block).c_str());
}

Status LoadVerifier::CheckUnchanged(const LoadUnit& unit, const std::byte* data) const {
  const checkpoint::Extent& extent = unit.extent;
  if (verified_.Match(extent.file, extent.offset, data, extent.bytes)) return {};
  return sources_.reader().ChangedSinceVerified(*sources_.stored(unit.param), *unit.tensor,
                                                extent.offset - unit.tensor->offset);
}

}  // namespace hybridopt
