"""GradientHooks: move gradients to the host while the backward pass still runs.

Autograd calls a hook of each param after it has accumulated the param's gradient. The hook collects final
gradients, which are those of a step's last micro-batch. One call to the library offloads a batch of them,
when the batch is large enough or the backward pass ends, and `grad` of their params becomes None. The
copies begin after the work that is queued by then on the streams that made the gradients. The hooks drop
the tensors when the copies have ended. The step then reads the gradients on the host. Gradients that the
device will read are not copied: `grad` becomes None too, and they live until the step has read them.
"""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from .. import abi
from ..base.checks import check_switch, kind_of
from ..base.modes import in_no_mode
from ..base.owned_hooks import ParamHooks
from ..engine.engine import Engine
from ..engine.moves import send_gradients, take_off
from ..params.bound import Leaving
from ..params.registered import Slot
from ..params.taken import Taken, owns_storage, refuse_written, written_of
from ..params.tensors import local
from ..steps.under_way import WaitAtEnd
from ..traps.clipping import note_taken
from .micro_batches import MicroBatches, refuse_another_pass

# A batch is offloaded as soon as it has this number of gradients, or of bytes.
SEND_AT_BYTES = 64 << 20
SEND_AT_PARAMS = 256
# The number of batches under way at which a hook waits for the oldest one; the library's queue holds 256 calls. With
# accumulate=True the limit is lower, because then the device is short of memory.
MAX_IN_FLIGHT = 64
MAX_IN_FLIGHT_ACCUMULATING = 4
# How many streams one call to the library may name.
MAX_STREAMS = 4
_MARK = "hybridopt"

# By ticket: the gradients that its copies read.
InFlight = collections.deque[tuple[int, list[Taken]]]


class Final(NamedTuple):
    """A gradient that is final: no later backward pass of this step adds to it. A later hook of the param may still
    change it, until it is sent."""

    slot: Slot
    grad: Tensor


class Sending(NamedTuple):
    """A gradient whose batch is sent."""

    slot: Slot
    grad: Tensor
    usable: Tensor  # as the library reads it


class Hooked(Protocol):
    """What the hooks use of the optimizer."""

    _hooks: GradientHooks | None

    @property
    def _engine(self) -> Engine | None: ...

    @property
    def max_grad_norm(self) -> float | None: ...

    _leftover: Any  # where free memory of the device is given to state

    def _ready_engine(self, binds_params: bool = True) -> Engine: ...


def refuse_held_accumulators(params: Iterable[tuple[str, Tensor]]) -> None:
    """Raises if other code holds the autograd node that accumulates the gradient of one of these params. Code that
    averages gradients in the backward pass holds this node, because its own hook is on it (DistributedDataParallel,
    and the wrappers of Megatron-LM, apex and DeepSpeed). It would find no gradient, and the ranks would diverge
    silently. A graph that still exists also holds the node; the two cases cannot be distinguished."""
    if not dist.is_available() or not dist.is_initialized():
        return
    for name, param in params:
        if param.requires_grad and _is_accumulator_held(param):
            raise abi.InvalidStateError(
                f"the autograd node that accumulates the gradient of parameter {name!r} is held by a wrapper "
                "that averages gradients (DistributedDataParallel, say), which would find none, since "
                "hook_gradients() takes them before: leave the hooks out, or shard the model by "
                "torch.distributed.fsdp.fully_shard; or it is held by the graph of an earlier forward pass: "
                "let go of its results (del loss) before hook_gradients()"
            )


def _is_accumulator_held(param: Tensor) -> bool:
    """If nothing refers to the node, autograd makes a new node each time, which has no metadata."""
    _metadata_of_accumulator(param)[_MARK] = True
    return _metadata_of_accumulator(param).pop(_MARK, False)


def _metadata_of_accumulator(param: Tensor) -> dict[str, Any]:
    node: Any = get_gradient_edge(param).node
    return node.metadata


