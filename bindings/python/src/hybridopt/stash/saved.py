"""The objects that autograd keeps instead of a tensor, and from which the tensor is restored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..params.strides import is_dense
from .blocks import Block

_empty: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def _without_elements(dtype: torch.dtype, device: torch.device) -> Tensor:
    found = _empty.get((dtype, device))
    if found is None:
        found = _empty[dtype, device] = torch.empty(0, dtype=dtype, device=device)
    return found


class Guard:
    """Tells whether a tensor has been changed in place since it was saved, even if its memory has been released.
    (torch does not check this for tensors that hooks have saved.)"""

    __slots__ = ("_counter", "_kind", "_maker", "_module", "_version")

    def __init__(self, tensor: Tensor, module: str, counter: Tensor) -> None:
        self._module = module
        self._maker = "" if tensor.grad_fn is None else tensor.grad_fn.name()
        self._kind = tensor.dtype, tensor.shape
        self._counter = counter  # shares the tensor's version
        self._version = tensor._version

    def check(self) -> None:
        version = self._counter._version
        if version != self._version:
            raise RuntimeError(
                f"{self._name()} was changed in place after it was saved for the backward pass: it is at version "
                f"{version}, expected version {self._version}; change a clone() of it instead"
            )

    def _name(self) -> str:
        dtype, shape = self._kind
        kind = str(dtype).removeprefix("torch.")
        maker = f" made by {self._maker}" if self._maker else ""
        module = f" that module {self._module!r} saved" if self._module else ""
        return f"the {kind} tensor of shape {tuple(shape)}{maker}{module}"


class Kept:
    """A tensor that stays."""

    __slots__ = ("guard", "tensor")

    def __init__(self, tensor: Tensor, module: str) -> None:
        # The result of a node refers to the node that saves it, so keeping the tensor itself would be a reference
        # cycle.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.guard = Guard(tensor, module, self.tensor)

    def restore(self) -> Tensor:
        self.guard.check()
        return self.tensor


class Put:
    """A tensor over a block."""

    __slots__ = ("block", "dtype", "guard", "offset_bytes", "shape", "stride")

    def __init__(self, tensor: Tensor, block: Block, address: int, module: str) -> None:
        self.block = block
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset_bytes = address - block.address
        counter = tensor.detach()
        counter.data = _without_elements(tensor.dtype, tensor.device)
        self.guard = Guard(tensor, module, counter)

    def restore(self) -> Tensor:
        """To be called when the block is on the device."""
        storage, begin = self.block.memory()
        offset = (begin + self.offset_bytes) // self.dtype.itemsize
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, offset, self.shape, self.stride)


class Wrapped:
    """A tensor that consists of others (for example a DTensor), each of which was saved by itself."""

    __slots__ = ("context", "guard", "parts", "shape", "stride", "type")

    def __init__(self, tensor: Any, parts: dict[str, Any], context: Any, module: str) -> None:
        self.type = type(tensor)
        self.parts = parts
        self.context = context
        self.shape, self.stride = tensor.shape, tensor.stride()
        counter = tensor.detach()
        for name, part in parts.items():
            if isinstance(part, (Kept, Put, Wrapped)):
                setattr(counter, name, None)  # the counter holds no memory
        self.guard = Guard(tensor, module, counter)

    def restore(self, parts: dict[str, Any]) -> Tensor:
        self.guard.check()
        return self.type.__tensor_unflatten__(parts, self.context, self.shape, self.stride)


# ------------------------------------------------------------------------------- what may go --


def is_param(tensor: Tensor) -> bool:
    """Whether a tensor is a param, a view of a param, or another tensor of the caller for which the caller wants a
    gradient."""
    base = tensor._base
    return _is_wanted(tensor) or (base is not None and _is_wanted(base))


def _is_wanted(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)


def may_go(tensor: Tensor, device: torch.device, min_bytes: int) -> bool:
    return (
        tensor.device == device
        and tensor.layout == torch.strided
        and tensor.numel() * tensor.element_size() >= min_bytes
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and not torch._is_functional_tensor(tensor)
        and not is_param(tensor)
    )


def span_of(tensor: Tensor) -> tuple[int, int]:
    """The address of its first element, and the number of bytes from there to the end of its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


# A view with holes goes together with the bytes between its elements, if its span is at most this many times larger
# than its elements.
HOLES = 4


def range_of(tensor: Tensor) -> tuple[int, int] | None:
    """The range that is put aside for a tensor: its span, or that of the whole tensor of which it is a view. So
    views between each other's elements (queries, keys and values in one matrix) are put aside together, once. None:
    there are too many holes."""
    begin, size = span_of(tensor)
    dense = tensor.numel() * tensor.element_size()
    if size <= dense:
        return begin, size
    base = tensor._base
    if base is not None and base.layout == torch.strided and is_dense(base):
        base_begin, base_size = span_of(base)
        inside = base_begin <= begin and begin + size <= base_begin + base_size
        if inside and base_size <= HOLES * dense:
            return base_begin, base_size
    return (begin, size) if size <= HOLES * dense else None
