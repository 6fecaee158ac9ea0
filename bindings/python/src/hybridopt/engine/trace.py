"""Traces: pictures of what the library does in steps, as files for ui.perfetto.dev."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType

from .. import abi
from ..base.checks import shown
from .engine import Engine


class Trace:
    """What `with optimizer.trace(path) as trace:` gives. After the block, `dropped` is how many events the ring had no
    room for: 0 means that the picture is complete."""

    def __init__(
        self, path: str | os.PathLike[str], ring_bytes: int, engine: Engine, present: Callable[[], Engine | None]
    ) -> None:
        self.path = os.fspath(path)
        self.dropped = 0
        self._ring_bytes = ring_bytes
        self._engine = engine
        self._present = present

    def __enter__(self) -> Trace:
        self._check_path()
        self._engine.handle.trace_start(self._ring_bytes)
        return self

    def _check_path(self) -> None:
        """Raises where no file can be made, before there is a recording to lose."""
        if os.path.isdir(self.path):
            wrong = "a directory, expected the name of a file"
        elif not os.path.isdir(os.path.dirname(self.path) or os.curdir):
            wrong = "whose folder is not there; make it first"
        else:
            return
        raise abi.InvalidArgumentError(f"path is {shown(self.path)}, {wrong}, or give trace() another path")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._write()
        except abi.HybridoptError:
            if error is None:  # what the block has raised says more
                raise

    def _write(self) -> None:
        handle = self._engine.handle
        if not handle.closed:
            try:
                self.dropped = handle.trace_stop(self.path)
            except abi.HybridoptError:
                handle.trace_stop(None)  # the next trace can begin
                raise
        if self._present() is not self._engine:
            raise abi.InvalidStateError(
                f"the trace {shown(self.path)} ends early or is missing: in the with statement params were added or "
                "replaced, or the optimizer was closed; trace steps between which nothing of this happens"
            )
