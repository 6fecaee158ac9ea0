// Machine: where and when the figures were taken, and how quiet it was.
#pragma once

#include <cstdint>
#include <string>

namespace bench {

struct Machine {
  std::string cpu;
  std::string gpu;     // where it is measured
  uint32_t cpus;       // that this process may use
  std::string driver;  // of NVIDIA; empty: there is none
  uint64_t memory_bytes;
  uint64_t memory_available_bytes;  // of the whole machine, whatever a cgroup allows
  std::string date;                 // UTC
  double huge_page_share;           // of this process's memory while the large arrays were there
  double cpus_of_others;            // CPUs kept busy by other processes during the run, on average
};

Machine DescribeMachine();

// The share of this process's anonymous memory that huge pages hold now.
double HugePageShare();

// Measures, from its construction on, how many CPUs other processes keep busy.
class Neighbours {
 public:
  Neighbours();
  double CpusBusy() const;

 private:
  double wall_;    // seconds
  double others_;  // CPU seconds
};

}  // namespace bench
