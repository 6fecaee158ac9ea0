"""Engines that are put aside: none of their params is in param_groups now, and they may come back. DeepSpeed's
stage 3 steps its params part by part in this way, each part alone in param_groups."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import Tensor

from .engine import Engine
from .history import History, Pause

MOST_ENGINES = 256


class Aside:
    """No param belongs to two of these engines. What `state` shows of them stays theirs."""

    def __init__(self, history: History, counts: dict[Tensor, int]) -> None:
        self._history = history
        self._pauses: dict[Engine, Pause] = {}  # the engine that was put aside last is the last one
        self._engine_of: dict[Tensor, Engine] = {}
        self.counts = counts  # hidden_counts() of engines that have ended

    def put(self, engine: Engine, state: dict[Tensor, Any]) -> None:
        """`state` shows all of the engine's."""
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
        """The engine for these params, if there is one. Those that have only some of them end. Where there is
        none, those end too whose params nobody has state of any more."""
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
        """What `state` shows of the engine is in ordinary tensors from now on, which another one adopts."""
        self.note_counts(engine, state)
        engine.shown.leave_device()
        self._history.note_dropped(self._remove(engine))

    def end_all(self, state: dict[Tensor, Any]) -> None:
        for engine in list(self._pauses):
            self.end(engine, state)

    def engines(self) -> list[Engine]:
        return list(self._pauses)

    def params(self, state: dict[Tensor, Any]) -> list[Tensor]:
        """Their params that `state` has something for."""
        return [param for param in self._engine_of if dict.get(state, param)]

    # ------------------------------------------------------------------------- hidden step counts --

    def note_counts(self, engine: Engine, state: dict[Tensor, Any]) -> None:
        """The engine ends; the next one for its params goes on from its hidden step counts."""
        known = {param: self.counts[param] for param in self.counts if dict.__contains__(state, param)}
        self.counts = {**known, **engine.hidden_counts()}

    def hidden_counts(self) -> dict[Tensor, int]:
        """Those of engines that have ended, and of those that are aside."""
        counts = dict(self.counts)
        for engine in self._pauses:
            counts.update(engine.hidden_counts())
        return counts


def has_state(engine: Engine, state: dict[Tensor, Any]) -> bool:
    """Whether `state` has anything for a param of the engine."""
    return any(dict.get(state, slot.param) for slot in engine.slots)
