"""OffloadOptimizer: what AdamW, Adam, SGD, Lion and Adagrad have in common. A torch optimizer in
everything that can be seen; the state lives in the library and its step is one call."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from itertools import chain
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from . import abi, checkpoints, loading, placement
from .contexts import context_for
from .engine import Engine, Member, Slot, refuse_capture
from .gradient_hooks import refuse_replicas
from .history import History
from .lifecycle import Lifecycle, movable_bits
from .modes import in_no_mode
from .plans import Plan, Stats, StepResult, described
from .state import State
from .tensors import DTYPES, gradient_of, is_spread, like_param, local

if TYPE_CHECKING:
    from .process_group import ProcessGroupComm
    from typing_extensions import Unpack


class OffloadOptions(TypedDict, total=False):
    """Keyword arguments that all optimizers here have beside torch's."""

    offload_fraction: float | str
    """Share of the state that lives on the host: 1.0 (the default) is all; "auto" leaves as much on
    the device as device_budget_bytes allows."""
    device_budget_bytes: int | None
    """With "auto": how many bytes of the device the state may take."""
    state_dtype: torch.dtype
    """Of moments: torch.float32 (the default), or torch.bfloat16, rounded at random so that small
    changes are not lost. Masters stay in fp32."""
    master_layout: str
    """Of the fp32 masters of bf16 params: "fp32" (the default), 4 bytes an element, or "split", 2
    bytes: the param is the upper half, and only the lower one is kept. The same bits. What the host
    keeps of a param on a GPU stays whole."""
    check_weights: bool | None
    """True: every param in 16 bits is compared with its master before each step, so that no write is
    missed; it reads both once more. False: where a param's version says that it has been written, or
    512 bytes of it do. None (the default) is True for params on the CPU, False for those on a GPU."""
    threads: int
    """CPU threads that update the host's share; 0 (the default) is one per CPU of this rank."""
    pin: bool
    """True (the default): staging memory that the system does not pin is an error; False: it is then
    used unpinned, which is slower."""
    max_grad_norm: float | None
    """Clips the global norm of the gradients inside the step, as torch.nn.utils.clip_grad_norm_ does
    before it; None (the default): no clipping."""
    movable: str | Iterable[str]
    """What offload() may move: one or some of "params", "grads" and "states". Room for it on the host is
    taken with the state; none (the default) is taken for nothing."""
    process_group: Any
    """The ranks that agree on norm, clipping and skipped steps, as a torch.distributed.ProcessGroup;
    None (the default): those of the DTensors' mesh, or this process alone."""
    comm_timeout_seconds: float
    """A rank that does not answer for so long has failed; 600 (the default) is 10 minutes."""


MASTER_LAYOUTS = {"fp32": abi.OFFLOAD_MASTER_FP32, "split": abi.OFFLOAD_MASTER_SPLIT}
DEFAULT_OPTIONS: OffloadOptions = {
    "offload_fraction": 1.0,
    "device_budget_bytes": None,
    "state_dtype": torch.float32,
    "master_layout": "fp32",
    "check_weights": None,
    "threads": 0,
    "pin": True,
    "max_grad_norm": None,
    "movable": (),
    "process_group": None,
    "comm_timeout_seconds": 600.0,
}
# Options of torch's optimizers that change what is computed or how it is called.
UNSUPPORTED = {
    "amsgrad": "it keeps a third moment",
    "capturable": "the step runs on the host and cannot be part of a CUDA graph",
    "differentiable": "autograd does not see the step",
}


