#include "save/loader.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "base/system.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/format/reshard.h"
#include "runtime/work_pieces.h"
#include "save/optimizer_manifest.h"

namespace hybridopt {
namespace {

using checkpoint::Extent;
using checkpoint::StoredShard;
using checkpoint::StoredTensor;

constexpr size_t kDifferencesTold = 5;
constexpr uint64_t kUnitBytesMax = uint64_t{8} << 20;
// The size of the buffer for converted values that go to the device; with it a load takes less than
// 1 MiB beside its blocks.
constexpr uint64_t kStagingBytes = uint64_t{512} << 10;
constexpr uint64_t kStagedAlignment = 64;
// How many elements are converted at a time, if their format is not that of the file.
constexpr uint64_t kConvertedElements = uint64_t{1} << 15;
// The least bytes for which it is worth to wake the workers.
constexpr uint64_t kSharedBytes = uint64_t{256} << 10;

std::string Text(const std::vector<int64_t>& shape) {
  std::string text;
  for (int64_t extent : shape) text += (text.empty() ? "(" : ", ") + std::to_string(extent);
  return text + ")";
}

// Whether a stored dtype can be converted to a slot's format. Masters are stored in fp32 from every
// format, moments in fp32 or bf16.
bool Converts(int32_t dtype, StateSlot slot) {
  return dtype == OFFLOAD_FP32 || (slot != kMaster && dtype == OFFLOAD_BF16);
}

// Each way to round has a loop of its own, so that the compiler can vectorize it.
template <typename RoundOne>
void RoundEach(const std::byte* values, uint64_t count, RoundOne round_one, std::byte* rounded) {
  for (uint64_t i = 0; i < count; ++i)
    StoreElement<uint16_t>(rounded, i, round_one(LoadElement<float>(values, i)));
}

// Rounds masters, which need not be aligned, to their params.
void RoundToParams(const std::byte* masters, uint64_t count, const Rounded& to, std::byte* params) {
  if (RowOf(to.master).beside_param) return RowOf(to.master).encode_params(masters, count, params);
  switch (to.dtype) {
    case OFFLOAD_FP32:
      std::memcpy(params, masters, count * sizeof(float));
      return;
    case OFFLOAD_FP16:
      return RoundEach(
          masters, count, [](float value) { return Fp32ToFp16(value); }, params);
    default:
      HYBRIDOPT_CHECK(to.dtype == OFFLOAD_BF16);
      RoundEach(
          masters, count, [](float value) { return Fp32ToBf16(value); }, params);
  }
}

// The read unit that holds a byte of an array. Blocks are cut into units, so that no unit spans two
// blocks.
Extent UnitAt(const StoredTensor& tensor, uint64_t block_bytes, uint64_t unit_bytes, uint64_t at) {
  const uint64_t block = at / block_bytes * block_bytes;
  const uint64_t begin = block + (at - block) / unit_bytes * unit_bytes;
  const uint64_t end = std::min({begin + unit_bytes, block + block_bytes, tensor.bytes});
  return {tensor.file, tensor.offset + begin, end - begin};
}

}  // namespace

// ------------------------------------------------------------------------------------ comparing --

bool Loader::Wants(uint32_t id, StateSlot slot) const {
  return locator_.Has(id, slot) &&
         (slot == kMaster || (request_.flags & OFFLOAD_LOAD_FRESH_MOMENTS) == 0);
}

void Loader::Differ(const std::string& text) {
  difference_count_ += 1;
  if (differences_.size() < kDifferencesTold) differences_.push_back(text);
}

Status Loader::Differences() const {
  if (difference_count_ == 0) return {};
  std::string text;
  for (const std::string& difference : differences_)
    text += (text.empty() ? "" : "; ") + difference;
  if (difference_count_ > differences_.size())
    text += "; and " + std::to_string(difference_count_ - differences_.size()) + " more";
  return Status::Error(OFFLOAD_CHECKPOINT_MISMATCH, "'%.300s' is of another model: %s",
                       request_.path.c_str(), text.c_str());
}

Status Loader::Open() {
  HYBRIDOPT_ASSIGN(reader_, checkpoint::Reader::Open(context_.files(), request_.path));
  const checkpoint::Manifest& manifest = reader_->manifest();
  if (manifest.algorithm != table_.algorithm() &&
      (request_.flags & OFFLOAD_LOAD_FRESH_MOMENTS) == 0)
    Differ(std::string("it was saved by ") + AlgorithmOf(manifest.algorithm)->name +
           ", this optimizer is " + AlgorithmOf(table_.algorithm())->name +
           " (OFFLOAD_LOAD_FRESH_MOMENTS takes the weights alone)");
  std::unordered_map<std::string_view, const checkpoint::StoredParam*> by_name;
  for (const checkpoint::StoredParam& param : manifest.params) by_name[param.name] = &param;
  sources_.resize(table_.size());
  for (uint32_t id = 0; id < table_.size(); ++id) {
    const auto found = by_name.find(table_.param(id).name);
    sources_[id].stored = found == by_name.end() ? nullptr : found->second;
    CompareParam(id);
  }
  return Differences();
}

void Loader::CompareParam(uint32_t id) {
  const Param& param = table_.param(id);
  Source& source = sources_[id];
  const std::string name = "param '" + param.name.substr(0, 128) + "' ";
  if (source.stored == nullptr) {
    if (param.count > 0) Differ(name + "is missing");
    return;
  }
  const checkpoint::StoredParam& stored = *source.stored;
  if (stored.shape != ShapeOf(param.shard)) {
    Differ(name + "has shape " + Text(stored.shape) + ", here " + Text(ShapeOf(param.shard)));
    return;
  }
  if (stored.dtype != param.dtype)
    Differ(name + "is in " + StoredDtypeName(stored.dtype) + ", here in " +
           StoredDtypeName(param.dtype));
  for (const StoredShard& shard : stored.shards) source.shards.push_back(&shard.shard);
  if (param.count == 0) return;
  if (Status covered = checkpoint::CheckCoverage(source.shards, param.shard); !covered.ok())
    Differ(name + covered.message());
  for (const StoredShard& shard : stored.shards) CompareArrays(id, shard);
  CompareCounts(id);
}

void Loader::CompareArrays(uint32_t id, const StoredShard& shard) {
  const std::string name = "param '" + table_.param(id).name.substr(0, 128) + "' of rank " +
                           std::to_string(shard.rank) + " ";
  for (uint32_t index = 0; index < kStateSlots; ++index) {
    const StateSlot slot{index};
    if (!Wants(id, slot)) continue;
    const int32_t kind = locator_.KindOf(slot);
    const StoredTensor* const tensor = checkpoint::FindTensor(shard, kind);
    if (tensor == nullptr)
      Differ(name + "has no " + checkpoint::KindName(kind) +
             (slot == kMaster ? "" : " (OFFLOAD_LOAD_FRESH_MOMENTS takes the weights alone)"));
    else if (!Converts(tensor->dtype, slot))
      Differ(name + "has " + checkpoint::KindName(kind) + " in " + StoredDtypeName(tensor->dtype) +
             ", expected " + (slot == kMaster ? "F32" : "F32 or BF16"));
  }
  if ((request_.flags & OFFLOAD_LOAD_FRESH_MOMENTS) != 0) return;
  for (const StoredTensor& tensor : shard.tensors) {
    bool kept = false;
    for (uint32_t slot = 0; slot < kStateSlots; ++slot)
      kept =
          kept || (Wants(id, StateSlot{slot}) && locator_.KindOf(StateSlot{slot}) == tensor.kind);
    if (!kept)
      Differ(name + "has " + checkpoint::KindName(tensor.kind) + ", which is not kept here");
  }
}

// Checks that all stored shards from which a param's elements come have one step count.
void Loader::CompareCounts(uint32_t id) {
  const checkpoint::StoredParam& stored = *sources_[id].stored;
  std::optional<uint32_t> first;
  bool told = false;
  (void)checkpoint::ForEachSegment(
      sources_[id].shards, table_.param(id).shard, [&](const checkpoint::Segment& segment) {
        if (!first.has_value()) first = segment.shard;
        const uint64_t counts[] = {stored.shards[*first].step_count,
                                   stored.shards[segment.shard].step_count};
        if (counts[0] == counts[1] || told) return Status();
        told = true;
        Differ("param '" + stored.name.substr(0, 128) + "' was stepped " +
               std::to_string(counts[0]) + " times on rank " +
               std::to_string(stored.shards[*first].rank) + " and " + std::to_string(counts[1]) +
               " times on rank " + std::to_string(stored.shards[segment.shard].rank) +
               ", and this shard has parts of both");
        return Status();
      });
}

uint32_t Loader::fingerprint() const {
  uint64_t hash = reader_->manifest().step;
  for (const checkpoint::StoredFile& file : reader_->manifest().files)
    hash = hash * 0x9e3779b97f4a7c15 + file.head_hash;
  for (const checkpoint::StoredParam& param : reader_->manifest().params)
    for (const StoredShard& shard : param.shards)
      for (const StoredTensor& tensor : shard.tensors)
        for (uint64_t block : tensor.hashes) hash = hash * 0x9e3779b97f4a7c15 + block;
  return static_cast<uint32_t>(hash >> 33);
}

std::vector<int32_t> Loader::Known() const {
  // Params without elements need not be registered.
  std::vector<int32_t> known;
  for (const checkpoint::StoredParam& param : reader_->manifest().params)
    known.push_back(checkpoint::HasElements(param) ? 0 : 1);
  for (const Source& source : sources_)
    if (source.stored != nullptr) known[source.stored - reader_->manifest().params.data()] = 1;
  return known;
}

Status Loader::CheckAllKnown(const std::vector<int32_t>& known) const {
  Loader told(context_, table_, shape_, locator_, request_);
  for (size_t i = 0; i < known.size(); ++i)
    if (known[i] == 0)
      told.Differ("param '" + reader_->manifest().params[i].name.substr(0, 128) +
                  "' is stored, but not registered here");
  return told.Differences();
}

// ------------------------------------------------------------------------------------ verifying --

Status Loader::ForEachUnit(FunctionRef<Status(const Unit&)> begin_unit,
                           FunctionRef<Status(const Piece&)> visit) const {
  for (uint32_t id = 0; id < table_.size(); ++id)
    for (uint32_t slot = 0; slot < kStateSlots; ++slot)
      if (Wants(id, StateSlot{slot}))
        HYBRIDOPT_TRY(ForEachUnitOf(id, StateSlot{slot}, begin_unit, visit));
  return {};
}

Status Loader::ForEachUnitOf(uint32_t id, StateSlot slot,
                             FunctionRef<Status(const Unit&)> begin_unit,
                             FunctionRef<Status(const Piece&)> visit) const {
  const std::vector<StoredShard>& shards = sources_[id].stored->shards;
  Extent extent{0, 0, 0};
  const auto visit_segment = [&](const checkpoint::Segment& segment) -> Status {
    const StoredTensor& tensor =
        *checkpoint::FindTensor(shards[segment.shard], locator_.KindOf(slot));
    const uint64_t element_bytes = DtypeBytes(tensor.dtype);
    for (uint64_t done = 0; done < segment.count;) {
      const uint64_t at = (segment.source + done) * element_bytes;
      const Extent next = UnitAt(tensor, block_bytes(), unit_bytes_, at);
      if (next.file != extent.file || next.offset != extent.offset || extent.bytes == 0) {
        extent = next;
        HYBRIDOPT_TRY(begin_unit({extent, &tensor, id, segment.shard, at / block_bytes()}));
      }
      const uint64_t into = tensor.offset + at - extent.offset;
      const uint64_t count = std::min(segment.count - done, (extent.bytes - into) / element_bytes);
      HYBRIDOPT_TRY(visit({id, slot, segment.destination + done, count, into, tensor.dtype}));
      done += count;
    }
    return {};
  };
  return checkpoint::ForEachSegment(sources_[id].shards, table_.param(id).shard, visit_segment);
}

// Lists the units that will be read, in order, and the blocks that they touch.
Status Loader::ListUnits() {
  uint64_t largest = 1;
  for (const Source& source : sources_)
    if (source.stored != nullptr)
      for (const StoredShard& shard : source.stored->shards)
        for (const StoredTensor& tensor : shard.tensors) largest = std::max(largest, tensor.bytes);
  unit_bytes_ = std::min({kUnitBytesMax, block_bytes(), checkpoint::RoundUpToDirect(largest)});
  HYBRIDOPT_TRY(ForEachUnit(
      [&](const Unit& unit) {
        units_.push_back(unit.extent);
        bytes_total_ += unit.extent.bytes;
        if (touched_.empty() || touched_.back().tensor != unit.tensor ||
            touched_.back().block != unit.block)
          touched_.push_back(unit);
        return Status();
      },
      [](const Piece&) { return Status(); }));
  const auto key = [](const Unit& unit) {
    return std::tuple(unit.tensor->file, unit.tensor->offset, unit.block);
  };
  std::sort(touched_.begin(), touched_.end(),
            [&](const Unit& a, const Unit& b) { return key(a) < key(b); });
  touched_.erase(std::unique(touched_.begin(), touched_.end(),
                             [&](const Unit& a, const Unit& b) { return key(a) == key(b); }),
                 touched_.end());
  return {};
}

Status Loader::TakeMemory() {
  blocks_ = static_cast<uint32_t>(std::clamp<uint64_t>(units_.size(), 1, request_.io_depth));
  const uint64_t reading_bytes = blocks_ * checkpoint::BlockReader::BlockBytes(unit_bytes_);
  const uint64_t staging_bytes = context_.device().unified() ? 0 : kStagingBytes;
  HYBRIDOPT_ASSIGN(memory_, PinnedRoom::TakeAnyway(context_, reading_bytes + staging_bytes));
  staging_ = memory_.data() + reading_bytes;
  files_.emplace(*reader_);
  HYBRIDOPT_ASSIGN(stream_, CheckpointStream::Create(context_, "a load"));
  return {};
}

Status Loader::Verify() {
  HYBRIDOPT_TRY(ListUnits());
  HYBRIDOPT_TRY(TakeMemory());
  if ((request_.flags & OFFLOAD_LOAD_NO_VERIFY) != 0) return {};
  std::vector<Extent> extents;
  for (const Unit& touched : touched_) {
    const uint64_t begin = touched.block * block_bytes();
    for (uint64_t at = begin; at < BlockEnd(touched);) {
      extents.push_back(UnitAt(*touched.tensor, block_bytes(), unit_bytes_, at));
      at += extents.back().bytes;
      bytes_total_ += extents.back().bytes;
    }
  }
  checkpoint::BlockReader reader(Opening(), extents, memory_.data(), blocks_, unit_bytes_);
  HYBRIDOPT_TRY(reader.Start());
  checkpoint::BlockHasher hasher(block_bytes());
  verified_.emplace(unit_bytes_);
  auto extent = extents.begin();
  for (const Unit& touched : touched_) {
    const uint64_t bytes = BlockEnd(touched) - touched.block * block_bytes();
    const bool one_unit = extent->bytes == bytes;
    uint64_t hash = 0;
    hasher.Reset(bytes);
    for (uint64_t left = bytes; left > 0; left -= extent++->bytes) {
      HYBRIDOPT_ASSIGN(const std::byte* data, reader.Next());
      hash = verified_->Add(extent->file, extent->offset, data, extent->bytes);
      if (!one_unit) hasher.Add(data, extent->bytes);
      Progress(extent->bytes);
    }
    if (!one_unit) hash = hasher.Take()[0];
    if (hash != touched.tensor->hashes[touched.block]) return Damaged(touched);
  }
  return {};
}

uint64_t Loader::BlockEnd(const Unit& unit) const {
  return std::min((unit.block + 1) * block_bytes(), unit.tensor->bytes);
}

Status Loader::Damaged(const Unit& unit) const {
  return Status::Error(
      OFFLOAD_CHECKPOINT_CORRUPT,
      "'%.500s': %s is not what was written; nothing was changed; load an older checkpoint "
      "(offload_checkpoint_verify lists all damage)",
      reader_->FilePath(unit.tensor->file).c_str(),
      reader_->BlockText(*sources_[unit.param].stored, *unit.tensor, unit.block).c_str());
}

Status Loader::CheckUnchanged(const Unit& unit, const std::byte* data) const {
  const Extent& extent = unit.extent;
  if (!verified_.has_value() || verified_->Match(extent.file, extent.offset, data, extent.bytes))
    return {};
  return reader_->ChangedSinceVerified(*sources_[unit.param].stored, *unit.tensor,
                                       extent.offset - unit.tensor->offset);
}

void Loader::Progress(uint64_t bytes) {
  bytes_done_ += bytes;
  if (request_.progress != nullptr)
    request_.progress(request_.progress_user, bytes_done_, bytes_total_);
}

// ------------------------------------------------------------------------------------ replacing --

Status Loader::Replace(EventHandle ready) {
  if (ready != nullptr) HYBRIDOPT_TRY(stream_.Await(ready, "the stream given to it"));
  checkpoint::BlockReader reader(Opening(), units_, memory_.data(), blocks_, unit_bytes_);
  HYBRIDOPT_TRY(reader.Start());
  const std::byte* data = nullptr;
  const auto begin_unit = [&](const Unit& unit) -> Status {
    HYBRIDOPT_TRY(AwaitCopies());  // copies that still run may read the memory of the unit before
    HYBRIDOPT_ASSIGN(data, reader.Next());
    HYBRIDOPT_TRY(CheckUnchanged(unit, data));
    Progress(unit.extent.bytes);
    return {};
  };
  HYBRIDOPT_TRY(
      ForEachUnit(begin_unit, [&](const Piece& piece) { return Put(piece, data + piece.into); }));
  if ((request_.flags & OFFLOAD_LOAD_FRESH_MOMENTS) != 0) HYBRIDOPT_TRY(FillMoments());
  return AwaitCopies();
}

Status Loader::Put(const Piece& piece, const std::byte* data) {
  has_replaced_ = true;
  const uint64_t element_bytes = DtypeBytes(piece.dtype);
  const ParamLocation& location = request_.locations[piece.param];
  for (uint64_t done = 0; done < piece.count;) {
    const StateRange range =
        locator_.At(piece.param, piece.slot, piece.element + done, piece.count - done, location);
    const std::byte* const from = data + done * element_bytes;
    if (range.params == nullptr && RowOf(range.format).stored_dtype == piece.dtype) {
      HYBRIDOPT_TRY(Copy(from, range.data, range.count * element_bytes, range.on_device));
    } else {
      HYBRIDOPT_TRY(PutEncoded(range, piece.dtype, from));
    }
    if (piece.slot == kMaster && !range.is_param)
      HYBRIDOPT_TRY(PutParams(piece.param, piece.element + done, range.count, from));
    done += range.count;
  }
  return {};
}

// Writes state whose format is not that of the file: fp32 is rounded to nearest, bf16 is widened
// exactly. Of masters beside params PutParams writes the params.
Status Loader::PutEncoded(const StateRange& range, int32_t dtype, const std::byte* from) {
  const FormatRow& format = RowOf(range.format);
  std::vector<float> wide(dtype == OFFLOAD_FP32 ? 0 : std::min(range.count, kConvertedElements));
  return PutComputed(range, [&](uint64_t first, uint64_t count, std::byte* into) {
    const std::byte* values = from + first * DtypeBytes(dtype);
    if (dtype != OFFLOAD_FP32) {
      RowOf(Format::kBf16).decode(values, nullptr, count, wide.data());
      values = reinterpret_cast<const std::byte*>(wide.data());
    }
    format.encode(values, count, into);
  });
}

// Writes state that `make` computes, some elements at a time: in place on the host, or through the
// staging buffer to the device.
Status Loader::PutComputed(const StateRange& range,
                           FunctionRef<void(uint64_t, uint64_t, std::byte*)> make) {
  const FormatRow& format = RowOf(range.format);
  for (uint64_t done = 0; done < range.count;) {
    const uint64_t now = std::min(range.count - done, kConvertedElements);
    std::byte* const destination = range.data + format.Bytes(done);
    std::byte* made = destination;
    if (range.on_device) {
      HYBRIDOPT_ASSIGN(made, Stage(format.Bytes(now)));
    }
    make(done, now, made);
    if (range.on_device) HYBRIDOPT_TRY(Copy(made, destination, format.Bytes(now), true));
    done += now;
  }
  return {};
}

Status Loader::Copy(const std::byte* from, std::byte* to, uint64_t bytes, bool to_device) {
  if (to_device) {
    copying_ = true;
    return context_.device().CopyToDevice(stream_.handle(), to, from, bytes);
  }
  if (bytes < kSharedBytes) {
    std::memcpy(to, from, bytes);
    return {};
  }
  const uint32_t workers = context_.workers().threads();
  return context_.workers().Run([&](uint32_t worker) {
    const WorkRange range = RangeOfWorker(bytes, checkpoint::kDirectAlignment, worker, workers);
    std::memcpy(to + range.begin, from + range.begin, range.end - range.begin);
  });
}

// Writes the params, each of which is its master rounded.
Status Loader::PutParams(uint32_t id, uint64_t element, uint64_t count, const std::byte* masters) {
  const int32_t dtype = table_.param(id).dtype;
  const uint64_t param_bytes = DtypeBytes(dtype);
  auto* const params = static_cast<std::byte*>(request_.locations[id].data) + element * param_bytes;
  if (!context_.device().unified() && dtype == OFFLOAD_FP32)
    return Copy(masters, params, count * param_bytes, true);
  const uint64_t room = context_.device().unified() ? count : kStagingBytes / param_bytes;
  for (uint64_t done = 0; done < count;) {
    const uint64_t now = std::min(count - done, room);
    std::byte* rounded = params;
    if (!context_.device().unified()) {
      HYBRIDOPT_ASSIGN(rounded, Stage(now * param_bytes));
    }
    HYBRIDOPT_TRY(RoundAll(masters + done * sizeof(float), now,
                           {dtype, shape_.params[id].formats().master}, rounded));
    if (!context_.device().unified())
      HYBRIDOPT_TRY(Copy(rounded, params + done * param_bytes, now * param_bytes, true));
    done += now;
  }
  return {};
}

Status Loader::RoundAll(const std::byte* values, uint64_t count, const Rounded& to,
                        std::byte* rounded) {
  if (count * sizeof(float) < kSharedBytes) {
    RoundToParams(values, count, to, rounded);
    return {};
  }
  const uint32_t workers = context_.workers().threads();
  return context_.workers().Run([&](uint32_t worker) {
    const WorkRange range = RangeOfWorker(count, kWorkGrainElements, worker, workers);
    RoundToParams(values + range.begin * sizeof(float), range.end - range.begin, to,
                  rounded + range.begin * DtypeBytes(to.dtype));
  });
}

// Gives a part of the staging buffer, aligned for any type. The buffer lives until stream_ has been
// destroyed, because a device that hangs may read it until then.
Result<std::byte*> Loader::Stage(uint64_t bytes) {
  if (staged_bytes_ + bytes > kStagingBytes) HYBRIDOPT_TRY(AwaitCopies());
  std::byte* const room = staging_ + staged_bytes_;
  staged_bytes_ += system::RoundUp(bytes, kStagedAlignment);
  return room;
}

// Fills the moments with their initial values, as commit does.
Status Loader::FillMoments() {
  has_replaced_ = true;
  for (uint32_t id = 0; id < table_.size(); ++id) {
    const Param& param = table_.param(id);
    for (StateSlot slot : {kMoment0, kMoment1}) {
      if (!locator_.Has(id, slot)) continue;
      const float value =
          slot == kMoment0 ? static_cast<float>(request_.first_moments[param.group]) : 0.0f;
      const Pattern pattern = PatternOf(shape_.params[id].format[slot], value);
      for (uint64_t first = 0; first < param.count;) {
        const StateRange range =
            locator_.At(id, slot, first, param.count - first, request_.locations[id]);
        if (!range.on_device) {
          FillArray(range.data, range.count, pattern);
        } else {
          copying_ = true;
          HYBRIDOPT_TRY(context_.device().Fill(stream_.handle(), range.data, range.count, pattern));
        }
        first += range.count;
      }
    }
  }
  return {};
}

// Waits for the queued copies. The memory that they read may then be written again.
Status Loader::AwaitCopies() {
  staged_bytes_ = 0;
  if (!copying_) return {};
  copying_ = false;
  return stream_.AwaitCopies("state going up");
}

void Loader::SetCounts(StepCounts& step_counts) const {
  const bool fresh = (request_.flags & OFFLOAD_LOAD_FRESH_MOMENTS) != 0 &&
                     (request_.flags & OFFLOAD_LOAD_KEEP_STEPS) == 0;
  step_counts.set_applied(fresh ? 0 : reader_->manifest().step);
  for (uint32_t id = 0; id < table_.size(); ++id) {
    const Param& param = table_.param(id);
    if (param.count == 0 && param.shard.partial()) continue;  // other ranks step it
    step_counts.set(id, fresh ? 0 : StoredCount(id));
  }
}

uint64_t Loader::StoredCount(uint32_t id) const {
  const Source& source = sources_[id];
  uint64_t count = 0;
  if (source.stored == nullptr) return count;
  const std::vector<StoredShard>& shards = source.stored->shards;
  if (table_.param(id).count == 0) {
    for (const StoredShard& shard : shards) count = std::max(count, shard.step_count);
    return count;
  }
  (void)checkpoint::ForEachSegment(source.shards, table_.param(id).shard,
                                   [&](const checkpoint::Segment& segment) {
                                     count = shards[segment.shard].step_count;
                                     return Status::Error(OFFLOAD_INTERNAL, "the first tells");
                                   });
  return count;
}

}  // namespace hybridopt
