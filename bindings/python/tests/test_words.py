"""Texts of the library in the terms of this package: errors, and what it prints."""

import json
import os
import pathlib
import re
import warnings

import pytest
import torch
from torch.nn import Parameter

import hybridopt
from hybridopt import abi
from hybridopt.base import words
from hybridopt.engine import making
from hybridopt.params.registered import Wanted
from models import perceptron, run, set_gradients

SOURCES = pathlib.Path(__file__).parents[3] / "src"
# Names of the C ABI, which must not appear in any text of this package.
OF_C = re.compile(r"OFFLOAD_\w+|\boffload_[a-z]+_\w+|\boffload_(?:params|grads|states)\b(?!=)|\boptions\.\w+|\bgroup\.\w+")
# Errors that only C programs can cause: this package does not call these functions, or passes nothing to them that a
# user has chosen.
ONLY_IN_C = {
    "OFFLOAD_CHANGES_ON_DEVICE", "OFFLOAD_CHANGES_WIDE", "OFFLOAD_DEVICE_CUDA", "OFFLOAD_DEVICE_HOST", "OFFLOAD_DEVICE_SIM", "OFFLOAD_MASTER", "OFFLOAD_PLACE_AUTO",
    "OFFLOAD_PLACE_DISK", "OFFLOAD_PLACE_HOST", "OFFLOAD_ROUND_NEAREST", "OFFLOAD_ROUND_STOCHASTIC", "OFFLOAD_SHARD_RANGE", "OFFLOAD_STASH_KEEP", "OFFLOAD_STEP_FOLLOW_PARAMS",
    "offload_device_alloc", "offload_device_download", "offload_device_upload", "offload_exchange_create", "offload_mpi_create",
    "offload_nccl_create", "offload_optimizer_changes", "offload_optimizer_reload_params", "offload_pool_enter", "offload_pool_take_memory", "offload_stash_mark", "offload_stash_prefetch", "offload_stash_push", "offload_state_kind",
    "offload_stream_create", "offload_stream_run",
}  # fmt: skip


def texts_of(source):
    """The string literals of a C++ source; adjacent literals are joined."""
    code = re.sub(r"^\s*(//.*|#.*)$|extern \"C\"", "", source, flags=re.MULTILINE)
    for found in re.finditer(r'"(?:[^"\\\n]|\\.)*"(?:\s*(?:PRI\w+\s*)?"(?:[^"\\\n]|\\.)*")*', code):
        yield "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', found[0]))


def test_every_text_of_the_library_has_pythons_words():
    """Checks all texts in the library's sources, including those that no test can provoke."""
    sources = [path for path in SOURCES.rglob("*") if path.suffix in (".cpp", ".h", ".inc")]
    texts = {text for path in sources for text in texts_of(path.read_text())}
    of_c = {text for text in texts if OF_C.search(text)}
    assert len(sources) > 100 and len(of_c) > 80
    left = {word for text in of_c for word in OF_C.findall(words.in_python(text))}
    assert left - ONLY_IN_C == set()
    assert ONLY_IN_C - left == set()  # the list has no entry that is not needed


def test_every_word_is_one_of_the_librarys():
    texts = " ".join(text for path in SOURCES.rglob("*.*") for text in texts_of(path.read_text(errors="replace")))
    header = (SOURCES.parent / "include/offload.h").read_text()
    assert [word for word in words.WORDS if word not in texts and word not in header] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("device_fraction 0.25 needs 9 bytes; lower device_fraction", "offload_fraction 0.75 needs 9 bytes; raise offload_fraction"),
        ("Muon: keep the params in host memory with OFFLOAD_DEVICE_HOST", "Muon: keep the params on the CPU"),
        ("no trace has been started; call offload_optimizer_trace_start first", "no trace has been started; begin one by trace()"),
        ("group.ns_coefficients[1][0] is inf", "ns_coefficients[1][0] is inf"),
        ("needs 9 bytes; raise device_fraction, or free", "needs 9 bytes; lower offload_fraction, or free"),
        ("options.path 'options.path/group.lr' exists", "path 'options.path/group.lr' exists"),
        ("param 3 'group.beta1' and group.beta1", "param 3 'group.beta1' and betas[0]"),
        ("'/o'brien/options.path', options.path", "'/o'brien/options.path', path"),
        ("param 'beta1'' of 'it's/beta1'; group.beta1", "param 'beta1'' of 'it's/beta1'; betas[0]"),
        ("give both up with OFFLOAD_MOVE_DROP, or bind NULL and step", "give both up with zero_grad()"),
        ("set allow_pageable of the context to use it unpinned", "set pin=False to use it unpinned"),
        ("raise that limit, make chunk_elements or staging_slots smaller, or set", "raise that limit, or set"),
        ("at least 9, or make chunk_elements, staging_slots, movable or x smaller", "at least 9, or make movable or x smaller"),
        ("my_options.path, suboptions.path", "my_options.path, suboptions.path"),
    ],
)  # fmt: skip
def test_phrases_and_names_of_users(text, expected):
    assert words.in_python(text) == expected


