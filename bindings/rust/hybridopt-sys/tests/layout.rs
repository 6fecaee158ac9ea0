//! Compares sizes, offsets and values with the table that a C compiler makes of offload.h, in both
//! directions: tests/abi/layout_test.c prints it, and header_test.sh holds that nothing is missing
//! there.

use std::collections::BTreeMap;
use std::mem::{size_of, MaybeUninit};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::addr_of;

use hybridopt_sys::*;

/// Name to offset or value, and size.
type Table = BTreeMap<String, (i64, usize)>;

fn size_behind<T>(_: *const T) -> usize {
    size_of::<T>()
}

/// A field that is not named here does not compile: the pattern has no `..`.
macro_rules! structs {
    ($table:ident, $($name:ident { $($field:ident),* $(,)? })*) => {$({
        $table.insert(stringify!($name).to_string(), (0, size_of::<$name>()));
        let $name { $($field: _),* } = $name::default();
        let uninit = MaybeUninit::<$name>::uninit();
        let base = uninit.as_ptr();
        $(
            // SAFETY: only the address is taken.
            let field = unsafe { addr_of!((*base).$field) };
            let offset = field as i64 - base as i64;
            let name = concat!(stringify!($name), ".", stringify!($field)).to_string();
            $table.insert(name, (offset, size_behind(field)));
        )*
    })*};
}

macro_rules! values {
    ($table:ident, $($name:ident),* $(,)?) => {
        $($table.insert(stringify!($name).to_string(), (i64::from($name), 0));)*
    };
}

fn ours() -> Table {
    let mut table = Table::new();
    structs!(table,
        offload_context_options_t {
            struct_size, device_kind, device_index, threads, pinned_bytes_max, device_timeout_ns,
            log, log_user, sim_memory_bytes, sim_seed, sim_delay_ns_max, numa_nodes, local_rank,
            local_world, sim_pinned_bytes_max, allow_pageable, reserved,
        }
        offload_context_info_t {
            struct_size, device_kind, threads, cpus_allowed, nodes, threads_seated, huge_pages,
            optimizers, device_memory_bytes, device_memory_free_bytes, pinned_bytes, isa,
            device_name, local_rank, local_world, cpus, numa_rung, numa_nodes, notes,
        }
        offload_comm_t {
            struct_size, rank, world, reserved, user, sum, max, barrier,
        }
        offload_optimizer_options_t {
            struct_size, algorithm, device_fraction, chunk_elements, staging_slots, movable, comm,
            comm_timeout_ns, master_layout, moment_dtype, moment_rounding, reserved,
            rounding_seed,
        }
        offload_group_t {
            struct_size, nesterov, maximize, reserved, lr, beta1, beta2, eps, weight_decay,
            momentum, dampening, lr_decay, initial_accumulator_value,
        }
        offload_shard_t {
            struct_size, dimensions, box_count, flags, global_shape, box_offsets, box_extents,
            range_begin, range_count,
        }
        offload_param_t {
            struct_size, group, dtype, grad_dtype, placement, flags, name, data, grad, count,
            shard, chunk_order, reserved,
        }
        offload_binding_t {
            struct_size, param, data, grad,
        }
        offload_plan_t {
            struct_size, param_count, element_count, host_elements, device_elements,
            host_state_bytes, device_state_bytes, staging_bytes, host_params_bytes,
            host_grads_bytes, host_swap_bytes, host_scratch_bytes, device_scratch_bytes,
            host_bytes, device_bytes, device_free_bytes, host_available_bytes, pinned_bytes_left,
            chunk_count, grads_down_bytes, params_up_bytes, fits, reserved,
        }
        offload_step_options_t {
            struct_size, flags, grad_scale, grad_norm_max, stream,
        }
        offload_step_result_t {
            struct_size, skipped, step, grad_norm, grad_clip, total_seconds, norm_seconds,
            grads_down_seconds, update_seconds, params_up_seconds, device_update_seconds,
            stall_seconds, grads_down_bytes, params_up_bytes,
        }
        offload_move_options_t {
            struct_size, flags, params, param_count, stream_count, streams,
        }
        offload_state_view_t {
            struct_size, dtype, device_data, device_count, host_data, host_count, step_count,
        }
        offload_stats_t {
            struct_size, queued, steps_applied, steps_skipped, host_bytes, device_bytes,
            staging_bytes, params_on_device_bytes, params_on_host_bytes, grads_on_device_bytes,
            grads_on_host_bytes, states_on_device_bytes, states_on_host_bytes, grads_down_bytes,
            params_up_bytes, offloaded_bytes, reloaded_bytes, total_seconds, norm_seconds,
            grads_down_seconds, update_seconds, params_up_seconds, device_update_seconds,
            stall_seconds,
        }
        offload_save_options_t {
            struct_size, flags, path, stream, progress, progress_user, io_depth, reserved,
        }
        offload_load_options_t {
            struct_size, flags, path, stream, progress, progress_user, io_depth, reserved,
        }
        offload_checkpoint_info_t {
            struct_size, format_version, algorithm, save_flags, world, group_count, step,
            param_count, tensor_count, file_count, bytes,
        }
        offload_checkpoint_tensor_t {
            struct_size, kind, dtype, rank, dimensions, box_count, global_shape, box_offsets,
            box_extents, range_begin, range_count, name, file, file_offset, bytes, step_count,
        }
        offload_verify_options_t {
            struct_size, io_depth, progress, progress_user,
        }
    );
    values!(
        table,
        OFFLOAD_OK,
        OFFLOAD_INVALID_ARGUMENT,
        OFFLOAD_INVALID_STATE,
        OFFLOAD_UNSUPPORTED,
        OFFLOAD_OUT_OF_HOST_MEMORY,
        OFFLOAD_OUT_OF_DEVICE_MEMORY,
        OFFLOAD_DEVICE_FAILED,
        OFFLOAD_COMM_FAILED,
        OFFLOAD_IO_FAILED,
        OFFLOAD_CHECKPOINT_CORRUPT,
        OFFLOAD_CHECKPOINT_MISMATCH,
        OFFLOAD_TIMED_OUT,
        OFFLOAD_POISONED,
        OFFLOAD_INTERNAL,
        OFFLOAD_DEVICE_HOST,
        OFFLOAD_DEVICE_SIM,
        OFFLOAD_DEVICE_CUDA,
        OFFLOAD_ADAMW,
        OFFLOAD_ADAM,
        OFFLOAD_SGD,
        OFFLOAD_LION,
        OFFLOAD_ADAGRAD,
        OFFLOAD_FP32,
        OFFLOAD_BF16,
        OFFLOAD_FP16,
        OFFLOAD_U16,
        OFFLOAD_MASTER_FP32,
        OFFLOAD_MASTER_SPLIT,
        OFFLOAD_ROUND_STOCHASTIC,
        OFFLOAD_ROUND_NEAREST,
        OFFLOAD_PLACE_AUTO,
        OFFLOAD_PLACE_HOST,
        OFFLOAD_PLACE_DEVICE,
        OFFLOAD_STATE_MASTER,
        OFFLOAD_STATE_EXP_AVG,
        OFFLOAD_STATE_EXP_AVG_SQ,
        OFFLOAD_STATE_MOMENTUM_BUFFER,
        OFFLOAD_STATE_SUM,
        OFFLOAD_STATE_MASTER_LOW,
        OFFLOAD_MOVABLE_PARAMS,
        OFFLOAD_MOVABLE_GRADS,
        OFFLOAD_MOVABLE_STATES,
        OFFLOAD_MOVABLE_ACCUMULATE,
        OFFLOAD_LOG_INFO,
        OFFLOAD_LOG_WARNING,
        OFFLOAD_LOG_ERROR,
        OFFLOAD_NUMA_NONE,
        OFFLOAD_NUMA_FIRST_TOUCH,
        OFFLOAD_NUMA_PLACED,
        OFFLOAD_PARAM_REPLICA,
        OFFLOAD_SHARD_RANGE,
        OFFLOAD_STEP_ASSUME_FINITE,
        OFFLOAD_MOVE_ACCUMULATE,
        OFFLOAD_MOVE_DROP,
        OFFLOAD_SAVE_MASTERS_ONLY,
        OFFLOAD_LOAD_FRESH_MOMENTS,
        OFFLOAD_LOAD_KEEP_STEPS,
        OFFLOAD_LOAD_NO_VERIFY,
    );
    table
}

