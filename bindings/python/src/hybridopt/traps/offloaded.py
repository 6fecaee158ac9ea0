"""Params that offload(params=True) has put on the host. They have no memory until reload(params=True), and an
operation that would read or write it raises. So does one on what `detach()` and `.data` return meanwhile."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import abi
from .trap import HARMLESS, VIEWS, Traps, parts_of, take_back


class _Away(NamedTuple):
    name: str
    holder: weakref.ref[object]  # the engine, which holds the content


_away: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by param that is on the host, and by view of one
_params: WeakIdKeyDictionary = WeakIdKeyDictionary()  # weak references to the params of these views

_LOST = (
    "has lost its content: the optimizer whose offload(params=True) had put it on the host has ended without "
    "reload(params=True); give it new content with module.load_state_dict(state, assign=True) or param.data = tensor"
)
_SETS_CONTENT = "data"  # the operation that gives a param another tensor's memory


def _refuse(params: list[Tensor], operation: str) -> None:
    param = params[0]
    if _is_lost(param) and operation == _SETS_CONTENT and len(params) == 1:  # the tensor that is set has content
        _forget(params)
        return
    by = repr(operation) if operation else "the forward pass of a layer that stash.wrap() has wrapped"
    parameter = f"parameter {_away[param].name!r}"
    if _is_lost(param):
        raise abi.InvalidStateError(f"{parameter}, which is used by {by}, {_LOST}")
    raise abi.InvalidStateError(
        f"{parameter} is used by {by} while its content is on the host, where optimizer.offload(params=True) has put it; "
        "call optimizer.reload(params=True) before, or use it after the block of `with optimizer.offloaded():`"
    )


def _is_lost(param: Tensor) -> bool:
    """Whether nothing holds the content any more."""
    return _away[param].holder() is None


def _note_view(tensor: Tensor, view: Tensor) -> list[Tensor]:
    parts = parts_of(view)
    for part in parts:
        _away[part] = _away[tensor]
        _params[part] = _params.get(tensor) or weakref.ref(tensor)
    return parts


# These functions only tell where the memory is.
_PLACES = {Tensor.data_ptr, Tensor.untyped_storage}
_traps = Traps(_refuse, HARMLESS | _PLACES | VIEWS, _note_view)


def is_offloaded(param: Tensor) -> bool:
    return param in _away


def why_no_memory(param: Tensor) -> str:
    """Why step() finds no content in a param that is on the host, and what to do."""
    if _is_lost(param):
        return _LOST
    return (
        "has its content on the host, where optimizer.offload(params=True) has put it; call "
        "optimizer.reload(params=True) before step(), or step() after the block of `with optimizer.offloaded():`"
    )


def note_offloaded(holder: object, params: Iterable[tuple[str, Tensor]]) -> None:
    """`holder` is what holds the content on the host. When that has ended, the content is lost."""
    held = weakref.ref(holder)
    for name, param in params:
        parts = parts_of(param)
        for part in parts:
            _away[part] = _Away(name, held)
        _traps.set(parts)


def note_reloaded(params: Iterable[Tensor]) -> None:
    listed = [part for param in params for part in parts_of(param)]
    ids = set(map(id, listed))
    listed += [view for view, param in list(_params.items()) if id(param()) in ids]
    take_back(listed)
    _forget(listed)


def _forget(listed: Iterable[Tensor]) -> None:
    for tensor in listed:
        _away.pop(tensor, None)
        _params.pop(tensor, None)
