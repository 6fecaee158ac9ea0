#include "place/disk_memory.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "checkpoint/format/hash.h"
#include "memory/size_text.h"

namespace hybridopt {
namespace {

using checkpoint::RoundUpToDirect;

// Arrays that one loop reads must not begin at the same address modulo a page (state/shape.cpp), as
// areas do. So each begins some cache lines behind the begin of its area.
constexpr uint64_t LeadBytes(uint32_t slot) { return slot * 5 * kArrayAlignmentBytes; }

// Calls visit(slot, end) for each array of a chunk that is on disk; `end` is where it ends in its
// area.
template <typename Visit>
void ForEachArray(const StateShape& shape, const ChunkTable& chunks, const Chunk& chunk,
                  Visit&& visit) {
  for (const Fragment& fragment : chunks.FragmentsOf(chunk)) {
    if (fragment.tier != Tier::kDisk) continue;
    const ParamShape& param = shape.params[fragment.param];
    for (uint32_t slot = 0; slot < kStateSlots; ++slot)
      if (param.Keeps(Tier::kDisk, StateSlot{slot}))
        visit(slot, LeadBytes(slot) + fragment.state_offset[slot] +
                        param.Bytes(StateSlot{slot}, fragment.begin, fragment.count));
  }
}

std::array<uint64_t, kStateSlots> AreaBytes(const StateShape& shape, const ChunkTable& chunks,
                                            const Chunk& chunk) {
  std::array<uint64_t, kStateSlots> bytes{};
  ForEachArray(shape, chunks, chunk, [&](uint32_t slot, uint64_t end) {
    bytes[slot] = std::max(bytes[slot], RoundUpToDirect(end));
  });
  return bytes;
}

}  // namespace

std::vector<std::string> DiskPaths(const char* paths) {
  std::vector<std::string> directories;
  const std::string_view text = paths == nullptr ? "" : paths;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(':', begin), text.size());
    if (end > begin) directories.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return directories;
}

// ---------------------------------------------------------------------------------------- sizes --

DiskMemory::AreaBegins DiskMemory::AreaBeginsOf(const StateShape& shape, const ChunkTable& chunks) {
  std::array<uint64_t, kStateSlots> most{};
  for (const Chunk& chunk : chunks.chunks) {
    const std::array<uint64_t, kStateSlots> bytes = AreaBytes(shape, chunks, chunk);
    for (uint32_t slot = 0; slot < kStateSlots; ++slot)
      most[slot] = std::max(most[slot], bytes[slot]);
  }
  AreaBegins begins{};
  for (uint32_t slot = 0; slot < kStateSlots; ++slot) begins[slot + 1] = begins[slot] + most[slot];
  return begins;
}

DiskMemory::Sizes DiskMemory::SizesOf(const StateShape& shape, const ChunkTable& chunks) {
  Sizes sizes;
  if (!shape.options.on_disk) return sizes;
  sizes.record_bytes = AreaBeginsOf(shape, chunks).back();
  for (const Chunk& chunk : chunks.chunks) {
    if (!chunk.on_disk) continue;
    sizes.records += 1;
    for (const uint64_t bytes : AreaBytes(shape, chunks, chunk)) sizes.step_bytes += bytes;
  }
  sizes.file_bytes = sizes.records * sizes.record_bytes;
  sizes.table_bytes = sizes.records * (sizeof(Record) + sizeof(uint32_t)) +
                      chunks.chunks.size() * sizeof(uint32_t) +
                      chunks.fragments.size() * sizeof(uint32_t) +
                      shape.params.size() * 2 * sizeof(uint32_t);
  const uint64_t room = shape.options.disk_ring_bytes / std::max<uint64_t>(sizes.record_bytes, 1);
  sizes.slots = static_cast<uint32_t>(std::min<uint64_t>(room, sizes.records));
  return sizes;
}

