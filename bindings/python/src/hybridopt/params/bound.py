"""Bound: the addresses of params and gradients that the library knows."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import abi
from ..traps import away
from ..traps.offloaded import is_offloaded
from .registered import Registered, Slot
from .slot_batch import BATCH_SLOTS, SlotBatch, slot_batches_of
from .tensors import local, version_of

# offload_binding_t in words of 8 bytes: struct_size and the param's id, then data, then grad.
WORDS = ctypes.sizeof(abi.offload_binding_t) // 8
DATA, GRAD = 1, 2


class Addresses:
    """The addresses that the library knows, by slot. A param without a gradient has 0 there."""

    def __init__(self, handle: abi.Optimizer, params: list[int]) -> None:
        self._handle = handle
        self.params = list(params)
        self.grads = [0] * len(params)
        self.moves = 0  # counts changes of params' addresses
        self._being_told: set[int] = set()  # more than nothing after an exception has ended tell()
        # The structs are allocated once and filled word by word, which is faster than field by field.
        self._structs = abi.array_of(abi.offload_binding_t, len(params))
        words = ctypes.c_uint64 * (WORDS * len(self._structs))
        self._words: Any = words.from_buffer(self._structs)
        for id, struct in enumerate(self._structs):
            struct.param = id
        self._heads = self._words[::WORDS]  # by slot

    def changed(self, params: list[int], grads: list[int]) -> list[int]:
        """The ids of the slots whose address here differs from the one that the library knows."""
        if params == self.params and grads == self.grads and not self._being_told:
            return []
        both = zip(params, self.params, grads, self.grads)
        differ = [id for id, (param, p, grad, g) in enumerate(both) if param != p or grad != g]
        return sorted({*differ, *self._being_told}) if self._being_told else differ

    def tell(self, ids: list[int], params: list[int], grads: list[int]) -> None:
        """Binds the params and gradients of these slots to new addresses."""
        self._being_told.update(ids)
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
        self._being_told.difference_update(ids)


@dataclass
class Leaving:
    """Gradients that are being taken off their params."""

    gradients: dict[Slot, tuple[Tensor, int]]  # and their versions
    sent: dict[Slot, Tensor]  # those that go to the host, as the library reads them
    kept: dict[Slot, Tensor]  # those that stay on the device
    are_added: bool = False  # on the host, to those of earlier backward passes
    have_left: bool = False  # the library has all that are sent

    @classmethod
    def of(cls, gradients: dict[Slot, Tensor], sent: dict[Slot, Tensor], kept: dict[Slot, Tensor]) -> Leaving:
        return cls({slot: (grad, version_of(local(grad))) for slot, grad in gradients.items()}, sent, kept)


class Bound:
    """Binds params, and their gradients for the next step."""

    def __init__(self, handle: abi.Optimizer, registered: Registered) -> None:
        self._slots = slots = registered.slots
        self._params = [slot.param for slot in slots]
        self._copies = [(slot.param, slot.copy) for slot in slots if slot.copy is not None]
        self.are_copies_filled = False  # since a call has begun that an exception may cut off
        self._batches = slot_batches_of(slots, registered.addresses)
        self._has_looked = False  # look() has run, and nothing has been bound since
        self.addresses = Addresses(handle, registered.addresses)
        # The slots that had a gradient at the last bind(). If other slots have one, it is a new list.
        self.active: list[Slot] = []
        self._are_others_active = False  # gradients on the host have changed which slots are active
        # Slots whose gradient the library holds on the host; True if a hook moved it there.
        self.hosted: dict[Slot, bool] = {}
        # Gradients that hooks have taken off their params, and that the next step reads where they are.
        self.kept: dict[Slot, Tensor] = {}
        # Slots whose gradients have been taken since the last zero_grad(). In torch they would have one still.
        self.had_gradients: dict[Slot, None] = {}
        # What a move of gradients is at. An exception such as KeyboardInterrupt may end it at any place, and the next call
        # of the optimizer undoes or finishes it (moves.finish_gradients()).
        self.leaving: Leaving | None = None
        self.arriving: dict[Slot, Tensor] | None = None

    # ------------------------------------------------------------------------------- binding --

    def look(self) -> list[Slot]:
        """Finds the addresses for the bind() that follows. Returns the slots whose gradient may have another
        dtype than before, or for which autograd may make one of another dtype."""
        self._has_looked = True
        return [slot for batch in self._batches for slot in batch.look()]

    def bind(self) -> bool:
        """Binds the present params and gradients. Returns False if there is no gradient."""
        if away.keepers:
            away.bring_back(self._params)  # including params that were trained and are now frozen
        self._finish_look()
        grads: list[int] = []
        for batch in self._batches:
            batch.find_params()
            batch.find_gradients()
            grads += batch.grads
        self._put_kept(grads)
        self._tell_changed(grads)
        if self._are_others_active or any(batch.has_changed for batch in self._batches):
            found = (grad for batch in self._batches for grad in batch.usable)
            both = zip(self._slots, found)
            self.active = [slot for slot, grad in both if grad is not None or self.has_taken(slot)]
            self._are_others_active = bool(self.hosted or self.kept)
        return bool(self.active)

    def bind_params(self) -> None:
        """Binds the present params. A step or a move binds gradients itself before it reads them."""
        away.bring_back(self._params)
        self._finish_look()
        for batch in self._batches:
            batch.find_params()
        self.release()
        self._tell_changed(None)

    def bind_present(self, slot: Slot) -> None:
        """Binds the params for a call that uses the memory of this one before the next bind(). If it has moved, others may
        have moved too, one to where another was. Offloaded params have no address."""
        if is_offloaded(slot.param):
            return
        away.bring_back([slot.param])
        if self._batch_of(slot).address_of(slot) != self.addresses.params[slot.id]:
            self.bind_params()

    def release(self) -> None:
        """Drops the references to the gradients that look() or bind() has found."""
        self._has_looked = False
        for batch in self._batches:
            batch.release()

    def rebind_params(self) -> None:
        """Binds all params again after a reload: the library dropped their addresses at the offload."""
        addresses = [self._batch_of(slot).address_of(slot) for slot in self._slots]
        self.addresses.tell(list(range(len(addresses))), addresses, [0] * len(addresses))

    def bind_gradients(self, gradients: dict[Slot, Tensor]) -> None:
        """Binds some params and their gradients, which must be in a form that the library can read. No param is
        read. If a stash has put some params aside, all params keep the addresses that the library knows, because
        another param may now have the memory of one of these addresses. Before a step all params are on the device,
        and bound."""
        ids = [slot.id for slot in gradients]
        if any(map(away.has_been_away, self._params)):
            params = [self.addresses.params[id] for id in ids]
        else:
            params = [self._batch_of(slot).address_of(slot) for slot in gradients]
        self.addresses.tell(ids, params, [grad.data_ptr() for grad in gradients.values()])

    def _put_kept(self, grads: list[int]) -> None:
        for slot in (*self.hosted, *self.kept):
            if grads[slot.id] != 0:
                self.refuse_two_gradients(slot)
        for slot, grad in self.kept.items():
            grads[slot.id] = grad.data_ptr()

    def refuse_two_gradients(self, slot: Slot) -> None:
        raise abi.InvalidStateError(
            f"the gradient of parameter {slot.name!r} has been taken off it by hook_gradients() or offload(grads=True), and "
            "there is another one now; drop both with zero_grad(), or drop the one that is with the parameter by setting "
            "its grad to None"
        )

    def _finish_look(self) -> None:
        if not self._has_looked:
            self.look()
        self._has_looked = False

    def _batch_of(self, slot: Slot) -> SlotBatch:
        return self._batches[slot.id // BATCH_SLOTS]

    def _tell_changed(self, grads: list[int] | None) -> None:
        """Binds the params and gradients whose addresses differ from those that the library knows. Without `grads`
        it also unbinds the gradients of params that have moved."""
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
        """Notes that the library holds the gradients of these slots on the host, and so has dropped their
        addresses."""
        for slot in slots:
            self.hosted[slot] = hooked
            self.had_gradients[slot] = None
            self.addresses.grads[slot.id] = 0
        self._are_others_active = True

    def note_dropped(self, slots: Iterable[Slot]) -> None:
        """Notes that the library holds no gradient of these slots, and knows no address of one."""
        for slot in slots:
            self.hosted.pop(slot, None)
            self.addresses.grads[slot.id] = 0
        self._are_others_active = True

    def note_kept(self, gradients: dict[Slot, Tensor]) -> None:
        """Notes gradients that are no longer at their params; the next step reads them where they are."""
        self.kept.update(gradients)
        self.had_gradients.update(dict.fromkeys(gradients))
        self._are_others_active = True

    def drop_kept(self) -> None:
        """Drops the gradients of note_kept(), and makes the library drop their addresses."""
        if self.kept:
            ids = [slot.id for slot in self.kept]
            self.addresses.tell(ids, [self.addresses.params[id] for id in ids], [0] * len(ids))
            self.kept.clear()

    @property
    def is_moving(self) -> bool:
        """Whether an exception has cut off a move of gradients."""
        return self.leaving is not None or self.arriving is not None

    def params_of_taken(self) -> list[Tensor]:
        """The params whose gradients for the next step are not with them any more."""
        return [slot.param for slot in (*self.hosted, *self.kept)]

    def has_taken(self, slot: Slot) -> bool:
        """Whether the slot's gradient for the next step has been taken off its param."""
        return slot in self.hosted or slot in self.kept

    def gradients(self) -> list[Tensor | None]:
        """The gradients of the active slots; None where the library holds the gradient on the host."""
        usable = [gradient for batch in self._batches for gradient in batch.usable]
        return [self.kept.get(slot, usable[slot.id]) for slot in self.active]

    def note_queued(self) -> None:
        """Notes that a queued step uses up the gradients that were taken off their params."""
        for slot in self.active if self.hosted else ():
            self.hosted.pop(slot, None)
        self.drop_kept()

    def note_written_in_place(self, slots: list[Slot]) -> None:
        """Increments the versions of params that the library writes or has written, as any operation in
        place does, so that autograd notices. It leaves out params with gaps: take_copies() writes those."""
        if len(slots) == len(self._slots) and not self._copies:
            torch.autograd.graph.increment_version(self._params)
            return
        torch.autograd.graph.increment_version([slot.param for slot in slots if slot.copy is None])

    def take_copies(self, slots: list[Slot]) -> None:
        """For params with gaps: copies the values that the library has written to the dense copies back to the
        params."""
        if self._copies:
            for slot in slots:
                if slot.copy is not None:
                    local(slot.param).copy_(slot.copy)

    def fill_copies(self) -> None:
        """Copies params with gaps to the dense copies that the library updates."""
        for param, copy in self._copies:
            copy.copy_(local(param))
        self.are_copies_filled = True

    def storages(self) -> list[torch.UntypedStorage]:
        """The storages of bound tensors. A save or load needs them until it has ended."""
        return [slot.bound.untyped_storage() for slot in self._slots]
