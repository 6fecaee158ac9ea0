"""Reporting: an optimizer's reports about its memory and its steps."""

from __future__ import annotations

import os
from typing import Any

import torch

from .. import abi
from ..base.checks import shown
from ..base.modes import in_no_mode
from ..base.units import readable
from ..engine.engine import Engine
from ..engine.engines import Engines
from ..engine.trace import Trace
from ..settings.options import OffloadOptions
from ..settings.placement import Placement
from ..steps.history import History, MemorySample
from ..steps.plans import Plan, Stats, StepResult, described

OPTIONS_TOLD = ("offload_fraction", "host_executors", "master_layout", "max_grad_norm", "state_dtype")


class Reporting(torch.optim.Optimizer):
    """Reports of an optimizer. None of them changes it."""

    _engines: Engines
    _history: History
    _options: OffloadOptions
    _placement: Placement

    def _ready_engine(self, binds_params: bool = True) -> Engine:
        raise NotImplementedError

    def _planned_engine(self) -> Engine:
        """An engine as the first step will make it."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """As torch's, with the options and bytes of this class added."""
        groups = super().__repr__().removesuffix(")")
        lines = "".join(f"    {name}: {value}\n" for name, value in self._particulars().items())
        return f"{groups}Offload\n{lines})"

    def _particulars(self) -> dict[str, Any]:
        """The entries that repr() adds. It does not wait, does not make an engine, and does not raise."""
        particulars: dict[str, Any] = {key: self._options.get(key) for key in OPTIONS_TOLD}
        if self._engines.is_closed:
            return {**particulars, "bytes": "none, the optimizer is closed"}
        if self._engines.present is None:
            return {**particulars, "bytes": "none before the first step; plan() tells them"}
        particulars["offload_fraction"] = self._placement.offload_fraction
        try:
            stats = self.stats()
        except abi.HybridoptError as error:  # in a forked child
            return {**particulars, "bytes": f"not known: {error}"}
        particulars["steps"] = self._history.told(stats)
        particulars["bytes"] = (
            f"{readable(stats.state_bytes.host)} of state on the host, "
            f"{readable(stats.state_bytes.device)} on the device"
        )
        if stats.state_bytes.disk > 0:
            particulars["bytes"] += f", {readable(stats.state_bytes.disk)} on disk"
        return particulars

    @in_no_mode
    def plan(self) -> Plan:
        """All memory that the first step will take, or has taken."""
        self._engines.check_open(self)
        engine = self._planned_engine() if self._engines.present is None else self._engines.present
        return described(
            Plan,
            engine.plan(),
            offload_fraction=self._placement.offload_fraction,
            reason=self._placement.reason,
        )

    def stats(self) -> Stats:
        """Totals of steps, bytes and seconds. They are 0 before the first step."""
        engine = self._engines.present
        return self._history.stats(None if engine is None else engine.handle.stats())

    @in_no_mode
    def last_step(self) -> StepResult:
        """The result of the last step: whether it was skipped, the gradient norm, and so on. Waits for the
        step."""
        self._settle()
        if not self._history.results:
            raise abi.InvalidStateError("no step yet; call step() first")
        return described(StepResult, self._history.results[-1])

    @in_no_mode
    def step_results(self) -> list[StepResult]:
        """The results of the last 1024 steps, with skipped ones. Waits for queued steps."""
        self._settle()
        return [described(StepResult, result) for result in self._history.results]

    def _settle(self) -> None:
        if self._engines.present is not None:
            self._engines.present.settle()

    @in_no_mode
    def trace(self, path: str | os.PathLike[str], ring_bytes: int = 0) -> Trace:
        """Records what the library's threads and streams do in the steps of a with statement, and writes that to
        `path`, a file that ui.perfetto.dev opens (docs/TRACE.md):

            with optimizer.trace("step.json"):
                for batch in batches: ...

        It waits for queued steps and saves at the end, and changes no bit. `ring_bytes` bounds the memory of events
        (0: 16 MiB); when it is full, each new event drops the oldest, and `trace.dropped` counts them."""
        if not isinstance(ring_bytes, int) or isinstance(ring_bytes, bool) or not 0 <= ring_bytes < 2**63:
            raise ValueError(f"Invalid ring_bytes: {shown(ring_bytes)}, expected bytes from 4096 on (0: 16 MiB)")
        self._engines.check_open(self)
        return Trace(path, ring_bytes, self._ready_engine(), lambda: self._engines.present)

    def memory_timeline(self) -> list[MemorySample]:
        """The last 4096 samples of memory in use, by kind and place. There is one before and one after each
        step, and one after each move."""
        return self._history.samples()

    def plot_timeline(self, path: str | os.PathLike[str]) -> None:
        """Writes a plot of memory_timeline() and of the lanes of the last steps. It needs matplotlib. Waits for
        queued steps."""
        from ..steps.timeline_plot import plot_timeline

        plot_timeline(self.memory_timeline(), self.step_results(), path)
