"""What an optimizer has done so far. Its state moves to another engine when params are added, say; this
goes on."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from typing import Any

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
    or field.name in ("grads_down_bytes", "params_up_bytes", "offloaded_bytes", "reloaded_bytes")
]


class History:
    def __init__(self) -> None:
        self.made = time.monotonic()
        self.results: deque[StepResult] = deque(maxlen=REMEMBERED_RESULTS)
        self.samples: deque[Any] = deque(maxlen=REMEMBERED_SAMPLES)
        self._before = Stats()  # of engines that have ended
        self._steps_before = 0  # that the engine does not count
        self._steps_now = 0  # by the latest result, or by the checkpoint that was loaded since

    def add(self, result: abi.offload_step_result_t) -> None:
        result.step += self._steps_before
        self._steps_now = result.step
        self.results.append(described(StepResult, result))

    def stats(self, own: abi.offload_stats_t | None) -> Stats:
        """With those of the engine there is."""
        now = Stats() if own is None else described(Stats, own)
        sums = {name: getattr(now, name) + getattr(self._before, name) for name in TOTALS}
        return dataclasses.replace(now, **sums)

    def note_end(self, own: abi.offload_stats_t) -> None:
        """The engine ends. All of its results are here."""
        sums = self.stats(own)
        self._before = Stats(**{name: getattr(sums, name) for name in TOTALS})
        self._steps_before = self._steps_now

    def note_load(self, steps: int) -> None:
        """The engine counts from the checkpoint's steps on."""
        self._steps_before = 0
        self._steps_now = steps
