//! Structs, handles and pointers to functions.

use std::os::raw::{c_char, c_void};

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

pub type offload_ticket_t = u64;

pub type offload_stream_t = *mut c_void;

pub type offload_log_function_t =
    Option<unsafe extern "C" fn(user: *mut c_void, level: i32, text: *const c_char)>;

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
    pub reserved: u32,
}

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
    pub device_name: [c_char; 64],
    pub local_rank: u32,
    pub local_world: u32,
    pub cpus: u32,
    pub numa_rung: i32,
    pub numa_nodes: u64,
    pub notes: [c_char; 256],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_comm_t {
    pub struct_size: u32,
    pub rank: i32,
    pub world: i32,
    pub reserved: u32,
    pub user: *mut c_void,
    pub sum: Option<
        unsafe extern "C" fn(
            user: *mut c_void,
            values: *mut f64,
            count: u32,
            timeout_ns: i64,
        ) -> i32,
    >,
    pub max: Option<
        unsafe extern "C" fn(
            user: *mut c_void,
            values: *mut i32,
            count: u32,
            timeout_ns: i64,
        ) -> i32,
    >,
    pub barrier: Option<unsafe extern "C" fn(user: *mut c_void, timeout_ns: i64) -> i32>,
}

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
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_group_t {
    pub struct_size: u32,
    pub nesterov: i32,
    pub maximize: i32,
    pub reserved: u32,
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub momentum: f64,
    pub dampening: f64,
    pub lr_decay: f64,
    pub initial_accumulator_value: f64,
}

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
    pub reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_binding_t {
    pub struct_size: u32,
    pub param: u32,
    pub data: *mut c_void,
    pub grad: *const c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_plan_t {
    pub struct_size: u32,
    pub param_count: u32,
    pub element_count: u64,
    pub host_elements: u64,
    pub device_elements: u64,
    pub host_state_bytes: [u64; 8],
    pub device_state_bytes: [u64; 8],
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
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_step_options_t {
    pub struct_size: u32,
    pub flags: u32,
    pub grad_scale: f64,
    pub grad_norm_max: f64,
    pub stream: offload_stream_t,
}

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
}

//
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
}

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
    pub params_on_device_bytes: u64,
    pub params_on_host_bytes: u64,
    pub grads_on_device_bytes: u64,
    pub grads_on_host_bytes: u64,
    pub states_on_device_bytes: u64,
    pub states_on_host_bytes: u64,
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
}

pub type offload_progress_function_t =
    Option<unsafe extern "C" fn(user: *mut c_void, bytes_done: u64, bytes_total: u64)>;

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

pub type offload_tensor_function_t =
    Option<unsafe extern "C" fn(user: *mut c_void, tensor: *const offload_checkpoint_tensor_t)>;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct offload_verify_options_t {
    pub struct_size: u32,
    pub io_depth: u32,
    pub progress: offload_progress_function_t,
    pub progress_user: *mut c_void,
}

pub type offload_stream_function_t = Option<unsafe extern "C" fn(user: *mut c_void)>;

/// All zero, which stands for the documented defaults, and `struct_size` set.
macro_rules! default_is_zero {
    ($($name:ident),* $(,)?) => {$(
        impl Default for $name {
            fn default() -> Self {
                // SAFETY: numbers, null pointers and `None` functions are valid when all zero.
                let mut zero: Self = unsafe { std::mem::zeroed() };
                zero.struct_size = std::mem::size_of::<Self>() as u32;
                zero
            }
        }
    )*};
}

default_is_zero!(
    offload_context_options_t,
    offload_context_info_t,
    offload_comm_t,
    offload_optimizer_options_t,
    offload_group_t,
    offload_shard_t,
    offload_param_t,
    offload_binding_t,
    offload_plan_t,
    offload_step_options_t,
    offload_step_result_t,
    offload_move_options_t,
    offload_state_view_t,
    offload_stats_t,
    offload_save_options_t,
    offload_load_options_t,
    offload_checkpoint_info_t,
    offload_checkpoint_tensor_t,
    offload_verify_options_t,
);
