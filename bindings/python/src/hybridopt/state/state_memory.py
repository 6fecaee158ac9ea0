"""The state of params in the library's memory, on the host and on the device, and on disk."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import abi
from ..params.bound import Bound
from ..params.registered import Slot
from ..params.tensors import STATE_DTYPES, arranged, cuda_view, host_view, in_memory_order
from . import master_bits


class StateMemory:
    """Reads and writes state. Callers must have waited for queued work that uses it."""

    def __init__(self, handle: abi.Optimizer, device: torch.device, bound: Bound) -> None:
        self._handle = handle
        self._device = device
        self._bound = bound

    def drain(self) -> None:
        """Waits for everything queued."""
        self._handle.drain()

    def view_of(self, slot: Slot, kind: int) -> abi.offload_state_view_t:
        """The addresses of one kind of state."""
        return self._handle.state(slot.id, kind)

    def show(self, slot: Slot, kind: int) -> tuple[Tensor, bool]:
        """One kind of state as `state` shows it, in the shape of the param, and whether the tensor is a view of the
        memory that steps use. It is a copy if its parts are in several places, or on disk."""
        view = self.view_of(slot, kind)
        if view.device_count == slot.count and slot.count > 0:
            flat, is_live = cuda_view(view, self._handle, self._device), True
        else:
            flat, is_live = self._on_host(slot, kind, view), view.host_count == slot.count
        values = slot.arrange(flat)
        return (master_bits.as_bytes(values) if kind == abi.OFFLOAD_STATE_MASTER_LOW else values), is_live

    def read(self, slot: Slot, kind: int) -> Tensor:
        """One kind of state in host memory and memory order; a view if it is all there."""
        return self._on_host(slot, kind, self.view_of(slot, kind))

    def _on_host(self, slot: Slot, kind: int, view: abi.offload_state_view_t) -> Tensor:
        parts = [host_view(view, self._handle)]
        if view.device_count > 0:
            parts.insert(0, cuda_view(view, self._handle, self._device).cpu())
        if view.disk_count > 0:
            parts.append(self._read_disk(slot, kind, view))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def is_on_disk(self, slot: Slot) -> bool:
        """Whether some of a param's state is on disk."""
        return any(self.view_of(slot, kind).disk_count > 0 for kind in slot.kinds.values())

    def _read_disk(self, slot: Slot, kind: int, view: abi.offload_state_view_t) -> Tensor:
        if kind == abi.OFFLOAD_STATE_MASTER_LOW:
            self._bound.bind_present(slot)  # the library reads the upper halves there
        numbers = torch.empty(view.disk_count, dtype=torch.float32, device="cpu")
        first = view.device_count + view.host_count
        self._handle.read_state(slot.id, _numbers_of(kind), first, view.disk_count, numbers.data_ptr())
        if kind != abi.OFFLOAD_STATE_MASTER_LOW:
            return numbers.to(STATE_DTYPES[view.dtype])
        return master_bits.halves(numbers, STATE_DTYPES[view.dtype])[1]

    def _write_disk(self, slot: Slot, kind: int, view: abi.offload_state_view_t, flat: Tensor) -> None:
        """Replaces the part on disk. The library writes the param too where it writes masters: the param gets back
        what it had, as where masters lie in memory."""
        first = view.device_count + view.host_count
        numbers = flat[first:].cpu()
        is_master = kind in (abi.OFFLOAD_STATE_MASTER, abi.OFFLOAD_STATE_MASTER_LOW)
        if is_master:
            self._bound.bind_present(slot)
        before = slot.bound.clone() if is_master else None
        if kind == abi.OFFLOAD_STATE_MASTER_LOW:
            numbers = master_bits.joined(in_memory_order(slot.bound)[first:].cpu(), numbers)
        numbers = numbers.float().contiguous()
        self._handle.write_state(slot.id, _numbers_of(kind), first, view.disk_count, numbers.data_ptr())
        if before is not None:
            slot.bound.data.copy_(before)  # a backward pass may run, and sees no write

    def write(self, slot: Slot, kind: int, value: Tensor) -> None:
        """Replaces one kind of state by a tensor like those that show() returns."""
        view = self.view_of(slot, kind)
        if kind == abi.OFFLOAD_STATE_MASTER_LOW:
            value = master_bits.as_halves(value)
        flat = in_memory_order(arranged(value.detach(), STATE_DTYPES[view.dtype], slot.stride))
        if view.host_count > 0:
            host_view(view, self._handle).copy_(flat[view.device_count :][: view.host_count])
        if view.device_count > 0:
            cuda_view(view, self._handle, self._device).copy_(flat[: view.device_count])
        if view.disk_count > 0:
            self._write_disk(slot, kind, view, flat)


def _numbers_of(kind: int) -> int:
    """The kind of state that the library reads and writes as numbers for this kind."""
    return abi.OFFLOAD_STATE_MASTER if kind == abi.OFFLOAD_STATE_MASTER_LOW else kind
