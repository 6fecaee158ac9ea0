"""hybridopt plan: bytes, what fits, and the time of a step from what doctor has measured."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from command import BAD, FAILED, TOOL, USAGE, may_be_shown, misuse, refuse, succeed, tool
from safetensors.torch import save_file

ROOT = pathlib.Path(__file__).parent.parent.parent
ROOM = ["--host-memory", "1TiB", "--device-memory", "1TiB"]
ENOUGH = ["--host-memory", "100TiB", "--device-memory", "100TiB"]
GIB = 1 << 30


def answer(*arguments, code=0):
    """The JSON output of a plan that ends with this exit code."""
    result = tool("plan", *arguments, "--json")
    assert result.returncode == code and result.stderr == "", result
    return json.loads(result.stdout)


STATE_BYTES = [  # bytes of master and moments for each element
    (["7e9"], 12),
    (["7e9", "--offload-fraction", "0.25"], 12),
    (["7B", "--small-state"], 6),
    (["7B", "--master-layout", "split"], 10),
    (["7B", "--small-state", "--master-layout", "fp32"], 8),
    (["7B", "--small-state", "--master-layout", "split24"], 5),
    (["1e9", "--algorithm", "lion", "--dtype", "fp32"], 8),
    (["2e9", "--algorithm", "sgd", "--dtype", "fp16"], 8),
    (["350M", "--algorithm", "adagrad"], 8),
    (["1000"], 12),
]


@pytest.mark.parametrize(("arguments", "bytes_each"), STATE_BYTES)
def test_plan_tells_state_and_rings(arguments, bytes_each):
    told = json.loads(succeed("plan", *arguments, *ROOM, "--json"))
    assert told["status"] == "OK"
    fraction = float(arguments[2]) if "--offload-fraction" in arguments else 1
    host = told["elements"] * fraction * bytes_each
    # In addition to the state there are the staging ring on the host and, on the device, the ring for state that
    # streams. The tables take 0.2 %.
    assert host <= told["host_bytes"] <= host * 1.003 + 2**28
    on_device = told["elements"] * bytes_each - host
    assert on_device <= told["device_bytes"] - told["device_ring_bytes"] <= on_device * 1.003 + 2**25
    assert told["device_ring_bytes"] <= 4 * 2**22 * bytes_each
    assert (told["device_ring_bytes"] > 0) == (host > 0)
    assert host <= told["pinned_bytes"] <= told["host_bytes"] + 2**14  # whole pages are pinned


@pytest.mark.parametrize("fraction", ["2", "-1", "nan", "half", "", "0.5x"])
@pytest.mark.parametrize("option", ["--offload-fraction", "--device-fraction"])
def test_plan_of_no_fraction(option, fraction):
    misuse(f"{option}: got '{fraction}', expected a number from 0 to 1", "plan", "7B", option, fraction)


def test_plan_counts_every_element():
    odd = answer("1003", "--offload-fraction", "0.5")
    assert odd["grads_down_bytes"] == 1004  # 502 elements of bf16 on the host, 501 on the device


def peak_of_plan(*arguments):
    """The most memory that a plan has taken, in bytes."""
    process = subprocess.Popen([TOOL, "plan", *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss * 1024


def test_a_plan_takes_little_memory():
    # Params of 25 chunks, of 16 MiB each. To touch memory is what a plan takes its time for.
    extra = peak_of_plan("70B", "--dtype", "fp32", *ENOUGH) - peak_of_plan("1000", "--dtype", "fp32", *ENOUGH)
    assert extra <= 25 * (4 << 22) + (32 << 20)


PRESET = ["plan", "14B", "--small-state", "--hook-gradients", "--activations", "50GiB", "--stash", "8GiB"]


def test_plan_of_a_training_on_another_machine():
    """14 G params on 139 GiB of GPU memory with 128 GiB of host memory."""
    machine = ["--host-memory", "128GiB", "--device-memory", "139GiB"]
    told = json.loads(succeed(*PRESET, *machine, "--json"))
    params = 28e9
    library = told["device_bytes"]
    assert told["training_device_bytes"] == 2 * params + 42 * GIB + library and told["device_fits"] is True
    expected = 6 * 14e9 + params + 8 * GIB  # state, gradients, stash
    assert expected <= told["training_host_bytes"] <= expected * 1.003 + 2**28 and told["host_fits"] is True
    assert told["pinned_bytes"] >= 6 * 14e9 + params
    text = succeed(*PRESET, *machine)
    assert re.search(
        r"training  on the device 94.3 GiB: params and at most as much of gradients 52.2 GiB, activations "
        r"42.0 GiB; fits into 139.0 GiB, 44.7 GiB are left there\n          on the host 112.\d GiB: state and "
        r"gradients 104.\d GiB, stash 8.0 GiB; fits into 128.0 GiB, 15.\d GiB are left for the program itself\n",
        text,
    )
    # Without hooks the gradients stay on the device.
    stays = answer("14B", "--small-state", *machine)
    assert params <= told["training_host_bytes"] - 8 * GIB - stays["training_host_bytes"] <= params * 1.003
    assert stays["training_device_bytes"] == 2 * params + stays["device_bytes"]


def test_plan_counts_the_room_of_early_updates():
    machine = ["--host-memory", "128GiB", "--device-memory", "139GiB"]
    without = json.loads(succeed(*PRESET, *machine, "--json"))
    told = json.loads(succeed(*PRESET, *machine, "--early-updates", "12GiB", "--json"))
    assert told["early_updates_bytes"] == 12 * GIB and without["early_updates_bytes"] == 0
    tables = told["host_bytes"] - without["host_bytes"] - 12 * GIB
    assert told["training_host_bytes"] == without["training_host_bytes"] + tables + 12 * GIB
    assert 0 < tables < 2**24 and told["pinned_bytes"] == without["pinned_bytes"] + 12 * GIB
    text = succeed(*PRESET, *machine, "--early-updates", "12GiB")
    assert re.search(r"state and gradients 104.\d GiB, early updates 12.0 GiB, stash 8.0 GiB; fits", text)
    # No more than the state and params of all elements, and what aligns them.
    small = json.loads(succeed("plan", "1e6", "--hook-gradients", "--early-updates", "1GiB", "--json"))
    assert 14e6 <= small["early_updates_bytes"] <= 14e6 * 1.01 + 2**14
    refuse(USAGE, "--early-updates is given without --hook-gradients, expected both", "plan", "7B",
           "--early-updates", "1GiB")  # fmt: skip


def test_plan_of_a_training_that_does_not_fit():
    machine = ["--host-memory", "96GiB", "--device-memory", "80GiB"]
    told = answer(*PRESET[1:], *machine, code=BAD)
    assert (told["device_fits"], told["host_fits"], told["python"]) == (False, False, None)
    result = tool(*PRESET, *machine)
    assert "does not fit into 80.0 GiB, 14.3 GiB are missing" in result.stdout
    assert re.search(r"does not fit into 96.0 GiB, 16.\d GiB are missing\n", result.stdout)
    assert "optimizer = " not in result.stdout
    refused = "nothing that these options leave open fits into 80.0 GiB on the device and 96.0 GiB on the host"
    assert refuse(BAD, refused, *PRESET, *machine) == "OUT_OF_HOST_MEMORY"
    # The advice is what these options do not have yet.
    gib = ["plan", "7B", "--host-memory", "1GiB"]
    refuse(BAD, "into 1.0 GiB on the host; on the host the optimizer's option disk_fraction takes less", *gib)
    refuse(BAD, "; on the host --small-state, or the optimizer's option disk_fraction takes less", *gib, "--master-layout", "fp32")
    room = ["--hook-gradients", "--stash", "1MiB", "--early-updates", "1MiB"]
    refuse(BAD, "; on the host a smaller --stash, smaller --early-updates, or the optimizer's option disk_fraction takes less", *gib, *room)
    narrow = ["plan", "7B", "--device-memory", "1GiB", "--host-memory", "900GiB"]
    shared = "; on the device more --gpus share params, gradients and state"
    assert tool(*narrow).stderr.endswith(f"{shared}, --hook-gradients takes gradients off it\n")
    more = ["--offload-fraction", "0.5", "--activations", "2GiB", "--hook-gradients"]
    given = f"{shared}, a larger --offload-fraction takes state off it, a larger --stash takes activations off it\n"
    assert tool(*narrow, *more).stderr.endswith(given)
    told = answer(*PRESET[1:], "--host-memory", "1TiB", "--device-memory", "80GiB", code=BAD)
    assert told["host_fits"] is True


def test_plan_of_a_training_on_this_machine():
    told = json.loads(succeed("plan", "1000", "--json"))
    assert 0 < told["host_available_bytes"] < 1 << 50 and told["host_fits"] is True
    if told["device_available_bytes"] == 0:
        assert told["device_fits"] is None
        told = "no GPU is found here (hybridopt doctor says why), --device-memory says how much another one has"
        assert told in succeed("plan", "1000")
    # The stash reduces the activations on the device, but not below 0.
    all_gone = json.loads(succeed("plan", "1000", "--activations", "1MiB", "--stash", "2MiB", "--json"))
    assert all_gone["activations_on_device_bytes"] == 0 and all_gone["stash_bytes"] >= 2 << 20


@pytest.mark.parametrize(
    "option", ["--activations", "--early-updates", "--stash", "--host-memory", "--device-memory"]
)
def test_plan_of_no_size(option):
    refuse(USAGE, "bytes, expected 0 to 1.0 PiB, as 8GiB", "plan", "7B", f"{option}=2PiB")
    for size in ("-5", "3s", "1.5GiB", "8 parsecs", "", "nan", "99999999TiB"):
        misuse(f"{option}: got '{size}', expected a whole number with a unit, as 8GiB, 1536MiB or 2GB", "plan", "7B", option, size)


def test_sizes_have_units():
    sizes = {"2000B": 2000, "1048576": 1 << 20, "2kB": 2000, "2KiB": 2048, "2GB": 2 * 10**9, "2 gib": 2 << 30, "2G": 2 * 10**9}
    for size, expected in sizes.items():
        told = json.loads(tool("plan", "1000", "--device-memory", size, "--json").stdout)
        assert told["device_available_bytes"] == expected
    assert json.loads(succeed("plan", "1000", "--stash", "0", *ROOM, "--json"))["stash_bytes"] == 0


@pytest.mark.parametrize(
    "option", ["--activations", "--early-updates", "--stash", "--host-memory", "--device-memory"]
)
def test_a_few_bytes_need_a_unit(option):
    for size, text in (("80", "80 bytes"), ("1", "1 byte"), ("1048575", "1048575 bytes")):
        misuse(
            f"{option}: got '{size}', which is {text}; write a unit, as {size}GiB, or {size}B for so few",
            "plan", "7B", option, size,
        )  # fmt: skip


@pytest.mark.parametrize("name", ["adamx", "AdamW", "muon", ""])  # the state of Muon goes by the shapes of matrices
def test_plan_of_an_unknown_algorithm_names_those_that_there_are(name):
    misuse(f"--algorithm: got '{name}', expected adamw, adam, sgd, lion, adagrad or signum", "plan", "7B", "--algorithm",
           name)  # fmt: skip


def test_each_layout_has_its_name():
    rows = {
        (): ["fp32 state", "split masters, same bits", "split masters, bf16 moments"],
        ("--small-state",): ["split masters, bf16 moments"],
        ("--master-layout", "fp32"): ["fp32 state"],
        ("--master-layout", "fp32", "--small-state"): ["fp32 masters, bf16 moments"],
        ("--master-layout", "split24"): ["masters of 24 bits"],
        ("--master-layout", "split24", "--small-state"): ["masters of 24 bits, bf16 moments"],
        ("--dtype", "fp16"): ["fp32 state"],
        ("--dtype", "fp32", "--small-state"): ["fp32 masters, bf16 moments"],
    }
    for options, names in rows.items():
        table = succeed("plan", "1e9", *ROOM, *options).split("\nstate  ")[1].split("\n")
        assert [line.split("  ")[0] for line in table[1 : 1 + len(names)]] == names
        assert not table[1 + len(names)].endswith("yes")
    for layout in ("split", "split24"):
        refuse(USAGE, f"--master-layout is '{layout}' with --dtype fp32, expected fp32: only the masters of bf16 params",
               "plan", "7B", "--dtype", "fp32", "--master-layout", layout)  # fmt: skip


def test_plan_of_values_that_there_are_not():
    misuse("--dtype: got 'bfloat16', expected fp32, bf16 or fp16", "plan", "7B", "--dtype", "bfloat16")
    misuse("--master-layout: got '', expected fp32, split or split24", "plan", "7B", "--master-layout", "")
    misuse("--machine: got '', expected a path", "plan", "7B", "--machine", "")
    for gpus in ("0", "1025", "eight", "1.5", ""):
        misuse(f"--gpus: got '{gpus}', expected a whole number from 1 to 1024", "plan", "7B", "--gpus", gpus)


def test_the_docs_show_what_plan_prints():
    page = (ROOT / "docs" / "PYTORCH.md").read_text()
    line, shown = page.split("\n$ ")[1].split("\n```")[0].split("\n", 1)
    assert succeed(*line.split()[1:]) == shown + "\n"


# --- of which model ---

# The numbers of params that the publishers give.
PARAMS = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "meta-llama/Meta-Llama-3-8B-Instruct": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "Llama-3.2-1B": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "phi-3-mini": 3_821_079_552,
    "google/gemma-2-9b-it": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
}


@pytest.mark.parametrize("name", PARAMS)
def test_a_model_by_name(name):
    told = answer(name, *ENOUGH)
    assert (told["elements"], told["source"]) == (PARAMS[name], name)
    assert f" ({name}), 100 % of the state" in succeed("plan", name, *ENOUGH)


def test_a_name_that_is_not_known():
    told = "'qwen3-9b' is no model (did you mean 'qwen3-4b'?), expected a number of parameters"
    assert refuse(USAGE, told, "plan", "qwen3-9b") == "INVALID_ARGUMENT"
    refuse(USAGE, "'colossus' is no model, expected a number of parameters, 1000 to 1e15", "plan", "colossus")
    refuse(USAGE, "or one of gpt2, gpt2-medium, ", "plan", "colossus")
    for path in ("/none", "./none", "../none", "~/none", "none/", "none.json", "none.safetensors", "/no\x1b[2J"):
        told = f"'{path.replace(chr(27), chr(92) + 'x1b')}' is not there, expected a config.json, safetensors or their"
        refuse(USAGE, told, "plan", path)
    hostile = tool("plan", "\x1b[2J\u202e")
    assert may_be_shown(hostile.stderr) and r"'\x1b[2J\u202e' is no model" in hostile.stderr


@pytest.mark.parametrize("number", ["0", "nan", "inf", "1e16", "-7B", "B", "", "7BB", "0.5"])
def test_a_number_that_is_none(number):
    result = tool("plan", "--", number)
    assert (result.returncode, result.stdout) == (USAGE, "")
    assert f"hybridopt: '{number}' is no model" in result.stderr


def test_a_number_without_its_unit():
    refuse(USAGE, "'8' is less than 1000 parameters; did you mean '8B'?", "plan", "8")


LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "vocab_size": 151936, "decoder_sparse_step": 1,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
BIASED = {**LLAMA, "attention_bias": True, "mlp_bias": True}
BIASES = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)


@pytest.mark.parametrize(
    ("config", "elements"),
    [(LLAMA, 8_030_261_248), (BIASED, 8_030_261_248 + BIASES), (MOE, 30_532_122_624), (GPT2, 124_439_808)],
)
def test_a_model_by_its_config(config, elements, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        told = answer(path, *ROOM)
        assert told["elements"] == elements and told["source"].endswith("/config.json")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("{", "the file is no JSON text, expected a model's config.json"),
        ("[1]", "it is no JSON object, expected a config.json"),
        ("{}", "model_type is '', expected one of llama, mistral, "),
        ({"model_type": "rwkv\x1b"}, r"model_type is 'rwkv\x1b', expected one of llama, mistral, "),
        ({**LLAMA, "hidden_size": -1}, "hidden_size is -1, expected a number from 0 to 2^32"),
        ({**LLAMA, "hidden_size": "many"}, 'hidden_size is "many", expected a number from 0 to 2^32'),
        ({**LLAMA, "vocab_size": 2**40}, "vocab_size is 1099511627776, expected a number from 0 to 2^32"),
        ({**LLAMA, "vocab_size": None}, "vocab_size is nothing, expected a number from 0 to 2^32"),
        ({**LLAMA, "hidden_size": 2**32, "intermediate_size": 2**32}, "parameters, expected 1 to 1e15"),
        ({**MOE, "decoder_sparse_step": 2}, "decoder_sparse_step is 2, expected 1; give the safetensors files"),
    ],
)
def test_a_config_that_cannot_be_counted(config, text, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    refuse(USAGE, f"'{path}': ", "plan", path)
    refuse(USAGE, text, "plan", path)


def test_a_config_that_is_deep_or_large(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("[" * 1_000_000 + "]" * 1_000_000)
    refuse(USAGE, "it is no JSON object", "plan", path)
    with path.open("w") as file:
        file.truncate((64 << 20) + 1)
    refuse(USAGE, "the file is too large, expected a model's config.json", "plan", path)


def save_two(folder):
    """Two files of 12 and 5 params, with an index."""
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(0)}, folder / "model-1.safetensors")
    save_file({"c": torch.zeros(5, dtype=torch.bfloat16)}, folder / "model-2.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors",
                                                "c": "model-2.safetensors"}}))  # fmt: skip
    return index


def test_a_model_by_its_safetensors(tmp_path):
    index = save_two(tmp_path)
    assert answer(tmp_path / "model-1.safetensors", *ROOM)["elements"] == 12
    save_file({"again": torch.zeros(12)}, tmp_path / "consolidated.safetensors")  # the index says which files count
    for path in (index, tmp_path, f"{tmp_path}/"):
        assert answer(path, *ROOM)["elements"] == 17
    index.unlink()
    told = answer(tmp_path, *ROOM)
    assert told["elements"] == 29 and told["source"] == f"3 safetensors in {tmp_path}/"


def test_safetensors_that_cannot_be_counted(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    refuse(USAGE, f"'{empty}' has neither safetensors files nor a config.json", "plan", empty)
    index = save_two(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    missing = f"could not open '{tmp_path}/model-2.safetensors': No such file or directory"
    assert refuse(FAILED, missing, "plan", index) == "IO_FAILED"
    index.write_text('{"weight_map": {"a": "../model-1.safetensors"}}')
    refuse(USAGE, "weight_map names what is no file beside the index", "plan", index)
    index.write_text("{}")
    refuse(USAGE, "there is no weight_map, expected an index of safetensors files", "plan", index)
    cut = tmp_path / "model-1.safetensors"
    cut.write_bytes(cut.read_bytes()[:20])
    refuse(BAD, f"'{cut}': the file's header claims ", "plan", cut)
    strange = tmp_path / "strange.safetensors"
    save_file({"a": torch.zeros(3, dtype=torch.int64)}, strange)
    refuse(BAD, f"'{strange}': the header: ", "plan", strange)
    save_file({"b": torch.zeros(0)}, strange)
    refuse(USAGE, f"'{strange}' has no parameters", "plan", strange)


# --- what fits ---


def test_the_least_of_the_state_is_offloaded():
    machine = ["--host-memory", "256GiB", "--device-memory", "80GiB"]
    told = answer("llama-3.1-8b", "--activations", "20GiB", *machine)
    for choice in told["choices"]:
        least = choice["offload_fraction"]
        layout = ["--master-layout", choice["master_layout"]]
        layout += ["--small-state"] if choice["state_dtype"] == "bf16" else []
        room = 80 * GIB * 95 // 100
        exact = answer("llama-3.1-8b", "--activations", "20GiB", *machine, *layout, "--offload-fraction", least)
        assert choice["fits"] and exact["training_device_bytes"] == choice["device_bytes"] <= room
        more = f"--offload-fraction={least - 0.01}"
        assert answer("llama-3.1-8b", "--activations", "20GiB", *machine, *layout, more)["training_device_bytes"] > room
    assert [choice["offload_fraction"] for choice in told["choices"]] == sorted(
        (choice["offload_fraction"] for choice in told["choices"]), reverse=True
    )
    assert "\noffload_fraction: the least that leaves 5 % of the device free\n" in succeed(
        "plan", "llama-3.1-8b", "--activations", "20GiB", *machine
    )
    assert "free, without activations (--activations)\n" in succeed("plan", "llama-3.1-8b", *machine)


def test_what_fits_on_the_device_needs_no_offload():
    told = "\nall state fits on the device: no offload is needed"
    machine = ["--host-memory", "256GiB", "--device-memory", "80GiB"]
    assert f"{told} if the activations fit too\n" in succeed("plan", "1e9", *machine)
    assert f"{told}\n" in succeed("plan", "1e9", "--activations", "20GiB", *machine)
    assert told not in succeed("plan", "llama-3.1-8b", *machine)
    assert told not in succeed("plan", "1e9", *machine, "--offload-fraction", "0")


def test_exact_state_comes_first():
    # All fit: split masters, which keep the same bits, leave less on the host.
    both = answer("14B", "--host-memory", "1TiB", "--device-memory", "80GiB")
    assert 'master_layout="split")' in both["python"]
    # Only bf16 moments fit.
    small = answer("14B", "--host-memory", "96GiB", "--device-memory", "60GiB")
    assert [choice["fits"] for choice in small["choices"]] == [False, False, True]
    assert small["python"].endswith('master_layout="split", state_dtype="bf16")')
    text = succeed("plan", "14B", "--host-memory", "96GiB", "--device-memory", "60GiB")
    assert text.count("not on the host") == 2 and text.endswith(small["python"] + "\n")
    # The plan keeps what the options set.
    given = answer("14B", *ROOM, "--master-layout", "split24", "--offload-fraction", "0.25")
    assert given["python"].endswith('offload_fraction=0.25, master_layout="split24")')
    assert [choice["offload_fraction"] for choice in given["choices"]] == [0.25]


def test_a_fraction_in_the_words_of_c():
    rest = answer("1e9", *ROOM, "--device-fraction", "0.75")
    assert rest == answer("1e9", *ROOM, "--offload-fraction", "0.25")
    both = tool("plan", "1e9", "--device-fraction", "1", "--offload-fraction", "0")
    assert both.returncode == USAGE and "--offload-fraction excludes --device-fraction" in both.stderr


def test_ranks_share_the_model():
    alone = answer("1e9", "--offload-fraction", "1", *ROOM)
    shared = answer("8e9", "--gpus", "8", "--offload-fraction", "1", *ROOM)
    assert shared["elements_of_a_rank"] == alone["elements"]
    for key in ("host_bytes", "device_bytes", "training_device_bytes"):
        assert shared[key] == alone[key]
    assert shared["all_ranks_host_bytes"] == 8 * alone["training_host_bytes"]
    assert answer("8001", "--gpus", "8", *ROOM)["elements_of_a_rank"] == 1001
    text = succeed("plan", "8e9", "--gpus", "8", "--offload-fraction", "1", *ROOM)
    assert "each of 8 GPUs has 1,000,000,000 of them" in text and ": 8 times state " in text
    # One rank's state fits the host, eight do not.
    answer("8e9", "--gpus", "8", "--offload-fraction", "1", "--host-memory", "40GiB", code=BAD)
    assert tool("plan", "7B", "--gpus", "0").returncode == USAGE


@pytest.mark.parametrize("algorithm", ["adamw", "sgd"])
def test_the_line_of_python_can_be_pasted(algorithm):
    line = answer("1000", *ROOM, "--algorithm", algorithm, "--small-state", "--offload-fraction", "0.5",
                  "--hook-gradients", "--early-updates", "1MiB")["python"]  # fmt: skip
    assert "offload_fraction=0.5" in line and "optimizer.hook_gradients()" in line
    program = f"""
