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

from ..base.modes import without_collection
from ..base.owned_hooks import OwnedHook, Uncopied, drop_ended
from ..params.fsdp2 import groups_of
from ..traps.trap import without_traps

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


class Hook(OwnedHook):
    """A hook that torch calls before it uses a module. It keeps no object alive. The hooks of a copied module do not
    wait: no step writes the copy's params."""

    def __call__(self, *_: Any) -> None:
        waiter: Waiter | None = self._owner()
        if waiter is not None and (torch.compiler.is_compiling() or waiter.is_wanted()):
            self._wait(waiter)

    # This makes torch.compile end one graph before the wait and begin another after it. A graph that was compiled
    # without the wait would never wait.
    @torch._disable_dynamo
    def _wait(self, waiter: Waiter) -> None:
        self.wait(waiter)

    def wait(self, waiter: Waiter) -> None:
        waiter.finish()


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

    def __init__(self, name: str, module: nn.Module, waits: Waits | None = None) -> None:
        self._name = name
        self._module = weakref.ref(module)
        self.waits = waits

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        only_drops = self._only_drops(*args, **kwargs)
        if self.waits is not None and not only_drops:
            self.waits()
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


class Waits(Uncopied):
    """Waits for all params before a function that reads or writes the weights or gradients of one module. All
    optimizers whose steps overlap share the replaced functions, so that the optimizers can end in any order, without
    notice."""

    def __init__(self, module: nn.Module) -> None:
        self.waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()
        for name in METHODS:
            vars(module)[name] = Method(name, module, self)
        self._handles = [
            module.register_state_dict_pre_hook(self),
            module.register_load_state_dict_pre_hook(self),
        ]

    @staticmethod
    def of(module: nn.Module) -> Waits:
        method = vars(module).get(METHODS[0])
        waits = method.waits if isinstance(method, Method) else None
        return Waits(module) if waits is None else waits

    def __call__(self, *_: Any) -> None:
        for waiter in list(self.waiters):
            waiter.finish()

    def leave(self, module: nn.Module, owner: weakref.ref[Waiter]) -> None:
        discard(self.waiters, owner)
        if not self.waiters:
            for handle in self._handles:
                handle.remove()
            for name in METHODS:
                vars(module).pop(name, None)


def discard(waiters: weakref.WeakSet[Waiter], owner: weakref.ref[Waiter]) -> None:
    waiter = owner()
    if waiter is not None:
        waiters.discard(waiter)


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


def own_params(module: nn.Module) -> Iterator[Tensor]:
    """The params of a module without those of the modules below it."""
    return (param for param in module._parameters.values() if param is not None)


def note_params(module: nn.Module, has_params: dict[nn.Module, bool]) -> bool:
    """Notes of each module, in one walk, whether it has params in or below it. module.parameters() would make such a walk
    for each module."""
    if module not in has_params:
        has_params[module] = any(True for _ in own_params(module))
        below = [note_params(child, has_params) for child in module.children()]
        has_params[module] |= any(below)
    return has_params[module]


