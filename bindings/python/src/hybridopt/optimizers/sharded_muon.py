"""ShardedMuon: Muon for models whose matrices are cut between ranks, as FSDP2 and tensor parallel layers cut them."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.distributed.tensor import DTensor

from .. import abi
from ..base.checks import refuse_assignment
from ..base.modes import in_no_mode
from ..base.owned_hooks import Removal
from ..hiding.going_home import GoingHome
from ..hiding.way_back import WayBack
from ..params.hyperparameters import named_algorithm
from ..params.matrices import cut_by
from ..params.registered import MASTER, MASTER_LOW
from ..params.sharding import SHARD_ATTRIBUTE, TensorShard
from ..params.tensors import gradient_dtype, gradient_of, local, local_gradient, set_gradient
from ..ranks import home_state, homes
from ..ranks.homes import CutMatrix, Gathering
from ..settings.options import WAYS_OUT
from ..state import loading
from ..steps.history import MemorySample
from ..steps.plans import Plan, Stats, StepResult
from . import grad_scaler
from .muon import Muon

_NOT_PARAMS = ("params", "param_names")


class Homes(list[CutMatrix]):
    """The matrices that are cut between ranks, and the home of each. str() is a table."""

    def __str__(self) -> str:
        total = sum(cut.cost for cut in self) or 1
        lines = [
            f"{cut.name}  {' x '.join(map(str, cut.shape))}  rank {cut.home} of {len(cut.runs)}  "
            f"{cut.cost / total:.1%} of the work"
            for cut in self
        ]
        shares: dict[int, int] = {}
        for cut in self:
            shares[cut.home] = shares.get(cut.home, 0) + cut.cost
        lines += [f"rank {rank}: {share / total:.1%} of the work" for rank, share in sorted(shares.items())]
        return "\n".join(lines) or "no matrix is cut between ranks"


@dataclasses.dataclass(frozen=True)
class ShardedPlan(Plan):
    """The memory of this rank, and which rank updates what. str() shows both."""

    homes: Homes = dataclasses.field(repr=False)
    home_bytes: int  # on the device, beside the shards: matrices whose home is this rank, and their gradients
    message_bytes: int  # on the device: about what messages of the largest matrix take; if gradients are hooked, of all

    def __str__(self) -> str:
        return f"{self!r}\n{self.homes}"


class _Cut:
    """A matrix of which this rank has a part, and the param that stands for it in the optimizer of this rank."""

    def __init__(self, cut: CutMatrix, param: DTensor) -> None:
        self.cut, self.param = cut, param
        self.is_home = cut.home == dist.get_rank()
        self.whole = Parameter(homes.empty_like(cut, param._local_tensor), requires_grad=param.requires_grad)
        self.whole.decoupled_grad = None  # type: ignore[attr-defined]  # a gradient of any dtype
        none = (0,) * len(cut.shape)
        setattr(self.whole, SHARD_ATTRIBUTE, TensorShard(cut.shape, ((none, cut.shape if self.is_home else none),)))

    @property
    def name(self) -> str:
        return self.cut.name

    @property
    def part(self) -> Tensor:
        """This rank's part of the param."""
        return self.param._local_tensor.detach()

    def gather(self) -> None:
        self.whole.requires_grad_(self.param.requires_grad)
        homes.gather(self.cut, self.part, self.whole.detach())

    def gather_gradient(self, dtype: torch.dtype | None, hooked: Gathering | Tensor | None) -> None:
        """Gets the gradient, which has this dtype; None: there is none on any rank. `hooked`: what hooks have taken of
        it, or have sent home."""
        if dtype is None:
            if isinstance(hooked, Gathering):
                hooked.end(None)
            set_gradient(self.whole, None)
            return
        whole, own = gradient_of(self.whole), self.param.grad
        if whole is None or whole.dtype != dtype:
            whole = torch.empty_like(self.whole, dtype=dtype)
        if hooked is None:
            part = torch.zeros_like(self.part) if own is None else local_gradient(own, self.param, self.cut.name)
            hooked = Gathering(self.cut, part.to(dtype))
        elif isinstance(hooked, Tensor):
            hooked = Gathering(self.cut, hooked)
        hooked.end(whole)
        set_gradient(self.whole, whole)

    def without_memory(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Tensors that tell the names, dtypes and shapes of the state of this rank's part."""
        return {key: home_state.without_memory(self.cut, self.param, value) for key, value in entry.items()}

    def scatter(self, part: Tensor) -> None:
        homes.scatter(self.cut, self.whole.detach(), part)


# Options that need the params themselves, of which this optimizer has parts alone.
REFUSED = ("keep_addresses", "track_changes")


class ShardedMuon(torch.optim.Optimizer):
    """hybridopt.Muon for params of which some are matrices that are cut between ranks (DTensors of FSDP2 and of tensor
    parallel layers). Each of these has one home rank, which keeps its state and updates it as a whole: gradients go
    there and params come back, matrix after matrix, so that the bits are those of an optimizer without shards.
    Groups of AdamW, and params that are whole, are updated where they are. All ranks make and step it together.

    Args:
        params (iterable): as of hybridopt.Muon; muon_groups(model) makes them, before or after the model is sharded.
        process_group (ProcessGroup, default None): the ranks that hold the model; None: all ranks.
        arguments: those of hybridopt.Muon, but keep_addresses and track_changes.

    homes is the list of these matrices; print() of it shows where each is updated. save_checkpoint() stores matrices
    whole, and state_dict() shows their state in shards, as torch.distributed.checkpoint needs it.
    """

    _step_supports_amp_scaling = True  # as of hybridopt.Muon
    _way_back: WayBack | None = None  # if steps overlap
    _going_home: GoingHome | None = None  # if gradients are hooked

    def __init__(
        self,
        params: Iterable[Any],
        *arguments: Any,
        process_group: dist.ProcessGroup | None = None,
        **keywords: Any,
    ) -> None:
        for name in REFUSED:
            if keywords.get(name) not in (None, False):
                raise ValueError(f"ShardedMuon does not support {name}={keywords[name]!r}; leave it out")
        model = keywords.pop("overlap", None)
        groups = _groups_of(params)
        found = [_cut_in(group, index) for index, group in enumerate(groups)]
        cuts = homes.with_homes([cut for of_group in found for cut, _ in of_group], process_group)
        homes.check_group(cuts, process_group)
        self._has_ranks = dist.is_initialized() and dist.get_world_size(process_group) > 1
        if self._has_ranks:
            homes.check_alike(cuts, process_group)
        self.homes = Homes(cuts)
        self._cuts = [_Cut(cut, param) for cut, (_, param) in zip(cuts, chain.from_iterable(found))]
        self._group = process_group
        self._shown: dict[int, weakref.ref[Any]] = {}  # the shards of the last state_dict(), by id
        stand_in: dict[Tensor, Tensor] = {each.param: each.whole for each in self._cuts}
        if self._has_ranks:
            keywords["process_group"] = process_group or dist.group.WORLD
        self._gather()  # the masters begin with these
        self._local = Muon([_replaced(group, stand_in) for group in groups], *arguments, **keywords)
        shown = [
            {**own, "params": [entry[1] if isinstance(entry, tuple) else entry for entry in group["params"]]}
            for own, group in zip(self._local.param_groups, groups)
        ]
        super().__init__(shown, self._local.defaults)
        if model is not None:
            self.overlap(model)

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_assignment(self, name, value, WAYS_OUT)
        super().__setattr__(name, value)

    @property
    def max_grad_norm(self) -> float | None:
        """As of hybridopt.Muon."""
        return self._local.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, max_grad_norm: float | None) -> None:
        self._local.max_grad_norm = max_grad_norm

    # ------------------------------------------------------------------------------------ step --

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the params that have a gradient. Unless overlap() was called, the step is complete when this returns.
        All ranks call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._finish()
        self._pass_hyperparameters()
        with torch.no_grad(), self._scaled():
            self._gather_gradients()
            self._gather()  # the step follows params that other code has written
            self._local.step()
            if self._way_back is None:
                self._scatter()
            else:
                self._way_back.begin()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. All ranks call it, if hook_gradients() has been called."""
        if self._going_home is not None:
            self._going_home.drop()
        self._local.zero_grad(set_to_none)  # waits, if zeros are to be written, for a step that reads the gradients
        super().zero_grad(set_to_none)
        if self._going_home is not None:
            (self._going_home.forget_gradients if set_to_none else self._going_home.set_zeros)()

    @contextlib.contextmanager
    def _scaled(self) -> Iterator[None]:
        """In this context the optimizer of this rank has the scale of a GradScaler that steps this one, and the verdict of
        all ranks on Inf and NaN."""
        given = {name: getattr(self, name) for name in grad_scaler.ATTRIBUTES & vars(self).keys()}
        if given and self._going_home is not None:
            raise abi.UnsupportedError(
                "hook_gradients() of ShardedMuon does not go with a GradScaler, which finds no gradients; leave one of them out"
            )
        if self._has_ranks and "found_inf" in given:
            found = float(given["found_inf"]) != 0.0
            given["found_inf"] = torch.tensor(float(any(homes.told(found, self._group).values())))
        vars(self._local).update(given)
        try:
            yield
        finally:
            for name in given:
                del vars(self._local)[name]

    def _pass_hyperparameters(self) -> None:
        for group, own in zip(self.param_groups, self._local.param_groups):
            own.update((key, value) for key, value in group.items() if key not in _NOT_PARAMS)

    def _gather(self) -> None:
        with torch.no_grad():
            for each in self._cuts:
                each.gather()

    def _gather_gradients(self) -> None:
        if not self._has_ranks:
            return
        own = [None if each.param.grad is None else each.param.grad.dtype for each in self._cuts]
        going_home = self._going_home
        if going_home is None:
            hooked: list[Gathering | Tensor | None] = [None] * len(own)
        else:
            going_home.settle()
            hooked = [going_home.parts_of(number) for number in range(len(own))]
            own = [going_home.dtype_of(number) or dtype for number, dtype in enumerate(own)]
            going_home.end_round()
        try:
            dtypes = homes.gradient_dtypes(self.homes, own, self._group)
        except ValueError:
            for each in hooked:
                if isinstance(each, Gathering):
                    each.end(None)
            raise
        for cut, dtype, each in reversed(list(zip(self._cuts, dtypes, hooked))):
            cut.gather_gradient(dtype, each)

    def _scatter(self) -> None:
        with torch.no_grad():
            for each in self._cuts:
                each.scatter(each.part)

    def _finish(self, call: str = "") -> None:
        """Brings back the matrices of a step under way, for a call that may not come before the step of gradients that
        are on their way. All ranks call it."""
        if call and self._going_home is not None:
            self._going_home.refuse(call)
        if self._way_back is not None:
            self._way_back.finish()

    # ------------------------------------------------------------------------------------- state --

    @property  # type: ignore[override]
    def state(self) -> Mapping[Tensor, dict[str, Any]]:
        """Per param, as of hybridopt.Muon; but of a matrix that ranks share it has tensors without memory (on "meta"), because
        only the home has its state. state_dict() has all state, and load_state_dict() takes it."""
        cut_of = {each.whole: each for each in self._cuts}
        entries: dict[Tensor, dict[str, Any]] = {}
        for param, entry in self._local.state.items():
            each = cut_of.get(param)
            entries[param if each is None else each.param] = entry if each is None else each.without_memory(entry)
        return MappingProxyType(entries)

    @state.setter
    def state(self, content: Mapping[Any, Any]) -> None:
        if content:
            raise abi.UnsupportedError("the state of ShardedMuon cannot be assigned, because that of a matrix is on one rank; use load_state_dict()")

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As torch's, for torch.distributed.checkpoint too: the state of a matrix that ranks share is a DTensor with the
        placements of the param, in host memory. All ranks call it."""
        self._finish("state_dict() is called")
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._pass_hyperparameters()
        state_dict = self._local.state_dict()
        state, places = state_dict["state"], self._places()
        whole = [state.pop(place, {}) for place in places]
        if self._has_ranks:
            shards = home_state.in_shards(self.homes, self._params(), whole, self._group)
            state.update((place, entry) for place, entry in zip(places, shards) if entry)
            self._shown = {id(value): weakref.ref(value) for entry in shards for value in entry.values() if isinstance(value, Tensor)}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state_dict of this class, of any number of ranks; of hybridopt.Muon; or of torch.optim.Muon. Tensors are
        whole, the same on all ranks, or DTensors. All ranks call it."""
        self._finish("load_state_dict() is called")
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        loading.groups_of(state_dict, self._local.param_groups, self._local.defaults, self._local._kind())
        keys = list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
        state, places = dict(state_dict["state"]), [keys[place] for place in self._places()]
        shards = [self._loaded(state.pop(key, {})) for key in places]
        if self._has_ranks:
            whole = home_state.at_homes(self.homes, self._params(), shards, self._group)
            state.update((key, entry) for key, entry in zip(places, whole) if entry)
        self._local.load_state_dict({**state_dict, "state": state})
        for group, own in zip(self.param_groups, self._local.param_groups):
            group.update((key, value) for key, value in own.items() if key not in _NOT_PARAMS)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _loaded(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Without the present master if there is a loaded one: set_optimizer_state_dict() of torch.distributed.checkpoint
        adds the loaded values to the present state_dict, in which another master layout has another key."""
        masters = [key for key in (MASTER, MASTER_LOW) if entry.get(key) is not None]
        present = [key for key in masters if self._is_shown(entry[key])] if len(masters) > 1 else []
        return {key: value for key, value in entry.items() if key not in present}

    def _is_shown(self, value: Any) -> bool:
        """Whether the last state_dict() has this very tensor."""
        shown = self._shown.get(id(value))
        return shown is not None and shown() is value

    def _params(self) -> list[DTensor]:
        return [each.param for each in self._cuts]

    def _places(self) -> list[int]:
        """The number of each matrix among all params, as state_dicts count them."""
        params = chain.from_iterable(group["params"] for group in self._local.param_groups)
        place_of = {param: place for place, param in enumerate(params)}
        return [place_of[each.whole] for each in self._cuts]

    def __getstate__(self) -> Any:
        raise abi.UnsupportedError("ShardedMuon cannot be copied or pickled, because its state is on several ranks; make a new one, and load state_dict() into it")

    @in_no_mode
    def overlap(self, model: nn.Module) -> Removal:
        """As of hybridopt.Muon: step() sends gradients to the homes and returns, and params come back at the begin of the
        model's next forward pass, or where other code first uses one of them. All ranks do that in the same order among
        their messages, as all calls of a program in which they do alike: a use on one rank alone waits for the others.
        All ranks call this."""
        removal = self._local.overlap(model)
        if not self._cuts:
            return removal
        self._way_back = WayBack(self, model, self._cuts)
        return Removal(self._way_back, f"overlap({type(model).__name__}) of ShardedMuon")

    @in_no_mode
    def hook_gradients(self, *, micro_batches: int | None = 1) -> Removal:
        """As of hybridopt.Muon, but that gradients of matrices which ranks share go to their homes during the backward
        pass, in one order on all ranks, instead of to the host. Until the step, or zero_grad(), which drops them, no
        state may be saved or loaded. All ranks call this, and zero_grad() from then on."""
        if self._going_home is not None:
            raise abi.InvalidStateError(
                "gradients are hooked already; call remove() on what hook_gradients() returned"
            )
        removal = self._local.hook_gradients(micro_batches=micro_batches)
        if not self._has_ranks:
            return removal
        self._going_home = GoingHome(self, self._cuts, self._group, micro_batches)
        return Removal(self._going_home, "hook_gradients() of ShardedMuon")

    @contextlib.contextmanager
    def last_micro_batch(self) -> Iterator[None]:
        """As of hybridopt.Muon."""
        own = contextlib.nullcontext() if self._going_home is None else self._going_home.micro_batches.last()
        with own, self._local.last_micro_batch():
            yield

    def synchronize(self) -> None:
        """As of hybridopt.Muon. All ranks call it."""
        self._finish()
        self._local.synchronize()

    def materialize(self) -> None:
        """As of hybridopt.Muon. All ranks call it."""
        self._local.materialize()

    def save_checkpoint(self, path: Any, **options: Any) -> Any:
        """As of hybridopt.Muon. All ranks call it."""
        self._finish("save_checkpoint() is called")
        self._pass_hyperparameters()
        self._gather()
        return self._local.save_checkpoint(path, **options)

    def load_checkpoint(self, path: Any, **options: Any) -> Any:
        """As of hybridopt.Muon: sets params and state. All ranks call it."""
        self._finish("load_checkpoint() is called")
        result = self._local.load_checkpoint(path, **options)
        self._scatter()
        return result

    def offload(self, params: bool = False, grads: bool = False, states: bool = False) -> None:
        """As of hybridopt.Muon, for the state that this rank has: states=True moves it to the host. movable=("states",)
        takes the room for it."""
        if params or grads:
            raise abi.UnsupportedError(
                "ShardedMuon offloads no params and gradients, because it has parts of them alone, which belong to the model; "
                "call offload(states=True) for state alone, and zero_grad() for the memory of gradients"
            )
        self._local.offload(states=states)

    def reload(self, states: bool = False) -> None:
        """As of hybridopt.Muon, for what offload() has moved."""
        self._local.reload(states=states)

    @contextlib.contextmanager
    def offloaded(self, params: bool = False, grads: bool = False, states: bool = True) -> Iterator[None]:
        """As of hybridopt.Muon, for the state that this rank has."""
        self.offload(params=params, grads=grads, states=states)
        try:
            yield
        finally:
            self.reload(states=states)

    def set_offload_fraction(self, offload_fraction: float, disk_fraction: float | None = None) -> None:
        """As of hybridopt.Muon, for the state that this rank has."""
        self._local.set_offload_fraction(offload_fraction, disk_fraction)

    def close(self) -> None:
        """As of hybridopt.Muon. All ranks call it."""
        if self._going_home is not None:
            self._going_home.drop()
            self._going_home.remove()
        if self._way_back is not None:
            self._way_back.remove()
        self._local.close()

    # ----------------------------------------------------------------------------------- reports --

    def last_step(self) -> StepResult:
        """As of hybridopt.Muon."""
        return self._local.last_step()

    def step_results(self) -> list[StepResult]:
        """As of hybridopt.Muon."""
        return self._local.step_results()

    def stats(self) -> Stats:
        """Of this rank, as of hybridopt.Muon."""
        return self._local.stats()

    def memory_timeline(self) -> list[MemorySample]:
        """Of this rank, as of hybridopt.Muon."""
        return self._local.memory_timeline()

    def plan(self) -> ShardedPlan:
        """The memory of this rank, as of hybridopt.Muon, with that of the matrices whose home it is, and all homes."""
        plan = self._local.plan()
        wholes = [each.whole for each in self._cuts]
        home_bytes = sum(whole.nbytes + whole.numel() * gradient_dtype(whole).itemsize for whole in wholes)
        at_once = max if self._going_home is None else sum
        return ShardedPlan(
            **{field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)},
            homes=self.homes,
            home_bytes=home_bytes,
            message_bytes=at_once([0, *(max(each.whole.nbytes, local(each.param).nbytes) for each in self._cuts)]),
        )

    # ----------------------------------------------------------------------------------- refused --

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after the constructor, because homes are given once."""
        if len(self.param_groups) == len(self._local.param_groups):
            raise abi.UnsupportedError("ShardedMuon takes its groups when it is made; make a new one, and load a checkpoint of this one into it")
        super().add_param_group(param_group)


def _groups_of(params: Iterable[Any]) -> list[dict[str, Any]]:
    listed: list[Any] = [params] if isinstance(params, (Tensor, dict)) else list(params)
    groups: list[dict[str, Any]] = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    return [{**group, "params": _entries(group.get("params", []))} for group in groups]


def _entries(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def _cut_in(group: dict[str, Any], index: int) -> list[tuple[CutMatrix, DTensor]]:
    """The matrices of a group that are cut between ranks."""
    if named_algorithm(index, group) not in (None, abi.OFFLOAD_MUON):
        return []
    found = []
    names = group.get("param_names")
    for place, entry in enumerate(group["params"]):
        known = f"param_groups.{index}.{place}" if names is None else names[place]
        name, param = entry if isinstance(entry, tuple) else (known, entry)
        is_stack = bool(group.get("stacked")) and param.ndim == 3
        if isinstance(param, DTensor) and (is_stack or param.ndim == 2) and cut_by(param, is_stack):
            found.append((homes.cut_matrix_of(name, param), param))
    return found


def _replaced(group: dict[str, Any], stand_in: dict[Tensor, Tensor]) -> dict[str, Any]:
    entries = []
    for entry in group["params"]:
        if isinstance(entry, tuple):
            entries.append((entry[0], stand_in.get(entry[1], entry[1])))
        else:
            entries.append(stand_in.get(entry, entry))
    return {**group, "params": entries}
