"""What the library will take, has taken and has done, as dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from . import abi

_STATE_KINDS = {
    abi.OFFLOAD_STATE_MASTER: "master_param",
    abi.OFFLOAD_STATE_EXP_AVG: "exp_avg",
    abi.OFFLOAD_STATE_EXP_AVG_SQ: "exp_avg_sq",
    abi.OFFLOAD_STATE_MOMENTUM_BUFFER: "momentum_buffer",
    abi.OFFLOAD_STATE_SUM: "sum",
    abi.OFFLOAD_STATE_MASTER_LOW: "master_low",
}


@dataclass(frozen=True)
class Plan:
    """Every byte that the first step takes, or has taken (offload_plan_t)."""

    param_count: int
    element_count: int
    host_elements: int
    device_elements: int
    host_state_bytes: dict[str, int]
    device_state_bytes: dict[str, int]
    staging_bytes: int
    host_params_bytes: int
    host_grads_bytes: int
    host_swap_bytes: int
    host_scratch_bytes: int
    device_scratch_bytes: int
    host_bytes: int
    device_bytes: int
    device_free_bytes: int
    host_available_bytes: int
    chunk_count: int
    grads_down_bytes: int
    params_up_bytes: int
    fits: bool
    numa_bytes: dict[int, int]  # of host_bytes, on each NUMA node
    numa_unknown_bytes: int
    device_ring_bytes: int  # of device_scratch_bytes: the ring that state on the host goes through
    pinned_state_bytes: int  # of host_bytes: pinned for that ring
    host_early_bytes: int  # of host_bytes: for early updates
    offload_fraction: float
    reason: str  # why the fraction is what it is


@dataclass(frozen=True)
class Stats:
    """Totals since the optimizer was made, and what is held now (offload_stats_t).

    A load is no step: after load_checkpoint() and load_state_dict() `steps_applied` goes on from what this
    optimizer has done itself. The step count of each param is in `state`, and last_step().step goes on from the
    checkpoint's."""

    queued: int = 0
    steps_applied: int = 0
    steps_skipped: int = 0
    host_bytes: int = 0
    device_bytes: int = 0
    staging_bytes: int = 0
    params_on_device_bytes: int = 0
    params_on_host_bytes: int = 0
    grads_on_device_bytes: int = 0
    grads_on_host_bytes: int = 0
    states_on_device_bytes: int = 0
    states_on_host_bytes: int = 0
    grads_down_bytes: int = 0
    params_up_bytes: int = 0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    total_seconds: float = 0.0
    norm_seconds: float = 0.0
    grads_down_seconds: float = 0.0
    update_seconds: float = 0.0
    params_up_seconds: float = 0.0
    device_update_seconds: float = 0.0
    stall_seconds: float = 0.0
    cpu_elements: int = 0
    streamed_elements: int = 0
    state_up_bytes: int = 0
    state_down_bytes: int = 0
    state_up_seconds: float = 0.0
    streamed_update_seconds: float = 0.0
    state_down_seconds: float = 0.0
    cpu_idle_seconds: float = 0.0
    streamed_idle_seconds: float = 0.0
    gave_way_copies: int = 0
    gave_way_seconds: float = 0.0
    pushes_ahead_bytes: int = 0
    early_elements: int = 0
    undone_elements: int = 0


@dataclass(frozen=True)
class StepResult:
    """What the last step did (offload_step_result_t)."""

    skipped: bool
    step: int
    grad_norm: float
    grad_clip: float
    total_seconds: float
    norm_seconds: float
    grads_down_seconds: float
    update_seconds: float
    params_up_seconds: float
    device_update_seconds: float
    stall_seconds: float
    grads_down_bytes: int
    params_up_bytes: int
    cpu_elements: int
    streamed_elements: int
    state_up_bytes: int
    state_down_bytes: int
    state_up_seconds: float
    streamed_update_seconds: float
    state_down_seconds: float
    cpu_idle_seconds: float
    streamed_idle_seconds: float
    early_elements: int
    undone_elements: int


Described = TypeVar("Described", Plan, Stats, StepResult)


def described(cls: type[Described], struct: abi.Struct, **extra: Any) -> Described:
    """The dataclass of a struct: fields of the same names, more readable where that is possible."""
    values = dict(extra)
    for name, converted in _CONVERSIONS[cls]:
        if name not in values:
            value = getattr(struct, name)
            values[name] = value if converted is None else converted(value)
    return cls(**values)


def _conversions_of(cls: type) -> list[tuple[str, Callable[[Any], Any] | None]]:
    """The fields of a dataclass, and what makes a struct's value readable (None: it is readable)."""
    conversions: list[tuple[str, Callable[[Any], Any] | None]] = []
    for field in dataclasses.fields(cls):
        if field.type == "dict[str, int]":
            conversions.append((field.name, _by_kind))
        elif field.name == "numa_bytes":
            conversions.append((field.name, _by_node))
        else:
            conversions.append((field.name, bool if field.type == "bool" else None))
    return conversions


def _by_kind(counts: Any) -> dict[str, int]:
    return {name: counts[kind] for kind, name in _STATE_KINDS.items() if counts[kind] > 0}


def _by_node(counts: Any) -> dict[int, int]:
    return {node: count for node, count in enumerate(counts) if count > 0}


_CONVERSIONS: dict[type, list[tuple[str, Callable[[Any], Any] | None]]] = {
    cls: _conversions_of(cls) for cls in (Plan, Stats, StepResult)
}
