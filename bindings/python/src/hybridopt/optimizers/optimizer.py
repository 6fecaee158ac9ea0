"""OffloadOptimizer: the base class of the optimizers in algorithms.py. It behaves as a torch optimizer, but
the library holds the state, and a step is one call of the library."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import abi
from ..base.callers import depth_of_caller
from ..base.checks import kind_of, refuse_assignment
from ..base.modes import in_no_mode, refuse_capture
from ..base.owned_hooks import Removal
from ..engine import making, moves
from ..engine.engine import Engine
from ..engine.engines import Engines
from ..traps.clipping import NOTHING_TO_CLIP, note_taken, note_used, refuse_taken_by_another, taken_by
from ..hiding.gradient_hooks import GradientHooks, refuse_held_accumulators
from ..hiding.overlap import Overlap
from ..params.hyperparameters import check_arguments, hyperparameters_of, named_algorithm, with_own_defaults
from ..params.kept_addresses import KeptAddresses
from ..params.matrices import check_matrices
from ..params.members import Member, has_gradient, members_of, named
from ..params.registered import Slot, Wanted, wide_gradients
from ..params.tensors import set_gradient
from ..ranks import local_ranks
from ..settings import disk, placement
from ..settings.groups import check_group, check_values, refuse_fsdp1_in
from ..settings.options import DEFAULT_OPTIONS, ROWS, WAYS_OUT, OffloadOptions, checked
from ..settings.placement import Leftover, Placement
from ..state.entries import State
from ..steps.history import History
from ..traps import away
from ..traps.trap import without_traps
from . import adopting, grad_scaler
from .publishing import Publishing
from .reporting import Reporting
from .saving import Saving

if TYPE_CHECKING:
    from ..ranks.process_group import ProcessGroupComm


class OffloadOptimizer(Saving, Reporting, Publishing):
    """The base class. Subclasses say which algorithm it is."""

    _step_supports_amp_scaling = True  # GradScaler gives step() the scale, and whether it has found Inf or NaN
    _comm: ProcessGroupComm | None = None
    _options: OffloadOptions = DEFAULT_OPTIONS
    _placement = Placement(1.0, "no step yet")
    _leftover: Leftover | None = None
    _hooks: GradientHooks | None = None
    _overlap: Overlap | None = None
    _kept_addresses: KeptAddresses | None = None
    _says_whether_to_clip = False

    def _algorithm(self, group: dict[str, Any]) -> int:
        """enum offload_algorithm, of a param group that names none. Subclasses implement it."""
        raise NotImplementedError

    def _algorithms_of(self, param_groups: list[dict[str, Any]]) -> list[int]:
        """enum offload_algorithm, of each group."""
        named = itertools.starmap(named_algorithm, enumerate(param_groups))
        return [
            self._algorithm(group) if algorithm is None else algorithm
            for group, algorithm in zip(param_groups, named)
        ]

    @property
    def _engine(self) -> Engine | None:
        return self._engines.present

    # ---------------------------------------------------------------------------- construction --

    def _configure(self, params: Any, options: OffloadOptions, **hyperparameters: Any) -> None:
        """Checks the numeric arguments, and stores the options that torch does not have. Constructors call this
        before torch's constructor."""
        if isinstance(params, nn.Module) and not isinstance(params, nn.ParameterList):
            raise TypeError(f"params is {kind_of(params)}, expected its parameters; pass model.named_parameters()")
        check_arguments(**hyperparameters)
        self._options = checked(options, type(self).__name__)
        self._says_whether_to_clip = "max_grad_norm" in options
        if self._options["local_world"] is None:
            local_ranks.count_in(local_ranks.mask_of(self._options["numa_nodes"]))
        self._history = History()
        self._engines = Engines(self._history)
        if self._options["overlap"] is not None:
            self._overlap = Overlap(self, self._options["overlap"])

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_assignment(self, name, value, WAYS_OUT)
        super().__setattr__(name, value)

    @in_no_mode
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. If there have been steps, the state moves to new memory with room for the new params.
        Until that is done it takes twice the memory."""
        self._engines.check_open(self)
        super().add_param_group(with_own_defaults(len(self.param_groups), param_group))
        try:
            index, group = len(self.param_groups) - 1, self.param_groups[-1]
            algorithm = self._algorithms_of(self.param_groups)[index]
            check_group(index, group, algorithm, self._options, type(self).__name__)
            if self._hooks is not None:
                refuse_held_accumulators(named(index, group))
                engine = self._prepare(always=True)  # hooks the new params too
                if engine is not None:
                    engine.bound.release()
        except Exception:
            self.param_groups.pop()
            raise

    @property
    def max_grad_norm(self) -> float | None:
        """The norm to which a step clips the gradients; None: it does not clip. An assignment takes effect
        with the next step. All ranks must assign the same value."""
        return self._options["max_grad_norm"]

    @max_grad_norm.setter
    def max_grad_norm(self, max_grad_norm: float | None) -> None:
        self._engines.check_open(self)
        ROWS["max_grad_norm"].check("max_grad_norm", max_grad_norm)
        if max_grad_norm is not None:
            refuse_fsdp1_in(self.param_groups, "max_grad_norm")
        self._options = {**self._options, "max_grad_norm": max_grad_norm}
        self._says_whether_to_clip = True

    # ------------------------------------------------------------------------------------ step --

    @in_no_mode
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the params that have a gradient. Unless overlap() was called, the step is complete when this
        returns. Gradients stay as they are."""
        self._engines.check_open(self)
        refuse_capture()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._leftover is not None:
            self._give_back()
        scaled = not grad_scaler.ATTRIBUTES.isdisjoint(vars(self))
        if scaled and grad_scaler.is_skipped(self, self._engine, self._hooks):
            self._drop_hosted()  # a skipped step drops gradients on the host too
            self._history.note_skipped()
            return loss
        if taken_by:
            refuse_taken_by_another(self, itertools.chain(*itertools.starmap(named, enumerate(self.param_groups))))
        engine = self._prepare()
        if self._hooks is not None:
            self._hooks.refuse_written()
        if self in taken_by:
            note_used(self)
        if engine is not None and (engine.bound.bind() or self._comm is not None):
            self._sample("gradients")
            self._step(engine, scaled)
            self._sample("step")
            if self._leftover is not None and engine.plan_of is not None:
                self._note_placement(self._leftover.after_step(engine.plan_of, self._move_state))
        return loss

    def _step(self, engine: Engine, scaled: bool) -> None:
        options = self._step_options(scaled)
        # A GradScaler must learn whether the step has found Inf or NaN before it goes on.
        is_told = scaled and self._hooks is not None and grad_scaler.is_scaling(self)
        if self._overlap is not None:
            engine.settle_ended()
        engine.expects_skips = is_told
        if self._overlap is not None and not is_told and self._overlap.may_begin():
            taken = [] if self._hooks is None else self._hooks.in_flight()
            engine.begin_step(self._overlap.aliases(), self._overlap, taken, **options)
            if self._hooks is not None:
                self._hooks.begin_again()
            if engine.under_way is not None and engine.under_way.is_shared:
                self._finish()
                self._overlap.warn_of_shared_memory()
            return
        with self._telling_rank():
            skipped = engine.step(**options)
        if self._hooks is not None:
            if is_told:
                self._hooks.tell_scaler(skipped)
            self._hooks.release()
        if engine.device.type == "cpu" or skipped:
            engine.settle()

    def _step_options(self, scaled: bool) -> dict[str, Any]:
        options = {"grad_scale": grad_scaler.grad_scale(self) if scaled else 1.0}
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
        if self._engine is not None and self._engine.under_way is not None:
            with self._telling_rank():
                self._engine.under_way.wait(slots, streams)

    def _finish_for_use(self) -> None:
        """Does what _finish() does, for code outside of modules that is about to use a param."""
        if self._engine is not None and self._engine.under_way is not None:
            with self._telling_rank():
                self._engine.under_way.finish_for_use()

    def _finish(self) -> None:
        """Waits until the step under way has updated all params."""
        if self._engine is not None and self._engine.under_way:
            self._wait_for(self._engine.slots)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. It also drops gradients that are on the host. With set_to_none=False all params that have had a
        gradient get zeros on their device, those too whose gradients hook_gradients() takes."""
        self._engines.check_open(self)
        if not set_to_none:
            self._finish()  # a step may still read the gradients
        with without_traps() if set_to_none else contextlib.nullcontext():
            super().zero_grad(set_to_none)
        self._give_back()
        for group in self.param_groups:
            for param in group["params"]:
                if getattr(param, "decoupled_grad", None) is not None:
                    set_gradient(param, None if set_to_none else param.decoupled_grad.zero_())
        self._drop_hosted()
        if self._engine is None:
            return
        if set_to_none:
            self._engine.bound.had_gradients.clear()
        else:
            moves.zero_gradients(self._engine)

    def _drop_hosted(self) -> None:
        """Drops the gradients that are on the host."""
        note_used(self)
        if self._engine is not None:
            moves.drop_gradients(self._engine)
        if self._hooks is not None:
            self._hooks.drop()

    # ---------------------------------------------------------------------------------- engine --

    def _ready_engine(self, binds_params: bool = True) -> Engine:
        """The engine, committed and up to date with params, groups and state. It is made even if there are no
        gradients. Callers that read no params pass binds_params=False; then params that a stash has put aside may
        stay there."""
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
        self._finish()
        self._finish_gradients()
        if self._engine is not None:
            self._engine.fit_params()
        engine = self._engines.ready(self, always)
        if engine is not None and not engine.shown.is_as_left(self._state):
            adopting.adopt(engine, self._state, before_step=not always)
        return engine

    def _finish_gradients(self) -> None:
        """Waits for a step that an exception has cut off; undoes or finishes a move of gradients that one has cut off."""
        engine = self._engine
        if engine is not None and engine.may_miscount:
            engine.settle()  # before look() drops gradients that the step may read
        if engine is not None and engine.bound.is_moving:
            moves.finish_gradients(engine, functools.partial(note_taken, self))
            self._note_returned(engine)

    def _note_returned(self, engine: Engine) -> None:
        if not engine.bound.params_of_taken():
            note_used(self)

    def _wanted(self) -> Wanted:
        """What an engine must fit now. Raises if the groups are invalid."""
        groups, algorithms = self.param_groups, self._algorithms_of(self.param_groups)
        for index, group in enumerate(groups):
            check_values(index, group, type(self).__name__)
        fields = [hyperparameters_of(algorithm, *each) for algorithm, each in zip(algorithms, enumerate(groups))]
        for algorithm, each in zip(algorithms, enumerate(groups)):
            check_matrices(algorithm, *each)
        return Wanted(fields, groups)

    def _committed_engine(self, known: dict[Tensor, Slot], wanted: Wanted, always: bool) -> Engine | None:
        """A new engine; None while there is nothing to update. `known` has the slots of the engine before it,
        if there was one."""
        members = members_of(self.param_groups, wide_gradients(known))
        away.bring_back(member.param for member in members)
        if self._comm is None:
            self._comm = making.ranks_of(members, self._options)
            if self._comm is not None:
                self._engines.end_aside(self)
        members = making.with_shards(members, known, self._comm, self._options)
        # All ranks step together, even ranks without gradients.
        stepped = always or self._comm is not None
        if not members or not (stepped or any(has_gradient(m.param) for m in members)):
            return None
        if self._overlap is not None:
            members = self._overlap.ordered(members)
        engine = self._new_engine(members, wanted)
        self._kept_addresses = making.kept_addresses_of(self._options, engine, self._kept_addresses)
        engine.kept_addresses = self._kept_addresses
        engine.commit()
        making.warn_of_no_effect(self._options, wanted, engine.device)
        engine.counts_before = self._engines.counts
        self._leftover = making.leftover_of(engine, self._options)
        if self._comm is not None:
            self._comm.finish_at_exit(engine.handle)
        return engine

    def _new_engine(self, members: list[Member], wanted: Wanted) -> Engine:
        """An engine that is not committed."""
        engine, self._placement = making.make_engine(members, wanted, self._options, self._comm, self._history)
        return engine

    def _planned_engine(self) -> Engine:
        wanted = self._wanted()
        members = members_of(self.param_groups, {})
        away.bring_back(member.param for member in members)
        if not members:
            raise abi.InvalidStateError("no parameter requires a gradient; there is nothing to plan for")
        return self._new_engine(members, wanted)

    def _may_put_aside(self) -> bool:
        """Whether the engine may exist beside the next one. It may not if it depends on other ranks, on hooks
        of the model or on the memory that the device has left."""
        is_alone = self._comm is None and self._hooks is None and self._overlap is None
        return is_alone and self._options["offload_fraction"] != placement.AUTO

    def _begin_with(self, engine: Engine) -> None:
        for hooks in (self._hooks, self._overlap):
            if hooks is not None:
                hooks.attach(engine)

    def _let_go(self) -> None:
        note_used(self)
        if self._hooks is not None:
            self._hooks.release()
        self._leftover = None

    def _unhook(self) -> None:
        for hooks in (self._hooks, self._overlap):
            if hooks is not None:
                hooks.remove()

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
        self._engines.check_open(self)
        if self._hooks is not None:
            raise abi.InvalidStateError(
                "gradients are hooked already; call remove() on what hook_gradients() returned"
            )
        refuse_fsdp1_in(self.param_groups, "hook_gradients()")
        self._finish_gradients()
        if not self._says_whether_to_clip:
            warnings.warn(NOTHING_TO_CLIP, stacklevel=depth_of_caller())
        self._engines.end_aside(self)
        hooks = GradientHooks(self, accumulate, micro_batches, grad_scaler, free_all)
        for index, group in enumerate(self.param_groups):
            refuse_held_accumulators(named(index, group))
        needed = "accumulate" if accumulate else "grads"
        if needed not in self._options["movable"]:
            # Another engine, which has room for the gradients, adopts the state.
            self._engines.end(self, "hooks need room for gradients")
            movable = (*self._options["movable"], needed)
            self._options = {**self._options, "movable": movable}
        hooks.attach(self._ready_engine())
        self._hooks = hooks
        return Removal(hooks, f"hook_gradients() of {type(self).__name__}")

    def last_micro_batch(self) -> contextlib.AbstractContextManager[None]:
        """Marks the backward pass in this context as the last one of a step, in which hook_gradients() moves
        gradients. Without hooks it has no effect."""
        self._engines.check_open(self)
        return contextlib.nullcontext() if self._hooks is None else self._hooks.micro_batches.last()

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
        self._engines.check_open(self)
        if self._overlap is not None:
            made = "call remove() on what overlap() returned"
            if self._options["overlap"] is not None:
                made = "overlap= of the constructor has begun it; leave this call or that argument out"
            raise abi.InvalidStateError(f"steps overlap already; {made}")
        refuse_fsdp1_in(self.param_groups, "overlap()")
        self._engines.end_aside(self)
        overlap = Overlap(self, model)
        if self._engine is not None:
            overlap.attach(self._engine)
        self._overlap = overlap
        return Removal(overlap, f"overlap({type(model).__name__}) of {type(self).__name__}")

    @in_no_mode
    def synchronize(self) -> None:
        """Waits for all steps. After that any code may read and write params, and gradients that hooks have taken."""
        self._engines.check_open(self)
        self._finish()
        if self._engine is not None:
            self._engine.settle()
            self._finish_copies(self._engine)

    def _finish_copies(self, engine: Engine) -> None:
        """Waits for the copies of hooks, after which other code may write what they have read."""
        if self._hooks is not None:
            self._hooks.finish_copies(engine)

    @in_no_mode
    def offload(self, params: bool = False, grads: bool = False, states: bool = False) -> None:
        """Moves content to the host, bit for bit, and frees its device memory before it returns. What is on the
        host already stays there. The `movable` option must name what is moved.

        Params keep their tensors, but have no content until reload(): an operation that uses one raises. `grad` of
        params becomes None; reload() sets it again, or the next step uses the gradients on the host."""
        self._engines.check_open(self)
        self._engines.end_aside(self)
        engine = self._ready_engine(binds_params=params or grads)  # else the params may be elsewhere
        moves.check_movable(engine, {"params": params, "grads": grads, "states": states})
        engine.settle()
        if grads:
            moves.offload_gradients(engine, functools.partial(note_taken, self))
            self._finish_copies(engine)
        moves.offload(engine, self._state, params, states)
        self._sample("offload")

    @in_no_mode
    def reload(self, params: bool = False, grads: bool = False, states: bool = False) -> None:
        """Moves content back to torch's memory and waits for that."""
        self._engines.check_open(self)
        refuse_capture()
        self._finish()
        self._finish_gradients()
        engine = self._ready_engine() if self._engine is None else self._engine
        moves.reload(engine, params, grads, states)
        self._finish_copies(engine)
        self._note_returned(engine)
        self._sample("reload")

    @in_no_mode
    def set_offload_fraction(self, offload_fraction: float, disk_fraction: float | None = None) -> None:
        """Changes how much of the state is on the host, from 0.0 (all state on the device) to 1.0 (all on the
        host), without a change of its bits. It returns when the content has been copied and the memory that
        is no longer needed has been freed, on both sides. If the device or the host lacks memory, it raises
        and nothing has changed.

        `disk_fraction` is the part of it that lives on disk, in the `disk_paths` that the optimizer was made with; None
        leaves that as it is. Then all state on disk is read and written once, and until that has been done the disk
        has it twice.

        Tensors that were taken from `state` or state_dict() before must not be used any more, unless they were copied:
        the memory behind them may be gone, and a use raises. Read `state` again."""
        self._engines.check_open(self)
        refuse_capture()
        placement.check_fraction(offload_fraction)
        on_disk = self._options["disk_fraction"] if disk_fraction is None else disk_fraction
        on_disk = disk.fraction_of("disk_fraction", on_disk)
        disk.check_fractions(offload_fraction, on_disk, self._options["disk_paths"])
        self._engines.end_aside(self)
        if self._engine is not None:
            self._move_state(1.0 - offload_fraction, on_disk)
            self._placement = placement.chosen(offload_fraction, self._engine.device.type == "cpu")
        self._leftover = None
        self._options = {
            **self._options,
            "offload_fraction": float(offload_fraction),
            "disk_fraction": on_disk,
            "device_budget_bytes": None,
            "device_headroom": None,
        }
        self._sample("set_offload_fraction")

    def _move_state(self, device_fraction: float, disk_fraction: float = 0.0) -> None:
        engine = self._ready_engine()  # this adopts changes of `state`
        engine.set_fractions(self._state, device_fraction, disk_fraction)

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

    def _sample(self, label: str) -> None:
        if self._engine is not None:
            self._history.sample(label, self._engine.handle.stats())

    @in_no_mode
    def refresh_masters(self) -> None:
        """Makes the next step update the masters from the params. Call it after writes that leave no trace in
        the tensors (in place to `param.data`). It is not needed after load_state_dict(), copy_() and other
        operations on params. The upper half of a split master is the param itself; this clears the lower
        half, which belongs to the value of before."""
        self._engines.check_open(self)
        if self._engine is not None:
            self._finish()
            if any(slot.split for slot in self._engine.slots):
                self._prepare(always=True)  # adopts lower halves in `state`, to clear them too
        for engine in (*self._engines.aside(), self._engine):
            if engine is not None:
                engine.forget_what_is_in_sync()

    @in_no_mode
    def close(self) -> None:
        """Frees the memory of the state, as the end of the object does. Tensors that were taken from `state`
        stay valid: the memory of all state, and the library's threads, last as long as one of these tensors. After
        that only reports (stats(), step_results(), memory_timeline() and so on) may be called, and close()."""
        self._finish_gradients()
        self._engines.close(self)
        self._state = State(self)
        self._comm = self._leftover = self._kept_addresses = None
