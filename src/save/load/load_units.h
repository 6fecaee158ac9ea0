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

// The bytes that are read at a time: a block of an array, or a part of a large block.
struct LoadUnit {
  checkpoint::Extent extent;
  const checkpoint::StoredTensor* tensor;
  uint32_t param;
  uint64_t block;  // the index of the block in the tensor
};

// Elements that are contiguous both in a unit and in the param.
struct LoadPiece {
  StateElements elements;
  uint64_t into;  // bytes from the start of the unit
  int32_t dtype;  // as stored
};

class LoadUnits {
 public:
  LoadUnits(const ParamTable& table, const StateLocator& locator, const LoadSources& sources)
      : table_(table), locator_(locator), sources_(sources) {}

  // Lists the units. To be called before all functions below.
  Status List();

  // Calls begin_unit for each unit with elements of this optimizer, and visit for each piece of the
  // unit. If shards have several boxes, a unit may be visited more than once.
  Status ForEach(FunctionRef<Status(const LoadUnit&)> begin_unit,
                 FunctionRef<Status(const LoadPiece&)> visit) const;
  // The extents of these units, in the order in which ForEach visits them.
  const std::vector<checkpoint::Extent>& extents() const { return extents_; }
  // The blocks that contain units, each as one LoadUnit, in the order of files and offsets.
  const std::vector<LoadUnit>& blocks() const { return blocks_; }
  // The units of a whole block.
  std::vector<checkpoint::Extent> ExtentsOf(const LoadUnit& block) const;
  uint64_t unit_bytes() const { return unit_bytes_; }  // the most bytes of a unit

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
