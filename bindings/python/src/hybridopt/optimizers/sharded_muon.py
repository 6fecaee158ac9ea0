"""ShardedMuon: Muon for models whose matrices are cut between ranks, as FSDP2 and tensor parallel layers cut them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.distributed.tensor import DTensor

from .. import abi
from ..params.hyperparameters import named_algorithm
from ..params.matrices import cut_by
from ..params.sharding import SHARD_ATTRIBUTE, TensorShard
from ..params.tensors import local_gradient
from ..ranks import homes
from ..ranks.homes import CutMatrix
from ..steps.plans import Plan, StepResult
from .muon import Muon

# Options that need the params themselves, of which this optimizer has parts alone.
REFUSED = ("overlap",)
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


class _Cut:
    """A matrix of which this rank has a part, and the param that stands for it in the optimizer of this rank."""

    def __init__(self, cut: CutMatrix, param: DTensor) -> None:
        self.cut, self.param = cut, param
        self.is_home = cut.home == dist.get_rank()
        self.whole = Parameter(homes.empty_like(cut, param._local_tensor))
        none = (0,) * len(cut.shape)
        setattr(self.whole, SHARD_ATTRIBUTE, TensorShard(cut.shape, ((none, cut.shape if self.is_home else none),)))

    @property
    def part(self) -> Tensor:
        """This rank's part of the param."""
        return self.param._local_tensor.detach()

    def gather(self) -> None:
        homes.gather(self.cut, self.part, self.whole.detach())

    def gather_gradient(self, is_there: bool) -> None:
        if not is_there:
            self.whole.grad = None
            return
        if self.whole.grad is None:
            self.whole.grad = torch.empty_like(self.whole)
        own = self.param.grad
        part = torch.zeros_like(self.part) if own is None else local_gradient(own, self.param, self.cut.name)
        homes.gather(self.cut, part, self.whole.grad)

    def scatter(self) -> None:
        homes.scatter(self.cut, self.whole.detach(), self.part)


class ShardedMuon(torch.optim.Optimizer):
    """hybridopt.Muon for params of which some are matrices that are cut between ranks (DTensors of FSDP2 and of tensor
    parallel layers). Each of these has one home rank, which keeps its state and updates it as a whole: gradients go
    there and params come back, matrix after matrix, so that the bits are those of an optimizer without shards.
    Groups of AdamW, and params that are whole, are updated where they are. All ranks make and step it together.

    Args:
        params (iterable): as of hybridopt.Muon; muon_groups(model) makes them, before or after the model is sharded.
        process_group (ProcessGroup, default None): the ranks that hold the model; None: all ranks.
        arguments: those of hybridopt.Muon, but overlap.

    homes is the list of these matrices; print() of it shows where each is updated. Save and load with
    save_checkpoint() and load_checkpoint(), at any number of ranks and without shards too.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *arguments: Any,
        process_group: dist.ProcessGroup | None = None,
        **keywords: Any,
    ) -> None:
        for name in REFUSED:
            if keywords.get(name) is not None:
                raise ValueError(f"ShardedMuon does not support {name}={keywords[name]!r}; leave it out")
        groups = _groups_of(params)
        found = [_cut_in(group, index) for index, group in enumerate(groups)]
        cuts = homes.with_homes([cut for of_group in found for cut, _ in of_group])
        homes.check_group(cuts, process_group)
        self.homes = Homes(cuts)
        by_name = {cut.name: cut for cut in cuts}
        self._cuts = [_Cut(by_name[cut.name], param) for of_group in found for cut, param in of_group]
        self._group = process_group
        stand_in: dict[Tensor, Tensor] = {each.param: each.whole for each in self._cuts}
        several = dist.is_initialized() and dist.get_world_size(process_group) > 1
        if several:
            keywords["process_group"] = process_group or dist.group.WORLD
        self._gather()  # the masters begin with these
        self._local = Muon([_replaced(group, stand_in) for group in groups], *arguments, **keywords)
        shown = [
            {**own, "params": [entry[1] if isinstance(entry, tuple) else entry for entry in group["params"]]}
            for own, group in zip(self._local.param_groups, groups)
        ]
        super().__init__(shown, self._local.defaults)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the params that have a gradient, and is complete when it returns. All ranks call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._pass_hyperparameters()
        with torch.no_grad():
            missing = {each.cut.name for each in self._cuts if each.param.grad is None}
            absent = homes.without_gradient(self.homes, missing, self._group) if self._cuts else set()
            for each in self._cuts:
                each.gather()  # the next step follows params that other code has written
                each.gather_gradient(each.cut.name not in absent)
            self._local.step()
            self._scatter()
        return loss

    def _pass_hyperparameters(self) -> None:
        for group, own in zip(self.param_groups, self._local.param_groups):
            own.update((key, value) for key, value in group.items() if key not in _NOT_PARAMS)

    def _gather(self) -> None:
        with torch.no_grad():
            for each in self._cuts:
                each.gather()

    def _scatter(self) -> None:
        with torch.no_grad():
            for each in self._cuts:
                each.scatter()

    # ------------------------------------------------------------------------------------- state --

    def save_checkpoint(self, path: Any, **options: Any) -> Any:
        """As of hybridopt.Muon. All ranks call it."""
        self._pass_hyperparameters()
        self._gather()
        return self._local.save_checkpoint(path, **options)

    def load_checkpoint(self, path: Any, **options: Any) -> Any:
        """As of hybridopt.Muon: sets params and state. All ranks call it."""
        result = self._local.load_checkpoint(path, **options)
        self._scatter()
        return result

    def last_step(self) -> StepResult | None:
        """As of hybridopt.Muon."""
        return self._local.last_step()

    def plan(self) -> Plan:
        """The memory of this rank, as of hybridopt.Muon. print(optimizer.homes) shows which rank updates what."""
        return self._local.plan()

    def close(self) -> None:
        """As of hybridopt.Muon."""
        self._local.close()

    def state_dict(self) -> dict[str, Any]:
        """Refused: the state of a matrix is on its home alone."""
        raise abi.UnsupportedError("ShardedMuon has no state_dict(), because the state of a matrix is on one rank; use save_checkpoint()")

    def load_state_dict(self, state_dict: Any) -> None:
        """Refused, as state_dict()."""
        raise abi.UnsupportedError("ShardedMuon has no load_state_dict(), because the state of a matrix is on one rank; use load_checkpoint()")

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
    for place, entry in enumerate(group["params"]):
        name, param = entry if isinstance(entry, tuple) else (f"param_groups.{index}.{place}", entry)
        if isinstance(param, DTensor) and param.ndim == 2 and cut_by(param):
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
