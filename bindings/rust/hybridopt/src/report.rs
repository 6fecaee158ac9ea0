//! Reports of the library. Each has a field for every field of the C struct.
//!
//! Written by generate_abi.py; do not edit.

use std::ffi::CStr;
use std::os::raw::c_char;

use hybridopt_sys as sys;

fn text(characters: &[c_char]) -> String {
    assert!(characters.contains(&0), "the library ends its texts");
    // SAFETY: there is a NUL in it.
    unsafe { CStr::from_ptr(characters.as_ptr()) }.to_string_lossy().into_owned()
}

/// One value for each tier.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct ByTier<T> {
    /// The memory of the device.
    pub device: T,
    /// Host memory.
    pub host: T,
    /// Files in options.disk_paths.
    pub disk: T,
}

impl<T: Copy> ByTier<T> {
    fn of(values: &[T]) -> Self {
        ByTier { device: values[0], host: values[1], disk: values[2] }
    }
}

/// The parts of the machine that a context uses.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ContextInfo {
    /// Of enum offload_device_kind.
    pub device_kind: i32,
    /// Number of update threads.
    pub threads: u32,
    /// CPUs in this process's affinity mask.
    pub cpus_allowed: u32,
    /// NUMA nodes with CPUs that this process may use.
    pub nodes: u32,
    /// `true`: each update thread stays on its NUMA node; `false`: the system refused.
    pub threads_seated: bool,
    /// `true`: the library asks for huge pages for state and the system has them.
    pub huge_pages: bool,
    /// Optimizers of this context that have not been destroyed.
    pub optimizers: u32,
    /// Capacity; 0 on the host device.
    pub device_memory_bytes: u64,
    /// Free on the device now; 0 on the host device.
    pub device_memory_free_bytes: u64,
    /// Host memory that is pinned for this context now.
    pub pinned_bytes: u64,
    /// Instruction set of the host kernels: "avx512", ...
    pub isa: String,
    /// The device's own name.
    pub device_name: String,
    /// This rank, as the library used it to share out the CPUs.
    pub local_rank: u32,
    /// Number of ranks that the library shared out the CPUs to.
    pub local_world: u32,
    /// How many of cpus_allowed are this rank's.
    pub cpus: u32,
    /// Of enum offload_numa_rung; final once the first work has started threads.
    pub numa_rung: i32,
    /// Bit n: update threads run on node n (nodes above 63 do not show).
    pub numa_nodes: u64,
    /// What the library could not have as asked or at its best, and why; "" if there is nothing to
    /// tell.
    pub notes: String,
    /// Bit n: the kernel has been told to put host memory on node n.
    pub numa_memory_nodes: u64,
    /// Of enum offload_numa_policy in force; if it is not what options asked for, notes and a
    /// warning in the log tell why.
    pub numa_policy: i32,
    /// Stashes of this context that have not been destroyed.
    pub stashes: u32,
}

impl From<&sys::offload_context_info_t> for ContextInfo {
    fn from(raw: &sys::offload_context_info_t) -> Self {
        ContextInfo {
            device_kind: raw.device_kind,
            threads: raw.threads,
            cpus_allowed: raw.cpus_allowed,
            nodes: raw.nodes,
            threads_seated: raw.threads_seated != 0,
            huge_pages: raw.huge_pages != 0,
            optimizers: raw.optimizers,
            device_memory_bytes: raw.device_memory_bytes,
            device_memory_free_bytes: raw.device_memory_free_bytes,
            pinned_bytes: raw.pinned_bytes,
            isa: text(&raw.isa),
            device_name: text(&raw.device_name),
            local_rank: raw.local_rank,
            local_world: raw.local_world,
            cpus: raw.cpus,
            numa_rung: raw.numa_rung,
            numa_nodes: raw.numa_nodes,
            notes: text(&raw.notes),
            numa_memory_nodes: raw.numa_memory_nodes,
            numa_policy: raw.numa_policy,
            stashes: raw.stashes,
        }
    }
}

