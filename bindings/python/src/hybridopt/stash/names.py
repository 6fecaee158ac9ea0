"""Finds which module and which function of torch is running: saved tensors get their names from that."""

from __future__ import annotations

import fnmatch
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..base.checks import shown
from ..base.owned_hooks import Uncopied

# The functions that save tensors, by their role in a model.
ROLES: dict[str, tuple[Any, ...]] = {
    "norm": (
        functional.layer_norm,
        functional.rms_norm,
        functional.group_norm,
        functional.batch_norm,
        functional.instance_norm,
        torch.layer_norm,
        torch.rms_norm,
    ),
    "attention.core": (functional.scaled_dot_product_attention,),
    "linear": (
        functional.linear,
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.addmm,
        Tensor.matmul,
        Tensor.__matmul__,
        Tensor.bmm,
        Tensor.mm,
    ),
    "activation": (
        functional.gelu,
        functional.silu,
        functional.relu,
        functional.leaky_relu,
        functional.sigmoid,
        functional.softplus,
        functional.tanh,
        torch.relu,
        torch.sigmoid,
        torch.tanh,
        Tensor.relu,
        Tensor.sigmoid,
        Tensor.tanh,
    ),
    "softmax": (functional.softmax, functional.log_softmax, torch.softmax, Tensor.softmax),
    "dropout": (functional.dropout, torch.dropout),
    "loss": (functional.cross_entropy, functional.nll_loss, functional.mse_loss),
}
_ROLE_OF = {function: role for role, functions in ROLES.items() for function in functions}

# Megatron-LM's words for `--offload-modules`, as the names that its modules have.
MEGATRON = {
    "attn_norm": "input_layernorm",
    "qkv_linear": "linear_qkv",
    "core_attn": "core_attention",
    "attn_proj": "linear_proj",
    "mlp_norm": "pre_mlp_layernorm",
    "expert_fc1": "experts.linear_fc1",
    "moe_act": "experts.activation_func",
}


class Stack(threading.local):
    """For each thread: the running modules, outermost first, and the running function of torch."""

    def __init__(self) -> None:
        self.modules: list[str] = []
        self.role = ""


class Watch:
    """Hooks of one module that tell when it runs. Copies of the module do not have them."""

    def __init__(self, name: str, enter: Callable[[str], None], leave: Callable[[str], None]) -> None:
        self._name = name
        self._enter = weakref.WeakMethod(enter)
        self._leave = weakref.WeakMethod(leave)

    def before(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and (enter := self._enter()) is not None:
            enter(self._name)

    def after(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and (leave := self._leave()) is not None:
            leave(self._name)

    def attach(self, module: nn.Module) -> list[Callable[[], None]]:
        """Returns functions that undo it."""
        return [
            module.register_forward_pre_hook(Call(self.before), prepend=True).remove,
            module.register_forward_hook(Call(self.after), always_call=True).remove,
        ]


class Call(Uncopied):
    """A hook that has no effect in copies and pickles of its module."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> None:
        self._function(*arguments)


class Roles(TorchFunctionMode):
    """Notes the role of the running function of torch."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self._stack = stack

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        role = _ROLE_OF.get(function)
        if role is None or self._stack.role:
            return function(*args, **(kwargs or {}))
        self._stack.role = role
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self._stack.role = ""


class Names:
    """The names of all modules of a model."""

    def __init__(self) -> None:
        self.stack = Stack()
        self._known: list[str] = []
        self._undo: list[Callable[[], None]] = []

    def watch(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if name:
                self._known.append(name)
                self._undo += Watch(name, self._enter, self._leave).attach(module)

    def _enter(self, name: str) -> None:
        self.stack.modules.append(name)

    def _leave(self, name: str) -> None:
        while self.stack.modules and self.stack.modules.pop() != name:
            pass  # an inner module that was left by an exception before its hook was called

    @property
    def module(self) -> str:
        return self.stack.modules[-1] if self.stack.modules else ""

    def check(self, wanted: Iterable[str]) -> None:
        """Refuses a name that fits no module and no role."""
        for name in wanted:
            if not isinstance(name, str):
                raise TypeError(f"only() got {shown(name)}, expected parts of modules' names or roles, as strings")
            if name not in ROLES and not any(matches(known, name) for known in self._known):
                has = "has no module of that name" if self._known else "is not known: give model="
                raise ValueError(
                    f"only() got {shown(name)}, but the model {has}; expected parts of modules' names, with * and ? "
                    f"for any letters, or the roles {', '.join(ROLES)}, or Megatron-LM's {', '.join(MEGATRON)}"
                )

    def is_one_of(self, wanted: Iterable[str]) -> bool:
        """Whether a running module or function has one of the names."""
        return any(
            self.stack.role == name or matches(self.module, name) for name in wanted
        )

    def remove(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._known.clear()


def matches(module: str, name: str) -> bool:
    """Whether the parts of a name ("attention.core") are consecutive parts of a module's name."""
    parts, wanted = module.split("."), MEGATRON.get(name, name).split(".")
    return any(
        all(map(fnmatch.fnmatchcase, parts[begin:], wanted))
        for begin in range(len(parts) - len(wanted) + 1)
    )