Status DiskMemory::CheckRing(const StateShape& shape, const ChunkTable& chunks) {
  const Sizes sizes = SizesOf(shape, chunks);
  const uint64_t least = std::min(kMinSlots, sizes.records);
  if (sizes.slots >= least) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "options.disk_ring_bytes is %llu, expected at least %llu, the state of %llu "
                       "chunks (0 = 256 MiB); raise it, or make chunk_elements smaller",
                       static_cast<unsigned long long>(shape.options.disk_ring_bytes),
                       static_cast<unsigned long long>(least * sizes.record_bytes),
                       static_cast<unsigned long long>(least));
}

// --------------------------------------------------------------------------------------- making --

DiskMemory::DiskMemory(Context& context, const StateShape& shape, const ChunkTable& chunks,
                       DiskTotals& totals)
    : context_(context),
      shape_(shape),
      chunks_(&chunks),
      sizes_(SizesOf(shape, chunks)),
      begins_(AreaBeginsOf(shape, chunks)),
      record_of_chunk_(chunks.chunks.size(), kNone),
      record_of_fragment_(chunks.fragments.size(), kNone),
      first_fragment_(shape.params.size()),
      end_fragment_(shape.params.size()),
      totals_(totals),
      slots_(sizes_.slots, SlotState::kFree) {
  for (Queue* const queue : {&reads_, &writes_}) queue->jobs.resize(sizes_.slots * kStateSlots);
  pass_.reserve(sizes_.records);
  ListRecords();
}

void DiskMemory::ListRecords() {
  for (size_t number = 0; number < chunks_->chunks.size(); ++number) {
    const Chunk& chunk = chunks_->chunks[number];
    if (!chunk.on_disk) continue;
    const auto record = static_cast<uint32_t>(records_.size());
    record_of_chunk_[number] = record;
    records_.emplace_back();
    const std::array<uint64_t, kStateSlots> bytes = AreaBytes(shape_, *chunks_, chunk);
    for (uint32_t slot = 0; slot < kStateSlots; ++slot)
      records_.back().areas[slot].bytes = bytes[slot];
    for (uint32_t index = chunk.first_fragment; index < chunk.first_fragment + chunk.fragment_count;
         ++index) {
      const Fragment& fragment = chunks_->fragments[index];
      if (fragment.tier != Tier::kDisk) continue;
      record_of_fragment_[index] = record;
      if (end_fragment_[fragment.param] == 0) first_fragment_[fragment.param] = index;
      end_fragment_[fragment.param] = index + 1;
    }
  }
}

Result<std::unique_ptr<DiskMemory>> DiskMemory::Create(Context& context, const StateShape& shape,
                                                       const ChunkTable& chunks,
                                                       const std::vector<std::string>& paths,
                                                       DiskTotals& totals) {
  std::unique_ptr<DiskMemory> disk(new DiskMemory(context, shape, chunks, totals));
  HYBRIDOPT_TRY(disk->TakeFiles(paths));
  const uint64_t ring_bytes = disk->sizes_.ring_bytes();
  HYBRIDOPT_ASSIGN(disk->ring_, shape.options.streams_disk()
                                    ? PinnedRoom::Take(context, ring_bytes, "disk_ring_bytes")
                                    : PinnedRoom::TakePageable(context, ring_bytes));
  const uint32_t threads = std::min(kThreads, disk->sizes_.slots);
  disk->threads_.reserve(threads);  // so that an exception cannot lose a thread that runs
  if (threads > 0)
    HYBRIDOPT_TRY(system::StartThreads<&DiskMemory::Loop>("hybridopt/disk", disk.get(), threads,
                                                          &disk->threads_));
  return disk;
}

Status DiskMemory::TakeFiles(const std::vector<std::string>& paths) {
  const auto count = static_cast<uint32_t>(paths.size());
  files_.reserve(count);
  for (uint32_t file = 0; file < count; ++file) {
    const uint64_t records = (sizes_.records + count - 1 - file) / count;
    const uint64_t bytes = records * sizes_.record_bytes;
    Result<checkpoint::File> made = checkpoint::File::Scratch(context_.files(), paths[file]);
    const Status status = made.ok() ? made.value().Allocate(bytes) : made.status();
    if (!status.ok())
      return Status::Error(OFFLOAD_IO_FAILED,
                           "options.disk_paths names '%.300s', where %s of state are to lie: %s; "
                           "name directories with more room, or lower options.disk_fraction",
                           paths[file].c_str(), BytesText(bytes).c_str(), status.message().c_str());
    files_.push_back(std::move(made.value()));
  }
  return {};
}

