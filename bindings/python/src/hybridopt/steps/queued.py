"""Steps: queued steps whose results have not been taken yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import abi
from ..params.registered import Slot

REMEMBERED_STEPS = 64  # by offload_optimizer_step_result


class Steps:
    def __init__(self, handle: abi.Optimizer) -> None:
        self._handle = handle
        self._unsettled: deque[tuple[int, list[Slot]]] = deque()  # tickets, and the slots of each step
        # The step that queue() is about to note: the library writes the ticket, even if an exception ends the call.
        self._newest: tuple[abi.offload_ticket_t, list[Slot]] = abi.offload_ticket_t(), []
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
        """Queues a step and gives its ticket. Until result() or ended() the gradients are kept alive."""
        self.note_cut_off()
        self._newest = abi.offload_ticket_t(), slots
        ticket = self._handle.step(self._newest[0], **options)
        self._unsettled.append((ticket, slots))  # now, since Ctrl-C may end the wait for it
        self._newest = abi.offload_ticket_t(), []
        if gradients:
            self._read[ticket] = gradients
        return ticket

    def note_cut_off(self) -> None:
        """Notes a step that the library has, if an exception has ended queue() before that was noted."""
        (newest, slots), self._newest = self._newest, (abi.offload_ticket_t(), [])
        if newest.value and all(ticket != newest.value for ticket, _ in self._unsettled):
            self._unsettled.append((newest.value, slots))

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

    def ended(self) -> list[tuple[abi.offload_step_result_t, list[Slot]]]:
        """Waits for the queued steps, and returns their results and slots. Each call of remove_first() then removes the
        first of them."""
        self.wait()
        self._read.clear()
        known, self._known = self._known, {}
        return [(known.get(ticket) or self._handle.step_result(ticket), slots) for ticket, slots in self._unsettled]

    @property
    def remove_first(self) -> Callable[[], Any]:
        return self._unsettled.popleft
