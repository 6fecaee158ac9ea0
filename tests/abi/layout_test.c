/*
 * Pins the layout of every struct and the value of every constant of offload.h, as they are on
 * LP64 (x86-64 and aarch64 Linux). Lines are only ever added: a changed one breaks every caller
 * that is already compiled. header_test.sh checks that nothing is missing here.
 *
 * With --list it prints what it pins, with --table also offsets or values, and sizes: bindings
 * compare their own with them.
 */
#include <stdio.h>
#include <string.h>

#include "offload.h"

typedef struct pin {
  const char* name;
  long actual_offset;
  long actual_size;
  long expected_offset;
  long expected_size;
} pin_t;

/* STRUCT(type, size), FIELD(type, field, offset, size), VALUE(constant, value) */
#define STRUCT(type, size) \
  { #type, 0, (long)sizeof(type), 0, size }
#define FIELD(type, field, offset, size) \
  { #type "." #field, (long)offsetof(type, field), (long)sizeof(((type*)0)->field), offset, size }
#define VALUE(constant, value) \
  { #constant, constant, 0, value, 0 }

static const pin_t pins[] = {
    /* clang-format off */
    STRUCT(offload_context_options_t, 104),
    FIELD(offload_context_options_t, struct_size, 0, 4),
    FIELD(offload_context_options_t, device_kind, 4, 4),
    FIELD(offload_context_options_t, device_index, 8, 4),
    FIELD(offload_context_options_t, threads, 12, 4),
    FIELD(offload_context_options_t, pinned_bytes_max, 16, 8),
    FIELD(offload_context_options_t, device_timeout_ns, 24, 8),
    FIELD(offload_context_options_t, log, 32, 8),
    FIELD(offload_context_options_t, log_user, 40, 8),
    FIELD(offload_context_options_t, sim_memory_bytes, 48, 8),
    FIELD(offload_context_options_t, sim_seed, 56, 8),
    FIELD(offload_context_options_t, sim_delay_ns_max, 64, 8),
    FIELD(offload_context_options_t, numa_nodes, 72, 8),
    FIELD(offload_context_options_t, local_rank, 80, 4),
    FIELD(offload_context_options_t, local_world, 84, 4),
    FIELD(offload_context_options_t, sim_pinned_bytes_max, 88, 8),
    FIELD(offload_context_options_t, allow_pageable, 96, 4),
    FIELD(offload_context_options_t, numa_policy, 100, 4),

    STRUCT(offload_context_info_t, 1408),
    FIELD(offload_context_info_t, struct_size, 0, 4),
    FIELD(offload_context_info_t, device_kind, 4, 4),
    FIELD(offload_context_info_t, threads, 8, 4),
    FIELD(offload_context_info_t, cpus_allowed, 12, 4),
    FIELD(offload_context_info_t, nodes, 16, 4),
    FIELD(offload_context_info_t, threads_seated, 20, 4),
    FIELD(offload_context_info_t, huge_pages, 24, 4),
    FIELD(offload_context_info_t, optimizers, 28, 4),
    FIELD(offload_context_info_t, device_memory_bytes, 32, 8),
    FIELD(offload_context_info_t, device_memory_free_bytes, 40, 8),
    FIELD(offload_context_info_t, pinned_bytes, 48, 8),
    FIELD(offload_context_info_t, isa, 56, 32),
    FIELD(offload_context_info_t, device_name, 88, 256),
    FIELD(offload_context_info_t, local_rank, 344, 4),
    FIELD(offload_context_info_t, local_world, 348, 4),
    FIELD(offload_context_info_t, cpus, 352, 4),
    FIELD(offload_context_info_t, numa_rung, 356, 4),
    FIELD(offload_context_info_t, numa_nodes, 360, 8),
    FIELD(offload_context_info_t, notes, 368, 1024),
    FIELD(offload_context_info_t, numa_memory_nodes, 1392, 8),
    FIELD(offload_context_info_t, numa_policy, 1400, 4),
    FIELD(offload_context_info_t, reserved, 1404, 4),

    STRUCT(offload_comm_t, 48),
    FIELD(offload_comm_t, struct_size, 0, 4),
    FIELD(offload_comm_t, rank, 4, 4),
    FIELD(offload_comm_t, world, 8, 4),
    FIELD(offload_comm_t, reserved, 12, 4),
    FIELD(offload_comm_t, user, 16, 8),
    FIELD(offload_comm_t, sum, 24, 8),
    FIELD(offload_comm_t, max, 32, 8),
    FIELD(offload_comm_t, barrier, 40, 8),

    STRUCT(offload_optimizer_options_t, 88),
    FIELD(offload_optimizer_options_t, struct_size, 0, 4),
    FIELD(offload_optimizer_options_t, algorithm, 4, 4),
    FIELD(offload_optimizer_options_t, device_fraction, 8, 8),
    FIELD(offload_optimizer_options_t, chunk_elements, 16, 8),
    FIELD(offload_optimizer_options_t, staging_slots, 24, 4),
    FIELD(offload_optimizer_options_t, movable, 28, 4),
    FIELD(offload_optimizer_options_t, comm, 32, 8),
    FIELD(offload_optimizer_options_t, comm_timeout_ns, 40, 8),
    FIELD(offload_optimizer_options_t, master_layout, 48, 4),
    FIELD(offload_optimizer_options_t, moment_dtype, 52, 4),
    FIELD(offload_optimizer_options_t, moment_rounding, 56, 4),
    FIELD(offload_optimizer_options_t, reserved, 60, 4),
    FIELD(offload_optimizer_options_t, rounding_seed, 64, 8),
    FIELD(offload_optimizer_options_t, stream_ring_bytes, 72, 8),
    FIELD(offload_optimizer_options_t, host_executors, 80, 4),
    FIELD(offload_optimizer_options_t, reserved1, 84, 4),

    STRUCT(offload_group_t, 88),
    FIELD(offload_group_t, struct_size, 0, 4),
    FIELD(offload_group_t, nesterov, 4, 4),
    FIELD(offload_group_t, maximize, 8, 4),
    FIELD(offload_group_t, reserved, 12, 4),
    FIELD(offload_group_t, lr, 16, 8),
    FIELD(offload_group_t, beta1, 24, 8),
    FIELD(offload_group_t, beta2, 32, 8),
    FIELD(offload_group_t, eps, 40, 8),
    FIELD(offload_group_t, weight_decay, 48, 8),
    FIELD(offload_group_t, momentum, 56, 8),
    FIELD(offload_group_t, dampening, 64, 8),
    FIELD(offload_group_t, lr_decay, 72, 8),
    FIELD(offload_group_t, initial_accumulator_value, 80, 8),

    STRUCT(offload_shard_t, 56),
    FIELD(offload_shard_t, struct_size, 0, 4),
    FIELD(offload_shard_t, dimensions, 4, 4),
    FIELD(offload_shard_t, box_count, 8, 4),
    FIELD(offload_shard_t, flags, 12, 4),
    FIELD(offload_shard_t, global_shape, 16, 8),
    FIELD(offload_shard_t, box_offsets, 24, 8),
    FIELD(offload_shard_t, box_extents, 32, 8),
    FIELD(offload_shard_t, range_begin, 40, 8),
    FIELD(offload_shard_t, range_count, 48, 8),

    STRUCT(offload_param_t, 72),
    FIELD(offload_param_t, struct_size, 0, 4),
    FIELD(offload_param_t, group, 4, 4),
    FIELD(offload_param_t, dtype, 8, 4),
    FIELD(offload_param_t, grad_dtype, 12, 4),
    FIELD(offload_param_t, placement, 16, 4),
    FIELD(offload_param_t, flags, 20, 4),
    FIELD(offload_param_t, name, 24, 8),
    FIELD(offload_param_t, data, 32, 8),
    FIELD(offload_param_t, grad, 40, 8),
    FIELD(offload_param_t, count, 48, 8),
    FIELD(offload_param_t, shard, 56, 8),
    FIELD(offload_param_t, chunk_order, 64, 4),
    FIELD(offload_param_t, reserved, 68, 4),

    STRUCT(offload_binding_t, 24),
    FIELD(offload_binding_t, struct_size, 0, 4),
    FIELD(offload_binding_t, param, 4, 4),
    FIELD(offload_binding_t, data, 8, 8),
    FIELD(offload_binding_t, grad, 16, 8),

    STRUCT(offload_plan_t, 1200),
    FIELD(offload_plan_t, struct_size, 0, 4),
    FIELD(offload_plan_t, param_count, 4, 4),
    FIELD(offload_plan_t, element_count, 8, 8),
    FIELD(offload_plan_t, host_elements, 16, 8),
    FIELD(offload_plan_t, device_elements, 24, 8),
    FIELD(offload_plan_t, host_state_bytes, 32, 256),
    FIELD(offload_plan_t, device_state_bytes, 288, 256),
    FIELD(offload_plan_t, staging_bytes, 544, 8),
    FIELD(offload_plan_t, host_params_bytes, 552, 8),
    FIELD(offload_plan_t, host_grads_bytes, 560, 8),
    FIELD(offload_plan_t, host_swap_bytes, 568, 8),
    FIELD(offload_plan_t, host_scratch_bytes, 576, 8),
    FIELD(offload_plan_t, device_scratch_bytes, 584, 8),
    FIELD(offload_plan_t, host_bytes, 592, 8),
    FIELD(offload_plan_t, device_bytes, 600, 8),
    FIELD(offload_plan_t, device_free_bytes, 608, 8),
    FIELD(offload_plan_t, host_available_bytes, 616, 8),
    FIELD(offload_plan_t, pinned_bytes_left, 624, 8),
    FIELD(offload_plan_t, chunk_count, 632, 8),
    FIELD(offload_plan_t, grads_down_bytes, 640, 8),
    FIELD(offload_plan_t, params_up_bytes, 648, 8),
    FIELD(offload_plan_t, fits, 656, 4),
    FIELD(offload_plan_t, reserved, 660, 4),
    FIELD(offload_plan_t, numa_bytes, 664, 512),
    FIELD(offload_plan_t, numa_unknown_bytes, 1176, 8),
    FIELD(offload_plan_t, device_ring_bytes, 1184, 8),
    FIELD(offload_plan_t, pinned_state_bytes, 1192, 8),

    STRUCT(offload_step_options_t, 32),
    FIELD(offload_step_options_t, struct_size, 0, 4),
    FIELD(offload_step_options_t, flags, 4, 4),
    FIELD(offload_step_options_t, grad_scale, 8, 8),
    FIELD(offload_step_options_t, grad_norm_max, 16, 8),
    FIELD(offload_step_options_t, stream, 24, 8),

    STRUCT(offload_step_result_t, 176),
    FIELD(offload_step_result_t, struct_size, 0, 4),
    FIELD(offload_step_result_t, skipped, 4, 4),
    FIELD(offload_step_result_t, step, 8, 8),
    FIELD(offload_step_result_t, grad_norm, 16, 8),
    FIELD(offload_step_result_t, grad_clip, 24, 8),
    FIELD(offload_step_result_t, total_seconds, 32, 8),
    FIELD(offload_step_result_t, norm_seconds, 40, 8),
    FIELD(offload_step_result_t, grads_down_seconds, 48, 8),
    FIELD(offload_step_result_t, update_seconds, 56, 8),
    FIELD(offload_step_result_t, params_up_seconds, 64, 8),
    FIELD(offload_step_result_t, device_update_seconds, 72, 8),
    FIELD(offload_step_result_t, stall_seconds, 80, 8),
    FIELD(offload_step_result_t, grads_down_bytes, 88, 8),
    FIELD(offload_step_result_t, params_up_bytes, 96, 8),
    FIELD(offload_step_result_t, cpu_elements, 104, 8),
    FIELD(offload_step_result_t, streamed_elements, 112, 8),
    FIELD(offload_step_result_t, state_up_bytes, 120, 8),
    FIELD(offload_step_result_t, state_down_bytes, 128, 8),
    FIELD(offload_step_result_t, state_up_seconds, 136, 8),
    FIELD(offload_step_result_t, streamed_update_seconds, 144, 8),
    FIELD(offload_step_result_t, state_down_seconds, 152, 8),
    FIELD(offload_step_result_t, cpu_idle_seconds, 160, 8),
    FIELD(offload_step_result_t, streamed_idle_seconds, 168, 8),

    STRUCT(offload_move_options_t, 32),
    FIELD(offload_move_options_t, struct_size, 0, 4),
    FIELD(offload_move_options_t, flags, 4, 4),
    FIELD(offload_move_options_t, params, 8, 8),
    FIELD(offload_move_options_t, param_count, 16, 4),
    FIELD(offload_move_options_t, stream_count, 20, 4),
    FIELD(offload_move_options_t, streams, 24, 8),

    STRUCT(offload_state_view_t, 48),
    FIELD(offload_state_view_t, struct_size, 0, 4),
    FIELD(offload_state_view_t, dtype, 4, 4),
    FIELD(offload_state_view_t, device_data, 8, 8),
    FIELD(offload_state_view_t, device_count, 16, 8),
    FIELD(offload_state_view_t, host_data, 24, 8),
    FIELD(offload_state_view_t, host_count, 32, 8),
    FIELD(offload_state_view_t, step_count, 40, 8),

    STRUCT(offload_stats_t, 256),
    FIELD(offload_stats_t, struct_size, 0, 4),
    FIELD(offload_stats_t, queued, 4, 4),
    FIELD(offload_stats_t, steps_applied, 8, 8),
    FIELD(offload_stats_t, steps_skipped, 16, 8),
    FIELD(offload_stats_t, host_bytes, 24, 8),
    FIELD(offload_stats_t, device_bytes, 32, 8),
    FIELD(offload_stats_t, staging_bytes, 40, 8),
    FIELD(offload_stats_t, params_on_device_bytes, 48, 8),
    FIELD(offload_stats_t, params_on_host_bytes, 56, 8),
    FIELD(offload_stats_t, grads_on_device_bytes, 64, 8),
    FIELD(offload_stats_t, grads_on_host_bytes, 72, 8),
    FIELD(offload_stats_t, states_on_device_bytes, 80, 8),
    FIELD(offload_stats_t, states_on_host_bytes, 88, 8),
    FIELD(offload_stats_t, grads_down_bytes, 96, 8),
    FIELD(offload_stats_t, params_up_bytes, 104, 8),
    FIELD(offload_stats_t, offloaded_bytes, 112, 8),
    FIELD(offload_stats_t, reloaded_bytes, 120, 8),
    FIELD(offload_stats_t, total_seconds, 128, 8),
    FIELD(offload_stats_t, norm_seconds, 136, 8),
    FIELD(offload_stats_t, grads_down_seconds, 144, 8),
    FIELD(offload_stats_t, update_seconds, 152, 8),
    FIELD(offload_stats_t, params_up_seconds, 160, 8),
    FIELD(offload_stats_t, device_update_seconds, 168, 8),
    FIELD(offload_stats_t, stall_seconds, 176, 8),
    FIELD(offload_stats_t, cpu_elements, 184, 8),
    FIELD(offload_stats_t, streamed_elements, 192, 8),
    FIELD(offload_stats_t, state_up_bytes, 200, 8),
    FIELD(offload_stats_t, state_down_bytes, 208, 8),
    FIELD(offload_stats_t, state_up_seconds, 216, 8),
    FIELD(offload_stats_t, streamed_update_seconds, 224, 8),
    FIELD(offload_stats_t, state_down_seconds, 232, 8),
    FIELD(offload_stats_t, cpu_idle_seconds, 240, 8),
    FIELD(offload_stats_t, streamed_idle_seconds, 248, 8),

    STRUCT(offload_save_options_t, 48),
    FIELD(offload_save_options_t, struct_size, 0, 4),
    FIELD(offload_save_options_t, flags, 4, 4),
    FIELD(offload_save_options_t, path, 8, 8),
    FIELD(offload_save_options_t, stream, 16, 8),
    FIELD(offload_save_options_t, progress, 24, 8),
    FIELD(offload_save_options_t, progress_user, 32, 8),
    FIELD(offload_save_options_t, io_depth, 40, 4),
    FIELD(offload_save_options_t, reserved, 44, 4),

    STRUCT(offload_load_options_t, 48),
    FIELD(offload_load_options_t, struct_size, 0, 4),
    FIELD(offload_load_options_t, flags, 4, 4),
    FIELD(offload_load_options_t, path, 8, 8),
    FIELD(offload_load_options_t, stream, 16, 8),
    FIELD(offload_load_options_t, progress, 24, 8),
    FIELD(offload_load_options_t, progress_user, 32, 8),
    FIELD(offload_load_options_t, io_depth, 40, 4),
    FIELD(offload_load_options_t, reserved, 44, 4),

    STRUCT(offload_checkpoint_info_t, 64),
    FIELD(offload_checkpoint_info_t, struct_size, 0, 4),
    FIELD(offload_checkpoint_info_t, format_version, 4, 4),
    FIELD(offload_checkpoint_info_t, algorithm, 8, 4),
    FIELD(offload_checkpoint_info_t, save_flags, 12, 4),
    FIELD(offload_checkpoint_info_t, world, 16, 4),
    FIELD(offload_checkpoint_info_t, group_count, 20, 4),
    FIELD(offload_checkpoint_info_t, step, 24, 8),
    FIELD(offload_checkpoint_info_t, param_count, 32, 8),
    FIELD(offload_checkpoint_info_t, tensor_count, 40, 8),
    FIELD(offload_checkpoint_info_t, file_count, 48, 8),
    FIELD(offload_checkpoint_info_t, bytes, 56, 8),

    STRUCT(offload_checkpoint_tensor_t, 104),
    FIELD(offload_checkpoint_tensor_t, struct_size, 0, 4),
    FIELD(offload_checkpoint_tensor_t, kind, 4, 4),
    FIELD(offload_checkpoint_tensor_t, dtype, 8, 4),
    FIELD(offload_checkpoint_tensor_t, rank, 12, 4),
    FIELD(offload_checkpoint_tensor_t, dimensions, 16, 4),
    FIELD(offload_checkpoint_tensor_t, box_count, 20, 4),
    FIELD(offload_checkpoint_tensor_t, global_shape, 24, 8),
    FIELD(offload_checkpoint_tensor_t, box_offsets, 32, 8),
    FIELD(offload_checkpoint_tensor_t, box_extents, 40, 8),
    FIELD(offload_checkpoint_tensor_t, range_begin, 48, 8),
    FIELD(offload_checkpoint_tensor_t, range_count, 56, 8),
    FIELD(offload_checkpoint_tensor_t, name, 64, 8),
    FIELD(offload_checkpoint_tensor_t, file, 72, 8),
    FIELD(offload_checkpoint_tensor_t, file_offset, 80, 8),
    FIELD(offload_checkpoint_tensor_t, bytes, 88, 8),
    FIELD(offload_checkpoint_tensor_t, step_count, 96, 8),

    STRUCT(offload_verify_options_t, 24),
    FIELD(offload_verify_options_t, struct_size, 0, 4),
    FIELD(offload_verify_options_t, io_depth, 4, 4),
    FIELD(offload_verify_options_t, progress, 8, 8),
    FIELD(offload_verify_options_t, progress_user, 16, 8),

    VALUE(OFFLOAD_OK, 0),
    VALUE(OFFLOAD_INVALID_ARGUMENT, 10),
    VALUE(OFFLOAD_INVALID_STATE, 11),
    VALUE(OFFLOAD_UNSUPPORTED, 12),
    VALUE(OFFLOAD_OUT_OF_HOST_MEMORY, 20),
    VALUE(OFFLOAD_OUT_OF_DEVICE_MEMORY, 21),
    VALUE(OFFLOAD_DEVICE_FAILED, 30),
    VALUE(OFFLOAD_COMM_FAILED, 31),
    VALUE(OFFLOAD_IO_FAILED, 40),
    VALUE(OFFLOAD_CHECKPOINT_CORRUPT, 41),
    VALUE(OFFLOAD_CHECKPOINT_MISMATCH, 42),
    VALUE(OFFLOAD_TIMED_OUT, 50),
    VALUE(OFFLOAD_POISONED, 60),
    VALUE(OFFLOAD_INTERNAL, 70),

    VALUE(OFFLOAD_DEVICE_HOST, 0),
    VALUE(OFFLOAD_DEVICE_SIM, 1),
    VALUE(OFFLOAD_DEVICE_CUDA, 2),

    VALUE(OFFLOAD_ADAMW, 1),
    VALUE(OFFLOAD_ADAM, 2),
    VALUE(OFFLOAD_SGD, 3),
    VALUE(OFFLOAD_LION, 4),
    VALUE(OFFLOAD_ADAGRAD, 5),
    VALUE(OFFLOAD_SIGNUM, 6),

    VALUE(OFFLOAD_FP32, 1),
    VALUE(OFFLOAD_BF16, 2),
    VALUE(OFFLOAD_FP16, 3),
    VALUE(OFFLOAD_U16, 4),
    VALUE(OFFLOAD_MASTER_FP32, 0),
    VALUE(OFFLOAD_MASTER_SPLIT, 1),
    VALUE(OFFLOAD_EXECUTORS_AUTO, 0),
    VALUE(OFFLOAD_EXECUTORS_CPU, 1),
    VALUE(OFFLOAD_EXECUTORS_STREAMED, 2),
    VALUE(OFFLOAD_ROUND_STOCHASTIC, 0),
    VALUE(OFFLOAD_ROUND_NEAREST, 1),

    VALUE(OFFLOAD_PLACE_AUTO, 0),
    VALUE(OFFLOAD_PLACE_HOST, 1),
    VALUE(OFFLOAD_PLACE_DEVICE, 2),

    VALUE(OFFLOAD_STATE_MASTER, 0),
    VALUE(OFFLOAD_STATE_EXP_AVG, 1),
    VALUE(OFFLOAD_STATE_EXP_AVG_SQ, 2),
    VALUE(OFFLOAD_STATE_MOMENTUM_BUFFER, 3),
    VALUE(OFFLOAD_STATE_SUM, 4),
    VALUE(OFFLOAD_STATE_MASTER_LOW, 5),

    VALUE(OFFLOAD_MOVABLE_PARAMS, 1),
    VALUE(OFFLOAD_MOVABLE_GRADS, 2),
    VALUE(OFFLOAD_MOVABLE_STATES, 4),
    VALUE(OFFLOAD_MOVABLE_ACCUMULATE, 8),

    VALUE(OFFLOAD_NUMA_NEAR, 0),
    VALUE(OFFLOAD_NUMA_INTERLEAVED, 1),
    VALUE(OFFLOAD_NUMA_NONE, 0),
    VALUE(OFFLOAD_NUMA_FIRST_TOUCH, 1),
    VALUE(OFFLOAD_NUMA_PLACED, 2),
    VALUE(OFFLOAD_LOG_INFO, 1),
    VALUE(OFFLOAD_LOG_WARNING, 2),
    VALUE(OFFLOAD_LOG_ERROR, 3),

    VALUE(OFFLOAD_PARAM_REPLICA, 1),

    VALUE(OFFLOAD_SHARD_RANGE, 1),

    VALUE(OFFLOAD_STEP_ASSUME_FINITE, 1),

    VALUE(OFFLOAD_MOVE_ACCUMULATE, 1),
    VALUE(OFFLOAD_MOVE_DROP, 2),

    VALUE(OFFLOAD_SAVE_MASTERS_ONLY, 1),
    VALUE(OFFLOAD_LOAD_FRESH_MOMENTS, 1),
    VALUE(OFFLOAD_LOAD_KEEP_STEPS, 2),
    VALUE(OFFLOAD_LOAD_NO_VERIFY, 4),
    /* clang-format on */
};

int main(int argc, char** argv) {
  const size_t count = sizeof(pins) / sizeof(pins[0]);
  int failures = 0;
  size_t i;
  if (argc == 2 && strcmp(argv[1], "--list") == 0) {
    for (i = 0; i < count; i++) puts(pins[i].name);
    return 0;
  }
  if (argc == 2 && strcmp(argv[1], "--table") == 0) {
    for (i = 0; i < count; i++)
      printf("%s %ld %ld\n", pins[i].name, pins[i].actual_offset, pins[i].actual_size);
    return 0;
  }
  for (i = 0; i < count; i++) {
    const pin_t* pin = &pins[i];
    if (pin->actual_offset != pin->expected_offset || pin->actual_size != pin->expected_size) {
      printf("%s: got value or offset %ld, size %ld; pinned %ld, %ld\n", pin->name,
             pin->actual_offset, pin->actual_size, pin->expected_offset, pin->expected_size);
      failures++;
    }
  }
  printf("%lu of %lu pins hold\n", (unsigned long)(count - (size_t)failures), (unsigned long)count);
  return failures != 0;
}
