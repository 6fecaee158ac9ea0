// The loops that the library is compared with. Each does its part [begin, end) of one pass over
// five arrays, which moves the bytes of AdamW: it reads a bf16 gradient (2 bytes), reads and writes
// three fp32 state arrays (24), and writes a bf16 param (2). The loops are compiled for the machine
// that builds them.
#pragma once

#include <cstdint>

namespace bench {

// The five arrays. A bf16 value is held as its 16 bits.
struct AdamWArrays {
  const uint16_t* grad;
  uint16_t* param;
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
};

// The hyperparameters; the library gets the same.
struct AdamWFactors {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
};

using Loop = void (*)(const AdamWArrays& arrays, const AdamWFactors& factors, uint64_t step,
                      uint64_t begin, uint64_t end);

// The ceiling: almost no arithmetic, so that only the memory limits the speed. The param is written
// past the caches (Streamed) or through them (Cached). begin and end are multiples of 64 elements.
void MemoryStreamed(const AdamWArrays&, const AdamWFactors&, uint64_t step, uint64_t begin,
                    uint64_t end);
void MemoryCached(const AdamWArrays&, const AdamWFactors&, uint64_t step, uint64_t begin,
                  uint64_t end);

// AdamW in one plain loop.
void PlainAdamW(const AdamWArrays&, const AdamWFactors&, uint64_t step, uint64_t begin,
                uint64_t end);

// The arrays of an update in any layout of state: masters or their lower halves, and two moments.
struct StateArrays {
  const uint16_t* grad;
  uint16_t* param;
  void* master;
  void* moment0;
  void* moment1;
};

// Reads and writes the bytes that an update reads and writes, and computes nothing: the speed that
// the memory allows CPU threads. begin and end are multiples of 64 elements.
using StateLoop = void (*)(const StateArrays& arrays, uint64_t begin, uint64_t end);

// The loop for masters and moments of these sizes in bytes per element. Masters of 2 bytes are
// lower halves; the loop then also reads the param, which holds the upper half.
StateLoop StateLoopOf(uint64_t master_bytes, uint64_t moment_bytes);

}  // namespace bench
