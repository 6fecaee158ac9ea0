"""Aside: engines none of whose params is in param_groups now. An engine is taken back when exactly its params
are there again. DeepSpeed's stage 3 steps its params in this way: it puts one part of them after the other
into param_groups."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import Tensor

from ..steps.history import History, Pause
from .engine import Engine

MOST_ENGINES = 256


class Aside:
    """No param belongs to two of these engines. Their views stay in `state`."""

    def __init__(self, history: History, counts: dict[Tensor, int]) -> None:
        self._history = history
        self._pauses: dict[Engine, Pause] = {}  # in the order in which engines were put aside
        self._engine_of: dict[Tensor, Engine] = {}
        self.counts = counts  # hidden_counts() of engines that have ended

    def put(self, engine: Engine, state: dict[Tensor, Any]) -> None:
        """Puts an engine aside. `state` must show all of its state."""
        engine.bound.release()
        self._pauses[engine] = self._history.note_pause(engine.handle.stats())
        self._engine_of.update(dict.fromkeys(engine.registered.slot_of, engine))
        if len(self._pauses) > MOST_ENGINES:
            self.end(next(iter(self._pauses)), state)

    def take(
        self,
        algorithm: int,
        groups: list[dict[str, Any]],
        param_groups: list[dict[str, Any]],
        state: dict[Tensor, Any],
    ) -> Engine | None:
        """Takes back the engine for exactly these params, if there is one. Engines that have only some of
        these params end. If no engine fits, engines without anything in `state` end too."""
        if not self._pauses:
            return None
        params = chain.from_iterable(group["params"] for group in param_groups)
        for engine in {self._engine_of[param] for param in params if param in self._engine_of}:
            if not engine.difference(algorithm, groups, param_groups):
                self._history.note_return(self._remove(engine))
                return engine
            self.end(engine, state)
        for engine in list(self._pauses):
            if not has_state(engine, state):
                self.end(engine, state)
        return None

    def _remove(self, engine: Engine) -> Pause:
        for param in engine.registered.slot_of:
            del self._engine_of[param]
        return self._pauses.pop(engine)

    def end(self, engine: Engine, state: dict[Tensor, Any]) -> None:
        """Ends an engine. Its state stays in `state`, in ordinary tensors, for another engine to adopt."""
        self.note_counts(engine, state)
        engine.shown.leave_device()
        self._history.note_dropped(self._remove(engine))

    def end_all(self, state: dict[Tensor, Any]) -> None:
        for engine in list(self._pauses):
            self.end(engine, state)

    def engines(self) -> list[Engine]:
        return list(self._pauses)

    def params(self, state: dict[Tensor, Any]) -> list[Tensor]:
        """The params of engines aside for which `state` has an entry that is not empty."""
        return [param for param in self._engine_of if dict.get(state, param)]

    # ------------------------------------------------------------------------- hidden step counts --

    def note_counts(self, engine: Engine, state: dict[Tensor, Any]) -> None:
        """Keeps the hidden step counts of an engine that ends, for the next engine with its params."""
        known = {param: self.counts[param] for param in self.counts if dict.__contains__(state, param)}
        self.counts = {**known, **engine.hidden_counts(state)}

    def forget_unstepped(self) -> None:
        """Moments are loaded: they have had a step, whatever those of before had."""
        self.counts = {param: count for param, count in self.counts.items() if count > 0}

    def hidden_counts(self, state: dict[Tensor, Any]) -> dict[Tensor, int]:
        """The hidden step counts of engines that have ended or are aside."""
        counts = dict(self.counts)
        for engine in self._pauses:
            counts.update(engine.hidden_counts(state))
        return counts


def has_state(engine: Engine, state: dict[Tensor, Any]) -> bool:
    """Whether `state` has anything for a param of the engine."""
    return any(dict.get(state, slot.param) for slot in engine.slots)
