#include "checkpoint/format/safetensors.h"

#include <algorithm>
#include <set>

#include "base/shard.h"
#include "base/utf8.h"
#include "checkpoint/format/json.h"
#include "kernels/dtypes.h"

namespace hybridopt::checkpoint {
namespace {

constexpr std::string_view kMetadata = "__metadata__";

std::map<std::string, std::string> ParseMetadata(JsonReader& json) {
  std::map<std::string, std::string> metadata;
  json.Members([&](const std::string& key) {
    if (!metadata.emplace(key, json.String()).second)
      json.Fail("the key \"%.64s\" stands twice in %s", key.c_str(), kMetadata.data());
  });
  return metadata;
}

HeadTensor ParseTensor(JsonReader& json, std::string name) {
  HeadTensor tensor{std::move(name), OFFLOAD_FP32, {}, 0, 0};
  std::vector<uint64_t> offsets;
  json.Object({
      {"dtype",
       [&] {
         const std::string text = json.String();
         if (!FindStoredDtype(text, &tensor.dtype))
           json.Fail("dtype is \"%.16s\", known are F32, BF16, F16 and U16", text.c_str());
       }},
      {"shape",
       [&] {
         json.Array([&] {
           tensor.shape.push_back(static_cast<int64_t>(json.Unsigned(INT64_MAX)));
           if (tensor.shape.size() > kMaxDimensions)
             json.Fail("shape has more than %u dimensions", kMaxDimensions);
         });
       }},
      {"data_offsets",
       [&] {
         json.Array([&] {
           offsets.push_back(json.Unsigned());
           if (offsets.size() > 2) json.Fail("data_offsets has more than two numbers");
         });
         if (offsets.size() < 2) json.Fail("data_offsets has less than two numbers");
       }},
  });
  if (!json.ok()) return tensor;
  tensor.begin = offsets[0];
  tensor.end = offsets[1];
  uint64_t bytes = 0;
  if (!CountElements(tensor.shape, &bytes) ||
      __builtin_mul_overflow(bytes, DtypeBytes(tensor.dtype), &bytes))
    json.Fail("the shape of \"%.64s\" is too large", tensor.name.c_str());
  else if (tensor.begin > tensor.end || tensor.end - tensor.begin != bytes)
    json.Fail("data_offsets of \"%.64s\" are %llu and %llu, but its shape takes %llu bytes",
              tensor.name.c_str(), Wide(tensor.begin), Wide(tensor.end), Wide(bytes));
  return tensor;
}

// Checks that the tensors, sorted by offset, fill the data without gaps and overlaps.
Status CheckFilled(const std::vector<HeadTensor>& tensors, uint64_t data_bytes) {
  uint64_t end = 0;
  for (const HeadTensor& tensor : tensors) {
    if (tensor.begin != end)
      return Status::Error(OFFLOAD_CHECKPOINT_CORRUPT,
                           "tensor \"%.256s\" begins at byte %llu of the data, but the one before "
                           "it ends at %llu; no hole and no overlap is allowed",
                           tensor.name.c_str(), Wide(tensor.begin), Wide(end));
    end = tensor.end;
  }
  if (end != data_bytes)
    return Status::Error(OFFLOAD_CHECKPOINT_CORRUPT,
                         "the tensors end at byte %llu of the data, but the file holds %llu of it",
                         Wide(end), Wide(data_bytes));
  return {};
}

Status CheckNamesDiffer(const std::vector<HeadTensor>& tensors) {
  std::vector<std::string_view> names;
  for (const HeadTensor& tensor : tensors) names.push_back(tensor.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice == names.end()) return {};
  return Corrupt("tensor \"" + std::string(twice->substr(0, 256)) + "\" stands twice");
}

void AppendTensor(std::string* json, const HeadTensor& tensor) {
  AppendJsonString(json, tensor.name);
  *json += std::string(":{\"dtype\":\"") + StoredDtypeName(tensor.dtype) + "\",\"shape\":[";
  for (size_t d = 0; d < tensor.shape.size(); ++d)
    *json += (d == 0 ? "" : ",") + std::to_string(tensor.shape[d]);
  *json += "],\"data_offsets\":[" + std::to_string(tensor.begin) + "," +
           std::to_string(tensor.end) + "]}";
}

}  // namespace

bool FindStoredDtype(std::string_view name, int32_t* dtype) {
  for (const DtypeRow& row : kDtypeRows) {
    if (name != row.stored_name) continue;
    *dtype = row.dtype;
    return true;
  }
  return false;
}

bool CountElements(const std::vector<int64_t>& shape, uint64_t* count) {
  // If one factor is zero the product is zero, even if the others would overflow.
  const bool zero = std::find(shape.begin(), shape.end(), 0) != shape.end();
  int64_t product = zero ? 0 : 1;
  for (const int64_t extent : shape) {
    if (extent < 0) return false;
    if (!zero && __builtin_mul_overflow(product, extent, &product)) return false;
  }
  *count = static_cast<uint64_t>(product);
  return true;
}

Result<std::string> EncodeHead(const Head& head) {
  std::string json = "{";
  const auto comma = [&] {
    if (json.back() != '{') json.push_back(',');
  };
  if (!head.metadata.empty()) {
    AppendJsonString(&json, kMetadata);
    json += ":{";
    for (const auto& [key, value] : head.metadata) {
      comma();
      AppendJsonString(&json, key);
      json.push_back(':');
      AppendJsonString(&json, value);
    }
    json.push_back('}');
  }
  for (const HeadTensor& tensor : head.tensors) {
    comma();
    AppendTensor(&json, tensor);
  }
  json.push_back('}');
  json.append(-(json.size() + kHeadLengthBytes) % kDataAlignment, ' ');
  if (!IsUtf8(json))
    return Status::Error(OFFLOAD_UNSUPPORTED,
                         "a param's name is not UTF-8, which a checkpoint's files need; rename it");
  if (json.size() > kHeadBytesMax)
    return Status::Error(OFFLOAD_UNSUPPORTED,
                         "the names and shapes of one file take %llu bytes, at most %llu are "
                         "allowed; spread the params over more ranks or shorten their names",
                         Wide(json.size()), Wide(kHeadBytesMax));
  std::string bytes;
  for (uint64_t i = 0; i < kHeadLengthBytes; ++i)
    bytes.push_back(static_cast<char>(json.size() >> (8 * i) & 0xff));
  return bytes + json;
}

Result<uint64_t> BytesBeforeData(std::string_view first_bytes, uint64_t file_bytes) {
  if (first_bytes.size() < kHeadLengthBytes || file_bytes < kHeadLengthBytes)
    return Corrupt("the file has " + std::to_string(file_bytes) +
                   " bytes, too few for a safetensors file");
  uint64_t length = 0;
  for (uint64_t i = 0; i < kHeadLengthBytes; ++i)
    length |= uint64_t{static_cast<unsigned char>(first_bytes[i])} << (8 * i);
  if (length > kHeadBytesMax)
    return Corrupt("the file's header claims " + std::to_string(length) + " bytes, at most " +
                   std::to_string(kHeadBytesMax) + " are allowed");
  if (length > file_bytes - kHeadLengthBytes)
    return Corrupt("the file's header claims " + std::to_string(length) +
                   " bytes, but the file has " + std::to_string(file_bytes));
  return kHeadLengthBytes + length;
}

Result<Head> ParseHead(std::string_view bytes, uint64_t file_bytes) {
  HYBRIDOPT_ASSIGN(const uint64_t before_data, BytesBeforeData(bytes, file_bytes));
  if (bytes.size() != before_data)
    return Corrupt("the header has " + std::to_string(bytes.size()) + " bytes, but claims " +
                   std::to_string(before_data));
  const std::string_view text = bytes.substr(kHeadLengthBytes);
  if (text.empty() || text[0] != '{') return Corrupt("the header does not begin with '{'");
  Head head;
  bool has_metadata = false;
  JsonReader json(text);
  json.Members([&](std::string key) {
    if (key != kMetadata) {
      head.tensors.push_back(ParseTensor(json, std::move(key)));
    } else if (!has_metadata) {
      has_metadata = true;
      head.metadata = ParseMetadata(json);
    } else {
      json.Fail("%s stands twice", kMetadata.data());
    }
  });
  json.End();
  if (!json.ok()) return Corrupt("the header: " + json.error());
  HYBRIDOPT_TRY(CheckNamesDiffer(head.tensors));
  std::stable_sort(head.tensors.begin(), head.tensors.end(), [](const auto& a, const auto& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  HYBRIDOPT_TRY(CheckFilled(head.tensors, file_bytes - before_data));
  return head;
}

}  // namespace hybridopt::checkpoint
