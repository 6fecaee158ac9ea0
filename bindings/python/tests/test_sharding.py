"""Compares shards with tensors that torch itself has sharded. The test runs in one process, and ranks are
coordinates."""

import ctypes
import itertools

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hybridopt import abi
from hybridopt.params import sharding

MESHES = [(2,), (3,), (4,), (2, 2), (3, 2), (2, 3)]
SHAPES = [(n,) for n in range(14)] + [(8, 8), (5, 7), (1, 9), (7, 3), (0, 4), (5, 3, 4)]


def placements_for(dimensions):
    yield Replicate()
    for dim in range(min(dimensions, 2)):
        yield Shard(dim)
        yield _StridedShard(dim, split_factor=2)
        yield _StridedShard(dim, split_factor=3)


def cut_by_torch(tensor, mesh, coordinate, placements):
    """None if a version of torch cannot shard the tensor: older ones refuse uneven strided shards."""
    for parts, part, placement in zip(mesh, coordinate, placements):
        if not isinstance(placement, Replicate):
            even = not isinstance(placement, _StridedShard) or (
                tensor.size(placement.dim) % (parts * placement.split_factor) == 0
            )
            if not (even or CUTS_UNEVENLY):
                return None
            tensor = placement._split_tensor(tensor, parts, with_padding=False)[0][part]
    return tensor


def cuts_unevenly():
    try:
        _StridedShard(0, split_factor=2)._split_tensor(torch.ones(3), 2, with_padding=False)
    except AssertionError:
        return False
    return True


CUTS_UNEVENLY = cuts_unevenly()


def elements_of(shard):
    """The global indices of a shard's elements, in the order of the shard."""
    whole = torch.arange(torch.Size(shard.global_shape).numel()).view(shard.global_shape)
    listed = []
    for offsets, extents in shard.boxes:
        box = whole[tuple(slice(o, o + e) for o, e in zip(offsets, extents))]
        listed += box.flatten().tolist()
    if shard.range:
        listed = listed[shard.range[0] : sum(shard.range)]
    return listed


def test_boxes_are_the_elements_that_torch_cut():
    cases, uneven, several, empty = 0, 0, 0, 0
    for shape, mesh in itertools.product(SHAPES, MESHES):
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        for placements in itertools.product(placements_for(len(shape)), repeat=len(mesh)):
            sizes = set()
            for coordinate in itertools.product(*map(range, mesh)):
                local = cut_by_torch(whole, mesh, coordinate, placements)
                if local is None:
                    continue
                runs = sharding.runs_of(shape, mesh, coordinate, placements, "weight")
                shard = sharding.TensorShard(shape, sharding.boxes_of(runs, "weight"))
                expected = local.flatten().tolist()
                assert elements_of(shard) == expected, (shape, mesh, coordinate, placements)
                sizes.add(len(expected))
                several += len(shard.boxes) > 1
                empty += not expected
                cases += 1
            uneven += len(sizes) > 1
    # Checks that the difficult cases are among them.
    least = 1000 if CUTS_UNEVENLY else 200
    assert min(cases, uneven, several, empty) > least, (cases, uneven, several, empty)


def test_the_library_takes_every_shard():
    shapes = [(13,), (5, 7), (0, 4)]
    with abi.Context(threads=1) as context:
        for shape, mesh in itertools.product(shapes, [(2, 2), (3,)]):
            for placements in itertools.product(placements_for(len(shape)), repeat=len(mesh)):
                with abi.Optimizer(context, algorithm=abi.OFFLOAD_LION) as optimizer:
                    group = optimizer.add_group(lr=1.0)
                    kept = []
                    for coordinate in itertools.product(*map(range, mesh)):
                        runs = sharding.runs_of(shape, mesh, coordinate, placements, "weight")
                        shard = sharding.TensorShard(shape, sharding.boxes_of(runs, "weight"))
                        struct = shard.struct()
                        data = torch.zeros(len(elements_of(shard)))
                        kept.append(data)
                        param = abi.offload_param_t(
                            group=group,
                            dtype=abi.OFFLOAD_FP32,
                            grad_dtype=abi.OFFLOAD_FP32,
                            name=f"weight {coordinate}".encode(),
                            data=data.data_ptr(),
                            count=data.numel(),
                        )
                        param.shard = ctypes.pointer(struct)
                        optimizer.add_params([param])


def test_ranges_and_flags_reach_the_struct():
    shard = sharding.TensorShard((4, 6), (((0, 0), (4, 6)),), range=(5, 7))
    struct = shard.struct()
    assert (struct.flags, struct.range_begin, struct.range_count) == (1, 5, 7)
    assert [struct.global_shape[i] for i in range(2)] == [4, 6]
    assert elements_of(shard) == list(range(5, 12))
    whole = sharding.TensorShard((4, 6), (((0, 0), (4, 6)),)).struct()
    assert (whole.flags, whole.range_begin, whole.range_count) == (0, 0, 0)


def test_partial_placements_are_refused():
    with pytest.raises(ValueError, match="param weight: placement .* is unsupported"):
        sharding.runs_of((4,), (2,), (0,), [Partial()], "weight")


def test_shards_in_too_many_pieces_are_refused():
    columns = [_StridedShard(1, split_factor=2)]
    runs = sharding.runs_of((2048, 8), (2,), (0,), columns, "weight")
    assert len(sharding.boxes_of(runs, "weight")) == 4096
    runs = sharding.runs_of((2049, 8), (2,), (0,), columns, "weight")
    with pytest.raises(ValueError, match="its shard is 4098 separate pieces of memory"):
        sharding.boxes_of(runs, "weight")


def test_a_plain_tensor_may_say_what_it_is_a_shard_of():
    param = torch.nn.Parameter(torch.zeros(3))
    assert sharding.shard_of(param, "weight") is None
    param.offload_shard = sharding.TensorShard((9,), (((3,), (3,)),))
    assert sharding.shard_of(param, "weight").boxes == (((3,), (3,)),)
    param.offload_shard = (3, 3)
    with pytest.raises(TypeError, match="param weight: offload_shard is a tuple, expected"):
        sharding.shard_of(param, "weight")
