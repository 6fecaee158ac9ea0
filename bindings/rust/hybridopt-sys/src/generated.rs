//! The constants, structs and functions of offload.h, by the same names. The statuses and the
//! enumerators of `int32_t` fields are `i32`, flags are `u32`.
//!
//! Written by generate_abi.py; do not edit. The manual is the header.

use std::os::raw::{c_char, c_void};

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

pub const OFFLOAD_DEVICE_HOST: i32 = 0;
pub const OFFLOAD_DEVICE_SIM: i32 = 1;
pub const OFFLOAD_DEVICE_CUDA: i32 = 2;

pub const OFFLOAD_ADAMW: i32 = 1;
pub const OFFLOAD_ADAM: i32 = 2;
pub const OFFLOAD_SGD: i32 = 3;
pub const OFFLOAD_LION: i32 = 4;
pub const OFFLOAD_ADAGRAD: i32 = 5;
pub const OFFLOAD_SIGNUM: i32 = 6;
pub const OFFLOAD_MUON: i32 = 7;

pub const OFFLOAD_FP32: i32 = 1;
pub const OFFLOAD_BF16: i32 = 2;
pub const OFFLOAD_FP16: i32 = 3;
pub const OFFLOAD_U16: i32 = 4;
pub const OFFLOAD_I8: i32 = 5;

pub const OFFLOAD_MASTER_FP32: i32 = 0;
pub const OFFLOAD_MASTER_SPLIT: i32 = 1;
pub const OFFLOAD_MASTER_SPLIT24: i32 = 2;

pub const OFFLOAD_ROUND_STOCHASTIC: i32 = 0;
pub const OFFLOAD_ROUND_NEAREST: i32 = 1;

pub const OFFLOAD_PLACE_AUTO: i32 = 0;
pub const OFFLOAD_PLACE_HOST: i32 = 1;
pub const OFFLOAD_PLACE_DEVICE: i32 = 2;
pub const OFFLOAD_PLACE_DISK: i32 = 3;

pub const OFFLOAD_TIER_DEVICE: i32 = 0;
pub const OFFLOAD_TIER_HOST: i32 = 1;
pub const OFFLOAD_TIER_DISK: i32 = 2;

pub const OFFLOAD_STATE_MASTER: i32 = 0;
pub const OFFLOAD_STATE_EXP_AVG: i32 = 1;
pub const OFFLOAD_STATE_EXP_AVG_SQ: i32 = 2;
pub const OFFLOAD_STATE_MOMENTUM_BUFFER: i32 = 3;
pub const OFFLOAD_STATE_SUM: i32 = 4;
pub const OFFLOAD_STATE_MASTER_LOW: i32 = 5;

pub const OFFLOAD_MOVABLE_PARAMS: u32 = 1;
pub const OFFLOAD_MOVABLE_GRADS: u32 = 2;
pub const OFFLOAD_MOVABLE_STATES: u32 = 4;
pub const OFFLOAD_MOVABLE_ACCUMULATE: u32 = 8;

pub const OFFLOAD_LOG_INFO: i32 = 1;
pub const OFFLOAD_LOG_WARNING: i32 = 2;
pub const OFFLOAD_LOG_ERROR: i32 = 3;

#[repr(C)]
pub struct offload_context {
    _private: [u8; 0],
}
pub type offload_context_t = *mut offload_context;

#[repr(C)]
pub struct offload_optimizer {
    _private: [u8; 0],
}
pub type offload_optimizer_t = *mut offload_optimizer;

#[repr(C)]
pub struct offload_stash {
    _private: [u8; 0],
}
pub type offload_stash_t = *mut offload_stash;

#[repr(C)]
pub struct offload_pool {
    _private: [u8; 0],
}
pub type offload_pool_t = *mut offload_pool;

#[repr(C)]
pub struct offload_exchange {
    _private: [u8; 0],
}
pub type offload_exchange_t = *mut offload_exchange;

pub type offload_ticket_t = u64;

pub type offload_stream_t = *mut c_void;

