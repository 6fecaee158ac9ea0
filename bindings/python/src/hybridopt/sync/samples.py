"""Samples: some bits of each param. If they have changed, somebody has written the param. Samples are read
at the addresses that the library knows, so the params must be bound before."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..params.bound import Addresses
from ..params.registered import Slot
from ..params.tensors import tensor_at

# The sample of a param is RUNS runs of RUN_BYTES bytes, spread evenly over it.
RUNS, RUN_BYTES = 8, 64
LONG_BYTES = RUNS * RUN_BYTES  # the sample of a param up to this size is the whole param


def stride_of(size_bytes: int) -> int:
    """The bytes from one run to the next, in a param of that size."""
    return (size_bytes - RUN_BYTES) // (RUNS - 1) // 4 * 4


class Samples:
    """Samples are taken and kept on the device of the params, by two operations for all params together; one more
    operation compares them."""

    def __init__(self, slots: list[Slot], addresses: Addresses, device: torch.device) -> None:
        self._slots = slots
        self._addresses = addresses
        self._device = device
        self._moves = -1
        self._short = [slot for slot in slots if slot.bytes <= LONG_BYTES]
        self._long = [slot for slot in slots if slot.bytes > LONG_BYTES]
        self._views: list[list[Tensor]] = []

    def take(self) -> Tensor:
        if self._moves != self._addresses.moves:
            self._moves = self._addresses.moves
            both = (self._short, self._long)
            self._views = [[self._view_of(slot) for slot in slots] for slots in both if slots]
        return torch.cat([torch.cat(views).reshape(-1) for views in self._views])

    def _view_of(self, slot: Slot) -> Tensor:
        address = self._addresses.params[slot.id]
        flat = tensor_at(address, slot.bytes // 2, torch.int16, self._device)
        if slot.bytes <= LONG_BYTES:
            return flat
        return flat.as_strided((RUNS, RUN_BYTES // 2), (stride_of(slot.bytes) // 2, 1))

    def cut(self, content: Tensor) -> list[bytes]:
        """The sample of each slot."""
        on_host = content.cpu()
        whole = ctypes.string_at(on_host.data_ptr(), 2 * on_host.numel())
        sample_of, begin = {}, 0
        for slot in self._short + self._long:
            end = begin + min(slot.bytes, LONG_BYTES)
            sample_of[slot.id] = whole[begin:end]
            begin = end
        return [sample_of[slot.id] for slot in self._slots]
