"""WeightPatch: which elements of a model's params have changed, and to what."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .. import abi
from ..params.tensors import local
from . import files
from .part import Part


@dataclasses.dataclass(frozen=True)
class WeightChange:
    """The changes of one param, or of the shard of it that this rank holds. Elements are counted row by row."""

    shape: tuple[int, ...]  # of the tensor that this rank holds
    indices: Tensor | None  # int64, ascending; None: `values` has all elements
    values: Tensor  # the new values; if there are no indices, in the shape of the param
    hash: int  # of the tensor after the change
    base_hash: int | None  # of the tensor before the change; None: not known, because `values` has all elements
    shard: Part | None = None  # which part of a larger tensor this is; None: a whole tensor
    # If changes of shards were gathered: the shards. `hash` is then the hash of their hashes in this order.
    parts: tuple[Part, ...] = ()

    @property
    def dense(self) -> bool:
        """Whether it has all elements."""
        return self.indices is None

    def on_host(self) -> WeightChange:
        """The same change in host memory."""
        indices = None if self.indices is None else self.indices.cpu()
        return dataclasses.replace(self, indices=indices, values=self.values.cpu())

    def applied_to(self, tensor: Tensor) -> Tensor:
        """A copy of the tensor with the change."""
        if self.indices is None:
            return self.values.to(tensor.device).clone(memory_format=torch.contiguous_format)
        flat = tensor.detach().reshape(-1).clone()
        flat[self.indices.to(tensor.device)] = self.values.to(tensor.device)
        return flat.view(self.shape)

    def hash_of(self, tensor: Tensor) -> int:
        """The hash of a tensor, computed as `hash` was."""
        if not self.parts:
            return hash_of(tensor)
        return hash_of_hashes([hash_of(part.elements_of(tensor)) for part in self.parts])


class WeightPatch:
    """The changes of params by name. It iterates over pairs of a name and a WeightChange, in the order of the params.
    Params of which nothing has changed are there too: their hash lets a follower notice that it has fallen behind."""

    def __init__(
        self, changes: dict[str, WeightChange], acknowledge: Callable[[], None] | None = None
    ) -> None:
        self._changes = changes
        self._acknowledge = acknowledge

    def __iter__(self) -> Iterator[tuple[str, WeightChange]]:
        return iter(self._changes.items())

    def __len__(self) -> int:
        return len(self._changes)

    def __getitem__(self, name: str) -> WeightChange:
        return self._changes[name]

    def __contains__(self, name: str) -> bool:
        return name in self._changes

    def __repr__(self) -> str:
        changed = sum(change.values.numel() for _, change in self)
        whole = sum(change.dense for _, change in self)
        return f"<WeightPatch of {len(self)} params: {changed} values, {whole} params whole>"

    def acknowledge(self) -> None:
        """Says that all followers have applied the patch, so that the next one begins from here. Until then the next
        patch contains all changes of this one again, so a patch that is lost on its way does no harm."""
        if self._acknowledge is None:
            raise abi.InvalidStateError(
                "this patch comes from a file, and only the optimizer's own can be acknowledged; call acknowledge() of "
                "what weight_changes() returned"
            )
        self._acknowledge()

    def to_file(self, path: str | os.PathLike[str]) -> None:
        """Writes a safetensors file, which appears as a whole or not at all. docs/PYTORCH.md has the names in it."""
        tensors, metadata = {}, {}
        for name, change in self:
            tensors[f"{name}.values"] = change.values
            if change.indices is not None:
                tensors[f"{name}.indices"] = change.indices
            entry = files.Entry(change.shape, change.hash, change.base_hash, change.shard, change.parts)
            metadata[name] = entry.text()
        files.write(path, tensors, {"format": files.FORMAT, "params": json.dumps(metadata)})

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> WeightPatch:
        """Reads what to_file() has written, into memory of the CPU."""
        tensors, metadata = files.read(path)
        changes = {}
        for name, text in metadata.items():
            entry = files.Entry.of(path, name, text)
            values = files.tensor_of(path, tensors, f"{name}.values")
            indices = tensors.get(f"{name}.indices")
            changes[name] = WeightChange(
                entry.shape, indices, values, entry.hash, entry.base_hash, entry.shard, entry.parts
            )
            _check(path, name, changes[name])
        return cls(changes)


def _check(path: str | os.PathLike[str], name: str, change: WeightChange) -> None:
    """Refuses what cannot be in a patch, because other code may have made the file."""
    count = math.prod(change.shape)
    if change.indices is None:
        fits = tuple(change.values.shape) == change.shape
    else:
        indices = change.indices
        fits = indices.dtype == torch.int64 and change.values.shape == indices.shape and indices.dim() == 1
        fits = fits and (indices.numel() == 0 or bool(indices.min() >= 0 and indices.max() < count))
    if not fits:
        raise ValueError(
            f"{os.fspath(path)!r} does not fit together for {name!r}: its values or indices are not those of a tensor "
            f"of shape {change.shape}; write the file with WeightPatch.to_file()"
        )


def hash_of(tensor: Tensor) -> int:
    """The hash of a tensor's elements, row by row, as the library computes it for params."""
    on_host = local(tensor).detach().contiguous().cpu()
    return abi.content_hash(on_host.data_ptr(), on_host.numel() * on_host.element_size())


def hash_of_hashes(hashes: list[int]) -> int:
    words = torch.tensor([word - (1 << 64) if word >> 63 else word for word in hashes], dtype=torch.int64, device="cpu")
    return hash_of(words)
