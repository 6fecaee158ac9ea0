"""Views of state that somebody still holds after the state has moved. The memory behind them may be gone, so that an
operation that would read or write it raises."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .. import abi
from .trap import Traps, parts_of


def _refuse(_: list[Tensor], operation: str) -> None:
    raise abi.InvalidStateError(
        f"a tensor of an optimizer's state is used by {operation!r} after the state has moved to other memory "
        "(set_offload_fraction()); read optimizer.state or state_dict() again after the move, or clone() the tensor before"
    )


_traps = Traps(_refuse)


def note_moved(views: Iterable[Tensor]) -> None:
    for view in views:
        _traps.set(parts_of(view))
