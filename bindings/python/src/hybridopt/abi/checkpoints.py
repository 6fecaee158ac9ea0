"""Reads and verifies the directory of a checkpoint."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

from . import generated as c
from .handles import encoded, make
from .library import call
from .progress import progress_of

_PATH_BYTES = 4096


@dataclass(frozen=True)
class StoredTensor:
    """One kind of state of one rank's part of one param (offload_checkpoint_tensor_t)."""

    name: str
    kind: int
    dtype: int
    rank: int
    global_shape: tuple[int, ...]
    box_offsets: tuple[tuple[int, ...], ...]
    box_extents: tuple[tuple[int, ...], ...]
    range_begin: int
    range_count: int
    file: str
    file_offset: int
    bytes: int
    step_count: int


def _stored(tensor: c.offload_checkpoint_tensor_t) -> StoredTensor:
    def rows(values: Any) -> tuple[tuple[int, ...], ...]:
        width = tensor.dimensions
        return tuple(tuple(values[i * width : (i + 1) * width]) for i in range(tensor.box_count))

    return StoredTensor(
        name=os.fsdecode(tensor.name or b""),
        kind=tensor.kind,
        dtype=tensor.dtype,
        rank=tensor.rank,
        global_shape=tuple(tensor.global_shape[: tensor.dimensions]),
        box_offsets=rows(tensor.box_offsets),
        box_extents=rows(tensor.box_extents),
        range_begin=tensor.range_begin,
        range_count=tensor.range_count,
        file=os.fsdecode(tensor.file or b""),
        file_offset=tensor.file_offset,
        bytes=tensor.bytes,
        step_count=tensor.step_count,
    )


def checkpoint_inspect(
    path: str | os.PathLike[str],
) -> tuple[c.offload_checkpoint_info_t, list[StoredTensor]]:
    """Reads and checks the manifest and the headers, not the data."""
    tensors: list[StoredTensor] = []
    raised: list[BaseException] = []  # of Ctrl-C, which ctypes would print and forget

    def visit(_: Any, tensor: Any) -> None:
        try:
            tensors.append(_stored(tensor[0]))
        except BaseException as error:
            raised.append(error)

    info = c.offload_checkpoint_info_t()
    call("offload_checkpoint_inspect", encoded("path", path), info, c.offload_tensor_function_t(visit), None)
    _raise_first(raised)
    return info, tensors


def checkpoint_verify(path: str | os.PathLike[str], **options: Any) -> None:
    """Reads every byte and compares every hash. Fields: offload_verify_options_t. What `progress` raises, Ctrl-C too, is
    raised when all is read."""
    raised: list[BaseException] = []
    fields, _kept = progress_of(options, raised.append)
    call("offload_checkpoint_verify", encoded("path", path), make(c.offload_verify_options_t, fields))
    _raise_first(raised)


def checkpoint_newest(directory: str | os.PathLike[str], *, verify: bool = False, **options: Any) -> str:
    """The checkpoint in a directory with the highest step whose manifest and headers are good; with
    ``verify`` its data too, which is read for that. Fields: offload_verify_options_t. What `progress` raises, Ctrl-C too,
    is raised when all is read."""
    raised: list[BaseException] = []
    fields, _kept = progress_of(options, raised.append)
    how = make(c.offload_verify_options_t, fields) if verify else None
    path = ctypes.create_string_buffer(_PATH_BYTES)
    call("offload_checkpoint_newest", encoded("directory", directory), how, path, len(path))
    _raise_first(raised)
    return os.fsdecode(path.value)


def _raise_first(raised: list[BaseException]) -> None:
    if raised:
        raise raised[0]
