#include <cerrno>
#include <cstring>

#include "base/utf8.h"
#include "checkpoint/paths.h"
#include "checkpoint/pending_directory.h"
#include "checkpoints.h"
#include "commands.h"
#include "gatherer.h"
#include "given_paths.h"
#include "kernels/convert.h"
#include "kernels/dtypes.h"
#include "own_folder.h"
#include "stream_file.h"
#include "text.h"

namespace tool {
namespace {

using namespace hybridopt::checkpoint;  // NOLINT: the tool is about checkpoints
using hybridopt::Printable;
using hybridopt::system::SystemFiles;

int32_t TargetDtype(const std::string& name) {
  return name == "bf16" ? OFFLOAD_BF16 : name == "fp16" ? OFFLOAD_FP16 : OFFLOAD_FP32;
}

// Converts elements, given as bytes, to the dtype of the export, as bytes.
class Converter {
 public:
  Converter(int32_t from, int32_t to) : from_(from), to_(to) {}

  const std::vector<std::byte>& Convert(const std::byte* data, uint64_t bytes) {
    const uint64_t count = bytes / hybridopt::DtypeBytes(from_);
    out_.resize(count * hybridopt::DtypeBytes(to_));
    for (uint64_t i = 0; i < count; ++i) Store(i, Load(data, i));
    return out_;
  }

 private:
  float Load(const std::byte* data, uint64_t i) const {
    if (from_ == OFFLOAD_FP32) {
      float value = 0;
      std::memcpy(&value, data + i * sizeof(value), sizeof(value));
      return value;
    }
    uint16_t bits = 0;
    std::memcpy(&bits, data + i * sizeof(bits), sizeof(bits));
    return from_ == OFFLOAD_BF16 ? hybridopt::Bf16ToFp32(bits) : hybridopt::Fp16ToFp32(bits);
  }

  void Store(uint64_t i, float value) {
    if (to_ == OFFLOAD_FP32) {
      std::memcpy(out_.data() + i * sizeof(value), &value, sizeof(value));
      return;
    }
    const uint16_t bits =
        to_ == OFFLOAD_BF16 ? hybridopt::Fp32ToBf16(value) : hybridopt::Fp32ToFp16(value);
    std::memcpy(out_.data() + i * sizeof(bits), &bits, sizeof(bits));
  }

  const int32_t from_, to_;
  std::vector<std::byte> out_;
};

bool Holds(const StoredParam& param, int32_t kind) {
  for (const StoredShard& shard : param.shards)
    if (FindTensor(shard, kind) != nullptr) return true;
  // A tensor without elements counts as having a master.
  return !HasElements(param) && kind == OFFLOAD_STATE_MASTER;
}

struct Entry {
  const StoredParam* param;
  int32_t from;
};

class Exporter {
 public:
  Exporter(const Reader& reader, Gatherer* gatherer, int32_t kind, int32_t to)
      : reader_(reader), gatherer_(gatherer), kind_(kind), to_(to) {}

  // Lists the tensors to write and makes the head of the file.
  Status Plan() {
    const Manifest& manifest = reader_.manifest();
    head_.metadata = {{"format", "pt"},
                      {"hybridopt_state", KindName(kind_)},
                      {"hybridopt_step", std::to_string(manifest.step)}};
    for (const StoredParam& param : manifest.params) {
      if (!Holds(param, kind_)) continue;
      HYBRIDOPT_ASSIGN(const int32_t from, gatherer_->Check(param, kind_));
      if (!hybridopt::IsParamDtype(from))
        return Status::Error(OFFLOAD_UNSUPPORTED,
                             "param '%.256s': %s is stored as %s, which is part of a number only",
                             param.name.c_str(), KindName(kind_), hybridopt::StoredDtypeName(from));
      uint64_t elements = 0;
      (void)CountElements(param.shape, &elements);  // checked when the manifest was read
      const uint64_t end = data_bytes_ + elements * hybridopt::DtypeBytes(to_);
      head_.tensors.push_back({param.name, to_, param.shape, data_bytes_, end});
      entries_.push_back({&param, from});
      data_bytes_ = end;
    }
    if (!entries_.empty()) return {};
    return Status::Error(
        OFFLOAD_CHECKPOINT_MISMATCH,
        "the checkpoint holds no %s of any param; 'hybridopt inspect' shows what it holds, which "
        "--what can name",
        KindName(kind_));
  }

