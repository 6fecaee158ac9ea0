"""The options of state on disk: checks each of them, and refuses options that contradict."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..base.checks import is_number, listed, shown
from .placement import AUTO


def fraction_of(name: str, value: Any) -> float:
    if not is_number(value) or not 0.0 <= value <= 1.0:
        raise ValueError(f"Invalid {name}: {shown(value)}, expected 0.0 (no state on disk) to 1.0 (all of it)")
    return float(value)


def paths_of(name: str, value: Any) -> tuple[str, ...]:
    """The directories that the option names."""
    if value is None:
        return ()
    paths = [value] if isinstance(value, (str, os.PathLike)) else listed(value) or ()
    names = [os.fspath(path) if isinstance(path, (str, os.PathLike)) else None for path in paths]
    texts = tuple(name for name in names if isinstance(name, str) and name and ":" not in name)
    if not texts or len(texts) < len(names):
        raise ValueError(
            f"Invalid {name}: {shown(value)}, expected a directory, or several, one on each drive, without ':' in their "
            "names"
        )
    return texts


def joined(paths: Any) -> bytes | None:
    """The directories that paths_of() has returned, as the library takes them."""
    return os.fsencode(":".join(paths)) if paths else None


def check(options: Mapping[str, Any]) -> None:
    """Raises if the options of an optimizer contradict each other."""
    fraction, paths = options["disk_fraction"], options["disk_paths"]
    check_fractions(options["offload_fraction"], fraction, paths)
    if not paths:
        if ring_bytes := options["disk_ring_bytes"]:
            raise ValueError(
                f"disk_ring_bytes is {ring_bytes} without disk_paths, expected 0; name a directory there, or leave "
                "disk_ring_bytes out"
            )
        return
    if (save_buffer_bytes := options["save_buffer_bytes"]) not in (0, AUTO):
        raise ValueError(
            f"save_buffer_bytes={shown(save_buffer_bytes)} with disk_paths={shown(paths)}: a step waits until a save has "
            "read state on disk; leave save_buffer_bytes out, or disk_paths"
        )


def check_fractions(offload_fraction: float | str, disk_fraction: float, paths: Any) -> None:
    """Raises if there is no directory for the state on disk, or if less state is off the device than is to be there."""
    if disk_fraction > 0.0 and not paths:
        raise ValueError(
            f"disk_paths is {paths or None} with disk_fraction={disk_fraction}, expected a directory, or several, where "
            "the optimizer is made"
        )
    if paths and offload_fraction == AUTO:
        raise ValueError(
            f"offload_fraction='auto' with disk_paths={shown(paths)}: it moves state between the device and the host "
            "alone; give offload_fraction a number"
        )
    if offload_fraction != AUTO and disk_fraction > offload_fraction:  # type: ignore[operator]
        raise ValueError(
            f"disk_fraction={disk_fraction} with offload_fraction={offload_fraction}, expected at most that: the state "
            "on disk is a part of what is not on the device"
        )
