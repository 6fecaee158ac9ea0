/*
 * offload_nccl.h: the comm table of offload.h over NCCL.
 *
 * Optional: in libhybridopt_nccl.so, which is built where CUDA is; libhybridopt.so needs none. Link
 * with -lhybridopt_nccl -lhybridopt. Neither links to NCCL: the functions are taken from the
 * libnccl that the process has loaded already (PyTorch brings one), else from the file that
 * HYBRIDOPT_NCCL_PATH names, else from libnccl.so.2, so that there are never two copies of it. It
 * must be 2.14 or newer.
 */
#ifndef HYBRIDOPT_OFFLOAD_NCCL_H
#define HYBRIDOPT_OFFLOAD_NCCL_H

#include "offload.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What the ranks of one communicator share. One rank makes it and sends its bytes to the others. */
typedef struct offload_nccl_id {
  char bytes[128];
} offload_nccl_id_t;

/* A new id. Errors: INVALID_ARGUMENT (id is NULL), UNSUPPORTED (no libnccl, or too old; the text
 * says where it was looked for), COMM_FAILED. */
OFFLOAD_API int32_t offload_nccl_get_id(offload_nccl_id_t* id);

/* Fills *table with functions over a communicator of its own on that CUDA device. Collective: all
 * ranks call it, and it waits for them up to timeout_ns. Make one table per optimizer: two that
 * share one would answer each other's calls. Every function waits at most as long as the library
 * tells it, looks for NCCL's asynchronous errors meanwhile, and on an error or a timeout aborts the
 * communicator: all later calls then fail at once. Sums are added in rank order on every rank: the
 * same bits everywhere. The table's exchange sends and receives device memory, all messages in one
 * group, on the stream that it gets, and returns when they have arrived.
 * Errors: INVALID_ARGUMENT, UNSUPPORTED (no libnccl, no CUDA device), TIMED_OUT, COMM_FAILED,
 * OUT_OF_HOST_MEMORY, OUT_OF_DEVICE_MEMORY. *table is written on success only. */
OFFLOAD_API int32_t offload_nccl_create(const offload_nccl_id_t* id, int32_t rank, int32_t world,
                                        int32_t device_index, int64_t timeout_ns,
                                        offload_comm_t* table);

/* Frees what create made, after the optimizer has been destroyed. Waits for no other rank.
 * Errors: INVALID_ARGUMENT (not a table of offload_nccl_create, or destroyed before). */
OFFLOAD_API int32_t offload_nccl_destroy(offload_comm_t* table);

/* What went wrong in the last failed call of this process: of the three above, or of a table's
 * functions, which fail on the library's thread. "" if none has. Valid until this thread asks
 * again. */
OFFLOAD_API const char* offload_nccl_last_error(void);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* HYBRIDOPT_OFFLOAD_NCCL_H */
