#include "model.h"

#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <set>
#include <vector>

#include "base/files.h"
#include "checkpoint/file_io.h"
#include "checkpoint/format/safetensors.h"
#include "model_shape.h"

namespace tool {
namespace {

using hybridopt::system::Files;
using hybridopt::system::SystemFiles;
using namespace hybridopt::checkpoint;  // NOLINT: of formats

constexpr char kIndex[] = "model.safetensors.index.json";
constexpr char kConfig[] = "config.json";
constexpr uint64_t kJsonBytesMax = uint64_t{64} << 20;
constexpr uint64_t kFilesMax = 65536;
constexpr uint64_t kFewestParams = 1000;  // a number below it lacks its unit

bool IsThere(const std::string& path) { return SystemFiles().Look(path) == 0; }

// A file that is open for reading.
class InputFile {
 public:
  static Result<std::unique_ptr<InputFile>> Open(const std::string& path) {
    std::unique_ptr<InputFile> file(new InputFile(path));
    file->file_ = SystemFiles().OpenFile(path, Files::Open::kRead);
    if (file->file_ < 0) return IoError("open", path, file->file_);
    file->bytes_ = SystemFiles().Size(file->file_);
    if (file->bytes_ < 0) return IoError("read", path, file->bytes_);
    return file;
  }
  ~InputFile() {
    if (file_ >= 0) (void)SystemFiles().Close(file_);
  }
  uint64_t bytes() const { return static_cast<uint64_t>(bytes_); }

  Result<std::string> Read(uint64_t bytes) {
    std::string text(bytes, '\0');
    for (uint64_t done = 0; done < bytes;) {
      const int64_t read = SystemFiles().Read(file_, text.data() + done, bytes - done, done);
      if (read == -EINTR) continue;
      if (read < 0) return IoError("read", path_, read);
      if (read == 0) text.resize(done);
      if (read == 0) break;
      done += static_cast<uint64_t>(read);
    }
    return text;
  }

 private:
  explicit InputFile(const std::string& path) : path_(path) {}

  const std::string path_;
  int file_ = -1;
  int64_t bytes_ = 0;
};

// The same failure, with the file's name at the beginning of its text.
Status InFile(const std::string& path, const Status& status) {
  if (status.ok()) return {};
  return Status::Error(status.code(), "'%.500s': %s", path.c_str(), status.message().c_str());
}

Result<uint64_t> CountSafetensors(const std::string& path) {
  HYBRIDOPT_ASSIGN(const auto file, InputFile::Open(path));
  HYBRIDOPT_ASSIGN(const std::string first, file->Read(kHeadLengthBytes));
  const Result<uint64_t> before = BytesBeforeData(first, file->bytes());
  if (!before.ok()) return InFile(path, before.status());
  HYBRIDOPT_ASSIGN(const std::string head_text, file->Read(before.value()));
  const Result<Head> head = ParseHead(head_text, file->bytes());
  if (!head.ok()) return InFile(path, head.status());
  uint64_t sum = 0;
  for (const HeadTensor& tensor : head.value().tensors) {
    uint64_t count = 0;
    (void)CountElements(tensor.shape, &count);  // checked when the head was parsed
    sum += count;
  }
  return sum;
}

std::string Beside(const std::string& path, const std::string& name) {
  const size_t slash = path.find_last_of('/');
  return slash == std::string::npos ? name : path.substr(0, slash + 1) + name;
}

Result<uint64_t> CountFiles(const std::string& folder_of, const std::set<std::string>& names) {
  uint64_t sum = 0;
  for (const std::string& name : names) {
    HYBRIDOPT_ASSIGN(const uint64_t count, CountSafetensors(Beside(folder_of, name)));
    sum += count;
  }
  return sum;
}

// An index names the file of each tensor. The files are in the folder of the index.
Result<uint64_t> CountIndex(const std::string& path) {
  HYBRIDOPT_ASSIGN(const Json index,
                   ReadJson(path, kJsonBytesMax, "an index of safetensors files"));
  const auto refuse = [&](const char* text) {
    return InFile(path, Status::Error(OFFLOAD_INVALID_ARGUMENT, "%s", text));
  };
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
    return refuse("there is no weight_map, expected an index of safetensors files");
  std::set<std::string> names;
  for (const Json& name : index["weight_map"]) {
    if (!name.is_string() || name.get_ref<const std::string&>().find('/') != std::string::npos)
      return refuse("weight_map names what is no file beside the index");
    names.insert(name.get<std::string>());
    if (names.size() > kFilesMax) return refuse("weight_map names more than 65536 files");
  }
  return CountFiles(path, names);
}

Result<uint64_t> CountConfig(const std::string& path) {
  HYBRIDOPT_ASSIGN(const Json config, ReadJson(path, kJsonBytesMax, "a model's config.json"));
  const Result<ModelShape> shape = ShapeOfConfig(config);
  if (!shape.ok()) return InFile(path, shape.status());
  const Result<uint64_t> count = CountParams(shape.value());
  if (!count.ok()) return InFile(path, count.status());
  return count.value();
}

// Counts the params of a model in a directory, from the most reliable file that it has.
Result<Model> InDirectory(const std::string& directory, const std::vector<std::string>& names) {
  const std::string path = directory.back() == '/' ? directory : directory + "/";
  std::set<std::string> files;
  for (const std::string& name : names)
    if (name.ends_with(".safetensors")) files.insert(name);
  if (IsThere(path + kIndex)) {
    HYBRIDOPT_ASSIGN(const uint64_t count, CountIndex(path + kIndex));
    return Model{count, path + kIndex};
  }
  if (!files.empty()) {
    HYBRIDOPT_ASSIGN(const uint64_t count, CountFiles(path, files));
    return Model{count, std::to_string(files.size()) + " safetensors in " + path};
  }
  if (IsThere(path + kConfig)) {
    HYBRIDOPT_ASSIGN(const uint64_t count, CountConfig(path + kConfig));
    return Model{count, path + kConfig};
  }
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "'%.500s' has neither safetensors files nor a config.json; name a directory "
                       "that has, or give the number of parameters",
                       directory.c_str());
}

Result<Model> InPath(const std::string& path) {
  std::vector<std::string> names;
  if (SystemFiles().List(path, &names) == 0) return InDirectory(path, names);
  Result<uint64_t> count = path.ends_with(".safetensors")  ? CountSafetensors(path)
                           : path.ends_with(".index.json") ? CountIndex(path)
                                                           : CountConfig(path);
  if (!count.ok()) return count.status();
  return Model{count.value(), path};
}

// Whether the text can only be a path. "owner/name" may be a model too.
bool IsPath(const std::string& text) {
  return text.starts_with('/') || text.starts_with('.') || text.starts_with('~') ||
         text.ends_with('/') || text.ends_with(".json") || text.ends_with(".safetensors");
}

// Parses a number of parameters as people write it. Returns false if the text is not a number.
bool ParseCount(const std::string& text, uint64_t* elements) {
  constexpr struct {
    char letter;
    double factor;
  } kFactors[] = {{'K', 1e3}, {'M', 1e6}, {'B', 1e9}, {'T', 1e12}};
  char* end = nullptr;
  double count = std::strtod(text.c_str(), &end);
  if (end != text.c_str())
    for (const auto& [letter, factor] : kFactors)
      if (std::toupper(static_cast<unsigned char>(*end)) == letter) {
        count *= factor;
        ++end;
        break;
      }
  if (text.empty() || *end != '\0' || !(count >= 1 && count <= 1e15)) return false;
  *elements = static_cast<uint64_t>(count);
  return true;
}

}  // namespace

