"""The moments of each algorithm, by the names that torch gives them."""

from __future__ import annotations

from typing import Any

from .. import abi

MOMENTS = {value: row.moments for value, row in abi.ALGORITHMS.items()}
# Of all algorithms, without their numbers.
MOMENTS_OF_ANY = {name: None for moments in MOMENTS.values() for name in moments}
# The algorithms whose state has a step count beside the moments, as in torch.
COUNTED = {value for value, row in abi.ALGORITHMS.items() if row.counts_steps}


def moments_of(group: dict[str, Any]) -> dict[str, int]:
    """The moments that params of a group have, with their numbers in the ABI. The group has the fields of
    offload_group_t."""
    row = abi.ALGORITHMS[group["algorithm"]]
    return {} if row.needs_momentum and group["momentum"] == 0 else row.moments
