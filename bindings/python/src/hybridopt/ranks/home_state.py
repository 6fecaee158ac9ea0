"""State of matrices between their homes, which have it whole, and the ranks, which show it in shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..params.sharding import as_dtensor, local_part
from . import homes
from .homes import CutMatrix

Entry = dict[str, Any]  # of `state`, by torch's names
# The dtype and the dimensions behind those of the matrix, by name; None for what is no tensor.
Layout = dict[str, "tuple[torch.dtype, tuple[int, ...]] | None"]


def in_shards(
    cuts: list[CutMatrix], params: list[DTensor], entries: list[Entry], group: dist.ProcessGroup | None
) -> list[Entry]:
    """The entries of homes, with a shard of each tensor on each rank: DTensors in host memory, with the placements of
    the param. All ranks of the group call this."""
    own = {index: _layout(entries[index], cut) for index, cut in enumerate(cuts) if cut.home == dist.get_rank()}
    layouts: dict[int, Layout] = {}
    for rank, told in homes.told(own, group).items():
        layouts.update((index, told[index]) for index, cut in enumerate(cuts) if cut.home == rank)
    return [_shards(cut, params[i], entries[i], layouts[i]) for i, cut in enumerate(cuts)]


def without_memory(cut: CutMatrix, param: DTensor, value: Tensor) -> DTensor:
    """A DTensor on "meta" in place of a shard of a state tensor. `value` is that of the home, or one without elements."""
    shape = (*cut.extents(dist.get_rank()), *value.shape[len(cut.shape) :])
    return as_dtensor(torch.empty(shape, dtype=value.dtype, device="meta"), param)


def at_homes(
    cuts: list[CutMatrix], params: list[DTensor], entries: list[Entry], group: dist.ProcessGroup | None
) -> list[Entry]:
    """The other way: entries with shards, or with whole tensors on all ranks, as those of homes. Tensors of ranks that are
    not home to a matrix have no element. All ranks of the group call this."""
    parts = [_parts(param, entry) for param, entry in zip(params, entries)]
    own = [_layout(entry, cut) for entry, cut in zip(parts, cuts)]
    for rank, told in homes.told(own, group).items():
        shared = [index for index, cut in enumerate(cuts) if rank in cut.runs]
        for index in shared:
            cut, here, there = cuts[index], own[index], told[index]
            if here != there:
                raise ValueError(
                    f"the state of parameter {cut.name!r} in the loaded state_dict has {_listed(here)}, but that of rank {rank} of "
                    f"the group has {_listed(there)}; load a state_dict of one optimizer on all ranks"
                )
    return [_whole(cut, param, entry) for cut, param, entry in zip(cuts, params, parts)]


def _layout(entry: Entry, cut: CutMatrix) -> Layout:
    return {
        key: (value.dtype, tuple(value.shape[len(cut.shape) :])) if isinstance(value, Tensor) else None
        for key, value in sorted(entry.items())
    }


def _listed(layout: Layout) -> str:
    each = (key if value is None else f"{key} in {value[0]}" for key, value in layout.items())
    return ", ".join(each) or "nothing"


def _shards(cut: CutMatrix, param: DTensor, entry: Entry, layout: Layout) -> Entry:
    device, shards = param._local_tensor.device, {}
    for key, found in layout.items():
        if found is None:
            shards[key] = entry.get(key)
            continue
        dtype, behind = found
        part = torch.empty((*cut.extents(dist.get_rank()), *behind), dtype=dtype, device=device)
        whole = entry[key].to(device) if cut.home == dist.get_rank() else part
        homes.scatter(cut, whole, part)
        shards[key] = as_dtensor(part.cpu(), param)
    return shards


def _parts(param: DTensor, entry: Entry) -> Entry:
    device = param._local_tensor.device
    return {
        key: local_part(value, param).to(device).contiguous() if isinstance(value, Tensor) else value
        for key, value in entry.items()
    }


def _whole(cut: CutMatrix, param: DTensor, parts: Entry) -> Entry:
    entry: Entry = {}
    for key, part in sorted(parts.items()):
        entry[key] = part
        if isinstance(part, Tensor):
            whole = homes.empty_like(cut, part)
            homes.gather(cut, part, whole)
            entry[key] = whole.cpu()
    return entry
