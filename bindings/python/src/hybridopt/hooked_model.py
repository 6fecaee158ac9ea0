"""HookedModel: a model that waits for a step that still writes its params. Each module waits for its own
params before its forward pass, and FSDP2 before it gathers params. Functions that read or write all
weights wait for all params."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .traps import without_traps

# Methods of a module that write its weights or gradients and for which torch has no hooks.
METHODS = ("_apply", "zero_grad")


class Waiter(Protocol):
    """What the hooks call to wait."""

    def is_wanted(self) -> bool:
        """Whether wait() would have any effect now."""

    def wait(self, params: Iterable[Tensor], streams: Iterable[Any] = ()) -> None:
        """Waits for params that will be used on the current stream and on `streams`."""

    def finish(self) -> None:
        """Waits for all params."""


def nothing(*_: Any) -> None:
    """The hook of a copied or unpickled module. It does not wait: no step writes the copy's params."""


def _nothing() -> Callable[..., None]:
    return nothing


class Hook:
    """A hook that torch calls before it uses a module. It keeps no object alive. Copies of the module have a
    hook that does not wait."""

    def __init__(self, waiter: Waiter) -> None:
        self._waiter = weakref.ref(waiter)

    def __call__(self, *_: Any) -> None:
        waiter = self._waiter()
        if waiter is not None and (torch.compiler.is_compiling() or waiter.is_wanted()):
            self._wait(waiter)

    # This makes torch.compile end one graph before the wait and begin another behind it. A graph that was
    # compiled without the wait would leave it out for ever.
    @torch._disable_dynamo
    def _wait(self, waiter: Waiter) -> None:
        self.wait(waiter)

    def wait(self, waiter: Waiter) -> None:
        waiter.finish()

    def __deepcopy__(self, _: Any) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> Any:
        return _nothing, ()


class ForwardHook(Hook):
    """Waits for the params that the forward pass of one module uses."""

    def __init__(self, waiter: Waiter, module: nn.Module) -> None:
        super().__init__(waiter)
        self._module = weakref.ref(module)
        self.own: list[Tensor] = []
        self.params: list[Tensor] = []  # own, and the params of modules below that torch does not call
        self.was_called = False

    def wait(self, waiter: Waiter) -> None:
        self.was_called = True
        module = self._module()
        params: Iterable[Tensor] = self.params
        if module is not None and not module.training and not torch.is_grad_enabled():
            # In this mode torch may use fast paths that do not call the modules below.
            params = module.parameters()
        waiter.wait(params)


