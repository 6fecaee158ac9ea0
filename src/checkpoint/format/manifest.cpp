// The manifest as text: one JSON object. Its first two keys and its last key are at fixed
// positions, so that they can be read and checked before all others.
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <functional>
#include <unordered_set>
#include <utility>

#include "base/check.h"
#include "base/utf8.h"
#include "checkpoint/format/format.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/format/json.h"
#include "kernels/algorithms.h"
#include "kernels/dtypes.h"

namespace hybridopt::checkpoint {
namespace {

constexpr std::string_view kFirst = "{\"format\":\"hybridopt-checkpoint\",\"version\":";
constexpr std::string_view kLast = ",\"xxh3\":\"";  // 16 digits and kEnd follow
constexpr std::string_view kEnd = "\"}\n";
constexpr size_t kHashDigits = 16;
static_assert(kManifestTailBytes == kLast.size() + kHashDigits + kEnd.size());

constexpr size_t kWriterBytesMax = 256;
constexpr size_t kLayoutBytesMax = 64;
constexpr size_t kProductsBytesMax = 512;
constexpr size_t kFileNameBytesMax = 255;

std::string HashText(uint64_t hash) {
  char digits[kHashDigits + 1];
  std::snprintf(digits, sizeof(digits), "%016llx", Wide(hash));
  return digits;
}

// ------------------------------------------------------------------------------------- writing --

class ManifestWriter {
 public:
  explicit ManifestWriter(const Manifest& manifest) : manifest_(manifest) {}

  std::string Write() {
    text_ = std::string(kFirst) + std::to_string(manifest_.version) + ",\n";
    Key("writer");
    AppendJsonString(&text_, manifest_.writer);
    Number(",\"step\"", manifest_.step);
    text_ += std::string(",\"algorithm\":\"") + AlgorithmOf(manifest_.algorithm)->name + "\"";
    Bool(",\"masters_only\"", manifest_.masters_only);
    text_ += ",";
    Key("layout");
    AppendJsonString(&text_, manifest_.layout);
    if (!manifest_.matrix_products.empty()) {
      text_ += ",";
      Key("matrix_products");
      AppendJsonString(&text_, manifest_.matrix_products);
    }
    Number(",\"world\"", manifest_.world);
    Number(",\"block_bytes\"", manifest_.block_bytes);
    text_ += ",\n";
    List("groups", manifest_.groups, [&](const offload_group_t& group) { Group(group); });
    text_ += ",\n";
    List("files", manifest_.files, [&](const StoredFile& file) { File(file); });
    text_ += ",\n";
    List("params", manifest_.params, [&](const StoredParam& param) { Param(param); });
    text_ += "\n";
    const uint64_t hash = Xxh3(text_);
    text_ += std::string(kLast) + HashText(hash) + std::string(kEnd);
    return std::move(text_);
  }

 private:
  void Key(const char* key) { text_ += std::string("\"") + key + "\":"; }

  void Number(const char* quoted_key, uint64_t number) {
    text_ += std::string(quoted_key) + ":" + std::to_string(number);
  }

  void Bool(const char* quoted_key, bool value) {
    text_ += std::string(quoted_key) + (value ? ":true" : ":false");
  }

  template <typename Items, typename Append>
  void Join(const Items& items, const char* between, Append&& append) {
    const char* before = "";
    for (const auto& item : items) {
      text_ += before;
      append(item);
      before = between;
    }
  }

  // An array with one line for each item.
  template <typename Items, typename Append>
  void List(const char* key, const Items& items, Append&& append) {
    Key(key);
    text_ += "[";
    Join(items, ",\n", append);
    text_ += "]";
  }

  template <typename Numbers>
  void NumberList(const Numbers& numbers) {
    text_ += "[";
    Join(numbers, ",", [&](auto number) { text_ += std::to_string(number); });
    text_ += "]";
  }

  // A list without the row of zeros that ends it: "[[1,2,3],[4,5,6]]".
  void Rows(const double (&list)[kNsListMost][3]) {
    text_ += "[";
    for (int32_t i = 0; i < RowsOf(list); ++i) {
      text_ += i == 0 ? "[" : ",[";
      Join(list[i], ",", [&](double number) { AppendJsonNumber(&text_, number); });
      text_ += "]";
    }
    text_ += "]";
  }

