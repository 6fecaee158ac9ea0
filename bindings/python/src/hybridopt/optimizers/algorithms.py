"""The optimizers: torch's classes with the same names, arguments, checks and state_dicts; and Lion and Signum, which
torch does not have, in the same manner."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import abi
from ..base.checks import check_switch, is_switch
from ..base.modes import in_no_mode
from ..params.hyperparameters import check_arguments, hyperparameters_of
from ..params.tensors import like_param, local
from ..settings.options import OffloadOptions, state_dtype_of, with_options
from ..state.shown import count_dtype
from .optimizer import OffloadOptimizer

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT
    from typing_extensions import Unpack


# Torch before 2.7 has no such argument of Adam.
_ADAM_HAS_DECOUPLED = "decoupled_weight_decay" in inspect.signature(torch.optim.Adam).parameters


def adam_of(group: dict[str, Any], is_decoupled: bool) -> int:
    """Whether a group has Adam or AdamW, if by default its weight decay is decoupled or not. check_values() refuses a
    value that is no switch."""
    decoupled = group.get("decoupled_weight_decay", is_decoupled)
    if is_switch(decoupled):
        is_decoupled = bool(decoupled)
    return abi.OFFLOAD_ADAMW if is_decoupled else abi.OFFLOAD_ADAM


@with_options
class Adam(OffloadOptimizer, torch.optim.Adam):
    """torch.optim.Adam with its state in host memory.

    Args:
        params (iterable): params to optimize, (name, param) pairs such as model.named_parameters(), or
            dicts that are param groups. Any shape; fp32, bf16 or fp16; all on one device. Names are
            the keys of checkpoints.
        lr (float or Tensor, default 1e-3): learning rate. A Tensor has one element.
        betas (two floats, default (0.9, 0.999)): decay a step of the averages of gradient and square, from
            0 to below 1.
        eps (float, default 1e-8): added to the root of the average square.
        weight_decay (float, default 0): L2 penalty, added to the gradient as weight_decay * param.
        amsgrad, capturable, differentiable (bool, default False): True is refused.
        maximize (bool, default False): ascends instead.
        foreach, fused (bool, default None): change nothing here.
        decoupled_weight_decay (bool, default False): True makes it AdamW; needs torch 2.7.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **options: Unpack[OffloadOptions],
    ) -> None:
        self._configure(params, options, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        check_switch("decoupled_weight_decay", decoupled_weight_decay)
        if decoupled_weight_decay and not _ADAM_HAS_DECOUPLED:
            raise TypeError(
                f"torch {torch.__version__} has no Adam with decoupled_weight_decay; use "
                "hybridopt.AdamW, which is that"
            )
        decoupled = {"decoupled_weight_decay": decoupled_weight_decay}
        torch.optim.Adam.__init__(
            self,
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            **(decoupled if _ADAM_HAS_DECOUPLED else {}),
        )

    def _algorithm(self, group: dict[str, Any]) -> int:
        return adam_of(group, False)


@with_options
class AdamW(OffloadOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW with its state in host memory.

    Args:
        params (iterable): params to optimize, (name, param) pairs such as model.named_parameters(), or
            dicts that are param groups. Any shape; fp32, bf16 or fp16; all on one device. Names are
            the keys of checkpoints.
        lr (float or Tensor, default 1e-3): learning rate. A Tensor has one element.
        betas (two floats, default (0.9, 0.999)): decay a step of the averages of gradient and square, from
            0 to below 1.
        eps (float, default 1e-8): added to the root of the average square.
        weight_decay (float, default 1e-2): decoupled: params shrink by lr * weight_decay of themselves.
        amsgrad, capturable, differentiable (bool, default False): True is refused.
        maximize (bool, default False): ascends instead.
        foreach, fused (bool, default None): change nothing here.
        cautious_weight_decay (bool, default False): weight decay leaves out elements that the update
            without it moves away from zero (Chen et al., "Cautious Weight Decay", 2025). torch's has no
            such argument.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        cautious_weight_decay: bool = False,
        **options: Unpack[OffloadOptions],
    ) -> None:
        self._configure(params, options, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        torch.optim.AdamW.__init__(
            self,
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        if cautious_weight_decay is not False:  # otherwise groups and state_dicts are the same as torch's
            self.defaults["cautious_weight_decay"] = cautious_weight_decay
            self._fill_groups()
            for index, algorithm in enumerate(self._algorithms_of(self.param_groups)):
                hyperparameters_of(algorithm, index, self.param_groups[index])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._fill_groups()

    def _fill_groups(self) -> None:
        """Adds the hyperparameters that torch's constructor and state_dicts do not have."""
        if "cautious_weight_decay" in self.defaults:
            for group in self.param_groups:
                group.setdefault("cautious_weight_decay", self.defaults["cautious_weight_decay"])

    def _algorithm(self, group: dict[str, Any]) -> int:
        return adam_of(group, True)


@with_options
class SGD(OffloadOptimizer, torch.optim.SGD):
    """torch.optim.SGD with its momentum in host memory.

    Args:
        params (iterable): params to optimize, (name, param) pairs such as model.named_parameters(), or
            dicts that are param groups. Any shape; fp32, bf16 or fp16; all on one device. Names are
            the keys of checkpoints.
        lr (float or Tensor, default 1e-3): learning rate. A Tensor has one element.
        momentum (float, default 0): share of the momentum that a step keeps. 0: no momentum, and no
            state but masters.
        dampening (float, default 0): share of the gradient that momentum does not take.
        weight_decay (float, default 0): L2 penalty, added to the gradient as weight_decay * param.
        nesterov (bool, default False): looks one step of the momentum ahead.
        maximize (bool, default False): ascends instead.
        differentiable (bool, default False): True is refused.
        foreach, fused (bool, default None): change nothing here.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[OffloadOptions],
    ) -> None:
        self._configure(params, options, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay)
        torch.optim.SGD.__init__(
            self,
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )

    def _algorithm(self, group: dict[str, Any]) -> int:
        return abi.OFFLOAD_SGD


class _FromPaper(OffloadOptimizer):
    """An optimizer that torch does not have. It checks its arguments as torch's optimizers do."""

    def _start(
        self,
        params: ParamsT,
        options: OffloadOptions,
        lr: float | Tensor,
        weight_decay: float,
        switches: dict[str, bool | None],
        **hyperparameters: Any,
    ) -> None:
        self._configure(params, options, lr=lr, weight_decay=weight_decay)
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        if not lr >= 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        if not weight_decay >= 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        if switches["foreach"] and switches["fused"]:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        defaults = {"lr": lr, **hyperparameters, "weight_decay": weight_decay, **switches}
        OffloadOptimizer.__init__(self, params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a state_dict of another class may lack these
            group.setdefault("foreach", None)
            group.setdefault("maximize", False)
            group.setdefault("differentiable", False)
            group.setdefault("fused", None)


@with_options
class Lion(_FromPaper):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023) with its momentum in
    host memory.

    Args:
        params (iterable): params to optimize, (name, param) pairs such as model.named_parameters(), or
            dicts that are param groups. Any shape; fp32, bf16 or fp16; all on one device. Names are
            the keys of checkpoints.
        lr (float or Tensor, default 1e-4): learning rate. A Tensor has one element.
            Each element moves by just this much.
        betas (two floats, default (0.9, 0.99)): share of the momentum in the direction of a step, and what
            a step keeps of it, from 0 to below 1.
        weight_decay (float, default 0): decoupled: params shrink by lr * weight_decay of themselves.
        maximize (bool, default False): ascends instead.
        differentiable (bool, default False): True is refused.
        foreach, fused (bool, default None): change nothing here.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[OffloadOptions],
    ) -> None:
        check_arguments(betas=betas)
        for index, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        switches = {
            "foreach": foreach,
            "maximize": maximize,
            "differentiable": differentiable,
            "fused": fused,
        }
        self._start(params, options, lr, weight_decay, switches, betas=betas)

    def _algorithm(self, group: dict[str, Any]) -> int:
        return abi.OFFLOAD_LION


@with_options
class Signum(_FromPaper):
    """Signum, that is signSGD with momentum (Bernstein et al., "signSGD: Compressed Optimisation for
    Non-Convex Problems", 2018), with its momentum in host memory.

    Args:
        params (iterable): params to optimize, (name, param) pairs such as model.named_parameters(), or
            dicts that are param groups. Any shape; fp32, bf16 or fp16; all on one device. Names are
            the keys of checkpoints.
        lr (float or Tensor, default 1e-4): learning rate. A Tensor has one element.
            Each element moves by just this much.
        momentum (float, default 0.9): share of the momentum that a step keeps, from 0 to below 1.
        weight_decay (float, default 0): decoupled: params shrink by lr * weight_decay of themselves.
        maximize (bool, default False): ascends instead.
        differentiable (bool, default False): True is refused.
        foreach, fused (bool, default None): change nothing here.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        momentum: float = 0.9,
        weight_decay: float = 0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[OffloadOptions],
    ) -> None:
        check_arguments(momentum=momentum)
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"Invalid momentum value: {momentum}")
        switches = {
            "foreach": foreach,
            "maximize": maximize,
            "differentiable": differentiable,
            "fused": fused,
        }
        self._start(params, options, lr, weight_decay, switches, momentum=momentum)

    def _algorithm(self, group: dict[str, Any]) -> int:
        return abi.OFFLOAD_SIGNUM


@with_options
class Adagrad(OffloadOptimizer, torch.optim.Adagrad):
    """torch.optim.Adagrad with its sums in host memory.

    Args:
        params (iterable): params to optimize, (name, param) pairs such as model.named_parameters(), or
            dicts that are param groups. Any shape; fp32, bf16 or fp16; all on one device. Names are
            the keys of checkpoints.
        lr (float or Tensor, default 1e-2): learning rate. A Tensor has one element.
        lr_decay (float, default 0): step k is made with lr / (1 + (k - 1) * lr_decay).
        weight_decay (float, default 0): L2 penalty, added to the gradient as weight_decay * param.
        initial_accumulator_value (float, default 0): the sums of squares before the first step.
        eps (float, default 1e-10): added to the root of the sum.
        maximize (bool, default False): ascends instead.
        differentiable (bool, default False): True is refused.
        foreach, fused (bool, default None): change nothing here.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[OffloadOptions],
    ) -> None:
        self._configure(
            params,
            options,
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
        )
        # torch's constructor would make all sums on the device; it shall only check the arguments.
        checked = torch.optim.Adagrad(
            [torch.zeros(1, device="cpu")],
            lr,
            lr_decay,
            weight_decay,
            initial_accumulator_value,
            eps,
            foreach,
            maximize=maximize,
            differentiable=differentiable,
            fused=fused,
        )
        torch.optim.Optimizer.__init__(self, params, checked.defaults)

    @in_no_mode
    def _fill_state(self) -> None:
        """As in torch's Adagrad, all params have state before their first step. It is made when `state` is first
        read, and the first step takes it over. Entries that were deleted since do not come back."""
        super()._fill_state()
        seen: set[Tensor] = vars(self).setdefault("_shown_from_the_start", set())
        for group, algorithm in zip(self.param_groups, self._algorithms_of(self.param_groups)):
            for param in group["params"] if algorithm == abi.OFFLOAD_ADAGRAD else ():
                if param not in seen and dict.get(self._state, param) is None:
                    begin = group["initial_accumulator_value"]
                    dtype = state_dtype_of(self._options["state_dtype"])
                    sums = torch.full(local(param).shape, begin, dtype=dtype, device="cpu")
                    count = torch.zeros((), dtype=count_dtype(), device="cpu")
                    entry = {"step": count, "sum": like_param(sums, param)}
                    dict.__setitem__(self._state, param, entry)
                seen.add(param)

    def _algorithm(self, group: dict[str, Any]) -> int:
        return abi.OFFLOAD_ADAGRAD
