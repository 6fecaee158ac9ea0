"""A stash that copies as late as it may: to the host when the caller waits for that copy, and back when the caller
pops. Until then destinations hold NaNs. So memory that is freed or read too early shows in every run."""

import ctypes

from hybridopt import abi


class LazyStash:
    """Stands in for abi.Stash on the CPU."""

    def __init__(self, context, *, budget_bytes, slab_bytes=0, min_bytes=0):
        self.closed = False
        self.budget_bytes = budget_bytes
        self.tickets = {}  # number -> [address, bytes, copy or None, destination or None]
        self.log = []
        self.last = 0
        self.pushed_bytes = self.refused_bytes = self.prefetched_bytes = self.held_bytes_max = 0

    @property
    def held_bytes(self):
        return sum(entry[1] for entry in self.tickets.values())

    def push(self, data, bytes, stream=0, lane=0):
        if self.held_bytes + bytes > self.budget_bytes:
            self.refused_bytes += bytes
            return 0
        self.last += 1
        self.tickets[self.last] = [data, bytes, None, None]
        self.pushed_bytes += bytes
        self.held_bytes_max = max(self.held_bytes_max, self.held_bytes)
        self.log.append(("push", self.last, bytes))
        return self.last

    def _copy_down(self, ticket):
        entry = self._entry(ticket)
        if entry[2] is None:
            entry[2] = ctypes.string_at(entry[0], entry[1])

    def _entry(self, ticket):
        if ticket not in self.tickets:
            raise abi.InvalidArgumentError(f"ticket {ticket} is not one of this stash, or has ended")
        return self.tickets[ticket]

    def release(self, ticket, stream=0):
        self._copy_down(ticket)
        self.log.append(("release", ticket, self.tickets[ticket][1]))

    def prefetch(self, ticket, destination, bytes, stream=0):
        self._copy_down(ticket)
        entry = self._entry(ticket)
        assert entry[3] is None and bytes >= entry[1]
        ctypes.memset(destination, 0xFF, entry[1])  # NaN in every floating-point dtype
        entry[3] = destination
        self.prefetched_bytes += entry[1]
        self.log.append(("prefetch", ticket, entry[1]))

    def pop(self, ticket, stream=0, flags=0):
        entry = self._entry(ticket)
        if entry[3] is None:
            raise abi.InvalidStateError(f"ticket {ticket} has not been prefetched")
        ctypes.memmove(entry[3], entry[2], entry[1])
        entry[3] = None
        if not flags & abi.OFFLOAD_STASH_KEEP:
            del self.tickets[ticket]
        self.log.append(("pop", ticket, entry[1]))

    def drop(self, ticket, stream=0):
        entry = self._entry(ticket)
        if entry[3] is not None:
            ctypes.memmove(entry[3], entry[2], entry[1])
        del self.tickets[ticket]
        self.log.append(("drop", ticket, entry[1]))

    def stats(self):
        return abi.offload_stash_stats_t(
            tickets=len(self.tickets),
            held_bytes=self.held_bytes,
            used_bytes=self.held_bytes,
            used_bytes_max=self.held_bytes_max,
            pushed_bytes=self.pushed_bytes,
            refused_bytes=self.refused_bytes,
            prefetched_bytes=self.prefetched_bytes,
        )

    def close(self):
        self.closed = True
        self.tickets.clear()
