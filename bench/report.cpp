#include "report.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <ostream>

namespace bench {
namespace {

template <typename... Arguments>
std::string Format(const char* format, Arguments... arguments) {
  char text[256];
  std::snprintf(text, sizeof(text), format, arguments...);
  return text;
}

// A short text of a figure; figures range from 0.01 to 10^9.
std::string Short(double value) {
  if (std::abs(value) >= 1e6) return Format("%.0f M", value * 1e-6);
  return Format("%.3f", value);
}

void PrintMachine(std::ostream& out, const Report& report) {
  const Machine& machine = report.machine;
  const std::string gpu = machine.gpu.empty() ? "" : "; " + machine.gpu;
  out << Format("%s, %u CPUs, %.0f GiB%s; %s; isa %s; %s\n", machine.cpu.c_str(), machine.cpus,
                static_cast<double>(machine.memory_bytes) / (1 << 30), gpu.c_str(),
                report.library.c_str(), report.isa.c_str(), machine.date.c_str());
  out << Format(
      "%.1f Mi elements, %u rounds; %.0f %% of the memory in huge pages; other processes kept "
      "%.1f CPUs busy\n\n",
      static_cast<double>(report.elements) / (1 << 20), report.rounds,
      machine.huge_page_share * 100, machine.cpus_of_others);
}

void PrintRow(std::ostream& out, const Row& row) {
  out << Format("%-40s %7u %9.2f %19s", row.name.c_str(), row.threads, row.seconds.median * 1e3,
                Format("%.2f .. %.2f", row.seconds.q1 * 1e3, row.seconds.q3 * 1e3).c_str());
  if (row.speed.median > 0)
    out << Format("  %6.3f %15s", row.speed.median,
                  Format("%.3f .. %.3f", row.speed.q1, row.speed.q3).c_str());
  if (row.bytes_per_param > 0) {
    const double params_per_s = static_cast<double>(row.elements) / row.seconds.median;
    out << Format(" %9.0f %7.1f", params_per_s * 1e-6, params_per_s * row.bytes_per_param * 1e-9);
  }
  out << '\n';
}

nlohmann::ordered_json ToJson(const Spread& spread) {
  return {{"q1", spread.q1}, {"median", spread.median}, {"q3", spread.q3}};
}

nlohmann::ordered_json ToJson(const Row& row) {
  nlohmann::ordered_json json = {{"name", row.name},
                                 {"threads", row.threads},
                                 {"elements", row.elements},
                                 {"seconds", ToJson(row.seconds)}};
  if (row.speed.median > 0) json["speed"] = ToJson(row.speed);
  if (row.bytes_per_param > 0) json["bytes_per_param"] = row.bytes_per_param;
  return json;
}

}  // namespace

void PrintTable(std::ostream& out, const Report& report) {
  PrintMachine(out, report);
  out << Format("%-40s %7s %9s %19s  %6s %15s %9s %7s\n", "row", "threads", "ms", "quartiles",
                "speed", "quartiles", "Mparam/s", "GB/s");
  for (const Row& row : report.rows) PrintRow(out, row);
  out << Format("\n%-44s %9s %23s  %-10s %s\n", "figure", "median", "quartiles", "unit", "goal");
  for (const Figure& figure : report.figures) {
    const std::string line =
        Format("%-44s %9s %23s  %-10s %s", figure.key.c_str(), Short(figure.value.median).c_str(),
               (Short(figure.value.q1) + " .. " + Short(figure.value.q3)).c_str(),
               figure.unit.c_str(), figure.goal.c_str());
    out << line.substr(0, line.find_last_not_of(' ') + 1) << '\n';
  }
}

void PrintJson(std::ostream& out, const Report& report) {
  const Machine& machine = report.machine;
  nlohmann::ordered_json json;
  for (const Figure& figure : report.figures) json[figure.key] = figure.value.median;
  for (const Figure& figure : report.figures)
    json["spread"][figure.key] = {figure.value.q1, figure.value.q3};
  for (const Row& row : report.rows) json["rows"].push_back(ToJson(row));
  json["elements"] = report.elements;
  json["rounds"] = report.rounds;
  json["library"] = report.library;
  json["isa"] = report.isa;
  json["machine"] = {{"cpu", machine.cpu},
                     {"cpus", machine.cpus},
                     {"memory_bytes", machine.memory_bytes},
                     {"gpu", machine.gpu},
                     {"date", machine.date},
                     {"huge_page_share", machine.huge_page_share},
                     {"cpus_of_others", machine.cpus_of_others}};
  out << json.dump(2) << '\n';
}

}  // namespace bench
