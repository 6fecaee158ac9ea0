"""The hooks of layers that wrap() wraps: what they call around each call of a layer, and how they are removed."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from ..base.checks import listed, shown
from .names import Call


class Wraps(Protocol):
    """The methods that the hooks of a layer call."""

    def _enter_layer(self, layer: nn.Module, name: str) -> None: ...

    def _leave_layer(self, layer: nn.Module, result: Any) -> None: ...


class LayerHooks:
    """Is called before and after a wrapped module. If the stash has the weights of a module, it must live as long as
    the module: then these hooks keep the stash alive."""

    def __init__(self, stash: Wraps, layer: nn.Module, name: str, keeps_stash: bool) -> None:
        self._stash = weakref.ref(stash)
        self._kept = stash if keeps_stash else None
        self._layer = weakref.ref(layer)
        self._name = name
        self._has_ended = False
        self._compiled: Callable[..., Any] | None = None  # the argument of around()
        self._call: weakref.ref[Any] | None = None  # the result of around()

    def attach(self, layer: nn.Module) -> Iterator[Callable[[], None]]:
        """Hooks the layer. Yields functions that undo that."""
        compiled = layer._compiled_call_impl
        if compiled is None:
            yield layer.register_forward_pre_hook(Call(self.before), prepend=True).remove
            yield layer.register_forward_hook(Call(self.after), always_call=True).remove
        else:
            layer._compiled_call_impl = self.around(compiled)
            yield self.end

    @torch._disable_dynamo
    def before(self, *_: Any) -> None:
        stash, layer = self._stash(), self._layer()
        if stash is not None and layer is not None:
            stash._enter_layer(layer, self._name)

    @torch._disable_dynamo
    def after(self, *arguments: Any) -> None:
        stash, layer = self._stash(), self._layer()
        if stash is not None and layer is not None:
            stash._leave_layer(layer, arguments[-1] if arguments else None)

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the compiled call of a module, because torch does not call the hooks of such a module."""

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._has_ended:
                return compiled(*args, **kwargs)
            self.before()
            result = None
            try:
                result = compiled(*args, **kwargs)
                return result
            finally:
                self.after(result)

        self._compiled, self._call = compiled, weakref.ref(call)
        return call

    def end(self) -> None:
        """Undoes around(). Wrappers that other code has put around it since then stay."""
        self._has_ended, self._kept = True, None
        layer = self._layer()
        if layer is not None and self._call is not None and layer._compiled_call_impl is self._call():
            layer._compiled_call_impl = self._compiled


class Wrapping:
    """What wrap() returns: its remove() ends the wrapping."""

    def __init__(self, undo: list[Callable[[], None]], bring_back: Callable[[], None], count: int) -> None:
        self._undo = undo
        self._count = count
        self._bring_back = bring_back

    def bring_back(self) -> None:
        """Brings all params of the modules to the device, for code that reads or writes them outside of the modules'
        forward and backward passes. With weights=True they leave again after their next use."""
        self._bring_back()

    def remove(self) -> None:
        for each in self._undo:
            each()
        self._undo.clear()

    def __repr__(self) -> str:
        modules = "1 module" if self._count == 1 else f"{self._count} modules"
        return f"<wrap() of {modules}, {'until remove()' if self._undo else 'removed'}>"


def modules_of(modules: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    if isinstance(modules, nn.Module) and not isinstance(modules, nn.ModuleList):
        return [modules]
    found = listed(modules)
    if found is None:
        found = [modules]
    for each in found:
        if not isinstance(each, nn.Module):
            raise TypeError(f"wrap() got {shown(each)}, expected torch.nn.Module or several of them")
    return list(dict.fromkeys(found))