bool DiskMemory::is_direct() const {
  return std::all_of(files_.begin(), files_.end(),
                     [](const checkpoint::File& file) { return file.is_direct(); });
}

DiskMemory::~DiskMemory() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  threads_.clear();  // joins the threads
}

// -------------------------------------------------------------------------------------- records --

Status DiskMemory::Failure(Status cause, uint32_t record) const {
  return Status::Error(cause.code(),
                       "state on disk (options.disk_paths) in '%.300s' is lost: %s; make a new "
                       "optimizer and load the last checkpoint",
                       files_[record % files_.size()].path().c_str(), cause.message().c_str());
}

Status DiskMemory::ReadArea(uint32_t record, uint32_t slot, std::byte* into) {
  const Area& area = records_[record].areas[slot];
  const uint64_t begin = OffsetOf(record) + begins_[slot];
  HYBRIDOPT_ASSIGN(const uint64_t read, FileOf(record).Read(into, area.bytes, begin));
  totals_.read_bytes += read;
  if (read < area.bytes)
    return Status::Error(
        OFFLOAD_IO_FAILED, "somebody has cut the file off: it has %llu of %llu bytes at byte %llu",
        static_cast<unsigned long long>(read), static_cast<unsigned long long>(area.bytes),
        static_cast<unsigned long long>(begin));
  if (checkpoint::Xxh3({reinterpret_cast<const char*>(into), area.bytes}) == area.hash) return {};
  return Status::Error(OFFLOAD_IO_FAILED,
                       "what was read is not what the library wrote there (their hashes differ)");
}

Status DiskMemory::WriteArea(uint32_t record, uint32_t slot, const std::byte* from) {
  Area& area = records_[record].areas[slot];
  area.hash = checkpoint::Xxh3({reinterpret_cast<const char*>(from), area.bytes});
  HYBRIDOPT_TRY(FileOf(record).Write(from, area.bytes, OffsetOf(record) + begins_[slot]));
  totals_.written_bytes += area.bytes;
  return {};
}

Status DiskMemory::Run(const Job& job, bool writes, Content content) {
  std::byte* const area = AreaOf(job.record, job.slot);
  if (writes) return WriteArea(job.record, job.slot, area);
  if (content == Content::kStored) return ReadArea(job.record, job.slot, area);
  std::memset(area, 0, records_[job.record].areas[job.slot].bytes);
  return {};
}

// ------------------------------------------------------------------------------------- the pass --

void DiskMemory::Begin(FunctionRef<bool(uint32_t chunk)> wanted, Content content) {
  std::unique_lock lock(mutex_);
  EndWalks(lock);
  pass_.clear();
  for (uint32_t chunk = 0; chunk < record_of_chunk_.size(); ++chunk) {
    const uint32_t record = record_of_chunk_[chunk];
    if (record == kNone) continue;
    records_[record].in_pass = wanted(chunk);
    if (records_[record].in_pass) pass_.push_back(record);
  }
  // More would leave no slot for one of the first.
  const size_t kept = content == Content::kStored ? std::min(pass_.size(), slots_.size()) : 0;
  GiveUpAhead(lock, kept);
  content_ = content;
  next_ = 0;
  ReadAhead();
}

void DiskMemory::GiveUpAhead(std::unique_lock<std::mutex>& lock, size_t kept) {
  if (!has_ahead_) return;
  has_ahead_ = false;
  const auto is_given_up = [&](uint32_t number) {
    const Record& record = records_[number];
    return record.slot != kNone && (kept == 0 || !record.in_pass || number > pass_[kept - 1]);
  };
  for (uint32_t number = 0; number < records_.size(); ++number) {
    if (!is_given_up(number)) continue;
    changed_.wait(lock, [&] { return records_[number].under_way == 0; });
    slots_[records_[number].slot] = SlotState::kFree;
    records_[number].slot = kNone;
  }
}

