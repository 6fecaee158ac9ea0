"""Wire forms: patches as the receivers of vLLM, verl and slime take them. docs/PYTORCH.md names the versions."""

from __future__ import annotations

import importlib
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..base.checks import shown
from . import files
from .applying import target_of, tensors_of
from .patch import WeightChange, WeightPatch

__all__ = ["VllmPatch", "verl_flushes", "vllm_patches", "write_slime_version"]


def __dir__() -> list[str]:
    """The names that completion and help() list: only the public ones."""
    return __all__


class VllmPatch(NamedTuple):
    """The change of one param. It has the fields of vLLM's SparseWeightPatch and of its CheckpointWeightPatch."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor
    indices: Tensor  # int32

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape, as SparseWeightPatch calls it."""
        return self.shape


def vllm_patches(patch: WeightPatch, device: torch.device | str | None = None) -> list[VllmPatch]:
    """The changes for vLLM: for `send_weights()` of the trainer's engine of its backend "sparse_nccl" (with `device`
    the GPU that sends), and for its load_checkpoint_weight_patches(). Names must be those of the checkpoint that vLLM
    has loaded.
    `device` None: the changes stay where the patch has them.

    The backend takes no whole params, so that a param that comes whole has all its indices. Where vLLM has loaded the
    weights with which training begins, acknowledge the first patch and do not send it."""
    return [
        VllmPatch(name, change.shape, change.values.dtype, _on(values, device), _on(indices.int(), device))
        for name, change in _changed(patch)
        for indices, values in [_sparse(name, change, "vLLM")]
    ]


def verl_flushes(
    patch: WeightPatch, device: torch.device | str | None = None, flush_bytes: int = 512 << 20
) -> Iterator[list[tuple[str, Tensor]]]:
    """The changes as verl's checkpoint engine "delta_sharded" gives them to its rollout workers: lists of named tensors
    of at most about `flush_bytes` bytes, for apply_delta() of its SGLang loader and decode_delta_payload() of its vLLM
    one. A patch in which all params are whole has the form of verl's first synchronization. `device` None: where the
    patch has its values; host memory, if it has some there and others on a GPU."""
    if not hasattr(torch, "hash_tensor"):
        raise RuntimeError(f"verl's form has a checksum of torch.hash_tensor, which torch {torch.__version__} has not")
    if isinstance(flush_bytes, bool) or not isinstance(flush_bytes, int) or flush_bytes < 16:
        raise ValueError(f"Invalid flush_bytes: {shown(flush_bytes)}, expected an int of at least 16")
    device = _device_of(patch) if device is None else device
    whole = all(change.dense for _, change in patch)
    pending: list[_Piece] = []
    for piece in _pieces(patch, whole, flush_bytes):
        together = sum(each.bytes for each in [*pending, piece]) <= flush_bytes
        if pending and not (together and pending[0].values.dtype == piece.values.dtype):
            yield _flush(pending, device)
            pending = []
        pending.append(piece)
    if pending:
        yield _flush(pending, device)


class _Piece(NamedTuple):
    """Elements of one param, in one flush."""

    name: str
    shape: tuple[int, ...]
    indices: Tensor | None  # None: it is the whole param
    values: Tensor

    @property
    def bytes(self) -> int:
        return self.values.numel() * (self.values.element_size() + (0 if self.indices is None else 4))


def _pieces(patch: WeightPatch, whole: bool, flush_bytes: int) -> Iterator[_Piece]:
    for name, change in _changed(patch):
        if whole:
            _refuse_shard(name, change)
            yield _Piece(name, change.shape, None, change.values.reshape(-1))
            continue
        indices, values = _sparse(name, change, "verl")
        most = flush_bytes // (4 + values.element_size())
        for some, own in zip(indices.split(most), values.split(most)):
            yield _Piece(name, change.shape, some, own)


def _flush(pieces: list[_Piece], device: torch.device | str) -> list[tuple[str, Tensor]]:
    values = torch.cat([_on(piece.values, device) for piece in pieces])
    given = [_on(piece.indices.int(), device) for piece in pieces if piece.indices is not None]
    positions = torch.cat(given or [torch.empty(0, dtype=torch.int32, device=device)]).view(torch.uint8)
    params, end = [], 0
    for piece in pieces:
        begin, end = end, end + piece.values.numel()
        begin_byte, end_byte = (4 * begin, 4 * end) if given else (0, 0)
        params.append(
            {
                "name": piece.name,
                "dtype": str(values.dtype).removeprefix("torch."),
                "shape": list(piece.shape),
                "pos_start": begin_byte,
                "pos_end": end_byte,
                "pos_width": 4,
                "val_start": begin,
                "val_end": end,
            }
        )
    checksum = _hash(positions) ^ (_hash(values) << 1)
    spec = {"encoding": "indices" if given else "dense", "params": params, "checksum": checksum}
    text = torch.frombuffer(bytearray(json.dumps(spec).encode()), dtype=torch.uint8)
    named = [("__delta_spec__", _on(text, device)), ("__values__", values)]
    return [*named, ("__positions__", positions)] if given else named


