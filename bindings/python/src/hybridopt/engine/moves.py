"""Moves: offloads params, gradients and states to the host, and reloads them. The library copies the
content; this module frees torch's memory and allocates it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .. import abi
from ..base.checks import check_switch
from ..params.bound import Leaving
from ..params.registered import Slot
from ..params.released_storages import storages_of
from ..params.tensors import gradient_of, like_param, local, set_gradient, version_of
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


def offload(engine: Engine, state: dict[Tensor, Any], params: bool, states: bool) -> None:
    """Moves params and states to the host unless they are there, and frees the device memory."""
    streams = [engine.stream()]
    params_leave = params and engine.released_storages is None
    if params_leave:
        _refuse_shared_memory(engine)
        engine.move_to_kept_addresses()
        engine.note_params_leave()
    if states:
        offload_states(engine, state, streams)
    if params_leave:
        queue_params(engine, streams)
    engine.wait()
    if params_leave:
        release_params(engine)


def _refuse_shared_memory(engine: Engine) -> None:
    """Raises if torch cannot free the memory of a param."""
    for slot in engine.slots:
        if slot.count > 0 and not local(slot.param).untyped_storage().resizable():
            raise abi.InvalidStateError(
                f"params cannot be offloaded: the memory of parameter {slot.name!r} is not torch's, or numpy() or "
                "share_memory_() have shared it, so that torch cannot free it; give the parameter memory of its own, "
                "param.data = param.data.clone()"
            )


def offload_states(engine: Engine, state: dict[Tensor, Any], streams: list[int]) -> None:
    """Queues the copies of states. From here on reload() brings them back, wherever an exception ends the offload."""
    were_offloaded, engine.states_are_offloaded = engine.states_are_offloaded, True
    engine.shown.hide(state)
    try:
        engine.handle.offload_states(streams=streams)
    except abi.HybridoptError:  # the library has refused the call
        if not were_offloaded:
            engine.shown.show_hidden()
            engine.states_are_offloaded = False
        raise


def queue_params(engine: Engine, streams: list[int]) -> None:
    """Queues the copies of all params to the host. From here on their content is on the host, and reload() brings it
    back, even if an exception such as KeyboardInterrupt ends the offload at any point."""
    engine.released_storages = []
    try:
        engine.handle.offload_params(streams=streams)
    except abi.HybridoptError:  # the library has refused the call
        engine.released_storages = None
        raise
    note_offloaded(engine, ((slot.name, slot.param) for slot in engine.slots if slot.count > 0))


def release_params(engine: Engine) -> None:
    """Frees the memory of params that are on the host, storage by storage, or behind all addresses that they keep."""
    assert engine.released_storages is not None
    if engine.kept_addresses is not None:
        engine.released_storages.extend(engine.kept_addresses.storages(engine.slots))
        engine.kept_addresses.release()
        return
    for storage in storages_of(engine.slots):
        engine.released_storages.append(storage)
        storage.release()


def reload(engine: Engine, params: bool, grads: bool, states: bool) -> None:
    """Moves content back to torch's memory and waits for that."""
    check_movable(engine, {"params": params, "grads": grads, "states": states})
    streams = [engine.stream()]
    if states and engine.states_are_offloaded:
        engine.handle.reload_states(streams=streams)
        engine.shown.show_hidden()
        engine.states_are_offloaded = False
    if params and engine.released_storages is not None:
        if engine.kept_addresses is not None:
            engine.kept_addresses.take()
        for storage in engine.released_storages:
            storage.restore()
        engine.bound.rebind_params()
        engine.handle.reload_params(streams=streams)
        engine.wait()
        engine.masters.note_reload()
        engine.see_versions()
        engine.released_storages = None
    if params:
        note_reloaded(slot.param for slot in engine.slots)  # an exception may have ended a reload before this
    if grads:
        reload_gradients(engine)
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


Note = Callable[[list[Tensor]], None]


def offload_gradients(engine: Engine, note: Note) -> None:
    """Takes all gradients off their params, and copies them to the host. Waits for that. Calls note() with the params
    before the first of them loses its gradient."""
    bound = engine.bound
    found = {slot: grad for slot in engine.slots if (grad := gradient_of(slot.param)) is not None}
    usable = {slot: slot.usable_gradient(grad) for slot, grad in found.items()}
    for slot in usable:
        if bound.has_taken(slot):
            bound.refuse_two_gradients(slot)
    kept = dict(bound.kept)
    bound.leaving = Leaving.of(found, {**usable, **kept}, {})
    if usable:
        send_gradients(engine, usable, 0, [engine.stream()])
    if kept:
        send_gradients(engine, kept, 0, [engine.stream()], hooked=True)
    engine.wait()
    bound.leaving.have_left = True
    take_off(engine, note)


