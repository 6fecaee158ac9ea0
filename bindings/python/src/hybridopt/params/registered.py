"""Registered: the param groups and params that the library knows, and the properties of params that must
not change meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import abi
from ..traps.offloaded import is_offloaded, why_no_memory
from .members import Member, checked, takes_part
from .moments import COUNTED, moments_of
from .strides import is_dense, is_same_order
from .tensors import DTYPES, arranged, gradient_dtype, gradient_of, local, local_gradient

if TYPE_CHECKING:
    from .sharding import TensorShard

MASTER = "master_param"
MASTER_LOW = "master_low"


class Slot:
    """A registered param, and checks that the param and its gradient still fit. A slot never changes."""

    # Without these each slot would have a dict, which Python's garbage collector goes through too.
    __slots__ = (
        *("id", "param", "device", "name", "group", "chunk_order", "split_rows", "shard", "dtype", "grad_dtype"),
        *("shape", "count", "bytes", "copy", "stride", "row_major", "low_dtype", "split", "has_master"),
        *("moments", "kinds", "is_plain", "is_counted"),
    )

    def __init__(
        self,
        id: int,
        member: Member,
        device: torch.device,
        group: dict[str, Any],
        low_dtype: torch.dtype | None,
    ) -> None:
        current = local(member.param)
        self.id = id  # also its index in the list of slots
        self.param = member.param
        self.is_plain = current is member.param  # no DTensor
        self.device = device
        self.name = member.name
        self.group = member.group
        self.chunk_order = member.chunk_order
        self.split_rows = member.split_rows
        self.shard: TensorShard | None = member.shard
        self.dtype = current.dtype
        self.grad_dtype = gradient_dtype(member.param)
        if self.grad_dtype not in DTYPES or member.wide_gradient:
            self.grad_dtype = torch.float32  # gradients of other dtypes will be converted
        self.shape = current.shape
        self.count = current.numel()
        self.bytes = current.numel() * current.element_size()
        # A param with gaps between its elements has this dense copy, which the library updates.
        self.copy = None if is_dense(current) else torch.empty_like(current.detach()).contiguous()
        bound = current if self.copy is None else self.copy
        self.stride = bound.stride()
        self.row_major = bound.is_contiguous()
        # The dtype of the low part of the master that is stored beside the param; None: whole masters are stored.
        self.low_dtype = low_dtype if self.dtype == torch.bfloat16 else None
        self.split = self.low_dtype is not None
        # The library stores a master apart from the param. When other code writes the param, the master
        # must be updated.
        own_master = self.dtype != torch.float32 or device.type != "cpu"
        # The param itself is the upper half of a split master, so that needs no update.
        self.has_master = own_master and not self.split
        self.is_counted = group["algorithm"] in COUNTED  # `state` has a step count
        self.moments = moments_of(group)
        self.kinds = dict(self.moments)  # every kind of state that `state` shows, by its name
        if self.split:
            self.kinds[MASTER_LOW] = abi.OFFLOAD_STATE_MASTER_LOW
        elif self.dtype != torch.float32:  # an fp32 param has the bits of its master: none is shown
            self.kinds[MASTER] = abi.OFFLOAD_STATE_MASTER

    @property
    def bound(self) -> Tensor:
        """The dense tensor that the library updates."""
        return local(self.param).detach() if self.copy is None else self.copy

    def address(self) -> int:
        """The address of `bound`."""
        return (local(self.param) if self.copy is None else self.copy).data_ptr()

    def arrange(self, flat: Tensor) -> Tensor:
        """A view of elements in memory order, in the shape of the param."""
        return flat.as_strided(self.shape, self.stride)

    def takes_gradient(self) -> bool:
        """Whether the registered dtype can represent, without rounding, the present gradient, or the gradient that
        autograd will make. (check_param() refuses a param that itself has another dtype.)"""
        if self.grad_dtype == torch.float32 or local(self.param).dtype != self.dtype:
            return True
        dtype = gradient_dtype(self.param)
        return dtype == self.grad_dtype or (
            gradient_of(self.param) is None and dtype != torch.float32
        )

    def check_param(self, current: Tensor) -> None:
        """Raises if the param's shape, dtype, device or strides have changed. Only its address may change."""
        stride = current.stride()
        # A copy can be filled from any strides. The stride of a dimension of size 1 has no effect.
        if self.copy is not None or is_same_order(self.shape, stride, self.stride):
            stride = self.stride
        for is_so, was_so, now, before in (
            ("has shape", "had shape", tuple(current.shape), tuple(self.shape)),
            ("has dtype", "had dtype", current.dtype, self.dtype),
            ("is on", "was on", current.device, self.device),
            ("has strides", "had strides", stride, self.stride),
        ):
            if now != before:
                raise abi.InvalidStateError(
                    f"parameter {self.name!r} {is_so} {now}, but its state was made when it {was_so} "
                    f"{before}; make a new optimizer after changing parameters, and load this one's "
                    "state_dict() into it"
                )
        self.check_address(current.data_ptr())

    def check_address(self, address: int) -> None:
        """Raises if the param has elements, but no memory."""
        if address == 0 and self.count > 0:
            why = "has no memory: its storage was freed or resized to 0; bring it back before step()"
            if is_offloaded(self.param):
                why = why_no_memory(self.param)
            raise abi.InvalidStateError(f"parameter {self.name!r} {why}")

    def usable_gradient(self, grad: Tensor) -> Tensor:
        """The gradient, or a copy of it that the library can read."""
        grad = local_gradient(grad, self.param, self.name)
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"hybridopt does not support sparse gradients; parameter {self.name!r} has one: make "
                "its layer with sparse=False, or give it to torch.optim.SparseAdam"
            )
        # torch checks assignments to .grad, but not to .grad.data or decoupled_grad.
        wrong = None
        if grad.shape != self.shape:
            wrong = f"has shape {tuple(grad.shape)}, expected {tuple(self.shape)}"
        elif grad.device != self.device:
            wrong = f"is on {grad.device}, expected {self.device}"
        elif self.count > 0 and grad.data_ptr() == 0:
            wrong = "has no memory: its storage was freed or resized to 0"
        if wrong is not None:
            raise abi.InvalidStateError(
                f"the gradient of parameter {self.name!r} {wrong}; set it to None or compute it again"
            )
        return arranged(grad, self.grad_dtype, self.stride)

    def describe(self, struct: abi.offload_param_t, address: int) -> None:
        """Fills in a struct of the ABI, which keeps the memory that it points to alive."""
        struct.group = self.group
        struct.dtype = DTYPES[self.dtype]
        struct.grad_dtype = DTYPES[self.grad_dtype]
        struct.name = abi.encoded("a parameter's name", self.name)
        struct.data = address or None
        struct.count = self.count
        struct.chunk_order = self.chunk_order
        if self.split_rows:
            struct.split_count = len(self.split_rows)
            struct.split_rows = (ctypes.c_uint64 * len(self.split_rows))(*self.split_rows)
        if self.shard is not None:
            struct.shard = ctypes.pointer(self.shard.struct())
            struct.flags = abi.OFFLOAD_PARAM_REPLICA if self.shard.replica else 0
        elif self.row_major and 1 <= len(self.shape) <= 8:
            struct.shard = whole_tensor(self.shape)