import torch, hybridopt
model = torch.nn.Linear(8, 8).bfloat16()
{line}
model(torch.ones(1, 8).bfloat16()).sum().backward()
optimizer.step()
"""
    library = pathlib.Path(TOOL).parent.parent / "libhybridopt.so"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "bindings/python/src"), "HYBRIDOPT_LIBRARY": str(library)}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# --- how long a step takes ---


def machine_file(tmp_path, **changes):
    """A possible output of doctor, with rates that are easy to compute with."""
    rates = {"host": 1e9, "cpu": 1e9, "streamed": 2e9, "both": 4e9, "device": 16e9}
    updates = [
        {"layout": layout, "executor": executor, "params_per_s": rate * 2**i}
        for i, layout in enumerate(("fp32", "split", "small"))
        for executor, rate in rates.items()
    ]
    told = {
        "doctor": 1, "date": "2026-01-01 00:00 UTC", "elements": 1 << 26,
        "machine": {"memory_available_bytes": 512 * GIB},
        "device": {"kind": "cuda", "memory_free_bytes": 80 * GIB}, "measured": {"updates": updates},
    }  # fmt: skip
    told.update(changes)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(told))
    return path


def test_a_step_is_predicted_from_what_doctor_measured(tmp_path):
    path = machine_file(tmp_path)
    told = answer("8e9", "--machine", path, "--offload-fraction", "0.5")
    assert (told["host_available_bytes"], told["device_available_bytes"]) == (512 * GIB, 80 * GIB)
    seconds = 4 / 4 + 4 / 16
    assert told["predicted_step_seconds"] == [seconds, seconds]
    assert [choice["predicted_step_seconds"][0] for choice in told["choices"]] == [seconds, seconds / 2, seconds / 4]
    assert 'master_layout="split")' in told["python"]  # the fastest of those with the same bits
    shared = answer("8e9", "--machine", path, "--offload-fraction", "0.5", "--gpus", "4")
    assert shared["predicted_step_seconds"] == [seconds / 4, seconds]
    text = succeed("plan", "8e9", "--machine", path, "--offload-fraction", "0.5")
    assert re.search(r"\nfp32 state +0.5 .* 1.25 s  yes\n", text)
    measured = "predicted from the rates that doctor measured over 67,108,864 params on 2026-01-01 00:00 UTC"
    assert f"\nstep: {measured}; nothing was run\n" in text
    # Options override the file.
    assert answer("8e9", "--machine", path, *ROOM)["device_available_bytes"] == 1024 * GIB


def test_the_fastest_of_the_same_bits_is_chosen(tmp_path):
    updates = [
        {"layout": layout, "executor": executor, "params_per_s": rate}
        for layout, rate in (("fp32", 4e9), ("split", 3e9), ("small", 9e9))
        for executor in ("both", "device")
    ]
    told = answer("8e9", "--machine", machine_file(tmp_path, measured={"updates": updates}))
    assert told["python"] == (
        "optimizer = hybridopt.AdamW(model.named_parameters(), lr=1e-4, "
        f"offload_fraction={told['choices'][0]['offload_fraction']})"
    )


def test_a_machine_without_a_gpu_updates_on_the_host(tmp_path):
    told = answer("8e9", "--machine", machine_file(tmp_path, device=None), "--offload-fraction", "0.5")
    assert told["predicted_step_seconds"] == [8.0, 8.0] and told["device_available_bytes"] == 0
    path = machine_file(tmp_path, device=None)
    told_text = succeed("plan", "1e9", "--machine", path)
    assert "; that machine has no GPU, --device-memory says how much another one has\n" in told_text


@pytest.mark.parametrize("options", [["--algorithm", "lion"], ["--dtype", "fp32"], ["--master-layout", "split24"]])
def test_what_was_not_measured_is_not_predicted(options, tmp_path):
    told = answer("8e9", "--machine", machine_file(tmp_path), *options)
    assert told["predicted_step_seconds"] is None and told["choices"][0]["predicted_step_seconds"] is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"doctor": 2}, "is of version 2, expected 1, as this release writes it; on that machine, 'hybridopt doctor"),
        ({"doctor": "1"}, "doctor is missing or wrong, expected a number from 0 to 2^60"),
        ({"date": None}, "date is missing or wrong, expected a text"),
        ({"machine": []}, "machine is missing or wrong, expected an object"),
        ({"machine": {"memory_available_bytes": -1}}, "memory_available_bytes is missing or wrong"),
        ({"device": 5}, "device is missing or wrong, expected an object"),
        ({"measured": {}}, "updates is missing or wrong, expected an array"),
        ({"measured": {"updates": [1]}}, "updates is missing or wrong, expected an array of objects"),
        ({"measured": {"updates": [{"layout": "fp32", "executor": "both", "params_per_s": 0}]}},
         "params_per_s is missing or wrong, expected a number above 0; on that machine, 'hybridopt doctor --json > FILE'"),
    ],
)  # fmt: skip
def test_a_file_that_doctor_did_not_print(changes, text, tmp_path):
    path = machine_file(tmp_path, **changes)
    refuse(USAGE, f"--machine '{path}'", "plan", "7B", "--machine", path)
    refuse(USAGE, text, "plan", "7B", "--machine", path)


def test_a_machine_file_that_is_none(tmp_path):
    way_out = "; on that machine, 'hybridopt doctor --json > FILE' makes a new one"
    for name, why in {"none": "No such file or directory", ".": "Is a directory"}.items():
        wrong = f"--machine '{tmp_path / name}' cannot be used: {why}; name a file that is there"
        refuse(USAGE, wrong + way_out, "plan", "7B", "--machine", tmp_path / name)
    path = tmp_path / "machine.json"
    for content in (b"", b"ok    CPU  of doctor without --json", b"\xff\xfe"):
        path.write_bytes(content)
        wrong = f"--machine: '{path}': the file is no JSON text, expected what hybridopt doctor --json prints"
        refuse(USAGE, wrong + way_out, "plan", "7B", "--machine", path)
    path.write_text("[]")
    refuse(USAGE, "the whole is missing or wrong, expected an object", "plan", "7B", "--machine", path)
    hostile = machine_file(tmp_path, date="\x1b[2J\n\u202e")
    text = succeed("plan", "7B", "--machine", hostile)
    assert may_be_shown(text) and r"on \x1b[2J\n\u202e; nothing was run" in text


def test_plan_reads_what_doctor_prints(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(succeed("doctor", "--memory", "16MiB", "--device", "sim", "--json"))
    told = answer("1e8", "--machine", path)
    assert all(choice["predicted_step_seconds"][0] > 0 for choice in told["choices"])
    assert "with a simulated device; nothing was run" in succeed("plan", "1e8", "--machine", path)
