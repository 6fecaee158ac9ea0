"""The golden checkpoints, read by other code: a reader written from the format page, and the safetensors package."""

import os
import pathlib
import shutil

import numpy
import pytest
import read_by_the_page
from safetensors import safe_open
from safetensors.numpy import load_file

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
DIRECTORIES = sorted(path for path in GOLDEN.iterdir() if path.is_dir())
KINDS = ["master", "exp_avg", "exp_avg_sq", "momentum_buffer", "sum"]
KINDS_OF = {
    "adagrad-world1": ["master", "sum"],
    "adam-world2": ["master", "exp_avg", "exp_avg_sq"],
    "adamw-world1": ["master", "exp_avg", "exp_avg_sq"],
    "counts-world2": ["master", "exp_avg", "exp_avg_sq"],
    "lion-world2": ["master", "exp_avg"],
    "masters-world1": ["master"],
    "sgd-world3": ["master", "momentum_buffer"],
    "signum-world1": ["master", "exp_avg"],
}


def element(param, kind, index):
    return 4 * (param + 1) + KINDS.index(kind) / 2 + index / 4096


def test_all_are_read():
    assert [path.name for path in DIRECTORIES] == sorted(KINDS_OF)


@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda path: path.name)
def test_the_page_is_enough_to_read_every_element(directory):
    manifest = read_by_the_page.read_manifest(directory)
    state = read_by_the_page.load(directory)
    assert manifest["step"] == 42
    assert len(state) == len(manifest["params"]) == 3
    for number, param in enumerate(manifest["params"]):
        count = int(numpy.prod(param["shape"]))
        kinds = state[param["name"]]
        assert sorted(kinds) == (sorted(KINDS_OF[directory.name]) if count else [])
        for kind, values in kinds.items():
            assert values == [element(number, kind, index) for index in range(count)]


@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda path: path.name)
def test_the_stock_safetensors_package_opens_every_file(directory):
    manifest = read_by_the_page.read_manifest(directory)
    opened = 0
    for number, file in enumerate(manifest["files"]):
        arrays = load_file(directory / file["name"])
        with safe_open(directory / file["name"], framework="numpy") as handle:
            metadata = handle.metadata()
        assert metadata == {
            "hybridopt_checkpoint": "1",
            "rank": str(file["rank"]),
            "step": "42",
            "world": str(manifest["world"]),
        }
        for index, param in enumerate(manifest["params"]):
            for shard in param["shards"]:
                places = read_by_the_page.global_indices(param["shape"], shard)
                offsets, extents = shard["boxes"][0]
                whole_box = len(shard["boxes"]) == 1 and shard["range"] == [0, numpy.prod(extents)]
                for tensor in shard["tensors"]:
                    if tensor["file"] != number:
                        continue
                    array = arrays.pop(param["name"] + "." + tensor["kind"])
                    assert array.dtype == numpy.float32
                    assert list(array.shape) == (extents if whole_box else [len(places)])
                    expected = [element(index, tensor["kind"], place) for place in places]
                    assert array.ravel().tolist() == expected
                    opened += 1
        assert not arrays
    assert opened > 0


def test_the_reader_of_the_page_finds_damage(tmp_path):
    source = GOLDEN / "lion-world2"
    for name in os.listdir(source):
        size = (source / name).stat().st_size
        for at in range(0, size, 97):
            copy = tmp_path / "copy"
            shutil.copytree(source, copy)
            data = bytearray((copy / name).read_bytes())
            data[at] ^= 1
            (copy / name).write_bytes(data)
            with pytest.raises((read_by_the_page.Bad, ValueError)):
                read_by_the_page.load(copy)
            shutil.rmtree(copy)