@functools.lru_cache(maxsize=256)  # many params have the same shape
def whole_tensor(shape: torch.Size) -> Any:
    """The shard of a param that is a whole tensor. It tells the library the param's dimensions."""
    sizes = ctypes.c_int64 * len(shape)
    return ctypes.pointer(
        abi.offload_shard_t(
            dimensions=len(shape),
            box_count=1,
            global_shape=sizes(*shape),
            box_offsets=sizes(),
            box_extents=sizes(*shape),
        )
    )


def wide_gradients(slot_of: dict[Tensor, Slot]) -> dict[Tensor, bool]:
    """Whether params are registered with gradients in fp32."""
    return {param: slot.grad_dtype == torch.float32 for param, slot in slot_of.items()}


class Wanted(NamedTuple):
    """What an optimizer of the library must fit."""

    groups: list[dict[str, Any]]  # algorithm and hyperparameters of each, as fields of offload_group_t
    param_groups: list[dict[str, Any]]  # torch's


# Values of these types do not change in place.
_CONSTANT = (type(None), bool, int, float, str)


def _is_constant(value: Any) -> bool:
    return type(value) in _CONSTANT or (type(value) is tuple and all(map(_is_constant, value)))


def _as_checked(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of a param group that has been checked; an empty dict if a value in it may change in place."""
    others = (value for key, value in group.items() if key not in ("params", "param_names"))
    return dict(group) if all(map(_is_constant, others)) else {}


def _has_same_values(group: dict[str, Any], before: dict[str, Any]) -> bool:
    return len(group) == len(before) and all(map(is_, group, before)) and all(map(is_, group.values(), before.values()))


@contextlib.contextmanager
def _naming_group(index: int) -> Iterator[None]:
    """Adds the number of the param group to the library's error about a value in it."""
    try:
        yield
    except abi.InvalidArgumentError as error:
        raise abi.InvalidArgumentError(f"param group {index}: {error}") from None


class Registered:
    """The groups and params of one optimizer of the library."""

    def __init__(
        self,
        handle: abi.Optimizer,
        device: torch.device,
        wanted: Wanted,
        members: list[Member],
        low_dtype: torch.dtype | None,
    ) -> None:
        self._handle = handle
        self.groups = [dict(group) for group in wanted.groups]  # hyperparameters, as the library knows them
        for index, group in enumerate(wanted.groups):
            with _naming_group(index):
                handle.add_group(**group)
        self.slots = [
            Slot(id, member, device, wanted.groups[member.group], low_dtype)
            for id, member in enumerate(members)
        ]
        self.slot_of = {slot.param: slot for slot in self.slots}
        self._checked: list[dict[str, Any]] = []  # the groups at the last set_groups()
        # The params of the groups at the last comparison one by one, and those of them without a slot.
        self._gone_through: list[list[Tensor]] = []
        self._left_out: list[Tensor] = []
        self.addresses = [slot.address() for slot in self.slots]  # when they were registered
        structs = abi.array_of(abi.offload_param_t, len(self.slots))
        for slot, struct, address in zip(self.slots, structs, self.addresses):
            slot.check_address(address)
            slot.describe(struct, address)
        handle.add_params(structs)

    def set_groups(self, wanted: Wanted) -> None:
        """Tells the library which hyperparameters have changed. Nothing else differs."""
        for id, group in enumerate(wanted.groups):
            if group != self.groups[id]:
                with _naming_group(id):
                    self._handle.set_group(id, **group)
                self.groups[id] = dict(group)
        self._checked = list(map(_as_checked, wanted.param_groups))

    def is_as_checked(self, param_groups: list[dict[str, Any]]) -> bool:
        """Whether the groups have the values that they had at the last set_groups(), and the same params, so that
        they need not be checked again. This looks at objects alone, which takes little time."""
        return (
            len(param_groups) == len(self._checked)
            and all(map(_has_same_values, param_groups, self._checked))
            and self._has_params_of_before(param_groups)
        )

    def difference(self, wanted: Wanted) -> str:
        """What differs from the registered params and groups; "" if nothing does."""
        if len(wanted.groups) != len(self.groups):
            return "param groups are others"
        for new, old in zip(wanted.groups, self.groups):
            if new["algorithm"] != old["algorithm"]:
                return "a param group has another algorithm"
            if moments_of(new) != moments_of(old):
                return "a param group has got its first momentum, or has none any more"
        if any(slot.split_rows != tuple(wanted.param_groups[slot.group].get("split_rows") or ()) for slot in self.slots):
            return "a param group has other split_rows"
        if self._has_params_of_before(wanted.param_groups):
            return ""
        return self._difference_of_params(wanted.param_groups)

    def _has_params_of_before(self, param_groups: list[dict[str, Any]]) -> bool:
        return self._are_the_same(param_groups) and not any(map(takes_part, self._left_out))

    def _are_the_same(self, param_groups: list[dict[str, Any]]) -> bool:
        """Whether the groups have the params that they had at the last comparison one by one."""
        return len(param_groups) == len(self._gone_through) and all(
            len(group["params"]) == len(before) and all(map(is_, group["params"], before))
            for group, before in zip(param_groups, self._gone_through)
        )

    def _difference_of_params(self, param_groups: list[dict[str, Any]]) -> str:
        left_out: list[Tensor] = []
        known: set[int] = set()
        for index, group in enumerate(param_groups):
            for name, param in checked(index, group):
                slot = self.slot_of.get(param)
                if slot is None:
                    if takes_part(param):
                        return f"parameter {name!r} has been added or unfrozen"
                    left_out.append(param)
                elif slot.group != index:
                    return f"parameter {slot.name!r} is in another group"
                elif slot.id in known:
                    return f"parameter {slot.name!r} is named twice"
                else:
                    known.add(slot.id)
        if len(known) != len(self.slots):
            return "parameters have been taken out"
        self._gone_through = [list(group["params"]) for group in param_groups]
        self._left_out = left_out
        return ""
