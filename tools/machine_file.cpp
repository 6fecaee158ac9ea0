#include "machine_file.h"

#include "given_paths.h"
#include "model.h"

namespace tool {
namespace {

constexpr uint64_t kBytesMax = uint64_t{4} << 20;
constexpr uint64_t kNumberMost = uint64_t{1} << 60;
constexpr size_t kRatesMost = 1000;
constexpr char kWayOut[] = "on that machine, 'hybridopt doctor --json > FILE' makes a new one";

// Reads members by their names, and keeps the first failure.
class MemberReader {
 public:
  explicit MemberReader(const std::string& path) : path_(path) {}

  // Returns an empty object if there is none.
  const Json& Object(const Json& parent, const char* key) {
    static const Json empty = Json::object();
    const auto found = parent.find(key);
    if (found != parent.end() && found->is_object()) return *found;
    Fail(key, "an object");
    return empty;
  }
  uint64_t Number(const Json& parent, const char* key) {
    const auto found = parent.find(key);
    if (found != parent.end() && found->is_number_unsigned() &&
        found->get<uint64_t>() <= kNumberMost)
      return found->get<uint64_t>();
    Fail(key, "a number from 0 to 2^60");
    return 0;
  }
  double Rate(const Json& parent, const char* key) {
    const auto found = parent.find(key);
    if (found != parent.end() && found->is_number() && found->get<double>() > 0 &&
        found->get<double>() < 1e18)
      return found->get<double>();
    Fail(key, "a number above 0");
    return 1;
  }
  std::string Text(const Json& parent, const char* key) {
    const auto found = parent.find(key);
    if (found != parent.end() && found->is_string()) return found->get<std::string>();
    Fail(key, "a text");
    return "";
  }
  void Fail(const char* key, const char* expected) {
    if (status_.ok())
      status_ = Status::Error(OFFLOAD_INVALID_ARGUMENT,
                              "--machine '%.500s': %s is missing or wrong, expected %s; %s",
                              path_.c_str(), key, expected, kWayOut);
  }
  const Status& status() const { return status_; }

 private:
  const std::string path_;
  Status status_;
};

}  // namespace

Result<MachineFile> MachineFile::Read(const std::string& path) {
  const Status there = CheckFile("--machine", path);
  if (!there.ok()) return Status::Error(there.code(), "%s; %s", there.message().c_str(), kWayOut);
  const Result<Json> read = ReadJson(path, kBytesMax, "what hybridopt doctor --json prints");
  if (!read.ok())
    return Status::Error(read.status().code(), "--machine: %s; %s", read.status().message().c_str(),
                         kWayOut);
  const Json& json = read.value();
  MemberReader reader(path);
  if (!json.is_object()) reader.Fail("the whole", "an object");
  HYBRIDOPT_TRY(reader.status());
  if (const uint64_t version = reader.Number(json, "doctor");
      reader.status().ok() && version != kDoctorVersion)
    return Status::Error(
        OFFLOAD_INVALID_ARGUMENT,
        "--machine '%.500s' is of version %llu, expected %u, as this release writes it; %s",
        path.c_str(), static_cast<unsigned long long>(version), kDoctorVersion, kWayOut);
  MachineFile file;
  file.date_ = reader.Text(json, "date");
  file.elements_ = reader.Number(json, "elements");
  file.host_available_bytes_ =
      reader.Number(reader.Object(json, "machine"), "memory_available_bytes");
  if (json.contains("device") && !json["device"].is_null()) {
    const Json& device = reader.Object(json, "device");
    file.has_device_ = true;
    file.is_simulated_ = reader.Text(device, "kind") == "sim";
    file.device_free_bytes_ = reader.Number(device, "memory_free_bytes");
  }
  const Json& measured = reader.Object(json, "measured");
  const auto updates = measured.find("updates");
  if (updates == measured.end() || !updates->is_array() || updates->size() > kRatesMost)
    reader.Fail("updates", "an array");
  HYBRIDOPT_TRY(reader.status());
  for (const Json& update : *updates) {
    if (!update.is_object()) reader.Fail("updates", "an array of objects");
    HYBRIDOPT_TRY(reader.status());
    file.rates_[{reader.Text(update, "layout"), reader.Text(update, "executor")}] =
        reader.Rate(update, "params_per_s");
  }
  HYBRIDOPT_TRY(reader.status());
  return file;
}

std::optional<double> MachineFile::StepSeconds(const std::string& layout, double on_host,
                                               double on_device) const {
  const auto seconds = [&](double elements, const char* executor) -> std::optional<double> {
    if (elements == 0) return 0.0;
    const auto found = rates_.find({layout, executor});
    if (found == rates_.end()) return {};
    return elements / found->second;
  };
  // Without a device, CPU threads update all state in the host's memory.
  if (!has_device_) return seconds(on_host + on_device, "host");
  const std::optional<double> host = seconds(on_host, "both");
  const std::optional<double> device = seconds(on_device, "device");
  if (!host || !device) return {};
  return *host + *device;
}

}  // namespace tool
