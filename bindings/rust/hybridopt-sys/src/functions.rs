//! The functions.

use std::os::raw::{c_char, c_void};

use crate::types::*;

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
    pub fn offload_optimizer_plan(optimizer: offload_optimizer_t, plan: *mut offload_plan_t)
        -> i32;
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
    pub fn offload_optimizer_state(
        optimizer: offload_optimizer_t,
        param: u32,
        kind: i32,
        view: *mut offload_state_view_t,
    ) -> i32;
    pub fn offload_optimizer_set_step_count(
        optimizer: offload_optimizer_t,
        param: u32,
        step_count: u64,
    ) -> i32;
    pub fn offload_optimizer_get_stats(
        optimizer: offload_optimizer_t,
        stats: *mut offload_stats_t,
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
        path: *mut c_char,
        path_bytes: u64,
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
}
