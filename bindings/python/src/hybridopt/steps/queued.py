"""Steps: queued steps whose results have not been taken yet."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import abi
from ..params.registered import Slot

REMEMBERED_STEPS = 64  # by offload_optimizer_step_result


class Steps:
    def __init__(self, handle: abi.Optimizer) -> None:
        self._handle = handle
        self._unsettled: list[tuple[int, list[Slot]]] = []  # tickets, and the slots of each step
        self._known: dict[int, abi.offload_step_result_t] = {}  # results of some of them, by ticket
        self._read: dict[int, list[Tensor]] = {}  # gradients that steps read, kept alive here
        self.skipped_gradients: dict[Slot, Tensor | None] = {}  # of a skipped step, until it has been reported

    def __len__(self) -> int:
        return len(self._unsettled)

    @property
    def is_full(self) -> bool:
        """Whether the next step would make the library drop a result that has not been taken."""
        return len(self._unsettled) == REMEMBERED_STEPS

    def queue(self, slots: list[Slot], options: dict[str, Any], gradients: list[Tensor]) -> int:
        """Queues a step and gives its ticket. Until result() or take() the gradients are kept alive."""
        ticket = self._handle.step(**options)
        self._unsettled.append((ticket, slots))  # now, since Ctrl-C may end the wait for it
        if gradients:
            self._read[ticket] = gradients
        return ticket

    def result(self, ticket: int) -> abi.offload_step_result_t:
        """Waits for the step that was queued last and returns its result."""
        try:
            self._handle.wait(ticket)  # for this ticket alone: a failed save raises from its own ticket
        except abi.HybridoptError:
            self.forget_failed()
            raise
        self._read.pop(ticket, None)
        self._known[ticket] = self._handle.step_result(ticket)
        return self._known[ticket]

    def was_last_skipped(self) -> bool:
        """Whether the step that was queued last, which has ended, was skipped."""
        if not self._unsettled:
            return False
        ticket, _ = self._unsettled[-1]
        return bool((self._known.get(ticket) or self._handle.step_result(ticket)).skipped)

    def forget_failed(self) -> None:
        """Removes the step that was queued last, because it has failed."""
        ticket, _ = self._unsettled.pop()
        self._read.pop(ticket, None)

    def wait(self) -> None:
        """Waits for the queued steps, but not for saves."""
        if self._unsettled and self._unsettled[-1][0] not in self._known:
            self._handle.wait(self._unsettled[-1][0])

    def have_ended(self) -> bool:
        """Whether wait() would return at once. If there is an error, wait() raises it."""
        if not self._unsettled:
            return False
        try:
            self._handle.wait(self._unsettled[-1][0], timeout_ns=0)
        except abi.HybridoptError:
            return False
        return True

    def take(self) -> list[tuple[abi.offload_step_result_t, list[Slot]]]:
        """Waits for the queued steps, removes them, and returns their results and slots."""
        self.wait()
        steps, self._unsettled = self._unsettled, []
        known, self._known = self._known, {}
        self._read.clear()
        return [(known.get(ticket) or self._handle.step_result(ticket), slots) for ticket, slots in steps]
