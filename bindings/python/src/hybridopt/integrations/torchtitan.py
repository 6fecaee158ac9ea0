"""torchtitan: a container whose optimizers are those of this package. In a model's config:

    optimizer=OffloadOptimizersContainer.Config(
        param_groups=default_adamw(lr=3e-4).param_groups,
        offload={"offload_fraction": 1.0, "state_dtype": "bfloat16"},
    )
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn, optim
from torchtitan.components.optimizer import OptimizersContainer

from ..optimizers import algorithms
from ..optimizers.sharded_muon import ShardedMuon

__all__ = ["OffloadOptimizersContainer"]


def __dir__() -> list[str]:
    """The names that completion and help() list: only the public ones."""
    return __all__


NAMES = ("AdamW", "Adam", "SGD", "Lion", "Signum", "Adagrad", "Muon")


class OffloadOptimizersContainer(OptimizersContainer):
    """torchtitan's container, with the optimizers of this package under torch's names."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        offload: dict[str, Any] = field(default_factory=dict)
        """Options of this package (hybridopt.OffloadOptions) for every optimizer. Options in
        optimizer_factory_kwargs_by_name, for one optimizer, take precedence."""

        overlap: bool = False
        """Whether steps go on beside the next forward pass (OffloadOptimizer.overlap)."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., optim.Optimizer]:
        if name not in NAMES:
            raise NotImplementedError(
                f"Optimizer {name} is none of hybridopt, expected one of {', '.join(NAMES)}; use "
                "torchtitan's OptimizersContainer for it"
            )
        if name == "Muon":
            return ShardedMuon  # FSDP2 cuts matrices between ranks
        factory: Callable[..., optim.Optimizer] = getattr(algorithms, name)
        return factory

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        if config.implementation == "fused_opt_states_bf16":
            raise ValueError(
                "implementation='fused_opt_states_bf16' makes moments for torch's fused kernel; leave it out and "
                "set offload={'state_dtype': 'bfloat16'}"
            )
        by_name = config.optimizer_factory_kwargs_by_name
        options = {name: {**config.offload, **by_name.get(name, {})} for name in {*NAMES, *by_name}}
        merged = replace(config)
        merged.optimizer_factory_kwargs_by_name = options
        super().__init__(merged, model_parts=model_parts)
        if config.overlap:
            self._overlap()

    def _overlap(self) -> None:
        for optimizer in self.optimizers:
            params = {param for group in optimizer.param_groups for param in group["params"]}
            for model in self.model_parts:
                if not params.isdisjoint(model.parameters()):
                    optimizer.overlap(model)
