"""History: results, samples of memory and totals of an optimizer. They continue when the optimizer gets
another engine, for example because params were added."""

from __future__ import annotations

import dataclasses
import operator
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import abi
from ..abi.reports import ByTier
from .plans import Stats, by_tier, described
from .skips import Skips

REMEMBERED_RESULTS = 1024
REMEMBERED_SAMPLES = 4096
# The fields of Stats that are sums over all engines. The others describe the present.
TOTALS = [
    field.name
    for field in dataclasses.fields(Stats)
    if field.name.endswith("_seconds")
    or field.name.startswith("steps_")
    or field.name.endswith(("_up_bytes", "_down_bytes", "_ahead_bytes", "_elements", "_copies", "loaded_bytes"))
]


@dataclass(frozen=True)
class MemorySample:
    """How much memory is in use, and for what. Samples are taken before a step (`gradients`), after it (`step`), and
    after each move (`offload`, `reload`, `set_offload_fraction`, and `auto` if offload_fraction="auto" moved state)."""

    seconds: float  # since the optimizer was made
    label: str
    params_bytes: ByTier[int]
    grads_bytes: ByTier[int]
    state_bytes: ByTier[int]
    device_bytes: int  # the library's own, the device share's states and scratch
    host_bytes: int  # the library's own, all of it


BYTE_FIELDS = {  # and whether they count by tier
    field.name: field.type == "ByTier[int]"
    for field in dataclasses.fields(MemorySample)
    if field.name.endswith("_bytes")
}
HELD = [field.name for field in dataclasses.fields(Stats) if field.name not in TOTALS]


class Sampled(NamedTuple):
    """The parts of a MemorySample. Few samples are ever read, so a step keeps only the parts, and told() makes the
    sample."""

    seconds: float
    label: str
    own: abi.offload_stats_t
    held_aside: dict[str, Any]

    def told(self) -> MemorySample:
        held = {}
        for name, is_by_tier in BYTE_FIELDS.items():
            value = getattr(self.own, name)
            held[name] = (by_tier(value) if is_by_tier else value) + self.held_aside[name]
        return MemorySample(self.seconds, self.label, **held)


@dataclass(frozen=True)
class Pause:
    """The totals of an engine when it was put aside."""

    stats: Stats
    steps: int  # the engine's own step count


class History:
    def __init__(self) -> None:
        self._made = time.monotonic()
        self.results: deque[abi.offload_step_result_t] = deque(maxlen=REMEMBERED_RESULTS)  # for described()
        self._samples: deque[Sampled] = deque(maxlen=REMEMBERED_SAMPLES)
        self.skips = Skips()
        self._before = Stats()  # totals without the present engine
        self._counted = Stats()  # the part of the present engine's totals that _before includes
        # For the engines that are aside. Samples refer to this dict, so it is replaced and never changed.
        self._held_aside = {name: getattr(Stats(), name) for name in HELD}
        self._steps_before = 0  # steps that the present engine does not count
        self._steps_now = 0  # steps in the latest result, or in the checkpoint loaded since
        self._steps_loaded: int | None = None  # of the checkpoint that was loaded last

    def add(self, result: abi.offload_step_result_t, taken: Callable[[], Any]) -> None:
        """Calls taken() when it has the result, and not between two statements: Ctrl-C there would lose the result or
        add it again."""
        told = type(result).from_buffer_copy(result)
        told.step += self._steps_before
        self._steps_now = told.step
        append: Callable[[Any], Any] = self.results.append
        _ = append(told), taken()

    def note_skipped(self) -> None:
        """Notes a step that was skipped before the library heard of it."""
        self._before = dataclasses.replace(self._before, steps_skipped=self._before.steps_skipped + 1)

    def sample(self, label: str, own: abi.offload_stats_t) -> None:
        """Adds a sample of the memory in use now."""
        self._samples.append(Sampled(time.monotonic() - self._made, label, own, self._held_aside))

    def samples(self) -> list[MemorySample]:
        return [sampled.told() for sampled in self._samples]

    def stats(self, own: abi.offload_stats_t | None) -> Stats:
        """Totals of all engines, and the memory of the present engine and of those aside."""
        now = Stats() if own is None else described(Stats, own)
        before, counted = self._before, self._counted
        sums = {
            name: getattr(before, name) + getattr(now, name) - getattr(counted, name) for name in TOTALS
        }
        held = {name: getattr(now, name) + self._held_aside[name] for name in HELD}
        return Stats(**sums, **held)

    def note_end(self, own: abi.offload_stats_t) -> None:
        """Notes the end of the present engine, after all of its results have been added."""
        sums = self.stats(own)
        self._before = Stats(**{name: getattr(sums, name) for name in TOTALS})
        self._counted = Stats()
        self._steps_before = self._steps_now

    def note_pause(self, own: abi.offload_stats_t) -> Pause:
        """Notes that the present engine is put aside, after all of its results have been added."""
        pause = Pause(described(Stats, own), self._steps_now - self._steps_before)
        self.note_end(own)
        self._hold(pause, operator.add)
        return pause

    def note_return(self, pause: Pause) -> None:
        """Notes that an engine aside is the present engine again. There must be no other one."""
        self._hold(pause, operator.sub)
        self._counted = pause.stats
        self._steps_before = self._steps_now - pause.steps

    def note_dropped(self, pause: Pause) -> None:
        """Notes that an engine has ended while it was aside."""
        self._hold(pause, operator.sub)

    def _hold(self, pause: Pause, combine: Callable[[Any, Any], Any]) -> None:
        held = self._held_aside.items()
        self._held_aside = {name: combine(value, getattr(pause.stats, name)) for name, value in held}

    def note_load(self, steps: int) -> None:
        """Notes that the present engine goes on from the steps of a checkpoint."""
        self._steps_before = 0
        self._steps_now = self._steps_loaded = steps

    def told(self, stats: Stats) -> str:
        """The steps that have been made, for repr()."""
        loaded = "" if self._steps_loaded is None else f"; the checkpoint that was loaded has {self._steps_loaded}"
        return f"{stats.steps_applied} applied and {stats.steps_skipped} skipped since it was made{loaded}"
