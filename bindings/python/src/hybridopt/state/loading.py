"""Checks that a state_dict comes from an optimizer of the same kind, before anything changes."""

from __future__ import annotations

from typing import Any

from ..params.moments import COUNTED, MOMENTS

_MOMENTS_OF_ANY = {name: None for moments in MOMENTS.values() for name in moments}


def check_group(kind: str, index: int, group: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Raises if a param group lacks a hyperparameter. Boolean options may be missing: older optimizers had
    fewer of them, and torch then uses False."""
    needed = [
        name
        for name, value in defaults.items()
        if value is not None and not isinstance(value, bool)
    ]
    missing = [name for name in needed if name not in group]
    if missing:
        raise ValueError(
            f"param group {index} of the loaded state_dict lacks {', '.join(missing)}, expected "
            f"{', '.join(needed)}; load a state_dict of {kind}"
        )


def check_entry(kind: str, key: object, entry: Any, algorithm: int) -> None:
    """Raises if the state of a param is another algorithm's."""
    if not isinstance(entry, dict):
        return
    moments = MOMENTS[algorithm]
    foreign = [
        name for name in _MOMENTS_OF_ANY if name not in moments and entry.get(name) is not None
    ]
    missing = [name for name in moments if entry.get(name) is None]
    stepped = algorithm in COUNTED and float(entry.get("step", 0)) > 0
    if foreign or (missing and (stepped or len(missing) < len(moments))):
        has = f"has {', '.join(foreign)}" if foreign else "is not whole"
        lacks = f" and lacks {', '.join(missing)}" if missing else ""
        raise ValueError(
            f"the state of parameter {key!r} in the loaded state_dict {has}{lacks}, expected "
            f"{', '.join(moments)}; load a state_dict of {kind}"
        )
