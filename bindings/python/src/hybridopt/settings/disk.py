"""The options of state on disk: checks each of them, and refuses options that contradict."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..base.checks import is_number, listed, shown

AUTO = "auto"


def fraction_of(name: str, value: Any) -> float:
    if not is_number(value) or not 0.0 <= value <= 1.0:
        raise ValueError(f"Invalid {name}: {shown(value)}, expected 0.0 (no state on disk) to 1.0 (all of it)")
    return float(value)


def paths_of(name: str, value: Any) -> tuple[str, ...]:
    """The directories that the option names."""
    paths = [value] if isinstance(value, (str, os.PathLike)) else listed(() if value is None else value)
    texts = [os.fspath(path) if isinstance(path, (str, os.PathLike)) else None for path in paths or ()]
    is_empty = value is not None and not texts
    if paths is None or is_empty or not all(isinstance(text, str) and text and ":" not in text for text in texts):
        raise ValueError(
            f"Invalid {name}: {shown(value)}, expected a directory, or several, one on each drive, without ':' in their "
            "names"
        )
    return tuple(text for text in texts if isinstance(text, str))


def joined(paths: Any) -> bytes | None:
    """The directories that paths_of() has returned, as the library takes them."""
    return os.fsencode(":".join(paths)) if paths else None


def check(options: Mapping[str, Any]) -> None:
    """Raises if the options of an optimizer contradict each other."""
    fraction, paths, ring_bytes = options["disk_fraction"], options["disk_paths"], options["disk_ring_bytes"]
    if fraction == 0.0:
        if paths:
            raise ValueError(
                f"disk_fraction is 0 with disk_paths={shown(paths)}, expected a share above 0.0; set it, or leave "
                "disk_paths out"
            )
        if ring_bytes:
            raise ValueError(
                f"disk_ring_bytes is {ring_bytes} with disk_fraction=0, expected 0; set disk_fraction, or leave "
                "disk_ring_bytes out"
            )
        return
    if not paths:
        raise ValueError(f"disk_paths is {paths or None} with disk_fraction={fraction}, expected a directory, or several")
    check_offload_fraction(options["offload_fraction"], fraction)
    for name, rest, instead in (
        ("host_executors", ("auto", "cpu"), "CPU threads update state on disk; leave host_executors out"),
        ("early_update_bytes", (0,), "state on disk is not updated before its step; leave early_update_bytes out"),
        ("save_buffer_bytes", (0, AUTO), "a step waits until a save has read state on disk; leave save_buffer_bytes out"),
    ):
        if (value := options[name]) not in rest:
            raise ValueError(f"{name}={shown(value)} with disk_fraction={fraction}: {instead}, or disk_fraction")


def check_offload_fraction(offload_fraction: float | str, disk_fraction: float) -> None:
    """Raises if less state is off the device than is to be on disk."""
    if offload_fraction == AUTO:
        raise ValueError(
            f"offload_fraction='auto' with disk_fraction={disk_fraction}: with state on disk the share on the device "
            "does not change; give offload_fraction a number"
        )
    if disk_fraction > offload_fraction:  # type: ignore[operator]
        raise ValueError(
            f"disk_fraction={disk_fraction} with offload_fraction={offload_fraction}, expected at most that: the state "
            "on disk is a part of what is not on the device"
        )