pub type offload_log_function_t = Option<unsafe extern "C" fn(user: *mut c_void, level: i32, text: *const c_char)>;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_context_options_t {
    pub struct_size: u32,
    pub device_kind: i32,
    pub device_index: i32,
    pub threads: u32,
    pub pinned_bytes_max: u64,
    pub device_timeout_ns: u64,
    pub log: offload_log_function_t,
    pub log_user: *mut c_void,
    pub sim_memory_bytes: u64,
    pub sim_seed: u64,
    pub sim_delay_ns_max: u64,
    pub numa_nodes: u64,
    pub local_rank: u32,
    pub local_world: u32,
    pub sim_pinned_bytes_max: u64,
    pub allow_pageable: i32,
    pub numa_policy: i32,
}
default_is_zero!(offload_context_options_t);

pub const OFFLOAD_NUMA_NEAR: i32 = 0;
pub const OFFLOAD_NUMA_INTERLEAVED: i32 = 1;

pub const OFFLOAD_NUMA_NONE: i32 = 0;
pub const OFFLOAD_NUMA_FIRST_TOUCH: i32 = 1;
pub const OFFLOAD_NUMA_PLACED: i32 = 2;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_context_info_t {
    pub struct_size: u32,
    pub device_kind: i32,
    pub threads: u32,
    pub cpus_allowed: u32,
    pub nodes: u32,
    pub threads_seated: i32,
    pub huge_pages: i32,
    pub optimizers: u32,
    pub device_memory_bytes: u64,
    pub device_memory_free_bytes: u64,
    pub pinned_bytes: u64,
    pub isa: [c_char; 32],
    pub device_name: [c_char; 256],
    pub local_rank: u32,
    pub local_world: u32,
    pub cpus: u32,
    pub numa_rung: i32,
    pub numa_nodes: u64,
    pub notes: [c_char; 1024],
    pub numa_memory_nodes: u64,
    pub numa_policy: i32,
    pub stashes: u32,
}
default_is_zero!(offload_context_info_t);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_message_t {
    pub struct_size: u32,
    pub rank: i32,
    pub sends: i32,
    pub reserved: u32,
    pub data: *mut c_void,
    pub bytes: u64,
}
default_is_zero!(offload_message_t);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_comm_t {
    pub struct_size: u32,
    pub rank: i32,
    pub world: i32,
    pub reserved: u32,
    pub user: *mut c_void,
    pub sum: Option<unsafe extern "C" fn(user: *mut c_void, values: *mut f64, count: u32, timeout_ns: i64) -> i32>,
    pub max: Option<unsafe extern "C" fn(user: *mut c_void, values: *mut i32, count: u32, timeout_ns: i64) -> i32>,
    pub barrier: Option<unsafe extern "C" fn(user: *mut c_void, timeout_ns: i64) -> i32>,
    pub exchange: Option<unsafe extern "C" fn(user: *mut c_void, messages: *const offload_message_t, count: u32, stream: offload_stream_t, timeout_ns: i64) -> i32>,
    pub exchange_on_host: i32,
    pub reserved1: u32,
}
default_is_zero!(offload_comm_t);

pub const OFFLOAD_EXECUTORS_AUTO: i32 = 0;
pub const OFFLOAD_EXECUTORS_CPU: i32 = 1;
pub const OFFLOAD_EXECUTORS_STREAMED: i32 = 2;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_optimizer_options_t {
    pub struct_size: u32,
    pub algorithm: i32,
    pub device_fraction: f64,
    pub chunk_elements: u64,
    pub staging_slots: u32,
    pub movable: u32,
    pub comm: *const offload_comm_t,
    pub comm_timeout_ns: u64,
    pub master_layout: i32,
    pub moment_dtype: i32,
    pub moment_rounding: i32,
    pub reserved: u32,
    pub rounding_seed: u64,
    pub stream_ring_bytes: u64,
    pub host_executors: i32,
    pub reserved1: u32,
    pub early_update_bytes: u64,
    pub track_changes: i32,
    pub reserved2: u32,
    pub save_buffer_bytes: u64,
    pub disk_fraction: f64,
    pub disk_paths: *const c_char,
    pub disk_ring_bytes: u64,
}
default_is_zero!(offload_optimizer_options_t);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_group_t {
    pub struct_size: u32,
    pub nesterov: i32,
    pub maximize: i32,
    pub cautious_weight_decay: i32,
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub momentum: f64,
    pub dampening: f64,
    pub lr_decay: f64,
    pub initial_accumulator_value: f64,
    pub algorithm: i32,
    pub ns_steps: i32,
    pub update_rms: f64,
    pub ns_coefficients: [[f64; 3]; 10],
}
default_is_zero!(offload_group_t);

