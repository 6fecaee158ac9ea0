"""Ranges of device memory that are copied to the host and back. A range is copied once, even if several tensors over
it were saved."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..abi.errors import HybridoptError, InvalidStateError
from ..base.modes import current_stream
from .choice import Link

# A range comes back to an address with the same remainder modulo this number: the order in which some kernels add
# depends on the alignment of their data.
ALIGNMENT = 64


class Handle(Protocol):
    """The functions of abi.stash.Stash that queue copies."""

    @property
    def closed(self) -> bool: ...

    def push(self, data: int, bytes: int, stream: int = 0, lane: int = 0) -> int: ...

    def release(self, ticket: int, stream: int = 0) -> None: ...

    def prefetch(self, ticket: int, destination: int, bytes: int, stream: int = 0) -> None: ...

    def pop(self, ticket: int, stream: int = 0, flags: int = 0) -> None: ...

    def drop(self, ticket: int, stream: int = 0) -> None: ...


class Counter:
    """Bytes that a forward pass has on the device. A block may be deleted at any moment, in any thread, even in the
    middle of a statement of this class. So the bytes that it frees are noted, and subtracted later."""

    def __init__(self) -> None:
        self._bytes = 0
        self._freed: deque[int] = deque()

    def add(self, size_bytes: int) -> None:
        self._bytes += size_bytes

    def free(self, size_bytes: int) -> None:
        self._freed.append(size_bytes)

    def bytes(self) -> int:
        while self._freed:
            self._bytes -= self._freed.popleft()
        return self._bytes


class Block:
    """One range, held by the tensors that were saved over it.

        storage  ticket  buffer
        yes      0       None    it stays on the device
        yes      yes     None    it is copied to the host, or has been: its memory may not be used yet
        None     yes     None    it is on the host
        None     yes     yes     it is copied into the buffer
        None     0       yes     it is back
    """

    __slots__ = (
        "__weakref__",
        "address",
        "buffer",
        "bytes",
        "counter",
        "forward_pass",
        "origin",
        "padding",
        "place",
        "storage",
        "stream",
        "ticket",
        "transfers",
        "was_used",
    )

    def __init__(self, storage: torch.UntypedStorage, address: int, size_bytes: int) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.address = address
        self.bytes = size_bytes
        self.origin = StorageWeakRef(storage)  # tells whether the memory that was saved still exists
        self.padding = address % ALIGNMENT
        self.buffer: Tensor | None = None
        self.ticket = 0
        self.stream = 0
        self.transfers: Transfers | None = None
        self.counter: Counter | None = None
        self.forward_pass: Any = None  # it decides which block comes back next
        self.place = -1  # its index in the order of the pass
        self.was_used = False

    def __del__(self) -> None:
        if getattr(self, "was_used", None) is None:
            return  # an exception has ended __init__()
        if self.counter is not None and (self.storage is not None or self.buffer is not None):
            self.counter.free(self.bytes)
        if self.ticket and self.transfers is not None:
            self.transfers.abandon(self.ticket, self.stream, (self.storage, self.buffer))

    def note_arrival(self, _: int) -> None:
        self.ticket = 0

    def memory(self) -> tuple[torch.UntypedStorage, int]:
        """A storage, and the byte of this storage at which the block begins now."""
        if self.storage is not None:
            return self.storage, self.address - self.storage.data_ptr()
        assert self.buffer is not None
        return self.buffer.untyped_storage(), self.padding


class Transfers:
    """Queues copies of blocks, and keeps memory alive while copies read or write it. It does not use
    record_stream(): the library is told which stream waits for which copy."""

    def __init__(self, handle: Handle, device: torch.device) -> None:
        self.handle = handle
        self._device = device
        self._pushed_bytes = 0
        self._seconds = 0.0
        self.abandoned: deque[tuple[int, int, Any]] = deque()  # by append(), and end_abandoned() behind it
        self._ending = threading.Lock()

    def push(self, block: Block) -> bool:
        """Queues the copy to the host, unless the stash has no room."""
        stream = block.stream = current_stream(self._device)
        block.transfers = self  # before there is a ticket, which the end of the block gives back
        begin = time.perf_counter()
        block.ticket = self.handle.push(block.address, block.bytes, stream)
        if block.ticket:
            self._pushed_bytes += block.bytes
            self._seconds += time.perf_counter() - begin
        return block.ticket != 0

    def link(self) -> Link:
        """The speed of the link on the CPU, where a push is the copy itself. On other devices the device measures
        copies."""
        is_timed = self._device.type == "cpu" and self._seconds > 0.0
        speed = self._pushed_bytes / self._seconds if is_timed else 1.0
        return Link(speed, speed)

    def release(self, block: Block) -> None:
        """Releases the device memory of a block: its stream may use the memory again when the copy has ended."""
        self.handle.release(block.ticket, block.stream)
        block.storage = None

    def prefetch(self, block: Block) -> None:
        """Queues the copy back, into new memory of the stream that the block was used on."""
        with self._on(block.stream):
            size = block.padding + block.bytes
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        address = buffer.data_ptr() + block.padding
        # In one statement, since Ctrl-C between two would free the memory that the copy writes.
        prefetch = cast("Callable[..., Any]", self.handle.prefetch)
        _, block.buffer = prefetch(block.ticket, address, block.bytes, block.stream), buffer

    def bring_back(self, block: Block) -> None:
        """Makes the current stream wait until it may use the block."""
        if block.buffer is None:
            self.prefetch(block)
        self.pop(block, block.stream)
        self.follow(block)

    def pop(self, owner: Any, stream: int, flags: int = 0) -> None:
        """Makes later work on the stream wait until the bytes are back, and notes that the owner's ticket has
        arrived. If Ctrl-C ends the call, that is so too."""
        try:
            self.handle.pop(owner.ticket, stream, flags)
            owner.note_arrival(stream)
        except HybridoptError:
            raise
        except BaseException:
            with suppress(HybridoptError):  # it has been popped
                self.handle.pop(owner.ticket, stream, flags)
            owner.note_arrival(stream)
            raise

    def follow(self, block: Block) -> None:
        """If a block is back on a stream other than the current one, copies the block: memory belongs to the stream
        on which it was allocated, and that stream would reuse it too early."""
        stream = current_stream(self._device)
        if stream == block.stream or block.buffer is None:
            return
        mine, its = self._stream(stream), self._stream(block.stream)
        mine.wait_stream(its)
        buffer = block.buffer.clone()
        its.wait_stream(mine)
        block.buffer, block.stream = buffer, stream

    def stream(self) -> int:
        return current_stream(self._device)

    def default_stream(self) -> int:
        return 0 if self._device.type == "cpu" else torch.cuda.default_stream(self._device).cuda_stream

    def order(self, owner: int, user: int) -> None:
        """To be called when memory of the stream `owner` is released that the stream `user` has used: the owner
        waits for the user."""
        if owner != user:
            self._stream(owner).wait_stream(self._stream(user))

    def _stream(self, stream: int) -> torch.cuda.Stream:
        if stream == 0:  # torch takes 0 for "no stream given", and makes another one
            return torch.cuda.default_stream(self._device)
        return torch.cuda.ExternalStream(stream, self._device)

    def _on(self, stream: int) -> AbstractContextManager[Any]:
        if stream == current_stream(self._device):
            return nullcontext()
        return torch.cuda.stream(self._stream(stream))

    def abandon(self, ticket: int, stream: int, memory: Any) -> None:
        """Ends a ticket that is not needed any more. `memory` is released when its stream waits for the copies."""
        self.abandoned.append((ticket, stream, memory))
        self.end_abandoned()

    def end_abandoned(self) -> None:
        """A block may be deleted inside of this function, by the garbage collection. Then the thread that has the
        lock also ends that block."""
        while self.abandoned and not self._ending.locked():
            with self._ending:
                while self.abandoned and not self.handle.closed:
                    ticket, stream, _ = self.abandoned[0]
                    try:
                        self.handle.drop(ticket, stream)
                    except InvalidStateError:
                        return  # the stream captures a graph: later
                    except HybridoptError:
                        pass  # the stash is poisoned: its next call says why
                    self.abandoned.popleft()
                if self.handle.closed:
                    self.abandoned.clear()
