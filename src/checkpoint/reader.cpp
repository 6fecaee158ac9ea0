#include "checkpoint/reader.h"

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>

#include "base/check.h"
#include "checkpoint/block_reader.h"
#include "checkpoint/format/hash.h"
#include "memory/arena.h"

namespace hybridopt::checkpoint {
namespace {

Status AtPath(const std::string& path, const Status& status) {
  return Status::Error(status.code(), "'%.500s': %s", path.c_str(), status.message().c_str());
}

Status CorruptAt(const std::string& path, const char* text) {
  return AtPath(path, Status::Error(OFFLOAD_CHECKPOINT_CORRUPT, "%s", text));
}

// Whether the failure concerns only this checkpoint, so that another one may be good.
bool ConcernsThisCheckpoint(const Status& status) {
  return status.code() == OFFLOAD_IO_FAILED || status.code() == OFFLOAD_CHECKPOINT_CORRUPT ||
         status.code() == OFFLOAD_UNSUPPORTED;
}

// One array of a file, and the param and the shard that it belongs to.
struct Array {
  const StoredParam* param;
  const StoredShard* shard;
  const StoredTensor* tensor;
};

// The arrays of each file, in the order of their bytes.
std::vector<std::vector<Array>> ArraysByFile(const Manifest& manifest) {
  std::vector<std::vector<Array>> arrays(manifest.files.size());
  for (const StoredParam& param : manifest.params)
    for (const StoredShard& shard : param.shards)
      for (const StoredTensor& tensor : shard.tensors)
        arrays[tensor.file].push_back({&param, &shard, &tensor});
  for (auto& list : arrays)
    std::sort(list.begin(), list.end(),
              [](const Array& a, const Array& b) { return a.tensor->offset < b.tensor->offset; });
  return arrays;
}

// Maps a buffer without huge pages, so that a small buffer takes little memory.
Result<Arena> MapBuffer(uint64_t bytes) {
  PageWish wish;
  wish.huge_pages = false;
  return Arena::Map(RoundUpToDirect(bytes), wish);
}

// Larger manifests are checked piece by piece before memory for the whole text is taken.
constexpr uint64_t kManifestPieceBytes = uint64_t{1} << 20;

// Checks the hash at the end of a manifest against its text. If they differ, the size of the file
// may be wrong too.
Status CheckLargeManifest(File& file, uint64_t bytes) {
  HYBRIDOPT_ASSIGN(Arena memory, MapBuffer(kManifestPieceBytes));
  const auto* const text = reinterpret_cast<const char*>(memory.data());
  const auto read = [&](uint64_t offset, uint64_t wanted) -> Status {
    HYBRIDOPT_ASSIGN(const uint64_t got, file.Read(memory.data(), RoundUpToDirect(wanted), offset));
    // The file is shorter than before.
    return got >= wanted ? Status() : CheckManifestTail("", std::nullopt);
  };
  const uint64_t tail_begin = bytes - kManifestTailBytes;
  const uint64_t aligned = tail_begin / kDirectAlignment * kDirectAlignment;
  HYBRIDOPT_TRY(read(aligned, bytes - aligned));
  const std::string tail(text + (tail_begin - aligned), kManifestTailBytes);
  HYBRIDOPT_TRY(CheckManifestTail(tail, std::nullopt));
  BlockHasher hasher(tail_begin);
  hasher.Reset(tail_begin);
  for (uint64_t at = 0; at < tail_begin; at += kManifestPieceBytes) {
    const uint64_t piece = std::min(kManifestPieceBytes, tail_begin - at);
    HYBRIDOPT_TRY(read(at, piece));
    hasher.Add(text, piece);
  }
  return CheckManifestTail(tail, hasher.Take()[0]);
}

Result<std::string> ReadManifest(system::Files& files, const std::string& path) {
  {
    HYBRIDOPT_ASSIGN(File file, File::Open(files, path));
    HYBRIDOPT_ASSIGN(const uint64_t bytes, file.Size());
    if (bytes > kManifestPieceBytes && bytes <= kManifestBytesMax)
      if (const Status status = CheckLargeManifest(file, bytes); !status.ok())
        return AtPath(path, status);
  }
  return ReadSmallFile(files, path, kManifestBytesMax);
}

// Compares one file with its hashes.
class FileVerifier {
 public:
  FileVerifier(const Manifest& manifest, uint32_t file, const std::vector<Array>& arrays,
               VerifyResult* result, ReadHashes* read)
      : manifest_(manifest), file_(file), arrays_(arrays), result_(result), read_(read) {
    for (const Array& array : arrays) read_bytes_ = std::max(read_bytes_, array.tensor->bytes);
    read_bytes_ = std::min(read_bytes_, kReadBytesMax);
  }

