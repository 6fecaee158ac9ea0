"""What the parts of an engine know of each other, for type checkers: at run time there is nothing
here. Engine has it all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from . import abi
    from .engine import Slot
    from .masters import Samples


class Part:
    """The base class of Engine's parts."""

    if TYPE_CHECKING:
        device: torch.device
        algorithm: int
        groups: list[dict[str, Any]]
        counts: Tensor
        handle: abi.Optimizer
        slots: list[Slot]
        movable: int
        check_weights: bool
        params_out: bool
        states_out: bool
        _bindings: Any
        _slots_with_copies: list[Slot]
        _kept: Samples | None
        _count_views: list[Tensor]
        _counts_version: int
        _counts_place: int

        def stream(self) -> int: ...
        def _set_counts(self, counts: Tensor) -> None: ...
        def wait(self) -> None: ...
        def settle(self, state: dict[Tensor, Any]) -> None: ...
        def read(self, slot: Slot, kind: int) -> Tensor: ...
        def write(self, slot: Slot, kind: int, value: Tensor) -> None: ...
        def notice_writes(self) -> None: ...
        def view_of(self, slot: Slot, kind: int) -> abi.offload_state_view_t: ...
        def _refresh_copies(self) -> None: ...
        def adopt_master(self, slot: Slot, entry: dict[str, Any], part: Any) -> None: ...
        def _address_of(self, slot: Slot) -> int: ...
        def _arrange(self, slot: Slot, flat: Tensor) -> Tensor: ...
        def _tell_all(self, changed: list[tuple[Slot, int, int]]) -> None: ...
        def _publish(self, slot: Slot, state: dict[Tensor, Any]) -> None: ...
        def _usable(self, slot: Slot, grad: Tensor) -> Tensor: ...
