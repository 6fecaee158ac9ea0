#include <algorithm>
#include <map>
#include <set>
#include <sstream>

#include "base/utf8.h"
#include "checkpoints.h"
#include "commands.h"
#include "kernels/algorithms.h"
#include "kernels/dtypes.h"
#include "text.h"

namespace tool {
namespace {

using namespace hybridopt::checkpoint;  // NOLINT: the tool is about checkpoints
using hybridopt::AlgorithmOf;
using hybridopt::Box;
using hybridopt::Printable;
using hybridopt::Shard;

struct KindSummary {
  std::set<std::string> dtypes;
  uint64_t shards = 0;
  uint64_t bytes = 0;
};

// The summaries by kind of state, in the order of the ABI.
std::map<int32_t, KindSummary> Summarize(const StoredParam& param) {
  std::map<int32_t, KindSummary> kinds;
  for (const StoredShard& shard : param.shards) {
    for (const StoredTensor& tensor : shard.tensors) {
      KindSummary& kind = kinds[tensor.kind];
      kind.dtypes.insert(hybridopt::StoredDtypeName(tensor.dtype));
      kind.shards += 1;
      kind.bytes += tensor.bytes;
    }
  }
  return kinds;
}

// "41", or "40 to 41" where ranks differ, "-" where nothing is stored.
std::string StepsText(const StoredParam& param) {
  if (param.shards.empty()) return "-";
  const auto [least, most] =
      std::minmax_element(param.shards.begin(), param.shards.end(),
                          [](const auto& a, const auto& b) { return a.step_count < b.step_count; });
  const std::string text = std::to_string(least->step_count);
  if (least->step_count == most->step_count) return text;
  return text + " to " + std::to_string(most->step_count);
}

// "AdamW", or "AdamW (groups of SGD)".
std::string AlgorithmsText(const Manifest& manifest) {
  std::string others;
  std::set<int32_t> told = {0, manifest.algorithm};
  for (const offload_group_t& group : manifest.groups)
    if (told.insert(group.algorithm).second)
      others += (others.empty() ? "" : ", ") + std::string(AlgorithmOf(group.algorithm)->name);
  return AlgorithmOf(manifest.algorithm)->name +
         (others.empty() ? "" : " (groups of " + others + ")");
}

std::string Joined(const std::set<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

std::string TextOf(const Reader& reader) {
  const Manifest& manifest = reader.manifest();
  std::ostringstream out;
  out << "step " << manifest.step << ", " << AlgorithmsText(manifest) << ", "
      << Printable(manifest.layout) << " state" << (manifest.masters_only ? " (masters only)" : "")
      << ", saved by " << Counted(manifest.world, "rank") << " with " << Printable(manifest.writer);
  if (!manifest.matrix_products.empty())
    out << ", matrices multiplied by " << Printable(manifest.matrix_products);
  out << "\n\n";
  using Align = Table::Align;
  Table table({{"tensor", Align::kLeft},
               {"shape", Align::kLeft},
               {"dtype", Align::kLeft},
               {"shards", Align::kRight},
               {"steps", Align::kRight},
               {"size", Align::kRight}});
  size_t tensors = 0;
  for (const StoredParam& param : manifest.params) {
    const auto kinds = Summarize(param);
    for (const auto& [kind, summary] : kinds)
      table.Add({param.name + "." + KindName(kind), ShapeText(param.shape), Joined(summary.dtypes),
                 std::to_string(summary.shards), StepsText(param), SizeText(summary.bytes)});
    if (kinds.empty())
      table.Add({param.name, ShapeText(param.shape), "-", "0", StepsText(param), SizeText(0)});
    tensors += kinds.size();
  }
  table.Print(out);
  out << "\n"
      << Counted(manifest.params.size(), "param") << ", " << Counted(tensors, "tensor") << ", "
      << Counted(manifest.files.size(), "file") << ", " << SizeText(reader.bytes())
      << " of state\n";
  return out.str();
}

Json JsonOfRows(const double (&list)[hybridopt::kNsListMost][3]) {
  Json rows = Json::array();
  for (int32_t i = 0; i < hybridopt::RowsOf(list); ++i)
    rows.push_back({list[i][0], list[i][1], list[i][2]});
  return rows;
}

Json JsonOf(const offload_group_t& group) {
  Json object = Json::object();
  if (group.algorithm != 0) object["algorithm"] = AlgorithmOf(group.algorithm)->name;
  for (const hybridopt::GroupField& field : hybridopt::kGroupFields) {
    if (!hybridopt::IsInEveryManifest(field) && field.IsZero(group)) continue;
    if (field.list != nullptr)
      object[field.name] = JsonOfRows(group.*field.list);
    else if (field.number != nullptr)
      object[field.name] = group.*field.number;
    else if (field.is_flag())
      object[field.name] = group.*field.flag != 0;
    else
      object[field.name] = group.*field.flag;
  }
  return object;
}

Json JsonOf(const Manifest& manifest, const StoredShard& stored) {
  const Shard& shard = stored.shard;
  Json boxes = Json::array(), tensors = Json::array();
  for (const Box& box : shard.boxes)
    boxes.push_back({std::vector(box.offset.begin(), box.offset.begin() + shard.dimensions),
                     std::vector(box.size.begin(), box.size.begin() + shard.dimensions)});
  for (const StoredTensor& tensor : stored.tensors)
    tensors.push_back({{"kind", KindName(tensor.kind)},
                       {"dtype", hybridopt::StoredDtypeName(tensor.dtype)},
                       {"file", manifest.files[tensor.file].name},
                       {"offset", tensor.offset},
                       {"bytes", tensor.bytes}});
  return {{"rank", stored.rank},
          {"group", stored.group},
          {"step_count", stored.step_count},
          {"boxes", boxes},
          {"range", {shard.range_begin, shard.range_count}},
          {"tensors", tensors}};
}

Json JsonOf(const Reader& reader) {
  const Manifest& manifest = reader.manifest();
  Json groups = Json::array(), files = Json::array(), params = Json::array();
  for (const offload_group_t& group : manifest.groups) groups.push_back(JsonOf(group));
  for (const StoredFile& file : manifest.files)
    files.push_back({{"name", file.name}, {"rank", file.rank}, {"bytes", file.bytes}});
  for (const StoredParam& param : manifest.params) {
    Json shards = Json::array();
    for (const StoredShard& shard : param.shards) shards.push_back(JsonOf(manifest, shard));
    params.push_back({{"name", param.name},
                      {"dtype", hybridopt::StoredDtypeName(param.dtype)},
                      {"shape", param.shape},
                      {"shards", shards}});
  }
  return {{"status", "OK"},
          {"format_version", manifest.version},
          {"writer", manifest.writer},
          {"step", manifest.step},
          {"algorithm", AlgorithmOf(manifest.algorithm)->name},
          {"masters_only", manifest.masters_only},
          {"layout", manifest.layout},
          {"matrix_products", manifest.matrix_products},
          {"world", manifest.world},
          {"state_bytes", reader.bytes()},
          {"groups", groups},
          {"files", files},
          {"params", params}};
}

}  // namespace

Result<Report> Inspect(const InspectOptions& options) {
  HYBRIDOPT_ASSIGN(const Reader reader, OpenCheckpoint(options.directory));
  return Report{TextOf(reader), JsonOf(reader), {}};
}

}  // namespace tool
