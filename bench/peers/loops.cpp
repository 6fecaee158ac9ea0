// The loop that only moves memory, as a shared library for cpu.py.
#include "../loops.h"

#include "../team.h"

#define PEERS_API extern "C" __attribute__((visibility("default")))

PEERS_API bench::Team* peers_team(uint32_t threads, int pinned) {
  return new bench::Team(threads, pinned != 0);
}
PEERS_API void peers_team_free(bench::Team* team) { delete team; }

PEERS_API void peers_memory(bench::Team* team, int streamed, const uint16_t* grad, uint16_t* param,
                            float* master, float* exp_avg, float* exp_avg_sq, uint64_t elements) {
  const bench::AdamWArrays arrays = {grad, param, master, exp_avg, exp_avg_sq};
  team->Split(elements, [&](uint64_t begin, uint64_t end) {
    (streamed != 0 ? bench::MemoryStreamed : bench::MemoryCached)(arrays, {}, 1, begin, end);
  });
}
