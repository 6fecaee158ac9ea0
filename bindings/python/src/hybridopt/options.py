"""The keyword arguments that all optimizers here have beside torch's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypedDict

import torch
from torch import nn

from . import abi, placement
from .local_ranks import check_local_rank, mask_of


class OffloadOptions(TypedDict, total=False):
    """Keyword arguments that all optimizers here have beside torch's."""

    offload_fraction: float | str
    """Share of the state that lives on the host: 1.0 (the default) is all; "auto" leaves as much on
    the device as device_budget_bytes allows, or without that as the device has left after two steps."""
    device_budget_bytes: int | None
    """With "auto": how many bytes of the device the state may take. None (the default): what the device
    has left after two steps. All of it goes back to the host if torch runs out of memory later."""
    device_headroom: float | None
    """With "auto" and without a budget: the share of the device that stays free; None (the default) is
    0.1."""
    state_dtype: torch.dtype
    """Of moments: torch.float32 (the default), or torch.bfloat16, rounded at random so that small
    changes are not lost. Masters stay in fp32."""
    master_layout: str
    """Of the fp32 masters of bf16 params: "fp32" (the default), 4 bytes an element, or "split", 2
    bytes: the param is the upper half, and only the lower one is kept. The same bits. What the host
    keeps of a param on a GPU stays whole."""
    host_executors: str
    """Who updates the host's share of params on a GPU: "auto" (the default), CPU threads and, where the
    host's state can be pinned, the GPU, through which state then streams; "cpu" or "streamed": one of
    them alone. The same bits."""
    check_weights: bool | None
    """True: every param in 16 bits is compared with its master before each step, so that no write is
    missed; it reads both once more. False: where a param's version says that it has been written, or
    512 bytes of it do. None (the default) is True for params on the CPU, False for those on a GPU."""
    threads: int
    """CPU threads that update the host's share; 0 (the default) is one per CPU of this rank."""
    numa_policy: str
    """Where host memory lies on a machine of several NUMA nodes: "near" the update threads (the
    default), or "interleaved" page by page over all nodes that this process may use. Where that
    cannot be had, a line on stderr says why."""
    local_rank: int | None
    """The number of this rank among those that share the host's CPUs. None (the default): ranks of the
    process group count themselves; without one LOCAL_RANK says."""
    local_world: int | None
    """How many ranks share the host's CPUs; 1 for a rank with CPUs of its own. None (the default): as
    counted, else as LOCAL_WORLD_SIZE says."""
    numa_nodes: Iterable[int] | None
    """The NUMA nodes of update threads and host memory. None (the default): those near the device."""
    pin: bool
    """True (the default): staging memory that the system does not pin is an error; False: it is then
    used unpinned, which is slower."""
    max_grad_norm: float | None
    """Clips the global norm of the gradients inside the step, as torch.nn.utils.clip_grad_norm_ does
    before it; None (the default): no clipping."""
    movable: str | Iterable[str]
    """What offload() may move: one or some of "params", "grads" and "states". Room for it on the host is
    taken with the state; none (the default) is taken for nothing."""
    overlap: nn.Module | None
    """The model: step() returns at once, and its modules wait for their params (OffloadOptimizer.overlap).
    None (the default): step() waits."""
    process_group: Any
    """The ranks that agree on norm, clipping and skipped steps, as a torch.distributed.ProcessGroup;
    None (the default): those of the DTensors' largest mesh, or this process alone."""
    replica_group: Any
    """The ranks that hold the same params, as a torch.distributed.ProcessGroup: those that
    DistributedDataParallel averages over. None (the default): those that the DTensors' meshes connect."""
    comm_timeout_seconds: float
    """A rank that does not answer for so long has failed; 600 (the default) is 10 minutes."""


