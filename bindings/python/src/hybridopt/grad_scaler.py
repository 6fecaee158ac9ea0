"""What torch.amp.GradScaler tells a step, as attributes of the optimizer, and what it is told."""

from __future__ import annotations

from typing import Any

from . import abi
from .engine import Engine


def is_scaling(optimizer: Any) -> bool:
    """Whether a GradScaler makes this step."""
    return hasattr(optimizer, "found_inf")


def found_inf(optimizer: Any) -> bool:
    """The scaler's verdict, which may be that of other ranks."""
    verdict = getattr(optimizer, "found_inf", None)
    return verdict is not None and float(verdict) != 0.0


def grad_scale(optimizer: Any) -> float:
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


def check(optimizer: Any, engine: Engine, is_named: bool) -> None:
    """Refuses a scaler's step over gradients on the host: a scaler looks for Inf and NaN in `grad`,
    where they are not. One that hook_gradients() was told of, by name, hears of the verdict."""
    hosted = engine.bound.hosted
    if not is_scaling(optimizer) or not hosted:
        return
    unscaled = getattr(optimizer, "grad_scale", None) is None
    if unscaled and any(hosted.values()):
        raise abi.InvalidStateError(
            "GradScaler.unscale_() has not seen the gradients that hooks have brought to the host, "
            "and this step would take them as they are, scaled; leave unscale_() out, for the step "
            "unscales, and clip by max_grad_norm"
        )
    if not unscaled and not is_named:
        raise abi.InvalidStateError(
            "gradients are on the host, where GradScaler cannot look for Inf and NaN, and its "
            "update() would not know what this step found; make the hooks with "
            "hook_gradients(grad_scaler=...), or call reload(grads=True) before GradScaler.step()"
        )
