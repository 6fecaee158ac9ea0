"""The arguments of a stash: checks them and translates them."""

from __future__ import annotations

from typing import Any

import torch

from ..abi.handles import Context
from ..base.checks import is_number, shown
from ..ranks.local_ranks import mask_of
from ..settings.contexts import context_for
from ..settings.options import DEFAULT_OPTIONS, NUMA_POLICIES


def device_of(device: torch.device | str | None) -> torch.device:
    count = torch.cuda.device_count()
    if device is None:
        device = "cuda" if count > 0 else "cpu"
    found = _device_or_none(device)
    usable = found is not None and (found.type == "cpu" or (found.type == "cuda" and (found.index or 0) < count))
    if found is None or not usable:
        raise ValueError(
            f"Invalid device: {shown(device)}, expected a torch.device or its name: 'cpu', or 'cuda' with a number below "
            f"the number of GPUs here, which is {count}"
        )
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _device_or_none(device: Any) -> torch.device | None:
    if not isinstance(device, (str, torch.device)):
        return None
    try:
        return torch.device(device)
    except RuntimeError:
        return None


def context_of(device: torch.device, pin: bool) -> Context:
    """The context that optimizers with default options on this device also use."""
    return context_for(
        device,
        None,
        None,
        mask_of(None),
        threads=DEFAULT_OPTIONS["threads"],
        numa_policy=NUMA_POLICIES[DEFAULT_OPTIONS["numa_policy"]],
        allow_pageable=int(not pin),
    )


def fraction_of(fraction: Any) -> float | None:
    if fraction is None:
        return None
    if is_number(fraction) and 0.0 <= fraction <= 1.0:
        return float(fraction)
    raise ValueError(
        f"Invalid fraction: {shown(fraction)}, expected a share of the activations' bytes from 0.0 to 1.0, or None for as "
        "much as the link can hide"
    )


def check_count(name: str, value: Any, least: int, meaning: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"Invalid {name}: {shown(value)}, expected an int: {meaning}")
    if not least <= value < 1 << 63:
        expected = f"at least {least}" if value < least else "less than 2**63"
        raise ValueError(f"Invalid {name}: {shown(value)}, expected {expected}: {meaning}")


def check_key(call: str, key: Any) -> None:
    if not isinstance(key, str):
        raise TypeError(f"{call} got {shown(key)}, expected the name of a program as a string")
