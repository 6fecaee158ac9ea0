#include <algorithm>
#include <cstdio>

#include "base/utf8.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/pending_directory.h"
#include "checkpoints.h"
#include "commands.h"
#include "gatherer.h"
#include "kernels/dtypes.h"
#include "own_folder.h"
#include "stream_file.h"
#include "text.h"

namespace tool {
namespace {

using namespace hybridopt::checkpoint;  // NOLINT: the tool is about checkpoints
using hybridopt::Printable;
using hybridopt::system::SystemFiles;

// Checks that all shards of a param agree on the values that a shard of the new world stores once.
Status CheckAlike(const StoredParam& param) {
  for (const StoredShard& shard : param.shards) {
    const StoredShard& first = param.shards[0];
    const char* const what = shard.step_count != first.step_count           ? "step counts"
                             : shard.group != first.group                   ? "groups"
                             : shard.tensors.size() != first.tensors.size() ? "kinds of state"
                                                                            : nullptr;
    if (what != nullptr)
      return Status::Error(OFFLOAD_CHECKPOINT_MISMATCH,
                           "param '%.256s': ranks %u and %u stored different %s; it cannot be "
                           "resharded",
                           param.name.c_str(), first.rank, shard.rank, what);
  }
  return {};
}

// The part of rank `rank`: equal ranges in order; if they cannot be equal, the first ones are
// longer by one element.
StoredShard PartOf(const StoredParam& param, uint32_t rank, uint32_t world) {
  StoredShard part = param.shards[0];
  part.rank = rank;
  part.shard = WholeShard(param.shape);
  const uint64_t count = part.shard.range_count;
  const uint64_t even = count / world, rest = count % world;
  part.shard.range_begin = rank * even + std::min<uint64_t>(rank, rest);
  part.shard.range_count = even + (rank < rest ? 1 : 0);
  for (StoredTensor& tensor : part.tensors) {
    tensor.file = rank;
    tensor.bytes = part.shard.range_count * hybridopt::DtypeBytes(tensor.dtype);
    tensor.hashes.clear();
  }
  return part;
}

// Makes the new manifest except for positions in files and hashes.
Result<Manifest> Plan(const Manifest& old, const Gatherer& gatherer, uint32_t world) {
  Manifest plan = old;
  plan.writer = "hybridopt reshard " HYBRIDOPT_VERSION;
  plan.world = world;
  plan.files.clear();
  for (uint32_t rank = 0; rank < world; ++rank)
    plan.files.push_back({ShardFileName(rank, world), rank, 0, 0, 0});
  for (StoredParam& param : plan.params) {
    if (param.shards.empty()) continue;
    HYBRIDOPT_TRY(CheckAlike(param));
    for (const StoredTensor& tensor : param.shards[0].tensors)
      HYBRIDOPT_TRY(gatherer.Check(param, tensor.kind).status());
    std::vector<StoredShard> parts;
    for (uint32_t rank = 0; rank < world; ++rank) {
      StoredShard part = PartOf(param, rank, world);
      // A param without elements has one shard, which holds the step count.
      if (part.shard.range_count > 0 || (rank == 0 && !HasElements(param)))
        parts.push_back(std::move(part));
    }
    param.shards = std::move(parts);
  }
  return plan;
}

class Resharder {
 public:
  Resharder(const Reader& reader, Gatherer* gatherer, Manifest* plan)
      : reader_(reader), gatherer_(gatherer), plan_(plan), bar_("resharding") {}

  // All files but the manifest.
  Status Write(const std::string& directory) {
    HYBRIDOPT_ASSIGN(const std::vector<std::string> heads, LayOutFiles(plan_));
    const std::vector<std::vector<Array>> arrays = ArraysByFile();
    for (uint32_t file = 0; file < heads.size(); ++file)
      HYBRIDOPT_TRY(WriteFile(directory, plan_->files[file], heads[file], arrays[file]));
    return {};
  }

 private:
  struct Array {
    size_t param;
    StoredShard* shard;
    StoredTensor* tensor;
  };