class GradientHooks:
    """Moves the gradients of the optimizer that owns it."""

    def __init__(
        self,
        optimizer: Hooked,
        accumulate: bool,
        micro_batches: int | None,
        grad_scaler: torch.amp.GradScaler | None,
        free_all: bool = False,
    ) -> None:
        check_switch("accumulate", accumulate)
        check_switch("free_all", free_all)
        check_micro_batches(micro_batches, accumulate)
        if grad_scaler is not None and not isinstance(grad_scaler, torch.amp.GradScaler):
            raise TypeError(
                f"grad_scaler is {kind_of(grad_scaler)}, expected the torch.amp.GradScaler "
                "whose step() will step this optimizer"
            )
        self._optimizer = weakref.ref(optimizer)
        self._accumulate = accumulate
        # If the device has no room for gradients, or the host adds them up, no gradient is kept on the device.
        self._keeps_none = free_all or accumulate
        self._keep = b""  # per slot: whether its gradient should stay on the device in this step
        self._owed_bytes = 0  # gradients with shared storages that should have stayed so far, minus those that have
        self._storage = (0, False)  # the last shared storage, and whether it stays
        self.micro_batches = MicroBatches(micro_batches)
        self._param_hooks = ParamHooks(self._ready)
        # The next batch, and the streams that made its gradients.
        self._final: dict[Tensor, Final] = {}
        self._final_bytes = 0
        self._streams: dict[int, None] = {}
        self._graph_task = -1  # the backward pass at whose end the batch is offloaded
        self._in_flight: InFlight = collections.deque()  # copies that may still be under way
        self._written: str | None = None  # a param whose gradient other code has written while it was in flight
        self._wait_at_end: WaitAtEnd | None = None
        self._begun = False  # whether a gradient for the next step has been collected
        self.grad_scaler = grad_scaler

    def attach(self, engine: Engine) -> None:
        """Hooks the params of an engine, instead of those of the engine before."""
        if self._wait_at_end is not None:
            self._wait_at_end.detach()
        self._wait_at_end = WaitAtEnd(self, engine.handle, self._in_flight)
        self._param_hooks.attach(slot.param for slot in engine.slots)

    def remove(self) -> None:
        """Removes the hooks. Gradients on the host stay there for the next step. Raises at its end if other code has
        written one since a hook took it."""
        self._param_hooks.remove()
        optimizer = self._optimizer()
        if optimizer is not None and optimizer._hooks is self:
            optimizer._hooks = None
            if optimizer._engine is not None:
                optimizer._engine.wait()
        try:
            self.refuse_written()
        finally:
            self.release()

    def release(self) -> None:
        """Drops all gradients after a step has read them."""
        self._in_flight.clear()
        self.begin_again()

    def drop(self) -> None:
        """Starts the step again: its gradients are dropped, and other code may write them. Those of a step under way stay."""
        for each in self.in_flight() if self._begun else ():
            each.may_be_written = True
        self.begin_again()

    def begin_again(self) -> None:
        """Starts a new step: the gradients of the last one have been used or dropped."""
        self._begun = False
        self._written = None
        self.micro_batches.begin_step()
        self._forget_final()

    def in_flight(self) -> list[Taken]:
        """The gradients that copies may still read."""
        return [each for _, sent in self._in_flight for each in sent]

    def refuse_written(self) -> None:
        """Raises if other code has written a gradient in place since a hook took it."""
        written = self._written or written_of(self.in_flight())
        if written is not None:
            refuse_written(written)

    def finish_copies(self, engine: Engine) -> None:
        """Waits for the copies that are under way, after which other code may write what they have read."""
        while self._in_flight:
            self._drop_oldest(engine, -1)

    def tell_scaler(self, found_inf: bool) -> None:
        """Stores whether the step found Inf or NaN where GradScaler.update() reads it. The scaler cannot find
        out itself, because it reads `grad` alone."""
        optimizer, scaler = self._optimizer(), self.grad_scaler
        if optimizer is None or scaler is None or optimizer._engine is None:
            return
        device = optimizer._engine.device
        verdict = torch.full((), float(found_inf), dtype=torch.float32, device=device)
        scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"][device] = verdict

    @in_no_mode
    def _ready(self, param: Tensor) -> None:
        """Autograd calls this after it has accumulated the gradient of a param."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        if param.grad is None or hasattr(param, "decoupled_grad"):  # a step does not use this gradient
            return
        if not self._accumulate and not self.micro_batches.end_pass(param):  # else the host adds up all passes
            return
        engine = optimizer._engine
        if engine is None or not self._begun:
            # This is the first gradient of a step. Only now may another engine be made, with room for
            # unfrozen params or a group's momentum: later it would lose the gradients on the host.
            engine = optimizer._ready_engine(binds_params=False)
            count = len(engine.slots)
            keeps_none = self._keeps_none or optimizer._leftover is not None
            self._keep = bytes(count) if keeps_none else engine.handle.grads_to_keep(count)
            self._owed_bytes, self._storage = 0, (0, False)
            engine.note_gradients_leave()
            self._begun = True
        slot = engine.registered.slot_of.get(param)
        if slot is None:  # the param was removed from the optimizer
            return
        self._check(engine, slot, param.grad)
        self._collect(engine, Final(slot, param.grad))

    def _check(self, engine: Engine, slot: Slot, grad: Tensor) -> None:
        if not slot.takes_gradient():
            raise abi.InvalidStateError(
                f"the gradient of parameter {slot.name!r} is {grad.dtype} and would be rounded "
                f"to {slot.grad_dtype}, as gradients of this step are on the host already; set "
                "grad_dtype of the parameter between step() and the next backward pass, or drop the "
                "gradients with zero_grad() and start the step again"
            )
        if slot in engine.bound.kept or (slot in engine.bound.hosted and not self._accumulate):
            refuse_another_pass(slot.name, "; hook_gradients(accumulate=True) adds them up on the host")

    # --------------------------------------------------------------------------------- offloading --

    def _collect(self, engine: Engine, final: Final) -> None:
        stream = engine.stream()
        if stream not in self._streams and len(self._streams) == MAX_STREAMS:
            self._send()
        self._streams[stream] = None
        self._final[final.slot.param] = final
        self._final_bytes += local(final.grad).nbytes
        graph_task = torch._C._current_graph_task_id()
        if (
            graph_task == -1  # FSDP2 reduces the last gradients after the end of the backward pass
            or self._final_bytes >= SEND_AT_BYTES
            or len(self._final) >= SEND_AT_PARAMS
        ):
            self._send()
        elif graph_task != self._graph_task:
            self._graph_task = graph_task
            torch.autograd.Variable._execution_engine.queue_callback(self._send)

    @in_no_mode
    def _send(self) -> None:
        """Offloads the batch, except for gradients that have been replaced or dropped since."""
        optimizer = self._optimizer()
        final, streams = list(self._final.items()), list(self._streams)
        self._forget_final()
        engine = None if optimizer is None else optimizer._engine
        if optimizer is None or engine is None:
            return
        slot_of = engine.registered.slot_of
        batch = [
            Sending(each.slot, each.grad, each.slot.usable_gradient(each.grad))
            for param, each in final
            if param.grad is each.grad and slot_of.get(param) is each.slot
        ]
        if not batch:
            return
        stays = [self._stays(each) for each in batch]
        kept = {each.slot: each.usable for each, stay in zip(batch, stays) if stay}
        leaving = {each.slot: each.usable for each, stay in zip(batch, stays) if not stay}
        self._let_go(engine)
        moved = Leaving.of({each.slot: each.grad for each in batch}, leaving, kept)
        moved.are_added = self._accumulate
        engine.bound.leaving = moved
        if leaving:
            flags = abi.OFFLOAD_MOVE_ACCUMULATE if self._accumulate else 0
            ticket = send_gradients(engine, leaving, flags, streams, hooked=True)
            sent = [Taken(slot.name, grad) for slot, grad in leaving.items()]
            self._in_flight.append((ticket, sent))
            if self._may_be_of_program(engine, leaving):
                engine.await_read(ticket, streams)
                for each in sent:
                    each.may_be_written = True
        moved.have_left = True
        take_off(engine, functools.partial(note_taken, optimizer))

    def _may_be_of_program(self, engine: Engine, leaving: dict[Slot, Tensor]) -> bool:
        """Whether one of these gradients may be cut from a buffer that the program writes after the pass. On a GPU those of
        FSDP2, whose buffers nobody writes, shall not wait."""
        on_cpu = engine.device.type == "cpu"
        return any((on_cpu or slot.is_plain) and not owns_storage(grad) for slot, grad in leaving.items())

    def _stays(self, sending: Sending) -> bool:
        """Whether a gradient stays on the device. FSDP2 puts the gradients of one module into one storage, and a
        single gradient that stays would keep the memory of all of them. So they all stay, or all leave. A plain gradient
        that is cut from a buffer leaves, since the buffer may be the program's, which writes it again."""
        should_stay = bool(self._keep[sending.slot.id])
        if owns_storage(sending.usable):
            return should_stay
        if sending.slot.is_plain:
            return False
        storage = sending.usable.untyped_storage()
        if storage.data_ptr() != self._storage[0]:
            stays = 2 * self._owed_bytes > storage.nbytes()
            self._storage = (storage.data_ptr(), stays)
            if stays:
                self._owed_bytes -= storage.nbytes()
        if should_stay:
            self._owed_bytes += sending.usable.nbytes
        return self._storage[1]

    def _forget_final(self) -> None:
        self._graph_task = -1  # FSDP2 may reduce gradients after the callback of the pass
        self._final.clear()
        self._final_bytes = 0
        self._streams.clear()

    def _let_go(self, engine: Engine) -> None:
        """Drops gradients that have been copied. Waits for the oldest copy if too many are under way."""
        most = MAX_IN_FLIGHT_ACCUMULATING if self._accumulate else MAX_IN_FLIGHT
        while self._in_flight:
            if not self._drop_oldest(engine, -1 if len(self._in_flight) >= most else 0):
                return

    def _drop_oldest(self, engine: Engine, patience_ns: int) -> bool:
        """Drops the gradients of the oldest copy if it ends in this time, and returns whether it does."""
        ticket, sent = self._in_flight[0]
        try:
            engine.handle.wait(ticket, timeout_ns=patience_ns)
        except abi.TimedOutError:
            return False
        self._written = self._written or written_of(sent)
        self._in_flight.popleft()
        return True


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