void DiskMemory::Add(uint32_t record, bool writes) {
  Record& added = records_[record];
  HYBRIDOPT_CHECK(added.under_way == 0);
  slots_[added.slot] = SlotState::kBusy;
  under_way_ += 1;
  for (uint32_t slot = 0; slot < kStateSlots; ++slot) {
    if (added.areas[slot].bytes == 0) continue;
    (writes ? writes_ : reads_).Add({record, slot});
    added.under_way += 1;
  }
  if (added.under_way == 0) Finish(record, writes);  // its params have no state at all
  changed_.notify_all();
}

void DiskMemory::Finish(uint32_t record, bool wrote) {
  under_way_ -= 1;
  slots_[records_[record].slot] = wrote ? SlotState::kFree : SlotState::kReady;
  if (!wrote) return;
  records_[record].slot = kNone;
  ReadAhead();
}

// Reads the next records into the slots that are free. From then on next_ is a record that has
// neither been read nor updated.
void DiskMemory::ReadAhead() {
  const auto skip_what_is_read = [&] {
    while (next_ < pass_.size() && records_[pass_[next_]].slot != kNone) ++next_;
  };
  skip_what_is_read();
  for (uint32_t slot = 0; slot < slots_.size() && next_ < pass_.size() && failure_.ok(); ++slot) {
    if (slots_[slot] != SlotState::kFree) continue;
    const uint32_t record = pass_[next_];
    records_[record].slot = slot;
    skip_what_is_read();
    Add(record, false);
  }
}

uint32_t DiskMemory::InPass(uint32_t chunk) const {
  const uint32_t record = record_of_chunk_[chunk];
  return record != kNone && records_[record].in_pass ? record : kNone;
}

bool DiskMemory::HasCome(uint32_t record) const {
  const uint32_t slot = records_[record].slot;
  return !failure_.ok() || (slot != kNone && slots_[slot] == SlotState::kReady);
}

bool DiskMemory::IsReady(uint32_t chunk) {
  const uint32_t record = InPass(chunk);
  if (record == kNone) return true;
  std::lock_guard lock(mutex_);
  return HasCome(record);
}

Status DiskMemory::Await(uint32_t chunk) {
  const uint32_t record = InPass(chunk);
  if (record == kNone) return {};
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return HasCome(record); });
  return failure_;
}

void DiskMemory::Updated(uint32_t chunk) {
  const uint32_t record = InPass(chunk);
  if (record == kNone) return;
  std::lock_guard lock(mutex_);
  Add(record, true);
}

Status DiskMemory::End() {
  std::unique_lock lock(mutex_);
  next_ = pass_.size();
  changed_.wait(lock, [&] { return under_way_ == 0; });
  for (const uint32_t record : pass_) {
    records_[record].slot = kNone;
    records_[record].in_pass = false;
  }
  std::fill(slots_.begin(), slots_.end(), SlotState::kFree);
  content_ = Content::kStored;
  next_ = 0;
  has_ahead_ = true;
  ReadAhead();
  return failure_;
}

void DiskMemory::Loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !writes_.empty() || !reads_.empty(); });
    if (stopping_) return;
    const bool writes = !writes_.empty();
    const Job job = (writes ? writes_ : reads_).Take();
    const Content content = content_;
    Status status = failure_;
    if (status.ok()) {
      lock.unlock();
      status = CatchExceptions("state on disk", [&] { return Run(job, writes, content); });
      if (!status.ok()) status = Failure(std::move(status), job.record);
      lock.lock();
    }
    if (walking_) {
      FinishArea(job, writes, std::move(status));
    } else {
      if (failure_.ok()) failure_ = std::move(status);
      if (--records_[job.record].under_way == 0) Finish(job.record, writes);
    }
    changed_.notify_all();
  }
}

// ---------------------------------------------------------------------------------------- walks --

