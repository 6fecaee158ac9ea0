"""Engine: one optimizer of the library, bound to the tensors of one torch optimizer.

Tensors of the optimizer's `state` are views of the library's memory, so nothing is kept twice. What
somebody puts there instead of them is adopted before the next step.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import abi
from .adopting import COUNTED, Adopting
from .history import History
from .masters import MASTER, MASTER_LOW, Masters, Samples
from .modes import in_no_mode
from .moves import Moves
from .tensors import (
    DTYPES,
    STATE_DTYPES,
    arranged,
    cuda_view,
    gradient_dtype,
    gradient_of,
    host_view,
    in_memory_order,
    is_dense,
    is_same_order,
    like_param,
    local,
    local_gradient,
)

if TYPE_CHECKING:
    from .sharding import TensorShard

# The moments of each algorithm by torch's names.
MOMENTS = {
    abi.OFFLOAD_ADAMW: {
        "exp_avg": abi.OFFLOAD_STATE_EXP_AVG,
        "exp_avg_sq": abi.OFFLOAD_STATE_EXP_AVG_SQ,
    },
    abi.OFFLOAD_ADAM: {
        "exp_avg": abi.OFFLOAD_STATE_EXP_AVG,
        "exp_avg_sq": abi.OFFLOAD_STATE_EXP_AVG_SQ,
    },
    abi.OFFLOAD_SGD: {"momentum_buffer": abi.OFFLOAD_STATE_MOMENTUM_BUFFER},
    abi.OFFLOAD_LION: {"exp_avg": abi.OFFLOAD_STATE_EXP_AVG},
    abi.OFFLOAD_ADAGRAD: {"sum": abi.OFFLOAD_STATE_SUM},
}
REMEMBERED_STEPS = 64  # by offload_optimizer_step_result


def refuse_capture() -> None:
    """Before anything asks the device: that would end the capture with a text about something else."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "what the optimizer does runs on the host and cannot be captured into a CUDA graph; call "
            "it outside of torch.cuda.graph()"
        )


