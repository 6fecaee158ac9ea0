/*
 * offload_mpi.h: the comm table of offload.h over MPI.
 *
 * Optional: in libhybridopt_mpi.so, which is built where an MPI is; libhybridopt.so needs none.
 * Link with -lhybridopt_mpi -lhybridopt and the MPI of the program. docs/RANKS.md has an example.
 */
#ifndef HYBRIDOPT_OFFLOAD_MPI_H
#define HYBRIDOPT_OFFLOAD_MPI_H

#include <mpi.h>

#include "offload.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Fills *table with functions over a duplicate of communicator. Collective: all its ranks call it,
 * and it waits for them without limit, as MPI_Comm_dup does. Make one table per optimizer: two that
 * share one would answer each other's calls.
 *
 * The library calls the table from a thread of its own, so MPI must have been initialised with
 * MPI_THREAD_MULTIPLE. Sums are added in rank order on every rank: the same bits everywhere, which
 * MPI_Allreduce does not promise. The table's exchange works on host memory (exchange_on_host is
 * 1), through copies of its own, which take as much memory as the largest exchange: so nothing
 * touches the caller's memory after a call, not even after a timeout. Errors of MPI come back as
 * COMM_FAILED, whatever the error handler of communicator is. After a failure or a timeout all
 * later calls fail at once. Errors: INVALID_ARGUMENT (table is NULL; communicator is MPI_COMM_NULL
 * or an inter-communicator), INVALID_STATE (MPI not initialised, finalized, or without
 * MPI_THREAD_MULTIPLE), OUT_OF_HOST_MEMORY, COMM_FAILED. *table is written on success only. */
OFFLOAD_API int32_t offload_mpi_create(MPI_Comm communicator, offload_comm_t* table);

/* Frees what create made, after the optimizer has been destroyed and before MPI_Finalize.
 * Collective if nothing has failed. After a failure it asks no other rank: what a call that never
 * ended may still write to is left to the process. Errors: INVALID_ARGUMENT (not a table of
 * offload_mpi_create, or destroyed before), COMM_FAILED. */
OFFLOAD_API int32_t offload_mpi_destroy(offload_comm_t* table);

/* What went wrong in the last failed call of this process: of the two above, or of a table's
 * functions, which fail on the library's thread. "" if none has. Valid until this thread asks
 * again. */
OFFLOAD_API const char* offload_mpi_last_error(void);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* HYBRIDOPT_OFFLOAD_MPI_H */
