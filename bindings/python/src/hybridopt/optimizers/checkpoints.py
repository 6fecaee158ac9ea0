"""Saves and loads in the library's own format, with a progress bar."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from .. import abi
from ..base.checks import check_switch, shown
from ..engine.engine import Engine

Progress = Callable[[int, int], Any] | bool | None


class Bar:
    """A tqdm bar as a function of bytes done and bytes in all."""

    def __init__(self, title: str) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped]

        self._bar = tqdm(desc=title, unit="B", unit_scale=True, unit_divisor=1024)

    def __call__(self, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def progress_function(progress: Progress, title: str) -> Callable[[int, int], Any] | None:
    """The function to call with the progress. tqdm is imported only if it is needed."""
    if callable(progress):
        return progress
    if progress is not None and not isinstance(progress, bool):
        raise TypeError(
            f"Invalid progress: {shown(progress)}, expected a function of the bytes done and the bytes in all, True or "
            "False for a bar, or None"
        )
    if progress is False or (progress is None and not sys.stderr.isatty()):
        return None
    try:
        return Bar(title)
    except ImportError:
        if progress is None:
            return None
        raise


class Transfer:
    """A save or load under way."""

    def __init__(self, engine: Engine, ticket: int, progress: Any, what: str) -> None:
        self._engine = engine
        self._what = what
        self._ticket = ticket
        self._progress = progress

    def __repr__(self) -> str:
        return f"<{self._what}, {'ended' if self.done() else 'under way'}>"

    def done(self) -> bool:
        """Whether wait() would return at once, or raise."""
        return self._engine.handle.ended(self._ticket)

    def wait(self) -> None:
        """Returns when everything is on disk; raises if the save has failed."""
        try:
            self._engine.handle.wait(self._ticket)
        finally:
            if isinstance(self._progress, Bar):
                self._progress.close()


def save(
    engine: Engine,
    path: str | os.PathLike[str],
    masters_only: bool,
    wait: bool,
    progress: Progress,
) -> Transfer:
    check_switch("masters_only", masters_only)
    check_switch("wait", wait)
    function = progress_function(progress, f"save {os.fspath(path)}")
    flags = abi.OFFLOAD_SAVE_MASTERS_ONLY if masters_only else 0
    with engine.ended_if_cut_off():
        engine.before_save()
        stream = engine.stream() or None
        ticket = engine.handle.save(
            path, keep=engine.bound.storages(), flags=flags, stream=stream, progress=function
        )
    transfer = Transfer(engine, ticket, function, f"save to {os.fspath(path)!r}")
    if wait:
        transfer.wait()
    return transfer


def load(
    engine: Engine,
    path: str | os.PathLike[str],
    fresh_moments: bool,
    keep_steps: bool,
    verify: bool,
    progress: Progress,
) -> None:
    for name, value in (("fresh_moments", fresh_moments), ("keep_steps", keep_steps), ("verify", verify)):
        check_switch(name, value)
    engine.settle()
    flags = 0 if verify else abi.OFFLOAD_LOAD_NO_VERIFY
    flags |= abi.OFFLOAD_LOAD_FRESH_MOMENTS if fresh_moments else 0
    flags |= abi.OFFLOAD_LOAD_KEEP_STEPS if keep_steps else 0
    function = progress_function(progress, f"load {os.fspath(path)}")
    stream = engine.stream() or None
    with engine.ended_if_cut_off():
        engine.bound.fill_copies()  # what they hold if the load is refused
        ticket = engine.handle.load(
            path, keep=engine.bound.storages(), flags=flags, stream=stream, progress=function
        )
        Transfer(engine, ticket, function, f"load of {os.fspath(path)!r}").wait()
        if keep_steps or not fresh_moments:
            info, tensors = abi.checkpoint_inspect(path)
            counts: dict[str, int] = {}
            for tensor in tensors:
                counts[tensor.name] = max(tensor.step_count, counts.get(tensor.name, 0))
            engine.after_load(info.step, counts)
        else:
            engine.after_load(0, {})
