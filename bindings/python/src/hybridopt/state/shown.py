"""Shown: the tensors in the optimizer's `state`. They are views of the library's memory, so that nothing is
stored twice, and are made when somebody reads `state`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .. import abi
from ..base.modes import without_collection
from ..params.registered import MASTER, Registered, Slot
from ..params.tensors import like_param, local
from ..traps import moved
from .entries import Entry, Snapshot
from .state_memory import StateMemory


def count_dtype() -> torch.dtype:
    """The dtype of step counts, as torch has it: 16 bits would not count beyond 256."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


class Exhibit:
    """The views of one param's state."""

    def __init__(self) -> None:
        self.entry: Entry | None = None  # the entry in `state` that has the views
        self.views: dict[str, Tensor] = {}
        self.places: dict[str, int] = {}  # addresses of the views: other code may set another storage
        # State that lies in several places, or on disk, is shown as a copy. The versions of these copies.
        self.copies: dict[str, int] = {}


class Shown:
    """The exhibits and step counts of all params. The argument `state` is always the optimizer's."""

    def __init__(
        self,
        handle: abi.Optimizer,
        device: torch.device,
        registered: Registered,
        state_memory: StateMemory,
    ) -> None:
        self._handle = handle
        self._device = device
        self._slots = registered.slots
        self._slot_of = registered.slot_of
        self._state_memory = state_memory
        self._of: dict[Slot, Exhibit] = {}  # of the slots whose state has been published
        self._with_copies: set[Slot] = set()
        self._on_disk: set[Slot] = set()  # those of them with state on disk
        self._unpublished = set(filter(self._has_state, self._slots))
        self._due: dict[Slot, None] = {}  # those of them with state to publish, in the order of steps
        self._counted_last: list[Slot] | None = None
        self._snapshot: Snapshot | None = None  # taken when all entries were as they were published
        self._hidden: list[Slot] = []  # slots whose state is offloaded and whose views are removed
        self.shows_all_masters = False  # also show an fp32 param as its own master
        # One tensor with a view for each param, so that one operation counts a step of all params.
        self.set_counts(torch.zeros(len(self._slots), dtype=count_dtype(), device="cpu"))

    def of(self, slot: Slot) -> Exhibit:
        return self._of.setdefault(slot, Exhibit())

    def with_entries(self, state: dict[Tensor, Any]) -> list[Slot]:
        """The slots that have an entry in `state`, or had one when their state was published."""
        slots = {slot for slot, exhibit in self._of.items() if exhibit.entry is not None}
        slots.update(self._slot_of[param] for param in dict.keys(state) if param in self._slot_of)
        return sorted(slots, key=lambda slot: slot.id)

    def _has_state(self, slot: Slot) -> bool:
        return bool(slot.kinds) or slot.is_counted

    def publish(self, slot: Slot, state: dict[Tensor, Any]) -> None:
        """Puts views of a param's state into its entry of `state`. The caller has waited for everything queued."""
        exhibit = self.of(slot)
        self._snapshot = None
        if slot.is_counted:
            exhibit.views["step"] = self.count_views[slot.id]
        for key, kind in slot.kinds.items():
            if key not in exhibit.views:
                view, is_live = self._state_memory.show(slot, kind)
                if not is_live:
                    exhibit.copies[key] = view._version
                    if slot not in self._with_copies and self._state_memory.is_on_disk(slot):
                        self._on_disk.add(slot)
                    self._with_copies.add(slot)
                exhibit.views[key] = like_param(view, slot.param)
        if self.shows_all_masters and slot.dtype == torch.float32:
            exhibit.views[MASTER] = slot.param.detach()
        if not exhibit.views:
            return
        exhibit.places = {key: local(view).data_ptr() for key, view in exhibit.views.items()}
        entry = dict.get(state, slot.param)
        if not isinstance(entry, Entry):
            entry = Entry(entry or {})
            dict.__setitem__(state, slot.param, entry)
        entry.show(self._handle, exhibit.views)
        exhibit.entry = entry
        self._unpublished.discard(slot)
        self._due.pop(slot, None)

    def _wait(self) -> None:
        """Waits for everything queued. After a failure nothing is queued any more: the state as it was before
        can be shown, and a step raises the error."""
        with contextlib.suppress(abi.HybridoptError):
            self._handle.drain()

    def publish_due(self, state: dict[Tensor, Any]) -> None:
        """Publishes the state of all slots for which it is due."""
        if self._due:
            self._wait()
            with without_collection():
                for slot in list(self._due):
                    self.publish(slot, state)
        if self.shows_all_masters:
            self._follow_params()

    def _follow_params(self) -> None:
        """Makes the views of params that are shown as masters point to the params' present memory."""
        for slot, exhibit in self._of.items():
            if slot.dtype == torch.float32 and MASTER in exhibit.views:
                view = local(exhibit.views[MASTER])
                view.data = local(slot.param).detach()
                exhibit.places[MASTER] = view.data_ptr()

    def note_due(self, slots: list[Slot]) -> None:
        """Notes that these slots have state to publish."""
        for slot in slots:
            if slot in self._unpublished:
                self._due[slot] = None

    def withdraw(self, slot: Slot) -> None:
        """Makes a param's entry an ordinary dict, until its state is published again."""
        exhibit = self.of(slot)
        if exhibit.entry is not None:
            exhibit.entry.end()
        exhibit.entry = None
        self._snapshot = None
        if self._has_state(slot):
            self._unpublished.add(slot)
        self._counted_last = None

    def is_untouched(self, state: dict[Tensor, Any]) -> bool:
        """Whether all entries are as they were published, and `state` has no others."""
        return self._snapshot is not None and self._snapshot.matches(state)

    def note_untouched(self, state: dict[Tensor, Any]) -> None:
        """Notes that all entries are now as they were published."""
        both = [(exhibit.entry, dict(exhibit.views)) for exhibit in self._of.values()]
        self._snapshot = Snapshot(state, [(e, views) for e, views in both if e is not None])

    def is_as_published(self, slot: Slot, entry: dict[str, Any]) -> bool:
        """Whether an entry has the objects that were published. The content of its tensors may have been written."""
        exhibit = self.of(slot)
        return entry is exhibit.entry and all(
            entry.get(key) is view and local(view).data_ptr() == exhibit.places[key]
            for key, view in exhibit.views.items()
        )

    def is_in(self, slot: Slot, state: dict[Tensor, Any]) -> bool:
        """Whether `state` has the entry with the views."""
        entry = self.of(slot).entry
        return entry is not None and dict.get(state, slot.param) is entry

    def forget_moved(self, slot: Slot) -> None:
        """Drops views that no longer lie in the library's memory: torch.multiprocessing moves a tensor that
        it sends to its own memory, in place, and an assignment to `.data` may do the same."""
        exhibit = self.of(slot)
        for key, view in list(exhibit.views.items()):
            if local(view).data_ptr() != exhibit.places[key]:
                del exhibit.views[key]
                exhibit.copies.pop(key, None)
                if key == "step":
                    self.count_views[slot.id] = self.counts[slot.id]

    def is_as_left(self, state: dict[Tensor, Any]) -> bool:
        """Whether, as far as a quick look tells, other code has changed nothing that the library must take over."""
        return not (self._with_copies or self.have_counts_moved() or self.have_counts_changed()) and self.is_untouched(
            state
        )

    # --------------------------------------------------------------------------------- copies --

    def refresh_copies(self) -> None:
        """Updates the copies from the state."""
        if self._with_copies:
            self._handle.drain()
        for slot in self._with_copies:
            self.refresh_copies_of(slot, self.of(slot).copies)

    def refresh_copies_of(self, slot: Slot, keys: Iterable[str]) -> None:
        """The same for some copies of one param's state. The caller has waited for everything queued."""
        exhibit = self.of(slot)
        for key in keys:
            view = local(exhibit.views[key])
            view.copy_(self._state_memory.show(slot, slot.kinds[key])[0])
            exhibit.copies[key] = view._version

    def take_copies(self, slots: Iterable[Slot] | None = None) -> None:
        """Writes back the copies that other code has written, of some slots (None: of all)."""
        for slot in self._with_copies if slots is None else slots:
            exhibit = self.of(slot)
            for key, version in exhibit.copies.items():
                view = local(exhibit.views[key])
                if view._version != version:
                    self._handle.drain()
                    self._state_memory.write(slot, slot.kinds[key], view)
                    exhibit.copies[key] = view._version

    def let_go_of_disk(self, state: dict[Tensor, Any]) -> bool:
        """Removes the copies of state on disk from `state`, where the next look makes new ones: they would fill the host
        memory that the disk saves. Returns whether there were any."""
        slots = sorted(self._on_disk, key=lambda slot: slot.id)
        seen = [slot for slot in slots if self.of(slot).entry is not None]  # not those that were deleted
        for slot in slots:
            self._take_from_sight(slot, state)
        self.note_due(seen)
        return bool(slots)

    # --------------------------------------------------------------------------------- counts --

    def set_counts(self, counts: Tensor) -> None:
        self.counts = counts
        self._count_views: list[Tensor] = []
        self._counts_place = counts.data_ptr()
        self.note_counts()

    @property
    def count_views(self) -> list[Tensor]:
        """The counts one by one, as views."""
        if not self._count_views:
            self._count_views = list(self.counts.unbind())
        return self._count_views

    def note_counts(self) -> None:
        """Notes that the library has these counts."""
        self._counts_version = self.counts._version

    def count(self, slots: list[Slot]) -> None:
        """Counts a step of the slots. From then on they have state to publish."""
        if slots is not self._counted_last:
            self.note_due(slots)
            self._counted_last = slots
        if len(slots) == len(self._slots):
            self.counts.add_(1)
        else:
            self.counts[[slot.id for slot in slots]] += 1

    def have_counts_moved(self) -> bool:
        return self.counts.data_ptr() != self._counts_place

    def have_counts_changed(self) -> bool:
        return self.counts._version != self._counts_version

    # ------------------------------------------------------------------------- states offloaded --

    def hide(self, state: dict[Tensor, Any], everywhere: bool = False) -> None:
        """Removes the views of memory that is about to be freed from `state`: views of device memory, or all
        views. State that is due stays unpublished until show_hidden()."""
        if not everywhere and self._device.type == "cpu":
            return
        if self._due:
            self._wait()  # masters that follow written params may be queued
        for slot in list(self._due):
            if everywhere or self._is_on_device(slot):
                del self._due[slot]
                self._hidden.append(slot)
        for slot in filter(self._of.__contains__, self._slots):
            exhibit = self.of(slot)
            on_device = any(local(view).device.type != "cpu" for view in exhibit.views.values())
            if not on_device and not exhibit.copies and not everywhere:
                continue
            if exhibit.entry is not None:
                self._hidden.append(slot)
            if everywhere:  # states that come back from the host, by reload(), have the same addresses
                moved.note_moved(
                    view for key, view in exhibit.views.items() if key in slot.kinds and key not in exhibit.copies
                )
            self._take_from_sight(slot, state)

    def _take_from_sight(self, slot: Slot, state: dict[Tensor, Any]) -> None:
        """Removes a param's entry from `state`, and forgets its views."""
        exhibit = self.of(slot)
        entry = exhibit.entry
        self.withdraw(slot)  # first, since an entry that is missing counts as one that the program has deleted
        if entry is not None and dict.get(state, slot.param) is entry:
            dict.pop(state, slot.param)
        exhibit.views, exhibit.copies = {}, {}
        self._with_copies.discard(slot)
        self._on_disk.discard(slot)

    def _is_on_device(self, slot: Slot) -> bool:
        """Whether some of a param's state is on the device."""
        views = (self._state_memory.view_of(slot, kind) for kind in slot.kinds.values())
        return any(view.device_count > 0 for view in views)

    def show_hidden(self) -> None:
        """Makes the slots that hide() has noted publish their state when `state` is read next. Not now: if state is
        partly on the host it is shown as a copy, which takes longer to make than the device memory takes to come
        back."""
        hidden, self._hidden = self._hidden, []
        self.note_due(hidden)

    def refuse_hidden(self) -> None:
        if self._hidden:
            raise abi.InvalidStateError(
                "states are offloaded and cannot be looked at; call reload(states=True) first"
            )

    def leave_device(self) -> None:
        """Replaces views of device memory by tensors on the host, so that another engine can take the device
        memory when this one ends."""
        for exhibit in self._of.values():
            if exhibit.entry is not None:
                exhibit.entry.end()
                for key, tensor in exhibit.views.items():
                    if tensor.device.type != "cpu":
                        exhibit.entry[key] = tensor.cpu()
            exhibit.views = {}
