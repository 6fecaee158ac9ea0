"""Muon, which updates the matrices of hidden layers, and the function that finds these in a model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .. import abi
from ..base.checks import check_switch, listed, shown
from ..params.hyperparameters import check_arguments, named_algorithm
from ..settings.options import OffloadOptions, with_options
from . import algorithms
from .optimizer import OffloadOptimizer

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT
    from typing_extensions import Unpack


@with_options
class Muon(OffloadOptimizer):
    """Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024) with its momentum in host
    memory, with the arguments of torch.optim.Muon. Its params are matrices; all others belong in groups with
    algorithm="adamw" (muon_groups() makes both), which have AdamW's defaults. On a GPU only the GPU updates
    params, through cuBLASLt, which torch brings along: what is on the host streams through it.

    Args:
        params (iterable): matrices to optimize, (name, param) pairs, or dicts that are param groups, such as
            those of muon_groups(model). fp32, bf16 or fp16; all on one device. Names are the keys of
            checkpoints.
        lr (float or Tensor, default 1e-3): learning rate of Muon's groups. A Tensor has one element.
        weight_decay (float, default 0.1): of Muon's groups, decoupled: params shrink by lr * weight_decay of
            themselves.
        momentum (float, default 0.95): share of the momentum that a step keeps, from 0 to below 1.
        nesterov (bool, default True): looks one step of the momentum ahead.
        ns_coefficients (three floats or a list of up to 10 such triples, default (3.4445, -4.775, 2.0315)): of each
            step of Newton-Schulz. Steps behind the last triple use it too; there must not be more triples than steps.
        eps (float, default 1e-7): the least by which a matrix is divided before Newton-Schulz.
        ns_steps (int, default 5): steps of Newton-Schulz, 1 to 99.
        adjust_lr_fn (str, default None): "original", which None means too: a matrix has lr * max(1, rows /
            cols)**0.5. "match_rms_adamw": lr * 0.2 * max(rows, cols)**0.5, which fits the learning
            rate of AdamW.
        update_rms (float, default None): if it is given, a matrix has lr * update_rms * max(rows, cols)**0.5, so that
            the root mean square of an update is about lr * update_rms; "match_rms_adamw" is 0.2. Above 0, and not with
            "original". torch's class has no such argument.

    A group may also have `split_rows`, a list of whole numbers: then its params are fused matrices, each part of which is
    updated as a matrix of its own. The list has the rows of each part, as (h, h) for gate and up. If it adds up to fewer
    rows than a matrix has, it is repeated, and a part has its rows of each repetition, as those of queries, keys and
    values of each group. With `stacked=True` params with three dimensions are stacks of matrices, as of experts.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] | Sequence[tuple[float, float, float]] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        update_rms: float | None = None,
        **options: Unpack[OffloadOptions],
    ) -> None:
        self._configure(
            params, options, lr=lr, weight_decay=weight_decay, momentum=momentum, ns_coefficients=ns_coefficients, eps=eps
        )
        check_switch("nesterov", nesterov)
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        if not lr >= 0.0:
            raise ValueError(f"Learning rate should be >= 0 but is: {lr}")
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum should be >= 0 and below 1 but is: {momentum}")
        if not weight_decay >= 0.0:
            raise ValueError(f"weight decay should be >= 0 but is: {weight_decay}")
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "update_rms": update_rms,
        }
        OffloadOptimizer.__init__(self, params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. A group that names another algorithm has the defaults of that one, also for `lr` and
        `weight_decay`, because those of Muon have another scale."""
        if isinstance(param_group, dict):
            algorithm = named_algorithm(len(self.param_groups), param_group)
            if algorithm == abi.OFFLOAD_MUON:
                param_group = {**self.defaults, **param_group}
            elif algorithm is not None:
                param_group = {**_scale_of(algorithm), **param_group}
        super().add_param_group(param_group)

    def _algorithm(self, group: dict[str, Any]) -> int:
        return abi.OFFLOAD_MUON


def _scale_of(algorithm: int) -> dict[str, Any]:
    """The defaults of an algorithm that every algorithm has, but with numbers of its own."""
    arguments = inspect.signature(getattr(algorithms, abi.ALGORITHMS[algorithm].name).__init__).parameters
    return {name: arguments[name].default for name in ("lr", "weight_decay")}


# -------------------------------------------------------------------------------------- groups --


class MuonGroups(list[dict[str, Any]]):
    """The groups of muon_groups(). str() is the table of what went where."""

    def __init__(self, groups: list[dict[str, Any]], rows: list[tuple[str, str, str, str]]) -> None:
        super().__init__(groups)
        self.rows = rows  # algorithm, name, shape, and why, of each param

    def __str__(self) -> str:
        widths = [max(len(row[column]) for row in self.rows) for column in range(3)]
        lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3]]) for row in self.rows]
        return "\n".join(lines)


def muon_groups(
    model: nn.Module,
    *,
    adamw: dict[str, Any] | None = None,
    head: str | None = "auto",
    stacks: Sequence[str] = (),
    splits: Mapping[str, Sequence[int]] | None = None,
) -> MuonGroups:
    """The param groups of a model for Muon: one with the matrices of hidden layers, and one with algorithm="adamw" for
    all else (embeddings, the head, norms, biases, and what has one row, one column or other than two dimensions).
    print() of them shows what went where, and why. Muon's params that are stacked or split have groups of their own.

    Args:
        adamw: hyperparameters of AdamW's group, such as {"lr": 3e-4}. What is left out is AdamW's default.
        head: the name of the layer that makes the model's output, such as "lm_head"; None if the model has none. "auto":
            what get_output_embeddings() of the model says, the layer that shares its weight with an embedding,
            or else the layer with a matrix that the model has registered last.
        stacks: names of params with three dimensions that are stacks of matrices, such as "*.experts.*"; * stands for
            any letters.
        splits: names of fused matrices, written as in stacks, with the rows of their parts (split_rows of Muon's groups),
            such as {"*.gate_up.weight": (1024, 1024)}.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"muon_groups() got a {type(model).__name__}, expected a model (torch.nn.Module)")
    known = [name for name in inspect.signature(algorithms.AdamW).parameters if name not in ("params", "options")]
    for name in adamw or {}:
        if name not in known:
            raise ValueError(f"adamw of muon_groups() has {shown(name)}, expected hyperparameters of AdamW: {', '.join(known)}")
    embeddings = _embeddings_of(model)
    heads = _heads_of(model, head, embeddings)
    chosen = _Chosen(stacks, {} if splits is None else splits)
    muon: dict[tuple[bool, tuple[int, ...]], list[tuple[str, Tensor]]] = {}  # by what a group has to say
    others: list[tuple[str, Tensor]] = []
    rows: list[tuple[str, str, str, str]] = []
    for name, param in model.named_parameters():
        stacked, split_rows = chosen.of(name)
        why = _why_not(name, param, embeddings, heads, stacked)
        if why and (stacked or split_rows):
            raise ValueError(f"stacks or splits of muon_groups() name {name!r}, which Muon does not update: {why}")
        params = others if why else muon.setdefault((stacked, split_rows), [])
        params.append((name, param))
        shape = " x ".join(map(str, param.shape)) or "one number"
        rows.append(("adamw" if why else "muon", name, shape, why or _kind(stacked, split_rows)))
    chosen.check_used()
    if not muon:
        raise ValueError(f"{type(model).__name__} has no matrix of a hidden layer for Muon; use hybridopt.AdamW")
    groups: list[dict[str, Any]] = []
    for (stacked, split_rows), params in muon.items():
        extra = {"stacked": True} if stacked else {}
        groups.append({"params": params, **extra, **({"split_rows": split_rows} if split_rows else {})})
    if others:
        groups.append({"params": others, "algorithm": "adamw", **(adamw or {})})
    return MuonGroups(groups, rows)


class _Chosen:
    """The params that the arguments stacks and splits name."""

    def __init__(self, stacks: Sequence[str], splits: Mapping[str, Sequence[int]]) -> None:
        names = listed(stacks)
        if names is None or not all(isinstance(name, str) for name in names):
            raise TypeError(f"stacks is {shown(stacks)}, expected a list of names, such as ['*.experts.*']")
        if not isinstance(splits, Mapping) or not all(
            isinstance(name, str) and listed(rows) is not None for name, rows in splits.items()
        ):
            raise TypeError(
                f"splits is {shown(splits)}, expected a dict of names with the rows of their parts, such as "
                "{'*.gate_up.weight': (1024, 1024)}"
            )
        self._stacks, self._splits = names, {name: tuple(rows) for name, rows in splits.items()}
        self._unused = dict.fromkeys([*self._stacks, *self._splits])

    def of(self, name: str) -> tuple[bool, tuple[int, ...]]:
        """Whether the param is a stack, and the rows of its parts."""
        stacks = [pattern for pattern in self._stacks if fnmatchcase(name, pattern)]
        splits = [pattern for pattern in self._splits if fnmatchcase(name, pattern)]
        for pattern in stacks + splits:
            self._unused.pop(pattern, None)
        return bool(stacks), self._splits[splits[0]] if splits else ()

    def check_used(self) -> None:
        if self._unused:
            raise ValueError(f"no parameter of the model has the name {shown(next(iter(self._unused)))} of stacks or splits")


def _kind(stacked: bool, split_rows: tuple[int, ...]) -> str:
    what = "stack of matrices" if stacked else "matrix of a hidden layer"
    return f"{what}, in parts of {', '.join(map(str, split_rows))} rows" if split_rows else what


def _embeddings_of(model: nn.Module) -> set[Tensor]:
    modules = (module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    return {module.weight for module in modules}


def _matrices_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, param) for name, param in module.named_parameters(recurse=False) if param.ndim == 2)


