#include "gatherer.h"

#include <algorithm>
#include <cstring>

#include "kernels/dtypes.h"

namespace tool {

using namespace hybridopt::checkpoint;  // NOLINT: the tool is about checkpoints

namespace {

constexpr uint64_t kWindowBytes = uint64_t{2} << 20;  // elements gathered at a time
constexpr size_t kOpenFilesMax = 64;

// Where the block begins in memory, and its size: reads are rounded outward to whole units.
constexpr uint64_t kBlockBegin = kWindowBytes;
constexpr uint64_t kMemoryBytes = kBlockBegin + Gatherer::kUnitBytes + 2 * kDirectAlignment;

std::vector<const Shard*> ShardsOf(const StoredParam& param) {
  std::vector<const Shard*> shards;
  for (const StoredShard& stored : param.shards) shards.push_back(&stored.shard);
  return shards;
}

}  // namespace

Shard WholeShard(const std::vector<int64_t>& shape) {
  Shard shard{};
  shard.dimensions = static_cast<uint32_t>(shape.size());
  shard.boxes.resize(1);
  std::copy(shape.begin(), shape.end(), shard.global_shape.begin());
  std::copy(shape.begin(), shape.end(), shard.boxes[0].size.begin());
  (void)CountElements(shape, &shard.range_count);  // checked when the manifest was read
  return shard;
}

Result<Gatherer> Gatherer::Make(const Reader& reader, const ReadHashes& verified) {
  HYBRIDOPT_ASSIGN(hybridopt::Arena memory, hybridopt::Arena::Map(kMemoryBytes));
  return Gatherer(reader, verified, std::move(memory));
}

std::byte* Gatherer::block() const { return memory_.data() + kBlockBegin; }

Result<int32_t> Gatherer::Check(const StoredParam& param, int32_t kind) const {
  const std::string where = "param '" + param.name.substr(0, 256) + "', " + KindName(kind);
  int32_t dtype = OFFLOAD_FP32;
  if (!HasElements(param)) return dtype;
  for (size_t i = 0; i < param.shards.size(); ++i) {
    const StoredTensor* const tensor = FindTensor(param.shards[i], kind);
    if (tensor == nullptr)
      return Status::Error(OFFLOAD_CHECKPOINT_MISMATCH, "%s: rank %u did not store it",
                           where.c_str(), param.shards[i].rank);
    if (i > 0 && tensor->dtype != dtype)
      return Status::Error(OFFLOAD_CHECKPOINT_MISMATCH,
                           "%s: rank %u stored it as %s, rank %u as %s", where.c_str(),
                           param.shards[0].rank, hybridopt::StoredDtypeName(dtype),
                           param.shards[i].rank, hybridopt::StoredDtypeName(tensor->dtype));
    dtype = tensor->dtype;
  }
  const Status coverage = CheckCoverage(ShardsOf(param), WholeShard(param.shape));
  if (coverage.ok()) return dtype;
  return Status::Error(coverage.code(), "%s: %s", where.c_str(), coverage.message().c_str());
}

Status Gatherer::Read(const StoredParam& param, int32_t kind, const Shard& wanted,
                      FunctionRef<Status(const std::byte*, uint64_t)> take) {
  if (wanted.range_count == 0) return {};
  const std::vector<const Shard*> stored = ShardsOf(param);
  const uint64_t element_bytes = hybridopt::DtypeBytes(FindTensor(param.shards[0], kind)->dtype);
  const uint64_t window_elements = kWindowBytes / element_bytes;
  std::vector<Segment> segments;
  Shard part = wanted;
  for (uint64_t at = 0; at < wanted.range_count; at += part.range_count) {
    part.range_begin = wanted.range_begin + at;
    part.range_count = std::min(window_elements, wanted.range_count - at);
    segments.clear();
    HYBRIDOPT_TRY(ForEachSegment(stored, part, [&](const Segment& segment) -> Status {
      segments.push_back(segment);
      return {};
    }));
    std::sort(segments.begin(), segments.end(), [](const Segment& a, const Segment& b) {
      return a.shard != b.shard ? a.shard < b.shard : a.source < b.source;
    });
    for (auto begin = segments.begin(); begin != segments.end();) {
      const auto end = std::find_if(begin, segments.end(),
                                    [&](const Segment& s) { return s.shard != begin->shard; });
      HYBRIDOPT_TRY(
          CopySegments(param, *FindTensor(param.shards[begin->shard], kind), {begin, end}));
      begin = end;
    }
    HYBRIDOPT_TRY(take(window(), part.range_count * element_bytes));
  }
  return {};
}

// Copies from one stored array into the window. The segments are sorted by their position in the
// array.
Status Gatherer::CopySegments(const StoredParam& param, const StoredTensor& tensor,
                              std::span<const Segment> segments) {
  const uint64_t element_bytes = hybridopt::DtypeBytes(tensor.dtype);
  uint64_t have_begin = 0, have_end = 0;  // the range of the array that the block holds
  const std::byte* have = nullptr;
  for (const Segment& segment : segments) {
    const uint64_t bytes = segment.count * element_bytes;
    for (uint64_t done = 0; done < bytes;) {
      const uint64_t from = segment.source * element_bytes + done;
      if (from < have_begin || from >= have_end) {
        have_begin = from / kUnitBytes * kUnitBytes;
        have_end = std::min(have_begin + kUnitBytes, tensor.bytes);
        HYBRIDOPT_ASSIGN(have, ReadUnit(param, tensor, have_begin, have_end));
      }
      const uint64_t now = std::min(bytes - done, have_end - from);
      std::memcpy(window() + segment.destination * element_bytes + done, have + (from - have_begin),
                  now);
      done += now;
    }
  }
  return {};
}

// Reads the bytes of an array from `begin` to `end` into the block.
Result<const std::byte*> Gatherer::ReadUnit(const StoredParam& param, const StoredTensor& tensor,
                                            uint64_t begin, uint64_t end) {
  HYBRIDOPT_ASSIGN(File* const file, FileOf(tensor.file));
  const uint64_t offset = tensor.offset + begin;
  const uint64_t aligned = offset / kDirectAlignment * kDirectAlignment;
  HYBRIDOPT_ASSIGN(const uint64_t read,
                   file->Read(block(), RoundUpToDirect(tensor.offset + end) - aligned, aligned));
  const std::byte* const data = block() + (offset - aligned);
  if (aligned + read < tensor.offset + end ||
      !verified_->Match(tensor.file, offset, data, end - begin))
    return reader_->ChangedSinceVerified(param, tensor, begin);
  return data;
}

Result<File*> Gatherer::FileOf(uint32_t file) {
  const auto found = files_.find(file);
  if (found != files_.end()) return &found->second;
  if (files_.size() == kOpenFilesMax) files_.clear();
  HYBRIDOPT_ASSIGN(File opened, reader_->OpenFile(file));
  return &files_.emplace(file, std::move(opened)).first->second;
}

}  // namespace tool
