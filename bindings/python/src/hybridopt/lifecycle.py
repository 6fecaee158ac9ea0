"""Giving the device away and taking it back: params, gradients and states, one by one or together.

The library keeps the content; here the memory is given back to torch. A param keeps its tensor, its
views and whatever else refers to it: only its storage shrinks to nothing, and grows again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import abi
from .engine import Engine, Slot, refuse_capture
from .gradient_hooks import GradientHooks, refuse_replicas
from .history import History
from .modes import in_no_mode
from .moves import MOVABLE
from .plans import StepResult
from .state import State
from .tensors import gradient_of, like_param, local, set_gradient


def movable_bits(names: Iterable[str]) -> int:
    """enum offload_movable, or-ed, for words of the `movable` option."""
    bits = 0
    for name in names:
        if name not in MOVABLE:
            raise ValueError(f"Invalid movable: {name!r}, expected some of {', '.join(MOVABLE)}")
        bits |= MOVABLE[name]
    return bits


@dataclass(frozen=True)
class MemorySample:
    """Who holds how much: before a step (`gradients`) and after it (`step`), after an `offload` and
    after a `reload`."""

    seconds: float  # since the optimizer was made
    label: str
    params_on_device_bytes: int
    params_on_host_bytes: int
    grads_on_device_bytes: int
    grads_on_host_bytes: int
    states_on_device_bytes: int
    states_on_host_bytes: int
    device_bytes: int  # the library's own, the device share's states and scratch
    host_bytes: int  # the library's own, all of it


class Storage:
    """Memory of torch's that has been given up. What in it belongs to no param is kept here."""

    def __init__(self, tensor: Tensor, slots: list[Slot]) -> None:
        self._storage = tensor.untyped_storage()
        self._bytes = self._storage.nbytes()
        self._gaps = [
            (begin, self._all()[begin:end].to("cpu", copy=True)) for begin, end in self._rest(slots)
        ]
        self._storage.resize_(0)

    def _all(self) -> Tensor:
        everything = torch.empty(0, dtype=torch.uint8, device=self._storage.device)
        return everything.set_(self._storage)

    def _rest(self, slots: list[Slot]) -> Iterator[tuple[int, int]]:
        """Bytes outside the params', begin and end."""
        passed = 0
        taken = []
        for slot in slots:
            if slot.copy is None:
                tensor = local(slot.param)
                begin = int(tensor.storage_offset()) * tensor.element_size()
                taken.append((begin, begin + slot.count * tensor.element_size()))
        for begin, end in sorted(taken):
            if begin > passed:
                yield passed, begin
            passed = max(passed, end)
        if passed < self._bytes:
            yield passed, self._bytes

    def restore(self) -> None:
        if self._storage.nbytes() == 0:
            self._storage.resize_(self._bytes)
            for begin, content in self._gaps:
                self._all()[begin : begin + content.numel()].copy_(content)


