"""hybridopt doctor: its output on this machine. No figure is compared with a limit."""

import json
import os
import resource
import signal
import subprocess

import pytest
from command import DONE, TOOL, USAGE, ended_by, may_be_shown, misuse, on_a_terminal, refuse, shown_by_a_terminal, succeed, tool

SMALL = ["doctor", "--memory", "16MiB"]
LAYOUTS = ["fp32", "split", "small"]
ON_A_DEVICE = ["cpu", "streamed", "both", "device"]


@pytest.fixture(scope="module")
def told():
    return json.loads(succeed(*SMALL, "--device", "sim", "--json"))


def test_json_has_the_machine_and_every_figure(told):
    assert (told["status"], told["doctor"]) == ("OK", 1)
    machine, measured = told["machine"], told["measured"]
    assert machine["cpus"] == len(os.sched_getaffinity(0)) and machine["threads"] >= 1
    assert 0 < machine["memory_available_bytes"] <= machine["memory_bytes"]
    assert told["device"]["kind"] == "sim" and told["device"]["memory_bytes"] > 0
    rates = {(each["layout"], each["executor"]): each["params_per_s"] for each in measured["updates"]}
    assert list(rates) == [(layout, "host") for layout in LAYOUTS] + [
        (layout, executor) for layout in LAYOUTS for executor in ON_A_DEVICE
    ]
    assert min(rates.values()) > 0 and measured["memory_bytes_per_s"] > 0
    assert [rung["pinned_bytes"] for rung in measured["pinned"]] == [16 << 20]
    assert all(rate > 0 for rate in measured["link"].values()) and len(measured["link"]) == 3
    assert measured["disk"] is None


def test_every_line_that_is_not_good_has_one_that_mends_it(told):
    assert [check["name"] for check in told["checks"]][:4] == ["CPU", "memory", "huge pages", "memory rate"]
    for check in told["checks"]:
        assert check["good"] is (check["mend"] is None) and check["text"]


def test_text_has_a_line_for_each_check():
    text = succeed(*SMALL, "--device", "none")
    lines = text.splitlines()
    assert lines[0].startswith("hybridopt 0.") and lines[1].endswith(" s") and lines[2] == ""
    for line, after in zip(lines[3:], lines[4:] + [""], strict=True):
        assert line[:4] in ("ok  ", "mend", "    ")
        assert line.startswith("mend") == after.lstrip().startswith("-> ")
    assert "\x1b" not in text and "GPU" not in text.split("memlock")[0]


def test_colours_are_for_a_terminal_that_wants_them():
    plain = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    shown = shown_by_a_terminal(*SMALL, "--device", "none", env=plain)
    assert "\n\x1b[32mok  \x1b[0m  CPU" in shown
    assert "\x1b" not in shown_by_a_terminal(*SMALL, "--device", "none", env={**plain, "NO_COLOR": "1"})


def test_a_terminal_sees_what_is_being_measured():
    shown, out = on_a_terminal(*SMALL, "--device", "none")
    assert "\rmeasuring memory ..\x1b[K" in shown and shown.endswith("\r\x1b[K")
    assert "\x1b" not in out


def test_a_disk_is_measured_and_nothing_is_left(tmp_path):
    disk = json.loads(succeed(*SMALL, "--device", "none", tmp_path, "--json"))["measured"]["disk"]
    assert disk["directory"] == str(tmp_path) and disk["bytes"] == 12 << 20  # of 1 Mi params
    assert disk["write_bytes_per_s"] > 0 and disk["read_bytes_per_s"] > 0
    assert list(tmp_path.iterdir()) == []
    refuse(USAGE, f"DIR '{tmp_path}/none' cannot be used: No such file or directory; name a directory that is there",
           *SMALL, tmp_path / "none")  # fmt: skip


