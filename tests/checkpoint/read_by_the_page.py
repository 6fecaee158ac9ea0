"""Reads a checkpoint; written from docs/CHECKPOINT_FORMAT.md alone, with nothing of the library.

load(directory) gives {param: {kind: [elements of the global tensor, row-major]}} for F32 state.
"""

import itertools
import json
import pathlib
import struct

import xxhash

TAIL = 28  # bytes


class Bad(Exception):
    pass


def require(condition, text):
    if not condition:
        raise Bad(text)


def once(pairs):
    names = [name for name, _ in pairs]
    require(len(set(names)) == len(names), "a key stands twice")
    return dict(pairs)


def read_manifest(directory):
    text = (pathlib.Path(directory) / "manifest.json").read_bytes()
    require(text.startswith(b'{"format":"hybridopt-checkpoint","version":'), "not a manifest")
    tail = b',"xxh3":"' + xxhash.xxh3_64_hexdigest(text[:-TAIL]).encode() + b'"}\n'
    require(text[-TAIL:] == tail, "the manifest's hash does not match")
    manifest = json.loads(text, object_pairs_hook=once)
    require(manifest["version"] in (1, 2), "unknown version")
    return manifest


def read_file(directory, file):
    """The file's bytes and its safetensors header."""
    data = (pathlib.Path(directory) / file["name"]).read_bytes()
    require(len(data) == file["bytes"], "a file has another size")
    head = data[: file["data_begin"]]
    require(xxhash.xxh3_64_hexdigest(head) == file["head_xxh3"], "a header's hash does not match")
    (length,) = struct.unpack("<Q", head[:8])
    require(length == len(head) - 8 and len(head) % 4096 == 0, "a header has another length")
    return data, json.loads(head[8:], object_pairs_hook=once)


def global_indices(shape, shard):
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    indices = []
    for offsets, extents in shard["boxes"]:
        for at in itertools.product(*(range(extent) for extent in extents)):
            indices.append(sum((o + a) * s for o, a, s in zip(offsets, at, strides)))
    begin, count = shard["range"]
    return indices[begin : begin + count]


def check_blocks(tensor, data, block_bytes):
    blocks = [data[at : at + block_bytes] for at in range(0, len(data), block_bytes)]
    hashes = [xxhash.xxh3_64_hexdigest(block) for block in blocks]
    require(hashes == tensor["xxh3"], "a block is damaged")


def load(directory):
    manifest = read_manifest(directory)
    files = [read_file(directory, file) for file in manifest["files"]]
    state = {}
    for param in manifest["params"]:
        count = 1
        for extent in param["shape"]:
            count *= extent
        kinds = {}
        for shard in param["shards"]:
            indices = global_indices(param["shape"], shard)
            for tensor in shard["tensors"]:
                require(tensor["dtype"] == "F32", "this reader knows F32 only")
                data, head = files[tensor["file"]]
                begin = tensor["offset"] - manifest["files"][tensor["file"]]["data_begin"]
                entry = head[param["name"] + "." + tensor["kind"]]
                require(entry["data_offsets"] == [begin, begin + tensor["bytes"]], "other offsets")
                part = data[tensor["offset"] : tensor["offset"] + tensor["bytes"]]
                check_blocks(tensor, part, manifest["block_bytes"])
                values = struct.unpack(f"<{len(indices)}f", part)
                whole = kinds.setdefault(tensor["kind"], [None] * count)
                for index, value in zip(indices, values):
                    require(whole[index] is None, "an element is stored twice")
                    whole[index] = value
        for kind, whole in kinds.items():
            require(None not in whole, "an element is missing")
        state[param["name"]] = kinds
    return state
