"""Compared: finds written params by comparing every element with its master."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from . import abi
from .bound import Addresses
from .master_bits import are_rounded
from .registered import Slot
from .steps import Steps
from .state_memory import StateMemory
from .tensors import in_memory_order, tensor_at

# How many elements of small params are compared at once. Two copies of them fit in the CPU's cache.
BLOCK_ELEMENTS = 1 << 17
STATE_ALIGNMENT_BYTES = 64  # the state of each param starts at a multiple of this

_compare_memory = ctypes.CDLL(None).memcmp
_compare_memory.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]


class Block:
    """Small params whose masters are neighbours in memory, so that one call rounds all of them."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.masters: list[Tensor] = []
        self._gaps: list[int] = []  # elements of padding in front of each master
        self._all_masters = torch.empty(0, dtype=torch.float32, device="cpu")  # with the padding
        # The memory of each param, and padding between them as between the masters.
        self._params: list[bytes | ctypes.Array[ctypes.c_char]] = []
        self._rounded = torch.empty(0, dtype=torch.bfloat16, device="cpu")  # room for _all_masters
        self._rounded_address = 0

    def take(self, slot: Slot, master: Tensor) -> bool:
        """Adds a param to the block if its master directly follows the last one. Returns whether it did."""
        gap = 0
        if self.slots:
            last = self.masters[-1]
            gap_bytes = master.data_ptr() - (last.data_ptr() + last.nbytes)
            gap = gap_bytes // master.element_size()
            follows = 0 <= gap_bytes < STATE_ALIGNMENT_BYTES and slot.dtype == self.slots[0].dtype
            if not follows or len(self._all_masters) + gap + slot.count > BLOCK_ELEMENTS:
                return False
        self.slots.append(slot)
        self.masters.append(master)
        self._gaps.append(gap)
        count, first = len(self._all_masters) + gap + slot.count, self.masters[0]
        self._all_masters = tensor_at(
            first.data_ptr(), count, torch.float32, first.device, self.masters
        )
        return True

    def find_params(self, addresses: Addresses) -> None:
        """Looks up the addresses of the params."""
        self._params = []
        for slot, gap in zip(self.slots, self._gaps):
            if gap > 0:
                self._params.append(bytes(2 * gap))  # the padding is zero: the library never writes it
            memory = (ctypes.c_char * slot.bytes).from_address(addresses.params[slot.id])
            self._params.append(memory)

    def use_scratch(self, scratch: Tensor) -> None:
        """Gives the block memory to round its masters into. Blocks may share it."""
        self._rounded = scratch.view(self.slots[0].dtype)[: len(self._all_masters)]
        self._rounded_address = self._rounded.data_ptr()

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
        self._blocks: list[Block] = []
        self._large: list[tuple[Slot, Tensor]] = []  # with their masters

    def begin(self) -> None:
        """Starts: commit has just made the masters. Their views are kept, because asking for a view waits
        for a running save."""
        for slot in self._slots:
            master = self._state_memory.read(slot, abi.OFFLOAD_STATE_MASTER)
            if slot.count > BLOCK_ELEMENTS:
                self._large.append((slot, master))
            elif not self._blocks or not self._blocks[-1].take(slot, master):
                self._blocks.append(Block())
                self._blocks[-1].take(slot, master)
        if self._blocks:
            scratch = torch.empty(BLOCK_ELEMENTS, dtype=torch.int16, device="cpu")
            for block in self._blocks:
                block.use_scratch(scratch)

    def note(self) -> None:
        """Does nothing: written() needs to remember nothing."""

    def forget(self) -> None:
        """Does nothing: written() compares all params anyway."""

    def forget_one(self, slot: Slot) -> None:
        """Does nothing, for the same reason."""

    def written(self, among: set[Slot] | None = None) -> list[Slot]:
        """The params that differ from their masters, rounded."""
        self._steps.wait()
        if self._moves != self._addresses.moves:
            self._moves = self._addresses.moves
            for block in self._blocks:
                block.find_params(self._addresses)
        blocks, large = self._blocks, self._large
        if among is not None:
            blocks = [block for block in blocks if not among.isdisjoint(block.slots)]
            large = [both for both in large if both[0] in among]
        differing = [block for block in blocks if not block.is_rounded()]
        suspects = [both for block in differing for both in zip(block.slots, block.masters)]
        return [
            slot
            for slot, master in suspects + large
            if not are_rounded(master, in_memory_order(slot.bound))
        ]