  // The arrays of each file, in the order of their bytes.
  std::vector<std::vector<Array>> ArraysByFile() const {
    std::vector<std::vector<Array>> arrays(plan_->files.size());
    for (size_t p = 0; p < plan_->params.size(); ++p)
      for (StoredShard& shard : plan_->params[p].shards)
        for (StoredTensor& tensor : shard.tensors)
          arrays[tensor.file].push_back({p, &shard, &tensor});
    for (auto& list : arrays)
      std::sort(list.begin(), list.end(),
                [](const Array& a, const Array& b) { return a.tensor->offset < b.tensor->offset; });
    return arrays;
  }

  Status WriteFile(const std::string& directory, const StoredFile& file, const std::string& head,
                   const std::vector<Array>& arrays) {
    HYBRIDOPT_ASSIGN(auto stream, StreamFile::Create(directory + "/" + file.name, file.bytes));
    HYBRIDOPT_TRY(stream->Append(head.data(), head.size()));
    for (const Array& array : arrays) HYBRIDOPT_TRY(Copy(array, stream.get()));
    return stream->Finish();
  }

  Status Copy(const Array& array, StreamFile* stream) {
    BlockHasher hasher(plan_->block_bytes);
    hasher.Reset(array.tensor->bytes);
    const auto take = [&](const std::byte* data, uint64_t bytes) -> Status {
      hasher.Add(data, bytes);
      done_ += bytes;
      bar_.Show(done_, reader_.bytes());
      return stream->Append(data, bytes);
    };
    HYBRIDOPT_TRY(gatherer_->Read(reader_.manifest().params[array.param], array.tensor->kind,
                                  array.shard->shard, take));
    array.tensor->hashes = hasher.Take();
    return {};
  }

  const Reader& reader_;
  Gatherer* const gatherer_;
  Manifest* const plan_;
  ProgressBar bar_;
  uint64_t done_ = 0;
};

Status WriteAll(const Reader& reader, Gatherer* gatherer, Manifest* plan,
                PendingDirectory* pending) {
  HYBRIDOPT_TRY(Resharder(reader, gatherer, plan).Write(pending->path()));
  HYBRIDOPT_ASSIGN(const std::string text, EncodeManifest(*plan));
  HYBRIDOPT_TRY(SyncDirectory(SystemFiles(), pending->path()));
  HYBRIDOPT_TRY(WriteSmallFile(SystemFiles(), pending->path() + "/" + kManifestFile, text));
  HYBRIDOPT_TRY(SyncDirectory(SystemFiles(), pending->path()));
  return pending->Publish();
}

// Replaces the library's text, which is about a save, by one that names OUT.
Status CheckOut(const std::string& out) {
  const Status status = PendingDirectory::CheckTarget(SystemFiles(), out);
  if (status.ok()) return {};
  std::string text = status.message();
  const std::string theirs = "options.path";
  if (text.compare(0, theirs.size(), theirs) == 0) text.replace(0, theirs.size(), "OUT");
  return Status::Error(status.code(), "%s", text.c_str());
}

}  // namespace

Result<Report> Reshard(const ReshardOptions& options) {
  HYBRIDOPT_TRY(CheckOut(options.out));
  HYBRIDOPT_ASSIGN(const Reader reader, OpenCheckpoint(options.directory));
  ReadHashes verified(Gatherer::kUnitBytes);
  HYBRIDOPT_ASSIGN(Gatherer gatherer, Gatherer::Make(reader, verified));
  HYBRIDOPT_ASSIGN(Manifest plan, Plan(reader.manifest(), gatherer, options.world));
  {
    ProgressBar bar("verifying");
    const auto show = [&](uint64_t done, uint64_t total) { bar.Show(done, total); };
    HYBRIDOPT_ASSIGN(const VerifyResult result, reader.Verify(kIoDepth, show, &verified));
    HYBRIDOPT_TRY(result.status());
  }
  HYBRIDOPT_ASSIGN(PendingDirectory pending, PendingDirectory::Make(SystemFiles(), options.out));
  const OwnFolder own(pending.path());
  const Status status = WriteAll(reader, &gatherer, &plan, &pending);
  if (!status.ok()) {
    pending.Remove();
    return status;
  }
  Report report;
  report.text = Printable(options.out) + ": " + SizeText(reader.bytes()) + " of state for " +
                Counted(options.world, "rank") + "\n";
  report.json = {{"status", "OK"},
                 {"path", options.out},
                 {"world", options.world},
                 {"state_bytes", reader.bytes()}};
  return report;
}

}  // namespace tool
