"""Homes: the ranks that update matrices whose parts several ranks have.

Each matrix has one home rank. The parts of its gradient go there, and the parts of the updated matrix come back:

    rank 0   rows 0..3 --+                              +--> rows 0..3
    rank 1   rows 4..7 --+--> the whole, on its home ---+--> rows 4..7
    rank 2   rows 8..9 --+                              +--> rows 8..9

One matrix follows the other, so that the memory for messages is that of the largest one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ..params.sharding import Run, runs_of

Region = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class CutMatrix:
    """A matrix, or a stack of them, of which each rank of a mesh has a part."""

    name: str
    shape: tuple[int, ...]
    runs: dict[int, list[list[Run]]]  # by rank: what it has along each dimension
    copies: frozenset[int]  # ranks whose part another rank has too, and sends
    home: int = -1
    group: dist.ProcessGroup | None = None  # the ranks of the optimizer, by which messages go

    @property
    def cost(self) -> int:
        """In proportion to the operations of its update."""
        return math.prod(self.shape) * min(self.shape[-2:])

    def extents(self, rank: int) -> tuple[int, ...]:
        return tuple(sum(end - begin for begin, end in runs) for runs in self.runs[rank])

    def has_part(self, rank: int) -> bool:
        return math.prod(self.extents(rank)) > 0

    def regions(self, rank: int) -> Iterator[tuple[Region, Region]]:
        """The boxes of a rank's part: where each is in the matrix, and where in the part."""
        yield from _products([list(_placed(runs)) for runs in self.runs[rank]])


def _placed(runs: list[Run]) -> Iterator[tuple[slice, slice]]:
    passed = 0
    for begin, end in runs:
        yield slice(begin, end), slice(passed, passed + end - begin)
        passed += end - begin


def _products(dimensions: list[list[tuple[slice, slice]]]) -> Iterator[tuple[Region, Region]]:
    for chosen in itertools.product(*dimensions):
        yield tuple(whole for whole, _ in chosen), tuple(part for _, part in chosen)


def cut_matrix_of(name: str, param: DTensor) -> CutMatrix:
    """Raises for placements other than Shard and Replicate."""
    mesh = param.device_mesh.mesh
    runs: dict[int, list[list[Run]]] = {}
    copies: set[int] = set()
    for coordinate in itertools.product(*map(range, mesh.shape)):
        rank = int(mesh[coordinate])
        runs[rank] = runs_of(param.shape, mesh.shape, coordinate, param.placements, name)
        if any(index > 0 and isinstance(each, Replicate) for index, each in zip(coordinate, param.placements)):
            copies.add(rank)
    cut = CutMatrix(name, tuple(param.shape), runs, frozenset(copies))
    own, here = tuple(param._local_tensor.shape), cut.extents(dist.get_rank())
    if own != here:
        raise ValueError(
            f"param {name}: its local tensor has the shape {own}, expected {here} for {cut.shape} with {param.placements}; "
            "make it with distribute_tensor or fully_shard"
        )
    return cut


def with_homes(cuts: Sequence[CutMatrix], group: dist.ProcessGroup | None = None) -> list[CutMatrix]:
    """Gives each matrix to the rank that has the least work so far, the costliest first. All ranks of a mesh get the
    same, because they have the same matrices in the same order."""
    homes: dict[int, int] = {}
    load: dict[tuple[int, ...], dict[int, int]] = {}
    for index in sorted(range(len(cuts)), key=lambda index: -cuts[index].cost):
        ranks = tuple(sorted(cuts[index].runs))
        of_rank = load.setdefault(ranks, dict.fromkeys(ranks, 0))
        homes[index] = min(ranks, key=lambda rank: of_rank[rank])
        of_rank[homes[index]] += cuts[index].cost
    return [dataclasses.replace(cut, home=homes[index], group=group) for index, cut in enumerate(cuts)]


class Gathering:
    """The parts of a matrix on their way to its home. All ranks of the mesh make and end it, or all let it go: then it
    waits for the parts too, because gloo sends nothing more to a rank after a message that went before it had arrived."""

    def __init__(self, cut: CutMatrix, part: Tensor) -> None:
        own = dist.get_rank()
        senders = [rank for rank in cut.runs if rank not in cut.copies and cut.has_part(rank)]
        self._cut = cut
        self._parts: dict[int, Tensor] = {}  # by rank, if this one is the home
        sent = part.contiguous()
        operations = []
        if own == cut.home:
            self._parts = {rank: part if rank == own else part.new_empty(_shape_at(cut, rank, part)) for rank in senders}
            operations = [dist.P2POp(dist.irecv, each, rank, cut.group) for rank, each in self._parts.items() if rank != own]
        elif own in senders:
            operations = [dist.P2POp(dist.isend, sent, cut.home, cut.group)]
        works = dist.batch_isend_irecv(operations) if operations else []
        # It has what must live until then. A process that ends does not wait.
        self._arrive = weakref.finalize(self, _await, works, [sent, *self._parts.values()])
        self._arrive.atexit = False

    def end(self, whole: Tensor | None) -> None:
        """Waits for the parts, and puts them together in `whole`, which only the home has. None: nobody wants them."""
        self._arrive()
        if whole is None:
            return
        for rank, each in self._parts.items():
            for there, here in self._cut.regions(rank):
                whole[there].copy_(each[here])