pub const OFFLOAD_PARAM_REPLICA: u32 = 1;

pub const OFFLOAD_SHARD_RANGE: u32 = 1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_shard_t {
    pub struct_size: u32,
    pub dimensions: u32,
    pub box_count: u32,
    pub flags: u32,
    pub global_shape: *const i64,
    pub box_offsets: *const i64,
    pub box_extents: *const i64,
    pub range_begin: u64,
    pub range_count: u64,
}
default_is_zero!(offload_shard_t);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_param_t {
    pub struct_size: u32,
    pub group: u32,
    pub dtype: i32,
    pub grad_dtype: i32,
    pub placement: i32,
    pub flags: u32,
    pub name: *const c_char,
    pub data: *mut c_void,
    pub grad: *const c_void,
    pub count: u64,
    pub shard: *const offload_shard_t,
    pub chunk_order: i32,
    pub split_count: u32,
    pub split_rows: *const u64,
}
default_is_zero!(offload_param_t);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_binding_t {
    pub struct_size: u32,
    pub param: u32,
    pub data: *mut c_void,
    pub grad: *const c_void,
}
default_is_zero!(offload_binding_t);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_plan_t {
    pub struct_size: u32,
    pub param_count: u32,
    pub element_count: u64,
    pub elements: [u64; 4],
    pub state_bytes: [[u64; 32]; 4],
    pub staging_bytes: u64,
    pub host_params_bytes: u64,
    pub host_grads_bytes: u64,
    pub host_swap_bytes: u64,
    pub host_scratch_bytes: u64,
    pub device_scratch_bytes: u64,
    pub host_bytes: u64,
    pub device_bytes: u64,
    pub device_free_bytes: u64,
    pub host_available_bytes: u64,
    pub pinned_bytes_left: u64,
    pub chunk_count: u64,
    pub grads_down_bytes: u64,
    pub params_up_bytes: u64,
    pub fits: i32,
    pub reserved: u32,
    pub numa_bytes: [u64; 64],
    pub numa_unknown_bytes: u64,
    pub device_ring_bytes: u64,
    pub pinned_state_bytes: u64,
    pub host_early_bytes: u64,
    pub host_change_bytes: u64,
    pub device_change_bytes: u64,
    pub host_save_bytes: u64,
    pub disk_bytes: u64,
    pub disk_step_bytes: u64,
    pub host_disk_bytes: u64,
}
default_is_zero!(offload_plan_t);

pub const OFFLOAD_STEP_ASSUME_FINITE: u32 = 1;
pub const OFFLOAD_STEP_FOLLOW_PARAMS: u32 = 2;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_step_options_t {
    pub struct_size: u32,
    pub flags: u32,
    pub grad_scale: f64,
    pub grad_norm_max: f64,
    pub stream: offload_stream_t,
}
default_is_zero!(offload_step_options_t);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_step_result_t {
    pub struct_size: u32,
    pub skipped: i32,
    pub step: u64,
    pub grad_norm: f64,
    pub grad_clip: f64,
    pub total_seconds: f64,
    pub norm_seconds: f64,
    pub grads_down_seconds: f64,
    pub update_seconds: f64,
    pub params_up_seconds: f64,
    pub device_update_seconds: f64,
    pub stall_seconds: f64,
    pub grads_down_bytes: u64,
    pub params_up_bytes: u64,
    pub cpu_elements: u64,
    pub streamed_elements: u64,
    pub state_up_bytes: u64,
    pub state_down_bytes: u64,
    pub state_up_seconds: f64,
    pub streamed_update_seconds: f64,
    pub state_down_seconds: f64,
    pub cpu_idle_seconds: f64,
    pub streamed_idle_seconds: f64,
    pub early_elements: u64,
    pub undone_elements: u64,
}
default_is_zero!(offload_step_result_t);