/// The memory that commit takes, by kind and place, and what a step copies. Padding is included.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Plan {
    /// Params that are registered.
    pub param_count: u32,
    /// Elements of all params.
    pub element_count: u64,
    /// Elements whose state a tier holds, by enum offload_tier.
    pub elements: ByTier<u64>,
    /// State, by enum offload_tier and enum offload_state_kind.
    pub state_bytes: ByTier<[u64; 32]>,
    /// Pinned host memory: the staging ring and the results of norms.
    pub staging_bytes: u64,
    /// Pinned: room for params that are offloaded.
    pub host_params_bytes: u64,
    /// Pinned: room for gradients that are offloaded.
    pub host_grads_bytes: u64,
    /// Pinned: room for the state of the device share.
    pub host_swap_bytes: u64,
    /// Tables, norm sums, copies of what queued steps need.
    pub host_scratch_bytes: u64,
    /// Norms, gradients that go back to the device for a step, the ring that state on the host goes
    /// through.
    pub device_scratch_bytes: u64,
    /// All of the above on the host.
    pub host_bytes: u64,
    /// All of the above on the device.
    pub device_bytes: u64,
    /// Free on the device now; 0 on the host device.
    pub device_free_bytes: u64,
    /// Available on the host now, within the limits of cgroups.
    pub host_available_bytes: u64,
    /// How much more this context may pin; `u64::MAX` without a limit.
    pub pinned_bytes_left: u64,
    /// Chunks of a step in which all params have a gradient.
    pub chunk_count: u64,
    /// What such a step copies from the device to the host, if CPU threads update all chunks.
    pub grads_down_bytes: u64,
    /// What such a step copies from the host to the device, if CPU threads update all chunks.
    pub params_up_bytes: u64,
    /// `true`: commit would find enough memory now; disks are not asked.
    pub fits: bool,
    /// The part of host_bytes on each NUMA node: as the context's policy will place it; after
    /// commit, while no work is queued, as the kernel reports it for up to 4,096 pages of each
    /// array.
    pub numa_bytes: [u64; 64],
    /// The rest of host_bytes: small tables, pages that nothing has touched yet, nodes above 63;
    /// all of it without libnuma.
    pub numa_unknown_bytes: u64,
    /// Of device_scratch_bytes: the ring that state on the host goes through; 0 = CPU threads alone
    /// update the host share.
    pub device_ring_bytes: u64,
    /// Of host_bytes: state that commit pins for that ring.
    pub pinned_state_bytes: u64,
    /// Of host_bytes: for early updates.
    pub host_early_bytes: u64,
    /// Of host_bytes: for options.track_changes.
    pub host_change_bytes: u64,
    /// Of device_scratch_bytes: for options.track_changes.
    pub device_change_bytes: u64,
    /// Of host_bytes: for state that steps put aside while a save runs.
    pub host_save_bytes: u64,
    /// Of the files in options.disk_paths.
    pub disk_bytes: u64,
    /// What a step in which all params have a gradient reads from these files, and what it writes
    /// to them.
    pub disk_step_bytes: u64,
    /// Of host_bytes: the ring through which state on disk goes.
    pub host_disk_bytes: u64,
}

