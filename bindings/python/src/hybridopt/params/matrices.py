"""Checks of params that an algorithm updates as whole matrices."""

from __future__ import annotations

import math
import sys
from typing import Any

from torch import Tensor

from .. import abi
from ..base.checks import is_switch, is_whole, shown
from .members import named
from .strides import is_dense
from .tensors import is_spread, local

OTHER_GROUP = "give it to a group with algorithm='adamw'"


def check_matrices(algorithm: int, index: int, group: dict[str, Any]) -> None:
    """Raises if Muon cannot update a param of the group."""
    stacked, rows = group.get("stacked", False), group.get("split_rows")
    if not is_switch(stacked):
        raise ValueError(f"param group {index} has stacked={shown(stacked)}, expected True or False")
    if rows is not None:
        _check_split_rows(index, rows)
    if algorithm != abi.OFFLOAD_MUON:
        for key in ("stacked", "split_rows"):
            if group.get(key):
                raise ValueError(
                    f"param group {index} has {key}={shown(group[key])}, but {abi.ALGORITHMS[algorithm].name} updates no "
                    "matrices; leave it out"
                )
        return
    for name, param in named(index, group):
        check_matrix(name, param, bool(stacked))
        if rows and param.shape[-2] % sum(rows) != 0:
            raise ValueError(
                f"param group {index} has split_rows={shown(rows)}, which add up to {sum(rows)}, but parameter {name!r} has "
                f"{param.shape[-2]} rows, expected a multiple of the sum; put matrices of other shapes into a group of their own"
            )


def _check_split_rows(index: int, rows: Any) -> None:
    if not isinstance(rows, (list, tuple)) or not rows or not all(is_whole(each, 1, 2**44) for each in rows):
        raise ValueError(
            f"param group {index} has split_rows={shown(rows)}, expected a list of the rows of each part, such as "
            "(1024, 1024), or None"
        )


def check_matrix(name: str, param: Tensor, stacked: bool) -> None:
    is_stack = stacked and param.ndim == 3
    cut = cut_by(param, is_stack)
    if cut:
        raise ValueError(
            f"parameter {name!r} is cut between ranks ({cut}), but Muon needs whole matrices; use hybridopt.ShardedMuon, which "
            f"puts them together, {OTHER_GROUP}, or leave it out of the sharding (fully_shard(ignored_params=...), say)"
        )
    if param.ndim != 2 and not is_stack:
        stack = " (if it is a stack of matrices, as of experts, set stacked=True in its group)" if param.ndim == 3 else ""
        raise ValueError(
            f"parameter {name!r} has the shape {tuple(param.shape)}, but Muon updates matrices, of two dimensions{stack}; "
            f"{OTHER_GROUP}, as hybridopt.muon_groups(model) does"
        )
    current = local(param)
    if is_dense(current) and not current.is_contiguous():  # a matrix with gaps is updated in a dense copy
        raise ValueError(
            f"parameter {name!r} has the strides {current.stride()}, but Muon needs rows that follow each other; "
            f"make the parameter from contiguous() of its matrix, or {OTHER_GROUP}"
        )


def cut_by(param: Tensor, is_stack: bool = False) -> str:
    """What says that other ranks have parts of the param; "" if this one has all of it, or of a stack only whole matrices.
    All ranks answer alike, also those whose part is the whole by chance."""
    if getattr(param, "_fsdp_flattened", False):
        return "by FullyShardedDataParallel, FSDP1"
    if getattr(param, "tensor_model_parallel", False) and (ranks := _megatron_ranks(param)) > 1:
        return f"by Megatron-LM, over {ranks} tensor parallel ranks"
    if not is_spread(param):
        return ""
    from . import sharding  # which imports much

    shard = getattr(param, sharding.SHARD_ATTRIBUTE, None)
    if isinstance(shard, sharding.TensorShard):
        count = sum(math.prod(extents) for _, extents in shard.boxes)
        if count == 0:
            return ""  # nothing of a matrix is no part of one
        has_all = count == math.prod(shard.global_shape) and shard.global_shape == tuple(param.shape)
        return "" if has_all else f"{sharding.SHARD_ATTRIBUTE} says that it is a part of {shard.global_shape}"
    if not isinstance(param, sharding.DTensor):
        return ""  # shard_of() refuses another attribute
    parts = zip(param.device_mesh.shape, param.placements)
    has_all = all(
        size == 1 or isinstance(placement, sharding.Replicate) or (is_stack and getattr(placement, "dim", None) == 0)
        for size, placement in parts
    )
    return "" if has_all else f"a DTensor with the placements {param.placements}"


def _megatron_ranks(param: Tensor) -> int:
    """The ranks over which Megatron-LM cuts tensor parallel params such as this one, which it also marks where one rank
    has all of them."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return 1
    if getattr(param, "allreduce", True):  # False for experts
        return state.get_tensor_model_parallel_world_size()
    return state.get_expert_tensor_parallel_world_size()
