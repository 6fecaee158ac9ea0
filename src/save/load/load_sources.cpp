#include "save/load/load_sources.h"

#include <algorithm>
#include <unordered_map>

#include "kernels/algorithms.h"
#include "save/optimizer_manifest.h"
#include "state_io/state_writer.h"

namespace hybridopt {
namespace {

using checkpoint::StoredShard;
using checkpoint::StoredTensor;

constexpr size_t kDifferencesTold = 5;

std::string Text(const std::vector<int64_t>& shape) {
  std::string text;
  for (int64_t extent : shape) text += (text.empty() ? "(" : ", ") + std::to_string(extent);
  return text + ")";
}

}  // namespace

bool LoadSources::Wants(uint32_t id, StateSlot slot) const {
  return locator_.Has(id, slot) && (slot == kMaster || (flags_ & OFFLOAD_LOAD_FRESH_MOMENTS) == 0);
}

void LoadSources::Differences::Add(const std::string& text) {
  count += 1;
  if (told.size() < kDifferencesTold) told.push_back(text);
}

Status LoadSources::Differences::Tell(const std::string& path, const std::string& more) const {
  if (count == 0) return {};
  std::string text;
  for (const std::string& difference : told) text += (text.empty() ? "" : "; ") + difference;
  if (count > told.size()) text += "; and " + std::to_string(count - told.size()) + " more";
  return Status::Error(OFFLOAD_CHECKPOINT_MISMATCH, "'%.300s' is of another model%s: %s",
                       path.c_str(), more.c_str(), text.c_str());
}

Status LoadSources::Open(system::Files& files, const std::string& path) {
  path_ = path;
  HYBRIDOPT_ASSIGN(reader_, checkpoint::Reader::Open(files, path));
  const checkpoint::Manifest& manifest = reader_->manifest();
  std::unordered_map<std::string_view, const checkpoint::StoredParam*> by_name;
  for (const checkpoint::StoredParam& param : manifest.params) by_name[param.name] = &param;
  sources_.resize(table_.size());
  bool knows_none = !manifest.params.empty();
  for (uint32_t id = 0; id < table_.size(); ++id) {
    const auto found = by_name.find(table_.param(id).name);
    sources_[id].stored = found == by_name.end() ? nullptr : found->second;
    knows_none = knows_none && sources_[id].stored == nullptr;
    CompareParam(id);
  }
  return differences_.Tell(path_, knows_none ? ", whose params have other names, such as '" +
                                                   manifest.params[0].name.substr(0, 128) + "'"
                                             : "");
}

void LoadSources::CompareParam(uint32_t id) {
  const Param& param = table_.param(id);
  Source& source = sources_[id];
  const std::string name = "param '" + param.name.substr(0, 128) + "' ";
  if (source.stored == nullptr) {
    if (param.count > 0) differences_.Add(name + "is missing");
    return;
  }
  const checkpoint::StoredParam& stored = *source.stored;
  if (stored.shape != ShapeOf(param.shard)) {
    differences_.Add(name + "has shape " + Text(stored.shape) + ", here " +
                     Text(ShapeOf(param.shard)));
    return;
  }
  if (stored.dtype != param.dtype)
    differences_.Add(name + "is in " + StoredDtypeName(stored.dtype) + ", here in " +
                     StoredDtypeName(param.dtype));
  for (const StoredShard& shard : stored.shards) source.shards.push_back(&shard.shard);
  if (param.count == 0) return;
  if (Status covered = checkpoint::CheckCoverage(source.shards, param.shard); !covered.ok())
    differences_.Add(name + covered.message());
  for (const StoredShard& shard : stored.shards) CompareArrays(id, shard);
  CompareCounts(id);
}

void LoadSources::CompareArrays(uint32_t id, const StoredShard& shard) {
  const std::string name = "param '" + table_.param(id).name.substr(0, 128) + "' of rank " +
                           std::to_string(shard.rank) + " ";
  const int32_t stored = reader_->manifest().AlgorithmOf(shard);
  if (stored != table_.algorithm(id) && (flags_ & OFFLOAD_LOAD_FRESH_MOMENTS) == 0) {
    differences_.Add(name + "was saved by " + AlgorithmOf(stored)->name + ", here its group is " +
                     AlgorithmOf(table_.algorithm(id))->name +
                     " (OFFLOAD_LOAD_FRESH_MOMENTS takes the weights alone)");
    return;
  }
  for (uint32_t index = 0; index < kStateSlots; ++index) {
    const StateSlot slot{index};
    if (!Wants(id, slot)) continue;
    const int32_t kind = locator_.KindOf(id, slot);
    const StoredTensor* const tensor = checkpoint::FindTensor(shard, kind);
    if (tensor == nullptr)
      differences_.Add(
          name + "has no " + checkpoint::KindName(kind) +
          (slot == kMaster ? "" : " (OFFLOAD_LOAD_FRESH_MOMENTS takes the weights alone)"));
    else if (!StateWriter::Takes(tensor->dtype, slot))
      differences_.Add(name + "has " + checkpoint::KindName(kind) + " in " +
                       StoredDtypeName(tensor->dtype) + ", expected " +
                       (slot == kMaster ? "F32" : "F32 or BF16"));
  }
  if ((flags_ & OFFLOAD_LOAD_FRESH_MOMENTS) != 0) return;
  for (const StoredTensor& tensor : shard.tensors) {
    bool kept = false;
    for (uint32_t slot = 0; slot < kStateSlots; ++slot)
      kept = kept ||
             (Wants(id, StateSlot{slot}) && locator_.KindOf(id, StateSlot{slot}) == tensor.kind);
    if (!kept)
      differences_.Add(name + "has " + checkpoint::KindName(tensor.kind) +
                       ", which is not kept here");
  }
}

// Checks that all stored shards with elements of a param have the same step count.
void LoadSources::CompareCounts(uint32_t id) {
  const checkpoint::StoredParam& stored = *sources_[id].stored;
  std::optional<uint32_t> first;
  bool told = false;
  (void)ForEachSegment(id, [&](const checkpoint::Segment& segment) {
    if (!first.has_value()) first = segment.shard;
    const uint64_t counts[] = {stored.shards[*first].step_count,
                               stored.shards[segment.shard].step_count};
    if (counts[0] == counts[1] || told) return Status();
    told = true;
    differences_.Add(
        "param '" + stored.name.substr(0, 128) + "' was stepped " + std::to_string(counts[0]) +
        " times on rank " + std::to_string(stored.shards[*first].rank) + " and " +
        std::to_string(counts[1]) + " times on rank " +
        std::to_string(stored.shards[segment.shard].rank) + ", and this shard has parts of both");
    return Status();
  });
}

uint32_t LoadSources::fingerprint() const {
  uint64_t hash = reader_->manifest().step;
  for (const checkpoint::StoredFile& file : reader_->manifest().files)
    hash = hash * 0x9e3779b97f4a7c15 + file.head_hash;
  for (const checkpoint::StoredParam& param : reader_->manifest().params)
    for (const StoredShard& shard : param.shards)
      for (const StoredTensor& tensor : shard.tensors)
        for (uint64_t block : tensor.hashes) hash = hash * 0x9e3779b97f4a7c15 + block;
  return static_cast<uint32_t>(hash >> 33);
}

std::vector<int32_t> LoadSources::Known() const {
  // Params without elements need not be registered.
  std::vector<int32_t> known;
  for (const checkpoint::StoredParam& param : reader_->manifest().params)
    known.push_back(checkpoint::HasElements(param) ? 0 : 1);
  for (const Source& source : sources_)
    if (source.stored != nullptr) known[source.stored - reader_->manifest().params.data()] = 1;
  return known;
}

Status LoadSources::CheckAllKnown(const std::vector<int32_t>& known) const {
  Differences unknown;
  for (size_t i = 0; i < known.size(); ++i)
    if (known[i] == 0)
      unknown.Add("param '" + reader_->manifest().params[i].name.substr(0, 128) +
                  "' is stored, but not registered here");
  return unknown.Tell(path_);
}

uint64_t LoadSources::StoredCount(uint32_t id) const {
  const Source& source = sources_[id];
  uint64_t count = 0;
  if (source.stored == nullptr) return count;
  const std::vector<StoredShard>& shards = source.stored->shards;
  if (table_.param(id).count == 0) {
    for (const StoredShard& shard : shards) count = std::max(count, shard.step_count);
    return count;
  }
  (void)ForEachSegment(id, [&](const checkpoint::Segment& segment) {
    count = shards[segment.shard].step_count;
    return Status::Error(OFFLOAD_INTERNAL, "the first tells");
  });
  return count;
}

}  // namespace hybridopt