  Status Run(File& file, uint32_t blocks, FunctionRef<void(uint64_t)> progress) {
    HYBRIDOPT_ASSIGN(Arena memory, MapBuffer(blocks * BlockReader::BlockBytes(read_bytes_)));
    std::vector<Extent> extents;
    for (const Array& array : arrays_)
      for (uint64_t at = 0; at < array.tensor->bytes; at += read_bytes_)
        extents.push_back(
            {0, array.tensor->offset + at, std::min(read_bytes_, array.tensor->bytes - at)});
    const auto open = [&](uint32_t) -> Result<std::shared_ptr<File>> {
      return std::shared_ptr<File>(std::shared_ptr<void>(), &file);  // the caller closes the file
    };
    BlockReader reader(open, extents, memory.data(), blocks, read_bytes_);
    HYBRIDOPT_TRY(reader.Start());
    BlockHasher hasher(manifest_.block_bytes);
    for (const Array& array : arrays_) {
      hasher.Reset(array.tensor->bytes);
      for (uint64_t at = 0; at < array.tensor->bytes; at += read_bytes_) {
        const uint64_t bytes = std::min(read_bytes_, array.tensor->bytes - at);
        HYBRIDOPT_ASSIGN(const std::byte* data, reader.Next());
        hasher.Add(data, bytes);
        if (read_ != nullptr) read_->Add(file_, array.tensor->offset + at, data, bytes);
        result_->bytes += bytes;
        progress(result_->bytes);
      }
      Compare(array, hasher.Take());
    }
    return {};
  }

 private:
  void Compare(const Array& array, const std::vector<uint64_t>& hashes) {
    for (uint64_t block = 0; block < hashes.size(); ++block) {
      if (hashes[block] == array.tensor->hashes[block]) continue;
      result_->damaged_blocks += 1;
      if (result_->damages.size() == kDamagesMax) continue;
      const uint64_t begin = block * manifest_.block_bytes;
      const uint64_t end = std::min(begin + manifest_.block_bytes, array.tensor->bytes);
      result_->damages.push_back({array.param->name, array.tensor->kind, array.shard->rank,
                                  manifest_.files[file_].name, block, hashes.size(),
                                  array.tensor->offset + begin, array.tensor->offset + end});
    }
  }

  const Manifest& manifest_;
  const uint32_t file_;
  const std::vector<Array>& arrays_;
  VerifyResult* const result_;
  ReadHashes* const read_;  // NULL: no second pass follows
  uint64_t read_bytes_ = 0;
};

}  // namespace

Status VerifyResult::status() const {
  if (damaged_blocks == 0) return {};
  constexpr size_t kNamed = 3;
  std::string text = damaged_blocks == 1 ? "a block is damaged: "
                                         : std::to_string(damaged_blocks) + " blocks are damaged: ";
  for (size_t i = 0; i < std::min(kNamed, damages.size()); ++i) {
    const Damage& damage = damages[i];
    text += (i == 0 ? "" : "; ") + damage.param.substr(0, 128) + "." + KindName(damage.kind) +
            " of rank " + std::to_string(damage.rank) + ", block " + std::to_string(damage.block) +
            " of " + std::to_string(damage.block_count) + " (" + damage.file + ", bytes " +
            std::to_string(damage.begin) + " to " + std::to_string(damage.end) + ")";
  }
  if (damaged_blocks > kNamed) text += "; ...";
  return Status::Error(OFFLOAD_CHECKPOINT_CORRUPT, "%s", text.c_str());
}

Result<Reader> Reader::Open(system::Files& files, std::string path) {
  const std::string manifest_path = path + "/" + kManifestFile;
  const Result<std::string> text = ReadManifest(files, manifest_path);
  const auto look = [&] { return files.Look(manifest_path); };
  if (const int looked = text.ok() ? 0 : Uninterrupted(look);
      looked == -ENOENT || looked == -ENOTDIR)
    return Status::Error(OFFLOAD_IO_FAILED,
                         "could not open '%.500s', as it is not there; give the directory of a "
                         "checkpoint (offload_checkpoint_newest finds the newest in a directory)",
                         manifest_path.c_str());
  if (!text.ok()) return text.status();
  Result<Manifest> manifest = ParseManifest(text.value());
  if (!manifest.ok()) return AtPath(manifest_path, manifest.status());
  Reader reader(files, std::move(path), std::move(manifest.value()));
  const std::vector<Head> heads = HeadsOf(reader.manifest_);
  for (uint32_t file = 0; file < heads.size(); ++file)
    HYBRIDOPT_TRY(reader.CheckHead(file, heads[file]));
  return reader;
}

Status Reader::CheckHead(uint32_t index, const Head& expected) const {
  const StoredFile& stored = manifest_.files[index];
  const std::string path = FilePath(index);
  HYBRIDOPT_ASSIGN(File file, OpenFile(index));
  HYBRIDOPT_ASSIGN(const uint64_t bytes, file.Size());
  if (bytes != stored.bytes)
    return AtPath(path, Status::Error(OFFLOAD_CHECKPOINT_CORRUPT,
                                      "the file has %llu bytes, the manifest says %llu",
                                      Wide(bytes), Wide(stored.bytes)));
  HYBRIDOPT_ASSIGN(Arena memory, MapBuffer(stored.data_begin));
  HYBRIDOPT_ASSIGN(const uint64_t read, file.Read(memory.data(), memory.bytes(), 0));
  if (read < stored.data_begin) return CorruptAt(path, "the file ends inside its header");
  const std::string_view head(reinterpret_cast<const char*>(memory.data()), stored.data_begin);
  if (Xxh3(head) != stored.head_hash)
    return CorruptAt(path, "the header's hash is not the one the manifest tells: it was changed");
  const Result<Head> parsed = ParseHead(head, bytes);
  if (!parsed.ok()) return AtPath(path, parsed.status());
  if (parsed.value() == expected) return {};
  return CorruptAt(path, "the header does not describe what the manifest says of this file");
}

uint64_t Reader::bytes() const {
  uint64_t bytes = 0;
  for (const StoredFile& file : manifest_.files) bytes += file.bytes - file.data_begin;
  return bytes;
}

Result<VerifyResult> Reader::Verify(uint32_t io_depth,
                                    FunctionRef<void(uint64_t done, uint64_t total)> progress,
                                    ReadHashes* read) const {
  HYBRIDOPT_CHECK(read == nullptr || kReadBytesMax % read->unit_bytes() == 0);
  if (io_depth > kIoDepthMax)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "io_depth is %u, expected 1 to %u, or 0 for %u",
                         io_depth, kIoDepthMax, kIoDepth);
  if (io_depth == 0) io_depth = kIoDepth;
  const uint64_t total = bytes();
  const auto arrays = ArraysByFile(manifest_);
  VerifyResult result;
  progress(0, total);
  for (uint32_t file = 0; file < arrays.size(); ++file) {
    if (arrays[file].empty()) continue;
    HYBRIDOPT_ASSIGN(File opened, OpenFile(file));
    FileVerifier verifier(manifest_, file, arrays[file], &result, read);
    HYBRIDOPT_TRY(verifier.Run(opened, io_depth, [&](uint64_t done) { progress(done, total); }));
  }
  return result;
}

