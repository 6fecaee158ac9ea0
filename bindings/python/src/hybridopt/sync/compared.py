"""Compared: finds written params by comparing every element with its master."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .. import abi
from ..params.bound import Addresses
from ..params.registered import Slot
from ..params.tensors import in_memory_order, tensor_at
from ..state.master_bits import are_rounded
from ..state.state_memory import StateMemory
from ..steps.queued import Steps

# How many elements of small params are compared at once. Two copies of them fit in the CPU's cache.
BLOCK_ELEMENTS = 1 << 17
STATE_ALIGNMENT_BYTES = 64  # the state of each param starts at a multiple of this

_compare_memory = ctypes.CDLL(None).memcmp
_compare_memory.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]


class Block:
    """Small params whose masters are neighbours in memory, so that one call rounds all of them."""

    def __init__(self, slot: Slot, master: Tensor) -> None:
        self.slots = [slot]
        self._begins = [0]  # of their masters, in elements from the first one
        self._end = slot.count
        self._first_master = master
        self._all_masters = master  # with the padding between them
        # The memory of each param, and padding between them as between the masters.
        self._params: list[bytes | ctypes.Array[ctypes.c_char]] = []
        self._rounded = torch.empty(0, dtype=torch.bfloat16, device="cpu")  # room for _all_masters
        self._rounded_address = 0

    def take(self, slot: Slot, address: int) -> bool:
        """Adds a param to the block if its master, at this address, directly follows the last one. Returns
        whether it did."""
        begin = (address - self._first_master.data_ptr()) // 4
        follows = 0 <= 4 * (begin - self._end) < STATE_ALIGNMENT_BYTES
        if not follows or slot.dtype != self.slots[0].dtype or begin + slot.count > BLOCK_ELEMENTS:
            return False
        self.slots.append(slot)
        self._begins.append(begin)
        self._end = begin + slot.count
        return True

    def finish(self, scratch: Tensor) -> None:
        """Finds the memory of all masters, after the last take(). They are rounded into the scratch memory,
        which blocks may share."""
        first = self._first_master
        self._all_masters = tensor_at(
            first.data_ptr(), self._end, first.dtype, first.device, owner=first
        )
        self._rounded = scratch.view(self.slots[0].dtype)[: self._end]
        self._rounded_address = self._rounded.data_ptr()

    def find_params(self, addresses: Addresses) -> None:
        """Looks up the addresses of the params."""
        self._params = []
        end = 0
        for slot, begin in zip(self.slots, self._begins):
            if begin > end:
                self._params.append(bytes(2 * (begin - end)))  # the library never writes the padding
            memory = (ctypes.c_char * slot.bytes).from_address(addresses.params[slot.id])
            self._params.append(memory)
            end = begin + slot.count

    def with_masters(self) -> list[tuple[Slot, Tensor]]:
        both = zip(self.slots, self._begins)
        return [(slot, self._all_masters[begin : begin + slot.count]) for slot, begin in both]

    def is_rounded(self) -> bool:
        """Whether all params equal their masters, rounded."""
        self._rounded.copy_(self._all_masters)
        params = b"".join(self._params)
        return _compare_memory(params, self._rounded_address, len(params)) == 0


class Compared:
    """Any write to a param, by whatever means, makes it differ from its master, rounded. A step finds that
    itself for the params that it updates; this is for other params, for saves and for who looks at masters.
    The params are read at the addresses that the library knows, so they must be bound before each call."""

    steps_follow_params = True

    def __init__(
        self, slots: list[Slot], addresses: Addresses, state_memory: StateMemory, steps: Steps
    ) -> None:
        self._slots = slots
        self._addresses = addresses
        self._state_memory = state_memory
        self._steps = steps
        self._moves = -1  # of the addresses that the blocks have found
        self._has_found_masters = False
        self._blocks: list[Block] = []
        self._large: list[tuple[Slot, Tensor]] = []  # with their masters

    def begin(self) -> None:
        """Does nothing: most trainings never call written()."""

    def find_masters(self) -> None:
        """Finds where the masters are, once: asking for a view waits for queued work, and a running save must
        not be waited for. Before the first save written() is called."""
        if self._has_found_masters:
            return
        self._state_memory.drain()
        blocks: list[Block] = []
        large: list[tuple[Slot, Tensor]] = []
        for slot in self._slots:
            if slot.count > BLOCK_ELEMENTS:
                large.append((slot, self._master_of(slot)))
                continue
            view = self._state_memory.view_of(slot, abi.OFFLOAD_STATE_MASTER)
            if not blocks or not blocks[-1].take(slot, view.host_data or 0):
                blocks.append(Block(slot, self._master_of(slot)))
        scratch = torch.empty(BLOCK_ELEMENTS, dtype=torch.int16, device="cpu")
        for block in blocks:
            block.finish(scratch)
        self._blocks, self._large, self._has_found_masters = blocks, large, True

    def _master_of(self, slot: Slot) -> Tensor:
        return self._state_memory.read(slot, abi.OFFLOAD_STATE_MASTER)

    def note(self) -> None:
        """Does nothing: written() needs to remember nothing."""

    def forget(self) -> None:
        """Does nothing: written() compares all params anyway."""

    def forget_one(self, slot: Slot) -> None:
        """Does nothing, for the same reason."""

    def written(self, among: set[Slot] | None = None) -> list[Slot]:
        """The params that differ from their masters, rounded."""
        self._steps.wait()
        self.find_masters()
        if self._moves != self._addresses.moves:
            self._moves = self._addresses.moves
            for block in self._blocks:
                block.find_params(self._addresses)
        blocks, large = self._blocks, self._large
        if among is not None:
            blocks = [block for block in blocks if not among.isdisjoint(block.slots)]
            large = [both for both in large if both[0] in among]
        suspects = [
            both for block in blocks if not block.is_rounded() for both in block.with_masters()
        ]
        return [
            slot
            for slot, master in suspects + large
            if not are_rounded(master, in_memory_order(slot.bound))
        ]
