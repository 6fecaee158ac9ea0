"""Masters: makes masters follow after other code has written params, and reads masters as fp32 numbers in
whatever layout they are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import abi
from ..base.modes import current_stream, is_in_backward
from ..params.registered import MASTER, MASTER_LOW, Slot
from ..params.tensors import arranged, in_memory_order
from ..state import master_bits
from ..state.state_memory import StateMemory
from ..traps import away
from .in_sync import InSync


class Masters:
    def __init__(
        self,
        handle: abi.Optimizer,
        device: torch.device,
        slots: list[Slot],
        state_memory: StateMemory,
        in_sync: InSync,
    ) -> None:
        self._handle = handle
        self._device = device
        self._slots = slots
        self._state_memory = state_memory
        self._in_sync = in_sync
        self.written_before_offload: set[Slot] = set()
        # Adopted in a backward pass, which must not see the write of a param that these masters need.
        self.put_off: dict[Slot, Tensor] = {}  # what fit() has to write

    def refresh(self, among: set[Slot] | None = None) -> int:
        """Makes the masters of params that other code has written (for example by loading weights) follow these
        params. Params outside of `among` may be left out. Returns the ticket, or 0 if there was nothing to do."""
        written = self._in_sync.written(among)
        if not written:
            return 0
        ticket = self._refresh(written)
        self._in_sync.note()
        return ticket

    def note_offload(self) -> None:
        """Notes, before params are offloaded, which of them have been written. An offload and a reload alone
        must not make params count as written."""
        self.written_before_offload = set(self._in_sync.written())

    def note_reload(self) -> None:
        """Notes that params have been reloaded with the bits that they had, perhaps to other memory."""
        self._in_sync.note()
        for slot in self.written_before_offload:
            self._in_sync.forget_one(slot)
        self.written_before_offload = set()

    def _refresh(self, slots: list[Slot]) -> int:
        params = [slot.id for slot in slots]
        return self._handle.refresh_masters(params=params, streams=[current_stream(self._device)])

    def drop_low_halves(self) -> None:
        """Sets the lower halves of split masters so that the masters equal their params. A write to such a param
        changes the upper half of the master itself, so the lower half no longer belongs to it."""
        self._refresh([slot for slot in self._slots if slot.split])
        self._handle.drain()

    def read(self, slot: Slot) -> Tensor:
        """Masters in fp32, on the host, in memory order. It is a view where they are stored in that form."""
        self._handle.drain()
        if slot.split:
            low = self._state_memory.read(slot, abi.OFFLOAD_STATE_MASTER_LOW)
            return master_bits.joined(_elements(slot).cpu(), low)
        if MASTER in slot.kinds:
            return self._state_memory.read(slot, abi.OFFLOAD_STATE_MASTER)
        return _elements(slot).cpu()

    def has_low_bits(self, slot: Slot) -> bool:
        """Whether the master has bits that the param does not have."""
        if slot.dtype == torch.float32:
            return False
        return not torch.equal(self.read(slot), _elements(slot).cpu().float())

    def adopt(
        self, slot: Slot, entry: dict[str, Any], part_of: Callable[[Tensor], Tensor]
    ) -> None:
        """Takes masters, in any layout, from an entry of `state` that was loaded or assigned. `part_of`
        cuts out the part of this process. If the entry has none, fp32 masters follow the param in the next
        step."""
        master, low = entry.get(MASTER), entry.get(MASTER_LOW)
        self.put_off.pop(slot, None)
        if slot.split:
            if isinstance(low, Tensor):
                low = master_bits.as_halves(part_of(low))
                if low.dtype == slot.low_dtype:
                    self._state_memory.write(slot, abi.OFFLOAD_STATE_MASTER_LOW, low)
                else:
                    self._split(slot, self._joined(slot, low))
            elif isinstance(master, Tensor):
                self._split(slot, part_of(master))
            else:
                zeros = torch.zeros((), dtype=slot.low_dtype, device="cpu").expand(slot.shape)
                self._state_memory.write(slot, abi.OFFLOAD_STATE_MASTER_LOW, zeros)
        elif slot.dtype != torch.float32 and isinstance(master, Tensor):
            self._state_memory.write(slot, abi.OFFLOAD_STATE_MASTER, part_of(master))
        elif slot.dtype == torch.bfloat16 and isinstance(low, Tensor):
            whole = self._joined(slot, master_bits.as_halves(part_of(low)))
            self._state_memory.write(slot, abi.OFFLOAD_STATE_MASTER, whole)
        for key in (MASTER, MASTER_LOW):
            if key not in slot.kinds:
                entry.pop(key, None)
        self._in_sync.forget_one(slot)  # the param may differ from these masters

    def _joined(self, slot: Slot, low: Tensor) -> Tensor:
        flat = in_memory_order(arranged(low, low.dtype, slot.stride)).cpu()
        return slot.arrange(master_bits.joined(_elements(slot).cpu(), flat))

    def _split(self, slot: Slot, master: Tensor) -> None:
        assert slot.low_dtype is not None
        flat = in_memory_order(arranged(master, torch.float32, slot.stride)).cpu()
        low, fitting = master_bits.split(flat, _elements(slot).cpu(), slot.low_dtype)
        if fitting is not None and is_in_backward():
            self.put_off[slot] = flat.clone()
        elif fitting is not None:
            slot.bound.copy_(slot.arrange(fitting))
        self._state_memory.write(slot, abi.OFFLOAD_STATE_MASTER_LOW, slot.arrange(low))

    def fit(self) -> None:
        """Writes the params that adopt() could not write in a backward pass. Not to be called in one."""
        for slot in list(self.put_off):
            self._split(slot, slot.arrange(self.put_off[slot]))
            del self.put_off[slot]


def _elements(slot: Slot) -> Tensor:
    """The elements of a param in the order of memory, even if a stash has put the param aside."""
    away.bring_back([slot.param])
    return in_memory_order(slot.bound)
