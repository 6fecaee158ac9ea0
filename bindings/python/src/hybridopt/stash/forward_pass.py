"""One forward pass and its backward pass: decides which ranges go, when their memory is released, and when they come
back."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch

from .blocks import Block, Counter, Transfers
from .choice import Choice, Measured
from .clock import Clock


class Record:
    """The measurements of a range: when its save and its first use began and ended, as points of the clock. The time
    from begin to end may include waits for copies."""

    def __init__(self, block: Block, name: str, role: str, group: int) -> None:
        self.bytes = block.bytes
        self.name = name
        self.role = role
        self.group = group
        self.saved: tuple[Any, Any] | None = None
        self.used: tuple[Any, Any] | None = None
        self.is_held = False


class ForwardPass:
    """With a choice, the pass has on the device at most what the choice keeps, plus a window if the link is too slow
    for the ranges that go. Without a choice it has at most a window, so that even a model that needs the stash in
    order to fit can be measured."""

    def __init__(
        self, transfers: Transfers, choice: Choice | None, clock: Clock | None, window_bytes: int | None
    ) -> None:
        self._transfers = transfers
        self._choice = choice
        self._clock = clock  # None: this pass is not measured
        self._window_bytes = window_bytes
        self._blocks: list[weakref.ref[Block]] = []
        self._leaving: deque[weakref.ref[Block]] = deque()
        self._on_device = Counter()
        self._kept_bytes = 0
        self._largest_bytes = 0 if choice is None else choice.largest_bytes
        self._uses = 0
        self._next: int | None = None  # the next block's index in the order of coming back
        self._records: dict[int, Record] = {}  # by place; an exception may have cut off the save of one
        self.forward_end: Any = None
        self._last_use_end: Any = None  # a point of the clock
        self.is_open = True

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def was_used(self) -> bool:
        return self._uses > 0

    @property
    def was_used_whole(self) -> bool:
        return self._uses == len(self._blocks)

    @property
    def is_over(self) -> bool:
        """Whether no code can use the saved tensors any more."""
        return all(block() is None for block in self._blocks)

    # -------------------------------------------------------------------------------- forward --

    def save(self, block: Block, name: str, role: str, group: int) -> None:
        place = len(self._blocks)
        begin = None if self._clock is None else self._clock.now()
        block.forward_pass, block.place, block.counter = self, place, self._on_device
        self._blocks.append(weakref.ref(block))
        self._on_device.add(block.bytes)
        choice = self._choice
        goes = choice is None or place >= len(choice.goes) or choice.goes[place]
        record = Record(block, name, role, group)
        if self._clock is not None:
            self._records[place] = record
        if goes and self._transfers.push(block):
            self._largest_bytes = max(self._largest_bytes, block.bytes)
            self._leaving.append(weakref.ref(block))
        else:
            self._kept_bytes += block.bytes
        self._release(self._forward_limit_bytes())
        if self._clock is not None:
            record.saved = begin, self._clock.now()

    def end_forward(self) -> None:
        self.is_open = False
        self._release(self._forward_limit_bytes())
        if self._clock is not None and self.forward_end is None:
            self.forward_end = self._clock.now()

    def release_all(self) -> None:
        """Releases all memory that copies still read: the next forward pass needs it."""
        self._release(-1)

    def _forward_limit_bytes(self) -> int:
        """The most bytes of the forward pass. Hidden copies have ended when the last range that stays is there, so
        they need no window. The copies of a fraction may be late; the ranges saved last are used first, so they need
        not have left."""
        is_hidden = self._choice is not None and self._choice.is_hidden
        return self._staying_bytes() if is_hidden else self._limit_bytes()

    def _limit_bytes(self) -> int:
        window = 2 * self._largest_bytes if self._window_bytes is None else self._window_bytes
        return self._staying_bytes() + window

    def _staying_bytes(self) -> int:
        planned = 0 if self._choice is None else self._choice.kept_bytes
        return max(planned, self._kept_bytes)

    def _release(self, limit_bytes: int) -> None:
        while self._leaving and self._on_device.bytes() > limit_bytes:
            block = self._leaving.popleft()()
            if block is not None and block.storage is not None and not block.was_used:
                self._transfers.release(block)
                self._on_device.free(block.bytes)

    # ------------------------------------------------------------------------------- backward --

    def use(self, block: Block) -> None:
        """Makes a block usable on the current stream, and begins to bring back the next blocks."""
        if block.was_used:
            self._transfers.follow(block)
            return
        block.was_used = True
        self.is_open = False
        begin = None if self._clock is None else self._clock.now()
        if self.forward_end is None:
            self.forward_end = begin
        if block.storage is None:
            if block.buffer is None:
                self._on_device.add(block.bytes)
            self._transfers.bring_back(block)
        self._uses += 1
        record = self._records.get(block.place)
        if self._clock is not None and record is not None:
            record.is_held = block.storage is None and not block.origin.expired()
            record.used = begin, self._clock.now()
            self._last_use_end = record.used[1]
        self._bring_next(block.place)

    def _bring_next(self, place: int) -> None:
        order = () if self._choice is None else self._choice.order
        planned = self._choice is not None and len(self._blocks) == len(self._choice.goes)
        if self._next is None:
            self._next = 0 if planned else place
        while True:
            if planned:
                if self._next >= len(order):
                    return
                assert self._choice is not None
                if self._uses < self._choice.begin[self._next]:
                    return
                block = self._blocks[order[self._next]]()
            else:
                if self._next < 0:
                    return
                block = self._blocks[self._next]()
            if block is not None and block.storage is None and block.buffer is None:
                if self._on_device.bytes() + block.bytes > self._limit_bytes():
                    return
                try:
                    self._transfers.prefetch(block)
                except torch.OutOfMemoryError:
                    return  # it comes back when it is used
                self._on_device.add(block.bytes)
            self._next += 1 if planned else -1

    # ------------------------------------------------------------------------------ measuring --

    @property
    def has_ended_on_device(self) -> bool:
        """Whether measured() returns without a wait."""
        assert self._clock is not None
        return self._last_use_end is None or self._clock.has_passed(self._last_use_end)

    @property
    def is_measured_whole(self) -> bool:
        """Whether no save was cut off, by Ctrl-C for example."""
        records = self._records.values()
        return len(records) == len(self._blocks) and all(record.saved is not None for record in records)

    def measured(self) -> tuple[list[Measured], float]:
        """All ranges, and the seconds of the forward pass, without waits that copies caused. If a range stays in
        this pass, the pass cannot tell whether other code holds the range; an earlier measurement has told that."""
        held = () if self._choice is None else self._choice.held
        clock, records = self._clock, list(self._records.values())
        assert clock is not None and records and records[0].saved is not None
        points = [record.saved for record in records if record.saved is not None]
        begin = points[0][0]
        waited = 0.0
        saved = []
        for before, after in points:
            saved.append(clock.seconds(begin, before) - waited)
            waited += clock.seconds(before, after)
        forward_seconds = clock.seconds(begin, self.forward_end) - waited
        used: dict[int, float] = {}
        uses = [(clock.seconds(begin, r.used[0]), place) for place, r in enumerate(records) if r.used]
        for seconds, place in sorted(uses):
            used[place] = seconds - waited
            before, after = records[place].used or (None, None)
            waited += clock.seconds(before, after)
        ranges = [
            Measured(r.bytes, r.name, r.role, r.group, saved[place], used.get(place), r.is_held or place in held)
            for place, r in enumerate(records)
        ]
        return ranges, forward_seconds
