"""Chooses the tensors that go to the host, from the numbers of one measured pass alone."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence

import torch


@dataclasses.dataclass
class Measured:
    """A range of memory that may go to the host, as measured in a forward and a backward pass."""

    bytes: int
    name: str  # the module that saved it
    role: str  # the role of torch's function that saved it
    group: int  # the call of a wrapped module; without wrapped modules each range is a group
    saved: float  # computing seconds of the device before it was saved, without waits
    used: float | None  # the same before the backward pass first used it; None: it did not
    is_held: bool  # other code held the memory, so putting it aside frees nothing

    @property
    def lifetime(self) -> float:
        return -math.inf if self.used is None else self.used - self.saved


@dataclasses.dataclass(frozen=True)
class Link:
    """The bytes that the link copies in a second, in each direction."""

    down: float
    up: float


@dataclasses.dataclass(frozen=True)
class Choice:
    """What goes to the host in each forward pass that saves the same tensors.

    Attributes:
        goes: by the order of saving, whether a range goes.
        order: the places in `goes` of those that go, in the order in which the backward pass uses them.
        begin: for each of `order`, how many ranges the backward pass has used when its copy back should
            begin, so that it has ended in time.
        is_hidden: whether only what the link can hide goes, so that the forward pass need not wait for it.
        held: the places of those that somebody else held.
        eligible_bytes, chosen_bytes, kept_bytes: of all ranges, of those that go, and of the others.
        largest_bytes: the largest one that goes.
        forward_seconds, backward_seconds: that the device computes.
        link: bytes a second in each direction.
    """

    goes: tuple[bool, ...] = dataclasses.field(repr=False)
    order: tuple[int, ...] = dataclasses.field(repr=False)
    begin: tuple[int, ...] = dataclasses.field(repr=False)
    is_hidden: bool
    held: frozenset[int] = dataclasses.field(repr=False)
    eligible_bytes: int
    chosen_bytes: int
    kept_bytes: int
    largest_bytes: int
    forward_seconds: float
    backward_seconds: float
    link: Link


def nothing(link: Link) -> Choice:
    """The choice for a pass that has saved no tensor that may go."""
    return choose([], 0.0, link, budget_bytes=0, keep_last=0, fraction=None)


def candidates(ranges: Sequence[Measured], keep_last: int) -> list[int]:
    """The places of the ranges that may go, longest lifetime first."""
    groups = sorted({each.group for each in ranges})
    last = set(groups[max(len(groups) - keep_last, 0) :])
    places = (
        place
        for place, each in enumerate(ranges)
        if each.used is not None and not each.is_held and each.group not in last
    )
    return sorted(places, key=lambda place: -ranges[place].lifetime)


# The share of the link that a choice may use: other copies use the link too.
LINK_SHARE = 0.9


class Hidden:
    """Finds which copies the link can do while the device computes: copies down before the forward pass ends, copies
    up after that, each before its range is used."""

    def __init__(self, ranges: Sequence[Measured], forward_seconds: float, link: Link) -> None:
        self._link = link
        used = [math.inf if each.used is None else each.used for each in ranges]
        by_use = sorted(range(len(ranges)), key=used.__getitem__)
        self._turn = {place: turn for turn, place in enumerate(by_use)}
        # For each range: the seconds for which the link is still free for this range and all later ones.
        self._down = forward_seconds - _numbers([each.saved for each in ranges])
        # For each use: its time, and how long the link works until then for its range and for the ranges before it.
        self._uses = _numbers([used[place] - forward_seconds for place in by_use])
        self._busy = torch.zeros_like(self._uses)
        self._goes = torch.zeros_like(self._uses, dtype=torch.bool)

    def take(self, place: int, size_bytes: int) -> bool:
        """Takes a range if both of its copies can be hidden beside those of the ranges taken before."""
        down, up = (size_bytes / (LINK_SHARE * speed) for speed in (self._link.down, self._link.up))
        turn = self._turn[place]
        if bool(self._down[: place + 1].min() < down):
            return False
        later = self._goes[turn:].clone()
        later[0] = True
        if bool((self._uses[turn:] - self._busy[turn:])[later].min() < up):
            return False
        self._down[: place + 1] -= down
        self._busy[turn:] += up
        self._goes[turn] = True
        return True


def _numbers(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def choose(
    ranges: Sequence[Measured],
    forward_seconds: float,
    link: Link,
    *,
    budget_bytes: int,
    keep_last: int,
    fraction: float | None,
) -> Choice:
    """Ranges with the longest lifetime go first: until the link can hide no more; or, if there is a fraction, until
    that share of all bytes goes."""
    eligible_bytes = sum(each.bytes for each in ranges)
    limit_bytes = budget_bytes
    if fraction is not None:
        limit_bytes = min(limit_bytes, round(fraction * eligible_bytes))
    hidden = Hidden(ranges, forward_seconds, link)
    goes = [False] * len(ranges)
    chosen_bytes = 0
    for place in candidates(ranges, keep_last):
        size = ranges[place].bytes
        if chosen_bytes + size > limit_bytes:
            continue
        if fraction is None and not hidden.take(place, size):
            continue
        goes[place] = True
        chosen_bytes += size
    order, begin = schedule(ranges, goes, link)
    return Choice(
        goes=tuple(goes),
        order=order,
        begin=begin,
        is_hidden=fraction is None,
        held=frozenset(place for place, each in enumerate(ranges) if each.is_held),
        eligible_bytes=eligible_bytes,
        chosen_bytes=chosen_bytes,
        kept_bytes=eligible_bytes - chosen_bytes,
        largest_bytes=max((ranges[place].bytes for place in order), default=0),
        forward_seconds=forward_seconds,
        backward_seconds=max((each.used or 0.0 for each in ranges), default=0.0) - forward_seconds,
        link=link,
    )


# Copies back begin earlier than necessary by this factor, so that no time is lost if a copy takes longer.
MARGIN = 1.25


def schedule(
    ranges: Sequence[Measured], goes: Sequence[bool], link: Link
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The order in which ranges come back, and after how many uses the copy of each begins. Copies begin as late as
    possible, because until then other tensors use the memory."""
    uses = sorted((each.used, place) for place, each in enumerate(ranges) if each.used is not None)
    times = [time for time, _ in uses]
    order, begin = [], []
    latest = math.inf
    for time, place in reversed(uses):
        if not goes[place]:
            continue
        latest = min(latest, time) - MARGIN * ranges[place].bytes / link.up
        order.append(place)
        begin.append(max(bisect.bisect_right(times, latest) - 1, 0))
    return tuple(reversed(order)), tuple(reversed(begin))
