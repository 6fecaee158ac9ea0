// Prints the tables of src/state/transitions.h and move_table.h into docs/LIFECYCLE.md, or reports
// that the file's tables differ. Usage: lifecycle_tables [--write] FILE
#include <array>
#include <cstring>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "state/transitions.h"

namespace hybridopt {
namespace {

template <typename At>
std::string Words(const Transition<At>& transition, const char* next) {
  const std::string summary = transition.summary == nullptr ? "" : transition.summary;
  switch (transition.effect) {
    case Effect::kNothing:
      return "-";
    case Effect::kRefused:
      return summary.empty() ? "**no**" : "**no**: " + summary;
    default:
      return summary.empty() ? next : summary;
  }
}

template <typename Rows, size_t kLocations>
std::string Table(const Rows& rows, const std::array<const char*, kLocations>& locations) {
  std::string text = "| call |";
  for (const char* location : locations) text += std::string(" ") + location + " |";
  text += "\n|---|";
  for (size_t i = 0; i < kLocations; ++i) text += "---|";
  text += "\n";
  for (const auto& row : rows) {
    text += std::string("| ") + row.name + " |";
    for (const auto& transition : row.by_location)
      text += " " + Words(transition, locations[static_cast<size_t>(transition.next)]) + " |";
    text += "\n";
  }
  return text;
}

// What moves wait for until a running save has read: those that leave alone what it reads, nothing.
std::string BehindASave() {
  std::string touching, others;
  const auto add = [](std::string& list, const char* call) {
    list += (list.empty() ? "" : ", ") + std::string(call);
  };
  for (const MoveRow& move : kMoves) {
    const Call call = CallOf(move.move);
    const auto* const grads = FindRow(grad_table::kRows, call);
    const auto* const states = FindRow(states_table::kRows, call);
    const char* const name = grads != nullptr    ? grads->name
                             : states != nullptr ? states->name
                                                 : FindRow(params_table::kRows, call)->name;
    add(move.touches_state ? touching : others, name);
  }
  return "| behind a running save | waits until the save has read |\n|---|---|\n"
         "| `step` | chunk by chunk, what the chunk overwrites |\n"
         "| " +
         others + " | nothing |\n| " + touching +
         ", `set_device_fraction`, `set_fractions` | everything |\n"
         "| `save`, `load` | and until the first one is complete |\n"
         "| `offload_optimizer_state`, `read_state`, `write_state` | **no** (INVALID_STATE): work "
         "is "
         "queued |\n";
}

std::vector<std::pair<std::string, std::string>> Tables() {
  return {{"params", Table(params_table::kRows, kParamsAtNames)},
          {"gradients", Table(grad_table::kRows, kGradAtNames)},
          {"states", Table(states_table::kRows, kStatesAtNames)},
          {"behind a save", BehindASave()}};
}

// The text with each table between its marks. Empty if a mark is missing.
std::string WithTables(std::string text) {
  for (const auto& [name, table] : Tables()) {
    const std::string begin_mark = "<!-- table: " + name + " -->\n";
    const size_t mark = text.find(begin_mark);
    const size_t begin = mark + begin_mark.size();
    const size_t end = mark == std::string::npos ? mark : text.find("<!-- end -->", begin);
    if (end == std::string::npos) {
      std::cerr << "no marks around the table of " << name << "\n";
      return {};
    }
    text.replace(begin, end - begin, table);
  }
  return text;
}

int Run(const char* path, bool write) {
  std::ifstream file(path);
  if (!file) {
    std::cerr << "could not read " << path << "\n";
    return 1;
  }
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::string wanted = WithTables(text);
  if (wanted.empty()) return 1;
  if (write) {
    if (std::ofstream(path) << wanted << std::flush) return 0;
    std::cerr << "could not write " << path << "\n";
    return 1;
  }
  if (wanted == text) return 0;
  std::cerr << path << " has other tables than src/state/transitions.h and move_table.h. Run\n"
            << "  build/dev/tests/lifecycle_tables --write docs/LIFECYCLE.md\n";
  return 1;
}

}  // namespace
}  // namespace hybridopt

int main(int argc, char** argv) {
  const bool write = argc == 3 && std::strcmp(argv[1], "--write") == 0;
  if (argc != 2 && !write) {
    std::cerr << "usage: lifecycle_tables [--write] FILE\n";
    return 2;
  }
  return hybridopt::Run(argv[argc - 1], write);
}
