"""Gradients that leave the device while the backward pass still runs.

A hook on each param looks at its gradient when autograd has accumulated it. Gradients that are final,
those of a step's last micro-batch, are collected; when there are some, and when the backward pass ends,
the library is told of all of them in one call, and they are taken off their params. The copies run behind
the work that is queued by then on the streams that made them; the hooks let tensors go when the copies
have ended. The step finds the gradients on the host.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from . import abi
from .engine import Engine
from .modes import in_no_mode
from .moves import send_gradients
from .registered import Slot

# Gradients are handed over together when they are so large, or so many.
BATCH_BYTES = 64 << 20
BATCH_PARAMS = 256
# The library takes 256 queued calls. Batches beyond these wait for the oldest copies to end. Who adds up
# on the host has little memory on the device: there fewer are held.
MAX_IN_FLIGHT = 64
MAX_IN_FLIGHT_ACCUMULATING = 4
# The library takes so many streams in one call.
MAX_STREAMS = 4
_MARK = "hybridopt"


class Final(NamedTuple):
    """A gradient that no other backward pass of this step adds to."""

    slot: Slot
    grad: Tensor
    usable: Tensor  # as the library reads it


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
        micro_batches: int | None,
        grad_scaler: torch.amp.GradScaler | None,
    ) -> None:
        check_micro_batches(micro_batches, accumulate)
        if grad_scaler is not None and not isinstance(grad_scaler, torch.amp.GradScaler):
            raise TypeError(
                f"grad_scaler is a {type(grad_scaler).__name__}, expected the torch.amp.GradScaler "
                "whose step() will step this optimizer"
            )
        # Params hold their hooks: those must not hold on to an optimizer that nobody else wants.
        self._optimizer = weakref.ref(optimizer)
        self._accumulate = accumulate
        self._micro_batches = micro_batches
        self._is_last = False  # inside of last_micro_batch()
        self._passes: dict[Tensor, int] = {}  # backward passes of this step that a param took part in
        self._handles: dict[Tensor, Any] = {}
        # What is to be handed over next, and the streams that it was made on.
        self._final: dict[Tensor, Final] = {}
        self._final_bytes = 0
        self._streams: dict[int, None] = {}
        self._graph_task = -1  # the backward pass at whose end it is handed over
        # Copies that may still be under way, with what they read.
        self._in_flight: collections.deque[tuple[int, list[Tensor]]] = collections.deque()
        self._begun = False  # gradients of the next step have been handed over, or are about to be
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
        self.begin_again()

    def __enter__(self) -> GradientHooks:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()

    def release(self) -> None:
        """After a step, which has read all gradients: lets them go."""
        self._in_flight.clear()
        self.begin_again()

    def begin_again(self) -> None:
        """The gradients of a step have been used up or dropped."""
        self._begun = False
        self._passes.clear()
        self._forget_final()

    @contextlib.contextmanager
    def last_micro_batch(self) -> Iterator[None]:
        """The backward pass in here is the last one of a step."""
        was_last, self._is_last = self._is_last, True
        try:
            yield
        finally:
            self._is_last = was_last

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
        """Autograd has added to the gradient of a param."""
        optimizer = self._optimizer()
        if optimizer is None:
            self.remove()
            return
        if param.grad is None or hasattr(param, "decoupled_grad"):  # not what a step takes
            return
        if not self._is_final(param):
            return
        engine = optimizer._engine
        if engine is None or not self._begun:
            # The first one of a step: state can still move to where there is room for what has been
            # unfrozen, or for a group's momentum. Later the gradients on the host would be lost.
            engine = optimizer._ready_engine()
            self._begun = True
        slot = engine.registered.slot_of.get(param)
        if slot is None:  # no param of this optimizer any more
            return
        self._check(engine, slot, param.grad)
        self._collect(engine, Final(slot, param.grad, slot.usable_gradient(param.grad)))

    def _is_final(self, param: Tensor) -> bool:
        if self._accumulate:  # on the host, where each pass is added
            return True
        passes = self._passes[param] = self._passes.get(param, 0) + 1
        return self._is_last or (self._micro_batches is not None and passes >= self._micro_batches)

    def _check(self, engine: Engine, slot: Slot, grad: Tensor) -> None:
        if not slot.takes_gradient():
            raise abi.InvalidStateError(
                f"the gradient of parameter {slot.name!r} is {grad.dtype} and would be rounded "
                f"to {slot.grad_dtype}, as gradients of this step are on the host already; set "
                "grad_dtype of the parameter between step() and the next backward pass, or drop the "
                "gradients with zero_grad() and start the step again"
            )
        if slot in engine.bound.hosted and not self._accumulate:
            raise abi.InvalidStateError(
                f"the gradient of parameter {slot.name!r} is on the host already, and another backward pass "
                "has made one; call step() or zero_grad() before that pass. If a step has several, say how "
                "many by hook_gradients(micro_batches=n), or micro_batches=None and the last one in `with "
                "optimizer.last_micro_batch():`; hook_gradients(accumulate=True) adds them up on the host"
            )

    # ------------------------------------------------------------------------------- handing over --

    def _collect(self, engine: Engine, final: Final) -> None:
        stream = engine.stream()
        if stream not in self._streams and len(self._streams) == MAX_STREAMS:
            self._send()
        self._streams[stream] = None
        self._final[final.slot.param] = final
        self._final_bytes += final.usable.nbytes
        graph_task = torch._C._current_graph_task_id()
        if (
            graph_task == -1  # at the end of a backward pass, where FSDP2 reduces what is left
            or self._final_bytes >= BATCH_BYTES
            or len(self._final) >= BATCH_PARAMS
        ):
            self._send()
        elif graph_task != self._graph_task:
            self._graph_task = graph_task
            torch.autograd.Variable._execution_engine.queue_callback(self._send)

    @in_no_mode
    def _send(self) -> None:
        """Hands over what has been collected, but for gradients that somebody has replaced or dropped."""
        optimizer = self._optimizer()
        final, streams = list(self._final.items()), list(self._streams)
        self._forget_final()
        engine = None if optimizer is None else optimizer._engine
        if engine is None:
            return
        slot_of = engine.registered.slot_of
        batch = [
            each
            for param, each in final
            if param.grad is each.grad and slot_of.get(param) is each.slot
        ]
        if not batch:
            return
        self._let_go(engine)
        flags = abi.OFFLOAD_MOVE_ACCUMULATE if self._accumulate else 0
        gradients = {each.slot: each.usable for each in batch}
        ticket = send_gradients(engine, gradients, flags, streams, hooked=True)
        self._in_flight.append((ticket, list(gradients.values())))
        for each in batch:
            each.slot.param.grad = None

    def _forget_final(self) -> None:
        self._final.clear()
        self._final_bytes = 0
        self._streams.clear()

    def _let_go(self, engine: Engine) -> None:
        """Drops what has been copied; waits where too much has not."""
        most = MAX_IN_FLIGHT_ACCUMULATING if self._accumulate else MAX_IN_FLIGHT
        while self._in_flight:
            ticket, _ = self._in_flight[0]
            patience_ns = -1 if len(self._in_flight) >= most else 0
            try:
                engine.handle.wait(ticket, timeout_ns=patience_ns)
            except abi.TimedOutError:
                return
            self._in_flight.popleft()


def check_micro_batches(micro_batches: int | None, accumulate: bool) -> None:
    if micro_batches is not None and (type(micro_batches) is not int or micro_batches < 1):
        raise ValueError(
            f"Invalid micro_batches: {micro_batches!r}, expected the number of backward passes of a step, or "
            "None if last_micro_batch() tells the last one"
        )
    if accumulate and micro_batches != 1:
        raise ValueError(
            "with accumulate=True gradients of each backward pass leave and are added up on the host; "
            "leave micro_batches out"
        )
