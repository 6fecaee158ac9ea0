"""Slot batches: each looks up the addresses of its params and gradients in a few calls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .registered import Slot
from .tensors import gradient_of, local

BATCH_SLOTS = 256  # this number of tensor objects stays in the CPU's cache while a batch reads them


def find_guards() -> Any:
    """The class with which torch.compile guards its graphs. It compares the whole form of a tensor in less
    time than Python takes to read one attribute. The class is private to torch; without it Forms reads the
    attributes."""
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return None
    return TensorGuards


TensorGuards = find_guards()
_grad_of = attrgetter("grad")


def gradients_of(params: list[Tensor]) -> list[Tensor | None]:
    """gradient_of() for many params. It takes less time than a call for each."""
    if any(map(hasattr, params, repeat("decoupled_grad"))):
        return list(map(gradient_of, params))
    return list(map(_grad_of, params))


def form_of(tensor: Tensor | None) -> tuple[Any, ...]:
    if tensor is None:
        return ()
    return (
        type(tensor),
        tensor.dtype,
        tensor.device,
        tensor.shape,
        tensor.stride(),
        tensor.layout,
        tensor.requires_grad,
    )


def renewed(known: list[int], now: list[int]) -> list[int]:
    """`known` if both lists have the same numbers, else `now`. Python compares lists of the same objects in
    a fraction of the time."""
    return known if known == now else now


class Forms:
    """The forms of some tensors: type, dtype, device, shape, strides. It keeps no reference to them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._count = len(tensors)
        self._guards: Any = None
        self._forms: list[tuple[Any, ...]] = []
        if TensorGuards is None:
            self._forms = [form_of(tensor) for tensor in tensors]
        elif tensors:
            self._guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)

    def match(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether these tensors have the same forms, in the same order. None never matches."""
        if len(tensors) != self._count:
            return False
        if self._guards is not None:
            return self._guards.check(*tensors)
        return self._forms == [form_of(tensor) for tensor in tensors]


class SlotBatch:
    """Consecutive slots, and the addresses of their params and gradients. If all tensors have the forms that
    they had at the look before, a batch reads all addresses at once. Otherwise it checks slot by slot."""

    def __init__(self, slots: list[Slot], addresses: list[int]) -> None:
        self._slots = slots
        self._begin = slots[0].id
        self._params = [slot.param for slot in slots]
        # Addresses in the order of slots; 0 where there is no gradient.
        self.params = addresses
        self.grads = [0] * len(slots)
        self.usable: list[Tensor | None] = []  # the gradients as the library reads them
        # From the last look(): torch's gradients, and the slots that must be checked one by one.
        self._found: list[Tensor | None] = []
        self._one_by_one = slots
        # From the last time that all slots were checked one by one: the slots that had a gradient; the places of slots
        # whose param and gradient the library reads directly, and their forms; the other slots; and the slots for which
        # autograd may make a gradient of another dtype although the forms are the same.
        self._had_gradient: list[bool] | None = None
        self._alike: list[int] = []
        self._forms = Forms([])
        self._others = slots
        self._all_alike = False  # every slot is in _alike and had a gradient
        self._unsure = slots

    @property
    def has_changed(self) -> bool:
        """Whether the last look() found that the set of params with a gradient may have changed."""
        return self._one_by_one is self._slots

    def look(self) -> list[Slot]:
        """Finds the present gradients. Returns the slots whose gradient may have another dtype than before, or for
        which autograd may make a gradient of another dtype."""
        self._found = found = gradients_of(self._params)
        if not self._is_as_before():
            self._one_by_one = self._slots
            return self._slots
        self._one_by_one = self._others
        if self._all_alike:
            self.params = renewed(self.params, list(map(Tensor.data_ptr, self._params)))
            # All params have a gradient: none is None.
            self.grads = renewed(self.grads, list(map(Tensor.data_ptr, found)))  # type: ignore[arg-type]
        else:
            for place in self._alike:
                grad = found[place]
                self.params[place] = self._params[place].data_ptr()
                self.grads[place] = 0 if grad is None else grad.data_ptr()
        return self._unsure

    def find_params(self) -> None:
        """Reads the addresses of the params. Call it after look()."""
        for slot in self._one_by_one:
            self.params[slot.id - self._begin] = self.address_of(slot)

    def find_gradients(self) -> None:
        """Reads the addresses of the gradients. Call it after find_params()."""
        self.usable = list(self._found)
        for slot in self._one_by_one:
            place = slot.id - self._begin
            grad = self._found[place]
            grad = None if grad is None else slot.usable_gradient(grad)
            self.usable[place] = grad
            self.grads[place] = 0 if grad is None else grad.data_ptr()
        if self.has_changed:
            self._note_forms()

    def release(self) -> None:
        """Drops the references to gradients."""
        self._found, self.usable = [], []

    def address_of(self, slot: Slot) -> int:
        """The address at which the library updates one param."""
        current = local(slot.param)
        address = current.data_ptr()
        if (
            address != self.params[slot.id - self._begin]
            or current.shape != slot.shape
            or current.stride() != slot.stride
            or current.dtype != slot.dtype
        ):
            slot.check_param(current)
        return address if slot.copy is None else slot.copy.data_ptr()

    def check_memory(self, slot: Slot) -> None:
        """Raises if the memory of the slot's param or gradient has been freed."""
        place = slot.id - self._begin
        if self.params[place] == 0:
            slot.check_param(local(slot.param))
        grad = self.usable[place] if self.usable else None
        if grad is not None and self.grads[place] == 0:
            slot.usable_gradient(grad)

    def _is_as_before(self) -> bool:
        if self._all_alike:  # then no gradient is None
            return self._forms.match([*self._params, *self._found])
        has_gradient = [grad is not None for grad in self._found]
        return has_gradient == self._had_gradient and self._forms.match(self._alike_tensors())

    def _note_forms(self) -> None:
        self._had_gradient = [grad is not None for grad in self._found]
        self._others = [
            slot
            for slot, found, usable in zip(self._slots, self._found, self.usable)
            if slot.copy is not None
            or slot.count == 0  # an empty tensor has no address
            or local(slot.param) is not slot.param
            or usable is not found
        ]
        others = set(self._others)
        self._alike = [place for place, slot in enumerate(self._slots) if slot not in others]
        self._unsure = [
            slot
            for slot, had_gradient in zip(self._slots, self._had_gradient)
            if slot.grad_dtype != torch.float32 and (slot in others or not had_gradient)
        ]
        self._all_alike = not others and all(self._had_gradient)
        self._forms = Forms(self._alike_tensors())

    def _alike_tensors(self) -> list[Tensor]:
        gradients = [self._found[place] for place in self._alike]
        return [
            *(self._params[place] for place in self._alike),
            *(grad for grad in gradients if grad is not None),
        ]


def slot_batches_of(slots: list[Slot], addresses: list[int]) -> list[SlotBatch]:
    """Batches of these slots, whose params are at these addresses now."""
    parts = (slice(begin, begin + BATCH_SLOTS) for begin in range(0, len(slots), BATCH_SLOTS))
    return [SlotBatch(slots[part], addresses[part]) for part in parts]
