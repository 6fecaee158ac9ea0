"""On which thread code waits for queued work when an object ends, and what the end of the interpreter waits for."""

from __future__ import annotations

import _thread
import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

exiting = threading.Event()  # set when the interpreter ends
_calls: set[threading.Event] = set()  # those that have not returned and that the end of the interpreter waits for
_callers: set[int] = set()  # threads of outside()
_collecting: set[int] = set()  # threads that run a garbage collection
for _set in (_calls, _callers, _collecting):
    os.register_at_fork(after_in_child=_set.clear)  # a child has none of the other threads
COLLECTION_SECONDS = 1.0  # for which a garbage collection waits for queued work


def _note_collection(
    phase: str,
    _: dict[str, int],
    collecting: set[int] = _collecting,  # at the end of the interpreter modules may have no globals any more
    get_ident: Callable[[], int] = threading.get_ident,
) -> None:
    (collecting.add if phase == "start" else collecting.discard)(get_ident())


gc.callbacks.append(_note_collection)


def outside(call: Callable[..., object], *arguments: Any, for_seconds: float | None = COLLECTION_SECONDS) -> None:
    """Calls a function that waits for queued work, in which a comm or progress function may run:

    - on this thread, if the program ends an object there;
    - on another thread, if a garbage collection does. It may come while this thread holds a lock for which the function
      waits, that of a progress bar, say. So the collection waits `for_seconds` only (None: to the end);
    - on another thread, if Python has not started this one: the function may run here, and its work would wait for
      itself.

    The interpreter does not end before the call has."""
    # A collection may also come in the middle of functions of `threading`, so this uses none that take a lock.
    ident = threading.get_ident()
    thread = threading._active.get(ident)  # type: ignore[attr-defined]
    is_of_program = thread is not None and not isinstance(thread, threading._DummyThread)
    if (is_of_program or ident in _callers) and ident not in _collecting:
        call(*arguments)
        return
    returned = later(call, *arguments)
    if is_of_program:
        returned.wait(for_seconds)


@contextlib.contextmanager
def awaited_at_exit() -> Iterator[None]:
    """The interpreter does not end before this context has been left."""
    returned = threading.Event()
    _calls.add(returned)
    try:
        yield
    finally:
        _note_return(returned)


def _note_return(returned: threading.Event) -> None:
    _calls.discard(returned)
    returned.set()


def later(call: Callable[..., object], *arguments: Any) -> threading.Event:
    """Calls a function on another thread. The interpreter does not end before it has returned."""
    returned = threading.Event()
    _calls.add(returned)
    try:
        _thread.start_new_thread(_call, (returned, [(call, arguments)]))
    except BaseException:
        _calls.discard(returned)
        raise
    return returned


def _call(returned: threading.Event, work: list[Any]) -> None:
    _callers.add(threading.get_ident())
    try:
        _call_last(work)
    finally:
        _callers.discard(threading.get_ident())
        _note_return(returned)


def _call_last(work: list[Any]) -> None:
    """Calls the last function of a list, and keeps no reference to its arguments."""
    call, arguments = work.pop()
    call(*arguments)


def await_calls() -> None:
    """At the end of the interpreter: waits for the calls that have begun."""
    for returned in list(_calls):
        returned.wait()