pub const OFFLOAD_MOVE_ACCUMULATE: u32 = 1;
pub const OFFLOAD_MOVE_DROP: u32 = 2;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_move_options_t {
    pub struct_size: u32,
    pub flags: u32,
    pub params: *const u32,
    pub param_count: u32,
    pub stream_count: u32,
    pub streams: *const offload_stream_t,
}
default_is_zero!(offload_move_options_t);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_state_view_t {
    pub struct_size: u32,
    pub dtype: i32,
    pub device_data: *mut c_void,
    pub device_count: u64,
    pub host_data: *mut c_void,
    pub host_count: u64,
    pub step_count: u64,
    pub disk_count: u64,
}
default_is_zero!(offload_state_view_t);

pub const OFFLOAD_CHANGES_IN_TENSOR: u32 = 1;
pub const OFFLOAD_CHANGES_GAPS: u32 = 2;
pub const OFFLOAD_CHANGES_WIDE: u32 = 4;
pub const OFFLOAD_CHANGES_ON_DEVICE: u32 = 8;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_changes_options_t {
    pub struct_size: u32,
    pub flags: u32,
    pub buffer: *mut c_void,
    pub buffer_bytes: u64,
    pub dense_above: f64,
    pub stream: offload_stream_t,
}
default_is_zero!(offload_changes_options_t);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_change_t {
    pub struct_size: u32,
    pub param: u32,
    pub dense: i32,
    pub dtype: i32,
    pub index_bytes: u32,
    pub gaps: i32,
    pub count: u64,
    pub indices_offset: u64,
    pub values_offset: u64,
    pub hash: u64,
    pub base_hash: u64,
    pub has_base: i32,
    pub reserved: u32,
}
default_is_zero!(offload_change_t);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_changes_t {
    pub struct_size: u32,
    pub param_count: u32,
    pub take: u64,
    pub bytes: u64,
    pub params: *const offload_change_t,
}
default_is_zero!(offload_changes_t);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_stats_t {
    pub struct_size: u32,
    pub queued: u32,
    pub steps_applied: u64,
    pub steps_skipped: u64,
    pub host_bytes: u64,
    pub device_bytes: u64,
    pub staging_bytes: u64,
    pub params_bytes: [u64; 4],
    pub grads_bytes: [u64; 4],
    pub state_bytes: [u64; 4],
    pub grads_down_bytes: u64,
    pub params_up_bytes: u64,
    pub offloaded_bytes: u64,
    pub reloaded_bytes: u64,
    pub total_seconds: f64,
    pub norm_seconds: f64,
    pub grads_down_seconds: f64,
    pub update_seconds: f64,
    pub params_up_seconds: f64,
    pub device_update_seconds: f64,
    pub stall_seconds: f64,
    pub cpu_elements: u64,
    pub streamed_elements: u64,
    pub state_up_bytes: u64,
    pub state_down_bytes: u64,
    pub state_up_seconds: f64,
    pub streamed_update_seconds: f64,
    pub state_down_seconds: f64,
    pub cpu_idle_seconds: f64,
    pub streamed_idle_seconds: f64,
    pub gave_way_copies: u64,
    pub gave_way_seconds: f64,
    pub pushes_ahead_bytes: u64,
    pub early_elements: u64,
    pub undone_elements: u64,
    pub disk_read_bytes: u64,
    pub disk_written_bytes: u64,
}
default_is_zero!(offload_stats_t);

pub type offload_progress_function_t = Option<unsafe extern "C" fn(user: *mut c_void, bytes_done: u64, bytes_total: u64)>;

pub const OFFLOAD_SAVE_MASTERS_ONLY: u32 = 1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_save_options_t {
    pub struct_size: u32,
    pub flags: u32,
    pub path: *const c_char,
    pub stream: offload_stream_t,
    pub progress: offload_progress_function_t,
    pub progress_user: *mut c_void,
    pub io_depth: u32,
    pub reserved: u32,
}
default_is_zero!(offload_save_options_t);

