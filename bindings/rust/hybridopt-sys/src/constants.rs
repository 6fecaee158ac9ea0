//! The enumerators. The statuses and those of the `int32_t` fields are `i32`, flags are `u32`.

// enum offload_status
pub const OFFLOAD_OK: i32 = 0;
pub const OFFLOAD_INVALID_ARGUMENT: i32 = 10;
pub const OFFLOAD_INVALID_STATE: i32 = 11;
pub const OFFLOAD_UNSUPPORTED: i32 = 12;
pub const OFFLOAD_OUT_OF_HOST_MEMORY: i32 = 20;
pub const OFFLOAD_OUT_OF_DEVICE_MEMORY: i32 = 21;
pub const OFFLOAD_DEVICE_FAILED: i32 = 30;
pub const OFFLOAD_COMM_FAILED: i32 = 31;
pub const OFFLOAD_IO_FAILED: i32 = 40;
pub const OFFLOAD_CHECKPOINT_CORRUPT: i32 = 41;
pub const OFFLOAD_CHECKPOINT_MISMATCH: i32 = 42;
pub const OFFLOAD_TIMED_OUT: i32 = 50;
pub const OFFLOAD_POISONED: i32 = 60;
pub const OFFLOAD_INTERNAL: i32 = 70;

// enum offload_device_kind
pub const OFFLOAD_DEVICE_HOST: i32 = 0;
pub const OFFLOAD_DEVICE_SIM: i32 = 1;
pub const OFFLOAD_DEVICE_CUDA: i32 = 2;

// enum offload_algorithm
pub const OFFLOAD_ADAMW: i32 = 1;
pub const OFFLOAD_ADAM: i32 = 2;
pub const OFFLOAD_SGD: i32 = 3;
pub const OFFLOAD_LION: i32 = 4;
pub const OFFLOAD_ADAGRAD: i32 = 5;

// enum offload_dtype
pub const OFFLOAD_FP32: i32 = 1;
pub const OFFLOAD_BF16: i32 = 2;
pub const OFFLOAD_FP16: i32 = 3;
pub const OFFLOAD_U16: i32 = 4;

pub const OFFLOAD_MASTER_FP32: i32 = 0;
pub const OFFLOAD_MASTER_SPLIT: i32 = 1;

pub const OFFLOAD_ROUND_STOCHASTIC: i32 = 0;
pub const OFFLOAD_ROUND_NEAREST: i32 = 1;

// enum offload_placement
pub const OFFLOAD_PLACE_AUTO: i32 = 0;
pub const OFFLOAD_PLACE_HOST: i32 = 1;
pub const OFFLOAD_PLACE_DEVICE: i32 = 2;

// enum offload_state_kind
pub const OFFLOAD_STATE_MASTER: i32 = 0;
pub const OFFLOAD_STATE_EXP_AVG: i32 = 1;
pub const OFFLOAD_STATE_EXP_AVG_SQ: i32 = 2;
pub const OFFLOAD_STATE_MOMENTUM_BUFFER: i32 = 3;
pub const OFFLOAD_STATE_SUM: i32 = 4;
pub const OFFLOAD_STATE_MASTER_LOW: i32 = 5;

// enum offload_movable
pub const OFFLOAD_MOVABLE_PARAMS: u32 = 1;
pub const OFFLOAD_MOVABLE_GRADS: u32 = 2;
pub const OFFLOAD_MOVABLE_STATES: u32 = 4;
pub const OFFLOAD_MOVABLE_ACCUMULATE: u32 = 8;

// enum offload_log_level
pub const OFFLOAD_LOG_INFO: i32 = 1;
pub const OFFLOAD_LOG_WARNING: i32 = 2;
pub const OFFLOAD_LOG_ERROR: i32 = 3;

// enum offload_numa_rung
pub const OFFLOAD_NUMA_NONE: i32 = 0;
pub const OFFLOAD_NUMA_FIRST_TOUCH: i32 = 1;
pub const OFFLOAD_NUMA_PLACED: i32 = 2;

// enum offload_param_flag
pub const OFFLOAD_PARAM_REPLICA: u32 = 1;

// enum offload_shard_flag
pub const OFFLOAD_SHARD_RANGE: u32 = 1;

// enum offload_step_flag
pub const OFFLOAD_STEP_ASSUME_FINITE: u32 = 1;

// enum offload_move_flag
pub const OFFLOAD_MOVE_ACCUMULATE: u32 = 1;
pub const OFFLOAD_MOVE_DROP: u32 = 2;

// enum offload_save_flag
pub const OFFLOAD_SAVE_MASTERS_ONLY: u32 = 1;

// enum offload_load_flag
pub const OFFLOAD_LOAD_FRESH_MOMENTS: u32 = 1;
pub const OFFLOAD_LOAD_KEEP_STEPS: u32 = 2;
pub const OFFLOAD_LOAD_NO_VERIFY: u32 = 4;