std::string Reader::BlockText(const StoredParam& param, const StoredTensor& tensor,
                              uint64_t block) const {
  const uint64_t begin = block * manifest_.block_bytes;
  const uint64_t end = std::min(begin + manifest_.block_bytes, tensor.bytes);
  return "block " + std::to_string(block) + " of " + param.name.substr(0, 128) + "." +
         KindName(tensor.kind) + " (bytes " + std::to_string(tensor.offset + begin) + " to " +
         std::to_string(tensor.offset + end) + ")";
}

Status Reader::ChangedSinceVerified(const StoredParam& param, const StoredTensor& tensor,
                                    uint64_t at) const {
  return Status::Error(OFFLOAD_CHECKPOINT_CORRUPT,
                       "'%.500s': %s has changed since it was verified: the file was written to "
                       "meanwhile, or the disk does not give the same bytes twice",
                       FilePath(tensor.file).c_str(),
                       BlockText(param, tensor, at / manifest_.block_bytes).c_str());
}

Result<std::vector<std::string>> CheckpointsIn(system::Files& files, const std::string& directory) {
  std::vector<std::string> names;
  const int error = Uninterrupted([&] {
    names.clear();
    return files.List(directory, &names);
  });
  if (error != 0) return IoError("list", directory, error);
  std::sort(names.begin(), names.end());
  std::vector<std::string> paths;
  for (const std::string& name : names) {
    // Names that begin with a dot are directories of unfinished saves.
    if (name[0] == '.') continue;
    const std::string path = directory + "/" + name;
    const std::string manifest_path = path + "/" + kManifestFile;
    const int looked = Uninterrupted([&] { return files.Look(manifest_path); });
    if (looked != -ENOENT && looked != -ENOTDIR) paths.push_back(path);
  }
  return paths;
}

Result<std::string> NewestCheckpoint(system::Files& files, const std::string& directory,
                                     FunctionRef<Status(const std::string& path)> check) {
  HYBRIDOPT_ASSIGN(const std::vector<std::string> paths, CheckpointsIn(files, directory));
  std::vector<std::pair<uint64_t, std::string>> candidates;  // step and path
  std::string refused;                                       // why the last candidate was refused
  for (const std::string& path : paths) {
    const Result<Reader> reader = Reader::Open(files, path);
    if (reader.ok())
      candidates.emplace_back(reader.value().manifest().step, path);
    else if (ConcernsThisCheckpoint(reader.status()))
      refused = "; the last one that was refused: " + reader.status().message();
    else
      return reader.status();
  }
  std::sort(candidates.begin(), candidates.end());
  for (; !candidates.empty(); candidates.pop_back()) {
    const std::string& path = candidates.back().second;
    const Status status = check(path);
    if (status.ok()) return path;
    if (!ConcernsThisCheckpoint(status)) return status;
    refused = "; the last one that was refused: " + AtPath(path, status).message();
  }
  return Status::Error(OFFLOAD_INVALID_STATE, "'%.500s' holds no good checkpoint%s",
                       directory.c_str(), refused.c_str());
}

}  // namespace hybridopt::checkpoint
