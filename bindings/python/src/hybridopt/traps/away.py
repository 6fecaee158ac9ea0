"""Weights that an activation stash has put on the host. They have no memory on the device, and an operation on one
raises."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import abi
from .trap import Traps, take_back


class Keeper(Protocol):
    """An activation stash that puts weights on the host."""

    def come_for_step(self, params: Iterable[Tensor]) -> None:
        """Brings back those of these params that a step updates."""

    def come_to_be_read(self, params: Iterable[Tensor]) -> None:
        """Brings back these params."""


keepers: weakref.WeakSet[Keeper] = weakref.WeakSet()
_names: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of weights that are or have been away


def _refuse(weights: list[Tensor], operation: str) -> None:
    raise abi.InvalidStateError(
        f"parameter {_names[weights[0]]!r} is used by {operation!r} while it is on the host, where wrap(weights=True) "
        "has put it; it comes back for the forward and backward pass of its layer, for a step and for state_dict(). "
        "Before any other use call bring_back() of what wrap() has returned"
    )


_traps = Traps(_refuse)


def note_away(weight: Tensor, name: str) -> None:
    """Makes operations on the weight raise an error that names it. note_back() ends that."""
    _names[weight] = name
    _traps.set_instead([weight])


def note_back(weights: Iterable[Tensor]) -> None:
    """Operations on these weights work again."""
    take_back(weight for weight in weights if getattr(type(weight), "traps", None) is _traps)


def has_been_away(tensor: Tensor) -> bool:
    """Whether an activation stash has put the tensor's memory on the host, so that its address changes."""
    return tensor in _names


def bring_back(params: Iterable[Tensor]) -> None:
    """Brings back those of these params that are on the host, for code of this package that reads them."""
    if keepers:
        away = [param for param in params if getattr(type(param), "traps", None) is _traps]
        for keeper in list(keepers) if away else ():
            keeper.come_to_be_read(away)
