"""Warnings of steps that were skipped because a gradient had an Inf or NaN."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..base.callers import depth_of_caller
from ..params.registered import Slot
from ..params.tensors import local

MOST_NAMES = 3


class Skips:
    """Counts skipped steps. Warns of the first one, and of each one whose number is a power of two: so a run in
    which every step is skipped shows it, without too many warnings."""

    def __init__(self) -> None:
        self._count = 0

    def note(self, slots: Sequence[Slot], gradients: Mapping[Slot, Tensor | None], has_ranks: bool) -> None:
        """Notes that a step over these slots was skipped. `gradients` are those of its gradients that still exist."""
        self._count += 1
        if self._count & (self._count - 1) != 0:
            return
        found = {slot: gradients.get(slot) for slot in slots}
        there = {slot: local(grad) for slot, grad in found.items() if grad is not None}
        where = _told(_not_finite(there), len(there) < len(found), has_ranks)
        times = "" if self._count == 1 else f" {self._count} steps have been skipped so far."
        warnings.warn(
            f"a step was skipped, and no parameter has changed, because of Inf or NaN in {where}.{times} The next "
            f"warning comes after {2 * self._count} skipped steps; stats().steps_skipped counts them",
            stacklevel=depth_of_caller(),
        )


def _not_finite(gradients: dict[Slot, Tensor]) -> list[str]:
    """The names of the slots whose gradients have an Inf or NaN. The host waits for a device once, and no gradient is
    copied."""
    elements = {slot: grad for slot, grad in gradients.items() if grad.numel() > 0}
    if not elements:
        return []
    with torch.no_grad():
        ends = [torch.stack(torch.aminmax(grad)).float() for grad in elements.values()]
        are_finite = torch.stack(ends).isfinite().all(1).tolist()
    return [slot.name for slot, is_finite in zip(elements, are_finite) if not is_finite]


def _told(names: list[str], some_are_gone: bool, has_ranks: bool) -> str:
    if names:
        listed = ", ".join(map(repr, names[:MOST_NAMES]))
        others = len(names) - MOST_NAMES
        more = "" if others <= 0 else f" and {others} other parameter{'' if others == 1 else 's'}"
        return f"the gradients of {listed}{more}"
    ranks = "of another rank" if has_ranks else ""
    if some_are_gone:
        gone = "that is gone: hook_gradients() or overlap() has taken it, leave them out to see the parameter's name"
        return f"a gradient {ranks}, or in one {gone}" if ranks else f"a gradient {gone}"
    return f"a gradient {ranks}" if ranks else "a gradient"