  void Group(const offload_group_t& group) {
    const char* before = "{";
    for (const GroupField& field : kGroupFields) {
      if (!IsInEveryManifest(field) && field.IsZero(group)) continue;
      text_ += before;
      before = ",";
      Key(field.name);
      if (field.list != nullptr)
        Rows(group.*field.list);
      else if (!field.is_flag())
        AppendJsonNumber(&text_, field.In(group));
      else
        text_ += field.In(group) != 0 ? "true" : "false";
    }
    if (group.algorithm != 0)
      text_ += std::string(",\"algorithm\":\"") + AlgorithmOf(group.algorithm)->name + "\"";
    text_ += "}";
  }

  void File(const StoredFile& file) {
    text_ += "{";
    Key("name");
    AppendJsonString(&text_, file.name);
    Number(",\"rank\"", file.rank);
    Number(",\"bytes\"", file.bytes);
    Number(",\"data_begin\"", file.data_begin);
    text_ += ",\"head_xxh3\":\"" + HashText(file.head_hash) + "\"}";
  }

  void Param(const StoredParam& param) {
    text_ += "{";
    Key("name");
    AppendJsonString(&text_, param.name);
    text_ += std::string(",\"dtype\":\"") + StoredDtypeName(param.dtype) + "\",\"shape\":";
    NumberList(param.shape);
    text_ += ",\"shards\":[";
    Join(param.shards, ",\n ", [&](const StoredShard& shard) { OneShard(shard); });
    text_ += "]}";
  }

  void OneShard(const StoredShard& stored) {
    const Shard& shard = stored.shard;
    Number("{\"rank\"", stored.rank);
    Number(",\"group\"", stored.group);
    Number(",\"step_count\"", stored.step_count);
    text_ += ",\"boxes\":[";
    Join(shard.boxes, ",", [&](const Box& box) {
      text_ += "[";
      NumberList(std::vector(box.offset.begin(), box.offset.begin() + shard.dimensions));
      text_ += ",";
      NumberList(std::vector(box.size.begin(), box.size.begin() + shard.dimensions));
      text_ += "]";
    });
    text_ += "],\"range\":[" + std::to_string(shard.range_begin) + "," +
             std::to_string(shard.range_count) + "],\"tensors\":[";
    Join(stored.tensors, ",\n  ", [&](const StoredTensor& tensor) { Tensor(tensor); });
    text_ += "]}";
  }

  void Tensor(const StoredTensor& tensor) {
    text_ += std::string("{\"kind\":\"") + KindName(tensor.kind) + "\",\"dtype\":\"" +
             StoredDtypeName(tensor.dtype) + "\"";
    Number(",\"file\"", tensor.file);
    Number(",\"offset\"", tensor.offset);
    Number(",\"bytes\"", tensor.bytes);
    text_ += ",\"xxh3\":[";
    Join(tensor.hashes, ",", [&](uint64_t hash) { text_ += "\"" + HashText(hash) + "\""; });
    text_ += "]}";
  }

  const Manifest& manifest_;
  std::string text_;
};

// ------------------------------------------------------------------------------------- reading --

using Numbers = std::vector<int64_t>;

// Boxes and range as they are in the text. They can be checked only with the shape, which may come
// later in the text.
struct ShardText {
  Numbers offsets;  // of all boxes, one after the other
  Numbers extents;
  uint32_t box_count = 0;
  bool even = true;  // every box has the same number of coordinates
  uint64_t range_begin = 0;
  uint64_t range_count = 0;
};

class ManifestReader {
 public:
  explicit ManifestReader(std::string_view text) : json_(text) {}

  Result<Manifest> Read() {
    json_.Object({
        {"format", [&] { json_.String(); }},  // checked with the first bytes
        {"version", [&] { manifest_.version = Small(kFormatVersion); }},
        {"writer", [&] { manifest_.writer = Text(kWriterBytesMax); }},
        {"step", [&] { manifest_.step = json_.Unsigned(kStepsMax); }},
        {"algorithm", [&] { Word(FindAlgorithm, "an algorithm", &manifest_.algorithm); }},
        {"masters_only", [&] { manifest_.masters_only = json_.Bool(); }},
        {"layout", [&] { manifest_.layout = Text(kLayoutBytesMax); }},
        {"matrix_products", [&] { manifest_.matrix_products = Text(kProductsBytesMax); }, true},
        {"world", [&] { manifest_.world = Small(kWorldMax); }},
        {"block_bytes", [&] { manifest_.block_bytes = json_.Unsigned(kBlockBytesMax); }},
        {"groups", [&] { json_.Array([&] { manifest_.groups.push_back(Group()); }); }},
        {"files", [&] { json_.Array([&] { manifest_.files.push_back(File()); }); }},
        {"params", [&] { json_.Array([&] { Param(); }); }},
        {"xxh3", [&] { json_.String(); }},  // checked before the parser runs
    });
    json_.End();
    if (!json_.ok()) return Corrupt("the manifest: " + json_.error());
    for (size_t i = 0; i < manifest_.params.size(); ++i) HYBRIDOPT_TRY(MakeShards(i));
    return std::move(manifest_);
  }

