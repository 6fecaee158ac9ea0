"""Checks of param groups."""

from __future__ import annotations

from typing import Any

from ..base.checks import is_switch, shown
from ..params.fsdp2 import refuse_gathered
from ..params.hyperparameters import hyperparameters_of
from ..params.matrices import check_matrices
from ..params.members import check_dtype, check_lists, named, refuse_twice
from ..params.tensors import refuse_fsdp1
from .options import OffloadOptions, refuse_in_group

# Options of torch's optimizers that change what is computed or how it is called.
UNSUPPORTED = {
    "amsgrad": "it keeps a third moment",
    "capturable": "the step runs on the host and cannot be part of a CUDA graph",
    "differentiable": "autograd does not see the step",
}
# Options that need to know which ranks hold which part of a param, or which param a module uses.
REFUSING_FSDP1 = ("max_grad_norm", "process_group", "overlap")


def check_values(index: int, group: dict[str, Any], owner: str) -> None:
    """Checks the values that can be written into a group at any time. `owner` is the class of the optimizer."""
    check_lists(index, group)
    for option, why in UNSUPPORTED.items():
        value = group.get(option)
        if value is not None and (not is_switch(value) or value):
            raise RuntimeError(
                f"hybridopt.{owner} does not support {option}={shown(value)} (param group {index}): {why}; set it to False"
            )
    decoupled = group.get("decoupled_weight_decay", False)  # of torch's Adam; it chooses the algorithm
    if not is_switch(decoupled):
        raise ValueError(
            f"param group {index} has decoupled_weight_decay={shown(decoupled)}, expected True or False"
        )
    refuse_in_group(index, group)


def check_group(index: int, group: dict[str, Any], algorithm: int, options: OffloadOptions, owner: str) -> None:
    """Refuses a group that the optimizer cannot step, before it has the group."""
    check_values(index, group, owner)
    refuse_twice(index, group)
    hyperparameters_of(algorithm, index, group)
    check_matrices(algorithm, index, group)
    refuse_gathered(named(index, group))
    refusing = [option for option in REFUSING_FSDP1 if options.get(option) is not None]
    for name, param in named(index, group):
        if param.requires_grad:
            check_dtype(name, param)
        for option in refusing:
            refuse_fsdp1(name, param, option)


def refuse_fsdp1_in(param_groups: list[dict[str, Any]], what: str) -> None:
    for index, group in enumerate(param_groups):
        for name, param in named(index, group):
            refuse_fsdp1(name, param, what)
