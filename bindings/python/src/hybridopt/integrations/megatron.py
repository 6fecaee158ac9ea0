"""Megatron-LM: after install() the flag --optimizer-cpu-offload and its fraction mean this package. Call it
before the optimizer is made, for instance at the top of pretrain_gpt.py:

    from hybridopt.integrations import megatron
    megatron.install(host_executors="auto")
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..engine.engine import Engine
from ..optimizers import algorithms
from ..optimizers.optimizer import OffloadOptimizer
from ..params.members import Member, takes_part
from ..params.registered import Wanted
from ..settings.options import OffloadOptions, state_dtype_of
from .wrapped import check_options

__all__ = ["HybridAdam", "HybridAdamW", "HybridDeviceOptimizer", "HybridSGD", "install"]


def __dir__() -> list[str]:
    """The names that completion and help() list: only the public ones."""
    return __all__


PLACES = (
    "megatron.core.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.cpu_offloading",
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
)
NAME = "HybridDeviceOptimizer"
MAKER = "_get_megatron_optimizer_based_on_param_groups"

# Options of this package for which Megatron has its own flag or method.
MEGATRONS = {
    "offload_fraction": "set --optimizer-offload-fraction",
    "device_budget_bytes": "set --optimizer-offload-fraction",
    "device_headroom": "set --optimizer-offload-fraction",
    "max_grad_norm": "Megatron clips by itself: set --clip-grad",
    "process_group": "Megatron agrees on the norm by itself",
    "replica_group": "Megatron agrees on the norm by itself",
    "overlap": "Megatron's optimizer does not know the model",
}
# Arguments of Megatron's HybridDeviceOptimizer that are no hyperparameters.
OWN_ARGUMENTS = (
    "offload_fraction",
    "cpu_optimizer_cls",
    "gpu_optimizer_cls",
    "param_update_in_fp32",
    "pin_cpu_grads",
    "pin_cpu_params",
    "overlap_cpu_optimizer_d2h_h2d",
)
installed_options: dict[str, Any] = {}  # some of OffloadOptions
making_for: Any = None  # the OptimizerConfig while Megatron makes an optimizer


def class_for(cpu_optimizer_cls: type[torch.optim.Optimizer] | None) -> type[HybridDeviceOptimizer]:
    """The algorithm of the class with which Megatron would step on the CPU."""
    for theirs, ours in ((torch.optim.AdamW, HybridAdamW), (torch.optim.Adam, HybridAdam), (torch.optim.SGD, HybridSGD)):
        if isinstance(cpu_optimizer_cls, type) and issubclass(cpu_optimizer_cls, theirs):
            return ours
    raise ValueError(
        f"cpu_optimizer_cls={cpu_optimizer_cls}, expected torch.optim.AdamW, Adam or SGD; leave "
        "--optimizer-cpu-offload out for another optimizer"
    )


class HybridDeviceOptimizer(OffloadOptimizer):
    """The class that Megatron knows by this name. Megatron first makes an object for all params, and then one for this
    rank's shards. So an object takes memory only at its first step, or when it first loads a checkpoint."""

    _shows_all_masters = False
    _has_wide_gradients = False

    def __new__(cls, *args: Any, **kwargs: Any) -> HybridDeviceOptimizer:
        if cls is HybridDeviceOptimizer:
            cls = class_for(kwargs.get("cpu_optimizer_cls"))
        made: HybridDeviceOptimizer = object.__new__(cls)
        return made

    def __init__(
        self,
        params: Any,
        offload_fraction: float = 0.5,
        cpu_optimizer_cls: type[torch.optim.Optimizer] | None = None,
        gpu_optimizer_cls: type[torch.optim.Optimizer] | None = None,
        param_update_in_fp32: bool = False,
        pin_cpu_grads: bool = True,
        pin_cpu_params: bool = True,
        overlap_cpu_optimizer_d2h_h2d: bool = True,
        **kwargs: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in OWN_ARGUMENTS}
        self._shows_all_masters = param_update_in_fp32
        options: Any = {"pin": pin_cpu_grads and pin_cpu_params, **installed_options}
        if making_for is not None:
            options.update(options_of(making_for))
            self._has_wide_gradients = making_for.main_grads_dtype == torch.float32
        options["offload_fraction"] = float(offload_fraction)
        self._configure(params, options)
        torch.optim.Optimizer.__init__(self, params, hyperparameters_of(cpu_optimizer_cls, kwargs))
        # Megatron makes the next one with **self.defaults.
        self.defaults = {**self.defaults, **given}

    @contextlib.contextmanager
    def _torchs_defaults(self) -> Iterator[None]:
        """In this context `defaults` has only hyperparameters: torch copies them into each param group, and requires
        them of groups that are loaded."""
        whole = self.defaults
        self.defaults = {name: value for name, value in whole.items() if name not in OWN_ARGUMENTS}
        try:
            yield
        finally:
            self.defaults = whole

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for name in OWN_ARGUMENTS:
            param_group.pop(name, None)
        with self._torchs_defaults():
            super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but the state is taken over at once: Megatron reads step counts from `state` before this call
        and writes them into `state` after it."""
        groups = [
            {name: value for name, value in group.items() if name not in OWN_ARGUMENTS}
            for group in state_dict["param_groups"]
        ]
        with self._torchs_defaults():
            super().load_state_dict({**state_dict, "param_groups": groups})
        if state_dict["state"]:
            self._ready_engine()

    def _committed_engine(self, *args: Any) -> Engine | None:
        """Shards of params do not have requires_grad, and get gradients just before a step."""
        others = [p for group in self.param_groups for p in group["params"] if not takes_part(p)]
        for param in others:
            param.requires_grad_(True)
        try:
            return super()._committed_engine(*args)
        finally:
            for param in others:
                param.requires_grad_(False)

    def _new_engine(self, members: list[Member], wanted: Wanted) -> Engine:
        """This package puts the first params on the device, but users of the flag expect the first ones on the host."""
        if self._has_wide_gradients:
            members = [member._replace(wide_gradient=True) for member in members]
        engine = super()._new_engine(members[::-1], wanted)
        engine.shown.shows_all_masters = self._shows_all_masters
        return engine

    # ------------------------------------------------------------- what else Megatron calls --

    @property
    def sub_optimizers(self) -> list[torch.optim.Optimizer]:
        return [self]

    @property
    def param_to_fp32_param(self) -> dict[Tensor, Tensor]:
        """The masters of params in lower precision."""
        engine = self._ready_engine()
        return {
            slot.param: self.master_of(slot.param)
            for slot in reversed(engine.slots)
            if slot.dtype != torch.float32
        }

    def dummy_step(self) -> None:
        """Shows all state from now on, so that it can be loaded into. No param is stepped."""
        engine = self._ready_engine()
        engine.shown.note_due(engine.slots[::-1])

    def _sync_hdo_state_to_sub_optimizers(self) -> None:
        """Takes over `state`, which has been loaded, so that the loaded tensors need not be kept."""
        self._ready_engine()

    def update_fp32_param_by_new_param(self) -> None:
        """To be called when weights have been loaded without the optimizer's state."""
        self.refresh_masters()


