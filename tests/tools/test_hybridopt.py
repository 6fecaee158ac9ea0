"""The hybridopt command-line tool: what it prints, writes and returns.

HYBRIDOPT_TOOL and HYBRIDOPT_MAKE_SAMPLE are the programs, HYBRIDOPT_FAULTY_FILES is preloaded.
"""

import errno
import itertools
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import time

import hybridopt
import pytest
import read_by_the_page
import torch
import xxhash
from command import BAD, DONE, FAILED, TOOL, USAGE, ended_by, may_be_shown, misuse, on_a_terminal, refuse, shown_by_a_terminal, succeed, tool
from safetensors import safe_open
from safetensors.torch import load_file

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
GOLDENS = sorted(path for path in GOLDEN.iterdir() if path.is_dir())
TAIL = 28

def with_fault(fault):
    """The environment for a tool whose file operations fail as faulty_files.c describes."""
    preload = os.environ["HYBRIDOPT_FAULTY_FILES"]
    return {**os.environ, "LD_PRELOAD": preload, "HYBRIDOPT_TEST_FAULT": fault}


def make_sample(which, directory):
    subprocess.run([os.environ["HYBRIDOPT_MAKE_SAMPLE"], which, str(directory)], check=True)
    return directory


@pytest.fixture
def sample(tmp_path):
    return make_sample("sample", tmp_path / "sample")


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def edit_manifest(directory, edit):
    """Changes a manifest and corrects its hash."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_bytes())
    del manifest["xxh3"]
    edit(manifest)
    text = json.dumps(manifest, separators=(",", ":")).encode()[:-1]
    path.write_bytes(text + b',"xxh3":"' + xxhash.xxh3_64_hexdigest(text).encode() + b'"}\n')


def drop_rank(directory, rank):
    """Makes the checkpoint as if one rank's file had never been part of it."""

    def edit(manifest):
        manifest["files"] = [file for file in manifest["files"] if file["rank"] != rank]
        for param in manifest["params"]:
            param["shards"] = [shard for shard in param["shards"] if shard["rank"] != rank]
            for shard in param["shards"]:
                for tensor in shard["tensors"]:
                    tensor["file"] = 0

    edit_manifest(directory, edit)


# --- list, newest ---


@pytest.fixture
def run(tmp_path):
    """A directory with two good checkpoints, a damaged one, an unfinished save and other things."""
    for name in ("begin", "end", "wrong", ".step-44"):  # all are of step 42
        shutil.copytree(GOLDEN / "sgd-world3", tmp_path / "run" / name)
    (tmp_path / "run" / "wrong" / "manifest.json").write_text("{}")
    (tmp_path / "run" / "logs").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("")
    return tmp_path / "run"


def test_list_names_what_is_there_and_the_newest(run):
    damaged = f"'{run}/wrong/manifest.json': the manifest has 2 bytes, too few: it was cut"
    assert succeed("list", run).splitlines() == [
        "checkpoint  step  algorithm  ranks   size  manifest and headers",
        "begin         42  SGD            3  192 B  whole",
        "end           42  SGD            3  192 B  whole, newest",
        f"wrong          -  -              -      -  refused: {damaged}",
    ]
    told = json.loads(succeed("list", run, "--json"))["checkpoints"]
    whole = {"algorithm": "SGD", "world": 3, "state_bytes": 192, "masters_only": False}
    assert told == [
        {"name": "begin", "step": 42, **whole, "newest": False},
        {"name": "end", "step": 42, **whole, "newest": True},
        {"name": "wrong", "error": damaged},
    ]
    assert succeed("list", run / "logs") == f"no checkpoint in {run}/logs\n"


def test_list_is_in_the_order_of_steps(tmp_path):
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = hybridopt.SGD([("weight", param)], lr=0.1)
    for step in range(1, 11):
        param.grad = torch.ones(2)
        optimizer.step()
        if step >= 8:
            optimizer.save_checkpoint(tmp_path / f"step-{step}")
    shutil.copytree(GOLDEN / "sgd-world3", tmp_path / "a-wrong-one")
    (tmp_path / "a-wrong-one" / "manifest.json").write_text("{}")
    lines = succeed("list", tmp_path).splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["step-8", "step-9", "step-10", "a-wrong-one"]
    assert lines[2].endswith("whole, newest")
    assert "\n1 param, 1 tensor, 1 file, " in succeed("inspect", tmp_path / "step-8")


def test_newest_is_for_scripts(run):
    assert succeed("newest", run) == succeed("newest", run, "--verify") == f"{run}/end\n"
    flip(run / "end" / "shard-00001-of-00003.safetensors", 4101)
    assert json.loads(succeed("newest", run, "--json"))["path"] == f"{run}/end"
    assert succeed("newest", run, "--verify") == f"{run}/begin\n"
    assert refuse(BAD, "holds no good checkpoint", "newest", run / "logs") == "INVALID_STATE"


def test_newest_gives_scripts_the_path_as_it_is_and_terminals_a_safe_one(tmp_path):
    for name in ("caf\u00e9", "a b", "\x1b[2J\n\u202e"):
        path = tmp_path / name / "step-42"
        shutil.copytree(GOLDEN / "sgd-world3", path)
        assert succeed("newest", path.parent) == f"{path}\n"
        assert pathlib.Path(succeed("newest", path.parent).removesuffix("\n")).is_dir()
        assert json.loads(succeed("newest", path.parent, "--json"))["path"] == str(path)
        assert may_be_shown(shown_by_a_terminal("newest", path.parent))
    assert shown_by_a_terminal("newest", path.parent) == f"{tmp_path}/" + r"\x1b[2J\n\u202e/step-42" + "\n"
    raw = os.fsencode(tmp_path) + b"/\x9b\xff"
    shutil.copytree(GOLDEN / "sgd-world3", os.fsdecode(raw + b"/step-42"))
    found = subprocess.run([TOOL, "newest", raw], capture_output=True, check=True)
    assert found.stdout == raw + b"/step-42\n"


