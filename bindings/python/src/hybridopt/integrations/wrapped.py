"""Code that the adaptors of several frameworks share. It checks options, finds the optimizer inside of a framework's
wrapper, and gives it the names of params."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..base.checks import kind_of
from ..optimizers.optimizer import OffloadOptimizer
from ..settings.options import DEFAULT_OPTIONS

# Prefixes that wrappers of modules add to the names of params: DistributedDataParallel, torch.compile, activation
# checkpointing.
WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")


def unwrapped(optimizer: Any) -> OffloadOptimizer:
    """The optimizer of this package that a framework's wrapper holds as `optimizer`."""
    inner = optimizer
    while not isinstance(inner, OffloadOptimizer):
        inner = getattr(inner, "optimizer", None)
        if inner is None:
            raise TypeError(
                f"the optimizer is {kind_of(optimizer)}, expected one of hybridopt (AdamW, Adam, SGD, "
                "Lion, Signum, Adagrad, Muon) or a wrapper around one"
            )
    return inner


def check_options(options: dict[str, Any], others: dict[str, str]) -> None:
    """Refuses arguments of a framework's install() that are no options of this package, or that are in `others`:
    options that belong to the framework. The values of `others` say what to do instead."""
    for name in options:
        if name in others:
            raise TypeError(f"install() got {name!r}: {others[name]}")
        if name not in DEFAULT_OPTIONS:
            expected = ", ".join(name for name in DEFAULT_OPTIONS if name not in others)
            raise TypeError(f"install() got an unexpected keyword argument {name!r}, expected some of {expected}")


def check_clipped_once(
    optimizer: OffloadOptimizer, framework_has: str, framework_norm: float | None, way_out: str
) -> None:
    """Refuses gradients that both the framework and the optimizer would clip. The error begins with
    `framework_has`, which names the framework's setting."""
    if optimizer.max_grad_norm is not None and framework_norm:
        raise ValueError(
            f"{framework_has} and the optimizer max_grad_norm={optimizer.max_grad_norm}: gradients would be "
            f"clipped twice; {way_out}, and the step clips without another pass over them"
        )


def name_params(optimizer: OffloadOptimizer, model: nn.Module) -> None:
    """Gives params of groups without names the names that they have in the model, before the first step: checkpoints
    find params by name."""
    names: dict[nn.Parameter, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        for wrapper in WRAPPERS:
            name = name.removeprefix(wrapper) if wrapper == WRAPPERS[0] else name.replace(wrapper, "")
        names.setdefault(param, name)
    groups = optimizer.param_groups
    if any("param_names" in group for group in groups):
        return
    if all(param in names for group in groups for param in group["params"]):
        for group in groups:
            group["param_names"] = [names[param] for param in group["params"]]
