"""Refuses code that clips gradients after hook_gradients() or offload(grads=True) has taken them off their params.
Such code would find no gradients, clip nothing and return a norm of 0.0. Traps on the params notice when one of
torch's functions for clipping asks for a gradient. The traps stay until the next step, beneath traps of other kinds; no
other use removes them. So torch.compile sees one class of params before the step and one after it, and compiles a model
at most twice."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import abi
from .trap import Traps, without_traps

NOTHING_TO_CLIP = (
    "hook_gradients() takes gradients to the host, where torch.nn.utils.clip_grad_norm_() does not find them and is "
    "refused, and where other code that clips finds none; make the optimizer with max_grad_norm= (or assign "
    "optimizer.max_grad_norm), None if nothing is to be clipped"
)

_GRAD: Any = Tensor.grad
_CLIPS_IN = sys.modules[torch.nn.utils.clip_grad_norm_.__module__].__file__
_FRAMES = 12  # frames of the trap's handlers, between torch's function and the use of a gradient


class Clips(Protocol):
    """The part of the optimizer that the error text mentions."""

    @property
    def max_grad_norm(self) -> float | None: ...


class _AllButClipping:
    def __contains__(self, function: object) -> bool:
        return function != _GRAD.__get__ or not _is_in_clipping()


# __contains__() has already asked the same question, except for classes of params that handle torch's functions
# themselves: for these no function is harmless.
def _used(params: list[Tensor], operation: str) -> None:
    if operation != "grad" or not _is_in_clipping():
        return
    with without_traps():
        if params[0].grad is not None:
            return  # it is back, or has not gone yet
    optimizer = next((each for each, taken in list(taken_by.items()) if taken.has(params[0])), None)
    if optimizer is None:
        return  # the optimizer has ended, and its gradients with it
    norm = optimizer.max_grad_norm
    how = "assign optimizer.max_grad_norm, by which the step clips" if norm is None else f"the step clips to {norm}"
    raise abi.InvalidStateError(
        "torch.nn.utils.clip_grad_norm_() and its like find no gradients after the backward pass, since hook_gradients() "
        f"or offload(grads=True) has taken them, and would return a norm of 0.0; leave the call out: {how}, and "
        "optimizer.last_step().grad_norm tells the norm after it"
    )


def _is_in_clipping() -> bool:
    frame = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame.f_code.co_filename == _CLIPS_IN:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


_traps = Traps(_used, _AllButClipping(), lies_beneath=True)


class Taken:
    """The params of one optimizer whose gradients have been taken since the last step."""

    def __init__(self) -> None:
        self._params: dict[int, Tensor] = {}  # by id()
        # Not by __del__(), which may run when the interpreter ends and this module has no _traps any more.
        weakref.finalize(self, _end, self._params).atexit = False

    def has(self, param: Tensor) -> bool:
        return id(param) in self._params

    def add(self, params: list[Tensor]) -> None:
        self._params.update((id(param), param) for param in params)  # first: end() takes all traps back
        _traps.set(params)

    def end(self) -> None:
        _end(self._params)


def _end(params: dict[int, Tensor]) -> None:
    _traps.end(params.values())
    params.clear()


taken_by: weakref.WeakKeyDictionary[Clips, Taken] = weakref.WeakKeyDictionary()


def refuse_taken_by_another(optimizer: Clips, params: Iterable[tuple[str, Tensor]]) -> None:
    """Raises if another optimizer has taken the gradient of one of these params, which a step would leave out. An
    optimizer that the program has replaced may still exist, and its hooks with it."""
    others = [taken for each, taken in list(taken_by.items()) if each is not optimizer]
    own = taken_by.get(optimizer)
    for name, param in params if others else ():
        if (own is not None and own.has(param)) or not any(taken.has(param) for taken in others):
            continue
        with without_traps():
            if param.grad is not None:
                continue
        raise abi.InvalidStateError(
            f"the gradient of parameter {name!r} has been taken by hook_gradients() or offload(grads=True) of another "
            "optimizer, so that this step would leave the parameter out; call zero_grad() and close() of that one, and "
            "repeat the backward pass. If the program has no such optimizer any more, a reference cycle still holds it, "
            "which gc.collect() ends, or the traceback of an exception"
        )


def note_taken(optimizer: Clips, params: list[Tensor]) -> None:
    """Notes that gradients have been taken off these params for the optimizer's next step."""
    if not params:
        return
    taken = taken_by.get(optimizer)
    if taken is None:
        taken = taken_by[optimizer] = Taken()
    taken.add(params)


def note_used(optimizer: Clips) -> None:
    """Notes that the step has begun, or that the gradients are back or dropped."""
    taken = taken_by.pop(optimizer, None)
    if taken is not None:
        taken.end()
