/* What a test tells the library that stands for libnuma, and what that has heard. */
#ifndef HYBRIDOPT_TESTS_FAKE_NUMA_H
#define HYBRIDOPT_TESTS_FAKE_NUMA_H

/* The object `fake_numa` of the library. */
typedef struct {
  unsigned long memory_nodes; /* bit n: node n has memory that the process may use */
  unsigned long empty_nodes;  /* bit n: node n is allowed, but has no memory */
  int toucher;                /* the node of pages whose first toucher decides where they lie */
  int mbind_error;            /* errno of every mbind; 0 = it works */
  int move_pages_error;       /* likewise */
  int get_mempolicy_error;    /* likewise */
  unsigned long range_count;  /* policies set so far */
} fake_numa_t;

typedef struct {
  const void* data;
  unsigned long bytes;
  int mode;            /* MPOL_... */
  unsigned long nodes; /* bit n: node n */
} fake_numa_range_t;

/* Its function `fake_numa_range_of`: the latest range that holds an address, or NULL. */
typedef const fake_numa_range_t* (*fake_numa_range_of_t)(const void* data);

#endif