pub const OFFLOAD_LOAD_FRESH_MOMENTS: u32 = 1;
pub const OFFLOAD_LOAD_KEEP_STEPS: u32 = 2;
pub const OFFLOAD_LOAD_NO_VERIFY: u32 = 4;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_load_options_t {
    pub struct_size: u32,
    pub flags: u32,
    pub path: *const c_char,
    pub stream: offload_stream_t,
    pub progress: offload_progress_function_t,
    pub progress_user: *mut c_void,
    pub io_depth: u32,
    pub reserved: u32,
}
default_is_zero!(offload_load_options_t);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_checkpoint_info_t {
    pub struct_size: u32,
    pub format_version: u32,
    pub algorithm: i32,
    pub save_flags: u32,
    pub world: u32,
    pub group_count: u32,
    pub step: u64,
    pub param_count: u64,
    pub tensor_count: u64,
    pub file_count: u64,
    pub bytes: u64,
}
default_is_zero!(offload_checkpoint_info_t);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_checkpoint_tensor_t {
    pub struct_size: u32,
    pub kind: i32,
    pub dtype: i32,
    pub rank: u32,
    pub dimensions: u32,
    pub box_count: u32,
    pub global_shape: *const i64,
    pub box_offsets: *const i64,
    pub box_extents: *const i64,
    pub range_begin: u64,
    pub range_count: u64,
    pub name: *const c_char,
    pub file: *const c_char,
    pub file_offset: u64,
    pub bytes: u64,
    pub step_count: u64,
}
default_is_zero!(offload_checkpoint_tensor_t);

pub type offload_tensor_function_t = Option<unsafe extern "C" fn(user: *mut c_void, tensor: *const offload_checkpoint_tensor_t)>;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_verify_options_t {
    pub struct_size: u32,
    pub io_depth: u32,
    pub progress: offload_progress_function_t,
    pub progress_user: *mut c_void,
}
default_is_zero!(offload_verify_options_t);

pub type offload_stash_ticket_t = u64;

pub type offload_stash_mark_t = u64;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_stash_options_t {
    pub struct_size: u32,
    pub lanes: u32,
    pub budget_bytes: u64,
    pub slab_bytes: u64,
    pub min_bytes: u64,
    pub tickets_max: u32,
    pub reserved: u32,
}
default_is_zero!(offload_stash_options_t);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_stash_plan_t {
    pub struct_size: u32,
    pub tickets_max: u32,
    pub slab_bytes: u64,
    pub slab_count: u64,
    pub slabs_bytes: u64,
    pub scratch_bytes: u64,
    pub host_bytes: u64,
    pub host_available_bytes: u64,
    pub pinned_bytes_left: u64,
    pub fits: i32,
    pub reserved: u32,
}
default_is_zero!(offload_stash_plan_t);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_stash_stats_t {
    pub struct_size: u32,
    pub tickets: u32,
    pub slabs_bytes: u64,
    pub pinned_bytes: u64,
    pub used_bytes: u64,
    pub used_bytes_max: u64,
    pub held_bytes: u64,
    pub pushes: u64,
    pub pushed_bytes: u64,
    pub refused_pushes: u64,
    pub refused_bytes: u64,
    pub small_pushes: u64,
    pub prefetches: u64,
    pub prefetched_bytes: u64,
    pub pops: u64,
    pub drops: u64,
    pub down_timed_bytes: u64,
    pub down_seconds: f64,
    pub up_timed_bytes: u64,
    pub up_seconds: f64,
    pub release_wait_seconds: f64,
    pub pop_wait_seconds: f64,
    pub ahead_bytes: u64,
}
default_is_zero!(offload_stash_stats_t);

pub const OFFLOAD_STASH_KEEP: i32 = 1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_exchange_matrix_t {
    pub struct_size: u32,
    pub dtype: i32,
    pub grad_dtype: i32,
    pub reserved: u32,
    pub name: *const c_char,
    pub shard: *const offload_shard_t,
}
default_is_zero!(offload_exchange_matrix_t);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_exchange_options_t {
    pub struct_size: u32,
    pub matrix_count: u32,
    pub matrices: *const offload_exchange_matrix_t,
    pub comm: *const offload_comm_t,
    pub comm_timeout_ns: u64,
}
default_is_zero!(offload_exchange_options_t);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_exchange_plan_t {
    pub struct_size: u32,
    pub home_count: u32,
    pub home_elements: u64,
    pub device_bytes: u64,
    pub host_bytes: u64,
}
default_is_zero!(offload_exchange_plan_t);

pub type offload_stream_function_t = Option<unsafe extern "C" fn(user: *mut c_void)>;

