"""Helpers for torch's tensors: local parts, gradients, memory order, and tensors over given memory."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from .. import abi

DTYPES = {
    torch.float32: abi.OFFLOAD_FP32,
    torch.bfloat16: abi.OFFLOAD_BF16,
    torch.float16: abi.OFFLOAD_FP16,
}

STATE_DTYPES = {
    abi.OFFLOAD_FP32: torch.float32,
    abi.OFFLOAD_BF16: torch.bfloat16,
    abi.OFFLOAD_U16: torch.int16,  # torch has few operations for uint16
    abi.OFFLOAD_I8: torch.int8,
}

# The state that is stored beside bf16 params: the upper bits of what was lost when the master was rounded to the param.
LOW_DTYPES = {abi.OFFLOAD_MASTER_SPLIT: torch.int16, abi.OFFLOAD_MASTER_SPLIT24: torch.int8}

# In newer versions of torch a param's grad_dtype is the dtype in which autograd makes its gradient. In older
# ones that is the param's dtype.
TELLS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds: the shard of a DTensor, or the whole of another tensor."""
    return getattr(tensor, "_local_tensor", tensor)


def version_of(tensor: Tensor) -> int:
    """How often torch has written a tensor in place."""
    return 0 if tensor.is_inference() else tensor._version


def gradient_of(param: Tensor) -> Tensor | None:
    """The gradient that the next step uses: `decoupled_grad` if the param has this attribute (Megatron stores
    gradients of another dtype there), else `grad`."""
    return param.decoupled_grad if hasattr(param, "decoupled_grad") else param.grad


def gradient_dtype(param: Tensor) -> torch.dtype:
    """The dtype of the param's gradient, or of the gradient that autograd will make."""
    grad = gradient_of(param)
    if grad is not None:
        return local(grad).dtype
    if not TELLS_GRAD_DTYPE:
        return local(param).dtype
    return param.grad_dtype or torch.float32  # None: any


def set_gradient(param: Tensor, grad: Tensor | None) -> None:
    """Sets the gradient that gradient_of() returns."""
    setattr(param, "decoupled_grad" if hasattr(param, "decoupled_grad") else "grad", grad)


def local_gradient(grad: Tensor, param: Tensor, name: str) -> Tensor:
    """The part of a gradient for the part of the param that this process holds."""
    if not hasattr(grad, "_local_tensor"):
        return grad
    expected = getattr(param, "placements", "a plain tensor")
    placements = getattr(grad, "placements", None)
    if placements != expected:
        raise ValueError(
            f"the gradient of parameter {name!r} has the placements {placements}, expected "
            f"{expected}; redistribute() it before step()"
        )
    wait = getattr(grad._local_tensor, "wait", None)  # set if a collective may still be writing it
    return grad._local_tensor if wait is None else wait()


def is_spread(param: Tensor) -> bool:
    """Whether a param is a part of a larger tensor: it is a DTensor or has the attribute offload_shard."""
    return hasattr(param, "_local_tensor") or hasattr(param, "offload_shard")


def refuse_fsdp1(name: str, param: Tensor, what: str) -> None:
    """Raises for params of FullyShardedDataParallel (FSDP1). FSDP1 does not tell which part of a param this rank
    has, nor which ranks have the other parts."""
    if getattr(param, "_fsdp_flattened", False):
        raise ValueError(
            f"{what} with parameter {name!r}, which FullyShardedDataParallel (FSDP1) has cut into parts "
            "that only it knows; shard the model by torch.distributed.fsdp.fully_shard, or leave "
            f"{what} out: FSDP1 has clip_grad_norm_() to be called before step(), and optim_state_dict()"
        )


def like_param(state: Tensor, param: Tensor) -> Tensor:
    """Wraps a state tensor with this process's elements as a DTensor if the param is one."""
    if not hasattr(param, "_local_tensor"):
        return state
    from . import sharding  # which imports much

    assert isinstance(param, sharding.DTensor)
    return sharding.as_dtensor(state, param)


def local_part(value: Tensor, param: Tensor) -> Tensor:
    """The part of a loaded or assigned state tensor that belongs to this process."""
    if not hasattr(param, "_local_tensor") and not hasattr(value, "_local_tensor"):
        return value
    from . import sharding

    return sharding.local_part(value, param)


def in_memory_order(tensor: Tensor) -> Tensor:
    """A flat view of a dense tensor's elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def arranged(tensor: Tensor, dtype: torch.dtype, stride: tuple[int, ...]) -> Tensor:
    """The tensor in this dtype and memory order: a copy, or the tensor itself if it has both."""
    if tensor.dtype == dtype and (tensor.stride() == stride or tensor.numel() == 0):
        return tensor
    copied = torch.empty_strided(tensor.shape, stride, dtype=dtype, device=tensor.device)
    return copied.copy_(tensor)


class _CudaMemory:
    def __init__(self, address: int, typestr: str, count: int, owner: Any) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": typestr,
            "data": (address, False),
            "version": 3,
        }


def tensor_at(
    address: int | None, count: int, dtype: torch.dtype, device: torch.device, owner: Any = None
) -> Tensor:
    """A tensor over the memory at an address. It keeps `owner`, the owner of the memory, alive. Without an
    owner the caller must make sure that the memory exists as long as the tensor is used."""
    if count == 0 or not address:
        return torch.empty(0, dtype=dtype, device=device)
    if device.type == "cpu":
        memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
        memory.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=dtype)
    typestr = f"<i{dtype.itemsize}"  # the interface has no type for bf16
    on_device = _CudaMemory(address, typestr, count, owner)
    return torch.as_tensor(on_device, device=device).view(dtype)


def host_view(view: abi.offload_state_view_t, owner: Any) -> Tensor:
    """The host's part of a state array as a tensor, which keeps the owner of the memory alive."""
    dtype = STATE_DTYPES[view.dtype]
    return tensor_at(view.host_data, view.host_count, dtype, torch.device("cpu"), owner)


def cuda_view(view: abi.offload_state_view_t, owner: Any, device: torch.device) -> Tensor:
    """The GPU's part of a state array as a tensor, which keeps the owner of the memory alive."""
    dtype = STATE_DTYPES[view.dtype]
    return tensor_at(view.device_data, view.device_count, dtype, device, owner)
