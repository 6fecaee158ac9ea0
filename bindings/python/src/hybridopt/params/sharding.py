"""TensorShard: which elements of a global tensor a process holds, and whether it counts them.

For the library a shard is a list of boxes in the global tensor; it knows nothing of placements. This
module computes the boxes of a DTensor from its placements, by the rules by which torch cuts tensors:
Shard(d) cuts the rest of dimension d as torch.chunk does; _StridedShard(d, k) first cuts it into k pieces
and then takes one part of each. So a rank holds a list of runs along each dimension, and the local tensor
is their product:

    rows  0..1, 4..5  x  columns 0..7          two boxes, one after the other in memory
    rows  0..1        x  columns 0..3, 8..11   four boxes: memory goes through the columns' runs
                                               row by row
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from .. import abi
from ..base.checks import kind_of
from .strides import is_dense

# A half-open range of indices along one dimension.
Run = tuple[int, int]
MAX_BOXES = 4096  # of the library
# The attribute in which a param says which part of which tensor it is (for Megatron's buffers, say).
SHARD_ATTRIBUTE = "offload_shard"


@dataclasses.dataclass(frozen=True)
class TensorShard:
    """The part of a global tensor that a process holds: boxes (offsets, extents), and optionally a range of
    the elements in them, counted through the boxes in order. If `replica`, this process updates the part,
    but another rank counts it in the norm and saves it."""

    global_shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    range: tuple[int, int] | None = None  # first element, number of elements
    replica: bool = False

    def struct(self) -> abi.offload_shard_t:
        """The shard as a struct of the ABI, which keeps its arrays alive."""
        dimensions = len(self.global_shape)
        begin, count = self.range or (0, 0)
        return abi.offload_shard_t(
            dimensions=dimensions,
            box_count=len(self.boxes),
            flags=abi.OFFLOAD_SHARD_RANGE if self.range else 0,
            global_shape=_int64s(self.global_shape),
            box_offsets=_int64s(i for offsets, _ in self.boxes for i in offsets),
            box_extents=_int64s(i for _, extents in self.boxes for i in extents),
            range_begin=begin,
            range_count=count,
        )


def _int64s(values: Any) -> Any:
    listed = list(values)
    return (ctypes.c_int64 * len(listed))(*listed)


def shard_of(param: Tensor, name: str) -> TensorShard | None:
    """The shard in a param's attribute, or the one that a DTensor's placements describe; None for a plain
    tensor without the attribute."""
    shard = getattr(param, SHARD_ATTRIBUTE, None)
    if shard is None:
        return _shard_of_dtensor(param, name) if isinstance(param, DTensor) else None
    if not isinstance(shard, TensorShard):
        raise TypeError(
            f"param {name}: {SHARD_ATTRIBUTE} is {kind_of(shard)}, expected a "
            "hybridopt.TensorShard"
        )
    return shard


def _shard_of_dtensor(param: DTensor, name: str) -> TensorShard:
    mesh = param.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank holds none of it
        nothing = (0,) * max(param.ndim, 1)
        return TensorShard(tuple(param.shape) or (1,), ((nothing, nothing),), replica=True)
    runs = runs_of(param.shape, mesh.shape, coordinate, param.placements, name)
    local = param._local_tensor
    extents = tuple(sum(end - begin for begin, end in dimension) for dimension in runs)
    if extents != tuple(local.shape):
        raise ValueError(
            f"param {name}: its local tensor has the shape {tuple(local.shape)}, expected "
            f"{extents} for {tuple(param.shape)} with {param.placements} on a mesh of "
            f"{tuple(mesh.shape)}; make it with distribute_tensor or fully_shard"
        )
    if is_dense(local) and not local.is_contiguous():  # a tensor with gaps is updated in a dense copy
        raise ValueError(
            f"param {name}: its local tensor has the strides {local.stride()}, expected a "
            "contiguous one; call contiguous() on the param before it is distributed"
        )
    replica = any(
        isinstance(placement, Replicate) and index > 0
        for placement, index in zip(param.placements, coordinate)
    )
    return TensorShard(tuple(param.shape) or (1,), boxes_of(runs, name), replica=replica)


def runs_of(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    name: str,
) -> list[list[Run]]:
    """The runs that the rank at a mesh coordinate holds along each dimension, in the order of its memory."""
    runs = [[(0, size)] if size else [] for size in global_shape]
    for parts, part, placement in zip(mesh_shape, coordinate, placements):
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, _StridedShard):
            pieces = _chunks(runs[placement.dim], int(placement.split_factor))
        elif isinstance(placement, Shard):
            pieces = [runs[placement.dim]]
        else:
            raise ValueError(
                f"param {name}: placement {placement} is unsupported, expected Shard or Replicate; "
                "redistribute it first"
            )
        held = [run for piece in pieces for run in _chunks(piece, parts)[part]]
        runs[placement.dim] = _joined(held)
    return runs


def _chunks(runs: list[Run], count: int) -> list[list[Run]]:
    """Runs cut into `count` parts as torch.chunk does: equal parts, except the last ones, which may be shorter or
    empty."""
    size = sum(end - begin for begin, end in runs)
    length = -(-size // count)
    return [_slice(runs, i * length, (i + 1) * length) for i in range(count)]


def _slice(runs: list[Run], first: int, last: int) -> list[Run]:
    """The elements `first` to `last` of runs, counted over all runs."""
    cut, passed = [], 0
    for begin, end in runs:
        low, high = max(first - passed, 0), min(last - passed, end - begin)
        if low < high:
            cut.append((begin + low, begin + high))
        passed += end - begin
    return cut


def _joined(runs: list[Run]) -> list[Run]:
    """Merges runs that directly follow each other."""
    joined: list[Run] = []
    for begin, end in runs:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined


def boxes_of(
    runs: list[list[Run]], name: str
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """The product of each dimension's runs, as boxes in the order of a contiguous local tensor."""
    if not runs:  # a scalar
        return (((0,), (1,)),)
    if any(not dimension for dimension in runs):
        nothing = (0,) * len(runs)
        return ((nothing, nothing),)
    # Memory goes through the last cut dimension once for every index of the dimensions before it.
    cut = max((d for d, dimension in enumerate(runs) if len(dimension) > 1), default=0)
    before = [
        [(i, i + 1) for begin, end in dimension for i in range(begin, end)]
        for dimension in runs[:cut]
    ]
    count = math.prod(map(len, before + runs[cut:]))
    if count > MAX_BOXES:
        raise ValueError(
            f"param {name}: its shard is {count} separate pieces of memory, expected at most "
            f"{MAX_BOXES}; shard it along dimension 0, or along one dimension by one mesh dimension"
        )
    boxes = itertools.product(*before, *runs[cut:])
    return tuple(
        (tuple(begin for begin, _ in box), tuple(end - begin for begin, end in box))
        for box in boxes
    )