class HookedModel:
    def __init__(self, model: nn.Module, waiter: Waiter) -> None:
        self._model = model
        self._owner = weakref.ref(waiter)
        self._hooks: dict[nn.Module, ForwardHook] = {}
        self._groups: list[Any] = []
        self._undo: list[Callable[[], Any]] = []
        for module in model.modules():
            drop_ended(module._forward_hooks)
            drop_ended(module._forward_pre_hooks)
        # The end of the forward pass waits for all params, because the loss may use params directly.
        self._undo.append(model.register_forward_hook(Hook(waiter)).remove)
        self.attach()

    @without_collection()
    def attach(self) -> None:
        """Hooks the modules that have no hooks yet."""
        waiter = self._owner()
        assert waiter is not None  # who calls this
        for module in self._model.modules():
            for group in groups_of(module):
                if all(group is not known for known in self._groups):
                    self._attach_group(group, waiter)
        gathered = {each.sharded_param for group in self._groups for each in group.fsdp_params}
        has_params: dict[nn.Module, bool] = {}
        note_params(self._model, has_params)
        for module in self._open_modules(self._model, has_params, set()):
            if module not in self._hooks:
                self._attach_module(module, waiter)
            hook = self._hooks[module]
            own = module.parameters() if is_closed(module) else own_params(module)
            hook.own = hook.params = [param for param in own if param not in gathered]
        self.share_out()
        for module in filter(has_params.__getitem__, has_params):
            self._attach_methods(module, waiter)

    def aliases(self) -> dict[Tensor, list[Tensor]]:
        """By param: the other tensors on its memory, which FSDP2 reads instead of the param."""
        groups = (each for group in self._groups for each in group.fsdp_params)
        return {each.sharded_param: [each._sharded_param_data] for each in groups}

    def share_out(self) -> None:
        """Params of modules that were not called in the forward pass are used by the modules above them. So those
        modules wait for these params from now on."""
        for module, hook in self._hooks.items():
            if hook.was_called:
                hook.params = list(self._used_by(module, {}))

    def remove(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._hooks.clear()

    def _open_modules(
        self, module: nn.Module, has_params: dict[nn.Module, bool], seen: set[nn.Module]
    ) -> Iterator[nn.Module]:
        """The modules with params, in or below them, whose hooks torch calls."""
        if module in seen or not has_params[module]:
            return
        seen.add(module)
        yield module
        if not is_closed(module):
            for child in module.children():
                yield from self._open_modules(child, has_params, seen)

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

    def _attach_module(self, module: nn.Module, waiter: Waiter) -> None:
        hook = self._hooks[module] = ForwardHook(waiter, module)
        compiled = module._compiled_call_impl
        if compiled is None:
            # This hook goes before all others, which may read or write the params it waits for.
            self._undo.append(module.register_forward_pre_hook(hook, prepend=True).remove)
            return
        hooks = getattr(compiled, "hybridopt_hooks", None)
        if hooks is None:
            hooks = _hook_compiled_call(module)
        hooks.add(hook)
        self._undo.append(functools.partial(hooks.discard, hook))

    def _attach_group(self, group: Any, waiter: Waiter) -> None:
        self._groups.append(group)
        waiters = getattr(group.unshard, "hybridopt_waiters", None)
        if waiters is None:
            waiters = _hook_unshard(group)
        waiters.add(waiter)
        self._undo.append(functools.partial(discard, waiters, self._owner))

    def _attach_methods(self, module: nn.Module, waiter: Waiter) -> None:
        if is_wrapper(module):
            return
        waits = Waits.of(module)
        if waiter not in waits.waiters:
            waits.waiters.add(waiter)
            self._undo.append(functools.partial(waits.leave, module, self._owner))


def _hook_compiled_call(module: nn.Module) -> weakref.WeakSet[ForwardHook]:
    """Replaces the compiled call of a module, for which torch calls no hooks, by a call that first calls the hooks
    in a set. Returns the set."""
    hooks: weakref.WeakSet[ForwardHook] = weakref.WeakSet()
    compiled: Any = module._compiled_call_impl

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        for hook in list(hooks):
            hook()
        return compiled(*args, **kwargs)

    call.hybridopt_hooks = hooks  # type: ignore[attr-defined]
    module._compiled_call_impl = call
    return hooks


def _hook_unshard(group: Any) -> weakref.WeakSet[Waiter]:
    """Makes FSDP2 call the waiters in a set before it gathers the params of a group. Returns the set."""
    waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()
    unshard = group.unshard

    @functools.wraps(unshard)
    def unshard_after_wait(*args: Any, **kwargs: Any) -> Any:
        for waiter in list(waiters):
            if waiter.is_wanted() and not group.is_unsharded:
                stream = getattr(group.comm_ctx, "all_gather_copy_in_stream", None)
                params = [each.sharded_param for each in group.fsdp_params]
                waiter.wait(params, [] if stream is None else [stream])
        return unshard(*args, **kwargs)

    unshard_after_wait.hybridopt_waiters = waiters  # type: ignore[attr-defined]
    group.unshard = unshard_after_wait
    return waiters
