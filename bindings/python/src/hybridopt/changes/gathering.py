"""Gathering: the changes of all ranks' shards, put together on one rank."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from ..base.checks import shown
from .part import Part
from .patch import WeightChange, WeightPatch, hash_of_hashes

# What a rank has of each param: a part of it, or all (None).
Held = dict[str, Part | None]


def gather_changes(patch: WeightPatch, to: int = 0, group: Any = None) -> WeightPatch:
    """A patch of whole tensors on rank `to`, made of the patches of all ranks; on the other ranks an empty one.

        patch = hybridopt.gather_changes(optimizer.weight_changes(), to=0)
        if rank == 0: patch.to_file("step-17.safetensors")
        patch.acknowledge()                  # on every rank, once the followers have it

    All ranks that hold parts of these params must call it. `group` is a process group of theirs (None: the default
    one), and `to` is a rank as torch.distributed.get_rank() counts them. Only what has changed is sent, and the patch
    is in host memory."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("there is no process group; call torch.distributed.init_process_group() first")
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    if isinstance(to, bool) or not isinstance(to, int) or to not in ranks:
        raise ValueError(f"Invalid to: {shown(to)}, expected one of the ranks {ranks} of the process group")
    held: list[Held] = [{} for _ in ranks]
    dist.all_gather_object(held, {name: change.shard for name, change in patch}, group=group)
    own = _senders(held, first=ranks.index(to))[dist.get_rank(group)]
    sent: list[Any] | None = [None] * len(ranks) if dist.get_rank() == to else None
    dist.gather_object({name: patch[name].on_host() for name in own}, sent, dst=to, group=group)
    whole = {}
    if sent is not None:
        names = dict.fromkeys(name for row in [held[ranks.index(to)], *held] for name in row)
        whole = {name: _whole(name, [row[name] for row in sent if name in row]) for name in names}
    return WeightPatch(whole, patch.acknowledge)


def _senders(held: list[Held], first: int) -> list[list[str]]:
    """The names that each rank sends. One rank sends what several hold: `first` if it is one of them."""
    senders: list[list[str]] = [[] for _ in held]
    seen = set()
    for rank in [first, *range(len(held))]:
        for name, part in held[rank].items():
            if (name, part) not in seen:
                seen.add((name, part))
                senders[rank].append(name)
    return senders


def _whole(name: str, changes: list[WeightChange]) -> WeightChange:
    """The change of a whole tensor, made of those of its parts."""
    for change in changes:
        if change.shard is None or change.shard.is_whole:
            return WeightChange(change.shape, change.indices, change.values, change.hash, change.base_hash)
    pairs = [(change, change.shard) for change in changes if change.shard is not None and change.shard.count]
    shape = changes[0].shard.shape if changes[0].shard is not None else ()
    count = sum(part.count for _, part in pairs)
    if count != math.prod(shape):
        raise ValueError(
            f"the ranks of the process group hold {count} of {math.prod(shape)} elements of parameter {name!r}; give "
            "the group of all ranks that hold parts of these parameters"
        )
    indices, values = [], []
    for change, part in pairs:
        own = torch.arange(part.count, device=change.values.device) if change.indices is None else change.indices
        indices.append(part.in_tensor(own))
        values.append(change.values.reshape(-1))
    order = torch.argsort(torch.cat(indices))
    ordered = torch.cat(values)[order]
    hashes = [change.hash for change, _ in pairs]
    bases = [change.base_hash for change, _ in pairs if change.base_hash is not None]
    return WeightChange(
        shape,
        None if len(order) == count else torch.cat(indices)[order],
        ordered.view(shape) if len(order) == count else ordered,
        hash_of_hashes(hashes),
        hash_of_hashes(bases) if len(bases) == len(pairs) else None,
        parts=tuple(part for _, part in pairs),
    )
