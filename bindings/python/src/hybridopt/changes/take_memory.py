"""TakeMemory: memory for the indices and values of an optimizer's takes, one take after the other."""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor


class TakeMemory:
    """Memory on the host is used again once no array of the last take is alive: the system gives out new memory page by
    page while it is written, which takes a large part of the time of a take. Memory on a GPU is torch's, which uses it
    again by itself."""

    def __init__(self) -> None:
        self._bytes = 0  # that the last takes have used
        self._memory: Tensor | None = None
        self._lent: weakref.ref[Loan] | None = None

    def lend(self, needed: int = 0, device: torch.device | None = None) -> Loan:
        """Memory for a take that needs `needed` bytes, or about as many as the last one; device None: on the host."""
        least = max(needed, self._bytes)
        if device is not None:
            return Loan(torch.empty(least + least // 2, dtype=torch.uint8, device=device))
        memory = self._memory
        is_free = self._lent is None or self._lent() is None
        if memory is None or not is_free or not least <= memory.numel() <= 4 * least:
            memory = torch.empty(least + least // 2, dtype=torch.uint8, device="cpu")  # what nobody writes costs nothing
        loan = Loan(memory)
        self._memory, self._lent = memory, weakref.ref(loan)
        return loan

    def note_used(self, used: int) -> None:
        """Notes the bytes that a take has used. After a small one lend() still plans half of what it planned before."""
        self._bytes = max(used, self._bytes // 2)


class Loan:
    """The memory of one take. On the host each array has a storage of its own, so that code that sends or saves one
    does not send the memory of all others, and the loan lives as long as one of its arrays. On a GPU arrays are views
    of one tensor."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.bytes = memory.numel()
        self.address = memory.data_ptr()

    def array(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        if count == 0:
            return torch.empty(0, dtype=dtype, device=self._memory.device)
        if self._memory.device.type != "cpu":
            return self._memory[offset : offset + count * dtype.itemsize].view(dtype)
        part = (ctypes.c_char * (count * dtype.itemsize)).from_address(self.address + offset)
        part.loan = self  # type: ignore[attr-defined]
        return torch.frombuffer(part, dtype=dtype)