def test_a_checkpoint_is_told_from_a_directory_of_checkpoints(run):
    told = f"DIR '{run}/end' is a checkpoint, expected a directory that holds checkpoints; give the directory above it"
    for arguments in (["list"], ["newest"], ["newest", "--verify"]):
        assert refuse(USAGE, told, *arguments, run / "end") == "INVALID_ARGUMENT"


def counts_of(tmp_path, *arguments):
    """The numbers of calls to the file system and of allocations that a command makes."""
    calls = tmp_path / "calls"
    result = tool(*arguments, env={**with_fault(""), "HYBRIDOPT_TEST_CALLS": str(calls)})
    assert result.returncode == DONE, result
    return map(int, calls.read_text().split())


def calls_of(tmp_path, *arguments):
    return next(counts_of(tmp_path, *arguments))


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
def test_inspect_says_that_memory_is_out(more, tmp_path):
    """What a command has made is freed meanwhile, which allocates too: nlohmann's json."""
    arguments = ["inspect", GOLDEN / "sgd-world3", *more]
    _, allocations = counts_of(tmp_path, *arguments)
    told = 0
    for number in range(1, allocations + 1):
        result = tool(*arguments, env=with_fault(f"memory:{number}"))
        assert result.returncode in (DONE, FAILED), (number, result)
        if result.returncode == FAILED:
            assert "out of " in result.stderr + result.stdout, (number, result)
            told += 1
    assert told > 0 or not allocations  # with a sanitizer nothing is counted


def test_list_reads_each_checkpoint_once(tmp_path):
    empty, one = tmp_path / "empty", tmp_path / "one"
    empty.mkdir()
    shutil.copytree(GOLDEN / "sgd-world3", one / "end")
    of_one = calls_of(tmp_path, "list", one) - calls_of(tmp_path, "list", empty)
    assert of_one == calls_of(tmp_path, "inspect", one / "end")


@pytest.mark.parametrize(
    "arguments", [["inspect"], ["verify"], ["reshard", "OUT", "--world", "1"], ["export", "OUT"]], ids=lambda a: a[0]
)
def test_a_directory_of_checkpoints_is_told_from_one(arguments, run, tmp_path):
    given = [tmp_path / "out" if argument == "OUT" else argument for argument in arguments[1:]]
    told = f"'{run}' is no checkpoint, but holds some: the newest is '{run}/end', and hybridopt list names all"
    assert refuse(USAGE, told, arguments[0], run, *given) == "INVALID_ARGUMENT"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [["list"], ["newest"], ["inspect"], ["verify"], ["reshard", "OUT", "--world", "1"], ["export", "OUT"]],
    ids=lambda a: a[0],
)
def test_a_directory_that_is_not_there_is_wrong_usage_of_every_command(arguments, tmp_path):
    given = [tmp_path / "out" if argument == "OUT" else argument for argument in arguments[1:]]
    (tmp_path / "file").touch()
    for name, why in (("none", "No such file or directory"), ("file", "Not a directory")):
        told = f"DIR '{tmp_path}/{name}' cannot be used: {why}; name a directory that is there"
        assert refuse(USAGE, told, arguments[0], tmp_path / name, *given) == "INVALID_ARGUMENT"
    assert not (tmp_path / "out").exists()


# --- inspect ---


def test_inspect_prints_a_table_that_lines_up():
    assert succeed("inspect", GOLDEN / "sgd-world3").splitlines() == [
        "step 42, SGD, fp32 state, saved by 3 ranks with hybridopt 0.1.0, "
        "tests/golden/make_golden.cpp",
        "",
        "tensor                shape   dtype  shards  steps  size",
        "flat.master           11 x 2  F32         3     41  88 B",
        "flat.momentum_buffer  11 x 2  F32         3     41  88 B",
        "two.master            2       F32         2     42   8 B",
        "two.momentum_buffer   2       F32         2     42   8 B",
        "nothing               0 x 4   -           0      -   0 B",
        "",
        "3 params, 4 tensors, 3 files, 192 B of state",
    ]
    assert "masters only" in succeed("inspect", GOLDEN / "masters-world1")


def test_inspect_lines_up_names_of_many_bytes(sample):
    lines = succeed("inspect", sample).splitlines()
    assert "n\u00e4me                       0 x 7  -           0      -      0 B" in lines
    assert "head.weight.exp_avg        1100   F32         1     43  4.3 KiB" in lines


def test_groups_that_name_their_algorithm_are_told_and_kept(tmp_path):
    directory, dealt = tmp_path / "mixed", tmp_path / "dealt"
    shutil.copytree(GOLDEN / "sgd-world3", directory)

    def edit(manifest):
        manifest["version"] = 3
        manifest["groups"][0]["algorithm"] = "Signum"

    edit_manifest(directory, edit)
    assert succeed("inspect", directory).startswith("step 42, SGD (groups of Signum), fp32 state")
    succeed("reshard", directory, dealt, "--world", "2")
    for each in (directory, dealt):
        told = json.loads(succeed("inspect", each, "--json"))
        assert (told["format_version"], told["algorithm"]) == (3, "SGD")
        assert told["groups"][0]["algorithm"] == "Signum"


