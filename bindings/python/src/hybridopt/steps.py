"""Steps that have been queued and whose results nobody has asked for yet."""

from __future__ import annotations

from typing import Any

from . import abi
from .registered import Slot

REMEMBERED_STEPS = 64  # by offload_optimizer_step_result


class Steps:
    def __init__(self, handle: abi.Optimizer) -> None:
        self._handle = handle
        self._unsettled: list[tuple[int, list[Slot]]] = []  # tickets, and who took part

    def __len__(self) -> int:
        return len(self._unsettled)

    @property
    def is_full(self) -> bool:
        """Whether the library would forget a result with the next step."""
        return len(self._unsettled) == REMEMBERED_STEPS

    def run(self, slots: list[Slot], options: dict[str, Any]) -> abi.offload_step_result_t:
        """Queues a step, waits for its end and gives its result."""
        ticket = self._handle.step(**options)
        self._unsettled.append((ticket, slots))  # also if Ctrl-C ends the wait
        try:
            self._handle.wait(ticket)  # not for all: a failed save is told to whoever waits for it
        except abi.HybridoptError:
            self._unsettled.pop()  # the step has not happened
            raise
        return self._handle.step_result(ticket)

    def wait(self) -> None:
        """Waits for the steps, and for no save."""
        if self._unsettled:
            self._handle.wait(self._unsettled[-1][0])

    def take(self) -> list[tuple[abi.offload_step_result_t, list[Slot]]]:
        """Waits for the steps and forgets them: their results, and who took part."""
        self.wait()
        steps, self._unsettled = self._unsettled, []
        return [(self._handle.step_result(ticket), slots) for ticket, slots in steps]
