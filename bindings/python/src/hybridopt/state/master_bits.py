"""Masters and the params that they are rounded to, bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor


def lost_bits(low_dtype: torch.dtype) -> int:
    """How many of the lower bits of fp32 numbers masters do not have."""
    return 16 - 8 * low_dtype.itemsize


def joined(param: Tensor, low: Tensor) -> Tensor:
    """Split masters as numbers: the bf16 param is the upper half, rounded. A zero that others have
    written over a larger number stays one, though the lower half may be negative."""
    upper = param.view(torch.int16).to(torch.int32) << 16
    lost = low.to(torch.int32) << lost_bits(low.dtype)
    zeroed = (upper << 1 == 0) & (lost < 0)
    return torch.where(zeroed, upper, upper + lost).view(torch.float32)


def halves(master: Tensor, low_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Upper halves of masters as int16, and what is stored of the lower ones. Masters that have fewer bits
    are rounded to nearest, ties to even, before. The upper half rounds ties away from zero, so that what
    this has changed fits into the lower half."""
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
    """The lower halves of masters, and params that fit them where these do not (else None). Where a
    param is not its master's upper half, others have written it since, and it is right; but a master
    between two bf16 numbers may have been rounded the other way."""
    upper, low = halves(master, low_dtype)
    bits = param.view(torch.int16)
    as_even = master.bfloat16().view(torch.int16) == bits
    same = upper == bits
    fitting = None
    if (as_even & ~same).any():
        fitting = torch.where(as_even, upper, bits).view(torch.bfloat16)
    return torch.where(same | as_even, low, torch.zeros_like(low)), fitting