# -------------------------------------------------------------------------------------- provoked --


def trained(module=None, **options):
    module = perceptron() if module is None else module
    optimizer = hybridopt.AdamW(module.named_parameters(), **options)
    run(optimizer, list(module.parameters()), [1])
    return optimizer


def save_over_something(folder):
    trained().save_checkpoint(folder)


def save_without_a_parent(folder):
    trained().save_checkpoint(folder / "no" / "parent")


def save_by_a_hidden_name(folder):
    trained().save_checkpoint(folder / ".hidden")


def save_by_no_name(folder):
    trained().save_checkpoint("")


def save_by_a_long_name(folder):
    trained().save_checkpoint(folder / ("x" * 300))


def save_by_a_name_that_is_no_text(folder):
    trained().save_checkpoint(os.fsencode(folder) + b"/\xff")


def load_nothing(folder):
    trained().load_checkpoint(folder / "nothing")


def load_with_keep_steps_alone(folder):
    trained().save_checkpoint(folder / "saved")
    trained().load_checkpoint(folder / "saved", keep_steps=True)


def load_another_model(folder):
    trained(torch.nn.Linear(2, 2)).save_checkpoint(folder / "saved")
    trained().load_checkpoint(folder / "saved")


def load_another_algorithm(folder):
    module = perceptron()
    optimizer = hybridopt.SGD(module.named_parameters(), momentum=0.9)
    run(optimizer, list(module.parameters()), [1])
    optimizer.save_checkpoint(folder / "saved")
    trained(module).load_checkpoint(folder / "saved")


