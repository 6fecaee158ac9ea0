#include "checkpoints.h"

#include <sstream>
#include <vector>

#include "base/utf8.h"
#include "checkpoint/paths.h"
#include "commands.h"
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

void AddRow(const std::string& path, bool is_newest, Table& table, Json& rows) {
  const std::string name = NameOf(path);
  const Result<Reader> reader = Reader::Open(hybridopt::system::SystemFiles(), path);
  if (!reader.ok()) {
    table.Add({name, "-", "-", "-", "-", "refused: " + reader.status().message()});
    rows.push_back({{"name", name}, {"error", reader.status().message()}});
    return;
  }
  const Manifest& manifest = reader.value().manifest();
  const char* const algorithm = hybridopt::AlgorithmOf(manifest.algorithm)->name;
  const char* const whole = manifest.masters_only ? "masters only" : "whole";
  table.Add({name, std::to_string(manifest.step), algorithm, std::to_string(manifest.world),
             SizeText(reader.value().bytes()), std::string(whole) + (is_newest ? ", newest" : "")});
  rows.push_back({{"name", name},
                  {"step", manifest.step},
                  {"algorithm", algorithm},
                  {"world", manifest.world},
                  {"state_bytes", reader.value().bytes()},
                  {"masters_only", manifest.masters_only},
                  {"newest", is_newest}});
}

}  // namespace

Result<Reader> OpenCheckpoint(const std::string& directory) {
  Result<Reader> reader = Reader::Open(hybridopt::system::SystemFiles(), directory);
  if (reader.ok()) return reader;
  const Result<std::string> newest = NewestIn(directory, false);
  if (!newest.ok()) return reader;
  return Status::Error(reader.status().code(),
                       "'%.500s' is no checkpoint, but holds some: the newest is '%.500s', and "
                       "hybridopt list names all",
                       directory.c_str(), newest.value().c_str());
}

Result<Report> List(const ListOptions& options) {
  HYBRIDOPT_ASSIGN(const std::vector<std::string> paths,
                   CheckpointsIn(hybridopt::system::SystemFiles(), options.directory));
  const Result<std::string> newest = NewestIn(options.directory, false);
  using Align = Table::Align;
  Table table({{"checkpoint", Align::kLeft},
               {"step", Align::kRight},
               {"algorithm", Align::kLeft},
               {"ranks", Align::kRight},
               {"size", Align::kRight},
               {"manifest and headers", Align::kLeft}});
  Json rows = Json::array();
  for (const std::string& path : paths)
    AddRow(path, newest.ok() && newest.value() == path, table, rows);
  std::ostringstream out;
  if (paths.empty())
    out << "no checkpoint in " << hybridopt::Printable(options.directory) << "\n";
  else
    table.Print(out);
  return Report{out.str(), {{"status", "OK"}, {"checkpoints", rows}}, {}};
}

Result<Report> Newest(const NewestOptions& options) {
  HYBRIDOPT_ASSIGN(const std::string path, NewestIn(options.directory, options.verify));
  return Report{hybridopt::Printable(path) + "\n", {{"status", "OK"}, {"path", path}}, {}};
}

}  // namespace tool
