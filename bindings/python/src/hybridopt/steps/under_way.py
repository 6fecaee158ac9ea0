"""UnderWay: a step that runs while the program goes on. The library reads gradients and writes params until
the program has waited for them."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from .. import abi
from ..abi import ends
from ..base.modes import current_stream, in_no_mode
from ..params.registered import Slot
from ..params.taken import Taken
from ..params.tensors import local, version_of
from ..traps.trap import Traps, take_back, without_traps
from .queued import Steps

_log = logging.getLogger("hybridopt")


class Keeper(Protocol):
    """Is called when code outside of modules uses a param."""

    def used(self, slot: Slot, operation: str) -> None:
        """An operation of torch is about to use this param; `operation` is "" for a use by this package. Waits for
        the step."""


def _used(tensors: list[Tensor], operation: str) -> None:
    for each in list(_all):
        each.note_use(tensors, operation)
    _await_ended()


_traps = Traps(_used)


class Used:
    """The tensors that the step uses of one slot."""

    def __init__(self, slot: Slot, gradient: Tensor | None, aliases: Sequence[Tensor]) -> None:
        self.gradient = gradient
        self.gradient_version = 0 if gradient is None else version_of(gradient)
        self.trapped = [slot.param, *aliases] if slot.is_plain else [slot.param, local(slot.param), *aliases]


# By the id of a slot: the memory of its param and of its gradient.
Memory = dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage | None]]


class Copies:
    """What a step writes for params with gaps between their elements: dense copies, from which the params are to be
    filled. This refers to the params weakly: a param may refer to the optimizer."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[TensorWeakRef, Tensor]] = {}  # by the id of a slot: its param and the copy

    def add(self, slot: Slot) -> None:
        assert slot.copy is not None
        self._of[slot.id] = TensorWeakRef(slot.param), slot.copy

    def clear(self) -> None:
        self._of.clear()

    def take(self) -> None:
        """Fills all params that are still there."""
        devices = {copy.device for _, copy in self._of.values() if copy.is_cuda}
        for id in list(self._of):
            self.take_one(id)
        for device in devices:  # any stream may use the params next
            torch.cuda.current_stream(device).synchronize()

    @in_no_mode
    def take_one(self, id: int) -> None:
        referred, copy = self._of.get(id, (None, None))
        with without_traps():
            param = None if referred is None else referred()
            if param is not None and copy is not None:
                local(param).copy_(copy)
        self._of.pop(id, None)  # last: an exception may end this before