def _heads_of(model: nn.Module, head: str | None, embeddings: set[Tensor]) -> set[Tensor]:
    """The matrices of the layer that makes the model's output."""
    if head is None:
        return set()
    if head != "auto":
        modules = dict(model.named_modules())
        found = {param for _, param in _matrices_of(modules[head])} if isinstance(head, str) and head in modules else set()
        if not found:
            raise ValueError(f"head={shown(head)} is no layer of {type(model).__name__} with a matrix of its own, expected one")
        return found
    told = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(told, nn.Module):
        return {param for _, param in _matrices_of(told)}
    layers = [list(_matrices_of(module)) for module in model.modules() if not isinstance(module, nn.Embedding)]
    layers = [matrices for matrices in layers if matrices]
    if any(param in embeddings for matrices in layers for _, param in matrices):
        return set()  # the head is tied to an embedding
    last = layers[-1] if layers else []
    return {param for name, param in last if name == "weight"}


def _why_not(name: str, param: Tensor, embeddings: set[Tensor], heads: set[Tensor], stacked: bool) -> str:
    """Why a param is not updated by Muon; "" if it is."""
    if stacked and param.ndim == 3:
        return ""
    if param.ndim != 2:
        return "no matrix"
    if param in embeddings or "embed" in name.lower():
        return "embedding"
    if param in heads:
        return "head"
    return "one row or column" if 1 in param.shape else ""
