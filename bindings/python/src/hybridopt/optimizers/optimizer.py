"""OffloadOptimizer: the base class of the optimizers in algorithms.py. It behaves as a torch optimizer, but
the library holds the state, and a step is one call of the library."""

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

from .. import abi
from ..base.modes import in_no_mode
from ..base.owned_hooks import Removal
from ..base.streams import refuse_capture
from ..base.units import readable
from ..engine import making, moves
from ..engine.aside import Aside, has_state
from ..engine.engine import Engine
from ..hiding.gradient_hooks import GradientHooks, refuse_held_accumulators
from ..hiding.overlap import Overlap
from ..params.hyperparameters import check_flags, hyperparameters_of
from ..params.members import Member, check_dtype, has_gradient, members_of, named, refuse_twice
from ..params.registered import Slot, wide_gradients
from ..params.tensors import like_param, refuse_fsdp1, set_gradient
from ..ranks import local_ranks
from ..settings import placement
from ..settings.options import DEFAULT_OPTIONS, ROWS, OffloadOptions, checked, refuse_in_group
from ..settings.placement import Leftover, Placement
from ..state import loading
from ..state.entries import Entry, State
from ..steps.history import History, MemorySample
from ..steps.plans import Plan, Stats, StepResult, described
from ..traps import away
from ..traps.trap import without_traps
from . import adopting, checkpoints, grad_scaler

if TYPE_CHECKING:
    from ..ranks.process_group import ProcessGroupComm

# Options of torch's optimizers that change what is computed or how it is called.
UNSUPPORTED = {
    "amsgrad": "it keeps a third moment",
    "capturable": "the step runs on the host and cannot be part of a CUDA graph",
    "differentiable": "autograd does not see the step",
}

NOTHING_TO_CLIP = (
    "hook_gradients() takes gradients to the host, where torch.nn.utils.clip_grad_norm_() does not find them and is "
    "refused, and where other code that clips finds none; make the optimizer with max_grad_norm= (or assign "
    "optimizer.max_grad_norm), None if nothing is to be clipped"
)
# Options whose values are objects of this process. A copied or unpickled optimizer does not have them.
OF_THIS_PROCESS = ("process_group", "replica_group", "overlap")


