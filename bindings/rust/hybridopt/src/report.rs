//! What the library tells about itself: reports with a field for each of the C struct's.

use std::ffi::CStr;
use std::os::raw::c_char;

use hybridopt_sys as sys;

/// How a field of C becomes one of ours.
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
    /// What was really obtained.
    ContextInfo from offload_context_info_t {
        /// Update threads, really.
        threads: u32,
        /// CPUs in this process's affinity mask.
        cpus_allowed: u32,
        /// NUMA nodes with CPUs this process may use.
        nodes: u32,
        /// Each update thread keeps to its NUMA node; else the system refused.
        threads_seated: bool,
        /// State memory asks for huge pages, as the system allows.
        huge_pages: bool,
        /// Alive in this context.
        optimizers: u32,
        /// Capacity; 0 on the host device.
        device_memory_bytes: u64,
        /// Now.
        device_memory_free_bytes: u64,
        /// Host memory that is pinned for this context, really.
        pinned_bytes: u64,
        /// Instruction set of the host kernels: "avx512" and so on.
        isa: String,
        /// The device's own name.
        device_name: String,
        /// As the CPUs were shared out.
        local_rank: u32,
        /// As the CPUs were shared out.
        local_world: u32,
        /// This rank's part of `cpus_allowed`.
        cpus: u32,
        /// 0: pages lie where the system puts them, 1: first touch, 2: placed. Final once the first
        /// work has started threads.
        numa_rung: i32,
        /// Bit n: there are update threads on node n.
        numa_nodes: u64,
        /// What fell short of the best, and why; empty if nothing did.
        notes: String,
        /// Bit n: the kernel has been told to put host memory on node n.
        numa_memory_nodes: u64,
        /// 0: host memory lies near the update threads, 1: it is interleaved.
        numa_policy: i32,
    }
}

report! {
    /// What commit takes, by kind and place. Bytes include padding.
    Plan from offload_plan_t {
        /// Params registered.
        param_count: u32,
        /// Elements of all params.
        element_count: u64,
        /// Of the host share.
        host_elements: u64,
        /// Of the device share.
        device_elements: u64,
        /// Indexed by [`StateKind`](crate::StateKind).
        host_state_bytes: [u64; 32],
        /// Indexed by [`StateKind`](crate::StateKind).
        device_state_bytes: [u64; 32],
        /// Pinned host memory: ring and verdict.
        staging_bytes: u64,
        /// Pinned: room for params that are offloaded.
        host_params_bytes: u64,
        /// Pinned: room for gradients that are offloaded.
        host_grads_bytes: u64,
        /// Pinned: room for the device share's state.
        host_swap_bytes: u64,
        /// Tables, norm sums, queued-step snapshots.
        host_scratch_bytes: u64,
        /// Norm sums, verdict, gradients that come back for a step.
        device_scratch_bytes: u64,
        /// All of the above on the host.
        host_bytes: u64,
        /// All of the above on the device.
        device_bytes: u64,
        /// On the device now; 0 on the host device.
        device_free_bytes: u64,
        /// On the host now, cgroup limit counted.
        host_available_bytes: u64,
        /// Under the context's cap; `u64::MAX` without one.
        pinned_bytes_left: u64,
        /// Chunks a full step moves.
        chunk_count: u64,
        /// Copied device to host by a full step.
        grads_down_bytes: u64,
        /// Copied host to device by a full step.
        params_up_bytes: u64,
        /// Commit would find room for all of it now.
        fits: bool,
        /// Of `host_bytes`, on each NUMA node: planned before commit, found after it.
        numa_bytes: [u64; 64],
        /// The rest of `host_bytes`, whose node is not known.
        numa_unknown_bytes: u64,
        /// Of `device_scratch_bytes`: the ring that state on the host goes through; 0: CPU threads
        /// alone update the host share.
        device_ring_bytes: u64,
        /// Of `host_bytes`: state that commit pins for that ring.
        pinned_state_bytes: u64,
    }
}

