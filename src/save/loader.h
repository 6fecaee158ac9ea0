// Loader: brings the state of a checkpoint into an optimizer; world, sharding and device fraction
// may have been others when it was saved. Verify reads and checks all bytes and changes nothing;
// only then Replace writes. So the files are read twice (unless the caller passes NO_VERIFY). The
// reasons: who offloads state has no memory for a second copy of it, and if Replace found a damaged
// block, the state that it had overwritten would be lost. Replace compares each unit with what
// Verify has read before it uses the unit.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/function_ref.h"
#include "checkpoint/block_reader.h"
#include "checkpoint/open_files.h"
#include "checkpoint/read_hashes.h"
#include "checkpoint/reader.h"
#include "machine/context.h"
#include "machine/pinned_room.h"
#include "place/state_locator.h"
#include "save/checkpoint_stream.h"
#include "state/step_counts.h"

namespace hybridopt {

// A queued load.
struct LoadRequest {
  std::string path;
  uint32_t flags = 0;
  uint32_t io_depth = 0;  // above 0
  offload_progress_function_t progress = nullptr;
  void* progress_user = nullptr;
  std::vector<ParamLocation> locations;  // per param
  std::vector<double> first_moments;     // per group: the initial value of the first moments
};

// What masters are rounded to: a param of this dtype, whose masters have this format.
struct Rounded {
  int32_t dtype;
  Format master;
};

class Loader {
 public:
  Loader(Context& context, const ParamTable& table, const StateShape& shape,
         const StateLocator& locator, const LoadRequest& request)
      : context_(context), table_(table), shape_(shape), locator_(locator), request_(request) {}

  // Opens the checkpoint and compares its content with this optimizer: CHECKPOINT_MISMATCH names
  // the first few differences.
  Status Open();
  // A hash that differs between checkpoints.
  uint32_t fingerprint() const;
  // Per param of the checkpoint, after Open: 1 if this optimizer has it, else 0.
  std::vector<int32_t> Known() const;
  // CHECKPOINT_MISMATCH names the first params that no rank knows.
  Status CheckAllKnown(const std::vector<int32_t>& known) const;
  // Takes the memory for reading, and compares the hashes of all blocks that will be read.
  Status Verify();

  // Writes state and params, after the work behind which `ready` was recorded. After a failure they
  // may be partly old and partly new.
  Status Replace(EventHandle ready);
  bool has_replaced() const { return has_replaced_; }
  // Sets the step counts of the checkpoint.
  void SetCounts(StepCounts& step_counts) const;

 private:
  // A read unit: what is read at a time, a block of an array or a part of a large block.
  struct Unit {
    checkpoint::Extent extent;
    const checkpoint::StoredTensor* tensor;
    uint32_t param;
    uint32_t shard;
    uint64_t block;  // the index of the block in the tensor
  };
  // Elements that are contiguous both in a unit and in the param.
  struct Piece {
    uint32_t param;
    StateSlot slot;
    uint64_t element;  // the first element, counted in the param
    uint64_t count;
    uint64_t into;  // bytes from the unit's begin
    int32_t dtype;  // as stored
  };
  // The stored param that one param is loaded from.
  struct Source {
    const checkpoint::StoredParam* stored;
    std::vector<const Shard*> shards;  // of `stored`
  };

  bool Wants(uint32_t id, StateSlot slot) const;
  void Differ(const std::string& text);
  void CompareParam(uint32_t id);
  void CompareArrays(uint32_t id, const checkpoint::StoredShard& shard);
  void CompareCounts(uint32_t id);
  Status Differences() const;

  // Calls begin_unit for each unit that holds elements of this optimizer, and visit for each piece
  // in it. A unit may be visited more than once if shards have several boxes.
  Status ForEachUnit(FunctionRef<Status(const Unit&)> begin_unit,
                     FunctionRef<Status(const Piece&)> visit) const;
  Status ForEachUnitOf(uint32_t id, StateSlot slot, FunctionRef<Status(const Unit&)> begin_unit,
                       FunctionRef<Status(const Piece&)> visit) const;
  Status ListUnits();
  Status TakeMemory();
  checkpoint::BlockReader::Open Opening() {
    return [this](uint32_t file) { return files_->Get(file); };
  }
  uint64_t block_bytes() const { return reader_->manifest().block_bytes; }
  uint64_t BlockEnd(const Unit& unit) const;  // bytes from the tensor's begin
  Status CheckUnchanged(const Unit& unit, const std::byte* data) const;
  Status Damaged(const Unit& unit) const;
  void Progress(uint64_t bytes);

  Status Put(const Piece& piece, const std::byte* data);
  Status Copy(const std::byte* from, std::byte* to, uint64_t bytes, bool to_device);
  Status PutEncoded(const StateRange& range, int32_t dtype, const std::byte* from);
  Status PutComputed(const StateRange& range,
                     FunctionRef<void(uint64_t, uint64_t, std::byte*)> make);
  Status PutParams(uint32_t id, uint64_t element, uint64_t count, const std::byte* masters);
  Status RoundAll(const std::byte* values, uint64_t count, const Rounded& to, std::byte* rounded);
  Result<std::byte*> Stage(uint64_t bytes);
  Status FillMoments();
  Status AwaitCopies();
  uint64_t StoredCount(uint32_t id) const;

  Context& context_;
  const ParamTable& table_;
  const StateShape& shape_;
  const StateLocator locator_;
  const LoadRequest& request_;

  std::optional<checkpoint::Reader> reader_;
  std::vector<Source> sources_;  // per param
  std::vector<std::string> differences_;
  uint64_t difference_count_ = 0;

  std::optional<checkpoint::OpenFiles> files_;
  uint64_t unit_bytes_ = 0;                         // read at a time
  std::vector<checkpoint::Extent> units_;           // in the order of Replace
  std::vector<Unit> touched_;                       // one for each block that a unit touches
  std::optional<checkpoint::ReadHashes> verified_;  // hashes of what Verify has read
  uint32_t blocks_ = 0;                             // of memory
  PinnedRoom memory_;
  uint64_t bytes_done_ = 0;
  uint64_t bytes_total_ = 0;

  CheckpointStream stream_;
  std::byte* staging_ = nullptr;  // converted values on their way to the device
  uint64_t staged_bytes_ = 0;
  bool copying_ = false;  // copies are queued on stream_
  bool has_replaced_ = false;
};

}  // namespace hybridopt