class UnderWay:
    """The step that was queued last, and those of its params for which the program has not waited."""

    def __init__(
        self,
        handle: abi.Optimizer,
        steps: Steps,
        device: torch.device,
        slots: list[Slot],
        on_end: Callable[[list[Slot]], None],
    ) -> None:
        """UnderWay calls on_end when the program has waited for all params of a step. The argument lists the
        slots whose params other code has written since the step was queued."""
        self._handle = handle
        self._steps = steps
        self._device = device
        self._slots = slots
        self._on_end = weakref.WeakMethod(on_end)
        self._ticket = 0
        self.is_shared = False  # whether other processes may have the memory of a param, which no trap can see
        self._is_ended = True  # somebody has waited for the step itself
        self._pending: dict[Slot, Used] = {}
        self._taken: Sequence[Taken] = ()
        self._keeper: weakref.ref[Keeper] | None = None
        self._versions: list[int] = []  # of the params of all slots, at begin()
        self._lock = threading.RLock()  # a param may be used in any thread
        _all.add(self)
        self._memory: Memory = {}
        self._copies = Copies()
        self._wait_at_end = WaitAtEnd(self, handle, self._memory, self._copies.take)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        self._wait_at_end()
        # At the end of the interpreter modules may have no globals any more, and no code uses a param.
        if is_finalizing():
            return
        if self._wait_at_end.is_over:
            self._take_traps_back(self._pending.values())
        else:
            self._wait_at_end.take_back_later(each for used in self._pending.values() for each in used.trapped)

    def __bool__(self) -> bool:
        return bool(self._pending)

    def begin(
        self,
        ticket: int,
        slots: Sequence[Slot],
        gradients: Sequence[Tensor | None],
        aliases: Mapping[Tensor, Sequence[Tensor]],
        keeper: Keeper,
        taken: Sequence[Taken],
    ) -> None:
        """Notes that the step of this ticket runs over these slots with these gradients and with those that hooks have
        taken, and sets traps on their params and on `aliases`, other tensors over the memory of a param."""
        self._ticket = ticket
        self._is_ended = False
        self.is_shared = False
        for slot, gradient in zip(slots, gradients):
            self._pending[slot] = Used(slot, gradient, aliases.get(slot.param, ()) if aliases else ())
            read = None if gradient is None else gradient.untyped_storage()
            written = slot.bound.untyped_storage()
            self._memory[slot.id] = written, read
            if slot.copy is not None:
                self._copies.add(slot)
            if self._device.type == "cpu":  # torch says of all memory of a GPU that it is shared
                of_param = written if slot.copy is None else local(slot.param).untyped_storage()
                self.is_shared = self.is_shared or of_param.is_shared()
        self._versions = [version_of(local(slot.param)) for slot in self._slots]
        self._keeper = weakref.ref(keeper)
        self._taken = taken
        _traps.set(tensor for used in self._pending.values() for tensor in used.trapped)

    def note_use(self, tensors: list[Tensor], operation: str) -> None:
        """Tells the keeper if the step still writes one of these tensors, which an operation is about to use."""
        ids = set(map(id, tensors))
        pending = list(self._pending.items())
        slot = next((slot for slot, used in pending if not ids.isdisjoint(map(id, used.trapped))), None)
        keeper = None if self._keeper is None else self._keeper()
        if slot is not None and keeper is not None:
            keeper.used(slot, operation)
        if slot is not None and self.is_pending(slot):  # the keeper or the optimizer has ended
            self.finish_for_use()

    def is_pending(self, slot: Slot) -> bool:
        """Whether the program has not waited for this param yet."""
        return slot in self._pending

    def wait(self, slots: Iterable[Slot], others: Iterable[torch.cuda.Stream] = ()) -> None:
        """Waits until the step has updated the params of these slots. On the CPU the caller waits. On a GPU
        later work on the current stream, the default stream and `others` waits."""
        with self._lock:
            waiting = [slot for slot in slots if slot in self._pending]
            if not waiting:
                return
            try:
                if self._device.type == "cpu":
                    self._handle.wait(self._ticket)
                    self._keep_skipped()
                else:
                    self._wait_on_streams(waiting, others)
            except abi.HybridoptError:
                self._fail()
                raise
            self._give_back(waiting)

    def _keep_skipped(self) -> None:
        """Keeps the gradients of a skipped step, because one of them is the reason for the skip."""
        if not self._is_ended and self._steps.was_last_skipped():
            self._steps.skipped_gradients = {slot: used.gradient for slot, used in self._pending.items()}
        self._is_ended = True

    def finish(self) -> None:
        """Waits for all params of the step."""
        self.wait(list(self._pending))

    @in_no_mode
    def finish_for_use(self) -> None:
        """Waits for all params of the step, because code outside of modules uses one of them. That code may write
        the param through `.data`, which leaves no trace, so the step must have ended before. On a GPU the code may
        use a stream other than that of the modules, which would not wait again; then the caller waits."""
        self.finish()
        if self._device.type == "cuda":
            current = torch.cuda.current_stream(self._device)
            if current != torch.cuda.default_stream(self._device):
                current.synchronize()

    @in_no_mode
    def finish_before_fork(self) -> None:
        """Waits for all params: a child process gets them as they are now, without a thread that writes them."""
        if self._pending and self._device.type == "cpu":
            try:
                self._handle.wait(self._ticket)
            except abi.HybridoptError:
                return  # the next wait raises the error
            self.finish()

    def _wait_on_streams(self, slots: list[Slot], others: Iterable[torch.cuda.Stream]) -> None:
        ids = [slot.id for slot in slots]
        streams = {current_stream(self._device)}
        streams.add(torch.cuda.default_stream(self._device).cuda_stream)
        streams.update(other.cuda_stream for other in others)
        for stream in streams:
            try:
                self._handle.stream_wait(stream, self._ticket, ids)
            except abi.PoisonedError:
                self._handle.wait(self._ticket)  # raises why
                raise

    def _give_back(self, slots: list[Slot]) -> None:
        for slot in slots:
            if slot.copy is not None:
                self._copies.take_one(slot.id)
                self._versions[slot.id] += 1
        all_used = [self._pending.pop(slot) for slot in slots]
        self._take_traps_back(all_used)
        written: list[str] = []
        for slot, used in zip(slots, all_used):
            gradient = used.gradient
            self._memory.pop(slot.id, None)  # an exception may have ended this after it
            if gradient is None:
                continue
            if gradient.device.type != "cpu":
                # The gradient may belong to another stream, and is freed now. record_stream() keeps
                # torch from reusing its memory before the current stream has passed its wait.
                gradient.record_stream(torch.cuda.current_stream(self._device))
            if version_of(gradient) != used.gradient_version:
                written.append(slot.name)
        if not self._pending:
            written += [each.name for each in self._taken if each.is_written]
            self._let_taken_go()
            self._end_step()
        if written:
            raise abi.InvalidStateError(
                f"the gradient of parameter {written[0]!r} was written in place while a step read it, "
                "so that this step may have used other numbers; call optimizer.zero_grad(), which "
                "waits where it must, or optimizer.synchronize() before writing gradients"
            )

    def _let_taken_go(self) -> None:
        for each in self._taken:
            each.may_be_written = True
        self._taken = ()

    def _end_step(self) -> None:
        on_end, before = self._on_end(), zip(self._slots, self._versions)
        if on_end is not None:
            on_end([slot for slot, version in before if version_of(local(slot.param)) != version])

    def _fail(self) -> None:
        """Ends the step after a failure, which the caller raises: nothing waits for it again."""
        self._take_traps_back(self._pending.values())
        self._pending.clear()
        self._memory.clear()
        self._copies.clear()
        self._let_taken_go()
        self._steps.forget_failed()

    def _take_traps_back(self, all_used: Iterable[Used]) -> None:
        take_back(tensor for used in all_used for tensor in used.trapped)


