"""Saving: the state of an optimizer as users read it, copy it, save it and load it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import abi
from ..base.checks import shown
from ..base.modes import in_no_mode
from ..engine.engine import Engine
from ..engine.engines import Engines
from ..params.moments import COUNTED
from ..params.tensors import like_param
from ..settings.groups import check_group, refuse_fsdp1_in
from ..settings.options import OffloadOptions
from ..state import loading
from ..state.entries import Entry, State
from ..steps.history import History
from . import checkpoints

if TYPE_CHECKING:
    from ..ranks.process_group import ProcessGroupComm

# Options whose values are objects of this process. A copied or unpickled optimizer does not have them.
OF_THIS_PROCESS = ("process_group", "replica_group", "overlap")


class Saving(torch.optim.Optimizer):
    """The state of an optimizer, and how it is saved and loaded."""

    _engines: Engines
    _history: History
    _options: OffloadOptions
    _comm: ProcessGroupComm | None
    _says_whether_to_clip: bool
    _state: State

    def _algorithms_of(self, param_groups: list[dict[str, Any]]) -> list[int]:
        raise NotImplementedError

    def _ready_engine(self, binds_params: bool = True) -> Engine:
        raise NotImplementedError

    def _kind(self) -> str:
        """The optimizers whose state_dicts fit, for error texts."""
        name = next(cls.__name__ for cls in type(self).__mro__ if cls.__module__.startswith("hybridopt."))
        known = f" or torch.optim.{name}" if hasattr(torch.optim, name) else ""
        return f"hybridopt.{name}{known}"

    # ----------------------------------------------------------------------------------- state --

    @property
    def state(self) -> State:
        """Per param, by torch's names: `step`, moments, and the fp32 `master_param` of a param in
        lower precision. The tensors are views of the library's memory."""
        return self._state

    @state.setter
    def state(self, content: dict[Any, Any]) -> None:
        if self._engines.present is not None:
            self._engines.present.show(self._state)  # so that the next step notices the entries that `content` replaces
        self._state = State(self, content)

    def _fill_state(self) -> None:
        """Brings `state` up to date. State calls this before it is read or changed."""
        if self._engines.present is not None:
            self._engines.present.show(self._state)

    @in_no_mode
    def materialize(self) -> None:
        """Takes the memory for the state now, so that `state` has the entries of all trained params before their
        first step, for code that loads into them: moments are zero (Adagrad's sum has its initial value), step
        counts are 0, and masters equal the params. The next step uses everything that is loaded, assigned or written
        there. If nothing is, the call does not change the bits of steps. If there are several ranks, all must call
        this. Call it after the model has been wrapped and moved to its device."""
        self._ready_engine().materialize(self._state)

    @in_no_mode
    def master_of(self, param: Tensor) -> Tensor:
        """The master of a param in fp32: the numbers that steps update, and of which the param is the rounded
        value. It is a view of the library's memory if the master is stored there in fp32, otherwise a copy.
        Waits for queued work."""
        self._engines.check_open(self)
        engine = self._ready_engine()
        slot = engine.registered.slot_of.get(param) if isinstance(param, Tensor) else None
        if slot is None:
            raise ValueError(f"master_of() got {shown(param)}, expected one of the optimizer's trained parameters")
        engine.settle()
        engine.refresh_masters()
        return like_param(slot.arrange(engine.masters.read(slot)), param)

    # ---------------------------------------------------------------------- copies and pickles --

    def __getstate__(self) -> dict[str, Any]:
        self._engines.check_open(self)
        return {
            **super().__getstate__(),
            "state": dict(self.state.items()),
            "_says_whether_to_clip": self._says_whether_to_clip,
            "_hidden_counts": self._engines.hidden_counts(self._state),
            "_options": {**self._options, **dict.fromkeys(OF_THIS_PROCESS)},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "_history" not in vars(self):  # a copy starts without a history
            self._history = History()
            self._engines = Engines(self._history)
        self._engines.counts = state.pop("_hidden_counts", self._engines.counts)
        content = state.pop("state", None)
        # torch's classes look for a step count in all entries, which some groups' algorithms do not have.
        uncounted = set() if content is None else self._uncounted_in(state.get("param_groups", []))
        if content is not None:
            self.state = {key: entry for key, entry in content.items() if key not in uncounted}
        super().__setstate__(state)
        if uncounted:
            self.state = content

    def _uncounted_in(self, groups: list[dict[str, Any]]) -> set[Tensor]:
        """The params whose entries of `state` have no step count."""
        algorithms = self._algorithms_of(groups)
        of_groups = (group["params"] for group, each in zip(groups, algorithms) if each not in COUNTED)
        return set(itertools.chain.from_iterable(of_groups))

    # ---------------------------------------------------------------------------- state_dicts --

    def _refuse_left_out(self, what: str, keys: Iterable[Any]) -> None:
        """Raises if the saved content would lack some of the state. `keys` are the keys of `state`."""
        params = {param for group in self.param_groups for param in group["params"]}
        count = sum(isinstance(key, Tensor) and key not in params for key in keys)
        if count > 0:
            raise abi.InvalidStateError(
                f"{what} would leave out the state of {count} parameters that are not in param_groups; put them "
                "there before, or delete their entries from `state`"
            )

    def state_dict(self) -> dict[str, Any]:
        """As torch's. torch's optimizer of the same name can load it. The tensors are views of live state: make a
        deepcopy if they must not change with the next step."""
        self._engines.check_open(self)
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
        self._engines.check_open(self)
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            if changed is not None:
                state_dict = changed
        groups = loading.groups_of(state_dict, self.param_groups, self.defaults, self._kind())
        algorithms = self._algorithms_of(groups)
        for index, (group, algorithm) in enumerate(zip(groups, algorithms)):
            check_group(index, group, algorithm, self._options, type(self).__name__)
        state = loading.state_of(state_dict, self.param_groups, algorithms, self._kind())
        self._engines.forget_unstepped()
        self.__setstate__({"state": state, "param_groups": groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    # ---------------------------------------------------------------------------- checkpoints --

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
        None (the default) shows a bar on a terminal. A function that raises is not called again; what it raised
        goes to the logger "hybridopt", and the save goes on."""
        self._engines.check_open(self)
        refuse_fsdp1_in(self.param_groups, "save_checkpoint()")
        engine = self._ready_engine()
        self._refuse_left_out("save_checkpoint()", self._engines.params_aside(self._state))
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
        step counts. verify=False reads the files once instead of twice. `progress` is as for save_checkpoint()."""
        self._engines.check_open(self)
        refuse_fsdp1_in(self.param_groups, "load_checkpoint()")
        engine = self._ready_engine()
        checkpoints.load(engine, path, fresh_moments, keep_steps, verify, progress)
