"""Takes a state_dict apart. Checks that it comes from an optimizer of the same kind, before anything changes."""

from __future__ import annotations

from copy import deepcopy
from itertools import chain
from typing import Any

from ..params.moments import COUNTED, MOMENTS, MOMENTS_OF_ANY

Groups = list[dict[str, Any]]


def groups_of(state_dict: dict[str, Any], own_groups: Groups, defaults: dict[str, Any], kind: str) -> Groups:
    """The param groups of a state_dict, with the params of this optimizer. `kind` names the optimizers whose
    state_dicts fit."""
    groups: Groups = deepcopy(state_dict["param_groups"])
    if len(groups) != len(own_groups):
        raise ValueError("loaded state dict has a different number of parameter groups")
    for own, loaded in zip(own_groups, groups):
        if len(own["params"]) != len(loaded["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
            )
    for index, (own, loaded) in enumerate(zip(own_groups, groups)):
        if "update_rms" in own:
            loaded.setdefault("update_rms", None)  # torch's state_dicts have none: adjust_lr_fn says the scale
        check_group(kind, index, loaded, defaults)
        loaded["params"] = own["params"]
        if "param_names" in own:
            loaded.setdefault("param_names", own["param_names"])
        if "algorithm" in own and "algorithm" not in loaded:  # torch's state_dicts have none
            groups[index] = {**own, **loaded}
    return groups


def state_of(state_dict: dict[str, Any], own_groups: Groups, algorithms: list[int], kind: str) -> dict[Any, Any]:
    """The state of a state_dict, by the params of this optimizer. groups_of() has compared the groups; `algorithms`
    are theirs."""
    algorithm_of = {
        key: algorithm
        for group, algorithm in zip(state_dict["param_groups"], algorithms)
        for key in group["params"]
    }
    for key, entry in state_dict["state"].items():
        check_entry(kind, key, entry, algorithm_of.get(key, algorithms[0]))
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    param_of = dict(zip(keys, chain.from_iterable(group["params"] for group in own_groups)))
    return {
        param_of.get(key, key): dict(entry) if isinstance(entry, dict) else entry
        for key, entry in state_dict["state"].items()
    }


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
    """Raises if the state of a param belongs to another algorithm."""
    if not isinstance(entry, dict):
        return
    moments = MOMENTS[algorithm]
    foreign = [
        name for name in MOMENTS_OF_ANY if name not in moments and entry.get(name) is not None
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