impl From<&sys::offload_plan_t> for Plan {
    fn from(raw: &sys::offload_plan_t) -> Self {
        Plan {
            param_count: raw.param_count,
            element_count: raw.element_count,
            elements: ByTier::of(&raw.elements),
            state_bytes: ByTier::of(&raw.state_bytes),
            staging_bytes: raw.staging_bytes,
            host_params_bytes: raw.host_params_bytes,
            host_grads_bytes: raw.host_grads_bytes,
            host_swap_bytes: raw.host_swap_bytes,
            host_scratch_bytes: raw.host_scratch_bytes,
            device_scratch_bytes: raw.device_scratch_bytes,
            host_bytes: raw.host_bytes,
            device_bytes: raw.device_bytes,
            device_free_bytes: raw.device_free_bytes,
            host_available_bytes: raw.host_available_bytes,
            pinned_bytes_left: raw.pinned_bytes_left,
            chunk_count: raw.chunk_count,
            grads_down_bytes: raw.grads_down_bytes,
            params_up_bytes: raw.params_up_bytes,
            fits: raw.fits != 0,
            numa_bytes: raw.numa_bytes,
            numa_unknown_bytes: raw.numa_unknown_bytes,
            device_ring_bytes: raw.device_ring_bytes,
            pinned_state_bytes: raw.pinned_state_bytes,
            host_early_bytes: raw.host_early_bytes,
            host_change_bytes: raw.host_change_bytes,
            device_change_bytes: raw.device_change_bytes,
            host_save_bytes: raw.host_save_bytes,
            disk_bytes: raw.disk_bytes,
            disk_step_bytes: raw.disk_step_bytes,
            host_disk_bytes: raw.host_disk_bytes,
        }
    }
}

/// What a completed step did, and how long its parts took.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct StepResult {
    /// `true`: a gradient had an Inf or NaN; the step has changed nothing.
    pub skipped: bool,
    /// Steps applied so far, this one included unless it was skipped.
    pub step: u64,
    /// Global norm of the unscaled gradients before clipping; NaN if the step did not compute it
    /// (ASSUME_FINITE without clipping), Inf or NaN if it was skipped.
    pub grad_norm: f64,
    /// Factor by which clipping multiplied the gradients; 1 = no clipping.
    pub grad_clip: f64,
    /// From the start of the work to its end.
    pub total_seconds: f64,
    /// From the start until the norm was known.
    pub norm_seconds: f64,
    /// Copying gradients to the host, as the device timed it.
    pub grads_down_seconds: f64,
    /// CPU threads updating the host share.
    pub update_seconds: f64,
    /// Copying params to the device, as the device timed it.
    pub params_up_seconds: f64,
    /// The device updating its share.
    pub device_update_seconds: f64,
    /// CPU threads waiting for gradients, a staging slot, the device's update or a save.
    pub stall_seconds: f64,
    /// Gradients copied from the device to the host.
    pub grads_down_bytes: u64,
    /// Params copied from the host to the device.
    pub params_up_bytes: u64,
    /// Elements of the host share that CPU threads updated.
    pub cpu_elements: u64,
    /// Elements of the host share whose state went through the device.
    pub streamed_elements: u64,
    /// Streamed state copied from the host to the device.
    pub state_up_bytes: u64,
    /// Streamed state copied from the device to the host.
    pub state_down_bytes: u64,
    /// Copying streamed state to the device, as the device timed it.
    pub state_up_seconds: f64,
    /// The device updating the streamed elements.
    pub streamed_update_seconds: f64,
    /// Copying streamed state back, as the device timed it.
    pub state_down_seconds: f64,
    /// From the end of the CPU threads' last chunk to that of the last streamed chunk.
    pub cpu_idle_seconds: f64,
    /// From the end of the last streamed chunk to that of the CPU threads' last chunk.
    pub streamed_idle_seconds: f64,
    /// Elements of the host share that had been updated before the step; they count neither as
    /// cpu_elements nor as streamed_elements.
    pub early_elements: u64,
    /// Elements updated early and undone, since the step before.
    pub undone_elements: u64,
}

impl From<&sys::offload_step_result_t> for StepResult {
    fn from(raw: &sys::offload_step_result_t) -> Self {
        StepResult {
            skipped: raw.skipped != 0,
            step: raw.step,
            grad_norm: raw.grad_norm,
            grad_clip: raw.grad_clip,
            total_seconds: raw.total_seconds,
            norm_seconds: raw.norm_seconds,
            grads_down_seconds: raw.grads_down_seconds,
            update_seconds: raw.update_seconds,
            params_up_seconds: raw.params_up_seconds,
            device_update_seconds: raw.device_update_seconds,
            stall_seconds: raw.stall_seconds,
            grads_down_bytes: raw.grads_down_bytes,
            params_up_bytes: raw.params_up_bytes,
            cpu_elements: raw.cpu_elements,
            streamed_elements: raw.streamed_elements,
            state_up_bytes: raw.state_up_bytes,
            state_down_bytes: raw.state_down_bytes,
            state_up_seconds: raw.state_up_seconds,
            streamed_update_seconds: raw.streamed_update_seconds,
            state_down_seconds: raw.state_down_seconds,
            cpu_idle_seconds: raw.cpu_idle_seconds,
            streamed_idle_seconds: raw.streamed_idle_seconds,
            early_elements: raw.early_elements,
            undone_elements: raw.undone_elements,
        }
    }
}

