"""Contexts of the library, shared: optimizers on one device with the same options use the same
update threads."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch

from . import abi

_contexts: weakref.WeakValueDictionary[tuple, abi.Context] = weakref.WeakValueDictionary()


def context_for(device: torch.device, **options: Any) -> abi.Context:
    """The context of a device. Fields: offload_context_options_t."""
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
        context = _contexts[key] = abi.Context(**options)
    return context
