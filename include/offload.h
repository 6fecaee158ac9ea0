/*
 * offload.h: keep optimizer state in host memory, step it at memory-bus speed.
 *
 * This header is the manual. It is plain C99; link with -lhybridopt.
 *
 * THE STORY IN SIX CALLS
 *
 *   offload_context_create      pick a device, get worker threads
 *   offload_optimizer_create    pick an algorithm and where its state lives
 *   offload_optimizer_add_group / _add_params   register, nothing is allocated
 *   offload_optimizer_commit    allocate, copy the fp32 masters in
 *   offload_optimizer_step      queue one update, get a ticket
 *   offload_optimizer_wait      wait for the ticket
 *
 * RULES, STATED ONCE
 *
 * Status.    Every function that can fail returns an int32_t status, OFFLOAD_OK (0) on success.
 *            offload_last_error() then says which parameter, what was got, what was expected and
 *            what to do about it. After INVALID_ARGUMENT, INVALID_STATE and UNSUPPORTED nothing
 *            has changed. Bad input never crashes.
 * Structs.   Set struct_size to sizeof the struct and everything else to zero first; zero always
 *            means the documented default. A shorter struct of an older caller reads as zeros at
 *            the end; a longer one of a newer caller is accepted while its unknown tail is zero,
 *            else UNSUPPORTED. In an array of structs the elements lie struct_size bytes apart, and
 *            all carry the same struct_size. Of an output struct the smaller of both sizes is
 *            written; the caller sets struct_size before the call.
 * Ownership. The caller owns parameters, gradients and streams; the library borrows the addresses
 *            and never frees them. Strings and arrays passed in are copied before the call returns.
 *            The library owns optimizer state; views of it are borrowed until destroy.
 * Async.     A function that queues work returns a ticket. Tickets of one optimizer complete in
 *            the order they were given out, except a save's: it completes when its files are there,
 *            and later work neither waits for it nor says that it has completed. From the queueing
 *            call until its ticket completes, the gradients must not be written and the parameters
 *            not be touched, except on a stream that offload_optimizer_stream_wait has put behind
 *            them. A save only reads, and of the parameters only some: see there.
 * Failure.   When queued work fails, its optimizer is poisoned: whoever waits gets the cause (when
 *            no save reads the caller's memory any more), later calls get POISONED (but for plan,
 *            state, get_stats and step_result), streams that wait on it are released, destroy
 *            works. A step that the device fails in the middle of may have updated some params and
 *            not others: go back to saved state. The context and its other optimizers go on, as far
 *            as the device does. A save or load that fails for its files poisons nothing: its own
 *            ticket tells, and offload_optimizer_wait with ticket 0 tells once if nobody has been
 *            told before.
 * Threads.   Different handles may be used by different threads at once. Calls on one handle are
 *            serialised by the caller, except offload_optimizer_wait, _step_result and
 *            _get_stats, which any thread may call at any time before destroy. Destroy ends queued
 *            work and returns when no other call uses the handle any more: a wait that another
 *            thread is in returns first, with the outcome of what it waits for. Working threads
 *            belong to the library; they start with the first work, not before.
 * Fork.      Handles do not survive fork: in the child every call that takes one returns
 *            INVALID_STATE and touches nothing. The parent goes on undisturbed.
 * Process.   The library changes no process-wide setting: no signal handler, no floating-point
 *            mode, no memory policy, no environment. Of the environment it reads HYBRIDOPT_ISA,
 *            LOCAL_RANK and LOCAL_WORLD_SIZE (see offload_context_create) and nothing else.
 * Units.     count is elements, bytes is bytes, times are nanoseconds (_ns) or seconds (_seconds).
 *
 * WORDS
 *
 *   param       what the model computes with, on the device, in fp32, bf16 or fp16
 *   master      the fp32 value of a param; what the optimizer really updates
 *   state       masters and moments (exp_avg, exp_avg_sq, momentum_buffer, sum)
 *   host share  the elements whose state lives in host memory and is updated by CPU threads
 *   device share the elements whose state lives on the device and is updated there
 *   chunk       unit of the pipeline that carries gradients down and params up
 *   offload     copy from the device to the host and give the device memory up; reload: back
 *   staging     the fixed ring of pinned chunks in between
 *   checkpoint  a directory that holds the state of one point of the timeline
 *
 * The bits of params and state after a step depend on the inputs and hyperparameters alone: not on
 * the device share, chunk size, thread count, instruction set or timing. docs/NUMERICS.md has the
 * formulas and the order of operations.
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

/* Every status. Values never change; gaps are for later ones of the same kind. */
enum offload_status {
  OFFLOAD_OK = 0,
  OFFLOAD_INVALID_ARGUMENT = 10,   /* a parameter is wrong; nothing happened */
  OFFLOAD_INVALID_STATE = 11,      /* not now, or not on this handle; nothing happened */
  OFFLOAD_UNSUPPORTED = 12,        /* this build, device or release cannot; nothing happened */
  OFFLOAD_OUT_OF_HOST_MEMORY = 20, /* the text names bytes asked for and bytes there */
  OFFLOAD_OUT_OF_DEVICE_MEMORY = 21,
  OFFLOAD_DEVICE_FAILED = 30,       /* the device reported an error, perhaps of earlier work */
  OFFLOAD_COMM_FAILED = 31,         /* another rank failed or vanished */
  OFFLOAD_IO_FAILED = 40,           /* the text names the file and the system's error */
  OFFLOAD_CHECKPOINT_CORRUPT = 41,  /* the bytes on disk are not what was written */
  OFFLOAD_CHECKPOINT_MISMATCH = 42, /* a good checkpoint, but of another model */
  OFFLOAD_TIMED_OUT = 50,           /* the work goes on; wait again */
  OFFLOAD_POISONED = 60,            /* earlier queued work of this optimizer failed */
  OFFLOAD_INTERNAL = 70             /* a bug of ours; please report the text */
};

enum offload_device_kind {
  OFFLOAD_DEVICE_HOST = 0, /* params and grads in host memory: one pass over them, no staging */
  OFFLOAD_DEVICE_SIM = 1,  /* an accelerator made of threads, for tests and GPU-less machines */
  OFFLOAD_DEVICE_CUDA = 2
};

enum offload_algorithm {
  OFFLOAD_ADAMW = 1,  /* Adam with decoupled weight decay; state exp_avg, exp_avg_sq */
  OFFLOAD_ADAM = 2,   /* Adam with L2 weight decay; state exp_avg, exp_avg_sq */
  OFFLOAD_SGD = 3,    /* momentum, dampening, nesterov; state momentum_buffer if momentum > 0 */
  OFFLOAD_LION = 4,   /* sign of an interpolated momentum; state exp_avg */
  OFFLOAD_ADAGRAD = 5 /* state sum */
};

