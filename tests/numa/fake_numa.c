/* Stands for libnuma on a machine with as many nodes as a test wants. It remembers the policy of
 * each range and says that pages lie where the policy wants them. FAKE_NUMA_INCOMPLETE leaves out
 * one function, and with FAKE_NUMA_REFUSED the system has no NUMA policy. */
#include "fake_numa.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define RANGES 4096
#define NODES 1024

EXPORT fake_numa_t fake_numa;
static fake_numa_range_t ranges[RANGES]; /* the latest last */

EXPORT int numa_available(void) {
#ifdef FAKE_NUMA_REFUSED
  errno = EPERM;
  return -1;
#else
  return 0;
#endif
}

#ifndef FAKE_NUMA_INCOMPLETE
EXPORT long get_mempolicy(int* mode, unsigned long* mask, unsigned long bits, void* address,
                          unsigned flags) {
  if (mode != NULL || bits != NODES + 1 || address != NULL || flags != MPOL_F_MEMS_ALLOWED) abort();
  if (fake_numa.get_mempolicy_error != 0) {
    errno = fake_numa.get_mempolicy_error;
    return -1;
  }
  memset(mask, 0, NODES / 8);
  mask[0] = fake_numa.memory_nodes | fake_numa.empty_nodes;
  return 0;
}
#endif

EXPORT long long numa_node_size64(int node, long long* free_bytes) {
  if (free_bytes != NULL) *free_bytes = 0;
  if (node < 64 && fake_numa.memory_nodes >> node & 1) return 1 << 30;
  return node < 64 && fake_numa.empty_nodes >> node & 1 ? 0 : -1;
}

EXPORT long mbind(void* data, unsigned long bytes, int mode, const unsigned long* mask,
                  unsigned long bits, unsigned flags) {
  fake_numa_range_t* range = &ranges[fake_numa.range_count % RANGES];
  if (fake_numa.mbind_error != 0) {
    errno = fake_numa.mbind_error;
    return -1;
  }
  if (bits != NODES + 1 || flags != 0) abort();
  range->data = data;
  range->bytes = bytes;
  range->mode = mode;
  range->nodes = mask[0];
  fake_numa.range_count++;
  return 0;
}

EXPORT const fake_numa_range_t* fake_numa_range_of(const void* data) {
  unsigned long i;
  for (i = fake_numa.range_count; i-- > 0 && i + RANGES >= fake_numa.range_count;) {
    const fake_numa_range_t* range = &ranges[i % RANGES];
    const unsigned long at = (unsigned long)data - (unsigned long)range->data;
    if (data >= range->data && at < range->bytes) return range;
  }
  return NULL;
}

/* The node of the page at an address, as its range's policy has it. */
static int node_of(const void* page) {
  const fake_numa_range_t* range = fake_numa_range_of(page);
  unsigned long turn, nodes;
  if (range == NULL) return -ENOENT;
  if (range->nodes == 0) return fake_numa.toucher;
  if (range->mode != MPOL_INTERLEAVE) return __builtin_ctzl(range->nodes);
  turn = ((unsigned long)page - (unsigned long)range->data) / 4096;
  turn %= (unsigned long)__builtin_popcountl(range->nodes);
  for (nodes = range->nodes; turn > 0; turn--) nodes &= nodes - 1;
  return __builtin_ctzl(nodes);
}

EXPORT int numa_move_pages(int pid, unsigned long count, void** pages, const int* nodes,
                           int* status, int flags) {
  unsigned long i;
  if (pid != 0 || nodes != NULL || flags != 0) abort(); /* it only asks */
  if (fake_numa.move_pages_error != 0) {
    errno = fake_numa.move_pages_error;
    return -1;
  }
  for (i = 0; i < count; i++) status[i] = node_of(pages[i]);
  return 0;
}
