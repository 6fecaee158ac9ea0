"""Params that cannot be read now: an operation on one raises. Meanwhile the tensor has another class, whose
operations raise.

Check mode, which the environment variable HYBRIDOPT_CHECK_OVERLAP=1 turns on, does this to params that a step
still writes, so that code without the necessary wait is found. Their memory and address do not change. An
activation stash does it to weights that are on the host, and have no memory on the device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from . import abi

VARIABLE = "HYBRIDOPT_CHECK_OVERLAP"

# Functions and attributes that read no element of a tensor. Check mode allows them.
_HARMLESS_FUNCTIONS = {
    Tensor.data_ptr, Tensor.dim, Tensor.element_size, Tensor.is_contiguous, Tensor.nelement,
    Tensor.numel, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook,
    Tensor.requires_grad_, Tensor.size, Tensor.storage_offset, Tensor.stride, Tensor.is_inference,
    torch.autograd.grad, torch.autograd.backward,
}  # fmt: skip
_HARMLESS_ATTRIBUTES = (
    "_backward_hooks", "_version", "device", "dtype", "grad", "grad_dtype", "grad_fn", "is_cpu",
    "is_cuda", "is_leaf", "is_meta", "is_quantized", "is_sparse", "itemsize", "layout", "nbytes", "ndim",
    "requires_grad", "retains_grad", "shape",
)  # fmt: skip


def _harmless() -> set[Any]:
    attributes = (getattr(Tensor, name, None) for name in _HARMLESS_ATTRIBUTES)
    accessors = (
        getattr(attribute, accessor, None)
        for attribute in attributes
        for accessor in ("__get__", "__set__", "__delete__")
    )
    return {*_HARMLESS_FUNCTIONS, *accessors}


HARMLESS = _harmless()

WRITTEN = (
    "while a step still writes it, and no module that has it was called before; call optimizer.synchronize() "
    "before this use"
)
AWAY = (
    "while it is on the host, where wrap(weights=True) has put it; it comes back for the forward and backward pass "
    "of its layer, for a step and for state_dict(). Before any other use call bring_back() of what wrap() has "
    "returned"
)


_been_away: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by tensors


class Unreadable:
    """The base of the classes that such tensors have."""

    parameter = ""
    why = WRITTEN
    readable: type[Tensor]  # the class that the tensor had before

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", str(function))
        if name == "__get__":  # of an attribute, which knows its name
            name = getattr(getattr(function, "__self__", None), "__name__", name)
        raise abi.InvalidStateError(
            f"parameter {cls.parameter!r} is used by {name!r} {cls.why}"
        )


def is_on() -> bool:
    return os.environ.get(VARIABLE, "") not in ("", "0")


def hide(tensor: Tensor, parameter: str, why: str = WRITTEN) -> None:
    """Makes operations on the tensor raise an error that names the parameter."""
    readable = type(tensor)
    if issubclass(readable, Unreadable):
        return
    if why is AWAY:
        _been_away[tensor] = True
    fields = {"parameter": parameter, "readable": readable, "why": why, "__slots__": ()}
    tensor.__class__ = type(f"Unreadable{readable.__name__}", (Unreadable, readable), fields)


def has_been_away(tensor: Tensor) -> bool:
    """Whether an activation stash has put the tensor's memory on the host, so that its address changes."""
    return tensor in _been_away


def reveal(tensor: Tensor) -> None:
    """Undoes hide()."""
    hidden = type(tensor)
    if issubclass(hidden, Unreadable):
        tensor.__class__ = hidden.readable