enum offload_dtype {
  OFFLOAD_FP32 = 1,
  OFFLOAD_BF16 = 2,
  OFFLOAD_FP16 = 3,
  OFFLOAD_U16 = 4 /* of state only: lower halves of split masters */
};

/* How the fp32 master of a bf16 param is kept. Its bits are the same either way. */
enum offload_master_layout {
  OFFLOAD_MASTER_FP32 = 0, /* as 4 bytes of state */
  OFFLOAD_MASTER_SPLIT = 1 /* the bf16 param is its upper half, 2 bytes of state are the lower */
};

/* How moments kept in bf16 are rounded. */
enum offload_rounding {
  OFFLOAD_ROUND_STOCHASTIC = 0, /* at random: the mean of many roundings is the number itself */
  OFFLOAD_ROUND_NEAREST = 1     /* to nearest, ties to even: small changes are lost */
};

enum offload_placement {
  OFFLOAD_PLACE_AUTO = 0,  /* device_fraction decides */
  OFFLOAD_PLACE_HOST = 1,  /* all state of this param on the host */
  OFFLOAD_PLACE_DEVICE = 2 /* all state of this param on the device */
};

/* The kinds of state. A param has those its algorithm names, and a master where it needs one. */
enum offload_state_kind {
  OFFLOAD_STATE_MASTER = 0,
  OFFLOAD_STATE_EXP_AVG = 1,
  OFFLOAD_STATE_EXP_AVG_SQ = 2,
  OFFLOAD_STATE_MOMENTUM_BUFFER = 3,
  OFFLOAD_STATE_SUM = 4,
  /* The lower 16 bits of split masters. The upper are in the param, rounded:
   * master bits = (param bits << 16) + (MASTER_LOW bits, read as a signed number). */
  OFFLOAD_STATE_MASTER_LOW = 5
};

/* What offload_optimizer_offload_* may move. Room for it on the host is part of the plan. */
enum offload_movable {
  OFFLOAD_MOVABLE_PARAMS = 1,
  OFFLOAD_MOVABLE_GRADS = 2,
  OFFLOAD_MOVABLE_STATES = 4,
  OFFLOAD_MOVABLE_ACCUMULATE = 8 /* gradients, and room to add them up in fp32; includes GRADS */
};

enum offload_log_level { OFFLOAD_LOG_INFO = 1, OFFLOAD_LOG_WARNING = 2, OFFLOAD_LOG_ERROR = 3 };

/* Handles. NULL, destroyed and foreign ones are recognised and refused. */
typedef struct offload_context* offload_context_t;
typedef struct offload_optimizer* offload_optimizer_t;

/* A point on an optimizer's timeline. 0 stands for all that has been queued so far. */
typedef uint64_t offload_ticket_t;

/* A stream of the context's device: what offload_stream_create gave, or a cudaStream_t. NULL is
 * the default stream of the simulated device, and the only stream of the host device. */
typedef void* offload_stream_t;

/* ---------------------------------------------------------------------------------- library -- */

/* The ABI this library implements: major * 1000 + minor. Callers built against a header of the
 * same major work. Never fails. */
OFFLOAD_API uint32_t offload_abi_version(void);

/* One line about this build: version, compiler, devices, instruction sets. Static; never NULL. */
OFFLOAD_API const char* offload_build_info(void);

/* "INVALID_ARGUMENT" for OFFLOAD_INVALID_ARGUMENT and so on; "UNKNOWN" for anything else. */
OFFLOAD_API const char* offload_status_name(int32_t status);

/* What went wrong in the last failed call of this thread; "" if none has. Valid until the next
 * failed call of this thread. */
OFFLOAD_API const char* offload_last_error(void);

/* ---------------------------------------------------------------------------------- context -- */

/* Called from any thread, library threads included; must not call back into the library. */
typedef void (*offload_log_function_t)(void* user, int32_t level, const char* text);

typedef struct offload_context_options {
  uint32_t struct_size;
  int32_t device_kind;  /* enum offload_device_kind; 0 = host */
  int32_t device_index; /* which CUDA device; must be 0 for host and sim */
  uint32_t threads;     /* CPU threads that update the host share; 0 = one per CPU of this rank's
                           part (affinity mask and cgroup quota counted); at most 1024 */
  uint64_t pinned_bytes_max;  /* cap on staging memory of this context; 0 = no cap */
  uint64_t device_timeout_ns; /* device work that makes no progress for so long counts as failed;
                                 0 = 600 s */
  offload_log_function_t log; /* NULL = warnings and errors go to stderr */
  void* log_user;             /* handed to log */
  uint64_t sim_memory_bytes;  /* sim: capacity of the device; 0 = 1 GiB */
  uint64_t sim_seed;          /* sim: seed of the random delays */
  uint64_t sim_delay_ns_max;  /* sim: each command on a stream is delayed by 0 to this; 0 = none */
  uint64_t numa_nodes;        /* bit n: update threads and host memory on NUMA node n; 0 = the nodes
                                 near the device, or all that have CPUs if its place is not known */
  uint32_t local_rank;        /* 0 to local_world - 1: which part of the CPUs is this rank's */
  uint32_t local_world;       /* ranks that share the host's CPUs; 0 = as LOCAL_RANK and
                                 LOCAL_WORLD_SIZE of the environment say, else 1; 1 = alone, for
                                 ranks that the launcher has bound to CPUs of their own */
  uint64_t sim_pinned_bytes_max; /* sim: host memory that it can pin, as a limit of the system or
                                    the driver would have it; 0 = no limit */
  int32_t allow_pageable; /* memory that the system does not pin: 0 = commit fails, 1 = it is used
                             unpinned, which is slower */
  int32_t numa_policy;    /* enum offload_numa_policy; 0 = near the update threads */
} offload_context_options_t;

/* On which NUMA nodes the host memory of a context should lie. */
enum offload_numa_policy {
  OFFLOAD_NUMA_NEAR = 0,       /* on the nodes of the update threads */
  OFFLOAD_NUMA_INTERLEAVED = 1 /* page by page on the nodes of numa_nodes in turn; if that is 0, on
                                  all nodes that have CPUs and memory this process may use */
};

