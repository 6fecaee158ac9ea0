"""hybridopt: optimizers whose state lives in host memory, for PyTorch and, as hybridopt.abi, without
it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import abi
    from .algorithms import SGD, Adagrad, Adam, AdamW, Lion
    from .optimizer import OffloadOptimizer
    from .plans import Plan, Stats, StepResult
    from .sharding import TensorShard

_MODULES = {
    "Adagrad": "algorithms",
    "Adam": "algorithms",
    "AdamW": "algorithms",
    "Lion": "algorithms",
    "SGD": "algorithms",
    "OffloadOptimizer": "optimizer",
    "Plan": "plans",
    "Stats": "plans",
    "StepResult": "plans",
    "TensorShard": "sharding",
}

# Spelled out for type checkers, which export nothing else.
__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Lion",
    "OffloadOptimizer",
    "Plan",
    "Stats",
    "StepResult",
    "TensorShard",
    "abi",
]


def __getattr__(name: str) -> Any:
    """Imports torch only when a name that needs it is used."""
    if name == "abi":
        return importlib.import_module(".abi", __name__)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
