"""Chooses how much of the state is on the device: a given fraction, as much as a budget of bytes allows, or
as much as the device has left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import abi
from ..base.checks import is_number, is_whole, is_word, shown
from ..base.units import readable

if TYPE_CHECKING:
    from ..base.device_memory import DeviceMemory

AUTO = "auto"
DEFAULT_HEADROOM = 0.1  # of the device
OBSERVED_STEPS = 2
# The free memory of a device may not be usable in one piece: after a failure try with less.
SMALLER, TRIES = 0.75, 5


@dataclass(frozen=True)
class Placement:
    offload_fraction: float  # of the state's elements, on the host
    reason: str

    @property
    def device_fraction(self) -> float:
        return 1.0 - self.offload_fraction


def check(
    offload_fraction: float | str,
    device_budget_bytes: int | None,
    device_headroom: float | None = None,
) -> None:
    """Raises if the options are invalid or contradict each other."""
    is_auto = is_word(offload_fraction, AUTO)
    if device_headroom is not None:
        if not is_auto or device_budget_bytes is not None:
            raise ValueError(
                f"device_headroom={shown(device_headroom)} is for offload_fraction='auto' without "
                f"device_budget_bytes, got offload_fraction={offload_fraction!r} and "
                f"device_budget_bytes={device_budget_bytes!r}; leave device_headroom out"
            )
        if not is_number(device_headroom) or not 0.0 <= device_headroom < 1.0:
            raise ValueError(
                f"Invalid device_headroom: {shown(device_headroom)}, expected the share of the device that is to "
                "stay free, from 0.0 to below 1.0"
            )
    if is_auto:
        if device_budget_bytes is not None and not is_whole(device_budget_bytes, 0, 1 << 64):
            raise ValueError(
                f"offload_fraction='auto' with device_budget_bytes={shown(device_budget_bytes)}, expected "
                "how many bytes of the device optimizer state may take, or None for what the device has left"
            )
        return
    check_fraction(offload_fraction)
    if device_budget_bytes is not None:
        raise ValueError(
            f"device_budget_bytes={shown(device_budget_bytes)} with offload_fraction={offload_fraction}: "
            "the fraction decides already; leave one of them out, or set offload_fraction='auto'"
        )


def check_fraction(offload_fraction: float | str) -> None:
    if not is_number(offload_fraction) or not 0.0 <= offload_fraction <= 1.0:  # type: ignore[operator]
        raise ValueError(
            f"Invalid offload_fraction: {shown(offload_fraction)}, expected 0.0 (all state on the device) "
            "to 1.0 (all on the host), or 'auto' where the optimizer is made"
        )


def chosen(offload_fraction: float | str, on_host: bool) -> Placement:
    """The placement if the caller has chosen the fraction, or if all params are in host memory."""
    if on_host:
        return Placement(1.0, "the parameters are in host memory, so is all of their state")
    return Placement(float(offload_fraction), "as given")


def choose(
    offload_fraction: float | str,
    device_budget_bytes: int | None,
    on_host: bool,
    plan_of: Callable[[float], abi.offload_plan_t],
) -> Placement:
    """The placement for these options. `plan_of` returns the plan for a device fraction."""
    if on_host or offload_fraction != AUTO:
        return chosen(offload_fraction, on_host)
    if device_budget_bytes is None:
        return Placement(
            1.0, f"all state is on the host until {OBSERVED_STEPS} steps have shown what the device has left"
        )
    least, most = plan_of(0.0).device_bytes, plan_of(1.0).device_bytes
    if most <= device_budget_bytes:
        return Placement(
            0.0, f"all state is {readable(most)} on the device, the budget is "
            f"{readable(device_budget_bytes)}"
        )
    if least >= device_budget_bytes:
        return Placement(
            1.0, f"even without state the device holds {readable(least)}, the budget is "
            f"{readable(device_budget_bytes)}"
        )
    fraction = (device_budget_bytes - least) / (most - least)
    while (needed := plan_of(fraction).device_bytes) > device_budget_bytes:
        excess = (needed - device_budget_bytes) / (most - least)
        fraction = max(0.0, fraction - max(excess, 1e-6))
    return Placement(
        1.0 - fraction, f"{readable(needed)} on the device of {readable(most)} for all state; the "
        f"budget is {readable(device_budget_bytes)}"
    )


class Leftover:
    """offload_fraction="auto" without a budget: all state is on the host until two steps have shown how much device
    memory other things need. Then as much of the state goes to the device as its free memory allows, less the
    headroom. If torch runs out of memory after that, all state goes back to the host for good."""

    def __init__(self, memory: DeviceMemory, headroom: float) -> None:
        self._memory = memory
        self._headroom = headroom
        self._steps = 0
        self._has_taken = False
        self._out_of_memory_count = 0  # torch's count when state was moved to the device

    def after_step(
        self, plan_of: Callable[[float], abi.offload_plan_t], move: Callable[[float], None]
    ) -> Placement | None:
        """Call this after each step. After the last observed one it calls `move` with a device fraction, to
        move state to the device, and returns the new placement. Otherwise it returns None."""
        self._steps += 1
        if self._steps != OBSERVED_STEPS:
            return None
        left = self._memory.left_bytes()
        headroom = int(self._headroom * self._memory.total_bytes())
        why = (
            f"after {OBSERVED_STEPS} steps the device had {readable(left)} left, of which "
            f"{readable(headroom)} are headroom"
        )
        usable = left - headroom
        for _ in range(TRIES):
            if usable <= 0:
                break
            budget = plan_of(0.0).device_bytes + int(usable)
            choice = choose(AUTO, budget, False, plan_of)
            try:
                move(choice.device_fraction)
            except abi.OutOfDeviceMemoryError:
                usable = int(usable * SMALLER)
                continue
            self._has_taken = choice.offload_fraction < 1.0
            self._out_of_memory_count = self._memory.out_of_memory_count()
            return Placement(choice.offload_fraction, f"{why}; {choice.reason}")
        return Placement(1.0, f"{why}; that is no room for state")

    def has_run_out(self) -> bool:
        """Whether torch has run out of memory since state was moved to the device."""
        return self._has_taken and self._memory.out_of_memory_count() > self._out_of_memory_count

    def give_back(self, move: Callable[[float], None]) -> Placement:
        """Moves all state back to the host."""
        move(0.0)
        self._has_taken = False
        return Placement(1.0, "torch ran out of device memory, and all state went back to the host")
