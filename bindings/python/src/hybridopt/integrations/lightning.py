"""Lightning: configure_optimizers() returns an optimizer of this package, and a callback lets its steps go
on beside the forward pass:

    Trainer(..., callbacks=[OffloadCallback(overlap=True)])
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from ..base.checks import check_switch
from ..base.owned_hooks import Removal
from .wrapped import check_clipped_once, name_params, unwrapped

__all__ = ["OffloadCallback"]


def __dir__() -> list[str]:
    """The names that completion and help() list: only the public ones."""
    return __all__


class OffloadCallback(Callback):
    """What Trainer does not do by itself.

    Args:
        overlap (bool, default False): steps go on beside the next forward pass (OffloadOptimizer.overlap).
    """

    def __init__(self, overlap: bool = False) -> None:
        check_switch("overlap", overlap)
        self._is_overlapping = overlap
        self._overlaps: list[Removal] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in map(unwrapped, trainer.optimizers):
            check_clipped_once(
                optimizer,
                f"Trainer has gradient_clip_val={trainer.gradient_clip_val}",
                trainer.gradient_clip_val,
                "leave gradient_clip_val out",
            )
            name_params(optimizer, pl_module)
            if self._is_overlapping:
                self._overlaps.append(optimizer.overlap(pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()  # code that reads weights after fit() need not know of it

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._end()

    def _end(self) -> None:
        while self._overlaps:
            self._overlaps.pop().remove()