def as_dtensor(state: Tensor, param: DTensor) -> DTensor:
    """A tensor of this process's elements as a DTensor of the param's placements, which shares its
    memory. It stays where it is, whatever the mesh's device. It may have dimensions behind those of the param."""
    known = param._spec.tensor_meta
    assert known is not None  # it belongs to an existing DTensor
    behind = state.shape[param.ndim :]
    stride = tuple(step * behind.numel() for step in known.stride) + state.stride()[param.ndim :]
    meta = TensorMeta(torch.Size((*known.shape, *behind)), stride, state.dtype)
    spec = DTensorSpec(param.device_mesh, param.placements, tensor_meta=meta)
    return DTensor(state, spec, requires_grad=False)


def local_part(value: Tensor, param: Tensor) -> Tensor:
    """The part of a state tensor from elsewhere that belongs to this process: plain tensors of the global shape, and
    DTensors of other placements, are cut as the param is."""
    if not isinstance(param, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    if not isinstance(value, DTensor):
        return part_of(value, param.device_mesh, param.placements).to(param._local_tensor.device)
    if value.placements != param.placements or value.device_mesh != param.device_mesh:
        value = value.redistribute(param.device_mesh, param.placements)
    return value._local_tensor


def part_of(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """What this process would hold of a plain tensor that were a DTensor of these placements. No rank communicates."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank holds none of it
        return whole.new_empty(0)
    part = whole
    for dimension, runs in enumerate(runs_of(whole.shape, mesh.shape, coordinate, placements, "of a state")):
        held = [part.narrow(dimension, begin, end - begin) for begin, end in runs or [(0, 0)]]
        part = torch.cat(held, dimension)
    return part
