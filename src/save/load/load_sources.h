// LoadSources: the stored params from which an optimizer's params are loaded. The optimizer that
// saved them may have had another world, sharding or device fraction. Compares the content of the
// checkpoint with the optimizer before any state is read.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/function_ref.h"
#include "checkpoint/format/reshard.h"
#include "checkpoint/reader.h"
#include "place/state_locator.h"

namespace hybridopt {

class LoadSources {
 public:
  // `flags` is a combination of enum offload_load_flag.
  LoadSources(const ParamTable& table, const StateLocator& locator, uint32_t flags)
      : table_(table), locator_(locator), flags_(flags) {}

  // Opens the checkpoint and compares its content with this optimizer: CHECKPOINT_MISMATCH names
  // the first few differences.
  Status Open(system::Files& files, const std::string& path);
  // A hash that differs between different checkpoints.
  uint32_t fingerprint() const;
  // Per param of the checkpoint: 1 if this optimizer has it, else 0.
  std::vector<int32_t> Known() const;
  // CHECKPOINT_MISMATCH names the first params that are on no rank.
  Status CheckAllKnown(const std::vector<int32_t>& known) const;

  const checkpoint::Reader& reader() const { return *reader_; }
  // The stored param from which this param is loaded; NULL if there is none.
  const checkpoint::StoredParam* stored(uint32_t id) const { return sources_[id].stored; }
  // Whether a load reads this state.
  bool Wants(uint32_t id, StateSlot slot) const;
  // Calls visit for each range of a param's elements that is contiguous in one stored shard.
  Status ForEachSegment(uint32_t id, FunctionRef<Status(const checkpoint::Segment&)> visit) const {
    return checkpoint::ForEachSegment(sources_[id].shards, table_.param(id).shard, visit);
  }
  // The number of steps that a stored param has had.
  uint64_t StoredCount(uint32_t id) const;

 private:
  struct Source {
    const checkpoint::StoredParam* stored;
    std::vector<const Shard*> shards;  // the shards of `stored`
  };
  // The differences to the checkpoint; the error text lists the first few.
  struct Differences {
    std::vector<std::string> told;
    uint64_t count = 0;

    void Add(const std::string& text);
    Status Tell(const std::string& path, const std::string& more = "") const;
  };

  void CompareParam(uint32_t id);
  void CompareArrays(uint32_t id, const checkpoint::StoredShard& shard);
  void CompareCounts(uint32_t id);

  const ParamTable& table_;
  const StateLocator& locator_;
  const uint32_t flags_;
  std::string path_;
  std::optional<checkpoint::Reader> reader_;
  std::vector<Source> sources_;  // per param
  Differences differences_;
};

}  // namespace hybridopt
