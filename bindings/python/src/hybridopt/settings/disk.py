"""The options of state on disk: checks each of them, and refuses options that contradict."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..base.checks import listed, shown
from .placement import AUTO


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