 private:
  std::string Text(size_t most) {
    std::string text = json_.String();
    if (text.size() > most)
      json_.Fail("a text of %llu bytes, at most %llu are allowed", Wide(text.size()), Wide(most));
    if (text.find('\0') != std::string::npos) json_.Fail("a text with a NUL character");
    return text;
  }

  uint32_t Small(uint32_t most) { return static_cast<uint32_t>(json_.Unsigned(most)); }

  template <typename Value>
  void Word(bool (*find)(std::string_view, Value*), const char* what, Value* value) {
    const std::string word = json_.String();
    if (!find(word, value))
      json_.Fail("\"%.32s\" is not %s this release knows", word.c_str(), what);
  }

  uint64_t Hash() {
    const std::string text = json_.String();
    uint64_t hash = 0;
    std::from_chars(text.data(), text.data() + text.size(), hash, 16);
    if (text != HashText(hash)) json_.Fail("a hash is not 16 small hexadecimal digits");
    return hash;
  }

  Numbers PerDimension() {
    Numbers numbers;
    json_.Array([&] {
      numbers.push_back(static_cast<int64_t>(json_.Unsigned(INT64_MAX)));
      if (numbers.size() > kMaxDimensions) json_.Fail("more than %u dimensions", kMaxDimensions);
    });
    return numbers;
  }

  double Hyperparameter() {
    const double number = json_.Number();
    if (number < 0) json_.Fail("a hyperparameter is %g, expected at least 0", number);
    return number;
  }

  void Rows(double (&list)[kNsListMost][3]) {
    int32_t row = 0;
    json_.Array([&] {
      int32_t column = 0;
      json_.Array([&] {
        const double number = json_.Number();
        if (row < kNsListMost && column < 3) list[row][column] = number;
        column += 1;
      });
      if (column != 3) json_.Fail("a row of ns_coefficients has %d numbers, expected 3", column);
      row += 1;
    });
    if (row > kNsListMost)
      json_.Fail("ns_coefficients has %d rows, expected at most %d", row, kNsListMost);
    if (row <= kNsListMost && row != RowsOf(list)) json_.Fail("a row of ns_coefficients is zeros");
  }

  offload_group_t Group() {
    offload_group_t group{};
    group.struct_size = sizeof(group);
    std::vector<std::function<void()>> reads;
    for (const GroupField& field : kGroupFields)
      reads.emplace_back([this, &group, &field] {
        if (field.list != nullptr)
          Rows(group.*field.list);
        else if (field.number != nullptr)
          group.*field.number = Hyperparameter();
        else if (!field.is_flag())
          group.*field.flag = static_cast<int32_t>(Small(static_cast<uint32_t>(field.most)));
        else
          group.*field.flag = json_.Bool();
      });
    std::vector<JsonReader::Field> fields;
    for (const GroupField& field : kGroupFields)
      fields.push_back({field.name, reads[fields.size()], !IsInEveryManifest(field)});
    const auto read_algorithm = [&] { Word(FindAlgorithm, "an algorithm", &group.algorithm); };
    fields.push_back({"algorithm", read_algorithm, true});
    json_.Object(fields);
    return group;
  }

  StoredFile File() {
    StoredFile file{};
    json_.Object({
        {"name", [&] { file.name = Text(kFileNameBytesMax); }},
        {"rank", [&] { file.rank = Small(kWorldMax); }},
        {"bytes", [&] { file.bytes = json_.Unsigned(INT64_MAX); }},
        {"data_begin", [&] { file.data_begin = json_.Unsigned(INT64_MAX); }},
        {"head_xxh3", [&] { file.head_hash = Hash(); }},
    });
    return file;
  }

