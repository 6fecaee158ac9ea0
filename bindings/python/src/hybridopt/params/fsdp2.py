"""What torch.distributed.fsdp.fully_shard (FSDP2) does with the params of a module. Only torch's own records tell it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from .. import abi


def groups_of(module: nn.Module) -> list[Any]:
    """The param groups that fully_shard gathers before the forward pass of a module."""
    get_state = getattr(module, "_get_fsdp_state", None)
    if get_state is None:
        return []
    state = get_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # later releases of torch use this name
    return groups if groups is not None else [g for g in (state._fsdp_param_group,) if g is not None]


def refuse_gathered(params: Iterable[tuple[str, Tensor]]) -> None:
    """Raises for a param that FSDP2 has gathered for a forward pass. It is not the shard: it gets no gradient, and its
    memory is freed."""
    gathered = _gathered()
    for name, param in params if gathered else ():
        if id(param) in gathered:
            raise abi.InvalidStateError(
                f"parameter {name!r} is the whole one that FSDP2 has gathered for a forward pass, and not this rank's "
                "shard, which is trained: after a forward pass without a backward pass, an evaluation for example, the "
                "root keeps whole parameters; call model.reshard() before you make the optimizer"
            )


def _gathered() -> set[int]:
    """The ids of the whole params of all models."""
    composable = sys.modules.get("torch.distributed._composable_state")
    modules = getattr(composable, "_module_state_mapping", ())
    sharded = (each for module in list(modules) for group in groups_of(module) for each in group.fsdp_params)
    whole = (getattr(each, "_unsharded_param", None) for each in sharded)
    return {id(param) for param in whole if param is not None}
