"""Reports of the library as dataclasses, with a field for every field of the C struct.

Written by generate_abi.py; do not edit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class ByTier(Generic[T]):
    """One value for each tier (enum offload_tier)."""

    device: T
    """The memory of the device."""
    host: T
    """Host memory."""
    disk: T
    """Files in options.disk_paths."""

    def __add__(self: ByTier[int], other: ByTier[int]) -> ByTier[int]:
        return ByTier(self.device + other.device, self.host + other.host, self.disk + other.disk)

    def __sub__(self: ByTier[int], other: ByTier[int]) -> ByTier[int]:
        return ByTier(self.device - other.device, self.host - other.host, self.disk - other.disk)


@dataclass(frozen=True)
class PlannedMemory:
    """The memory that commit takes, by kind and place, and what a step copies. Padding is included
    (offload_plan_t)."""

    param_count: int
    """Params that are registered."""
    element_count: int
    """Elements of all params."""
    elements: ByTier[int]
    """Elements whose state a tier holds, by enum offload_tier."""
    state_bytes: ByTier[dict[str, int]]
    """State, by enum offload_tier and enum offload_state_kind."""
    staging_bytes: int
    """Pinned host memory: the staging ring and the results of norms."""
    host_params_bytes: int
    """Pinned: room for params that are offloaded."""
    host_grads_bytes: int
    """Pinned: room for gradients that are offloaded."""
    host_swap_bytes: int
    """Pinned: room for the state of the device share."""
    host_scratch_bytes: int
    """Tables, norm sums, copies of what queued steps need."""
    device_scratch_bytes: int
    """Norms, gradients that go back to the device for a step, the ring that state on the host goes
    through."""
    host_bytes: int
    """All of the above on the host."""
    device_bytes: int
    """All of the above on the device."""
    device_free_bytes: int
    """Free on the device now; 0 on the host device."""
    host_available_bytes: int
    """Available on the host now, within the limits of cgroups."""
    pinned_bytes_left: int
    """How much more this context may pin; 2**64 - 1 without a limit."""
    chunk_count: int
    """Chunks of a step in which all params have a gradient."""
    grads_down_bytes: int
    """What such a step copies from the device to the host, if CPU threads update all chunks."""
    params_up_bytes: int
    """What such a step copies from the host to the device, if CPU threads update all chunks."""
    fits: bool
    """True: commit would find enough memory now; disks are not asked."""
    numa_bytes: dict[int, int]
    """The part of host_bytes on each NUMA node: as the context's policy will place it; after
    commit, while no work is queued, as the kernel reports it for up to 4,096 pages of each
    array."""
    numa_unknown_bytes: int
    """The rest of host_bytes: small tables, pages that nothing has touched yet, nodes above 63; all
    of it without libnuma."""
    device_ring_bytes: int
    """Of device_scratch_bytes: the ring that state on the host goes through; 0 = CPU threads alone
    update the host share."""
    pinned_state_bytes: int
    """Of host_bytes: state that commit pins for that ring."""
    host_early_bytes: int
    """Of host_bytes: for early updates."""
    host_change_bytes: int
    """Of host_bytes: for options.track_changes."""
    device_change_bytes: int
    """Of device_scratch_bytes: for options.track_changes."""
    host_save_bytes: int
    """Of host_bytes: for state that steps put aside while a save runs."""
    disk_bytes: int
    """Of the files in options.disk_paths."""
    disk_step_bytes: int
    """What a step in which all params have a gradient reads from these files, and what it writes to
    them."""
    host_disk_bytes: int
    """Of host_bytes: the ring through which state on disk goes."""


@dataclass(frozen=True)
class StepResult:
    """What a completed step did, and how long its parts took (offload_step_result_t)."""

    skipped: bool
    """True: a gradient had an Inf or NaN; the step has changed nothing."""
    step: int
    """Steps applied so far, this one included unless it was skipped."""
    grad_norm: float
    """Global norm of the unscaled gradients before clipping; NaN if the step did not compute it
    (ASSUME_FINITE without clipping), Inf or NaN if it was skipped."""
    grad_clip: float
    """Factor by which clipping multiplied the gradients; 1 = no clipping."""
    total_seconds: float
    """From the start of the work to its end."""
    norm_seconds: float
    """From the start until the norm was known."""
    grads_down_seconds: float
    """Copying gradients to the host, as the device timed it."""
    update_seconds: float
    """CPU threads updating the host share."""
    params_up_seconds: float
    """Copying params to the device, as the device timed it."""
    device_update_seconds: float
    """The device updating its share."""
    stall_seconds: float
    """CPU threads waiting for gradients, a staging slot, the device's update or a save."""
    grads_down_bytes: int
    """Gradients copied from the device to the host."""
    params_up_bytes: int
    """Params copied from the host to the device."""
    cpu_elements: int
    """Elements of the host share that CPU threads updated."""
    streamed_elements: int
    """Elements of the host share whose state went through the device."""
    state_up_bytes: int
    """Streamed state copied from the host to the device."""
    state_down_bytes: int
    """Streamed state copied from the device to the host."""
    state_up_seconds: float
    """Copying streamed state to the device, as the device timed it."""
    streamed_update_seconds: float
    """The device updating the streamed elements."""
    state_down_seconds: float
    """Copying streamed state back, as the device timed it."""
    cpu_idle_seconds: float
    """From the end of the CPU threads' last chunk to that of the last streamed chunk."""
    streamed_idle_seconds: float
    """From the end of the last streamed chunk to that of the CPU threads' last chunk."""
    early_elements: int
    """Elements of the host share that had been updated before the step; they count neither as
    cpu_elements nor as streamed_elements."""
    undone_elements: int
    """Elements updated early and undone, since the step before."""