Result<Json> ReadJson(const std::string& path, uint64_t bytes_max, const char* expected) {
  HYBRIDOPT_ASSIGN(const auto file, InputFile::Open(path));
  const auto refuse = [&](const char* text) {
    return InFile(path, Status::Error(OFFLOAD_INVALID_ARGUMENT, "%s, expected %s", text, expected));
  };
  if (file->bytes() > bytes_max) return refuse("the file is too large");
  HYBRIDOPT_ASSIGN(const std::string text, file->Read(file->bytes()));
  constexpr bool kThrows = false;
  Json json = Json::parse(text, nullptr, kThrows);
  if (json.is_discarded()) return refuse("the file is no JSON text");
  return json;
}

Result<Model> FindModel(const std::string& text) {
  uint64_t elements = 0;
  if (ParseCount(text, &elements)) {
    if (elements >= kFewestParams) return Model{elements, ""};
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "'%.100s' is less than 1000 parameters; did you mean '%.100sB'?",
                         text.c_str(), text.c_str());
  }
  if (!text.empty() && IsThere(text)) {
    HYBRIDOPT_ASSIGN(const Model model, InPath(text));
    if (model.elements >= 1) return model;
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "'%.500s' has no parameters", text.c_str());
  }
  if (const ModelShape* const shape = FindShape(text); shape != nullptr) {
    HYBRIDOPT_ASSIGN(elements, CountParams(*shape));
    return Model{elements, text};
  }
  if (IsPath(text))
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "'%.500s' is not there, expected a config.json, safetensors or their "
                         "directory; check the path, or give the number of parameters, as 7B",
                         text.c_str());
  const std::string nearest = NearestName(text);
  const std::string hint = nearest.empty() ? "" : " (did you mean '" + nearest + "'?)";
  return Status::Error(
      OFFLOAD_INVALID_ARGUMENT,
      "'%.100s' is no model%s, expected a number of parameters, 1000 to 1e15, as 7e9, "
      "7B or 350M, a path to a config.json, to safetensors or to their directory, "
      "or one of %s",
      text.c_str(), hint.c_str(), ShapeNames().c_str());
}

}  // namespace tool
