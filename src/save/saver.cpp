#include "save/saver.h"

#include <algorithm>
#include <cstring>

#include "base/system.h"
#include "checkpoint/file_io.h"
#include "checkpoint/format/hash.h"
#include "save/optimizer_manifest.h"

namespace hybridopt {
namespace {

// The bytes that are copied and then hashed at a time: few enough to stay in the cache in between.
constexpr uint64_t kPieceBytes = uint64_t{256} << 10;
// The same for copies from the device; the saver waits for each of these copies.
constexpr uint64_t kDevicePieceBytes = uint64_t{4} << 20;

}  // namespace

Result<std::unique_ptr<Saver>> Saver::Create(Context& context, const Saved& saved,
                                             SaveRequest request, const SavePoint& point,
                                             std::span<std::byte> buffer) {
  std::unique_ptr<Saver> saver(new Saver(context, saved, std::move(request), point));
  HYBRIDOPT_TRY(saver->LayOut(saved.table, saved.shape));
  saver->FillCapture(buffer);
  return saver;
}

Saver::~Saver() { (void)Join(); }

// --------------------------------------------------------------------------------------- layout --

Status Saver::LayOut(const ParamTable& table, const StateShape& shape) {
  const bool masters_only = (request_.flags & OFFLOAD_SAVE_MASTERS_ONLY) != 0;
  manifest_ =
      NewManifest(table.algorithm(), point_.step, point_.world, masters_only, request_.groups);
  manifest_.layout = RowOf(shape.options.formats.moment0).stored_layout;
  if (shape.matrices > 0) manifest_.matrix_products = context_.device().matrix_products();
  manifest_.files.push_back(
      {checkpoint::ShardFileName(point_.rank, point_.world), point_.rank, 0, 0, 0});
  // The arrays are sorted into the order in which a step overwrites them.
  std::vector<uint32_t> ids;  // of the params in the manifest
  for (uint32_t id : shape.update_order) {
    const Param& param = table.param(id);
    if (!IsStored(param, id)) continue;
    ListShard(param, id, shape.params[id]);
    ids.push_back(id);
  }
  HYBRIDOPT_ASSIGN(std::vector<std::string> heads, checkpoint::LayOutFiles(&manifest_));
  head_ = std::move(heads[0]);
  for (size_t i = 0; i < ids.size(); ++i)
    for (checkpoint::StoredTensor& tensor : manifest_.params[i].shards[0].tensors)
      arrays_.push_back({ids[i], SlotOf(table.algorithm(ids[i]), tensor.kind), &tensor});
  std::stable_sort(arrays_.begin(), arrays_.end(), [](const Array& a, const Array& b) {
    return a.tensor->offset < b.tensor->offset;
  });
  return {};
}

// A param without elements has only a step count, which need not be stored if it is 0.
bool Saver::IsStored(const Param& param, uint32_t id) const {
  if ((param.flags & OFFLOAD_PARAM_REPLICA) != 0) return false;
  return param.count > 0 || (!param.shard.partial() && point_.step_counts[id] > 0);
}

void Saver::FillCapture(std::span<std::byte> buffer) {
  for (const Array& array : arrays_) capture_.AddArray(array.param, array.slot, Borrows(array));
  capture_.UseBuffer(buffer);
  capture_.BorrowBehind(point_.ready);
}

// Whether some element of the array is read from the caller's memory.
bool Saver::Borrows(const Array& array) const {
  const ParamLocation& location = request_.locations[array.param];
  if (array.slot != kMaster || location.params_on_host) return false;
  const uint64_t count = array.tensor->bytes / DtypeBytes(array.tensor->dtype);
  for (uint64_t first = 0; first < count;) {
    const StateRange range = locator_.At(array.param, array.slot, first, count - first, location);
    if (range.is_param || range.params != nullptr) return true;
    first += range.count;
  }
  return false;
}

void Saver::ListShard(const Param& param, uint32_t id, const ParamShape& shaped) {
  checkpoint::StoredParam stored{param.name, param.dtype, ShapeOf(param.shard), {}};
  checkpoint::StoredShard shard{point_.rank, param.group, point_.step_counts[id], param.shard, {}};
  if (param.count == 0)
    manifest_.version = std::max(manifest_.version, checkpoint::kVersionOfEmptyShards);
  for (uint32_t index = 0; index < kStateSlots; ++index) {
    const StateSlot slot{index};
    if (param.count == 0 || !locator_.Has(id, slot)) continue;
    if (slot != kMaster && (request_.flags & OFFLOAD_SAVE_MASTERS_ONLY) != 0) continue;
    const int32_t dtype = RowOf(shaped.format[slot]).stored_dtype;
    shard.tensors.push_back(
        {locator_.KindOf(id, slot), dtype, 0, 0, param.count * DtypeBytes(dtype), {}});
  }
  stored.shards.push_back(std::move(shard));
  manifest_.params.push_back(std::move(stored));
}

// --------------------------------------------------------------------------------------- thread --

void Saver::Start(std::string directory, Status failure, Owner& owner) {
  directory_ = std::move(directory);
  owner_ = &owner;
  capture_.OnBorrowedRead([this] { owner_->BorrowedRead(); });
  outcome_ = std::move(failure);
  if (outcome_.ok()) {
    Result<system::Thread> thread =
        system::Thread::Start<&Saver::RunThread>("hybridopt/save", this);
    if (thread.ok()) {
      thread_ = std::move(thread.value());
      return;
    }
    outcome_ = thread.status();
  }
  owner.Written();
}

void Saver::RunThread() {
  {
    TraceRange range(trace_, TraceRow::kSave, "save");
    range.SetBytes(manifest_.files[0].bytes);
    outcome_ = CatchExceptions("a save", [this]() -> Status {
      HYBRIDOPT_TRY(TakeMemory());
      return Write();
    });
    FreeTransfer();
    if (outcome_.ok() && point_.rank != 0)
      outcome_ = CatchExceptions("a save", [this] { return WritePart(); });
  }
  owner_->Written();
}

Status Saver::Join() {
  thread_.Join();
  return outcome_;
}

// Frees the save's own stream, event and memory, before the save reports its end.
void Saver::FreeTransfer() {
  transfer_ = Transfer();
  memory_ = PinnedRoom();
}

Status Saver::TakeMemory() {
  const uint64_t file_bytes = checkpoint::RoundUpToDirect(manifest_.files[0].bytes);
  block_bytes_ = std::min(checkpoint::kBlockBytes, file_bytes);
  blocks_ = static_cast<uint32_t>(
      std::min<uint64_t>(request_.io_depth, (file_bytes + block_bytes_ - 1) / block_bytes_));
  HYBRIDOPT_ASSIGN(memory_, PinnedRoom::TakeAnyway(context_, blocks_ * block_bytes_));
  HYBRIDOPT_ASSIGN(transfer_, Transfer::Create(context_, "a save"));
  return {};
}

// -------------------------------------------------------------------------------------- writing --

Status Saver::Write() {
  if (point_.ready != nullptr)
    HYBRIDOPT_TRY(transfer_.Await(point_.ready, "the stream given to it"));
  const checkpoint::StoredFile& stored = manifest_.files[0];
  HYBRIDOPT_ASSIGN(checkpoint::File file,
                   checkpoint::File::Create(context_.files(), directory_ + "/" + stored.name));
  HYBRIDOPT_TRY(file.Allocate(stored.bytes));
  {
    const auto wrote = [this](uint64_t bytes) { Wrote(bytes); };
    checkpoint::BlockWriter writer(file, memory_.data(), blocks_, block_bytes_, wrote);
    HYBRIDOPT_TRY(writer.Start());
    HYBRIDOPT_TRY(WriteArrays(writer));
    capture_.End();
    HYBRIDOPT_TRY(writer.Finish());
  }
  HYBRIDOPT_TRY(file.Truncate(stored.bytes));
  HYBRIDOPT_TRY(file.Sync());
  return file.Close();
}

Status Saver::WriteArrays(checkpoint::BlockWriter& writer) {
  writer_ = &writer;
  HYBRIDOPT_TRY(Append(head_.data(), head_.size()));
  for (const Array& array : arrays_) HYBRIDOPT_TRY(AppendArray(array));
  if (filled_bytes_ > 0) writer.Submit(filled_bytes_);
  return {};
}

// Makes sure that the block being filled has room; reduces *bytes to that room.
Status Saver::Room(uint64_t* bytes) {
  if (filled_bytes_ == block_bytes_) {
    writer_->Submit(filled_bytes_);
    block_ = nullptr;
    filled_bytes_ = 0;
  }
  if (block_ == nullptr) {
    HYBRIDOPT_ASSIGN(block_, writer_->Next());
  }
  *bytes = std::min(*bytes, block_bytes_ - filled_bytes_);
  return {};
}

Status Saver::Append(const void* data, uint64_t bytes) {
  for (uint64_t done = 0; done < bytes;) {
    uint64_t piece = bytes - done;
    HYBRIDOPT_TRY(Room(&piece));
    std::memcpy(block_ + filled_bytes_, static_cast<const std::byte*>(data) + done, piece);
    filled_bytes_ += piece;
    done += piece;
  }
  return {};
}

// A step may wait for what the capture has given, so that is read without a wait for the disk.
Status Saver::AppendArray(const Array& array) {
  const uint64_t element_bytes = DtypeBytes(array.tensor->dtype);
  const uint64_t count = array.tensor->bytes / element_bytes;
  checkpoint::BlockHasher hasher(manifest_.block_bytes);
  hasher.Reset(array.tensor->bytes);
  for (uint64_t first = 0; first < count;) {
    // No element is cut: arrays lie in the file at multiples of their elements.
    uint64_t bytes = std::min((count - first) * element_bytes, kDevicePieceBytes);
    HYBRIDOPT_TRY(Room(&bytes));
    const Capture::Source source =
        capture_.Take(array.param, array.slot, first, bytes / element_bytes);
    if (source.behind != nullptr)
      HYBRIDOPT_TRY(transfer_.Await(source.behind, "state that a step puts aside"));
    for (uint64_t done = 0; done < source.count;) {
      const StateRange range = RangeOf(array, source, first, done);
      HYBRIDOPT_TRY(AppendRange(range, array.tensor->dtype, hasher));
      done += range.count;
    }
    if (source.aside != nullptr)
      context_.device().DiscardHost(source.aside, RowOf(source.format).Bytes(source.count));
    capture_.Finish(array.param, array.slot, first, source.count);
    first += source.count;
  }
  array.tensor->hashes = hasher.Take();
  return {};
}

// What the capture has given from its element `done` on; its first one is element `first`.
StateRange Saver::RangeOf(const Array& array, const Capture::Source& source, uint64_t first,
                          uint64_t done) const {
  if (source.aside == nullptr)
    return locator_.At(array.param, array.slot, first + done, source.count - done,
                       request_.locations[array.param]);
  StateRange range{source.aside, source.format, source.count, false, false};
  if (RowOf(source.format).beside_param) range.params = source.params;
  return range;
}

Status Saver::AppendRange(const StateRange& range, int32_t dtype, checkpoint::BlockHasher& hasher) {
  const uint64_t element_bytes = DtypeBytes(dtype);
  StateReader reader(transfer_);
  for (uint64_t done = 0; done < range.count;) {
    const uint64_t bytes = std::min((range.count - done) * element_bytes,
                                    range.on_device ? kDevicePieceBytes : kPieceBytes);
    std::byte* const into = block_ + filled_bytes_;
    HYBRIDOPT_TRY(reader.Read(range, done, bytes / element_bytes, dtype, into));
    hasher.Add(into, bytes);
    filled_bytes_ += bytes;
    done += bytes / element_bytes;
  }
  return {};
}

void Saver::Wrote(uint64_t bytes) {
  if (request_.progress != nullptr)
    request_.progress(request_.progress_user, bytes, manifest_.files[0].bytes);
}

// Writes this rank's part of the manifest, which rank 0 reads.
Status Saver::WritePart() {
  HYBRIDOPT_ASSIGN(const std::string text, checkpoint::EncodeManifest(manifest_));
  return checkpoint::WriteSmallFile(
      context_.files(), directory_ + "/" + PartFileName(point_.rank, point_.world), text);
}

}  // namespace hybridopt
