"""Reads the attributes that torch.amp.GradScaler sets on the optimizer for a step."""

from __future__ import annotations

from typing import Any

from .. import abi
from ..engine.engine import Engine
from ..hiding.gradient_hooks import GradientHooks

ATTRIBUTES = frozenset(("found_inf", "grad_scale"))  # of an optimizer while a GradScaler steps it


def is_scaling(optimizer: Any) -> bool:
    """Whether a GradScaler called this step."""
    return hasattr(optimizer, "found_inf")


def is_skipped(optimizer: Any, engine: Engine | None, hooks: GradientHooks | None) -> bool:
    """Whether there is no step because the scaler has found Inf or NaN, on this rank or on another one. Raises if
    the scaler could not look."""
    if engine is not None:
        _check(optimizer, engine, hooks is not None and hooks.grad_scaler is not None)
    verdict = getattr(optimizer, "found_inf", None)
    return verdict is not None and float(verdict) != 0.0


def grad_scale(optimizer: Any) -> float:
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


def _check(optimizer: Any, engine: Engine, is_named: bool) -> None:
    """Raises if a scaler steps over gradients that have been taken off their params: the scaler looks for Inf and
    NaN in `grad`, which is None then. A scaler that was given to hook_gradients() learns what the step has found."""
    hosted, kept = engine.bound.hosted, engine.bound.kept
    if not is_scaling(optimizer) or not (hosted or kept):
        return
    unscaled = getattr(optimizer, "grad_scale", None) is None
    if unscaled and (kept or any(hosted.values())):
        raise abi.InvalidStateError(
            "GradScaler.unscale_() has not seen the gradients that hooks have taken off their params, "
            "and this step would take them as they are, scaled; leave unscale_() out, for the step "
            "unscales, and clip by max_grad_norm"
        )
    if not unscaled and not is_named:
        raise abi.InvalidStateError(
            "gradients are off their params, where GradScaler cannot look for Inf and NaN, and its "
            "update() would not know what this step found; make the hooks with "
            "hook_gradients(grad_scaler=...), or call reload(grads=True) before GradScaler.step()"
        )