/* How host memory gets where it should lie: the best that this system allows. */
enum offload_numa_rung {
  OFFLOAD_NUMA_NONE = 0,        /* pages lie where the system puts them */
  OFFLOAD_NUMA_FIRST_TOUCH = 1, /* threads keep to their node and touch their pages first */
  OFFLOAD_NUMA_PLACED = 2       /* libnuma has told the kernel which nodes to prefer */
};

typedef struct offload_context_info {
  uint32_t struct_size;
  int32_t device_kind;
  uint32_t threads;       /* update threads, really */
  uint32_t cpus_allowed;  /* CPUs in this process's affinity mask */
  uint32_t nodes;         /* NUMA nodes with CPUs this process may use */
  int32_t threads_seated; /* 1: each update thread keeps to its NUMA node; 0: the system refused */
  int32_t huge_pages;     /* 1: state memory asks for huge pages, as the system allows */
  uint32_t optimizers;    /* alive in this context */
  uint64_t device_memory_bytes;      /* capacity; 0 on the host device */
  uint64_t device_memory_free_bytes; /* now */
  uint64_t pinned_bytes;             /* host memory that is pinned for this context, really */
  char isa[32];                      /* instruction set of the host kernels: "avx512", ... */
  char device_name[256];
  uint32_t local_rank;  /* as the CPUs were shared out */
  uint32_t local_world; /* likewise */
  uint32_t cpus;        /* this rank's part of cpus_allowed */
  int32_t numa_rung;    /* enum offload_numa_rung; final once the first work has started threads */
  uint64_t numa_nodes;  /* bit n: there are update threads on node n (those above 63 not shown) */
  char notes[1024];     /* what fell short of the best, and why; "" if nothing did */
  uint64_t numa_memory_nodes; /* bit n: the kernel has been told to put host memory on node n */
  int32_t numa_policy;        /* enum offload_numa_policy: what is in force; notes and a warning in
                                 the log say why, where that is not what was asked for */
  uint32_t reserved;
} offload_context_info_t;

/* Opens a device and learns the machine. Allocates little and starts no thread of the update pool.
 * HYBRIDOPT_ISA in the environment (reference, avx2, avx512, neon, sve) forces an instruction set.
 * Ranks on one host share its CPUs out, so that no two run on the same (docs/CONFIGURATION.md).
 * Errors: INVALID_ARGUMENT (field named), UNSUPPORTED (no such device or instruction set here).
 * *context is written on success only. */
OFFLOAD_API int32_t offload_context_create(const offload_context_options_t* options,
                                           offload_context_t* context);

/* Frees the context with the streams and device memory it gave out.
 * Errors: INVALID_STATE while optimizers of it are alive. */
OFFLOAD_API int32_t offload_context_destroy(offload_context_t context);

/* What was really obtained. */
OFFLOAD_API int32_t offload_context_get_info(offload_context_t context,
                                             offload_context_info_t* info);

/* -------------------------------------------------------------------------------- registering --
 */

/* How ranks of one model talk to each other: a table of functions of the caller's, over MPI, NCCL,
 * a process group or threads. Calls come from the library's thread of that optimizer, in the same
 * order on all ranks. Each returns OFFLOAD_OK, OFFLOAD_TIMED_OUT, or any other status for a
 * failure. Results must be the same bits on all ranks. */
typedef struct offload_comm {
  uint32_t struct_size;
  int32_t rank;      /* 0 to world - 1 */
  int32_t world;     /* at least 1 */
  uint32_t reserved; /* 0 */
  void* user;        /* handed to the functions */
  /* In place: the sum over all ranks of each of count values. */
  int32_t (*sum)(void* user, double* values, uint32_t count, int64_t timeout_ns);
  /* In place: the maximum over all ranks. */
  int32_t (*max)(void* user, int32_t* values, uint32_t count, int64_t timeout_ns);
  /* Returns when all ranks have called it. */
  int32_t (*barrier)(void* user, int64_t timeout_ns);
} offload_comm_t;

typedef struct offload_optimizer_options {
  uint32_t struct_size;
  int32_t algorithm;       /* enum offload_algorithm; required */
  double device_fraction;  /* share of the elements with OFFLOAD_PLACE_AUTO whose state lives on the
                              device, in [0, 1]; 0 = all on the host. Device elements come first in
                              registration order. The host device has one memory: no effect there */
  uint64_t chunk_elements; /* elements a pipeline chunk holds at most, 1024 to 2^28; 0 = 2^20, or
                              2^22 on CUDA */
  uint32_t staging_slots;  /* chunks in the staging ring, 2 to 64; 0 = 8 */
  uint32_t movable;        /* enum offload_movable, or-ed; 0 = nothing is ever moved */
  const offload_comm_t* comm; /* other ranks; NULL = none. Copied, but what its user points to must
                                 live until destroy */
  uint64_t comm_timeout_ns;   /* a rank that does not answer for so long has failed; 0 = 600 s */
  int32_t master_layout;      /* enum offload_master_layout. Where the host updates params that are
                                 on a device, masters stay fp32: the param is not there to read */
  int32_t moment_dtype;       /* OFFLOAD_FP32 or OFFLOAD_BF16; 0 = OFFLOAD_FP32 */
  int32_t moment_rounding;    /* enum offload_rounding, of bf16 moments */
  uint32_t reserved;          /* 0 */
  uint64_t rounding_seed;     /* of stochastic rounding: the same on all ranks, and after a load */
} offload_optimizer_options_t;

/* Hyperparameters of a group of params, as PyTorch names and means them (Lion as in its paper).
 * There are no silent defaults here: zero means zero. A field that the algorithm does not use
 * must be zero. All are finite and not negative. */
typedef struct offload_group {
  uint32_t struct_size;
  int32_t nesterov;    /* SGD: 0 or 1; needs momentum > 0 and dampening 0 */
  int32_t maximize;    /* 0 or 1: step along the gradient instead of against it */
  uint32_t reserved;   /* 0 */
  double lr;           /* all */
  double beta1;        /* AdamW, Adam, Lion; in [0, 1) */
  double beta2;        /* AdamW, Adam, Lion; in [0, 1) */
  double eps;          /* AdamW, Adam, Adagrad; above 0 */
  double weight_decay; /* all */
  double momentum;     /* SGD; whether it is zero is settled at commit, see _set_group */
  double dampening;    /* SGD; needs momentum > 0 */
  double lr_decay;     /* Adagrad */
  double initial_accumulator_value; /* Adagrad; fills sum at commit, ignored later */
} offload_group_t;

enum offload_param_flag {
  OFFLOAD_PARAM_REPLICA = 1 /* another rank counts this shard in the norm; its Inf and NaN count */
};

