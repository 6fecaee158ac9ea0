#include "checkpoint/format/format.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <unordered_map>

#include "base/check.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/format/reshard.h"
#include "kernels/algorithms.h"
#include "kernels/dtypes.h"

namespace hybridopt::checkpoint {
namespace {

// Finds a row by its name. Rows have a value and a name.
template <typename Row, size_t kCount>
const char* RowName(const Row (&rows)[kCount], int32_t value) {
  for (const Row& row : rows)
    if (row.value == value) return row.name;
  return nullptr;
}

template <typename Row, size_t kCount>
bool Find(const Row (&rows)[kCount], std::string_view name, int32_t* value) {
  for (const Row& row : rows) {
    if (name != row.name) continue;
    *value = row.value;
    return true;
  }
  return false;
}

constexpr char kHeadVersion[] = "1";  // of the heads, which are the same in all versions

// The arrays of each file, in the order of the manifest.
std::vector<std::vector<StoredTensor*>> ArraysByFile(Manifest* manifest) {
  std::vector<std::vector<StoredTensor*>> arrays(manifest->files.size());
  for (StoredParam& param : manifest->params)
    for (StoredShard& shard : param.shards)
      for (StoredTensor& tensor : shard.tensors) arrays[tensor.file].push_back(&tensor);
  return arrays;
}

bool SameHyperparameters(const offload_group_t& a, const offload_group_t& b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0;  // no padding: the layout test pins every field
}

// Merges the groups of a part into those of the whole. Returns the index in the whole of each group
// of the part.
std::vector<uint32_t> MergeGroups(Manifest* whole, const std::vector<offload_group_t>& groups) {
  std::vector<uint32_t> names;
  for (const offload_group_t& group : groups) {
    const auto same =
        std::find_if(whole->groups.begin(), whole->groups.end(),
                     [&](const auto& known) { return SameHyperparameters(known, group); });
    names.push_back(static_cast<uint32_t>(same - whole->groups.begin()));
    if (same == whole->groups.end()) whole->groups.push_back(group);
  }
  return names;
}

Status Disagree(uint32_t part, const char* what) {
  return Status::Error(
      OFFLOAD_CHECKPOINT_MISMATCH,
      "part %u of the checkpoint has another %s than part 0; save all ranks of one "
      "training run, at the same step",
      part, what);
}

Status CheckSameRun(const Manifest& first, const Manifest& part, uint32_t index) {
  if (part.step != first.step) return Disagree(index, "step");
  if (part.algorithm != first.algorithm) return Disagree(index, "algorithm");
  if (part.masters_only != first.masters_only) return Disagree(index, "choice of moments");
  if (part.layout != first.layout) return Disagree(index, "state layout");
  if (part.world != first.world) return Disagree(index, "world");
  if (part.block_bytes != first.block_bytes) return Disagree(index, "block size");
  return {};
}

// Moves the params of one part over to the whole.
class ParamMerger {
 public:
  explicit ParamMerger(Manifest* whole) : whole_(whole) {}

  Status Add(StoredParam&& param, const std::vector<uint32_t>& groups, uint32_t first_file) {
    for (StoredShard& shard : param.shards) {
      shard.group = groups[shard.group];
      for (StoredTensor& tensor : shard.tensors) tensor.file += first_file;
    }
    const auto [place, is_new] = ids_.emplace(param.name, whole_->params.size());
    if (is_new) {
      whole_->params.push_back(std::move(param));
      return {};
    }
    StoredParam& known = whole_->params[place->second];
    if (known.shape != param.shape || known.dtype != param.dtype)
      return Status::Error(OFFLOAD_CHECKPOINT_MISMATCH,
                           "param \"%.256s\" has another global shape or dtype on another rank",
                           param.name.c_str());
    for (StoredShard& shard : param.shards) known.shards.push_back(std::move(shard));
    return {};
  }

