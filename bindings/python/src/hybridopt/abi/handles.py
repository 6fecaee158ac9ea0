"""Contexts and optimizers of the ABI as objects. Keyword arguments are fields of the ABI's structs. A field
that is not given is 0, which means the documented default."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from . import generated as c
from .ends import COLLECTION_SECONDS, await_calls, awaited_at_exit, exiting, outside
from .errors import HybridoptError, InvalidStateError, TimedOutError
from .library import function, last_error
from .progress import is_called_by, log_raised, progress_of, running

_log = logging.getLogger("hybridopt")

# A wait without limit is a loop of waits of this length, so that Python can handle Ctrl-C in between.
_WAIT_NS = 200_000_000

Self = TypeVar("Self", bound="Handle")
Made = TypeVar("Made", bound=c.Struct)


@functools.cache
def _zeros(struct: type[c.Struct]) -> bytes:
    return bytes(struct())


def blank(struct: type[Made]) -> Made:
    """A struct that is zero except struct_size. It is made in less time than by a call of the class."""
    return struct.from_buffer_copy(_zeros(struct))


def make(struct: type[c.Struct], fields: dict[str, Any]) -> Any:
    """A struct with these field values. Strings are encoded. An unknown field is a TypeError, a number that its field
    cannot hold a ValueError: ctypes would cut off its upper bits."""
    made = blank(struct)
    known = [name for name, *_ in struct._fields_]
    for name, value in fields.items():
        if name not in known or name == "struct_size":
            expected = ", ".join(field for field in known[1:] if field != "reserved")
            raise TypeError(f"{struct.__name__} has no field {name!r}, expected some of {expected}")
        setattr(made, name, encoded(name, value) if isinstance(value, (str, os.PathLike)) else value)
        held = getattr(made, name)
        if isinstance(value, int) and isinstance(held, int) and held != value:
            bits = 8 * getattr(struct, name).size
            raise ValueError(f"{struct.__name__}.{name} got a number that its {bits} bits do not hold")
    return made


def encoded(name: str, value: str | os.PathLike[str]) -> bytes:
    """A path or a name as the library takes it: up to the first NUL."""
    text = os.fsencode(value)
    if b"\0" in text:
        raise ValueError(f"{name} is {os.fspath(value)!r}, expected text without NUL characters")
    return text


def array_of(struct: type[c.Struct], count: int) -> Any:
    """An array of structs that are zero except struct_size. Of many structs it is made in less time than a
    list, in which each is a Python object."""
    return (struct * count).from_buffer_copy(_zeros(struct) * count)


def ids_of(params: Iterable[int] | None) -> tuple[Any, int]:
    """Ids as a C array and its length. None stands for all params."""
    if params is None:
        return None, 0
    ids = list(params)
    return (ctypes.c_uint32 * max(len(ids), 1))(*ids), len(ids)


def _end(name: str, value: int, kept: tuple[dict[int, Any], tuple[Any, ...]]) -> None:
    """Destroys an object that ends. If its queued work calls no function of Python, it waits for no lock, and a garbage
    collection waits to the end, before memory that the work uses is freed."""
    transfers, uses = kept
    calls_python = bool(transfers) or any(each is not None for each in uses[1:])  # the first one is the context
    outside(_destroy, name, value, kept, for_seconds=COLLECTION_SECONDS if calls_python else None)


def _destroy(name: str, value: int, _: Any) -> None:
    function(name)(value)  # in a forked child the library refuses this call, which has no effect


class Handle:
    """An object of the library. close(), the end of a `with` block or the last reference's end destroys it.
    At the end of the process running saves are waited for; objects that are still open are not destroyed."""

    _destroyer: str
    retold: Callable[[HybridoptError], HybridoptError] | None = None  # None: in the words of offload.h

    def __init__(self, value: int, *uses: Any) -> None:
        """`uses`: objects that the object of the library uses."""
        self._value: int | None = value
        self._owner = os.getpid()
        self._kept: dict[int, Any] = {}  # objects that queued work uses, by its ticket
        # These objects are freed after the handle has been destroyed, whatever is released first, and also if a garbage
        # collection ends them together.
        kept = self._kept, uses
        self._finalizer = weakref.finalize(self, _end, self._destroyer, value, kept)
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        return f"<hybridopt.abi.{type(self).__name__}, {'closed' if self.closed else 'open'}>"

    @property
    def closed(self) -> bool:
        return self._value is None

    @property
    def value(self) -> int:
        """The handle that the ABI's functions take."""
        if self._value is None:
            raise InvalidStateError(f"this {type(self).__name__} is closed; make a new one")
        return self._value

    def _call(self, name: str, *arguments: Any) -> None:
        """library.call(), whose errors tell what happened in the words of `retold`."""
        try:
            status = function(name)(*arguments)
            if status != c.OFFLOAD_OK:
                raise last_error(status)
        except HybridoptError as error:
            if self.retold is None:
                raise
            raise self.retold(error) from None

    def refuse_wait(self) -> None:
        """Raises if a wait on this thread would wait for itself."""
        if running and is_called_by(self):
            raise InvalidStateError(
                "a progress function waits for the optimizer whose save or load has called it, and would wait for itself, "
                "for example by a param that a step still writes; leave that to the code that waits for the save"
            )

    def _wait_in_pieces(self, name: str, timeout_ns: int, *arguments: Any) -> None:
        if timeout_ns != 0:
            self.refuse_wait()
        if timeout_ns >= 0:
            self._call(name, *arguments, timeout_ns)
            return
        while True:
            try:
                self._call(name, *arguments, _WAIT_NS)
                return
            except TimedOutError:
                continue

    def close(self) -> None:
        """Destroys the handle. A second call has no effect."""
        if self._value is None:
            return
        if self._owner == os.getpid():
            self.refuse_wait()
            self._call(self._destroyer, self._value)
        self._finalizer.detach()
        self._value = None

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Context(Handle):
    """A device and update threads. Fields: offload_context_options_t. Errors of the context and of what is made in it
    go through `retold` before they are raised: another layer may have other words for what they tell."""

    _destroyer = "offload_context_destroy"

    def __init__(
        self, *, retold: Callable[[HybridoptError], HybridoptError] | None = None, **options: Any
    ) -> None:
        self.retold = retold
        handle = c.offload_context_t()
        fields = make(c.offload_context_options_t, options)
        self._call("offload_context_create", fields, handle)
        self._log = options.get("log")  # ctypes does not keep it alive
        super().__init__(handle.value or 0)

    def info(self) -> c.offload_context_info_t:
        info = c.offload_context_info_t()
        self._call("offload_context_get_info", self.value, info)
        return info

    def alloc(self, bytes: int) -> int:
        data = ctypes.c_void_p()
        self._call("offload_device_alloc", self.value, bytes, data)
        return data.value or 0

    def free(self, data: int) -> None:
        self._call("offload_device_free", self.value, data)

    def upload(self, device_data: int, host_data: int, bytes: int, stream: int = 0) -> None:
        self._call("offload_device_upload", self.value, device_data, host_data, bytes, stream)

    def download(self, host_data: int, device_data: int, bytes: int, stream: int = 0) -> None:
        self._call("offload_device_download", self.value, host_data, device_data, bytes, stream)

    def map(self, device_data: int, bytes: int) -> int:
        mapped = ctypes.c_void_p()
        self._call("offload_device_map", self.value, device_data, bytes, mapped)
        return mapped.value or 0

    def stream_create(self) -> int:
        stream = c.offload_stream_t()
        self._call("offload_stream_create", self.value, stream)
        return stream.value or 0

    def stream_destroy(self, stream: int) -> None:
        self._call("offload_stream_destroy", self.value, stream)

    def stream_synchronize(self, stream: int = 0, timeout_ns: int = -1) -> None:
        self._wait_in_pieces("offload_stream_synchronize", timeout_ns, self.value, stream)


