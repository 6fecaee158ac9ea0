"""Masters and the params that they are rounded to, bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor


def lost_bits(low_dtype: torch.dtype) -> int:
    """The number of lower bits of fp32 numbers that masters do not have."""
    return 16 - 8 * low_dtype.itemsize


def joined(param: Tensor, low: Tensor) -> Tensor:
    """Split masters as numbers: the bf16 param is the rounded upper half. If other code has written a zero over a
    larger number, the result is zero, although the lower half may be negative."""
    upper = param.view(torch.int16).to(torch.int32) << 16
    lost = low.to(torch.int32) << lost_bits(low.dtype)
    zeroed = (upper << 1 == 0) & (lost < 0)
    return torch.where(zeroed, upper, upper + lost).view(torch.float32)


def halves(master: Tensor, low_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Upper halves of masters as int16, and the part of the lower halves that is stored. Masters with fewer bits are
    first rounded to nearest, ties to even. The upper half rounds ties away from zero, so that the change that this
    rounding makes fits into the lower half."""
    bits = master.contiguous().view(torch.int32)
    lost = lost_bits(low_dtype)
    if lost > 0:
        nearest = bits + ((1 << (lost - 1)) - 1) + (bits >> lost & 1)
        bits = torch.where(master.isnan(), bits, nearest >> lost << lost)
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16), (bits - (upper << 16) >> lost).to(low_dtype)


def as_bytes(low: Tensor) -> Tensor:
    """A view of lower halves as bytes: one or two for each element, in a last dimension of their own.
    torch.distributed has no collective for integers of 16 bits."""
    return low.unsqueeze(-1).view(torch.uint8)


def as_halves(stored: Tensor) -> Tensor:
    """Lower halves as integers. They are stored as as_bytes() shows them, or in int16 as older versions did."""
    if stored.dtype != torch.uint8:
        return stored
    if not stored.is_contiguous() or stored.storage_offset() % 2 != 0:
        stored = stored.clone(memory_format=torch.contiguous_format)
    return stored.view({1: torch.int8, 2: torch.int16}[stored.shape[-1]]).squeeze(-1)


def split(
    master: Tensor, param: Tensor, low_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The lower halves of masters, and, if the params do not fit these masters, new params (else None). If a param
    is not the upper half of its master, other code has written the param since, and the param is right. There is one
    exception: if a master is halfway between two bf16 numbers, the param may have been rounded the other way."""
    upper, low = halves(master, low_dtype)
    bits = param.view(torch.int16)
    as_even = master.bfloat16().view(torch.int16) == bits
    same = upper == bits
    fitting = None
    if (as_even & ~same).any():
        fitting = torch.where(as_even, upper, bits).view(torch.bfloat16)
    return torch.where(same | as_even, low, torch.zeros_like(low)), fitting
