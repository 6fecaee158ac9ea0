// Machine: where and when the figures were measured, and how many CPUs other programs used
// meanwhile.
#pragma once

#include <cstdint>
#include <string>

namespace bench {

struct Machine {
  std::string cpu;
  std::string gpu;     // set if a GPU is measured
  uint32_t cpus;       // that this process may use
  std::string driver;  // the NVIDIA driver; empty: there is none
  uint64_t memory_bytes;
  uint64_t memory_available_bytes;  // of the whole machine, even if a cgroup allows less
  std::string date;                 // UTC
  double huge_page_share;           // of this process's memory while it held the large arrays
  double cpus_of_others;            // CPUs kept busy by other processes during the run, on average
};

Machine DescribeMachine();

// The fraction of this process's anonymous memory that is in huge pages now.
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