class OffloadOptimizer(Lifecycle):
    """The base class. Subclasses say which algorithm it is and what its hyperparameters are."""

    _step_supports_amp_scaling = True  # GradScaler hands scale and verdict to step()
    _engine: Engine | None = None
    _comm: ProcessGroupComm | None = None
    _options: OffloadOptions = DEFAULT_OPTIONS
    _placement = placement.Placement(1.0, "no step yet")
    _closed = False

    # ------------------------------------------------------------------- what subclasses tell --

    def _algorithm(self) -> int:
        """enum offload_algorithm."""
        raise NotImplementedError

    def _hyperparameters(self, group: dict[str, Any]) -> dict[str, Any]:
        """Fields of offload_group_t for a param group."""
        raise NotImplementedError

    def _kind(self) -> str:
        """Whose state_dicts fit, for texts."""
        name = next(cls.__name__ for cls in type(self).__mro__ if cls.__module__.startswith(__package__))
        known = f" or torch.optim.{name}" if hasattr(torch.optim, name) else ""
        return f"hybridopt.{name}{known}"

    # ---------------------------------------------------------------------------- construction --

    def _configure(self, options: OffloadOptions) -> None:
        """Takes the options apart from torch's. Called before torch's constructor."""
        for name in options:
            if name not in DEFAULT_OPTIONS:
                raise TypeError(
                    f"{type(self).__name__}() got an unexpected keyword argument {name!r}, expected "
                    f"torch's or some of {', '.join(DEFAULT_OPTIONS)}"
                )
        merged: OffloadOptions = {**DEFAULT_OPTIONS, **options}
        placement.check(merged["offload_fraction"], merged["device_budget_bytes"])
        if merged["max_grad_norm"] is not None and not merged["max_grad_norm"] > 0:
            raise ValueError(
                f"Invalid max_grad_norm: {merged['max_grad_norm']}, expected a number above 0, or "
                "None for no clipping"
            )
        if merged["state_dtype"] not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"Invalid state_dtype: {merged['state_dtype']}, expected torch.float32 or "
                "torch.bfloat16"
            )
        if merged["master_layout"] not in MASTER_LAYOUTS:
            raise ValueError(
                f"Invalid master_layout: {merged['master_layout']!r}, expected 'fp32' or 'split'"
            )
        threads = merged["threads"]
        if not isinstance(threads, int) or threads < 0:
            raise ValueError(
                f"Invalid threads: {threads!r}, expected a whole number, or 0 for one thread per CPU of "
                "this rank"
            )
        movable = merged["movable"]
        merged["movable"] = (movable,) if isinstance(movable, str) else tuple(movable)
        movable_bits(merged["movable"])
        self._options = merged
        self._history = History()

    @in_no_mode
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. After steps the state moves to new memory with room for the new params, so
        that for a moment there is twice as much."""
        super().add_param_group(param_group)
        try:
            self._check_group(len(self.param_groups) - 1, self.param_groups[-1])
            if self._hooks is not None:
                self._prepare(always=True)  # the new params' gradients are hooked too
        except Exception:
            self.param_groups.pop()
            raise

    def _check_group(self, index: int, group: dict[str, Any]) -> None:
        self._check_switches(index, group)
        for name, param in self._named(index, group):
            if param.requires_grad:
                check_dtype(name, param)

    def _check_switches(self, index: int, group: dict[str, Any]) -> None:
        for option, why in UNSUPPORTED.items():
            if group.get(option):
                raise RuntimeError(
                    f"hybridopt.{type(self).__name__} does not support {option}=True (param group "
                    f"{index}): {why}; set it to False"
                )

    @staticmethod
    def _named(index: int, group: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Params with the names they were given, else with their place."""
        names = group.get("param_names")
        for i, param in enumerate(group["params"]):
            yield names[i] if names else f"param_groups.{index}.{i}", param

    # ----------------------------------------------------------------------------------- state --

    @property
    def state(self) -> State:
        """Per param, by torch's names: `step`, moments, and the fp32 `master_param` of a param in
        lower precision. The tensors are views of the library's memory."""
        return self._state

    @state.setter
    def state(self, content: dict[Any, Any]) -> None:
        if self._engine is not None:
            self._engine.settle(self._state)
        self._state = State(self, content)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "state": dict(self.state.items()),
            "_options": {**self._options, "process_group": None},  # which belongs to its process
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "_history" not in vars(self):  # a copy begins with nothing
            self._history = History()
        if "state" in state:
            self.state = state.pop("state")
        super().__setstate__(state)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, and for torch's optimizer of the same name too: tensors are references to live
        state, so deepcopy what must not change with the next step."""
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state_dict of this class or of torch's optimizer of the same name. State stays in
        fp32 on the host, whatever the params are; it is copied in at the next step."""
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            if changed is not None:
                state_dict = changed

        loaded_groups = deepcopy(state_dict["param_groups"])
        if len(loaded_groups) != len(self.param_groups):
            raise ValueError("loaded state dict has a different number of parameter groups")
        for own, loaded in zip(self.param_groups, loaded_groups):
            if len(own["params"]) != len(loaded["params"]):
                raise ValueError(
                    "loaded state dict contains a parameter group that doesn't match the size of "
                    "optimizer's group"
                )
        param_of = dict(
            zip(
                chain.from_iterable(group["params"] for group in loaded_groups),
                chain.from_iterable(group["params"] for group in self.param_groups),
            )
        )
        for index, (own, loaded) in enumerate(zip(self.param_groups, loaded_groups)):
            loading.check_group(self._kind(), index, loaded, self.defaults)
            loaded["params"] = own["params"]
            if "param_names" in own:
                loaded.setdefault("param_names", own["param_names"])
            self._check_group(index, loaded)
        state = {
            param_of.get(key, key): dict(value) if isinstance(value, dict) else value
            for key, value in state_dict["state"].items()
        }
        for key, value in state_dict["state"].items():
            loading.check_entry(self._kind(), key, value, self._algorithm())
        self.__setstate__({"state": state, "param_groups": loaded_groups})

        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @in_no_mode
    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        masters_only: bool = False,
        wait: bool = True,
        progress: checkpoints.Progress = None,
    ) -> checkpoints.Transfer:
        """Writes masters, moments and step counts as a new directory of safetensors files and a
        manifest: whole or not there. On several ranks all call this. It returns when all is on disk.

        With wait=False training goes on meanwhile; until the next step() has returned (or wait() of
        what this returns) nobody else may write fp32 params on the CPU, and until that wait() moments
        and masters in place. Nor may storages of params on the CPU be resized, freed, or moved by
        share_memory_() or torch.multiprocessing until that wait(): the save reads memory that would
        be gone, and the process may crash.

        `progress` is a function of bytes done and bytes in all, or True or False for a tqdm bar;
        None (the default) shows one on a terminal."""
        return checkpoints.save(self._ready_engine(), path, masters_only, wait, progress)

    @in_no_mode
    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        fresh_moments: bool = False,
        keep_steps: bool = False,
        verify: bool = True,
        progress: checkpoints.Progress = None,
    ) -> None:
        """Reads a directory that save_checkpoint or any other program of the library has written, by
        any number of ranks: state and params. Param groups stay as they are; a refused checkpoint
        changes nothing. fresh_moments takes the weights only, and keep_steps the step counts too;
        verify=False reads the files once instead of twice."""
        engine = self._ready_engine()
        checkpoints.load(engine, self._state, path, fresh_moments, keep_steps, verify, progress)

    # ------------------------------------------------------------------------------------ step --

    @in_no_mode
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over the params that have a gradient, done when this returns. Gradients stay as
        they are."""
        refuse_capture()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_scaler()
        if self._found_inf():
            self._drop_hosted()  # a step that is skipped uses them up too
            return loss
        engine = self._prepare()
        if engine is not None and (engine.bind() or self._comm is not None):
            options = {"grad_scale": self._grad_scale()}
            if self._options["max_grad_norm"] is not None:
                options["grad_norm_max"] = self._options["max_grad_norm"]
            self._sample("gradients")
            self._step(engine, options)
            if self._hooks is not None:
                self._hooks.release()
            if engine.device.type == "cpu":
                engine.settle(self._state)
            self._sample("step")
        return loss

    def _step(self, engine: Engine, options: dict[str, float]) -> None:
        try:
            skipped = engine.step(self._state, **options)
        except abi.CommFailedError as error:
            if self._comm is None or not self._comm.error:
                raise
            raise abi.CommFailedError(f"{error}: {self._comm.error}") from None
        if self._hooks is not None and hasattr(self, "found_inf"):
            self._hooks.tell_scaler(skipped)

    def _check_scaler(self) -> None:
        """GradScaler looks for Inf and NaN in `grad`; gradients on the host are not there."""
        engine = self._engine
        if engine is None or not hasattr(self, "found_inf"):
            return
        hosted = [slot for slot in engine.slots if slot.hosted]
        unscaled = getattr(self, "grad_scale", None) is None
        if unscaled and any(slot.hooked for slot in hosted):
            raise abi.InvalidStateError(
                "GradScaler.unscale_() has not seen the gradients that hooks have brought to the host, "
                "and this step would take them as they are, scaled; leave unscale_() out, for the step "
                "unscales, and clip by max_grad_norm"
            )
        known = self._hooks is not None and self._hooks.grad_scaler is not None
        if hosted and not unscaled and not known:
            raise abi.InvalidStateError(
                "gradients are on the host, where GradScaler cannot look for Inf and NaN, and its "
                "update() would not know what this step found; make the hooks with "
                "hook_gradients(grad_scaler=...), or call reload(grads=True) before GradScaler.step()"
            )

    def _found_inf(self) -> bool:
        """GradScaler's verdict, which may be that of other ranks."""
        found_inf = getattr(self, "found_inf", None)
        return found_inf is not None and float(found_inf) != 0.0

    def _grad_scale(self) -> float:
        scale = getattr(self, "grad_scale", None)
        return 1.0 if scale is None else float(scale)

    def _ready_engine(self) -> Engine:
        """The engine, committed and up to date with params, groups and state, whether there are
        gradients or not."""
        refuse_capture()
        engine = self._prepare(always=True)
        if engine is None:
            raise abi.InvalidStateError("no parameter requires a gradient; there is nothing to move or save")
        if self._storages is None:
            engine.bind_params()
        return engine

    def _prepare(self, always: bool = False) -> Engine | None:
        """The engine, committed and up to date with param groups and state; None while there is
        nothing to step, but for `always`."""
        if self._closed:
            raise abi.InvalidStateError(f"this {type(self).__name__} is closed; make a new one")
        for index, group in enumerate(self.param_groups):
            self._check_switches(index, group)
        groups = [self._hyperparameters(group) for group in self.param_groups]
        known: Any = {} if self._engine is None else self._engine.slot_of
        if self._engine is not None:
            changed = self._what_has_changed(self._engine, groups)
            if changed:
                self._members(known)  # or what is refused would be so when the engine is gone
                self._drop_engine(changed)
        if self._engine is None:
            members = self._spread(self._members(known), known)
            # On several ranks all step together, those without gradients too.
            stepped = always or self._comm is not None
            if not members or not (stepped or any(has_gradient(m.param) for m in members)):
                return None
            if self._hooks is not None:
                refuse_replicas({member.param for member in members})
            engine = self._new_engine(members, groups)
            engine.commit()
            if self._comm is not None:
                self._comm.finish_at_exit(engine.handle)
            self._engine = engine
            if self._hooks is not None:
                self._hooks.attach(engine)
        self._engine.set_groups(groups)
        self._engine.adopt(self._state)
        return self._engine

    def _what_has_changed(self, engine: Engine, groups: list[dict[str, Any]]) -> str:
        """Params, groups, algorithm or dtypes of gradients that are not those that the engine was made
        for; "" if all are."""
        if len(groups) != len(engine.groups) or self._algorithm() != engine.algorithm:
            return "param groups are others"
        if not engine.can_take(groups):
            return "a param group has got its first momentum, or has none any more"
        known = 0
        for index, group in enumerate(self.param_groups):
            for place, param in enumerate(group["params"]):
                slot = engine.slot_of.get(param)
                if slot is None:
                    if takes_part(param):
                        name = group.get("param_names", {place: f"param_groups.{index}.{place}"})[place]
                        return f"parameter {name!r} has been added or unfrozen"
                elif slot.group != index:
                    return f"parameter {slot.name!r} is in another group"
                elif not slot.takes_gradient():
                    return f"the gradient of parameter {slot.name!r} is in a wider dtype than before"
                else:
                    known += 1
        return "" if known == len(engine.slots) else "parameters have been taken out"

    def _members(self, known: Any) -> list[Member]:
        """Params that are trained, and those of slots known before. A frozen one without gradient
        gets no state."""
        members: list[Member] = []
        names: set[str] = set()
        seen: set[Tensor] = set()
        for index, group in enumerate(self.param_groups):
            for name, param in self._named(index, group):
                if param not in known and not takes_part(param):
                    continue
                check_dtype(name, param)  # it may have been converted
                if param in seen:
                    raise ValueError(
                        f"parameter {name!r} is twice in param group {index}, and would be updated "
                        "twice in each step; name it once"
                    )
                while name in names:
                    name += "'"
                names.add(name)
                seen.add(param)
                wide = param in known and known[param].grad_dtype == torch.float32
                members.append(Member(param, name, index, wide_gradient=wide))
        return members

    def _spread(self, members: list[Member], known: dict[Tensor, Slot]) -> list[Member]:
        """Members that know their shards; finds the other ranks. All of them call this, but for the
        members of before: that a gradient is wider may show on one rank alone."""
        before = {param: slot.name for param, slot in known.items()}
        if self._comm is not None and before == {m.param: m.name for m in members}:
            return [dataclasses.replace(m, shard=known[m.param].shard) for m in members]
        group = self._options["process_group"]
        if group is None and not any(is_spread(member.param) for member in members):
            return members
        from . import distributed  # which imports much

        if self._comm is None:
            self._comm = distributed.comm_for(
                members, group, self._options["comm_timeout_seconds"]
            )
        return distributed.with_shards(members, self._comm)

    def _new_engine(self, members: list[Member], groups: list[dict[str, Any]]) -> Engine:
        device = self._device_of(members)
        context = context_for(
            device, threads=self._options["threads"], allow_pageable=int(not self._options["pin"])
        )

        check_weights = self._options["check_weights"]

        def engine_for(device_fraction: float) -> Engine:
            return Engine(
                context,
                device,
                self._algorithm(),
                groups,
                members,
                device.type == "cpu" if check_weights is None else check_weights,
                self._history,
                device_fraction=device_fraction,
                movable=movable_bits(self._options["movable"]),
                moment_dtype=DTYPES[self._options["state_dtype"]],
                master_layout=MASTER_LAYOUTS[self._options["master_layout"]],
                **({} if self._comm is None else self._comm.options()),
            )

        fraction = self._options["offload_fraction"]
        self._placement = placement.choose(
            fraction,
            self._options["device_budget_bytes"],
            device.type == "cpu",
            lambda device_fraction: engine_for(device_fraction).plan(),
        )
        if fraction == placement.AUTO:
            print(
                f"hybridopt: offload_fraction {self._placement.offload_fraction:.4f}: "
                f"{self._placement.reason}",
                file=sys.stderr,
            )
        return engine_for(self._placement.device_fraction)

    @staticmethod
    def _device_of(members: list[Member]) -> torch.device:
        devices = {local(member.param).device: member.name for member in members}
        if len(devices) > 1:
            places = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
            raise ValueError(
                f"the parameters are on several devices ({places}); make one optimizer for each "
                "device"
            )
        return next(iter(devices))

    def _drop_engine(self, why: str) -> None:
        """Its state goes on in tensors of its memory until another engine adopts it."""
        engine = self._engine
        if engine is None:
            return
        self._check_all_here(why)
        engine.settle(self._state)
        engine.wait()  # a save reads params that the next engine will write
        if self._hooks is not None:
            self._hooks.release()
        engine.leave_device()
        self._history.note_end(engine.handle.stats())
        self._engine = None

    # --------------------------------------------------------------------------------- looking --

    @in_no_mode
    def plan(self) -> Plan:
        """Every byte that the first step will take, or has taken."""
        engine = self._engine
        if engine is None:
            groups = [self._hyperparameters(group) for group in self.param_groups]
            members = self._members(())
            if not members:
                raise abi.InvalidStateError(
                    "no parameter requires a gradient; there is nothing to plan for"
                )
            engine = self._new_engine(members, groups)
        return described(
            Plan,
            engine.plan(),
            offload_fraction=self._placement.offload_fraction,
            reason=self._placement.reason,
        )

    def stats(self) -> Stats:
        """Totals of steps, bytes and seconds; zeros before the first step."""
        return self._history.stats(None if self._engine is None else self._engine.handle.stats())

    @in_no_mode
    def last_step(self) -> StepResult:
        """What the last step did: skipped? which gradient norm? Waits for it."""
        results = self.step_results()
        if not results:
            raise abi.InvalidStateError("no step yet; call step() first")
        return results[-1]

    @in_no_mode
    def refresh_masters(self) -> None:
        """Weights were written in a way that tensors do not notice (`param.data` in place): the fp32
        masters follow. Not needed after load_state_dict, copy_ and other operations on params. Split
        masters follow by themselves, but for lower halves left from before, which this drops."""
        if self._engine is not None:
            self._engine.forget_versions()
            if any(slot.split for slot in self._engine.slots):
                self._ready_engine().drop_low_halves()

    @in_no_mode
    def master_of(self, param: Tensor) -> Tensor:
        """The fp32 numbers that steps update, rounded to which they are the param: a view of the
        library's memory where they lie there as such, else a copy. Waits for queued work."""
        engine = self._ready_engine()
        slot = engine.slot_of.get(param)
        if slot is None:
            raise ValueError("this parameter has no state here; is it one of the optimizer's, and trained?")
        engine.settle(self._state)
        engine.refresh_masters()
        return like_param(engine.master_of(slot).as_strided(slot.shape, slot.stride), param)

    @in_no_mode
    def close(self) -> None:
        """Gives the memory of the state back, as the end of the object does. Tensors that `state` has
        given out stay valid and hold on to their part."""
        if self._engine is not None:
            self._check_all_here("the optimizer is to be closed")
            if self._hooks is not None:
                self._hooks.remove()
            self._engine.settle(self._state)
            self._history.note_end(self._engine.handle.stats())
            self._engine = None
        self._state = State(self)
        self._closed = True


def check_dtype(name: str, param: Tensor) -> None:
    if local(param).dtype not in DTYPES:
        raise TypeError(
            f"parameter {name!r} is {param.dtype}, expected torch.float32, torch.bfloat16 or "
            "torch.float16; convert it, or leave it to a torch optimizer"
        )


def has_gradient(param: Tensor) -> bool:
    return gradient_of(param) is not None


def takes_part(param: Tensor) -> bool:
    return param.requires_grad or has_gradient(param)