 private:
  Manifest* whole_;
  std::unordered_map<std::string, size_t> ids_;
};

Status CheckNothingTwice(const StoredParam& param) {
  std::vector<const Shard*> shards;
  for (const StoredShard& stored : param.shards) shards.push_back(&stored.shard);
  const Status disjoint = CheckDisjoint(shards);
  if (disjoint.ok()) return {};
  return Status::Error(OFFLOAD_CHECKPOINT_MISMATCH,
                       "param \"%.256s\": %s; one rank saves a replica, the others set "
                       "OFFLOAD_PARAM_REPLICA",
                       param.name.c_str(), disjoint.message().c_str());
}

}  // namespace

const char* KindName(int32_t kind) { return RowName(kStoredKinds, kind); }
bool FindKind(std::string_view name, int32_t* kind) { return Find(kStoredKinds, name, kind); }

const StoredTensor* FindTensor(const StoredShard& shard, int32_t kind) {
  for (const StoredTensor& tensor : shard.tensors)
    if (tensor.kind == kind) return &tensor;
  return nullptr;
}

bool HasElements(const StoredParam& param) {
  return std::find(param.shape.begin(), param.shape.end(), 0) == param.shape.end();
}

bool FindParamDtype(std::string_view name, int32_t* dtype) {
  return FindStoredDtype(name, dtype) && IsParamDtype(*dtype);
}
bool FindAlgorithm(std::string_view name, int32_t* algorithm) {
  return Find(kAlgorithms, name, algorithm);
}

std::string ShardFileName(uint32_t rank, uint32_t world) {
  char name[64];
  std::snprintf(name, sizeof(name), "shard-%05u-of-%05u.safetensors", rank, world);
  return name;
}

std::string TensorName(const StoredParam& param, const StoredTensor& tensor) {
  return param.name + "." + KindName(tensor.kind);
}

std::vector<int64_t> StoredShape(const Shard& shard) {
  if (shard.boxes.size() == 1 && shard.range_begin == 0) {
    const auto begin = shard.boxes[0].size.begin();
    const std::vector<int64_t> shape(begin, begin + shard.dimensions);
    uint64_t count = 0;
    if (CountElements(shape, &count) && count == shard.range_count) return shape;
  }
  return {static_cast<int64_t>(shard.range_count)};
}

std::vector<Head> HeadsOf(const Manifest& manifest) {
  std::vector<Head> heads(manifest.files.size());
  for (size_t i = 0; i < heads.size(); ++i)
    heads[i].metadata = {{"hybridopt_checkpoint", kHeadVersion},
                         {"rank", std::to_string(manifest.files[i].rank)},
                         {"step", std::to_string(manifest.step)},
                         {"world", std::to_string(manifest.world)}};
  for (const StoredParam& param : manifest.params) {
    for (const StoredShard& shard : param.shards) {
      for (const StoredTensor& tensor : shard.tensors) {
        const uint64_t begin = tensor.offset - manifest.files[tensor.file].data_begin;
        heads[tensor.file].tensors.push_back({TensorName(param, tensor), tensor.dtype,
                                              StoredShape(shard.shard), begin,
                                              begin + tensor.bytes});
      }
    }
  }
  for (Head& head : heads)
    std::sort(head.tensors.begin(), head.tensors.end(),
              [](const auto& a, const auto& b) { return a.begin < b.begin; });
  return heads;
}

Result<std::vector<std::string>> LayOutFiles(Manifest* manifest) {
  auto arrays = ArraysByFile(manifest);
  for (size_t i = 0; i < arrays.size(); ++i) {
    std::stable_sort(arrays[i].begin(), arrays[i].end(), [](const auto* a, const auto* b) {
      return DtypeBytes(a->dtype) > DtypeBytes(b->dtype);
    });
    uint64_t end = 0;
    for (StoredTensor* tensor : arrays[i]) {
      tensor->offset = end;
      end += tensor->bytes;
    }
    // Until the length of the head is known, offsets count from the start of the data.
    manifest->files[i].data_begin = 0;
    manifest->files[i].bytes = end;
  }
  std::vector<std::string> heads;
  for (const Head& head : HeadsOf(*manifest)) {
    HYBRIDOPT_ASSIGN(std::string bytes, EncodeHead(head));
    heads.push_back(std::move(bytes));
  }
  for (size_t i = 0; i < arrays.size(); ++i) {
    for (StoredTensor* tensor : arrays[i]) tensor->offset += heads[i].size();
    manifest->files[i].data_begin = heads[i].size();
    manifest->files[i].bytes += heads[i].size();
    manifest->files[i].head_hash = Xxh3(heads[i]);
  }
  return heads;
}

Result<Manifest> MergeManifests(std::vector<Manifest> parts) {
  HYBRIDOPT_CHECK(!parts.empty());
  Manifest whole = parts[0];
  whole.groups.clear();
  whole.files.clear();
  whole.params.clear();
  ParamMerger merger(&whole);
  for (uint32_t i = 0; i < parts.size(); ++i) {
    Manifest& part = parts[i];
    HYBRIDOPT_TRY(CheckSameRun(whole, part, i));
    whole.version = std::max(whole.version, part.version);
    const std::vector<uint32_t> groups = MergeGroups(&whole, part.groups);
    const auto first_file = static_cast<uint32_t>(whole.files.size());
    for (StoredFile& file : part.files) whole.files.push_back(std::move(file));
    for (StoredParam& param : part.params)
      HYBRIDOPT_TRY(merger.Add(std::move(param), groups, first_file));
  }
  for (const StoredParam& param : whole.params) HYBRIDOPT_TRY(CheckNothingTwice(param));
  return whole;
}

}  // namespace hybridopt::checkpoint