MASTER_LAYOUTS = {"fp32": abi.OFFLOAD_MASTER_FP32, "split": abi.OFFLOAD_MASTER_SPLIT}
HOST_EXECUTORS = {
    "auto": abi.OFFLOAD_EXECUTORS_AUTO,
    "cpu": abi.OFFLOAD_EXECUTORS_CPU,
    "streamed": abi.OFFLOAD_EXECUTORS_STREAMED,
}
MOVABLE = {
    "params": abi.OFFLOAD_MOVABLE_PARAMS,
    "grads": abi.OFFLOAD_MOVABLE_GRADS,
    "states": abi.OFFLOAD_MOVABLE_STATES,
    "accumulate": abi.OFFLOAD_MOVABLE_ACCUMULATE | abi.OFFLOAD_MOVABLE_GRADS,
}
NUMA_POLICIES = {"near": abi.OFFLOAD_NUMA_NEAR, "interleaved": abi.OFFLOAD_NUMA_INTERLEAVED}
DEFAULT_OPTIONS: OffloadOptions = {
    "offload_fraction": 1.0,
    "device_budget_bytes": None,
    "device_headroom": None,
    "state_dtype": torch.float32,
    "master_layout": "fp32",
    "host_executors": "auto",
    "check_weights": None,
    "threads": 0,
    "numa_policy": "near",
    "local_rank": None,
    "local_world": None,
    "numa_nodes": None,
    "pin": True,
    "max_grad_norm": None,
    "movable": (),
    "overlap": None,
    "process_group": None,
    "replica_group": None,
    "comm_timeout_seconds": 600.0,
}


def movable_bits(names: Iterable[str]) -> int:
    """enum offload_movable, or-ed, for words of the `movable` option."""
    bits = 0
    for name in names:
        if name not in MOVABLE:
            raise ValueError(f"Invalid movable: {name!r}, expected some of {', '.join(MOVABLE)}")
        bits |= MOVABLE[name]
    return bits


def check_max_grad_norm(max_grad_norm: float | None) -> None:
    if max_grad_norm is not None and not 0 < max_grad_norm < math.inf:
        raise ValueError(
            f"Invalid max_grad_norm: {max_grad_norm}, expected a finite number above 0, or None for no "
            "clipping"
        )


def refuse_in_group(index: int, group: dict[str, Any]) -> None:
    """Options hold for the whole optimizer; torch would keep them in a param group without a word."""
    for name in DEFAULT_OPTIONS:
        if name in group:
            raise ValueError(
                f"param group {index} has {name}={group[name]!r}, an option of the whole optimizer; give it "
                "to the optimizer itself, or make two optimizers"
            )


def checked(options: OffloadOptions, owner: str) -> OffloadOptions:
    """The options of an optimizer of that class with their defaults; refuses what is none."""
    for name in options:
        if name not in DEFAULT_OPTIONS:
            raise TypeError(
                f"{owner}() got an unexpected keyword argument {name!r}, expected torch's or some of "
                f"{', '.join(DEFAULT_OPTIONS)}"
            )
    merged: OffloadOptions = {**DEFAULT_OPTIONS, **options}
    placement.check(
        merged["offload_fraction"], merged["device_budget_bytes"], merged["device_headroom"]
    )
    check_max_grad_norm(merged["max_grad_norm"])
    if merged["state_dtype"] not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"Invalid state_dtype: {merged['state_dtype']}, expected torch.float32 or "
            "torch.bfloat16"
        )
    if merged["master_layout"] not in MASTER_LAYOUTS:
        raise ValueError(
            f"Invalid master_layout: {merged['master_layout']!r}, expected 'fp32' or 'split'"
        )
    if merged["host_executors"] not in HOST_EXECUTORS:
        raise ValueError(
            f"Invalid host_executors: {merged['host_executors']!r}, expected 'auto', 'cpu' or 'streamed'"
        )
    threads = merged["threads"]
    if not isinstance(threads, int) or threads < 0:
        raise ValueError(
            f"Invalid threads: {threads!r}, expected a whole number, or 0 for one thread per CPU of "
            "this rank"
        )
    if merged["numa_policy"] not in NUMA_POLICIES:
        raise ValueError(
            f"Invalid numa_policy: {merged['numa_policy']!r}, expected 'near' or 'interleaved'"
        )
    if merged["replica_group"] is not None and merged["process_group"] is None:
        raise ValueError(
            "replica_group without process_group: no other rank is asked; give the group of all ranks "
            "whose gradients make up the norm as process_group too"
        )
    check_local_rank(merged["local_rank"], merged["local_world"])
    if merged["numa_nodes"] is not None:
        merged["numa_nodes"] = tuple(merged["numa_nodes"])
    mask_of(merged["numa_nodes"])
    movable = merged["movable"]
    merged["movable"] = (movable,) if isinstance(movable, str) else tuple(movable)
    movable_bits(merged["movable"])
    return merged