class Optimizer(Handle):
    """An optimizer in a context. Fields: offload_optimizer_options_t."""

    _destroyer = "offload_optimizer_destroy"

    def __init__(self, context: Context, **options: Any) -> None:
        handle = c.offload_optimizer_t()
        fields = make(c.offload_optimizer_options_t, options)
        self.retold = context.retold
        self._call("offload_optimizer_create", context.value, fields, handle)
        self.context = context
        self._failed: dict[int, HybridoptError] = {}  # by ticket: failures that have not been raised yet
        super().__init__(handle.value or 0, context, options.get("comm"))

    def add_group(self, **group: Any) -> int:
        group_id = ctypes.c_uint32()
        self._call("offload_optimizer_add_group", self.value, make(c.offload_group_t, group), group_id)
        return group_id.value

    def set_group(self, group_id: int, **group: Any) -> None:
        self._call("offload_optimizer_set_group", self.value, group_id, make(c.offload_group_t, group))

    def add_params(self, params: Sequence[c.offload_param_t] | ctypes.Array[c.offload_param_t]) -> int:
        """Registers all of these params or none. Returns the id of the first."""
        is_array = isinstance(params, ctypes.Array)
        array = params if is_array else (c.offload_param_t * max(len(params), 1))(*params)
        first_id = ctypes.c_uint32()
        self._call("offload_optimizer_add_params", self.value, array, len(params), first_id)
        return first_id.value

    def bind(self, bindings: Any, count: int) -> None:
        """Binds new addresses: the first `count` elements of an array of offload_binding_t."""
        self._call("offload_optimizer_bind", self.value, bindings, count)

    def plan(self) -> c.offload_plan_t:
        plan = c.offload_plan_t()
        self._call("offload_optimizer_plan", self.value, plan)
        return plan

    def commit(self, stream: int = 0) -> None:
        self._call("offload_optimizer_commit", self.value, stream)

    def step(self, ticket: c.offload_ticket_t | None = None, /, **options: Any) -> int:
        """Queues a step and returns its ticket. The library writes it to `ticket` too, which tells it if Ctrl-C ends
        this call. Fields: offload_step_options_t."""
        ticket = c.offload_ticket_t() if ticket is None else ticket
        fields = make(c.offload_step_options_t, options)
        self._call("offload_optimizer_step", self.value, fields, ticket)
        return ticket.value

    def step_result(self, ticket: int = 0) -> c.offload_step_result_t:
        result = blank(c.offload_step_result_t)
        self._call("offload_optimizer_step_result", self.value, ticket, result)
        return result

    def wait(self, ticket: int = 0, timeout_ns: int = -1) -> None:
        """Waits for a ticket (0: for everything queued), at most timeout_ns (negative: no limit). The failure
        of a save or load is raised by a wait for its own ticket. If there was none, a wait for 0 raises it,
        one failure a call."""
        if ticket == 0:
            self.drain(timeout_ns)
            if self._failed:
                raise self._failed.pop(min(self._failed))
            return
        if ticket in self._failed:
            raise self._failed.pop(ticket)
        try:
            self._wait_in_pieces("offload_optimizer_wait", timeout_ns, self.value, ticket)
        except TimedOutError:
            raise
        except HybridoptError:
            self._kept.pop(ticket, None)  # the failure is raised here
            raise
        self._kept.pop(ticket, None)

    def drain(self, timeout_ns: int = -1) -> None:
        """Waits for everything queued, as wait() does, but raises only failures of the whole optimizer. It
        leaves the failure of a save or load to wait()."""
        try:
            self._wait_in_pieces("offload_optimizer_wait", timeout_ns, self.value, 0)
        except TimedOutError:
            raise
        except HybridoptError:
            pass  # a wait for its own ticket raises it again, or the second call below does
        self._hear()
        self._wait_in_pieces("offload_optimizer_wait", timeout_ns, self.value, 0)

    def ended(self, ticket: int) -> bool:
        """Whether wait() for a save or load would return at once, or raise."""
        if not self.closed:
            self._hear()
        return self.closed or ticket not in self._kept

    def stream_wait(self, stream: int, ticket: int = 0, params: Iterable[int] | None = None) -> None:
        """Makes later work on the stream wait until the params (None: all) are updated."""
        ids, count = ids_of(params)
        self._call("offload_optimizer_stream_wait", self.value, ticket, stream, ids, count)

    def offload_params(self, **options: Any) -> int:
        return self._move("offload_optimizer_offload_params", options)

    def reload_params(self, **options: Any) -> int:
        return self._move("offload_optimizer_reload_params", options)

    def offload_grads(self, **options: Any) -> int:
        return self._move("offload_optimizer_offload_grads", options)

    def reload_grads(self, **options: Any) -> int:
        return self._move("offload_optimizer_reload_grads", options)

    def undo_early_updates(self) -> int:
        ticket = c.offload_ticket_t()
        self._call("offload_optimizer_undo_early_updates", self.value, ticket)
        return ticket.value

    def grads_to_keep(self, count: int) -> bytes:
        """For each of the `count` params 1 if its gradient is better left on the device, else 0."""
        keep = (ctypes.c_uint8 * count)()
        self._call("offload_optimizer_grads_to_keep", self.value, keep, count)
        return bytes(keep)

    def offload_states(self, **options: Any) -> int:
        return self._move("offload_optimizer_offload_states", options)

    def reload_states(self, **options: Any) -> int:
        return self._move("offload_optimizer_reload_states", options)

    def refresh_masters(self, **options: Any) -> int:
        return self._move("offload_optimizer_refresh_masters", options)

    def set_fractions(self, device_fraction: float, disk_fraction: float) -> int:
        """Queues a change of how much state is on the device and on disk, and returns its ticket."""
        ticket = c.offload_ticket_t()
        self._call("offload_optimizer_set_fractions", self.value, device_fraction, disk_fraction, ticket)
        return ticket.value

    def state(self, param: int, kind: int) -> c.offload_state_view_t:
        """The addresses of one kind of state of one param. The memory stays the library's."""
        view = blank(c.offload_state_view_t)
        self._call("offload_optimizer_state", self.value, param, kind, view)
        return view

    def read_state(self, param: int, kind: int, first: int, count: int, address: int) -> None:
        """Copies elements of one kind of state, as fp32 numbers, to host memory."""
        values = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
        self._call("offload_optimizer_read_state", self.value, param, kind, first, count, values)

    def write_state(self, param: int, kind: int, first: int, count: int, address: int) -> None:
        """Replaces elements of one kind of state by fp32 numbers in host memory; with a master also its param."""
        values = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
        self._call("offload_optimizer_write_state", self.value, param, kind, first, count, values)

    def set_step_count(self, param: int, step_count: int) -> None:
        self._call("offload_optimizer_set_step_count", self.value, param, step_count)

    def changes(
        self, buffer: int = 0, buffer_bytes: int = 0, params: Iterable[int] | None = None, **options: Any
    ) -> c.offload_changes_t:
        """Takes what may have changed of params (None: all). Fields: offload_changes_options_t. Its structs are the
        library's: valid until the next take. A buffer that is too small is no error here: then `take` is 0, and
        `bytes` tells what is needed."""
        taken = blank(c.offload_changes_t)
        ids, count = ids_of(params)
        fields = make(
            c.offload_changes_options_t,
            {"buffer": buffer or None, "buffer_bytes": buffer_bytes, **options},
        )
        status = function("offload_optimizer_changes")(self.value, ids, count, fields, taken)
        if status != c.OFFLOAD_OK and taken.bytes <= buffer_bytes:
            error = last_error(status)
            raise error if self.retold is None else self.retold(error)
        return taken

    def acknowledge_changes(self, take: int) -> None:
        self._call("offload_optimizer_acknowledge_changes", self.value, take)

    def mark_changed(self, params: Iterable[int] | None = None) -> None:
        """Says that other code may have written these params (None: all)."""
        ids, count = ids_of(params)
        self._call("offload_optimizer_mark_changed", self.value, ids, count)

    def stats(self) -> c.offload_stats_t:
        stats = blank(c.offload_stats_t)
        self._call("offload_optimizer_get_stats", self.value, stats)
        return stats

    def trace_start(self, ring_bytes: int = 0) -> None:
        """Begins to record what queued work does, into a ring of this size (0: the default)."""
        self._call("offload_optimizer_trace_start", self.value, ring_bytes)

    def trace_stop(self, path: str | os.PathLike[str] | None) -> int:
        """Waits for everything queued, and writes the trace; None gives it up. Returns how many events were
        dropped."""
        if path is not None:
            with contextlib.suppress(HybridoptError):  # waits for that work raise it
                self.drain()
        dropped = ctypes.c_uint64()
        name = None if path is None else encoded("path", path)
        self._call("offload_optimizer_trace_stop", self.value, name, dropped)
        return dropped.value

    def save(self, path: str | os.PathLike[str], keep: Any = None, **options: Any) -> int:
        """Queues a save. Fields: offload_save_options_t; `progress` may be a Python function. The objects in
        `keep`, such as the owners of bound memory, stay alive until the save has ended."""
        return self._transfer("offload_optimizer_save", c.offload_save_options_t, path, keep, options)

    def load(self, path: str | os.PathLike[str], keep: Any = None, **options: Any) -> int:
        """Queues a load. Fields: offload_load_options_t; `progress` and `keep` as for save()."""
        return self._transfer("offload_optimizer_load", c.offload_load_options_t, path, keep, options)

    def _transfer(
        self, name: str, struct: type[c.Struct], path: Any, keep: Any, options: Any
    ) -> int:
        self._hear()
        ticket = c.offload_ticket_t()
        with awaited_at_exit():
            if exiting.is_set():
                options = {**options, "progress": None}  # Python ends, and a call of it would end the process with SIGABRT
            fields, kept = progress_of(options, log_raised, self)
            self._call(name, self.value, make(struct, {**fields, "path": path}), ticket)
            self._kept[ticket.value] = (kept, keep)
            _transferring.add(self)
        return ticket.value

    def _hear(self) -> None:
        """Releases what ended saves and loads needed, even if nothing has waited for them. The library
        reports a failure only once, so this keeps it until wait() raises it."""
        for ticket in sorted(self._kept):
            self._hear_of(ticket, 0)

    def _hear_of(self, ticket: int, timeout_ns: int) -> None:
        value = self.value
        try:
            self._wait_in_pieces("offload_optimizer_wait", timeout_ns, value, ticket)
        except TimedOutError:
            return
        except HybridoptError as error:
            if ticket in self._kept:  # no other thread has got this failure meanwhile
                error.__traceback__ = error.__context__ = None  # both refer to this optimizer
                self._failed[ticket] = error
        self._kept.pop(ticket, None)

    def _await_use(self, is_used: Callable[[Any], bool]) -> None:
        """As await_transfers(), of this optimizer."""
        for ticket, (_, keep) in sorted(self._kept.items()):
            if any(map(is_used, keep or ())):
                self._hear_of(ticket, -1)

    def _move(self, name: str, options: dict[str, Any]) -> int:
        """Queues a move. `params` (None: all) and `streams` are iterables."""
        fields = dict(options)
        ids, fields["param_count"] = ids_of(fields.pop("params", None))
        streams = list(fields.pop("streams", ()))
        array = (c.offload_stream_t * max(len(streams), 1))(*streams)
        move = make(c.offload_move_options_t, {**fields, "stream_count": len(streams)})
        move.params = ids
        move.streams = array
        ticket = c.offload_ticket_t()
        self._call(name, self.value, move, ticket)
        return ticket.value


# Optimizers with a save or load that may not have been waited for.
_transferring: weakref.WeakSet[Optimizer] = weakref.WeakSet()
os.register_at_fork(after_in_child=_transferring.clear)  # these belong to the parent


def await_transfers(is_used: Callable[[Any], bool]) -> None:
    """Waits for the saves and loads, of any optimizer, for which is_used() is true of an object in their `keep`. To be
    called before the memory behind such an object is freed. A failure is raised by a wait for the save or load itself."""
    for optimizer in list(_transferring):
        if not optimizer.closed:
            optimizer._await_use(is_used)


@atexit.register
def _finish_transfers() -> None:
    """Waits for saves before the interpreter ends, because their progress functions need it, and for calls of outside().
    Other threads go on meanwhile."""
    exiting.set()
    await_calls()
    for optimizer in list(_transferring):
        if optimizer.closed:
            continue
        for ticket in sorted({*optimizer._kept, *optimizer._failed}):
            try:
                optimizer.wait(ticket)
            except HybridoptError as error:
                _log.error("a save that was not waited for: %s", error)
    await_calls()
