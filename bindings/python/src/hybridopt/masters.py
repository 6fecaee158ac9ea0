"""What an engine does about masters: they follow params that others have written, and are shown as
numbers where they are kept in halves."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import abi
from .parts import Part
from .tensors import arranged, host_view, in_memory_order, local

if TYPE_CHECKING:
    from .engine import Slot

MASTER = "master_param"
MASTER_LOW = "master_low"
# What is looked at of each param: so many runs of so many bytes, spread over it.
RUNS, RUN_BYTES = 8, 64
# So many masters are rounded at once where all are looked at: they stay in the cache.
COMPARED_ELEMENTS = 1 << 20


def joined(param: Tensor, low: Tensor) -> Tensor:
    """Split masters as numbers: the bf16 param is the upper half, rounded. A zero that others have
    written over a larger number stays one, though the lower half may be negative."""
    upper = param.view(torch.int16).to(torch.int32) << 16
    lost = low.to(torch.int32)
    zeroed = (upper << 1 == 0) & (lost < 0)
    return torch.where(zeroed, upper, upper + lost).view(torch.float32)


def halves(master: Tensor) -> tuple[Tensor, Tensor]:
    """Upper and lower halves of masters as int16. Ties are rounded away from zero, so that what
    rounding has changed fits into the lower half."""
    bits = master.contiguous().view(torch.int32)
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16), (bits - (upper << 16)).to(torch.int16)


def samples_on_host(address: int, size_bytes: int) -> bytes:
    if size_bytes <= RUNS * RUN_BYTES:
        return ctypes.string_at(address, size_bytes) if size_bytes else b""
    stride = (size_bytes - RUN_BYTES) // (RUNS - 1) // 4 * 4
    return b"".join(ctypes.string_at(address + i * stride, RUN_BYTES) for i in range(RUNS))


def sample_of(tensor: Tensor) -> Tensor:
    """The same of a dense tensor anywhere, as a view."""
    itemsize, count = tensor.element_size(), tensor.numel()
    if count * itemsize <= RUNS * RUN_BYTES:
        return in_memory_order(tensor).view(torch.int16)
    stride = (count * itemsize - RUN_BYTES) // (RUNS - 1) // 4 * 4 // itemsize
    runs = (RUNS, RUN_BYTES // itemsize)
    return tensor.as_strided(runs, (stride, 1), tensor.storage_offset()).view(torch.int16)


class Samples:
    """Those of some slots' params, taken where they are in two copies, however many they are."""

    def __init__(self, slots: list[Slot]) -> None:
        self.slots = slots
        views = [sample_of(slot.bound) for slot in slots]
        self._lengths = [view.numel() for view in views]
        self._order = sorted(range(len(views)), key=lambda index: views[index].dim())
        short = [views[index] for index in self._order if views[index].dim() == 1]
        long = [views[index] for index in self._order if views[index].dim() == 2]
        parts = [torch.cat(views).reshape(-1) for views in (short, long) if views]
        self._content = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int16, device="cpu")

    def equal(self, others: Samples) -> bool:
        """Whether those of the same slots are the same, asked in one question."""
        return torch.equal(self._content, others._content)

    def bytes(self) -> list[bytes]:
        """Each one's."""
        on_host = self._content.cpu()
        content = ctypes.string_at(on_host.data_ptr(), 2 * on_host.numel())
        cut, begin = [b""] * len(self.slots), 0
        for index in self._order:
            end = begin + 2 * self._lengths[index]
            cut[index] = content[begin:end]
            begin = end
        return cut


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Of flat tensors of as many elements of 16 bits: as integers, the widest they can be, which torch
    compares fastest."""
    whole = all(flat.numel() % 4 == 0 and flat.storage_offset() % 4 == 0 for flat in (one, other))
    dtype = torch.int64 if whole else torch.int16
    return torch.equal(one.view(dtype), other.view(dtype))


def are_rounded(master: Tensor, param: Tensor) -> bool:
    """Whether params in 16 bits are their masters, rounded. Both flat, on the host."""
    rounded = torch.empty(min(master.numel(), COMPARED_ELEMENTS), dtype=param.dtype, device="cpu")
    for masters, params in zip(master.split(COMPARED_ELEMENTS), param.split(COMPARED_ELEMENTS)):
        now = rounded[: masters.numel()].copy_(masters)
        if not same_bits(now, params):
            return False
    return True


class Masters(Part):
    """Part of Engine, which has the rest."""

    def _are_away(self) -> bool:
        """Whether params are where the host cannot read them."""
        return self.device.type != "cpu"

    def note_in_sync(self, slots: list[Slot]) -> None:
        """Masters and params of these are the same now."""
        for slot in slots:
            slot.version = local(slot.param)._version
        if self.check_weights:  # samples are not asked
            return
        watched = [slot for slot in slots if slot.has_master and slot.count > 0]
        if self._are_away():
            if self._kept is not None and self._kept.slots != watched:
                self._cut_kept()
            self._kept = Samples(watched)
            return
        for slot in watched:
            slot.sample = samples_on_host(slot.address, slot.bytes)

    def _cut_kept(self) -> None:
        """Every slot gets its own sample, so that they may be compared one by one."""
        if self._kept is not None:
            for slot, sample in zip(self._kept.slots, self._kept.bytes()):
                slot.sample = sample
            self._kept = None

    def notice_writes(self) -> None:
        """Whoever writes `param.data` in place leaves the version as it is. With check_weights every
        param is looked at; without, where a sample of one has changed, all are compared."""
        if self.check_weights:
            self._compare_with_masters()
            return
        known = [
            slot
            for slot in self.slots
            if slot.has_master and slot.count > 0 and slot.version == local(slot.param)._version
        ]
        if not self._are_as_sampled(known):
            self.forget_versions()

    def keep_masters(self) -> None:
        """Views of masters, for comparisons: they cannot be asked for while a save runs."""
        for slot in self.slots:
            if self.check_weights and slot.has_master and slot.count > 0 and not self._are_away():
                slot.master = self.read(slot, abi.OFFLOAD_STATE_MASTER)

    def _compare_with_masters(self) -> None:
        """Notes which params are not what their masters are rounded to."""
        if self._are_away():
            self.forget_versions()  # the next step fetches and compares them
            return
        self.wait_for_steps()  # and for no save, which changes nothing
        for slot in self.slots:
            if slot.master is None or slot.version is None:
                continue
            if not are_rounded(slot.master, in_memory_order(slot.bound)):
                slot.version = None

    def _are_as_sampled(self, slots: list[Slot]) -> bool:
        if not self._are_away():
            return all(slot.sample == samples_on_host(slot.address, slot.bytes) for slot in slots)
        if not slots:
            return True
        now = Samples(slots)
        if self._kept is not None and self._kept.slots == slots:
            return now.equal(self._kept)
        self._cut_kept()
        return all(slot.sample == sample for slot, sample in zip(slots, now.bytes()))

    def forget_versions(self) -> None:
        """The next step compares every master with its param."""
        for slot in self.slots:
            slot.version = None

    def refresh_masters(self) -> None:
        """Params that others have written (weights were loaded, say) become their masters again."""
        if self.params_out:  # reload() finds out
            return
        self.notice_writes()
        written = [
            slot
            for slot in self.slots
            if slot.has_master and slot.version != local(slot.param)._version
        ]
        for slot in written:
            self._refresh_master(slot)
        if written:
            self.note_in_sync(written)

    def _refresh_master(self, slot: Slot) -> None:
        """Elements that are still their rounded masters keep those, down to the last bit."""
        if slot.count == 0:
            return
        self.wait()
        if slot.part_split:
            self.join_whole_masters(slot, self.low_of_whole_masters(slot))
            return
        if slot.dtype == torch.float32:
            self.handle.refresh_masters(params=[slot.id], streams=[self.stream()])
            return
        master = self.read(slot, abi.OFFLOAD_STATE_MASTER)
        param = in_memory_order(slot.bound).cpu()
        bits = param.view(torch.int16)
        written = master.to(slot.dtype).view(torch.int16) != bits
        if slot.dtype == torch.bfloat16 and written.any():
            written &= halves(master)[0] != bits  # split masters come with ties rounded up
        if written.any():
            merged = torch.where(written, param.float(), master)
            self.write(slot, abi.OFFLOAD_STATE_MASTER, self._arrange(slot, merged))

    def drop_low_halves(self) -> None:
        """Split masters become their params. Nothing notices when those are written: they are the
        masters, but for lower halves that were others'."""
        split = [slot.id for slot in self.slots if slot.split]
        if split:
            self.handle.refresh_masters(params=split, streams=[self.stream()])
            self.wait()
            self._refresh_copies()

    # ------------------------------------------------------------------------------ split on a GPU --
    # There the host's share of the masters is whole: the params, their upper halves, are elsewhere.
    # It is shown and written by its lower halves all the same, so that the share shows in nothing.

    def low_view(self, slot: Slot) -> abi.offload_state_view_t:
        """The lower halves in the device's share."""
        if slot.split_count is None:
            try:
                slot.split_count = self.handle.state(
                    slot.id, abi.OFFLOAD_STATE_MASTER_LOW
                ).device_count
            except abi.InvalidArgumentError:  # it has no such state: all is on the host
                slot.split_count = 0
        if slot.split_count > 0:
            return self.handle.state(slot.id, abi.OFFLOAD_STATE_MASTER_LOW)
        view = abi.offload_state_view_t(dtype=abi.OFFLOAD_U16)
        if slot.count > 0:
            view.step_count = self.handle.state(slot.id, abi.OFFLOAD_STATE_MASTER).step_count
        return view

    def _whole_masters(self, slot: Slot) -> Tensor:
        """Those of the host's share, as a view."""
        if self.low_view(slot).device_count == slot.count:
            return torch.empty(0, dtype=torch.float32, device="cpu")
        return host_view(self.handle.state(slot.id, abi.OFFLOAD_STATE_MASTER), self.handle)

    def low_of_whole_masters(self, slot: Slot) -> Tensor:
        return halves(self._whole_masters(slot))[1]

    def join_whole_masters(self, slot: Slot, low: Tensor) -> None:
        """What the params are now, with these lower halves."""
        masters = self._whole_masters(slot)
        if masters.numel() > 0:
            upper = in_memory_order(slot.bound)[slot.count - masters.numel() :].cpu()
            masters.copy_(joined(upper, low))

    # ----------------------------------------------------------------------------------- values --

    def master_of(self, slot: Slot) -> Tensor:
        """Masters in fp32, on the host, in memory order: a view where there is one."""
        self.wait()
        if slot.split:
            low = self.read(slot, abi.OFFLOAD_STATE_MASTER_LOW)
            return joined(in_memory_order(slot.bound).cpu(), low)
        if MASTER in slot.kinds:
            return self.read(slot, abi.OFFLOAD_STATE_MASTER)
        return in_memory_order(slot.bound).cpu()

    def adopt_master(self, slot: Slot, entry: dict[str, Any], part: Any) -> None:
        """Masters from state that came from elsewhere, in either layout; `part` gives what belongs to
        this process. State without any leaves fp32 masters to be compared with the param."""
        master, low = entry.get(MASTER), entry.get(MASTER_LOW)
        if slot.split:
            if isinstance(low, Tensor):
                self.write(slot, abi.OFFLOAD_STATE_MASTER_LOW, part(low))
            elif isinstance(master, Tensor):
                self._split(slot, part(master))
            else:
                zeros = torch.zeros((), dtype=torch.int16, device="cpu").expand(slot.shape)
                self.write(slot, abi.OFFLOAD_STATE_MASTER_LOW, zeros)
        elif slot.dtype != torch.float32 and isinstance(master, Tensor):
            self.write(slot, abi.OFFLOAD_STATE_MASTER, part(master))
        elif slot.dtype == torch.bfloat16 and isinstance(low, Tensor):
            flat = in_memory_order(arranged(part(low), torch.int16, slot.stride)).cpu()
            whole = joined(in_memory_order(slot.bound).cpu(), flat)
            self.write(slot, abi.OFFLOAD_STATE_MASTER, self._arrange(slot, whole))
        for key in (MASTER, MASTER_LOW):
            if key not in slot.kinds:
                entry.pop(key, None)

    def _split(self, slot: Slot, master: Tensor) -> None:
        """Masters in halves. Where a param is not its master's upper half it has been written since,
        and is right; but a master between two bf16 numbers may have been rounded the other way."""
        flat = in_memory_order(arranged(master, torch.float32, slot.stride)).cpu()
        param = in_memory_order(slot.bound).cpu()
        upper, low = halves(flat)
        as_even = flat.bfloat16().view(torch.int16) == param.view(torch.int16)
        same = upper == param.view(torch.int16)
        if (as_even & ~same).any():
            rounded = torch.where(as_even, upper, param.view(torch.int16)).view(torch.bfloat16)
            slot.bound.copy_(self._arrange(slot, rounded))
        low = torch.where(same | as_even, low, torch.zeros_like(low))
        self.write(slot, abi.OFFLOAD_STATE_MASTER_LOW, self._arrange(slot, low))
