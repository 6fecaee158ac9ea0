"""Part: which elements of a whole tensor a rank holds."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a whole tensor that a rank holds: boxes (offsets, extents), one after the other, and optionally a
    range of the elements in them (first, count)."""

    shape: tuple[int, ...]  # of the whole tensor
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    range: tuple[int, int] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.count == math.prod(self.shape)

    @property
    def count(self) -> int:
        """The number of its elements."""
        return self._boxed if self.range is None else self.range[1]

    @property
    def _boxed(self) -> int:
        return sum(math.prod(extents) for _, extents in self.boxes)

    def elements_of(self, tensor: Tensor) -> Tensor:
        """The elements of this part, in the order in which the rank holds them."""
        whole = tensor.detach().reshape(self.shape)
        cut = []
        for offsets, extents in self.boxes:
            box = whole[tuple(slice(first, first + count) for first, count in zip(offsets, extents))]
            cut.append(box.reshape(-1))
        first, count = self.range or (0, self._boxed)
        return torch.cat(cut)[first : first + count]

    def in_tensor(self, indices: Tensor) -> Tensor:
        """Ascending indices in this part as indices in the whole tensor."""
        passed = self.range[0] if self.range else 0
        indices = indices + passed
        found, end = [], 0
        for offsets, extents in self.boxes:
            begin, end = end, end + math.prod(extents)
            low, high = torch.searchsorted(indices, torch.tensor([begin, end], device=indices.device)).tolist()
            found.append(self._in_box(indices[low:high] - begin, offsets, extents))
        return torch.cat(found)

    def _in_box(self, indices: Tensor, offsets: tuple[int, ...], extents: tuple[int, ...]) -> Tensor:
        place, step = torch.zeros_like(indices), 1
        for offset, extent, size in zip(reversed(offsets), reversed(extents), reversed(self.shape)):
            place += (indices % max(extent, 1) + offset) * step
            indices = indices // max(extent, 1)
            step *= size
        return place

    def content(self) -> list[Any]:
        return [self.shape, self.boxes, self.range]

    @classmethod
    def of(cls, content: Any) -> Part:
        """The part with that content, which may come from a file. Raises ValueError if there can be no such part."""
        shape, boxes, bounds = content
        shape = tuple(int(size) for size in shape)
        boxes = tuple((tuple(map(int, offsets)), tuple(map(int, extents))) for offsets, extents in boxes)
        part = cls(shape, boxes, None if bounds is None else (int(bounds[0]), int(bounds[1])))
        first, count = part.range or (0, part._boxed)
        fits = bool(boxes) and first >= 0 and count >= 0 and first + count <= part._boxed
        for offsets, extents in boxes:
            fits = fits and len(offsets) == len(extents) == len(shape)
            fits = fits and all(
                0 <= offset <= offset + extent <= size for offset, extent, size in zip(offsets, extents, shape)
            )
        if not fits:
            raise ValueError(f"no part of a tensor of shape {shape}")
        return part
