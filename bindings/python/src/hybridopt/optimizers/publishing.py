"""Publishing: which weights steps have changed, for programs that follow them."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import abi
from ..base.checks import check_switch, is_number, shown
from ..base.modes import in_no_mode
from ..changes.part import Part
from ..changes.patch import WeightChange, WeightPatch, hash_of
from ..changes.take_memory import Loan
from ..engine.engine import Engine
from ..params.registered import Slot
from ..params.tensors import local
from ..settings.options import OffloadOptions


class Publishing(torch.optim.Optimizer):
    """The calls by which an optimizer gives its changed weights to other programs."""

    _options: OffloadOptions

    def _ready_engine(self, binds_params: bool = True) -> Engine:
        raise NotImplementedError

    @in_no_mode
    def weight_changes(self, *, dense_above: float | None = None, on_device: bool = False) -> WeightPatch:
        """The elements of all params that may differ from what they were when changes were last acknowledged, with
        their new values: steps note them (`track_changes=True`). Waits for the step under way.

            patch = optimizer.weight_changes()
            for name, change in patch: ...       # change.indices, change.values, change.hash
            patch.acknowledge()                  # once the followers have it

        The first patch has all params whole; so have those of params that were loaded, marked, or written where
        nobody could see which elements. `dense_above` is the fraction of changed elements above which a param comes
        whole; None: where indices and values would take as many bytes. With `on_device` indices and values stay on the
        GPU that has the params, as parts of one tensor; without it they come to host memory.

        The values of a param that comes whole are the param itself: use them before the next step. Of a DTensor each
        rank gets its own shard; hybridopt.gather_changes() puts whole tensors together. Params must not be offloaded."""
        if dense_above is not None and not (is_number(dense_above) and 0 < dense_above <= 1):
            raise ValueError(
                f"Invalid dense_above: {shown(dense_above)}, expected a fraction above 0 and up to 1, or None"
            )
        check_switch("on_device", on_device)
        self._refuse_untracked()
        engine = self._ready_engine()
        if on_device and engine.device.type == "cpu":
            raise ValueError("Invalid on_device: True, but the parameters are on the CPU; leave it out")
        if engine.released_storages is not None:
            raise abi.InvalidStateError(
                "params are offloaded, and changes are taken of params on their device; call reload(params=True) first"
            )
        engine.before_changes()
        return _taken(engine, 0.0 if dense_above is None else dense_above, on_device)

    @in_no_mode
    def mark_weights_changed(self) -> None:
        """Makes the next patch contain all params whole: for a new follower, or after other code has written params
        in a way that leaves no trace (through `.data` of fp32 params, or of bf16 params with split masters)."""
        self._refuse_untracked()
        self._ready_engine().handle.mark_changed()

    def _refuse_untracked(self) -> None:
        if not self._options["track_changes"]:
            raise abi.InvalidStateError(
                "changes are not tracked; make the optimizer with track_changes=True"
            )


def _taken(engine: Engine, dense_above: float, on_device: bool) -> WeightPatch:
    device = engine.device if on_device else None
    # A take that is refused has read all params, so the first try has room for more than the last take.
    loan = engine.take_memory.lend(device=device)
    options: dict[str, Any] = {
        "dense_above": dense_above,
        "stream": engine.stream(),  # work that has used the memory before is on it
        "flags": abi.OFFLOAD_CHANGES_WIDE | (abi.OFFLOAD_CHANGES_ON_DEVICE if on_device else 0),
    }
    taken = engine.handle.changes(loan.address, loan.bytes, **options)
    if taken.take == 0:
        del loan
        loan = engine.take_memory.lend(taken.bytes, device)
        taken = engine.handle.changes(loan.address, loan.bytes, **options)
    engine.take_memory.note_used(taken.bytes)
    changes = {}
    for slot, change in zip(engine.slots, taken.params[: taken.param_count]):
        changes[slot.name] = _change_of(slot, change, loan)
    return WeightPatch(changes, functools.partial(_acknowledge, engine.handle, taken.take))


def _acknowledge(handle: abi.Optimizer, take: int) -> None:
    # A closed engine has no more changes, and the next one begins with whole params.
    if not handle.closed:
        handle.acknowledge_changes(take)


def _change_of(
    slot: Slot, change: abi.offload_change_t, loan: Loan
) -> WeightChange:
    shape, base = tuple(slot.shape), change.base_hash if change.has_base else None
    shard = None
    if slot.shard is not None:
        shard = Part(slot.shard.global_shape, slot.shard.boxes, slot.shard.range)
    if change.dense or slot.count == 0 or not slot.row_major:
        whole = local(slot.param).detach()
        # The library hashes elements in the order of memory.
        found = change.hash if slot.row_major else hash_of(whole)
        return WeightChange(shape, None, whole, found, None, shard)
    indices = loan.array(change.indices_offset, change.count, torch.int64)
    values = loan.array(change.values_offset, change.count, slot.dtype)
    return WeightChange(shape, indices, values, change.hash, base, shard)
