"""The state of params in the library's memory, on the host and on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import abi
from ..params.registered import Slot
from ..params.tensors import STATE_DTYPES, arranged, cuda_view, host_view, in_memory_order
from . import master_bits


class StateMemory:
    """Reads and writes state. Callers must have waited for queued work that uses it."""

    def __init__(self, handle: abi.Optimizer, device: torch.device) -> None:
        self._handle = handle
        self._device = device

    def drain(self) -> None:
        """Waits for everything queued."""
        self._handle.drain()

    def view_of(self, slot: Slot, kind: int) -> abi.offload_state_view_t:
        """The addresses of one kind of state."""
        return self._handle.state(slot.id, kind)

    def show(self, slot: Slot, kind: int) -> tuple[Tensor, bool]:
        """One kind of state as `state` shows it, in the shape of the param, and whether the tensor is a view of the
        memory that steps use. It is a copy if a part is on the host and a part on the device."""
        view = self.view_of(slot, kind)
        if view.device_count == slot.count and slot.count > 0:
            flat, is_live = cuda_view(view, self._handle, self._device), True
        else:
            flat, is_live = self._on_host(view), view.host_count == slot.count
        values = slot.arrange(flat)
        return (master_bits.as_bytes(values) if kind == abi.OFFLOAD_STATE_MASTER_LOW else values), is_live

    def read(self, slot: Slot, kind: int) -> Tensor:
        """One kind of state in host memory and memory order; a view if it is all there."""
        return self._on_host(self.view_of(slot, kind))

    def _on_host(self, view: abi.offload_state_view_t) -> Tensor:
        on_host = host_view(view, self._handle)
        if view.device_count == 0:
            return on_host
        return torch.cat([cuda_view(view, self._handle, self._device).cpu(), on_host])

    def write(self, slot: Slot, kind: int, value: Tensor) -> None:
        """Replaces one kind of state by a tensor like those that show() returns."""
        view = self.view_of(slot, kind)
        if kind == abi.OFFLOAD_STATE_MASTER_LOW:
            value = master_bits.as_halves(value)
        flat = in_memory_order(arranged(value.detach(), STATE_DTYPES[view.dtype], slot.stride))
        if view.host_count > 0:
            host_view(view, self._handle).copy_(flat[view.device_count :])
        if view.device_count > 0:
            cuda_view(view, self._handle, self._device).copy_(flat[: view.device_count])
