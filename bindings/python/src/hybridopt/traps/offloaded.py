"""Params that offload(params=True) has put on the host. They have no memory until reload(params=True), and an
operation that would read or write it raises."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import abi
from .trap import HARMLESS, Traps, take_back

_names: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of params that are on the host


def _refuse(params: list[Tensor], operation: str) -> None:
    raise abi.InvalidStateError(
        f"parameter {_names[params[0]]!r} is used by {operation!r} while its content is on the host, where "
        "optimizer.offload(params=True) has put it; call optimizer.reload(params=True) before, or use it after the "
        "block of `with optimizer.offloaded():`"
    )


_DATA: Any = Tensor.data
# What tells where the memory is, or makes another tensor over it.
_PLACES = {Tensor.data_ptr, Tensor.detach, Tensor.untyped_storage, _DATA.__get__, _DATA.__set__}
_traps = Traps(_refuse, HARMLESS | _PLACES)


def note_offloaded(params: Iterable[tuple[str, Tensor]]) -> None:
    for name, param in params:
        _names[param] = name
        _traps.set([param])


def note_reloaded(params: Iterable[Tensor]) -> None:
    listed = list(params)
    take_back(listed)
    for param in listed:
        _names.pop(param, None)
