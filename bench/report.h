// Report: the results of the suites. Rows are contenders with their times. Figures are named
// numbers for programs that read the report; most are ratios of two rows, paired within rounds.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "machine.h"
#include "rounds.h"

namespace bench {

struct Row {
  std::string name;
  uint32_t threads;
  uint64_t elements;
  double bytes_per_param;  // moved to and from memory; 0: a rate would say nothing
  Spread seconds;
  Spread speed;  // relative to the row that it is compared with, from times paired within rounds
};

struct Figure {
  std::string key;
  Spread value;
  std::string unit;
  std::string goal;  // for people; empty: none
};

struct Report {
  Machine machine;
  std::string library;  // version, compiler
  std::string isa;
  uint64_t elements;
  uint32_t rounds;
  std::vector<Row> rows;
  std::vector<Figure> figures;
};

void PrintTable(std::ostream& out, const Report& report);
void PrintJson(std::ostream& out, const Report& report);

}  // namespace bench
