"""Engine: one optimizer of the library, made for the params of one torch optimizer.

Each of its parts is a class: Registered, Bound, Steps, UnderWay, StateMemory, InSync, Masters, Shown. The
engine makes one of each and calls them in the right order. A function waits for queued work only if its
documentation says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import abi
from ..base.modes import current_stream, in_no_mode, is_in_backward
from ..changes.take_memory import TakeMemory
from ..params.bound import Bound
from ..params.kept_addresses import KeptAddresses
from ..params.members import Member
from ..params.registered import Registered, Slot, Wanted
from ..params.released_storages import ReleasedStorage
from ..params.taken import Taken
from ..params.tensors import LOW_DTYPES, gradient_of, local, version_of
from ..state.shown import Shown
from ..state.state_memory import StateMemory
from ..steps.history import History
from ..steps.queued import Steps
from ..steps.under_way import Keeper, UnderWay
from ..sync.in_sync import Seen, in_sync_of
from ..sync.masters import Masters

_PATIENCE_NS = 10_000_000_000  # with work that has been queued when an exception comes


class Engine:
    """The constructor registers groups and params; commit() allocates the memory."""

    def __init__(
        self,
        context: abi.Context,
        device: torch.device,
        wanted: Wanted,
        members: list[Member],
        history: History,
        **options: Any,
    ) -> None:
        self.context = context
        self.device = device
        self.history = history
        self.movable: int = options.get("movable", 0)  # enum offload_movable, or-ed
        self.handle = abi.Optimizer(context, algorithm=wanted.groups[0]["algorithm"], **options)
        low_dtype = LOW_DTYPES.get(options.get("master_layout", 0))
        self.registered = Registered(self.handle, device, wanted, members, low_dtype)
        self.slots = self.registered.slots
        self.bound = Bound(self.handle, self.registered)
        self.steps = Steps(self.handle)
        self.under_way: UnderWay | None = None  # made by the first begin_step()
        self.state_memory = StateMemory(self.handle, device, self.bound)
        self.in_sync = in_sync_of(self.slots, device, self.bound.addresses)
        self.masters = Masters(self.handle, device, self.slots, self.state_memory, self.in_sync)
        self.shown = Shown(self.handle, device, self.registered, self.state_memory)
        # The storages of params that are offloaded; None while params are on the device.
        self.released_storages: list[ReleasedStorage] | None = None
        self.kept_addresses: KeptAddresses | None = None  # of params, if the options ask for that
        self.states_are_offloaded = False
        self.expects_skips = False  # a GradScaler, which looks for a scale, hears of them
        self._has_ranks = "comm" in options
        self._may_update_early = options.get("early_update_bytes", 0) > 0
        self._split_versions: list[int] = []  # of params with split masters, before gradients left
        # If changes are tracked: the params of which a write by other code is seen by their versions alone.
        is_tracked = bool(options.get("track_changes", 0))
        self._unwatched = [s for s in self.slots if is_tracked and s.count > 0 and not s.has_master]
        self._is_tracked = is_tracked
        self._seen: list[Seen] = []
        self.take_memory = TakeMemory()
        # Returns the plan for another device fraction.
        self.plan_of: Callable[[float], abi.offload_plan_t] | None = None
        self.counts_before: dict[Tensor, int] = {}  # hidden_counts() of the engine before this one
        # Slots that materialize() shows before their first step and whose step count `state` does not have.
        self._unstepped: set[Slot] = set()
        self.may_miscount = False  # until the steps of the library and the counts in `state` are the same again

    def is_as_checked(self, param_groups: list[dict[str, Any]]) -> bool:
        """Whether the engine fits and nothing has changed, so that it need not be updated."""
        return self.registered.is_as_checked(param_groups) and self._wider_gradient() is None

    def difference(self, wanted: Wanted) -> str:
        """The reason why the torch optimizer needs another engine now; "" if this one still fits."""
        what = self.registered.difference(wanted)
        slot = None if what else self._wider_gradient()
        return what if slot is None else f"the gradient of parameter {slot.name!r} is in a wider dtype than before"

    def _wider_gradient(self) -> Slot | None:
        return next((slot for slot in self.bound.look() if not slot.takes_gradient()), None)

    def plan(self) -> abi.offload_plan_t:
        return self.handle.plan()

    def commit(self) -> None:
        self.move_to_kept_addresses()
        self.bound.fill_copies()
        self.handle.commit(self.stream())
        self.in_sync.begin()
        self.see_versions()

    def move_to_kept_addresses(self) -> None:
        """Moves params to addresses that they keep, unless they have such addresses or need none."""
        kept = self.kept_addresses
        if kept is not None and kept.move_in(local(slot.param) for slot in self.slots):
            self.bound.bind_params()

    def stream(self) -> int:
        """The stream on which gradients and params are ready."""
        return current_stream(self.device)

    def wait(self) -> None:
        """Waits for everything queued. A failed save raises from its own ticket, not here."""
        self.handle.drain()

    def set_fractions(self, state: dict[Tensor, Any], device_fraction: float, disk_fraction: float) -> None:
        """Changes how much of the state is on the device and on disk. Views of moved state are replaced by new ones."""
        self.settle()
        self.wait()
        self.shown.hide(state, everywhere=True)
        try:
            self.handle.set_fractions(device_fraction, disk_fraction)
            self.wait()
        finally:
            if not self.states_are_offloaded:
                self.shown.show_hidden()

    # ------------------------------------------------------------------------------ step counts --

    def hidden_counts(self, state: dict[Tensor, Any]) -> dict[Tensor, int]:
        """The step counts of params whose state has no `step` in torch. The random bits that round bf16 moments and
        masters of 24 bits depend on the count: if the count began again, these bits would repeat. The count is 0 if
        materialize() has put moments from before the first step into `state`."""
        uncounted = self._uncounted()
        if not uncounted:
            return {}
        self._count_loaded_moments(uncounted)
        self.wait()
        counts = {slot: self._stored_count(slot) for slot in uncounted}
        return {
            slot.param: count
            for slot, count in counts.items()
            if count > 0 or self.shown.is_in(slot, state)
        }

    def _uncounted(self) -> list[Slot]:
        """The slots with moments or a master whose step count `state` does not have."""
        return [slot for slot in self.slots if slot.kinds and not slot.is_counted]

    def hidden_count(self, slot: Slot) -> int:
        """The step count for a param whose moments are loaded without one: the stored count, else that of the
        engine before, else 1, because a param with moments has had at least one step."""
        return self._stored_count(slot) or self.counts_before.get(slot.param, 1)

    def materialize(self, state: dict[Tensor, Any]) -> None:
        """Shows the state of all slots, those that have had no step among them."""
        self.shown.note_due(self.slots)
        self.show(state)
        self._unstepped = {slot for slot in self._uncounted() if self._stored_count(slot) == 0}

    def _count_loaded_moments(self, slots: Iterable[Slot]) -> None:
        """Counts one step for params whose moments other code has written before their first step: otherwise their
        first step would ignore these moments."""
        unstepped = self._unstepped.intersection(slots)
        if unstepped:
            self.wait()
        for slot in unstepped:
            if any(self.state_memory.read(slot, kind).any() for kind in slot.moments.values()):
                self.handle.set_step_count(slot.id, 1)
                self._unstepped.discard(slot)

    def _stored_count(self, slot: Slot) -> int:
        kinds = list(slot.kinds.values())
        return int(self.state_memory.view_of(slot, kinds[0]).step_count) if kinds else 0

    # --------------------------------------------------------------------------------- stepping --

    def step(self, **options: Any) -> bool:
        """Makes a step over the bound params and waits for it. Returns whether the step was skipped.

        On a GPU the host waits, instead of the current stream (offload_optimizer_stream_wait): after such a wait of
        the stream, torch's copies into memory that is not pinned, such as .cpu(), did not return."""
        kept = dict(self.bound.kept)
        with self.ended_if_cut_off():
            active, ticket, _ = self._queue(options, list(kept.values()))
            self.bound.note_queued()  # now, since Ctrl-C may end the wait below
            self.bound.note_written_in_place(active)  # while the library computes
            result = self.steps.result(ticket)
            self.bound.take_copies(active)
        self.see_versions()
        self._note_end([])
        self.bound.release()
        if result.skipped:
            found = {slot: kept.get(slot, gradient_of(slot.param)) for slot in active}
            self.steps.skipped_gradients = found
        return bool(result.skipped)

    def begin_step(
        self, aliases: Mapping[Tensor, Sequence[Tensor]], keeper: Keeper, taken: Sequence[Taken], **options: Any
    ) -> None:
        """Queues a step over the bound params. A param may be used after under_way has waited for it; `keeper` is
        told of each use. `aliases` are other tensors over the memory of params, and `taken` are gradients whose copies
        may be under way."""
        with self.ended_if_cut_off():
            active, ticket, refreshed = self._queue(options, [])  # under_way keeps the gradients alive
            self.bound.note_written_in_place(active)
            self.see_versions()
            gradients = self.bound.gradients()
            if self.under_way is None:
                self.under_way = UnderWay(self.handle, self.steps, self.device, self.slots, self._note_end)
            self.under_way.begin(ticket, active, gradients, aliases, keeper, taken)
            # Last: an exception may have ended this before, and the library reads the gradients until the step has ended.
            self.bound.note_queued()
            self.bound.release()
            self._await_refresh(refreshed)

    @contextlib.contextmanager
    def ended_if_cut_off(self) -> Iterator[None]:
        """An exception leaves this context, such as that of Ctrl-C or of a refused call, when the library has done what has
        been queued: other code may then write or free params that have no trap. Work that hangs is waited for some
        seconds only."""
        self.bound.are_copies_filled = False
        try:
            yield
        except BaseException:
            with contextlib.suppress(abi.HybridoptError):
                self.handle.drain(_PATIENCE_NS)
                if self.bound.are_copies_filled:
                    self.bound.take_copies(self.slots)
            raise

    def _await_refresh(self, ticket: int) -> None:
        """Waits until the library has read the params whose masters it refreshes (0: none). Those that a step does not
        update get no trap, so other code may write or free them at once."""
        if ticket != 0:
            self.await_read(ticket, [self.stream()])

    def await_read(self, ticket: int, streams: Iterable[int]) -> None:
        """Waits for queued work, whose memory other code may write then. On a GPU later work on these streams waits."""
        if self.device.type == "cpu":
            self.handle.wait(ticket)
            return
        for stream in streams:
            self.handle.stream_wait(stream, ticket)

    def _queue(self, options: dict[str, Any], gradients: list[Tensor]) -> tuple[list[Slot], int, int]:
        """Returns the slots that the step updates, its ticket, and that of the refresh before it (0: there is none)."""
        refreshed = 0
        if self.in_sync.steps_follow_params:
            options["flags"] = abi.OFFLOAD_STEP_FOLLOW_PARAMS
            self.bound.fill_copies()
            if len(self.bound.active) < len(self.slots):
                refreshed = self.masters.refresh(set(self.slots).difference(self.bound.active))
        else:
            refreshed = self.refresh_masters()
        self._undo_what_read_other_params()
        self._mark_unseen()
        if self.steps.is_full:
            self.settle()
        active = self.bound.active
        if self._unstepped:
            self._count_loaded_moments(active)
            self._unstepped.difference_update(active)
        had_miscounted, self.may_miscount = self.may_miscount, True
        try:
            ticket = self.steps.queue(active, {"stream": self.stream(), **options}, gradients)
        except abi.HybridoptError:  # the library has refused the call
            self.may_miscount = had_miscounted
            raise
        self.may_miscount = had_miscounted
        return active, ticket, refreshed

    def _note_end(self, written: list[Slot]) -> None:
        """Notes that a queued step has ended, and which params other code has written since it was
        queued."""
        if not self.in_sync.steps_follow_params:
            self.in_sync.note()
            for slot in written:
                self.in_sync.forget_one(slot)
        elif self.steps.was_last_skipped():
            self._await_refresh(self.masters.refresh())  # a skipped step follows no param

    def refresh_masters(self) -> int:
        """Updates the masters of params that other code has written, and returns the ticket, or 0 if there was nothing
        to do. For offloaded params note_params_leave() has already done that."""
        ticket = 0 if self.released_storages is not None else self._refresh_masters()
        if ticket != 0:
            self.shown.refresh_copies()
        return ticket

    def _refresh_masters(self) -> int:
        self.bound.fill_copies()
        if self.states_are_offloaded and self.plan().elements[abi.OFFLOAD_TIER_DEVICE] == 0:
            # The library refuses this, but the state has never been elsewhere: these moves copy nothing.
            self.handle.reload_states()
            try:
                return self.masters.refresh()
            finally:
                self.handle.offload_states()
        return self.masters.refresh()

    def fit_params(self) -> None:
        """Writes params that had to wait for the end of a backward pass (Masters.fit)."""
        if self.masters.put_off and not is_in_backward():
            self.undo_early_updates()
            self.wait()
            self.masters.fit()

    def note_params_leave(self) -> None:
        """Updates masters before params are offloaded. If the device's state is on the host already, the masters
        follow after the params have been reloaded."""
        self._mark_unseen()
        try:
            self.refresh_masters()
        except abi.InvalidStateError:
            self.masters.note_offload()

    def forget_what_is_in_sync(self) -> None:
        """Treats all params as written: other code may have written them without a trace. The upper half of a
        split master is the param itself; this clears the lower half, which belongs to the old value."""
        self.in_sync.forget()
        self.mark_changed()
        if not any(slot.split for slot in self.slots):
            return
        if self.released_storages is None:
            self.bound.bind_params()
        else:
            self.bound.release()
        self.masters.drop_low_halves()
        self.shown.refresh_copies()

    def _note_written(self, slots: list[Slot]) -> None:
        """Notes that the library has written these params and their masters. All others were in sync
        before."""
        self.bound.note_written_in_place(slots)
        self.bound.take_copies(slots)
        self.in_sync.note()
        self.see_versions()

    def settle(self) -> None:
        """Waits for queued steps, but not for saves, and records their results."""
        if len(self.steps) == 0 and not self.may_miscount:
            return
        if self.under_way is not None:
            self.under_way.finish()
        has_miscounted, self.may_miscount = self.may_miscount, True
        gradients, self.steps.skipped_gradients = self.steps.skipped_gradients, {}
        skipped: list[list[Slot]] = []
        if has_miscounted:
            self.steps.note_cut_off()
        for result, stepped in self.steps.ended():
            self.history.add(result, self.steps.remove_first)
            if not result.skipped:
                self.shown.count(stepped)
            elif not self.expects_skips:
                skipped.append(stepped)
        if has_miscounted and not self.states_are_offloaded:
            self._count_again()
            has_miscounted = False
        self.shown.refresh_copies()
        self.shown.note_counts()
        self.may_miscount = has_miscounted
        for slots in skipped:
            self.history.skips.note(slots, gradients, self._has_ranks)

    def _count_again(self) -> None:
        """Takes step counts from the library, after an exception has ended a step or a settle() before all were noted."""
        self.wait()
        stepped = [slot for slot in self.slots if slot.count > 0 and self._stored_count(slot) > 0]
        for slot in stepped:
            if slot.is_counted:
                self.shown.count_views[slot.id].fill_(self._stored_count(slot))
        self.shown.note_due(stepped)

    def settle_ended(self) -> None:
        """If the queued steps have ended, records their results, so that a skipped step is reported before the next
        step."""
        if self.steps.have_ended():
            self.settle()

    @in_no_mode
    def show(self, state: dict[Tensor, Any]) -> None:
        """Brings `state` up to date with all steps so far."""
        self.shown.refuse_hidden()
        self.settle()
        self.undo_early_updates()
        self.shown.publish_due(state)

    def note_gradients_leave(self) -> None:
        """Notes that the first gradients of a step are about to leave. From then on an early update may read
        params with split masters."""
        if self._may_update_early:
            self._split_versions = self._versions_of_split_params()

    def _undo_what_read_other_params(self) -> None:
        """Undoes early updates if a param with split masters has been written since."""
        if self._may_update_early and self._split_versions != self._versions_of_split_params():
            self.handle.undo_early_updates()

    def _versions_of_split_params(self) -> list[int]:
        return [version_of(local(slot.param)) for slot in self.slots if slot.split]

    # ------------------------------------------------------------------------ changes of weights --

    def see_versions(self) -> None:
        """Notes the versions of params that this engine or the library has written."""
        self._seen = self._look_at_unwatched()

    def _look_at_unwatched(self) -> list[Seen]:
        return [Seen(local(slot.param)) for slot in self._unwatched]

    def _mark_unseen(self) -> None:
        """Tells the library of params that other code has written in place and that have no master apart from them.
        It sees the others itself, when their masters follow."""
        now = self._look_at_unwatched()
        written = [slot.id for slot, seen, before in zip(self._unwatched, now, self._seen) if seen.differs_from(before)]
        if written:
            self.handle.mark_changed(written)
            self._seen = now

    def mark_changed(self) -> None:
        """Treats all params as changed, if changes are tracked."""
        if self._is_tracked:
            self.handle.mark_changed()

    def before_changes(self) -> None:
        """Waits for steps, and has the library notice what other code has written to params."""
        self.settle()
        self._mark_unseen()
        self.refresh_masters()
        self.wait()

    def undo_early_updates(self) -> None:
        """Brings state back to what it was before the library updated it early, and waits for that."""
        if self._may_update_early:
            with contextlib.suppress(abi.PoisonedError):  # the library has undone them itself
                self.handle.wait(self.handle.undo_early_updates())

    # ------------------------------------------------------------------------------ checkpoints --

    def before_save(self) -> None:
        """Updates masters and dense copies from the params."""
        for slot in self.slots:
            if not slot.row_major:
                raise abi.UnsupportedError(
                    f"parameter {slot.name!r} has strides {slot.stride}, and checkpoints hold elements "
                    "in the order of dimensions; make it contiguous(), or save state_dict()"
                )
        for slot in self.slots:
            if self.released_storages is not None and slot in self.masters.written_before_offload:
                raise abi.InvalidStateError(
                    f"parameter {slot.name!r} has been written and then offloaded, and its master does "
                    "not have the new value yet; call reload(params=True) before saving"
                )
        self._count_loaded_moments(self.slots)
        self._push_empty_counts()
        self._await_refresh(self.refresh_masters())

    def _push_empty_counts(self) -> None:
        """Sets the step counts of params without elements: torch counts their steps, the library does not."""
        empty = [slot for slot in self.slots if slot.param.numel() == 0]
        if empty:
            self.settle()
            self.wait()
        for slot in empty:
            self.handle.set_step_count(slot.id, int(self.shown.count_views[slot.id]))

    def after_load(self, steps: int, counts: Mapping[str, int]) -> None:
        """Notes that a load has written params, state and step counts, and that the optimizer's own count is
        `steps`. `counts` are those of params by name: the library sets none where this rank has no element of a
        param that others have elements of."""
        self._note_written(self.slots)
        self._unstepped.clear()
        self.history.note_load(steps)
        for slot in self.slots:
            elsewhere = slot.count == 0 and slot.param.numel() > 0
            count = counts.get(slot.name, 0) if elsewhere else self._stored_count(slot)
            self.shown.count_views[slot.id].fill_(count)
            # A master with more bits than its param cannot be made from the param by another engine.
            if count > 0 or self.masters.has_low_bits(slot):
                self.shown.note_due([slot])
        self.shown.refresh_copies()
        self.shown.note_counts()