@dataclass(frozen=True)
class Totals:
    """Totals since create, and the memory in use now. Fields that offload_step_result_t has too are
    sums over all steps (offload_stats_t)."""

    queued: int = 0
    """Calls that are queued or running now; a save until its ticket completes."""
    steps_applied: int = 0
    """Steps that have updated params; a load does not change it (`step` of later results continues
    from the checkpoint)."""
    steps_skipped: int = 0
    """Steps that a gradient with an Inf or NaN has skipped."""
    host_bytes: int = 0
    """Host memory that the library holds now, as in the plan."""
    device_bytes: int = 0
    """Device memory that the library holds now, as in the plan."""
    staging_bytes: int = 0
    """Staging memory that it holds now; part of host_bytes."""
    params_bytes: ByTier[int] = ByTier(0, 0, 0)
    """By enum offload_tier. On the device the caller's: registered params that have an address; on
    the host offloaded params."""
    grads_bytes: ByTier[int] = ByTier(0, 0, 0)
    """By enum offload_tier. On the device the caller's: gradients that have an address; on the host
    offloaded or accumulated gradients."""
    state_bytes: ByTier[int] = ByTier(0, 0, 0)
    """By enum offload_tier: state of the tier's share; the host's includes offloaded state of the
    device share."""
    grads_down_bytes: int = 0
    """Of all steps: gradients copied from the device to the host."""
    params_up_bytes: int = 0
    """Of all steps: params copied from the host to the device."""
    offloaded_bytes: int = 0
    """What offload_* has copied since create."""
    reloaded_bytes: int = 0
    """What reload_* has copied since create."""
    total_seconds: float = 0.0
    """Of all steps: from the start of the work to its end."""
    norm_seconds: float = 0.0
    """Of all steps: from the start until the norm was known."""
    grads_down_seconds: float = 0.0
    """Of all steps: copying gradients to the host, as the device timed it."""
    update_seconds: float = 0.0
    """Of all steps: CPU threads updating the host share."""
    params_up_seconds: float = 0.0
    """Of all steps: copying params to the device, as the device timed it."""
    device_update_seconds: float = 0.0
    """Of all steps: the device updating its share."""
    stall_seconds: float = 0.0
    """Of all steps: CPU threads waiting for gradients, a staging slot, the device's update or a
    save."""
    cpu_elements: int = 0
    """Of all steps: elements of the host share that CPU threads updated."""
    streamed_elements: int = 0
    """Of all steps: elements of the host share whose state went through the device."""
    state_up_bytes: int = 0
    """Of all steps: streamed state copied from the host to the device."""
    state_down_bytes: int = 0
    """Of all steps: streamed state copied from the device to the host."""
    state_up_seconds: float = 0.0
    """Of all steps: copying streamed state to the device, as the device timed it."""
    streamed_update_seconds: float = 0.0
    """Of all steps: the device updating the streamed elements."""
    state_down_seconds: float = 0.0
    """Of all steps: copying streamed state back, as the device timed it."""
    cpu_idle_seconds: float = 0.0
    """Of all steps: from the end of the CPU threads' last chunk to that of the last streamed
    chunk."""
    streamed_idle_seconds: float = 0.0
    """Of all steps: from the end of the last streamed chunk to that of the CPU threads' last
    chunk."""
    gave_way_copies: int = 0
    """Chunks of steps, and pieces of moves, that waited on the host until a stash's prefetches that
    were under way had ended (docs/STASH.md)."""
    gave_way_seconds: float = 0.0
    """How long they waited; part of other times above."""
    pushes_ahead_bytes: int = 0
    """A stash's pushes that were queued, and not known to have ended, when a step queued a chunk to
    the host: the sum over all its chunks."""
    early_elements: int = 0
    """Of all steps: elements of the host share that had been updated before the step; they count
    neither as cpu_elements nor as streamed_elements."""
    undone_elements: int = 0
    """Of all steps: elements updated early and undone, since the step before."""
    disk_read_bytes: int = 0
    """From the files in options.disk_paths, since commit."""
    disk_written_bytes: int = 0
    """To them."""