HOSTILE = {
    "\x1b]0;title\x07\x1b[2J": r"\x1b]0;title\x07\x1b[2J",
    "two\nlines\r\t\x7f": r"two\nlines\r\t\x7f",
    "\x85\x9b2J": r"\u0085\u009b2J",
    "\u202egnp.\u2066\u200b": r"\u202egnp.\u2066\u200b",
}


@pytest.mark.parametrize("word", HOSTILE)
def test_words_of_a_file_do_nothing_to_a_terminal(word, tmp_path):
    directory = tmp_path / "hostile"
    shutil.copytree(GOLDEN / "sgd-world3", directory)

    def edit(manifest):
        manifest["writer"] = manifest["layout"] = word
        manifest["params"][2]["name"] = word  # this param has no elements, so no file contains its name

    edit_manifest(directory, edit)
    text = succeed("inspect", directory)
    assert may_be_shown(text) and text.count(HOSTILE[word]) == 3, text
    assert len(text.splitlines()) == len(succeed("inspect", GOLDEN / "sgd-world3").splitlines())
    told = succeed("inspect", directory, "--json")
    assert may_be_shown(told) and told.isascii()
    assert json.loads(told)["writer"] == json.loads(told)["params"][2]["name"] == word

    edit_manifest(directory, lambda manifest: manifest.update({word: 1}))
    for arguments in (["inspect"], ["inspect", "--json"], ["verify"], ["verify", "--json"]):
        refused = tool(*arguments, directory)
        assert refused.returncode == BAD
        assert may_be_shown(refused.stdout + refused.stderr), refused
    assert HOSTILE[word] in tool("inspect", directory).stderr
    assert HOSTILE[word] in json.loads(tool("inspect", directory, "--json").stdout)["error"]


def test_names_of_folders_do_nothing_to_a_terminal(tmp_path):
    missing = tool("inspect", tmp_path / "\x1b[2J\u202e", "--json")
    assert missing.returncode == USAGE
    assert r"\x1b[2J\u202e" in json.loads(missing.stdout)["error"]
    raw = subprocess.run([TOOL, "inspect", os.fsencode(tmp_path) + b"/\x9b\xff"], capture_output=True)
    assert raw.returncode == USAGE and rb"/\x9b\xff" in raw.stderr.replace(b"'", b"")
    assert raw.stderr.isascii()
    out = tmp_path / "\x1b[2J\n\u202e"
    for command in (["export"], ["reshard", "--world", "1"]):
        told = tool(*command, GOLDEN / "sgd-world3", f"{out}{command[0]}")
        assert told.returncode == 0 and may_be_shown(told.stdout)
        assert len(told.stdout.splitlines()) == 1 and r"\x1b[2J\n\u202e" + command[0] in told.stdout
    more = tool("inspect", GOLDEN / "sgd-world3", out)
    assert more.returncode == USAGE and may_be_shown(more.stderr) and r"\x1b[2J\n\u202e" in more.stderr


@pytest.mark.parametrize("directory", GOLDENS, ids=lambda path: path.name)
def test_inspect_as_json_tells_what_the_manifest_says(directory):
    told = json.loads(succeed("inspect", directory, "--json"))
    manifest = read_by_the_page.read_manifest(directory)
    assert told["status"] == "OK" and told["format_version"] == manifest["version"]
    for key in ["writer", "step", "algorithm", "masters_only", "layout", "world", "groups"]:
        assert told[key] == manifest[key]
    assert told["state_bytes"] == sum(f["bytes"] - f["data_begin"] for f in manifest["files"])
    for param in manifest["params"]:
        for shard in param["shards"]:
            for tensor in shard["tensors"]:
                tensor["file"] = manifest["files"][tensor["file"]]["name"]
                del tensor["xxh3"]
    assert told["params"] == manifest["params"]
    assert [file["name"] for file in told["files"]] == [f["name"] for f in manifest["files"]]


def test_inspect_of_what_is_no_good_checkpoint(sample, tmp_path):
    (tmp_path / "empty").mkdir()
    told = f"'{tmp_path}/empty' is no checkpoint, as it has no manifest.json; give the directory of a checkpoint"
    assert refuse(USAGE, told, "inspect", tmp_path / "empty") == "INVALID_ARGUMENT"
    other = tmp_path / "other"
    shutil.copytree(sample, other)
    (other / "manifest.json").write_text("{}")
    assert refuse(BAD, "too few", "inspect", other) == "CHECKPOINT_CORRUPT"
    text = (sample / "manifest.json").read_bytes()[:-TAIL].replace(b'"version":1', b'"version":9')
    tail = b',"xxh3":"' + xxhash.xxh3_64_hexdigest(text).encode() + b'"}\n'
    (other / "manifest.json").write_bytes(text + tail)
    assert refuse(FAILED, "format version 9", "inspect", other) == "UNSUPPORTED"
    flip(sample / "shard-00001-of-00002.safetensors", 100)
    refuse(BAD, "shard-00001-of-00002.safetensors': the header's hash", "inspect", sample)


# --- verify ---


def test_verify_of_good_ones(sample):
    assert succeed("verify", sample) == "good: 13.6 KiB of state in 2 files match their hashes\n"
    told = json.loads(succeed("verify", sample, "--json"))
    assert told == {"status": "OK", "bytes": 13944, "damaged_blocks": 0, "damages": []}
    for directory in GOLDENS:
        assert succeed("verify", directory).startswith("good: ")


