"""Engines: which engine an optimizer has, and how it gets one.

The optimizer has one engine, whose params are those of param_groups, or none. Engines whose params are not in
param_groups now may be aside. DeepSpeed's stage 3 needs them: it puts one part of the params after the other into
param_groups, and steps each part alone.

                      kept
                     +-----+
              made   v     |    put aside
    nothing ------> PRESENT -----------------> ASIDE
                     |    ^                    |   |
                     |    +--------------------+   |
               ended |          taken back         | ended
                     v                             v
                   ENDED                         ENDED

    from     by          to        the call of the optimizer, and the reason
    nothing  made        PRESENT   ready(): no engine fits param_groups, and there is something to update
    PRESENT  kept        PRESENT   ready(): the engine fits param_groups
    PRESENT  put aside   ASIDE     ready(): none of its params is in param_groups, `state` shows something of it, and it
                                   may exist beside the next engine (_may_put_aside() of the optimizer)
    PRESENT  ended       ENDED     ready(): it does not fit param_groups for another reason
                                   end(): the next engine needs more room
                                   close()
    ASIDE    taken back  PRESENT   ready(): just its params are in param_groups
    ASIDE    ended       ENDED     ready(): some of its params are in param_groups together with others; or no engine is
                                   taken back, and `state` shows nothing of it; or MOST_ASIDE younger ones are aside
                                   end_aside(): hooks, an overlap, a move or ranks begin, which are for all params
                                   close()

The state of an engine that ends stays in `state`, in ordinary tensors. The next engine with these params adopts it.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, Protocol

from torch import Tensor

from .. import abi
from ..base.modes import without_collection
from ..params.members import members_of
from ..params.registered import Slot, Wanted, wide_gradients
from ..steps.history import History, Pause
from .engine import Engine
from .moves import check_nothing_offloaded

MOST_ASIDE = 256


class Owner(Protocol):
    """What Engines asks of its optimizer."""

    param_groups: list[dict[str, Any]]
    _state: Any

    def _wanted(self) -> Wanted:
        """What an engine must fit now. Raises if param_groups are invalid."""

    def _committed_engine(self, known: dict[Tensor, Slot], wanted: Wanted, always: bool) -> Engine | None:
        """A new engine; None while there is nothing to update. `known` has the slots of the engine before it."""

    def _may_put_aside(self) -> bool:
        """Whether the engine may exist beside the next one."""

    def _begin_with(self, engine: Engine) -> None:
        """Hooks the params and modules of a new engine."""

    def _let_go(self) -> None:
        """Drops what belongs to the present engine, which ends."""

    def _unhook(self) -> None:
        """Removes all hooks."""


class Engines:
    """The engines of one optimizer. No param belongs to two of them. `state` shows the views of all."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.present: Engine | None = None
        self.is_closed = False
        self._pauses: dict[Engine, Pause] = {}  # the engines aside, in the order in which they were put there
        self._aside_of: dict[Tensor, Engine] = {}
        self.counts: dict[Tensor, int] = {}  # hidden_counts() of engines that have ended

    def check_open(self, owner: object) -> None:
        """Raises if close() has ended the engines of the optimizer."""
        if self.is_closed:
            raise abi.InvalidStateError(f"this {type(owner).__name__} is closed; make a new one")

    # ------------------------------------------------------------------------------ transitions --

    def ready(self, owner: Owner, always: bool = False) -> Engine | None:
        """Makes sure that the present engine fits param_groups. Unless `always` is set, there need not be an engine
        while no param has a gradient."""
        self.check_open(owner)
        if self.present is not None and self.present.is_as_checked(owner.param_groups):
            return self.present
        with without_collection():
            return self._changed(owner, always)

    def _changed(self, owner: Owner, always: bool) -> Engine | None:
        """ready() after something has changed in param_groups, perhaps without effect on the engine."""
        wanted = owner._wanted()
        known: dict[Tensor, Slot] = {}
        if self.present is not None:
            known = self.present.registered.slot_of  # a reference to the engine would keep its memory
            why = self.present.difference(wanted)
            if why:
                # This raises for invalid params while the old engine still exists.
                members_of(owner.param_groups, wide_gradients(known))
                self._leave(owner, why)
        if self.present is None:
            self.present = self._take_back(owner, wanted)
        if self.present is None:
            self.present = owner._committed_engine(known, wanted, always)
            if self.present is None:
                return None
            owner._begin_with(self.present)
        self.present.registered.set_groups(wanted)
        return self.present

    def _leave(self, owner: Owner, why: str) -> None:
        """Puts the present engine aside or ends it, because it does not fit param_groups any more."""
        engine = self.present
        assert engine is not None
        params = chain.from_iterable(group["params"] for group in owner.param_groups)
        if owner._may_put_aside() and engine.registered.slot_of.keys().isdisjoint(params):
            check_nothing_offloaded(engine, why)
            engine.show(owner._state)
            if has_state(engine, owner._state):
                self._put_aside(engine, owner)
                return
        self.end(owner, why)

    def _put_aside(self, engine: Engine, owner: Owner) -> None:
        engine.wait()
        engine.bound.release()
        self._pauses[engine] = self._history.note_pause(engine.handle.stats())
        self._aside_of.update(dict.fromkeys(engine.registered.slot_of, engine))
        self.present = None
        if len(self._pauses) > MOST_ASIDE:
            self._end_one_aside(next(iter(self._pauses)), owner._state)

    def _take_back(self, owner: Owner, wanted: Wanted) -> Engine | None:
        """Takes the engine for just these params back, if it is aside."""
        if not self._pauses:
            return None
        params = chain.from_iterable(group["params"] for group in owner.param_groups)
        for engine in {self._aside_of[param] for param in params if param in self._aside_of}:
            if not engine.difference(wanted):
                self._history.note_return(self._remove(engine))
                engine.mark_changed()  # nobody has watched its params meanwhile
                return engine
            self._end_one_aside(engine, owner._state)
        for engine in list(self._pauses):
            if not has_state(engine, owner._state):
                self._end_one_aside(engine, owner._state)
        return None

    def end(self, owner: Owner, why: str) -> None:
        """Ends the present engine, if there is one. Raises `why` if content on the host would be lost with it."""
        engine = self.present
        if engine is None:
            return
        check_nothing_offloaded(engine, why)
        engine.show(owner._state)
        engine.wait()  # a save reads params that the next engine will write
        owner._let_go()
        self._leave_state(engine, owner._state)
        self._history.note_end(engine.handle.stats())
        self.present = None

    def end_aside(self, owner: Owner) -> None:
        """Ends all engines that are aside."""
        for engine in list(self._pauses):
            self._end_one_aside(engine, owner._state)

    def _end_one_aside(self, engine: Engine, state: dict[Tensor, Any]) -> None:
        self._leave_state(engine, state)
        self._history.note_dropped(self._remove(engine))

    def _remove(self, engine: Engine) -> Pause:
        for param in engine.registered.slot_of:
            del self._aside_of[param]
        return self._pauses.pop(engine)

    def close(self, owner: Owner) -> None:
        """Ends all engines for good. `state` keeps nothing of them."""
        if self.present is not None:
            check_nothing_offloaded(self.present, "the optimizer is to be closed")
        owner._unhook()
        if self.present is not None:
            self.present.settle()
            self._history.note_end(self.present.handle.stats())
            self.present = None
        self.end_aside(owner)
        self.is_closed = True

    # ------------------------------------------------------------------------------ those aside --

    def aside(self) -> list[Engine]:
        return list(self._pauses)

    def params_aside(self, state: dict[Tensor, Any]) -> list[Tensor]:
        """The params of engines aside for which `state` has an entry that is not empty."""
        return [param for param in self._aside_of if dict.get(state, param)]

    # ------------------------------------------------------------------------- hidden step counts --

    def _leave_state(self, engine: Engine, state: dict[Tensor, Any]) -> None:
        """Keeps the state and hidden step counts of an engine that ends, for the next engine of these params."""
        known = {param: self.counts[param] for param in self.counts if dict.__contains__(state, param)}
        self.counts = {**known, **engine.hidden_counts(state)}
        engine.shown.leave_device()

    def forget_unstepped(self) -> None:
        """Called after moments have been loaded. Loaded moments count as stepped, even if the moments before them
        had no step."""
        self.counts = {param: count for param, count in self.counts.items() if count > 0}

    def hidden_counts(self, state: dict[Tensor, Any]) -> dict[Tensor, int]:
        """The hidden step counts of all engines, those that have ended among them."""
        counts = dict(self.counts)
        for engine in (*self._pauses, self.present):
            if engine is not None:
                counts.update(engine.hidden_counts(state))
        return counts


def has_state(engine: Engine, state: dict[Tensor, Any]) -> bool:
    """Whether `state` has anything for a param of the engine."""
    return any(dict.get(state, slot.param) for slot in engine.slots)