enum offload_shard_flag {
  OFFLOAD_SHARD_RANGE = 1 /* range_begin and range_count are in force; else the whole boxes */
};

/* The part of a global tensor that this process owns: boxes in the tensor (tensor, expert and
 * pipeline parallelism), then a row-major range inside the boxes, one after the other (ZeRO,
 * distributed optimizer). Offsets are given, never derived. Empty shards are legal. */
typedef struct offload_shard {
  uint32_t struct_size;
  uint32_t dimensions;         /* 1 to 8 */
  uint32_t box_count;          /* boxes, at least 1; they must not overlap */
  uint32_t flags;              /* enum offload_shard_flag, or-ed */
  const int64_t* global_shape; /* [dimensions], each at least 0 */
  const int64_t* box_offsets;  /* [box_count][dimensions] */
  const int64_t* box_extents;  /* [box_count][dimensions] */
  uint64_t range_begin;        /* elements, counted through the boxes in order */
  uint64_t range_count;        /* elements; must equal the param's count */
} offload_shard_t;

typedef struct offload_param {
  uint32_t struct_size;
  uint32_t group;     /* what offload_optimizer_add_group gave */
  int32_t dtype;      /* of data: enum offload_dtype; required */
  int32_t grad_dtype; /* of grad; required */
  int32_t placement;  /* enum offload_placement; 0 = device_fraction decides */
  uint32_t flags;     /* enum offload_param_flag, or-ed */
  const char* name;   /* the stable key across runs: unique, not empty, at most 1023 bytes */
  void* data;         /* device address of count elements, contiguous; may be NULL if count is 0 */
  const void* grad;   /* device address of count elements, or NULL: no gradient yet */
  uint64_t count;     /* elements of this shard */
  const offload_shard_t* shard; /* NULL = the whole of a one-dimensional tensor */
  int32_t chunk_order; /* params with a lower one go through the pipeline first; equal ones, and by
                          default all, in registration order. Changes no bit */
  uint32_t reserved;   /* 0 */
} offload_param_t;

typedef struct offload_binding {
  uint32_t struct_size;
  uint32_t param;   /* its id */
  void* data;       /* new address; NULL = as before */
  const void* grad; /* new address; NULL = no gradient: the next step leaves this param untouched */
} offload_binding_t;

/* What commit will take, by kind and place. Bytes include padding. */
typedef struct offload_plan {
  uint32_t struct_size;
  uint32_t param_count;
  uint64_t element_count;
  uint64_t host_elements;          /* host share */
  uint64_t device_elements;        /* device share */
  uint64_t host_state_bytes[32];   /* indexed by enum offload_state_kind */
  uint64_t device_state_bytes[32]; /* likewise */
  uint64_t staging_bytes;          /* pinned host memory: ring and verdict */
  uint64_t host_params_bytes;      /* pinned: room for params that are offloaded */
  uint64_t host_grads_bytes;       /* pinned: room for gradients that are offloaded */
  uint64_t host_swap_bytes;        /* pinned: room for the device share's state */
  uint64_t host_scratch_bytes;     /* tables, norm sums, queued-step snapshots */
  uint64_t device_scratch_bytes;   /* norm sums, verdict, gradients that come back for a step */
  uint64_t host_bytes;             /* all of the above on the host */
  uint64_t device_bytes;           /* all of the above on the device */
  uint64_t device_free_bytes;      /* on the device now; 0 on the host device */
  uint64_t host_available_bytes;   /* on the host now, cgroup limit counted */
  uint64_t pinned_bytes_left;      /* under the context's cap; UINT64_MAX without one */
  uint64_t chunk_count;            /* chunks a full step moves */
  uint64_t grads_down_bytes;       /* copied device to host by a full step */
  uint64_t params_up_bytes;        /* copied host to device by a full step */
  int32_t fits;                    /* 1: commit would find room for all of it now */
  uint32_t reserved;
  uint64_t numa_bytes[64]; /* of host_bytes, on each NUMA node: where the context's policy will put
                              them; after commit, while no work is queued, where they lie, from what
                              the kernel says of up to 4,096 pages of each array */
  uint64_t numa_unknown_bytes; /* the rest of host_bytes: small tables, pages that nothing has
                                  touched yet, nodes above 63; all of it without libnuma */
} offload_plan_t;

/* Makes an optimizer that registers params. Nothing is allocated before commit.
 * Errors: INVALID_ARGUMENT (field named). *optimizer is written on success only. */
OFFLOAD_API int32_t offload_optimizer_create(offload_context_t context,
                                             const offload_optimizer_options_t* options,
                                             offload_optimizer_t* optimizer);

/* Finishes queued work (at most device_timeout_ns without progress), then frees everything. Views
 * end here. After it the handle is refused everywhere. */
OFFLOAD_API int32_t offload_optimizer_destroy(offload_optimizer_t optimizer);

/* Adds a group of params that share hyperparameters; ids count from 0.
 * Errors: INVALID_ARGUMENT (field named), INVALID_STATE after commit. */
OFFLOAD_API int32_t offload_optimizer_add_group(offload_optimizer_t optimizer,
                                                const offload_group_t* group, uint32_t* group_id);

/* New hyperparameters for a group, at any time. Steps queued before keep the old values. A group
 * committed with momentum 0 has no momentum_buffer and cannot get momentum later.
 * Errors: INVALID_ARGUMENT (field named). */
OFFLOAD_API int32_t offload_optimizer_set_group(offload_optimizer_t optimizer, uint32_t group_id,
                                                const offload_group_t* group);

/* Registers param_count params, all or none. Ids count from 0 in registration order; the first of
 * this call goes to *first_id (which may be NULL). data may not overlap another param's data.
 * Errors: INVALID_ARGUMENT (param and field named), INVALID_STATE after commit. */
OFFLOAD_API int32_t offload_optimizer_add_params(offload_optimizer_t optimizer,
                                                 const offload_param_t* params,
                                                 uint32_t param_count, uint32_t* first_id);

/* Tells new addresses, all or none. Steps queued before use the old ones. Cheap enough for every
 * step: frameworks re-make gradients.
 * Errors: INVALID_ARGUMENT (binding and field named). */
OFFLOAD_API int32_t offload_optimizer_bind(offload_optimizer_t optimizer,
                                           const offload_binding_t* bindings,
                                           uint32_t binding_count);

/* Every byte that commit will take, or has taken. Pure: call it as often as you like. */
OFFLOAD_API int32_t offload_optimizer_plan(offload_optimizer_t optimizer, offload_plan_t* plan);

