"""The keyword arguments that all optimizers here have beside torch's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypedDict, TypeVar

import torch
from torch import nn

from . import abi, placement
from .checks import check_word, is_number, is_whole
from .local_ranks import check_local_rank, nodes_of

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
MOST_THREADS = 1024  # of the library
MOST_SECONDS = 1e9  # the library counts nanoseconds in 63 bits
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


def movable_words(movable: Any) -> tuple[str, ...]:
    """The words of the `movable` option, which may be one word or several."""
    words = (movable,) if isinstance(movable, str) or not isinstance(movable, Iterable) else tuple(movable)
    for word in words:
        if not isinstance(word, str) or word not in MOVABLE:
            raise ValueError(f"Invalid movable: {word!r}, expected some of {', '.join(MOVABLE)}")
    return words


def movable_bits(words: Iterable[str]) -> int:
    """enum offload_movable, or-ed, for words of the `movable` option."""
    bits = 0
    for word in words:
        bits |= MOVABLE[word]
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
    is_norm = is_number(max_grad_norm) and 0 < max_grad_norm < math.inf  # type: ignore[operator]
    if max_grad_norm is not None and not is_norm:
        raise ValueError(
            f"Invalid max_grad_norm: {max_grad_norm!r}, expected a finite number above 0, or None for no "
            "clipping"
        )


# How an option is changed after the optimizer has been made.
_ASSIGNED_BY = {
    "max_grad_norm": "assign optimizer.max_grad_norm",
    "offload_fraction": "call optimizer.set_offload_fraction()",
    "overlap": "call optimizer.overlap()",
}


def refuse_in_group(index: int, group: dict[str, Any]) -> None:
    """Options hold for the whole optimizer; torch would keep them in a param group without a word."""
    if DEFAULT_OPTIONS.keys().isdisjoint(group):
        return
    name = next(name for name in DEFAULT_OPTIONS if name in group)
    way_out = _ASSIGNED_BY.get(name, "give it to the constructor")
    raise ValueError(
        f"param group {index} has {name}={group[name]!r}, an option of the whole optimizer, which has no effect in "
        f"a group; {way_out}, or make two optimizers, and delete the group's {name!r}"
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
    check_word("master_layout", merged["master_layout"], MASTER_LAYOUTS)
    check_word("host_executors", merged["host_executors"], HOST_EXECUTORS)
    check_word("numa_policy", merged["numa_policy"], NUMA_POLICIES)
    _check_numbers(merged)
    _check_switches(merged)
    _check_groups(merged)
    check_local_rank(merged["local_rank"], merged["local_world"])
    merged["numa_nodes"] = nodes_of(merged["numa_nodes"])
    merged["movable"] = movable_words(merged["movable"])
    return merged


def _check_numbers(options: OffloadOptions) -> None:
    early_bytes, threads = options["early_update_bytes"], options["threads"]
    if not is_whole(early_bytes, 0, 1 << 64):
        raise ValueError(
            f"Invalid early_update_bytes: {early_bytes!r}, expected a number of bytes, or 0 for no early "
            "updates"
        )
    if not is_whole(threads, 0, MOST_THREADS + 1):
        raise ValueError(
            f"Invalid threads: {threads!r}, expected a whole number up to {MOST_THREADS}, or 0 for one thread "
            "per CPU of this rank"
        )
    seconds = options["comm_timeout_seconds"]
    if not is_number(seconds) or not 0 < seconds < MOST_SECONDS:
        raise ValueError(
            f"Invalid comm_timeout_seconds: {seconds!r}, expected a number of seconds above 0 and below "
            f"{MOST_SECONDS:.0e}"
        )


def _check_switches(options: OffloadOptions) -> None:
    if not isinstance(options["pin"], bool):
        raise ValueError(f"Invalid pin: {options['pin']!r}, expected True or False")
    if options["check_weights"] not in (None, True, False) or is_number(options["check_weights"]):
        raise ValueError(
            f"Invalid check_weights: {options['check_weights']!r}, expected True, False, or None for True on the "
            "CPU and False on a GPU"
        )


def _check_groups(options: OffloadOptions) -> None:
    groups = {"process_group": options["process_group"], "replica_group": options["replica_group"]}
    for name, group in groups.items():
        if group is not None and not _is_process_group(group):
            raise TypeError(
                f"Invalid {name}: {group!r}, expected a torch.distributed.ProcessGroup that this rank is in, such "
                "as torch.distributed.group.WORLD, or None"
            )
    if groups["replica_group"] is not None and groups["process_group"] is None:
        raise ValueError(
            "replica_group without process_group: no other rank is asked; give the group of all ranks "
            "whose gradients make up the norm as process_group too"
        )


def _is_process_group(group: Any) -> bool:
    return torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup)
