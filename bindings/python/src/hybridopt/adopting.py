"""What an engine takes over of what others have put into an optimizer's state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from . import abi
from .parts import Part
from .tensors import local, local_part

if TYPE_CHECKING:
    from .engine import Slot

# Whose state has a step count beside the moments, as torch has it.
COUNTED = {abi.OFFLOAD_ADAMW, abi.OFFLOAD_ADAM, abi.OFFLOAD_ADAGRAD}


class Adopting(Part):
    """Part of Engine, which has the rest."""

    def adopt(self, state: dict[Tensor, Any]) -> None:
        """Takes over what others have put into `state`: loaded, assigned, deleted or written."""
        if self.counts.data_ptr() != self._counts_place:  # as in _forget_moved()
            self._set_counts(self.counts.clone())
        if self.counts._version != self._counts_version:
            self.settle(state)
            self.wait()
            for slot in self.slots:
                self._push_count(slot, int(self._count_views[slot.id]))
        for slot in self.slots:
            entry = dict.get(state, slot.param)
            if not entry and slot.entry is None:
                continue
            if entry is not None and self._is_ours(slot, entry):
                for key, version in slot.copies.items():
                    view = local(slot.views[key])
                    if view._version != version:
                        self.wait()
                        self.write(slot, slot.kinds[key], view)
                        slot.copies[key] = view._version
                continue
            self.wait()
            self._forget_moved(slot)
            if entry:
                self._adopt_entry(slot, entry, state)
            else:
                self._start_again(slot)
        self._counts_version = self.counts._version

    @staticmethod
    def _is_ours(slot: Slot, entry: dict[str, Any]) -> bool:
        """Whether an entry is as it was put there, but for what may be written in it."""
        return entry is slot.entry and all(
            entry.get(key) is view and local(view).data_ptr() == slot.places[key]
            for key, view in slot.views.items()
        )

    def _forget_moved(self, slot: Slot) -> None:
        """Views that are not of the library's memory any more: torch.multiprocessing moves what it
        sends into memory of its own, in place, and `.data` leads a tensor anywhere."""
        for key, view in list(slot.views.items()):
            if local(view).data_ptr() != slot.places[key]:
                del slot.views[key]
                slot.copies.pop(key, None)
                if key == "step":
                    self._count_views[slot.id] = self.counts[slot.id]

    def _push_count(self, slot: Slot, count: int) -> None:
        self.handle.set_step_count(slot.id, count)
        if count != int(self._count_views[slot.id]):
            self._count_views[slot.id].fill_(count)

    def _start_again(self, slot: Slot) -> None:
        """As torch does for a param without state. Masters stay: they are the param."""
        slot.entry = None
        self._push_count(slot, 0)
        fresh = self.groups[slot.group].get("initial_accumulator_value", 0.0)
        for kind in slot.moments.values():
            value = torch.full((), fresh, dtype=torch.float32, device=self.device).expand(slot.shape)
            self.write(slot, kind, value)

    def _adopt_entry(self, slot: Slot, entry: dict[str, Any], state: dict[Tensor, Any]) -> None:
        moments = {key: entry.get(key) for key in slot.moments}
        count = int(entry.get("step", 0)) if self.algorithm in COUNTED else 1
        if moments and all(value is None for value in moments.values()):
            if self.algorithm in COUNTED and count > 0:
                self._refuse(slot, f"has step {count} but lacks {', '.join(moments)}")
            self._start_again(slot)
            self._adopt_masters(slot, entry)
            self._publish(slot, state)  # or the next step would start again, if none settles before
            return
        loaded: dict[str, Tensor] = {}
        for key, value in moments.items():
            if not isinstance(value, Tensor):
                self._refuse(slot, f"lacks {key!r}")
            loaded[key] = value
            if value.shape != slot.param.shape:
                self._refuse(
                    slot,
                    f"has {key!r} of shape {tuple(value.shape)}, expected {tuple(slot.param.shape)}",
                )
        for key, value in loaded.items():
            self.write(slot, slot.moments[key], local_part(value, slot.param))
        self._adopt_masters(slot, entry)
        self._push_count(slot, count)
        self._publish(slot, state)

    def _adopt_masters(self, slot: Slot, entry: dict[str, Any]) -> None:
        self.adopt_master(slot, entry, lambda value: local_part(value, slot.param))
        slot.version = None  # the param may not be what these masters stand for

    def _refuse(self, slot: Slot, what: str) -> NoReturn:
        raise ValueError(
            f"the state of parameter {slot.name!r} {what}; load a state_dict of the same optimizer "
            "and model, or delete the parameter's entry to start its state afresh"
        )
