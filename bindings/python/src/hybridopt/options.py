"""The keyword arguments that all optimizers here have beside torch's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypedDict, TypeVar

import torch
from torch import nn

from . import abi, placement
from .local_ranks import check_local_rank, mask_of

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


class OffloadOptions(TypedDict, total=False):
    """Keyword arguments that all optimizers here have beside torch's.

    Options:
        offload_fraction (float or "auto", default 1.0): share of the state's elements that lives on the
            host, 0.0 to 1.0. "auto" leaves as much on the device as device_budget_bytes allows, or
            without that as the device has left after two steps.
        device_budget_bytes (int, default None): with "auto", how many bytes of the device the state may
            take. With host_executors "auto" state then streams through the GPU only if the ring for that
            takes no more than an eighth of them. None: what the device has left after two steps; all of
            it goes back to the host if torch runs out of memory later.
        device_headroom (float, default None): with "auto" and without a budget, the share of the device
            that stays free, 0.0 to below 1.0. None is 0.1.
        state_dtype (torch.dtype or str, default torch.float32): of moments; torch.bfloat16 is rounded at
            random so that small changes are not lost. As a string "float32", "fp32", "bfloat16" or
            "bf16". Masters stay in fp32.
        master_layout (str, default "fp32"): of the fp32 masters of bf16 params, "fp32", 4 bytes an
            element, or "split", 2 bytes: the param is the upper half, and only the lower one is kept.
            The same masters. A param differs only where its master lies exactly between two bf16
            numbers, because these ties are rounded away from zero.
        host_executors (str, default "auto"): who updates the host's share of params on a GPU. "auto": CPU
            threads and, where the host's state can be pinned, the GPU, through which state then streams;
            "cpu" or "streamed": one of them alone. The same bits.
        early_update_bytes (int, default 0): pinned host memory for early updates on a GPU, which need
            hook_gradients(): CPU threads update params while the backward pass still runs, for the case
            that the step neither clips nor is skipped. If it does, they are undone. The same bits.
        check_weights (bool, default None): True compares every param in 16 bits with its master before
            it is updated, so that no write is missed. On the CPU the step does that as it goes, on a GPU
            both are read once more. False looks at those whose version, or 512 bytes of content, tell of
            a write. None is True for params on the CPU, False for those on a GPU.
        threads (int, default 0): CPU threads that update the host's share; 0 is one per CPU of this rank.
        numa_policy (str, default "near"): where host memory lies on a machine of several NUMA nodes,
            "near" the update threads or "interleaved" page by page over all nodes that this process may
            use. Where that cannot be had, a line on stderr says why.
        local_rank (int, default None): the number of this rank among those that share the host's CPUs.
            None: ranks of the process group count themselves; without one LOCAL_RANK says.
        local_world (int, default None): how many ranks share the host's CPUs; 1 for a rank with CPUs of
            its own. None: as counted, else as LOCAL_WORLD_SIZE says.
        numa_nodes (ints, default None): the NUMA nodes of update threads and host memory. None: those
            near the device.
        pin (bool, default True): staging memory that the system does not pin is an error. False: it is
            then used unpinned, which is slower.
        max_grad_norm (float, default None): clips the global norm of the gradients inside the step, as
            torch.nn.utils.clip_grad_norm_ does before it. None: no clipping.
        movable (str or strs, default ()): what offload() may move, one or some of "params", "grads" and
            "states". Room for it on the host is taken with the state.
        overlap (nn.Module, default None): the model. step() returns at once, and the model's modules wait
            for their params (OffloadOptimizer.overlap). None: step() waits.
        process_group (ProcessGroup, default None): the ranks that agree on norm, clipping and skipped
            steps. None: those of the DTensors' largest mesh, or this process alone.
        replica_group (ProcessGroup, default None): the ranks that hold the same params, those that
            DistributedDataParallel averages over. None: those that the DTensors' meshes connect.
        comm_timeout_seconds (float, default 600.0): a rank that does not answer for so long has failed.
    """

    offload_fraction: float | str
    device_budget_bytes: int | None
    device_headroom: float | None
    state_dtype: torch.dtype | str
    master_layout: str
    host_executors: str
    early_update_bytes: int
    check_weights: bool | None
    threads: int
    numa_policy: str
    local_rank: int | None
    local_world: int | None
    numa_nodes: Iterable[int] | None
    pin: bool
    max_grad_norm: float | None
    movable: str | Iterable[str]
    overlap: nn.Module | None
    process_group: Any
    replica_group: Any
    comm_timeout_seconds: float


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
STATE_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}
NUMA_POLICIES = {"near": abi.OFFLOAD_NUMA_NEAR, "interleaved": abi.OFFLOAD_NUMA_INTERLEAVED}
DEFAULT_OPTIONS: OffloadOptions = {
    "offload_fraction": 1.0,
    "device_budget_bytes": None,
    "device_headroom": None,
    "state_dtype": torch.float32,
    "master_layout": "fp32",
    "host_executors": "auto",
    "early_update_bytes": 0,
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


def state_dtype_of(state_dtype: torch.dtype | str) -> torch.dtype:
    """The dtype of moments, which configuration files name by a string."""
    for name, dtype in STATE_DTYPES.items():
        if state_dtype in (dtype, name, f"torch.{name}"):
            return dtype
    raise ValueError(
        f"Invalid state_dtype: {state_dtype!r}, expected torch.float32 or torch.bfloat16, or one of the "
        f"strings {', '.join(map(repr, STATE_DTYPES))}"
    )


def with_options(cls: type[Optimizer]) -> type[Optimizer]:
    """A class decorator: the docstring lists the options of OffloadOptions too."""
    if cls.__doc__ and OffloadOptions.__doc__:  # python -OO has neither
        cls.__doc__ = cls.__doc__.rstrip() + "\n" + OffloadOptions.__doc__.partition("\n")[2]
    return cls


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
    merged["state_dtype"] = state_dtype_of(merged["state_dtype"])
    if merged["master_layout"] not in MASTER_LAYOUTS:
        raise ValueError(
            f"Invalid master_layout: {merged['master_layout']!r}, expected 'fp32' or 'split'"
        )
    if merged["host_executors"] not in HOST_EXECUTORS:
        raise ValueError(
            f"Invalid host_executors: {merged['host_executors']!r}, expected 'auto', 'cpu' or 'streamed'"
        )
    early_bytes = merged["early_update_bytes"]
    if not isinstance(early_bytes, int) or not 0 <= early_bytes < 1 << 64:
        raise ValueError(
            f"Invalid early_update_bytes: {early_bytes!r}, expected a number of bytes, or 0 for no early "
            "updates"
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
