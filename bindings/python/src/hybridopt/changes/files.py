"""Files of patches: safetensors, with what is no tensor in its metadata."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import json
import os
import tempfile
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..base.checks import shown
from .part import Part

FORMAT = "hybridopt weight patch 1"
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_HEADER_BYTES_MAX = 100_000_000  # the limit of safetensors


@dataclasses.dataclass(frozen=True)
class Entry:
    """The metadata of one param."""

    shape: tuple[int, ...]
    hash: int
    base_hash: int | None
    shard: Part | None
    parts: tuple[Part, ...]

    def text(self) -> str:
        base = None if self.base_hash is None else f"{self.base_hash:016x}"
        content: dict[str, Any] = {"shape": self.shape, "hash": f"{self.hash:016x}", "base_hash": base}
        if self.shard is not None:
            content["shard"] = self.shard.content()
        if self.parts:
            content["parts"] = [part.content() for part in self.parts]
        return json.dumps(content)

    @classmethod
    def of(cls, path: str | os.PathLike[str], name: str, text: str) -> Entry:
        try:
            found = json.loads(text)
            base = found["base_hash"]
            shape = tuple(int(size) for size in found["shape"])
            shard = Part.of(found["shard"]) if "shard" in found else None
            parts = tuple(Part.of(content) for content in found.get("parts", ()))
            if any(part.shape != shape for part in parts):
                raise ValueError("a part of another tensor")
            return cls(shape, int(found["hash"], 16), None if base is None else int(base, 16), shard, parts)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise _refused(path, f"its metadata for {name!r} are {shown(text)}") from error


def _refused(path: str | os.PathLike[str], why: str) -> ValueError:
    return ValueError(
        f"{os.fspath(path)!r} is no patch that can be read: {why}; expected a file of WeightPatch.to_file()"
    )


def write(path: str | os.PathLike[str], tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes a safetensors file, which appears as a whole or not at all."""
    header: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    write_whole(path, itertools.chain([head], map(bytes_of, tensors.values())))


def write_whole(path: str | os.PathLike[str], content: Iterable[bytes]) -> None:
    """Writes a file under another name first, then gives it its own."""
    folder, base = os.path.split(os.path.abspath(os.fspath(path)))
    number, pending = tempfile.mkstemp(prefix=f".{base}.", dir=folder)
    try:
        with os.fdopen(number, "wb") as file:
            os.fchmod(number, 0o666 & ~_umask())  # mkstemp gives rights to this user alone
            file.writelines(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(pending, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(pending)
        raise


def _umask() -> int:
    """Linux tells the mask of the process; os.umask() tells it only by a change, which other threads would see."""
    with open("/proc/self/status") as status:
        found = next((line.split()[1] for line in status if line.startswith("Umask:")), "022")
    return int(found, 8)


def bytes_of(tensor: Tensor) -> bytes:
    """A copy. After numpy() torch would never free the memory of a param."""
    on_host = tensor.detach().contiguous().cpu()
    return ctypes.string_at(on_host.data_ptr(), on_host.numel() * on_host.element_size())


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads the tensors of a file of to_file(), and a text for each param."""
    with open(path, "rb") as file:
        content = bytearray(file.read())
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(len(content) - 8, _HEADER_BYTES_MAX):
        raise _refused(path, f"it has {len(content)} bytes, and its header says {length}")
    try:
        header = json.loads(content[8 : 8 + length].decode())
        told = header.pop("__metadata__")
        if told.get("format") != FORMAT:
            raise _refused(path, f"its format is {shown(told.get('format'))}, not {FORMAT!r}")
        metadata = json.loads(told["params"])
        tensors = {name: _tensor(content, 8 + length, row) for name, row in header.items()}
    except (AttributeError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _refused(path, f"its header cannot be read ({error!r})") from error
    return tensors, metadata


def _tensor(content: bytearray, data: int, row: dict[str, Any]) -> Tensor:
    dtype, shape, (begin, end) = _DTYPES[row["dtype"]], row["shape"], row["data_offsets"]
    count = 1
    for size in shape:
        count *= size
    if not 0 <= begin <= end <= len(content) - data or (end - begin) != count * dtype.itemsize:
        raise KeyError(f"bytes {begin} to {end} for {row['dtype']} of shape {shape}")
    if count == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # The bytes are not aligned in the file.
    part = torch.frombuffer(content, dtype=torch.uint8, count=end - begin, offset=data + begin)
    return part.clone().view(dtype).view(shape)


def tensor_of(path: str | os.PathLike[str], tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise _refused(path, f"it has no tensor {name!r}")
    return tensors[name]
