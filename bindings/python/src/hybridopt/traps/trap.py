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
from torch.utils.weak import WeakIdKeyDictionary

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
_beneath: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by tensor: traps that it gets when its present one is taken back


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The tensor, and of a DTensor its shard."""
    shard = getattr(tensor, "_local_tensor", None)
    return [tensor] if shard is None else [tensor, shard]


class Traps:
    """Traps of one kind."""

    def __init__(
        self,
        used: Callable[[list[Tensor], str], None],
        harmless: Container[Any] | None = None,
        viewed: Callable[[Tensor, Tensor], Iterable[Tensor]] | None = None,
        lies_beneath: bool = False,
    ) -> None:
        """An operation of torch that is about to use tensors calls used(tensors, its name). That returns when the
        operation may go on, or raises. The name is "" for a use by this package. Functions in `harmless` (None:
        HARMLESS) spring no trap of this kind. If VIEWS are among them, viewed(tensor, view) is called for each view
        that they make, and returns the tensors that get the trap too. A trap that `lies_beneath` is there again when a
        trap of another kind has been taken back, and meanwhile it still refuses what is not harmless to it."""
        self.used = used
        self._harmless = HARMLESS if harmless is None else harmless
        self._lies_beneath = lies_beneath
        self._viewed = viewed
        self._trap_of: dict[type, type[Tensor]] = {}  # by the class of a tensor: a subclass of it and of Trap

    def set(self, tensors: Iterable[Tensor]) -> None:
        """Sets traps on tensors. A tensor that has a trap already keeps that trap, unless it lies beneath others."""
        for tensor in tensors:
            tensor.__class__ = self._trap_of.get(type(tensor)) or self._trap_over(tensor)

    def set_instead(self, tensors: Iterable[Tensor]) -> None:
        """Sets traps in the place of others, except for those that lie beneath: these stay there."""
        for tensor in tensors:
            take_back([tensor])
            self.set([tensor])

    def end(self, tensors: Iterable[Tensor]) -> None:
        """Takes back the traps of this kind, those too that lie beneath others."""
        for tensor in tensors:
            if getattr(type(tensor), "traps", None) is self:
                tensor.__class__ = _readable_of[type(tensor)]
            elif _beneath.get(tensor) is self:
                del _beneath[tensor]

    def refuse_beneath(self, tensor: Tensor, function: Callable[..., Any]) -> None:
        """Springs this trap, which lies beneath another one, if the function is not harmless to it."""
        if function not in self._harmless:
            self.used([tensor], _name_of(function))

    def _trap_over(self, tensor: Tensor) -> type[Tensor]:
        """The class of a trap on a tensor that may have one."""
        present = type(tensor)
        if not issubclass(present, Trap):
            return self._made_trap_of(present)
        other = present.traps
        if other is self:
            return present
        if other._lies_beneath:
            _beneath[tensor] = other
            return self._trap_of.get(present.readable) or self._made_trap_of(present.readable)
        if self._lies_beneath:
            _beneath[tensor] = self
        return present

    def view(self, tensor: Tensor, view: Tensor) -> Tensor:
        """Returns the view that one of VIEWS has made of a tensor without springing the tensor's trap."""
        if self._viewed is not None:
            self.set(self._viewed(tensor, view))
        return view

    def _made_trap_of(self, readable: type[Tensor]) -> type[Tensor]:
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
        trap: type[Tensor] = make(readable.__name__, (Trap, readable), fields)
        if readable in (Tensor, nn.Parameter):  # torch sends these to other processes without a copy
            ForkingPickler.register(trap, _reduced)
        _readable_of[trap] = readable
        self._trap_of[readable] = trap  # last: an exception may end this at any place
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
            if not torch.compiler.is_compiling() and _beneath and args and args[0] in _beneath:
                _beneath[args[0]].refuse_beneath(args[0], function)
            with torch._C.DisableTorchFunctionSubclass():
                returned = function(*args, **(kwargs or {}))
            return cls.traps.view(args[0], returned) if function in VIEWS else returned
        tensors = list(_tensors_in((args, kwargs)))
        spring(tensors, _name_of(function))
        with _lifted(tensors):
            return function(*args, **(kwargs or {}))

    # These methods are called before a function of torch has given the param its own class back.

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        return _use(self, "deepcopy", lambda own: own.__deepcopy__(memo))

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _use(self, "pickle", lambda own: own.__reduce_ex__(protocol))

    @property
    def fsdp_pre_all_gather(self: Any) -> Any:
        # FSDP2 asks a shard for this before it reads the memory through a tensor of its own.
        return _use(self, "all_gather", lambda own: own.fsdp_pre_all_gather)

    def detach(self: Any) -> Any:
        if torch.compiler.is_compiling():  # torch.compile cannot follow what comes next
            _end(self)
            return self.detach()
        makes_parameter, readable = sys._getframe(1).f_code is _MAKE_PARAMETER, self.readable
        if Tensor.detach in self.harmless and not makes_parameter:
            with torch._C.DisableTorchFunctionSubclass():
                view = Tensor.detach(self)
            return self.traps.view(self, view)
        if makes_parameter:  # which compares the class of what it gets with that of the param
            _end(self)
            return readable._make_subclass(readable, self)
        return _use(self, "detach", lambda own: own.detach())


HARMLESS = _harmless()
_DATA: Any = Tensor.data
VIEWS = {Tensor.detach, _DATA.__get__}  # they make another tensor over the same memory
# Handlers of torch's own classes.
_OF_TORCH = (Tensor.__torch_function__, nn.Parameter.__torch_function__)
_MAKE_PARAMETER = nn.Parameter.__new__.__code__


def _reduced(tensor: Tensor) -> Any:
    return _use(tensor, "pickle", reduce_tensor)


def take_back(tensors: Iterable[Tensor]) -> None:
    """Takes the traps of these tensors back, except for those that lie beneath others."""
    for tensor in tensors:
        trap: Any = type(tensor)
        if trap in _readable_of and not trap.traps._lies_beneath:
            _take_back(tensor)


def _take_back(tensor: Tensor) -> None:
    tensor.__class__ = _readable_of.get(type(tensor), type(tensor))  # another thread may have taken it back
    if _beneath and (beneath := _beneath.pop(tensor, None)) is not None:
        beneath.set([tensor])


def _use(tensor: Any, operation: str, use: Callable[[Any], Any]) -> Any:
    """Springs the trap of a tensor, and calls a function that reads the tensor's class."""
    spring([tensor], operation)
    with _lifted([tensor]):
        return use(tensor)


@contextlib.contextmanager
def _lifted(tensors: list[Tensor]) -> Iterator[None]:
    """Inside of this context tensors whose traps have been sprung have their own classes: those that lie beneath others
    are set again after it."""
    lifted = [(tensor, type(tensor).traps) for tensor in tensors if isinstance(tensor, Trap)]
    for tensor, _ in lifted:
        _take_back(tensor)
    try:
        yield
    finally:
        for tensor, traps in lifted:
            traps.set([tensor])


@torch._disable_dynamo
def _end(tensor: Any) -> None:
    """Springs the traps of a tensor and takes all of them back."""
    spring([tensor], "detach")
    if type(tensor) in _readable_of:
        _take_back(tensor)


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