def _hash(tensor: Tensor) -> int:
    return int(torch.hash_tensor(tensor).item()) if tensor.numel() else 0


def write_slime_version(
    patch: WeightPatch, model: nn.Module | Mapping[str, Tensor], folder: str | os.PathLike[str], version: int
) -> str:
    """Writes the changes as a version that engines pull as slime's delta transport over a disk has them: the folder
    weight_v000017 in `folder` for version 17, in the encoding "overwrite". Returns its path. `model` has the params as
    they were when the patch was made, for slime's checksums. Needs the package zstandard.

    Version 0 is the checkpoint that the engines have loaded, and each version needs the one before: acknowledge a patch
    when its version is written. If training begins with that checkpoint, acknowledge the first patch and write none."""
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ValueError(f"Invalid version: {shown(version)}, expected an int from 1 on")
    try:
        compressor = importlib.import_module("zstandard").ZstdCompressor(level=1)
    except ImportError as error:
        raise ImportError("slime's form is compressed; install zstandard (pip install zstandard)") from error
    known, tensors, checksums = tensors_of(model), {}, {}
    for name, change in _changed(patch):
        content = _content(name, target_of(known, name, change), change)
        delta = compressor.compress(_overwriting(name, content, change))
        tensors[name] = torch.frombuffer(bytearray(delta), dtype=torch.uint8)
        checksums[name] = f"{zlib.adler32(files.bytes_of(content)):08x}"
    path = os.path.join(os.fspath(folder), f"weight_v{version:06d}")
    os.makedirs(path, exist_ok=True)
    file = "model-00000-of-00001.safetensors"
    if tensors:
        files.write(os.path.join(path, file), tensors, checksums)
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": "overwrite",
        "compression_format": "zstd",
        "checksum_format": "adler32",
    }
    index = json.dumps({"metadata": metadata, "weight_map": dict.fromkeys(tensors, file)})
    files.write_whole(os.path.join(path, "model.safetensors.index.json"), [index.encode()])
    return path


def _content(name: str, tensor: Tensor, change: WeightChange) -> Tensor:
    """The bytes of a param on the host."""
    _refuse_shard(name, change)
    on_host = tensor.detach().contiguous().cpu()
    if change.hash_of(on_host) != change.hash:
        raise ValueError(
            f"parameter {name!r} of the model is not as it was when the patch was made; write the version before the "
            "next step"
        )
    return on_host.reshape(-1).view(torch.uint8)


def _overwriting(name: str, content: Tensor, change: WeightChange) -> bytes:
    """How many bytes change, which, and their new values."""
    size = change.values.element_size()
    elements = torch.arange(content.numel() // size, device="cpu") if change.indices is None else change.indices.cpu()
    if content.numel() >= 1 << 32:
        raise ValueError(
            f"parameter {name!r} has {content.numel()} bytes, and slime's form counts them in 32 bits; send all "
            "weights as a checkpoint"
        )
    places = (elements[:, None] * size + torch.arange(size, device="cpu")).reshape(-1)
    numbers = torch.cat([torch.tensor([places.numel()], device="cpu"), places]).numpy().astype("<u4")
    return numbers.tobytes() + files.bytes_of(content[places])


def _changed(patch: WeightPatch) -> Iterator[tuple[str, WeightChange]]:
    return ((name, change) for name, change in patch if change.values.numel() > 0)


def _sparse(name: str, change: WeightChange, receiver: str) -> tuple[Tensor, Tensor]:
    """Indices of the whole tensor, and values."""
    _refuse_shard(name, change)
    count = math.prod(change.shape)
    if count > 1 << 31:
        raise ValueError(
            f"parameter {name!r} has {count} elements, and {receiver}'s form counts them in 31 bits; send all weights "
            "as a checkpoint"
        )
    values = change.values.detach().reshape(-1)
    if torch.isnan(values).any():
        raise ValueError(
            f"parameter {name!r} has a NaN, which {receiver} takes for an element that has not changed; find out which "
            "step has made it"
        )
    return (torch.arange(count, device=values.device) if change.indices is None else change.indices), values


def _refuse_shard(name: str, change: WeightChange) -> None:
    if change.shard is not None and not change.shard.is_whole:
        raise ValueError(
            f"the patch has a shard of parameter {name!r}, and this form has whole tensors; put the shards together "
            "with hybridopt.gather_changes()"
        )


def _device_of(patch: WeightPatch) -> torch.device:
    devices = {change.values.device for _, change in _changed(patch)}
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


def _on(tensor: Tensor, device: torch.device | str | None) -> Tensor:
    return tensor.contiguous() if device is None else tensor.to(device).contiguous()
