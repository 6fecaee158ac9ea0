"""A model whose params are waited for: modules wait before their forward pass, FSDP2 before it gathers,
and so does what reads or writes weights as a whole."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

# Methods of a module that write its weights or gradients; hooks of torch tell nothing of them.
METHODS = ("_apply", "zero_grad")


class Waiter(Protocol):
    """Who is asked to wait."""

    def is_wanted(self) -> bool:
        """Whether wait() would do anything."""

    def wait(self, params: Iterable[Tensor], streams: Iterable[Any] = ()) -> None:
        """Params are about to be used, on the current stream and on `streams`."""

    def finish(self) -> None:
        """The same for all params."""


def nothing(*_: Any) -> None:
    """The hook of a module that was copied or unpickled: no step writes its params."""


def _nothing() -> Callable[..., None]:
    return nothing


class Hook:
    """What a module calls. It keeps nobody alive, and copies of the module do not wait."""

    def __init__(self, waiter: Waiter) -> None:
        self._waiter = weakref.ref(waiter)

    def __call__(self, *_: Any) -> None:
        waiter = self._waiter()
        if waiter is not None and (torch.compiler.is_compiling() or waiter.is_wanted()):
            self._wait(waiter)

    # What torch.compile compiles is cut in two here: else it would leave the wait out.
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
    """Waits for what the forward pass of one module uses."""

    def __init__(self, waiter: Waiter, module: nn.Module) -> None:
        super().__init__(waiter)
        self._module = weakref.ref(module)
        self.own: list[Tensor] = []
        self.params: list[Tensor] = []  # those, and what is below and not called by itself
        self.was_called = False

    def wait(self, waiter: Waiter) -> None:
        self.was_called = True
        module = self._module()
        params: Iterable[Tensor] = self.params
        if module is not None and not module.training and not torch.is_grad_enabled():
            # Shorter ways than the forward passes of modules below may be taken then.
            params = module.parameters()
        waiter.wait(params)


class Method:
    """A method of one module that waits first. That of a copied module waits for nobody."""

    def __init__(self, name: str, module: nn.Module, waiter: Waiter | None = None) -> None:
        self._name = name
        self._module = weakref.ref(module)
        self._waiter = None if waiter is None else weakref.ref(waiter)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        waiter = None if self._waiter is None else self._waiter()
        if waiter is not None and not self._only_drops(*args, **kwargs):
            waiter.finish()
        module = self._module()
        return getattr(type(module), self._name)(module, *args, **kwargs)

    def _only_drops(self, set_to_none: Any = True, *_: Any, **__: Any) -> bool:
        """Whether gradients are dropped and not written."""
        return self._name == "zero_grad" and bool(set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> Method:
        return Method(self._name, memo[id(self._module())])

    def __reduce__(self) -> Any:
        return Method, (self._name, self._module())


def groups_of(module: nn.Module) -> list[Any]:
    """The groups of params that fully_shard gathers before the forward pass of a module."""
    get_state = getattr(module, "_get_fsdp_state", None)
    if get_state is None:
        return []
    state = get_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # the name has changed between torch's releases
    return groups if groups is not None else [g for g in (state._fsdp_param_group,) if g is not None]


def is_wrapper(module: nn.Module) -> bool:
    """Whether it is what torch.compile(module) makes."""
    return "_orig_mod" in module._modules


def is_closed(module: nn.Module) -> bool:
    """Whether hooks of the modules below it are not called, or only inside of what is compiled."""
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
        # All is waited for when the forward pass is over: losses may use params by themselves.
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

    def params(self) -> set[Tensor]:
        return set(self._model.parameters())

    def aliases_of(self, param: Tensor) -> list[Tensor]:
        """Other tensors over the memory of a param, which are read instead of it."""
        groups = (each for group in self._groups for each in group.fsdp_params)
        return [each._sharded_param_data for each in groups if each.sharded_param is param]

    def share_out(self) -> None:
        """Params of modules that nobody has called are used by the modules above: those wait."""
        for module, hook in self._hooks.items():
            if hook.was_called:
                hook.params = list(self._used_by(module, {}))

    def remove(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._hooks.clear()

    def _open_modules(self, module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
        """The modules with params in or below them whose hooks are called."""
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
            # First: hooks of others may read or write what this one waits for.
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