class Method:
    """A method of one module that first waits. The method of a copied module does not wait."""

    def __init__(self, name: str, module: nn.Module, waiter: Waiter | None = None) -> None:
        self._name = name
        self._module = weakref.ref(module)
        self._waiter = None if waiter is None else weakref.ref(waiter)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        waiter = None if self._waiter is None else self._waiter()
        only_drops = self._only_drops(*args, **kwargs)
        if waiter is not None and not only_drops:
            waiter.finish()
        module = self._module()
        with without_traps() if only_drops else contextlib.nullcontext():
            return getattr(type(module), self._name)(module, *args, **kwargs)

    def _only_drops(self, set_to_none: Any = True, *_: Any, **__: Any) -> bool:
        """Whether the call drops gradients instead of writing them."""
        return self._name == "zero_grad" and bool(set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> Method:
        return Method(self._name, memo[id(self._module())])

    def __reduce__(self) -> Any:
        return Method, (self._name, self._module())


def groups_of(module: nn.Module) -> list[Any]:
    """The param groups that fully_shard gathers before the forward pass of a module."""
    get_state = getattr(module, "_get_fsdp_state", None)
    if get_state is None:
        return []
    state = get_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # the name has changed between torch's releases
    return groups if groups is not None else [g for g in (state._fsdp_param_group,) if g is not None]


def is_wrapper(module: nn.Module) -> bool:
    """Whether torch.compile(module) has returned this module."""
    return "_orig_mod" in module._modules


def is_closed(module: nn.Module) -> bool:
    """Whether torch does not call the hooks of the modules below, or only inside of compiled code."""
    return (
        isinstance(module, (torch.jit.ScriptModule, nn.DataParallel))
        or module._compiled_call_impl is not None
        or is_wrapper(module)
    )


class HookedModel:
    def __init__(self, model: nn.Module, waiter: Waiter) -> None:
        self._model = model
        self._waiter = waiter
        self._hooks: dict[nn.Module, ForwardHook] = {}
        self._groups: list[Any] = []
        self._undo: list[Callable[[], Any]] = []
        # The end of the forward pass waits for all params, because the loss may use params directly.
        self._undo.append(model.register_forward_hook(Hook(waiter)).remove)
        self.attach()

    def attach(self) -> None:
        """Hooks the modules that have no hooks yet."""
        for module in self._model.modules():
            for group in groups_of(module):
                if all(group is not known for known in self._groups):
                    self._attach_group(group)
        gathered = {each.sharded_param for group in self._groups for each in group.fsdp_params}
        for module in self._open_modules(self._model, set()):
            if module not in self._hooks:
                self._attach_module(module)
            hook = self._hooks[module]
            own = module.parameters(recurse=is_closed(module))
            hook.own = hook.params = [param for param in own if param not in gathered]
        self.share_out()
        for module in self._model.modules():
            if any(True for _ in module.parameters()):
                self._attach_methods(module)

    def aliases(self) -> dict[Tensor, list[Tensor]]:
        """Other tensors over the memory of params, which FSDP2 reads instead of the params."""
        groups = (each for group in self._groups for each in group.fsdp_params)
        return {each.sharded_param: [each._sharded_param_data] for each in groups}

    def share_out(self) -> None:
        """Gives the params of modules that were not called in the forward pass to the modules above them:
        these use such params, so they wait for them."""
        for module, hook in self._hooks.items():
            if hook.was_called:
                hook.params = list(self._used_by(module, {}))

    def remove(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._hooks.clear()

    def _open_modules(self, module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
        """The modules with params, in or below them, whose hooks torch calls."""
        if module in seen or not any(True for _ in module.parameters()):
            return
        seen.add(module)
        yield module
        if not is_closed(module):
            for child in module.children():
                yield from self._open_modules(child, seen)

    def _used_by(self, module: nn.Module, used: dict[Tensor, None]) -> dict[Tensor, None]:
        hook = self._hooks.get(module)
        if hook is not None:
            used.update(dict.fromkeys(hook.own))
        for child in module.children():
            below = self._hooks.get(child)
            if below is not None and not below.was_called:
                self._used_by(child, used)
        return used

    # --------------------------------------------------------------------------------- hooking --

    def _attach_module(self, module: nn.Module) -> None:
        hook = self._hooks[module] = ForwardHook(self._waiter, module)
        compiled = module._compiled_call_impl
        if compiled is None:
            # This hook goes before all others, which may read or write the params it waits for.
            self._undo.append(module.register_forward_pre_hook(hook, prepend=True).remove)
            return

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            hook()
            return compiled(*args, **kwargs)

        module._compiled_call_impl = call
        self._undo.append(functools.partial(setattr, module, "_compiled_call_impl", compiled))

    def _attach_group(self, group: Any) -> None:
        self._groups.append(group)
        unshard, referred = group.unshard, weakref.ref(self._waiter)

        @functools.wraps(unshard)
        def unshard_after_wait(*args: Any, **kwargs: Any) -> Any:
            waiter = referred()
            if waiter is not None and waiter.is_wanted() and not group.is_unsharded:
                stream = getattr(group.comm_ctx, "all_gather_copy_in_stream", None)
                params = [each.sharded_param for each in group.fsdp_params]
                waiter.wait(params, [] if stream is None else [stream])
            return unshard(*args, **kwargs)

        group.unshard = unshard_after_wait
        self._undo.append(functools.partial(setattr, group, "unshard", unshard))

    def _attach_methods(self, module: nn.Module) -> None:
        attributes = vars(module)
        if isinstance(attributes.get("_apply"), Method) or is_wrapper(module):
            return
        for name in METHODS:
            attributes[name] = Method(name, module, self._waiter)
            self._undo.append(functools.partial(attributes.pop, name, None))
        hook = Hook(self._waiter)
        self._undo.append(module.register_state_dict_pre_hook(hook).remove)
        self._undo.append(module.register_load_state_dict_pre_hook(hook).remove)
