"""What is bound: where the library has been told that params and gradients are."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from . import abi
from .registered import Slot
from .strides import is_same_order
from .tensors import arranged, gradient_of, local, local_gradient


class Bound:
    """The addresses of params and gradients, and who has a gradient for the next step."""

    def __init__(self, handle: abi.Optimizer, device: torch.device, slots: list[Slot]) -> None:
        self._handle = handle
        self._device = device
        self._slots = slots
        # By slot, as the library knows them. A gradient's address is 0 where it has none.
        self._addresses = [slot.bound.data_ptr() for slot in slots]
        self._grad_addresses = [0] * len(slots)
        self._grads: list[Tensor | None] = [None] * len(slots)  # the step reads them
        self._structs = (abi.offload_binding_t * max(len(slots), 1))()
        for struct in self._structs:
            struct.struct_size = ctypes.sizeof(struct)
        self.active: list[Slot] = []  # who has a gradient, as of bind()
        # Slots whose gradient the library holds on the host; True where a hook has brought it there.
        self.hosted: dict[Slot, bool] = {}

    def bind(self) -> bool:
        """Tells the library where params and gradients are now; False if there is no gradient."""
        self.active = []
        changed = []
        for slot in self._slots:
            address = self._address_of(slot)
            grad = gradient_of(slot.param)
            usable = None if grad is None else self._usable(slot, grad)
            self._grads[slot.id] = usable
            grad_address = 0 if usable is None else usable.data_ptr()
            if usable is not None or slot in self.hosted:
                self.active.append(slot)
            if (address, grad_address) != (self._addresses[slot.id], self._grad_addresses[slot.id]):
                changed.append((slot, address, grad_address))
        self._tell(changed)
        return bool(self.active)

    def bind_params(self) -> None:
        """The same for params alone: gradients are told before a step or a move reads them."""
        now = [(slot, self._address_of(slot), 0) for slot in self._slots]
        self._tell([change for change in now if change[1] != self._addresses[change[0].id]])

    def bind_one(self, slot: Slot, grad: Tensor | None) -> None:
        """Tells where one param is now, with that gradient."""
        self._tell([(slot, self._address_of(slot), 0 if grad is None else grad.data_ptr())])

    def bind_gradient(self, slot: Slot, grad: Tensor) -> Tensor:
        """The same with a gradient of any form; gives the one that the library reads."""
        usable = self._usable(slot, grad)
        self.bind_one(slot, usable)
        return usable

    def note_hosted(self, slot: Slot, hooked: bool) -> None:
        """The library holds a gradient on the host; it has given up the address for that."""
        self.hosted[slot] = hooked
        self._grad_addresses[slot.id] = 0

    def note_stepped(self) -> None:
        """A step has read the gradients of the active slots, and used up those on the host."""
        for slot in self.active:
            self._grads[slot.id] = None
            self.hosted.pop(slot, None)

    def storages(self) -> list[torch.UntypedStorage]:
        """The storages of what is bound, which must outlive a save or load."""
        return [slot.bound.untyped_storage() for slot in self._slots]

    def fill_copies(self) -> None:
        """Copies params with gaps to where the library steps them."""
        for slot in self._slots:
            if slot.copy is not None:
                slot.copy.copy_(local(slot.param))

    def note_written(self, slots: list[Slot]) -> None:
        """The library has written the params: autograd hears of it, as after any operation in place,
        and params with gaps get what their copies have."""
        torch.autograd.graph.increment_version([slot.param for slot in slots if slot.copy is None])
        for slot in slots:
            if slot.copy is not None:
                local(slot.param).copy_(slot.copy)

    def _tell(self, changed: list[tuple[Slot, int, int]]) -> None:
        for struct, (slot, address, grad_address) in zip(self._structs, changed):
            struct.param = slot.id
            struct.data = address or None
            struct.grad = grad_address or None
        self._handle.bind(self._structs, len(changed))
        for slot, address, grad_address in changed:
            self._addresses[slot.id] = address
            self._grad_addresses[slot.id] = grad_address

    # ------------------------------------------------------------------------------- checking --

    def _address_of(self, slot: Slot) -> int:
        current = local(slot.param)
        address = current.data_ptr()
        known = self._addresses[slot.id]
        if (
            address != known
            or current.shape != slot.shape
            or current.stride() != slot.stride
            or current.dtype != slot.dtype
        ):
            self._check_same(slot, current)
        return address if slot.copy is None else known

    def _check_same(self, slot: Slot, current: Tensor) -> None:
        """The library knows a param by its address alone; all else must be as it was registered."""
        stride = current.stride()
        # A copy is filled from any strides. Those of dimensions of one element lead nowhere.
        if slot.copy is not None or is_same_order(slot.shape, stride, slot.stride):
            stride = slot.stride
        for is_so, was_so, now, before in (
            ("has shape", "had shape", tuple(current.shape), tuple(slot.shape)),
            ("has dtype", "had dtype", current.dtype, slot.dtype),
            ("is on", "was on", current.device, self._device),
            ("has strides", "had strides", stride, slot.stride),
        ):
            if now != before:
                raise abi.InvalidStateError(
                    f"parameter {slot.name!r} {is_so} {now}, but its state was made when it {was_so} "
                    f"{before}; make a new optimizer after changing parameters, and load this one's "
                    "state_dict() into it"
                )
        if current.data_ptr() == 0 and slot.count > 0:
            raise abi.InvalidStateError(
                f"parameter {slot.name!r} has no memory: its storage was freed or resized to 0; "
                "bring it back before step()"
            )

    def _usable(self, slot: Slot, grad: Tensor) -> Tensor:
        """The gradient, copied where the library could not read it as it is."""
        grad = local_gradient(grad, slot.param, slot.name)
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"hybridopt does not support sparse gradients; parameter {slot.name!r} has one: make "
                "its layer with sparse=False, or give it to torch.optim.SparseAdam"
            )
        # torch checks what is assigned to .grad, but not .grad.data, nor decoupled_grad.
        wrong = None
        if grad.shape != slot.shape:
            wrong = f"has shape {tuple(grad.shape)}, expected {tuple(slot.shape)}"
        elif grad.device != self._device:
            wrong = f"is on {grad.device}, expected {self._device}"
        elif slot.count > 0 and grad.data_ptr() == 0:
            wrong = "has no memory: its storage was freed or resized to 0"
        if wrong is not None:
            raise abi.InvalidStateError(
                f"the gradient of parameter {slot.name!r} {wrong}; set it to None or compute it again"
            )
        return arranged(grad, slot.grad_dtype, slot.stride)
