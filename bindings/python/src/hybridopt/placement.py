"""How much of the state goes on the device: a fraction, or what fits a budget of bytes."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass

from . import abi

AUTO = "auto"


@dataclass(frozen=True)
class Placement:
    offload_fraction: float  # of the state's elements, on the host
    reason: str

    @property
    def device_fraction(self) -> float:
        return 1.0 - self.offload_fraction


def check(offload_fraction: float | str, device_budget_bytes: int | None) -> None:
    """Refuses what cannot be meant."""
    if offload_fraction == AUTO:
        if device_budget_bytes is None or device_budget_bytes < 0:
            raise ValueError(
                f"offload_fraction='auto' with device_budget_bytes={device_budget_bytes}, expected "
                "how many bytes of the device optimizer state may take"
            )
        return
    if not isinstance(offload_fraction, numbers.Real) or not 0.0 <= offload_fraction <= 1.0:
        raise ValueError(
            f"Invalid offload_fraction: {offload_fraction!r}, expected 0.0 (all state on the device) "
            "to 1.0 (all on the host), or 'auto'"
        )
    if device_budget_bytes is not None:
        raise ValueError(
            f"device_budget_bytes={device_budget_bytes} with offload_fraction={offload_fraction}: "
            "the fraction decides already; leave one of them out, or set offload_fraction='auto'"
        )


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def chosen(offload_fraction: float | str, on_host: bool) -> Placement:
    """Where the caller has decided, or there is nothing to decide."""
    if on_host:
        return Placement(1.0, "the parameters are in host memory, so is all of their state")
    return Placement(float(offload_fraction), "as given")


def choose(
    offload_fraction: float | str,
    device_budget_bytes: int | None,
    on_host: bool,
    plan_of: Callable[[float], abi.offload_plan_t],
) -> Placement:
    """`plan_of` gives the plan for a device fraction."""
    if on_host or offload_fraction != AUTO:
        return chosen(offload_fraction, on_host)
    assert device_budget_bytes is not None
    least, most = plan_of(0.0).device_bytes, plan_of(1.0).device_bytes
    if most <= device_budget_bytes:
        return Placement(
            0.0, f"all state is {mebibytes(most)} on the device, the budget is "
            f"{mebibytes(device_budget_bytes)}"
        )
    if least >= device_budget_bytes:
        return Placement(
            1.0, f"even without state the device holds {mebibytes(least)}, the budget is "
            f"{mebibytes(device_budget_bytes)}"
        )
    fraction = (device_budget_bytes - least) / (most - least)
    while (needed := plan_of(fraction).device_bytes) > device_budget_bytes:
        excess = (needed - device_budget_bytes) / (most - least)
        fraction = max(0.0, fraction - max(excess, 1e-6))
    return Placement(
        1.0 - fraction, f"{mebibytes(needed)} on the device of {mebibytes(most)} for all state; the "
        f"budget is {mebibytes(device_budget_bytes)}"
    )
