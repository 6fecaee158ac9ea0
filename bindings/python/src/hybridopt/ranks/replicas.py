"""Finds which ranks hold the same tensor, so that exactly one of them counts it in the norm and saves it.

If a DTensor's mesh has all ranks, its placements say that. Two other kinds of params need more:
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import abi
from ..params.sharding import SHARD_ATTRIBUTE, TensorShard

Ranks = tuple[int, ...]  # numbers in the whole job
_DIGEST_ELEMENTS = 1 << 22  # elements that are read at a time: their 64-bit copies take 64 MiB
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def ranks_of(mesh: Any) -> Ranks:
    return tuple(mesh.mesh.flatten().tolist())


@dataclasses.dataclass
class Told:
    """What each rank sends to the others before bits are compared."""

    links: set[Ranks]  # sets of ranks that hold parts or copies of the same params
    names_group: bool  # whether the caller has named one of these sets
    holders: dict[str, Ranks]  # by name: the ranks that hold one copy of a param that may have more copies


def mark_replicas(
    shards: dict[str, TensorShard | None],
    params: dict[str, Tensor],
    group: dist.ProcessGroup,
    replica_group: dist.ProcessGroup | None,
) -> tuple[dict[str, TensorShard | None], str]:
    """Marks shards that another rank counts as replicas. Returns all shards, and the reason why a checkpoint
    cannot hold them ("" if it can). All ranks of the group must call this."""
    own = _told(shards, params, group, replica_group)
    ranks = dist.get_process_group_ranks(group)
    told: dict[int, Told] = dict(zip(ranks, _gathered(own, group)))
    held: dict[str, set[Ranks]] = {}
    for theirs in told.values():
        for name, holders in theirs.holders.items():
            held.setdefault(name, set()).add(holders)
    contested = {name: sorted(copies, key=min) for name, copies in held.items() if len(copies) > 1}
    if not contested:
        return shards, ""
    digests = dict(
        zip(
            ranks,
            _gathered(
                {name: _digest(name, params[name], shards[name]) for name in contested if name in own.holders},
                group,
            ),
        )
    )
    linked = _linked(told)
    marked, namesakes = dict(shards), ""
    for name, copies in contested.items():
        counting: dict[int, Ranks] = {}
        for holders in copies:
            first = counting.setdefault(linked[holders[0]], holders)
            _check_same(name, first, holders, digests)
            if first != holders and dist.get_rank() in holders:
                marked[name] = _as_replica(shards[name], params[name])
        if len(counting) > 1:
            one, other = [min(holders) for holders in counting.values()][:2]
            if not all(theirs.names_group for theirs in told.values()):
                raise ValueError(_unknown(name, one, other))
            namesakes = namesakes or (
                f"parameter {name!r} is the name of different tensors on ranks {one} and {other}, of which "
                "a checkpoint can hold one; name them apart, by the stage of a pipeline, say"
            )
    return marked, namesakes


def _told(
    shards: dict[str, TensorShard | None],
    params: dict[str, Tensor],
    group: dist.ProcessGroup,
    replica_group: dist.ProcessGroup | None,
) -> Told:
    rank, everyone = dist.get_rank(), set(dist.get_process_group_ranks(group))
    told = Told(set(), replica_group is not None, {})
    if replica_group is not None:
        told.links.add(tuple(dist.get_process_group_ranks(replica_group)))
    for name, param in params.items():
        mesh = getattr(param, "device_mesh", None)
        ranks = (rank,) if mesh is None else ranks_of(mesh)
        told.links.add(ranks)
        says_itself = getattr(param, SHARD_ATTRIBUTE, None) is not None
        if not says_itself and rank in ranks and set(ranks) != everyone:
            told.holders[name] = ranks
    return told


def _gathered(own: Any, group: dist.ProcessGroup) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    return gathered


def _linked(told: dict[int, Told]) -> dict[int, int]:
    """For each rank the lowest rank that it is linked with, directly or through other ranks."""
    lowest = {rank: rank for rank in told}

    def find(rank: int) -> int:
        while lowest[rank] != rank:
            rank = lowest[rank]
        return rank

    for theirs in told.values():
        for link in theirs.links:
            roots = {find(rank) for rank in link if rank in lowest}
            for root in roots:
                lowest[root] = min(roots)
    return {rank: find(rank) for rank in told}


def _check_same(
    name: str, first: Ranks, other: Ranks, digests: dict[int, dict[str, tuple]]
) -> None:
    """Raises if two copies differ on any pair of ranks."""
    for one, two in zip(first, other):
        here, there = digests[one].get(name), digests[two].get(name)
        if here is None or here != there or len(first) != len(other):
            described = [
                f"{digest[0]} on ranks {list(ranks)}" if digest else "none"
                for digest, ranks in ((here, first), (there, other))
            ]
            raise ValueError(
                f"param {name}: ranks {one} and {two} hold different tensors of this name, "
                f"{described[0]} and {described[1]}; broadcast the model first if they are replicas, "
                f"else name them apart or set {SHARD_ATTRIBUTE}"
            )


def _unknown(name: str, one: int, other: int) -> str:
    return (
        f"param {name}: ranks {one} and {other} each have a tensor of this name, and no device mesh says "
        "whether it is the same one; if it is, give the group of ranks that have the same parameters "
        "(which DistributedDataParallel averages over) as replica_group=; if not, as in the stages of a "
        "pipeline, name them apart: AdamW((f'stage{stage}.{name}', param) for name, param in "
        "model.named_parameters())"
    )


def _as_replica(shard: TensorShard | None, param: Tensor) -> TensorShard:
    if shard is None:
        shape = tuple(param.shape) or (1,)
        shard = TensorShard(shape, (((0,) * len(shape), shape),))
    return dataclasses.replace(shard, replica=True)


def _digest(name: str, param: Tensor, shard: TensorShard | None) -> tuple:
    """Describes a tensor so that different ones differ: shape and dtype, the part that this rank holds, and
    two sums over its bits."""
    with torch.no_grad():
        here = getattr(param, "_local_tensor", param).detach()
        if here.numel() > 0 and here.data_ptr() == 0:
            raise abi.InvalidStateError(
                f"parameter {name!r} has no memory: its storage was freed or resized to 0. After a forward "
                "pass without a backward pass, an evaluation for example, the root of FSDP2 gives whole "
                "parameters instead of its shards; call model.reshard() before you make the optimizer"
            )
        bits = here.contiguous().view(-1).view(_BITS[here.element_size()])
        sums = [0, 0]
        for piece in bits.split(_DIGEST_ELEMENTS):
            wide = piece.to(torch.int64)
            order = torch.arange(1, wide.numel() + 1, dtype=wide.dtype, device=wide.device)
            sums[0] += int(wide.sum())
            sums[1] = (31 * sums[1] + int((wide * order).sum())) % (1 << 63)
    boxes = None if shard is None else (shard.boxes, shard.range, shard.replica)
    return f"{tuple(param.shape)} {param.dtype}", boxes, sums[0], sums[1]
