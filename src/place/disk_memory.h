// DiskMemory: the state of the disk tier, in scratch files, and the host memory through which it
// goes. The unit is a record: the elements of one chunk that are on disk. A record has one area for
// each array; in it the arrays of the chunk's fragments lie as in the device's ring
// (state/chunk_table.h). Records are spread over the files, of which each directory has one.
//
//   file 0   | record 0 | record 2 | ...        record | masters | first moments | second ones |
//   file 1   | record 1 | record 3 | ...
//   ring     | slot | slot | slot | ...         a slot has room for one record
//
// There are two ways to use it, and one user at a time. A pass goes through chunks in their order:
// threads read records ahead into free slots, the caller waits for one, updates it there, and the
// threads write it back while the caller goes on.
//
//   threads   read 0 | read 1 | write 0, read 2 | write 1, read 3 ...
//   caller           | update 0        | update 1        | update 2 ...
//
// The threads take areas, and those to write first: a drive is fastest when it reads and writes at
// once, so that writes must not wait until the ring has been read full. At the end of a pass they
// read what the next one needs first, if it goes through the same chunks: a step begins with a full
// ring, which was read while the caller computed gradients.
//
// A walk goes through the areas of one array after the other, for code that reads or writes the
// state of one param after the other: saves, loads, moves, and calls that read and write state.
// Hold brings one area into memory. If that area follows the last one, threads read the next ones
// ahead, and they write back what has been written, as in a pass.
//
// A hash of each area stays in memory. So a file that somebody else has cut off or changed is found
// when the area is read next.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/function_ref.h"
#include "base/system.h"
#include "checkpoint/file_io.h"
#include "machine/context.h"
#include "machine/pinned_room.h"
#include "state/chunk_table.h"

namespace hybridopt {

// What has been read and written since commit. It outlives a DiskMemory, of which a change of
// residence makes another.
struct DiskTotals {
  std::atomic<uint64_t> read_bytes = 0;
  std::atomic<uint64_t> written_bytes = 0;
};

// The directories in options.disk_paths.
std::vector<std::string> DiskPaths(const char* paths);

class DiskMemory {
 public:
  static constexpr uint64_t kDefaultRingBytes = uint64_t{256} << 20;
  static constexpr uint32_t kMinSlots = 2;  // one is updated while another is read or written

  struct Sizes {
    uint32_t records = 0;
    uint32_t slots = 0;         // of the ring
    uint64_t record_bytes = 0;  // the largest
    uint64_t file_bytes = 0;    // of all files
    uint64_t step_bytes = 0;    // what a pass over all records reads, and what it writes
    uint64_t table_bytes = 0;   // of the records and what belongs to them
    uint64_t ring_bytes() const { return slots * record_bytes; }
  };
  static Sizes SizesOf(const StateShape& shape, const ChunkTable& chunks);
  // INVALID_ARGUMENT if the ring in the options has no room for kMinSlots records.
  static Status CheckRing(const StateShape& shape, const ChunkTable& chunks);

  // Takes the memory and the room on disk. The arguments must outlive it, and not change.
  static Result<std::unique_ptr<DiskMemory>> Create(Context& context, const StateShape& shape,
                                                    const ChunkTable& chunks,
                                                    const std::vector<std::string>& paths,
                                                    DiskTotals& totals);
  ~DiskMemory();
  DiskMemory(const DiskMemory&) = delete;
  DiskMemory& operator=(const DiskMemory&) = delete;

  // The chunk table has been moved to here.
  void UseChunks(const ChunkTable& chunks) { chunks_ = &chunks; }

  // ---- a pass ----

  enum class Content {
    kStored,
    kNew  // zeros, which the caller overwrites; nothing is read
  };
  // Begins a pass over the chunks for which wanted(chunk) is true, in their order. Does not
  // allocate.
  void Begin(FunctionRef<bool(uint32_t chunk)> wanted, Content content = Content::kStored);
  // Waits for the record of a chunk. Chunks that have none, or are not part of the pass, need no
  // wait. If a read or write of the pass has failed, returns the failure.
  Status Await(uint32_t chunk);
  // Whether Await would return at once.
  bool IsReady(uint32_t chunk);
  // The chunk has been updated in the ring; a thread writes it back.
  void Updated(uint32_t chunk);
  // Ends the pass: waits for all writes, and gives up what has been read but not updated. Then
  // threads read the first records of the pass again.
  Status End();

  // ---- walks, one for each slot ----

  // The fragment that has this element of a param, which is on disk.
  const Fragment& FragmentOf(uint32_t param, uint64_t element) const;
  // Brings the area of an array in which this element is into memory; At finds it there until Hold
  // is called for another area of the same slot, or until a pass begins. No pass may be under way.
  // If to read that area has failed, returns the failure, and another try reads it again. If a
  // write of a walk has failed, returns that, as all later calls do.
  Status Hold(uint32_t param, StateSlot slot, uint64_t element);
  // The held area of this slot has been written; it goes to its file when the next one is held, and
  // has arrived there when Flush returns.
  void Wrote(StateSlot slot) { walks_[slot].written = true; }
  Status Flush();

  // The address of an element whose chunk is in the ring.
  std::byte* At(uint32_t param, StateSlot slot, uint64_t element) const;

