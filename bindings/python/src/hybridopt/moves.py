"""What an engine does for phases and hooks: tells addresses, sends gradients, hides what is away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import abi
from .parts import Part
from .tensors import gradient_of, local

if TYPE_CHECKING:
    from .engine import Slot

MOVABLE = {
    "params": abi.OFFLOAD_MOVABLE_PARAMS,
    "grads": abi.OFFLOAD_MOVABLE_GRADS,
    "states": abi.OFFLOAD_MOVABLE_STATES,
    "accumulate": abi.OFFLOAD_MOVABLE_ACCUMULATE | abi.OFFLOAD_MOVABLE_GRADS,
}


class Moves(Part):
    """Part of Engine, which has the rest."""

    def can_move(self, name: str) -> bool:
        """Whether there is room on the host for "params", "grads" or "states"."""
        return bool(self.movable & MOVABLE[name])

    def tell(self, slot: Slot, grad_address: int) -> None:
        """Binds one param where it is now, with that gradient (0: none)."""
        self._tell_all([(slot, self._address_of(slot), grad_address)])

    def send_gradient(self, slot: Slot, grad: Tensor, flags: int) -> tuple[int, Tensor]:
        """Queues the copy of a gradient to the host: its ticket, and what must live until then."""
        usable = self._usable(slot, grad)
        self.tell(slot, usable.data_ptr())
        streams = [self.stream()]
        ticket = self.handle.offload_grads(params=[slot.id], flags=flags, streams=streams)
        slot.hosted, slot.hooked, slot.grad_address = True, False, 0  # offloading gives the address up
        return ticket, usable

    def send_gradients(self) -> None:
        """The same for all gradients there are, and waits for the end."""
        sent = []
        for slot in self.slots:
            grad = gradient_of(slot.param)
            if grad is not None:
                sent.append(self.send_gradient(slot, grad, 0))
        self.wait()

    def note_versions(self) -> None:
        """Before params are offloaded: moving them is no reason to compare them with masters."""
        self.notice_writes()
        for slot in self.slots:
            slot.in_sync = slot.version == local(slot.param)._version

    def restore_versions(self) -> None:
        for slot in self.slots:
            slot.version = local(slot.param)._version if slot.in_sync else None

    def hide_device_state(self, state: dict[Tensor, Any]) -> None:
        """Takes views of device memory that is about to go from where others find them."""
        for slot in self.slots:
            on_device = any(local(view).device.type != "cpu" for view in slot.views.values())
            all_on_host = not on_device and slot.split_count == 0
            if all_on_host or not (on_device or slot.copies):
                continue
            slot.hidden = slot.entry is not None
            if slot.hidden and dict.get(state, slot.param) is slot.entry:
                dict.pop(state, slot.param)
            slot.entry, slot.views, slot.copies = None, {}, {}
        self._slots_with_copies = [slot for slot in self._slots_with_copies if slot.copies]

    def show_device_state(self, state: dict[Tensor, Any]) -> None:
        """Puts views of the new memory there again."""
        for slot in self.slots:
            if slot.hidden:
                self.wait()
                self._publish(slot, state)
                slot.hidden = False

    def refuse_hidden(self) -> None:
        if any(slot.hidden for slot in self.slots):
            raise abi.InvalidStateError(
                "states are offloaded and cannot be looked at; call reload(states=True) first"
            )