/* Takes the memory of the plan, copies masters in from the params (after the work now queued on
 * stream) and zeroes the moments. Returns when that is done. On an error nothing is kept and the
 * optimizer still registers.
 * Errors: INVALID_STATE (no params, or committed), OUT_OF_HOST_MEMORY, OUT_OF_DEVICE_MEMORY,
 * INVALID_ARGUMENT (pinned_bytes_max too small: the text says how much is needed), DEVICE_FAILED.
 */
OFFLOAD_API int32_t offload_optimizer_commit(offload_optimizer_t optimizer,
                                             offload_stream_t stream);

/* ------------------------------------------------------------------------------------- stepping --
 */

enum offload_step_flag {
  /* The caller vouches that every gradient is finite: without a norm to clip by, the pass that
   * looks for Inf and NaN is left out. With a non-finite gradient the result is then undefined
   * numbers (never undefined behaviour). */
  OFFLOAD_STEP_ASSUME_FINITE = 1
};

typedef struct offload_step_options {
  uint32_t struct_size;
  uint32_t flags;          /* enum offload_step_flag, or-ed */
  double grad_scale;       /* the loss scale: gradients are divided by it; above 0; 0 = 1 */
  double grad_norm_max;    /* clip the global norm of the unscaled gradients to this, as
                              torch.nn.utils.clip_grad_norm_ does; 0 = no clipping */
  offload_stream_t stream; /* gradients and params are ready after the work now queued on it */
} offload_step_options_t;

typedef struct offload_step_result {
  uint32_t struct_size;
  int32_t skipped;           /* 1: a gradient was Inf or NaN; nothing at all has changed */
  uint64_t step;             /* steps applied so far, this one included unless skipped */
  double grad_norm;          /* global norm of the unscaled gradients before clipping; NaN if not
                              computed (ASSUME_FINITE without clipping), Inf or NaN if skipped */
  double grad_clip;          /* factor that clipping multiplied the gradients by; 1 = not clipped */
  double total_seconds;      /* from the start of the work to its end */
  double norm_seconds;       /* until the norm and the verdict were known */
  double grads_down_seconds; /* lane: copying gradients to the host, as the device took it */
  double update_seconds;     /* lane: CPU threads updating the host share */
  double params_up_seconds;  /* lane: copying params to the device, as the device took it */
  double device_update_seconds; /* lane: the device updating its share */
  double stall_seconds;         /* CPU threads waiting: gradients, staging slot, the device's own
                                   update, a running save */
  uint64_t grads_down_bytes;    /* copied device to host */
  uint64_t params_up_bytes;     /* copied host to device */
} offload_step_result_t;

/* Queues one step over every param that has a gradient and returns at once; up to 8 steps may be
 * queued. options may be NULL for the defaults. A step with any non-finite gradient is skipped
 * exactly: no bit changes, step counts included. *ticket may be NULL.
 * Errors: INVALID_ARGUMENT, INVALID_STATE (before commit, or 8 queued), POISONED. */
OFFLOAD_API int32_t offload_optimizer_step(offload_optimizer_t optimizer,
                                           const offload_step_options_t* options,
                                           offload_ticket_t* ticket);

/* What a completed step did. The last 64 steps are remembered; ticket 0 is the last one queued.
 * Errors: INVALID_STATE (still running, or forgotten), INVALID_ARGUMENT (foreign ticket). */
OFFLOAD_API int32_t offload_optimizer_step_result(offload_optimizer_t optimizer,
                                                  offload_ticket_t ticket,
                                                  offload_step_result_t* result);

/* Blocks this thread until the ticket (0 = everything queued, saves included) completes, at most
 * timeout_ns: 0 only looks, a negative one waits without limit.
 * Errors: TIMED_OUT, the cause if the work failed, INVALID_ARGUMENT (foreign ticket), INVALID_STATE
 * (it was a save or load that failed, and 64 others have failed since: why has been forgotten). */
OFFLOAD_API int32_t offload_optimizer_wait(offload_optimizer_t optimizer, offload_ticket_t ticket,
                                           int64_t timeout_ns);

/* Makes later work on stream wait until the params named (params NULL or param_count 0 = all) hold
 * the values of the ticket, and no save up to it reads params any more. On the simulated device the
 * host thread does not wait. On the host device it is the only stream. On CUDA it waits until those
 * params are there, and the stream then need not: streams share the hardware's queues, and one that
 * waited could stand before the work that it waits for. If the step fails the stream is released.
 * Errors: INVALID_ARGUMENT (unknown param id, foreign ticket), UNSUPPORTED, POISONED. */
OFFLOAD_API int32_t offload_optimizer_stream_wait(offload_optimizer_t optimizer,
                                                  offload_ticket_t ticket, offload_stream_t stream,
                                                  const uint32_t* params, uint32_t param_count);

/* ------------------------------------------------------------------------------------ lifecycle --
 */
/* RL trainers give the device to the rollout and take it back; pre-training gives gradients away
 * while the backward pass runs. docs/LIFECYCLE.md has the table of what is allowed when.
 *
 * A call moves all params or those named, and skips what is there already (idempotent). It is
 * refused as a whole or done as a whole. It queues the copies and returns; when its ticket
 * completes the device memory may be freed or reused. Offloading gives the device address up:
 * before anything can come back, offload_optimizer_bind tells the new one (which may be the old
 * one). What may be moved is said at create (movable). Content survives bit for bit. */

enum offload_move_flag {
  OFFLOAD_MOVE_ACCUMULATE = 1, /* offload_grads: add to what the host holds, in fp32 */
  OFFLOAD_MOVE_DROP = 2        /* offload_grads: forget the gradients, wherever they are */
};

typedef struct offload_move_options {
  uint32_t struct_size;
  uint32_t flags;                  /* enum offload_move_flag, or-ed */
  const uint32_t* params;          /* ids; NULL = all */
  uint32_t param_count;            /* 0 with params not NULL: none */
  uint32_t stream_count;           /* producers, at most 4; 0 = the NULL stream alone */
  const offload_stream_t* streams; /* the copies wait for the work now queued on each of these */
} offload_move_options_t;

/* Params: their bits go to the host. Until they are back, a step that would update them is refused.
 * Errors of all six: INVALID_ARGUMENT (unknown param or stream), INVALID_STATE (not movable, or the
 * table in docs/LIFECYCLE.md says no; the text says what to call first), POISONED. */