  // False if a file system takes no direct I/O, so that its state goes through the page cache.
  bool is_direct() const;
  // Adds the bytes of the ring on each NUMA node.
  void AddNodeBytes(NodeBytes* sum) const { ring_.AddNodeBytes(sum); }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr uint32_t kThreads = 4;
  // The areas that a walk has in memory, at most: those that all threads read, and as many that
  // have been read.
  static constexpr uint32_t kWalkAreas = 2 * kThreads;

  struct Area {
    uint64_t bytes = 0;      // 0: the record has no such area
    uint64_t hash = 0;       // of what was written last
    bool under_way = false;  // in a walk: it is being read or written
    bool failed = false;     // in a walk: to read it has failed
  };
  struct Record {
    std::array<Area, kStateSlots> areas;
    uint32_t slot = kNone;   // of the ring
    uint32_t under_way = 0;  // areas that are being read or written
    bool in_pass = false;
  };
  // Where areas begin in a record; the last one is the record's end.
  using AreaBegins = std::array<uint64_t, kStateSlots + 1>;
  enum class SlotState : uint8_t { kFree, kBusy, kReady };
  struct Job {
    uint32_t record;
    uint32_t slot;  // of the area
  };
  // Jobs in the order in which they were added; there is room for the areas of all slots.
  struct Queue {
    std::vector<Job> jobs;
    uint64_t added = 0;
    uint64_t taken = 0;
    bool empty() const { return taken == added; }
    void Add(const Job& job) { jobs[added++ % jobs.size()] = job; }
    Job Take() { return jobs[taken++ % jobs.size()]; }
  };
  struct Walk {
    uint32_t record = kNone;  // whose area is held
    uint32_t end = 0;         // the areas before it have been read or are being read
    bool written = false;     // the area that is held
    Status failure;           // of an area that has failed
  };

  DiskMemory(Context& context, const StateShape& shape, const ChunkTable& chunks,
             DiskTotals& totals);
  static AreaBegins AreaBeginsOf(const StateShape& shape, const ChunkTable& chunks);
  Status TakeFiles(const std::vector<std::string>& paths);
  void ListRecords();

  std::byte* MemoryOf(uint32_t ring_slot) const {
    return ring_.data() + ring_slot * sizes_.record_bytes;
  }
  checkpoint::File& FileOf(uint32_t record) { return files_[record % files_.size()]; }
  // In a walk every record has its place in the ring.
  std::byte* AreaOf(uint32_t record, uint32_t slot) const {
    return MemoryOf(walking_ ? record % sizes_.slots : records_[record].slot) + begins_[slot];
  }
  uint64_t OffsetOf(uint32_t record) const { return record / files_.size() * sizes_.record_bytes; }
  uint32_t RecordOf(const Fragment& fragment) const {
    return record_of_fragment_[static_cast<size_t>(&fragment - chunks_->fragments.data())];
  }
  // The chunk's record if it is part of the pass, else kNone.
  uint32_t InPass(uint32_t chunk) const;
  Status ReadArea(uint32_t record, uint32_t slot, std::byte* into);
  Status WriteArea(uint32_t record, uint32_t slot, const std::byte* from);
  Status Run(const Job& job, bool writes, Content content);
  Status Failure(Status cause, uint32_t record) const;
  // These with mutex_ held.
  bool HasCome(uint32_t record) const;  // or the pass has failed
  void Add(uint32_t record, bool writes);
  void Finish(uint32_t record, bool wrote);
  void ReadAhead();
  // Frees the slots of what was read after the last pass, but for the first `kept` records of
  // pass_.
  void GiveUpAhead(std::unique_lock<std::mutex>& lock, size_t kept);
  void BeginWalks(std::unique_lock<std::mutex>& lock);
  void EndWalks(std::unique_lock<std::mutex>& lock);
  void AddArea(uint32_t record, uint32_t slot, bool writes);
  void WriteHeld(uint32_t slot);
  void ReadOn(uint32_t slot, uint32_t end);
  void FinishArea(const Job& job, bool writes, Status status);
  // On a thread.
  void Loop();

  Context& context_;
  const StateShape& shape_;
  const ChunkTable* chunks_;
  const Sizes sizes_;
  const AreaBegins begins_;
  std::vector<checkpoint::File> files_;
  PinnedRoom ring_;  // pinned if the device copies state from it and to it
  std::vector<Record> records_;
  std::vector<uint32_t> record_of_chunk_;     // kNone: nothing of the chunk is on disk
  std::vector<uint32_t> record_of_fragment_;  // per fragment
  std::vector<uint32_t> first_fragment_;      // per param: the first one on disk, and the last ones
  std::vector<uint32_t> end_fragment_;        // end
  std::array<Walk, kStateSlots> walks_;
  bool walking_ = false;  // changes only while no thread reads or writes
  DiskTotals& totals_;

  std::mutex mutex_;  // guards all below, and Record::slot
  std::condition_variable changed_;
  std::vector<SlotState> slots_;
  Queue reads_, writes_;
  uint32_t under_way_ = 0;      // records that are being read or written, or areas, in a walk
  std::vector<uint32_t> pass_;  // records, in order
  size_t next_ = 0;             // of pass_, to be read
  bool has_ahead_ = false;      // records in the ring were read after the end of a pass
  Content content_ = Content::kStored;
  Status failure_;
  bool stopping_ = false;
  std::vector<system::Thread> threads_;
};

}  // namespace hybridopt
