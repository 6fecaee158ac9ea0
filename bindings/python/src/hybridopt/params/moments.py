"""The moments of each algorithm, by the names that torch gives them."""

from __future__ import annotations

from typing import Any

from .. import abi

MOMENTS = {value: row.moments for value, row in abi.ALGORITHMS.items()}
# The algorithms whose state has a step count beside the moments, as in torch.
COUNTED = {value for value, row in abi.ALGORITHMS.items() if row.counts_steps}


def moments_of(algorithm: int, group: dict[str, Any]) -> dict[str, int]:
    """The moments that params of a group have, with their numbers in the ABI."""
    has_none = abi.ALGORITHMS[algorithm].needs_momentum and group["momentum"] == 0
    return {} if has_none else MOMENTS[algorithm]