def test_a_signal_leaves_nothing_on_the_disk(tmp_path):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        begun = tmp_path / "hybridopt-doctor-*" / ".checkpoint.saving-*" / "*"
        assert ended_by(number, begun, *SMALL, "--device", "none", tmp_path) == -number
        assert list(tmp_path.iterdir()) == []


def test_a_directory_with_a_strange_name_does_nothing_to_a_terminal(tmp_path):
    strange = tmp_path / "\x1b[2J\u202e"
    strange.mkdir()
    text = succeed(*SMALL, "--device", "none", strange)
    assert may_be_shown(text) and r"\x1b[2J\u202e: a checkpoint is written" in text
    assert may_be_shown(succeed(*SMALL, "--device", "none", strange, "--json"))


def test_a_disk_that_is_full_is_a_line_to_mend(tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    result = subprocess.run([TOOL, *SMALL, "--device", "none", tmp_path, "--json"], capture_output=True, text=True,
                            preexec_fn=limit, timeout=120)  # fmt: skip
    assert result.returncode == DONE, result
    line = json.loads(result.stdout)["checks"][-2]
    assert line["name"] == "disk" and line["text"].startswith("not measured: could not ")
    assert line["mend"] == "choose another directory" and list(tmp_path.iterdir()) == []


def test_the_limit_of_locked_memory_is_told():
    def limit():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (32 << 10, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))

    result = subprocess.run([TOOL, *SMALL, "--device", "none", "--json"], capture_output=True, text=True,
                            preexec_fn=limit, timeout=120)  # fmt: skip
    told = json.loads(result.stdout)
    (line,) = (check for check in told["checks"] if check["name"] == "memlock")
    assert told["machine"]["memlock_bytes"] == 32 << 10
    assert line["text"] == "32.0 KiB may be locked; without a GPU nothing is locked" and line["good"]


def test_slow_kernels_are_told():
    reference = {**os.environ, "HYBRIDOPT_ISA": "reference"}
    line = json.loads(tool(*SMALL, "--device", "none", "--json", env=reference).stdout)["checks"][0]
    assert "the reference kernels are slow" in line["text"] and line["mend"] == "unset HYBRIDOPT_ISA"
    refuse(USAGE, "HYBRIDOPT_ISA", *SMALL, env={**os.environ, "HYBRIDOPT_ISA": "mmx"})


def test_a_machine_without_a_gpu():
    answer = tool(*SMALL, "--json")
    told = json.loads(answer.stdout)
    if told["device"] is not None:
        pytest.skip("there is a GPU")
    (line,) = (check for check in told["checks"] if check["name"] == "GPU")
    if told["build"].endswith(" cuda"):
        assert line["text"].startswith("none: there is no CUDA device here: ") and "nvidia-smi" in line["mend"]
    else:
        assert line["text"] == "none: this build has no CUDA; build it with HYBRIDOPT_CUDA=ON where nvcc is"
        assert "cmake -DHYBRIDOPT_CUDA=ON" in line["mend"] and "nvidia-smi" not in line["mend"]
    refused = tool(*SMALL, "--device", "cuda")
    assert refused.returncode != DONE and refused.stderr.startswith("hybridopt: th")
    for text in (answer.stdout, refused.stderr, succeed("info")):
        assert "OFFLOAD_" not in text and "options." not in text


@pytest.mark.parametrize("memory", ["1MiB", "1PiB"])
def test_too_little_or_too_much_memory_is_refused(memory):
    refuse(USAGE, "bytes, expected 16.0 MiB to ", "doctor", f"--memory={memory}")


def test_wrong_usage():
    misuse("--device: got 'tpu', expected cuda, sim or none", "doctor", "--device", "tpu")
    misuse("--device: got '', expected cuda, sim or none", "doctor", "--device", "")
    misuse("--memory: got 'many', expected a whole number with a unit, as 8GiB, 1536MiB or 2GB", "doctor", "--memory", "many")
    misuse("'b' was not expected: no more words belong here", "doctor", "a", "b")