_all: weakref.WeakSet[UnderWay] = weakref.WeakSet()


def _before_fork() -> None:
    for each in list(_all):
        each.finish_before_fork()
    _await_ended(is_for_use=False)


os.register_at_fork(before=_before_fork)


class InUse(Protocol):
    """Memory that queued work uses."""

    def __len__(self) -> int: ...

    def clear(self) -> None: ...


class WaitAtEnd:
    """Waits for queued work before the end of an object, its owner, or of the process frees memory that this work uses.
    Code on another thread may go on meanwhile: params of the owner keep their traps, and a use of one waits too."""

    def __init__(
        self, owner: object, handle: abi.Optimizer, memory: InUse, finish: Callable[[], object] = lambda: None
    ) -> None:
        """finish() is called when the work has been done. It and `memory` must not refer to a param: a param may refer to
        the optimizer, and then the process would keep both."""
        self._handle = handle
        self._memory = memory
        self._finish = finish
        self._process = os.getpid()
        self._trapped: list[TensorWeakRef] = []
        self._lock = threading.RLock()
        self._finalizer = weakref.finalize(owner, self._end)
        _waits.add(self)

    def __call__(self) -> None:
        """The owner ends."""
        self._finalizer()

    def detach(self) -> None:
        """The end of the owner does not wait any more."""
        self._finalizer.detach()
        _waits.discard(self)

    @property
    def is_over(self) -> bool:
        return self not in _waits

    @property
    def owner_has_ended(self) -> bool:
        return self._finalizer.peek() is None

    def take_back_later(self, tensors: Iterable[Tensor]) -> None:
        """Takes the traps of these tensors back when the wait is over."""
        with self._lock:
            self._trapped = list(map(TensorWeakRef, tensors))
            if self.is_over:
                self._take_traps_back()

    def refuse_wait(self) -> None:
        """Raises if the work has called this thread."""
        if self._memory:
            self._handle.refuse_wait()

    def wait(self) -> None:
        """Waits for the work, if it may still be under way."""
        if self._memory and not self._handle.closed:
            self._handle.drain()
            with self._lock:
                if self._memory:  # no other thread has come first
                    self._finish()
                    self._memory.clear()

    def _end(self) -> None:
        if self._memory and os.getpid() == self._process:
            ends.outside(self._wait_and_free)
        else:
            _waits.discard(self)

    def _wait_and_free(self) -> None:
        try:
            self.wait()
        except abi.HybridoptError as error:
            _log.error("work that nobody has waited for: %s", error)
        except BaseException:  # of Ctrl-C, which only the main thread gets: another one waits on
            if threading.get_ident() == threading.main_thread().ident:
                ends.later(self._wait_and_free)
            raise
        with self._lock:
            self._memory.clear()
            _waits.discard(self)
            self._take_traps_back()

    def _take_traps_back(self) -> None:
        with without_traps():
            alive = [tensor for tensor in (each() for each in self._trapped) if tensor is not None]
        self._trapped = []
        take_back(alive)


_waits: set[WaitAtEnd] = set()  # those that are not over


def _await_ended(is_for_use: bool = True) -> None:
    for each in list(_waits):
        if each.owner_has_ended:
            if is_for_use:
                each.refuse_wait()
            with contextlib.suppress(abi.HybridoptError):  # the end of the owner logs it
                each.wait()