report! {
    /// What a completed step did.
    StepResult from offload_step_result_t {
        /// A gradient was Inf or NaN; nothing at all has changed.
        skipped: bool,
        /// Steps applied so far, this one included unless skipped.
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
        /// Copying gradients to the host, as the device took it.
        grads_down_seconds: f64,
        /// CPU threads updating the host share.
        update_seconds: f64,
        /// Copying params to the device, as the device took it.
        params_up_seconds: f64,
        /// The device updating its share.
        device_update_seconds: f64,
        /// CPU threads waiting for gradients or for a free staging slot.
        stall_seconds: f64,
        /// Copied device to host.
        grads_down_bytes: u64,
        /// Copied host to device.
        params_up_bytes: u64,
        /// Elements of the host share that CPU threads updated.
        cpu_elements: u64,
        /// Elements of the host share whose state went through the device.
        streamed_elements: u64,
        /// Of their state: copied from the host to the device.
        state_up_bytes: u64,
        /// Of their state: copied from the device to the host.
        state_down_bytes: u64,
        /// Copying their state to the device, as the device timed it.
        state_up_seconds: f64,
        /// The device updating them.
        streamed_update_seconds: f64,
        /// Copying their state back, as the device timed it.
        state_down_seconds: f64,
        /// From the CPU threads' last chunk to the last one that was streamed.
        cpu_idle_seconds: f64,
        /// From the last streamed chunk to the CPU threads' last one.
        streamed_idle_seconds: f64,
    }
}

report! {
    /// Totals since create, and what is held now.
    Stats from offload_stats_t {
        /// Calls queued or running now.
        queued: u32,
        /// Steps that changed something.
        steps_applied: u64,
        /// Steps with an Inf or NaN.
        steps_skipped: u64,
        /// Held now, as in the plan.
        host_bytes: u64,
        /// Held now, as in the plan.
        device_bytes: u64,
        /// Held now; part of `host_bytes`.
        staging_bytes: u64,
        /// The caller's, of registered params with an address.
        params_on_device_bytes: u64,
        /// Offloaded.
        params_on_host_bytes: u64,
        /// The caller's, of gradients with an address.
        grads_on_device_bytes: u64,
        /// Offloaded or accumulated.
        grads_on_host_bytes: u64,
        /// The device share.
        states_on_device_bytes: u64,
        /// The host share, and what was offloaded of the device share.
        states_on_host_bytes: u64,
        /// Since create.
        grads_down_bytes: u64,
        /// Since create.
        params_up_bytes: u64,
        /// Since create, by the offloading calls.
        offloaded_bytes: u64,
        /// Since create, by the reloading calls.
        reloaded_bytes: u64,
        /// Sum of the step results since create, as are the following.
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
        /// Elements of the host share that CPU threads updated.
        cpu_elements: u64,
        /// Elements of the host share whose state went through the device.
        streamed_elements: u64,
        /// Of their state: copied from the host to the device.
        state_up_bytes: u64,
        /// Of their state: copied from the device to the host.
        state_down_bytes: u64,
        /// Copying their state to the device, as the device timed it.
        state_up_seconds: f64,
        /// The device updating them.
        streamed_update_seconds: f64,
        /// Copying their state back, as the device timed it.
        state_down_seconds: f64,
        /// From the CPU threads' last chunk to the last one that was streamed.
        cpu_idle_seconds: f64,
        /// From the last streamed chunk to the CPU threads' last one.
        streamed_idle_seconds: f64,
    }
}

report! {
    /// What a checkpoint's manifest says of the whole.
    CheckpointInfo from offload_checkpoint_info_t {
        /// Of the manifest.
        format_version: u32,
        /// The library's number of the algorithm.
        algorithm: i32,
        /// 1: masters only.
        save_flags: u32,
        /// Ranks that saved it.
        world: u32,
        /// Groups of the optimizer.
        group_count: u32,
        /// Steps applied when it was saved.
        step: u64,
        /// Different names.
        param_count: u64,
        /// Parts of tensors.
        tensor_count: u64,
        /// Safetensors files.
        file_count: u64,
        /// Of all tensors.
        bytes: u64,
    }
}
