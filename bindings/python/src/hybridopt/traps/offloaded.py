"""Params that offload(params=True) has put on the host. They have no memory until reload(params=True), and an
operation that would read or write it raises. So does one on what `detach()` and `.data` return meanwhile."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import abi
from .trap import HARMLESS, VIEWS, Traps, parts_of, take_back

_names: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of params that are on the host, and of their views
_params: WeakIdKeyDictionary = WeakIdKeyDictionary()  # weak references to the params of these views


def _refuse(params: list[Tensor], operation: str) -> None:
    by = repr(operation) if operation else "the forward pass of a layer that stash.wrap() has wrapped"
    raise abi.InvalidStateError(
        f"parameter {_names[params[0]]!r} is used by {by} while its content is on the host, where "
        "optimizer.offload(params=True) has put it; call optimizer.reload(params=True) before, or use it after the "
        "block of `with optimizer.offloaded():`"
    )


def _note_view(tensor: Tensor, view: Tensor) -> list[Tensor]:
    parts = parts_of(view)
    for part in parts:
        _names[part] = _names[tensor]
        _params[part] = _params.get(tensor) or weakref.ref(tensor)
    return parts


# These functions only tell where the memory is.
_PLACES = {Tensor.data_ptr, Tensor.untyped_storage}
_traps = Traps(_refuse, HARMLESS | _PLACES | VIEWS, _note_view)


def is_offloaded(param: Tensor) -> bool:
    return param in _names


def note_offloaded(params: Iterable[tuple[str, Tensor]]) -> None:
    for name, param in params:
        parts = parts_of(param)
        for part in parts:
            _names[part] = name
        _traps.set(parts)


def note_reloaded(params: Iterable[Tensor]) -> None:
    listed = [part for param in params for part in parts_of(param)]
    ids = set(map(id, listed))
    listed += [view for view, param in list(_params.items()) if id(param()) in ids]
    take_back(listed)
    for tensor in listed:
        _names.pop(tensor, None)
        _params.pop(tensor, None)
