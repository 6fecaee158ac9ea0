"""The hyperparameters of a param group, as the library takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import abi
from ..base.checks import is_number, is_switch, is_whole, shown

# The fields of offload_group_t that are one number of a tuple: the tuple, and the place in it.
IN_TUPLES = {
    "beta1": ("betas", 0),
    "beta2": ("betas", 1),
}
LENGTHS = {"betas": 2}
TRIPLES_MOST = 10  # of the library
# What Muon multiplies the learning rate of a matrix by, as update_rms of the library.
ADJUSTMENTS = {None: 0.0, "original": 0.0, "match_rms_adamw": 0.2}

# Default hyperparameters of each algorithm that a group may name, as in hybridopt's class for it. lr, weight_decay
# and maximize are not here: every algorithm has them, and the optimizer's arguments give them.
OWN_DEFAULTS: dict[int, dict[str, Any]] = {
    abi.OFFLOAD_ADAMW: {"betas": (0.9, 0.999), "eps": 1e-8},
    abi.OFFLOAD_ADAM: {"betas": (0.9, 0.999), "eps": 1e-8},
    abi.OFFLOAD_SGD: {"momentum": 0, "dampening": 0, "nesterov": False},
    abi.OFFLOAD_LION: {"betas": (0.9, 0.99)},
    abi.OFFLOAD_ADAGRAD: {"lr_decay": 0, "initial_accumulator_value": 0, "eps": 1e-10},
    abi.OFFLOAD_SIGNUM: {"momentum": 0.9},
    abi.OFFLOAD_MUON: {
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": (3.4445, -4.775, 2.0315),
        "eps": 1e-7,
        "ns_steps": 5,
        "adjust_lr_fn": None,
        "update_rms": None,
    },
}
_BY_NAME = {abi.ALGORITHMS[value].name.lower(): value for value in OWN_DEFAULTS}


def named_algorithm(index: int, group: dict[str, Any]) -> int | None:
    """The algorithm (enum offload_algorithm) that a param group names; None if it names none."""
    name = group.get("algorithm")
    if name is None:
        return None
    if not isinstance(name, str) or name.lower() not in _BY_NAME:
        names = ", ".join(map(repr, _BY_NAME))
        raise ValueError(f"param group {index} has algorithm={shown(name)}, expected one of {names}")
    return _BY_NAME[name.lower()]


def with_own_defaults(index: int, group: dict[str, Any]) -> dict[str, Any]:
    """The group with the hyperparameters of the algorithm that it names. What the optimizer's own algorithm has and
    this one has not is off."""
    algorithm = named_algorithm(index, group) if isinstance(group, dict) else None
    if algorithm is None:
        return group  # torch refuses what is no dict
    off = {name: False for name in abi.GROUP_FLAGS if name not in abi.ALGORITHMS[algorithm].reads}
    return {**off, **OWN_DEFAULTS[algorithm], **group}


def hyperparameters_of(algorithm: int, index: int, group: dict[str, Any]) -> dict[str, Any]:
    """The algorithm and the fields of offload_group_t that it reads. Refuses values that are not numbers, flags that are
    neither True nor False, and flags that the algorithm does not use: torch would accept these silently."""
    row = abi.ALGORITHMS[algorithm]
    fields: dict[str, Any] = {"algorithm": algorithm}
    for name in abi.GROUP_FLAGS:
        value = group.get(name, False)
        if not is_switch(value):
            raise ValueError(f"param group {index} has {name}={shown(value)}, expected True or False")
        if value and name not in row.reads:
            raise ValueError(
                f"param group {index} has {name}={shown(value)}, but {row.name} does not use it; leave it out"
            )
    fields.update((name, _field_of(name, index, group)) for name in row.reads)
    if algorithm == abi.OFFLOAD_SGD and fields["momentum"] == 0.0:  # then torch ignores dampening, nesterov
        fields.update(dampening=0.0, nesterov=0)
    if algorithm == abi.OFFLOAD_MUON and fields["momentum"] == 0.0:  # then nesterov changes nothing
        fields["nesterov"] = 0
    return fields


def _field_of(name: str, index: int, group: dict[str, Any]) -> Any:
    """The value of a field of offload_group_t."""
    if name in abi.GROUP_FLAGS:
        return int(group.get(name, False))
    if name == "ns_steps":
        return _ns_steps_of(index, group)
    if name == "ns_coefficients":
        return _triples_of(index, group)
    if name == "update_rms":
        return _update_rms_of(index, group)
    if name in IN_TUPLES:
        key, place = IN_TUPLES[name]
        return _numbers_of(index, group, key)[place]
    return _library_number(name, *_numbers_of(index, group, name))


def _ns_steps_of(index: int, group: dict[str, Any]) -> int:
    steps = group.get("ns_steps")
    if isinstance(steps, int) and is_whole(steps, 1, 100):
        return steps
    raise ValueError(f"param group {index} has ns_steps={shown(steps)}, expected a whole number from 1 to 99")


def _triples_of(index: int, group: dict[str, Any]) -> tuple[tuple[float, ...], ...]:
    name = "ns_coefficients"
    triples = _triples_in(group.get(name))
    if triples is None:
        raise ValueError(f"param group {index} has {name}={shown(group.get(name))}, expected {_expected(name)}")
    steps = _ns_steps_of(index, group)
    if len(triples) > steps:
        raise ValueError(
            f"param group {index} has {len(triples)} triples in ns_coefficients, but ns_steps={steps}; set ns_steps to at "
            f"least {len(triples)}, or leave out triples"
        )
    return triples


def _update_rms_of(index: int, group: dict[str, Any]) -> float:
    name, given = group.get("adjust_lr_fn"), group.get("update_rms")
    if name is not None and (not isinstance(name, str) or name not in ADJUSTMENTS):
        raise ValueError(
            f"param group {index} has adjust_lr_fn={shown(name)}, expected None, 'original' or 'match_rms_adamw'"
        )
    if given is None:
        return ADJUSTMENTS[name]
    number = _number(given)
    if number is None or not 0.0 < number < math.inf:
        raise ValueError(
            f"param group {index} has update_rms={shown(given)}, expected None or a number that is finite and above 0"
        )
    if name == "original":
        raise ValueError(
            f"param group {index} has update_rms={shown(given)} and adjust_lr_fn='original', which has another scale; set "
            "adjust_lr_fn=None, or leave out update_rms"
        )
    return number


def check_arguments(**arguments: Any) -> None:
    """Refuses arguments of a constructor that are no numbers although torch would compare them with numbers. Of a learning
    rate that is a tensor torch itself checks the number of elements."""
    for name, value in arguments.items():
        numbers = _triples_in(value) if name == "ns_coefficients" else _numbers_in(name, value)
        if numbers is None and not (name == "lr" and isinstance(value, Tensor)):
            raise ValueError(f"Invalid {name}: {shown(value)}, expected {_expected(name)}")


def _numbers_in(name: str, value: Any) -> list[float] | None:
    """The numbers of a hyperparameter: as many as LENGTHS says, else one. None if their number is wrong."""
    if name not in LENGTHS:
        number = _number(value)
        return None if number is None else [number]
    return _sequence(value, LENGTHS[name])


def _sequence(value: Any, length: int) -> list[float] | None:
    if isinstance(value, (Mapping, str, bytes)) or not hasattr(value, "__getitem__"):
        return None
    try:
        numbers = [_number(each) for each in value]
    except TypeError:  # a tensor without dimensions
        return None
    found = [number for number in numbers if number is not None]
    return found if len(found) == len(numbers) == length else None


def _triples_in(value: Any) -> tuple[tuple[float, ...], ...] | None:
    """The coefficients of each step, of one triple or of a list of them. A triple of zeros would end the library's
    list."""
    one = _sequence(value, 3)
    if one is None and not isinstance(value, (list, tuple)):
        return None
    triples = [one] if one is not None else [_sequence(each, 3) for each in value]
    found = tuple(tuple(triple) for triple in triples if triple is not None and any(triple))
    return found if len(found) == len(triples) and 1 <= len(found) <= TRIPLES_MOST else None


def _expected(name: str) -> str:
    triples = f"three numbers, not all of them 0, or a list of 1 to {TRIPLES_MOST} such triples, one for each step"
    return {"betas": "two numbers", "ns_coefficients": triples}.get(name, "a number")


def _numbers_of(index: int, group: dict[str, Any], name: str) -> list[float]:
    if name not in group:
        raise ValueError(f"param group {index} has no {name!r}, expected {_expected(name)}")
    numbers = _numbers_in(name, group[name])
    if numbers is None:
        raise ValueError(f"param group {index} has {name}={shown(group[name])}, expected {_expected(name)}")
    return numbers


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.dtype == torch.bool or value.is_complex():
            return None
        value = value.item()
    try:
        return float(value) if is_number(value) else None
    except OverflowError:
        return None


def _library_number(name: str, number: float) -> float:
    if name == "lr" and -1e-12 < number < 0.0:
        return 0.0  # schedulers that go to 0 may end below it by a rounding error
    if name == "eps" and number == 0.0:
        return 1e-45  # torch accepts 0; the library replaces smaller values by the smallest fp32 number
    return number
