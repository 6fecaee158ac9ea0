"""What is bound: where the library has been told that params and gradients are."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import abi
from .batch import BATCH_SLOTS, Batch, batches_of
from .registered import Slot
from .tensors import local

# offload_binding_t in words of 8 bytes: struct_size and the param's id, then data, then grad.
WORDS = ctypes.sizeof(abi.offload_binding_t) // 8
DATA, GRAD = 1, 2


class Addresses:
    """Addresses by slot. That of a gradient is 0 where there is none."""

    def __init__(self, handle: abi.Optimizer, params: list[int]) -> None:
        self._handle = handle
        self.params = params
        self.grads = [0] * len(params)
        self.moves = 0  # grows when the address of a param changes
        # The structs are kept and filled by words, which takes less time than by fields.
        self._structs = (abi.offload_binding_t * max(len(params), 1))()
        words = ctypes.c_uint64 * (WORDS * len(self._structs))
        self._words: Any = words.from_buffer(self._structs)
        for id, struct in enumerate(self._structs):
            struct.struct_size, struct.param = ctypes.sizeof(struct), id
        self._heads = self._words[::WORDS]  # by slot

    def changed(self, params: list[int], grads: list[int]) -> list[int]:
        """The slots, as places in these lists, whose addresses the library does not know."""
        if params == self.params and grads == self.grads:
            return []
        both = zip(params, self.params, grads, self.grads)
        return [id for id, (param, p, grad, g) in enumerate(both) if param != p or grad != g]

    def tell(self, ids: list[int], params: list[int], grads: list[int]) -> None:
        """Tells the library where the params and gradients of these slots are."""
        end = WORDS * len(ids)
        self._words[:end:WORDS] = [self._heads[id] for id in ids]
        self._words[DATA:end:WORDS] = params
        self._words[GRAD:end:WORDS] = grads
        self._handle.bind(self._structs, len(ids))
        for id, param, grad in zip(ids, params, grads):
            self.grads[id] = grad
            if param != self.params[id]:
                self.params[id] = param
                self.moves += 1


class Bound:
    """Params, and their gradients for the next step."""

    def __init__(self, handle: abi.Optimizer, slots: list[Slot]) -> None:
        self._slots = slots
        self._params = [slot.param for slot in slots]
        self._copies = [(slot.param, slot.copy) for slot in slots if slot.copy is not None]
        self._batches = batches_of(slots)
        self._has_looked = False  # and nobody has bound what look() has found
        self.addresses = Addresses(handle, [slot.bound.data_ptr() for slot in slots])
        self.active: list[Slot] = []  # who has a gradient, as of bind(); another list if others have
        self._are_others_active = False  # or may be, whether gradients of torch have changed or not
        # Slots whose gradient the library holds on the host; True where a hook has brought it there.
        self.hosted: dict[Slot, bool] = {}

    # ------------------------------------------------------------------------------- binding --

    def look(self) -> list[Slot]:
        """Looks where params and gradients are, for the bind() that follows. Gives the slots whose
        gradients, or those that autograd will make, may have another dtype than before."""
        self._has_looked = True
        return [slot for batch in self._batches for slot in batch.look()]

    def bind(self) -> bool:
        """Tells the library where params and gradients are now; False if there is no gradient."""
        self._finish_look()
        grads: list[int] = []
        for batch in self._batches:
            batch.find_params()
            batch.find_gradients()
            grads += batch.grads
        self._tell_changed(grads)
        if self._are_others_active or any(batch.has_changed for batch in self._batches):
            found = (grad for batch in self._batches for grad in batch.usable)
            both = zip(self._slots, found)
            self.active = [slot for slot, grad in both if grad is not None or slot in self.hosted]
            self._are_others_active = bool(self.hosted)
        return bool(self.active)

    def bind_params(self) -> None:
        """The same for params alone: gradients are told before a step or a move reads them."""
        self._finish_look()
        for batch in self._batches:
            batch.find_params()
        self.release()
        self._tell_changed(None)

    def release(self) -> None:
        """Nobody needs the gradients that look() or bind() has found any more."""
        self._has_looked = False
        for batch in self._batches:
            batch.release()

    def rebind_params(self) -> None:
        """The same for params whose addresses the library has given up."""
        addresses = [self._batch_of(slot).address_of(slot) for slot in self._slots]
        self.addresses.tell(list(range(len(addresses))), addresses, [0] * len(addresses))

    def bind_gradients(self, gradients: dict[Slot, Tensor]) -> None:
        """Tells where some params and their gradients are, as the library reads these."""
        ids = [slot.id for slot in gradients]
        params = [self._batch_of(slot).address_of(slot) for slot in gradients]
        self.addresses.tell(ids, params, [grad.data_ptr() for grad in gradients.values()])

    def _finish_look(self) -> None:
        if not self._has_looked:
            self.look()
        self._has_looked = False

    def _batch_of(self, slot: Slot) -> Batch:
        return self._batches[slot.id // BATCH_SLOTS]

    def _tell_changed(self, grads: list[int] | None) -> None:
        """Tells the addresses that the library does not know yet. Without `grads` it forgets those of
        the params that have moved."""
        params: list[int] = []
        for batch in self._batches:
            params += batch.params
        changed = self.addresses.changed(params, grads or self.addresses.grads)
        if not changed:
            return
        for id in changed:
            if params[id] == 0 or (grads and grads[id] == 0):
                self._batch_of(self._slots[id]).check_memory(self._slots[id])
        told = [grads[id] for id in changed] if grads else [0] * len(changed)
        self.addresses.tell(changed, [params[id] for id in changed], told)

    # ---------------------------------------------------------------------- what has been done --

    def note_hosted(self, slots: Iterable[Slot], hooked: bool) -> None:
        """The library holds gradients on the host; it has given up the addresses for that."""
        for slot in slots:
            self.hosted[slot] = hooked
            self.addresses.grads[slot.id] = 0
        self._are_others_active = True

    def gradients(self) -> list[Tensor | None]:
        """What the next step reads of the active slots; None where the library has it."""
        usable = [gradient for batch in self._batches for gradient in batch.usable]
        return [usable[slot.id] for slot in self.active]

    def note_stepped(self) -> None:
        """A step has read the gradients, and used up those on the host."""
        self.release()
        if self.hosted:
            for slot in self.active:
                self.hosted.pop(slot, None)

    def note_written_in_place(self, slots: list[Slot]) -> None:
        """The library writes these params, or has written them: autograd hears of it, as of any
        operation in place. It does not hear of params with gaps, which take_copies() writes."""
        if len(slots) == len(self._slots) and not self._copies:
            torch.autograd.graph.increment_version(self._params)
            return
        torch.autograd.graph.increment_version([slot.param for slot in slots if slot.copy is None])

    def take_copies(self, slots: list[Slot]) -> None:
        """Params with gaps among these become what the library has made of their copies."""
        if self._copies:
            for slot in slots:
                if slot.copy is not None:
                    local(slot.param).copy_(slot.copy)

    def fill_copies(self) -> None:
        """Copies params with gaps to where the library steps them."""
        for param, copy in self._copies:
            copy.copy_(local(param))

    def storages(self) -> list[torch.UntypedStorage]:
        """The storages of what is bound, which must outlive a save or load."""
        return [slot.bound.untyped_storage() for slot in self._slots]