def _await(works: Iterable[dist.Work], tensors: Sequence[Tensor]) -> None:
    for work in works:
        work.wait()
    for tensor in tensors:
        if tensor.is_cuda:  # it may have been made on the stream of a backward pass
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def gather(cut: CutMatrix, part: Tensor, whole: Tensor) -> None:
    """Puts the parts of all ranks together in `whole`, which only the home has. All ranks of the mesh call this."""
    Gathering(cut, part).end(whole)


def scatter(cut: CutMatrix, whole: Tensor, part: Tensor) -> None:
    """The other way: all ranks get their parts of the home's matrix."""
    own = dist.get_rank()
    if own != cut.home:
        if cut.has_part(own):
            received = part.new_empty(part.shape)
            _exchange([dist.P2POp(dist.irecv, received, cut.home, cut.group)])
            part.copy_(received)
        return
    others = [rank for rank in cut.runs if rank != own and cut.has_part(rank)]
    sent = {rank: part.new_empty(_shape_at(cut, rank, part)) for rank in others}
    for rank, each in [*sent.items(), (own, part)]:
        for there, here in cut.regions(rank):
            each[here].copy_(whole[there])
    _exchange([dist.P2POp(dist.isend, each, rank, cut.group) for rank, each in sent.items()])


def _shape_at(cut: CutMatrix, rank: int, part: Tensor) -> tuple[int, ...]:
    """The shape of a rank's part, if this rank's is `part`, which may have dimensions behind those of the matrix."""
    return (*cut.extents(rank), *part.shape[len(cut.shape) :])


def _exchange(operations: list[dist.P2POp]) -> None:
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def told(own: Any, group: dist.ProcessGroup | None) -> dict[int, Any]:
    """What each rank of the group tells, by rank. All of them call this."""
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, own, group=group)
    return dict(zip(dist.get_process_group_ranks(group or dist.group.WORLD), of_ranks))


def gradient_dtypes(
    cuts: Sequence[CutMatrix], own: list[torch.dtype | None], group: dist.ProcessGroup | None
) -> list[torch.dtype | None]:
    """The dtype of each matrix's gradient; None if there is none on any rank. `own`: those of this rank. Raises on all
    ranks if some have a gradient and others have none. All ranks of the group call this."""
    of_rank = told(own, group)
    return [_dtype_of(cut, {rank: of_rank[rank][i] for rank in cut.runs if cut.has_part(rank)}) for i, cut in enumerate(cuts)]


def _dtype_of(cut: CutMatrix, of_rank: dict[int, torch.dtype | None]) -> torch.dtype | None:
    without = sorted(rank for rank, dtype in of_rank.items() if dtype is None)
    if without and len(without) < len(of_rank):
        raise ValueError(
            f"parameter {cut.name!r} has no gradient on the ranks {without}, but the others of {sorted(of_rank)} have "
            "one; call backward() alike on all ranks"
        )
    dtypes = [dtype for dtype in of_rank.values() if dtype is not None]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def check_group(cuts: Sequence[CutMatrix], group: dist.ProcessGroup | None) -> None:
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD) if cuts else []
    for cut in cuts:
        if not set(cut.runs) <= set(ranks):
            raise ValueError(
                f"parameter {cut.name!r} is on the ranks {sorted(cut.runs)}, but process_group has the ranks {ranks}; give the "
                "group of all that hold parts of these parameters"
            )


def check_alike(cuts: Sequence[CutMatrix], group: dist.ProcessGroup | None) -> None:
    """Raises on all ranks that share matrices if they do not have them in one order, in which they send them. (It is
    also the first message of the group, which with NCCL must be one of all ranks.) All ranks of the group call this."""
    own = [(cut.name, cut.shape, sorted(cut.runs)) for cut in cuts]
    for rank, other in told(own, group).items():
        here = [each for each in own if rank in each[2]]
        there = [each for each in other if dist.get_rank() in each[2]]
        for one, another in itertools.zip_longest(here, there):
            if one != another:
                raise ValueError(
                    f"rank {dist.get_rank()} shares {_listed(one)} with rank {rank}, which has {_listed(another)} in its place; "
                    "give the params in the same order and with the same names on all ranks"
                )


def _listed(matrix: tuple[str, tuple[int, ...], list[int]] | None) -> str:
    return "no matrix" if matrix is None else f"parameter {matrix[0]!r} of the shape {matrix[1]}"


def empty_like(cut: CutMatrix, part: Tensor) -> Tensor:
    """Room for the matrix on its home, and for no element elsewhere. `part` is as for gather()."""
    shape = cut.shape if dist.get_rank() == cut.home else (0, *cut.shape[1:])
    return part.new_empty((*shape, *part.shape[len(cut.shape) :]))
