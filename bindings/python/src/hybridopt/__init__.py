"""hybridopt: optimizers whose state lives in host memory, for PyTorch and, as hybridopt.abi, without
it."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import abi, integrations, stash
    from .changes.applying import apply_changes
    from .changes.gathering import gather_changes
    from .changes.patch import WeightChange, WeightPatch
    from .optimizers.algorithms import SGD, Adagrad, Adam, AdamW, Lion, Signum
    from .optimizers.muon import Muon, muon_groups
    from .optimizers.optimizer import OffloadOptimizer
    from .optimizers.sharded_muon import ShardedMuon
    from .params.sharding import TensorShard
    from .settings.options import OffloadOptions
    from .stash import ActivationStash
    from .steps.plans import Plan, Stats, StepResult

    __version__: str

_MODULES = {
    "ActivationStash": "stash",
    "Adagrad": "optimizers.algorithms",
    "Adam": "optimizers.algorithms",
    "AdamW": "optimizers.algorithms",
    "Lion": "optimizers.algorithms",
    "Muon": "optimizers.muon",
    "SGD": "optimizers.algorithms",
    "ShardedMuon": "optimizers.sharded_muon",
    "Signum": "optimizers.algorithms",
    "OffloadOptimizer": "optimizers.optimizer",
    "OffloadOptions": "settings.options",
    "Plan": "steps.plans",
    "Stats": "steps.plans",
    "StepResult": "steps.plans",
    "TensorShard": "params.sharding",
    "WeightChange": "changes.patch",
    "WeightPatch": "changes.patch",
    "apply_changes": "changes.applying",
    "gather_changes": "changes.gathering",
    "muon_groups": "optimizers.muon",
}

# Written out for type checkers, which export only these names.
__all__ = [
    "SGD",
    "ActivationStash",
    "Adagrad",
    "Adam",
    "AdamW",
    "Lion",
    "Muon",
    "OffloadOptimizer",
    "OffloadOptions",
    "Plan",
    "ShardedMuon",
    "Signum",
    "Stats",
    "StepResult",
    "TensorShard",
    "WeightChange",
    "WeightPatch",
    "__version__",
    "abi",
    "apply_changes",
    "gather_changes",
    "integrations",
    "muon_groups",
    "stash",
]


# They are imported when they are used, and may need torch.
_SUBMODULES = ("abi", "integrations", "stash")


def __getattr__(name: str) -> Any:
    """Imports torch only when a name that needs it is used."""
    if name == "__version__":  # the library's: "hybridopt 0.1.0, ..."
        build_info: str = importlib.import_module(".abi", __name__).build_info()
        return build_info.split(",")[0].split()[1]
    if name not in _MODULES and name not in _SUBMODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if name in _SUBMODULES:
            return importlib.import_module(f".{name}", __name__)
        return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"hybridopt.{name} needs torch, which this Python ({sys.executable}) does not have; install torch "
            "2.6 or newer (pip install torch), or use hybridopt.abi, which does without"
        ) from None


def __dir__() -> list[str]:
    """The names that completion and help() list, whether torch has been imported or not: only the public ones."""
    return sorted(__all__)
