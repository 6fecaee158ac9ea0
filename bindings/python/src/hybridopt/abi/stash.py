"""The activation stash of the ABI as an object."""

from __future__ import annotations

import contextlib
from typing import Any

from . import generated as c
from .handles import Context, Handle, make
from .errors import HybridoptError
from .library import call


def stash_plan(context: Context, **options: Any) -> c.offload_stash_plan_t:
    """The memory that Stash(context, **options) would take. Fields: offload_stash_options_t."""
    plan = c.offload_stash_plan_t()
    call("offload_stash_plan", context.value, make(c.offload_stash_options_t, options), plan)
    return plan


class Stash(Handle):
    """Host memory for activations, in a context. Fields: offload_stash_options_t."""

    _destroyer = "offload_stash_destroy"

    def __init__(self, context: Context, **options: Any) -> None:
        handle = c.offload_stash_t()
        fields = make(c.offload_stash_options_t, options)
        self.retold = context.retold
        self._call("offload_stash_create", context.value, fields, handle)
        self.context = context
        super().__init__(handle.value or 0, context)

    def push(self, data: int, bytes: int, stream: int = 0, lane: int = 0) -> int:
        """Queues the copy to the host: its ticket, or 0 if the stash has no room for it."""
        ticket = c.offload_stash_ticket_t()
        try:
            self._call("offload_stash_push", self.value, lane, data, bytes, stream, ticket)
            return ticket.value
        except BaseException:
            if ticket.value:  # Ctrl-C came behind the call: nobody would know the ticket
                self.drop(ticket.value, stream)
            raise

    def release(self, ticket: int, stream: int = 0) -> None:
        """Later work on the stream waits until the copy to the host has ended."""
        self._call("offload_stash_release", self.value, ticket, stream)

    def prefetch(self, ticket: int, destination: int, bytes: int, stream: int = 0) -> None:
        """Queues the copy back, into memory of the device that has room for `bytes` bytes."""
        try:
            self._call("offload_stash_prefetch", self.value, ticket, destination, bytes, stream)
        except HybridoptError:
            raise
        except BaseException:  # Ctrl-C came before or behind the call: the destination is to be free again
            with contextlib.suppress(HybridoptError):
                self.pop(ticket, stream, c.OFFLOAD_STASH_KEEP)
            raise

    def pop(self, ticket: int, stream: int = 0, flags: int = 0) -> None:
        """Later work on the stream waits until the bytes are back."""
        self._call("offload_stash_pop", self.value, ticket, stream, flags)

    def drop(self, ticket: int, stream: int = 0) -> None:
        """Ends a ticket; later work on the stream waits until its copies have ended."""
        self._call("offload_stash_drop", self.value, ticket, stream)

    def mark(self, lane: int = 0) -> int:
        mark = c.offload_stash_mark_t()
        self._call("offload_stash_mark", self.value, lane, mark)
        return mark.value

    def rollback(self, mark: int, stream: int = 0) -> None:
        """Drops what the mark's lane has pushed since the mark."""
        self._call("offload_stash_rollback", self.value, mark, stream)

    def wait(self, ticket: int = 0, timeout_ns: int = -1) -> None:
        """Waits for the copies of a ticket (0: of all), at most timeout_ns (negative: no limit)."""
        self._wait_in_pieces("offload_stash_wait", timeout_ns, self.value, ticket)

    def stats(self) -> c.offload_stash_stats_t:
        stats = c.offload_stash_stats_t()
        self._call("offload_stash_get_stats", self.value, stats)
        return stats
