/* Stands for libnuma on a machine with as many nodes as a test wants. It remembers the policy of
 * each range and says that pages lie where the policy wants them. FAKE_NUMA_OLD leaves out what
 * libnuma 1 had not, FAKE_NUMA_INCOMPLETE one function, and with FAKE_NUMA_REFUSED the system has
 * no NUMA policy. */
#include "fake_numa.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define RANGES 4096
#define NODES 1024
#define WORD_BITS (8 * sizeof(unsigned long))

typedef struct {
  unsigned long size;
  unsigned long* words;
} bitmask;

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

EXPORT int numa_bitmask_isbitset(const bitmask* mask, unsigned bit) {
  return bit < mask->size && (mask->words[bit / WORD_BITS] >> bit % WORD_BITS & 1);
}
#ifndef FAKE_NUMA_INCOMPLETE
EXPORT bitmask* numa_bitmask_setbit(bitmask* mask, unsigned bit) {
  if (bit < mask->size) mask->words[bit / WORD_BITS] |= 1ul << bit % WORD_BITS;
  return mask;
}
#endif
EXPORT void numa_bitmask_free(bitmask* mask) {
  free(mask->words);
  free(mask);
}

#ifndef FAKE_NUMA_OLD
EXPORT bitmask* numa_allocate_nodemask(void) {
  bitmask* mask = malloc(sizeof(*mask));
  mask->size = NODES;
  mask->words = calloc(NODES / WORD_BITS, sizeof(unsigned long));
  return mask;
}
EXPORT bitmask* numa_get_mems_allowed(void) {
  bitmask* mask = numa_allocate_nodemask();
  mask->words[0] = fake_numa.memory_nodes | fake_numa.empty_nodes;
  return mask;
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
