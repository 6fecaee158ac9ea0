// LoadUnits: the parts of a checkpoint's files that one optimizer reads, in the order in which it
// reads them.
#pragma once

#include <cstdint>
#include <vector>

#include "base/function_ref.h"
#include "checkpoint/block_reader.h"
#include "save/load/load_sources.h"
#include "state_io/state_writer.h"

namespace hybridopt {

// What is read at a time: a block of an array, or a part of a large block.
struct LoadUnit {
  checkpoint::Extent extent;
  const checkpoint::StoredTensor* tensor;
  uint32_t param;
  uint64_t block;  // the index of the block in the tensor
};

// Elements that are contiguous both in a unit and in the param.
struct LoadPiece {
  StateElements elements;
  uint64_t into;  // bytes from the unit's begin
  int32_t dtype;  // as stored
};

class LoadUnits {
 public:
  LoadUnits(const ParamTable& table, const StateLocator& locator, const LoadSources& sources)
      : table_(table), locator_(locator), sources_(sources) {}

  // Lists them; before all below.
  Status List();

  // Calls begin_unit for each unit that holds elements of this optimizer, and visit for each piece
  // in it. A unit may be visited more than once if shards have several boxes.
  Status ForEach(FunctionRef<Status(const LoadUnit&)> begin_unit,
                 FunctionRef<Status(const LoadPiece&)> visit) const;
  // The extents of these units, in the same order.
  const std::vector<checkpoint::Extent>& extents() const { return extents_; }
  // One unit for each block that some unit touches, in the order of files and offsets.
  const std::vector<LoadUnit>& blocks() const { return blocks_; }
  // The units of a whole block.
  std::vector<checkpoint::Extent> ExtentsOf(const LoadUnit& block) const;
  uint64_t unit_bytes() const { return unit_bytes_; }  // at most, of a unit

 private:
  Status ForEachOf(uint32_t id, StateSlot slot, FunctionRef<Status(const LoadUnit&)> begin_unit,
                   FunctionRef<Status(const LoadPiece&)> visit) const;
  checkpoint::Extent UnitAt(const checkpoint::StoredTensor& tensor, uint64_t at) const;
  void SortBlocks();
  uint64_t block_bytes() const { return sources_.reader().manifest().block_bytes; }

  const ParamTable& table_;
  const StateLocator& locator_;
  const LoadSources& sources_;
  uint64_t unit_bytes_ = 0;
  std::vector<checkpoint::Extent> extents_;
  std::vector<LoadUnit> blocks_;
};

}  // namespace hybridopt
