"""What is in sync: params that are their masters, rounded, because nobody but the library has written
them since."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import abi
from .master_bits import are_rounded
from .registered import Slot
from .samples import Samples, samples_on_host
from .steps import Steps
from .stored import Stored
from .tensors import in_memory_order, local


def is_away(device: torch.device) -> bool:
    """Whether params are where the host cannot read them."""
    return device.type != "cpu"


class InSync:
    """Notices who writes params that have masters of their own. An operation of torch in place counts
    up the version of the param; other memory has another storage. Whoever writes `param.data` in place
    leaves both as they are. With check_weights all params are compared with their masters for that;
    without, where a sample of one has changed, all count as written."""

    def __init__(
        self,
        device: torch.device,
        slots: list[Slot],
        stored: Stored,
        steps: Steps,
        check_weights: bool,
    ) -> None:
        self._device = device
        self._stored = stored
        self._steps = steps
        self._check_weights = check_weights
        self._watched = [slot for slot in slots if slot.has_master and slot.count > 0]
        # By slot, of when it was last in sync. A version of None: the param may have been written.
        self._versions: list[int | None] = [None] * len(slots)
        self._addresses = [0] * len(slots)
        self._storages: list[StorageWeakRef | None] = [None] * len(slots)
        self._samples = [b""] * len(slots)
        self._samples_together: tuple[list[Slot], Samples] | None = None  # in place of single ones
        self._masters: dict[Slot, Tensor] = {}  # views, where params are compared with them
        self._offloaded_in_sync: set[Slot] = set()

    def keep_masters(self) -> None:
        """Takes views of masters for comparisons: a running save would make them wait."""
        if self._check_weights and not is_away(self._device):
            for slot in self._watched:
                self._masters[slot] = self._stored.read(slot, abi.OFFLOAD_STATE_MASTER)

    def note(self, slots: list[Slot]) -> None:
        """Masters and params of these slots are the same now."""
        watched = [slot for slot in slots if slot.has_master and slot.count > 0]
        for slot in watched:
            self._note_one(slot)
        if self._check_weights:  # samples are not asked
            return
        if is_away(self._device):
            if self._samples_together is not None and self._samples_together[0] != watched:
                self._cut_samples()
            self._samples_together = (watched, Samples([slot.bound for slot in watched]))
            return
        for slot in watched:
            self._samples[slot.id] = samples_on_host(slot.bound.data_ptr(), slot.bytes)

    def forget(self) -> None:
        """Every param may have been written."""
        for slot in self._watched:
            self.forget_one(slot)

    def forget_one(self, slot: Slot) -> None:
        self._versions[slot.id] = None

    def written(self) -> list[Slot]:
        """The params that others may have written since they were in sync."""
        if self._check_weights:
            self._compare_with_masters()
        elif not self._are_as_sampled([slot for slot in self._watched if self._is_known(slot)]):
            self.forget()
        return [slot for slot in self._watched if not self._is_known(slot)]

    # ------------------------------------------------------------------------- params offloaded --

    def note_offload(self) -> None:
        """Params are about to be offloaded. That alone is no reason to compare them with masters."""
        self._offloaded_in_sync = set(self._watched).difference(self.written())

    def was_written_before_offload(self, slot: Slot) -> bool:
        return slot in self._watched and slot not in self._offloaded_in_sync

    def note_reload(self) -> None:
        """Params are back, in other memory."""
        for slot in self._watched:
            if slot in self._offloaded_in_sync:
                self._note_one(slot)
            else:
                self.forget_one(slot)

    # --------------------------------------------------------------------------------- content --

    def _note_one(self, slot: Slot) -> None:
        param = local(slot.param)
        self._versions[slot.id] = param._version
        self._addresses[slot.id] = param.data_ptr()
        storage = param.untyped_storage()
        known = self._storages[slot.id]
        if known is None or known.cdata != storage._cdata:
            # An address alone would not tell memory from other memory made where that was freed.
            self._storages[slot.id] = StorageWeakRef(storage)

    def _is_known(self, slot: Slot) -> bool:
        """Whether neither version nor memory of a param have changed."""
        param, storage = local(slot.param), self._storages[slot.id]
        return (
            self._versions[slot.id] == param._version
            and self._addresses[slot.id] == param.data_ptr()
            and storage is not None
            and storage.cdata == param.untyped_storage()._cdata
        )

    def _compare_with_masters(self) -> None:
        """Forgets the params that are not what their masters are rounded to."""
        if is_away(self._device):
            self.forget()  # the next step fetches and compares them
            return
        self._steps.wait()
        for slot, master in self._masters.items():
            if self._is_known(slot) and not are_rounded(master, in_memory_order(slot.bound)):
                self.forget_one(slot)

    def _are_as_sampled(self, slots: list[Slot]) -> bool:
        if not is_away(self._device):
            return all(
                self._samples[slot.id] == samples_on_host(slot.bound.data_ptr(), slot.bytes)
                for slot in slots
            )
        if not slots:
            return True
        now = Samples([slot.bound for slot in slots])
        if self._samples_together is not None and self._samples_together[0] == slots:
            return now.equal(self._samples_together[1])
        self._cut_samples()
        return all(self._samples[slot.id] == sample for slot, sample in zip(slots, now.bytes()))

    def _cut_samples(self) -> None:
        """Every slot gets its own sample, so that they may be compared one by one."""
        if self._samples_together is not None:
            slots, samples = self._samples_together
            for slot, sample in zip(slots, samples.bytes()):
                self._samples[slot.id] = sample
            self._samples_together = None
