"""Traps: while a trap is set on a tensor, torch does not use the tensor before the owner of the trap has been
called."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor

# Functions and attributes that read no element of a tensor and return nothing by which other code could read one. They
# spring no trap.
_HARMLESS_FUNCTIONS = (
    "element_size", "is_contiguous", "is_inference", "nelement", "numel", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad_", "size", "storage_offset", "stride",
)  # fmt: skip
_HARMLESS_ATTRIBUTES = (
    "_backward_hooks", "_post_accumulate_grad_hooks", "_version", "device", "dtype", "grad", "grad_dtype", "grad_fn",
    "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_quantized", "is_sparse", "itemsize", "layout", "nbytes", "ndim",
    "requires_grad", "retains_grad", "shape",
)  # fmt: skip


def _harmless() -> set[Any]:
    functions = (getattr(Tensor, name) for name in _HARMLESS_FUNCTIONS)
    attributes = (getattr(Tensor, name, None) for name in _HARMLESS_ATTRIBUTES)
    accessors = (
        getattr(attribute, accessor, None)
        for attribute in attributes
        for accessor in ("__get__", "__set__", "__delete__")
    )
    return {torch.autograd.grad, torch.autograd.backward, *functions, *accessors}


_readable_of: dict[type, type[Tensor]] = {}  # by the class of a tensor with a trap: its own class


class Traps:
    """Traps of one kind."""

    def __init__(
        self,
        used: Callable[[list[Tensor], str], None],
        harmless: Container[Any] | None = None,
        viewed: Callable[[Tensor, Tensor], Iterable[Tensor]] | None = None,
    ) -> None:
        """An operation of torch that is about to use tensors calls used(tensors, its name). That returns when the
        operation may go on, or raises. The name is "" for a use by this package. Functions in `harmless` (None:
        HARMLESS) spring no trap of this kind. If VIEWS are among them, viewed(tensor, view) is called for each view
        that they make, and returns the tensors that get the trap too."""
        self.used = used
        self._harmless = HARMLESS if harmless is None else harmless
        self._viewed = viewed
        self._trap_of: dict[type, type[Tensor]] = {}  # by the class of a tensor: a subclass of it and of Trap

    def set(self, tensors: Iterable[Tensor]) -> None:
        """Sets traps on tensors. A tensor that has a trap already keeps that trap."""
        for tensor in tensors:
            tensor.__class__ = self._trap_of.get(type(tensor)) or self._made_trap_of(type(tensor))

    def view(self, tensor: Tensor, view: Tensor) -> Tensor:
        """Returns the view that one of VIEWS has made of a tensor without springing the tensor's trap."""
        if self._viewed is not None:
            self.set(self._viewed(tensor, view))
        return view

    def _made_trap_of(self, readable: type[Tensor]) -> type[Tensor]:
        if readable in _readable_of:
            return readable
        fields = {
            "readable": readable,
            "traps": self,
            # A class that handles torch's functions itself decides what these functions do.
            "harmless": self._harmless if readable.__torch_function__ in _OF_TORCH else set(),
            "__slots__": (),
            "__module__": readable.__module__,  # programs that compare names of classes find the same
            "__qualname__": readable.__qualname__,
        }
        make: Any = type(readable)
        trap = self._trap_of[readable] = make(readable.__name__, (Trap, readable), fields)
        _readable_of[trap] = readable
        if readable in (Tensor, nn.Parameter):  # torch sends these to other processes without a copy
            ForkingPickler.register(trap, _reduced)
        return trap


class Trap:
    """The base of the classes that tensors with a trap have."""

    readable: type[Tensor]  # the class that the tensor had before
    traps: Traps
    harmless: Container[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.readable(*args, **kwargs)  # code that makes a tensor by type(param) gets one without a trap

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in cls.harmless:
            with torch._C.DisableTorchFunctionSubclass():
                returned = function(*args, **(kwargs or {}))
            return cls.traps.view(args[0], returned) if function in VIEWS else returned
        spring(_tensors_in((args, kwargs)), _name_of(function))
        return function(*args, **(kwargs or {}))

    # These methods are called before a function of torch has given the param its own class back.

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        spring([self], "deepcopy")
        return self.__deepcopy__(memo)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        spring([self], "pickle")
        return self.__reduce_ex__(protocol)

    @property
    def fsdp_pre_all_gather(self: Any) -> Any:
        # FSDP2 asks a shard for this before it reads the memory through a tensor of its own.
        spring([self], "all_gather")
        return self.fsdp_pre_all_gather

    def detach(self: Any) -> Any:
        if torch.compiler.is_compiling():  # torch.compile cannot follow what comes next
            spring([self], "detach")
            return self.detach()
        makes_parameter, readable = sys._getframe(1).f_code is _MAKE_PARAMETER, self.readable
        if Tensor.detach in self.harmless and not makes_parameter:
            with torch._C.DisableTorchFunctionSubclass():
                view = Tensor.detach(self)
            return self.traps.view(self, view)
        spring([self], "detach")
        if makes_parameter:  # torch has seen the trap's class, and expects it again
            return readable._make_subclass(readable, self)
        return self.detach()


HARMLESS = _harmless()
_DATA: Any = Tensor.data
VIEWS = {Tensor.detach, _DATA.__get__}  # they make another tensor over the same memory
# Handlers of torch's own classes.
_OF_TORCH = (Tensor.__torch_function__, nn.Parameter.__torch_function__)
_MAKE_PARAMETER = nn.Parameter.__new__.__code__


def _reduced(tensor: Tensor) -> Any:
    spring([tensor], "pickle")
    return reduce_tensor(tensor)


def take_back(tensors: Iterable[Tensor]) -> None:
    """Takes the traps of these tensors back."""
    for tensor in tensors:
        readable = _readable_of.get(type(tensor))
        if readable is not None:
            tensor.__class__ = readable


@torch._disable_dynamo
def spring(tensors: Iterable[Tensor], operation: str = "") -> None:
    """Waits until these tensors may be used, or raises. `operation` is "" if this package uses them."""
    trapped: dict[Traps, list[Tensor]] = {}
    for tensor in tensors:
        trap = type(tensor)
        if issubclass(trap, Trap):
            trapped.setdefault(trap.traps, []).append(tensor)
    for traps, used in trapped.items():
        traps.used(used, operation)
        take_back(used)


def without_traps() -> contextlib.AbstractContextManager[Any]:
    """Inside of this context functions of torch spring no trap: for code that reads no element."""
    guard: contextlib.AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
    return guard


def _tensors_in(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, (list, tuple)):
        for each in nested:
            yield from _tensors_in(each)
    elif isinstance(nested, dict):
        yield from _tensors_in(list(nested.values()))


def _name_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__", "__delete__"):  # of an attribute, which knows its name
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    return name
