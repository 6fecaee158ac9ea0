// Saver: one running save of one rank. It reads all state in the order of its file, through a fixed
// number of blocks of memory, on a thread of its own, while the timeline runs other work.
//
//   arenas, device --copy, hash--> blocks --threads--> file --truncate, sync--> (part) --> ready
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/files.h"
#include "base/system.h"
#include "checkpoint/block_writer.h"
#include "checkpoint/format/format.h"
#include "checkpoint/format/hash.h"
#include "machine/context.h"
#include "machine/pinned_room.h"
#include "machine/trace/trace.h"
#include "place/capture.h"
#include "place/state_locator.h"
#include "state_io/state_reader.h"
#include "state_io/transfer.h"

namespace hybridopt {

// A queued save.
struct SaveRequest {
  std::string path;
  uint32_t flags = 0;
  uint32_t io_depth = 0;  // above 0
  offload_progress_function_t progress = nullptr;
  void* progress_user = nullptr;
  std::vector<ParamLocation> locations;  // per param
  std::vector<offload_group_t> groups;
};

// The other values that are saved, as they are at the save's place on the timeline.
struct SavePoint {
  uint64_t step;
  std::vector<uint64_t> step_counts;  // per param
  uint32_t rank;
  uint32_t world;
  // Recorded after the caller's work that the save waits for; NULL on the host device.
  EventHandle ready;
};

class Saver {
 public:
  // The object that the saver's thread tells how far it has come.
  class Owner {
   public:
    virtual void BorrowedRead() = 0;  // all borrowed memory has been read
    virtual void Written() = 0;       // the thread has finished its work; Join returns the outcome

   protected:
    ~Owner() = default;
  };

  // What a save reads.
  struct Saved {
    const ParamTable& table;
    const StateShape& shape;
    const Residence& residence;  // the timeline's, as the chunks
    const ChunkTable& chunks;
    StateLocator locator;
    Trace& trace;
  };
  // Decides the offset of each array in the file. Steps put aside what the save has not read into
  // the buffer.
  static Result<std::unique_ptr<Saver>> Create(Context& context, const Saved& saved,
                                               SaveRequest request, const SavePoint& point,
                                               std::span<std::byte> buffer);
  ~Saver();  // waits for its thread
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  // Writes into an existing directory. The owner must outlive the saver. If the saver's thread
  // cannot be started, the owner's functions are called before Start returns. If `failure` is an
  // error, nothing is written and `failure` is the outcome.
  void Start(std::string directory, Status failure, Owner& owner);
  // A later step asks this capture before it overwrites state.
  Capture& capture() { return capture_; }
  // Waits until the saver's thread has ended. OK: this rank's file is on disk; on ranks other than
  // 0, so is the rank's part of the manifest.
  Status Join();

  Trace& trace() const { return trace_; }
  const SaveRequest& request() const { return request_; }
  // This rank's part of the manifest. To be called after Join has returned OK.
  checkpoint::Manifest TakeManifest() { return std::move(manifest_); }

 private:
  struct Array {
    uint32_t param;
    StateSlot slot;
    checkpoint::StoredTensor* tensor;
  };
  Saver(Context& context, const Saved& saved, SaveRequest request, const SavePoint& point)
      : context_(context),
        request_(std::move(request)),
        point_(point),
        locator_(saved.locator),
        trace_(saved.trace),
        capture_(saved.shape, saved.residence, saved.chunks) {}

  Status LayOut(const ParamTable& table, const StateShape& shape);
  bool IsStored(const Param& param, uint32_t id) const;
  void ListShard(const Param& param, uint32_t id, const ParamShape& shaped);
  void FillCapture(std::span<std::byte> buffer);
  bool Borrows(const Array& array) const;
  void RunThread();
  void FreeTransfer();
  Status TakeMemory();
  Status Write();
  Status WriteArrays(checkpoint::BlockWriter& writer);
  Status Room(uint64_t* bytes);
  Status Append(const void* data, uint64_t bytes);
  Status AppendArray(const Array& array);
  StateRange RangeOf(const Array& array, const Capture::Source& source, uint64_t first,
                     uint64_t done) const;
  Status AppendRange(const StateRange& range, int32_t dtype, checkpoint::BlockHasher& hasher);
  Status WritePart();
  void Wrote(uint64_t bytes);

  Context& context_;
  const SaveRequest request_;
  const SavePoint point_;
  const StateLocator locator_;
  Trace& trace_;
  std::string directory_;
  Capture capture_;
  std::string head_;
  checkpoint::Manifest manifest_;
  std::vector<Array> arrays_;  // in the order of the file

  // The members below are used by the saver's thread.
  PinnedRoom memory_;
  uint64_t block_bytes_ = 0;
  uint32_t blocks_ = 0;
  Transfer transfer_;  // until it is destroyed its copies may write memory_
  checkpoint::BlockWriter* writer_ = nullptr;
  std::byte* block_ = nullptr;  // the block that is being filled
  uint64_t filled_bytes_ = 0;   // the filled bytes of block_

  Owner* owner_ = nullptr;
  system::Thread thread_;
  Status outcome_ = Status::Error(OFFLOAD_INTERNAL, "a save that has not run");
};

}  // namespace hybridopt
