"""WayBack: matrices come back from their homes (ranks/homes.py) after step() has returned.

    step()                     the program goes on      the next forward pass, or a use of a param
    gradients go home | ...... the homes update ....... | matrix 0 | matrix 1 | matrix 2 | ...

All ranks must exchange messages in one order. So what a rank uses first decides nothing: at the first use of any of the
matrices all of them come back, in the order of the optimizer's params. A program calls its model on all ranks alike, so
that all ranks do this at the same place among their other messages. No thread sends messages: those of a thread would
come between the program's own in another order on each rank, which hangs where streams share a queue of the device.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import abi
from ..base.modes import in_no_mode
from ..params.tensors import local
from ..traps.trap import Traps, take_back
from .hooked_model import HookedModel
from .overlap import Overlapped, warn_of_use

# The attribute by which a param keeps the way back of a step under way, so that its optimizer may end before.
_ATTRIBUTE = "_hybridopt_way_back"


class Away(Protocol):
    """A matrix that has a home."""

    @property
    def name(self) -> str: ...

    @property
    def param(self) -> DTensor: ...

    @property
    def whole(self) -> Tensor:
        """What stands for it in the optimizer of this rank."""

    @property
    def part(self) -> Tensor:
        """This rank's part of the param."""

    def scatter(self, part: Tensor) -> None:
        """Brings it back into the part. All ranks call this."""


class Sharded(Protocol):
    """What WayBack uses of the optimizer that owns it."""

    _way_back: WayBack | None

    @property
    def _local(self) -> Overlapped:
        """The optimizer that makes the updates of this rank."""


def _used(tensors: list[Tensor], operation: str) -> None:
    ids = set(map(id, tensors))
    for each in list(_all):
        each.note_use(ids, operation)


_traps = Traps(_used)
_all: weakref.WeakSet[WayBack] = weakref.WeakSet()


class WayBack:
    """The way back of the matrices that a step updates, for a model whose steps overlap with its forward pass."""

    def __init__(self, optimizer: Sharded, model: nn.Module, matrices: Sequence[Away]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._local = optimizer._local  # makes the updates of this rank
        self._matrices = matrices
        # By matrix, of a step that is under way: this rank's part, and the tensors that have traps.
        self._parts: list[Tensor] = []
        self._trapped: list[list[Tensor]] = []
        self._process = os.getpid()
        self._lock = threading.RLock()  # a param may be used in any thread
        self._model = HookedModel(model, self)
        _all.add(self)

    def begin(self) -> None:
        """The homes update these matrices from now on, and nothing but this object may use the params before they are
        back."""
        aliases = self._model.aliases()
        self._parts = [each.part for each in self._matrices]
        self._trapped = [
            [each.param, local(each.param), *aliases.get(each.param, ())] for each in self._matrices
        ]
        for each in self._matrices:
            setattr(each.param, _ATTRIBUTE, self)
        _traps.set(tensor for trapped in self._trapped for tensor in trapped)

    def note_use(self, ids: set[int], operation: str) -> None:
        """An operation is about to use the tensors with these ids."""
        for each, trapped in zip(self._matrices, list(self._trapped)):
            if not ids.isdisjoint(map(id, trapped)):
                warn_of_use(each.name, operation)
                self.finish()
                return

    # ------------------------------------------------------------------- what hooks of the model call --

    def is_wanted(self) -> bool:
        return bool(self._trapped)

    def wait(self, params: Iterable[Tensor], streams: Iterable[Any] = ()) -> None:
        """Brings all matrices back, whichever params these are, for use on the current stream and on `streams`."""
        self.finish()
        if self._matrices[0].param.is_cuda:
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream(stream.device))

    @in_no_mode
    def finish(self) -> None:
        """Brings the matrices of the step under way back. All ranks call it."""
        with self._lock:
            if not self._trapped:
                return
            if os.getpid() != self._process:
                raise abi.InvalidStateError(
                    f"parameter {self._matrices[0].name!r} is not there in this process, which was forked before it "
                    "came back from its home; call optimizer.synchronize() on all ranks before the fork"
                )
            try:
                for each, part in zip(self._matrices, self._parts):
                    self._wait_at_home(each)
                    each.scatter(part)
            finally:
                self._end()

    def _end(self) -> None:
        take_back(tensor for trapped in self._trapped for tensor in trapped)
        self._trapped, self._parts = [], []
        for each in self._matrices:
            each.param.__dict__.pop(_ATTRIBUTE, None)

    def _wait_at_home(self, matrix: Away) -> None:
        """Waits until this rank has updated the matrix, if it is its home, and else for the step of this rank, so that
        an error of a step is raised on all ranks before one of them waits for another."""
        engine = self._local._engine
        slot = None if engine is None else engine.registered.slot_of.get(matrix.whole)
        if slot is not None:
            self._local._wait_for([slot], ())

    def remove(self) -> None:
        """Removes all hooks. From now on step() waits. All ranks call it."""
        try:
            self.finish()
        finally:
            self._model.remove()
            if self._local._overlap is not None:
                self._local._overlap.remove()
            optimizer = self._optimizer()
            if optimizer is not None:
                optimizer._way_back = None