def test_verify_names_damaged_tensors_and_blocks(sample):
    file = sample / "shard-00001-of-00002.safetensors"
    size = file.stat().st_size
    flip(file, 4096)
    flip(file, size - 1)
    result = tool("verify", sample)
    assert result.returncode == BAD
    assert result.stdout.splitlines() == [
        "damaged tensor          rank   block  file                              bytes",
        f"embed.weight.master        1  0 of 1  {file.name}  4096 to 4168",
        f"head.weight.exp_avg_sq     1  1 of 2  {file.name}  {size - 304} to {size}",
    ]
    assert "2 blocks are damaged: embed.weight.master of rank 1, block 0 of 1" in result.stderr
    answer = tool("verify", sample, "--json")
    assert answer.returncode == BAD and answer.stderr == ""
    told = json.loads(answer.stdout)
    assert told["status"] == "CHECKPOINT_CORRUPT" and told["damaged_blocks"] == 2
    assert told["damages"][1] == {
        "param": "head.weight",
        "kind": "exp_avg_sq",
        "rank": 1,
        "file": file.name,
        "block": 1,
        "block_count": 2,
        "begin": size - 304,
        "end": size,
    }


def test_a_bar_is_shown_on_a_terminal_and_wiped(sample, tmp_path):
    shown, out = on_a_terminal("verify", sample)
    rate = r"\rverifying 100 % of 13\.6 KiB, \d+(\.\d)? [KMG]?i?B/s, 0 s left \[#{40}\]"
    assert re.search(rate, shown)
    assert shown.endswith("\r\x1b[K") and out.startswith("good: ")
    shown, _ = on_a_terminal("reshard", sample, tmp_path / "out", "--world", "1")
    assert "\rresharding 100 % of " in shown and "\rverifying 100 % of " in shown
    shown, _ = on_a_terminal("export", sample, tmp_path / "out.safetensors")
    assert "\rexporting 100 % of " in shown and shown.endswith("\r\x1b[K")


# --- reshard ---


@pytest.mark.parametrize("directory", GOLDENS, ids=lambda path: path.name)
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_reshard_keeps_every_bit_and_deals_evenly(directory, world, tmp_path):
    out = tmp_path / "out"
    assert str(out) in succeed("reshard", directory, out, "--world", world)
    assert succeed("verify", out).startswith("good: ")
    before = read_by_the_page.read_manifest(directory)
    after = read_by_the_page.read_manifest(out)
    assert read_by_the_page.load(out) == read_by_the_page.load(directory)
    assert after["world"] == world and len(after["files"]) == world
    for key in ["step", "algorithm", "masters_only", "layout", "groups", "block_bytes"]:
        assert after[key] == before[key]
    for old, new in zip(before["params"], after["params"], strict=True):
        assert [new[key] for key in ("name", "dtype", "shape")] == [
            old[key] for key in ("name", "dtype", "shape")
        ]
        counts = [shard["range"][1] for shard in new["shards"]]
        if counts:
            everyone = counts + [0] * (world - len(counts))
            assert max(everyone) - min(everyone) <= 1
        for shard in new["shards"]:
            assert shard["step_count"] == old["shards"][0]["step_count"]
    # With one rank the tensors are whole, so any reader of safetensors can read them.
    if world == 1:
        arrays = load_file(out / "shard-00000-of-00001.safetensors")
        for param in after["params"]:
            if 0 not in param["shape"]:
                assert list(arrays[param["name"] + ".master"].shape) == param["shape"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_reshard_there_and_back_gives_the_same_files(sample, tmp_path):
    succeed("reshard", sample, tmp_path / "one", "--world", 1)
    succeed("reshard", tmp_path / "one", tmp_path / "five", "--world", 5)
    succeed("reshard", tmp_path / "five", tmp_path / "again", "--world", 1)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_reshard_as_json(sample, tmp_path):
    told = json.loads(succeed("reshard", sample, tmp_path / "out", "--world", 4, "--json"))
    assert told == {
        "status": "OK",
        "path": str(tmp_path / "out"),
        "world": 4,
        "state_bytes": 13944,
    }


def test_reshard_removes_what_a_crash_left(sample, tmp_path):
    left = tmp_path / ".out.saving-0123456789abcdef"
    left.mkdir()
    (left / "shard-00000-of-00001.safetensors").write_text("half")
    succeed("reshard", sample, tmp_path / "out", "--world", 1)
    assert not left.exists()


def test_reshard_makes_nothing_where_it_is_refused(sample, tmp_path):
    out = tmp_path / "out"

    def expect(code, text):
        refuse(code, text, "reshard", sample, out, "--world", 2)
        assert [path.name for path in tmp_path.iterdir()] == ["sample"]

    intact = tmp_path.with_name(tmp_path.name + "-intact")
    shutil.copytree(sample, intact)

    def again():
        shutil.rmtree(sample)
        shutil.copytree(intact, sample)

    flip(sample / "shard-00000-of-00002.safetensors", 4096)
    expect(BAD, "a block is damaged: embed.weight.master of rank 0")
    again()
    drop_rank(sample, 1)
    expect(BAD, "param 'embed.weight', master: element (0, 2) of the tensor is in none of the 1")
    again()
    edit_manifest(sample, lambda m: m["params"][1]["shards"][1].update(step_count=7))
    expect(BAD, "'blocks.0.\"qkv\"': ranks 0 and 1 stored different step counts")
    again()
    edit_manifest(sample, lambda m: m["params"][1]["shards"][1].update(group=1))
    expect(BAD, "ranks 0 and 1 stored different groups")
    shutil.rmtree(sample)
    make_sample("mixed", sample)
    expect(BAD, "param 'w', exp_avg: rank 0 stored it as F32, rank 1 as BF16")
    again()
    refuse(USAGE, f"OUT '{sample}' exists", "reshard", sample, sample, "--world", 2)
    nowhere = tmp_path / "none" / "out"
    refuse(USAGE, f"OUT '{nowhere}': its parent", "reshard", sample, nowhere, "--world", 2)


def limit_files_to_5000_bytes():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))


