// Report: what the suites found. Rows are things that were timed; figures are numbers with a name
// for machines, most of them ratios of rows paired within rounds.
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
  double bytes_per_param;  // moved to and from memory; 0: no sense in a rate
  Spread seconds;
  Spread speed;  // against the row it is compared with, as times are paired; 0: none
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