const Fragment& DiskMemory::FragmentOf(uint32_t param, uint64_t element) const {
  const auto begin = chunks_->fragments.begin() + first_fragment_[param];
  const auto end = chunks_->fragments.begin() + end_fragment_[param];
  const auto behind = std::upper_bound(
      begin, end, element, [](uint64_t one, const Fragment& f) { return one < f.begin; });
  HYBRIDOPT_CHECK(behind != begin);
  return *std::prev(behind);
}

void DiskMemory::BeginWalks(std::unique_lock<std::mutex>& lock) {
  if (walking_) return;
  GiveUpAhead(lock, 0);
  walking_ = true;
}

void DiskMemory::EndWalks(std::unique_lock<std::mutex>& lock) {
  if (!walking_) return;
  changed_.wait(lock, [&] { return under_way_ == 0; });
  walks_ = {};
  walking_ = false;
}

void DiskMemory::AddArea(uint32_t record, uint32_t slot, bool writes) {
  Area& area = records_[record].areas[slot];
  if (area.bytes == 0) return;
  area.under_way = true;
  area.failed = false;
  under_way_ += 1;
  (writes ? writes_ : reads_).Add({record, slot});
  changed_.notify_all();
}

// What could not be read may be what nobody needs.
void DiskMemory::FinishArea(const Job& job, bool writes, Status status) {
  Area& area = records_[job.record].areas[job.slot];
  area.under_way = false;
  under_way_ -= 1;
  area.failed = !status.ok();
  if (area.failed) (writes ? failure_ : walks_[job.slot].failure) = std::move(status);
}

void DiskMemory::WriteHeld(uint32_t slot) {
  Walk& walk = walks_[slot];
  if (walk.written) AddArea(walk.record, slot, true);
  walk.written = false;
}

// Reads the areas of a slot up to this record, as far as the ring has room for them.
void DiskMemory::ReadOn(uint32_t slot, uint32_t end) {
  const auto has_room = [&](uint32_t record) {
    return record < sizes_.slots || !records_[record - sizes_.slots].areas[slot].under_way;
  };
  for (uint32_t& next = walks_[slot].end; next < end && has_room(next); ++next)
    AddArea(next, slot, false);
}

Status DiskMemory::Hold(uint32_t param, StateSlot slot, uint64_t element) {
  const uint32_t record = RecordOf(FragmentOf(param, element));
  Walk& walk = walks_[slot];
  if (walk.record == record) return {};
  std::unique_lock lock(mutex_);
  BeginWalks(lock);
  WriteHeld(slot);
  const uint32_t most = std::min(kWalkAreas, sizes_.slots);
  const bool goes_on = walk.record != kNone && record > walk.record && record - walk.record <= most;
  if (!goes_on || record >= walk.end) {
    changed_.wait(lock, [&] { return under_way_ == 0; });
    walk.end = record;
  }
  walk.record = kNone;
  const uint32_t end = std::min(record + (goes_on ? most : 1), sizes_.records);
  const Area& area = records_[record].areas[slot];
  changed_.wait(lock, [&] {
    if (failure_.ok()) ReadOn(slot, end);
    return !failure_.ok() || (walk.end > record && !area.under_way);
  });
  if (!failure_.ok()) return failure_;
  if (area.failed) return walk.failure;
  walk.record = record;
  return {};
}

Status DiskMemory::Flush() {
  std::unique_lock lock(mutex_);
  for (uint32_t slot = 0; slot < kStateSlots; ++slot) WriteHeld(slot);
  if (walking_) changed_.wait(lock, [&] { return under_way_ == 0; });
  return failure_;
}

std::byte* DiskMemory::At(uint32_t param, StateSlot slot, uint64_t element) const {
  const Fragment& fragment = FragmentOf(param, element);
  return AreaOf(RecordOf(fragment), slot) + LeadBytes(slot) + fragment.state_offset[slot] +
         shape_.params[param].Bytes(slot, fragment.begin, element - fragment.begin);
}

}  // namespace hybridopt