class OffloadOptimizer(torch.optim.Optimizer):
    """The base class. Subclasses say which algorithm it is."""

    _step_supports_amp_scaling = True  # GradScaler gives step() the scale and what it has found
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

    def _algorithm(self) -> int:
        """enum offload_algorithm. Subclasses implement it."""
        raise NotImplementedError

    def _hyperparameters(self) -> list[dict[str, Any]]:
        """Those of each param group, as fields of offload_group_t."""
        algorithm = self._algorithm()
        for index, group in enumerate(self.param_groups):
            check_flags(algorithm, index, group)
        return [hyperparameters_of(algorithm, *each) for each in enumerate(self.param_groups)]

    def _kind(self) -> str:
        """The optimizers whose state_dicts fit, for error texts."""
        name = next(cls.__name__ for cls in type(self).__mro__ if cls.__module__.startswith("hybridopt."))
        known = f" or torch.optim.{name}" if hasattr(torch.optim, name) else ""
        return f"hybridopt.{name}{known}"

    # ---------------------------------------------------------------------------- construction --

    def _configure(self, options: OffloadOptions) -> None:
        """Stores the options that torch does not have. Constructors call this before torch's."""
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
        """As torch's. If there have been steps, the state moves to new memory with room for the new params.
        Until that is done it takes twice the memory."""
        super().add_param_group(param_group)
        try:
            self._check_group(len(self.param_groups) - 1, self.param_groups[-1])
            if self._hooks is not None:
                refuse_held_accumulators(named(len(self.param_groups) - 1, self.param_groups[-1]))
                engine = self._prepare(always=True)  # hooks the new params too
                if engine is not None:
                    engine.bound.release()
        except Exception:
            self.param_groups.pop()
            raise

    def _check_group(self, index: int, group: dict[str, Any]) -> None:
        self._check_switches(index, group)
        refuse_in_group(index, group)
        refuse_twice(index, group)
        check_flags(self._algorithm(), index, group)
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
        """The norm to which a step clips the gradients; None: it does not clip. An assignment takes effect
        with the next step. All ranks must assign the same value."""
        return self._options["max_grad_norm"]

    @max_grad_norm.setter
    def max_grad_norm(self, max_grad_norm: float | None) -> None:
        ROWS["max_grad_norm"].check("max_grad_norm", max_grad_norm)
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
            self._engine.show(self._state)  # so that the next step notices what `content` replaces
        self._state = State(self, content)

    def _fill_state(self) -> None:
        """Brings `state` up to date. State calls this before it is read or changed."""
        if self._engine is not None:
            self._engine.show(self._state)

    @in_no_mode
    def materialize(self) -> None:
        """Takes the memory for the state now, so that `state` has the entries of all trained params before their
        first step, for code that loads into them: moments are zero (Adagrad's sum is the initial one), step counts
        0, and masters the params. What is loaded, assigned or written there is used by the next step; without that
        the bits are those of steps alone. Of several ranks all must call this. Call it after the model has been
        wrapped and moved to its device."""
        self._ready_engine().materialize(self._state)

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
        if "_history" not in vars(self):  # a copy starts without a history
            self._history = History()
            self._aside = Aside(self._history, {})
        self._aside.counts = state.pop("_hidden_counts", self._aside.counts)
        if "state" in state:
            self.state = state.pop("state")
        super().__setstate__(state)

    def _hidden_counts(self) -> dict[Tensor, int]:
        counts = self._aside.hidden_counts(self._state)
        return counts if self._engine is None else {**counts, **self._engine.hidden_counts(self._state)}

    def _refuse_left_out(self, what: str, keys: Iterable[Any]) -> None:
        """Raises if what is to be saved would lack some of the state. `keys` are the keys of `state`."""
        params = {param for group in self.param_groups for param in group["params"]}
        count = sum(isinstance(key, Tensor) and key not in params for key in keys)
        if count > 0:
            raise abi.InvalidStateError(
                f"{what} would leave out the state of {count} parameters that are not in param_groups; put them "
                "there before, or delete their entries from `state`"
            )

    def state_dict(self) -> dict[str, Any]:
        """As torch's. torch's optimizer of the same name can load it. The tensors are views of live state:
        deepcopy what must not change with the next step."""
        self._refuse_left_out("state_dict()", self.state)
        state_dict = super().state_dict()
        entries = state_dict["state"].items()
        state_dict["state"] = {
            key: dict(entry) if isinstance(entry, Entry) else entry for key, entry in entries
        }
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state_dict of this class or of torch's optimizer of the same name. State stays in fp32 on the
        host, whatever the dtype of the params. The next step copies it to the library's memory."""
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
        self._aside.forget_unstepped()
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
        """Writes masters, moments and step counts to a new directory, as safetensors files and a manifest.
        The directory appears only when it is complete. With several ranks all must call this. The call
        returns when everything is on disk.

        With wait=False it returns at once, and training may go on. Then, until the next step() or wait() of
        the returned object has returned, other code must not write fp32 params on the CPU. Until that wait()
        has returned, it must not write moments and masters in place, nor resize, free or move (by
        share_memory_() or torch.multiprocessing) storages of params on the CPU: the save would read memory
        that no longer exists, and the process might crash.

        `progress` is a function of the bytes done and the total bytes, or True or False for a tqdm bar.
        None (the default) shows a bar on a terminal."""
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
        """Loads state and params from a directory that save_checkpoint() or another program with this library
        has written, with any number of ranks. Param groups stay as they are. If the checkpoint is refused,
        nothing has changed. With fresh_moments only the weights are loaded, with keep_steps too also the
        step counts. verify=False reads the files once instead of twice."""
        self._refuse_fsdp1("load_checkpoint()")
        engine = self._ready_engine()
        checkpoints.load(engine, path, fresh_moments, keep_steps, verify, progress)

    # ------------------------------------------------------------------------------------ step --

    @in_no_mode
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the params that have a gradient. Unless overlap() was called, the step is complete when this
        returns. Gradients stay as they are."""
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
            self._drop_hosted()  # a skipped step drops gradients on the host too
            self._history.note_skipped()
            return loss
        engine = self._prepare()
        if self._hooks is not None:
            self._hooks.unclipped.end()
        if engine is not None and (engine.bound.bind() or self._comm is not None):
            self._sample("gradients")
            self._step(engine)
            self._sample("step")
            if self._leftover is not None and engine.plan_of is not None:
                self._note_placement(self._leftover.after_step(engine.plan_of, self._move_state))
        return loss

    def _step(self, engine: Engine) -> None:
        options = self._step_options()
        # A GradScaler must be told what the step has found before it goes on.
        is_told = self._hooks is not None and grad_scaler.is_scaling(self)
        if self._overlap is not None:
            engine.settle_ended()
        engine.expects_skips = is_told
        if self._overlap is not None and not is_told and self._overlap.may_begin():
            engine.begin_step(self._overlap.aliases(), self._overlap, **options)
            if self._hooks is not None:
                self._hooks.begin_again()
            return
        with self._telling_rank():
            skipped = engine.step(**options)
        if self._hooks is not None:
            if is_told:
                self._hooks.tell_scaler(skipped)
            self._hooks.release()
        if engine.device.type == "cpu" or skipped:
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
        """Adds the comm table's own error text to an error of the library."""
        try:
            yield
        except abi.CommFailedError as error:
            if self._comm is None or not self._comm.error:
                raise
            raise abi.CommFailedError(f"{error}: {self._comm.error}") from None

    @in_no_mode
    def _wait_for(self, slots: Sequence[Slot], streams: Iterable[Any] = ()) -> None:
        """Waits until the step under way has updated the params of these slots."""
        if self._engine is not None:
            with self._telling_rank():
                self._engine.under_way.wait(slots, streams)

    @in_no_mode
    def _finish_for_use(self) -> None:
        """As _finish, for code outside of modules that is about to use a param."""
        if self._engine is not None:
            with self._telling_rank():
                self._engine.under_way.finish_for_use()

    def _finish(self) -> None:
        """Waits until the step under way has updated all params."""
        if self._engine is not None and self._engine.under_way:
            self._wait_for(self._engine.slots)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. It also drops gradients that are on the host."""
        if not set_to_none:
            self._finish()  # a step may read what is to be zero
        with without_traps() if set_to_none else contextlib.nullcontext():
            super().zero_grad(set_to_none)
        self._give_back()
        for group in self.param_groups:
            for param in group["params"]:
                if getattr(param, "decoupled_grad", None) is not None:
                    set_gradient(param, None if set_to_none else param.decoupled_grad.zero_())
        self._drop_hosted()

    def _drop_hosted(self) -> None:
        """Drops the gradients that are on the host."""
        if self._engine is not None:
            moves.drop_gradients(self._engine)
        if self._hooks is not None:
            self._hooks.begin_again()

    # ---------------------------------------------------------------------------------- engine --

    def _ready_engine(self, binds_params: bool = True) -> Engine:
        """The engine, committed and up to date with params, groups and state. It is made even if there are no
        gradients. Who reads no param need not have them bound: a stash may have put some aside."""
        refuse_capture()
        engine = self._prepare(always=True)
        if engine is None:
            raise abi.InvalidStateError("no parameter requires a gradient; there is nothing to move or save")
        if binds_params and engine.released_storages is None:
            engine.bound.bind_params()
        else:
            engine.bound.release()
        return engine

    def _prepare(self, always: bool = False) -> Engine | None:
        """The engine, committed and up to date with param groups and state. Unless `always` is set, it is None
        while there is no gradient."""
        if self._closed:
            raise abi.InvalidStateError(f"this {type(self).__name__} is closed; make a new one")
        self._finish()
        for index, group in enumerate(self.param_groups):
            self._check_switches(index, group)
            refuse_in_group(index, group)
        groups = self._hyperparameters()
        known: dict[Tensor, Slot] = {}
        if self._engine is not None:
            known = self._engine.registered.slot_of  # a reference to the engine would keep its memory
            changed = self._engine.difference(self._algorithm(), groups, self.param_groups)
            if changed:
                # This raises for invalid params while the old engine still exists.
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
        """A new engine; None while there is nothing to update. `known` has the slots of the engine before it,
        if there was one."""
        members = members_of(self.param_groups, wide_gradients(known))
        away.bring_back(member.param for member in members)
        if self._comm is None:
            self._comm = making.ranks_of(members, self._options)
            if self._comm is not None:
                self._aside.end_all(self._state)
        members = making.with_shards(members, known, self._comm, self._options)
        # On several ranks all step together, those without gradients too.
        stepped = always or self._comm is not None
        if not members or not (stepped or any(has_gradient(m.param) for m in members)):
            return None
        if self._overlap is not None:
            members = self._overlap.ordered(members)
        engine = self._new_engine(members, groups)
        engine.commit()
        making.warn_of_no_early_updates(self._options, engine.device)
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
        """Puts the engine aside or ends it, because it does not fit param_groups any more."""
        engine = self._engine
        assert engine is not None
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        if not self._may_put_aside() or not engine.registered.slot_of.keys().isdisjoint(params):
            return self._drop_engine(why)
        moves.check_nothing_offloaded(engine, why)
        engine.show(self._state)
        if not has_state(engine, self._state):
            return self._drop_engine(why)
        engine.wait()
        self._aside.put(engine, self._state)
        self._engine = None

    def _may_put_aside(self) -> bool:
        """Whether the engine may exist beside the next one. It may not if it depends on other ranks, on hooks
        of the model or on the memory that the device has left."""
        is_alone = self._comm is None and self._hooks is None and self._overlap is None
        return is_alone and self._options["offload_fraction"] != placement.AUTO

    def _drop_engine(self, why: str) -> None:
        """Ends the engine. Its state stays in `state`, in tensors, until another engine adopts it."""
        engine = self._engine
        if engine is None:
            return
        moves.check_nothing_offloaded(engine, why)
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
        free_all: bool = False,
    ) -> Removal:
        """Moves gradients to the host during the backward pass from now on, in batches as they become ready,
        and sets `grad` of their params to None. The next step uses and drops them; zero_grad() drops them
        too.

        Gradients move in the last backward pass of a step. In the passes before, autograd adds them up on
        the device. `micro_batches` is the number of passes of a step. If it is None, the last pass must be
        inside of `with optimizer.last_micro_batch():`. Under FSDP2's set_requires_gradient_sync(False) there
        are no gradients before the last pass, so a step counts as one pass. With `accumulate`, for devices
        without room for gradients, gradients move in every pass, and the host adds them up in fp32. For
        low-precision gradients that takes twice the memory on the host.

        Gradients that the device will read stay in its memory until the step has read them: those of params
        whose state is there, or goes there in the step (of the latter as many as in the step before). With
        `free_all` they move to the host too, which frees the most memory, but the step takes longer; so they
        do with offload_fraction="auto" without a budget, which gives free memory to state.

        Call it after the model has been wrapped, and when nothing holds a graph of it any more: wrappers that
        average gradients in their own hooks, such as DistributedDataParallel, are refused by what they hold.

        The call allocates the memory for state and gradients. To clip, use max_grad_norm:
        torch.nn.utils.clip_grad_norm_ finds no gradients, and raises after a backward pass whose gradients have been
        taken; last_step().grad_norm tells the norm. A warning says so unless the optimizer was made with
        max_grad_norm=, which may be None. GradScaler finds no gradients either: give the scaler that
        steps this optimizer as `grad_scaler`, and the step will tell it what it has found."""
        if self._hooks is not None:
            raise abi.InvalidStateError(
                "gradients are hooked already; call remove() on what hook_gradients() returned"
            )
        self._refuse_fsdp1("hook_gradients()")
        if not self._says_whether_to_clip:
            warnings.warn(NOTHING_TO_CLIP, stacklevel=3)
        self._aside.end_all(self._state)
        hooks = GradientHooks(self, accumulate, micro_batches, grad_scaler, free_all)
        for index, group in enumerate(self.param_groups):
            refuse_held_accumulators(named(index, group))
        needed = "accumulate" if accumulate else "grads"
        if needed not in self._options["movable"]:
            # Another engine, which has room for the gradients, adopts the state.
            self._drop_engine("hooks need room for gradients")
            movable = (*self._options["movable"], needed)
            self._options = {**self._options, "movable": movable}
        hooks.attach(self._ready_engine())
        self._hooks = hooks
        return Removal(hooks)

    def last_micro_batch(self) -> contextlib.AbstractContextManager[None]:
        """Marks the backward pass in this context as the last one of a step, in which hook_gradients() moves
        gradients. Without hooks it has no effect."""
        return contextlib.nullcontext() if self._hooks is None else self._hooks.last_micro_batch()

    @in_no_mode
    def overlap(self, model: nn.Module) -> Removal:
        """Makes step() queue the step and return, from now on. In its forward pass each module of the model
        waits for its own params only, and the library updates params in the order in which the first forward
        pass uses them. `overlap=model` in the constructor has the same effect.

        Whatever else uses a param by functions of torch (averages of weights, copy.deepcopy, state_dict()) waits
        for it as well. HYBRIDOPT_CHECK_OVERLAP=1 in the environment warns of such uses, because each of them
        waits earlier than a module would. What reaches the memory of params in another way (a tensor over it
        that was made before, C++ code, TorchScript) must call synchronize() first. If a step fails, the next wait
        raises the error."""
        if self._overlap is not None:
            raise abi.InvalidStateError(
                "steps overlap already; call remove() on what overlap() returned"
            )
        self._refuse_fsdp1("overlap()")
        self._aside.end_all(self._state)
        overlap = Overlap(self, model)
        if self._engine is not None:
            overlap.attach(self._engine)
        self._overlap = overlap
        return Removal(overlap)

    @in_no_mode
    def synchronize(self) -> None:
        """Waits for all steps. After that any code may read and write params."""
        self._finish()
        if self._engine is not None:
            self._engine.settle()

    @in_no_mode
    def offload(self, params: bool = False, grads: bool = False, states: bool = False) -> None:
        """Moves content to the host, bit for bit, and frees its device memory before it returns. What is on the
        host already stays there. The `movable` option must name what is moved.

        Params keep their tensors, but have no content until reload(): an operation that uses one raises. `grad` of params becomes None;
        reload() sets it again, or the next step uses the gradients on the host."""
        self._aside.end_all(self._state)
        moves.offload(self._ready_engine(), self._state, params, grads, states)
        self._sample("offload")

    @in_no_mode
    def reload(self, params: bool = False, grads: bool = False, states: bool = False) -> None:
        """Moves content back to torch's memory and waits for that."""
        refuse_capture()
        self._finish()
        engine = self._ready_engine() if self._engine is None else self._engine
        moves.reload(engine, params, grads, states)
        self._sample("reload")

    @in_no_mode
    def set_offload_fraction(self, offload_fraction: float) -> None:
        """Changes how much of the state is on the host, from 0.0 (all state on the device) to 1.0 (all on the
        host), without a change of its bits. It returns when the content has been copied and the memory that
        is no longer needed has been freed, on both sides. If the device or the host lacks memory, it raises
        and nothing has changed.

        Tensors that were taken from `state` before are no longer the optimizer's: read `state` again."""
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
        engine = self._ready_engine()  # it has adopted changes of `state`
        engine.set_device_fraction(self._state, device_fraction)

    def _note_placement(self, chosen: Placement | None) -> None:
        """Records a choice of offload_fraction="auto", if there is one."""
        if chosen is not None:
            self._placement = chosen
            making.print_choice(chosen)
            self._sample("auto")

    @in_no_mode
    def _give_back(self) -> None:
        """Moves state that offload_fraction="auto" moved to the device back to the host if torch has run out
        of memory since."""
        if self._leftover is not None and self._leftover.has_run_out():
            self._note_placement(self._leftover.give_back(self._move_state))

    @contextlib.contextmanager
    def offloaded(
        self, params: bool = True, grads: bool = True, states: bool = True
    ) -> Iterator[None]:
        """Calls offload() at the start of the context and reload() at its end, for a phase that needs the
        device memory."""
        self.offload(params=params, grads=grads, states=states)
        try:
            yield
        finally:
            self.reload(params=params, grads=grads, states=states)

    # ------------------------------------------------------------------------------- reporting --

    def __repr__(self) -> str:
        """As torch's, with the options and bytes of this class added."""
        groups = super().__repr__().removesuffix(")")
        lines = "".join(f"    {name}: {value}\n" for name, value in self._particulars().items())
        return f"{groups}Offload\n{lines})"

    def _particulars(self) -> dict[str, Any]:
        """What repr() adds. It does not wait, does not make an engine, and does not raise."""
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
        particulars["steps"] = self._history.told(stats)
        particulars["bytes"] = (
            f"{readable(stats.states_on_host_bytes)} of state on the host, "
            f"{readable(stats.states_on_device_bytes)} on the device"
        )
        return particulars

    @in_no_mode
    def plan(self) -> Plan:
        """All memory that the first step will take, or has taken."""
        engine = self._engine
        if engine is None:
            groups = self._hyperparameters()
            members = members_of(self.param_groups, {})
            away.bring_back(member.param for member in members)
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
        """Totals of steps, bytes and seconds. They are 0 before the first step."""
        return self._history.stats(None if self._engine is None else self._engine.handle.stats())

    @in_no_mode
    def last_step(self) -> StepResult:
        """The result of the last step: whether it was skipped, the gradient norm, and so on. Waits for the
        step."""
        results = self.step_results()
        if not results:
            raise abi.InvalidStateError("no step yet; call step() first")
        return results[-1]

    def memory_timeline(self) -> list[MemorySample]:
        """The last 4096 samples of memory in use, by kind and place. There is one before and one after each
        step, and one after each move."""
        return list(self._history.samples)

    @in_no_mode
    def step_results(self) -> list[StepResult]:
        """The results of the last 1024 steps, with skipped ones. Waits for queued steps."""
        if self._engine is not None:
            self._engine.settle()
        return list(self._history.results)

    def plot_timeline(self, path: str | os.PathLike[str]) -> None:
        """Writes a plot of memory_timeline() and of the lanes of the last steps. It needs matplotlib. Waits for
        queued steps."""
        from ..steps.timeline_plot import plot_timeline

        plot_timeline(self.memory_timeline(), self.step_results(), path)

    def _sample(self, label: str) -> None:
        if self._engine is not None:
            self._history.sample(label, self._engine.handle.stats())

    @in_no_mode
    def refresh_masters(self) -> None:
        """Makes the next step update the masters from the params. Call it after writes that leave no trace in
        the tensors (in place to `param.data`). It is not needed after load_state_dict(), copy_() and other
        operations on params. The upper half of a split master is the param itself; this clears the lower
        half, which belongs to the value of before."""
        if self._engine is not None:
            self._finish()
            if any(slot.split for slot in self._engine.slots):
                self._prepare(always=True)  # adopts lower halves in `state`, to clear them too
        for engine in (*self._aside.engines(), self._engine):
            if engine is not None:
                engine.forget_what_is_in_sync()

    @in_no_mode
    def master_of(self, param: Tensor) -> Tensor:
        """The master of a param in fp32: the numbers that steps update, and of which the param is the rounded
        value. It is a view of the library's memory if the master is stored there in fp32, otherwise a copy.
        Waits for queued work."""
        engine = self._ready_engine()
        slot = engine.registered.slot_of.get(param)
        if slot is None:
            raise ValueError("this parameter has no state here; is it one of the optimizer's, and trained?")
        engine.settle()
        engine.refresh_masters()
        return like_param(slot.arrange(engine.masters.read(slot)), param)

    @in_no_mode
    def close(self) -> None:
        """Frees the memory of the state, as the end of the object does. Tensors that were taken from `state`
        stay valid: the memory of all state, and the library's threads, last as long as one of these tensors."""
        if self._engine is not None:
            moves.check_nothing_offloaded(self._engine, "the optimizer is to be closed")
            if self._hooks is not None:
                self._hooks.remove()
            if self._overlap is not None:
                self._overlap.remove()
            self._engine.settle()
            self._history.note_end(self._engine.handle.stats())
            self._engine = self._leftover = None
        self._aside.end_all(self._state)
        self._state = State(self)
        self._comm = None
        self._closed = True
