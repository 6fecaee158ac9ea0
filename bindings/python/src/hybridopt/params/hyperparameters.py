"""The hyperparameters of a param group, as the library takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import abi
from ..base.checks import is_number, is_switch, shown

BETAS = ("beta1", "beta2")


def hyperparameters_of(algorithm: int, index: int, group: dict[str, Any]) -> dict[str, Any]:
    """The fields of offload_group_t that the algorithm reads. Refuses values that are not numbers, flags that are
    neither True nor False, and flags that the algorithm does not use: torch would accept these silently."""
    row = abi.ALGORITHMS[algorithm]
    fields: dict[str, Any] = {}
    for name in abi.GROUP_FLAGS:
        value = group.get(name, False)
        if not is_switch(value):
            raise ValueError(f"param group {index} has {name}={shown(value)}, expected True or False")
        if value and name not in row.reads:
            raise ValueError(
                f"param group {index} has {name}={value!r}, but {row.name} does not use it; leave it out"
            )
    for name in row.reads:
        if name in abi.GROUP_FLAGS:
            fields[name] = int(group.get(name, False))
        elif name in BETAS:
            fields[name] = _numbers_of(index, group, "betas")[BETAS.index(name)]
        else:
            fields[name] = _library_number(name, *_numbers_of(index, group, name))
    if algorithm == abi.OFFLOAD_SGD and fields["momentum"] == 0.0:  # then torch ignores dampening, nesterov
        fields.update(dampening=0.0, nesterov=0)
    return fields


def check_arguments(**arguments: Any) -> None:
    """Refuses arguments of a constructor that are no numbers although torch would compare them with numbers. For
    tensors torch itself checks the number of elements."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor) and _numbers_in(name, value) is None:
            raise ValueError(f"Invalid {name}: {shown(value)}, expected {_expected(name)}")


def _numbers_in(name: str, value: Any) -> list[float] | None:
    """The numbers of a hyperparameter: two for `betas`, one for all others. None if their number is wrong."""
    if name != "betas":
        number = _number(value)
        return None if number is None else [number]
    if isinstance(value, (Mapping, str, bytes)) or not hasattr(value, "__getitem__"):
        return None
    try:
        numbers = [_number(each) for each in value]
    except TypeError:  # a tensor without dimensions
        return None
    found = [number for number in numbers if number is not None]
    return found if len(found) == len(numbers) == len(BETAS) else None


def _expected(name: str) -> str:
    return "two numbers" if name == "betas" else "a number"


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