OFFLOAD_API int32_t offload_optimizer_offload_params(offload_optimizer_t optimizer,
                                                     const offload_move_options_t* options,
                                                     offload_ticket_t* ticket);
OFFLOAD_API int32_t offload_optimizer_reload_params(offload_optimizer_t optimizer,
                                                    const offload_move_options_t* options,
                                                    offload_ticket_t* ticket);

/* Gradients: they keep their values. The next step reads them where they are and uses them up; or
 * they are reloaded first. With ACCUMULATE each call adds, in fp32 and in the order of the calls,
 * and the step uses the sum. Norms are computed as gradients land. With DROP nothing is copied and
 * the params named have no gradient until one is bound. */
OFFLOAD_API int32_t offload_optimizer_offload_grads(offload_optimizer_t optimizer,
                                                    const offload_move_options_t* options,
                                                    offload_ticket_t* ticket);
OFFLOAD_API int32_t offload_optimizer_reload_grads(offload_optimizer_t optimizer,
                                                   const offload_move_options_t* options,
                                                   offload_ticket_t* ticket);

/* States: the device share of masters and moments. When all params' states are out, the library
 * holds no byte on the device. Reload takes the memory before it returns.
 * Errors: also OUT_OF_DEVICE_MEMORY (nothing changed). */
OFFLOAD_API int32_t offload_optimizer_offload_states(offload_optimizer_t optimizer,
                                                     const offload_move_options_t* options,
                                                     offload_ticket_t* ticket);
OFFLOAD_API int32_t offload_optimizer_reload_states(offload_optimizer_t optimizer,
                                                    const offload_move_options_t* options,
                                                    offload_ticket_t* ticket);

/* Weights were loaded from outside: copies masters in from the params again. Moments and step
 * counts stay. Without this the next step would bring the old weights back.
 * Errors: as above. */
OFFLOAD_API int32_t offload_optimizer_refresh_masters(offload_optimizer_t optimizer,
                                                      const offload_move_options_t* options,
                                                      offload_ticket_t* ticket);

/* Changes the device fraction of a committed optimizer. The call is queued like the others: steps
 * queued before it use the old fraction, steps queued after it the new one, with the same bits.
 *
 * device_fraction: 0 (all state on the host) to 1 (all on the device). It decides about the params
 *   with OFFLOAD_PLACE_AUTO, as at create. The elements whose state changes its place are copied;
 * the others stay where they are. On OFFLOAD_DEVICE_HOST, which has one memory, nothing moves.
 * ticket: completes when the content has been copied and the memory that is no longer needed has
 *   been given back, on both sides. May be NULL.
 *
 * The call itself takes the memory that the new fraction needs beyond the old one. Until the ticket
 * completes both are held.
 * It is allowed at any time: while states, params or gradients are offloaded (offloaded states then
 * stay on the host, and a later reload brings back what the new fraction gives the device), and
 * while a save runs (the change waits until the save has read all state). It reads fp32 params at
 * their addresses: these stay valid until the ticket completes. Views of offload_optimizer_state
 * end: ask for new ones.
 *
 * Errors: INVALID_ARGUMENT (device_fraction); OUT_OF_DEVICE_MEMORY, OUT_OF_HOST_MEMORY, and
 *   INVALID_ARGUMENT for pinned_bytes_max (what the change needs is not free; nothing has changed);
 *   INVALID_STATE (not committed, queue full); POISONED. */
OFFLOAD_API int32_t offload_optimizer_set_device_fraction(offload_optimizer_t optimizer,
                                                          double device_fraction,
                                                          offload_ticket_t* ticket);

/* A borrowed view of one kind of state of one param: its first device_count elements lie at
 * device_data on the device, the next host_count at host_data in host memory. Valid until destroy
 * or the next offload_optimizer_set_device_fraction; device_data ends with offload_states, and
 * where the param itself is its master, with its address. The content is stable while nothing is
 * queued, and may be written then. */
typedef struct offload_state_view {
  uint32_t struct_size;
  int32_t dtype;         /* enum offload_dtype */
  void* device_data;     /* NULL if device_count is 0 */
  uint64_t device_count; /* elements */
  void* host_data;       /* NULL if host_count is 0 */
  uint64_t host_count;   /* elements */
  uint64_t step_count;   /* steps this param has taken part in */
} offload_state_view_t;

/* The view of one state kind. An fp32 param that is updated in place has no separate master: the
 * view is then the param itself. Of a bf16 param in OFFLOAD_MASTER_SPLIT the elements with a fp32
 * master show as MASTER and those with halves as MASTER_LOW; a view counts only its own.
 * Errors: INVALID_ARGUMENT (unknown param, kind this algorithm has not), INVALID_STATE (before
 * commit, or while work is queued: wait first). */
OFFLOAD_API int32_t offload_optimizer_state(offload_optimizer_t optimizer, uint32_t param,
                                            int32_t kind, offload_state_view_t* view);

/* How many steps a param has taken part in, for state that is not from here: what is written
 * through views belongs to a count, by which bias corrections and first steps go. At most 2^53.
 * Errors: INVALID_ARGUMENT (unknown param, count), INVALID_STATE (before commit, or while work is
 * queued: wait first), POISONED. */
OFFLOAD_API int32_t offload_optimizer_set_step_count(offload_optimizer_t optimizer, uint32_t param,
                                                     uint64_t step_count);

typedef struct offload_stats {
  uint32_t struct_size;
  uint32_t queued; /* calls queued or running now, a save until its ticket completes */
  uint64_t steps_applied;
  uint64_t steps_skipped;
  uint64_t host_bytes;             /* held now, as in the plan */
  uint64_t device_bytes;           /* held now, as in the plan */
  uint64_t staging_bytes;          /* held now; part of host_bytes */
  uint64_t params_on_device_bytes; /* the caller's, of registered params with an address */
  uint64_t params_on_host_bytes;   /* offloaded */
  uint64_t grads_on_device_bytes;  /* the caller's, of gradients with an address */
  uint64_t grads_on_host_bytes;    /* offloaded or accumulated */
  uint64_t states_on_device_bytes; /* the device share */
  uint64_t states_on_host_bytes;   /* the host share, and what was offloaded of the device share */
  uint64_t grads_down_bytes;       /* since create */
  uint64_t params_up_bytes;        /* since create */
  uint64_t offloaded_bytes;        /* since create, by offload_* */
  uint64_t reloaded_bytes;         /* since create, by reload_* */
  double total_seconds;            /* sums of the step results since create */
  double norm_seconds;
  double grads_down_seconds;
  double update_seconds;
  double params_up_seconds;
  double device_update_seconds;
  double stall_seconds;
} offload_stats_t;

