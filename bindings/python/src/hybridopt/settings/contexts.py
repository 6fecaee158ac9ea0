"""Shares contexts of the library: optimizers on one device with the same options use the same update
threads."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch

from .. import abi
from ..base import words
from ..ranks.local_ranks import local_rank_and_world

_contexts: weakref.WeakValueDictionary[tuple, abi.Context] = weakref.WeakValueDictionary()


def context_for(
    device: torch.device,
    local_rank: int | None,
    local_world: int | None,
    numa_nodes: int,
    **options: Any,
) -> abi.Context:
    """The context of a device, with this rank's part of the host's CPUs. Other fields:
    offload_context_options_t."""
    rank, world = local_rank or 0, local_world or 0
    if world == 0:
        rank, world = local_rank_and_world(numa_nodes)
    options = {**options, "local_rank": rank, "local_world": world, "numa_nodes": numa_nodes}
    if device.type == "cuda":
        options = {
            **options,
            "device_kind": abi.OFFLOAD_DEVICE_CUDA,
            "device_index": device.index if device.index is not None else 0,
        }
    elif device.type != "cpu":
        raise ValueError(
            f"the parameters are on {device}, expected cpu or cuda; move the model there before its "
            "first optimizer step"
        )
    key = (os.getpid(), *sorted(options.items()))  # a forked child cannot use its parent's
    context = _contexts.get(key)
    if context is None or context.closed:
        context = _contexts[key] = abi.Context(retold=words.retold, log=words.LOG, **options)
    return context
