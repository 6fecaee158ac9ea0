"""transformers: a callback for Trainer, which makes the optimizer by itself:

    Trainer(
        ...,
        args=TrainingArguments(..., max_grad_norm=0.0),
        optimizer_cls_and_kwargs=(hybridopt.AdamW, {"lr": 1e-5, "max_grad_norm": 1.0}),
        callbacks=[OffloadCallback(overlap=True)],
    )

Programs that make the Trainer by themselves (LLaMA-Factory, ms-swift, axolotl) call install() before.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ..base.checks import check_switch
from ..base.owned_hooks import Removal
from ..optimizers import algorithms
from .wrapped import check_clipped_once, check_options, name_params, unwrapped

__all__ = ["OffloadCallback", "install"]


def __dir__() -> list[str]:
    """The names that completion and help() list: only the public ones."""
    return __all__


FOLDER = "hybridopt"  # in each of Trainer's checkpoints
CLASSES = {
    torch.optim.AdamW: algorithms.AdamW,
    torch.optim.SGD: algorithms.SGD,
    torch.optim.Adagrad: algorithms.Adagrad,
}
# Options that install() cannot give to every Trainer.
OTHERS = {
    "max_grad_norm": "Trainer clips by itself: set max_grad_norm in its arguments",
    "overlap": "give the Trainer OffloadCallback(overlap=True)",
}
installed_options: dict[str, Any] | None = None  # some of OffloadOptions; None before install()


class OffloadCallback(TrainerCallback):
    """A callback that does what Trainer does not do by itself.

    Args:
        overlap (bool, default False): steps go on beside the next forward pass (OffloadOptimizer.overlap).
        save_checkpoint (bool, default False): OffloadOptimizer.save_checkpoint also writes each checkpoint, into the
            folder `hybridopt` of Trainer's checkpoint, for any number of ranks and for other programs.
        load_from (path, default None): such a folder, read when training begins, on any number of ranks.
            Trainer's resume_from_checkpoint reads Trainer's own files and does not need it.
    """

    def __init__(
        self,
        overlap: bool = False,
        save_checkpoint: bool = False,
        load_from: str | os.PathLike[str] | None = None,
    ) -> None:
        check_switch("overlap", overlap)
        check_switch("save_checkpoint", save_checkpoint)
        self._is_overlapping = overlap
        self._is_saving = save_checkpoint
        self._load_from = load_from
        self._overlap: Removal | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        optimizer, model = unwrapped(kwargs["optimizer"]), kwargs["model"]
        check_clipped_once(
            optimizer,
            f"TrainingArguments has max_grad_norm={args.max_grad_norm}",
            args.max_grad_norm,
            "set TrainingArguments(max_grad_norm=0.0)",
        )
        name_params(optimizer, model)
        if self._load_from is not None:
            optimizer.load_checkpoint(self._load_from)
        if self._is_overlapping:
            self._end_overlap()  # of a train() that has raised
            self._overlap = optimizer.overlap(model)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._end_overlap()  # code that reads weights after train() need not know of it

    def _end_overlap(self) -> None:
        if self._overlap is not None:
            self._overlap.remove()
            self._overlap = None

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._is_saving:
            folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}", FOLDER)
            unwrapped(kwargs["optimizer"]).save_checkpoint(folder, progress=False)


def install(**options: Any) -> None:
    """From now on Trainer makes an optimizer of this package if its arguments ask for one of torch's that this
    package has: --optim adamw_torch, adamw_torch_fused, sgd or adagrad. Learning rate, betas and so on are
    Trainer's. `options` are some of hybridopt.OffloadOptions; a later call replaces them."""
    global installed_options
    check_options(options, OTHERS)
    is_first = installed_options is None
    installed_options = options
    if is_first:
        name = "get_optimizer_cls_and_kwargs"
        setattr(Trainer, name, staticmethod(of_this_package(getattr(Trainer, name))))


def of_this_package(choose: Callable[..., tuple[Any, dict[str, Any]]]) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Trainer's function that returns the class of an optimizer and its arguments, with the classes of this package."""

    @functools.wraps(choose)
    def chosen(args: TrainingArguments, model: Any = None) -> tuple[Any, dict[str, Any]]:
        theirs, kwargs = choose(args, model)
        if theirs not in CLASSES:
            raise ValueError(
                f"--optim is {args.optim}, expected adamw_torch, adamw_torch_fused, sgd or adagrad after "
                "hybridopt.integrations.transformers.install(); set one of these, or leave install() out"
            )
        return CLASSES[theirs], {**kwargs, **(installed_options or {})}

    return chosen