  Status Write(const std::string& path) {
    HYBRIDOPT_ASSIGN(const std::string head, EncodeHead(head_));
    HYBRIDOPT_ASSIGN(auto stream, StreamFile::Create(path, head.size() + data_bytes_));
    HYBRIDOPT_TRY(stream->Append(head.data(), head.size()));
    ProgressBar bar("exporting");
    uint64_t done = 0;
    for (const Entry& entry : entries_) {
      Converter converter(entry.from, to_);
      const auto take = [&](const std::byte* data, uint64_t bytes) -> Status {
        const std::vector<std::byte>& converted = converter.Convert(data, bytes);
        done += converted.size();
        bar.Show(done, data_bytes_);
        return stream->Append(converted.data(), converted.size());
      };
      HYBRIDOPT_TRY(gatherer_->Read(*entry.param, kind_, WholeShard(entry.param->shape), take));
    }
    return stream->Finish();
  }

  size_t tensors() const { return entries_.size(); }
  uint64_t data_bytes() const { return data_bytes_; }

 private:
  const Reader& reader_;
  Gatherer* const gatherer_;
  const int32_t kind_;
  const int32_t to_;
  Head head_;
  std::vector<Entry> entries_;
  uint64_t data_bytes_ = 0;
};

// Does not replace an existing file, if the file system supports such a rename.
int RenameFile(const std::string& from, const std::string& out) {
  const int error = SystemFiles().RenameNoReplace(from, out);
  if (error != -ENOSYS && error != -EINVAL) return error;
  return SystemFiles().Look(out) == 0 ? -EEXIST : SystemFiles().Rename(from, out);
}

Status NameFile(const std::string& from, const std::string& out) {
  if (const int error = RenameFile(from, out); error != 0) return IoError("name", out, error);
  Status status = SyncDirectory(SystemFiles(), ParentOf(out));
  // An export that failed must leave nothing, so a file that might not survive a crash gets its old
  // name again.
  if (!status.ok()) (void)SystemFiles().Rename(out, from);
  return status;
}

// The file is written into a temporary directory, as a checkpoint is. If an export is killed, the
// next one to the same place recognises that directory by its name and removes it.
Status WriteAndName(Exporter* exporter, const std::string& out) {
  HYBRIDOPT_ASSIGN(PendingDirectory pending, PendingDirectory::Make(SystemFiles(), out));
  const OwnFolder own(pending.path());
  const std::string path = pending.path() + "/" + ShardFileName(0, 1);
  Status status = exporter->Write(path);
  if (status.ok()) status = NameFile(path, out);
  pending.Remove();
  return status;
}

}  // namespace

Result<Report> Export(const ExportOptions& options) {
  HYBRIDOPT_TRY(CheckNewFile("OUT", options.out, "choose a new name, or remove what is there"));
  int32_t kind = 0;
  if (!FindKind(options.what, &kind))
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "--what is %s, expected a kind of state",
                         options.what.c_str());
  HYBRIDOPT_ASSIGN(const Reader reader, OpenCheckpoint(options.directory));
  ReadHashes verified(Gatherer::kUnitBytes);
  HYBRIDOPT_ASSIGN(Gatherer gatherer, Gatherer::Make(reader, verified));
  Exporter exporter(reader, &gatherer, kind, TargetDtype(options.dtype));
  HYBRIDOPT_TRY(exporter.Plan());
  {
    ProgressBar bar("verifying");
    const auto show = [&](uint64_t done, uint64_t total) { bar.Show(done, total); };
    HYBRIDOPT_ASSIGN(const VerifyResult result, reader.Verify(kIoDepth, show, &verified));
    HYBRIDOPT_TRY(result.status());
  }
  HYBRIDOPT_TRY(WriteAndName(&exporter, options.out));
  Report report;
  report.text = Printable(options.out) + ": " + options.what + " of " +
                Counted(exporter.tensors(), "tensor") + " in " + options.dtype + ", " +
                SizeText(exporter.data_bytes()) + "\n";
  report.json = {
      {"status", "OK"},         {"path", options.out},           {"what", options.what},
      {"dtype", options.dtype}, {"tensors", exporter.tensors()}, {"bytes", exporter.data_bytes()}};
  return report;
}

}  // namespace tool
