"""Comm tables and shards, for optimizers on several ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..params.members import Member
from ..params.sharding import shard_of
from .process_group import ProcessGroupComm
from .replicas import Ranks, mark_replicas, ranks_of


def comm_for(
    members: list[Member], process_group: dist.ProcessGroup | None, timeout_seconds: float
) -> ProcessGroupComm | None:
    """The comm table of the ranks that hold these params: the ranks of `process_group`, otherwise those of
    the DTensors' largest mesh. None if the params are on this process alone. All ranks must call this."""
    meshes: dict[Ranks, Member] = {}
    for member in members:
        if hasattr(member.param, "device_mesh"):
            meshes.setdefault(ranks_of(member.param.device_mesh), member)
    if process_group is not None:
        group_ranks = dist.get_process_group_ranks(process_group)
        for ranks, member in meshes.items():
            if dist.get_rank() in ranks and not set(ranks) <= set(group_ranks):
                raise ValueError(
                    f"parameter {member.name!r} is on the ranks {list(ranks)}, but process_group has the "
                    f"ranks {group_ranks}; give the group of all that hold parts of these parameters"
                )
        return ProcessGroupComm(group_ranks, timeout_seconds)
    if not meshes:
        return None
    largest = max(meshes, key=len)
    if not all(set(ranks) <= set(largest) for ranks in meshes):
        listed = ", ".join(f"{m.name!r} on ranks {list(ranks)}" for ranks, m in meshes.items())
        raise ValueError(
            f"the parameters are spread over different sets of ranks ({listed}); give the group of "
            "all of them as process_group"
        )
    mesh: Any = meshes[largest].param
    root = ranks_of(_root_of(mesh.device_mesh))
    no_clipping = "" if set(root) <= set(largest) else _part_of_a_mesh(largest, root)
    if len(largest) == 1 and not no_clipping:
        return None
    return ProcessGroupComm(list(largest), timeout_seconds, no_clipping)


def _root_of(mesh: Any) -> Any:
    """The root mesh of which a mesh is a part, or the mesh itself."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed import device_mesh  # as versions before 2.10 have it

    return device_mesh._mesh_resources.get_root_mesh(mesh)


def _part_of_a_mesh(ranks: Ranks, root: Ranks) -> str:
    return (
        f"max_grad_norm: the parameters are on the ranks {list(ranks)} of a device mesh of {list(root)}, and "
        "whether the others hold parameters of the same model, as the stages of a pipeline do, is not known; "
        "give the ranks whose gradients make up the norm as process_group=, those of the whole mesh if it "
        "is a pipeline, else those of these parameters' mesh"
    )


def with_shards(
    members: list[Member],
    comm: ProcessGroupComm | None,
    replica_group: dist.ProcessGroup | None,
) -> list[Member]:
    """The members, each with the part of its tensor that this rank holds. With a comm table all its ranks
    must call this."""
    shards = {member.name: shard_of(member.param, member.name) for member in members}
    if comm is not None:
        comm.register()
        params = {member.name: member.param for member in members}
        with comm.exchanging():
            shards, comm.no_saving = mark_replicas(shards, params, comm.group, replica_group)
    return [member._replace(shard=shards[member.name]) for member in members]
