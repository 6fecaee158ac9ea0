"""Moves: offloads params, gradients and states to the host, and reloads them. The library copies the
content; this module frees torch's memory and allocates it again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import abi
from ..base.checks import check_switch
from ..params.registered import Slot
from ..params.released_storages import storages_of
from ..params.tensors import gradient_of, like_param, set_gradient
from ..settings.options import MOVABLE
from ..traps.offloaded import note_offloaded, note_reloaded
from .engine import Engine


def check_movable(engine: Engine, wanted: dict[str, bool]) -> None:
    """Raises if the optimizer was made without room on the host for what is to be moved."""
    for name, want in wanted.items():
        check_switch(name, want)
    missing = [name for name, want in wanted.items() if want and not engine.movable & MOVABLE[name]]
    if missing:
        raise abi.InvalidStateError(
            f"there is no room on the host for {', '.join(missing)}; make the optimizer with "
            f"movable={tuple(name for name, want in wanted.items() if want)}"
        )


def check_nothing_offloaded(engine: Engine, why: str) -> None:
    """Raises if the engine holds content on the host that would be lost with the engine."""
    if engine.released_storages is not None or engine.states_are_offloaded:
        raise abi.InvalidStateError(
            f"{why}, but params or states are offloaded; call reload(params=True, states=True) "
            "first"
        )
    if engine.bound.hosted or engine.bound.kept:
        raise abi.InvalidStateError(
            f"{why}, but gradients have been taken off their params and would be lost; step() without "
            "that first, or drop the gradients with zero_grad()"
        )


def offload(
    engine: Engine, state: dict[Tensor, Any], params: bool, grads: bool, states: bool
) -> None:
    """Moves content to the host, except for what is there already, and frees the device memory."""
    check_movable(engine, {"params": params, "grads": grads, "states": states})
    engine.settle()
    streams = [engine.stream()]
    params_leave = params and engine.released_storages is None
    if grads:
        send_all_gradients(engine)
    if params_leave:
        engine.note_params_leave()
    if states:
        engine.shown.hide(state)
        engine.handle.offload_states(streams=streams)
        engine.states_are_offloaded = True
    if params_leave:
        queue_params(engine, streams)
    engine.wait()
    if grads:
        for slot in engine.bound.hosted:
            set_gradient(slot.param, None)
    if params_leave:
        release_params(engine)


def queue_params(engine: Engine, streams: list[int]) -> None:
    """Queues the copies of all params to the host. From here on their content is on the host, and reload() brings it
    back, even if an exception such as KeyboardInterrupt ends the offload at any point."""
    engine.released_storages = []
    try:
        engine.handle.offload_params(streams=streams)
    except abi.HybridoptError:  # the library has refused the call
        engine.released_storages = None
        raise
    note_offloaded((slot.name, slot.param) for slot in engine.slots if slot.count > 0)


def release_params(engine: Engine) -> None:
    """Frees the memory of params that are on the host, storage by storage."""
    assert engine.released_storages is not None
    for storage in storages_of(engine.slots):
        engine.released_storages.append(storage)
        storage.release()


def reload(engine: Engine, params: bool, grads: bool, states: bool) -> None:
    """Moves content back to torch's memory and waits for that."""
    check_movable(engine, {"params": params, "grads": grads, "states": states})
    streams = [engine.stream()]
    if states and engine.states_are_offloaded:
        engine.handle.reload_states(streams=streams)
        engine.states_are_offloaded = False
        engine.shown.show_hidden()
    if params and engine.released_storages is not None:
        for storage in engine.released_storages:
            storage.restore()
        engine.bound.rebind_params()
        engine.handle.reload_params(streams=streams)
        engine.wait()
        engine.released_storages = None
        note_reloaded(slot.param for slot in engine.slots)
        engine.masters.note_reload()
        engine.see_versions()
    if grads:
        reload_gradients(engine, streams)
    engine.wait()


# --------------------------------------------------------------------------------- gradients --


def send_gradients(
    engine: Engine,
    gradients: dict[Slot, Tensor],
    flags: int,
    streams: list[int],
    hooked: bool = False,
) -> int:
    """Queues copies of gradients to the host and returns the ticket. Each gradient must be what
    Slot.usable_gradient() returns, and must live until the ticket has completed. `streams` are the streams
    whose work writes the gradients."""
    engine.bound.bind_gradients(gradients)
    params = [slot.id for slot in gradients]
    ticket = engine.handle.offload_grads(params=params, flags=flags, streams=streams)
    engine.bound.note_hosted(gradients, hooked)
    return ticket


def send_all_gradients(engine: Engine) -> None:
    """Copies all gradients to the host and waits for that."""
    found = {slot: gradient_of(slot.param) for slot in engine.slots}
    usable = {slot: slot.usable_gradient(grad) for slot, grad in found.items() if grad is not None}
    kept = engine.bound.kept
    for slot in usable:
        if slot in kept:
            engine.bound.refuse_two_gradients(slot)
    if usable:
        send_gradients(engine, usable, 0, [engine.stream()])
    if kept:
        send_gradients(engine, kept, 0, [engine.stream()], hooked=True)
    engine.wait()
    kept.clear()


def drop_gradients(engine: Engine) -> None:
    """Drops the gradients that are on the host, and those that hooks have kept on the device."""
    engine.bound.drop_kept()
    hosted = engine.bound.hosted
    if hosted:
        params = [slot.id for slot in hosted]
        engine.handle.offload_grads(params=params, flags=abi.OFFLOAD_MOVE_DROP)
        hosted.clear()


def reload_gradients(engine: Engine, streams: list[int]) -> None:
    """Sets `grad` of params again: to copies of the gradients that are on the host, and to the gradients that
    hooks have kept on the device."""
    hosted, kept = engine.bound.hosted, engine.bound.kept
    for slot in (*hosted, *kept):
        if gradient_of(slot.param) is not None:
            raise abi.InvalidStateError(
                f"parameter {slot.name!r} has a gradient that was taken off it and another one here; "
                "step() or zero_grad() before the next backward pass"
            )
    for slot, grad in kept.items():
        set_gradient(slot.param, like_param(grad, slot.param))
    kept.clear()
    gradients = {
        slot: torch.empty_strided(
            slot.shape, slot.stride, dtype=slot.grad_dtype, device=engine.device
        )
        for slot in hosted
    }
    if gradients:
        engine.bound.bind_gradients(gradients)
        for slot, grad in gradients.items():
            set_gradient(slot.param, like_param(grad, slot.param))
        engine.handle.reload_grads(params=[slot.id for slot in hosted], streams=streams)
        hosted.clear()
