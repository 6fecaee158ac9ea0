"""The library's plans and statistics as dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from .. import abi
from ..abi.reports import ByTier, PlannedMemory, StepResult, Totals

_STATE_KINDS = {
    abi.OFFLOAD_STATE_MASTER: "master_param",
    abi.OFFLOAD_STATE_EXP_AVG: "exp_avg",
    abi.OFFLOAD_STATE_EXP_AVG_SQ: "exp_avg_sq",
    abi.OFFLOAD_STATE_MOMENTUM_BUFFER: "momentum_buffer",
    abi.OFFLOAD_STATE_SUM: "sum",
    abi.OFFLOAD_STATE_MASTER_LOW: "master_low",
}


@dataclass(frozen=True)
class Plan(PlannedMemory):
    """Every byte that the first step takes, or has taken (offload_plan_t)."""

    offload_fraction: float
    reason: str  # why the fraction is what it is


@dataclass(frozen=True)
class Stats(Totals):
    """Totals since the optimizer was made, and what is held now (offload_stats_t).

    A load is no step: after load_checkpoint() and load_state_dict() `steps_applied` goes on from what this
    optimizer has done itself. The step count of each param is in `state`, and last_step().step goes on from the
    checkpoint's."""


_TIERS = len(dataclasses.fields(ByTier))

Described = TypeVar("Described", Plan, Stats, StepResult)


def described(cls: type[Described], struct: abi.Struct, **extra: Any) -> Described:
    """The dataclass of a struct, with fields of the same names, in a more readable form if there is one."""
    values = dict(extra)
    for name, converted in _CONVERSIONS[cls]:
        if name not in values:
            value = getattr(struct, name)
            values[name] = value if converted is None else converted(value)
    return cls(**values)


def _conversions_of(cls: type) -> list[tuple[str, Callable[[Any], Any] | None]]:
    """The fields of a dataclass, each with the converter of its value (None: it is not converted)."""
    conversions: list[tuple[str, Callable[[Any], Any] | None]] = []
    for field in dataclasses.fields(cls):
        if field.type == "dict[str, int]":
            conversions.append((field.name, _by_kind))
        elif field.type == "dict[int, int]":
            conversions.append((field.name, _by_node))
        elif field.type == "ByTier[int]":
            conversions.append((field.name, by_tier))
        elif field.type == "ByTier[dict[str, int]]":
            conversions.append((field.name, _by_tier_and_kind))
        else:
            conversions.append((field.name, bool if field.type == "bool" else None))
    return conversions


def _by_kind(counts: Any) -> dict[str, int]:
    return {name: counts[kind] for kind, name in _STATE_KINDS.items() if counts[kind] > 0}


def by_tier(counts: Any) -> ByTier[int]:
    return ByTier(*counts[:_TIERS])


def _by_tier_and_kind(counts: Any) -> ByTier[dict[str, int]]:
    return ByTier(*map(_by_kind, counts[:_TIERS]))


def _by_node(counts: Any) -> dict[int, int]:
    return {node: count for node, count in enumerate(counts) if count > 0}


_CONVERSIONS: dict[type, list[tuple[str, Callable[[Any], Any] | None]]] = {
    cls: _conversions_of(cls) for cls in (Plan, Stats, StepResult)
}
