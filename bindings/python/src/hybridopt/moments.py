"""The moments of each algorithm, by the names that torch gives them."""

from __future__ import annotations

from typing import Any

from . import abi

MOMENTS = {
    abi.OFFLOAD_ADAMW: {
        "exp_avg": abi.OFFLOAD_STATE_EXP_AVG,
        "exp_avg_sq": abi.OFFLOAD_STATE_EXP_AVG_SQ,
    },
    abi.OFFLOAD_ADAM: {
        "exp_avg": abi.OFFLOAD_STATE_EXP_AVG,
        "exp_avg_sq": abi.OFFLOAD_STATE_EXP_AVG_SQ,
    },
    abi.OFFLOAD_SGD: {"momentum_buffer": abi.OFFLOAD_STATE_MOMENTUM_BUFFER},
    abi.OFFLOAD_LION: {"exp_avg": abi.OFFLOAD_STATE_EXP_AVG},
    abi.OFFLOAD_ADAGRAD: {"sum": abi.OFFLOAD_STATE_SUM},
}
# The algorithms whose state has a step count beside the moments, as in torch.
COUNTED = {abi.OFFLOAD_ADAMW, abi.OFFLOAD_ADAM, abi.OFFLOAD_ADAGRAD}


def moments_of(algorithm: int, group: dict[str, Any]) -> dict[str, int]:
    """The moments that params of a group have, with their numbers in the ABI."""
    has_none = algorithm == abi.OFFLOAD_SGD and group["momentum"] == 0
    return {} if has_none else MOMENTS[algorithm]