  void Param() {
    StoredParam param{};
    std::vector<ShardText> texts;
    json_.Object({
        {"name", [&] { param.name = Text(kNameBytesMax); }},
        {"dtype", [&] { Word(FindParamDtype, "a dtype", &param.dtype); }},
        {"shape", [&] { param.shape = PerDimension(); }},
        {"shards",
         [&] {
           json_.Array([&] {
             texts.emplace_back();
             param.shards.push_back(OneShard(&texts.back()));
           });
         }},
    });
    manifest_.params.push_back(std::move(param));
    texts_.push_back(std::move(texts));
  }

  StoredShard OneShard(ShardText* text) {
    StoredShard stored{};
    json_.Object({
        {"rank", [&] { stored.rank = Small(kWorldMax); }},
        {"group", [&] { stored.group = Small(UINT32_MAX); }},
        {"step_count", [&] { stored.step_count = json_.Unsigned(kStepsMax); }},
        {"boxes", [&] { json_.Array([&] { OneBox(text); }); }},
        {"range", [&] { Range(text); }},
        {"tensors", [&] { json_.Array([&] { stored.tensors.push_back(Tensor()); }); }},
    });
    return stored;
  }

  void OneBox(ShardText* text) {
    Numbers lists[2];
    size_t count = 0;
    json_.Array([&] {
      if (count == 2) return json_.Fail("a box has more than offsets and extents");
      lists[count++] = PerDimension();
    });
    if (count != 2) return json_.Fail("a box is not a list of offsets and a list of extents");
    text->box_count += 1;
    text->offsets.insert(text->offsets.end(), lists[0].begin(), lists[0].end());
    text->extents.insert(text->extents.end(), lists[1].begin(), lists[1].end());
    text->even = text->even && lists[0].size() == lists[1].size() &&
                 lists[0].size() * text->box_count == text->offsets.size();
  }

  void Range(ShardText* text) {
    uint64_t* const numbers[] = {&text->range_begin, &text->range_count};
    size_t count = 0;
    json_.Array([&] {
      if (count == 2) return json_.Fail("a range has more than a begin and a count");
      *numbers[count++] = json_.Unsigned(INT64_MAX);
    });
    if (count != 2) json_.Fail("a range is not a begin and a count");
  }

  StoredTensor Tensor() {
    StoredTensor tensor{};
    json_.Object({
        {"kind", [&] { Word(FindKind, "a kind of state", &tensor.kind); }},
        {"dtype", [&] { Word(FindStoredDtype, "a dtype", &tensor.dtype); }},
        {"file", [&] { tensor.file = Small(UINT32_MAX); }},
        {"offset", [&] { tensor.offset = json_.Unsigned(INT64_MAX); }},
        {"bytes", [&] { tensor.bytes = json_.Unsigned(INT64_MAX); }},
        {"xxh3", [&] { json_.Array([&] { tensor.hashes.push_back(Hash()); }); }},
    });
    return tensor;
  }

  // Makes the shards of a param whose shape is known now.
  Status MakeShards(size_t index) {
    StoredParam& param = manifest_.params[index];
    const std::string where = "the manifest: param \"" + param.name.substr(0, 256) + "\": ";
    for (size_t i = 0; i < param.shards.size(); ++i) {
      const ShardText& text = texts_[index][i];
      const size_t dimensions = param.shape.size();
      if (!text.even || text.box_count * dimensions != text.offsets.size())
        return Corrupt(where + "a box has another number of dimensions than the shape");
      offload_shard_t source{};
      source.struct_size = sizeof(source);
      source.dimensions = static_cast<uint32_t>(dimensions);
      source.box_count = text.box_count;
      source.flags = OFFLOAD_SHARD_RANGE;
      source.global_shape = param.shape.data();
      source.box_offsets = text.offsets.data();
      source.box_extents = text.extents.data();
      source.range_begin = text.range_begin;
      source.range_count = text.range_count;
      Result<Shard> shard = ValidateShard(source, text.range_count);
      if (!shard.ok()) return Corrupt(where + shard.status().message());
      param.shards[i].shard = std::move(shard.value());
    }
    return {};
  }