def test_a_full_disk_leaves_nothing(sample, tmp_path):
    # A limit on the size of files stands for a full disk.
    for command in (["reshard", sample, tmp_path / "out", "--world", "1"],
                    ["export", sample, tmp_path / "out"]):
        refuse(FAILED, "File too large", *command, preexec_fn=limit_files_to_5000_bytes)
        assert [path.name for path in tmp_path.iterdir()] == ["sample"]


def killed_by_a_file_of(limit):
    """The system kills a process in the call that would make a file larger than its limit."""

    def restrict():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return restrict


def is_pending(name, out):
    return re.fullmatch(re.escape(f".{out}.saving-") + "[0-9a-f]{16}", name) is not None


@pytest.mark.parametrize("command", ["reshard", "export"])
def test_what_is_killed_has_no_name_and_is_removed_by_the_next(command, sample, tmp_path):
    more = ["--world", "2"] if command == "reshard" else []
    arguments = [command, str(sample), str(tmp_path / "out"), *more]
    whole = tmp_path / "whole"
    succeed(command, sample, whole, *more)
    size = (whole / "shard-00001-of-00002.safetensors" if more else whole).stat().st_size
    # Faults where the program reserves room and where it writes the last bytes; for a reshard also in its second file.
    for limit in (0, 5000, size - 1):
        for left in [path for path in tmp_path.iterdir() if path.name.startswith(".")]:
            assert is_pending(left.name, "out")
        assert tool(*arguments, preexec_fn=killed_by_a_file_of(limit)).returncode == -signal.SIGXFSZ
        names = sorted(path.name for path in tmp_path.iterdir())
        assert len(names) == 3 and is_pending(names[0], "out"), names
        assert names[1:] == ["sample", "whole"]
    succeed(*arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "sample", "whole"]


def test_a_signal_removes_what_is_unfinished(sample, tmp_path):
    for command in (["export", sample, tmp_path / "out"], ["reshard", sample, tmp_path / "out", "--world", "2"]):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            assert ended_by(number, tmp_path / ".out.saving-*" / "*", *command) == -number
            assert [path.name for path in tmp_path.iterdir()] == ["sample"]


def test_an_export_removes_only_what_exports_make(sample, tmp_path):
    """A file that something else has given such a pending name stays."""
    left = tmp_path / ".out.saving-0123456789abcdef"
    left.mkdir()
    (left / "mine").write_text("bytes")
    (left / "shard-00000-of-00001.safetensors").write_text("half")
    succeed("export", sample, tmp_path / "out")
    assert [path.name for path in left.iterdir()] == ["mine"]


# --- export ---

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("directory", GOLDENS, ids=lambda path: path.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_export_writes_whole_tensors_rounded_to_nearest(directory, dtype, tmp_path):
    state = read_by_the_page.load(directory)
    manifest = read_by_the_page.read_manifest(directory)
    kinds = sorted({kind for kinds in state.values() for kind in kinds})
    for kind in kinds:
        out = tmp_path / f"{kind}.safetensors"
        succeed("export", directory, out, "--what", kind, "--dtype", dtype)
        tensors = load_file(out)
        shapes = {param["name"]: param["shape"] for param in manifest["params"]}
        for name, values in state.items():
            if kind not in values and not (kind == "master" and 0 in shapes[name]):
                continue
            expected = torch.tensor(values.get(kind, []), dtype=torch.float32)
            expected = expected.to(DTYPES[dtype]).reshape(shapes[name])
            assert tensors[name].dtype == DTYPES[dtype]
            assert torch.equal(tensors.pop(name), expected)
        assert not tensors
        with safe_open(out, framework="pt") as handle:
            assert handle.metadata() == {
                "format": "pt",
                "hybridopt_state": kind,
                "hybridopt_step": "42",
            }
    assert len(list(tmp_path.iterdir())) == len(kinds)


def test_export_tells_what_it_wrote_and_masters_in_fp32_are_the_default(sample, tmp_path):
    out = tmp_path / "w.safetensors"
    assert succeed("export", sample, out) == f"{out}: master of 4 tensors in fp32, 4.5 KiB\n"
    told = json.loads(succeed("export", sample, tmp_path / "b", "--dtype", "bf16", "--json"))
    assert told == {
        "status": "OK",
        "path": str(tmp_path / "b"),
        "what": "master",
        "dtype": "bf16",
        "tensors": 4,
        "bytes": 2 * 1162,
    }


def test_export_reads_state_of_16_bits(tmp_path):
    halves = make_sample("halves", tmp_path / "halves")
    exact = torch.tensor([4 + 0.5 + i / 4096 for i in range(21)]).reshape(7, 3)
    succeed("export", halves, tmp_path / "a", "--what", "exp_avg")
    assert torch.equal(load_file(tmp_path / "a")["w"], exact.bfloat16().float())
    succeed("export", halves, tmp_path / "s", "--what", "exp_avg_sq", "--dtype", "bf16")
    assert torch.equal(load_file(tmp_path / "s")["w"], (exact + 0.5).half().float().bfloat16())
    text = "param 'w': master is stored as U16"
    assert refuse(FAILED, text, "export", halves, tmp_path / "m") == "UNSUPPORTED"
    succeed("reshard", halves, tmp_path / "two", "--world", 2)
    succeed("reshard", tmp_path / "two", tmp_path / "one", "--world", 1)
    for file in halves.glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "one" / file.name).read_bytes()


