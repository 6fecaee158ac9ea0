"""Code that clips gradients which hook_gradients() has taken off their params: it would find none, clip nothing and
return a norm of 0.0. A trap on one of the params sees that torch's functions for clipping ask for its gradient."""

from __future__ import annotations

import sys
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import abi
from ..traps.trap import Traps

_GRAD: Any = Tensor.grad
_CLIPS_IN = sys.modules[torch.nn.utils.clip_grad_norm_.__module__].__file__
_FRAMES = 12  # between the use of a gradient and the function of torch: handlers of the trap


class Clips(Protocol):
    """What the error tells of the optimizer."""

    @property
    def max_grad_norm(self) -> float | None: ...


class _AllButGrad:
    def __contains__(self, function: object) -> bool:
        return function != _GRAD.__get__


_optimizers: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by params: weak references


def _used(params: list[Tensor], operation: str) -> None:
    if operation != "grad" or not _is_in_clipping():
        return
    referred = _optimizers.get(params[0])
    optimizer = None if referred is None else referred()
    norm = None if optimizer is None else optimizer.max_grad_norm
    how = "assign optimizer.max_grad_norm, by which the step clips" if norm is None else f"the step clips to {norm}"
    raise abi.InvalidStateError(
        "torch.nn.utils.clip_grad_norm_() and its like find no gradients after the backward pass, since hook_gradients() "
        f"has taken them, and would return a norm of 0.0; leave the call out: {how}, and "
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


_traps = Traps(_used, _AllButGrad())


def watch(param: Tensor, optimizer: Clips) -> None:
    """The gradient of this param has been taken off it. The next use of `grad` takes the trap back."""
    _optimizers[param] = weakref.ref(optimizer)
    _traps.set([param])
