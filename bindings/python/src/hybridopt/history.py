"""What an optimizer has done so far. Its state moves to another engine when params are added, say; its
history goes on."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from dataclasses import dataclass

from . import abi
from .plans import Stats, StepResult, described

REMEMBERED_RESULTS = 1024
REMEMBERED_SAMPLES = 4096
# Fields of Stats that add up from engine to engine; the others tell of now.
TOTALS = [
    field.name
    for field in dataclasses.fields(Stats)
    if field.name.endswith("_seconds")
    or field.name.startswith("steps_")
    or field.name.endswith(("_up_bytes", "_down_bytes", "_elements", "loaded_bytes"))
]


@dataclass(frozen=True)
class MemorySample:
    """Who holds how much: before a step (`gradients`) and after it (`step`), after each move
    (`offload`, `reload`, `set_offload_fraction`, and `auto` where offload_fraction="auto" moved state)."""

    seconds: float  # since the optimizer was made
    label: str
    params_on_device_bytes: int
    params_on_host_bytes: int
    grads_on_device_bytes: int
    grads_on_host_bytes: int
    states_on_device_bytes: int
    states_on_host_bytes: int
    device_bytes: int  # the library's own, the device share's states and scratch
    host_bytes: int  # the library's own, all of it


BYTE_FIELDS = [
    field.name for field in dataclasses.fields(MemorySample) if field.name.endswith("_bytes")
]
HELD = [field.name for field in dataclasses.fields(Stats) if field.name not in TOTALS]


@dataclass(frozen=True)
class Pause:
    """What an engine said when it was put aside."""

    stats: Stats
    steps: int  # that it counts


class History:
    def __init__(self) -> None:
        self._made = time.monotonic()
        self.results: deque[StepResult] = deque(maxlen=REMEMBERED_RESULTS)
        self.samples: deque[MemorySample] = deque(maxlen=REMEMBERED_SAMPLES)
        self._before = Stats()  # totals without the engine there is
        self._counted = Stats()  # what of its totals is in those
        self._held_aside = dict.fromkeys(HELD, 0)  # by engines that are aside
        self._steps_before = 0  # that the engine does not count
        self._steps_now = 0  # by the latest result, or by the checkpoint that was loaded since

    def add(self, result: abi.offload_step_result_t) -> None:
        result.step += self._steps_before
        self._steps_now = result.step
        self.results.append(described(StepResult, result))

    def sample(self, label: str, own: abi.offload_stats_t) -> None:
        """Notes who holds how much now."""
        held = {name: getattr(own, name) + self._held_aside[name] for name in BYTE_FIELDS}
        self.samples.append(MemorySample(time.monotonic() - self._made, label, **held))

    def stats(self, own: abi.offload_stats_t | None) -> Stats:
        """Totals of all engines, and what the one there is and those that are aside hold."""
        now = Stats() if own is None else described(Stats, own)
        before, counted = self._before, self._counted
        sums = {
            name: getattr(before, name) + getattr(now, name) - getattr(counted, name) for name in TOTALS
        }
        held = {name: getattr(now, name) + self._held_aside[name] for name in HELD}
        return Stats(**sums, **held)

    def note_end(self, own: abi.offload_stats_t) -> None:
        """The engine ends. All of its results have been added."""
        sums = self.stats(own)
        self._before = Stats(**{name: getattr(sums, name) for name in TOTALS})
        self._counted = Stats()
        self._steps_before = self._steps_now

    def note_pause(self, own: abi.offload_stats_t) -> Pause:
        """The engine is put aside. All of its results have been added."""
        pause = Pause(described(Stats, own), self._steps_now - self._steps_before)
        self.note_end(own)
        self._hold(pause, 1)
        return pause

    def note_return(self, pause: Pause) -> None:
        """It is the engine again; there is no other one."""
        self._hold(pause, -1)
        self._counted = pause.stats
        self._steps_before = self._steps_now - pause.steps

    def note_dropped(self, pause: Pause) -> None:
        """It has ended aside."""
        self._hold(pause, -1)

    def _hold(self, pause: Pause, sign: int) -> None:
        for name in HELD:
            self._held_aside[name] += sign * getattr(pause.stats, name)

    def note_load(self, steps: int) -> None:
        """The engine counts from the checkpoint's steps on."""
        self._steps_before = 0
        self._steps_now = steps