class HybridAdamW(HybridDeviceOptimizer, algorithms.AdamW):
    pass


class HybridAdam(HybridDeviceOptimizer, algorithms.Adam):
    pass


class HybridSGD(HybridDeviceOptimizer, algorithms.SGD):
    pass


def hyperparameters_of(
    cpu_optimizer_cls: type[torch.optim.Optimizer] | None, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The hyperparameters with torch's defaults and checks."""
    assert cpu_optimizer_cls is not None  # class_for() has seen to it
    kwargs = dict(kwargs)
    if not kwargs.pop("bias_correction", True):
        raise ValueError("bias_correction=False, expected True: Adam's averages are always corrected here")
    known = inspect.signature(cpu_optimizer_cls).parameters
    if "decoupled_weight_decay" not in known:  # torch adds it to the defaults of AdamW
        kwargs.pop("decoupled_weight_decay", None)
    for name in kwargs:
        if name not in known:
            raise TypeError(
                f"{NAME} got {name!r}, which torch.optim.{cpu_optimizer_cls.__name__} does not have; expected "
                f"some of {', '.join(known)}"
            )
    checked: dict[str, Any] = cpu_optimizer_cls([torch.zeros(1, device="cpu")], **kwargs).defaults
    return checked


# ------------------------------------------------------------------------------------- installing --


def check(config: Any) -> None:
    """Refuses settings of an OptimizerConfig that contradict each other, or that this package replaces."""
    if not config.optimizer_cpu_offload:
        for flag, is_set in (
            ("--optimizer-offload-fraction", config.optimizer_offload_fraction),
            ("--overlap-cpu-optimizer-d2h-h2d", config.overlap_cpu_optimizer_d2h_h2d),
            ("--use-torch-optimizer-for-cpu-offload", config.use_torch_optimizer_for_cpu_offload),
        ):
            if is_set:
                raise ValueError(f"{flag} is given without --optimizer-cpu-offload; add that, or leave it out")
        return
    if config.optimizer not in ("adam", "sgd"):
        raise ValueError(
            f"--optimizer is {config.optimizer}, expected adam or sgd: with --optimizer-cpu-offload Megatron would "
            "step SGD instead; leave that out for another optimizer"
        )
    for flag, is_set, needed, is_there in (
        (
            "--overlap-param-gather-with-optimizer-step",
            config.overlap_param_gather_with_optimizer_step,
            "--overlap-param-gather",
            config.overlap_param_gather,
        ),
        (
            "--overlap-param-gather",
            config.overlap_param_gather,
            "--use-distributed-optimizer",
            config.use_distributed_optimizer,
        ),
    ):
        if is_set and not is_there:
            raise ValueError(f"{flag} is given without {needed}; add that, or leave it out")
    if (config.bf16 or config.fp16) and not config.use_precision_aware_optimizer:
        raise ValueError(
            "--optimizer-cpu-offload without --use-precision-aware-optimizer: Megatron would keep fp32 main "
            "params on the GPU, 4 bytes a parameter; add --use-precision-aware-optimizer and "
            "--use-distributed-optimizer"
        )
    if config.main_params_dtype != torch.float32:
        raise ValueError(
            f"--main-params-dtype is {config.main_params_dtype}, expected fp32: masters in the host's memory are "
            "fp32; for fewer bytes call hybridopt.integrations.megatron.install(master_layout='split')"
        )
    moments = (config.exp_avg_dtype, config.exp_avg_sq_dtype)
    if moments not in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        raise ValueError(
            f"--exp-avg-dtype is {moments[0]} and --exp-avg-sq-dtype {moments[1]}, expected fp32 for both or "
            "bf16 for both"
        )
    asked = state_dtype_of(installed_options.get("state_dtype", torch.float32))
    if torch.bfloat16 == moments[0] != asked and "state_dtype" in installed_options:
        raise ValueError(
            f"--exp-avg-dtype is {moments[0]} and install() was given state_dtype={asked}; leave one out"
        )


def options_of(config: Any) -> OffloadOptions:
    """The options that follow from an OptimizerConfig, in addition to those of install()."""
    if config.exp_avg_dtype == torch.float32:  # this may just be Megatron's default
        return {}
    return {"state_dtype": config.exp_avg_dtype}


def checking(make: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's function that makes an optimizer, with the checks before it."""

    @functools.wraps(make)
    def checked(config: Any, *args: Any, **kwargs: Any) -> Any:
        global making_for
        check(config)
        making_for = config
        try:
            return make(config, *args, **kwargs)
        finally:
            making_for = None

    return checked


def found(place: str, name: str) -> ModuleType:
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "megatron":
            raise
        raise ModuleNotFoundError(
            f"install() replaces classes of megatron-core, and Python finds no {error.name}; pip install --no-deps "
            "megatron-core==0.16.1, or another version that docs/FRAMEWORKS.md names",
            name=error.name,
        ) from None
    if not hasattr(module, name):
        version = getattr(importlib.import_module("megatron.core"), "__version__", "of unknown version")
        raise RuntimeError(
            f"megatron-core {version} has no {place}.{name}, which install() replaces; docs/FRAMEWORKS.md names "
            "a version that has"
        )
    return module


def install(**options: Any) -> None:
    """From now on Megatron's --optimizer-cpu-offload makes optimizers of this package. `options` are some of
    hybridopt.OffloadOptions; a later call replaces them."""
    global installed_options
    check_options(options, MEGATRONS)
    modules = [found(place, NAME) for place in PLACES]
    maker = found(PLACES[0], MAKER)
    installed_options = options
    if getattr(modules[0], NAME) is HybridDeviceOptimizer:
        return
    for module in modules:
        setattr(module, NAME, HybridDeviceOptimizer)
    setattr(maker, MAKER, checking(getattr(maker, MAKER)))
