/*
 * offload.h: keep optimizer state in host memory and update it there at memory-bus speed.
 *
 * This header is the manual. It is plain C99; link with -lhybridopt.
 *
 * THE LIBRARY IN SIX CALLS
 *
 *   offload_context_create      opens a device and makes the worker threads
 *   offload_optimizer_create    chooses the algorithm and where the state lives
 *   offload_optimizer_add_group / _add_params   register; they allocate nothing
 *   offload_optimizer_commit    allocates the memory and copies the fp32 masters in
 *   offload_optimizer_step      queues one update and returns a ticket
 *   offload_optimizer_wait      waits for the ticket
 *
 * BY TASK
 *
 *   begin with one call         offload_create_all of offload_simple.h
 *   ask what fits, before       offload_optimizer_plan, offload_stash_plan
 *   wait for a step             offload_optimizer_wait; a stream: offload_optimizer_stream_wait
 *   see what a step did         offload_optimizer_step_result, offload_optimizer_get_stats
 *   look at what a step did     offload_optimizer_trace_start, offload_optimizer_trace_stop
 *   change a learning rate      offload_optimizer_set_group
 *   move state while training   offload_optimizer_set_device_fraction, _set_fractions
 *   read or replace state       offload_optimizer_read_state, _write_state; offload_optimizer_state
 *   load weights from outside   offload_optimizer_refresh_masters
 *   give the device away        offload_optimizer_offload_params, _grads, _states, then _reload_...
 *   keep addresses meanwhile    offload_pool_create, offload_pool_release_memory
 *   let gradients leave early   offload_optimizer_offload_grads, offload_optimizer_grads_to_keep
 *   save and resume             offload_optimizer_save, _load; offload_checkpoint_newest
 *   look into a checkpoint      offload_checkpoint_inspect, offload_checkpoint_verify
 *   train over several ranks    offload_comm_t; tables of it: offload_mpi.h, offload_nccl.h
 *   update matrices by Muon that are cut between ranks
 *                               offload_exchange_create, _gather, _scatter
 *   publish changed weights     offload_optimizer_changes, offload_optimizer_acknowledge_changes
 *   put activations aside       offload_stash_create, offload_stash_push
 *   try it without a GPU        OFFLOAD_DEVICE_SIM, offload_device_alloc, offload_stream_run
 *
 * RULES FOR ALL FUNCTIONS
 *
 * Status.    Every function that can fail returns an int32_t status, OFFLOAD_OK (0) on success.
 *            After a failure offload_last_error() names the parameter, the value that the library
 *            got, the value that it expected, and what the caller can do. A call that returns
 *            INVALID_ARGUMENT, INVALID_STATE or UNSUPPORTED has changed nothing. Wrong arguments
 *            never crash the library.
 * Structs.   The caller sets struct_size to sizeof the struct and every other byte to zero before
 *            it fills in fields; a field that is zero has its documented default. A caller that was
 *            compiled with an older header passes a shorter struct: the library reads zeros for the
 *            missing fields. A caller with a newer header passes a longer struct: the library
 *            accepts it while all fields that it does not know are zero, and returns UNSUPPORTED
 *            otherwise. The elements of an array of structs lie struct_size bytes apart and all
 *            have the same struct_size. Into an output struct the library writes no more bytes than
 *            the struct_size that the caller has set before the call.
 * Ownership. The caller owns parameters, gradients and streams. The library uses their addresses
 *            and never frees them. It copies strings and arrays that it gets before the call
 *            returns. The library owns the optimizer state; a view of it is valid until destroy.
 * Async.     A function that queues work returns a ticket. The tickets of one optimizer complete in
 *            the order in which the library returned them, with one exception: the ticket of a save
 *            completes when its files are on disk. Work behind a save does not wait for the save,
 *            and its ticket does not tell whether the save has completed. From the call that queues
 *            work until the ticket completes, the caller must not write the gradients and must not
 *            read or write the parameters, except on a stream that it has passed to
 *            offload_optimizer_stream_wait. A save only reads, and reads only some parameters: see
 *            offload_optimizer_save.
 * Failure.   When queued work fails, the library marks the optimizer as poisoned: calls that wait
 *            return the cause (as soon as no save reads the caller's memory any more); later calls
 *            return POISONED, except plan, state, get_stats, step_result and trace_stop; streams
 *            that wait for the optimizer go on; destroy works. If the device fails in the middle of
 *            a step, some params may have been updated and others not: load an earlier checkpoint.
 *            The context and its other optimizers go on as far as the device does. A save or load
 *            that fails because of its files does not poison the optimizer: its own ticket returns
 *            the cause, and if no call has returned that cause yet, the next offload_optimizer_wait
 *            with ticket 0 returns it, once. A copy of a stash that fails poisons the stash: later
 *            calls return POISONED, except get_stats; destroy works.
 * Threads.   Threads may use different handles at the same time. The caller makes sure that only
 *            one thread at a time calls functions with the same handle, except
 *            offload_optimizer_wait, _step_result and _get_stats, and all functions of a stash or a
 *            pool: any thread may call these at any time before destroy. The library starts its
 *            own threads with the first work.
 * Functions  that the caller passes in (log, progress, visit, comm, offload_stream_run) should not
 *            throw. The library turns an exception of such a function into a failure: COMM_FAILED
 *            for comm, DEVICE_FAILED for offload_stream_run, INTERNAL for progress and visit. It
 *            ignores an exception of log. A thread that gets pthread_cancel inside a call of the
 *            library ends after that call.
 * Fork.      Handles do not survive fork: in the child every call with such a handle returns
 *            INVALID_STATE and does nothing. The parent goes on undisturbed.
 * Process.   The library changes no setting of the process: no signal handler, no floating-point
 *            mode, no memory policy, no environment variable. It reads the environment variables
 *            HYBRIDOPT_ISA, LOCAL_RANK and LOCAL_WORLD_SIZE (see offload_context_create) and no
 *            others.
 * Zero.      A ticket of 0 is: for offload_optimizer_wait and _stream_wait everything that has been
 *            queued so far; for offload_optimizer_step_result the last step that was queued; for
 *            offload_stash_wait the copies of all tickets; from offload_stash_push no ticket, since
 *            nothing was taken. A list of params that is NULL means all params. A list that is not
 *            NULL and has a count of 0 means all params for offload_optimizer_stream_wait, and no
 *            param for offload_move_options_t.
 * Units.     A count is a number of elements, bytes are bytes, times are in nanoseconds (_ns) or
 *            seconds (_seconds).
 *
 * WORDS
 *
 *   param       an array of numbers that the model computes with, on the device, in fp32, bf16 or
 *               fp16
 *   master      the fp32 value of a param, which the optimizer updates
 *   state       masters and moments (exp_avg, exp_avg_sq, momentum_buffer, sum)
 *   host share  the elements whose state lies in host memory; CPU threads update them, or the
 *               device does, to which the library copies their state (enum offload_host_executors)
 *   device share  the elements whose state lies in device memory; the device updates them
 *   chunk       the elements that one staging slot holds: the pipeline copies gradients to the host
 *               and params to the device chunk by chunk
 *   staging     the ring of pinned slots through which chunks travel
 *   offload     to copy from the device to the host and give up the device memory
 *   reload      to copy back to the device
 *   movable     what may be offloaded
 *   timeline    the queued work of one optimizer, in order
 *   stash       host memory for activations that are put aside
 *   checkpoint  a directory with the state of one point of the timeline
 *
 * The bits of params and state after a step depend on the inputs and hyperparameters alone. They do
 * not depend on the device share, the chunk size, the number of threads, the instruction set or the
 * timing. docs/NUMERICS.md has the formulas and the order of operations.
 */
#ifndef HYBRIDOPT_OFFLOAD_H
#define HYBRIDOPT_OFFLOAD_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define OFFLOAD_API __attribute__((visibility("default")))
#else
#define OFFLOAD_API
#endif