  JsonReader json_;
  Manifest manifest_{};
  std::vector<std::vector<ShardText>> texts_;  // in the order of manifest_.params
};

// ------------------------------------------------------------------------------------ checking --

// Whether a name is a plain file name, which cannot lead out of the directory on any system.
bool IsFileName(std::string_view name) {
  constexpr std::string_view kLetters =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
  return !name.empty() && name[0] != '.' && name.find_first_not_of(kLetters) == name.npos;
}

Status CheckFiles(const Manifest& manifest) {
  std::unordered_set<std::string_view> names = {kManifestFile};
  for (const StoredFile& file : manifest.files) {
    const std::string where = "the manifest: file \"" + file.name + "\": ";
    if (!IsFileName(file.name))
      return Corrupt(where + "a file's name is letters, digits, '.', '_' and '-', no '.' first");
    if (!names.insert(file.name).second) return Corrupt(where + "the name stands twice");
    if (file.rank >= manifest.world)
      return Corrupt(where + "rank " + std::to_string(file.rank) + " of a world of " +
                     std::to_string(manifest.world));
    if (file.data_begin > file.bytes || file.data_begin < kHeadLengthBytes ||
        file.data_begin > kHeadBytesMax + kHeadLengthBytes)
      return Corrupt(where + "data_begin is not between its first and its last byte");
  }
  return {};
}

Status CheckTensor(const Manifest& manifest, const StoredShard& shard, const StoredTensor& tensor) {
  if (tensor.file >= manifest.files.size()) return Corrupt("a file that is not listed");
  if (manifest.files[tensor.file].rank != shard.rank) return Corrupt("a file of another rank");
  uint64_t bytes = 0;
  if (__builtin_mul_overflow(shard.shard.range_count, DtypeBytes(tensor.dtype), &bytes) ||
      bytes != tensor.bytes)
    return Corrupt("bytes is not the number of its elements times their size");
  if (tensor.hashes.size() != BlockCount(tensor.bytes, manifest.block_bytes))
    return Corrupt("xxh3 has " + std::to_string(tensor.hashes.size()) +
                   " hashes, expected one for "
                   "each block");
  return {};
}

Status CheckShard(const Manifest& manifest, bool has_elements, const StoredShard& shard) {
  if (shard.rank >= manifest.world) return Corrupt("a rank outside the world");
  if (shard.group >= manifest.groups.size()) return Corrupt("a group that is not listed");
  if (shard.shard.range_count == 0 && (has_elements || manifest.version < kVersionOfEmptyShards))
    return Corrupt("a shard without elements");
  if (shard.shard.range_count == 0 && !shard.tensors.empty())
    return Corrupt("an array without elements");
  uint32_t kinds = 0;
  for (const StoredTensor& tensor : shard.tensors) {
    if ((kinds & 1u << tensor.kind) != 0)
      return Corrupt(std::string(KindName(tensor.kind)) + " stands twice");
    kinds |= 1u << tensor.kind;
    const Status status = CheckTensor(manifest, shard, tensor);
    if (!status.ok()) return Corrupt(std::string(KindName(tensor.kind)) + ": " + status.message());
  }
  return {};
}

Status CheckParam(const Manifest& manifest, const StoredParam& param) {
  if (param.name.empty()) return Corrupt("a param without a name");
  uint64_t elements = 0;
  if (param.shape.empty() || !CountElements(param.shape, &elements))
    return Corrupt("shape has no dimension or too many elements");
  std::vector<uint32_t> ranks;
  for (const StoredShard& shard : param.shards) {
    const Status status = CheckShard(manifest, elements > 0, shard);
    if (!status.ok())
      return Corrupt("the shard of rank " + std::to_string(shard.rank) + ": " + status.message());
    ranks.push_back(shard.rank);
  }
  std::sort(ranks.begin(), ranks.end());
  if (std::adjacent_find(ranks.begin(), ranks.end()) != ranks.end())
    return Corrupt("two shards of one rank");
  return {};
}

// Checks that the arrays of every file fill it without gaps, from the start of the data to the end
// of the file.
Status CheckFilled(const Manifest& manifest) {
  struct FileRange {
    uint32_t file;
    uint64_t begin, end;
  };
  std::vector<FileRange> ranges;
  for (const StoredParam& param : manifest.params)
    for (const StoredShard& shard : param.shards)
      for (const StoredTensor& tensor : shard.tensors)
        ranges.push_back({tensor.file, tensor.offset, tensor.offset + tensor.bytes});
  std::sort(ranges.begin(), ranges.end(), [](const FileRange& a, const FileRange& b) {
    return a.file != b.file ? a.file < b.file : a.begin < b.begin;
  });
  auto range = ranges.begin();
  for (uint32_t file = 0; file < manifest.files.size(); ++file) {
    uint64_t end = manifest.files[file].data_begin;
    for (; range != ranges.end() && range->file == file; ++range) {
      if (range->begin != end)
        return Corrupt("the manifest: the arrays of file \"" + manifest.files[file].name +
                       "\" leave a hole or overlap at byte " + std::to_string(end));
      end = range->end;
    }
    if (end != manifest.files[file].bytes)
      return Corrupt("the manifest: the arrays of file \"" + manifest.files[file].name +
                     "\" end at byte " + std::to_string(end) + ", the file at " +
                     std::to_string(manifest.files[file].bytes));
  }
  return {};
}

Status CheckManifest(const Manifest& manifest) {
  if (manifest.world < 1) return Corrupt("the manifest: world is 0, expected at least 1");
  if (manifest.block_bytes < kBlockBytesMin || manifest.block_bytes % kBlockBytesMin != 0)
    return Corrupt("the manifest: block_bytes is " + std::to_string(manifest.block_bytes) +
                   ", expected a multiple of " + std::to_string(kBlockBytesMin));
  for (const offload_group_t& group : manifest.groups)
    if (group.algorithm != 0 && manifest.version < kVersionOfGroupAlgorithms)
      return Corrupt("the manifest: a group names its algorithm, which version " +
                     std::to_string(manifest.version) + " of the format does not have");
  HYBRIDOPT_TRY(CheckFiles(manifest));
  std::unordered_set<std::string_view> names;
  for (const StoredParam& param : manifest.params) {
    const std::string where = "the manifest: param \"" + param.name.substr(0, 256) + "\": ";
    if (!names.insert(param.name).second) return Corrupt(where + "the name stands twice");
    const Status status = CheckParam(manifest, param);
    if (!status.ok()) return Corrupt(where + status.message());
  }
  return CheckFilled(manifest);
}

// Checks the first bytes and the hash at the end, before the rest is parsed.
Status CheckEnds(std::string_view text) {
  if (text.size() > kManifestBytesMax)
    return Corrupt("the manifest has " + std::to_string(text.size()) + " bytes, at most " +
                   std::to_string(kManifestBytesMax) + " are allowed");
  if (text.size() < kFirst.size() + kManifestTailBytes)
    return Corrupt("the manifest has " + std::to_string(text.size()) +
                   " bytes, too few: it was cut");
  const std::string_view body = text.substr(0, text.size() - kManifestTailBytes);
  HYBRIDOPT_TRY(CheckManifestTail(text.substr(body.size()), Xxh3(body)));
  if (body.substr(0, kFirst.size()) != kFirst)
    return Corrupt("the manifest does not begin as one of hybridopt");
  uint64_t version = 0;
  const char* const digits = body.data() + kFirst.size();
  const auto [end, error] = std::from_chars(digits, body.data() + body.size(), version);
  if (error != std::errc() || version == 0) return Corrupt("the manifest tells no version");
  if (version > kFormatVersion)
    return Status::Error(OFFLOAD_UNSUPPORTED,
                         "the checkpoint has format version %llu, this release reads versions 1 to "
                         "%u; use the release that wrote it, or a later one",
                         Wide(version), kFormatVersion);
  return {};
}

}  // namespace

Status CheckManifestTail(std::string_view tail, std::optional<uint64_t> hash) {
  const bool is_tail =
      tail.size() == kManifestTailBytes && tail.starts_with(kLast) && tail.ends_with(kEnd);
  if (is_tail && (!hash.has_value() || tail.substr(kLast.size(), kHashDigits) == HashText(*hash)))
    return {};
  return Corrupt("the manifest's own hash does not match its text: it was cut or changed");
}

Result<std::string> EncodeManifest(const Manifest& manifest) {
  std::string text = ManifestWriter(manifest).Write();
  if (!IsUtf8(text))
    return Status::Error(OFFLOAD_UNSUPPORTED,
                         "a param's name is not UTF-8, which a checkpoint's files need; rename it");
  if (text.size() > kManifestBytesMax)
    return Status::Error(OFFLOAD_UNSUPPORTED,
                         "the manifest takes %llu bytes, at most %llu are allowed: too many shards",
                         Wide(text.size()), Wide(kManifestBytesMax));
  return text;
}

Result<Manifest> ParseManifest(std::string_view text) {
  HYBRIDOPT_TRY(CheckEnds(text));
  HYBRIDOPT_ASSIGN(Manifest manifest, ManifestReader(text).Read());
  HYBRIDOPT_TRY(CheckManifest(manifest));
  return manifest;
}

}  // namespace hybridopt::checkpoint
