"""What is stored: the state of params, in the library's memory on the host and on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from . import abi
from .master_bits import halves, joined
from .registered import Slot
from .tensors import STATE_DTYPES, arranged, cuda_view, host_view, in_memory_order


class Stored:
    """Reads and writes state. Nothing may be queued that uses it.

    Of split masters on a GPU only the device's share is in halves. The host's share is whole: the
    params, their upper halves, are elsewhere. It is read and written by its lower halves all the same,
    so that nobody sees where a master lies."""

    def __init__(self, handle: abi.Optimizer, device: torch.device, slots: list[Slot]) -> None:
        self._handle = handle
        self._device = device
        # By slot: how many masters are in halves, the first ones of the param. None: not asked yet.
        self._split_counts: list[int | None] = [None] * len(slots)

    def view_of(self, slot: Slot, kind: int) -> abi.offload_state_view_t:
        """Where one kind of state lies. Of lower halves, those that there are."""
        if slot.part_split and kind == abi.OFFLOAD_STATE_MASTER_LOW:
            return self._low_view(slot)
        return self._handle.state(slot.id, kind)

    def show(self, slot: Slot, kind: int) -> tuple[Tensor, bool]:
        """One kind of state in the shape of the param, and whether that is a view of the memory that
        steps use: it is not where a part lies on the host and a part on the device, nor for lower
        halves of masters that are whole."""
        view = self.view_of(slot, kind)
        if view.device_count == slot.count and slot.count > 0:
            return slot.arrange(cuda_view(view, self._handle, self._device)), True
        return slot.arrange(self.read(slot, kind)), view.host_count == slot.count

    def read(self, slot: Slot, kind: int) -> Tensor:
        """One kind of state in host memory and memory order; a view if it is all there."""
        view = self.view_of(slot, kind)
        on_host = host_view(view, self._handle)
        if slot.part_split and kind == abi.OFFLOAD_STATE_MASTER_LOW:
            on_host = self.low_of_whole_masters(slot)
        if view.device_count == 0:
            return on_host
        return torch.cat([cuda_view(view, self._handle, self._device).cpu(), on_host])

    def write(self, slot: Slot, kind: int, value: Tensor) -> None:
        """Replaces one kind of state by a tensor in the shape of the param."""
        view = self.view_of(slot, kind)
        flat = in_memory_order(arranged(value.detach(), STATE_DTYPES[view.dtype], slot.stride))
        if slot.part_split and kind == abi.OFFLOAD_STATE_MASTER_LOW:
            self.join_whole_masters(slot, flat[view.device_count :].cpu())
        if view.host_count > 0:
            host_view(view, self._handle).copy_(flat[view.device_count :])
        if view.device_count > 0:
            cuda_view(view, self._handle, self._device).copy_(flat[: view.device_count])

    # ----------------------------------------------------------------- split masters on a GPU --

    def is_whole(self, slot: Slot) -> bool:
        """Whether the host has all masters of a param whose masters are split."""
        return self._split_counts[slot.id] == 0

    def low_of_whole_masters(self, slot: Slot) -> Tensor:
        return halves(self._whole_masters(slot))[1]

    def join_whole_masters(self, slot: Slot, low: Tensor) -> None:
        """The host's share becomes what the params are now, with these lower halves."""
        masters = self._whole_masters(slot)
        if masters.numel() > 0:
            upper = in_memory_order(slot.bound)[slot.count - masters.numel() :].cpu()
            masters.copy_(joined(upper, low))

    def _low_view(self, slot: Slot) -> abi.offload_state_view_t:
        """The lower halves in the device's share."""
        count = self._split_counts[slot.id]
        if count is None:
            try:
                count = self._handle.state(slot.id, abi.OFFLOAD_STATE_MASTER_LOW).device_count
            except abi.InvalidArgumentError:  # the param has no such state: all is on the host
                count = 0
            self._split_counts[slot.id] = count
        if count > 0:
            return self._handle.state(slot.id, abi.OFFLOAD_STATE_MASTER_LOW)
        view = abi.offload_state_view_t(dtype=abi.OFFLOAD_U16)
        if slot.count > 0:
            view.step_count = self._handle.state(slot.id, abi.OFFLOAD_STATE_MASTER).step_count
        return view

    def _whole_masters(self, slot: Slot) -> Tensor:
        """The masters of the host's share, as a view."""
        if self._low_view(slot).device_count == slot.count:
            return torch.empty(0, dtype=torch.float32, device="cpu")
        return host_view(self._handle.state(slot.id, abi.OFFLOAD_STATE_MASTER), self._handle)
