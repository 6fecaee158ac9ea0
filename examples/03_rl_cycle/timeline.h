// timeline.h: who holds how much of the device and of the host, as lines of a table.
#ifndef HYBRIDOPT_EXAMPLES_RL_CYCLE_TIMELINE_H
#define HYBRIDOPT_EXAMPLES_RL_CYCLE_TIMELINE_H

#include <math.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "../program.h"

inline constexpr uint64_t kDeviceBytes = uint64_t{16} << 20;  // either phase fits, both do not

// Where all bytes are. The library counts those it has to do with, the device counts what is free.
struct Bytes {
  offload_stats_t library;
  uint64_t scratch, weights, cache, free;
};

inline double mib(uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

// What lies on the device, each with its letter. The library counts its bytes itself, and the
// device counts what is free: together they must be the whole device.
inline std::vector<std::pair<char, uint64_t>> parts_of(const Bytes& bytes) {
  std::vector<std::pair<char, uint64_t>> parts = {
      {'P', bytes.library.params_bytes[OFFLOAD_TIER_DEVICE]},
      {'G', bytes.library.grads_bytes[OFFLOAD_TIER_DEVICE]},
      {'S', bytes.library.state_bytes[OFFLOAD_TIER_DEVICE]},
      {'x', bytes.scratch},
      {'W', bytes.weights},
      {'C', bytes.cache},
      {'.', bytes.free}};
  uint64_t sum = 0;
  for (const auto& [letter, size] : parts) sum += size;
  if (sum != kDeviceBytes) fail("the library and the device count different bytes");
  return parts;
}

// One line of the timeline; the bar has one letter for each MiB.
inline void show(const std::string& when, const char* phase, double seconds, const Bytes& bytes) {
  std::string bar;
  for (const auto& [letter, size] : parts_of(bytes))
    bar.append(static_cast<size_t>(lround(mib(size))), letter);
  printf("%4s  %-7s %4.0f  %s ", when.c_str(), phase, 1e3 * seconds, bar.c_str());
  for (const auto& [letter, size] : parts_of(bytes)) printf(" %4.1f", mib(size));
  const offload_stats_t& library = bytes.library;
  printf("   %4.1f %4.1f %4.1f\n", mib(library.params_bytes[OFFLOAD_TIER_HOST]),
         mib(library.grads_bytes[OFFLOAD_TIER_HOST]), mib(library.state_bytes[OFFLOAD_TIER_HOST]));
  fflush(stdout);
}

// Cuts text into lines of at most 88 columns.
inline void print_wrapped(const std::string& text) {
  size_t column = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    if (column + end - begin > 86) column = 0;
    printf("%s%s", column ? " " : begin ? "\n  " : "  ", text.substr(begin, end - begin).c_str());
    column += end - begin + 1;
    begin = end + 1;
  }
  printf("\n");
}

// gpu: its name; "" for the simulated device
inline void show_header(const std::string& gpu) {
  printf("%s\n", offload_build_info());
  if (gpu.empty()) {
    printf("A simulated device of %.0f MiB.", mib(kDeviceBytes));
  } else {
    printf("%s; %.0f MiB of it, as cudaMemGetInfo measures them.\n", gpu.c_str(),
           mib(kDeviceBytes));
  }
  printf("%sTraining needs P + G + S + x, the rollout W + C:\n\n", gpu.empty() ? " " : "");
  printf("  P  params, bf16                    W  weights of the generator, bf16\n");
  printf("  G  gradients, bf16                 C  KV cache of the generator\n");
  printf("  S  states: masters and moments     .  free\n");
  printf("  x  scratch of the library\n\n");
  printf("      phase     ms  device memory, MiB                   ");
  printf("                 host memory, MiB\n");
  printf(
      "                                      P    G    S    x    W    C    .      P    G    S\n");
}

#endif  // HYBRIDOPT_EXAMPLES_RL_CYCLE_TIMELINE_H