/* Totals since create. */
OFFLOAD_API int32_t offload_optimizer_get_stats(offload_optimizer_t optimizer,
                                                offload_stats_t* stats);

/* ---------------------------------------------------------------------------------- checkpoints --
 */
/* A checkpoint is a directory: safetensors files with the state, which any tool opens, and a
 * manifest (docs/CHECKPOINT_FORMAT.md). It is whole or not there: it gets its name with the last
 * system call of a save, when everything is on disk. What a crash leaves is a directory with
 * another name, which the next save to the same path removes and nothing ever loads.
 *
 * Params are found by name; any world size, sharding, device fraction and thread count loads what
 * any other has saved, bit for bit. Hyperparameters are kept for the reader; load does not set
 * them: the caller's groups are in force. */

/* Called from a thread of the library's, now and then and once at the end; the bytes never
 * decrease. Must not call back into the library. */
typedef void (*offload_progress_function_t)(void* user, uint64_t bytes_done, uint64_t bytes_total);

enum offload_save_flag {
  OFFLOAD_SAVE_MASTERS_ONLY = 1 /* without moments; loads with OFFLOAD_LOAD_FRESH_MOMENTS only */
};

typedef struct offload_save_options {
  uint32_t struct_size;
  uint32_t flags;          /* enum offload_save_flag, or-ed */
  const char* path;        /* the directory to make; nothing of that name may exist, its parent
                              must; the name is UTF-8, of at most 230 bytes on most file systems,
                              and begins with no '.'; a relative path starts where the process is
                              now; the same one, shared, on all ranks; required */
  offload_stream_t stream; /* fp32 params that are their own masters are read after the work now
                              queued on it */
  offload_progress_function_t progress; /* of this rank's bytes; NULL = none */
  void* progress_user;                  /* handed to progress */
  uint32_t io_depth;                    /* blocks of 8 MiB under way at once, 1 to 64; 0 = 4 */
  uint32_t reserved;                    /* 0 */
} offload_save_options_t;

/* Queues a save of masters, moments and step counts as they are at this point of the timeline, and
 * returns at once. Training goes on: a step queued behind the save follows it chunk by chunk, and
 * the files hold nothing of it; its ticket completes when it has run, however long the files take.
 * A save holds io_depth blocks of host memory and a few hundred bytes per tensor while it runs,
 * whatever the size of the model.
 * Params that are their own masters (fp32 ones where they are updated in place), and bf16 ones that
 * are halves of split masters, are read where they are. The caller must neither write nor free them
 * until they have been read: that is so when the save's own ticket has completed, or that of a
 * step, load, or move of params or states queued behind it, and on a stream that
 * offload_optimizer_stream_wait has put behind the save. Queued steps know it by themselves. One
 * save runs at a time: a save or load behind another begins when that one has completed.
 * With a comm table all ranks call it, each writes its own file, and rank 0 completes the
 * directory; a rank that fails fails the save on all. Params with OFFLOAD_PARAM_REPLICA are left to
 * the rank that counts them. While it runs the ranks meet in max, up to 50 times a second where
 * they have nothing else to do, and no step begins before all of them have read their state; how
 * long a rank's disk takes is not bounded by comm_timeout_ns. A save that fails poisons nothing:
 * its ticket tells why, nothing is left at path, training goes on.
 * Errors: INVALID_ARGUMENT (field named; path exists, or its parent does not; the name of a path or
 * param that no checkpoint can have), INVALID_STATE (before commit, or 256 calls queued),
 * UNSUPPORTED (unknown flag), POISONED; by the ticket IO_FAILED (file and system's error named),
 * UNSUPPORTED (more names and shards than a file may hold), OUT_OF_HOST_MEMORY, and another rank's
 * failure with its code; COMM_FAILED and DEVICE_FAILED (these two poison). */
OFFLOAD_API int32_t offload_optimizer_save(offload_optimizer_t optimizer,
                                           const offload_save_options_t* options,
                                           offload_ticket_t* ticket);

enum offload_load_flag {
  OFFLOAD_LOAD_FRESH_MOMENTS = 1, /* weights only: moments as after commit, step counts 0 */
  OFFLOAD_LOAD_KEEP_STEPS = 2,    /* with FRESH_MOMENTS: step counts from the checkpoint all the
                                     same */
  OFFLOAD_LOAD_NO_VERIFY = 4      /* hashes of the data are not compared, neither before nor while
                                     it replaces state: the files are read once, not twice */
};

typedef struct offload_load_options {
  uint32_t struct_size;
  uint32_t flags;                       /* enum offload_load_flag, or-ed */
  const char* path;                     /* a checkpoint's directory; a relative path starts where
                                           the process is now; required */
  offload_stream_t stream;              /* params are written after the work now queued on it */
  offload_progress_function_t progress; /* of this rank's bytes; NULL = none */
  void* progress_user;                  /* handed to progress */
  uint32_t io_depth;                    /* as for save */
  uint32_t reserved;                    /* 0 */
} offload_load_options_t;

/* Queues a load: masters, moments, step counts, and the params, rounded from the masters, at their
 * addresses as of this call. Everything is checked first: manifest and headers always, every
 * hash unless NO_VERIFY; on all ranks before any goes on, however long one takes. A load that is
 * refused changes nothing and poisons nothing: its ticket tells why. Gradients are not touched.
 * Unless NO_VERIFY, what is read again to replace state is compared with what was checked, before
 * it is used: where a file has changed in between, state is a mixture of old and new, which the
 * ticket says with CHECKPOINT_CORRUPT and the block, and the optimizer is poisoned.
 * Errors: INVALID_ARGUMENT (field named), INVALID_STATE (before commit, or 256 calls queued; params
 * or states offloaded: reload them first), UNSUPPORTED (unknown flag), POISONED; by the ticket
 * IO_FAILED, CHECKPOINT_CORRUPT (file, tensor and block named), CHECKPOINT_MISMATCH (the first few
 * differences), UNSUPPORTED (format of another release), OUT_OF_HOST_MEMORY, and another rank's
 * failure with its code; COMM_FAILED and DEVICE_FAILED (these two poison, as does whatever fails
 * once state is being replaced on any rank). */
OFFLOAD_API int32_t offload_optimizer_load(offload_optimizer_t optimizer,
                                           const offload_load_options_t* options,
                                           offload_ticket_t* ticket);

