"""Adopts changes that other code has made in the optimizer's `state`."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ..base.modes import without_collection
from ..engine.engine import Engine
from ..params.moments import MOMENTS_OF_ANY
from ..params.registered import MASTER, MASTER_LOW, Slot
from ..params.tensors import LOW_DTYPES, local_part


def adopt(engine: Engine, state: dict[Tensor, Any], before_step: bool) -> None:
    """Brings the library's state up to date with `state`, where entries may have been loaded, assigned,
    deleted or written."""
    shown = engine.shown
    if shown.have_counts_moved():
        shown.set_counts(shown.counts.clone())
    if shown.have_counts_changed():
        engine.settle()
        engine.wait()
        for slot in engine.slots:
            push_count(engine, slot, int(shown.count_views[slot.id]))
    if shown.is_untouched(state):
        shown.take_copies()
    else:
        with without_collection():
            adopt_entries(engine, state)
        shown.note_untouched(state)
    if before_step and shown.let_go_of_disk(state):
        shown.note_untouched(state)
    shown.note_counts()


def adopt_entries(engine: Engine, state: dict[Tensor, Any]) -> None:
    shown = engine.shown
    same: list[Slot] = []
    changed: list[Slot] = []
    for slot in shown.with_entries(state):
        entry = dict.get(state, slot.param)
        if entry or shown.of(slot).entry is not None:
            is_same = entry is not None and shown.is_as_published(slot, entry)
            (same if is_same else changed).append(slot)
    shown.take_copies(same)
    if changed:
        engine.wait()  # once: the code below queues no work
    for slot in changed:
        adopt_slot(engine, slot, state)


def adopt_slot(engine: Engine, slot: Slot, state: dict[Tensor, Any]) -> None:
    entry = dict.get(state, slot.param)
    engine.shown.forget_moved(slot)
    copied = list(engine.shown.of(slot).copies)
    if entry:
        adopt_entry(engine, slot, entry, state)
    else:
        start_again(engine, slot)
    engine.shown.refresh_copies_of(slot, copied)  # views show what has been written, and these copies do not


def push_count(engine: Engine, slot: Slot, count: int) -> None:
    engine.handle.set_step_count(slot.id, count)
    shown = engine.shown.count_views[slot.id]
    if count != int(shown):
        shown.fill_(count)


def start_again(engine: Engine, slot: Slot) -> None:
    """Resets moments and step count, as torch does for a param without state. The master stays."""
    engine.shown.withdraw(slot)
    push_count(engine, slot, 0)
    fresh = engine.registered.groups[slot.group].get("initial_accumulator_value", 0.0)
    for kind in slot.moments.values():
        value = torch.full((), fresh, dtype=torch.float32, device=engine.device).expand(slot.shape)
        engine.state_memory.write(slot, kind, value)


def drop_state_of_others(slot: Slot, entry: dict[str, Any]) -> None:
    """Takes out what the algorithm that the group had before has left."""
    for key in MOMENTS_OF_ANY.keys() - slot.moments.keys():
        entry.pop(key, None)
    if not slot.is_counted:
        entry.pop("step", None)


def adopt_entry(
    engine: Engine, slot: Slot, entry: dict[str, Any], state: dict[Tensor, Any]
) -> None:
    def part_of(value: Tensor) -> Tensor:
        return local_part(value, slot.param)

    moments = {key: entry.get(key) for key in slot.moments}
    count = int(entry.get("step", 0)) if slot.is_counted else engine.hidden_count(slot)
    if moments and all(value is None for value in moments.values()):
        if slot.is_counted and count > 0:
            refuse(slot, f"has step {count} but lacks {', '.join(moments)}")
        choose_master(engine, slot, entry)
        drop_state_of_others(slot, entry)
        start_again(engine, slot)
        engine.masters.adopt(slot, entry, part_of)
        # Otherwise the next step would reset the state again, unless `state` is read before it.
        engine.shown.publish(slot, state)
        return
    loaded: dict[str, Tensor] = {}
    for key, value in moments.items():
        if not isinstance(value, Tensor):
            refuse(slot, f"lacks {key!r}")
        loaded[key] = value
        if value.shape != slot.param.shape:
            refuse(
                slot,
                f"has {key!r} of shape {tuple(value.shape)}, expected {tuple(slot.param.shape)}",
            )
    choose_master(engine, slot, entry)
    for key, value in loaded.items():
        engine.state_memory.write(slot, slot.moments[key], part_of(value))
    engine.masters.adopt(slot, entry, part_of)
    push_count(engine, slot, count)
    engine.shown.publish(slot, state)


def choose_master(engine: Engine, slot: Slot, entry: dict[str, Any]) -> None:
    """If an entry has both a loaded master and the present one, keeps the loaded one. set_optimizer_state_dict() of
    torch.distributed.checkpoint adds the loaded values to the present state_dict, in which another master layout has
    another key."""
    own, other = (MASTER_LOW, MASTER) if slot.split else (MASTER, MASTER_LOW)
    if entry.get(other) is not None and entry.get(own) is engine.shown.of(slot).views.get(own, slot):
        entry.pop(own)
    low = entry.get(MASTER_LOW)
    shape = tuple(slot.param.shape)
    known = [(torch.int16, shape)]
    known += [(torch.uint8, (*shape, dtype.itemsize)) for dtype in LOW_DTYPES.values()]
    if isinstance(low, Tensor) and (low.dtype, tuple(low.shape)) not in known:
        bytes_each = (slot.low_dtype or torch.int16).itemsize
        refuse(
            slot,
            f"has {MASTER_LOW!r} in {low.dtype} of shape {tuple(low.shape)}, expected torch.uint8 of shape "
            f"{(*shape, bytes_each)}",
        )


def refuse(slot: Slot, what: str) -> NoReturn:
    raise ValueError(
        f"the state of parameter {slot.name!r} {what}; load a state_dict of the same optimizer "
        "and model, or delete the parameter's entry to start its state afresh"
    )