def count_dtype() -> torch.dtype:
    """Of step counts, as torch has it: 16 bits would not count beyond 256."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


@dataclass(frozen=True)
class Member:
    """A param of the torch optimizer that takes part."""

    param: Tensor
    name: str
    group: int
    shard: TensorShard | None = None  # None: all of a tensor
    wide_gradient: bool = False  # it has had gradients in fp32 before


class Slot:
    """A member as it is registered."""

    def __init__(
        self,
        id: int,
        member: Member,
        device: torch.device,
        moments: dict[str, int],
        split_masters: bool,
    ) -> None:
        current = local(member.param).detach()
        self.id = id
        self.param = member.param
        self.name = member.name
        self.group = member.group
        self.shard = member.shard
        self.dtype = current.dtype
        self.grad_dtype = gradient_dtype(member.param)
        if self.grad_dtype not in DTYPES or member.wide_gradient:
            self.grad_dtype = torch.float32  # gradients of other dtypes will be converted
        self.shape = current.shape
        self.count = current.numel()
        self.bytes = current.numel() * current.element_size()
        # A param with gaps between its elements is stepped in a dense copy, which is copied back.
        self.copy = None if is_dense(current) else torch.empty_like(current).contiguous()
        bound = current if self.copy is None else self.copy
        self.stride = bound.stride()
        self.row_major = bound.is_contiguous()
        self.address = bound.data_ptr()
        # Of the param. Its address would not tell it from one that was made where it has been freed.
        self.storage = StorageWeakRef(current.untyped_storage())
        self.grad_address = 0
        self.split = split_masters and self.dtype == torch.bfloat16
        # The library holds a master of its own; it must notice when the param is written.
        own_master = self.dtype != torch.float32 or device.type != "cpu"
        # Split masters of a param on a GPU are in halves there only; its host share has them whole.
        self.part_split = self.split and device.type != "cpu"
        self.split_count: int | None = None  # elements that are; the first ones
        self.has_master = own_master and (not self.split or self.part_split)
        self.master: Tensor | None = None  # where the host compares it with the param
        self.version: int | None = None  # of the param when masters were last the same
        self.sample = b""  # some bits of it, as they were then
        self.moments = moments
        self.kinds = dict(moments)
        if self.split:
            self.kinds[MASTER_LOW] = abi.OFFLOAD_STATE_MASTER_LOW
        elif self.dtype != torch.float32:  # an fp32 param shows no master: it is the same
            self.kinds[MASTER] = abi.OFFLOAD_STATE_MASTER
        self.entry: dict[str, Any] | None = None  # in the optimizer's state, made here
        self.views: dict[str, Tensor] = {}
        self.places: dict[str, int] = {}  # where they lie: torch may lead a tensor elsewhere
        self.copies: dict[str, int] = {}  # of views: those of state in two places, with versions
        self.grad: Tensor | None = None
        self.hosted = False  # the library holds the gradient, on the host
        self.hooked = False  # and a hook has brought it there
        self.in_sync = True  # whether masters were those of the param when it was offloaded
        self.hidden = False  # state has been taken from sight while it is offloaded

    def takes_gradient(self) -> bool:
        """Whether the gradient there is, or that which autograd is to make in fp32, would not be
        rounded to fewer bits. (A param of another dtype is refused later.)"""
        if self.grad_dtype == torch.float32 or local(self.param).dtype != self.dtype:
            return True
        dtype = gradient_dtype(self.param)
        return dtype == self.grad_dtype or (
            gradient_of(self.param) is None and dtype != torch.float32
        )

    @property
    def bound(self) -> Tensor:
        return local(self.param).detach() if self.copy is None else self.copy


class Engine(Adopting, Masters, Moves):
    """Registered when made, committed by commit(). Calls wait for nothing but where they say so."""

    def __init__(
        self,
        context: abi.Context,
        device: torch.device,
        algorithm: int,
        groups: list[dict[str, Any]],
        members: list[Member],
        check_weights: bool,
        history: History,
        **options: Any,
    ) -> None:
        self.context = context
        self.device = device
        self.algorithm = algorithm
        self.handle = abi.Optimizer(context, algorithm=algorithm, **options)
        self.check_weights = check_weights
        self.history = history
        self.movable = options.get("movable", 0)
        self.states_out = self.params_out = False
        self.groups = [dict(group) for group in groups]
        for group in groups:
            self.handle.add_group(**group)
        split_masters = options.get("master_layout", 0) == abi.OFFLOAD_MASTER_SPLIT
        self.slots = [
            Slot(id, member, device, self._moments_of(groups[member.group]), split_masters)
            for id, member in enumerate(members)
        ]
        self.slot_of = {slot.param: slot for slot in self.slots}
        self._register()
        self._set_counts(torch.zeros(len(self.slots), dtype=count_dtype(), device="cpu"))
        self._bindings = (abi.offload_binding_t * max(len(self.slots), 1))()
        for binding in self._bindings:
            binding.struct_size = ctypes.sizeof(binding)
        self._active: list[Slot] = []  # with a gradient, as of bind()
        self._unsettled_steps: list[tuple[int, list[Slot]]] = []  # tickets, and who took part
        self._slots_with_copies: list[Slot] = []
        self._kept: Samples | None = None  # of the params that were last in sync together

    # ------------------------------------------------------------------------------ registering --

    def _moments_of(self, group: dict[str, Any]) -> dict[str, int]:
        has_none = self.algorithm == abi.OFFLOAD_SGD and group["momentum"] == 0
        return {} if has_none else MOMENTS[self.algorithm]

    def _register(self) -> None:
        shards = [self._shard(slot) for slot in self.slots]
        self.handle.add_params(
            [
                abi.offload_param_t(
                    group=slot.group,
                    dtype=DTYPES[slot.dtype],
                    grad_dtype=DTYPES[slot.grad_dtype],
                    name=slot.name.encode(),
                    data=slot.address or None,
                    count=slot.count,
                    shard=shard,
                    flags=abi.OFFLOAD_PARAM_REPLICA if slot.shard and slot.shard.replica else 0,
                )
                for slot, shard in zip(self.slots, shards)
            ]
        )

    def _shard(self, slot: Slot) -> Any:
        """What the member says, else the whole tensor, by its dimensions where its elements lie in
        their order."""
        if slot.shard is not None:
            return ctypes.pointer(slot.shard.struct())
        if not slot.row_major or not 1 <= len(slot.shape) <= 8:
            return None
        sizes = ctypes.c_int64 * len(slot.shape)
        return ctypes.pointer(
            abi.offload_shard_t(
                dimensions=len(slot.shape),
                box_count=1,
                global_shape=sizes(*slot.shape),
                box_offsets=sizes(),
                box_extents=sizes(*slot.shape),
            )
        )

    def plan(self) -> abi.offload_plan_t:
        return self.handle.plan()

    def commit(self) -> None:
        self._fill_copies()
        self.handle.commit(self.stream())
        self.keep_masters()
        self.note_in_sync(self.slots)

    def stream(self) -> int:
        """The stream that gradients and params are ready on."""
        if self.device.type == "cuda":
            refuse_capture()
            return torch.cuda.current_stream(self.device).cuda_stream
        return 0

    # --------------------------------------------------------------------------------- stepping --

    def can_take(self, groups: list[dict[str, Any]]) -> bool:
        """A group that was committed without momentum has no buffers for it."""
        return all(
            self._moments_of(new) == self._moments_of(old) for new, old in zip(groups, self.groups)
        )

    def set_groups(self, groups: list[dict[str, Any]]) -> None:
        """Passes on what has changed."""
        for id, group in enumerate(groups):
            if group != self.groups[id]:
                self.handle.set_group(id, **group)
                self.groups[id] = dict(group)

    def bind(self) -> bool:
        """Tells the library where params and gradients are now; False if there is no gradient."""
        self._active = []
        changed = []
        for slot in self.slots:
            address = self._address_of(slot)
            grad = gradient_of(slot.param)
            slot.grad = None if grad is None else self._usable(slot, grad)
            grad_address = 0 if slot.grad is None else slot.grad.data_ptr()
            if slot.grad is not None or slot.hosted:
                self._active.append(slot)
            if self._has_moved(slot, address) or grad_address != slot.grad_address:
                changed.append((slot, address, grad_address))
        self._tell_all(changed)
        return bool(self._active)

    def bind_params(self) -> None:
        """The same for params alone: gradients are told before a step or a move reads them."""
        moved = [(slot, self._address_of(slot), 0) for slot in self.slots]
        self._tell_all([change for change in moved if self._has_moved(*change[:2])])

    def _tell_all(self, changed: list[tuple[Slot, int, int]]) -> None:
        for binding, (slot, address, grad_address) in zip(self._bindings, changed):
            binding.param = slot.id
            binding.data = address or None
            binding.grad = grad_address or None
        self.handle.bind(self._bindings, len(changed))
        for slot, address, grad_address in changed:
            self._note_bound(slot, address, grad_address)

    def storages(self) -> list[torch.UntypedStorage]:
        """Those of bound params, which a save or load must not outlive."""
        return [slot.bound.untyped_storage() for slot in self.slots]

    @staticmethod
    def _has_moved(slot: Slot, address: int) -> bool:
        storage = local(slot.param).untyped_storage()
        return address != slot.address or storage._cdata != slot.storage.cdata

    def _note_bound(self, slot: Slot, address: int, grad_address: int) -> None:
        if self._has_moved(slot, address):
            slot.version = None  # other memory, perhaps with other content
            slot.storage = StorageWeakRef(local(slot.param).untyped_storage())
        slot.address, slot.grad_address = address, grad_address

    def _address_of(self, slot: Slot) -> int:
        current = local(slot.param)
        address = current.data_ptr()
        if (
            address != slot.address
            or current.shape != slot.shape
            or current.stride() != slot.stride
            or current.dtype != slot.dtype
        ):
            self._check_same(slot, current)
        return address if slot.copy is None else slot.address

    def _check_same(self, slot: Slot, current: Tensor) -> None:
        """The library sees no more of a param than its address; all else must be as it was."""
        stride = current.stride()
        # A copy is filled from any strides. Those of one element lead nowhere.
        if slot.copy is not None or is_same_order(slot.shape, stride, slot.stride):
            stride = slot.stride
        for is_so, was_so, now, before in (
            ("has shape", "had shape", tuple(current.shape), tuple(slot.shape)),
            ("has dtype", "had dtype", current.dtype, slot.dtype),
            ("is on", "was on", current.device, self.device),
            ("has strides", "had strides", stride, slot.stride),
        ):
            if now != before:
                raise abi.InvalidStateError(
                    f"parameter {slot.name!r} {is_so} {now}, but its state was made when it {was_so} "
                    f"{before}; make a new optimizer after changing parameters, and load this one's "
                    "state_dict() into it"
                )
        if current.data_ptr() == 0 and slot.count > 0:
            raise abi.InvalidStateError(
                f"parameter {slot.name!r} has no memory: its storage was freed or resized to 0; "
                "bring it back before step()"
            )

    def _usable(self, slot: Slot, grad: Tensor) -> Tensor:
        """The gradient, copied where the library could not read it as it is."""
        grad = local_gradient(grad, slot.param, slot.name)
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"hybridopt does not support sparse gradients; parameter {slot.name!r} has one: make "
                "its layer with sparse=False, or give it to torch.optim.SparseAdam"
            )
        # torch checks what is assigned to .grad, but not .grad.data, nor decoupled_grad.
        wrong = None
        if grad.shape != slot.shape:
            wrong = f"has shape {tuple(grad.shape)}, expected {tuple(slot.shape)}"
        elif grad.device != self.device:
            wrong = f"is on {grad.device}, expected {self.device}"
        elif slot.count > 0 and grad.data_ptr() == 0:
            wrong = "has no memory: its storage was freed or resized to 0"
        if wrong is not None:
            raise abi.InvalidStateError(
                f"the gradient of parameter {slot.name!r} {wrong}; set it to None or compute it again"
            )
        return arranged(grad, slot.grad_dtype, slot.stride)

    def before_save(self) -> None:
        """Masters and copies are what the params are."""
        for slot in self.slots:
            if not slot.row_major:
                raise abi.UnsupportedError(
                    f"parameter {slot.name!r} has strides {slot.stride}, and checkpoints hold elements "
                    "in the order of dimensions; make it contiguous(), or save state_dict()"
                )
        for slot in self.slots:
            if self.params_out and slot.has_master and not slot.in_sync:
                raise abi.InvalidStateError(
                    f"parameter {slot.name!r} has been written and then offloaded, and its master is "
                    "not that yet; call reload(params=True) before saving"
                )
        self._fill_copies()
        self.refresh_masters()

    def after_load(self, state: dict[Tensor, Any], steps: int, most: int) -> None:
        """The library has written params, state and step counts, its own among them, which is `steps`.
        It stores nothing of params without elements, whose steps torch counts: they take `most`, those
        of the param that was stepped most."""
        self._note_written(self.slots)
        self.history.note_load(steps)
        for slot in self.slots:
            kinds = list(slot.kinds.values())
            count = self.view_of(slot, kinds[0]).step_count if kinds else 0
            count = most if slot.count == 0 else count
            self._count_views[slot.id].fill_(count)
            if count > 0 or slot.entry is not None or self._has_low_bits(slot):
                self._publish(slot, state)
        self._refresh_copies()
        self._counts_version = self.counts._version

    def _has_low_bits(self, slot: Slot) -> bool:
        """Whether the master is more than the param: another engine could not make it again."""
        if slot.dtype == torch.float32:
            return False
        return not torch.equal(self.master_of(slot), in_memory_order(slot.bound).cpu().float())

    def _fill_copies(self) -> None:
        if self.params_out:
            return
        for slot in self.slots:
            if slot.copy is not None:
                slot.copy.copy_(local(slot.param))

    def step(self, state: dict[Tensor, Any], **options: Any) -> bool:
        """A step over what is bound, done when this returns. Whether it has been skipped.

        On a GPU the host waits, not the current stream (offload_optimizer_stream_wait): torch's
        copies into memory that is not pinned, such as .cpu(), did not return behind such a wait."""
        self._fill_copies()
        self.refresh_masters()
        if len(self._unsettled_steps) == REMEMBERED_STEPS:
            self.settle(state)
        ticket = self.handle.step(stream=self.stream(), **options)
        self._unsettled_steps.append((ticket, self._active))  # also if Ctrl-C ends the wait
        try:
            self.handle.wait(ticket)  # not for all: a failed save is told to whoever waits for it
        except abi.HybridoptError:
            self._unsettled_steps.pop()  # it has not happened
            raise
        self._note_written(self._active)
        for slot in self._active:
            slot.grad = None
            slot.hosted = False  # a step uses up what the host holds
        return bool(self.handle.step_result(ticket).skipped)

    def _note_written(self, slots: list[Slot]) -> None:
        """As after any operation in place: autograd hears of it, and we know it was us."""
        written = [slot for slot in slots if slot.copy is None]
        torch.autograd.graph.increment_version([slot.param for slot in written])
        for slot in slots:
            if slot.copy is not None:
                local(slot.param).copy_(slot.copy)
        self.note_in_sync(slots)

    # ------------------------------------------------------------------------------------ state --

    def _set_counts(self, counts: Tensor) -> None:
        """One tensor for all, with a view for each, so that a step adds to them in one operation."""
        self.counts = counts
        self._counts_place = counts.data_ptr()
        self._counts_version = counts._version
        self._count_views = list(counts.unbind())

    def wait(self) -> None:
        """Waits for everything queued. Of a failed save its own ticket tells."""
        self.handle.drain()

    def wait_for_steps(self) -> None:
        if self._unsettled_steps:
            self.handle.wait(self._unsettled_steps[-1][0])

    @in_no_mode
    def settle(self, state: dict[Tensor, Any]) -> None:
        """Waits for queued steps, but for no save; then `state` says what they have done."""
        if not self._unsettled_steps:
            return
        self.wait_for_steps()
        steps, self._unsettled_steps = self._unsettled_steps, []
        for ticket, stepped in steps:
            result = self.handle.step_result(ticket)
            self.history.add(result)
            if result.skipped:
                continue
            if len(stepped) == len(self.slots):
                self.counts.add_(1)
            else:
                self.counts[[slot.id for slot in stepped]] += 1
            for slot in stepped:
                if slot.entry is None:
                    self._publish(slot, state)
        self._refresh_copies()
        self._counts_version = self.counts._version

    def _refresh_copies(self) -> None:
        if self._slots_with_copies:
            self.wait()
        for slot in self._slots_with_copies:
            for key in slot.copies:
                view = local(slot.views[key])
                view.copy_(self._arrange(slot, self.read(slot, slot.kinds[key])))
                slot.copies[key] = view._version

    def _publish(self, slot: Slot, state: dict[Tensor, Any]) -> None:
        """Puts views of a param's state where torch has its tensors."""
        if self.algorithm in COUNTED:
            slot.views["step"] = self._count_views[slot.id]
        for key, kind in slot.kinds.items():
            if key not in slot.views:
                self.wait()
                slot.views[key] = like_param(self._view(slot, key, kind), slot.param)
        if not slot.views:
            return
        slot.places = {key: local(view).data_ptr() for key, view in slot.views.items()}
        entry = dict.get(state, slot.param)
        if entry is None:
            entry = {}
            dict.__setitem__(state, slot.param, entry)
        entry.update(slot.views)
        slot.entry = entry

    def _arrange(self, slot: Slot, flat: Tensor) -> Tensor:
        return flat.as_strided(slot.shape, slot.stride)

    def _view(self, slot: Slot, key: str, kind: int) -> Tensor:
        """Zero-copy, but for a param whose state is partly here and partly there, and for lower
        halves of masters that are whole."""
        view = self.view_of(slot, kind)
        if view.device_count == slot.count and slot.count > 0:
            return self._arrange(slot, cuda_view(view, self.handle, self.device))
        flat = self.read(slot, kind)
        if view.host_count < slot.count:
            slot.copies[key] = flat._version
            if slot not in self._slots_with_copies:
                self._slots_with_copies.append(slot)
        return self._arrange(slot, flat)

    def view_of(self, slot: Slot, kind: int) -> abi.offload_state_view_t:
        """Where one kind of state lies. Of lower halves, those that there are."""
        if slot.part_split and kind == abi.OFFLOAD_STATE_MASTER_LOW:
            return self.low_view(slot)
        return self.handle.state(slot.id, kind)

    def read(self, slot: Slot, kind: int) -> Tensor:
        """One kind of state in host memory and memory order; a view if it is all there."""
        view = self.view_of(slot, kind)
        on_host = host_view(view, self.handle)
        if slot.part_split and kind == abi.OFFLOAD_STATE_MASTER_LOW:
            on_host = self.low_of_whole_masters(slot)
        if view.device_count == 0:
            return on_host
        return torch.cat([cuda_view(view, self.handle, self.device).cpu(), on_host])

    def write(self, slot: Slot, kind: int, value: Tensor) -> None:
        """Replaces one kind of state. Nothing may be queued."""
        view = self.view_of(slot, kind)
        flat = in_memory_order(arranged(value.detach(), STATE_DTYPES[view.dtype], slot.stride))
        if slot.part_split and kind == abi.OFFLOAD_STATE_MASTER_LOW:
            self.join_whole_masters(slot, flat[view.device_count :].cpu())
        if view.host_count > 0:
            host_view(view, self.handle).copy_(flat[view.device_count :])
        if view.device_count > 0:
            cuda_view(view, self.handle, self.device).copy_(flat[: view.device_count])

    def leave_device(self) -> None:
        """State on the device moves to host tensors, so that its memory is free for another engine
        when this one ends."""
        for slot in self.slots:
            for key, tensor in slot.views.items():
                if tensor.device.type != "cpu" and slot.entry is not None:
                    slot.entry[key] = tensor.cpu()
            slot.views = {}
