"""InSync: finds the params that other code may have written. The library makes their masters follow; it does not
change a master whose rounded value is the param."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from ..params.bound import Addresses
from ..params.registered import Slot
from ..params.tensors import local, version_of
from .samples import Samples


class Seen:
    """What tells of a write of a param in memory whose content is not compared: how often torch has written it in place, and
    its storage. Another storage may be at the same address, once that before has been freed."""

    def __init__(self, tensor: Tensor) -> None:
        self._version = version_of(tensor)
        self._storage = StorageWeakRef(tensor.untyped_storage())

    def differs_from(self, before: Seen) -> bool:
        return self._version != before._version or self._storage != before._storage or before._storage.expired()


class InSync(Protocol):
    """Finds the params that other code may have written."""

    # Whether a step itself finds the params that other code has written, among those that it updates.
    steps_follow_params: bool

    def begin(self) -> None:
        """Starts: commit has just made the masters from the params."""

    def note(self) -> None:
        """Notes that all params are in sync now."""

    def forget(self) -> None:
        """Treats every param as written until the next note()."""

    def forget_one(self, slot: Slot) -> None:
        """Treats this param as written until the next note()."""

    def written(self, among: set[Slot] | None = None) -> list[Slot]:
        """The params that other code may have written since note(). Only the slots in `among` must be checked."""


class Followed:
    """Params in host memory. A step makes the masters of the params that it updates follow, so this class notes
    nothing: it says of every param that it may have been written."""

    steps_follow_params = True

    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots

    def begin(self) -> None:
        pass

    def note(self) -> None:
        pass

    def forget(self) -> None:
        pass

    def forget_one(self, slot: Slot) -> None:
        pass

    def written(self, among: set[Slot] | None = None) -> list[Slot]:
        return [slot for slot in self._slots if among is None or slot in among]


class Watched:
    """Finds writes by their traces. An operation in place increments the version of a param. A param in
    other memory has another address, or the storage that was at this address has expired. A write to
    `param.data` in place leaves neither trace; but if a sample of the bits of one param has changed, all
    params count as written. The params must be bound before each call."""

    steps_follow_params = False

    def __init__(self, slots: list[Slot], addresses: Addresses, device: torch.device) -> None:
        self._slots = slots
        self._params = [slot.param for slot in slots]
        self._are_plain = all(local(param) is param for param in self._params)
        self._index_of = {slot: index for index, slot in enumerate(slots)}
        self._addresses = addresses
        self._samples = Samples(slots, addresses, device)
        # From the last note(). A version of None means that the param may have been written.
        self._versions: list[int | None] = []
        self._moves = -1
        self._places: list[int] = []
        self._storage_refs: list[StorageWeakRef] = []
        self._storages: list[int] = []
        self._content = torch.empty(0)  # of the samples
        self._has_memory_changed = True  # what the last written() found

    def begin(self) -> None:
        """Starts: commit has just made the masters from the params."""
        self.note()

    def note(self) -> None:
        """Notes that all params equal their masters, rounded, now."""
        self._versions = self._versions_now()
        if self._has_memory_changed or self._moves != self._addresses.moves:
            self._note_memory()
        if self._slots:
            self._content = self._samples.take()

    def forget(self) -> None:
        """Treats every param as written until the next note()."""
        self._versions = [None] * len(self._slots)

    def forget_one(self, slot: Slot) -> None:
        """Treats this param, if it is watched, as written until the next note()."""
        if slot in self._index_of:
            self._versions[self._index_of[slot]] = None

    def written(self, among: set[Slot] | None = None) -> list[Slot]:
        """The params that other code may have written since note()."""
        in_other_memory = self._find_in_other_memory()
        self._has_memory_changed = bool(in_other_memory)
        versions = self._versions_now()
        written = set(in_other_memory)
        if versions != self._versions:
            both = zip(self._slots, versions, self._versions)
            written.update(slot for slot, now, known in both if now != known)
        if len(written) < len(self._slots) and not self._are_as_sampled(written):
            return self._slots
        return [slot for slot in self._slots if slot in written] if written else []

    def _versions_now(self) -> list[int | None]:
        tensors = self._params if self._are_plain else map(local, self._params)
        return [tensor._version for tensor in tensors]

    # --------------------------------------------------------------------------------- memory --

    def _note_memory(self) -> None:
        storages = [local(slot.param).untyped_storage() for slot in self._slots]
        self._storage_refs = list(map(StorageWeakRef, storages))
        self._storages = [ref.cdata for ref in self._storage_refs]
        self._places = self._places_now()
        self._moves = self._addresses.moves
        self._has_memory_changed = False

    def _places_now(self) -> list[int]:
        return [self._addresses.params[slot.id] for slot in self._slots]

    def _find_in_other_memory(self) -> list[Slot]:
        """The params that are in other memory than at note(). An address alone proves something only while the
        storage that was there still exists: later another tensor may get the same address."""
        found = []
        if self._moves != self._addresses.moves:
            both = zip(self._slots, self._places_now(), self._places)
            found = [slot for slot, now, known in both if now != known]
        # StorageWeakRef.expired() calls this too, but takes four times as long.
        expired = list(map(UntypedStorage._expired, self._storages))
        if any(expired):
            found += [slot for slot, is_gone in zip(self._slots, expired) if is_gone]
        return found

    # --------------------------------------------------------------------------------- content --

    def _are_as_sampled(self, written: set[Slot]) -> bool:
        """Whether the samples of all params but `written` are as they were at note()."""
        now = self._samples.take()
        if torch.equal(now, self._content):
            return True
        both = zip(self._slots, self._samples.cut(now), self._samples.cut(self._content))
        return all(new == old for slot, new, old in both if slot not in written)


def is_away(device: torch.device) -> bool:
    """Whether params are in memory that the host cannot read."""
    return device.type != "cpu"


def in_sync_of(slots: list[Slot], device: torch.device, addresses: Addresses) -> InSync:
    """The right class for the slots among these whose params have masters of their own."""
    slots = [slot for slot in slots if slot.has_master and slot.count > 0]
    if is_away(device):
        return Watched(slots, addresses, device)
    return Followed(slots)
