"""Progress functions of the caller, which saves, loads and verifications call."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from . import generated as c

_log = logging.getLogger("hybridopt")
running: dict[int, weakref.ref[Any]] = {}  # by thread that runs a progress function: the object whose work has called it


def progress_of(
    options: dict[str, Any], note_raised: Callable[[BaseException], object], owner: object = None
) -> tuple[dict[str, Any], Any]:
    """The options with the Python function `progress` as a C function, and the objects to keep alive. If the Python
    function raises, it is not called again, the work goes on, and note_raised() gets the exception. `owner`: the object
    whose queued work calls the function."""
    progress = options.get("progress")
    if progress is None:
        return {name: value for name, value in options.items() if name != "progress"}, None
    referred = None if owner is None else weakref.ref(owner)
    has_raised = False

    def call(_: Any, done: int, total: int) -> None:
        nonlocal has_raised
        if has_raised:
            return
        if referred is not None:
            running[threading.get_ident()] = referred
        try:
            progress(done, total)
        except BaseException as error:
            has_raised = True
            note_raised(error)
        finally:
            if referred is not None:
                del running[threading.get_ident()]

    kept = c.offload_progress_function_t(call)
    return {**options, "progress": kept}, kept


def log_raised(error: BaseException) -> None:
    _log.error(
        "the progress function has raised, and is not called again; the save or load goes on", exc_info=error
    )


def is_called_by(owner: object) -> bool:
    """Whether this thread runs a progress function that work of this object has called."""
    referred = running.get(threading.get_ident())
    return referred is not None and referred() is owner
