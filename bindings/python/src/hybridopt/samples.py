"""Samples: some bits of params, by which a write to them is noticed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .tensors import in_memory_order

# What is looked at of each param: so many runs of so many bytes, spread over it.
RUNS, RUN_BYTES = 8, 64


def samples_on_host(address: int, size_bytes: int) -> bytes:
    """The sample of a dense tensor in host memory."""
    if size_bytes <= RUNS * RUN_BYTES:
        return ctypes.string_at(address, size_bytes) if size_bytes else b""
    stride = (size_bytes - RUN_BYTES) // (RUNS - 1) // 4 * 4
    return b"".join(ctypes.string_at(address + i * stride, RUN_BYTES) for i in range(RUNS))


def sample_of(tensor: Tensor) -> Tensor:
    """The same of a dense tensor anywhere, as a view."""
    itemsize, count = tensor.element_size(), tensor.numel()
    if count * itemsize <= RUNS * RUN_BYTES:
        return in_memory_order(tensor).view(torch.int16)
    stride = (count * itemsize - RUN_BYTES) // (RUNS - 1) // 4 * 4 // itemsize
    runs = (RUNS, RUN_BYTES // itemsize)
    return tensor.as_strided(runs, (stride, 1), tensor.storage_offset()).view(torch.int16)


class Samples:
    """The samples of dense tensors, taken where the tensors are, in two copies however many they are."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        views = [sample_of(tensor) for tensor in tensors]
        self._lengths = [view.numel() for view in views]
        self._order = sorted(range(len(views)), key=lambda index: views[index].dim())
        short = [views[index] for index in self._order if views[index].dim() == 1]
        long = [views[index] for index in self._order if views[index].dim() == 2]
        parts = [torch.cat(views).reshape(-1) for views in (short, long) if views]
        self._content = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int16, device="cpu")

    def equal(self, others: Samples) -> bool:
        """Whether samples of the same tensors are the same. The device is asked once."""
        return torch.equal(self._content, others._content)

    def bytes(self) -> list[bytes]:
        """Each tensor's sample."""
        on_host = self._content.cpu()
        content = ctypes.string_at(on_host.data_ptr(), 2 * on_host.numel())
        cut, begin = [b""] * len(self._lengths), 0
        for index in self._order:
            end = begin + 2 * self._lengths[index]
            cut[index] = content[begin:end]
            begin = end
        return cut