/// HYBRIDOPT_LAYOUT_TEST, or where the newest build of the repository has it.
fn layout_test() -> PathBuf {
    if let Some(named) = std::env::var_os("HYBRIDOPT_LAYOUT_TEST") {
        return PathBuf::from(named);
    }
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../build/dev/tests/abi_layout_test")
}

fn c_table() -> Table {
    let program = layout_test();
    let output = Command::new(&program).arg("--table").output().unwrap_or_else(|why| {
        panic!("{}: {why}; build it, or set HYBRIDOPT_LAYOUT_TEST to its path", program.display())
    });
    assert!(output.status.success(), "{}: {}", program.display(), output.status);
    String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| match line.split(' ').collect::<Vec<_>>()[..] {
            [name, offset, size] => {
                (name.to_string(), (offset.parse().unwrap(), size.parse().unwrap()))
            }
            _ => panic!("not name, offset, size: {line}"),
        })
        .collect()
}

#[test]
fn layout_is_what_c_says() {
    let (ours, c) = (ours(), c_table());
    let mut complaints = Vec::new();
    for (name, &(offset, size)) in &c {
        match ours.get(name) {
            None => complaints.push(format!("{name} is not declared")),
            Some(&(got_offset, got_size)) if (got_offset, got_size) != (offset, size) => {
                complaints.push(format!(
                    "{name}: offset or value {got_offset}, size {got_size}; in C {offset}, {size}"
                ));
            }
            Some(_) => {}
        }
    }
    for name in ours.keys().filter(|name| !c.contains_key(*name)) {
        complaints.push(format!("{name} is not in C"));
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    assert!(c.len() > 200, "the table has only {} lines", c.len());
}

/// A constant that the macro above does not list would go unchecked.
#[test]
fn every_constant_is_checked() {
    let ours = ours();
    let source = include_str!("../src/constants.rs");
    for line in source.lines().filter_map(|line| line.strip_prefix("pub const ")) {
        let name = &line[..line.find(':').unwrap()];
        assert!(ours.contains_key(name), "{name} is not in values!");
    }
}

#[test]
fn default_is_zero_but_for_the_size() {
    let plan = offload_plan_t::default();
    assert_eq!(plan.struct_size as usize, size_of::<offload_plan_t>());
    // SAFETY: a struct of numbers without padding.
    let bytes = unsafe {
        std::slice::from_raw_parts(addr_of!(plan).cast::<u8>(), size_of::<offload_plan_t>())
    };
    assert!(bytes[4..].iter().all(|&byte| byte == 0));
}
