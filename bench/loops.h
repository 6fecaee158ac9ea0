// The loops that the library is compared with. Each does its part [begin, end) of one AdamW-shaped
// pass over five arrays: reads a bf16 gradient (2 bytes), reads and writes three fp32 state arrays
// (24), writes a bf16 param (2). They are compiled for the very machine that builds them.
#pragma once

#include <cstdint>

namespace bench {

// bf16 values are held as their 16 bits.
struct AdamWArrays {
  const uint16_t* grad;
  uint16_t* param;
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
};

// What the library is given too.
struct AdamWFactors {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
};

using Loop = void (*)(const AdamWArrays& arrays, const AdamWFactors& factors, uint64_t step,
                      uint64_t begin, uint64_t end);

// Next to no arithmetic, so that only the memory counts: the ceiling. The param goes past the
// caches (Streamed) or through them (Cached). begin and end are multiples of 64 elements.
void MemoryStreamed(const AdamWArrays&, const AdamWFactors&, uint64_t step, uint64_t begin,
                    uint64_t end);
void MemoryCached(const AdamWArrays&, const AdamWFactors&, uint64_t step, uint64_t begin,
                  uint64_t end);

// AdamW in one loop, as one would write it.
void PlainAdamW(const AdamWArrays&, const AdamWFactors&, uint64_t step, uint64_t begin,
                uint64_t end);

// The arrays of an update, however its state is stored: masters or their lower halves, two moments.
struct StateArrays {
  const uint16_t* grad;
  uint16_t* param;
  void* master;
  void* moment0;
  void* moment1;
};

// Reads and writes what an update reads and writes, and computes nothing: how fast the memory
// allows CPU threads to be. begin and end are multiples of 64 elements.
using StateLoop = void (*)(const StateArrays& arrays, uint64_t begin, uint64_t end);

// The loop for masters and moments of these bytes an element; masters of 2 bytes are halves, and
// the loop reads the param too, which holds the other half.
StateLoop StateLoopOf(uint64_t master_bytes, uint64_t moment_bytes);

}  // namespace bench
