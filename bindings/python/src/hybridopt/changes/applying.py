"""apply_changes: brings a model that follows another one up to date."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..base.checks import kind_of
from ..params.tensors import local
from .patch import WeightChange, WeightPatch


def apply_changes(model: nn.Module | Mapping[str, Tensor], patch: WeightPatch) -> None:
    """Writes a patch of another process's optimizer into the params of `model`: a module, or tensors by name (a state
    dict). The tensors must have the names, shapes and dtypes of the trainer's; of a DTensor each rank applies the
    changes of its own shard.

    Before anything is written, every param is made in a copy of its own and compared with the hash in the patch. So a
    patch on a wrong base, or one that was damaged on its way, raises a ValueError and leaves the model as it is. A
    patch may be applied twice, and one that has more changes than needed fits too."""
    tensors = tensors_of(model)
    if not isinstance(patch, WeightPatch):
        raise TypeError(f"patch is {kind_of(patch)}, expected a WeightPatch; read a file by WeightPatch.from_file(path)")
    targets = {}
    for name, change in patch:
        targets[name] = target_of(tensors, name, change)
        _check_result(name, targets[name], change)
    for name, change in patch:
        target = targets[name]
        with torch.inference_mode() if target.is_inference() else torch.no_grad():
            if change.values.numel() > 0:
                target.copy_(change.applied_to(target))


def tensors_of(model: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if isinstance(model, nn.Module):
        return dict(model.named_parameters(remove_duplicate=False))
    if not isinstance(model, Mapping):
        raise TypeError(f"model is {kind_of(model)}, expected a module, or a dict of tensors by name")
    return model


def target_of(tensors: Mapping[str, Tensor], name: str, change: WeightChange) -> Tensor:
    if name not in tensors:
        known = ", ".join(map(repr, list(tensors)[:5]))
        raise ValueError(
            f"the patch has parameter {name!r}, and the model has none of that name (it has {known} ...); give the "
            "optimizer named_parameters() of the same model"
        )
    target = local(tensors[name])
    if tuple(target.shape) != change.shape or target.dtype != change.values.dtype:
        raise ValueError(
            f"parameter {name!r} is {target.dtype} of shape {tuple(target.shape)} here, and {change.values.dtype} of "
            f"shape {change.shape} in the patch; both must be the same"
        )
    return target


def _check_result(name: str, target: Tensor, change: WeightChange) -> None:
    found = change.hash_of(change.applied_to(target))
    if found == change.hash:
        return
    now = change.hash_of(target)
    if change.base_hash is not None and now != change.base_hash:
        raise ValueError(
            f"the patch does not fit parameter {name!r}: it begins from the hash {change.base_hash:016x}, and the "
            f"parameter has {now:016x}; apply the patches in order, or have the trainer send all of it "
            "(mark_weights_changed())"
        )
    raise ValueError(
        f"with the patch parameter {name!r} has the hash {found:016x}, expected {change.hash:016x}: the patch is damaged, or "
        "other code of the trainer has written the parameter without a trace (through .data) since the patch before; send it "
        "again, or call mark_weights_changed() in the trainer, whose next patch has all of it"
    )