#ifdef __cplusplus
extern "C" {
#endif
/* From here to the matching line below there is no preprocessor line: cffi and SWIG read it. */
/* begin-plain-c99 */

/* ------------------------------------------------------------------------------------ types -- */

/* Every status. Values never change; the gaps are for later statuses of the same kind. */
enum offload_status {
  OFFLOAD_OK = 0,
  OFFLOAD_INVALID_ARGUMENT = 10,   /* an argument is wrong; the call has changed nothing */
  OFFLOAD_INVALID_STATE = 11,      /* the call is not allowed now, or not with this handle; it has
                                      changed nothing */
  OFFLOAD_UNSUPPORTED = 12,        /* this build, device or release cannot do it; the call has
                                      changed nothing */
  OFFLOAD_OUT_OF_HOST_MEMORY = 20, /* the text has the bytes asked for and the bytes available */
  OFFLOAD_OUT_OF_DEVICE_MEMORY = 21,
  OFFLOAD_DEVICE_FAILED = 30,       /* the device reported an error, perhaps of earlier work */
  OFFLOAD_COMM_FAILED = 31,         /* another rank failed or did not answer */
  OFFLOAD_IO_FAILED = 40,           /* the text has the file and the system's error */
  OFFLOAD_CHECKPOINT_CORRUPT = 41,  /* the bytes on disk differ from those that a save wrote */
  OFFLOAD_CHECKPOINT_MISMATCH = 42, /* the checkpoint is intact, but belongs to another model */
  OFFLOAD_TIMED_OUT = 50,           /* the work goes on; wait again */
  OFFLOAD_POISONED = 60,            /* earlier queued work of this optimizer failed */
  OFFLOAD_INTERNAL = 70             /* a bug in the library; please report the text */
};

enum offload_device_kind {
  OFFLOAD_DEVICE_HOST = 0, /* params and gradients lie in host memory; there is no staging */
  OFFLOAD_DEVICE_SIM = 1,  /* a simulated accelerator, for tests and machines without a GPU */
  OFFLOAD_DEVICE_CUDA = 2
};

enum offload_algorithm {
  OFFLOAD_ADAMW = 1,   /* Adam with decoupled weight decay; state exp_avg, exp_avg_sq */
  OFFLOAD_ADAM = 2,    /* Adam with L2 weight decay; state exp_avg, exp_avg_sq */
  OFFLOAD_SGD = 3,     /* momentum, dampening, nesterov; state momentum_buffer if momentum > 0 */
  OFFLOAD_LION = 4,    /* sign of an interpolated momentum; state exp_avg */
  OFFLOAD_ADAGRAD = 5, /* gradients divided by the root of a sum of their squares; state sum */
  OFFLOAD_SIGNUM = 6,  /* signSGD with momentum: sign of averaged gradients; state exp_avg */
  OFFLOAD_MUON = 7     /* Newton-Schulz of momentum, for matrices; state momentum_buffer */
};

enum offload_dtype {
  OFFLOAD_FP32 = 1,
  OFFLOAD_BF16 = 2,
  OFFLOAD_FP16 = 3,
  OFFLOAD_U16 = 4, /* of state only: lower halves of split masters */
  OFFLOAD_I8 = 5   /* of state only: the bytes of masters of 24 bits */
};

/* How the library keeps the fp32 master of a bf16 param. FP32 and SPLIT keep the same bits. */
enum offload_master_layout {
  OFFLOAD_MASTER_FP32 = 0,   /* as 4 bytes of state */
  OFFLOAD_MASTER_SPLIT = 1,  /* the bf16 param is the upper half, 2 bytes of state are the lower */
  OFFLOAD_MASTER_SPLIT24 = 2 /* the same with 1 byte of state: a step rounds the master's lower 8
                                bits away */
};

/* How a step rounds moments that it keeps in bf16, and masters that it keeps in 24 bits. */
enum offload_rounding {
  OFFLOAD_ROUND_STOCHASTIC = 0, /* at random: the mean of many roundings is the exact number */
  OFFLOAD_ROUND_NEAREST = 1     /* to nearest, ties to even: small changes are lost */
};

enum offload_placement {
  OFFLOAD_PLACE_AUTO = 0,   /* device_fraction and disk_fraction decide */
  OFFLOAD_PLACE_HOST = 1,   /* all state of this param on the host */
  OFFLOAD_PLACE_DEVICE = 2, /* all state of this param on the device */
  OFFLOAD_PLACE_DISK = 3    /* all state of this param in the files of options.disk_paths */
};

/* The memories in which state is stored. Counts by tier are arrays with room for tiers of later
 * releases; the counts of those are 0. */
enum offload_tier {
  OFFLOAD_TIER_DEVICE = 0, /* the memory of the device */
  OFFLOAD_TIER_HOST = 1,   /* host memory */
  OFFLOAD_TIER_DISK = 2    /* files in options.disk_paths */
};

/* The kinds of state. The algorithm says which moments a param has. A param has a master, or the
 * lower half of one, unless it is fp32 and is updated in place: then it is its own master. */
enum offload_state_kind {
  OFFLOAD_STATE_MASTER = 0,
  OFFLOAD_STATE_EXP_AVG = 1,
  OFFLOAD_STATE_EXP_AVG_SQ = 2,
  OFFLOAD_STATE_MOMENTUM_BUFFER = 3,
  OFFLOAD_STATE_SUM = 4,
  /* The difference between a master and its param, which is the rounded upper half of the master:
   * SPLIT (OFFLOAD_U16):  master bits = (param bits << 16) + MASTER_LOW, read as a signed number
   * SPLIT24 (OFFLOAD_I8): master bits = (param bits << 16) + (MASTER_LOW << 8) */
  OFFLOAD_STATE_MASTER_LOW = 5
};

/* What offload_optimizer_offload_* may move. The plan includes room for it on the host. */
enum offload_movable {
  OFFLOAD_MOVABLE_PARAMS = 1,
  OFFLOAD_MOVABLE_GRADS = 2,
  OFFLOAD_MOVABLE_STATES = 4,
  OFFLOAD_MOVABLE_ACCUMULATE = 8 /* gradients, and room to add them up in fp32; includes GRADS */
};

enum offload_log_level { OFFLOAD_LOG_INFO = 1, OFFLOAD_LOG_WARNING = 2, OFFLOAD_LOG_ERROR = 3 };

/* Handles. The library recognises NULL, destroyed and foreign handles and refuses them. */
typedef struct offload_context* offload_context_t;
typedef struct offload_optimizer* offload_optimizer_t;
typedef struct offload_stash* offload_stash_t;
typedef struct offload_pool* offload_pool_t;
typedef struct offload_exchange* offload_exchange_t;

/* A point on an optimizer's timeline. What 0 stands for is told under "Zero" at the top. No other
 * optimizer of the process has had or will have the same ticket. */
typedef uint64_t offload_ticket_t;

/* A stream of the context's device: from offload_stream_create, or a cudaStream_t. NULL is the
 * default stream of the simulated device, and the only stream of the host device. */
typedef void* offload_stream_t;

/* ---------------------------------------------------------------------------------- library -- */

/* The ABI version of this library: major * 1000 + minor. A caller that was compiled with a header
 * of the same major version works. Never fails. */
OFFLOAD_API uint32_t offload_abi_version(void);

/* One line about this build: version, compiler, devices, instruction sets. Static; never NULL. */
OFFLOAD_API const char* offload_build_info(void);

/* "INVALID_ARGUMENT" for OFFLOAD_INVALID_ARGUMENT and so on; "UNKNOWN" for any other number. */
OFFLOAD_API const char* offload_status_name(int32_t status);

/* The text of the last call of this thread that failed; "" if none has. Valid until the next call
 * of this thread that fails. */
OFFLOAD_API const char* offload_last_error(void);

/* ---------------------------------------------------------------------------------- context -- */

/* Any thread may call it, threads of the library included. It must not call the library. */
typedef void (*offload_log_function_t)(void* user, int32_t level, const char* text);

typedef struct offload_context_options {
  uint32_t struct_size;
  int32_t device_kind;  /* enum offload_device_kind; 0 = host */
  int32_t device_index; /* the number of the CUDA device; must be 0 for host and sim */
  uint32_t threads;     /* CPU threads that update the host share, at most 1024; 0 = one for each
                           CPU that is this rank's (docs/CONFIGURATION.md) */
  uint64_t pinned_bytes_max;  /* most pinned host memory this context may take; 0 = no limit */
  uint64_t device_timeout_ns; /* the library treats the device as failed if its work makes no
                                 progress for this time; 0 = 600 s */
  offload_log_function_t log; /* gets all messages; NULL = warnings and errors go to stderr */
  void* log_user;             /* the library passes it to log */
  uint64_t sim_memory_bytes;  /* sim: capacity of the device; 0 = 1 GiB */
  uint64_t sim_seed;          /* sim: seed of the random delays */
  uint64_t sim_delay_ns_max;  /* sim: delays each command on a stream by a random time up to this;
                                 0 = no delays */
  uint64_t numa_nodes;        /* bit n: run update threads and put host memory on NUMA node n; 0 =
                                 on the nodes near the device, or on all nodes with CPUs if the
                                 place of the device is not known */
  uint32_t local_rank;        /* 0 to local_world - 1: which part of the CPUs is this rank's */
  uint32_t local_world;       /* number of ranks that share this host's CPUs; 1 = this rank alone,
                                 also where the launcher has bound each rank to CPUs of its own;
                                 0 = LOCAL_RANK and LOCAL_WORLD_SIZE of the environment, or 1 if
                                 they are not set */
  uint64_t sim_pinned_bytes_max; /* sim: most host memory that it can pin, as a limit of a system or
                                    driver would be; 0 = no limit */
  int32_t allow_pageable; /* what happens if the system does not pin memory: 0 = commit fails, 1 =
                             the library uses the memory unpinned, which is slower */
  int32_t numa_policy;    /* enum offload_numa_policy; 0 = near the update threads */
} offload_context_options_t;

/* On which NUMA nodes the host memory of a context should lie. */
enum offload_numa_policy {
  OFFLOAD_NUMA_NEAR = 0,       /* on the nodes of the update threads */
  OFFLOAD_NUMA_INTERLEAVED = 1 /* page by page on the nodes of numa_nodes in turn; if that is 0, on
                                  all nodes that have CPUs and memory this process may use */
};

/* What the library could do so that host memory lies where it should. */
enum offload_numa_rung {
  OFFLOAD_NUMA_NONE = 0,        /* nothing: the system decides where pages lie */
  OFFLOAD_NUMA_FIRST_TOUCH = 1, /* threads stay on their node and touch their pages first */
  OFFLOAD_NUMA_PLACED = 2       /* libnuma has told the kernel which nodes to prefer */
};

/* The parts of the machine that a context uses. */
typedef struct offload_context_info {
  uint32_t struct_size;
  int32_t device_kind;    /* enum offload_device_kind */
  uint32_t threads;       /* number of update threads */
  uint32_t cpus_allowed;  /* CPUs in this process's affinity mask */
  uint32_t nodes;         /* NUMA nodes with CPUs that this process may use */
  int32_t threads_seated; /* 1: each update thread stays on its NUMA node; 0: the system refused */
  int32_t huge_pages;     /* 1: the library asks for huge pages for state and the system has them */
  uint32_t optimizers;    /* optimizers of this context that have not been destroyed */
  uint64_t device_memory_bytes;      /* capacity; 0 on the host device */
  uint64_t device_memory_free_bytes; /* free on the device now; 0 on the host device */
  uint64_t pinned_bytes;             /* host memory that is pinned for this context now */
  char isa[32];                      /* instruction set of the host kernels: "avx512", ... */
  char device_name[256];             /* the device's own name */
  uint32_t local_rank;               /* this rank, as the library used it to share out the CPUs */
  uint32_t local_world;              /* number of ranks that the library shared out the CPUs to */
  uint32_t cpus;                     /* how many of cpus_allowed are this rank's */
  int32_t numa_rung;   /* enum offload_numa_rung; final once the first work has started threads */
  uint64_t numa_nodes; /* bit n: update threads run on node n (nodes above 63 do not show) */
  char notes[1024];    /* what the library could not have as asked or at its best, and why; "" if
                          there is nothing to tell */
  uint64_t numa_memory_nodes; /* bit n: the kernel has been told to put host memory on node n */
  int32_t numa_policy;        /* enum offload_numa_policy in force; if it is not what options asked
                                 for, notes and a warning in the log tell why */
  uint32_t stashes;           /* stashes of this context that have not been destroyed */
} offload_context_info_t;

/* Opens a device and reads what the machine has. Allocates little and starts no update thread. The
 * environment variable HYBRIDOPT_ISA (reference, avx2, avx512, neon, sve) forces an instruction
 * set. The ranks of one host share out its CPUs, so that no CPU runs threads of two ranks
 * (docs/CONFIGURATION.md). The library writes *context only on success.
 * Errors: INVALID_ARGUMENT (the text names the field), UNSUPPORTED (this machine has no such device
 * or instruction set). */
OFFLOAD_API int32_t offload_context_create(const offload_context_options_t* options,
                                           offload_context_t* context);

/* Frees the context, and the streams and device memory that the caller got from it and has not
 * freed. If a function that the caller gave to offload_stream_run does not return within
 * device_timeout_ns, the memory of the simulated device stays until the process ends, and a warning
 * in the log says so.
 * Errors: INVALID_STATE while the context has optimizers, stashes or exchanges. */
OFFLOAD_API int32_t offload_context_destroy(offload_context_t context);

/* Tells what the context really has. */
OFFLOAD_API int32_t offload_context_get_info(offload_context_t context,
                                             offload_context_info_t* info);

/* ------------------------------------------------------------------------------ registering -- */

/* One message of the exchange of offload_comm_t. The library makes it; a message of a later release
 * may be longer: the elements of an array lie struct_size bytes apart. */
typedef struct offload_message {
  uint32_t struct_size;
  int32_t rank;      /* the other rank; never this one */
  int32_t sends;     /* 1: send the bytes to that rank; 0: receive them from it */
  uint32_t reserved; /* 0 */
  void* data;        /* where the bytes are, or where they go; aligned to an element */
  uint64_t bytes;    /* at least 1 */
} offload_message_t;

/* How the ranks of one model communicate: functions of the caller, over MPI, NCCL, a process group
 * or threads. Threads of the library, not always the same one, call them: one call at a time for
 * each optimizer, in the same order on all ranks. (Those of an exchange are called by the thread
 * that calls offload_exchange_create, _gather and _scatter.) Each returns OFFLOAD_OK,
 * OFFLOAD_TIMED_OUT, or any other status for a failure. Results must have the same bits on all
 * ranks (docs/RANKS.md). */
typedef struct offload_comm {
  uint32_t struct_size;
  int32_t rank;      /* 0 to world - 1 */
  int32_t world;     /* number of ranks, at least 1 */
  uint32_t reserved; /* 0 */
  void* user;        /* the library passes it to the functions */
  /* In place: replaces each of count values by its sum over all ranks. */
  int32_t (*sum)(void* user, double* values, uint32_t count, int64_t timeout_ns);
  /* In place: replaces each of count values by its maximum over all ranks. */
  int32_t (*max)(void* user, int32_t* values, uint32_t count, int64_t timeout_ns);
  /* Returns when all ranks have called it. */
  int32_t (*barrier)(void* user, int64_t timeout_ns);
  /* Sends and receives messages, all of them at the same time: none may wait for another one of the
   * list. Returns when all have been sent and have arrived, and does not touch their memory
   * afterwards, whatever it returns. Messages from one rank to another arrive in the order in which
   * they are sent. Only ranks that have messages call it. NULL: offload_exchange_create refuses the
   * table; an optimizer does not need it. */
  int32_t (*exchange)(void* user, const offload_message_t* messages, uint32_t count,
                      offload_stream_t stream, int64_t timeout_ns);
  int32_t exchange_on_host; /* 1: the messages are in host memory, ready to be sent, and stream is
                               NULL; 0: they are in memory of the context's device, and are sent
                               and received behind the work that is queued on stream */
  uint32_t reserved1;       /* 0 */
} offload_comm_t;

/* Who updates the host share where the device has memory of its own. The bits are the same. */
enum offload_host_executors {
  OFFLOAD_EXECUTORS_AUTO = 0, /* CPU threads and, if the host's state can be pinned, the device too:
                                 each takes the next chunk when it has done one */
  OFFLOAD_EXECUTORS_CPU = 1,  /* CPU threads: gradients go to the host, params to the device */
  OFFLOAD_EXECUTORS_STREAMED = 2 /* the device: state goes to a ring there and back to the host.
                                    Commit fails if it cannot pin the host's state */
};

typedef struct offload_optimizer_options {
  uint32_t struct_size;
  int32_t algorithm;       /* enum offload_algorithm, of groups that name none; required */
  double device_fraction;  /* of the elements of OFFLOAD_PLACE_AUTO params, the fraction whose state
                              lives on the device, in [0, 1]; 0 = all on the host. The device share
                              is the first elements in registration order. The host device has one
                              memory, so there the fraction has no effect */
  uint64_t chunk_elements; /* most elements of a chunk, 1024 to 2^28; 0 = 2^20, on CUDA 2^22 */
  uint32_t staging_slots;  /* number of slots of the staging ring, 2 to 64; 0 = 8 */
  uint32_t movable;        /* enum offload_movable, or-ed; 0 = nothing is ever offloaded */
  const offload_comm_t* comm; /* the other ranks; NULL = none. The library copies the struct; what
                                 its user points to must live until destroy */
  uint64_t comm_timeout_ns;   /* the library treats a rank as failed if it does not answer for this
                                 time; 0 = 600 s */
  int32_t master_layout;   /* enum offload_master_layout, of bf16 params. With SPLIT and SPLIT24 a
                              step copies the params of the host share to the host, with their
                              gradients */
  int32_t moment_dtype;    /* OFFLOAD_FP32 or OFFLOAD_BF16; 0 = OFFLOAD_FP32 */
  int32_t moment_rounding; /* enum offload_rounding, for bf16 moments and 24-bit masters */
  uint32_t reserved;       /* 0 */
  uint64_t rounding_seed;  /* of stochastic rounding: use the same on all ranks and after a load */
  uint64_t stream_ring_bytes;  /* device memory for the ring that state on the host goes through, at
                                  least that of 2 chunks; 0 = of 3, without CPU threads 4 */
  int32_t host_executors;      /* enum offload_host_executors */
  uint32_t reserved1;          /* 0 */
  uint64_t early_update_bytes; /* host memory, pinned, for chunks that are updated before their step
                                  (see "Early updates" below); 0 = no early updates. The library
                                  takes at most what all chunks could use. Must be 0 on the host
                                  device, with OFFLOAD_EXECUTORS_STREAMED, and if gradients are not
                                  movable */
  int32_t track_changes;       /* 1: steps note which elements of params they change, for
                                  offload_optimizer_changes: two bits for each element in device
                                  memory, two in host memory; 0 = steps note nothing */
  uint32_t reserved2;          /* 0 */
  uint64_t save_buffer_bytes;  /* host memory, for a GPU pinned, to which a step copies state before
                                  it overwrites it, if a running save has still to read it (see
                                  offload_optimizer_save); 0 = none: the step waits. Commit takes
                                  it. UINT64_MAX = at most a quarter of the host memory that is free
                                  beside this optimizer and those of the other ranks on this
                                  machine; the first save takes it, as far as memory is free then,
                                  so that an optimizer that never saves pays nothing. The library
                                  takes at most what all state could use */
  double disk_fraction;        /* of the elements of OFFLOAD_PLACE_AUTO params, the fraction whose
                                  state lives on disk, in [0, 1]; the last elements in registration
                                  order. See "State on disk" at commit; 0 = none */
  const char* disk_paths;      /* one or more directories, with ':' between them: one for each
                                  drive. Chunks are spread over them. Required if disk_fraction is
                                  above 0 or a param is placed OFFLOAD_PLACE_DISK; NULL = no state
                                  is on disk */
  uint64_t disk_ring_bytes;    /* host memory through which state on disk goes, at least the state
                                  of 2 chunks; 0 = 256 MiB. The library takes at most what all
                                  chunks could use */
} offload_optimizer_options_t;

/* Hyperparameters of a group of params. Names and meanings are PyTorch's (for Lion and
 * Signum their papers', with decoupled weight decay).
 * Here zero means zero, not a default, except in algorithm and the fields ns_*. A field that the
 * group's algorithm does not use must be zero. All numbers are finite and, but for ns_coefficients,
 * not negative; nesterov, maximize and cautious_weight_decay are 0 or 1.
 *
 * Muon updates whole matrices: params of such a group need shards of whole ones, of a tensor with
 * two dimensions (rows, cols) or three (a stack); others belong in another group. On CUDA only the
 * device updates an optimizer that has them (docs/NUMERICS.md); without cuBLASLt: UNSUPPORTED.
 *
 * A step of Newton-Schulz is X = a X + (b X X' + c (X X')^2) X. ns_steps must not be smaller than
 * the list of ns_coefficients. The list is part of the struct, not behind a pointer, so that a
 * group is one value, which queued steps keep; published lists have at most 10 rows. */
typedef struct offload_group {
  uint32_t struct_size;
  int32_t nesterov;              /* SGD, Muon; needs momentum > 0 and dampening 0 */
  int32_t maximize;              /* 1: step along the gradient; 0: against it */
  int32_t cautious_weight_decay; /* AdamW; 1: an element gets no weight decay if the update,
                                    without the decay, moves it away from zero */
  double lr;                     /* all algorithms */
  double beta1;                  /* AdamW, Adam, Lion; in [0, 1) */
  double beta2;                  /* AdamW, Adam, Lion; in [0, 1) */
  double eps;                    /* AdamW, Adam, Adagrad, Muon; above 0 */
  double weight_decay;           /* all algorithms */
  double momentum;  /* SGD; commit fixes whether it is zero, see offload_optimizer_set_group.
                       Signum, Muon: in [0, 1) */
  double dampening; /* SGD; needs momentum > 0 */
  double lr_decay;  /* Adagrad */
  double initial_accumulator_value; /* Adagrad; commit fills sum with it, later it has no effect */
  int32_t algorithm; /* enum offload_algorithm; 0 = that of the options. offload_optimizer_set_group
                        cannot change it */
  int32_t ns_steps;  /* Muon; steps of Newton-Schulz, at most 99; 0 = 5 */
  double update_rms; /* Muon; if it is 0, a matrix has lr * max(1, rows / cols)^0.5; else lr *
                        update_rms * max(rows, cols)^0.5, where 0.2 fits the lr of AdamW */
  double ns_coefficients[10][3]; /* Muon; a, b and c of each step of Newton-Schulz, of either sign;
                                    a row of zeros ends the list; no row = 3.4445, -4.775, 2.0315;
                                    steps behind the list use its last row */
} offload_group_t;

enum offload_param_flag {
  OFFLOAD_PARAM_REPLICA = 1 /* another rank adds this shard to the norm; Inf and NaN of this rank's
                               gradient are noticed all the same */
};

enum offload_shard_flag {
  OFFLOAD_SHARD_RANGE = 1 /* use range_begin and range_count; otherwise the shard is its boxes */
};

/* The part of a global tensor that this process owns: one or several boxes in the tensor (tensor,
 * expert and pipeline parallelism). With OFFLOAD_SHARD_RANGE it is only a range of the elements of
 * these boxes, counted row by row and one box after the other (ZeRO, distributed optimizer). The
 * caller gives all offsets; the library derives none. A shard may be empty. */
typedef struct offload_shard {
  uint32_t struct_size;
  uint32_t dimensions;         /* 1 to 8 */
  uint32_t box_count;          /* number of boxes, at least 1; they must not overlap */
  uint32_t flags;              /* enum offload_shard_flag, or-ed */
  const int64_t* global_shape; /* [dimensions], each at least 0 */
  const int64_t* box_offsets;  /* [box_count][dimensions] */
  const int64_t* box_extents;  /* [box_count][dimensions] */
  uint64_t range_begin;        /* first element, counted through the boxes in order */
  uint64_t range_count;        /* elements; must equal the param's count */
} offload_shard_t;

/* Muon updates each part of a fused matrix as a matrix of its own if split_rows says how many rows
 * each part has. If the numbers add up to fewer rows than the matrix has, which must be a multiple
 * of their sum, the list is repeated, and a part has its rows of each repetition:
 *
 *   gate and up, h rows each            {h, h}
 *   q, k and v behind each other        {rows of q, rows of k, rows of v}
 *   q, k and v of each group in turn    {rows of q, of k, of v in one group}
 *   each head by itself                 {d, d, ...}, as many as there are heads
 *
 * State has the same layout with and without it, and checkpoints do not have the list. */
typedef struct offload_param {
  uint32_t struct_size;
  uint32_t group;     /* the id that offload_optimizer_add_group returned */
  int32_t dtype;      /* of data: enum offload_dtype; required */
  int32_t grad_dtype; /* of grad: enum offload_dtype; required */
  int32_t placement;  /* enum offload_placement; 0 = device_fraction decides */
  uint32_t flags;     /* enum offload_param_flag, or-ed */
  const char* name; /* identifies the param in checkpoints: unique, not empty, at most 1023 bytes */
  void* data;       /* device address of count elements, contiguous; may be NULL if count is 0 */
  const void* grad; /* device address of count elements, or NULL: there is no gradient yet */
  uint64_t count;   /* elements of this shard */
  const offload_shard_t* shard; /* NULL = the whole of a one-dimensional tensor */
  int32_t chunk_order;  /* the pipeline takes params with a lower chunk_order first, and params with
                           the same one (the default for all) in registration order; if the host
                           holds some gradients, each executor first takes those that are near it.
                           It changes no bit */
  uint32_t split_count; /* Muon; elements of split_rows; 0 = no matrix is split */
  const uint64_t* split_rows; /* [split_count], Muon: see above. The library copies the list */
} offload_param_t;

typedef struct offload_binding {
  uint32_t struct_size;
  uint32_t param;   /* id of the param */
  void* data;       /* new address; NULL = the address does not change */
  const void* grad; /* new address; NULL = no gradient: the next step does not change this param */
} offload_binding_t;

/* The memory that commit takes, by kind and place, and what a step copies. Padding is included. */
typedef struct offload_plan {
  uint32_t struct_size;
  uint32_t param_count;          /* params that are registered */
  uint64_t element_count;        /* elements of all params */
  uint64_t elements[4];          /* elements whose state a tier holds, by enum offload_tier */
  uint64_t state_bytes[4][32];   /* state, by enum offload_tier and enum offload_state_kind */
  uint64_t staging_bytes;        /* pinned host memory: the staging ring and the results of norms */
  uint64_t host_params_bytes;    /* pinned: room for params that are offloaded */
  uint64_t host_grads_bytes;     /* pinned: room for gradients that are offloaded */
  uint64_t host_swap_bytes;      /* pinned: room for the state of the device share */
  uint64_t host_scratch_bytes;   /* tables, norm sums, copies of what queued steps need */
  uint64_t device_scratch_bytes; /* norms, gradients that go back to the device for a step, the
                                    ring that state on the host goes through */
  uint64_t host_bytes;           /* all of the above on the host */
  uint64_t device_bytes;         /* all of the above on the device */
  uint64_t device_free_bytes;    /* free on the device now; 0 on the host device */
  uint64_t host_available_bytes; /* available on the host now, within the limits of cgroups */
  uint64_t pinned_bytes_left; /* how much more this context may pin; UINT64_MAX without a limit */
  uint64_t chunk_count;       /* chunks of a step in which all params have a gradient */
  uint64_t grads_down_bytes;  /* what such a step copies from the device to the host, if CPU
                                 threads update all chunks */
  uint64_t params_up_bytes;   /* what such a step copies from the host to the device, if CPU
                                 threads update all chunks */
  int32_t fits;               /* 1: commit would find enough memory now; disks are not asked */
  uint32_t reserved;
  uint64_t numa_bytes[64]; /* the part of host_bytes on each NUMA node: as the context's policy will
                              place it; after commit, while no work is queued, as the kernel
                              reports it for up to 4,096 pages of each array */
  uint64_t numa_unknown_bytes;  /* the rest of host_bytes: small tables, pages that nothing has
                                   touched yet, nodes above 63; all of it without libnuma */
  uint64_t device_ring_bytes;   /* of device_scratch_bytes: the ring that state on the host goes
                                   through; 0 = CPU threads alone update the host share */
  uint64_t pinned_state_bytes;  /* of host_bytes: state that commit pins for that ring */
  uint64_t host_early_bytes;    /* of host_bytes: for early updates */
  uint64_t host_change_bytes;   /* of host_bytes: for options.track_changes */
  uint64_t device_change_bytes; /* of device_scratch_bytes: for options.track_changes */
  uint64_t host_save_bytes; /* of host_bytes: for state that steps put aside while a save runs */
  uint64_t disk_bytes;      /* of the files in options.disk_paths */
  uint64_t disk_step_bytes; /* what a step in which all params have a gradient reads from these
                               files, and what it writes to them */
  uint64_t host_disk_bytes; /* of host_bytes: the ring through which state on disk goes */
} offload_plan_t;

/* Makes an optimizer; the caller then registers groups and params. Commit allocates the memory. The
 * library writes *optimizer only on success.
 * Errors: INVALID_ARGUMENT (the text names the field). */
OFFLOAD_API int32_t offload_optimizer_create(offload_context_t context,
                                             const offload_optimizer_options_t* options,
                                             offload_optimizer_t* optimizer);

/* Finishes queued work (for at most device_timeout_ns without progress), then frees everything.
 * Views are not valid any more, and every function refuses the handle.
 * Errors: COMM_FAILED (a function of comm has not returned 1 s after comm_timeout_ns: the library
 * keeps the memory of the optimizer and its context for ever, and touches no param or gradient any
 * more; the caller must keep what that function uses until it returns). */
OFFLOAD_API int32_t offload_optimizer_destroy(offload_optimizer_t optimizer);

/* Adds a group of params that share hyperparameters; ids count from 0.
 * Errors: INVALID_ARGUMENT (the text names the field), INVALID_STATE after commit. */
OFFLOAD_API int32_t offload_optimizer_add_group(offload_optimizer_t optimizer,
                                                const offload_group_t* group, uint32_t* group_id);

/* Sets new hyperparameters of a group, at any time. Steps that are queued keep the old ones. A
 * group that was committed with momentum 0 has no momentum_buffer and cannot get momentum later.
 * The group keeps its algorithm. Errors: INVALID_ARGUMENT (the text names the field). */
OFFLOAD_API int32_t offload_optimizer_set_group(offload_optimizer_t optimizer, uint32_t group_id,
                                                const offload_group_t* group);

/* Registers param_count params, all or none. Ids count from 0 in registration order; the library
 * writes the first id of this call to *first_id (first_id may be NULL). The data of two params must
 * not overlap.
 * Errors: INVALID_ARGUMENT (the text names the param and the field), INVALID_STATE after commit. */
OFFLOAD_API int32_t offload_optimizer_add_params(offload_optimizer_t optimizer,
                                                 const offload_param_t* params,
                                                 uint32_t param_count, uint32_t* first_id);

/* Tells the library new addresses, all or none. Steps that are queued use the old ones. The call is
 * cheap enough for every step, since frameworks allocate gradients anew.
 * Errors: INVALID_ARGUMENT (the text names the binding and the field). */
OFFLOAD_API int32_t offload_optimizer_bind(offload_optimizer_t optimizer,
                                           const offload_binding_t* bindings,
                                           uint32_t binding_count);

/* Tells every byte that commit will take or has taken. It changes nothing and may be called at any
 * time. */
OFFLOAD_API int32_t offload_optimizer_plan(offload_optimizer_t optimizer, offload_plan_t* plan);

/* Takes the memory of the plan, copies the masters in from the params (after the work that is
 * queued on stream now) and sets the moments to zero. Returns when that is done. After an error
 * the library keeps no memory, and the caller may go on to register.
 * Errors: INVALID_STATE (no params, or committed before), OUT_OF_HOST_MEMORY,
 * OUT_OF_DEVICE_MEMORY, INVALID_ARGUMENT (pinned_bytes_max is too small; the text has the bytes
 * needed), UNSUPPORTED (more names and shapes than a file of a checkpoint may hold), DEVICE_FAILED;
 * with state on disk also INVALID_ARGUMENT (disk_ring_bytes), IO_FAILED (the text names the
 * directory and the bytes) and UNSUPPORTED (a param is placed OFFLOAD_PLACE_HOST beside a
 * disk_fraction above 0).
 *
 * State on disk (options.disk_paths). Commit makes one file in each directory of disk_paths,
 * takes its room, and removes its name: when the process ends, in whatever way, the files are gone.
 * They are no checkpoint. A step reads chunks ahead into a ring of disk_ring_bytes, they are
 * updated there, and written back meanwhile; all bits are those of state in memory. CPU threads
 * update a chunk with state on disk, in a step, and begin with these chunks. With
 * OFFLOAD_EXECUTORS_STREAMED, and with matrices of OFFLOAD_MUON on CUDA devices, the device does:
 * chunks go from this ring, which is pinned then, through the device's ring and back. Reads and
 * writes bypass the page cache where the file system allows that. A hash of all that was written is
 * kept in memory and compared at each read. A read or write that fails, or a file that somebody has
 * cut off or changed, poisons the optimizer with a text that names the directory; the last
 * checkpoint loads into a new one. (A failed read of a save, or of a call that reads state, fails
 * only that.) A step behind a save waits until the save has read all state. Saves, loads,
 * read_state and write_state work on all state, offload_optimizer_state only on that in memory.
 * early_update_bytes is about chunks in memory. Refused with UNSUPPORTED beside it:
 * save_buffer_bytes (UINT64_MAX means 0 then).
 */
OFFLOAD_API int32_t offload_optimizer_commit(offload_optimizer_t optimizer,
                                             offload_stream_t stream);

/* --------------------------------------------------------------------------------- stepping -- */

enum offload_step_flag {
  /* The caller guarantees that every gradient is finite. If there is no norm to clip by, the step
   * then skips the pass that looks for Inf and NaN. If a gradient is not finite after all, the
   * resulting numbers are unspecified, but the behaviour is defined. */
  OFFLOAD_STEP_ASSUME_FINITE = 1,
  /* If an element of a bf16 or fp16 param differs from its rounded fp32 master, other code has
   * written it: the step first makes the master equal to the element. (For bf16, ties may have been
   * rounded to even or away from zero.) The step does this only for params that it updates, and not
   * if it is skipped; a later step then does it. Only for params in host memory; for others call
   * offload_optimizer_refresh_masters. The step reads 2 more bytes for each element. */
  OFFLOAD_STEP_FOLLOW_PARAMS = 2
};

typedef struct offload_step_options {
  uint32_t struct_size;
  uint32_t flags;          /* enum offload_step_flag, or-ed */
  double grad_scale;       /* the loss scale, above 0: the step divides gradients by it; 0 = 1 */
  double grad_norm_max;    /* clip the global norm of the unscaled gradients to this, as
                              torch.nn.utils.clip_grad_norm_ does; 0 = no clipping */
  offload_stream_t stream; /* gradients and params are ready after the work queued on it now */
} offload_step_options_t;

/* What a completed step did, and how long its parts took. */
typedef struct offload_step_result {
  uint32_t struct_size;
  int32_t skipped;      /* 1: a gradient had an Inf or NaN; the step has changed nothing */
  uint64_t step;        /* steps applied so far, this one included unless it was skipped */
  double grad_norm;     /* global norm of the unscaled gradients before clipping; NaN if the
                           step did not compute it (ASSUME_FINITE without clipping), Inf or NaN
                           if it was skipped */
  double grad_clip;     /* factor by which clipping multiplied the gradients; 1 = no clipping */
  double total_seconds; /* from the start of the work to its end */
  double norm_seconds;  /* from the start until the norm was known */
  double grads_down_seconds;    /* copying gradients to the host, as the device timed it */
  double update_seconds;        /* CPU threads updating the host share */
  double params_up_seconds;     /* copying params to the device, as the device timed it */
  double device_update_seconds; /* the device updating its share */
  double stall_seconds;         /* CPU threads waiting for gradients, a staging slot, the device's
                                   update or a save */
  uint64_t grads_down_bytes;    /* gradients copied from the device to the host */
  uint64_t params_up_bytes;     /* params copied from the host to the device */
  uint64_t cpu_elements;        /* elements of the host share that CPU threads updated */
  uint64_t streamed_elements;   /* elements of the host share whose state went through the device */
  uint64_t state_up_bytes;      /* streamed state copied from the host to the device */
  uint64_t state_down_bytes;    /* streamed state copied from the device to the host */
  double state_up_seconds;      /* copying streamed state to the device, as the device timed it */
  double streamed_update_seconds; /* the device updating the streamed elements */
  double state_down_seconds;      /* copying streamed state back, as the device timed it */
  double cpu_idle_seconds;        /* from the end of the CPU threads' last chunk to that of the last
                                     streamed chunk */
  double streamed_idle_seconds;   /* from the end of the last streamed chunk to that of the CPU
                                     threads' last chunk */
  uint64_t early_elements; /* elements of the host share that had been updated before the step; they
                              count neither as cpu_elements nor as streamed_elements */
  uint64_t undone_elements; /* elements updated early and undone, since the step before */
} offload_step_result_t;

/* Queues one step over every param that has a gradient, and returns at once. At most 8 steps may be
 * queued. options may be NULL for the defaults; ticket may be NULL. If any gradient is not finite,
 * the step is skipped: no bit changes, step counts included.
 * Errors: INVALID_ARGUMENT, INVALID_STATE (before commit, or 8 steps are queued), UNSUPPORTED (a
 * flag that this release does not know, or FOLLOW_PARAMS with params in device memory), POISONED.
 */
OFFLOAD_API int32_t offload_optimizer_step(offload_optimizer_t optimizer,
                                           const offload_step_options_t* options,
                                           offload_ticket_t* ticket);

/* Tells what a completed step did. The library remembers the last 64 steps; ticket 0 is the last
 * step queued.
 * Errors: INVALID_STATE (the step is still running, or too old), INVALID_ARGUMENT (not a ticket of
 * this optimizer's steps). */
OFFLOAD_API int32_t offload_optimizer_step_result(offload_optimizer_t optimizer,
                                                  offload_ticket_t ticket,
                                                  offload_step_result_t* result);

/* Blocks this thread until the ticket completes (0: everything queued, saves included), for at most
 * timeout_ns. With timeout_ns 0 it only looks; with a negative timeout_ns it waits without limit.
 * Errors: TIMED_OUT; the cause if the work failed; INVALID_ARGUMENT (not a ticket of this
 * optimizer); INVALID_STATE (the ticket of a save or load that failed so long ago that the library
 * has forgotten the cause: it remembers the last 64). */
OFFLOAD_API int32_t offload_optimizer_wait(offload_optimizer_t optimizer, offload_ticket_t ticket,
                                           int64_t timeout_ns);

/* Makes work that is queued on stream later wait until the params named (all if params is NULL or
 * param_count is 0) have the values of the ticket, and until no save up to the ticket reads params
 * any more. On CUDA this call blocks the calling thread until the work that writes these params has
 * been queued on the library's streams, and until no save up to the ticket reads params; then it
 * puts the stream behind that work and returns, while the work goes on. (A stream that waited for
 * work which is not queued yet could block that work: streams share the queues of the hardware.)
 * If the ticket is not of a step, it blocks until the ticket completes. So call it for the params
 * of a layer shortly before the layer is queued, in the order of options.chunk_order. On the
 * simulated device this call does not block. On the host device it blocks until the params are
 * written: there is only the NULL stream. If the step fails, the stream goes on.
 * Errors: INVALID_ARGUMENT (unknown param id, or not a ticket of this optimizer), UNSUPPORTED,
 * POISONED, COMM_FAILED (a call that blocks waits for a function of comm that has not returned 1 s
 * after comm_timeout_ns: the optimizer is poisoned, and the library touches no param or gradient
 * any more). */
OFFLOAD_API int32_t offload_optimizer_stream_wait(offload_optimizer_t optimizer,
                                                  offload_ticket_t ticket, offload_stream_t stream,
                                                  const uint32_t* params, uint32_t param_count);

/* -------------------------------------------------------------------------------- lifecycle -- */
/* An RL trainer gives the device's memory to the rollout and takes it back; pre-training offloads
 * gradients while the backward pass runs. docs/LIFECYCLE.md has the table of what is allowed when.
 *
 * Each call moves all params, or those that options names; it leaves alone what is already where it
 * should be. If any param cannot be moved, the call is refused and moves none. It queues the copies
 * and returns. When the ticket of an offload completes, the caller may free or reuse the device
 * memory: the library has given the device address up. Before a reload the caller tells the new
 * address with offload_optimizer_bind, even if it is the same as before. What may be moved is fixed
 * at create (movable). The content survives bit for bit. */

enum offload_move_flag {
  OFFLOAD_MOVE_ACCUMULATE = 1, /* offload_grads: add to the gradients on the host, in fp32 */
  OFFLOAD_MOVE_DROP = 2        /* offload_grads: discard the gradients, wherever they are */
};

typedef struct offload_move_options {
  uint32_t struct_size;
  uint32_t flags;                  /* enum offload_move_flag, or-ed */
  const uint32_t* params;          /* ids; NULL = all */
  uint32_t param_count;            /* number of ids; 0 with params not NULL: no param */
  uint32_t stream_count;           /* number of streams, at most 4; 0 = the NULL stream alone */
  const offload_stream_t* streams; /* the copies wait for the work that is queued on these now */
} offload_move_options_t;

/* Copies params to the host, or back to the device. While a param is on the host, the library
 * refuses steps that would update it.
 * Errors of all these functions: INVALID_ARGUMENT (unknown param or stream), INVALID_STATE (not
 * movable, or docs/LIFECYCLE.md forbids it now: the text tells what to call first), POISONED. */
OFFLOAD_API int32_t offload_optimizer_offload_params(offload_optimizer_t optimizer,
                                                     const offload_move_options_t* options,
                                                     offload_ticket_t* ticket);
OFFLOAD_API int32_t offload_optimizer_reload_params(offload_optimizer_t optimizer,
                                                    const offload_move_options_t* options,
                                                    offload_ticket_t* ticket);

/* Copies gradients to the host, or back to the device. They keep their values. The next step reads
 * gradients where they are; afterwards the host holds those no more. With ACCUMULATE each call adds
 * the gradients to those on the host, in fp32 and in the order of the calls, and the step uses the
 * sum. Without it the device computes the norms of gradients while they leave; with it the
 * library's threads compute those of the sums. With DROP nothing is copied, and the params have no
 * gradient until the caller binds one. The library waits as often for hundreds of params of one
 * call as for one param. So a backward hook should collect gradients, 64 MiB for example, and name
 * all of them in one call. */
OFFLOAD_API int32_t offload_optimizer_offload_grads(offload_optimizer_t optimizer,
                                                    const offload_move_options_t* options,
                                                    offload_ticket_t* ticket);
OFFLOAD_API int32_t offload_optimizer_reload_grads(offload_optimizer_t optimizer,
                                                   const offload_move_options_t* options,
                                                   offload_ticket_t* ticket);

/* Tells of each param whether its gradient is better left on the device until the next step has
 * read it: the device will update most of the param, because it has the state, or the state is in
 * the part of the host share that goes through the device's ring. A program that offloads gradients
 * during the backward pass leaves these out: they would go down and come up again. This is advice;
 * the bits do not depend on it. The part that goes through the ring is as large as it was in the
 * last step (before the first step it is empty, with OFFLOAD_EXECUTORS_STREAMED it is everything).
 *
 * keep: one byte for each param, in the order of ids; set to 1 where the gradient should stay,
 *   else 0.
 * count: the number of params.
 *
 * Errors: INVALID_ARGUMENT (keep is NULL; count), INVALID_STATE (not committed), POISONED. */
OFFLOAD_API int32_t offload_optimizer_grads_to_keep(offload_optimizer_t optimizer, uint8_t* keep,
                                                    uint32_t count);

/* Early updates (options.early_update_bytes). While the backward pass goes on, CPU threads update
 * chunks of the host share whose gradients offload_grads has copied to the host. They assume that
 * the next step will have the groups of the first such call, the grad_scale of the step before, no
 * clipping and no skip. They put the old state aside, and leave the params on the device as they
 * are. If the step is as assumed, it keeps these updates and copies their params to the device.
 * Otherwise the library copies the old state back and updates as usual, so all bits are those of a
 * run without early updates. Every other call that reads or changes state, params or gradients (a
 * load, a save and a change of the fraction too) first undoes the early updates. After an undo the
 * next step gets no early updates; if undos follow each other, the next 2, 4 ... up to 64 steps.
 *
 * Chunks are chosen as their gradients arrive: at most as many as early_update_bytes has room for,
 * and only a few more than the workers could update before the last step. Gradients that ACCUMULATE
 * has added up get no early updates. From an offload_grads to the end of the next step:
 * - the content of a view of offload_optimizer_state that was asked for before is unspecified;
 * - the caller must not write params with split masters without calling this first, because an
 *   early update may have read them. (With other masters such a write has no effect without
 *   offload_optimizer_refresh_masters, and that call undoes.)
 *
 * offload_optimizer_undo_early_updates undoes them, and there are no others before the next step
 * has ended. When its ticket completes, views and params may be read and written. It is not an
 * error if there is nothing to undo.
 * Errors: INVALID_STATE (not committed, or 256 calls are queued), POISONED. */
OFFLOAD_API int32_t offload_optimizer_undo_early_updates(offload_optimizer_t optimizer,
                                                         offload_ticket_t* ticket);

/* Copies the masters and moments of the device share to the host, or back to the device. While the
 * states of all params are offloaded, the library holds no byte on the device. A reload allocates
 * the device memory before it returns.
 * Errors: also OUT_OF_DEVICE_MEMORY (the call has changed nothing). */
OFFLOAD_API int32_t offload_optimizer_offload_states(offload_optimizer_t optimizer,
                                                     const offload_move_options_t* options,
                                                     offload_ticket_t* ticket);
OFFLOAD_API int32_t offload_optimizer_reload_states(offload_optimizer_t optimizer,
                                                    const offload_move_options_t* options,
                                                    offload_ticket_t* ticket);

/* Makes masters follow params that other code has written; moments and step counts stay. Call it
 * after such writes: the next step would otherwise restore the old weights, unless it has
 * OFFLOAD_STEP_FOLLOW_PARAMS. The rule is the same as there, wherever the params are: an element
 * whose param has the bits of its fp32 master, rounded, keeps all bits of the master. So params
 * that nobody has written lose nothing. Where the bf16 param is one half of the master
 * (options.master_layout), it is the rounded master whatever the other half is. The library cannot
 * see a write there; it sets the other half to 0 in all elements of the params that the call names.
 * Errors: as above. */
OFFLOAD_API int32_t offload_optimizer_refresh_masters(offload_optimizer_t optimizer,
                                                      const offload_move_options_t* options,
                                                      offload_ticket_t* ticket);

/* Changes the device fraction of a committed optimizer. Steps that are queued before this call use
 * the old fraction, steps behind it the new one; the bits are the same.
 *
 * device_fraction: from 0 (all state on the host) to 1 (all on the device). As at create, it
 * decides about params with OFFLOAD_PLACE_AUTO. The library copies the elements whose state changes
 * its place and leaves the others where they are. On OFFLOAD_DEVICE_HOST, which has one memory,
 *   nothing moves.
 * ticket: completes when the library has copied the content and freed the memory that it no longer
 *   needs, on host and device. May be NULL.
 *
 * Before it returns, the call takes the memory that the new fraction needs in addition; until the
 * ticket completes, the library holds the memory of both fractions.
 * The call is allowed at any time. While states are offloaded they stay on the host, and a later
 * reload copies to the device what the new fraction puts there. While a save runs, the change waits
 * until the save has read all state. The change reads fp32 params at their addresses: these must
 * stay valid until the ticket completes. Views of offload_optimizer_state are not valid any more:
 * ask for new ones.
 *
 * Errors: INVALID_ARGUMENT (device_fraction); OUT_OF_DEVICE_MEMORY, OUT_OF_HOST_MEMORY, and
 *   INVALID_ARGUMENT for pinned_bytes_max (the memory that the change needs is not free; nothing
 * has changed); INVALID_STATE (not committed, or 256 calls are queued); POISONED. */
OFFLOAD_API int32_t offload_optimizer_set_device_fraction(offload_optimizer_t optimizer,
                                                          double device_fraction,
                                                          offload_ticket_t* ticket);

/* The same for the disk too: set_device_fraction leaves the disk its fraction.
 *
 * disk_fraction: from 0 (no state on disk) to 1 (all of it), with device_fraction at most 1. Above
 *   0 it needs options.disk_paths, which may be given at create with a disk_fraction of 0.
 *
 * If state may be on disk, both calls make its files and its ring anew. They take the room for both
 * before they return, and the old ones go when the ticket completes. All state that is on disk
 * before or after the change is read and written once, also where its place stays the same.
 *
 * Errors: as above; also INVALID_ARGUMENT (disk_fraction, both fractions together, and
 *   disk_ring_bytes if the new chunks need more), IO_FAILED (the directories have too little room;
 *   nothing has changed), UNSUPPORTED (a param is placed OFFLOAD_PLACE_HOST beside a disk_fraction
 *   above 0). A file that fails during the change poisons the optimizer. */
OFFLOAD_API int32_t offload_optimizer_set_fractions(offload_optimizer_t optimizer,
                                                    double device_fraction, double disk_fraction,
                                                    offload_ticket_t* ticket);

/* A view of one kind of state of one param: its first device_count elements lie at device_data on
 * the device, the next host_count elements at host_data in host memory, pinned as one range or not
 * at all; the rest is on disk. The library owns the memory. The view is valid until destroy or the
 * next offload_optimizer_set_device_fraction or _set_fractions, with two exceptions: device_data is
 * valid until offload_states, and where the param is its own master, as long as the param's
 * address. The content does not change while no work is queued, and the caller may write it then.
 */
typedef struct offload_state_view {
  uint32_t struct_size;
  int32_t dtype;         /* enum offload_dtype */
  void* device_data;     /* NULL if device_count is 0 */
  uint64_t device_count; /* elements */
  void* host_data;       /* NULL if host_count is 0 */
  uint64_t host_count;   /* elements */
  uint64_t step_count;   /* steps that have updated this param */
  uint64_t disk_count;   /* the last elements: these are on disk and have no address; see
                            offload_optimizer_read_state */
} offload_state_view_t;

/* Gives the view of one kind of state. An fp32 param that is updated in place has no separate
 * master: the view is then the param itself. A bf16 param with OFFLOAD_MASTER_SPLIT or _SPLIT24 has
 * MASTER_LOW and no MASTER.
 * Errors: INVALID_ARGUMENT (unknown param, or a kind that the param does not have), INVALID_STATE
 * (before commit; while work is queued: wait first; while the states of the param are offloaded, or
 * the param itself where it is its own master: reload first). */
OFFLOAD_API int32_t offload_optimizer_state(offload_optimizer_t optimizer, uint32_t param,
                                            int32_t kind, offload_state_view_t* view);

/* Copies elements [first, first + count) of one kind of a param's state to the caller's memory, as
 * fp32 numbers: the numbers that steps use and checkpoints have. The state may be stored in any
 * layout and be anywhere: on the host, on the device, offloaded, or in the param, which may be
 * offloaded too. OFFLOAD_STATE_MASTER is the masters in every layout.
 *
 * values: room for count numbers in host memory; after a failure its content is unspecified. May be
 *   NULL if count is 0.
 *
 * Returns when the numbers have been copied, without waiting for queued work: while there is some,
 * the call is refused. If a param is its own master, or a part of it, the call reads the param; no
 * work of the caller may write it meanwhile. If some of the state is on a device, the call uses
 * less than 1 MiB of memory and a stream while it runs.
 * Errors: INVALID_ARGUMENT (unknown param; a kind that the param does not have, or
 *   OFFLOAD_STATE_MASTER_LOW; elements beyond the last one; values is NULL or not aligned),
 *   INVALID_STATE (before commit; while work is queued, a save until its ticket completes: wait
 *   first), OUT_OF_HOST_MEMORY, DEVICE_FAILED (also after device_timeout_ns), POISONED. They change
 *   nothing. */
OFFLOAD_API int32_t offload_optimizer_read_state(offload_optimizer_t optimizer, uint32_t param,
                                                 int32_t kind, uint64_t first, uint64_t count,
                                                 float* values);

/* Replaces elements [first, first + count) of one kind of a param's state by the caller's numbers,
 * wherever they are, as above. Numbers that the layout cannot represent are rounded to nearest,
 * ties to even: moments in bf16, masters of 24 bits. A later read returns the rounded numbers.
 *
 * With a master the call writes the param too, which is its master, rounded, as a load does: on the
 * device, or in host memory while the param is offloaded. So both stay equal, and no
 * offload_optimizer_refresh_masters is needed. No work of the caller may use the param meanwhile.
 * Step counts stay as they are; see offload_optimizer_set_step_count.
 *
 * values: count numbers in host memory. May be NULL if count is 0.
 *
 * Returns when all has been written, without waiting for queued work.
 * Errors: as above. They change nothing, with one exception: if the device or memory fails after
 *   the first number may have been written, the state is a mixture and the optimizer poisoned. */
OFFLOAD_API int32_t offload_optimizer_write_state(offload_optimizer_t optimizer, uint32_t param,
                                                  int32_t kind, uint64_t first, uint64_t count,
                                                  const float* values);

/* Sets how many steps have updated a param, for state that the caller has written:
 * bias corrections and the treatment of a first step depend on this count. At most 2^53; steps at
 * that count leave it there.
 * Errors: INVALID_ARGUMENT (unknown param, or count too large), INVALID_STATE (before commit, or
 * while work is queued: wait first), POISONED. */
OFFLOAD_API int32_t offload_optimizer_set_step_count(offload_optimizer_t optimizer, uint32_t param,
                                                     uint64_t step_count);

/* ---------------------------------------------------------------------------------- changes -- */
/* A trainer sends new weights to programs that follow it. At the learning rates of reinforcement
 * learning a step changes a few percent of the bf16 numbers, so it sends those alone. With
 * options.track_changes steps note which ones: they have old and new numbers at hand, and no second
 * copy of the weights is kept.
 *
 *   offload_optimizer_changes              what may differ since changes were last acknowledged
 *   (the program sends it, and its followers say that they have it)
 *   offload_optimizer_acknowledge_changes  the next take begins from here
 *
 * A take gives all elements that may differ, and may give some that do not; never less. Until it is
 * acknowledged, later takes give its elements again, so a take that was lost on its way costs
 * nothing. The first take after commit gives all params as `dense`: send them whole. So does the
 * first one after a load, and for the params that are named or written by _refresh_masters, by
 * _write_state (masters), by _mark_changed, and by a bind that gives a param which is not offloaded
 * another address. In host memory a refresh, and a step with OFFLOAD_STEP_FOLLOW_PARAMS, note what
 * other code has written element by element. The library cannot see other writes: through a view of
 * offload_optimizer_state, to a param that is its own master or one half of it, or before a step
 * without OFFLOAD_STEP_FOLLOW_PARAMS. Tell it with offload_optimizer_mark_changed, and where the
 * param has a master apart with offload_optimizer_refresh_masters instead, or the next step brings
 * the old value back; if that is forgotten, the hash of the follower differs. */

enum offload_changes_flag {
  OFFLOAD_CHANGES_IN_TENSOR = 1, /* indices count in the whole tensor, row by row; without it in
                                    this rank's shard */
  OFFLOAD_CHANGES_GAPS = 2,      /* store each index as its distance from the one before it, the
                                    first one from 0, in as few bytes as the largest gap takes */
  OFFLOAD_CHANGES_WIDE = 4,      /* store each index in 8 bytes, as programs use them that index
                                    with signed 64-bit numbers. It does not change which params are
                                    dense */
  OFFLOAD_CHANGES_ON_DEVICE = 8  /* write indices and values to device memory. The only other flag
                                    may be OFFLOAD_CHANGES_WIDE, and no param may be on the host */
};

typedef struct offload_changes_options {
  uint32_t struct_size;
  uint32_t flags;        /* enum offload_changes_flag, or-ed */
  void* buffer;          /* memory for indices and values, aligned to 8 bytes: on the host, or with
                            OFFLOAD_CHANGES_ON_DEVICE on the device */
  uint64_t buffer_bytes; /* of it. If it does not suffice, the take is refused and out->bytes tells
                            what is needed: so pass 0 first, or what was needed last time */
  double dense_above;    /* a param of which a larger fraction has changed is dense, 0 to 1; 0 = if
                            indices and values would take as many bytes as the whole param */
  offload_stream_t stream; /* params are read after the work that is queued on it now */
} offload_changes_options_t;

/* What a take gives of one param. */
typedef struct offload_change {
  uint32_t struct_size;
  uint32_t param;       /* its id */
  int32_t dense;        /* 1: send the whole param; there are no indices and values */
  int32_t dtype;        /* of the values: the param's, enum offload_dtype */
  uint32_t index_bytes; /* of one index: 4 or 8; of one gap: 1, 2, 4 or 8. Unsigned. 8 with
                           OFFLOAD_CHANGES_WIDE */
  int32_t gaps;         /* 1: the indices are gaps. 0 also where OFFLOAD_CHANGES_GAPS was set, but
                           the shard's boxes are not in the order of the tensor */
  uint64_t count;       /* elements that may differ; if dense, all that the rank has */
  uint64_t indices_offset; /* bytes into options.buffer; a multiple of 8 */
  uint64_t values_offset;  /* the same, of the new values, in the order of the indices */
  uint64_t hash;           /* of all that the rank has of the param (offload_content_hash): what the
                              follower must have afterwards */
  uint64_t base_hash;      /* the hash as of the take that was acknowledged last: what the follower
                              must have before. Not if dense */
  int32_t has_base;        /* 0: no take of this param has been acknowledged */
  uint32_t reserved;       /* 0 */
} offload_change_t;

typedef struct offload_changes {
  uint32_t struct_size;
  uint32_t param_count;           /* of `params` */
  uint64_t take;                  /* the number to acknowledge; 0: the take was refused */
  uint64_t bytes;                 /* of options.buffer that the take has used or needs */
  const offload_change_t* params; /* in the order asked for, params[0].struct_size bytes apart. The
                                     library owns them; valid until the next take, or destroy */
} offload_changes_t;

/* Takes what may have changed of these params (NULL: all) since changes were last acknowledged.
 * Params may be on the device, on the host or offloaded. Returns when all has been copied, without
 * waiting for queued work: while there is some, the call is refused. No work of the caller may
 * write the params meanwhile. A take that is refused or fails clears nothing.
 * If options.buffer_bytes does not suffice, the status is INVALID_ARGUMENT, and of *out the library
 * writes `bytes`.
 * Params on a device are read there, and only the changed elements are copied; if the buffer is
 * there too, none. While a take runs it uses up to 9 MB of device memory and as much pinned host
 * memory.
 * Errors: INVALID_ARGUMENT (unknown param, or one twice; buffer is NULL, not aligned or not memory
 * of the device; buffer_bytes: the text has the bytes needed; dense_above; stream), INVALID_STATE
 * (before commit; options.track_changes was 0; while work is queued, a save until its ticket
 * completes; a param has no address, or is on the host and the buffer on the device), UNSUPPORTED
 * (unknown flag; OFFLOAD_CHANGES_ON_DEVICE with IN_TENSOR or GAPS, or where the host is the
 * device), OUT_OF_HOST_MEMORY, OUT_OF_DEVICE_MEMORY, DEVICE_FAILED, POISONED. */
OFFLOAD_API int32_t offload_optimizer_changes(offload_optimizer_t optimizer, const uint32_t* params,
                                              uint32_t param_count,
                                              const offload_changes_options_t* options,
                                              offload_changes_t* out);

/* Says that the followers have all that a take gave: later takes begin from its values. Elements
 * that a step has changed since the take are given again. May be called while work is queued, and
 * again. Of params that a later take has named too, nothing is cleared before that one is
 * acknowledged.
 * Errors: INVALID_ARGUMENT (not a take of this optimizer), INVALID_STATE (as above), POISONED. */
OFFLOAD_API int32_t offload_optimizer_acknowledge_changes(offload_optimizer_t optimizer,
                                                          uint64_t take);

/* Says that other code has written these params (NULL: all), or may have: the next take gives them
 * whole. May be called while work is queued.
 * Errors: INVALID_ARGUMENT (unknown param), INVALID_STATE (before commit; options.track_changes was
 * 0), POISONED. */
OFFLOAD_API int32_t offload_optimizer_mark_changed(offload_optimizer_t optimizer,
                                                   const uint32_t* params, uint32_t param_count);

/* The hash of `bytes` bytes in host memory, which a follower compares with that of a take. With
 * word i (from 0) of 8 bytes, little-endian, the last one filled up with zeros, it is the sum of
 * mix(word + (i + 1) * 0x9E3779B97F4A7C15) over all words, plus mix(bytes); all modulo 2^64, where
 * mix(x) is
 *   x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
 *   x = (x ^ (x >> 27)) * 0x94D049BB133111EB
 *   x ^ (x >> 31)
 * So parts may be hashed in any order. It finds errors, and not what somebody has forged.
 * Errors: INVALID_ARGUMENT (data is NULL and bytes is not 0; hash is NULL). */
OFFLOAD_API int32_t offload_content_hash(const void* data, uint64_t bytes, uint64_t* hash);

/* Totals since create, and the memory in use now. Fields that offload_step_result_t has too are
 * sums over all steps. */
typedef struct offload_stats {
  uint32_t struct_size;
  uint32_t queued; /* calls that are queued or running now; a save until its ticket completes */
  uint64_t steps_applied;   /* steps that have updated params; a load does not change it
                               (`step` of later results continues from the checkpoint) */
  uint64_t steps_skipped;   /* steps that a gradient with an Inf or NaN has skipped */
  uint64_t host_bytes;      /* host memory that the library holds now, as in the plan */
  uint64_t device_bytes;    /* device memory that the library holds now, as in the plan */
  uint64_t staging_bytes;   /* staging memory that it holds now; part of host_bytes */
  uint64_t params_bytes[4]; /* by enum offload_tier. On the device the caller's: registered
                               params that have an address; on the host offloaded params */
  uint64_t grads_bytes[4];  /* by enum offload_tier. On the device the caller's: gradients
                               that have an address; on the host offloaded or accumulated
                               gradients */
  uint64_t state_bytes[4];  /* by enum offload_tier: state of the tier's share; the host's
                               includes offloaded state of the device share */
  uint64_t grads_down_bytes;
  uint64_t params_up_bytes;
  uint64_t offloaded_bytes; /* what offload_* has copied since create */
  uint64_t reloaded_bytes;  /* what reload_* has copied since create */
  double total_seconds;
  double norm_seconds;
  double grads_down_seconds;
  double update_seconds;
  double params_up_seconds;
  double device_update_seconds;
  double stall_seconds;
  uint64_t cpu_elements;
  uint64_t streamed_elements;
  uint64_t state_up_bytes;
  uint64_t state_down_bytes;
  double state_up_seconds;
  double streamed_update_seconds;
  double state_down_seconds;
  double cpu_idle_seconds;
  double streamed_idle_seconds;
  uint64_t gave_way_copies;    /* chunks of steps, and pieces of moves, that waited on the host
                                  until a stash's prefetches that were under way had ended
                                  (docs/STASH.md) */
  double gave_way_seconds;     /* how long they waited; part of other times above */
  uint64_t pushes_ahead_bytes; /* a stash's pushes that were queued, and not known to have ended,
                                  when a step queued a chunk to the host: the sum over all its
                                  chunks */
  uint64_t early_elements;
  uint64_t undone_elements;
  uint64_t disk_read_bytes;    /* from the files in options.disk_paths, since commit */
  uint64_t disk_written_bytes; /* to them */
} offload_stats_t;

/* Tells what the optimizer holds now, and totals since create. */
OFFLOAD_API int32_t offload_optimizer_get_stats(offload_optimizer_t optimizer,
                                                offload_stats_t* stats);

/* ------------------------------------------------------------------------------------ traces -- */
/* A trace is a picture of what the library's threads and streams do, and when: which chunk is
 * copied, updated, and waited for. It is a file that ui.perfetto.dev and chrome://tracing open;
 * docs/TRACE.md tells what its rows mean. A trace changes no bit of any result. Where none is
 * recorded, the library reads one word where an event would be. */

/* Begins to record the queued work of the optimizer, and its calls, into a ring of ring_bytes (0 =
 * 16 MiB, for about 300,000 events; at least 4096). The library takes the ring now, as host memory
 * that no plan counts, and stop frees it. When the ring is full, each new event drops the oldest.
 * Errors: INVALID_STATE (not committed; a trace has been started, or the last one was not written),
 * INVALID_ARGUMENT (ring_bytes), OUT_OF_HOST_MEMORY, POISONED, DEVICE_FAILED. */
OFFLOAD_API int32_t offload_optimizer_trace_start(offload_optimizer_t optimizer,
                                                  uint64_t ring_bytes);

/* Waits, without limit, until everything that has been queued has run, a save too; ends the
 * recording; and writes the trace to path, in the place of a file that is there. If path is NULL,
 * the trace is given up. *dropped is how many events the ring had no room for; dropped may be NULL.
 * After a failure of queued work it writes what led to it.
 * Errors: INVALID_STATE (no trace has been started), IO_FAILED (path; the recording has ended and
 * is kept, call again with another path). */
OFFLOAD_API int32_t offload_optimizer_trace_stop(offload_optimizer_t optimizer, const char* path,
                                                 uint64_t* dropped);

/* ------------------------------------------------------------------------------ checkpoints -- */
/* A checkpoint is a directory: safetensors files with the state, which other tools can open, and a
 * manifest (docs/CHECKPOINT_FORMAT.md). A checkpoint is complete or does not exist: the last step
 * of a save gives the directory its name, when everything is on disk. A crash leaves a directory
 * with another name; no load reads that, and the next save to the same path removes it.
 *
 * Params are found by name. A program with any number of ranks, sharding, device fraction and
 * number of threads can load a checkpoint of any other, bit for bit. Hyperparameters are stored for
 * readers of the checkpoint; a load does not set them and keeps those of the caller's groups. */

/* A thread of the library calls it from time to time and once at the end. bytes_done never
 * decreases. It must not call the library. */
typedef void (*offload_progress_function_t)(void* user, uint64_t bytes_done, uint64_t bytes_total);

enum offload_save_flag {
  OFFLOAD_SAVE_MASTERS_ONLY = 1 /* without moments; only OFFLOAD_LOAD_FRESH_MOMENTS loads it */
};

typedef struct offload_save_options {
  uint32_t struct_size;
  uint32_t flags;          /* enum offload_save_flag, or-ed */
  const char* path;        /* the directory to make; required. Nothing of that name may exist, and
                              its parent must. The name is UTF-8, has at most 230 bytes on most file
                              systems and does not begin with '.'. A relative path starts at the
                              current directory of this call. All ranks give the same path, on a
                              file system that they share */
  offload_stream_t stream; /* fp32 params that are their own masters are read after the work that is
                              queued on it now */
  offload_progress_function_t progress; /* bytes of this rank; NULL = none */
  void* progress_user;                  /* the library passes it to progress */
  uint32_t io_depth; /* blocks of 8 MiB that are read or written at the same time,
                        1 to 64; 0 = 4 */
  uint32_t reserved; /* 0 */
} offload_save_options_t;

/* Queues a save of masters, moments and step counts as they are at this point of the timeline, and
 * returns at once. Training goes on, and the files contain nothing of the steps that are queued
 * behind the save. A step that comes to state which the save has still to read copies it to the
 * buffer of save_buffer_bytes and updates it; the save reads the copy and frees its place. While
 * the buffer has no room for a chunk the step waits until the save has read enough. The buffer is
 * cut into blocks of 512 KiB, which large arrays fill and small ones share. Such a step's ticket
 * completes when the step is done, even if the save is not.
 * While it runs, a save holds io_depth blocks of host memory, a few hundred bytes for each tensor
 * and 8 bytes for each 512 KiB of state.
 * The save reads params where they are if they are their own masters (fp32 params that are updated
 * in place) or the upper halves of split masters. The caller must not write or free those params
 * until the save has read them, or a step has copied them for it. That is so when its own ticket
 * has completed, or the ticket of a step, load, or move of params or states behind it, and on a
 * stream that offload_optimizer_stream_wait has put behind the save. Queued steps wait by
 * themselves. One save runs at a time: a save or load behind a save begins when that one has
 * completed. With a comm table all ranks call this function; each rank writes its own file, and
 * rank 0 completes the directory. If one rank fails, the save fails on all. Params with
 * OFFLOAD_PARAM_REPLICA are saved by the rank that counts them in the norm. While a save runs, the
 * ranks call max, up to 50 times a second if they have nothing else to do, and no step begins
 * before the buffers of all ranks have room for all that the saves have still to read.
 * comm_timeout_ns does not limit how long a rank's disk takes. A save that fails does not poison
 * the optimizer: its ticket returns the cause, nothing remains at path, and training goes on.
 * Errors: INVALID_ARGUMENT (the text names the field; path exists, or its parent does not; a path
 * or the name of a param that no checkpoint can have), INVALID_STATE (before commit, or 256 calls
 * are queued), UNSUPPORTED (unknown flag), POISONED; through the ticket IO_FAILED (the text has
 * the file and the system's error), UNSUPPORTED (more names and shards than a file can hold),
 * OUT_OF_HOST_MEMORY, and another rank's failure with its status; COMM_FAILED and DEVICE_FAILED
 * (these two poison the optimizer). */
OFFLOAD_API int32_t offload_optimizer_save(offload_optimizer_t optimizer,
                                           const offload_save_options_t* options,
                                           offload_ticket_t* ticket);

enum offload_load_flag {
  OFFLOAD_LOAD_FRESH_MOMENTS = 1, /* load masters only: moments as after commit, step counts 0 */
  OFFLOAD_LOAD_KEEP_STEPS = 2,    /* with FRESH_MOMENTS: take step counts from the checkpoint */
  OFFLOAD_LOAD_NO_VERIFY = 4      /* do not compare the hashes of the data: the load reads the files
                                     once, not twice */
};

typedef struct offload_load_options {
  uint32_t struct_size;
  uint32_t flags;                       /* enum offload_load_flag, or-ed */
  const char* path;                     /* the directory of a checkpoint; required. A relative path
                                           starts at the current directory of this call */
  offload_stream_t stream;              /* params are written after the work that is queued on it
                                           now */
  offload_progress_function_t progress; /* bytes of this rank; NULL = none */
  void* progress_user;                  /* the library passes it to progress */
  uint32_t io_depth;                    /* as for save */
  uint32_t reserved;                    /* 0 */
} offload_load_options_t;

/* Queues a load of masters, moments and step counts, and of the params, which the load rounds from
 * the masters and writes to their addresses as of this call. Before it changes anything, the load
 * checks manifest and headers, and every hash unless NO_VERIFY is set; every rank waits until all
 * have done so, however long one takes. A load that is refused changes nothing and does not poison
 * the optimizer: its ticket returns the cause. A load does not touch gradients.
 * Unless NO_VERIFY is set, the load reads each block again to replace state and compares it with
 * what it has checked before it uses the block. If a file has changed in between, the ticket
 * returns CHECKPOINT_CORRUPT with the block, the state is a mixture of old and new, and the
 * optimizer is poisoned.
 * Errors: INVALID_ARGUMENT (the text names the field), INVALID_STATE (before commit, or 256 calls
 * are queued; params or states are offloaded: reload them first), UNSUPPORTED (unknown flag),
 * POISONED; through the ticket IO_FAILED, CHECKPOINT_CORRUPT (the text names file, tensor and
 * block), CHECKPOINT_MISMATCH (the text has the first differences), UNSUPPORTED (format of another
 * release), OUT_OF_HOST_MEMORY, and another rank's failure with its status; COMM_FAILED and
 * DEVICE_FAILED (these two poison the optimizer, as does any failure after a rank has begun to
 * replace state). */
OFFLOAD_API int32_t offload_optimizer_load(offload_optimizer_t optimizer,
                                           const offload_load_options_t* options,
                                           offload_ticket_t* ticket);

/* What a manifest says about the whole checkpoint. */
typedef struct offload_checkpoint_info {
  uint32_t struct_size;
  uint32_t format_version; /* of the manifest */
  int32_t algorithm;       /* enum offload_algorithm, that of the optimizer's options */
  uint32_t save_flags;     /* enum offload_save_flag, or-ed */
  uint32_t world;          /* number of ranks that saved it */
  uint32_t group_count;    /* groups of the optimizer */
  uint64_t step;           /* steps applied before the save */
  uint64_t param_count;    /* different names */
  uint64_t tensor_count;   /* stored arrays: how often visit is called */
  uint64_t file_count;     /* safetensors files */
  uint64_t bytes;          /* of all stored arrays */
} offload_checkpoint_info_t;

/* One stored array: one kind of state of one rank's shard of one param. Strings and arrays are
 * valid during the visit. */
typedef struct offload_checkpoint_tensor {
  uint32_t struct_size;
  int32_t kind;                /* enum offload_state_kind */
  int32_t dtype;               /* as stored: enum offload_dtype */
  uint32_t rank;               /* the rank that saved it */
  uint32_t dimensions;         /* 1 to 8 */
  uint32_t box_count;          /* of its shard */
  const int64_t* global_shape; /* [dimensions] */
  const int64_t* box_offsets;  /* [box_count][dimensions] */
  const int64_t* box_extents;  /* [box_count][dimensions] */
  uint64_t range_begin;        /* first element, counted through the boxes in order */
  uint64_t range_count;        /* elements stored */
  const char* name;            /* of the param */
  const char* file;            /* file name inside the directory */
  uint64_t file_offset;        /* where its first element lies in the file, in bytes */
  uint64_t bytes;
  uint64_t step_count; /* steps that have updated the param */
} offload_checkpoint_tensor_t;

/* The library sets tensor->struct_size; fields beyond it do not exist. The function must not call
 * the library. */
typedef void (*offload_tensor_function_t)(void* user, const offload_checkpoint_tensor_t* tensor);

/* Reads and checks the manifest and the headers of the files, but not the data. info may be NULL.
 * If all is well and visit is not NULL, calls visit on this thread for each stored array, in the
 * order of the manifest.
 * Errors: INVALID_ARGUMENT (path is NULL, struct_size), IO_FAILED (there is no such directory, for
 * example), CHECKPOINT_CORRUPT, UNSUPPORTED (format of another release), OUT_OF_HOST_MEMORY. */
OFFLOAD_API int32_t offload_checkpoint_inspect(const char* path, offload_checkpoint_info_t* info,
                                               offload_tensor_function_t visit, void* user);

typedef struct offload_verify_options {
  uint32_t struct_size;
  uint32_t io_depth;                    /* as for save */
  offload_progress_function_t progress; /* is called on this thread; NULL = none */
  void* progress_user;                  /* the library passes it to progress */
} offload_verify_options_t;

/* Reads every byte of a checkpoint and compares every hash. options may be NULL for the defaults.
 * Errors: as for inspect; INVALID_ARGUMENT (io_depth), UNSUPPORTED (options has unknown fields that
 * are not zero); CHECKPOINT_CORRUPT (the text names the first damaged tensors and their blocks). */
OFFLOAD_API int32_t offload_checkpoint_verify(const char* path,
                                              const offload_verify_options_t* options);

/* Finds the intact checkpoint with the highest step in `directory` and writes its path, ended by a
 * NUL, to path. No file says which checkpoint is the latest, since such a file could be wrong. With
 * verify = NULL a checkpoint is intact if its manifest and headers are; a load of it then still
 * compares every hash. With a verify struct the library also reads the data and compares every
 * hash, beginning with the highest step, until it finds a checkpoint that is intact as a whole: a
 * damaged checkpoint then does not stop a job that resumes by itself. Progress begins again with
 * each checkpoint.
 * Errors: INVALID_ARGUMENT (an argument is NULL; io_depth; path_bytes is too small: the text has
 * the bytes needed), INVALID_STATE (there is none: the text says why the last candidate was
 * refused), IO_FAILED (the system cannot list the directory), UNSUPPORTED (unknown fields of
 * verify), OUT_OF_HOST_MEMORY. */
OFFLOAD_API int32_t offload_checkpoint_newest(const char* directory,
                                              const offload_verify_options_t* verify, char* path,
                                              uint64_t path_bytes);

/* ------------------------------------------------------------------------------------ stash -- */
/* A stash puts activations aside: what the forward pass keeps for the backward pass goes to host
 * memory and comes back before the backward pass needs it, so that the device has room for a larger
 * model. It knows bytes only. docs/STASH.md has a program that can be copied.
 *
 *   forward    offload_stash_push       the copy to the host begins behind the stream's work
 *              offload_stash_release    a little later: the stream waits until the copy has ended;
 *                                       work behind that may overwrite the device memory
 *   backward   offload_stash_prefetch   a little ahead: the copy into memory of the caller begins
 *              offload_stash_pop        the stream waits until that copy has ended
 *
 * Create takes all host memory that a stash ever uses: slabs of equal size. A push takes as many as
 * its bytes fill, so the memory does not become fragmented. Whether a push finds room depends only
 * on the tickets that live at that moment, not on timing.
 * Events on streams order the copies. No function below blocks the calling thread until a copy has
 * ended, except wait and destroy. (Any call that queues on a stream whose launch queue is full
 * waits for room in that queue, as launches of kernels do. Memory that could not be pinned,
 * allow_pageable of the context, is copied on CUDA while the call waits.) On the host device, which
 * has no queues, the calls copy at once.
 * The library copies on two streams of its own, one for each direction, in the order of the calls.
 * Any thread may call any function of a stash at any time before destroy. */

/* The name of the bytes that a push has put aside; the library never gives it out twice. 0 is no
 * ticket. */
typedef uint64_t offload_stash_ticket_t;

/* A point in the order of a lane's pushes. */
typedef uint64_t offload_stash_mark_t;

typedef struct offload_stash_options {
  uint32_t struct_size;
  uint32_t lanes;        /* each micro-batch that is under way at the same time has a lane of its
                            own: mark and rollback concern one lane. 1 to 4096; 0 = 1 */
  uint64_t budget_bytes; /* host memory for slabs, rounded up to whole slabs; required */
  uint64_t slab_bytes;   /* a multiple of 4096; 0 = 4 MiB. A larger one makes fewer copies, a
                            smaller one leaves less of the last slab of each push unused */
  uint64_t min_bytes;    /* push does not take less; 0 = 1 MiB */
  uint32_t tickets_max;  /* most tickets at a time, at most 65536; 0 = one for each slab, at most
                            4096 */
  uint32_t reserved;     /* 0 */
} offload_stash_options_t;

/* The memory that create takes. Padding is included. */
typedef struct offload_stash_plan {
  uint32_t struct_size;
  uint32_t tickets_max;
  uint64_t slab_bytes;
  uint64_t slab_count;
  uint64_t slabs_bytes;          /* of all slabs; pinned, except on the host device */
  uint64_t scratch_bytes;        /* tables */
  uint64_t host_bytes;           /* both of the above. A stash takes no memory on the device */
  uint64_t host_available_bytes; /* available on the host now, within the limits of cgroups */
  uint64_t pinned_bytes_left;    /* that the context may still pin; UINT64_MAX without a limit */
  int32_t fits;                  /* 1: create would find enough memory now */
  uint32_t reserved;
} offload_stash_plan_t;

typedef struct offload_stash_stats {
  uint32_t struct_size;
  uint32_t tickets;     /* that live now */
  uint64_t slabs_bytes; /* that the stash has; less than the plan's if the system did not pin all */
  uint64_t pinned_bytes;   /* of slabs_bytes */
  uint64_t used_bytes;     /* slabs of tickets that live now */
  uint64_t used_bytes_max; /* the largest used_bytes since create */
  uint64_t held_bytes;     /* bytes of tickets that live now; the rest of used_bytes is padding */
  uint64_t pushes;         /* that were taken; this and all counts below are since create */
  uint64_t pushed_bytes;
  uint64_t refused_pushes; /* that found no room */
  uint64_t refused_bytes;
  uint64_t small_pushes; /* that were smaller than min_bytes */
  uint64_t prefetches;
  uint64_t prefetched_bytes;
  uint64_t pops;
  uint64_t drops; /* tickets that drop and rollback have ended */
  /* Copies and waits as the device timed them: those of tickets that have ended, once the library
   * has seen the end of their work. All 0 on the host device. */
  uint64_t down_timed_bytes;   /* bytes of timed copies to the host */
  double down_seconds;         /* the time of these copies */
  uint64_t up_timed_bytes;     /* bytes of timed copies to the device */
  double up_seconds;           /* the time of these copies */
  double release_wait_seconds; /* streams of the caller waited in release for a copy to the host */
  double pop_wait_seconds;     /* and in pop for a copy to the device */
  uint64_t ahead_bytes;        /* bytes of steps and moves that were queued to the device, and not
                                  known to have arrived, when a prefetch was queued: the sum over
                                  all prefetches */
} offload_stash_stats_t;

/* Tells every byte that create would take. It changes nothing.
 * Errors: as for create, except for those of memory: `fits` tells about that. */
OFFLOAD_API int32_t offload_stash_plan(offload_context_t context,
                                       const offload_stash_options_t* options,
                                       offload_stash_plan_t* plan);

/* Makes a stash and takes its memory. The slabs are pinned, within pinned_bytes_max of the context.
 * If the system pins only a part, the stash has fewer slabs, and notes of the context and stats
 * tell so; if it pins nothing and allow_pageable of the context is 1, the stash uses all slabs
 * unpinned. The library writes *stash only on success. Errors: INVALID_ARGUMENT (the text names the
 * field; pinned_bytes_max is too small: the text has the bytes needed), OUT_OF_HOST_MEMORY,
 * DEVICE_FAILED. */
OFFLOAD_API int32_t offload_stash_create(offload_context_t context,
                                         const offload_stash_options_t* options,
                                         offload_stash_t* stash);

/* Finishes the copies that are under way (for at most device_timeout_ns), then frees everything.
 * Tickets that live end. */
OFFLOAD_API int32_t offload_stash_destroy(offload_stash_t stash);

/* Puts `bytes` bytes at `data`, memory of the device, aside: queues their copy to the host behind
 * the work that is queued on stream now, and gives a ticket. From now on the caller must not write
 * or free the memory, until release, wait, pop or drop has ordered that behind the copy.
 * If the stash does not take it, *ticket is 0, the status is OFFLOAD_OK and nothing has happened:
 * the caller keeps its tensor. That is so if bytes is less than min_bytes, or if the slabs or
 * tickets that are free do not suffice.
 * Errors: INVALID_ARGUMENT (lane, data, stream, ticket is NULL), INVALID_STATE (stream is capturing
 * a graph), POISONED, DEVICE_FAILED. */
OFFLOAD_API int32_t offload_stash_push(offload_stash_t stash, uint32_t lane, const void* data,
                                       uint64_t bytes, offload_stream_t stream,
                                       offload_stash_ticket_t* ticket);

/* Makes work that is queued on stream later wait until the ticket's copy to the host has ended.
 * That work may overwrite the memory that was pushed, so the caller may free it in the order of
 * stream. A call shortly behind the push makes the stream wait for the copy; a call some layers
 * later finds it done. May be called again, for other streams.
 * Errors: INVALID_ARGUMENT (not a ticket of this stash, or one that has ended; stream),
 * INVALID_STATE (stream is capturing a graph), POISONED, DEVICE_FAILED. */
OFFLOAD_API int32_t offload_stash_release(offload_stash_t stash, offload_stash_ticket_t ticket,
                                          offload_stream_t stream);

/* Queues the copy of the ticket's bytes into `destination`, memory of the device with room for
 * destination_bytes, behind the work that is queued on stream now (which may still use that
 * memory). Until pop the caller must not use or free the memory. The copies to the device run in
 * the order of the calls, so call it in the order in which the backward pass needs the bytes.
 * Errors: INVALID_ARGUMENT (not a ticket of this stash, or one that has ended; destination, stream;
 * destination_bytes is less than what was pushed: the text has both), INVALID_STATE (the ticket has
 * been prefetched and not popped; stream is capturing a graph), POISONED, DEVICE_FAILED. */
OFFLOAD_API int32_t offload_stash_prefetch(offload_stash_t stash, offload_stash_ticket_t ticket,
                                           void* destination, uint64_t destination_bytes,
                                           offload_stream_t stream);

enum offload_stash_pop_flag {
  OFFLOAD_STASH_KEEP = 1 /* the ticket lives on and may be prefetched again */
};

/* Makes work that is queued on stream later wait until the copy of the ticket's last prefetch has
 * ended: that work may use the destination, and overwrite the memory that was pushed. Then the
 * ticket ends and its slabs are free for other pushes, unless flags (enum offload_stash_pop_flag,
 * or-ed) has OFFLOAD_STASH_KEEP.
 * Errors: INVALID_ARGUMENT (not a ticket of this stash, or one that has ended; stream),
 * INVALID_STATE (the ticket has not been prefetched; stream is capturing a graph), UNSUPPORTED
 * (unknown flag), POISONED, DEVICE_FAILED. */
OFFLOAD_API int32_t offload_stash_pop(offload_stash_t stash, offload_stash_ticket_t ticket,
                                      offload_stream_t stream, uint32_t flags);

/* Ends a ticket whose bytes nobody needs. Makes work that is queued on stream later wait until the
 * copies of the ticket that are under way have ended: that work may overwrite the memory that was
 * pushed, and the destination of a prefetch.
 * Errors: as for release. */
OFFLOAD_API int32_t offload_stash_drop(offload_stash_t stash, offload_stash_ticket_t ticket,
                                       offload_stream_t stream);

/* Returns the present point in the order of a lane's pushes, for a later rollback. To be called
 * before a part of the program that may fail, or that computes activations again.
 * Errors: INVALID_ARGUMENT (lane, mark is NULL). */
OFFLOAD_API int32_t offload_stash_mark(offload_stash_t stash, uint32_t lane,
                                       offload_stash_mark_t* mark);

/* Drops, as offload_stash_drop does, all tickets of the mark's lane that were pushed since the mark
 * and have not ended. Tickets of other lanes stay. A mark may be used several times.
 * Errors: INVALID_ARGUMENT (not a mark of this stash; stream), INVALID_STATE (stream is capturing a
 * graph), POISONED, DEVICE_FAILED. */
OFFLOAD_API int32_t offload_stash_rollback(offload_stash_t stash, offload_stash_mark_t mark,
                                           offload_stream_t stream);

/* Blocks this thread until the copies of the ticket that are queued now have ended (0: those of all
 * tickets), for at most timeout_ns. With timeout_ns 0 it only looks; with a negative timeout_ns it
 * waits without limit. Afterwards the memory that was pushed may be freed without release.
 * Errors: TIMED_OUT, DEVICE_FAILED, INVALID_ARGUMENT (not a ticket of this stash, or one that has
 * ended), INVALID_STATE (another thread destroys the stash), POISONED. */
OFFLOAD_API int32_t offload_stash_wait(offload_stash_t stash, offload_stash_ticket_t ticket,
                                       int64_t timeout_ns);

/* Tells what the stash holds now, and totals since create. */
OFFLOAD_API int32_t offload_stash_get_stats(offload_stash_t stash, offload_stash_stats_t* stats);

/* --------------------------------------------------------------- matrices cut between ranks -- */
/* Muon updates whole matrices. Where ranks have parts of them (tensor parallel layers, FSDP, ZeRO),
 * each matrix gets a home: the rank that registers the whole of it in its optimizer. The others do
 * not register it. An exchange brings the parts of all ranks together on the home, and takes them
 * back from there:
 *
 *   rank 0   rows 0..3 --+                              +--> rows 0..3
 *   rank 1   rows 4..7 --+--> the whole, on its home ---+--> rows 4..7
 *   rank 2   rows 8..9 --+                              +--> rows 8..9
 *
 *   once       gather the params, commit the optimizer
 *   each step  gather the gradients, offload_optimizer_step, _wait, scatter the params
 *
 * Params then have the bits of a run in which one rank has the whole matrices, in any world and
 * with any parts, if no step clips: the norm is a sum in the order of ranks. Optimizers get a comm
 * too, another one, so that all ranks skip and clip alike; a rank that is no home and has no other
 * param registers an empty one. The exchange keeps no matrix: the memory of parts and wholes is the
 * caller's. docs/RANKS.md has an example. */

/* A matrix, or a stack of them, of which each rank of the comm has a part. */
typedef struct offload_exchange_matrix {
  uint32_t struct_size;
  int32_t dtype;      /* of the param: enum offload_dtype; required */
  int32_t grad_dtype; /* of the gradient: enum offload_dtype; required */
  uint32_t reserved;  /* 0 */
  const char* name;   /* for errors: not empty, at most 1023 bytes; the same on all ranks */
  const offload_shard_t* shard; /* the elements of this rank, of a tensor with two dimensions (rows,
                                   cols) or three (a stack); may be empty */
} offload_exchange_matrix_t;

typedef struct offload_exchange_options {
  uint32_t struct_size;
  uint32_t matrix_count;                     /* elements of matrices, at least 1 */
  const offload_exchange_matrix_t* matrices; /* the same ones in the same order on all ranks */
  const offload_comm_t* comm; /* all ranks, with an exchange; required. The library copies the
                                 struct; what its user points to must live until destroy. No
                                 optimizer may use the same table: their calls would mix */
  uint64_t comm_timeout_ns;   /* the library treats a rank as failed if it does not answer for this
                                 time; 0 = 600 s */
} offload_exchange_options_t;

/* What an exchange takes on this rank: room for the messages of one matrix, the largest. */
typedef struct offload_exchange_plan {
  uint32_t struct_size;
  uint32_t home_count;    /* matrices whose home is this rank */
  uint64_t home_elements; /* elements of those */
  uint64_t device_bytes;  /* device memory: that of the largest of those; 0 on the host device and
                             in a world of 1 */
  uint64_t host_bytes;    /* host memory: on the host device that of the largest of those; else, if
                             comm.exchange_on_host is 1, the same or that of this rank's largest part
                             of another one, pinned; 0 in a world of 1 */
} offload_exchange_plan_t;

/* Tells the bytes that create would take, and how many matrices this rank would be the home of. It
 * calls no other rank. Errors: INVALID_ARGUMENT and UNSUPPORTED, as for create. */
OFFLOAD_API int32_t offload_exchange_plan(offload_context_t context,
                                          const offload_exchange_options_t* options,
                                          offload_exchange_plan_t* plan);

/* Makes an exchange. Collective: all ranks of comm call it, and tell each other their parts. Every
 * element of a matrix must be in some rank's part. Ranks may have the same part (then one of them
 * sends it to the home, which prefers its own), but parts must not overlap otherwise.
 *
 * The home of a matrix is the rank that has the least work so far, the first of several; matrices
 * are given out in the order of their work, the largest first: elements times the shorter side.
 * The library writes *exchange only on success.
 * Errors: INVALID_ARGUMENT (the text names the field, or the matrix and the ranks that do not fit
 * together), UNSUPPORTED (a field of a later release), OUT_OF_HOST_MEMORY, OUT_OF_DEVICE_MEMORY,
 * COMM_FAILED (also if the call of another rank fails, which is named). */
OFFLOAD_API int32_t offload_exchange_create(offload_context_t context,
                                            const offload_exchange_options_t* options,
                                            offload_exchange_t* exchange);

/* Frees the memory for messages. Asks no other rank. Errors: DEVICE_FAILED (a stream of a call that
 * has failed may still use that memory: it is kept for ever). */
OFFLOAD_API int32_t offload_exchange_destroy(offload_exchange_t exchange);

/* The rank that is the home of a matrix: its number in options.matrices.
 * Errors: INVALID_ARGUMENT (no such matrix; rank is NULL). */
OFFLOAD_API int32_t offload_exchange_home(offload_exchange_t exchange, uint32_t matrix,
                                          int32_t* rank);

/* Puts the parts of all ranks together in `whole` on the matrix's home. Collective: all ranks of
 * comm make the calls of gather and scatter in the same order, for the same matrices and dtypes.
 * The call comes behind the work that is queued on stream, and returns when this rank's messages
 * have been sent and have arrived and `whole` is complete. dtype is dtype or grad_dtype of the
 * matrix. `part` has the elements of the rank's shard, in its order, contiguous in device memory;
 * it may be NULL if there are none. `whole` has room for all elements, row by row; on other ranks
 * than the home it is not used. The two must not overlap.
 *
 * COMM_FAILED: a rank did not send or take its messages within comm_timeout_ns, or has failed. A
 * rank that waits for no message may notice that in a later call only. After a failure but
 * INVALID_ARGUMENT and INVALID_STATE, which change nothing, ranks are out of step: `whole` may have
 * some parts, and later calls return POISONED; home and destroy work.
 * Errors: INVALID_ARGUMENT (matrix, dtype, part, whole, stream), INVALID_STATE (stream is capturing
 * a graph), COMM_FAILED, DEVICE_FAILED, POISONED. */
OFFLOAD_API int32_t offload_exchange_gather(offload_exchange_t exchange, uint32_t matrix,
                                            int32_t dtype, const void* part, void* whole,
                                            offload_stream_t stream);

/* The other way: every rank gets its part of the home's `whole`. All else is as for gather. */
OFFLOAD_API int32_t offload_exchange_scatter(offload_exchange_t exchange, uint32_t matrix,
                                             int32_t dtype, const void* whole, void* part,
                                             offload_stream_t stream);

/* --------------------------------------------------------------------- device conveniences -- */
/* For callers without a CUDA runtime of their own, and for the simulated device. On the host device
 * the device memory is host memory, the only stream is NULL, and functions run at once. */

/* Allocates memory on the context's device, aligned to 256 bytes, with unspecified content. The
 * caller owns it until offload_device_free; destroying the context frees the rest.
 * Errors: OUT_OF_DEVICE_MEMORY (the text has the bytes asked for and the bytes free),
 * INVALID_ARGUMENT (bytes is 0). */
OFFLOAD_API int32_t offload_device_alloc(offload_context_t context, uint64_t bytes, void** data);

/* data may be NULL. Errors: INVALID_ARGUMENT (data is not from offload_device_alloc). */
OFFLOAD_API int32_t offload_device_free(offload_context_t context, void* data);

/* Copy after the work that is queued on stream now, and return when the copy is done.
 * Errors: INVALID_ARGUMENT (a range outside the device's memory), DEVICE_FAILED (also if the stream
 * makes no progress for device_timeout_ns: the copy may then still run, and host_data must stay
 * valid as long as the stream has work). */
OFFLOAD_API int32_t offload_device_upload(offload_context_t context, void* device_data,
                                          const void* host_data, uint64_t bytes,
                                          offload_stream_t stream);
OFFLOAD_API int32_t offload_device_download(offload_context_t context, void* host_data,
                                            const void* device_data, uint64_t bytes,
                                            offload_stream_t stream);

/* Gives the address at which a function that runs on the device sees device memory. The host cannot
 * use device addresses of the simulated device, so that a missing copy is noticed: it faults. Only
 * functions given to offload_stream_run may use the mapped address, but any thread may ask for it.
 * Errors: INVALID_ARGUMENT (range outside the device's memory), UNSUPPORTED on CUDA. */
OFFLOAD_API int32_t offload_device_map(offload_context_t context, void* device_data, uint64_t bytes,
                                       void** mapped);

OFFLOAD_API int32_t offload_stream_create(offload_context_t context, offload_stream_t* stream);

/* Finishes the stream's work first. stream may be NULL; the call then does nothing.
 * Errors: TIMED_OUT (its work was not done within device_timeout_ns: the stream stays as it is). */
OFFLOAD_API int32_t offload_stream_destroy(offload_context_t context, offload_stream_t stream);

/* Blocks until the work that is queued on stream now is done, for at most timeout_ns (negative: no
 * limit).
 * Errors: TIMED_OUT, DEVICE_FAILED with the cause of an earlier asynchronous failure. */
OFFLOAD_API int32_t offload_stream_synchronize(offload_context_t context, offload_stream_t stream,
                                               int64_t timeout_ns);

/* A function of the caller that stands for a kernel. It must not call the library. */
typedef void (*offload_stream_function_t)(void* user);

/* Queues function(user) on stream. Errors: INVALID_ARGUMENT, UNSUPPORTED on CUDA. */
OFFLOAD_API int32_t offload_stream_run(offload_context_t context, offload_stream_t stream,
                                       offload_stream_function_t function, void* user);

/* -------------------------------------------------------------- memory that keeps addresses -- */
/* A pool gives out blocks of device memory. Their memory can be given away and taken again, and the
 * addresses of the blocks stay: a CUDA graph that has captured them can be launched again. Params
 * in blocks are given away in this order: offload_optimizer_offload_params, wait,
 * offload_pool_release_memory; and they come back by offload_pool_take_memory,
 * offload_optimizer_bind, offload_optimizer_reload_params (docs/LIFECYCLE.md). The library itself
 * keeps nothing in pools. */

/* Makes a pool on the context's device. The device lives as long as the pool does, even if the
 * context is destroyed before.
 * Errors: UNSUPPORTED (the host device has no memory of its own). */
OFFLOAD_API int32_t offload_pool_create(offload_context_t context, offload_pool_t* pool);

/* Ends the handle. Blocks stay as they are, and each can still be freed; the pool ends with the
 * last of them. If the memory is released at this time, it does not come back. */
OFFLOAD_API int32_t offload_pool_destroy(offload_pool_t pool);

/* Allocates a block with unspecified content. It takes whole pages: on CUDA 2 MiB, in blocks above
 * 512 MiB a 256th of the block, rounded up to a power of two.
 * Errors: OUT_OF_DEVICE_MEMORY (the text has the bytes asked for and the bytes free),
 * INVALID_ARGUMENT (bytes is 0), INVALID_STATE (the memory is released). */
OFFLOAD_API int32_t offload_pool_alloc(offload_pool_t pool, uint64_t bytes, void** data);

/* Waits until the device has no work, as cudaFree does, and frees a block of any pool of this
 * process. data may be NULL.
 * Errors: INVALID_ARGUMENT (data is not such a block), INVALID_STATE (a stream is capturing a
 * graph), TIMED_OUT and DEVICE_FAILED (the block stays). */
OFFLOAD_API int32_t offload_pool_free(void* data);

/* Waits until the device has no work, and gives up the memory behind all blocks. Their content is
 * lost. Until take_memory an access to a block is an error that CUDA does not survive. If the
 * memory is released already, this does nothing.
 * Errors: INVALID_STATE (a stream is capturing a graph), TIMED_OUT, DEVICE_FAILED. */
OFFLOAD_API int32_t offload_pool_release_memory(offload_pool_t pool);

/* Takes memory behind all blocks again, with unspecified content, or behind none: after an error
 * this can be called again. If the memory is there, this does nothing.
 * Errors: OUT_OF_DEVICE_MEMORY (the text has the bytes asked for and the bytes free). */
OFFLOAD_API int32_t offload_pool_take_memory(offload_pool_t pool);

/* Makes pool the one from which offload_pool_torch_alloc of this thread allocates; NULL: none. */
OFFLOAD_API int32_t offload_pool_enter(offload_pool_t pool);

/* offload_pool_alloc and offload_pool_free as torch.cuda.memory.CUDAPluggableAllocator calls them.
 * The first returns NULL on failure, and offload_last_error() says why; if the second fails, the
 * block stays. device and stream are not used: blocks are on the pool's device, for all streams. */
OFFLOAD_API void* offload_pool_torch_alloc(int64_t bytes, int32_t device, offload_stream_t stream);
OFFLOAD_API void offload_pool_torch_free(void* data, int64_t bytes, int32_t device,
                                         offload_stream_t stream);

/* end-plain-c99 */
#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* HYBRIDOPT_OFFLOAD_H */
