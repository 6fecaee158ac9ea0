"""Members: the params of a torch optimizer that the library updates."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ..base.callers import depth_of_caller
from ..base.checks import shown
from .tensors import DTYPES, gradient_of, local

if TYPE_CHECKING:
    from .sharding import TensorShard


class Member(NamedTuple):
    """A param of the torch optimizer that the library updates."""

    param: Tensor
    name: str
    group: int
    shard: TensorShard | None = None  # None: the param is a whole tensor
    wide_gradient: bool = False  # the param had gradients in fp32 before
    chunk_order: int = 0  # params with a lower one are updated first
    split_rows: tuple[int, ...] = ()  # of a fused matrix: the rows of each part


def named(index: int, group: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The params of a param group with their names, or without names with their index."""
    check_lists(index, group)
    names = group.get("param_names")
    for i, param in enumerate(group["params"]):
        yield names[i] if names else f"param_groups.{index}.{i}", param


def check_lists(index: int, group: dict[str, Any]) -> None:
    """Refuses a group if its list of names does not fit its list of params: a program may change both."""
    params, names = group.get("params"), group.get("param_names")
    if not isinstance(params, (list, tuple)):
        raise TypeError(f"param group {index} has params={shown(params)}, expected a list of parameters")
    if names is None:
        return
    if not isinstance(names, (list, tuple)):
        raise TypeError(f"param group {index} has param_names={shown(names)}, expected a list of names")
    if len(names) != len(params):
        raise ValueError(
            f"param group {index} has {len(names)} names in 'param_names' for {len(params)} parameters in 'params', expected "
            "one for each, in the same order; change both lists alike, or call add_param_group() for new parameters"
        )


def checked(index: int, group: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """As named(). It checks params that were put into the group later, as torch checks the params of a new group."""
    for place, (name, param) in enumerate(named(index, group)):
        if not isinstance(param, Tensor):
            what = f"is {shown(param)}, expected a parameter; its name belongs into the group's 'param_names'"
            raise TypeError(f"params[{place}] of param group {index} {what}")
        if not isinstance(name, str):
            raise TypeError(f"param_names[{place}] of param group {index} is {shown(name)}, expected a string")
        if not (param.is_leaf or param.retains_grad):
            raise ValueError(
                f"parameter {name!r} of param group {index} is the result of an operation, for which autograd keeps no "
                "gradient; expected a parameter"
            )
        yield name, param


def has_gradient(param: Tensor) -> bool:
    return gradient_of(param) is not None


def takes_part(param: Tensor) -> bool:
    return param.requires_grad or has_gradient(param)


def check_dtype(name: str, param: Tensor) -> None:
    """Raises if the library cannot update params of this dtype."""
    if local(param).dtype not in DTYPES:
        raise TypeError(
            f"parameter {name!r} is {param.dtype}, expected torch.float32, torch.bfloat16 or "
            "torch.float16; convert it, or leave it to a torch optimizer"
        )


def refuse_twice(index: int, group: dict[str, Any]) -> None:
    """Raises if a group has a param more than once."""
    seen: dict[int, tuple[int, str]] = {}
    for name, param in named(index, group):
        _note_once(seen, param, name, index)


def _note_once(seen: dict[int, tuple[int, str]], param: Tensor, name: str, index: int) -> None:
    """`seen` has the group and name of each param by its id, which is found in less time than the param."""
    if id(param) not in seen:
        seen[id(param)] = index, name
        return
    group_before, name_before = seen[id(param)]
    before = "" if name_before == name else f", before as {name_before!r}"
    where = f"twice in param group {index}" if group_before == index else f"in param groups {group_before} and {index}"
    raise ValueError(
        f"parameter {name!r} is {where}{before}, and would be updated twice in each step; name it once"
    )


def members_of(param_groups: list[dict[str, Any]], known: Mapping[Tensor, bool]) -> list[Member]:
    """The params that are trained, and those that were members before. A frozen param without a gradient is not a
    member and gets no state. `known` has the previous members, and whether their gradients were in fp32."""
    members: list[Member] = []
    names: set[str] = set()
    renamed: list[str] = []
    seen: dict[int, tuple[int, str]] = {}
    for index, group in enumerate(param_groups):
        rows = tuple(group.get("split_rows") or ())
        for name, param in checked(index, group):
            wide_gradient = known.get(param)
            if wide_gradient is None and not takes_part(param):
                continue
            check_dtype(name, param)  # the param may have been converted
            _note_once(seen, param, name, index)
            if name in names:
                renamed.append(name)
            while name in names:
                name += "'"
            names.add(name)
            members.append(Member(param, name, index, wide_gradient=bool(wide_gradient), split_rows=rows))
    if renamed:
        _warn_of_renamed(renamed)
    return members


def _warn_of_renamed(names: list[str]) -> None:
    listed = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
    warnings.warn(
        f"several parameters have the same name ({listed}); the name of each but the first gets a ' at its end, in "
        "checkpoints and messages, so that a checkpoint fits only the same order of parameters. Give names of their "
        "own: (f'critic.{name}', param), say",
        stacklevel=depth_of_caller(),
    )