/* What a manifest says of the whole. */
typedef struct offload_checkpoint_info {
  uint32_t struct_size;
  uint32_t format_version;
  int32_t algorithm;   /* enum offload_algorithm */
  uint32_t save_flags; /* enum offload_save_flag, or-ed */
  uint32_t world;      /* ranks that saved it */
  uint32_t group_count;
  uint64_t step;         /* steps applied when it was saved */
  uint64_t param_count;  /* different names */
  uint64_t tensor_count; /* parts of tensors, as visited */
  uint64_t file_count;   /* safetensors files */
  uint64_t bytes;        /* of all tensors */
} offload_checkpoint_info_t;

/* One stored array: one kind of state of one rank's part of one param. Strings and arrays are valid
 * during the visit. */
typedef struct offload_checkpoint_tensor {
  uint32_t struct_size;
  int32_t kind;                /* enum offload_state_kind */
  int32_t dtype;               /* as stored: enum offload_dtype */
  uint32_t rank;               /* that saved it */
  uint32_t dimensions;         /* 1 to 8 */
  uint32_t box_count;          /* of its shard */
  const int64_t* global_shape; /* [dimensions] */
  const int64_t* box_offsets;  /* [box_count][dimensions] */
  const int64_t* box_extents;  /* [box_count][dimensions] */
  uint64_t range_begin;        /* elements, counted through the boxes in order */
  uint64_t range_count;        /* elements stored */
  const char* name;            /* of the param */
  const char* file;            /* inside the directory */
  uint64_t file_offset;        /* bytes, of its first element in the file */
  uint64_t bytes;
  uint64_t step_count; /* steps the param has taken part in */
} offload_checkpoint_tensor_t;

/* tensor->struct_size is the library's: fields beyond it are not there. Must not call back into the
 * library. */
typedef void (*offload_tensor_function_t)(void* user, const offload_checkpoint_tensor_t* tensor);

/* Reads and checks manifest and headers, not the data. info may be NULL; visit, unless NULL, is
 * called on this thread for each tensor, in the order of the manifest, if all is well.
 * Errors: INVALID_ARGUMENT (path NULL, struct_size), IO_FAILED (no such directory, say),
 * CHECKPOINT_CORRUPT, UNSUPPORTED (format of another release), OUT_OF_HOST_MEMORY. */
OFFLOAD_API int32_t offload_checkpoint_inspect(const char* path, offload_checkpoint_info_t* info,
                                               offload_tensor_function_t visit, void* user);

typedef struct offload_verify_options {
  uint32_t struct_size;
  uint32_t io_depth;                    /* as for save */
  offload_progress_function_t progress; /* NULL = none; called on this thread */
  void* progress_user;                  /* handed to progress */
} offload_verify_options_t;

/* Reads every byte and compares every hash. options may be NULL for the defaults.
 * Errors: as for inspect; INVALID_ARGUMENT (io_depth), UNSUPPORTED (unknown tail of options);
 * CHECKPOINT_CORRUPT names the first damaged tensors, with file and block. */
OFFLOAD_API int32_t offload_checkpoint_verify(const char* path,
                                              const offload_verify_options_t* options);

/* Among the checkpoints in `directory` the one with the highest step whose manifest and headers are
 * good: writes its path, ended by a NUL, to path. No file that says "latest" is ever trusted.
 * Errors: INVALID_ARGUMENT (NULL; path_bytes too small: the text says how much is needed),
 * INVALID_STATE (there is none: the text says why the last candidate was refused), IO_FAILED (the
 * directory cannot be listed), OUT_OF_HOST_MEMORY. */
OFFLOAD_API int32_t offload_checkpoint_newest(const char* directory, char* path,
                                              uint64_t path_bytes);

/* ------------------------------------------------------------------------- device conveniences --
 */
/* For callers without a CUDA runtime of their own, and for the simulated device. On the host
 * device memory is host memory, the only stream is NULL, and functions run at once. */

/* Memory on the context's device, aligned to 256 bytes, with unspecified content. Owned by the
 * caller until offload_device_free; the context frees what is left.
 * Errors: OUT_OF_DEVICE_MEMORY (bytes asked and free), INVALID_ARGUMENT (bytes is 0). */
OFFLOAD_API int32_t offload_device_alloc(offload_context_t context, uint64_t bytes, void** data);

/* Errors: INVALID_ARGUMENT if data is not what offload_device_alloc gave. NULL is allowed. */
OFFLOAD_API int32_t offload_device_free(offload_context_t context, void* data);

/* Copy behind the work now queued on stream; they return when the copy is done.
 * Errors: INVALID_ARGUMENT (a range outside the device's memory), DEVICE_FAILED (also when the
 * stream makes no progress for device_timeout_ns: host_data must then outlive the stream's work).
 */
OFFLOAD_API int32_t offload_device_upload(offload_context_t context, void* device_data,
                                          const void* host_data, uint64_t bytes,
                                          offload_stream_t stream);
OFFLOAD_API int32_t offload_device_download(offload_context_t context, void* host_data,
                                            const void* device_data, uint64_t bytes,
                                            offload_stream_t stream);

/* Where a function that runs on the device sees device memory: the sim's device addresses fault
 * when the host touches them, so that a missing copy shows. Only functions given to
 * offload_stream_run may use the mapped address, but any thread may ask for it.
 * Errors: INVALID_ARGUMENT (range outside the device's memory), UNSUPPORTED on CUDA. */
OFFLOAD_API int32_t offload_device_map(offload_context_t context, void* device_data, uint64_t bytes,
                                       void** mapped);

OFFLOAD_API int32_t offload_stream_create(offload_context_t context, offload_stream_t* stream);

/* Finishes the stream's work first. NULL is allowed and does nothing. */
OFFLOAD_API int32_t offload_stream_destroy(offload_context_t context, offload_stream_t stream);

/* Blocks until the work now queued on stream is done, at most timeout_ns (negative: no limit).
 * Errors: TIMED_OUT, DEVICE_FAILED with the cause of an earlier asynchronous failure. */
OFFLOAD_API int32_t offload_stream_synchronize(offload_context_t context, offload_stream_t stream,
                                               int64_t timeout_ns);

/* A function that stands for a kernel of the caller's; it must not call back into the library. */
typedef void (*offload_stream_function_t)(void* user);

/* Queues function(user) on stream. Errors: INVALID_ARGUMENT, UNSUPPORTED on CUDA. */
OFFLOAD_API int32_t offload_stream_run(offload_context_t context, offload_stream_t stream,
                                       offload_stream_function_t function, void* user);

/* end-plain-c99 */
#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* HYBRIDOPT_OFFLOAD_H */
