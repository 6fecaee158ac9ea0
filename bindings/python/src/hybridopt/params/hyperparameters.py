"""The hyperparameters of a param group, as the library takes them."""

from __future__ import annotations

from typing import Any

from .. import abi


def hyperparameters_of(algorithm: int, index: int, group: dict[str, Any]) -> dict[str, Any]:
    """The fields of offload_group_t that the algorithm reads."""
    return {name: _field(name, index, group) for name in abi.ALGORITHMS[algorithm].reads}


def check_flags(algorithm: int, index: int, group: dict[str, Any]) -> None:
    """Refuses a flag that is neither True nor False, and one that the algorithm does not use: torch would say
    nothing of it."""
    row = abi.ALGORITHMS[algorithm]
    for name in abi.GROUP_FLAGS:
        value = group.get(name, False)
        if value not in (False, True):
            raise ValueError(f"param group {index} has {name}={value!r}, expected True or False")
        if value and name not in row.reads:
            raise ValueError(
                f"param group {index} has {name}={value!r}, but {row.name} does not use it; leave it out"
            )


def _field(name: str, index: int, group: dict[str, Any]) -> float | int:
    if name in abi.GROUP_FLAGS:
        return int(group.get(name, False)) if _counts(name, group) else 0
    key = "betas" if name in ("beta1", "beta2") else name
    value = group[key]
    try:
        if key == "betas":
            return float(value[int(name[-1]) - 1])
        number = float(value) if _counts(name, group) else 0.0
    except (TypeError, ValueError, IndexError):
        expected = "two numbers" if key == "betas" else "a number"
        raise ValueError(f"param group {index} has {key}={value!r}, expected {expected}") from None
    if name == "lr" and -1e-12 < number < 0.0:
        return 0.0  # schedulers that go to 0 in steps of their own end a rounding error below it
    if name == "eps" and number == 0.0:
        return 1e-45  # torch takes 0; the library makes the smallest fp32 number of what is below that
    return number


def _counts(name: str, group: dict[str, Any]) -> bool:
    """Without momentum torch's SGD ignores what acts on it."""
    return name not in ("dampening", "nesterov") or float(group["momentum"]) > 0
