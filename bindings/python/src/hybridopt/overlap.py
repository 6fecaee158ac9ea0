"""Overlap: step() queues a step and returns. The model waits for a param before it uses it."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from . import abi, unreadable
from .engine import Engine
from .hooked_model import HookedModel
from .members import Member
from .registered import Slot


class Overlapped(Protocol):
    """What Overlap uses of the optimizer."""

    _engine: Engine | None
    _overlap: Overlap | None

    def _wait_for(self, slots: Sequence[Slot], streams: Iterable[Any]) -> None: ...

    def _finish(self) -> None: ...


class Overlap:
    """What OffloadOptimizer.overlap() returns. remove() ends it."""

    def __init__(self, optimizer: Overlapped, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"overlap is a {type(model).__name__}, expected the torch.nn.Module whose params the "
                "optimizer has"
            )
        # The model keeps its hooks alive. The hooks must not keep the optimizer alive.
        self._optimizer = weakref.ref(optimizer)
        self._order: dict[Tensor, int] = {}  # the order in which forward passes use params
        self._is_recording = True
        self._has_warned = False
        self._checks: dict[Tensor, Any] = {}
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

    def _check_gradient(self, param: Tensor) -> None:
        optimizer = self._optimizer()
        engine = None if optimizer is None else optimizer._engine
        slot = None if engine is None else engine.registered.slot_of.get(param)
        if engine is None or slot is None or not engine.under_way.is_pending(slot):
            return
        self.finish()
        raise abi.InvalidStateError(
            f"parameter {slot.name!r} has got a gradient and was used, but no module that has it was "
            "called before, and nobody has waited for the step that wrote it; use it in the forward "
            "pass of its module, or call optimizer.synchronize() before, and give overlap() what "
            f"torch.compile has made. {unreadable.VARIABLE}=1 in the environment shows the use"
        )

    # --------------------------------------------------------------------- what the optimizer calls --

    def ordered(self, members: list[Member]) -> list[Member]:
        """The members with the order in which forward passes use their params."""
        self.refuse_others({member.param: member.name for member in members})
        order, last = self._order, len(self._order)
        return [
            dataclasses.replace(member, chunk_order=order.get(member.param, last))
            for member in members
        ]

    def refuse_others(self, names: dict[Tensor, str]) -> None:
        """Raises if no module of the model has a param, so that nothing would wait for it."""
        known = self._model.params()
        for param, name in names.items():
            if param.requires_grad and param not in known:
                raise abi.InvalidStateError(
                    f"parameter {name!r} is in no module of the model given to overlap(), so nobody "
                    "would wait for it; give overlap() a module that has all params of the optimizer, "
                    "an nn.ModuleList of several models, say"
                )

    def attach(self, engine: Engine) -> None:
        """Hooks modules and params that have no hooks yet."""
        self._model.attach()
        for slot in engine.slots:
            if slot.param not in self._checks and slot.param.requires_grad:
                check = slot.param.register_post_accumulate_grad_hook(self._check_gradient)
                self._checks[slot.param] = check

    def may_begin(self) -> bool:
        """Whether a forward pass has been recorded, so that step() need not wait."""
        if self._is_recording and self._order:
            self._is_recording = False
            self._model.share_out()
        if self._is_recording and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "overlap() has seen no forward pass of its model, so that step() waits; give it the "
                "model that is called: what torch.compile has made, say",
                stacklevel=4,
            )
        return not self._is_recording

    def aliases_of(self, param: Tensor) -> list[Tensor]:
        return self._model.aliases_of(param)

    def remove(self) -> None:
        """Removes all hooks. From now on step() waits."""
        try:
            self.finish()
        finally:
            self._model.remove()
            for check in self._checks.values():
                check.remove()
            self._checks.clear()
            optimizer = self._optimizer()
            if optimizer is not None:
                optimizer._overlap = None