/// Totals since create, and the memory in use now. Fields that offload_step_result_t has too are
/// sums over all steps.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Stats {
    /// Calls that are queued or running now; a save until its ticket completes.
    pub queued: u32,
    /// Steps that have updated params; a load does not change it (`step` of later results continues
    /// from the checkpoint).
    pub steps_applied: u64,
    /// Steps that a gradient with an Inf or NaN has skipped.
    pub steps_skipped: u64,
    /// Host memory that the library holds now, as in the plan.
    pub host_bytes: u64,
    /// Device memory that the library holds now, as in the plan.
    pub device_bytes: u64,
    /// Staging memory that it holds now; part of host_bytes.
    pub staging_bytes: u64,
    /// By enum offload_tier. On the device the caller's: registered params that have an address; on
    /// the host offloaded params.
    pub params_bytes: ByTier<u64>,
    /// By enum offload_tier. On the device the caller's: gradients that have an address; on the
    /// host offloaded or accumulated gradients.
    pub grads_bytes: ByTier<u64>,
    /// By enum offload_tier: state of the tier's share; the host's includes offloaded state of the
    /// device share.
    pub state_bytes: ByTier<u64>,
    /// Of all steps: gradients copied from the device to the host.
    pub grads_down_bytes: u64,
    /// Of all steps: params copied from the host to the device.
    pub params_up_bytes: u64,
    /// What offload_* has copied since create.
    pub offloaded_bytes: u64,
    /// What reload_* has copied since create.
    pub reloaded_bytes: u64,
    /// Of all steps: from the start of the work to its end.
    pub total_seconds: f64,
    /// Of all steps: from the start until the norm was known.
    pub norm_seconds: f64,
    /// Of all steps: copying gradients to the host, as the device timed it.
    pub grads_down_seconds: f64,
    /// Of all steps: CPU threads updating the host share.
    pub update_seconds: f64,
    /// Of all steps: copying params to the device, as the device timed it.
    pub params_up_seconds: f64,
    /// Of all steps: the device updating its share.
    pub device_update_seconds: f64,
    /// Of all steps: CPU threads waiting for gradients, a staging slot, the device's update or a
    /// save.
    pub stall_seconds: f64,
    /// Of all steps: elements of the host share that CPU threads updated.
    pub cpu_elements: u64,
    /// Of all steps: elements of the host share whose state went through the device.
    pub streamed_elements: u64,
    /// Of all steps: streamed state copied from the host to the device.
    pub state_up_bytes: u64,
    /// Of all steps: streamed state copied from the device to the host.
    pub state_down_bytes: u64,
    /// Of all steps: copying streamed state to the device, as the device timed it.
    pub state_up_seconds: f64,
    /// Of all steps: the device updating the streamed elements.
    pub streamed_update_seconds: f64,
    /// Of all steps: copying streamed state back, as the device timed it.
    pub state_down_seconds: f64,
    /// Of all steps: from the end of the CPU threads' last chunk to that of the last streamed
    /// chunk.
    pub cpu_idle_seconds: f64,
    /// Of all steps: from the end of the last streamed chunk to that of the CPU threads' last
    /// chunk.
    pub streamed_idle_seconds: f64,
    /// Chunks of steps, and pieces of moves, that waited on the host until a stash's prefetches
    /// that were under way had ended (docs/STASH.md).
    pub gave_way_copies: u64,
    /// How long they waited; part of other times above.
    pub gave_way_seconds: f64,
    /// A stash's pushes that were queued, and not known to have ended, when a step queued a chunk
    /// to the host: the sum over all its chunks.
    pub pushes_ahead_bytes: u64,
    /// Of all steps: elements of the host share that had been updated before the step; they count
    /// neither as cpu_elements nor as streamed_elements.
    pub early_elements: u64,
    /// Of all steps: elements updated early and undone, since the step before.
    pub undone_elements: u64,
    /// From the files in options.disk_paths, since commit.
    pub disk_read_bytes: u64,
    /// To them.
    pub disk_written_bytes: u64,
}

