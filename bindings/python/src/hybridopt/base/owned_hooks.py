"""Hooks that an owner has put on modules and params. The optimizer owns its Overlap and its GradientHooks, which
refer to the modules and params that they hook. Hooks refer back to their owner weakly, and so do the objects that
users get. Otherwise the owner would live as long as the param, because Python's garbage collection does not see the
objects to which the hooks of a param refer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor


def nothing(*_: Any) -> None:
    """The hook of a copied or unpickled module."""


def _nothing() -> Callable[..., None]:
    return nothing


class Uncopied:
    """A hook whose copies and pickles have no effect."""

    def __deepcopy__(self, _: Any) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> Any:
        return _nothing, ()


class OwnedHook(Uncopied):
    """A hook that has no effect after the end of its owner."""

    def __init__(self, owner: Any) -> None:
        self._owner = weakref.ref(owner)

    @property
    def has_ended(self) -> bool:
        return self._owner() is None


def drop_ended(hooks: dict[int, Any] | None) -> None:
    """Removes hooks of owners that have ended from one of torch's dicts. An owner does not remove them at its own
    end, because that may come at any time, even in the middle of a loop over the dict."""
    if hooks:
        for id in [id for id, hook in hooks.items() if isinstance(hook, OwnedHook) and hook.has_ended]:
            del hooks[id]


class ParamHook(OwnedHook):
    """Calls a method of its owner."""

    def __init__(self, method: Callable[[Tensor], None]) -> None:
        super().__init__(method.__self__)  # type: ignore[attr-defined]
        self._function: Callable[[Any, Tensor], None] = method.__func__  # type: ignore[attr-defined]

    def __call__(self, param: Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            self._function(owner, param)


class ParamHooks:
    """Makes autograd call a method when it has accumulated the gradient of a param."""

    def __init__(self, method: Callable[[Tensor], None]) -> None:
        self._hook = ParamHook(method)
        self._handles: list[Any] = []

    def attach(self, params: Iterable[Tensor]) -> None:
        """Hooks these params and no others."""
        self.remove()
        for param in params:
            if param.requires_grad:
                drop_ended(param._post_accumulate_grad_hooks)
                self._handles.append(param.register_post_accumulate_grad_hook(self._hook))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class Removed(Protocol):
    def remove(self) -> None: ...


class Removal:
    """The object that hook_gradients() and overlap() return. remove(), or the end of a `with` block, ends what they
    have begun. The object keeps neither the optimizer nor the model alive."""

    def __init__(self, owner: Removed, call: str) -> None:
        self._owner = weakref.ref(owner)
        self._call = call  # that has returned this object

    def remove(self) -> None:
        """Removes the hooks. A second call has no effect."""
        owner = self._owner()
        if owner is not None:
            owner.remove()

    def __repr__(self) -> str:
        return f"<{self._call}, {'removed' if self._owner() is None else 'until remove()'}>"

    def __enter__(self) -> Removal:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()