def take_off(engine: Engine, note: Note) -> None:
    """Ends a move of gradients off their params: sets `grad` to None."""
    bound, leaving = engine.bound, engine.bound.leaving
    assert leaving is not None
    note([slot.param for slot in (*leaving.sent, *leaving.kept)])
    for slot in leaving.sent:
        bound.kept.pop(slot, None)
    bound.note_kept(leaving.kept)
    written: list[Slot] = []  # by the program, since an exception ended this: clipped, say, or added to
    for slot, (grad, version) in leaving.gradients.items():
        if gradient_of(slot.param) is not grad:
            continue
        if version_of(local(grad)) == version:
            set_gradient(slot.param, None)
        elif not leaving.are_added:
            written.append(slot)
    if written:  # these stay, and what has left is older
        for slot in written:
            bound.kept.pop(slot, None)
        _drop(engine, written)
    bound.leaving = None


def finish_gradients(engine: Engine, note: Note) -> None:
    """Undoes or finishes a move of gradients that an exception has cut off. All is on the params then, or all off
    them."""
    bound = engine.bound
    if bound.arriving is not None:
        arrive(engine, bound.arriving)
    if bound.leaving is None:
        return
    if bound.leaving.have_left:
        take_off(engine, note)
    elif bound.leaving.are_added:
        raise abi.InvalidStateError(
            "a backward pass has been cut off while its gradients were added up on the host, and how many of them were is "
            "not known; call zero_grad(), and make all backward passes of this step again"
        )
    else:
        _drop(engine, bound.leaving.sent)
        bound.leaving = None


def _drop(engine: Engine, slots: Iterable[Slot]) -> None:
    """Has the library forget gradients, and waits until it reads none of them."""
    slots = list(slots)
    engine.handle.offload_grads(params=[slot.id for slot in slots], flags=abi.OFFLOAD_MOVE_DROP)
    engine.bound.note_dropped(slots)
    engine.wait()


def drop_gradients(engine: Engine) -> None:
    """Drops the gradients that are on the host, and those that hooks have kept on the device."""
    bound = engine.bound
    bound.drop_kept()
    if bound.leaving is not None or bound.arriving is not None:
        _drop(engine, {**(bound.leaving.sent if bound.leaving else {}), **(bound.arriving or {})})
        bound.leaving = bound.arriving = None
    hosted = bound.hosted
    if hosted:
        params = [slot.id for slot in hosted]
        engine.handle.offload_grads(params=params, flags=abi.OFFLOAD_MOVE_DROP)
        hosted.clear()


def zero_gradients(engine: Engine) -> None:
    """Gives params whose gradients have been taken, and dropped or used, gradients of zeros."""
    for slot in engine.bound.had_gradients:
        if gradient_of(slot.param) is None:
            set_gradient(slot.param, like_param(_new_gradient(engine, slot).zero_(), slot.param))
    engine.bound.had_gradients.clear()  # from now on `grad` tells, which the program may set to None


def _new_gradient(engine: Engine, slot: Slot) -> Tensor:
    return torch.empty_strided(slot.shape, slot.stride, dtype=slot.grad_dtype, device=engine.device)


def reload_gradients(engine: Engine) -> None:
    """Sets `grad` of params again: to copies of the gradients that are on the host, and to the gradients that
    hooks have kept on the device."""
    hosted, kept = engine.bound.hosted, engine.bound.kept
    for slot in (*hosted, *kept):
        if gradient_of(slot.param) is not None:
            engine.bound.refuse_two_gradients(slot)
    if hosted or kept:
        arrive(engine, {slot: _new_gradient(engine, slot) for slot in hosted})


def arrive(engine: Engine, gradients: dict[Slot, Tensor]) -> None:
    """Copies gradients from the host, and sets `grad` of their params and of those whose gradients were kept. After an
    exception it can be called again with the same tensors."""
    bound = engine.bound
    bound.arriving = gradients
    if gradients:
        try:
            bound.bind_gradients(gradients)
            engine.handle.reload_grads(params=[slot.id for slot in gradients], streams=[engine.stream()])
        except abi.HybridoptError:  # the library has refused the call
            bound.arriving = None
            raise
        engine.wait()
    for slot, grad in (*gradients.items(), *bound.kept.items()):
        if gradient_of(slot.param) is None:
            set_gradient(slot.param, like_param(grad, slot.param))
    bound.hosted.clear()
    bound.kept.clear()
    bound.arriving = None