def test_export_makes_nothing_where_it_is_refused(sample, tmp_path):
    out = tmp_path / "out"

    def expect(code, text, *arguments):
        refuse(code, text, "export", sample, out, *arguments)
        assert [path.name for path in tmp_path.iterdir()] == ["sample"]

    expect(BAD, "the checkpoint holds no sum of any param; 'hybridopt inspect' shows what it holds", "--what", "sum")
    flip(sample / "shard-00001-of-00002.safetensors", 4096)
    expect(BAD, "a block is damaged: embed.weight.master of rank 1")
    flip(sample / "shard-00001-of-00002.safetensors", 4096)
    drop_rank(sample, 0)
    expect(BAD, "param 'embed.weight', master: element (0, 0) of the tensor is in none")
    refuse(USAGE, f"OUT '{sample}' exists", "export", sample, sample)
    none = tmp_path / "none"
    text = f"OUT '{none}/out': its folder '{none}' cannot be used: No such file or directory; make"
    refuse(USAGE, text, "export", sample, none / "out")


def test_what_is_in_the_way_is_told_before_anything_is_written(sample, tmp_path):
    (tmp_path / "file").write_text("bytes")
    (tmp_path / "dangling").symlink_to("nowhere")
    names = sorted(path.name for path in tmp_path.iterdir())
    for name in ("file", "dangling"):
        there = tmp_path / name
        folder = f"'{there}' cannot be used: "
        text = f"OUT '{there}' exists; choose a new name, or remove what is there"
        refuse(USAGE, text, "export", sample, there)
        text = f"OUT '{there}/' exists; a checkpoint never replaces anything"
        refuse(USAGE, text, "reshard", sample, f"{there}/", "--world", 2)
        refuse(USAGE, f"its folder {folder}", "export", sample, there / "out")
        refuse(USAGE, f"its parent {folder}", "reshard", sample, there / "out", "--world", 2)
    for out in (tmp_path / "file", tmp_path / "dangling", tmp_path / "new"):
        text = f"OUT is '{out}/', expected the name of a file to make"
        refuse(USAGE, text, "export", sample, f"{out}/")
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    succeed("reshard", sample, f"{tmp_path}/new/", "--world", 2)  # reshard creates a directory
    succeed("verify", tmp_path / "new")


def test_a_name_that_might_not_last_is_taken_back(sample, tmp_path):
    """After the file has got its name, the sync of its folder fails."""
    out = tmp_path / "out"
    failing = with_fault("sync")
    text = f"could not sync '{tmp_path}': Input/output error"
    assert refuse(FAILED, text, "export", sample, out, env=failing) == "IO_FAILED"
    assert [path.name for path in tmp_path.iterdir()] == ["sample"]
    succeed("export", sample, out)


