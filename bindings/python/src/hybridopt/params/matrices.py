"""Checks of params that an algorithm updates as whole matrices."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from .. import abi
from .members import named
from .strides import is_dense
from .tensors import is_spread, local

OTHER_GROUP = "give it to a group with algorithm='adamw'"


def check_matrices(algorithm: int, index: int, group: dict[str, Any]) -> None:
    """Raises if Muon cannot update a param of the group."""
    if algorithm == abi.OFFLOAD_MUON:
        for name, param in named(index, group):
            check_matrix(name, param)


def check_matrix(name: str, param: Tensor) -> None:
    cut = cut_by(param)
    if cut:
        raise ValueError(
            f"parameter {name!r} is cut between ranks ({cut}), but Muon needs whole matrices; use hybridopt.ShardedMuon, which "
            f"puts them together, {OTHER_GROUP}, or leave it out of the sharding (fully_shard(ignored_params=...), say)"
        )
    if param.ndim != 2:
        raise ValueError(
            f"parameter {name!r} has the shape {tuple(param.shape)}, but Muon updates matrices, of two dimensions; "
            f"{OTHER_GROUP}, as hybridopt.muon_groups(model) does"
        )
    current = local(param)
    if is_dense(current) and not current.is_contiguous():  # a matrix with gaps is updated in a dense copy
        raise ValueError(
            f"parameter {name!r} has the strides {current.stride()}, but Muon needs rows that follow each other; "
            f"make the parameter from contiguous() of its matrix, or {OTHER_GROUP}"
        )


def cut_by(param: Tensor) -> str:
    """What says that other ranks have parts of the param; "" if this one has all of it. All ranks answer alike, also those
    whose part is the whole by chance."""
    if getattr(param, "_fsdp_flattened", False):
        return "by FullyShardedDataParallel, FSDP1"
    if not is_spread(param):
        return ""
    from . import sharding  # which imports much

    shard = getattr(param, sharding.SHARD_ATTRIBUTE, None)
    if isinstance(shard, sharding.TensorShard):
        count = sum(math.prod(extents) for _, extents in shard.boxes)
        if count == 0:
            return ""  # nothing of a matrix is no part of one
        is_whole = count == math.prod(shard.global_shape) and shard.global_shape == tuple(param.shape)
        return "" if is_whole else f"{sharding.SHARD_ATTRIBUTE} says that it is a part of {shard.global_shape}"
    if not isinstance(param, sharding.DTensor):
        return ""  # shard_of() refuses another attribute
    parts = zip(param.device_mesh.shape, param.placements)
    is_whole = all(size == 1 or isinstance(placement, sharding.Replicate) for size, placement in parts)
    return "" if is_whole else f"a DTensor with the placements {param.placements}"
