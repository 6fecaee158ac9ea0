"""GoingHome: gradients go to the homes of their matrices (ranks/homes.py) while the backward pass still runs.

Autograd calls a hook of each param after it has accumulated the param's gradient; the hook takes the gradient. All ranks
must send in one order, but a gradient may be ready earlier on one rank than on another. So the order is that of the
optimizer's params, the last one first, as backward passes make them, and a gradient that is ready waits for its turn:

    turn      3     2     1     0
    ready     3 goes | 1 waits | 2 goes, 1 goes | 0 goes       step() waits until all have come

Nobody waits for a message before step(). All gradients of a step are a round, which every rank ends: by step(), or by
zero_grad(), which drops it. What a rank owes to a round that others have begun, it sends as zeros. Frozen matrices have
no turn.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import abi
from ..base.modes import in_no_mode
from ..base.owned_hooks import ParamHooks
from ..params.taken import Taken, owns_storage, refuse_written, written_of
from ..params.tensors import TELLS_GRAD_DTYPE, local, local_gradient
from ..ranks import homes
from ..ranks.homes import CutMatrix, Gathering
from ..traps.clipping import Clips, note_taken, note_used
from ..traps.trap import without_traps
from . import gradient_hooks
from .micro_batches import MicroBatches, refuse_another_pass


class Homed(Protocol):
    """A matrix that has a home."""

    @property
    def cut(self) -> CutMatrix: ...

    @property
    def param(self) -> DTensor: ...


class Hooked(Clips, Protocol):
    """What GoingHome uses of the optimizer that owns it."""

    _going_home: GoingHome | None

    @property
    def _local(self) -> gradient_hooks.Hooked:
        """The optimizer that makes the updates of this rank, whose other params have hooks too."""


def _dtype_of(param: DTensor) -> torch.dtype:
    """The dtype in which gradients of a param go home, the same on all ranks."""
    told: torch.dtype | None = param.grad_dtype if TELLS_GRAD_DTYPE else None
    return told or local(param).dtype


class GoingHome:
    """Sends the gradients of the matrices of an optimizer home."""

    def __init__(
        self, optimizer: Hooked, matrices: Sequence[Homed], group: dist.ProcessGroup | None, micro_batches: int | None
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._matrices = matrices
        self._order = [number for number in reversed(range(len(matrices))) if matrices[number].param.requires_grad]
        self._place_of = {number: place for place, number in enumerate(self._order)}
        self._number_of: dict[Tensor, int] = {each.param: number for number, each in enumerate(matrices)}
        self._group = group
        self.micro_batches = MicroBatches(micro_batches)
        self._taken: dict[int, Taken] = {}  # by number: gradients of this round that a hook has taken
        self._had_gradients: dict[int, None] = {}  # by number: taken since the last zero_grad()
        self._gone: list[Gathering] = []  # those that have gone, in order
        self._round = 0
        self._hooks = ParamHooks(self._take)
        self._hooks.attach(each.param for each in matrices)

    def __bool__(self) -> bool:
        """Whether gradients have been taken for the next step."""
        return bool(self._taken)

    @in_no_mode
    def _take(self, param: Tensor) -> None:
        """Autograd calls this after it has accumulated the gradient of a param."""
        optimizer = self._optimizer()
        if optimizer is None or param.grad is None:
            return
        if not self.micro_batches.end_pass(param):
            return
        number = self._number_of[param]
        each = self._matrices[number]
        part = local_gradient(param.grad, param, each.cut.name)
        self._check(number, part.dtype)
        if not owns_storage(part):
            part = part.clone()  # it is cut from a buffer, which may be the program's, which writes it again
        self._taken[number] = Taken(each.cut.name, part)
        self._had_gradients[number] = None
        param.grad = None
        note_taken(optimizer, [param])
        self._send(len(self._order), fills_up=False)

    def _check(self, number: int, dtype: torch.dtype) -> None:
        each = self._matrices[number]
        expected = _dtype_of(each.param)
        if number in self._taken or len(self._gone) > self._place_of[number]:
            refuse_another_pass(each.cut.name)
        if dtype != expected:
            raise abi.InvalidStateError(
                f"the gradient of parameter {each.cut.name!r} is {dtype}, but goes home in {expected}; set grad_dtype of "
                "the parameter before the backward pass, or leave hook_gradients() out"
            )

    def _send(self, end: int, fills_up: bool) -> None:
        """Sends the gradients whose turn it is before `end`, as far as they have been taken, or, if it fills up, with
        zeros for the others."""
        while len(self._gone) < end:
            number = self._order[len(self._gone)]
            each = self._matrices[number]
            taken = self._taken.get(number)
            if taken is not None:
                part = taken.tensor
            elif fills_up:
                own = each.param._local_tensor
                part = torch.zeros(own.shape, dtype=_dtype_of(each.param), device=own.device)
            else:
                return
            self._gone.append(Gathering(each.cut, part))

    # ------------------------------------------------------------------------ what the optimizer calls --

    def dtype_of(self, number: int) -> torch.dtype | None:
        """The dtype of a gradient that has been taken."""
        taken = self._taken.get(number)
        return None if taken is None else taken.tensor.dtype

    def settle(self) -> None:
        """Sends what the others have begun with. Raises on all ranks if other code has written a gradient in place since a
        hook took it. All ranks call it."""
        written_here = written_of(self._taken.values())
        told = homes.told((self._round, len(self._gone), written_here), self._group)
        sharing = sorted({rank for each in self._matrices for rank in each.cut.runs})
        rounds = {rank: told[rank][0] for rank in sharing}
        if len(set(rounds.values())) > 1:
            raise abi.InvalidStateError(
                f"the ranks {sharing} have ended {[rounds[rank] for rank in sharing]} backward passes by step() or "
                "zero_grad(), expected one number; call both alike on all ranks, and make a new optimizer"
            )
        self._send(max((told[rank][1] for rank in sharing), default=0), fills_up=True)
        written = next((name for _, _, name in told.values() if name is not None), None)
        if written is not None:
            refuse_written(written)

    def parts_of(self, number: int) -> Gathering | Tensor | None:
        """After settle(): a gradient on its way home, or this rank's part of one that has not gone; None: there is
        none."""
        place = self._place_of.get(number, len(self._gone))
        if place < len(self._gone):
            return self._gone[place]
        return self._taken[number].tensor if number in self._taken else None

    def end_round(self) -> None:
        """The next gradients are those of another step."""
        self._taken.clear()
        self._gone.clear()
        self.micro_batches.begin_step()
        self._round += 1
        optimizer = self._optimizer()
        if optimizer is not None:
            note_used(optimizer)

    def drop(self) -> None:
        """Drops the gradients that have been taken. All ranks call it."""
        self.micro_batches.begin_step()
        if not self._taken:
            return
        self._send(len(self._order), fills_up=True)
        for each in self._gone:
            each.end(None)
        self.end_round()

    def set_zeros(self) -> None:
        """Gives params whose gradients have been taken, and dropped or used, gradients of zeros."""
        for number in self._had_gradients:
            param = self._matrices[number].param
            if param.grad is None:
                with without_traps():  # no element is read
                    param.grad = torch.zeros_like(param, dtype=_dtype_of(param), requires_grad=False)
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """From now on `grad` tells which params have had a gradient."""
        self._had_gradients.clear()

    def refuse(self, call: str) -> None:
        """Raises while gradients are on their way, among whose messages no others may come."""
        if self._taken:
            raise abi.InvalidStateError(
                f"{call} between a backward pass, whose gradients are on their way to the homes, and its step; call step() "
                "or zero_grad() before"
            )

    def remove(self) -> None:
        """Removes the hooks."""
        self.refuse("the hooks are removed")
        self._hooks.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._going_home = None
            if optimizer._local._hooks is not None:
                optimizer._local._hooks.remove()
