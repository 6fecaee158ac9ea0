"""Gradients that leave the device while the backward pass still runs.

A hook on each param hands its gradient to the library as soon as autograd has accumulated it, and
takes it off the param. The copy runs behind the work now queued on the current stream; the hooks let
the tensor go when the copy has ended. The step finds the gradients on the host.
"""

from __future__ import annotations

import collections
import gc
import weakref
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from . import abi
from .engine import Engine
from .modes import in_no_mode
from .moves import send_gradient

# The library takes 256 queued calls. Gradients beyond these wait for the oldest copy to end.
MAX_IN_FLIGHT = 64
_MARK = "hybridopt"


class Hooked(Protocol):
    """The optimizer, as far as its hooks know it."""

    _engine: Engine | None
    _hooks: GradientHooks | None

    def _ready_engine(self) -> Engine: ...


def refuse_replicas(params: set[Tensor]) -> None:
    """DistributedDataParallel would find nothing to average, and the ranks would drift apart without a
    word. It leaves no mark on its params, but it keeps their accumulators. So does an autograd graph that is
    still there: where somebody keeps one, the module is looked for among all objects."""
    if not dist.is_available() or not dist.is_initialized():
        return
    if not any(param.requires_grad and _is_accumulator_kept(param) for param in params):
        return
    for found in gc.get_objects():
        if issubclass(type(found), DistributedDataParallel) and any(
            param in params for param in found.parameters()
        ):
            raise abi.InvalidStateError(
                "hook_gradients() takes gradients away before DistributedDataParallel, which these "
                "params are in, has averaged them; leave the hooks out, or shard the model by "
                "torch.distributed.fsdp.fully_shard"
            )


def _is_accumulator_kept(param: Tensor) -> bool:
    """Whether somebody keeps the node of autograd that adds up a param's gradients. Autograd itself makes
    another one each time, which has no metadata."""
    _metadata_of_accumulator(param)[_MARK] = True
    return _MARK in _metadata_of_accumulator(param)


def _metadata_of_accumulator(param: Tensor) -> dict[str, Any]:
    node: Any = get_gradient_edge(param).node
    return node.metadata


class GradientHooks:
    """What hook_gradients() gives: remove() takes the hooks off, as does the end of a with."""

    def __init__(
        self,
        optimizer: Hooked,
        accumulate: bool,
        grad_scaler: torch.amp.GradScaler | None,
    ) -> None:
        if grad_scaler is not None and not isinstance(grad_scaler, torch.amp.GradScaler):
            raise TypeError(
                f"grad_scaler is a {type(grad_scaler).__name__}, expected the torch.amp.GradScaler "
                "whose step() will step this optimizer"
            )
        # Params hold their hooks: those must not hold on to an optimizer that nobody else wants.
        self._optimizer = weakref.ref(optimizer)
        self._flags = abi.OFFLOAD_MOVE_ACCUMULATE if accumulate else 0
        self._handles: dict[Tensor, Any] = {}
        # Copies that may still be under way, with what they read.
        self._in_flight: collections.deque[tuple[int, Tensor]] = collections.deque()
        self._begun = False  # the host has gradients for the next step
        self.grad_scaler = grad_scaler

    def attach(self, engine: Engine) -> None:
        """Hooks the params of an engine that have none yet."""
        for slot in engine.slots:
            if slot.param not in self._handles and slot.param.requires_grad:
                handle = slot.param.register_post_accumulate_grad_hook(self._ready)
                self._handles[slot.param] = handle

    def remove(self) -> None:
        """Gradients stay with their params from now on; those on the host are for the next step."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        optimizer = self._optimizer()
        if optimizer is not None and optimizer._hooks is self:
            optimizer._hooks = None
            if optimizer._engine is not None:
                optimizer._engine.wait()
        self._in_flight.clear()

    def __enter__(self) -> GradientHooks:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()

    def release(self) -> None:
        """After a step, which has read all gradients: lets them go."""
        self._in_flight.clear()
        self._begun = False

    def begin_again(self) -> None:
        """Gradients on the host have been dropped."""
        self._begun = False

    def tell_scaler(self, found_inf: bool) -> None:
        """Puts the verdict of the step where GradScaler.update() looks for it. There is no other way:
        the scaler itself finds gradients in `grad` alone."""
        optimizer, scaler = self._optimizer(), self.grad_scaler
        if optimizer is None or scaler is None or optimizer._engine is None:
            return
        device = optimizer._engine.device
        verdict = torch.full((), float(found_inf), dtype=torch.float32, device=device)
        scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"][device] = verdict

    @in_no_mode
    def _ready(self, param: Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            self.remove()
            return
        if param.grad is None or hasattr(param, "decoupled_grad"):  # not what a step takes
            return
        engine = optimizer._engine
        if engine is None or not self._begun:
            # The first one of a step: state can still move to where there is room for what has been
            # unfrozen, or for a group's momentum. Later the gradients on the host would be lost.
            engine = optimizer._ready_engine()
        self._let_go(engine)
        slot = engine.registered.slot_of.get(param)
        if slot is None:  # no param of this optimizer any more
            return
        if not slot.takes_gradient():
            raise abi.InvalidStateError(
                f"the gradient of parameter {slot.name!r} is {param.grad.dtype} and would be rounded "
                f"to {slot.grad_dtype}, as gradients of this step are on the host already; set "
                "grad_dtype of the parameter between step() and the next backward pass, or drop the "
                "gradients with zero_grad() and start the step again"
            )
        ticket, grad = send_gradient(engine, slot, param.grad, self._flags, hooked=True)
        self._begun = True
        self._in_flight.append((ticket, grad))
        param.grad = None

    def _let_go(self, engine: Engine) -> None:
        """Drops what has been copied; waits where too much has not."""
        while self._in_flight:
            ticket, _ = self._in_flight[0]
            patience_ns = -1 if len(self._in_flight) >= MAX_IN_FLIGHT else 0
            try:
                engine.handle.wait(ticket, timeout_ns=patience_ns)
            except abi.TimedOutError:
                return
            self._in_flight.popleft()
