"""OffloadOptimizer: what the optimizers of algorithms.py have in common. A torch optimizer in
everything that can be seen; the state lives in the library and its step is one call."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import (
    abi,
    adopting,
    checkpoints,
    grad_scaler,
    loading,
    local_ranks,
    making,
    moves,
    placement,
)
from .aside import Aside, has_state
from .engine import Engine
from .gradient_hooks import GradientHooks, refuse_replicas
from .history import History, MemorySample
from .members import Member, check_dtype, has_gradient, members_of, named
from .modes import in_no_mode
from .options import (
    DEFAULT_OPTIONS,
    OffloadOptions,
    check_max_grad_norm,
    checked,
    refuse_in_group,
)
from .overlap import Overlap
from .placement import Leftover, Placement, mebibytes
from .plans import Plan, Stats, StepResult, described
from .registered import Slot, wide_gradients
from .state import Entry, State
from .streams import refuse_capture
from .tensors import like_param, refuse_fsdp1, set_gradient

if TYPE_CHECKING:
    from .process_group import ProcessGroupComm

# Options of torch's optimizers that change what is computed or how it is called.
UNSUPPORTED = {
    "amsgrad": "it keeps a third moment",
    "capturable": "the step runs on the host and cannot be part of a CUDA graph",
    "differentiable": "autograd does not see the step",
}

NOTHING_TO_CLIP = (
    "hook_gradients() takes gradients to the host, where torch.nn.utils.clip_grad_norm_() does not find them: "
    "it clips nothing and returns 0.0; make the optimizer with max_grad_norm= (or assign "
    "optimizer.max_grad_norm), None if nothing is to be clipped"
)
# Options that name objects of this process: a copied or unpickled optimizer is without them.
OF_THIS_PROCESS = ("process_group", "replica_group", "overlap")


class OffloadOptimizer(torch.optim.Optimizer):
    """The base class. Subclasses say which algorithm it is and what its hyperparameters are."""

    _step_supports_amp_scaling = True  # GradScaler hands scale and verdict to step()
    _engine: Engine | None = None
    _comm: ProcessGroupComm | None = None
    _options: OffloadOptions = DEFAULT_OPTIONS
    _placement = Placement(1.0, "no step yet")
    _leftover: Leftover | None = None
    _hooks: GradientHooks | None = None
    _overlap: Overlap | None = None
    _closed = False
    _says_whether_to_clip = False
    _state: State
    _history: History
    _aside: Aside

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
        self._options = checked(options, type(self).__name__)
        self._says_whether_to_clip = "max_grad_norm" in options
        if self._options["local_world"] is None:
            local_ranks.count_in(local_ranks.mask_of(self._options["numa_nodes"]))
        self._history = History()
        self._aside = Aside(self._history, {})
        if self._options["overlap"] is not None:
            self._overlap = Overlap(self, self._options["overlap"])

    @in_no_mode
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. After steps the state moves to new memory with room for the new params, so
        that for a moment there is twice as much."""
        super().add_param_group(param_group)
        try:
            self._check_group(len(self.param_groups) - 1, self.param_groups[-1])
            if self._hooks is not None:
                engine = self._prepare(always=True)  # the new params' gradients are hooked too
                if engine is not None:
                    engine.bound.release()
        except Exception:
            self.param_groups.pop()
            raise

    def _check_group(self, index: int, group: dict[str, Any]) -> None:
        self._check_switches(index, group)
        refuse_in_group(index, group)
        for name, param in named(index, group):
            if param.requires_grad:
                check_dtype(name, param)
            for option in ("max_grad_norm", "process_group", "overlap"):
                if self._options.get(option) is not None:
                    refuse_fsdp1(name, param, option)

    def _refuse_fsdp1(self, what: str) -> None:
        for index, group in enumerate(self.param_groups):
            for name, param in named(index, group):
                refuse_fsdp1(name, param, what)

    def _check_switches(self, index: int, group: dict[str, Any]) -> None:
        for option, why in UNSUPPORTED.items():
            if group.get(option):
                raise RuntimeError(
                    f"hybridopt.{type(self).__name__} does not support {option}=True (param group "
                    f"{index}): {why}; set it to False"
                )

    @property
    def max_grad_norm(self) -> float | None:
        """The norm that the gradients are clipped to inside the step; None: they are not. What is
        assigned holds from the next step on; all ranks assign the same."""
        return self._options["max_grad_norm"]

    @max_grad_norm.setter
    def max_grad_norm(self, max_grad_norm: float | None) -> None:
        check_max_grad_norm(max_grad_norm)
        if max_grad_norm is not None:
            self._refuse_fsdp1("max_grad_norm")
        self._options = {**self._options, "max_grad_norm": max_grad_norm}
        self._says_whether_to_clip = True

    # ----------------------------------------------------------------------------------- state --

    @property
    def state(self) -> State:
        """Per param, by torch's names: `step`, moments, and the fp32 `master_param` of a param in
        lower precision. The tensors are views of the library's memory."""
        return self._state

    @state.setter
    def state(self, content: dict[Any, Any]) -> None:
        if self._engine is not None:
            self._engine.show(self._state)  # what goes with it starts again, or is replaced
        self._state = State(self, content)

    def _fill_state(self) -> None:
        """Puts into `state` what is to be seen there: somebody is about to look."""
        if self._engine is not None:
            self._engine.show(self._state)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "state": dict(self.state.items()),
            "_says_whether_to_clip": self._says_whether_to_clip,
            "_hidden_counts": self._hidden_counts(),
            "_options": {**self._options, **dict.fromkeys(OF_THIS_PROCESS)},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "_history" not in vars(self):  # a copy begins with nothing
            self._history = History()
            self._aside = Aside(self._history, {})
        self._aside.counts = state.pop("_hidden_counts", self._aside.counts)
        if "state" in state:
            self.state = state.pop("state")
        super().__setstate__(state)

    def _hidden_counts(self) -> dict[Tensor, int]:
        counts = self._aside.hidden_counts()
        return counts if self._engine is None else {**counts, **self._engine.hidden_counts()}

    def _refuse_left_out(self, what: str, keys: Iterable[Any]) -> None:
        """Refuses to write a part of the state as if that were all. `keys` are those of state."""
        params = {param for group in self.param_groups for param in group["params"]}
        count = sum(isinstance(key, Tensor) and key not in params for key in keys)
        if count > 0:
            raise abi.InvalidStateError(
                f"{what} would leave out the state of {count} parameters that are not in param_groups; put them "
                "there before, or delete their entries from `state`"
            )

    def state_dict(self) -> dict[str, Any]:
        """As torch's, and for torch's optimizer of the same name too: tensors are references to live
        state, so deepcopy what must not change with the next step."""
        self._refuse_left_out("state_dict()", self.state)
        state_dict = super().state_dict()
        entries = state_dict["state"].items()
        state_dict["state"] = {
            key: dict(entry) if isinstance(entry, Entry) else entry for key, entry in entries
        }
        return state_dict

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
        self._refuse_fsdp1("save_checkpoint()")
        engine = self._ready_engine()
        self._refuse_left_out("save_checkpoint()", self._aside.params(self._state))
        if self._comm is not None and self._comm.no_saving:
            raise abi.InvalidStateError(self._comm.no_saving)
        return checkpoints.save(engine, path, masters_only, wait, progress)

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
        self._refuse_fsdp1("load_checkpoint()")
        engine = self._ready_engine()
        checkpoints.load(engine, path, fresh_moments, keep_steps, verify, progress)

    # ------------------------------------------------------------------------------------ step --

    @in_no_mode
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over the params that have a gradient, done when this returns (but for overlap()).
        Gradients stay as they are."""
        refuse_capture()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._give_back()
        if self._engine is not None:
            is_named = self._hooks is not None and self._hooks.grad_scaler is not None
            grad_scaler.check(self, self._engine, is_named)
        if grad_scaler.found_inf(self):
            self._drop_hosted()  # a step that is skipped uses them up too
            return loss
        engine = self._prepare()
        if engine is not None and (engine.bound.bind() or self._comm is not None):
            self._sample("gradients")
            self._step(engine)
            self._sample("step")
            if self._leftover is not None and engine.plan_of is not None:
                self._note_placement(self._leftover.after_step(engine.plan_of, self._move_state))
        return loss

    def _step(self, engine: Engine) -> None:
        options = self._step_options()
        # A GradScaler is told the verdict before it goes on.
        is_told = self._hooks is not None and grad_scaler.is_scaling(self)
        if self._overlap is not None and not is_told and self._overlap.may_begin():
            engine.begin_step(self._overlap.aliases_of, **options)
            if self._hooks is not None:
                self._hooks.begin_again()
            return
        with self._telling_rank():
            skipped = engine.step(**options)
        if self._hooks is not None:
            if is_told:
                self._hooks.tell_scaler(skipped)
            self._hooks.release()
        if engine.device.type == "cpu":
            engine.settle()

    def _step_options(self) -> dict[str, Any]:
        options = {"grad_scale": grad_scaler.grad_scale(self)}
        if self._options["max_grad_norm"] is not None:
            if self._comm is not None and self._comm.no_clipping:
                raise ValueError(self._comm.no_clipping)
            options["grad_norm_max"] = self._options["max_grad_norm"]
        return options

    @contextlib.contextmanager
    def _telling_rank(self) -> Iterator[None]:
        """What went wrong between ranks is said by the ranks, too."""
        try:
            yield
        except abi.CommFailedError as error:
            if self._comm is None or not self._comm.error:
                raise
            raise abi.CommFailedError(f"{error}: {self._comm.error}") from None

    @in_no_mode
    def _wait_for(self, slots: Sequence[Slot], streams: Iterable[Any] = ()) -> None:
        """Params of these slots are what the step under way makes of them."""
        if self._engine is not None:
            with self._telling_rank():
                self._engine.under_way.wait(slots, streams)

    def _finish(self) -> None:
        """The same for all params."""
        if self._engine is not None and self._engine.under_way:
            self._wait_for(self._engine.slots)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients that are on the host are dropped too."""
        if not set_to_none:
            self._finish()  # a step may read what is to be zero
        super().zero_grad(set_to_none)
        self._give_back()
        for group in self.param_groups:
            for param in group["params"]:
                if getattr(param, "decoupled_grad", None) is not None:
                    set_gradient(param, None if set_to_none else param.decoupled_grad.zero_())
        self._drop_hosted()

    def _drop_hosted(self) -> None:
        """Forgets the gradients that are on the host."""
        if self._engine is not None:
            moves.drop_gradients(self._engine)
        if self._hooks is not None:
            self._hooks.begin_again()

    # ---------------------------------------------------------------------------------- engine --

    def _ready_engine(self) -> Engine:
        """The engine, committed and up to date with params, groups and state, whether there are
        gradients or not."""
        refuse_capture()
        engine = self._prepare(always=True)
        if engine is None:
            raise abi.InvalidStateError("no parameter requires a gradient; there is nothing to move or save")
        if engine.released_storages is None:
            engine.bound.bind_params()
        else:
            engine.bound.release()
        return engine

    def _prepare(self, always: bool = False) -> Engine | None:
        """The engine, committed and up to date with param groups and state; None while there is
        nothing to step, but for `always`."""
        if self._closed:
            raise abi.InvalidStateError(f"this {type(self).__name__} is closed; make a new one")
        self._finish()
        for index, group in enumerate(self.param_groups):
            self._check_switches(index, group)
        groups = [self._hyperparameters(group) for group in self.param_groups]
        known: dict[Tensor, Slot] = {}
        if self._engine is not None:
            known = self._engine.registered.slot_of  # nothing else: it would keep the memory
            changed = self._engine.difference(self._algorithm(), groups, self.param_groups)
            if changed:
                # Params that are refused are refused while there is still an engine.
                members_of(self.param_groups, wide_gradients(known))
                self._leave_engine(changed)
        if self._engine is None:
            self._engine = self._aside.take(self._algorithm(), groups, self.param_groups, self._state)
        if self._engine is None:
            self._engine = self._committed_engine(known, groups, always)
            if self._engine is None:
                return None
            if self._hooks is not None:
                self._hooks.attach(self._engine)
            if self._overlap is not None:
                self._overlap.attach(self._engine)
        self._engine.registered.set_groups(groups)
        adopting.adopt(self._engine, self._state)
        return self._engine

    def _committed_engine(
        self, known: dict[Tensor, Slot], groups: list[dict[str, Any]], always: bool
    ) -> Engine | None:
        """A new engine, where one with the slots `known` may have been before; None while there is
        nothing to step."""
        members = members_of(self.param_groups, wide_gradients(known))
        if self._comm is None:
            self._comm = making.ranks_of(members, self._options)
            if self._comm is not None:
                self._aside.end_all(self._state)
        members = making.with_shards(members, known, self._comm, self._options)
        # On several ranks all step together, those without gradients too.
        stepped = always or self._comm is not None
        if not members or not (stepped or any(has_gradient(m.param) for m in members)):
            return None
        if self._hooks is not None:
            refuse_replicas({member.param for member in members})
        if self._overlap is not None:
            members = self._overlap.ordered(members)
        engine = self._new_engine(members, groups)
        engine.commit()
        engine.counts_before = self._aside.counts
        self._leftover = making.leftover_of(engine, self._options)
        if self._comm is not None:
            self._comm.finish_at_exit(engine.handle)
        return engine

    def _new_engine(self, members: list[Member], groups: list[dict[str, Any]]) -> Engine:
        engine, self._placement = making.make_engine(
            members, self._algorithm(), groups, self._options, self._comm, self._history
        )
        return engine

    def _leave_engine(self, why: str) -> None:
        """It is not the one for what is in param_groups."""
        engine = self._engine
        assert engine is not None
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        if not self._may_put_aside() or not engine.registered.slot_of.keys().isdisjoint(params):
            return self._drop_engine(why)
        moves.check_all_here(engine, why)
        engine.show(self._state)
        if not has_state(engine, self._state):
            return self._drop_engine(why)
        engine.wait()
        self._aside.put(engine, self._state)
        self._engine = None

    def _may_put_aside(self) -> bool:
        """Whether an engine may stay beside the next one: what the engine alone has to do with the model,
        other ranks or the room on the device is not there."""
        is_alone = self._comm is None and self._hooks is None and self._overlap is None
        return is_alone and self._options["offload_fraction"] != placement.AUTO

    def _drop_engine(self, why: str) -> None:
        """Its state goes on in tensors of its memory until another engine adopts it."""
        engine = self._engine
        if engine is None:
            return
        moves.check_all_here(engine, why)
        engine.show(self._state)
        engine.wait()  # a save reads params that the next engine will write
        if self._hooks is not None:
            self._hooks.release()
        self._aside.note_counts(engine, self._state)
        self._leftover = None
        engine.shown.leave_device()
        self._history.note_end(engine.handle.stats())
        self._engine = None

    # ----------------------------------------------------------------------------------- moves --

    @in_no_mode
    def hook_gradients(
        self,
        accumulate: bool = False,
        *,
        micro_batches: int | None = 1,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> GradientHooks:
        """From now on gradients go to the host during the backward pass, some at a time as they become
        ready, and are taken off their params (`grad` is None after it). The next step uses them up;
        zero_grad() drops them.

        They leave in the last backward pass of a step; before that autograd adds them up where they are.
        `micro_batches` is how many passes a step has, or None: then the last one is in
        `with optimizer.last_micro_batch():`. Under FSDP2's set_requires_gradient_sync(False) there are no
        gradients before the last pass: it counts as one. With `accumulate` gradients leave in every pass
        instead, for who has no room for them on the device, and are added up on the host, in fp32; for
        low-precision gradients that takes twice the room there.

        Takes the memory for state and gradients now. Clip by max_grad_norm: there is nothing here
        for torch.nn.utils.clip_grad_norm_ to look at, and a warning says so unless the optimizer was made
        with max_grad_norm=, which may be None; nor is there for GradScaler: one that steps this
        optimizer must be named as `grad_scaler`, to be told what the step has found."""
        if self._hooks is not None:
            raise abi.InvalidStateError(
                "gradients are hooked already; call remove() on what hook_gradients() gave"
            )
        if not self._says_whether_to_clip:
            warnings.warn(NOTHING_TO_CLIP, stacklevel=3)
        self._aside.end_all(self._state)
        hooks = GradientHooks(self, accumulate, micro_batches, grad_scaler)
        refuse_replicas({param for group in self.param_groups for param in group["params"]})
        needed = "accumulate" if accumulate else "grads"
        if needed not in self._options["movable"]:
            # Another engine, with room for the gradients, goes on from its state.
            self._drop_engine("hooks need room for gradients")
            movable = (*self._options["movable"], needed)
            self._options = {**self._options, "movable": movable}
        hooks.attach(self._ready_engine())
        self._hooks = hooks
        return hooks

    def last_micro_batch(self) -> contextlib.AbstractContextManager[None]:
        """The backward pass in this context is the last one of a step: with hook_gradients() gradients
        leave in it. Without hooks it does nothing."""
        return contextlib.nullcontext() if self._hooks is None else self._hooks.last_micro_batch()

    @in_no_mode
    def overlap(self, model: nn.Module) -> Overlap:
        """From now on step() queues and returns. Each module of the model, which has all params of this
        optimizer, waits in its forward pass for its own params only, and chunks are updated in the
        order in which the first forward pass uses them. `overlap=model` in the constructor is the same.

        Who else reads or writes params waits where it goes through the model (state_dict(),
        load_state_dict(), to()) or through this optimizer. Whoever reads them by themselves while a
        step is under way (averages of weights, copy.deepcopy) calls synchronize() before.
        HYBRIDOPT_CHECK_OVERLAP=1 in the environment finds who does not. A step that fails is told to
        the next one who waits."""
        if self._overlap is not None:
            raise abi.InvalidStateError(
                "steps overlap already; call remove() on what overlap() gave"
            )
        self._refuse_fsdp1("overlap()")
        self._aside.end_all(self._state)
        overlap = Overlap(self, model)
        names = (named(index, group) for index, group in enumerate(self.param_groups))
        overlap.refuse_others({param: name for name, param in chain.from_iterable(names)})
        if self._engine is not None:
            overlap.attach(self._engine)
        self._overlap = overlap
        return overlap

    @in_no_mode
    def synchronize(self) -> None:
        """Waits for all steps; then params may be read and written by anyone."""
        self._finish()
        if self._engine is not None:
            self._engine.settle()

    @in_no_mode
    def offload(self, params: bool = False, grads: bool = False, states: bool = False) -> None:
        """Moves content to the host, bit for bit, and gives the memory back. What is there already
        stays. Returns when the memory is free. The `movable` option must name what is moved.

        Params keep their tensors, but must not be used until reload(). Gradients are taken off
        their params; reload() puts them back, or the next step uses them where they are."""
        self._aside.end_all(self._state)
        moves.offload(self._ready_engine(), self._state, params, grads, states)
        self._sample("offload")

    @in_no_mode
    def reload(self, params: bool = False, grads: bool = False, states: bool = False) -> None:
        """Moves content back into memory of torch's, where it is when this returns."""
        refuse_capture()
        self._finish()
        engine = self._ready_engine() if self._engine is None else self._engine  # as it was offloaded
        moves.reload(engine, self._state, params, grads, states)
        self._sample("reload")

    @in_no_mode
    def set_offload_fraction(self, offload_fraction: float) -> None:
        """Changes how much of the state is on the host, between two steps: 0.0 (all of it on the
        device) to 1.0 (all on the host), with the same bits. Returns when the content has been copied
        and the memory that is no longer needed has been given back, on both sides. If the device or
        the host has no room, it raises and nothing has changed.

        Tensors taken from `state` before are not the optimizer's any more: look again."""
        refuse_capture()
        placement.check_fraction(offload_fraction)
        self._aside.end_all(self._state)
        if self._engine is not None:
            self._move_state(1.0 - offload_fraction)
            self._placement = placement.chosen(offload_fraction, self._engine.device.type == "cpu")
        self._leftover = None
        self._options = {
            **self._options,
            "offload_fraction": float(offload_fraction),
            "device_budget_bytes": None,
            "device_headroom": None,
        }
        self._sample("set_offload_fraction")

    def _move_state(self, device_fraction: float) -> None:
        engine = self._ready_engine()  # which has taken over what was put into `state`
        engine.set_device_fraction(self._state, device_fraction)

    def _note_placement(self, chosen: Placement | None) -> None:
        """offload_fraction="auto" has moved state."""
        if chosen is not None:
            self._placement = chosen
            making.tell(chosen)
            self._sample("auto")

    @in_no_mode
    def _give_back(self) -> None:
        """Moves state that offload_fraction="auto" has brought to the device back if torch has run out of
        memory since."""
        if self._leftover is not None and self._leftover.has_run_out():
            self._note_placement(self._leftover.give_back(self._move_state))

    @contextlib.contextmanager
    def offloaded(
        self, params: bool = True, grads: bool = True, states: bool = True
    ) -> Iterator[None]:
        """For a phase that needs the device for itself: offload() before, reload() after."""
        self.offload(params=params, grads=grads, states=states)
        try:
            yield
        finally:
            self.reload(params=params, grads=grads, states=states)

    # --------------------------------------------------------------------------------- looking --

    def __repr__(self) -> str:
        """As torch's, and what is particular here."""
        groups = super().__repr__().removesuffix(")")
        lines = "".join(f"    {name}: {value}\n" for name, value in self._particulars().items())
        return f"{groups}Offload\n{lines})"

    def _particulars(self) -> dict[str, Any]:
        """For repr(), which neither waits nor makes an engine, and never raises."""
        particulars: dict[str, Any] = {
            key: self._options.get(key)
            for key in ("offload_fraction", "host_executors", "master_layout", "max_grad_norm", "state_dtype")
        }
        if self._closed:
            return {**particulars, "bytes": "none, the optimizer is closed"}
        if self._engine is None:
            return {**particulars, "bytes": "none before the first step; plan() tells them"}
        particulars["offload_fraction"] = self._placement.offload_fraction
        try:
            stats = self.stats()
        except abi.HybridoptError as error:  # in a forked child
            return {**particulars, "bytes": f"not known: {error}"}
        particulars["bytes"] = (
            f"{mebibytes(stats.states_on_host_bytes)} of state on the host, "
            f"{mebibytes(stats.states_on_device_bytes)} on the device"
        )
        return particulars

    @in_no_mode
    def plan(self) -> Plan:
        """Every byte that the first step will take, or has taken."""
        engine = self._engine
        if engine is None:
            groups = [self._hyperparameters(group) for group in self.param_groups]
            members = members_of(self.param_groups, {})
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

    def memory_timeline(self) -> list[MemorySample]:
        """Bytes by kind and place before and after each step and after each move, the last 4096 of
        them."""
        return list(self._history.samples)

    @in_no_mode
    def step_results(self) -> list[StepResult]:
        """What the last 1024 steps did, skipped ones too. Waits for queued steps."""
        if self._engine is not None:
            self._engine.settle()
        return list(self._history.results)

    def plot_timeline(self, path: str | os.PathLike[str]) -> None:
        """Writes a picture of memory_timeline() and of the lanes of the last steps; needs
        matplotlib. Waits for queued steps."""
        from .timeline_plot import plot_timeline

        plot_timeline(self.memory_timeline(), self.step_results(), path)

    def _sample(self, label: str) -> None:
        if self._engine is not None:
            self._history.sample(label, self._engine.handle.stats())

    @in_no_mode
    def refresh_masters(self) -> None:
        """Weights were written in a way that tensors do not notice (`param.data` in place): the fp32
        masters follow. Not needed after load_state_dict, copy_ and other operations on params. Split
        masters follow by themselves, but for lower halves left from before, which this drops."""
        if self._engine is not None:
            self._finish()
            if any(slot.split for slot in self._engine.slots):
                self._prepare(always=True)  # lower halves that were put into `state` are dropped too
        for engine in (*self._aside.engines(), self._engine):
            if engine is not None:
                engine.forget_what_is_in_sync()

    @in_no_mode
    def master_of(self, param: Tensor) -> Tensor:
        """The fp32 numbers that steps update, rounded to which they are the param: a view of the
        library's memory where they lie there as such, else a copy. Waits for queued work."""
        engine = self._ready_engine()
        slot = engine.registered.slot_of.get(param)
        if slot is None:
            raise ValueError("this parameter has no state here; is it one of the optimizer's, and trained?")
        engine.settle()
        engine.refresh_masters()
        return like_param(slot.arrange(engine.masters.read(slot)), param)

    @in_no_mode
    def close(self) -> None:
        """Gives the memory of the state back, as the end of the object does. Tensors that `state` has
        given out stay valid and hold on to their part."""
        if self._engine is not None:
            moves.check_all_here(self._engine, "the optimizer is to be closed")
            if self._hooks is not None:
                self._hooks.remove()
            if self._overlap is not None:
                self._overlap.remove()
            self._engine.settle()
            self._history.note_end(self._engine.handle.stats())
            self._engine = self._leftover = None
        self._aside.end_all(self._state)
        self._state = State(self)
        self._closed = True
