"""What optimizers on several ranks have beside those on one: a comm table, and shards."""

from __future__ import annotations

import dataclasses

import torch.distributed as dist

from .members import Member
from .process_group import ProcessGroupComm
from .sharding import mark_replicas, shard_of


def comm_for(
    members: list[Member], process_group: dist.ProcessGroup | None, timeout_seconds: float
) -> ProcessGroupComm | None:
    """The comm table of the ranks that hold these params together: those of `process_group`, else
    those of the DTensors' mesh; None for params of this process alone. All ranks call this."""
    if process_group is not None:
        return ProcessGroupComm(dist.get_process_group_ranks(process_group), timeout_seconds)
    meshes = {
        tuple(mesh.mesh.flatten().tolist()): member.name
        for member in members
        if (mesh := getattr(member.param, "device_mesh", None)) is not None
    }
    if len(meshes) > 1:
        listed = ", ".join(f"{name!r} on ranks {list(ranks)}" for ranks, name in meshes.items())
        raise ValueError(
            f"the parameters are spread over different sets of ranks ({listed}); give the group of "
            "all of them as process_group"
        )
    for ranks in meshes:
        if len(ranks) > 1:
            return ProcessGroupComm(list(ranks), timeout_seconds)
    return None


def with_shards(members: list[Member], comm: ProcessGroupComm | None) -> list[Member]:
    """Members that know which part of which tensor they are. With a comm table all its ranks call
    this."""
    shards = {member.name: shard_of(member.param, member.name) for member in members}
    if comm is not None:
        comm.register()
        params = {member.name: member.param for member in members}
        shards = mark_replicas(shards, params, comm.group)
    return [dataclasses.replace(member, shard=shards[member.name]) for member in members]