def content_of(path):
    """The content of each file."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    return [file.read_bytes() for file in files]


@pytest.mark.parametrize("command, error", [("reshard", errno.ENOSPC), ("export", errno.EIO)])
def test_every_call_that_fails_is_told_and_leaves_nothing(command, error, sample, tmp_path):
    """The output is whole, or it does not exist and the error names the file."""
    more = ["--world", "2"] if command == "reshard" else []
    out = tmp_path / "out"
    arguments = [command, sample, out, *more]
    calls = tmp_path.parent / f"{tmp_path.name}.calls"
    result = tool(*arguments, env={**with_fault(""), "HYBRIDOPT_TEST_CALLS": str(calls)})
    assert result.returncode == DONE, result
    whole = content_of(out)
    told, survived = 0, 0
    for call in range(1, int(calls.read_text().split()[0]) + 1):
        subprocess.run(["rm", "-rf", str(out)], check=True)
        result = tool(*arguments, env=with_fault(f"fail:{call}:{error}"))
        names = sorted(path.name for path in tmp_path.iterdir())
        if result.returncode == DONE:
            survived += 1
            assert content_of(out) == whole, call
        else:
            told += 1
            assert result.returncode == FAILED, (call, result)
            assert f"(errno {error})" in result.stderr or os.strerror(error) in result.stderr, (call, result)
            assert str(tmp_path) in result.stderr, (call, result)
            assert "out" not in names, call
        assert all(name in ("out", "sample") or is_pending(name, "out") for name in names), (call, names)
    subprocess.run(["rm", "-rf", str(out)], check=True)
    succeed(*arguments)  # removes what the failed calls could not remove
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "sample"]
    # Only the lock and the removal at the end may fail without an error.
    assert told > 20 and survived <= 3, (told, survived)


def test_a_kind_that_a_rank_did_not_store_is_told(tmp_path):
    mixed = make_sample("mixed", tmp_path / "mixed")
    file = mixed / "shard-00001-of-00002.safetensors"

    def edit(manifest):  # takes the last array, of the second rank, away
        tensors = manifest["params"][0]["shards"][1]["tensors"]
        gone = next(t for t in tensors if t["kind"] == "exp_avg")
        tensors.remove(gone)
        entry = manifest["files"][1]
        data = file.read_bytes()
        head = json.loads(data[8 : entry["data_begin"]])
        del head["w.exp_avg"]
        text = json.dumps(head).encode().ljust(entry["data_begin"] - 8)
        entry["head_xxh3"] = xxhash.xxh3_64_hexdigest(data[:8] + text)
        entry["bytes"] -= gone["bytes"]
        file.write_bytes((data[:8] + text + data[entry["data_begin"] :])[: entry["bytes"]])

    edit_manifest(mixed, edit)
    text = "param 'w', exp_avg: rank 1 did not store it"
    refuse(BAD, text, "export", mixed, tmp_path / "o", "--what", "exp_avg")
    text = "ranks 0 and 1 stored different kinds of state"
    refuse(BAD, text, "reshard", mixed, tmp_path / "o", "--world", 1)


@pytest.mark.parametrize("command", ["reshard", "export"])
def test_what_changes_after_it_was_verified_is_never_written(command, sample, tmp_path):
    more = ["--world", "3"] if command == "reshard" else []
    arguments = [command, sample, tmp_path / "out", *more]
    changed = 0
    for call in itertools.count(1):
        result = tool(*arguments, env=with_fault(f"read:{call}"))
        if result.returncode == DONE:
            break  # there is no such read: all reads have been tried
        changed += "has changed since it was verified" in result.stderr
        assert result.returncode == BAD, result
        assert "block" in result.stderr or "manifest" in result.stderr or "header" in result.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["sample"]
    assert call > 10 and changed > 4, (call, changed)


# --- all ---


def peak_mib(*arguments):
    """The tool's peak of resident memory, read every millisecond. The number that wait4 returns is of no use,
    because it includes this process before the exec."""
    process = subprocess.Popen([TOOL, *map(str, arguments)], stdout=subprocess.DEVNULL)
    peaks = [0]
    while process.poll() is None:
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        is_tool = "Name:\thybridopt\n" in status
        peaks += [int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line and is_tool]
        time.sleep(0.001)
    assert process.returncode == DONE
    return max(peaks) / 1024


def test_memory_is_bounded_whatever_the_size(tmp_path):
    large = make_sample("large", tmp_path / "large")
    assert sum(file.stat().st_size for file in large.iterdir()) > 90 << 20
    assert peak_mib("inspect", large) < 64
    assert 1 < peak_mib("verify", large) < 64
    assert 1 < peak_mib("reshard", large, tmp_path / "three", "--world", 3) < 64
    assert 1 < peak_mib("export", large, tmp_path / "out", "--dtype", "bf16") < 64
    # The columns were gathered again.
    whole = load_file(tmp_path / "out")["columns"]
    place = torch.arange(4_000_000, dtype=torch.float32).reshape(40_000, 100)
    assert torch.equal(whole, (4 + place / 4096).bfloat16())
    succeed("reshard", tmp_path / "three", tmp_path / "one", "--world", 1)
    arrays = load_file(tmp_path / "one" / "shard-00000-of-00001.safetensors")
    assert torch.equal(arrays["columns.exp_avg"], 4.5 + place / 4096)
    flat = torch.arange(4_000_001, dtype=torch.float32)
    assert torch.equal(arrays["ranges.exp_avg_sq"], 8 + 1 + flat / 4096)


@pytest.mark.parametrize(
    "word, text",
    [
        ("pla", "'pla': no such command; did you mean 'plan'?"),
        ("verfy", "'verfy': no such command; did you mean 'verify'?"),
        ("frobnicate", "'frobnicate': no such command\n"),
        ("\x1b[2J", "'\\x1b[2J': no such command"),
    ],
)
def test_a_wrong_word_is_named(word, text):
    for arguments in ([word, "7B"], ["help", word], ["--help", word]):
        result = tool(*arguments)
        assert result.returncode == USAGE and result.stdout == ""
        assert result.stderr.startswith(f"hybridopt: {text}")


def test_a_long_word_is_cut():
    word, shown = "a" * 3000, "'" + "a" * 80 + "'... (3000 bytes)"
    assert tool(word).stderr.startswith(f"hybridopt: {shown}: no such command\n")
    misuse(f"{shown} was not expected: no more words belong here", "plan", "8B", word)
    misuse(f"--dtype: got {shown}, expected fp32, bf16 or fp16", "plan", "8B", "--dtype", word)
    misuse("'--" + "a" * 78 + "'... (3002 bytes): no such option", "info", f"--{word}=1")
    assert "'" + "a" * 100 + "': no such command" in tool("a" * 100).stderr


@pytest.mark.parametrize(
    "arguments, text",
    [
        ([], "hybridopt: a command is required, such as 'hybridopt plan 8B'"),
        (["inspect"], "hybridopt inspect: DIR is required"),
        (["verify", "a", "b"], "hybridopt verify: 'b' was not expected: no more words belong here"),
        (["reshard", "a", "b"], "hybridopt reshard: --world is required"),
        (["export", "a"], "hybridopt export: OUT is required"),
        (["--hlep"], "hybridopt: '--hlep': no such option; did you mean '--help'?"),
        (["--verison"], "hybridopt: '--verison': no such option; did you mean '--version'?"),
        (["--jsn"], "hybridopt: '--jsn': no such option"),
        (["trace"], "hybridopt trace: FILE is required"),
        (["trace", "--read"], "hybridopt trace: FILE is required"),
        (["plan"], "hybridopt plan: MODEL is required"),
        (["doctor", "--jsn"], "hybridopt doctor: '--jsn': no such option; did you mean '--json'?"),
        (["bench", "--second", "1", "x"], "hybridopt bench: '--second': no such option; did you mean '--seconds'?"),
        (
            ["plan", "1e9", "--fraction", "1"],
            "hybridopt plan: '--fraction': no such option; did you mean '--offload-fraction'?",
        ),
        (["plan", "1e9", "--gpu-memory", "8GiB"], "hybridopt plan: '--gpu-memory': no such option"),
        (["plan", "1e9", "--fra", "1"], "hybridopt plan: '--fra': no such option"),
        (["bench", "--second=1"], "hybridopt bench: '--second': no such option; did you mean '--seconds'?"),
        (["info", "more", "words"], "hybridopt info: 'more' was not expected: no more words belong here"),
        (["info", "--\x1b[2J"], "hybridopt info: '--\\x1b[2J': no such option"),
        (["--json", "info"], "hybridopt: '--json': no such option"),
        (["plan", "7B", "--gpus"], "hybridopt plan: --gpus takes one value, and is given once"),
        (["plan", "7B", "--gpus", "2", "--gpus", "3"], "hybridopt plan: --gpus takes one value, and is given once"),
        (["info", "--json=maybe"], "hybridopt info: --json takes no value"),
    ],
)
def test_wrong_usage_names_the_command_and_the_word(arguments, text):
    result = tool(*arguments)
    name = text.split(":")[0]
    assert (result.returncode, result.stdout) == (USAGE, "")
    assert result.stderr == f"{text}\nRun '{name} --help' for more information.\n"


@pytest.mark.parametrize("command", ["doctor", "list", "newest", "inspect", "verify"])
def test_an_empty_path_is_refused(command):
    misuse("DIR: got '', expected a path", command, "")


def test_values_of_checkpoint_commands_are_refused():
    for world in ("0", "many", "65537", "1.5", ""):
        misuse(f"--world: got '{world}', expected a whole number from 1 to 65536", "reshard", "a", "b", "--world", world)
    misuse("OUT: got '', expected a path", "reshard", "a", "", "--world", "1")
    misuse("OUT: got '', expected a path", "export", "a", "")
    kinds = "master, exp_avg, exp_avg_sq, momentum_buffer or sum"
    misuse(f"--what: got 'grad', expected {kinds}", "export", "a", "b", "--what", "grad")
    misuse("--dtype: got 'fp8\\x1b', expected fp32, bf16 or fp16", "export", "a", "b", "--dtype", "fp8\x1b")


def test_help_fits_into_100_columns():
    assert [line for line in succeed("--help").splitlines() if len(line) > 100] == []
    for command in ("info", "doctor", "bench", "trace", "plan", "list", "newest", "inspect", "verify", "reshard", "export"):
        text = succeed(command, "--help")
        assert [line for line in text.splitlines() if len(line) > 100] == []
    assert "--host-memory SIZE" in succeed("plan", "--help")
    for command in ("doctor", "bench", "plan"):
        assert succeed(command, "--help").rstrip().endswith("A SIZE is a whole number with a unit, as 8GiB, 1536MiB or 2GB.")


def test_info_tells_of_the_library_and_the_machine():
    lines = succeed("info").splitlines()
    assert lines[0].startswith("hybridopt 0.")
    assert [line.split()[0] for line in lines[1:4]] == ["ABI", "kernels", "threads"]
    told = json.loads(succeed("info", "--json"))
    assert told["status"] == "OK" and told["threads"] >= 1 and told["build"] == lines[0]


def test_the_docs_show_what_the_tool_prints(tmp_path):
    page = (GOLDEN.parent.parent / "docs" / "CHECKPOINTS.md").read_text()
    block = page.split("## Look into checkpoints")[1].split("```")[1]
    sessions = [part.split("\n", 1) for part in block.split("\n$ ")[1:]]
    assert [line.split()[:2] for line, _ in sessions] == [
        ["hybridopt", command] for command in ("list", "newest", "inspect", "verify", "reshard", "export")
    ]
    shutil.copytree(GOLDEN / "sgd-world3", tmp_path / "step-42")
    shutil.copytree(GOLDEN / "sgd-world3", tmp_path / "step-41")
    flip(tmp_path / "step-41" / "shard-00001-of-00003.safetensors", 4101)
    for line, shown in sessions:
        arguments = line.split("#")[0].split()[1:]
        result = tool(*arguments, cwd=tmp_path)
        assert (result.stdout + result.stderr).rstrip("\n") == shown.rstrip("\n")


def test_help_and_version():
    for command in ("info", "doctor", "bench", "trace", "plan", "inspect", "verify", "reshard", "export"):
        assert command in succeed("--help")
        assert "--json" in succeed(command, "--help")
    assert succeed("--version").startswith("hybridopt ")


def test_help_and_version_are_commands_too():
    assert succeed("help") == succeed("--help") and succeed("version") == succeed("--version")
    assert succeed("help", "plan") == succeed("plan", "--help")


def test_help_tells_the_values_and_the_default_of_each_option():
    texts = {
        "--algorithm NAME the optimizer: adamw, adam, sgd, lion, adagrad or signum; by default adamw": ["plan"],
        "--offload-fraction FRACTION share of the state on the host, 0 to 1": ["plan", "trace"],
        "--master-layout LAYOUT how the fp32 masters of bf16 params are kept: fp32, 4 bytes an element, split, 2 bytes "
        "and the same masters, or split24, 1 byte and masters of 24 bits; by default the table has fp32 and split":
            ["plan"],
        "--device DEVICE device beside the host: cuda, sim or none; by default the GPU if there is one":
            ["doctor", "bench", "trace"],
        "--seconds SECONDS how long to measure, about: 0 to 3600, by default 30": ["bench"],
    }  # fmt: skip
    for text, commands in texts.items():
        for command in commands:
            assert text in " ".join(succeed(command, "--help").split())


def test_output_that_cannot_be_written_is_a_failure(sample):
    for arguments in (["inspect", sample], ["--help"], ["--version"]):
        with open("/dev/full", "w") as full:
            result = subprocess.run([TOOL, *arguments], stdout=full, stderr=subprocess.PIPE)
        assert result.returncode == FAILED
        assert b"could not write to standard output" in result.stderr