impl From<&sys::offload_stats_t> for Stats {
    fn from(raw: &sys::offload_stats_t) -> Self {
        Stats {
            queued: raw.queued,
            steps_applied: raw.steps_applied,
            steps_skipped: raw.steps_skipped,
            host_bytes: raw.host_bytes,
            device_bytes: raw.device_bytes,
            staging_bytes: raw.staging_bytes,
            params_bytes: ByTier::of(&raw.params_bytes),
            grads_bytes: ByTier::of(&raw.grads_bytes),
            state_bytes: ByTier::of(&raw.state_bytes),
            grads_down_bytes: raw.grads_down_bytes,
            params_up_bytes: raw.params_up_bytes,
            offloaded_bytes: raw.offloaded_bytes,
            reloaded_bytes: raw.reloaded_bytes,
            total_seconds: raw.total_seconds,
            norm_seconds: raw.norm_seconds,
            grads_down_seconds: raw.grads_down_seconds,
            update_seconds: raw.update_seconds,
            params_up_seconds: raw.params_up_seconds,
            device_update_seconds: raw.device_update_seconds,
            stall_seconds: raw.stall_seconds,
            cpu_elements: raw.cpu_elements,
            streamed_elements: raw.streamed_elements,
            state_up_bytes: raw.state_up_bytes,
            state_down_bytes: raw.state_down_bytes,
            state_up_seconds: raw.state_up_seconds,
            streamed_update_seconds: raw.streamed_update_seconds,
            state_down_seconds: raw.state_down_seconds,
            cpu_idle_seconds: raw.cpu_idle_seconds,
            streamed_idle_seconds: raw.streamed_idle_seconds,
            gave_way_copies: raw.gave_way_copies,
            gave_way_seconds: raw.gave_way_seconds,
            pushes_ahead_bytes: raw.pushes_ahead_bytes,
            early_elements: raw.early_elements,
            undone_elements: raw.undone_elements,
            disk_read_bytes: raw.disk_read_bytes,
            disk_written_bytes: raw.disk_written_bytes,
        }
    }
}

/// What a manifest says about the whole checkpoint.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct CheckpointInfo {
    /// Of the manifest.
    pub format_version: u32,
    /// Of enum offload_algorithm, that of the optimizer's options.
    pub algorithm: i32,
    /// Of enum offload_save_flag, or-ed.
    pub save_flags: u32,
    /// Number of ranks that saved it.
    pub world: u32,
    /// Groups of the optimizer.
    pub group_count: u32,
    /// Steps applied before the save.
    pub step: u64,
    /// Different names.
    pub param_count: u64,
    /// Stored arrays: how often visit is called.
    pub tensor_count: u64,
    /// Safetensors files.
    pub file_count: u64,
    /// Of all stored arrays.
    pub bytes: u64,
}

impl From<&sys::offload_checkpoint_info_t> for CheckpointInfo {
    fn from(raw: &sys::offload_checkpoint_info_t) -> Self {
        CheckpointInfo {
            format_version: raw.format_version,
            algorithm: raw.algorithm,
            save_flags: raw.save_flags,
            world: raw.world,
            group_count: raw.group_count,
            step: raw.step,
            param_count: raw.param_count,
            tensor_count: raw.tensor_count,
            file_count: raw.file_count,
            bytes: raw.bytes,
        }
    }
}
