#include "checkpoints.h"

#include <unistd.h>

#include <algorithm>
#include <sstream>
#include <vector>

#include "base/utf8.h"
#include "checkpoint/format/format.h"
#include "checkpoint/paths.h"
#include "commands.h"
#include "given_paths.h"
#include "handles.h"
#include "kernels/algorithms.h"
#include "text.h"

namespace tool {
namespace {

using namespace hybridopt::checkpoint;  // NOLINT: the tool is about checkpoints

constexpr uint64_t kPathBytes = 4096;

// With `verify` the library reads all data of the checkpoint that it returns.
Result<std::string> NewestIn(const std::string& directory, bool verify) {
  const auto options = offload_init<offload_verify_options_t>();
  std::string path(kPathBytes, '\0');
  HYBRIDOPT_TRY(StatusOf(offload_checkpoint_newest(directory.c_str(), verify ? &options : nullptr,
                                                   path.data(), path.size())));
  path.resize(path.find('\0'));
  return path;
}

bool HasManifest(const std::string& directory) {
  return access((directory + "/" + kManifestFile).c_str(), F_OK) == 0;
}

// An error if the directory is a checkpoint. Called where it does not hold any.
Status CheckIsNoCheckpoint(const std::string& directory) {
  if (!HasManifest(directory)) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "DIR '%.500s' is a checkpoint, expected a directory that holds checkpoints; "
                       "give the directory above it, or see this one with 'hybridopt inspect'",
                       directory.c_str());
}

// What `hybridopt list` shows of one checkpoint.
struct Listed {
  std::string name;
  Status status;  // why the checkpoint is refused; then the fields below are empty
  uint64_t step = 0, bytes = 0, world = 0;
  const char* algorithm = "";
  bool masters_only = false;
};

// By step; those that are refused come last.
bool IsBefore(const Listed& a, const Listed& b) {
  return a.status.ok() && (!b.status.ok() || a.step < b.step);
}

Listed Look(const std::string& path) {
  const Result<Reader> reader = Reader::Open(hybridopt::system::SystemFiles(), path);
  if (!reader.ok()) return {.name = NameOf(path), .status = reader.status()};
  const Manifest& manifest = reader.value().manifest();
  return {.name = NameOf(path),
          .status = {},
          .step = manifest.step,
          .bytes = reader.value().bytes(),
          .world = manifest.world,
          .algorithm = hybridopt::AlgorithmOf(manifest.algorithm)->name,
          .masters_only = manifest.masters_only};
}

// The place of the checkpoint that offload_checkpoint_newest would return: of those with the
// highest step the last by name. If all are refused, the number of checkpoints.
size_t PlaceOfNewest(const std::vector<Listed>& listed) {
  size_t newest = listed.size();
  for (size_t i = 0; i < listed.size(); ++i)
    if (listed[i].status.ok() && (newest == listed.size() || listed[i].step >= listed[newest].step))
      newest = i;
  return newest;
}

void AddRow(const Listed& listed, bool is_newest, Table& table, Json& rows) {
  if (!listed.status.ok()) {
    table.Add({listed.name, "-", "-", "-", "-", "refused: " + listed.status.message()});
    rows.push_back({{"name", listed.name}, {"error", listed.status.message()}});
    return;
  }
  const char* const whole = listed.masters_only ? "masters only" : "whole";
  table.Add({listed.name, std::to_string(listed.step), listed.algorithm,
             std::to_string(listed.world), SizeText(listed.bytes),
             std::string(whole) + (is_newest ? ", newest" : "")});
  rows.push_back({{"name", listed.name},
                  {"step", listed.step},
                  {"algorithm", listed.algorithm},
                  {"world", listed.world},
                  {"state_bytes", listed.bytes},
                  {"masters_only", listed.masters_only},
                  {"newest", is_newest}});
}

}  // namespace

Result<Reader> OpenCheckpoint(const std::string& directory) {
  Result<Reader> reader = Reader::Open(hybridopt::system::SystemFiles(), directory);
  if (reader.ok() || HasManifest(directory)) return reader;
  HYBRIDOPT_TRY(CheckDirectory("DIR", directory));
  const Result<std::string> newest = NewestIn(directory, false);
  if (!newest.ok())
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "'%.500s' is no checkpoint, as it has no %s; give the directory of a "
                         "checkpoint, or one that holds checkpoints",
                         directory.c_str(), kManifestFile);
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "'%.500s' is no checkpoint, but holds some: the newest is '%.500s', and "
                       "hybridopt list names all",
                       directory.c_str(), newest.value().c_str());
}

Result<Report> List(const ListOptions& options) {
  HYBRIDOPT_TRY(CheckDirectory("DIR", options.directory));
  HYBRIDOPT_ASSIGN(const std::vector<std::string> paths,
                   CheckpointsIn(hybridopt::system::SystemFiles(), options.directory));
  if (paths.empty()) HYBRIDOPT_TRY(CheckIsNoCheckpoint(options.directory));
  std::vector<Listed> listed;
  for (const std::string& path : paths) listed.push_back(Look(path));
  std::stable_sort(listed.begin(), listed.end(), IsBefore);
  const size_t newest = PlaceOfNewest(listed);
  using Align = Table::Align;
  Table table({{"checkpoint", Align::kLeft},
               {"step", Align::kRight},
               {"algorithm", Align::kLeft},
               {"ranks", Align::kRight},
               {"size", Align::kRight},
               {"manifest and headers", Align::kLeft}});
  Json rows = Json::array();
  for (size_t i = 0; i < listed.size(); ++i) AddRow(listed[i], i == newest, table, rows);
  std::ostringstream out;
  if (paths.empty())
    out << "no checkpoint in " << hybridopt::Printable(options.directory) << "\n";
  else
    table.Print(out);
  return Report{out.str(), {{"status", "OK"}, {"checkpoints", rows}}, {}};
}

Result<Report> Newest(const NewestOptions& options) {
  HYBRIDOPT_TRY(CheckDirectory("DIR", options.directory));
  const Result<std::string> newest = NewestIn(options.directory, options.verify);
  if (!newest.ok()) HYBRIDOPT_TRY(CheckIsNoCheckpoint(options.directory));
  if (newest.status().code() == OFFLOAD_INVALID_STATE)  // there is none
    return Report{"", {{"status", "INVALID_STATE"}}, newest.status()};
  HYBRIDOPT_ASSIGN(const std::string path, newest);
  // A script gets the path as it is. A person sees it escaped.
  const std::string shown = isatty(STDOUT_FILENO) == 1 ? hybridopt::Printable(path) : path;
  return Report{shown + "\n", {{"status", "OK"}, {"path", path}}, {}};
}

}  // namespace tool