def load_a_checkpoint_that_is_damaged(folder):
    optimizer = trained()
    optimizer.save_checkpoint(folder / "saved")
    file = max((folder / "saved").glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    optimizer.load_checkpoint(folder / "saved")


def load_masters_only(folder):
    optimizer = trained()
    optimizer.save_checkpoint(folder / "saved", masters_only=True)
    optimizer.load_checkpoint(folder / "saved")


def load_a_manifest_that_is_none(folder):
    optimizer = trained()
    optimizer.save_checkpoint(folder / "saved")
    (manifest,) = (folder / "saved").glob("*.json")
    manifest.write_text(json.dumps({"format": "none"}))
    optimizer.load_checkpoint(folder / "saved")


def a_learning_rate_below_zero(_):
    optimizer = trained()
    optimizer.param_groups[0]["lr"] = -1.0
    optimizer.step()


def betas_of_one(_):
    optimizer = trained()
    optimizer.param_groups[0]["betas"] = (1.0, 1.0)
    optimizer.step()


def a_scale_below_zero(_):
    optimizer = trained()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(-1.0), torch.tensor(0.0)
    optimizer.step()


def params_over_one_memory(_):
    memory = torch.ones(10)
    params = [Parameter(memory[:6]), Parameter(memory[4:])]
    run(hybridopt.AdamW(params), params, [1])


def a_node_that_there_is_not(_):
    trained(numa_nodes=[63], local_world=1)


def a_stash_of_more_than_there_is(_):
    hybridopt.ActivationStash(budget=1 << 60)


def a_stash_with_slabs_of_no_size(_):
    hybridopt.ActivationStash(budget=1 << 20, slab_bytes=5)


def more_state_than_there_is(folder):
    sparse = torch.from_file(str(folder / "sparse"), shared=True, size=1 << 40, dtype=torch.float32)
    hybridopt.AdamW([Parameter(sparse)]).materialize()


def state_on_a_disk_that_there_is_not(folder):
    trained(disk_fraction=1.0, disk_paths=folder / "nothing")


def a_ring_that_is_too_small(folder):
    trained(disk_fraction=1.0, disk_paths=folder, disk_ring_bytes=1)


def a_larger_share_on_a_disk_that_has_gone(folder):
    (folder / "drive").mkdir(exist_ok=True)
    optimizer = trained(disk_fraction=0.5, disk_paths=folder / "drive")
    (folder / "drive").rmdir()
    optimizer.set_offload_fraction(1.0, disk_fraction=0.75)


def params_moved_without_room(_):
    trained().offload(params=True)


def a_second_gradient(_):
    model = perceptron()
    optimizer = hybridopt.AdamW(model.parameters(), max_grad_norm=None, movable="grads")
    set_gradients(model.parameters(), 1)
    optimizer.offload(grads=True)
    set_gradients(model.parameters(), 2)
    optimizer.offload(grads=True)


def a_step_without_params(_):
    model = perceptron()
    optimizer = hybridopt.AdamW(model.parameters(), movable=("params", "grads"))
    set_gradients(model.parameters(), 1)
    optimizer.offload(params=True, grads=True)
    optimizer.step()


PROVOKED = [
    value
    for name, value in list(globals().items())
    if callable(value) and getattr(value, "__code__", None) and value.__code__.co_varnames[:1] in (("folder",), ("_",))
]


@pytest.mark.parametrize("provoke", PROVOKED, ids=lambda provoke: provoke.__name__)
def test_errors_have_pythons_words_and_are_raised_alone(provoke, tmp_path, capfd):
    """An error that is raised is not printed as well."""
    with pytest.raises(Exception) as raised:
        provoke(tmp_path)
    assert isinstance(raised.value, (abi.HybridoptError, ValueError)), raised.value
    assert OF_C.search(str(raised.value)) is None, raised.value
    assert capfd.readouterr().err == ""


def test_enough_is_provoked():
    assert len(PROVOKED) > 20


@pytest.mark.parametrize(
    ("provoke", "text"),
    [
        (save_over_something, r"^path '.*' exists; a checkpoint never replaces anything"),
        (load_another_algorithm, r"was saved by .*, here its group is .* \(fresh_moments=True takes the weights alone\)"),
        (load_a_checkpoint_that_is_damaged, r"is not what was written; .*the command `hybridopt verify` lists all damage"),
        (load_with_keep_steps_alone, "^keep_steps=True says what to do beside fresh_moments=True"),
        (betas_of_one, r"^param group 0: betas\[0\] is 1, expected 0 <= betas\[0\] < 1"),
        (more_state_than_there_is, "host memory, but .* lower offload_fraction, or free host memory"),
    ],
)  # fmt: skip
def test_what_some_of_them_say(provoke, text, tmp_path):
    with pytest.raises(Exception, match=text):
        provoke(tmp_path)


def test_a_save_that_fails_later_is_raised_once(tmp_path, capfd):
    optimizer = trained()
    save = optimizer.save_checkpoint(tmp_path / "saved", wait=False)
    save.wait()
    (tmp_path / "full").mkdir()
    with pytest.raises(abi.HybridoptError) as raised:
        optimizer.save_checkpoint(tmp_path / "full", wait=False).wait()
    assert "exists" in str(raised.value) and capfd.readouterr().err == ""


def test_the_c_abi_keeps_its_own_words(tmp_path):
    """Users of hybridopt.abi use the names of the C ABI."""
    with abi.Context(threads=1) as context, pytest.raises(abi.InvalidArgumentError, match="options.algorithm is 77"):
        abi.Optimizer(context, algorithm=77)


# -------------------------------------------------------------- options that can have no effect --


def test_streaming_without_a_gpu_is_refused_in_pythons_words():
    param = Parameter(torch.ones(2))
    optimizer = hybridopt.AdamW([param], host_executors="streamed")
    for call in (optimizer.plan, optimizer.materialize, lambda: run(optimizer, [param], [1])):
        with pytest.raises(ValueError, match="^host_executors='streamed' with parameters on the CPU: .*'auto', or move"):
            call()


def test_early_updates_that_there_cannot_be_are_told():
    param = Parameter(torch.ones(2))
    optimizer = hybridopt.AdamW([param], early_update_bytes=1 << 20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(optimizer, [param], [1, 2])
    (told,) = caught
    assert str(told.message).startswith("early_update_bytes=1048576 has no effect: the parameters are on the CPU, and")
    assert str(told.message).endswith("; leave it out") and told.filename.endswith("models.py")


@pytest.mark.parametrize(
    ("options", "algorithm", "text"),
    [
        ({"host_executors": "streamed"}, "ADAMW", "host_executors='streamed' leaves nothing to CPU threads"),
        ({"movable": ("accumulate",)}, "ADAMW", r"with hook_gradients\(accumulate=True\) gradients are final in"),
        ({}, "MUON", "only the GPU updates matrices of Muon"),
        ({}, "ADAMW", None),
    ],
)
def test_early_updates_on_a_gpu_that_there_cannot_be_are_told(options, algorithm, text):
    wanted = Wanted([{"algorithm": getattr(abi, f"OFFLOAD_{algorithm}")}], [])
    merged = hybridopt.settings.options.checked({"early_update_bytes": 9, **options}, "AdamW")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        making.warn_of_no_effect(merged, wanted, torch.device("cuda"))
    assert [bool(re.search(text, str(each.message))) for each in caught] == ([] if text is None else [True])


def test_muon_on_a_gpu_leaves_no_update_to_the_cpu():
    def executors(algorithm, chosen):
        wanted = Wanted([{"algorithm": abi.OFFLOAD_ADAMW}, {"algorithm": algorithm}], [])
        return making.host_executors_of({"host_executors": chosen}, wanted, torch.device("cuda"))

    assert executors(abi.OFFLOAD_ADAMW, "auto") == "auto" and executors(abi.OFFLOAD_ADAMW, "cpu") == "cpu"
    assert executors(abi.OFFLOAD_MUON, "auto") == executors(abi.OFFLOAD_MUON, "streamed") == "streamed"
    with pytest.raises(ValueError, match="host_executors='cpu' with Muon on a GPU: only the GPU .*; set host_executors='auto'"):
        executors(abi.OFFLOAD_MUON, "cpu")
