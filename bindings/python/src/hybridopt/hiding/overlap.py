"""Overlap: step() queues a step and returns. The model waits for a param before it uses it."""

from __future__ import annotations

import os
import sys
import types
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from .. import abi
from ..base.callers import depth_of_caller
from ..base.checks import kind_of
from ..base.owned_hooks import ParamHooks
from ..engine.engine import Engine
from ..params.members import Member
from ..params.registered import Slot
from .hooked_model import HookedModel


class Overlapped(Protocol):
    """What Overlap uses of the optimizer."""

    _overlap: Overlap | None

    @property
    def _engine(self) -> Engine | None: ...

    def _wait_for(self, slots: Sequence[Slot], streams: Iterable[Any]) -> None: ...

    def _finish_for_use(self) -> None: ...

    def _finish(self) -> None: ...


VARIABLE = "HYBRIDOPT_CHECK_OVERLAP"


def is_checking() -> bool:
    """Whether uses of params outside of modules are reported."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def _frames_inside() -> int:
    """How many frames, from the caller's on, belong to this package, to torch or to copy.deepcopy()."""
    count, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _package_of(frame) in ("torch", "copy", "hybridopt"):
        count, frame = count + 1, frame.f_back
    return count


def _package_of(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def warn_of_use(name: str, operation: str) -> None:
    """Reports, in check mode, that code outside of modules uses a param which a step still writes. `operation` is "" for
    a use by this package."""
    if operation and is_checking():
        warnings.warn(
            f"parameter {name!r} is used by {operation!r} while a step still writes it, so that this "
            "use waits, and the step gains less time beside what follows; if that can be, use it later, after "
            "the forward pass",
            stacklevel=_frames_inside(),
        )


class Overlap:
    """Lets the steps of an optimizer, which owns it, go on beside the forward pass of a model."""

    def __init__(self, optimizer: Overlapped, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"overlap is {kind_of(model)}, expected the torch.nn.Module whose params the "
                "optimizer has"
            )
        self._optimizer = weakref.ref(optimizer)
        self._order: dict[Tensor, int] = {}  # the order in which forward passes use params
        self._is_recording = True
        self._has_seen_pass = False
        self._has_warned = self._has_warned_of_shared_memory = False
        self._checks = ParamHooks(self._check_gradient)
        self._model = HookedModel(model, self)

    # ------------------------------------------------------------------------- what hooks call --

    def is_wanted(self) -> bool:
        if self._is_recording:
            return True
        optimizer = self._optimizer()
        engine = None if optimizer is None else optimizer._engine
        return engine is not None and bool(engine.under_way)

    def wait(self, params: Iterable[Tensor], streams: Iterable[Any] = ()) -> None:
        if self._is_recording:
            self._has_seen_pass = True
            params = list(params)
            for param in params:
                self._order.setdefault(param, len(self._order))
        optimizer = self._optimizer()
        if optimizer is not None and optimizer._engine is not None:
            slot_of = optimizer._engine.registered.slot_of
            slots = [slot for slot in map(slot_of.get, params) if slot is not None]
            optimizer._wait_for(slots, streams)

    def finish(self) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._finish()

    def used(self, slot: Slot, operation: str) -> None:
        """Waits for the step that writes a param, because code outside of modules uses this param. (Overlap is the
        keeper of the param's trap.)"""
        warn_of_use(slot.name, operation)
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._finish_for_use()

    def _check_gradient(self, param: Tensor) -> None:
        optimizer = self._optimizer()
        engine = None if optimizer is None else optimizer._engine
        slot = None if engine is None else engine.registered.slot_of.get(param)
        if engine is None or slot is None or not (engine.under_way and engine.under_way.is_pending(slot)):
            return
        self.finish()
        raise abi.InvalidStateError(
            f"parameter {slot.name!r} has got a gradient, but nobody has waited for the step that wrote it: code "
            "that is not called through torch's functions in Python has used it (TorchScript, or an extension in "
            "C++), or its graph is older than this step; use it in the forward pass of its module, or call "
            "optimizer.synchronize() before"
        )

    # --------------------------------------------------------------------- what the optimizer calls --

    def ordered(self, members: list[Member]) -> list[Member]:
        """The members with the order in which forward passes use their params."""
        order, last = self._order, len(self._order)
        return [member._replace(chunk_order=order.get(member.param, last)) for member in members]

    def attach(self, engine: Engine) -> None:
        """Hooks modules that have no hooks yet, and the params of the engine."""
        self._model.attach()
        self._checks.attach(slot.param for slot in engine.slots)

    def may_begin(self) -> bool:
        """Whether a forward pass has been recorded, so that step() need not wait."""
        if self._is_recording and self._has_seen_pass:
            self._is_recording = False
            self._model.share_out()
        if self._is_recording and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "overlap() has seen no forward pass of its model, so that step() waits; give it the "
                "model that is called: what torch.compile has made, say",
                stacklevel=depth_of_caller(),
            )
        return not self._is_recording

    def warn_of_shared_memory(self) -> None:
        if not self._has_warned_of_shared_memory:
            self._has_warned_of_shared_memory = True
            warnings.warn(
                "overlap() has no effect while params lie in shared memory (share_memory(), or a param that was sent to "
                "another process): other processes would read them while a step writes them, so that step() waits",
                stacklevel=depth_of_caller(),
            )

    def aliases(self) -> dict[Tensor, list[Tensor]]:
        return self._model.aliases()

    def remove(self) -> None:
        """Removes all hooks. From now on step() waits."""
        try:
            self.finish()
        finally:
            self._model.remove()
            self._checks.remove()
            optimizer = self._optimizer()
            if optimizer is not None:
                optimizer._overlap = None