extern "C" {
    pub fn offload_abi_version() -> u32;
    pub fn offload_build_info() -> *const c_char;
    pub fn offload_status_name(status: i32) -> *const c_char;
    pub fn offload_last_error() -> *const c_char;
    pub fn offload_context_create(
        options: *const offload_context_options_t,
        context: *mut offload_context_t,
    ) -> i32;
    pub fn offload_context_destroy(context: offload_context_t) -> i32;
    pub fn offload_context_get_info(
        context: offload_context_t,
        info: *mut offload_context_info_t,
    ) -> i32;
    pub fn offload_optimizer_create(
        context: offload_context_t,
        options: *const offload_optimizer_options_t,
        optimizer: *mut offload_optimizer_t,
    ) -> i32;
    pub fn offload_optimizer_destroy(optimizer: offload_optimizer_t) -> i32;
    pub fn offload_optimizer_add_group(
        optimizer: offload_optimizer_t,
        group: *const offload_group_t,
        group_id: *mut u32,
    ) -> i32;
    pub fn offload_optimizer_set_group(
        optimizer: offload_optimizer_t,
        group_id: u32,
        group: *const offload_group_t,
    ) -> i32;
    pub fn offload_optimizer_add_params(
        optimizer: offload_optimizer_t,
        params: *const offload_param_t,
        param_count: u32,
        first_id: *mut u32,
    ) -> i32;
    pub fn offload_optimizer_bind(
        optimizer: offload_optimizer_t,
        bindings: *const offload_binding_t,
        binding_count: u32,
    ) -> i32;
    pub fn offload_optimizer_plan(
        optimizer: offload_optimizer_t,
        plan: *mut offload_plan_t,
    ) -> i32;
    pub fn offload_optimizer_commit(
        optimizer: offload_optimizer_t,
        stream: offload_stream_t,
    ) -> i32;
    pub fn offload_optimizer_step(
        optimizer: offload_optimizer_t,
        options: *const offload_step_options_t,
        ticket: *mut offload_ticket_t,
    ) -> i32;
    pub fn offload_optimizer_step_result(
        optimizer: offload_optimizer_t,
        ticket: offload_ticket_t,
        result: *mut offload_step_result_t,
    ) -> i32;
    pub fn offload_optimizer_wait(
        optimizer: offload_optimizer_t,
        ticket: offload_ticket_t,
        timeout_ns: i64,
    ) -> i32;
    pub fn offload_optimizer_stream_wait(
        optimizer: offload_optimizer_t,
        ticket: offload_ticket_t,
        stream: offload_stream_t,
        params: *const u32,
        param_count: u32,
    ) -> i32;
    pub fn offload_optimizer_offload_params(
        optimizer: offload_optimizer_t,
        options: *const offload_move_options_t,
        ticket: *mut offload_ticket_t,
    ) -> i32;
    pub fn offload_optimizer_reload_params(
        optimizer: offload_optimizer_t,
        options: *const offload_move_options_t,
        ticket: *mut offload_ticket_t,
    ) -> i32;
    pub fn offload_optimizer_offload_grads(
        optimizer: offload_optimizer_t,
        options: *const offload_move_options_t,
        ticket: *mut offload_ticket_t,
    ) -> i32;
    pub fn offload_optimizer_reload_grads(
        optimizer: offload_optimizer_t,
        options: *const offload_move_options_t,
        ticket: *mut offload_ticket_t,
    ) -> i32;
    pub fn offload_optimizer_grads_to_keep(
        optimizer: offload_optimizer_t,
        keep: *mut u8,
        count: u32,
    ) -> i32;
    pub fn offload_optimizer_undo_early_updates(
        optimizer: offload_optimizer_t,
        ticket: *mut offload_ticket_t,
    ) -> i32;
    pub fn offload_optimizer_offload_states(
        optimizer: offload_optimizer_t,
        options: *const offload_move_options_t,
        ticket: *mut offload_ticket_t,
    ) -> i32;
    pub fn offload_optimizer_reload_states(
        optimizer: offload_optimizer_t,
        options: *const offload_move_options_t,
        ticket: *mut offload_ticket_t,
    ) -> i32;
    pub fn offload_optimizer_refresh_masters(
        optimizer: offload_optimizer_t,
        options: *const offload_move_options_t,
        ticket: *mut offload_ticket_t,
    ) -> i32;
    pub fn offload_optimizer_set_device_fraction(
        optimizer: offload_optimizer_t,
        device_fraction: f64,
        ticket: *mut offload_ticket_t,
    ) -> i32;
    pub fn offload_optimizer_set_fractions(
        optimizer: offload_optimizer_t,
        device_fraction: f64,
        disk_fraction: f64,
        ticket: *mut offload_ticket_t,
    ) -> i32;
    pub fn offload_optimizer_state(
        optimizer: offload_optimizer_t,
        param: u32,
        kind: i32,
        view: *mut offload_state_view_t,
    ) -> i32;
    pub fn offload_optimizer_read_state(
        optimizer: offload_optimizer_t,
        param: u32,
        kind: i32,
        first: u64,
        count: u64,
        values: *mut f32,
    ) -> i32;
    pub fn offload_optimizer_write_state(
        optimizer: offload_optimizer_t,
        param: u32,
        kind: i32,
        first: u64,
        count: u64,
        values: *const f32,
    ) -> i32;
    pub fn offload_optimizer_set_step_count(
        optimizer: offload_optimizer_t,
        param: u32,
        step_count: u64,
    ) -> i32;
    pub fn offload_optimizer_changes(
        optimizer: offload_optimizer_t,
        params: *const u32,
        param_count: u32,
        options: *const offload_changes_options_t,
        out: *mut offload_changes_t,
    ) -> i32;
    pub fn offload_optimizer_acknowledge_changes(optimizer: offload_optimizer_t, take: u64) -> i32;
    pub fn offload_optimizer_mark_changed(
        optimizer: offload_optimizer_t,
        params: *const u32,
        param_count: u32,
    ) -> i32;
    pub fn offload_content_hash(data: *const c_void, bytes: u64, hash: *mut u64) -> i32;
    pub fn offload_optimizer_get_stats(
        optimizer: offload_optimizer_t,
        stats: *mut offload_stats_t,
    ) -> i32;
    pub fn offload_optimizer_trace_start(optimizer: offload_optimizer_t, ring_bytes: u64) -> i32;
    pub fn offload_optimizer_trace_stop(
        optimizer: offload_optimizer_t,
        path: *const c_char,
        dropped: *mut u64,
    ) -> i32;
    pub fn offload_optimizer_save(
        optimizer: offload_optimizer_t,
        options: *const offload_save_options_t,
        ticket: *mut offload_ticket_t,
    ) -> i32;
    pub fn offload_optimizer_load(
        optimizer: offload_optimizer_t,
        options: *const offload_load_options_t,
        ticket: *mut offload_ticket_t,
    ) -> i32;
    pub fn offload_checkpoint_inspect(
        path: *const c_char,
        info: *mut offload_checkpoint_info_t,
        visit: offload_tensor_function_t,
        user: *mut c_void,
    ) -> i32;
    pub fn offload_checkpoint_verify(
        path: *const c_char,
        options: *const offload_verify_options_t,
    ) -> i32;
    pub fn offload_checkpoint_newest(
        directory: *const c_char,
        verify: *const offload_verify_options_t,
        path: *mut c_char,
        path_bytes: u64,
    ) -> i32;
    pub fn offload_stash_plan(
        context: offload_context_t,
        options: *const offload_stash_options_t,
        plan: *mut offload_stash_plan_t,
    ) -> i32;
    pub fn offload_stash_create(
        context: offload_context_t,
        options: *const offload_stash_options_t,
        stash: *mut offload_stash_t,
    ) -> i32;
    pub fn offload_stash_destroy(stash: offload_stash_t) -> i32;
    pub fn offload_stash_push(
        stash: offload_stash_t,
        lane: u32,
        data: *const c_void,
        bytes: u64,
        stream: offload_stream_t,
        ticket: *mut offload_stash_ticket_t,
    ) -> i32;
    pub fn offload_stash_release(
        stash: offload_stash_t,
        ticket: offload_stash_ticket_t,
        stream: offload_stream_t,
    ) -> i32;
    pub fn offload_stash_prefetch(
        stash: offload_stash_t,
        ticket: offload_stash_ticket_t,
        destination: *mut c_void,
        destination_bytes: u64,
        stream: offload_stream_t,
    ) -> i32;
    pub fn offload_stash_pop(
        stash: offload_stash_t,
        ticket: offload_stash_ticket_t,
        stream: offload_stream_t,
        flags: u32,
    ) -> i32;
    pub fn offload_stash_drop(
        stash: offload_stash_t,
        ticket: offload_stash_ticket_t,
        stream: offload_stream_t,
    ) -> i32;
    pub fn offload_stash_mark(
        stash: offload_stash_t,
        lane: u32,
        mark: *mut offload_stash_mark_t,
    ) -> i32;
    pub fn offload_stash_rollback(
        stash: offload_stash_t,
        mark: offload_stash_mark_t,
        stream: offload_stream_t,
    ) -> i32;
    pub fn offload_stash_wait(
        stash: offload_stash_t,
        ticket: offload_stash_ticket_t,
        timeout_ns: i64,
    ) -> i32;
    pub fn offload_stash_get_stats(
        stash: offload_stash_t,
        stats: *mut offload_stash_stats_t,
    ) -> i32;
    pub fn offload_exchange_plan(
        context: offload_context_t,
        options: *const offload_exchange_options_t,
        plan: *mut offload_exchange_plan_t,
    ) -> i32;
    pub fn offload_exchange_create(
        context: offload_context_t,
        options: *const offload_exchange_options_t,
        exchange: *mut offload_exchange_t,
    ) -> i32;
    pub fn offload_exchange_destroy(exchange: offload_exchange_t) -> i32;
    pub fn offload_exchange_home(exchange: offload_exchange_t, matrix: u32, rank: *mut i32) -> i32;
    pub fn offload_exchange_gather(
        exchange: offload_exchange_t,
        matrix: u32,
        dtype: i32,
        part: *const c_void,
        whole: *mut c_void,
        stream: offload_stream_t,
    ) -> i32;
    pub fn offload_exchange_scatter(
        exchange: offload_exchange_t,
        matrix: u32,
        dtype: i32,
        whole: *const c_void,
        part: *mut c_void,
        stream: offload_stream_t,
    ) -> i32;
    pub fn offload_device_alloc(
        context: offload_context_t,
        bytes: u64,
        data: *mut *mut c_void,
    ) -> i32;
    pub fn offload_device_free(context: offload_context_t, data: *mut c_void) -> i32;
    pub fn offload_device_upload(
        context: offload_context_t,
        device_data: *mut c_void,
        host_data: *const c_void,
        bytes: u64,
        stream: offload_stream_t,
    ) -> i32;
    pub fn offload_device_download(
        context: offload_context_t,
        host_data: *mut c_void,
        device_data: *const c_void,
        bytes: u64,
        stream: offload_stream_t,
    ) -> i32;
    pub fn offload_device_map(
        context: offload_context_t,
        device_data: *mut c_void,
        bytes: u64,
        mapped: *mut *mut c_void,
    ) -> i32;
    pub fn offload_stream_create(context: offload_context_t, stream: *mut offload_stream_t) -> i32;
    pub fn offload_stream_destroy(context: offload_context_t, stream: offload_stream_t) -> i32;
    pub fn offload_stream_synchronize(
        context: offload_context_t,
        stream: offload_stream_t,
        timeout_ns: i64,
    ) -> i32;
    pub fn offload_stream_run(
        context: offload_context_t,
        stream: offload_stream_t,
        function: offload_stream_function_t,
        user: *mut c_void,
    ) -> i32;
    pub fn offload_pool_create(context: offload_context_t, pool: *mut offload_pool_t) -> i32;
    pub fn offload_pool_destroy(pool: offload_pool_t) -> i32;
    pub fn offload_pool_alloc(pool: offload_pool_t, bytes: u64, data: *mut *mut c_void) -> i32;
    pub fn offload_pool_free(data: *mut c_void) -> i32;
    pub fn offload_pool_release_memory(pool: offload_pool_t) -> i32;
    pub fn offload_pool_take_memory(pool: offload_pool_t) -> i32;
    pub fn offload_pool_enter(pool: offload_pool_t) -> i32;
    pub fn offload_pool_torch_alloc(
        bytes: i64,
        device: i32,
        stream: offload_stream_t,
    ) -> *mut c_void;
    pub fn offload_pool_torch_free(
        data: *mut c_void,
        bytes: i64,
        device: i32,
        stream: offload_stream_t,
    );
}
