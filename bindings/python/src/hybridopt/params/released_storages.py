"""Frees the memory of params and allocates it again. The tensor of a param and its views stay valid
objects: only the size of their storage changes, to 0 and back, or not even that (kept_addresses.py)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .registered import Slot
from .tensors import local


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class ReleasedStorage:
    """A storage whose memory is freed by release(). Bytes in it that belong to no param are kept here."""

    def __init__(self, storage: torch.UntypedStorage, slots: list[Slot]) -> None:
        self._storage = storage
        self._bytes = storage.nbytes()
        self._gaps = [
            (begin, bytes_of(storage)[begin:end].to("cpu", copy=True)) for begin, end in self._rest(slots)
        ]

    def release(self) -> None:
        self._storage.resize_(0)

    def _rest(self, slots: list[Slot]) -> Iterator[tuple[int, int]]:
        """The ranges (begin, end) of bytes that belong to no param."""
        passed = 0
        taken = []
        for slot in slots:
            if slot.copy is None:
                tensor = local(slot.param)
                begin = int(tensor.storage_offset()) * tensor.element_size()
                taken.append((begin, begin + slot.bytes))
        for begin, end in sorted(taken):
            if begin > passed:
                yield passed, begin
            passed = max(passed, end)
        if passed < self._bytes:
            yield passed, self._bytes

    def restore(self) -> None:
        if self._storage.nbytes() == 0:
            self._storage.resize_(self._bytes)
            self._fill_gaps()

    def _fill_gaps(self) -> None:
        for begin, content in self._gaps:
            bytes_of(self._storage)[begin : begin + content.numel()].copy_(content)


class KeptStorage(ReleasedStorage):
    """A storage that keeps its address: KeptAddresses gives up the memory behind it, and takes memory there again."""

    def restore(self) -> None:
        self._fill_gaps()


def slots_by_storage(slots: list[Slot]) -> dict[int, list[Slot]]:
    """Several params may share a storage."""
    by_storage: dict[int, list[Slot]] = {}
    for slot in slots:
        by_storage.setdefault(local(slot.param).untyped_storage()._cdata, []).append(slot)
    return by_storage


def storages_of(slots: list[Slot]) -> Iterator[ReleasedStorage]:
    """The storages of params, each made when it is asked for."""
    for group in slots_by_storage(slots).values():
        yield ReleasedStorage(local(group[0].param).untyped_storage(), group)
