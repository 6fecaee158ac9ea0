"""transformers: a callback for Trainer, which makes the optimizer by itself:

    Trainer(
        ...,
        args=TrainingArguments(..., max_grad_norm=0.0),
        optimizer_cls_and_kwargs=(hybridopt.AdamW, {"lr": 1e-5, "max_grad_norm": 1.0}),
        callbacks=[OffloadCallback(overlap=True)],
    )
"""

from __future__ import annotations

import os
from typing import Any

from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ..overlap import Overlap
from .wrapped import name_params, unwrapped

FOLDER = "hybridopt"  # in each of Trainer's checkpoints


class OffloadCallback(TrainerCallback):
    """What Trainer does not do by itself.

    Args:
        overlap (bool, default False): steps go on beside the next forward pass (OffloadOptimizer.overlap).
        save_checkpoint (bool, default False): beside each checkpoint of Trainer's its folder `hybridopt`
            is written by OffloadOptimizer.save_checkpoint, for any number of ranks and for other programs.
        load_from (path, default None): such a folder, read when training begins, on any number of ranks.
            Trainer's resume_from_checkpoint reads Trainer's own files and does not need it.
    """

    def __init__(
        self,
        overlap: bool = False,
        save_checkpoint: bool = False,
        load_from: str | os.PathLike[str] | None = None,
    ) -> None:
        self._is_overlapping = overlap
        self._is_saving = save_checkpoint
        self._load_from = load_from
        self._overlap: Overlap | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        optimizer, model = unwrapped(kwargs["optimizer"]), kwargs["model"]
        if optimizer.max_grad_norm is not None and args.max_grad_norm:
            raise ValueError(
                f"TrainingArguments has max_grad_norm={args.max_grad_norm} and the optimizer "
                f"max_grad_norm={optimizer.max_grad_norm}: gradients would be clipped twice; set "
                "TrainingArguments(max_grad_norm=0.0), and the step clips without another pass over them"
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
        self._end_overlap()  # whoever reads weights after train() need not know of it

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
