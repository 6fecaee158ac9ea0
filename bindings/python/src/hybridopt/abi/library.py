"""Finds libhybridopt.so and calls it. ctypes lets other Python threads run during every call."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
from typing import Any

from . import generated as c
from .errors import HybridoptError, UnsupportedError, error_of

# This package works with every library of this version: before 1.0 a minor version may break it.
ABI_MAJOR, ABI_MINOR = 0, 1
SONAME = f"libhybridopt.so.{ABI_MAJOR}.{ABI_MINOR}"


def library_path() -> str:
    """The path in HYBRIDOPT_LIBRARY, otherwise the library in this package, otherwise the system's."""
    if path := os.environ.get("HYBRIDOPT_LIBRARY"):
        return path
    packaged = pathlib.Path(__file__).parents[1] / SONAME
    return str(packaged) if packaged.exists() else SONAME


@functools.cache
def library() -> ctypes.CDLL:
    """The library, loaded once, with the types of its functions."""
    path = library_path()
    try:
        loaded = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(
            f"cannot load {path}: {error}; install the hybridopt package, which brings the library, "
            "or name a libhybridopt.so in HYBRIDOPT_LIBRARY"
        ) from error
    version = loaded.offload_abi_version()
    if divmod(version, 1000) != (ABI_MAJOR, ABI_MINOR):
        raise ImportError(
            f"{path} implements ABI {version // 1000}.{version % 1000}, expected {ABI_MAJOR}.{ABI_MINOR}; "
            "install the library and this package from one release"
        )
    return loaded


@functools.cache
def function(name: str) -> Any:
    """A function of the library, with its types. If the library is too old to have it: UnsupportedError."""
    result, arguments = c.FUNCTIONS[name]
    try:
        found = getattr(library(), name)
    except AttributeError:
        raise UnsupportedError(
            f"{name} is not in {library()._name} ({build_info()}); install a newer release"
        ) from None
    found.restype, found.argtypes = result, arguments
    return found


def call(name: str, *arguments: Any) -> None:
    """Calls a function that returns a status, and raises an exception unless that is OFFLOAD_OK."""
    status = function(name)(*arguments)
    if status != c.OFFLOAD_OK:
        raise last_error(status)


def last_error(status: int) -> HybridoptError:
    """The exception for the status that the last failed call of this thread returned."""
    return error_of(status, function("offload_last_error")().decode(errors="replace"))


def abi_version() -> int:
    return function("offload_abi_version")()


def build_info() -> str:
    return function("offload_build_info")().decode()


def status_name(status: int) -> str:
    return function("offload_status_name")(status).decode()


def content_hash(data: int, bytes: int) -> int:
    """The hash of bytes in host memory that takes of changes tell of params."""
    found = ctypes.c_uint64()
    call("offload_content_hash", data or None, bytes, found)
    return found.value
