//! Reports of the library. Each has a field for every field of the C struct.

use std::ffi::CStr;
use std::os::raw::c_char;

use hybridopt_sys as sys;

/// Converts a field of a C struct to the field of the report.
trait Convert<To> {
    fn convert(&self) -> To;
}

macro_rules! as_it_is {
    ($($type:ty),*) => {$(
        impl Convert<$type> for $type {
            fn convert(&self) -> $type {
                *self
            }
        }
    )*};
}

as_it_is!(i32, u32, u64, f64, [u64; 32], [u64; 64]);

impl Convert<bool> for i32 {
    fn convert(&self) -> bool {
        *self != 0
    }
}

impl<const N: usize> Convert<String> for [c_char; N] {
    fn convert(&self) -> String {
        assert!(self.contains(&0), "the library ends its texts");
        // SAFETY: there is a NUL in it.
        unsafe { CStr::from_ptr(self.as_ptr()) }.to_string_lossy().into_owned()
    }
}

macro_rules! report {
    (
        $(#[$meta:meta])*
        $name:ident from $raw:ident {
            $($(#[$field_meta:meta])* $field:ident: $type:ty,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq)]
        #[non_exhaustive]
        pub struct $name {
            $($(#[$field_meta])* pub $field: $type,)*
        }

        impl From<&sys::$raw> for $name {
            fn from(raw: &sys::$raw) -> Self {
                $name { $($field: raw.$field.convert(),)* }
            }
        }
    };
}

report! {
    /// The threads, the memory and the device that a context has got.
    ContextInfo from offload_context_info_t {
        /// Update threads that run.
        threads: u32,
        /// CPUs in this process's affinity mask.
        cpus_allowed: u32,
        /// NUMA nodes with CPUs this process may use.
        nodes: u32,
        /// Whether each update thread stays on its NUMA node; false if the system refused that.
        threads_seated: bool,
        /// Whether state memory asks for huge pages and the system allows them.
        huge_pages: bool,
        /// Optimizers in this context.
        optimizers: u32,
        /// Memory of the device; 0 on the host device.
        device_memory_bytes: u64,
        /// Free memory of the device now.
        device_memory_free_bytes: u64,
        /// Host memory that is pinned for this context.
        pinned_bytes: u64,
        /// Instruction set of the host kernels, such as "avx512".
        isa: String,
        /// The device's own name.
        device_name: String,
        /// The number of this rank when the CPUs of this host were divided among its ranks.
        local_rank: u32,
        /// How many ranks the CPUs of this host were divided among.
        local_world: u32,
        /// The number of CPUs of `cpus_allowed` that are this rank's.
        cpus: u32,
        /// 0: the system chooses where pages lie, 1: the thread that touches a page first, 2: the
        /// library. The value is final after the first work has started threads.
        numa_rung: i32,
        /// Bit n: there are update threads on node n.
        numa_nodes: u64,
        /// What is worse than it could be, and why; empty if nothing is.
        notes: String,
        /// Bit n: the kernel has been told to put host memory on node n.
        numa_memory_nodes: u64,
        /// 0: host memory lies near the update threads, 1: it is interleaved.
        numa_policy: i32,
    }
}

report! {
    /// The memory that commit takes, by kind and place. Bytes include padding.
    Plan from offload_plan_t {
        /// How many params are registered.
        param_count: u32,
        /// Elements of all params.
        element_count: u64,
        /// Elements of the host share.
        host_elements: u64,
        /// Elements of the device share.
        device_elements: u64,
        /// State on the host, indexed by [`StateKind`](crate::StateKind).
        host_state_bytes: [u64; 32],
        /// State on the device, indexed by [`StateKind`](crate::StateKind).
        device_state_bytes: [u64; 32],
        /// Pinned host memory for the staging ring and the verdict.
        staging_bytes: u64,
        /// Pinned host memory for params that are offloaded.
        host_params_bytes: u64,
        /// Pinned host memory for gradients that are offloaded.
        host_grads_bytes: u64,
        /// Pinned host memory for the device share's state while it is offloaded.
        host_swap_bytes: u64,
        /// Host memory for tables, norm sums and queued steps.
        host_scratch_bytes: u64,
        /// Device memory for norm sums, the verdict and gradients that a step copies back.
        device_scratch_bytes: u64,
        /// All host memory that commit takes.
        host_bytes: u64,
        /// All device memory that commit takes.
        device_bytes: u64,
        /// Free memory of the device now; 0 on the host device.
        device_free_bytes: u64,
        /// Host memory that the process can allocate now, within the cgroup's limit.
        host_available_bytes: u64,
        /// How much more memory the context's cap allows to pin; `u64::MAX` without a cap.
        pinned_bytes_left: u64,
        /// How many chunks a step of all params has.
        chunk_count: u64,
        /// Bytes of gradients that a step of all params copies to the host.
        grads_down_bytes: u64,
        /// Bytes of params that a step of all params copies to the device.
        params_up_bytes: u64,
        /// Whether commit would find all of this memory now.
        fits: bool,
        /// The bytes of `host_bytes` on each NUMA node: planned before commit, measured after it.
        numa_bytes: [u64; 64],
        /// The bytes of `host_bytes` whose node is not known.
        numa_unknown_bytes: u64,
        /// The part of `device_scratch_bytes` that is the ring through which state on the host
        /// streams; 0 if CPU threads alone update the host share.
        device_ring_bytes: u64,
        /// The part of `host_bytes` that is state which commit pins for that ring.
        pinned_state_bytes: u64,
        /// The part of `host_bytes` that is for early updates.
        host_early_bytes: u64,
    }
}

report! {
    /// The result of a completed step.
    StepResult from offload_step_result_t {
        /// Whether a gradient was Inf or NaN. Then the step has changed nothing.
        skipped: bool,
        /// Steps applied so far, including this one unless it was skipped.
        step: u64,
        /// Global norm of the unscaled gradients before clipping; NaN if not computed, Inf or NaN
        /// if skipped.
        grad_norm: f64,
        /// Factor that clipping multiplied the gradients by; 1 if not clipped.
        grad_clip: f64,
        /// From the start of the work to its end.
        total_seconds: f64,
        /// Until the norm and the verdict were known.
        norm_seconds: f64,
        /// How long the device took to copy gradients to the host.
        grads_down_seconds: f64,
        /// How long CPU threads took to update their chunks of the host share.
        update_seconds: f64,
        /// How long the device took to copy params to the device.
        params_up_seconds: f64,
        /// How long the device took to update its share.
        device_update_seconds: f64,
        /// How long CPU threads waited for gradients or for a free staging slot.
        stall_seconds: f64,
        /// Bytes of gradients that were copied to the host.
        grads_down_bytes: u64,
        /// Bytes of params that were copied to the device.
        params_up_bytes: u64,
        /// Elements of the host share that CPU threads updated.
        cpu_elements: u64,
        /// Elements of the host share whose state went through the device.
        streamed_elements: u64,
        /// Bytes of their state that were copied to the device.
        state_up_bytes: u64,
        /// Bytes of their state that were copied back to the host.
        state_down_bytes: u64,
        /// How long the device took to copy their state to the device.
        state_up_seconds: f64,
        /// How long the device took to update them.
        streamed_update_seconds: f64,
        /// How long the device took to copy their state back.
        state_down_seconds: f64,
        /// The time between the last chunk of the CPU threads and the last streamed chunk, if the
        /// latter ended later.
        cpu_idle_seconds: f64,
        /// The time between the last streamed chunk and the last chunk of the CPU threads, if the
        /// latter ended later.
        streamed_idle_seconds: f64,
        /// Elements of the host share that had been updated before the step.
        early_elements: u64,
        /// Elements that were updated early and undone since the step before.
        undone_elements: u64,
    }
}

report! {
    /// Totals since create, and the memory in use now.
    Stats from offload_stats_t {
        /// Calls queued or running now.
        queued: u32,
        /// Steps that have updated params.
        steps_applied: u64,
        /// Steps that were skipped because a gradient was Inf or NaN.
        steps_skipped: u64,
        /// Host memory in use now, as in [`Plan`].
        host_bytes: u64,
        /// Device memory in use now, as in [`Plan`].
        device_bytes: u64,
        /// Pinned staging memory in use now, a part of `host_bytes`.
        staging_bytes: u64,
        /// The caller's memory of registered params that have an address.
        params_on_device_bytes: u64,
        /// Params that are offloaded.
        params_on_host_bytes: u64,
        /// The caller's memory of gradients that have an address.
        grads_on_device_bytes: u64,
        /// Gradients that are offloaded or accumulated on the host.
        grads_on_host_bytes: u64,
        /// State of the device share that is on the device.
        states_on_device_bytes: u64,
        /// State of the host share, and state of the device share that is offloaded.
        states_on_host_bytes: u64,
        /// Bytes of gradients that steps have copied to the host since create.
        grads_down_bytes: u64,
        /// Bytes of params that steps have copied to the device since create.
        params_up_bytes: u64,
        /// Bytes that the offload calls have copied since create.
        offloaded_bytes: u64,
        /// Bytes that the reload calls have copied since create.
        reloaded_bytes: u64,
        /// The sum over all steps since create, as in [`StepResult`]. So are the fields below.
        total_seconds: f64,
        /// See [`StepResult`].
        norm_seconds: f64,
        /// See [`StepResult`].
        grads_down_seconds: f64,
        /// See [`StepResult`].
        update_seconds: f64,
        /// See [`StepResult`].
        params_up_seconds: f64,
        /// See [`StepResult`].
        device_update_seconds: f64,
        /// See [`StepResult`].
        stall_seconds: f64,
        /// Elements of the host share that CPU threads have updated.
        cpu_elements: u64,
        /// Elements of the host share whose state has gone through the device.
        streamed_elements: u64,
        /// Bytes of their state that were copied to the device.
        state_up_bytes: u64,
        /// Bytes of their state that were copied back to the host.
        state_down_bytes: u64,
        /// How long the device took to copy their state to the device.
        state_up_seconds: f64,
        /// How long the device took to update them.
        streamed_update_seconds: f64,
        /// How long the device took to copy their state back.
        state_down_seconds: f64,
        /// The time between the last chunk of the CPU threads and the last streamed chunk, if the
        /// latter ended later.
        cpu_idle_seconds: f64,
        /// The time between the last streamed chunk and the last chunk of the CPU threads, if the
        /// latter ended later.
        streamed_idle_seconds: f64,
        /// Chunks of steps, and pieces of moves, that waited until prefetches of a stash had ended.
        gave_way_copies: u64,
        /// How long they waited.
        gave_way_seconds: f64,
        /// Bytes of a stash's pushes that were under way when steps queued chunks to the host.
        pushes_ahead_bytes: u64,
        /// Elements of the host share that had been updated before their steps.
        early_elements: u64,
        /// Elements that were updated early and undone.
        undone_elements: u64,
    }
}

report! {
    /// The manifest of a checkpoint, without its arrays.
    CheckpointInfo from offload_checkpoint_info_t {
        /// The version of the manifest's format.
        format_version: u32,
        /// The library's number of the algorithm.
        algorithm: i32,
        /// 1 if the checkpoint has masters only.
        save_flags: u32,
        /// How many ranks saved it.
        world: u32,
        /// How many groups the optimizer had.
        group_count: u32,
        /// How many steps had been applied when it was saved.
        step: u64,
        /// How many params it has, counted by name.
        param_count: u64,
        /// How many stored arrays it has.
        tensor_count: u64,
        /// How many safetensors files it has.
        file_count: u64,
        /// Bytes of all stored arrays.
        bytes: u64,
    }
}
