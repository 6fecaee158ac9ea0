"""Whether strides fill memory, and in which order."""

from __future__ import annotations

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one range of memory, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def is_same_order(shape: torch.Size, one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two strides put all elements at the same places. The strides of dimensions of size 1 have no effect."""
    return shape.numel() == 0 or all(
        a == b for size, a, b in zip(shape, one, other) if size != 1
    )