class Lifecycle(torch.optim.Optimizer):
    """Part of OffloadOptimizer."""

    _engine: Engine | None
    _state: State
    _history: History
    _hooks: GradientHooks | None = None
    _storages: list[Storage] | None = None  # given up, in the order of params
    _options: Any

    if TYPE_CHECKING:  # OffloadOptimizer has them

        def _ready_engine(self) -> Engine: ...
        def _drop_engine(self, why: str) -> None: ...

    # ------------------------------------------------------------------------------- gradients --

    @in_no_mode
    def hook_gradients(
        self, accumulate: bool = True, *, grad_scaler: torch.amp.GradScaler | None = None
    ) -> GradientHooks:
        """From now on gradients go to the host during the backward pass, one by one as they become
        ready, and are taken off their params (`grad` is None after it). The next step uses them up;
        zero_grad() drops them. With `accumulate` several backward passes add up, in fp32; without
        it there is half the memory for low-precision gradients, and one backward pass a step.

        Takes the memory for state and gradients now. Clip by max_grad_norm: there is nothing here
        for torch.nn.utils.clip_grad_norm_ to look at, nor for GradScaler: one that steps this
        optimizer must be named as `grad_scaler`, to be told what the step has found."""
        if self._hooks is not None:
            raise abi.InvalidStateError(
                "gradients are hooked already; call remove() on what hook_gradients() gave"
            )
        hooks = GradientHooks(self, accumulate, grad_scaler)
        refuse_replicas({param for group in self.param_groups for param in group["params"]})
        needed = "accumulate" if accumulate else "grads"
        if needed not in self._options["movable"]:
            # Another engine, with room for the gradients, goes on from its state.
            self._drop_engine("hooks need room for gradients")
            self._options = {
                **self._options,
                "movable": (*self._options["movable"], needed),
            }
        hooks.attach(self._ready_engine())
        self._hooks = hooks
        return hooks

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients that are on the host are dropped too."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for param in group["params"]:
                if getattr(param, "decoupled_grad", None) is not None:
                    set_gradient(param, None if set_to_none else param.decoupled_grad.zero_())
        self._drop_hosted()

    def _drop_hosted(self) -> None:
        """Forgets the gradients that are on the host."""
        engine = self._engine
        hosted = [] if engine is None else [slot for slot in engine.slots if slot.hosted]
        if engine is not None and hosted:
            engine.handle.offload_grads(
                params=[slot.id for slot in hosted], flags=abi.OFFLOAD_MOVE_DROP
            )
            for slot in hosted:
                slot.hosted = False
        if self._hooks is not None:
            self._hooks.begin_again()

    # ---------------------------------------------------------------------------------- phases --

    @in_no_mode
    def offload(self, params: bool = False, grads: bool = False, states: bool = False) -> None:
        """Moves content to the host, bit for bit, and gives the memory back. What is there already
        stays. Returns when the memory is free. The `movable` option must name what is moved.

        Params keep their tensors, but must not be used until reload(). Gradients are taken off
        their params; reload() puts them back, or the next step uses them where they are."""
        engine = self._ready_engine()
        self._check_movable(engine, params=params, grads=grads, states=states)
        engine.settle(self._state)
        streams = [engine.stream()]
        if grads:
            engine.send_gradients()
        if states:
            engine.hide_device_state(self._state)
            engine.handle.offload_states(streams=streams)
            engine.states_out = True
        if params and self._storages is None:
            engine.note_versions()
            engine.handle.offload_params(streams=streams)
        engine.wait()
        if grads:
            for slot in engine.slots:
                if slot.hosted:
                    set_gradient(slot.param, None)
        if params and self._storages is None:
            self._storages = give_up(engine.slots)
            engine.params_out = True
        self._sample("offload")

    @in_no_mode
    def reload(self, params: bool = False, grads: bool = False, states: bool = False) -> None:
        """Moves content back into memory of torch's, where it is when this returns."""
        refuse_capture()
        engine = self._ready_engine() if self._engine is None else self._engine  # as it was offloaded
        self._check_movable(engine, params=params, grads=grads, states=states)
        streams = [engine.stream()]
        if states and engine.states_out:
            engine.handle.reload_states(streams=streams)
            engine.states_out = False
            engine.show_device_state(self._state)
        if params and self._storages is not None:
            for storage in self._storages:
                storage.restore()
            self._storages = None
            for slot in engine.slots:
                engine.tell(slot, 0)
            engine.handle.reload_params(streams=streams)
            engine.params_out = False
            engine.restore_versions()
        if grads:
            self._reload_grads(engine, streams)
        engine.wait()
        self._sample("reload")

    def _reload_grads(self, engine: Engine, streams: list[int]) -> None:
        hosted = [slot for slot in engine.slots if slot.hosted]
        for slot in hosted:
            if gradient_of(slot.param) is not None:
                raise abi.InvalidStateError(
                    f"parameter {slot.name!r} has a gradient on the host and another one here; "
                    "step() or zero_grad() before the next backward pass"
                )
        for slot in hosted:
            grad = torch.empty_strided(
                slot.shape, slot.stride, dtype=slot.grad_dtype, device=engine.device
            )
            engine.tell(slot, grad.data_ptr())
            set_gradient(slot.param, like_param(grad, slot.param))
        if hosted:
            engine.handle.reload_grads(params=[slot.id for slot in hosted], streams=streams)
            for slot in hosted:
                slot.hosted = False

    @contextlib.contextmanager
    def offloaded(
        self, params: bool = True, grads: bool = True, states: bool = True
    ) -> Iterator[None]:
        """For a phase that needs the device for itself: offload() before, reload() after."""
        self.offload(params=params, grads=grads, states=states)
        try:
            yield
        finally:
            self.reload(params=params, grads=grads, states=states)

    def _check_movable(self, engine: Engine, **wanted: bool) -> None:
        missing = [name for name, want in wanted.items() if want and not engine.can_move(name)]
        if missing:
            raise abi.InvalidStateError(
                f"there is no room on the host for {', '.join(missing)}; make the optimizer with "
                f"movable={tuple(name for name, want in wanted.items() if want)}"
            )

    def _check_all_here(self, why: str) -> None:
        """Before the engine is given up."""
        engine = self._engine
        if engine is None:
            return
        if self._storages is not None or engine.states_out:
            raise abi.InvalidStateError(
                f"{why}, but params or states are offloaded; call reload(params=True, states=True) "
                "first"
            )
        if any(slot.hosted for slot in engine.slots):
            raise abi.InvalidStateError(
                f"{why}, but gradients are on the host and would be lost; step() without that first, "
                "or drop the gradients with zero_grad()"
            )

    # -------------------------------------------------------------------------------- timeline --

    def memory_timeline(self) -> list[MemorySample]:
        """Bytes by kind and place before and after each step and after each move, the last 4096 of
        them."""
        return list(self._history.samples)

    @in_no_mode
    def step_results(self) -> list[StepResult]:
        """What the last 1024 steps did, skipped ones too. Waits for queued steps."""
        if self._engine is not None:
            self._engine.settle(self._state)
        return list(self._history.results)

    def plot_timeline(self, path: str | os.PathLike[str]) -> None:
        """Writes a picture of memory_timeline() and of the lanes of the last steps; needs
        matplotlib."""
        from .timeline_plot import plot_timeline

        plot_timeline(self, path)

    def _sample(self, label: str) -> None:
        engine = self._engine
        if engine is None:
            return
        stats = engine.handle.stats()
        fields = (name for name in MemorySample.__annotations__ if name.endswith("_bytes"))
        self._history.samples.append(
            MemorySample(
                seconds=time.monotonic() - self._history.made,
                label=label,
                **{name: getattr(stats, name) for name in fields},
            )
        )


def give_up(slots: list[Slot]) -> list[Storage]:
    """Shrinks the storages of params to nothing. Several params may lie in one."""
    by_storage: dict[int, list[Slot]] = {}
    for slot in slots:
        by_storage.setdefault(local(slot.param).untyped_storage()._cdata, []).append(slot)
    return [Storage(local(group[0].param), group) for group in by_storage.values()]
